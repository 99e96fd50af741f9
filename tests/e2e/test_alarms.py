"""Acceptance that looks wrong is said by the server, once, and counted where monitors look."""
import subprocess

import pytest

from serving import Server
from test_messages import edit_tensors

WORDS = "apples boats cakes doors eggs forks games hats".split()


@pytest.fixture
def serve(nibble):
    running = []

    def start(*args):
        running.append(Server(nibble, *args))
        return running[-1]
    yield start
    for s in running:
        s.stop()


def zero(name):
    def change(t):
        found = [k for k in t if k.endswith(name)]
        assert len(found) == 1, sorted(t)
        dtype, shape, data = t[found[0]]
        t[found[0]] = (dtype, shape, bytes(len(data)))
    return change


def alarms(s):
    text = s.get("/metrics")[2].decode()
    counted = {line.split('id="')[1].split('"')[0]: float(line.split()[-1]) for line in text.splitlines() if line.startswith("nibble_spec_alarms_total{")}
    info = s.get("/server_info")[2]["alarms"]
    assert [counted[k] for k in ("W-SPEC-FLOOR", "W-SPEC-PINNED", "E-SPEC-CORRUPT")] == [info[k] for k in ("spec_floor", "spec_pinned", "spec_corrupt")]
    return info


def test_model_that_says_one_thing(serve, tiny, tmp_path):
    s = serve(edit_tensors(tiny, tmp_path / "m", zero("lm_head.weight")))
    for _ in range(20):  # how many rounds are made is decided by their speed
        for w in WORDS:
            s.chat(f"How many {w}?", max_tokens=400, ignore_eos=True)
        if alarms(s)["spec_pinned"]:
            break
    assert alarms(s)["spec_pinned"] > 0 and alarms(s)["spec_corrupt"] == alarms(s)["spec_floor"] == 0
    assert len(s.said("W-SPEC-PINNED")) == 1 and s.said("E-SPEC-CORRUPT") == []


COMMANDS = (("run", "-p", "hi", "--max-tokens", 1), ("chat", "--max-tokens", 1), ("serve", "--port", 0))


def test_selftest_passes(nibble, serve, tiny):
    for command, *args in COMMANDS[:2]:
        said = nibble.full(command, tiny, *args, "--selftest", stdin=b"hi\n").stderr.decode()
        assert said.count("N-SPEC-TESTED") == 1 and "(2 drafts per round), alone and 2 at a time" in said, said
        assert "N-SPEC-TESTED" not in nibble.full(command, tiny, *args, stdin=b"hi\n").stderr.decode()
    s = serve(tiny, "--selftest", "--max-seqs", 4, "--spec", 1)
    assert len(s.said("N-SPEC-TESTED")) == 1 and "(1 drafts per round), alone and 4 at a time" in s.said("N-SPEC-TESTED")[0]


def test_selftest_refuses_to_start(nibble, tiny, tmp_path):
    """The last norm makes NaN of everything: nothing is answered, no port is opened."""
    def spoil(t):
        name, = [k for k in t if k.endswith("language_model.norm.weight")]
        dtype, shape, data = t[name]
        t[name] = (dtype, shape, b"\xc0\x7f" * (len(data) // 2))
    broken = edit_tensors(tiny, tmp_path / "m", spoil)
    for command, *args in COMMANDS:
        p = subprocess.run([nibble.path, command, broken, *map(str, args), "--selftest"], input=b"hi\n", capture_output=True, timeout=60)
        said = p.stderr.decode()
        assert p.returncode == 3 and "E-ENGINE-NONFINITE" in said and "N-SPEC-TESTED" not in said, said
        assert p.stdout == b"" and "ready" not in said
