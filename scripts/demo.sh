#!/usr/bin/env bash
# usage: demo.sh [QUESTION]
# Installs what building needs (Debian; nothing when it is there), builds nibble, and lets the embedded model answer a question.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh --minimal
make -s -j"$(nproc)"
question=${1:-"Ada has 12 apples. Ben has 30 apples. How many apples do they have together?"}
show() { printf '\n$'; printf ' %q' "$@"; printf '\n'; "$@"; }
show build/nibble inspect assets/qwen36-tiny
show build/nibble run assets/qwen36-tiny --temperature 0 -p "$question"
