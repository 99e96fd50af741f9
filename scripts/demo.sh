#!/usr/bin/env bash
# usage: demo.sh [QUESTION]
# Installs what building needs (Debian; nothing when it is there), builds nibble, lets the embedded model answer a question,
# quantizes it to NVFP4 with its draft head, looks at the result, checks it against its source and lets that answer too, and
# compares both on word problems.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh --minimal
problems=build/$(uname -m)-gcc/bench/bench_word_problems
make -s CC=gcc -j"$(nproc)" all "$problems"
question=${1:-"Ada has 12 apples. Ben has 30 apples. How many apples do they have together?"}
show() { printf '\n$'; printf ' %q' "$@"; printf '\n'; "$@"; }
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
show build/nibble inspect assets/qwen36-tiny
show build/nibble run assets/qwen36-tiny --temperature 0 -p "$question"
show build/nibble quantize assets/qwen36-tiny -o "$out/qwen36-tiny-nvfp4" --samples 48
show build/nibble inspect "$out/qwen36-tiny-nvfp4" --scan
show build/nibble check "$out/qwen36-tiny-nvfp4" --source assets/qwen36-tiny
show build/nibble run "$out/qwen36-tiny-nvfp4" --temperature 0 -p "$question"
show "$problems" --problems 100 assets/qwen36-tiny/word_problems.jsonl assets/qwen36-tiny "$out/qwen36-tiny-nvfp4"
