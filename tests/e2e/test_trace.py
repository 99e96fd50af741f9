"""nibble trace: every op of a pass, the first that is not finite, the first that leaves a reference."""
import json
import pathlib
import struct

import numpy as np
import pytest

from test_messages import edit_tensors

ROOT = pathlib.Path(__file__).resolve().parents[2]
P = "model.language_model."


@pytest.fixture(scope="module")
def ids(tensors, oracle, tmp_path_factory):
    f = tmp_path_factory.mktemp("ids") / "ids.json"
    f.write_text(json.dumps([int(i) for i in tensors(oracle / "trace.safetensors")["ids"]]))
    return f


def trace(nibble, model, ids, *args, exit=0):
    return nibble.json("trace", model, "--ids", ids, *args, "--json", exit=exit)


def test_against_transformers(nibble, tiny, oracle, ids):
    r = trace(nibble, tiny, ids, "--against", oracle / "trace.safetensors", "--band", 2e-6)
    assert r["compared"] == 10 and r["first_out_of_band"] is None and r["first_nonfinite"] is None
    assert max(o["error"] for o in r["ops"] if "error" in o) < 1e-6
    names = [o["name"] for o in r["ops"]]
    assert len(names) == len(set(names)) > 150 and names[0] == "hidden.0" and names[-1] == "logits"
    assert {o["op"] for o in r["ops"]} >= {"rmsnorm", "linear", "conv", "gdn", "attention", "route", "moe", "moe_combine", "kv_append", "qk_rope"}
    # too narrow a band: the first output that differs at all
    r = trace(nibble, tiny, ids, "--against", oracle / "trace.safetensors", "--band", 0, exit=1)
    assert r["first_out_of_band"] == "hidden.1"


def test_own_dump_is_the_same_bits(nibble, tiny, ids, tmp_path, tensors):
    trace(nibble, tiny, ids, "-o", tmp_path / "d.safetensors", "--threads", 2)
    r = trace(nibble, tiny, ids, "--against", tmp_path / "d.safetensors", "--band", 0, "--device", "ref")
    assert r["compared"] == len(r["ops"]) and r["first_out_of_band"] is None
    dump = tensors(tmp_path / "d.safetensors")
    for o in r["ops"]:
        assert dump[o["name"]].shape == (o["rows"], o["cols"]) and o["absmax"] == pytest.approx(np.abs(dump[o["name"]]).max(), rel=1e-7)
    nibble("logits", tiny, "--ids", ids, "--hidden", "-o", tmp_path / "l.safetensors", "-q")
    r = trace(nibble, tiny, ids, "--against", tmp_path / "l.safetensors", "--band", 0)
    assert r["compared"] == 9  # hidden.0 .. hidden.7 and the final norm


def test_nan_in_a_router_is_found(nibble, tiny, ids, tmp_path):
    """The tensor with the fault is named, not what it spoils afterwards."""
    name = f"{P}layers.5.mlp.gate.weight"

    def spoil(t):
        dtype, shape, data = t[name]
        at = 2 * (3 * shape[1] + 7)
        t[name] = (dtype, shape, data[:at] + struct.pack("<H", 0x7fc0) + data[at + 2:])
    r = trace(nibble, edit_tensors(tiny, tmp_path / "m", spoil), ids, exit=1)
    last = r["ops"][-1]
    assert r["first_nonfinite"] == last["name"] == name and last["nonfinite"] == last["rows"] and (last["row"], last["col"]) == (0, 3)
    text = nibble("trace", tmp_path / "m", "--ids", ids, exit=1).decode().splitlines()
    assert text[-1].startswith(f"{name}: 39 values are not finite, the first at row 0, column 3")


def test_a_wrong_weight_is_found(nibble, tiny, ids, tmp_path):
    """A matrix that was scaled: the first op out of band is its own."""
    name = f"{P}layers.4.linear_attn.out_proj.weight"
    trace(nibble, tiny, ids, "-o", tmp_path / "d.safetensors")

    def halve(t):
        dtype, shape, data = t[name]
        v = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        t[name] = (dtype, shape, ((v.view(np.float32) * np.float32(0.5)).view(np.uint32) >> 16).astype("<u2").tobytes())
    r = trace(nibble, edit_tensors(tiny, tmp_path / "m", halve), ids, "--against", tmp_path / "d.safetensors", exit=1)
    assert r["first_out_of_band"] == name


def test_errors(nibble, tiny, ids, tmp_path, oracle):
    def last(*args, exit):
        return nibble.full("trace", tiny, *args, exit=exit).stderr.decode().splitlines()[-1]
    assert "E-USAGE" in last(exit=2) and "E-USAGE" in last("-p", "x", "--ids", ids, exit=2)
    (tmp_path / "short.json").write_text("[1, 2]")
    assert "nibble: E-TRACE-DUMP: " in last("--ids", tmp_path / "short.json", "--against", oracle / "trace.safetensors", exit=3)
    (tmp_path / "far.json").write_text("[99999]")
    assert "nibble: E-ENGINE-TOKEN: " in last("--ids", tmp_path / "far.json", exit=3)
    assert b"logits" in nibble("trace", tiny, "-p", "What is 2 + 2?")
