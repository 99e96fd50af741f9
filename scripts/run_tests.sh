#!/usr/bin/env bash
# usage: run_tests.sh PROGRAM...
# Runs test programs (two at a time) and counts their cases; the last line is `N passed, N failed`.
# A program prints cmocka's lines, "[ RUN      ] name" and then "[       OK ] name", "[  FAILED  ] name" or "[  SKIPPED ] name".
# A crash, a hang, a non-zero exit without a failed case, and a program that ran nothing each count as one failure.
# Environment: RUNNER (prefix, such as qemu-aarch64), TEST_JOBS (2), TEST_TIMEOUT (seconds for one program, 300), TEST_LOGS (folder to keep).
set -u
jobs=${TEST_JOBS:-2} limit=${TEST_TIMEOUT:-300}
# Tests ask for absurd sizes on purpose and expect NULL; leaks and undefined behaviour are failures.
export ASAN_OPTIONS=${ASAN_OPTIONS:-allocator_may_return_null=1:detect_leaks=1:strict_string_checks=1:abort_on_error=0}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}

if [ "${1:-}" = --one ]; then # a single program, called by xargs below
  n=$2 t=$3 log=$TEST_LOGS/$2.log
  args=() RUNNER_FOR_CHILD=
  case $t in
  */fuzz_*) x=${t##*/fuzz_}; args=("tests/fuzz/corpus/$x") ;;
  *.py) RUNNER_FOR_CHILD=$RUNNER RUNNER='' ;;
  esac
  export CMOCKA_MESSAGE_OUTPUT=stdout RUNNER_FOR_CHILD
  ulimit -c 0
  t0=$(date +%s%N)
  # shellcheck disable=SC2086  # RUNNER is a command with options
  { timeout -k 5 "$limit" ${RUNNER:-} "$t" "${args[@]}" > "$log" 2>&1 < /dev/null; } 2> /dev/null
  rc=$?
  ms=$((($(date +%s%N) - t0) / 1000000))
  # cmocka repeats the names of failed cases in its closing summary: count only between "Running" and "test(s) run".
  counts=$(awk '
    /^\[==========\] .*Running [0-9]+ test/ { closed = 0; for (i = 1; i < NF; i++) if ($i == "Running") plan += $(i + 1) }
    /^\[==========\] .*test\(s\) run/       { closed = 1 }
    closed                { next }
    /^\[       OK \] /    { p++ }
    /^\[  SKIPPED \] /    { s++ }
    /^\[  FAILED  \] /    { f++ }
    END { printf "%d %d %d %d\n", p, f, s, plan }' "$log")
  read -r p f s plan <<< "$counts"
  why=
  if [ $rc -eq 124 ] || [ $rc -eq 137 ]; then why="no end after $limit s"
  elif [ $rc -gt 128 ]; then why="killed by signal $((rc - 128))"
  elif [ $rc -ne 0 ]; then why="exit $rc"
  elif [ "$f" -gt 0 ]; then why="exit 0 in spite of failed cases"
  elif [ "$((p + s))" -lt "$plan" ]; then why="ended after $((p + s)) of $plan cases"
  elif [ "$p" -eq 0 ] && [ "$s" -eq 0 ]; then why="ran nothing"
  fi
  if [ -n "$why" ] && [ "$f" -eq 0 ]; then f=1; fi
  echo "$p $f $s" > "$TEST_LOGS/$n.count"
  name=${t#build/*/}
  if [ -z "$why" ]; then
    printf 'ok    %-34s %5d cases %6d ms%s\n' "$name" "$p" "$ms" "$([ "$s" -gt 0 ] && echo "  ($s skipped)")"
  else
    { echo "----- $name: $why"; if [ "$(wc -c < "$log")" -gt 20000 ]; then head -c 8000 "$log"; echo; echo "[...]"; tail -c 10000 "$log"; else cat "$log"; fi
      printf 'FAIL  %-34s %5d cases %6d ms  %d failed: %s\n' "$name" "$p" "$ms" "$f" "$why"; } > "$log.shown"
    cat "$log.shown"
  fi
  exit 0
fi

own=
if [ -z "${TEST_LOGS:-}" ]; then TEST_LOGS=$(mktemp -d) own=1; fi
mkdir -p "$TEST_LOGS"; rm -f "$TEST_LOGS"/*.count
export TEST_LOGS TEST_TIMEOUT=$limit RUNNER="${RUNNER:-}"
[ -z "$own" ] || trap 'rm -rf "$TEST_LOGS"' EXIT
for i in $(seq $#); do printf '%s\0%s\0' "$i" "${!i}"; done | xargs -0 -r -n 2 -P "$jobs" "$0" --one
pass=0 fail=0 skip=0
for i in $(seq $#); do
  if read -r p f s < "$TEST_LOGS/$i.count" 2> /dev/null; then pass=$((pass + p)) fail=$((fail + f)) skip=$((skip + s)); else fail=$((fail + 1)); fi
done
[ "$skip" -eq 0 ] || echo "($skip cases skipped)"
echo "$pass passed, $fail failed"
[ "$fail" -eq 0 ]
