#!/usr/bin/env bash
# usage: bench/all.sh [--quick] OUT
# Every series of docs/BENCH.md on an idle machine, about 20 minutes (--quick: 2, numbers without meaning): OUT/report.md, with the
# commands, medians and spreads, and OUT/*.csv, *.svg, *.json. A part that fails is named in the report, and the others go on.
#
# BUILD    build folder with nibble and bench/ (build/x86_64-gcc)
# MODEL    NVFP4 export of the wide4 shape; without one the parts that need it are left out
# LLAMA    llama-bench, with PEERS="NAME=FILE.gguf ...": rows of llama.cpp beside ours
# LAYERS   of the full shape: as many as the memory holds (32)
# LIMIT    seconds for all of it (1200); a part that would begin later is named and left out
# ONLY     words; only parts whose name has one of them
set -uo pipefail
quick=0
[ "${1:-}" = --quick ] && { quick=1; shift; }
out=${1:?usage: bench/all.sh [--quick] OUT}
here=$(cd "$(dirname "$0")" && pwd)
build=${BUILD:-$here/../build/x86_64-gcc}
nibble=$build/nibble
model=${MODEL:-}
limit=${LIMIT:-1200}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
report=$out/report.md

if [ $quick = 1 ]; then
	wide=tiny full="tiny --layers 4" model_rounds=1 repeat=1 tokens=4 ms=5
	contexts=0,64 batches=1,4 prompts=64 long=64,128 middle=2,4 two=1,2 prompt=32 level_ms=2 runs=1
else
	wide=wide4 full="full --layers ${LAYERS:-32}" model_rounds=3 repeat=3 tokens=32 ms=150
	contexts=0,1024,4096,16384 batches=1,2,4,8,16,32 prompts=128,512,2048 long=1024,4096
	middle=2,4,8,16 two=1,8 prompt=512 level_ms=40 runs=5
fi

say() { printf '%s\n' "$*" >> "$report"; }

# CSV as a table in Markdown, numbers with four digits, without the parts of the bytes.
table() {
	python3 - "$1" <<-'PY' >> "$report"
		import csv, sys
		def short(v):
		    try: return f"{float(v):.4g}" if abs(float(v)) < 1e4 else f"{float(v):.0f}"
		    except ValueError: return v
		rows = [r for r in csv.reader(open(sys.argv[1], encoding="utf-8")) if r]
		parts = {i for i, name in enumerate(rows[0]) if name.endswith("_mb") or name == "head_candidates"}
		rows = [[v for i, v in enumerate(r) if i not in parts] for r in rows]
		print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
		for r in rows[1:]: print("| " + " | ".join(short(v) for v in r) + " |")
	PY
}

wanted() {
	local w
	[ -z "${ONLY:-}" ] && return 0
	for w in $ONLY; do case $1 in *"$w"*) return 0 ;; esac; done
	return 1
}

# part NAME KIND COMMAND...: KIND csv: the command writes CSV to $csv; md: its output is Markdown; text: fenced.
part() {
	local name=$1 kind=$2 slug t0 rc left
	shift 2
	wanted "$name" || return 0
	left=$((limit - ($(date +%s) - began)))
	[ $left -gt 5 ] || { say "" && say "## $name" && say "" && say "left out: no time"; return 0; }
	[ $left -lt 300 ] || left=300
	slug=$(printf '%s' "$name" | tr -cs 'a-z0-9' -)
	slug=${slug%-}
	printf '%s %s\n' "$(date +%T)" "$name" >&2
	say "" && say "## $name" && say "" && say "\`$(printf '%s ' "$@" | sed "s|$build/||g; s|$here/|bench/|g; s|$out/||g; s| $||")\`"
	say "" && say "load before: $(cut -d' ' -f1-3 /proc/loadavg 2> /dev/null)"
	say ""
	t0=$(date +%s)
	case $kind in
	csv) timeout $left "$@" --csv "$out/$slug.csv" --svg "$out/$slug.svg" > "$out/$slug.txt" 2> "$out/$slug.err" ;;
	*) timeout $left "$@" > "$out/$slug.txt" 2> "$out/$slug.err" ;;
	esac
	rc=$?
	if [ $rc -ne 0 ]; then
		say "FAILED ($rc): $(tail -n 1 "$out/$slug.err")"
	else
		case $kind in
		csv) { grep '^note:' "$out/$slug.txt" >> "$report" && say ""; true; } && table "$out/$slug.csv" ;;
		md) cat "$out/$slug.txt" >> "$report" ;;
		text) say '```' && cat "$out/$slug.txt" >> "$report" && say '```' ;;
		esac
	fi
	say "" && say "$(($(date +%s) - t0)) s"
}

