#!/usr/bin/env python3
"""What the server costs, and whether it is fair.

usage: bench_serve.py overhead [MODEL_DIR]   tokens/s of 1 and 16 streams beside bench_loop's: pairs in turn, median of their ratios
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

# Of stream i as in bench_loop. They end in different letters: a made model goes on by the last token, and streams in step
# with one another would read the same experts.
TEXT = "Tom has 3 apples and buys 4. How many has %s"
TOKENS = re.compile(rb'"completion_tokens":(\d+)')


class Nibble:
    path = os.environ.get("NIBBLE", str(ROOT / "build/nibble"))


def begin(server, n, max_tokens, same=False, **more):
    """n streams that were asked for, of the same prompt or not: selector of their sockets."""
    sel = selectors.DefaultSelector()
    for i in range(n):
        body = json.dumps({"prompt": TEXT % ("A" if same else chr(65 + i % 26) + "ab" * (i // 26)), "temperature": 0, "ignore_eos": True, "max_tokens": max_tokens, "stream": True,
                           "stream_options": {"include_usage": True, **more}}).encode()
        s = socket.create_connection(("127.0.0.1", server.port))
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        sel.register(s, selectors.EVENT_READ, {"raw": b"", "tokens": 0})
    return sel


def receive(sel):
    """What is there of any stream: its client, None for one that has ended."""
    for key, _ in sel.select():
        chunk = key.fileobj.recv(1 << 20)
        if chunk:
            key.data["raw"] = (key.data["raw"] + chunk)[-4096:]
        else:
            assert b"[DONE]" in key.data["raw"][-64:], "the server hung up"
            sel.unregister(key.fileobj)
            key.fileobj.close()
        yield key.data if chunk else None


def made(server):
    """Generated tokens and when they were."""
    tokens = server.metric("vllm:generation_tokens_total")
    return tokens, time.perf_counter()


def experts(server):
    """Different experts that the layers of a pass read, so far: experts, layers."""
    text = server.get("/metrics")[2].decode()
    return [sum(float(x.rsplit(" ", 1)[1]) for x in text.splitlines() if x.startswith(f"nibble_moe_{what}_total{{")) for what in ("experts", "layers")]


def served(server, n, max_tokens):
    """Tokens per second of n streams from when all have begun until the first one ends: what bench_loop measures.

    The clients share the server's processors, and what they cost is not the server's: once all have begun, they sleep until a
    stream has ended (SO_RCVLOWAT: less than that wakes nobody).
    """
    sel, begun = begin(server, n, max_tokens), set()
    while len(begun) < n:
        for c in receive(sel):
            assert c, "a stream ended before all had begun: more --tokens"
            if b'"text":"' in c["raw"]:
                begun.add(id(c))
    for key in sel.get_map().values():
        key.fileobj.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1 << 20)
    before, t0 = made(server)
    sel.select()
    after, t1 = made(server)
    while sel.get_map():
        for _ in receive(sel):
            pass
    return (after - before) / (t1 - t0)


class Bare:
    """bench_loop, opened once."""

    def __init__(self, model, n, a):
        self.p = subprocess.Popen([ROOT / f"build/{a.build}/bench/bench_loop", "--requests", str(n), "--max-tokens", str(a.tokens),
                                   "--threads", str(a.threads), "--spec", str(a.spec), "--chunk", "256", "--lines", model],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def rate(self):
        self.p.stdin.write("\n")
        self.p.stdin.flush()
        rate, *self.experts = (float(x) for x in self.p.stdout.readline().split())
        return rate

    def close(self):
        self.p.stdin.close()
        assert self.p.wait() == 0


def event_seconds(pid):
    """Processor time of the thread that speaks HTTP (the first one)."""
    return ticks(f"/proc/{pid}/task/{pid}/stat") / os.sysconf("SC_CLK_TCK")


def ticks(stat):
    """Of a process or thread."""
    f = open(stat).read().rsplit(")", 1)[1].split()
    return int(f[11]) + int(f[12])


class Others:
    """The share of the machine's processors that went to other processes, or to another machine."""

    def __init__(self, pids):
        self.pids = pids
        self.restart()

    def restart(self):
        self.before, self.t0 = self.ticks(), time.perf_counter()

    def ticks(self):
        f = [int(x) for x in open("/proc/stat").readline().split()[1:9]]
        return sum(f) - f[3] - f[4] - sum(ticks(f"/proc/{p}/stat") for p in [*self.pids, "self"])

    def share(self):
        return (self.ticks() - self.before) / ((time.perf_counter() - self.t0) * os.sysconf("SC_CLK_TCK") * os.cpu_count())


