"""`nibble logits` against the float32 transformers oracle, through the files a user gets."""
import json

import numpy as np
import pytest

PROMPTS = 9
MAX_LOGIT_ERROR, MAX_KL, MAX_HIDDEN_ERROR, MAX_DRAFT_ERROR = 3e-4, 1e-9, 2e-6, 5e-6  # the bounds of docs/NUMERICS.md


def log_softmax(x):
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def mean_kl(want, got):
    p, q = log_softmax(want), log_softmax(got)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def relative_rms(want, got):
    return float(np.sqrt(((want - got) ** 2).mean() / (want ** 2).mean()))


@pytest.fixture(scope="module")
def produced(nibble, tiny, oracle, tensors, tmp_path_factory):
    folder = tmp_path_factory.mktemp("logits")
    want = tensors(oracle / "logits.safetensors")
    ids = [want[f"{i}.ids"].tolist() for i in range(PROMPTS)]
    (folder / "ids.json").write_text(json.dumps(ids))
    nibble("logits", tiny, "--ids", folder / "ids.json", "-o", folder / "out.safetensors", "--hidden", "--mtp", "--kv", "f32")
    return ids, tensors(folder / "out.safetensors")


@pytest.mark.parametrize("i", range(PROMPTS))
def test_trunk_logits(produced, oracle, tensors, i):
    ids, got = produced
    want = tensors(oracle / "logits.safetensors")[f"{i}.logits"]
    assert got[f"{i}.logits"].shape[0] == len(ids[i])
    tail = got[f"{i}.logits"][-len(want):]
    assert np.abs(tail - want).max() <= MAX_LOGIT_ERROR
    assert mean_kl(want, tail) <= MAX_KL
    assert (tail.argmax(-1) == want.argmax(-1)).all()


@pytest.mark.parametrize("i", range(PROMPTS))
def test_draft_head_logits(produced, oracle, tensors, i):
    _, got = produced
    want = tensors(oracle / "mtp.safetensors")
    for name, theirs in (("mtp1.logits", "logits1"), ("mtp2.logits", "logits2")):
        w = want[f"{i}.{theirs}"]
        tail = got[f"{i}.{name}"][-len(w):]
        assert np.abs(tail - w).max() <= MAX_LOGIT_ERROR, name
        assert mean_kl(w, tail) <= MAX_KL, name
    w = want[f"{i}.hidden1"]
    assert relative_rms(w, got[f"{i}.mtp1.hidden"][-len(w):]) <= MAX_DRAFT_ERROR


def test_hidden_states(produced, oracle, tensors):
    ids, got = produced
    want = tensors(oracle / "trace.safetensors")
    assert want["ids"].tolist() == ids[1]
    for k in range(8):
        assert relative_rms(want[f"hidden.{k}"], got[f"1.hidden.{k}"]) <= MAX_HIDDEN_ERROR, k
    assert relative_rms(want["final_norm"], got["1.final_norm"]) <= MAX_HIDDEN_ERROR


def test_last_keeps_the_same_rows(nibble, tiny, produced, tensors, tmp_path):
    ids, whole = produced
    (tmp_path / "ids.json").write_text(json.dumps({"sequences": ids[:3]}))
    nibble("logits", tiny, "--ids", tmp_path / "ids.json", "-o", tmp_path / "o.safetensors", "--last", 5)
    got = tensors(tmp_path / "o.safetensors")
    assert sorted(got) == ["0.logits", "1.logits", "2.logits"]
    for i in range(3):
        assert got[f"{i}.logits"].tobytes() == whole[f"{i}.logits"][-5:].tobytes()


def test_one_list_and_no_tokenizer_files(nibble, tiny, produced, tensors, tmp_path):
    """IDS.json may be one list; the tokenizer's files are not touched."""
    ids, whole = produced
    model = tmp_path / "model"
    model.mkdir()
    for f in tiny.iterdir():
        if f.name in ("config.json", "model.safetensors.index.json") or f.suffix == ".safetensors":
            (model / f.name).symlink_to(f)
    (tmp_path / "ids.json").write_text(json.dumps(ids[2]))
    nibble("logits", model, "--ids", tmp_path / "ids.json", "-o", tmp_path / "o.safetensors")
    assert tensors(tmp_path / "o.safetensors")["0.logits"].tobytes() == whole["2.logits"].tobytes()


@pytest.mark.parametrize("options", [("--threads", 1), ("--threads", 3), ("--isa", "ref"), ("--device", "ref")])
def test_same_bits_however_computed(nibble, tiny, produced, tensors, tmp_path, options):
    ids, whole = produced
    (tmp_path / "ids.json").write_text(json.dumps(ids[:2]))
    nibble("logits", tiny, "--ids", tmp_path / "ids.json", "-o", tmp_path / "o.safetensors", "--mtp", *options)
    got = tensors(tmp_path / "o.safetensors")
    for name, a in got.items():
        assert a.tobytes() == whole[name].tobytes(), name
