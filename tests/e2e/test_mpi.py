"""`mpirun -n N nibble quantize`: the same bytes as one process, and one clear error when a rank fails.

Every rank may be given its own command, working folder and file limits, so machines that differ can be played on one.
"""
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess

import pytest

RANKS = "OMPI_COMM_WORLD_RANK"


@pytest.fixture(scope="module", autouse=True)
def built(nibble):
    if b"no MPI" in nibble("--version"):
        pytest.skip("built without MPI")


@pytest.fixture
def mpirun(nibble):
    """Run the job on n ranks; `prepare` is shell text that each runs before nibble. Returns (exit status, stdout, stderr)."""
    def run(n, *args, prepare="", cwd=None):
        script = f'{prepare}\nexec "$@"'
        p = subprocess.run(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(n), "sh", "-c", script, "sh", nibble.path, "quantize", *map(str, args)],
                           stdin=subprocess.DEVNULL, capture_output=True, timeout=120, cwd=cwd)
        return p.returncode, p.stdout.decode(), p.stderr.decode()
    return run


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    """Few and uneven sequences: five, so four ranks share badly, one of them a single token."""
    f = tmp_path_factory.mktemp("ids") / "ids.json"
    f.write_text(json.dumps([[(7 * i + k * k) % 1500 + 20 for k in range(n)] for i, n in enumerate((40, 1, 24, 33, 9))]))
    return f


@pytest.fixture(scope="module")
def alone(nibble, tiny, ids, tmp_path_factory):
    """(folder, maxima file) that one process writes."""
    at = tmp_path_factory.mktemp("alone")
    nibble("quantize", tiny, "-o", at / "out", "--calib-ids", ids, "--save-amax", at / "amax", "--shard-size", "700KB")
    return at / "out", at / "amax"


def same_folder(a, b):
    names = sorted(f.name for f in a.iterdir())
    assert names == sorted(f.name for f in b.iterdir())
    assert sum(n.endswith(".safetensors") for n in names) > 3
    for n in names:
        assert (a / n).read_bytes() == (b / n).read_bytes(), n


def errors(stderr):
    return re.findall(r"^nibble: (E-\S+): (.*)$", stderr, re.M)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_same_bytes(mpirun, tiny, ids, alone, tmp_path, n):
    rc, out, err = mpirun(n, tiny, "-o", tmp_path / "out", "--calib-ids", ids, "--save-amax", tmp_path / "amax", "--shard-size", "700KB")
    assert rc == 0, err
    same_folder(alone[0], tmp_path / "out")
    assert (tmp_path / "amax").read_bytes() == alone[1].read_bytes()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["amax", "out"]
    assert err.count("calibrate: ") == 1 and err.count("quantize: ") == 1, "only rank 0 speaks"
    assert err.count("W-QUANT-CARD") == 1 and out.count("GB/s of source") == 1


def test_more_ranks_than_sequences(mpirun, nibble, tiny, tmp_path):
    (tmp_path / "ids").write_text("[[5, 6, 7, 8, 9, 10]]")
    args = (tiny, "--calib-ids", tmp_path / "ids", "--shard-size", "700KB")
    nibble("quantize", *args, "-o", tmp_path / "one")
    rc, _, err = mpirun(3, *args, "-o", tmp_path / "three")
    assert rc == 0, err
    same_folder(tmp_path / "one", tmp_path / "three")


def test_json_counts_all_ranks(mpirun, tiny, alone, tmp_path):
    rc, out, err = mpirun(2, tiny, "-o", tmp_path / "out", "--amax", alone[1], "--json")
    assert rc == 0, err
    assert json.loads(out)["gb_per_second"] > 0


def test_dry_run_prints_once(mpirun, nibble, tiny):
    rc, out, err = mpirun(3, tiny, "--dry-run")
    assert rc == 0, err
    assert out.encode() == nibble("quantize", tiny, "--dry-run")


# ---- failures ----

def weight_bytes(shard, name):
    """(offset, length) of a tensor's bytes in a safetensors file."""
    with open(shard, "rb") as f:
        n = struct.unpack("<Q", f.read(8))[0]
        b, e = json.loads(f.read(n))[name]["data_offsets"]
    return 8 + n + b, e - b


