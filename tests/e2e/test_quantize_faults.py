"""nibble quantize when the world fails: kill -9, full and broken disks, sources that change, signals, a terminal.

After every fault: one line, the designed exit status, nothing under the final name, and --resume gives the same bytes as a run
that was left alone. faultfs.c (preloaded) makes chosen calls fail, so each call of a small model's run meets each fault.
"""
import concurrent.futures
import errno
import fcntl
import json
import os
import pathlib
import pty
import random
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CALLS = "write,pwrite,fsync,ftruncate,mkdir,rename,create"
TINY_SHAPE = ("--layers 4 --hidden 64 --vocab 512 --heads 2 --kv-heads 1 --lin-k-heads 1 --lin-v-heads 2 --lin-dim 16 --head-dim 32 "
              "--experts 2 --topk 1 --moe-inter 32 --no-vision --tokenizer /nonexistent").split()
SMALL = ["--no-calib", "--shard-size", "150000"]  # about 430 calls in two shards
NAMES = {"nibble_quant_summary.json"}             # holds seconds


def make_model(out, *args):
    subprocess.run([sys.executable, ROOT / "tools/make_model.py", out, *map(str, args)], check=True, capture_output=True)
    return out


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("faults") / "small", *TINY_SHAPE)


@pytest.fixture(scope="module")
def mid(tmp_path_factory):
    """About 90 MB in 4 shards."""
    return make_model(tmp_path_factory.mktemp("faults") / "mid", "--layers", 4, "--hidden", 512, "--experts", 16, "--no-vision")


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    out = tmp_path_factory.mktemp("shim") / "faultfs.so"
    subprocess.run(["cc", "-O1", "-Wall", "-Werror", "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", out, ROOT / "tests/e2e/faultfs.c", "-ldl"],
                   check=True)
    return out


class Job:
    """nibble quantize SRC -o DST OPTIONS, again and again."""

    def __init__(self, nibble, src, dst, options, shim=None):
        self.nibble, self.src, self.dst, self.options, self.shim = nibble, src, pathlib.Path(dst), list(map(str, options)), shim
        self.partial = pathlib.Path(f"{dst}.partial")

    def argv(self, *more):
        return [self.nibble.path, "quantize", str(self.src), "-o", str(self.dst), "-q", *self.options, *map(str, more)]

    def run(self, *more, **fault):
        env = dict(os.environ)
        if fault:
            env.update({f"FAULT_{k.upper()}": str(v) for k, v in fault.items()}, LD_PRELOAD=str(self.shim))
        return subprocess.run(self.argv(*more), capture_output=True, env=env, timeout=60, stdin=subprocess.DEVNULL)

    def wipe(self):
        shutil.rmtree(self.dst, ignore_errors=True), shutil.rmtree(self.partial, ignore_errors=True)


def content(folder):
    return {p.name: p.read_bytes() for p in pathlib.Path(folder).iterdir() if p.name not in NAMES}


def one_line(p, kinds=(3, 4)):
    lines = [s for s in p.stderr.decode().splitlines() if not s.startswith(("nibble: N-", "nibble: W-"))]
    assert p.returncode in kinds and len(lines) == 1 and lines[0].startswith("nibble: E-"), (p.returncode, p.stderr)
    return lines[0]


@pytest.fixture(scope="module")
def whole(nibble, small, tmp_path_factory):
    """The export of `small` that nothing disturbed, and the calls it took."""
    return undisturbed(nibble, small, SMALL, tmp_path_factory.mktemp("whole") / "out")


def undisturbed(nibble, src, options, dst):
    p = Job(nibble, src, dst, options).run()
    assert p.returncode == 0, p.stderr
    files = content(dst)
    assert not [n for n in files if n.startswith(".")] and not os.path.exists(f"{dst}.partial")
    return files


def resume_equals(job, whole, *more):
    p = job.run("--resume", *more)
    assert p.returncode == 0, p.stderr
    got = content(job.dst)
    assert set(got) == set(whole) and all(got[n] == whole[n] for n in whole), [n for n in whole if got.get(n) != whole[n]]
    assert not job.partial.exists()


def count_calls(job, tmp_path, calls):
    assert job.run("-t", 1, calls=calls, mode="count", count=tmp_path / "count").returncode == 0
    job.wipe()
    return int((tmp_path / "count").read_text())


