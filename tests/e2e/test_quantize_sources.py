"""nibble quantize on odd sources and bad values: every layout and float type is quantized and loads; what is wrong is named."""
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHAPE = ("--layers 4 --hidden 64 --vocab 512 --heads 2 --kv-heads 1 --lin-k-heads 1 --lin-v-heads 2 --lin-dim 16 --head-dim 32 "
         "--experts 2 --topk 1 --moe-inter 32 --tokenizer /nonexistent").split()
IDS = [[1 + i * j % 500 for i in range(40)] for j in range(1, 7)]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    made = {}

    def of(*options):
        if options not in made:
            made[options] = tmp_path_factory.mktemp("src") / "m"
            subprocess.run([sys.executable, ROOT / "tools/make_model.py", made[options], *SHAPE, *options], check=True, capture_output=True)
        return made[options]
    return of


@pytest.fixture
def ids(tmp_path):
    (tmp_path / "ids.json").write_text(json.dumps(IDS))
    return tmp_path / "ids.json"


def quantize(nibble, src, dst, *options, code=0):
    p = subprocess.run([nibble.path, "quantize", str(src), "-o", str(dst), *map(str, options)], capture_output=True, timeout=60,
                       stdin=subprocess.DEVNULL)
    err = p.stderr.decode()
    assert p.returncode == code, (p.returncode, err)
    errors = [s for s in err.splitlines() if s.startswith("nibble: E-")]
    assert len(errors) == (code != 0) and (code == 0) == os.path.exists(dst), err
    return errors[0] if code else err


def answer(nibble, model):
    return nibble.json("run", model, "--ids", "[1, 2, 3, 4]", "--max-tokens", 5, "--temperature", 0, "--json", "-q")["output_ids"]


def shards(folder):
    return {p.name: p.read_bytes() for p in pathlib.Path(folder).glob("*.safetensors")}


def read(path):
    raw = pathlib.Path(path).read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8:8 + n]), bytearray(raw[8 + n:])


def write(path, head, data, pad=0):
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8 + pad)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def convert(src, dst, to):
    """All weights in another float type, in one file without an index. BF16 numbers are exact in F32; as F16 they are rounded."""
    dst.mkdir()
    head, data = {}, bytearray()
    for path in sorted(src.glob("*.safetensors")):
        h, d = read(path)
        for name, t in h.items():
            if name == "__metadata__":
                continue
            b = bytes(d[t["data_offsets"][0]:t["data_offsets"][1]])
            if t["dtype"] == "BF16" and to != "BF16":
                b = (np.frombuffer(b, "<u2").astype("<u4") << 16).view("<f4").astype("<f4" if to == "F32" else "<f2").tobytes()
            head[name] = dict(dtype=to if t["dtype"] == "BF16" else t["dtype"], shape=t["shape"], data_offsets=[len(data), len(data) + len(b)])
            data += b
    write(dst / "model.safetensors", head, data)
    for f in ("config.json", "generation_config.json"):
        shutil.copy(src / f, dst)
    return dst


