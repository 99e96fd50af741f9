"""Good clients among bad ones: every good request is answered with the same bytes, nothing crashes, nothing stays behind.
SEED=... repeats a run; bench/bench_serve.py does the same for longer."""
import os

import pytest

from hostile import Crowd
from serving import Server

SEED = int(os.environ.get("SEED", "1"))


@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_crowd(nibble, tiny, seconds):
    s = Server(nibble, tiny, "--max-seqs", 4, "--max-queue", 64, "--log-format", "off", "--prefix-cache", "4M")
    c = Crowd(s, lambda q, n: nibble.json("run", tiny, "-p", q, "--temperature", 0, "--json", "-n", n), SEED)
    c.run(seconds=min(10, seconds))  # buffers and caches reach their size
    c.settle()
    before = c.rss()
    c.run(seconds=seconds)
    c.settle()
    assert c.wrong == [], f"SEED={SEED}: {c.wrong[:3]}"
    assert set(c.counts) == {name for name, _ in c.ACTIONS} or seconds < 60
    assert seconds < 60 or c.rss() < 1.02 * before, (before, c.rss())
    s.close()
