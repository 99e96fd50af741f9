"""nibble requant-mtp killed before, or refused by the disk at, every call that changes a file.

Whatever happens: the export is as it was, or complete, or the next run makes it complete; and a failure is one line.
"""
import errno
import os
import pathlib
import shutil
import signal
import subprocess

import pytest

from test_quantize_faults import CALLS, every_call, make_model, one_line, shim, small  # noqa: F401 (fixtures)

STAGE, PARTIAL = ".requant-mtp", ".requant-mtp.partial"


def content(folder):
    return {p.name: p.read_bytes() for p in pathlib.Path(folder).iterdir() if p.is_file() and not p.name.startswith(".")}


class Job:
    """requant-mtp on a fresh copy of an export that has its BF16 head in shards it shares."""

    def __init__(self, nibble, before, source, dst, shim, *options):
        self.nibble, self.source, self.dst, self.shim, self.options = nibble, source, pathlib.Path(dst), shim, options
        shutil.copytree(before, dst)

    def run(self, **fault):
        env = dict(os.environ)
        if fault:
            env.update({f"FAULT_{k.upper()}": str(v) for k, v in fault.items()}, LD_PRELOAD=str(self.shim))
        argv = [self.nibble.path, "requant-mtp", str(self.dst), "--source", str(self.source), "-q", "-t", "1", *self.options]
        return subprocess.run(argv, capture_output=True, env=env, timeout=60, stdin=subprocess.DEVNULL)

    def loads(self):
        p = subprocess.run([self.nibble.path, "inspect", str(self.dst), "-q"], capture_output=True, timeout=60)
        return p.returncode == 0


GENEROUS = ("--mtp-scales", "generous")


@pytest.fixture(scope="module")
def before(nibble, small, tmp_path_factory):  # noqa: F811
    out = tmp_path_factory.mktemp("requant") / "before"
    nibble("quantize", small, "-o", out, "-q", "--no-calib", "--mtp", "bf16", "--shard-size", 150000)
    return out


@pytest.fixture(scope="module")
def after(nibble, small, before, shim, tmp_path_factory):  # noqa: F811
    job = Job(nibble, before, small, tmp_path_factory.mktemp("requant") / "after", shim, *GENEROUS)
    p = job.run()
    assert p.returncode == 0, p.stderr
    assert job.loads() and not [n for n in os.listdir(job.dst) if n.startswith(".")]
    return content(job.dst)


def count_calls(job, count):
    assert job.run(calls=CALLS, mode="count", count=count).returncode == 0
    return int(count.read_text())


def check_state(job, before, after):
    """As before or complete, unless the next run is to finish it; and then it does."""
    if not (job.dst / STAGE).exists():
        assert content(job.dst) in (content(before), after)
        assert job.loads()
    p = job.run()
    assert p.returncode == 0, p.stderr
    assert content(job.dst) == after
    assert not [n for n in os.listdir(job.dst) if n.startswith(".")]
    shutil.rmtree(job.dst)


@pytest.mark.slow
def test_kill_before_every_call(nibble, small, before, after, shim, tmp_path):  # noqa: F811
    n = count_calls(Job(nibble, before, small, tmp_path / "n", shim, *GENEROUS), tmp_path / "count")
    assert n > 60

    def check(i):
        job = Job(nibble, before, small, tmp_path / f"o{i}", shim, *GENEROUS)
        assert job.run(calls=CALLS, mode="kill", n=i).returncode == -signal.SIGKILL
        if i % 3 == 0:  # the next run dies too
            job.run(calls=CALLS, mode="kill", n=1 + i * 7 % n)
        check_state(job, before, after)
    every_call(check, n)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["EIO", "ENOSPC"])
def test_fault_at_every_call(nibble, small, before, after, shim, tmp_path, fault):  # noqa: F811
    n = count_calls(Job(nibble, before, small, tmp_path / "n", shim, *GENEROUS), tmp_path / "count")

    def check(i):
        job = Job(nibble, before, small, tmp_path / f"o{i}", shim, *GENEROUS)
        p = job.run(calls=CALLS, mode=getattr(errno, fault), n=i, **({"sticky": 1} if fault == "ENOSPC" else {}))
        if p.returncode:
            one_line(p)
        else:
            assert content(job.dst) == after
        check_state(job, before, after)
    every_call(check, n)


def test_interrupted_calibration(nibble, tiny, tmp_path):
    """Ctrl-C while the head is measured: nothing has happened."""
    nibble("quantize", tiny, "-o", tmp_path / "m", "-q", "--no-calib", "--mtp", "none")
    old = content(tmp_path / "m")
    p = subprocess.Popen([nibble.path, "requant-mtp", tmp_path / "m", "--source", tiny, "--device", "ref"], stdout=subprocess.DEVNULL,
                         stderr=subprocess.PIPE)
    try:
        p.wait(0.5)
    except subprocess.TimeoutExpired:
        pass
    assert p.poll() is None, "the reference backend takes minutes for this"
    p.send_signal(signal.SIGINT)
    text = p.communicate(timeout=60)[1].decode()
    assert p.returncode == 130 and "E-CALIB-STOPPED" in text
    assert content(tmp_path / "m") == old and not (tmp_path / "m" / PARTIAL).exists()
