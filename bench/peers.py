#!/usr/bin/env python3
"""nibble beside llama.cpp on one machine: both programs in turn, round by round; medians and the ratios within rounds.

usage: bench/peers.py --nibble PROGRAM --model DIR --llama LLAMA_BENCH --peer NAME=FILE.gguf [--peer ...] [options]

DIR holds an NVFP4 export, the files what llama.cpp makes of the same shapes. Rows of nibble: decoding without drafts,
with --depth drafts (as the model verifies them), a prompt. Of each peer: tg and pp of llama-bench. Markdown on standard
output; --json FILE keeps every single value. Nothing is fetched and nothing is built.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time


def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"peers: {command[0]} failed ({done.returncode}): {done.stderr.strip()[-400:]}")
    return done.stdout


def nibble(args, what, extra):
    command = [args.nibble, "bench", what, args.model, "-q", "--json", "--repeat", "1", "--threads", str(args.threads)]
    return json.loads(run(command + extra))


def nibble_round(args):
    """{row: tokens/s}; decode, decode with drafts, prompt; and the read bandwidth of this moment."""
    depths = ["0"] + ([str(args.depth)] if args.depth else [])
    made = nibble(args, "decode", ["--frontier", "0", "--depth", ",".join(depths), "-n", str(args.tokens)])
    values = {}
    for row in made["rows"]:
        values["decode" if row["depth"] == 0 else f"decode, {row['depth']:.0f} drafts"] = row["tokens_s"]
        if row["depth"] > 0:
            values["accept length"] = row["accept_length"]
    values["read GB/s"] = made["rows"][0]["read_gb_s_before"]
    values[f"pp{args.prompt}"] = nibble(args, "prefill", ["--prompt", str(args.prompt)])["rows"][0]["tokens_s"]
    return values


def llama_round(args, path):
    out = json.loads(run([args.llama, "-m", path, "-p", str(args.prompt), "-n", str(args.tokens), "-t", str(args.threads),
                          "-r", "1", "-o", "json"]))
    return {("decode" if row["n_gen"] > 0 else f"pp{args.prompt}"): row["avg_ts"] for row in out}


def spread(values):
    return f"{statistics.median(values):.1f} ({min(values):.1f}..{max(values):.1f})"


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nibble", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--llama", required=True, help="the program llama-bench")
    parser.add_argument("--peer", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--depth", type=int, default=2, help="drafts per round of nibble's second decode row; 0: none")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    args.peers = dict(p.split("=", 1) if "=" in p else parser.error(f"--peer {p}: NAME=FILE") for p in args.peer)
    for path in [args.nibble, args.model, args.llama, *args.peers.values()]:
        if not os.path.exists(path):
            parser.error(f"{path}: not there")
    return args


def table(args, rounds):
    ours = [r["nibble"] for r in rounds]
    prompt = f"pp{args.prompt}"
    drafted = [k for k in ours[0] if k.startswith("decode,")]
    print(f"{len(rounds)} rounds, {args.threads} threads, {args.tokens} tokens, prompt {args.prompt}; read "
          f"{spread([r['read GB/s'] for r in ours])} GB/s" +
          (f"; accept length {spread([r['accept length'] for r in ours])}" if drafted else "") + "\n")
    print("| | decode, tokens/s | prompt, tokens/s |\n|---|---|---|")
    print(f"| nibble | {spread([r['decode'] for r in ours])} | {spread([r[prompt] for r in ours])} |")
    for key in drafted:
        print(f"| nibble{key[6:]} | {spread([r[key] for r in ours])} | |")
    for name in args.peers:
        theirs = [r[name] for r in rounds]
        print(f"| llama.cpp {name} | {spread([r['decode'] for r in theirs])} | {spread([r[prompt] for r in theirs])} |")
    print("\nRatios within a round (nibble / llama.cpp), median with the least and the largest:\n")
    print("| against | decode | " + " | ".join(k for k in drafted) + (" | " if drafted else "") + f"{prompt} |")
    print("|---|---|" + "---|" * (len(drafted) + 1))

    def ratios(ours_key, key, names):
        return ratio_text([r["nibble"][ours_key] / max(r[n][key] for n in names) for r in rounds])

    for label, names in [*((n, [n]) for n in args.peers), ("the best of them", list(args.peers))]:
        cells = [ratios("decode", "decode", names), *(ratios(k, "decode", names) for k in drafted),
                 ratios(prompt, prompt, names)]
        print(f"| {label} | " + " | ".join(cells) + " |")


def ratio_text(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def main():
    args = options()
    rounds = []
    for i in range(args.rounds):
        began = time.time()
        one = {"nibble": nibble_round(args)}
        for name, path in args.peers.items():
            one[name] = llama_round(args, path)
        rounds.append(one)
        print(f"round {i + 1} of {args.rounds}: {time.time() - began:.0f} s", file=sys.stderr)
    table(args, rounds)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as out:
            json.dump({"threads": args.threads, "tokens": args.tokens, "prompt": args.prompt, "rounds": rounds}, out, indent=1)


if __name__ == "__main__":
    main()
