"""`nibble quantize`: where the maxima come from must not change what is exported; the model's own text; what is refused."""
import json

import pytest

IDS = {"sequences": [[5, 9, 300, 41, 7, 7, 12], list(range(100, 160)), [3]]}
DESCRIBED = {"nibble_quant_summary.json", "QUANTIZATION.md"}  # say where the maxima came from, and how long it took


def export(nibble, tiny, out, *args, **kw):
    nibble("quantize", tiny, "-o", out, *args, **kw)
    return {p.name: p.read_bytes() for p in out.iterdir()}


@pytest.fixture()
def ids(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(IDS))
    return path


def test_saved_maxima_give_the_same_export(nibble, tiny, tmp_path, ids):
    saved, again = tmp_path / "amax.safetensors", tmp_path / "again.safetensors"
    a = export(nibble, tiny, tmp_path / "a", "--calib-ids", ids, "--save-amax", saved)
    b = export(nibble, tiny, tmp_path / "b", "--amax", saved, "--save-amax", again)
    c = export(nibble, tiny, tmp_path / "c", "--calib-ids", ids, "--max-ram", "1k", "--threads", 1)
    assert set(a) == set(b) == set(c)
    for name in set(a) - DESCRIBED:
        for other in (b, c):  # the same but for the line that says where the maxima came from
            differ = [x for x, y in zip(a[name].split(b"\n"), other[name].split(b"\n"), strict=True) if x != y]
            assert all(b'"calibration": ' in x for x in differ) and (not differ or name.endswith("config.json")), name
    assert any(n.endswith(".safetensors") for n in a)
    assert saved.read_bytes() == again.read_bytes()


def test_the_models_own_text(nibble, tiny, tmp_path):
    def maxima(name, *args):
        path = tmp_path / (name + ".safetensors")
        out = nibble.json("quantize", tiny, "-o", tmp_path / name, "--calib", "self", "--samples", 3, "--seq", 48, "--save-amax", path,
                          "--json", *args)
        assert "own text" in out["calibration"] and "3 sequences" in out["calibration"]
        return path.read_bytes()

    a = maxima("a")
    assert a == maxima("b", "--threads", 1) == maxima("c", "--seed", 20260)
    assert a != maxima("d", "--seed", 1)


@pytest.mark.parametrize("args, exit, id", [
    (("--calib", "EMPTY"), 3, "E-CALIB-EMPTY"),
    (("--calib-ids", "IDS", "--seed", 1), 2, "E-USAGE"),
    (("--calib", "self", "--seq", 5000), 3, "E-CALIB-LONG"),
    (("--calib-ids", "LONG", "--seq", 5000), 3, "E-CALIB-LONG"),
    (("--calib-ids", "IDS", "--calib", "self"), 2, "E-USAGE"),
])
def test_refused(nibble, tiny, tmp_path, ids, args, exit, id):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "long.json").write_text(json.dumps([1] * 4097))
    named = {"EMPTY": tmp_path / "empty.jsonl", "IDS": ids, "LONG": tmp_path / "long.json"}
    p = nibble.full("quantize", tiny, "-o", tmp_path / "out", *(named.get(a, a) for a in args), exit=exit)
    assert id in p.stderr.decode() and not (tmp_path / "out").exists()
