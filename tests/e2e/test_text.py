"""tokenize, detokenize and render: the oracle's vectors through the program."""
import json
import shutil

import pytest


def test_tokenizer_vectors(nibble, tiny, oracle, tmp_path):
    for v in json.loads((oracle / "tokenizer.vectors.json").read_text()):
        (tmp_path / "t").write_text(v["text"], newline="")
        assert json.loads(nibble("tokenize", tiny, "--file", tmp_path / "t")) == v["ids"], v["text"]
        assert nibble("detokenize", tiny, "--ids", json.dumps(v["ids"])).decode() == v["decoded"], v["text"]


def test_chat_template(nibble, tiny, oracle, tmp_path):
    for c in json.loads((oracle / "chat.json").read_text()):
        (tmp_path / "r.json").write_text(json.dumps(c["request"]))
        if "error" in c:
            p = nibble.full("render", tiny, "--request", tmp_path / "r.json", exit=3)
            assert p.stdout == b"" and p.stderr.startswith(b"nibble: E-TEMPLATE-") and c["error"] in p.stderr.decode(), c["name"]
        else:
            assert nibble("render", tiny, "--request", tmp_path / "r.json").decode() == c["text"], c["name"]


def test_only_tokenizer_and_template_files_are_needed(nibble, tiny, tmp_path):
    for f in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / f, tmp_path)
    (tmp_path / "r.json").write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    assert json.loads(nibble("tokenize", tmp_path, "--text", "hi"))
    assert nibble("render", tmp_path, "--request", tmp_path / "r.json").startswith(b"<|im_start|>user\nhi")


def test_template_in_tokenizer_config(nibble, tiny, tmp_path):
    config = json.loads((tiny / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copy(tiny / "tokenizer.json", tmp_path)
    (tmp_path / "r.json").write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    assert nibble("render", tmp_path, "--request", tmp_path / "r.json") == b"[user:hi]"


@pytest.mark.parametrize("text", ["a" * 1_000_000, " " * 1_000_000, "é" * 300_000, "\n \n" * 200_000])
def test_long_hostile_text_is_linear(nibble, tiny, tmp_path, text):
    (tmp_path / "t").write_text(text, newline="")
    ids = json.loads(nibble("tokenize", tiny, "--file", tmp_path / "t", timeout=60))
    (tmp_path / "ids").write_text(json.dumps(ids))
    assert nibble("detokenize", tiny, "--ids", f"@{tmp_path}/ids", timeout=60).decode() == text
