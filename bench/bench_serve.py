#!/usr/bin/env python3
"""What the server costs, and whether it is fair.

usage: bench_serve.py overhead [MODEL_DIR]   tokens/s of 1 and 16 streams beside bench_loop's, in turn; ratio of medians
       bench_serve.py fair [MODEL_DIR]       256 streams at once: tokens of the slowest and the fastest at the same moment
       bench_serve.py soak [MODEL_DIR]       the crowd of tests/e2e/hostile.py for --seconds (600) or --requests: every good
                                             answer is what `nibble run` says, resident memory stays within 2 %
Needs `make all bench`; without MODEL_DIR the embedded model. Standard library only.
"""
import argparse
import json
import os
import pathlib
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/e2e"))
from hostile import Crowd  # noqa: E402
from serving import Server  # noqa: E402

TEXT = "Tom has 3 apples and buys 4. How many?"
TOKENS = re.compile(rb'"completion_tokens":(\d+)')


class Nibble:
    path = str(ROOT / "build/nibble")


def streams(server, n, max_tokens, until=None):
    """n identical streams: tokens per second after all have begun; with `until`, tokens of each once one has that many.

    The clients share the server's processors, and what they cost is not the server's: once all have begun, a client of a
    timed run sleeps until its stream has ended (SO_RCVLOWAT: less than that wakes nobody).
    """
    body = json.dumps({"prompt": TEXT, "temperature": 0, "ignore_eos": True, "max_tokens": max_tokens, "stream": True,
                       "stream_options": {"include_usage": True, "continuous_usage_stats": bool(until)}}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    sel, socks = selectors.DefaultSelector(), []
    for _ in range(n):
        s = socket.create_connection(("127.0.0.1", server.port))
        s.sendall(head)
        socks.append(s)
        sel.register(s, selectors.EVENT_READ, {"raw": b"", "tokens": 0, "begun": False, "done": False})
    begun = done = 0
    t0 = before = None
    while done < n:
        for key, _ in sel.select():
            c = key.data
            chunk = key.fileobj.recv(1 << 20)
            if not chunk:
                assert c["done"], "the server hung up"
                sel.unregister(key.fileobj)
                continue
            c["raw"] = (c["raw"] + chunk)[-4096:]
            if not c["begun"] and b'"text":"' in c["raw"]:
                c["begun"] = True
                begun += 1
                if begun == n and t0 is None:
                    for k in [] if until else socks:
                        k.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1 << 20)
                    t0, before = time.perf_counter(), server.metric("vllm:generation_tokens_total")
            if until and (m := TOKENS.findall(c["raw"])):
                c["tokens"] = int(m[-1])
                if c["tokens"] >= until:
                    return [k.data["tokens"] for k in sel.get_map().values()]
            if b"[DONE]" in c["raw"][-64:] and not c["done"]:
                c["done"] = True
                done += 1
    seconds = time.perf_counter() - t0
    rate = (server.metric("vllm:generation_tokens_total") - before) / seconds
    for s in socks:
        s.close()
    return rate


def event_seconds(pid):
    """Processor time of the thread that speaks HTTP (the first one)."""
    f = open(f"/proc/{pid}/task/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(f[11]) + int(f[12])) / os.sysconf("SC_CLK_TCK")


def overhead(model, a):
    for n in a.streams:
        ours, bare = [], []
        s = Server(Nibble, model, "--max-seqs", n, "--ctx", 512 + a.tokens, "--log-format", "off", "--prefix-cache", 0, "-t", a.threads)
        streams(s, n, a.tokens)
        cpu, made = event_seconds(s.p.pid), s.metric("vllm:generation_tokens_total")
        for _ in range(a.repeat):
            ours.append(streams(s, n, a.tokens))
            bare.append(float(subprocess.check_output([ROOT / f"build/{a.build}/bench/bench_loop", "--requests", str(n), "--repeat", "1",
                                                       "--max-tokens", str(a.tokens), "--threads", str(a.threads), model])))
        per_token = (event_seconds(s.p.pid) - cpu) / (s.metric("vllm:generation_tokens_total") - made)
        s.close()
        ratio = statistics.median(x / y for x, y in zip(ours, bare))
        print(f"{n:3} streams: {statistics.median(ours):9.1f} tokens/s served, {statistics.median(bare):9.1f} bare, overhead {100 * (1 - ratio):.1f} %; "
              f"HTTP thread {1e6 * per_token:.0f} us of processor time a token")


def fair(model, a):
    s = Server(Nibble, model, "--max-seqs", a.clients, "--ctx", 512, "--log-format", "off", "--prefix-cache", 0, "--max-connections", 2 * a.clients)
    got = sorted(streams(s, a.clients, 200, until=100))
    print(f"{a.clients} streams when the first has 100 tokens: slowest {got[0]}, median {got[len(got) // 2]}, fastest {got[-1]}: ratio {got[-1] / max(got[0], 1):.2f}")
    s.close()
    return got[-1] < 1.5 * got[0]


def soak(model, a):
    s = Server(Nibble, model, "--max-seqs", 4, "--max-queue", 64, "--log-format", "off", "--prefix-cache", "4M")
    c = Crowd(s, lambda q, n: json.loads(subprocess.check_output([Nibble.path, "run", model, "-p", q, "--temperature", "0", "--json", "-n", str(n)])), a.seed)
    c.run(seconds=20)
    c.settle()
    before, t0 = c.rss(), time.time()
    c.run(seconds=None if a.requests else a.seconds, requests=a.requests and a.requests + sum(c.counts.values()))
    c.settle()
    after = c.rss()
    print(f"{sum(c.counts.values())} requests in {time.time() - t0:.0f} s: {dict(c.counts)}")
    print(f"resident memory {before} kB before, {after} kB after ({100 * (after / before - 1):+.1f} %), {len(c.wrong)} wrong answers {c.wrong[:3]}")
    s.close()
    return not c.wrong and after < 1.02 * before


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("overhead", "fair", "soak"))
    p.add_argument("model", nargs="?", default=str(ROOT / "assets/qwen36-tiny"))
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--repeat", type=int, default=5)
    p.add_argument("--threads", type=int, default=0)
    p.add_argument("--clients", type=int, default=256)
    p.add_argument("--seconds", type=int, default=600)
    p.add_argument("--requests", type=int, default=0)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    p.add_argument("--build", default="x86_64-gcc", help="folder below build/ that holds bench_loop")
    a = p.parse_args()
    sys.exit({"overhead": overhead, "fair": fair, "soak": soak}[a.what](a.model, a) is False)


if __name__ == "__main__":
    main()