def poison(shard, name):
    """A NaN in the middle of a tensor; size and time stay. Returns what heals it."""
    was = os.stat(shard)
    offset, length = weight_bytes(shard, name)
    at = offset + length // 4 * 2

    def put(two):
        with open(shard, "r+b") as f:
            f.seek(at)
            old = f.read(2)
            f.seek(at)
            f.write(two)
        os.utime(shard, ns=(was.st_atime_ns, was.st_mtime_ns))
        return old
    old = put(b"\xc0\x7f")
    return lambda: put(old)


def shard_of(model, name):
    index = model / "model.safetensors.index.json"
    return model / (json.loads(index.read_text())["weight_map"][name] if index.is_file() else "model.safetensors")


LATE = "model.language_model.layers.7.self_attn.o_proj.weight"
EARLY = "model.language_model.layers.0.linear_attn.out_proj.weight"


@pytest.fixture
def copy(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "src")
    return tmp_path / "src"


def test_one_rank_fails_then_resume(mpirun, nibble, copy, alone, tmp_path):
    heal = poison(shard_of(copy, LATE), LATE)
    args = (copy, "-o", tmp_path / "out", "--amax", alone[1], "--shard-size", "700KB")
    rc, _, err = mpirun(4, *args)
    assert rc == 3, err
    [(what, text)] = errors(err)
    assert what == "E-QUANT-NONFINITE" and LATE in text
    assert re.match(r"rank [123] of 4: ", text), text
    assert not (tmp_path / "out").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"src", "out.partial"}
    assert not list((tmp_path / "out.partial").glob("*.tmp"))
    heal()
    rc, _, err = mpirun(4, *args)
    assert rc == 3 and [e[0] for e in errors(err)] == ["E-QUANT-DST"], err
    rc, out, err = mpirun(2, *args, "--resume", "--json")  # other ranks than before
    assert rc == 0, err
    assert json.loads(out)["resumed_tasks"] > 0
    nibble("quantize", copy, "-o", tmp_path / "fresh", "--amax", alone[1], "--shard-size", "700KB")
    same_folder(tmp_path / "fresh", tmp_path / "out")


def test_resume_alone_what_ranks_began(mpirun, nibble, copy, alone, tmp_path):
    heal = poison(shard_of(copy, EARLY), EARLY)
    args = (copy, "-o", tmp_path / "out", "--amax", alone[1], "--shard-size", "700KB")
    rc, _, err = mpirun(3, *args)
    assert rc == 3 and errors(err)[0][1].startswith("rank 0 of 3: "), err
    heal()
    nibble("quantize", *args, "--resume")
    nibble("quantize", copy, "-o", tmp_path / "fresh", "--amax", alone[1], "--shard-size", "700KB")
    same_folder(tmp_path / "fresh", tmp_path / "out")


def test_a_rank_killed(mpirun, tiny, alone, tmp_path):
    rc, _, err = mpirun(3, tiny, "-o", tmp_path / "out", "--amax", alone[1], prepare=f'[ ${RANKS} = 1 ] && kill -9 $$')
    assert rc != 0
    assert not (tmp_path / "out").exists()


def test_all_ranks_fail_alike(mpirun, tiny, ids, tmp_path):
    rc, _, err = mpirun(4, tiny / "nothing", "-o", tmp_path / "out")
    assert rc == 3 and len(errors(err)) == 1, err
    rc, _, err = mpirun(4, tiny, "--recipe", "unheard-of", "-o", tmp_path / "out")
    assert rc == 2 and [e[0] for e in errors(err)] == ["E-USAGE"], err
    rc, _, err = mpirun(4, tiny, "-o", tmp_path / "out", "--calib-ids", tmp_path / "nothing")
    assert rc == 3 and [e[0] for e in errors(err)] == ["E-FILE-OPEN"], err
    assert list(tmp_path.iterdir()) == [], "an empty folder is no run to resume"


