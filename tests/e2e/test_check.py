"""nibble check: no finding on sound exports, and the right one, alone, on each kind of broken export.

Every case takes a good export, breaks one thing, and names the rules that must be reported: no others may be."""
import json
import os
import pathlib
import random
import re
import shutil
import struct

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
L = "model.language_model.layers."
GATE = L + "2.mlp.experts.3.gate_proj"
SIZES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}


class Model:
    """A folder whose tensors and configs can be changed; save() writes what was touched."""

    def __init__(self, path):
        self.path, self.files, self.touched = pathlib.Path(path), {}, set()
        for f in sorted(self.path.glob("*.safetensors")):
            raw = f.read_bytes()
            n = struct.unpack("<Q", raw[:8])[0]
            self.files[f.name] = {k: [v["dtype"], v["shape"], bytearray(raw[8 + n + v["data_offsets"][0]:8 + n + v["data_offsets"][1]])]
                                  for k, v in json.loads(raw[8:8 + n]).items() if k != "__metadata__"}

    def of(self, name):
        for f, tensors in self.files.items():
            if name in tensors:
                self.touched.add(f)
                return tensors
        raise KeyError(name)

    def data(self, name):
        return self.of(name)[name][2]

    def f32(self, name, v):
        self.data(name)[:] = struct.pack("<f", v)

    def value(self, name):
        return struct.unpack("<f", self.data(name))[0]

    def put(self, name, dtype, shape, data=None, beside=None):
        self.of(beside or next(iter(self.files[next(iter(self.files))])))[name] = [
            dtype, shape, bytearray(data if data is not None else int(np.prod(shape)) * SIZES[dtype])]

    def drop(self, pattern):
        for f, tensors in self.files.items():
            for k in [k for k in tensors if re.search(pattern, k)]:
                del tensors[k]
                self.touched.add(f)

    def json(self, name, change):
        p = self.path / name
        tree = json.loads(p.read_text())
        tree = change(tree) or tree
        p.write_text(json.dumps(tree))

    def config(self, change):
        self.json("config.json", change)

    def hf(self, change):
        self.json("hf_quant_config.json", change)

    def lists(self, change):
        """Change the exclude lists of both configs."""
        def one(section, key):
            section[key] = change(section[key])
        self.config(lambda c: one(c["quantization_config"], "ignore"))
        self.hf(lambda c: one(c["quantization"], "exclude_modules"))

    def save(self):
        for f in self.touched:
            head, data = {}, bytearray()
            for k, (dtype, shape, b) in self.files[f].items():
                head[k] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(b)]}
                data += b
            text = json.dumps(head).encode()
            text += b" " * (-len(text) % 8)
            (self.path / f).write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture(scope="module")
def exports(nibble, tiny, tmp_path_factory):
    """Sound exports by options; the model gets an image preprocessor, so that nothing at all is to be said about it."""
    made, base = {}, tmp_path_factory.mktemp("exports")
    source = base / "source"
    shutil.copytree(tiny, source)
    (source / "preprocessor_config.json").write_text("{}")

    def of(*options):
        if options not in made:
            made[options] = base / f"e{len(made)}"
            nibble("quantize", source, "-o", made[options], "--samples", 4, "-q", *options)
        return made[options]
    of.source = source
    return of


def check(nibble, path, *options):
    """The report and {rule: finding}; the exit status must fit the verdict."""
    p = nibble.full("check", path, "--json", "-q", *options, exit=None)
    r = json.loads(p.stdout)
    assert r["schema"] == "nibble.check/1"
    assert p.returncode == (1 if r["errors"] else 0), p.stderr
    assert (r["verdict"] == "broken") == any(f["severity"] == "error" and "TARGET" not in f["rule"] for f in r["findings"])
    assert len(r["findings"]) == r["errors"] + r["warnings"] + r["notes"]
    for f in r["findings"]:
        assert f["rule"].startswith("C-") and f["message"] and f["remedy"] and f["object"] and f["count"] >= 1
    return r, {f["rule"]: f for f in r["findings"]}


ALL = [(), ("--recipe", "nvfp4-mlp"), ("--recipe", "nvfp4-experts"), ("--recipe", "nvfp4-w4a16"), ("--recipe", "mixed"),
       ("--mtp", "bf16"), ("--mtp", "bf16", "--recipe", "mixed"), ("--mtp", "bf16", "--recipe", "nvfp4-w4a16"),
       ("--kv", "none"), ("--keep-qkv",), ("--algorithm", "mse"), ("--algorithm", "four-over-six", "--arith", "cpu"),
       ("--mtp-scales", "generous:8"), ("--mtp-scales", "borrow"), ("--shard-size", "2M"), ("--portable",)]


@pytest.mark.parametrize("options", ALL, ids=lambda o: " ".join(o) or "default")
def test_nothing_to_say_about_our_exports(nibble, exports, options):
    path = exports(*options)
    r, found = check(nibble, path, "--source", exports.source)
    assert r["findings"] == [] and r["loads"] and r["verdict"] == "sound"
    s = r["source"]
    assert s["matrices"] == s["as_quantize"] > 0 and s["bytes_different"] == 0
    assert s["copies"] == s["copies_equal"] > 0
    assert s["arithmetic"] == ("cpu" if "cpu" in options else "cuda")
    assert s["algorithm"] == (options[1] if options[:1] == ("--algorithm",) else "max")
    for f in s["families"]:
        assert 0.01 < f["mean_error"] <= f["worst_error"] < 0.12


