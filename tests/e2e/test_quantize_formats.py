"""Exports read back: every recipe is loaded, run and compared with its own dequantized weights and with ModelOpt's passes; the
published checkpoint's shape; configs against ModelOpt's, field by field; scales that lie, named when they are loaded."""
import json
import pathlib
import shutil
import struct

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NVFP4 = ROOT / "tests/oracle/qwen36-tiny/nvfp4"
P = "model.language_model."
E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E4M3 = np.array([(1 - 2 * (c >> 7)) * (np.nan if c & 127 == 127 else c % 8 / 512 if c & 120 == 0 else (1 + c % 8 / 8) * 2.0 ** ((c >> 3 & 15) - 7))
                 for c in range(256)], np.float32)


def header(path):
    raw = pathlib.Path(path).read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    head = json.loads(raw[8:8 + n])
    head.pop("__metadata__", None)
    return {k: (t["dtype"], t["shape"], raw[8 + n + t["data_offsets"][0]:8 + n + t["data_offsets"][1]]) for k, t in head.items()}


def model_tensors(folder):
    return {k: t for p in sorted(pathlib.Path(folder).glob("*.safetensors")) for k, t in header(p).items()}


def write(path, tensors):
    head, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        head[name] = dict(dtype=dtype, shape=shape, data_offsets=[at, at + len(data)])
        at += len(data)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))


@pytest.fixture(scope="module")
def export(nibble, tiny, tmp_path_factory):
    """The tiny model quantized with ModelOpt's own maxima; each set of options once."""
    made = {}

    def of(*options, amax=NVFP4 / "modelopt-cuda/amax.safetensors"):
        if options not in made:
            made[options] = tmp_path_factory.mktemp("export") / "m"
            nibble("quantize", tiny, "-o", made[options], "--amax", amax, "-q", *options)
        return made[options]
    return of


# ---- reading back


def dequantized(src, dst):
    """The export with every quantized Linear as float32 values and no quantization declared."""
    dst.mkdir()
    tensors, out = model_tensors(src), {}
    for name, (dtype, shape, data) in tensors.items():
        stem = name.removesuffix("weight")
        if name.endswith(("_scale", "_scale_2")):
            continue
        if dtype == "U8":
            codes = np.frombuffer(data, "u1").reshape(shape)
            s2 = np.frombuffer(tensors[stem + "weight_scale_2"][2], "<f4")[0]
            den = E4M3[np.frombuffer(tensors[stem + "weight_scale"][2], "u1").reshape(shape[0], -1)] * s2
            w = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(shape[0], -1) * np.repeat(den, 16, 1)
            out[name] = ("F32", list(w.shape), w.astype("<f4").tobytes())
        elif dtype == "F8_E4M3":
            w = E4M3[np.frombuffer(data, "u1")] * np.frombuffer(tensors[stem + "weight_scale"][2], "<f4")[0]
            out[name] = ("F32", shape, w.astype("<f4").tobytes())
        else:
            out[name] = (dtype, shape, data)
    # experts must all have one type: kept ones of the draft head stay as they are, fused
    write(dst / "model.safetensors", out)
    config = json.loads((src / "config.json").read_text())
    config.pop("quantization_config", None)
    (dst / "config.json").write_text(json.dumps(config))
    shutil.copy(src / "generation_config.json", dst)
    return dst


@pytest.fixture(scope="module")
def prompts(tensors, tmp_path_factory):
    path = tmp_path_factory.mktemp("ids") / "ids.json"
    path.write_text(json.dumps(tensors(NVFP4 / "fakequant.safetensors")["ids"].tolist()))
    return path


def logits(nibble, tensors, model, prompts, out, *options):
    nibble("logits", model, "--ids", prompts, "-o", out, "--last", 16, "-q", *options)
    t = tensors(out)
    return [t[f"{i}.logits"] for i in range(8)]


def rms(a, b):
    a, b = a.astype(float), b.astype(float)
    return np.sqrt(((a - b) ** 2).sum() / (b ** 2).sum())


def kl(got, want):
    def log_softmax(x):
        x = x.astype(float) - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))
    p, q = log_softmax(want), log_softmax(got)
    return (np.exp(p) * (p - q)).sum(-1)


