"""Errors and warnings that no other test provokes, each by its own cause; and that every id of docs/ERRORS.md is provoked somewhere."""
import json
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import time

import numpy as np
import pytest

from test_quantize_formats import model_tensors, write

ROOT = pathlib.Path(__file__).resolve().parents[2]
AMAX = ROOT / "tests/oracle/qwen36-tiny/nvfp4/modelopt-cuda/amax.safetensors"
SHAPE = ("--layers 4 --hidden 64 --vocab 512 --heads 2 --kv-heads 1 --lin-k-heads 1 --lin-v-heads 2 --lin-dim 16 --head-dim 32 "
         "--experts 2 --topk 1 --moe-inter 32 --tokenizer /nonexistent").split()
P = "model.language_model."

# Ids that only a failing allocator or a failing device could provoke.
NOT_PROVOKED = {
    "E-TEMPLATE-MEMORY", "E-TEXT-MEMORY",  # malloc returns NULL
    "W-EVAL-WORK",  # a folder just made that cannot be removed
    "E-QUANT-LOST",  # the loader refuses such a source first
    "E-DIST-PEER",  # a rank that fails without ending the job: mpirun ends it
    "E-OPS-DEVICE",  # the command line knows the devices; only programs that embed the engine can name another
    "E-CUDA-ARCH", "E-CUDA-DEVICE", "E-CUDA-FAILED", "E-CUDA-SHAPE",  # a GPU is needed, or an odd one
    "E-CUDA-BUILD", "E-CUDA-DRIVER",  # one of them, by the build: tests/cli/common.cases
    "E-SERVE-EVENTS",  # no descriptor left for the event loop
    "E-FILE-READ", "E-CMD-STDIN",  # a regular file or pipe whose read fails
}


def said(nibble, id, *args, exit=3, text="", **kw):
    """The program says `id` once, in one line that holds `text`; an error is also its last line."""
    err = nibble.full(*args, exit=exit, **kw).stderr.decode()
    lines = [s for s in err.splitlines() if s.startswith(f"nibble: {id}: ")]
    assert len(lines) == 1 and text in lines[0], err
    if id.startswith("E-"):
        assert err.splitlines()[-1] == lines[0], err
    return lines[0]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    def of(*options):
        d = tmp_path_factory.mktemp("made") / "m"
        subprocess.run([sys.executable, ROOT / "tools/make_model.py", d, *SHAPE, *options], check=True, capture_output=True)
        return d
    return of


@pytest.fixture(scope="module")
def nvfp4(nibble, tiny, tmp_path_factory):
    d = tmp_path_factory.mktemp("nvfp4") / "m"
    nibble("quantize", tiny, "-o", d, "--amax", AMAX, "--mtp-scales", "generous", "-q")
    return d


@pytest.fixture
def ids(tmp_path):
    (tmp_path / "ids.json").write_text("[[1, 2, 3, 4, 5, 6, 7, 8]]")
    return tmp_path / "ids.json"


def edit_config(folder, change):
    for name in ("config.json", "hf_quant_config.json"):
        at = folder / name
        if at.exists():
            c = json.loads(at.read_text())
            change(c)
            at.write_text(json.dumps(c))


def edit_tensors(src, dst, change):
    """A copy of the model, in one file, with its tensors changed: name -> (dtype, shape, bytes)."""
    shutil.copytree(src, dst, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    t = model_tensors(src)
    change(t)
    write(dst / "model.safetensors", t)
    return dst


# ---- quantize


def test_data_free_says_what_it_lacks(nibble, tiny, tmp_path):
    for id in ("W-QUANT-DATA-FREE", "W-QUANT-NO-KV"):
        said(nibble, id, "quantize", tiny, "-o", tmp_path / id, "--no-calib", exit=0)
    err = nibble.full("quantize", tiny, "-o", tmp_path / "cast", "--no-calib", "--kv", "fp8-cast").stderr.decode()
    assert "W-QUANT-DATA-FREE" in err and "W-QUANT-NO-KV" not in err


def test_experts_without_a_token(nibble, tiny, ids, tmp_path):
    said(nibble, "W-CALIB-UNSEEN", "quantize", tiny, "-o", tmp_path / "o", "--calib-ids", ids, exit=0, text=" routed experts saw no token")


def test_refused_lines_are_counted(nibble, tiny, tmp_path):
    good = {"messages": [{"role": "user", "content": "What is 2 + 2?"}]}
    bad = {"messages": [{"role": "nobody", "content": "?"}]}
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(x) + "\n" for x in (good, bad, good, bad, bad)))
    said(nibble, "W-CALIB-SKIPPED", "quantize", tiny, "-o", tmp_path / "o", "--calib", tmp_path / "c.jsonl", exit=0, text=": 3 lines")


