"""Broken model folders: each is one line with an id, exit 3, soon, and without much memory."""
import json
import resource
import shutil
import struct
import subprocess
import time

import pytest


@pytest.fixture
def model(tiny, tmp_path):
    """A copy to break."""
    shutil.copytree(tiny, tmp_path / "m")
    return tmp_path / "m"


def refuse(nibble, model, *command, kind=3):
    command = command or ("run", model, "--ids", "[1, 2]", "--max-tokens", 1)
    t = time.time()
    p = subprocess.run([nibble.path, *map(str, command)], capture_output=True, timeout=60, stdin=subprocess.DEVNULL,
                       preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)))
    lines = [s for s in p.stderr.decode().splitlines() if not s.startswith(("nibble: N-", "nibble: W-"))]
    assert p.returncode == kind, (p.returncode, p.stderr[-500:])
    assert len(lines) == 1 and lines[0].startswith("nibble: E-"), lines
    assert p.stdout == b"" and time.time() - t < 10
    return lines[0]


def header(path):
    raw = path.read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8:8 + n]), raw[8 + n:]


def write(path, head, data):
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def shard(model, n=1):
    return model / f"model-0000{n}-of-00002.safetensors"


def config(model, change):
    c = json.loads((model / "config.json").read_text())
    change(c)
    (model / "config.json").write_text(json.dumps(c))


def test_missing_folder(nibble, tmp_path):
    refuse(nibble, None, "inspect", tmp_path / "nothing")


def test_a_file_in_place_of_a_folder(nibble, tiny):
    refuse(nibble, None, "run", tiny / "word_problems.jsonl", "-p", "hi")


def test_empty_folder(nibble, tmp_path):
    refuse(nibble, None, "inspect", tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 5000, 8_000_000])
def test_truncated_shard(nibble, model, keep):
    shard(model).write_bytes(shard(model).read_bytes()[:keep])
    assert shard(model).name in refuse(nibble, model)


def test_missing_shard(nibble, model):
    shard(model, 2).unlink()
    assert shard(model, 2).name in refuse(nibble, model)


def test_swapped_shards(nibble, model):
    a, b = shard(model, 1), shard(model, 2)
    x, y = a.read_bytes(), b.read_bytes()
    a.write_bytes(y), b.write_bytes(x)
    refuse(nibble, model)