def test_full_disk_on_one_rank(mpirun, tiny, alone, tmp_path):
    """A file-size limit plays the full disk of one machine (its signal is ignored, so that the write fails)."""
    rc, _, err = mpirun(2, tiny, "-o", tmp_path / "out", "--amax", alone[1], "-t", "1", prepare=f"trap '' XFSZ; [ ${RANKS} = 1 ] && ulimit -f 100")
    assert rc == 4, err
    [(what, text)] = errors(err)
    assert what == "E-FILE-WRITE" and text.startswith("rank 1 of 2: ")


def test_no_shared_filesystem(mpirun, tiny, alone, tmp_path):
    """The same relative path in another folder is another machine's disk."""
    for r in "01":
        (tmp_path / r).mkdir()
    rc, _, err = mpirun(2, tiny, "-o", "out", "--amax", alone[1], prepare=f"cd ${RANKS}", cwd=tmp_path)
    assert rc == 3, err
    [(what, text)] = errors(err)
    assert what == "E-DIST-SHARED" and text.startswith("rank 1 of 2: ")
    assert not list(tmp_path.glob("*/out"))
    # A folder of that name with another job's token in it is not the same folder either.
    shutil.rmtree(tmp_path / "0/out.partial", ignore_errors=True)
    (tmp_path / "1/out.partial").mkdir()
    (tmp_path / "1/out.partial/.token").write_bytes(bytes(32))
    rc, _, err = mpirun(2, tiny, "-o", "out", "--amax", alone[1], prepare=f"cd ${RANKS}", cwd=tmp_path)
    assert rc == 3 and errors(err)[0][0] == "E-DIST-SHARED", err


def test_ranks_with_different_jobs(mpirun, tiny, tmp_path, alone):
    for r, shards in ("0", "700KB"), ("1", "900KB"):
        (tmp_path / r).write_text(shards)
    rc, _, err = mpirun(2, tiny, "-o", tmp_path / "out", "--amax", alone[1],
                        prepare=f'set -- "$@" --shard-size $(cat {tmp_path}/${RANKS})')
    assert rc == 3, err
    [(what, text)] = errors(err)
    assert what == "E-DIST-DIFFERS" and "plan" in text


def test_ranks_with_different_calibration(mpirun, tiny, tmp_path):
    for r in "01":
        (tmp_path / r).write_text(f"[[1, 2, 3, {r}]]")
    rc, _, err = mpirun(2, tiny, "-o", tmp_path / "out", prepare=f'set -- "$@" --calib-ids {tmp_path}/${RANKS}')
    assert rc == 3, err
    [(what, text)] = errors(err)
    assert what == "E-DIST-DIFFERS" and "calibration data" in text


def test_another_launcher(nibble, tiny, tmp_path):
    """Variables of a launcher whose ranks this MPI does not see: refused, or N processes would each write everything."""
    env = {"PMI_SIZE": "2", "PMI_RANK": "0"}
    p = subprocess.run([nibble.path, "quantize", tiny, "-o", str(tmp_path / "out")], env={**os.environ, **env}, capture_output=True, timeout=60)
    assert p.returncode == 2 and b"E-DIST-START" in p.stderr, p.stderr
    assert not pathlib.Path(tmp_path / "out").exists()


def test_requant_is_for_one_process(nibble, tiny, alone, tmp_path):
    """The draft head is one process's work: several would each write the same files."""
    dst = tmp_path / "out"
    shutil.copytree(alone[0], dst)
    before = {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in dst.iterdir()}
    p = subprocess.run(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", nibble.path, "requant-mtp", str(dst), "--source", str(tiny), "--mtp", "bf16"],
                       stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    said = errors(p.stderr.decode())
    assert p.returncode == 2 and said and {what for what, _ in said} == {"E-DIST-ALONE"}, p.stderr
    assert {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in dst.iterdir()} == before
    for env, refused in (({"PMIX_RANK": "1"}, True), ({"PMI_SIZE": "2", "PMI_RANK": "0"}, True), ({"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}, False), ({}, False)):
        p = subprocess.run([nibble.path, "requant-mtp", str(dst), "--source", str(tiny), "--mtp", "bf16", "--dry-run"], env={**os.environ, **env}, capture_output=True, timeout=60)
        assert (p.returncode == 2 and b"E-DIST-ALONE" in p.stderr) if refused else p.returncode == 0, (env, p.stderr)