def test_no_room_for_hidden_states(nibble, tiny, ids, tmp_path):
    said(nibble, "E-CALIB-SPILL", "quantize", tiny, "-o", tmp_path / "o", "--calib-ids", ids, "--max-ram", "1k", exit=4,
         env={"TMPDIR": "/nonexistent"})
    assert [p.name for p in tmp_path.iterdir()] == ["ids.json"]


def test_corpus_not_installed(nibble, tiny, tmp_path):
    (tmp_path / "bin").mkdir()
    shutil.copy(nibble.path, tmp_path / "bin/nibble")
    shutil.copytree(tiny, tmp_path / "share/nibble/qwen36-tiny")
    alone = type(nibble)(str(tmp_path / "bin/nibble"))
    said(alone, "E-QUANT-CORPUS", "quantize", tiny, "-o", tmp_path / "o", exit=4, text="--calib FILE")
    shutil.rmtree(tmp_path / "share")
    said(alone, "E-CMD-MODEL", "inspect", exit=2)


def test_fp8_of_half_floats(nibble, make, ids, tmp_path):
    def as_f16(t):
        for name, (dtype, shape, data) in t.items():
            if dtype == "BF16":
                wide = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
                t[name] = ("F16", shape, wide.astype(np.float16).tobytes())
    model = edit_tensors(make(), tmp_path / "m", as_f16)
    said(nibble, "E-QUANT-DTYPE", "quantize", model, "-o", tmp_path / "o", "--recipe", "mixed", "--calib-ids", ids, text="this is F16")


def test_family_that_cannot_be_quantized(nibble, make, tmp_path):
    said(nibble, "E-QUANT-FAMILY", "quantize", make("--next", "--no-vision"), "-o", tmp_path / "o", "--no-calib", text="qwen3_next")


def test_tensor_without_a_place(nibble, make, tmp_path):
    def add(t):
        t[f"{P}layers.2.mlp.third_gate.weight"] = ("BF16", [2, 2], bytes(8))
    said(nibble, "E-LOAD-UNUSED", "quantize", edit_tensors(make(), tmp_path / "m", add), "-o", tmp_path / "o", "--no-calib", text="layers.2.mlp.third_gate.weight")


def test_too_many_shards(nibble, make, tmp_path):
    said(nibble, "E-QUANT-SHARDS", "quantize", make("--experts", "4096", "--split-experts", "--topk", "2", "--no-mtp"), "-o", tmp_path / "o", "--no-calib", "--mtp", "none",
         "--shard-size", 1, "--dry-run", exit=2)


def test_head_for_another_trunk(nibble, tiny, nvfp4, tmp_path):
    def change(t):
        name = f"{P}norm.weight"
        dtype, shape, data = t[name]
        t[name] = (dtype, shape, bytes([data[0] ^ 1]) + data[1:])
    other = edit_tensors(nvfp4, tmp_path / "other", change)
    said(nibble, "W-REQUANT-TRUNK", "requant-mtp", other, "--source", tiny, "-o", tmp_path / "o", "--mtp", "bf16", exit=0)


# ---- loading and running


def kv_scales(t):
    return [n for n in t if n.startswith(P) and n.endswith(("k_scale", "v_scale"))]


def test_some_kv_scales(nibble, nvfp4, tmp_path):
    def drop(t):
        for n in kv_scales(t):
            if ".layers.3." in n:
                del t[n]
    said(nibble, "E-LOAD-KV", "run", edit_tensors(nvfp4, tmp_path / "m", drop), "--ids", "[1, 2]", text="attention layers have K/V scales")


def test_kv_scale_of_one(nibble, nvfp4, tmp_path):
    def one(t):
        name = sorted(kv_scales(t))[0]
        t[name] = (t[name][0], t[name][1], np.float32(1).tobytes())
    said(nibble, "W-LOAD-KV-SCALE", "run", edit_tensors(nvfp4, tmp_path / "m", one), "--ids", "[1, 2]", "--max-tokens", 1, exit=0, text="scale 1 ")


def test_kv_scales_that_nobody_declares(nibble, nvfp4, tmp_path):
    model = tmp_path / "m"
    shutil.copytree(nvfp4, model)

    def undeclare(c):
        for q in (c.get("quantization_config", {}), c.get("quantization", {})):
            q.pop("kv_cache_scheme", None)
            q.pop("kv_cache_quant_algo", None)
    edit_config(model, undeclare)
    said(nibble, "W-LOAD-KV-UNDECLARED", "run", model, "--ids", "[1, 2]", "--max-tokens", 1, exit=0)


def test_fp8_cache_without_scales(nibble, tiny):
    said(nibble, "W-KV-NO-SCALES", "run", tiny, "--ids", "[1, 2]", "--max-tokens", 1, "--kv", "fp8", exit=0)