: > "$report"
say "# Benchmarks, $(date -u '+%F %R') UTC$([ $quick = 1 ] && echo ', --quick: numbers without meaning')"
say ""
say "$("$nibble" --version | head -n 1); $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1), $(nproc) threads, $(awk '/MemTotal/ { printf "%.0f GB", $2 / 1e6 }' /proc/meminfo), $(uname -sr); $(gcc --version | head -n 1)"
began=$(date +%s)

d="$nibble bench decode --repeat $repeat -n $tokens"
# shellcheck disable=SC2086 # options in words
{
	if [ -n "${LLAMA:-}" ] && [ -n "${PEERS:-}" ] && [ -n "$model" ]; then
		peers=()
		for p in $PEERS; do peers+=(--peer "$p"); done
		part "peers: decode and prompt beside llama.cpp" md "$here/peers.py" --nibble "$nibble" --model "$model" --llama "$LLAMA" \
			"${peers[@]}" --rounds $model_rounds --tokens $tokens --prompt $prompt --json "$out/peers.json"
	fi
	part "decode: contexts" csv $d --synthetic $wide --frontier $contexts --depth 0
	part "decode: drafts" csv $d --synthetic $wide --frontier 0 --depth 0,1,2,3 --accept 0.86
	[ -n "$model" ] && part "decode: drafts as the model verifies them" csv $d "$model" --frontier 0 --depth 0,1,2,3
	part "decode: drafts, full shape" csv $d --synthetic $full --frontier 0 --depth 0,1,2,3 --accept 0.86
	part "batch: no drafts" csv $d --synthetic $wide --batch $batches --depth 0
	part "batch: full shape" csv $d --synthetic $full --batch $two --depth 0,2 --adaptive --accept 0.86
	part "prompt" csv "$nibble" bench prefill --synthetic $wide --prompt $prompts --repeat $repeat
	if [ -n "$model" ]; then
		part "load: warm page cache" md "$build/bench/bench_load" --rounds $model_rounds "$model"
		part "load: cold page cache" md "$build/bench/bench_load" --rounds $model_rounds --cold "$model"
		part "prefix cache" md "$build/bench/bench_prefix" --rounds $model_rounds --prompt $long "$model"
	fi
	for accept in 0.86 0.3 0; do
		part "batch: adaptive drafts, acceptance $accept" csv $d -n $((tokens / 2)) --synthetic $wide --batch ${batches%%,*},${batches##*,} \
			--depth 0,2 --adaptive --accept $accept
	done
	part "batch: adaptive drafts in between, acceptance 0.6" csv $d -n $((tokens / 2)) --synthetic $wide \
		--batch $middle --depth 0,2 --adaptive --accept 0.6
	part "kernels" csv "$nibble" bench kernels --synthetic $wide --repeat $repeat --ms $ms
	part "kernels: programs, all levels of the CPU" text "$build/bench/bench_kernels" --ms $level_ms
	part "kernels: packed matrices" text "$build/bench/bench_nv" --runs $runs
	part "kernels: attention and delta net" text "$build/bench/bench_attn" --ms $ms
	part "kernels: screened head" text "$build/bench/bench_head"
}
say "" && say "All of it: $(($(date +%s) - began)) s; load after: $(cut -d' ' -f1-3 /proc/loadavg 2> /dev/null)"
printf '%s\n' "$report"
! grep -q '^FAILED' "$report"
