#!/usr/bin/env python3
"""Tokenizer speed beside HF tokenizers, one thread each, on the same text; prints one line of CSV per program.

usage: bench_tokenizer.py [--tokenizer DIR] [--mb 10] [--bench build/.../bench/bench_tokenizer] [--text FILE]
DIR needs a tokenizer.json; without it tools/real_tokenizer.py rebuilds the full-size one (fetched by pip). The text is
half sources and documents of this tree with their words shuffled, half words of many scripts from the vocabulary itself
(common ones more often), unless a file is given.
"""
import argparse
import glob
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
from tokenizers import Tokenizer  # noqa: E402 (after the environment)

HERE = os.path.dirname(os.path.abspath(__file__))


def mixed_text(tokenizer, size, seed=7):
    rnd = random.Random(seed)
    files = sorted(glob.glob(HERE + "/../src/**/*.[ch]", recursive=True) + glob.glob(HERE + "/../docs/*.md"))
    lines = [line for f in files for line in open(f, encoding="utf8")]
    ids = sorted(tokenizer.get_vocab().values())
    words = [w for w in (tokenizer.decode([i]) for i in ids) if w and "\ufffd" not in w and re.search(r"\w", w)]
    out, n = [], 0
    while n < size:
        if rnd.random() < 0.5:
            part = rnd.choice(lines)
            if rnd.random() < 0.7:
                chunks = part.split(" ")
                rnd.shuffle(chunks)
                part = " ".join(chunks)
        else:
            part = "".join(words[int(len(words) * rnd.random() ** 3)] + rnd.choice(["", "", " "]) for _ in range(12)) + "\n"
        out.append(part)
        n += len(part.encode())
    return "".join(out)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--tokenizer")
    a.add_argument("--mb", type=float, default=10)
    a.add_argument("--bench", default=f"{HERE}/../build/{os.uname().machine}-gcc/bench/bench_tokenizer")
    a.add_argument("--text")
    o = a.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        folder = o.tokenizer or tmp
        if not o.tokenizer:
            subprocess.run([sys.executable, HERE + "/../tools/real_tokenizer.py", tmp + "/tokenizer.json"], check=True,
                           stdout=sys.stderr)
        t0 = time.perf_counter()
        hf = Tokenizer.from_file(folder + "/tokenizer.json")
        load = time.perf_counter() - t0
        text = open(o.text, encoding="utf8").read() if o.text else mixed_text(hf, int(o.mb * 1e6))
        size = len(text.encode())
        with open(tmp + "/text", "w", encoding="utf8", newline="") as f:
            f.write(text)
        print("program,load_ms,encode_mb_s,tokens", flush=True)
        t0 = time.perf_counter()
        ids = hf.encode(text, add_special_tokens=False).ids
        spent = time.perf_counter() - t0
        lines = text.splitlines(keepends=True)
        t0 = time.perf_counter()
        hf.encode_batch_fast(lines, add_special_tokens=False)
        by_line = time.perf_counter() - t0
        print(f"hf tokenizers (whole),{1e3 * load:.0f},{size / spent / 1e6:.2f},{len(ids)}")
        print(f"hf tokenizers (line by line),{1e3 * load:.0f},{size / by_line / 1e6:.2f},", flush=True)
        run = subprocess.run([o.bench, folder, tmp + "/text", "--json"], check=True, stdout=subprocess.PIPE)
        r = json.loads(run.stdout)
        print(f"nibble,{r['load_ms']:.0f},{r['encode_mb_s']:.2f},{r['tokens']}")
        checksum = 0
        for i in ids:
            checksum = (checksum * 31 + i) % 2**64
        if r["tokens"] != len(ids) or int(r["checksum"]) != checksum:
            sys.exit("the ids differ")
        print(f"same ids; nibble is {r['encode_mb_s'] / max(size / spent, size / by_line) * 1e6:.1f} times as fast")


if __name__ == "__main__":
    main()