def every_call(check, n):
    """check(i) for calls 1..n, two at a time: all of the first and the last ones, which make, flush and name things, and each 7th
    of the writes between, which are alike (FAULT_ALL=1: each). Returns how many."""
    step = 1 if os.environ.get("FAULT_ALL") else 7
    chosen = [i for i in range(1, n + 1) if i <= 12 or i > n - 30 or i % step == 0]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(check, chosen))
    return len(chosen)


# ---- each call of a run


@pytest.mark.slow
def test_kill_before_every_call(nibble, small, whole, shim, tmp_path):
    n = count_calls(Job(nibble, small, tmp_path / "n", SMALL, shim), tmp_path, CALLS)
    assert n > 300

    def check(i):
        job = Job(nibble, small, tmp_path / f"o{i}", SMALL, shim)
        p = job.run("-t", 1, calls=CALLS, mode="kill", n=i)
        assert p.returncode == -signal.SIGKILL
        if job.dst.exists():  # killed after the last rename
            assert content(job.dst) == whole and not job.partial.exists()
        else:
            if i % 3 == 0:  # the resumed run dies too
                job.run("--resume", "-t", 1, calls=CALLS, mode="kill", n=1 + i * 7 % 200)
            if job.dst.exists():
                assert content(job.dst) == whole
            else:
                resume_equals(job, whole)
        job.wipe()
    every_call(check, n)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["EIO", "ENOSPC", "EINTR", "short"])
def test_fault_at_every_call(nibble, small, whole, shim, tmp_path, fault):
    calls = CALLS if fault in ("EIO", "ENOSPC") else "write,pwrite,pread,read"
    n = count_calls(Job(nibble, small, tmp_path / "n", SMALL, shim), tmp_path, calls)
    mode = getattr(errno, fault) if fault != "short" else fault
    failed = []

    def check(i):
        job = Job(nibble, small, tmp_path / f"o{i}", SMALL, shim)
        p = job.run("-t", 1, calls=calls, mode=mode, n=i, **({"sticky": 1} if fault == "ENOSPC" else {}))
        if p.returncode == 0:
            assert content(job.dst) == whole and not job.partial.exists()
        else:
            failed.append(i)
            one_line(p)
            if job.dst.exists():  # only the flush of the parent folder may fail behind the rename
                assert content(job.dst) == whole and i >= n - 1
            else:
                if i % 5 == 0 and job.partial.exists():
                    assert "E-QUANT-DST" in one_line(job.run(), (3,))  # not without --resume
                resume_equals(job, whole)
        job.wipe()
    tried = every_call(check, n)
    if fault in ("EINTR", "short"):
        assert not failed  # these are no failures at all
    else:
        assert len(failed) > 0.9 * tried