def overhead(model, a):
    """Both sides stay open, so that neither pays for a start, and run in turn, first the one, then the other: what else the machine
    does meets both. Same options, same requests, same part of their lives; a first run of each is not counted. No turn begins while
    others take more than --foreign of the processors, and one in which they did is made again, for --patience seconds at most. The
    last figures are those of two bare loops: how far to trust the others."""
    for n in a.streams:
        s = Server(Nibble, model, "--max-seqs", n, "--ctx", 512 + a.tokens, "--log-format", "off", "--prefix-cache", 0, "-t", a.threads, "--spec", a.spec)
        bare, twin = Bare(model, n, a), Bare(model, n, a)
        sides = [lambda: served(s, n, a.tokens), bare.rate, twin.rate]
        for side in sides:
            side()
        rates, seconds, tokens = [[], [], []], event_seconds(s.p.pid), made(s)[0]
        others, turns, end = Others([s.p.pid, bare.p.pid, twin.p.pid]), 0, time.time() + a.patience
        while len(rates[0]) < a.repeat and time.time() < end:
            others.restart()
            time.sleep(0.3 if a.foreign < 1 else 0)
            if a.foreign < 1 and others.share() > a.foreign:
                time.sleep(1)
                continue
            turns += 1
            others.restart()
            turn = {k: sides[k]() for k in ((0, 1, 2) if turns % 2 else (2, 1, 0))}
            for k in turn if others.share() <= a.foreign or a.foreign >= 1 else ():
                rates[k].append(turn[k])
        e, k = experts(s), bare.experts
        per_token = (event_seconds(s.p.pid) - seconds) / (made(s)[0] - tokens)
        for x in (s, bare, twin):
            x.close()
        assert len(rates[0]) > 1, f"others took the processors in {turns} turns"
        ours, theirs, again = rates
        print(f"{n:3} streams: {statistics.median(ours):7.1f} tokens/s served, {statistics.median(theirs):7.1f} bare, overhead {cost(ours, theirs)}; "
              f"HTTP thread {1e6 * per_token:.1f} us of processor time a token; bare beside bare {cost(again, theirs)}; {e[0] / e[1]:.1f} "
              f"different experts a layer and pass, {k[0] / k[1]:.1f} bare; {len(ours)} of {turns} turns counted", flush=True)


def cost(ours, theirs):
    """Median and quartiles of what is missing, in percent."""
    lost = [100 * (1 - x / y) for x, y in zip(ours, theirs)]
    low, mid, high = statistics.quantiles(lost, n=4)
    return f"{mid:.1f} % ({low:.1f} to {high:.1f})"


def fair(model, a):
    s = Server(Nibble, model, "--max-seqs", a.clients, "--ctx", 512, "--log-format", "off", "--prefix-cache", 0, "--max-connections", 2 * a.clients)
    sel, got = begin(s, a.clients, 200, same=True, continuous_usage_stats=True), []
    while not got:
        for c in receive(sel):
            if c and (m := TOKENS.findall(c["raw"])):
                c["tokens"] = int(m[-1])
                if c["tokens"] >= 100:
                    got = sorted(k.data["tokens"] for k in sel.get_map().values())
                    break
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
    p.add_argument("--repeat", type=int, default=15)
    p.add_argument("--foreign", type=float, default=1.0, help="share of the processors, 0 to 1 (all turns count)")
    p.add_argument("--patience", type=float, default=600)
    p.add_argument("--spec", type=int, default=0, help="drafts per round; with them each side chooses its own depth by its own seconds")
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