@pytest.mark.parametrize("options,rules", [(("--kv", "fp8-cast"), {"C-KV-CAST"}), (("--mtp", "none"), {"C-MTP-ABSENT"}),
                                           (("--no-calib",), {"C-SCALE-ONE"})], ids=str)
def test_notes_on_what_was_asked_for(nibble, exports, options, rules):
    r, found = check(nibble, exports(*options), "--source", exports.source)
    assert set(found) == rules and r["verdict"] == "sound" and r["notes"] == len(rules)


def test_the_source_itself(nibble, exports):
    r, found = check(nibble, exports.source)
    assert r["verdict"] == "sound" and set(found) == {"C-CONFIG-DTYPE"}


def test_modelopts_own_export(nibble, oracle, exports, tmp_path):
    """ModelOpt's bytes and ModelOpt's configs: both arithmetics; the only remark is about its exclude list."""
    for arith in ("cuda", "cpu"):
        path = tmp_path / arith
        nibble("quantize", exports.source, "-o", path, "--arith", arith, "--mtp", "bf16", "-q", "--amax",
               oracle / f"nvfp4/modelopt-{arith}/amax.safetensors")
        for name in ("config.json", "hf_quant_config.json", "generation_config.json"):
            shutil.copy(oracle / f"nvfp4/modelopt-{arith}" / name, path / name)
        r, found = check(nibble, path, "--source", exports.source)
        assert set(found) == {"C-EXCL-NAMESPACE"} and r["verdict"] == "sound"
        assert r["source"]["arithmetic"] == arith and r["source"]["as_quantize"] == r["source"]["matrices"]
    shutil.copy(oracle / "nvfp4/mixed/cuda/config.json", tmp_path / "mixed.json")
    path = tmp_path / "mixed"
    shutil.copytree(exports("--recipe", "mixed", "--mtp", "bf16", "--kv", "fp8"), path)
    for name in ("config.json", "hf_quant_config.json"):
        shutil.copy(oracle / "nvfp4/mixed/cuda" / name, path / name)
    r, found = check(nibble, path)
    assert set(found) <= {"C-EXCL-FC"} and not r["errors"]


# ---- broken exports ----

def bf16_nan(m, name):
    m.data(name)[10:12] = b"\xc0\x7f"


def bytes_at(name, at, byte):
    def change(m):
        m.data(name)[at] = byte
    return change


def scalar(name, value):
    return lambda m: m.f32(name, value)


def drop(pattern):
    return lambda m: m.drop(pattern)


def unlink(*names):
    def change(m):
        for n in names:
            (m.path / n).unlink()
    return change


def write(name, text):
    return lambda m: (m.path / name).write_text(text)


def rename(old, new):
    def change(m):
        t = m.of(old)
        t[new] = t.pop(old)
    return change


def set_eos(value):
    def change(m):
        m.json("generation_config.json", lambda c: c.update(eos_token_id=value))
        m.config(lambda c: (c.pop("eos_token_id", None), c["text_config"].pop("eos_token_id", None)) and None)
    return change


