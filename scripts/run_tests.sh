#!/usr/bin/env bash
# Run test programs one after another and count: closing line "N passed, N failed".
set -u
pass=0 fail=0
for t in "$@"; do
  out=$(CMOCKA_MESSAGE_OUTPUT=stdout ${RUNNER:-} "$t" 2>&1); rc=$?
  p=$(grep -c '^\[       OK \]' <<<"$out"); f=$(grep -c '^\[  FAILED  \] [a-zA-Z_]' <<<"$out")
  if [ $rc -ne 0 ]; then printf '%s\n' "$out"; echo "FAIL $t (exit $rc)"; [ "$f" -eq 0 ] && f=1; else echo "ok   $t ($p)"; fi
  pass=$((pass + p)) fail=$((fail + f))
done
echo "$pass passed, $fail failed"
[ "$fail" -eq 0 ]
