#!/usr/bin/env bash
# usage: test.sh [quick | full | STAGE...]
# Sets up, builds, and runs the tests; the last line is `N passed, N failed`, and the exit status says whether N failed is 0.
# Stages (docs/TESTING.md), in the order of a full run; quick is the first six:
#   gcc      build everything with gcc -Werror                   clang    the same with clang
#   lint     make lint                                           unit     C tests, fuzz corpora, command-line cases
#   san      the C tests under AddressSanitizer and UBSan        py       Python tier; quick leaves out what is marked slow
#   tsan     threaded tests under ThreadSanitizer                arm      aarch64 build, tests under qemu-user
# Besides these, only when named:
#   web      the built-in page in headless Chromium (which is installed when it is missing)
# Environment: JOBS (compiler processes, default: CPUs), TEST_JOBS (test programs at a time, default: CPUs).
set -u
cd "$(dirname "$0")/.." || exit 4
quick="gcc clang lint unit san py" all="$quick tsan arm"
[ "$(uname -m)" = x86_64 ] || all="$quick tsan"
stages=() slow=''
for a in "${@:-full}"; do
  case $a in
  quick) slow='not slow'; read -ra s <<< "$quick"; stages+=("${s[@]}") ;;
  full) read -ra s <<< "$all"; stages+=("${s[@]}") ;;
  -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
  *) case " $all web " in *" $a "*) stages+=("$a") ;; *) echo "test: unknown stage '$a' (quick, full, or any of: $all web)" >&2; exit 2 ;; esac ;;
  esac
done
case " ${stages[*]} " in *" arm "*) setup=() ;; *) setup=(--no-cross) ;; esac
case " ${stages[*]} " in *" web "*) setup+=(--browser) ;; esac

jobs=${JOBS:-$(nproc)} logs=build/test-logs
export TEST_JOBS=${TEST_JOBS:-$(nproc)} TERM=dumb
mkdir -p $logs
passed=0 failed=0 begin=$(date +%s)

# Run one stage into its log; show the log's findings when it fails. Counts come from the log's closing line
# (`N passed, N failed` of run_tests.sh or pytest's); a stage without one counts as a single check.
stage() {
  local name=$1 log=$logs/$1.log t0 rc p f word=ok
  t0=$(date +%s%N)
  "${@:2}" > "$log" 2>&1 < /dev/null
  rc=$?
  p=$(tail -n 3 "$log" | grep -oE '[0-9]+ passed' | tail -n 1); p=${p% *}
  f=$(tail -n 3 "$log" | grep -oE '[0-9]+ (failed|errors?)' | awk '{ n += $1 } END { print n + 0 }')
  if [ -z "$p" ] && [ "$f" -eq 0 ]; then [ $rc -eq 0 ] && p=1 || p=0; fi
  if [ "$f" -eq 0 ] && { [ $rc -ne 0 ] || [ "$p" -eq 0 ]; }; then f=1; fi # a stage that ran nothing is no success
  passed=$((passed + ${p:-0})) failed=$((failed + f))
  if [ "$f" -gt 0 ]; then
    word=FAIL
    if [ "$(wc -l < "$log")" -gt 200 ]; then head -n 60 "$log"; echo "[... all of it in $log]"; tail -n 120 "$log"; else cat "$log"; fi
  fi
  printf '%-5s %-6s %6d ok %4d failed %7s s\n' $word "$name" "${p:-0}" "$f" "$(ms=$((($(date +%s%N) - t0) / 1000000)); printf '%d.%d' $((ms / 1000)) $((ms % 1000 / 100)))"
  [ "$f" -eq 0 ]
}

run_gcc() { make -j"$jobs" WERROR=1 CC=gcc all tests bench; }
run_clang() { make -j"$jobs" WERROR=1 CC=clang all tests bench; }
run_lint() { make lint; }
run_unit() { make -j"$jobs" WERROR=1 CC=gcc test; }
run_san() { TEST_TIMEOUT=600 make -j"$jobs" WERROR=1 CC=gcc SAN=address,undefined test; }
run_py() {
  [ -n "$(ls tests/e2e/test_*.py tests/diff/test_*.py 2> /dev/null)" ] || return 0
  make -j"$jobs" WERROR=1 CC=gcc all || return 1
  NIBBLE=$PWD/build/$(uname -m)-gcc/nibble .venv/bin/python -m pytest -q -p no:cacheprovider -n "$TEST_JOBS" -m "$slow" --durations=10 --durations-min=2 tests/e2e tests/diff
}
run_web() {
  make -j"$jobs" WERROR=1 CC=gcc all || return 1
  NIBBLE=$PWD/build/$(uname -m)-gcc/nibble .venv/bin/python -m pytest -q -p no:cacheprovider tests/web
}
# Kernels with more bits of address randomisation than the runtime expects break it at start: then without.
run_tsan() {
  local runner='' probe=$logs/tsan-probe
  echo 'int main(void) { return 0; }' | gcc -fsanitize=thread -x c - -o $probe || return 1
  $probe || runner="setarch $(uname -m) -R"
  # shellcheck disable=SC2086
  $runner $probe || return 1
  NIBBLE_TEST_SHORT=1 TSAN_OPTIONS=halt_on_error=1 TEST_TIMEOUT=1200 RUNNER=$runner make -j"$jobs" WERROR=1 CC=gcc SAN=thread test T="test_pool opscheck test_oracle_logits test_quantize test_diff_prefix test_diff_loop test_soak"
}
run_arm() { TEST_TIMEOUT=1800 make -j"$jobs" WERROR=1 ARCH=aarch64 test; }

stage setup scripts/setup.sh "${setup[@]}" || { echo "$passed passed, $failed failed"; exit 4; }
for s in "${stages[@]}"; do stage "$s" "run_$s"; done
echo "all stages: $(($(date +%s) - begin)) s"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
