#!/usr/bin/env bash
# usage: T=name SECS=60 fuzz.sh     (called by `make fuzz`)
# Builds the libFuzzer targets with clang under ASan+UBSan and runs each for SECS seconds. New inputs stay in
# build/fuzz/NAME, findings in build/fuzz/NAME-*; a finding becomes a file of tests/fuzz/corpus/NAME and a fix.
set -u
cd "$(dirname "$0")/.." || exit 4
command -v clang > /dev/null || { echo "fuzz: clang is missing (scripts/setup.sh installs clang and libclang-rt-14-dev)" >&2; exit 4; }
names=
for f in tests/fuzz/fuzz_*.c; do n=${f##*/fuzz_}; n=${n%.c}; [ -n "${T:-}" ] && [ "$T" != "$n" ] && [ "$T" != "fuzz_$n" ] || names+=" $n"; done
[ -n "$names" ] || { echo "fuzz: no target '${T:-}' (tests/fuzz/fuzz_NAME.c)" >&2; exit 2; }
dir=build/$(uname -m)-clang-address-undefined-fuzzer
# shellcheck disable=SC2046,SC2086
make -j2 CC=clang SAN=address,undefined FUZZER=1 $(printf "$dir/tests/fuzz/fuzz_%s " $names) || exit 4
bad=0
for n in $names; do
  mkdir -p "build/fuzz/$n"; dict=()
  [ -f "tests/fuzz/$n.dict" ] && dict=("-dict=tests/fuzz/$n.dict")
  if "$dir/tests/fuzz/fuzz_$n" -max_total_time="${SECS:-60}" -timeout=10 -rss_limit_mb=2048 -max_len=65536 -print_final_stats=1 -verbosity=0 \
    "${dict[@]}" "-artifact_prefix=build/fuzz/$n-" "build/fuzz/$n" "tests/fuzz/corpus/$n" > "build/fuzz/$n.log" 2>&1
  then printf 'ok    %-14s %s inputs run\n' "$n" "$(awk '/number_of_executed_units/ { print $2 }' "build/fuzz/$n.log")"
  else bad=$((bad + 1)); tail -n 40 "build/fuzz/$n.log"; printf 'FAIL  %-14s see build/fuzz/%s.log and build/fuzz/%s-*\n' "$n" "$n" "$n"
  fi
done
[ $bad -eq 0 ]