@pytest.mark.parametrize("length", [0, 1, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_header_length(nibble, model, length):
    raw = shard(model).read_bytes()
    shard(model).write_bytes(struct.pack("<Q", length) + raw[8:])
    refuse(nibble, model)


@pytest.mark.parametrize("what", ["past", "overlap", "negative", "huge", "backwards", "type", "shape", "shape-huge", "shape-negative", "gap", "string"])
def test_header_entries(nibble, model, what):
    head, data = header(shard(model))
    names = [n for n in head if n != "__metadata__"]
    t, u = head[names[0]], head[names[1]]
    if what == "past": t["data_offsets"][1] = len(data) + 8
    if what == "overlap": u["data_offsets"] = t["data_offsets"]
    if what == "negative": t["data_offsets"][0] = -8
    if what == "huge": t["data_offsets"] = [1 << 62, (1 << 62) + 8]
    if what == "backwards": t["data_offsets"].reverse()
    if what == "type": t["dtype"] = "F7"
    if what == "shape": t["shape"][0] += 1
    if what == "shape-huge": t["shape"] = [1 << 31, 1 << 31, 1 << 31]
    if what == "shape-negative": t["shape"][0] = -t["shape"][0]
    if what == "gap": data += b"\0" * 8
    if what == "string": t["data_offsets"] = "0,8"
    write(shard(model), head, data)
    assert shard(model).name in refuse(nibble, model)


def test_duplicate_name_in_header(nibble, model):
    head, data = header(shard(model))
    text = json.dumps(head)
    name = next(n for n in head if n != "__metadata__")
    text = (text[:-1] + f', {json.dumps(name)}: {json.dumps(head[name])}}}').encode()
    shard(model).write_bytes(struct.pack("<Q", len(text)) + text + data)
    refuse(nibble, model)


def test_missing_and_extra_tensor(nibble, model):
    index = json.loads((model / "model.safetensors.index.json").read_text())
    name = next(n for n in index["weight_map"] if "mlp.gate.weight" in n)
    path = model / index["weight_map"][name]
    head, data = header(path)
    head[name.replace("mlp.gate", "mlp.gatee")] = head.pop(name)
    write(path, head, data)
    index["weight_map"][name.replace("mlp.gate", "mlp.gatee")] = index["weight_map"].pop(name)
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "E-LOAD-" in refuse(nibble, model)


def test_index_names_another_shard(nibble, model):
    index = json.loads((model / "model.safetensors.index.json").read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = next(s for s in set(index["weight_map"].values()) if s != index["weight_map"][name])
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(nibble, model)


@pytest.mark.parametrize("path", ["../outside.safetensors", "/etc/passwd", "", "a\0b"])
def test_index_leaves_the_folder(nibble, model, path):
    index = json.loads((model / "model.safetensors.index.json").read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = path
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(nibble, model)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"a": 1e999999}', "\xff\xfe", "[" * 100_000, '{"weight_map": {"a": 1}}'])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "tokenizer.json"])
def test_broken_json(nibble, model, file, text):
    (model / file).write_bytes(text.encode("latin-1"))
    refuse(nibble, None, "run", model, "-p", "hi")


TEXT_FIELDS = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "num_experts",
               "num_experts_per_tok", "moe_intermediate_size", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
               "linear_conv_kernel_dim", "max_position_embeddings"]


CAN_BE_MEANT = [("max_position_embeddings", 3), ("num_experts_per_tok", 3), ("num_experts_per_tok", None), ("max_position_embeddings", None), ("linear_conv_kernel_dim", None)]  # null: the default, said


@pytest.mark.parametrize("value", [0, -1, 1 << 40, 1e300, "12", None, [], 3])
@pytest.mark.parametrize("field", TEXT_FIELDS)
def test_absurd_config(nibble, model, field, value):
    if (field, value) in CAN_BE_MEANT:
        pytest.skip("a value that can be meant")

    def change(c):
        assert field in c["text_config"]
        c["text_config"][field] = value
    config(model, change)
    refuse(nibble, model)


@pytest.mark.parametrize("change", [
    lambda c: c.update(model_type="llama"), lambda c: c["text_config"].update(hidden_act="gelu"),
    lambda c: c["text_config"].update(layer_types=["sliding_attention"] * 8), lambda c: c["text_config"]["layer_types"].pop(),
    lambda c: c["text_config"].update(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
    lambda c: c["text_config"].update(rms_norm_eps=-1), lambda c: c["text_config"].update(rms_norm_eps="small"),
])
def test_unknown_kind_in_config(nibble, model, change):
    config(model, change)
    assert "E-CONFIG" in refuse(nibble, model)


def test_tokenizer_of_another_kind(nibble, model):
    t = json.loads((model / "tokenizer.json").read_text())
    t["model"]["type"] = "Unigram"
    (model / "tokenizer.json").write_text(json.dumps(t))
    refuse(nibble, None, "tokenize", model, "--text", "hi")


def test_merge_of_unknown_piece(nibble, model):
    t = json.loads((model / "tokenizer.json").read_text())
    t["model"]["merges"].append("zzzzq qzzzz" if isinstance(t["model"]["merges"][0], str) else ["zzzzq", "qzzzz"])
    (model / "tokenizer.json").write_text(json.dumps(t))
    refuse(nibble, None, "tokenize", model, "--text", "hi")


def test_nan_weight_is_found_by_scan(nibble, model):
    head, data = header(shard(model))
    name, t = next((n, t) for n, t in head.items() if n != "__metadata__" and t["dtype"] == "BF16")
    raw = bytearray(data)
    raw[t["data_offsets"][0]:t["data_offsets"][0] + 2] = b"\xc0\x7f"
    write(shard(model), head, bytes(raw))
    p = subprocess.run([nibble.path, "inspect", model, "--scan"], capture_output=True, timeout=60)
    assert name in (p.stdout + p.stderr).decode() and p.returncode == 1


@pytest.mark.parametrize("text, kind", [(b"a\xffb", 3), (b"\xed\xa0\x80", 3), (b"\xf8\x88\x80\x80\x80", 3)])
def test_invalid_utf8_prompt(nibble, tiny, tmp_path, text, kind):
    (tmp_path / "t").write_bytes(text)
    refuse(nibble, None, "tokenize", tiny, "--file", tmp_path / "t", kind=kind)
    assert json.loads(nibble("tokenize", tiny, "--lossy", "--file", tmp_path / "t"))


def test_prompt_over_the_context(nibble, tiny):
    refuse(nibble, None, "run", tiny, "--raw", "-p", "a b " * 50, "--ctx", 16)


@pytest.mark.parametrize("ids", ["[1, 999999]", "[-1]", "[1.5]", "[[1]]", "[]", '["a"]', "[1", "{}"])
def test_bad_ids(nibble, tiny, ids):
    refuse(nibble, None, "run", tiny, "--ids", ids)