def test_failed_flush_forgets_what_was_written(nibble, small, whole, shim, tmp_path):
    """The kernel reports lost pages once: a later flush succeeds without them, so nothing may count as done."""
    job = Job(nibble, small, tmp_path / "o", SMALL, shim)
    assert "flushed" in one_line(job.run("-t", 1, calls="fsync", mode=errno.EIO, n=2), (4,))
    assert (job.partial / ".journal.0").stat().st_size == 0
    for f in job.partial.glob("*.safetensors"):  # the lost pages read as zeros
        raw = f.read_bytes()
        f.write_bytes(raw[:len(raw) // 2] + bytes(len(raw) - len(raw) // 2))
    resume_equals(job, whole)


def test_read_error(nibble, small, whole, shim, tmp_path):
    job = Job(nibble, small, tmp_path / "o", SMALL, shim)
    for i in range(1, 100, 9):
        assert "E-QUANT-READ" in one_line(job.run("-t", 1, calls="pread", mode=errno.EIO, n=i), (4,))
        resume_equals(job, whole)
        job.wipe()


# ---- the whole command, killed by the clock


def test_kill_at_random_times(nibble, mid, tmp_path):
    seed = int(os.environ.get("SEED", "11"))
    print("SEED", seed)
    rnd, options = random.Random(seed), ["--no-calib", "--shard-size", "8M"]
    t = time.time()
    want = undisturbed(nibble, mid, options, tmp_path / "whole")
    full, kills = time.time() - t, 0
    assert len([n for n in want if n.endswith(".safetensors")]) > 3
    for i in range(100):  # the clock may miss; 25 hits are enough
        if kills >= 25:
            break
        job = Job(nibble, mid, tmp_path / "o", options)
        for attempt in range(1 + i % 3):
            p = subprocess.Popen(job.argv(*(["--resume"] if attempt else [])), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(rnd.random() * full / (1 + attempt))
            p.kill()
            kills += p.wait() == -signal.SIGKILL
            if job.dst.exists():
                break
        if job.dst.exists():
            assert content(job.dst) == want
        else:
            resume_equals(job, want)
        job.wipe()
    assert kills >= 25


# ---- refusals


def stop_in_the_middle(job):
    assert job.run("-t", 1, calls="pwrite", mode="kill", n=60).returncode == -signal.SIGKILL


@pytest.mark.parametrize("other", [["--no-calib", "--shard-size", "90000"], ["--no-calib", "--shard-size", "150000", "--arith", "cpu"],
                                   ["--no-calib", "--shard-size", "150000", "--recipe", "nvfp4-mlp"],
                                   ["--no-calib", "--shard-size", "150000", "--mtp", "bf16"]])
def test_resume_of_another_job(nibble, small, whole, shim, tmp_path, other):
    job = Job(nibble, small, tmp_path / "o", SMALL, shim)
    stop_in_the_middle(job)
    left = content(job.partial)
    assert "E-QUANT-RESUME" in one_line(Job(nibble, small, tmp_path / "o", other).run("--resume"), (3,))
    assert content(job.partial) == left  # and nothing was touched
    resume_equals(job, whole)


def test_calibrated_run(nibble, small, shim, tmp_path):
    """Killed at 25 places while it writes; the resumed run calibrates again, and other data make another job."""
    for name, k in (("ids", 7), ("other", 11)):
        (tmp_path / name).write_text(json.dumps([[1 + (k * i * j) % 400 for i in range(50)] for j in range(1, 7)]))
    options = ["--shard-size", "150000", "--calib-ids", tmp_path / "ids"]
    want = undisturbed(nibble, small, options, tmp_path / "whole")
    n = count_calls(Job(nibble, small, tmp_path / "n", options, shim), tmp_path, CALLS)
    for i in range(8, n, n // 25):
        job = Job(nibble, small, tmp_path / "o", options, shim)
        assert job.run("-t", 1, calls=CALLS, mode="kill", n=i).returncode == -signal.SIGKILL
        if i % 2:
            other = Job(nibble, small, tmp_path / "o", ["--shard-size", "150000", "--calib-ids", tmp_path / "other"])
            assert "E-QUANT-RESUME" in one_line(other.run("--resume"), (3,))
        resume_equals(job, want, "-t", 1 + i % 3)
        job.wipe()


def test_resume_of_another_source(nibble, small, shim, tmp_path):
    src = tmp_path / "src"
    shutil.copytree(small, src)
    job = Job(nibble, src, tmp_path / "o", SMALL, shim)
    stop_in_the_middle(job)
    os.utime(next(src.glob("*.safetensors")))
    assert "E-QUANT-RESUME" in one_line(job.run("--resume"), (3,))


def test_resume_from_another_place(nibble, small, whole, shim, tmp_path):
    job = Job(nibble, small, tmp_path / "o", SMALL, shim)
    stop_in_the_middle(job)
    p = subprocess.run([nibble.path, "quantize", small.name + "/", "-o", f"{tmp_path}/o/", "-q", "--resume", *SMALL], cwd=small.parent,
                       capture_output=True)
    assert p.returncode == 0 and content(job.dst) == whole, p.stderr


def test_two_at_once(nibble, small, whole, shim, tmp_path):
    job = Job(nibble, small, tmp_path / "o", SMALL, shim)
    stop_in_the_middle(job)
    with open(job.partial / ".journal.0") as f:
        fcntl.flock(f, fcntl.LOCK_EX)  # as a running process holds it
        assert "E-QUANT-BUSY" in one_line(job.run("--resume"), (3,))
    resume_equals(job, whole)


# ---- the source changes


@pytest.mark.parametrize("mode, id", [("cut", "E-QUANT-READ"), ("touch", "E-QUANT-CHANGED")])
def test_source_changes_while_it_is_read(nibble, small, whole, shim, tmp_path, mode, id):
    src = tmp_path / "src"
    shutil.copytree(small, src)
    job = Job(nibble, src, tmp_path / "o", SMALL, shim)
    last = sorted(src.glob("*.safetensors"))[-1]
    line = one_line(job.run("-t", 1, calls="pread", mode=mode, n=40, file=last), (3,))
    assert id in line and last.name in line and not job.dst.exists()
    one_line(job.run("--resume"), (3,))  # a mixture is never finished
    shutil.copyfile(small / last.name, last)
    job.wipe()
    assert job.run().returncode == 0 and content(job.dst) == whole


def test_mapped_source_cut_short(nibble, small, shim, tmp_path):
    src = tmp_path / "src"
    shutil.copytree(small, src)
    (tmp_path / "ids.json").write_text(json.dumps([list(range(1, 40))]))
    lost = 0
    for f in sorted(src.glob("*.safetensors")):
        p = Job(nibble, src, tmp_path / "o", ["--calib-ids", tmp_path / "ids.json"], shim).run(
            "-t", 2, calls="pthread_create", mode="cut", n=1, file=f)
        line = one_line(p)
        lost += "E-FILE-LOST" in line
        shutil.copyfile(small / f.name, f)
    assert lost and not (tmp_path / "o").exists()


# ---- signals, terminal


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_cleanly(nibble, mid, tmp_path, sig):
    options = ["--no-calib", "--shard-size", "8M", "-t", "1"]
    want, stopped = undisturbed(nibble, mid, options, tmp_path / "whole"), 0
    for i in range(8):
        job = Job(nibble, mid, tmp_path / "o", options)
        p = subprocess.Popen(job.argv(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        deadline = time.time() + 10
        while not (job.partial / ".journal.0").exists() and p.poll() is None and time.time() < deadline:
            time.sleep(0.001)
        time.sleep(0.004 * i)
        p.send_signal(sig)
        out, err = p.communicate(timeout=20)
        if p.returncode == 0:
            assert content(job.dst) == want
        else:
            assert p.returncode == 130 and out == b"" and b"nibble: E-QUANT-STOPPED: " in err and b"--resume" in err
            assert not job.dst.exists()
            resume_equals(job, want)
            stopped += 1
        job.wipe()
    assert stopped


def catches(pid, sig):
    """Has the process a handler for it?"""
    line = next(s for s in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines() if s.startswith("SigCgt"))
    return int(line.split()[1], 16) >> (sig - 1) & 1


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_calibrating(nibble, mid, tmp_path, sig):
    (tmp_path / "ids.json").write_text(json.dumps([[1 + (i * j) % 8000 for i in range(500)] for j in range(1, 40)]))
    argv = [nibble.path, "quantize", mid, "-o", tmp_path / "o", "--calib-ids", tmp_path / "ids.json", "-q", "-t", "1"]
    p = subprocess.Popen(list(map(str, argv)), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    t = time.time()
    while not catches(p.pid, sig) and time.time() - t < 20:
        time.sleep(0.01)
    time.sleep(0.3)
    p.send_signal(sig)
    t = time.time()
    out, err = p.communicate(timeout=30)
    assert p.returncode == 130 and out == b"" and b"nibble: E-CALIB-STOPPED: " in err and time.time() - t < 10
    assert not list(tmp_path.glob("o*"))


def on_terminal(argv, timeout=60):
    pid, fd = pty.fork()
    if pid == 0:
        fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        os.execv(argv[0], argv)
    seen, end = b"", time.time() + timeout
    while time.time() < end:
        if select.select([fd], [], [], 1)[0]:
            try:
                piece = os.read(fd, 65536)
            except OSError:
                break
            if not piece:
                break
            seen += piece
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), seen.decode(errors="replace")


def shown(text):
    """What stands on the screen in the end: \\r returns, ESC[K erases to the end of the line."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        row, at = "", 0
        for part in line.replace("\x1b[K", "\0").split("\r"):
            at = 0
            for c in part:
                row, at = (row[:at], at) if c == "\0" else (row[:at] + c + row[at + 1:], at + 1)
        lines.append(row)
    return lines


def test_progress_on_a_terminal(nibble, mid, tmp_path):
    argv = [nibble.path, "quantize", str(mid), "-o", str(tmp_path / "o"), "--no-calib", "-t", "1"]
    code, text = on_terminal(argv)
    assert code == 0
    bars = [s for s in text.split("\r") if s.startswith("quantize ") and "%" in s]
    assert bars and all("GB/s" in s and "s left" in s for s in bars)
    assert not [s for s in shown(text) if "s left" in s]  # no bar stays behind
    assert [s for s in shown(text) if s.startswith("quantize: ")]
    shutil.rmtree(tmp_path / "o")
    p = subprocess.run(argv, capture_output=True)
    assert p.returncode == 0 and b"\r" not in p.stderr and b"\x1b" not in p.stderr
    assert len([s for s in p.stderr.splitlines() if not s.startswith(b"nibble: ")]) == 1  # one line for the step


def spoil(src, name):
    """A NaN at row 2, column 7 of a BF16 tensor."""
    for path in src.glob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        n = struct.unpack("<Q", raw[:8])[0]
        t = json.loads(raw[8:8 + n]).get(name)
        if t:
            at = 8 + n + t["data_offsets"][0] + 2 * (2 * t["shape"][1] + 7)
            raw[at:at + 2] = b"\xc0\x7f"
            return path.write_bytes(raw)
    raise KeyError(name)


def test_error_behind_a_bar(nibble, mid, tmp_path):
    src = tmp_path / "src"
    shutil.copytree(mid, src)
    spoil(src, "model.layers.3.self_attn.o_proj.weight")
    code, text = on_terminal([nibble.path, "quantize", str(src), "-o", str(tmp_path / "o"), "--no-calib", "-t", "1"])
    assert code == 3 and [s for s in text.split("\r") if s.startswith("quantize ")]  # a bar was there
    line = [s for s in shown(text) if "E-QUANT-NONFINITE" in s]
    assert len(line) == 1 and line[0].startswith("nibble: E-") and not [s for s in shown(text) if "s left" in s]
    assert "o_proj.weight" in line[0] and "row 2, column 7" in line[0]


# ---- memory


PEAK = """import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"""


def peak_bytes(argv):
    """Through a small process: what a fork shares with this large one would count as the child's."""
    return 1024 * int(subprocess.run([sys.executable, "-c", PEAK, *map(str, argv)], check=True, capture_output=True, timeout=120).stdout)


def test_memory_does_not_grow_with_the_model(nibble, tmp_path):
    src = make_model(tmp_path / "big", "--layers", 4, "--hidden", 1024, "--experts", 32, "--moe-inter", 384, "--no-vision", "--vocab", 2048)
    size = sum(p.stat().st_size for p in src.iterdir())
    peak = peak_bytes([nibble.path, "quantize", src, "-o", tmp_path / "o", "--no-calib", "-q", "-t", "2"])
    print(f"model {size / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
    assert peak < size / 4 and peak < 100e6


def test_max_ram_spills(nibble, small, tmp_path):
    (tmp_path / "ids.json").write_text(json.dumps([[1 + (i * j) % 400 for i in range(60)] for j in range(1, 9)]))
    out = {}
    for name, more in (("free", []), ("tight", ["--max-ram", "20000"])):
        p = subprocess.run([nibble.path, "quantize", small, "-o", tmp_path / name, "--calib-ids", tmp_path / "ids.json", *more],
                           capture_output=True)
        assert p.returncode == 0, p.stderr
        assert (b"N-CALIB-SPILLED" in p.stderr) == (name == "tight")
        out[name] = content(tmp_path / name)
    assert out["free"] == out["tight"]


def test_max_ram_bounds_memory(nibble, mid, tmp_path):
    """With --max-ram the weights of a layer leave memory after it: the peak stays below the model."""
    (tmp_path / "ids.json").write_text(json.dumps([[1 + (i * j) % 8000 for i in range(60)] for j in range(1, 5)]))
    size = sum(p.stat().st_size for p in mid.glob("*.safetensors"))
    peak = {}
    for name, more in (("free", []), ("tight", ["--max-ram", "100000"])):
        peak[name] = peak_bytes([nibble.path, "quantize", mid, "-o", tmp_path / name, "--calib-ids", tmp_path / "ids.json", "-t", 1, *more])
    print(f"model {size / 1e6:.0f} MB, peak {peak['free'] / 1e6:.0f} MB, with --max-ram {peak['tight'] / 1e6:.0f} MB")
    assert content(tmp_path / "free") == content(tmp_path / "tight")
    assert peak["tight"] < 0.85 * peak["free"]


# ---- a disk that is really full


def test_file_size_limit(nibble, small, whole, tmp_path):
    job = Job(nibble, small, tmp_path / "o", SMALL)

    def tight():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))
    p = subprocess.run(job.argv(), capture_output=True, preexec_fn=tight)
    assert "E-FILE-WRITE" in one_line(p, (4,)) and not job.dst.exists()
    resume_equals(job, whole)


def test_full_disk(nibble, small, whole, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True).returncode:
        pytest.skip("no right to mount")
    try:
        job = Job(nibble, small, disk / "o", SMALL)
        assert "E-QUANT-SPACE" in one_line(job.run(), (4,)) and not job.partial.exists()  # said before a byte is written
        subprocess.run(["mount", "-o", "remount,size=4M", disk], check=True)
        assert job.run().returncode == 0 and content(job.dst) == whole
    finally:
        subprocess.run(["umount", disk])