RECIPES = [("--recipe", "nvfp4-experts", "--mtp", "bf16"), ("--recipe", "nvfp4-mlp", "--mtp", "bf16"), ("--recipe", "nvfp4-w4a16", "--mtp", "bf16"),
           ("--recipe", "nvfp4", "--mtp", "bf16"), ("--recipe", "nvfp4", "--mtp", "nvfp4", "--mtp-scales", "generous"),
           ("--recipe", "nvfp4-w4a16", "--mtp", "nvfp4", "--kv", "none"), ("--recipe", "mixed", "--kv", "fp8-cast", "--mtp", "bf16"),
           ("--recipe", "nvfp4", "--mtp", "bf16", "--keep-qkv"), ("--recipe", "nvfp4", "--mtp", "bf16", "--algorithm", "mse"),
           ("--recipe", "nvfp4", "--mtp", "bf16", "--algorithm", "four-over-six")]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: " ".join(r).replace("--", ""))
def test_read_back(nibble, tiny, tensors, export, prompts, tmp_path, recipe):
    """With float activations and cache an export is its dequantized weights: the sums differ in order only. With its own
    activations it stays close, answers, and speculates."""
    model = export(*recipe)
    plain = dequantized(model, tmp_path / "plain")
    want = logits(nibble, tensors, plain, prompts, tmp_path / "a", "--kv", "f32")
    got = logits(nibble, tensors, model, prompts, tmp_path / "b", "--act", "bf16", "--kv", "f32")
    worst = max(map(rms, got, want))
    own = logits(nibble, tensors, model, prompts, tmp_path / "c")
    mean = np.mean([kl(a, b).mean() for a, b in zip(own, want)])
    print(f"{' '.join(recipe)}: relative RMS {worst:.1e} with float activations, KL {mean:.1e} with its own")
    assert worst <= 1e-5 and mean <= 5e-3
    ids = nibble("tokenize", tiny, "--text", "What is 12 + 30?").decode().strip()
    ask = ("--ids", ids, "--max-tokens", 32, "--temperature", 0, "--json", "-q")
    reply = nibble.json("run", model, "--act", "bf16", "--kv", "f32", *ask)
    assert reply["output_ids"] == nibble.json("run", plain, "--kv", "f32", *ask)["output_ids"]
    said = nibble.json("run", model, "-p", "What is 12 + 30?", "--max-tokens", 48, "--temperature", 0, "--json", "-q")
    assert said["speculative"]["accept_length"] > 2, said


def test_w4a16_is_modelopts(nibble, tensors, export, prompts, tmp_path):
    want = tensors(NVFP4 / "fakequant.safetensors")["w4a16.logits_last16"]
    got = logits(nibble, tensors, export(*RECIPES[2]), prompts, tmp_path / "o", "--kv", "f32")
    for i in range(8):
        assert rms(got[i], want[i]) <= 1e-5, i


def test_head_read_back(nibble, tensors, export, prompts, tmp_path):
    """The draft head's own logits, NVFP4 and float activations, against its dequantized weights."""
    model = export(*RECIPES[5])
    plain = dequantized(model, tmp_path / "plain")
    for m, out in (model, tmp_path / "a"), (plain, tmp_path / "b"):
        nibble("logits", m, "--ids", prompts, "-o", out, "--mtp", "--kv", "f32", "-q")
    a, b = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    names = [n for n in b if ".mtp" in n and n.endswith("logits")]
    assert len(names) == 16
    for n in names:
        assert rms(a[n], b[n]) <= 1e-5, n


# ---- the published checkpoint's shape


@pytest.fixture(scope="module")
def published(tiny, tmp_path_factory):
    """ModelOpt's export with a quantized head laid over it: K and V scales borrowed, `mtp*` no longer excluded."""
    dst = tmp_path_factory.mktemp("published") / "m"
    dst.mkdir()
    quantized, head = header(NVFP4 / "modelopt-cuda/quantized.safetensors"), header(NVFP4 / "mtp/quantized.safetensors")
    source, out = model_tensors(tiny), {}
    for name, _, _, _, same in json.loads((NVFP4 / "modelopt-cuda/tensors.json").read_text())["tensors"]:
        out[name] = source[name] if same else quantized[name]
    kept = set(json.loads((NVFP4 / "mtp/mtp.json").read_text())["kept_bf16"])
    out = {k: t for k, t in out.items() if not k.startswith("mtp.") or k in kept} | head
    write(dst / "model.safetensors", out)
    for name, section in ("config.json", "quantization_config"), ("hf_quant_config.json", "quantization"):
        c = json.loads((NVFP4 / "modelopt-cuda" / name).read_text())
        key = "ignore" if name == "config.json" else "exclude_modules"
        c[section][key] = [x for x in c[section][key] if not x.startswith("mtp")]
        (dst / name).write_text(json.dumps(c))
    for f in "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja":
        if (tiny / f).exists():
            shutil.copy(tiny / f, dst)
    return dst


