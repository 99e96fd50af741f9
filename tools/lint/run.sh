#!/usr/bin/env bash
# usage: run.sh [CHECK...]      (called by `make lint`)
# Runs the checks (all of them without arguments), prints findings and one line for each check, and exits 1 on any finding.
#   layers   includes go downward only, libraries stay behind their adapters     headers  each header compiles alone
#   errors   ids in the code == ids in docs/ERRORS.md                            tree     sizes, links, machine paths
#   format   clang-format     tidy  clang-tidy     cppcheck     man  mandoc      scripts  shellcheck, Python syntax
# clang-tidy reads the files that changed since they were last clean; TIDY=all reads every file, TIDY=deep follows more paths.
set -u
cd "$(dirname "$0")/../.." || exit 4
export LC_ALL=C.UTF-8
state=build/lint; mkdir -p $state
flags=(-std=c11 -Isrc -Itests -D_GNU_SOURCE)
read -ra pkg <<< "$(pkg-config --cflags yajl libpcre2-8 libutf8proc)"
flags+=("${pkg[@]}" '-DNIBBLE_VERSION=""' '-DNIBBLE_COMMIT=""' '-DNIBBLE_PREFIX=""')
need() { command -v "$1" > /dev/null || { echo "$1 is missing (scripts/setup.sh installs it)"; return 1; }; }
sources() { git ls-files --cached --others --exclude-standard -- "$@" | while read -r f; do [ -f "$f" ] && echo "$f"; done; }
isa() { case $1 in *_avx2.[ch]) echo "-mavx2 -mfma -mf16c" ;; *_avx512.[ch]) echo "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx2 -mfma -mf16c" ;;
  *_amx.[ch]) echo "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx2 -mfma -mf16c -mavx512vbmi -mavx512vbmi2 -mamx-tile -mamx-int8" ;; esac; }
native() { grep -v -e "_$([ "$(uname -m)" = x86_64 ] && echo '\(neon\|dotprod\)' || echo '\(avx2\|avx512\|amx\)')\.[ch]$"; }
export -f isa

check_layers() { python3 tools/lint/layers.py; }
check_errors() { python3 tools/lint/errors.py; }
check_tree() { python3 tools/lint/tree.py; }
check_headers() {
  local bad=0 f
  while read -r f; do
    # shellcheck disable=SC2046
    gcc "${flags[@]}" $(isa "$f") -Wall -Wextra -Werror -fsyntax-only -x c - <<< "#include \"${f#src/}\"" 2> $state/h.log ||
      { echo "$f does not compile alone:"; head -n 5 $state/h.log; bad=1; }
    g=NIBBLE_$(basename "${f%.h}" | tr 'a-z-' 'A-Z_')_H
    grep -q "^#ifndef $g$" "$f" || { echo "$f: include guard should be $g"; bad=1; }
  done < <(sources 'src/*.h' | native)
  return $bad
}
check_format() {
  need clang-format || return 1
  local out
  out=$(sources 'src/*.[ch]' 'tests/*.[ch]' 'bench/*.[ch]' 'examples/*.c' | xargs -r clang-format --dry-run -Werror 2>&1 |
    awk -F: '/^[^ ]+:[0-9]+:[0-9]+: error:/ { n[$1]++ } END { for (f in n) print f ": " n[f] " places differ from .clang-format (make format)" }' | sort)
  [ -z "$out" ] || { echo "$out"; return 1; }
}
tidy_one() {
  local out pre="-include tools/lint/analyzer.h"
  # A fifth of the paths costs a fifth of the time and has found the same so far; TIDY=deep follows all of them.
  [ "${TIDY:-}" = deep ] || pre+=" -Xclang -analyzer-config -Xclang max-nodes=40000"
  [ "$1" != src/base/err.c ] || pre=${pre#-include tools/lint/analyzer.h}
  # shellcheck disable=SC2046,SC2086
  out=$(clang-tidy --quiet "$1" -- $pre $FLAGS $(isa "$1") 2> /dev/null)
  if [ -z "$out" ]; then touch "$state/tidy/$2"; else printf '%s\n' "$out"; fi
}
# Unchanged files that were clean once need no second look: their state is named by the hash of file, headers and config.
check_tidy() {
  need clang-tidy || return 1
  local base f key out bad=0
  base=$({ cat .clang-tidy tools/lint/run.sh tools/lint/analyzer.h; sources 'src/*.h' | xargs cat; } | sha256sum | cut -c1-16)
  mkdir -p $state/tidy
  [ -z "${TIDY:-}" ] || rm -f $state/tidy/*
  while read -r f; do key=$(sha256sum < "$f" | cut -c1-16); [ -f "$state/tidy/$base-$key" ] || echo "$f $base-$key"; done < <(sources 'src/*.c' | native) > $state/todo
  export state; export FLAGS="${flags[*]}"
  export -f tidy_one
  # shellcheck disable=SC2016
  xargs -r -P2 -L1 bash -c 'tidy_one "$0" "$1"' < $state/todo > $state/tidy.log
  if grep -qE ' (warning|error): ' $state/tidy.log; then
    grep -E ' (warning|error): ' $state/tidy.log | sed "s#^$PWD/##" | sort -u
    echo "(clang-tidy's notes are in $state/tidy.log)"; bad=1
  fi
  return $bad
}
check_cppcheck() {
  need cppcheck || return 1
  mkdir -p $state/cppcheck
  sources 'src/*.c' | native > $state/files
  cppcheck --std=c11 --platform=unix64 --enable=warning,performance,portability --inline-suppr --suppressions-list=tools/lint/cppcheck.txt \
    --library=posix --cppcheck-build-dir=$state/cppcheck -j2 --quiet --error-exitcode=1 -Isrc -D_GNU_SOURCE -D__x86_64__ '-DNIBBLE_VERSION=""' '-DNIBBLE_COMMIT=""' \
    '-DNIBBLE_PREFIX=""' --template='{file}:{line}: {severity}: {message} [{id}]' --file-list=$state/files 2>&1
}
check_man() {
  [ -f docs/nibble.1 ] || return 0
  need mandoc || return 1
  ! mandoc -T lint -W warning docs/nibble.1 | grep -v -e 'outdated mandoc.db' | grep .
}
check_scripts() {
  local bad=0 f
  while read -r f; do bash -n "$f" || bad=1; done < <(sources '*.sh' .ci/run)
  while read -r f; do python3 -c 'import ast, sys; ast.parse(open(sys.argv[1]).read(), sys.argv[1])' "$f" || bad=1; done < <(sources '*.py')
  if command -v shellcheck > /dev/null; then sources '*.sh' .ci/run | xargs -r shellcheck -S warning || bad=1; fi
  return $bad
}

all="layers headers errors tree scripts format tidy cppcheck man"
failed=0
# shellcheck disable=SC2086
[ $# -gt 0 ] || set -- $all
for c in "$@"; do
  case " $all " in *" $c "*) ;; *) echo "lint: no check '$c' (one of: $all)" >&2; exit 2 ;; esac
  t0=$(date +%s%N)
  if out=$(check_"$c" 2>&1); then r=ok; else r=FAIL failed=$((failed + 1)); fi
  [ -z "$out" ] || printf '%s\n' "$out"
  printf '%-5s %-9s %6.1f s\n' $r "$c" "$((($(date +%s%N) - t0) / 100000000))e-1"
done
[ $failed -eq 0 ] || { echo "lint: $failed of the checks found something"; exit 1; }