def quantized_fc(m):
    h = m.of("mtp.fc.weight")["mtp.fc.weight"][1][0]
    m.put("mtp.fc.weight", "U8", [h, h], bytes([0x17]) * (h * h), beside="mtp.fc.weight")
    m.put("mtp.fc.weight_scale", "F8_E4M3", [h, h // 8], bytes([0x70]) * (h * h // 8), beside="mtp.fc.weight")
    m.put("mtp.fc.weight_scale_2", "F32", [], struct.pack("<f", 1e-4), beside="mtp.fc.weight")
    m.put("mtp.fc.input_scale", "F32", [], struct.pack("<f", 1e-2), beside="mtp.fc.weight")


def swap_shards(m):
    a, b = sorted(m.path.glob("model-*.safetensors"))[:2]
    x, y = a.read_bytes(), b.read_bytes()
    a.write_bytes(y), b.write_bytes(x)


def twice(m):
    first, second = sorted(m.files)[:2]
    name = next(iter(m.files[first]))
    m.files[second][name] = m.files[first][name]
    m.touched.add(second)


def both(change):
    def apply(m):
        m.config(lambda c: change(c["quantization_config"]))
        m.hf(lambda c: change(c["quantization"]))
    return apply


def zero_half(m):
    b = m.data(GATE + ".weight")
    b[len(b) // 2:] = bytes(len(b) - len(b) // 2)


def group_input(factor):
    def change(m):
        for p in "qkv":
            name = f"{L}3.self_attn.{p}_proj.input_scale"
            m.f32(name, m.value(name) * factor)
    return change


def many_blocks(byte):
    def change(m):
        b = m.data(GATE + ".weight_scale")
        b[:] = bytes([byte]) * len(b)
    return change


SHARDED = ("--shard-size", "2M")
INDEX = "model.safetensors.index.json"
HF = "hf_quant_config.json"
CASES = [
    # files
    ("no config", unlink("config.json"), {"C-FILE-CONFIG"}, "config.json", ()),
    ("bad config", write("config.json", "{"), {"C-FILE-CONFIG"}, "config.json", ()),
    ("bad generation config", write("generation_config.json", "[]"), {"C-FILE-SIDE", "C-STOP-TURN"}, "generation_config.json", ()),
    ("cut shard", lambda m: (m.path / "model-00002-of-00004.safetensors").write_bytes(
        (m.path / "model-00002-of-00004.safetensors").read_bytes()[:100000]), {"C-FILE-SHARD"}, "model-00002-of-00004", SHARDED),
    ("lost shard", unlink("model-00002-of-00004.safetensors"), {"C-FILE-MISSING"}, "model-00002-of-00004", SHARDED),
    ("extra shard", lambda m: shutil.copy(m.path / "model-00001-of-00004.safetensors", m.path / "model-00009-of-00009.safetensors"),
     {"C-FILE-EXTRA"}, "model-00009", SHARDED),
    ("no weights", unlink("model.safetensors"), {"C-FILE-NONE"}, "safetensors", ()),
    ("bad index", write(INDEX, "{}"), {"C-INDEX-BAD"}, INDEX, SHARDED),
    ("no index", unlink(INDEX), {"C-INDEX-ABSENT"}, INDEX, SHARDED),
    ("swapped shards", swap_shards, {"C-INDEX-PLACE"}, "embed_tokens", SHARDED),
    ("index names more", lambda m: m.json(INDEX, lambda x: x["weight_map"].update(
        {"model.more.weight": "model-00001-of-00004.safetensors"})), {"C-INDEX-LOST"}, "model.more.weight", SHARDED),
    ("index names less", lambda m: m.json(INDEX, lambda x: x["weight_map"].pop(GATE + ".weight") and None),
     {"C-INDEX-UNLISTED"}, "layers.2.mlp.experts.3.gate_proj.weight", SHARDED),
    ("index adds up wrongly", lambda m: m.json(INDEX, lambda x: x["metadata"].update(total_size=5)), {"C-INDEX-TOTAL"}, INDEX, SHARDED),
    ("tensor twice", twice, {"C-FILE-DUP"}, "", SHARDED),
    ("no tokenizer", unlink("tokenizer.json"), {"C-SIDE-TOKENIZER"}, "tokenizer.json", ()),
    ("no template", unlink("chat_template.jinja"), {"C-SIDE-TEMPLATE"}, "chat_template", ()),
    ("no generation config", unlink("generation_config.json"), {"C-SIDE-GENERATION", "C-STOP-TURN"}, "generation_config", ()),
    ("no preprocessor", unlink("preprocessor_config.json"), {"C-SIDE-VISION"}, "preprocessor_config", ()),
    # config and text
    ("other activation", lambda m: m.config(lambda c: c["text_config"].update(hidden_act="gelu")), {"C-CONFIG-MODEL"}, "config.json", ()),
    ("no dtype", lambda m: m.config(lambda c: [d.pop(k, None) for d in (c, c["text_config"]) for k in ("dtype", "torch_dtype")] and None),
     {"C-CONFIG-DTYPE"}, "config.json", ()),
    ("no stop", set_eos([]), {"C-STOP-NONE"}, "eos_token_id", ()),
    ("stop beyond the head", set_eos([1546, 99999]), {"C-STOP-RANGE"}, "generation_config", ()),
    ("stop is no token", set_eos([1546, 1663]), {"C-STOP-RANGE"}, "1663", ()),
    ("another stop", set_eos([5]), {"C-STOP-TURN"}, "generation_config", ()),
    ("bad tokenizer", write("tokenizer.json", "{}"), {"C-TEXT-TOKENIZER"}, "tokenizer.json", ()),
    ("bad template", write("chat_template.jinja", "{% if %}"), {"C-TEXT-TEMPLATE"}, "template", ()),
    ("raising template", write("chat_template.jinja", "{{ raise_exception('no') }}"), {"C-TEXT-TEMPLATE"}, "template", ()),
    ("deaf template", write("chat_template.jinja", "Hello."), {"C-TEXT-TEMPLATE"}, "template", ()),
    # tensors
    ("no router", drop(r"layers\.5\.mlp\.gate\.weight"), {"C-TENSOR-MISSING"}, "layers.5.mlp.gate.weight", ()),
    ("renamed norm", rename("model.language_model.norm.weight", "model.language_model.final_layernorm.weight"),
     {"C-TENSOR-MISSING", "C-TENSOR-UNUSED"}, "norm.weight", ()),
    ("one layer less", lambda m: m.config(lambda c: (c["text_config"].update(num_hidden_layers=7), c["text_config"]["layer_types"].pop()) and None),
     {"C-TENSOR-UNUSED"}, "layers.7", ()),
    ("other width", lambda m: m.config(lambda c: c["text_config"].update(moe_intermediate_size=32)), {"C-TENSOR-SHAPE"}, "mlp.experts", ()),
    ("unpacked codes", lambda m: m.put(L + "5.mlp.gate.weight", "U8", [16, 192], bytes([1]) * 3072, beside=L + "5.mlp.gate.weight"),
     {"C-TENSOR-DTYPE"}, "layers.5.mlp.gate", ()),
    ("no draft head", drop(r"^mtp\."), {"C-MTP-ABSENT"}, "mtp", ()),
    ("undeclared draft head", lambda m: m.config(lambda c: c["text_config"].pop("mtp_num_hidden_layers") and None), {"C-MTP-UNDECLARED"},
     "config.json", ()),
    ("part of a draft head", drop(r"^mtp\.norm"), {"C-TENSOR-MISSING"}, "mtp.norm.weight", ()),
    ("quantized fc", quantized_fc, {"C-MTP-FC", "C-EXCL-QUANTIZED"}, "mtp.fc", ()),
    # declarations
    ("undeclared", lambda m: ((m.path / HF).unlink(), m.config(lambda c: c.pop("quantization_config") and None)),
     {"C-QUANT-UNDECLARED", "C-KV-UNDECLARED"}, "config.json", ()),
    ("no hf_quant_config", unlink(HF), {"C-QUANT-ONE"}, HF, ()),
    ("no section in config", lambda m: m.config(lambda c: c.pop("quantization_config") and None), {"C-QUANT-ONE"}, "config.json", ()),
    ("other algorithm", lambda m: m.hf(lambda c: c["quantization"].update(quant_algo="FP8")), {"C-QUANT-AGREE"}, "quant_algo", ()),
    ("other kv", lambda m: m.hf(lambda c: c["quantization"].update(kv_cache_quant_algo=None)), {"C-QUANT-AGREE"}, "kv_cache", ()),
    ("one list longer", lambda m: m.hf(lambda c: c["quantization"]["exclude_modules"].append("nothing")), {"C-QUANT-AGREE"}, "exclude", ()),
    ("unknown algorithm", both(lambda q: q.update(quant_algo="NVFP5")), {"C-QUANT-ALGO"}, "config", ()),
    ("group of 32", lambda m: m.hf(lambda c: c["quantization"].update(group_size=32)), {"C-QUANT-GROUP"}, "hf_quant", ()),
    ("mixed lists less", both(lambda q: q["quantized_layers"].pop(L + "0.mlp.experts") and None), {"C-QUANT-LAYERS"}, "layers.0.mlp.experts",
     ("--recipe", "mixed")),
    ("excludes the experts", lambda m: m.lists(lambda x: x + ["*layers.4.mlp.experts*"]), {"C-EXCL-QUANTIZED"}, "layers.4.mlp.experts", ()),
    ("excludes no router", lambda m: m.lists(lambda x: [s for s in x if "layers.4.mlp.gate" not in s]), {"C-EXCL-PLAIN"}, "layers.4.mlp.gate", ()),
    ("excludes no vision", lambda m: m.lists(lambda x: [s for s in x if "visual" not in s]), {"C-EXCL-PLAIN"}, "visual", ()),
    ("excludes no fc", lambda m: m.lists(lambda x: [s for s in x if "mtp.fc" not in s]), {"C-EXCL-FC"}, "mtp.fc", ()),
    ("one namespace", lambda m: m.lists(lambda x: [s for s in x if not s.startswith("language_model.")]), {"C-EXCL-NAMESPACE"}, "mlp.gate", ()),
    # scales
    ("no block scales", drop(re.escape(GATE) + r"\.weight_scale$"), {"C-SCALE-MISSING"}, "layers.2.mlp.experts.3.gate_proj", ()),
    ("no tensor scale", drop(re.escape(GATE) + r"\.weight_scale_2$"), {"C-SCALE-MISSING"}, "layers.2.mlp.experts.3.gate_proj", ()),
    ("no input scale", drop(re.escape(GATE) + r"\.input_scale$"), {"C-SCALE-MISSING", "C-INPUT-MIXED"}, "layers.2.mlp.experts.3.gate_proj", ()),
    ("orphan scale", lambda m: m.put(L + "2.mlp.gate.weight_scale_2", "F32", []), {"C-TENSOR-UNUSED"}, "layers.2.mlp.gate.weight_scale_2", ()),
    ("narrow tensor scale", lambda m: m.put(GATE + ".weight_scale_2", "BF16", [], b"\0\x39", beside=GATE + ".weight"), {"C-SCALE-DTYPE"},
     "weight_scale_2", ()),
    ("NaN block scale", bytes_at(GATE + ".weight_scale", 7, 0x7F), {"C-SCALE-NAN"}, "gate_proj.weight_scale", ()),
    ("zero block scale", bytes_at(GATE + ".weight_scale", 7, 0), {"C-SCALE-ZERO"}, "gate_proj.weight_scale", ()),
    ("negative block scale", bytes_at(GATE + ".weight_scale", 7, 0xB8), {"C-SCALE-NEGATIVE"}, "gate_proj.weight_scale", ()),
    ("NaN tensor scale", scalar(L + "1.mlp.experts.2.down_proj.weight_scale_2", float("nan")), {"C-SCALE-NAN"}, "layers.1.mlp.experts.2.down", ()),
    ("infinite input scale", scalar(L + "1.mlp.shared_expert.down_proj.input_scale", float("inf")), {"C-SCALE-NAN"}, "shared_expert.down", ()),
    ("zero tensor scale", scalar(L + "1.mlp.experts.2.down_proj.weight_scale_2", 0.0), {"C-SCALE-ZERO"}, "experts.2.down_proj", ()),
    ("negative input scale", scalar(L + "1.mlp.shared_expert.down_proj.input_scale", -0.1), {"C-SCALE-NEGATIVE"}, "shared_expert.down", ()),
    ("placeholder", scalar(L + "1.mlp.experts.2.down_proj.weight_scale_2", 1.0), {"C-SCALE-ONE"}, "layers.1.mlp.experts.2.down_proj", ()),
    ("placeholder input", scalar(L + "1.mlp.shared_expert.down_proj.input_scale", 1.0), {"C-SCALE-ONE"}, "shared_expert.down_proj", ()),
    ("far from its kind", lambda m: m.f32(L + "1.mlp.experts.2.down_proj.weight_scale_2", 0.3), {"C-SCALE-OUTLIER"}, "layers.1.mlp.experts.2.down", ()),
    ("group of two scales", lambda m: m.f32(L + "3.self_attn.k_proj.weight_scale_2", 1.5 * m.value(L + "3.self_attn.k_proj.weight_scale_2")),
     {"C-SCALE-GROUP"}, "layers.3.self_attn.k_proj", ()),
    ("group of two inputs", lambda m: m.f32(L + "0.linear_attn.in_proj_z.input_scale", 1.5 * m.value(L + "0.linear_attn.in_proj_z.input_scale")),
     {"C-SCALE-GROUP"}, "layers.0.linear_attn.in_proj_z", ()),
    ("saturated", many_blocks(0x7E), {"C-SCALE-SATURATED"}, "experts.3.gate_proj", ()),
    ("coarse", many_blocks(0x01), {"C-SCALE-COARSE"}, "experts.3.gate_proj", ()),
    ("inputs clip", group_input(1 / 300), {"C-INPUT-CLIPS"}, "layers.3.self_attn.{q,k,v}".split("{")[0], ()),
    ("inputs are lost", group_input(1e6), {"C-INPUT-LOOSE"}, "layers.3.self_attn", ()),
    # KV
    ("other kv format", lambda m: m.hf(lambda c: c["quantization"].update(kv_cache_quant_algo="NVFP4")), {"C-KV-FORMAT"}, "hf_quant", ()),
    ("a layer's kv scales", drop(r"layers\.3\.self_attn\.._proj\.._scale$"), {"C-KV-MISSING"}, "layers.3.self_attn", ()),
    ("half a pair", drop(r"layers\.3\.self_attn\.v_proj\.v_scale$"), {"C-KV-MISSING"}, "layers.3.self_attn", ()),
    ("undeclared kv", lambda m: (m.hf(lambda c: c["quantization"].update(kv_cache_quant_algo=None)),
                                 m.config(lambda c: c["quantization_config"].pop("kv_cache_scheme") and None)), {"C-KV-UNDECLARED"}, "hf_quant", ()),
    ("kv placeholder", scalar(L + "3.self_attn.k_proj.k_scale", 1.0), {"C-KV-RANGE"}, "layers.3.self_attn.k_proj.k_scale", ()),
    ("kv zero", scalar(L + "3.self_attn.v_proj.v_scale", 0.0), {"C-SCALE-ZERO"}, "layers.3.self_attn.v_proj.v_scale", ()),
    # values
    ("NaN in the router", lambda m: bf16_nan(m, L + "5.mlp.gate.weight"), {"C-VALUE-NONFINITE"}, "layers.5.mlp.gate.weight", ()),
    ("zeroed router", lambda m: m.data(L + "5.mlp.gate.weight").__setitem__(slice(None), bytes(16 * 192 * 2)), {"C-VALUE-ZERO"}, "layers.5.mlp.gate", ()),
    ("zeroed codes", lambda m: m.data(GATE + ".weight").__setitem__(slice(None), bytes(len(m.data(GATE + ".weight")))), {"C-VALUE-ZERO"},
     "experts.3.gate_proj", ()),
    ("hole in the codes", zero_half, {"C-VALUE-HOLE"}, "experts.3.gate_proj", ()),
]


@pytest.mark.parametrize("name,change,rules,object_part,options", CASES, ids=[c[0] for c in CASES])
def test_broken(nibble, exports, tmp_path, name, change, rules, object_part, options):
    path = tmp_path / "m"
    shutil.copytree(exports(*options), path)
    m = Model(path)
    change(m)
    m.save()
    r, found = check(nibble, path)
    assert set(found) == rules, r["findings"]
    assert any(object_part in f["object"] for f in r["findings"]), r["findings"]
    # What is an error here is refused by the loader, or would run wrongly in it or elsewhere; what nibble refuses is an error.
    assert r["loads"] or r["errors"], r
    assert "verdict" in nibble.full("check", path, "-q", exit=1 if r["errors"] else 0).stdout.decode()


def test_nothing_is_quantized_though_declared(nibble, exports, tmp_path):
    shutil.copytree(exports.source, tmp_path / "m")
    e = exports()
    shutil.copy(e / "config.json", tmp_path / "m")
    shutil.copy(e / HF, tmp_path / "m")
    assert set(check(nibble, tmp_path / "m")[1]) == {"C-QUANT-NOTHING", "C-KV-CAST"}


def test_tokenizer_beyond_the_embedding(nibble, exports, tmp_path):
    shutil.copytree(exports.source, tmp_path / "m")
    m = Model(tmp_path / "m")
    m.config(lambda c: c["text_config"].update(vocab_size=1548))
    found = check(nibble, tmp_path / "m")[1]
    assert set(found) == {"C-TEXT-VOCAB", "C-TENSOR-SHAPE", "C-CONFIG-DTYPE"}


def test_one_finding_per_cause(nibble, exports, tmp_path):
    """A whole layer's experts with NaN scales: one finding, a pattern, a count."""
    path = tmp_path / "m"
    shutil.copytree(exports(), path)
    m = Model(path)
    for layer in (2, 5):
        for e in range(16):
            m.data(f"{L}{layer}.mlp.experts.{e}.up_proj.weight_scale")[0] = 0xFF
    m.save()
    r, found = check(nibble, path)
    assert set(found) == {"C-SCALE-NAN"} and found["C-SCALE-NAN"]["count"] == 32
    assert found["C-SCALE-NAN"]["object"] == L + "{2,5}.mlp.experts.{0-15}.up_proj.weight_scale"


# ---- against the source ----

def flip(name, at, mask=1):
    def change(m):
        m.data(name)[at] ^= mask
    return change


def swap_experts(m):
    for tail in ("weight", "weight_scale"):
        a, b = f"{L}2.mlp.experts.3.gate_proj.{tail}", f"{L}2.mlp.experts.4.gate_proj.{tail}"
        x, y = bytes(m.data(a)), bytes(m.data(b))
        m.data(a)[:], m.data(b)[:] = y, x


SOURCE_CASES = [
    ("one code", flip(GATE + ".weight", 33), {"C-SRC-BYTES"}, "byte 33 of its weight"),
    ("one block scale", flip(GATE + ".weight_scale", 12), {"C-SRC-BYTES"}, "byte 12 of its weight_scale"),
    ("experts swapped", swap_experts, {"C-SRC-BYTES", "C-SRC-ERROR"}, "relative error"),
    ("router changed", flip(L + "5.mlp.gate.weight", 100), {"C-SRC-COPY"}, "byte 100"),
    ("scale of no rule", scalar(L + "1.mlp.experts.2.down_proj.weight_scale_2", 2e-4), {"C-SRC-SCALE", "C-SRC-ERROR"}, "no rule"),
    ("no vision", drop("visual"), {"C-SRC-MISSING"}, "vision tower"),
    ("other theta", lambda m: m.config(lambda c: c["text_config"]["rope_parameters"].update(rope_theta=1e6)), {"C-SRC-CONFIG"}, "1000000 here"),
]


@pytest.mark.parametrize("name,change,rules,says", SOURCE_CASES, ids=[c[0] for c in SOURCE_CASES])
def test_against_the_source(nibble, exports, tmp_path, name, change, rules, says):
    path = tmp_path / "m"
    shutil.copytree(exports(), path)
    m = Model(path)
    change(m)
    m.save()
    r, found = check(nibble, path, "--source", exports.source)
    assert set(found) == rules, r["findings"]
    assert any(says in f["message"] for f in found.values()), found


def test_another_source(nibble, exports, tmp_path):
    """The model with other weights in one layer, and a source that is itself quantized."""
    path = tmp_path / "m"
    shutil.copytree(exports.source, path)
    m = Model(path)
    b = m.data(L + "0.linear_attn.out_proj.weight")
    b[:] = b[::-1][1:] + b[:1]
    m.save()
    r, found = check(nibble, exports(), "--source", path)
    assert "C-SRC-ERROR" in found and "out_proj" in found["C-SRC-ERROR"]["object"]
    assert "E-QUANT-ALREADY" in nibble.full("check", exports(), "--source", exports(), exit=3).stderr.decode()


def test_a_source_of_another_shape(nibble, exports, tmp_path):
    shutil.copytree(exports.source, tmp_path / "m")
    m = Model(tmp_path / "m")
    name = L + "0.mlp.shared_expert.up_proj.weight"
    m.put(name, "BF16", [32, 192], beside=name)
    m.save()
    found = check(nibble, exports(), "--source", tmp_path / "m")[1]
    assert found["C-SRC-SHAPE"]["object"] == name[:-7]


def test_what_only_the_loader_knows(nibble, exports, tmp_path):
    """Its warnings become notes; its refusal is an error even where no rule explains it."""
    shutil.copytree(exports.source, tmp_path / "m")
    m = Model(tmp_path / "m")
    m.config(lambda c: c.update(dtype="float16"))
    assert set(check(nibble, tmp_path / "m")[1]) == {"C-LOAD-WARNING"}
    name = L + "0.mlp.experts.down_proj"
    shape = m.of(name)[name][1]
    m.put(name, "F32", shape, b"\0\0\x80\x3f" * int(np.prod(shape)), beside=name)
    m.save()
    r, found = check(nibble, tmp_path / "m")
    assert set(found) == {"C-LOAD-REFUSED", "C-INDEX-TOTAL"} and not r["loads"] and r["refused"] == "E-LOAD-DTYPE"


def test_threads_and_isa_change_nothing(nibble, exports):
    def report(*options):
        r = check(nibble, exports(), "--source", exports.source, *options)[0]
        r.pop("seconds")
        return r
    assert report("-t", 1, "--isa", "ref") == report("-t", 4)


def test_errors(nibble, exports, tmp_path):
    assert "E-CKPT-DIR" in nibble.full("check", tmp_path / "none", exit=3).stderr.decode()
    assert "E-CKPT-DIR" in nibble.full("check", exports(), "--source", tmp_path / "none", exit=3).stderr.decode()
    (tmp_path / "empty").mkdir()
    assert set(check(nibble, tmp_path / "empty")[1]) >= {"C-FILE-CONFIG", "C-FILE-NONE"}


# ---- faults ----

def test_any_byte_is_found(nibble, exports, tmp_path):
    """Random bytes of random tensors changed, one after the other: each is named."""
    seed = int(os.environ.get("SEED", 20261))
    print("SEED", seed)
    rng = random.Random(seed)
    for _ in range(12):
        path = tmp_path / "m"
        shutil.copytree(exports(), path)
        m = Model(path)
        names = sorted(k for f in m.files.values() for k in f)
        name = rng.choice(names)
        at = rng.randrange(len(m.data(name)))
        m.data(name)[at] ^= 1 << rng.randrange(8)
        m.save()
        found = check(nibble, path, "--source", exports.source)[1]
        whole = [f for f in found.values() if any(name.startswith(o.split("{")[0]) or o.startswith(name) or o in name
                                                  for o in f["object"].split(", "))]
        # an input_scale, k_scale or v_scale has no counterpart in the source: only its group or its kind can tell
        if not name.endswith(("input_scale", "k_scale", "v_scale")):
            assert whole, (name, at, found)
        shutil.rmtree(path)


# ---- repairs ----

def files(path):
    return {p.name: p.read_bytes() for p in pathlib.Path(path).iterdir()}


def weights(path):
    return {k: (v[0], v[1], bytes(v[2])) for f in Model(path).files.values() for k, v in f.items()}


def fix(nibble, path, out, *options, exit=0):
    return nibble("check", path, "--fix", out, "-q", *options, exit=exit).decode()


@pytest.mark.parametrize("options", [(), ("--recipe", "mixed"), ("--mtp", "bf16"), ("--portable",), SHARDED], ids=str)
def test_nothing_to_repair(nibble, exports, tmp_path, options):
    assert "nothing to repair" in fix(nibble, exports(*options), tmp_path / "o", "--source", exports.source)
    assert files(tmp_path / "o") == files(exports(*options))


FIXES = ["no index", "bad index", "index adds up wrongly", "index names less", "extra shard", "no dtype", "excludes the experts",
         "excludes no router", "excludes no vision", "excludes no fc", "one namespace", "no tokenizer", "no template", "no generation config",
         "no preprocessor", "one list longer", "swapped shards"]


@pytest.mark.parametrize("name", FIXES)
def test_repairs(nibble, exports, tmp_path, name):
    _, change, _, _, options = next(c for c in CASES if c[0] == name)
    path, out = tmp_path / "m", tmp_path / "o"
    shutil.copytree(exports(*options), path)
    m = Model(path)
    change(m)
    m.save()
    before = files(path)
    if name == "one list longer":
        fix(nibble, path, out, "--source", exports.source)
        assert set(check(nibble, out)[1]) == {"C-QUANT-AGREE"}  # a harmless entry is not ours to remove
        return
    says = fix(nibble, path, out, "--source", exports.source)
    assert "nothing to repair" not in says and "verdict      sound:" in says
    r, found = check(nibble, out, "--source", exports.source)
    assert found == {} and r["loads"]
    assert weights(out) == weights(exports(*options)) and files(path) == before
    assert not (tmp_path / "o.partial").exists()
    nibble("run", out, "--ids", "[1, 2, 3]", "--max-tokens", 3, "-q")


def test_what_cannot_be_repaired_stays_broken(nibble, exports, tmp_path):
    path = tmp_path / "m"
    shutil.copytree(exports(), path)
    m = Model(path)
    bf16_nan(m, L + "5.mlp.gate.weight")
    m.save()
    assert "C-VALUE-NONFINITE" in fix(nibble, path, tmp_path / "o", exit=1)
    fix(nibble, path, tmp_path / "o", exit=3)  # it exists
    fix(nibble, path, tmp_path / "no/such/o", exit=3)


# ---- other engines ----

def predict(nibble, path, *targets):
    r, found = check(nibble, path, *[x for t in targets for x in ("--target", t)])
    for f in found.values():
        assert "TARGET" not in f["rule"] or "https://" in f["message"]
    return {t["name"] + "@" + t["version"]: t["outcome"] for t in r["targets"]}, r


EVERYONE = ["sglang@0.5.10", "sglang@0.5.15.post1", "sglang@0.5.16", "sglang@0.5.17", "sglang", "vllm@0.15.1", "vllm@0.20.0", "vllm@0.27.1", "vllm",
            "llama.cpp@b8400", "llama.cpp"]


def test_portable_is_taken_by_every_engine_with_nvfp4(nibble, exports):
    out, r = predict(nibble, exports("--portable"), *EVERYONE)
    assert set(out.values()) == {"works"} and len(out) == len(EVERYONE) and r["findings"] == []
    config = json.loads((exports("--portable") / "config.json").read_text())
    assert "kv_cache_scheme" not in config["quantization_config"] and "mtp*" in config["quantization_config"]["ignore"]
    names = weights(exports("--portable"))
    assert all(".mlp.experts." in n and not n.startswith("mtp.") for n, t in names.items() if t[0] == "U8")


@pytest.mark.parametrize("options,target,outcome", [
    ((), "sglang@0.5.15.post1", "does not load"),
    ((), "sglang@0.5.16", "does not load"),
    ((), "sglang@0.5.17", "works without drafts"),
    ((), "sglang", "works without drafts"),
    (("--mtp", "bf16"), "sglang@0.5.17", "works"),
    (("--mtp", "bf16"), "vllm", "works, degraded"),
    (("--mtp", "bf16", "--kv", "none"), "vllm", "works"),
    (("--recipe", "nvfp4-experts", "--mtp", "bf16"), "sglang@0.5.14", "works, degraded"),
    (("--recipe", "mixed"), "vllm@0.15.1", "does not load"),
    (("--recipe", "mixed"), "sglang@0.5.14", "does not load"),
    (("--recipe", "mixed"), "llama.cpp", "works, degraded"),
    (("--recipe", "nvfp4-w4a16"), "sglang", "does not load"),
    ((), "llama.cpp@b8000", "does not load"),
    ((), "llama.cpp@b9000", "works"),
    ((), "transformers", "does not load"),
], ids=str)
def test_predictions(nibble, exports, options, target, outcome):
    assert list(predict(nibble, exports(*options), target)[0].values()) == [outcome]


def test_predictions_for_broken_exports(nibble, exports, tmp_path):
    def broken(name, *options):
        path = tmp_path / name
        shutil.copytree(exports(*options), path)
        return Model(path)
    m = broken("up", "--mtp", "bf16", "--kv", "none")
    m.f32(GATE + ".weight_scale_2", 1.5 * m.value(GATE + ".weight_scale_2"))
    m.save()
    out, r = predict(nibble, m.path, "sglang", "vllm")
    assert out == {"sglang@main": "wrong output", "vllm@main": "wrong output"}
    assert [f["object"] for f in r["findings"] if f["rule"] == "C-TARGET-WRONG"] == list(out)
    m = broken("dtype", "--mtp", "bf16", "--kv", "none")
    m.config(lambda c: [d.pop(k, None) for d in (c, c["text_config"]) for k in ("dtype", "torch_dtype")] and None)
    assert predict(nibble, m.path, "sglang", "vllm")[0] == {"sglang@main": "does not load", "vllm@main": "works"}
    m = broken("fc", "--kv", "none")
    m.lists(lambda x: [s for s in x if "mtp.fc" not in s])
    assert predict(nibble, m.path, "vllm@0.18", "vllm@0.19")[0] == {"vllm@0.18": "works without drafts", "vllm@0.19": "works"}
    m = broken("head", "--mtp", "bf16", "--kv", "none")
    m.lists(lambda x: [s for s in x if not s.startswith("mtp")] + ["mtp.fc*"])
    assert predict(nibble, m.path, "vllm")[0] == {"vllm@main": "works without drafts"}
    m = broken("tower", "--mtp", "bf16", "--kv", "none")
    m.lists(lambda x: [s for s in x if not s.startswith("visual")])
    assert predict(nibble, m.path, "sglang", "vllm")[0] == {"sglang@main": "does not load", "vllm@main": "works"}


def test_targets_named_wrongly(nibble, exports):
    for t in ("sglan", "sglang@", "sglang@new", "vllm@0.1@2x" + "x" * 40):
        assert "E-USAGE" in nibble.full("check", exports(), "--target", t, exit=2).stderr.decode()
    assert nibble("check", "--target", "list").count(b"https://") > 15
    nibble("check", "--target", "all", exports.source, "-q")  # a BF16 model is everybody's
    assert "C-TARGET-FAILS" in nibble("check", exports(), "--target", "all", "-q", exit=1).decode()
    assert "C-TARGET-DEGRADED" in nibble("check", exports(), "--target", "vllm", "-q").decode()
    assert "C-TARGET-DRAFTS" in nibble("check", exports(), "--target", "sglang", "-q").decode()


def test_every_rule_is_documented_and_tried(root):
    """docs/CHECKS.md has each rule once (lint compares with the code); each is the outcome of some case above or below."""
    rules = re.findall(r"^\| (C-[A-Z-]+) \|", (root / "docs/CHECKS.md").read_text(), re.M)
    assert len(rules) == len(set(rules)) > 50
    text = pathlib.Path(__file__).read_text()
    assert [r for r in rules if f'"{r}"' not in text] == []