def change(model, name, values):
    """values: index -> BF16 code, or None to zero the tensor."""
    for path in model.glob("*.safetensors"):
        head, data = read(path)
        if name in head:
            b, e = head[name]["data_offsets"]
            a = np.frombuffer(data, "<u2")[b // 2:e // 2].copy()
            if values is None:
                a[:] = 0
            for at, code in (values or {}).items():
                a[at] = code
            data[b:e] = a.tobytes()
            return write(path, head, data)
    raise KeyError(name)


# ---- layouts


LAYOUTS = [(), ("--no-vision",), ("--dense",), ("--dense", "--no-vision"), ("--split-experts",), ("--tied",), ("--f32-vectors",)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "+".join(x) or "plain")
def test_layouts(nibble, make, ids, tmp_path, layout):
    src = make(*layout)
    quantize(nibble, src, tmp_path / "o", "--calib-ids", ids, "--shard-size", "200000")
    assert answer(nibble, tmp_path / "o")
    assert nibble.json("inspect", tmp_path / "o", "--json", "-q")


def test_split_experts_give_the_same_bytes(nibble, make, ids, tmp_path):
    """Also those of the draft head, which published checkpoints store per expert."""
    for name, layout in (("fused", ("--no-vision",)), ("split", ("--no-vision", "--split-experts"))):
        quantize(nibble, make(*layout), tmp_path / name, "--calib-ids", ids)
    assert shards(tmp_path / "fused") == shards(tmp_path / "split")
    assert any(".experts.1.gate_proj.weight_scale_2" in n and n.startswith("mtp.") for n in read(tmp_path / "split/model.safetensors")[0])


@pytest.mark.parametrize("to", ["F32", "F16"])
def test_other_float_types(nibble, make, ids, tmp_path, to):
    src = make("--no-vision")
    other = convert(src, tmp_path / "other", to)
    quantize(nibble, other, tmp_path / "o", "--no-calib", "--mtp", "nvfp4")
    quantize(nibble, src, tmp_path / "bf16", "--no-calib")
    assert answer(nibble, tmp_path / "o")
    (ah, a), (bh, b) = read(tmp_path / "o/model.safetensors"), read(tmp_path / "bf16/model.safetensors")
    packed = [n for n in bh if bh[n].get("dtype") in ("U8", "F8_E4M3")]
    same = sum(a[slice(*ah[n]["data_offsets"])] == b[slice(*bh[n]["data_offsets"])] for n in packed)
    assert len(packed) > 50 and (same == len(packed) if to == "F32" else same > 0)  # the same numbers, the same codes


def test_single_file(nibble, make, tmp_path):
    src = make("--no-vision")
    quantize(nibble, convert(src, tmp_path / "one", "BF16"), tmp_path / "a", "--no-calib")
    quantize(nibble, src, tmp_path / "b", "--no-calib")
    assert shards(tmp_path / "a") == shards(tmp_path / "b")


def test_hf_cache(nibble, make, tmp_path):
    """Snapshots are symbolic links into blobs/; the export holds files, never links."""
    src, cache = make("--no-vision"), tmp_path / "models--org--name"
    snapshot = cache / "snapshots/abc"
    snapshot.mkdir(parents=True), (cache / "blobs").mkdir(), (cache / "refs").mkdir()
    (cache / "refs/main").write_text("abc")
    for i, f in enumerate(sorted(src.iterdir())):
        shutil.copy(f, cache / f"blobs/{i}")
        (snapshot / f.name).symlink_to(f"../../blobs/{i}")
    quantize(nibble, src, tmp_path / "want", "--no-calib")
    for name, path in (("a", cache), ("b", snapshot)):
        quantize(nibble, path, tmp_path / name, "--no-calib")
        assert shards(tmp_path / name) == shards(tmp_path / "want")
        assert not [f for f in (tmp_path / name).iterdir() if f.is_symlink()]
    assert "E-QUANT-DST" in refused(nibble, cache, snapshot)


def refused(nibble, src, dst):
    return subprocess.run([nibble.path, "quantize", src, "-o", dst, "--no-calib"], capture_output=True).stderr.decode()


def test_unaligned_source_needs_no_copy(nibble, make, tmp_path):
    src = convert(make("--no-vision"), tmp_path / "odd", "BF16")
    head, data = read(src / "model.safetensors")
    write(src / "model.safetensors", head, data, pad=1)
    err = quantize(nibble, src, tmp_path / "a", "--no-calib")
    assert "W-LOAD-UNALIGNED" not in err
    quantize(nibble, make("--no-vision"), tmp_path / "b", "--no-calib")
    assert shards(tmp_path / "a") == shards(tmp_path / "b")


def test_no_draft_head(nibble, make, tmp_path):
    src = make("--no-mtp", "--no-vision")
    assert "E-QUANT-MTP" in quantize(nibble, src, tmp_path / "o", "--no-calib", code=3)
    quantize(nibble, src, tmp_path / "o", "--no-calib", "--mtp", "none")
    assert answer(nibble, tmp_path / "o")


def test_block_size(nibble, make, tmp_path):
    src = make("--no-vision", "--moe-inter", "24")
    line = quantize(nibble, src, tmp_path / "o", "--no-calib", code=3)
    assert "E-QUANT-SHAPE" in line and "down_proj" in line and "24" in line and not (tmp_path / "o.partial").exists()


def test_every_tensor_a_shard(nibble, make, tmp_path):
    quantize(nibble, make("--no-vision"), tmp_path / "o", "--no-calib", "--shard-size", 1)
    assert len(shards(tmp_path / "o")) > 150 and answer(nibble, tmp_path / "o")


# ---- values


def test_zero_tensor_and_block(nibble, make, tmp_path):
    shutil.copytree(make("--no-vision"), tmp_path / "m")
    change(tmp_path / "m", "model.layers.3.self_attn.o_proj.weight", None)
    change(tmp_path / "m", "model.layers.3.mlp.shared_expert.down_proj.weight", dict.fromkeys(range(16), 0))
    err = quantize(nibble, tmp_path / "m", tmp_path / "o", "--no-calib")
    assert err.count("W-QUANT-ZERO") == 1 and "o_proj" in err
    head, data = read(tmp_path / "o/model.safetensors")

    def get(name):
        return data[slice(*head[name]["data_offsets"])]
    zero = "model.layers.3.self_attn.o_proj."
    assert set(get(zero + "weight")) == {0} and set(get(zero + "weight_scale")) == {0x38}
    assert struct.unpack("<f", get(zero + "weight_scale_2")) == (1.0,)
    part = "model.layers.3.mlp.shared_expert.down_proj."
    assert not any(get(part + "weight")[:8]) and get(part + "weight_scale")[0] == 0x38 and any(get(part + "weight")[8:])
    assert answer(nibble, tmp_path / "o")


@pytest.mark.parametrize("code", [0x7FC0, 0x7F80, 0xFF80, 0xFFFF])
def test_nonfinite_weight(nibble, make, tmp_path, code):
    shutil.copytree(make("--no-vision"), tmp_path / "m")
    change(tmp_path / "m", "model.layers.1.mlp.experts.down_proj", {(1 * 64 + 5) * 32 + 9: code})  # expert 1, row 5, column 9
    line = quantize(nibble, tmp_path / "m", tmp_path / "o", "--no-calib", code=3)
    assert "E-QUANT-NONFINITE" in line and "model.layers.1.mlp.experts.down_proj" in line and "row 69, column 9" in line
    assert "experts.1.down_proj" in line


# ---- maxima


AMAX = "model.layers.0.linear_attn.in_proj_qkv.input_quantizer"


def damage(head, data, what):
    t = head[AMAX]
    at = t["data_offsets"][0]
    bad = {"zero": 0.0, "negative": -1.0, "nan": np.nan, "inf": np.inf, "tiny": 1e-45}
    if what in bad:
        data[at:at + 4] = struct.pack("<f", bad[what])
    elif what == "shape":
        end = len(data)
        data += struct.pack("<ff", 1, 2)
        del head[AMAX]
        head["extra.input_quantizer"] = dict(t)
        head[AMAX] = dict(dtype="F32", shape=[2], data_offsets=[end, end + 8])
    elif what == "type":
        t.update(dtype="I32")
    elif what == "missing":
        head["extra.input_quantizer"] = head.pop(AMAX)


@pytest.mark.parametrize("what, id", [("zero", "E-QUANT-AMAX"), ("negative", "E-AMAX-ENTRY"), ("nan", "E-AMAX-ENTRY"), ("inf", "E-AMAX-ENTRY"),
                                      ("tiny", "E-QUANT-AMAX"), ("shape", "E-AMAX-ENTRY"), ("type", "E-AMAX-ENTRY"),
                                      ("missing", "E-QUANT-AMAX")])
def test_bad_maxima(nibble, make, ids, tmp_path, what, id):
    src, saved = make("--no-vision"), tmp_path / "amax.safetensors"
    quantize(nibble, src, tmp_path / "good", "--calib-ids", ids, "--save-amax", saved)
    head, data = read(saved)
    for name in [n for n in head if "layers.0.linear_attn.in_proj_z" in n and what in ("zero", "tiny", "missing")]:
        if what == "missing":
            head["extra.z"] = head.pop(name)  # q, k, v and z share one scale: all of the group must lack it
        else:
            damage({AMAX: head[name]}, data, what)
    damage(head, data, what)
    write(tmp_path / "bad.safetensors", head, data)
    line = quantize(nibble, src, tmp_path / "o", "--amax", tmp_path / "bad.safetensors", code=3)
    assert id in line and "in_proj_qkv" in line
    assert not (tmp_path / "o.partial").exists()  # said before anything was made


def test_maxima_kept_beside_the_model(nibble, make, ids, tmp_path):
    shutil.copytree(make("--no-vision"), tmp_path / "m")
    quantize(nibble, tmp_path / "m", tmp_path / "a", "--calib-ids", ids, "--save-amax", tmp_path / "m/amax.safetensors")
    err = quantize(nibble, tmp_path / "m", tmp_path / "b", "--amax", tmp_path / "m/amax.safetensors")
    assert "N-CKPT-IGNORED" in err and shards(tmp_path / "a") == shards(tmp_path / "b")
    assert not (tmp_path / "b/amax.safetensors").exists()
    shutil.copy(tmp_path / "m/amax.safetensors", tmp_path / "m/model-00009-of-00009.safetensors")
    assert "E-CKPT-SHARD-EXTRA" in quantize(nibble, tmp_path / "m", tmp_path / "c", "--no-calib", code=3)


# ---- what goes along


def test_sidecars(nibble, make, tmp_path):
    src = tmp_path / "m"
    shutil.copytree(make("--no-vision"), src)
    err = quantize(nibble, src, tmp_path / "a", "--no-calib")
    assert "W-QUANT-CARD" in err and "W-QUANT-LICENCE" in err
    (src / "README.md").write_text("card"), (src / "LICENSE").write_text("free")
    (src / "notes").mkdir(), (src / ".hidden").write_text("x")
    os.mkfifo(src / "pipe"), (src / "gone").symlink_to("nowhere")
    with open(src / "video.bin2", "wb") as f:
        f.truncate(300 << 20)
    err = quantize(nibble, src, tmp_path / "b", "--no-calib")
    assert "W-QUANT-CARD" not in err and "W-QUANT-LICENCE" not in err and err.count("W-QUANT-SIDECAR") == 3
    got = {p.name for p in (tmp_path / "b").iterdir()}
    assert {"README.md", "LICENSE", "generation_config.json"} <= got and not got & {"notes", ".hidden", "pipe", "gone", "video.bin2"}