@pytest.mark.parametrize("value", [b"\xc0\x7f", b"\x80\xff"])
@pytest.mark.parametrize("where", ["model.language_model.layers.2.mlp.gate.weight", "mtp.layers.0.mlp.gate.weight"])
def test_router_that_is_not_finite(nibble, tiny, tmp_path, where, value):
    def spoil(t):
        dtype, shape, data = t[where]
        t[where] = (dtype, shape, data[:-2] + value)
    said(nibble, "E-ENGINE-ROUTER", "run", edit_tensors(tiny, tmp_path / "m", spoil), "--ids", "[1, 2]", text=where)


def test_fp4_inputs_without_a_scale(nibble, tiny, tmp_path):
    nibble("quantize", tiny, "-o", tmp_path / "m", "--recipe", "nvfp4-w4a16", "--no-calib", "-q")
    said(nibble, "E-NET-ACT", "run", tmp_path / "m", "--ids", "[1, 2]", "--act", "fp4", text="no input_scale")


def test_model_without_a_draft_head(nibble, make, ids, tmp_path):
    model = make("--no-mtp")
    said(nibble, "W-SPEC-NO-HEAD", "run", model, "--ids", "[1, 2]", "--max-tokens", 2, "--spec", 2, exit=0, text="--spec 2 is ignored")
    said(nibble, "E-LOAD-NO-HEAD", "logits", model, "--ids", ids, "--mtp", "-o", tmp_path / "l")
    said(nibble, "E-BENCH-DRAFT", "bench", "decode", model, "--depth", 1)


def test_limits(nibble, tiny):
    said(nibble, "E-ENGINE-CTX", "run", tiny, "--ids", "[1]", "--ctx", 10 ** 8, exit=2, text="the model's limit")
    said(nibble, "E-MACHINE-PLAN", "run", tiny, "--ids", "[1]", "--memory", "1M", exit=4, text="--memory")


def test_text_that_is_too_long(nibble, tiny, tmp_path):
    with open(tmp_path / "t", "wb") as f:
        f.truncate(1 << 30)  # sparse: 1 GiB of NUL
    said(nibble, "E-TEXT-SIZE", "tokenize", tiny, "--file", tmp_path / "t")


def test_lines_that_are_not_strings(nibble, tiny):
    said(nibble, "E-CMD-LINE", "tokenize", tiny, "--lines", "--file", "-", stdin=b'"good"\n17\n', text="not a JSON string")


def test_no_address_space(nibble, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    head = json.dumps({"x": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}}).encode()
    with open(tmp_path / "m/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        f.truncate(8 + len(head) + (1 << 40))  # sparse
    p = subprocess.run(["bash", "-c", f"ulimit -v 16000000; exec {nibble.path} inspect {tmp_path / 'm'}"], capture_output=True, timeout=60)
    assert p.returncode == 4 and b"nibble: E-FILE-MAP: " in p.stderr, p.stderr


def test_check_out_and_stop(nibble, tiny, nvfp4, tmp_path):
    said(nibble, "E-CHECK-OUT", "check", nvfp4, "--fix", tmp_path, text="it exists")
    shutil.copytree(nvfp4, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    head = json.dumps({f"x{i}": {"dtype": "BF16", "shape": [1 << 29], "data_offsets": [i << 30, (i + 1) << 30]} for i in range(128)}).encode()
    with open(tmp_path / "m/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        f.truncate(8 + len(head) + (1 << 37))  # 137 GB of zeros: nobody is done before the signal
    p = subprocess.Popen([nibble.path, "check", tmp_path / "m"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(1)
    p.send_signal(signal.SIGINT)
    err = p.communicate(timeout=60)[1].decode()
    assert p.returncode == 130 and err.splitlines()[-1].startswith("nibble: E-CHECK-STOPPED: "), err


def test_result_that_cannot_be_written(nibble, tiny):
    p = subprocess.run(["bash", "-c", f"exec {nibble.path} inspect {tiny} > /dev/full"], capture_output=True, timeout=60)
    assert p.returncode == 4 and b"nibble: E-CMD-STDOUT: " in p.stderr, p.stderr


def test_template_that_does_not_compile(nibble, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "m")
    (tmp_path / "m/chat_template.jinja").write_text("{% if %}")
    said(nibble, "W-INSPECT-TEMPLATE", "inspect", tmp_path / "m", exit=0)


# ---- all of them


def test_every_id_is_provoked():
    ids = set(re.findall(r"^\| ([EW]-[A-Z0-9-]+)", (ROOT / "docs/ERRORS.md").read_text(), re.M))
    assert len(ids) > 100
    tests = "\n".join(p.read_text(errors="replace") for p in (ROOT / "tests").rglob("*") if p.suffix in (".py", ".c", ".h", ".cases"))
    named = set(re.findall(r"[EW](?:-[A-Z0-9]+)+", tests.replace('"""' + __doc__, "")))
    assert NOT_PROVOKED <= ids
    assert ids - named == set(), sorted(ids - named)