def test_published_shape(nibble, tensors, published, export, prompts, tmp_path):
    seen = nibble.json("inspect", published, "--json")
    assert seen["quantization"] == "NVFP4" and seen["provenance"] is None
    assert seen["mtp"]["present"] and seen["mtp"]["format"].startswith("NVFP4") or "NVFP4" in seen["mtp"]["format"]
    assert seen["kv"]["declared"] == "FP8" and set(seen["kv"]["scales"]) == {"3", "7"}
    assert seen["mtp"]["scales"]["kv"] == seen["kv"]["scales"]["7"]  # borrowed
    table = nibble("inspect", published).decode()
    assert "not recorded" in table and "draft head  k " in table
    p = nibble.full("run", published, "-p", "Count from 1 to 20.", "--max-tokens", 64, "--temperature", 0)
    said = p.stderr.decode()
    assert "W-LOAD" not in said and "E-" not in said, said
    length = float(said.split("accept length ")[1].split()[0])
    print("accept length", length)
    assert length > 2
    # and it is what we export from the same maxima with the head's generous rule
    ours = model_tensors(export("--recipe", "nvfp4", "--mtp", "nvfp4", "--mtp-scales", "generous"))
    theirs = model_tensors(published)
    assert ours.keys() == theirs.keys()
    assert not [k for k in theirs if ours[k] != theirs[k]]


# ---- configs


def differences(a, b, at=""):
    """Paths at which two JSON values differ: ("only ours" | "only theirs" | "differs", path)."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for k in sorted(a.keys() | b.keys())
                for d in ([("only theirs", f"{at}{k}")] if k not in a else [("only ours", f"{at}{k}")] if k not in b else differences(a[k], b[k], f"{at}{k}."))]
    return [] if a == b else [("differs", at.rstrip("."))]


# docs/NVFP4.md, 13: differences by design
EXTRA_MIXED = ["mtp.fc*"]
# transformers writes its defaults into what it loads and drops none of ours; ModelOpt itself adds nothing to these
TRANSFORMERS = ("_name_or_path", "chunk_size_feed_forward", "id2label", "is_encoder_decoder", "label2id", "output_attentions", "output_hidden_states",
                "problem_type", "return_dict", "transformers_version", "architectures")


def quant_differences(model, oracle):
    ours, theirs = (json.loads((x / "hf_quant_config.json").read_text()) for x in (model, oracle))
    config, want = (json.loads((x / "config.json").read_text()) for x in (model, oracle))
    return ours, theirs, config, want


def test_mixed_configs(export):
    ours, theirs, config, want = quant_differences(export(*RECIPES[6]), NVFP4 / "mixed/cuda")
    assert differences(ours, theirs) == [("only ours", "nibble"), ("differs", "quantization.exclude_modules")]
    assert ours["quantization"]["exclude_modules"] == theirs["quantization"]["exclude_modules"] + EXTRA_MIXED
    assert differences(config["quantization_config"], want["quantization_config"]) == [("differs", "ignore")]
    assert config["quantization_config"]["ignore"] == want["quantization_config"]["ignore"] + EXTRA_MIXED
    assert list(ours["quantization"]["quantized_layers"]) == list(theirs["quantization"]["quantized_layers"])


def test_uniform_configs(export):
    ours, theirs, config, want = quant_differences(export(*RECIPES[3]), NVFP4 / "modelopt-cuda")
    assert differences(ours, theirs) == [("only ours", "nibble"), ("differs", "quantization.exclude_modules")]
    assert differences(config["quantization_config"], want["quantization_config"]) == [("differs", "ignore")]
    for mine, his in ((ours["quantization"]["exclude_modules"], theirs["quantization"]["exclude_modules"]),
                      (config["quantization_config"]["ignore"], want["quantization_config"]["ignore"])):
        # ModelOpt's list as it is, then mtp.fc, then the same names as vLLM and SGLang spell them
        spelled = [x.replace(P, s) for x in his if x.startswith(P) for s in ("language_model.model.", "model.")]
        more = ["mtp.fc*", "visual*", "language_model.lm_head"] + spelled
        assert mine[:len(his)] == his
        assert sorted(mine[len(his):]) == sorted(more)


def test_rest_of_config(tiny, export):
    """Everything but the quantization section: the source's config with the dtype pinned, and no field of ModelOpt's missing
    that is not one of transformers' own."""
    for recipe, oracle in (RECIPES[3], "modelopt-cuda"), (RECIPES[6], "mixed/cuda"):
        _, _, config, want = quant_differences(export(*recipe), NVFP4 / oracle)
        source = json.loads((tiny / "config.json").read_text())
        found = [d for d in differences(config, source) if not d[1].endswith("dtype")]
        assert found == [("only ours", "quantization_config")]
        assert config["dtype"] == config["torch_dtype"] == config["text_config"]["dtype"] == "bfloat16"
        found = [d for d in differences(config, want) if d[1].split(".")[-1] not in TRANSFORMERS and d[1] != "quantization_config.ignore"]
        assert found == [("only ours", "torch_dtype")] or set(found) <= {("only ours", "torch_dtype"), ("only theirs", "vision_config.dtype"),
                                                                        ("differs", "vision_config.dtype")}, found


# ---- q, k and v kept


def test_keep_qkv(nibble, tiny, export):
    model, source = export(*RECIPES[7]), model_tensors(tiny)
    t = model_tensors(model)
    excludes = json.loads((model / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    for layer in 3, 7:
        for x in "qkv":
            name = f"{P}layers.{layer}.self_attn.{x}_proj"
            assert t[name + ".weight"] == source[name + ".weight"]
            assert name + ".weight_scale" not in t and name + ".input_scale" not in t
            for spelling in name, name.replace(P, "language_model.model."), name.replace(P, "model."):
                assert spelling in excludes
        assert t[f"{P}layers.{layer}.self_attn.o_proj.weight"][0] == "U8"
        assert f"{P}layers.{layer}.self_attn.k_proj.k_scale" in t  # the cache is not the projection
    uniform = model_tensors(export(*RECIPES[3]))
    assert {k for k in t if t[k] != uniform.get(k)} == {f"{P}layers.{i}.self_attn.{x}_proj.weight" for i in (3, 7) for x in "qkv"}


# ---- what inspect says


def test_inspect(nibble, export):
    model = export("--recipe", "nvfp4", "--mtp", "nvfp4", "--mtp-scales", "generous")
    scales = {k: struct.unpack("<f", t[2])[0] for k, t in model_tensors(model).items() if k.endswith(("k_scale", "v_scale"))}
    seen = nibble.json("inspect", model, "--json")
    assert {k: v["format"] for k, v in seen["bytes"].items()} == {
        "embed": "BF16", "head": "BF16", "gdn": "NVFP4+BF16", "attention": "NVFP4+BF16", "router": "BF16", "experts": "NVFP4",
        "shared_expert": "NVFP4", "norm": "BF16", "mtp": "NVFP4+BF16", "vision": "BF16"}
    for layer, pair in seen["kv"]["scales"].items():
        for got, x in zip(pair, "kv"):
            assert np.float32(got) == np.float32(scales[f"{P}layers.{layer}.self_attn.{x}_proj.{x}_scale"])
    assert len(seen["kv"]["scales"]) == 2
    told = seen["provenance"]
    assert told["recipe"] == "nvfp4" and told["algorithm"] == "max" and told["arithmetic"] == "cuda" and told["mtp"] == "nvfp4"
    assert told["mtp_scales"] == "generous:4" and told["kv_scales"] == "calibrated" and "amax.safetensors" in told["calibration"]
    table = nibble("inspect", model).decode()
    for line in ("quantized    NVFP4", "  algorithm    max", "  mtp_scales   generous:4", "  layer 3     k ", "  draft head  k "):
        assert line in table
    assert nibble.json("inspect", export(*RECIPES[8]), "--json")["provenance"]["algorithm"] == "mse"
    assert nibble.json("inspect", export(*RECIPES[9]), "--json")["provenance"]["algorithm"] == "four-over-six"
    assert nibble.json("inspect", export(*RECIPES[6]), "--json")["quantization"] == "MIXED_PRECISION"


# ---- the summary


def test_summary_beside_max(export):
    def classes(recipe):
        s = json.loads((export(*recipe) / "nibble_quant_summary.json").read_text())
        return s["algorithm"], {c["class"]: c for c in s["classes"] if "relative_error" in c}
    _, by_max = classes(RECIPES[3])
    assert all(c["relative_error"] == c["relative_error_max"] for c in by_max.values())
    for recipe, most in (RECIPES[8], 0.083), (RECIPES[9], 0.089):
        algorithm, got = classes(recipe)
        assert algorithm == recipe[-1] and got.keys() == by_max.keys()
        for name, c in got.items():
            assert c["relative_error_max"] == by_max[name]["relative_error"]
            assert 0.07 < c["relative_error"] < most < c["relative_error_max"]
        card = (export(*recipe) / "QUANTIZATION.md").read_text()
        assert f"algorithm `{algorithm}`" in card and "with `max`" in card


def test_report_kl(nibble, tiny, export, tmp_path):
    """The figures stand in the summary and on the screen, the second export is gone, and the bytes are the same as without."""
    seen = {}
    for algorithm in "max", "four-over-six":
        dst = tmp_path / algorithm
        said = nibble("quantize", tiny, "-o", dst, "--amax", NVFP4 / "modelopt-cuda/amax.safetensors", "-q", "--mtp", "bf16", "--algorithm", algorithm,
                      "--report-kl").decode()
        s = seen[algorithm] = json.loads((dst / "nibble_quant_summary.json").read_text())
        assert f"logits {algorithm}: KL" in said and ("logits max: KL" in said)
        assert s["logits"]["positions"] == 128 and 0 < s["logits"]["kl_mean"] < 0.5 and s["logits"]["kl_mean"] < s["logits"]["kl_worst"]
        assert 0.85 < s["logits"]["same_top"] <= 1
        same = export("--recipe", "nvfp4", "--mtp", "bf16") if algorithm == "max" else export(*RECIPES[9])
        assert (dst / "model.safetensors").read_bytes() == (same / "model.safetensors").read_bytes()
    assert "logits_max" not in seen["max"] and seen["four-over-six"]["logits_max"] == seen["max"]["logits"]
    assert seen["four-over-six"]["logits"] != seen["max"]["logits"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["four-over-six", "max"]


# ---- scales that lie


def damaged(src, dst, name, data):
    shutil.copytree(src, dst)
    t = header(dst / "model.safetensors")
    dtype, shape, old = t[name]
    assert len(data) <= len(old)
    t[name] = (dtype, shape, data + old[len(data):])
    write(dst / "model.safetensors", t)
    return dst


SCALARS = [f"{P}layers.0.linear_attn.in_proj_qkv.weight_scale_2", f"{P}layers.3.self_attn.q_proj.input_scale", f"{P}layers.3.self_attn.k_proj.k_scale",
           f"{P}layers.7.self_attn.v_proj.v_scale", f"{P}layers.1.mlp.experts.3.up_proj.weight_scale_2", "mtp.layers.0.mlp.experts.15.down_proj.input_scale",
           "mtp.layers.0.self_attn.k_proj.k_scale"]
BAD = [("nan", struct.pack("<f", float("nan")), "NaN"), ("zero", bytes(4), "zero"), ("minus zero", struct.pack("<f", -0.0), "zero"),
       ("negative", struct.pack("<f", -1.0), "negative or infinite"), ("inf", struct.pack("<f", float("inf")), "negative or infinite")]


@pytest.mark.parametrize("what, data, word", BAD, ids=[b[0] for b in BAD])
def test_bad_scalars(nibble, export, tmp_path, what, data, word):
    model = export("--recipe", "nvfp4", "--mtp", "nvfp4", "--mtp-scales", "generous")
    for i, name in enumerate(SCALARS):
        p = nibble.full("run", damaged(model, tmp_path / str(i), name, data), "--ids", "[1, 2]", "--max-tokens", 1, exit=3)
        line = p.stderr.decode().splitlines()[-1]
        assert line.startswith("nibble: E-LOAD-SCALE") and f"{name}: {word}" in line, line


@pytest.mark.parametrize("byte", [0x00, 0x7f, 0x80, 0xb8, 0xff], ids=hex)
def test_bad_block_scales(nibble, export, tmp_path, byte):
    model = export("--recipe", "nvfp4", "--mtp", "nvfp4", "--mtp-scales", "generous")
    for i, stem in enumerate((f"{P}layers.2.mlp.shared_expert.down_proj", f"{P}layers.7.mlp.experts.0.gate_proj", "mtp.layers.0.self_attn.o_proj")):
        p = nibble.full("run", damaged(model, tmp_path / str(i), stem + ".weight_scale", b"\x38\x38" + bytes([byte])), "--ids", "[1, 2]",
                        "--max-tokens", 1, exit=3)
        line = p.stderr.decode().splitlines()[-1]
        assert line.startswith("nibble: E-LOAD-SCALE") and stem + ".weight_scale" in line and "index 2" in line, line


def test_bad_fp8_scales(nibble, export, tmp_path):
    for i, name in enumerate((f"{P}layers.3.self_attn.q_proj.weight_scale", f"{P}layers.0.linear_attn.out_proj.input_scale", "lm_head.weight_scale_2")):
        for k, (_, data, word) in enumerate(BAD):
            p = nibble.full("run", damaged(export(*RECIPES[6]), tmp_path / f"{i}{k}", name, data), "--ids", "[1, 2]", "--max-tokens", 1, exit=3)
            line = p.stderr.decode().splitlines()[-1]
            assert line.startswith("nibble: E-LOAD-SCALE") and f"{name}: {word}" in line, line


GROUPS = [(f"{P}layers.3.self_attn.v_proj", "weight_scale_2", f"{P}layers.3.self_attn.q_proj"),
          (f"{P}layers.3.self_attn.k_proj", "input_scale", f"{P}layers.3.self_attn.q_proj"),
          (f"{P}layers.4.linear_attn.in_proj_z", "weight_scale_2", f"{P}layers.4.linear_attn.in_proj_qkv"),
          (f"{P}layers.5.mlp.shared_expert.up_proj", "input_scale", f"{P}layers.5.mlp.shared_expert.gate_proj"),
          (f"{P}layers.6.mlp.experts.9.up_proj", "weight_scale_2", f"{P}layers.6.mlp.experts.9.gate_proj"),
          ("mtp.layers.0.mlp.experts.2.gate_proj", "weight_scale_2", "mtp.layers.0.mlp.experts.2.up_proj")]


def test_groups(nibble, export, tmp_path):
    """Members that differ are named and run with their own scales: the answer is that of the dequantized weights."""
    model = export("--recipe", "nvfp4", "--mtp", "nvfp4", "--mtp-scales", "generous")
    run = ("--ids", "[5, 6, 7]", "--max-tokens", 2, "--temperature", 0)
    assert "W-LOAD-GROUP" not in nibble.full("run", model, *run).stderr.decode()
    assert "W-LOAD-GROUP" not in nibble.full("run", export(*RECIPES[6]), *run).stderr.decode()  # FP8 has no groups
    for i, (stem, tail, other) in enumerate(GROUPS):
        t = header(model / "model.safetensors")
        value = struct.unpack("<f", t[f"{stem}.{tail}"][2])[0]
        bad = damaged(model, tmp_path / str(i), f"{stem}.{tail}", struct.pack("<f", value * 1.25))
        lines = [x for x in nibble.full("run", bad, *run).stderr.decode().splitlines() if "W-LOAD-GROUP" in x]
        assert len(lines) == 1 and "1 groups" in lines[0] and stem in lines[0] and other in lines[0] and tail in lines[0], lines


def test_groups_run_with_their_own(nibble, tensors, export, prompts, tmp_path):
    stem = f"{P}layers.3.self_attn.v_proj.weight_scale_2"
    value = struct.unpack("<f", header(export(*RECIPES[2]) / "model.safetensors")[stem][2])[0]
    bad = damaged(export(*RECIPES[2]), tmp_path / "bad", stem, struct.pack("<f", value * 1.5))
    want = logits(nibble, tensors, dequantized(bad, tmp_path / "plain"), prompts, tmp_path / "a", "--kv", "f32")
    got = logits(nibble, tensors, bad, prompts, tmp_path / "b", "--kv", "f32")
    assert max(map(rms, got, want)) <= 1e-5


def test_half_quantized_group(nibble, tiny, tmp_path):
    nibble("quantize", tiny, "-o", tmp_path / "m", "--recipe", "nvfp4-w4a16", "--kv", "none", "--mtp", "bf16", "--exclude", "layers.3.self_attn.k_proj")
    said = nibble.full("run", tmp_path / "m", "--ids", "[5, 6]", "--max-tokens", 1).stderr.decode()
    assert "W-LOAD-GROUP" in said and "k_proj" in said and "not quantized" in said
