"""The prefix cache of `nibble serve`, in memory and in a folder that outlives the server: same answers, fewer tokens computed."""
import os
import stat
from contextlib import closing

import pytest

from serving import Server

STORY = "Once upon a time there was a river, and by the river a mill. " * 12
ASK = STORY + "Where was the mill?"
BODY = {"messages": [{"role": "system", "content": STORY}, {"role": "user", "content": "Where was the mill?"}], "temperature": 0,
        "max_tokens": 24, "logprobs": True, "top_logprobs": 3}


def answer(s):
    out = s.post("/v1/chat/completions", BODY)
    return out["choices"][0]["message"], out["choices"][0]["logprobs"], out["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture()
def cold(nibble, tiny):
    with closing(Server(nibble, tiny, "--prefix-cache", 0, "-q")) as s:
        message, logprobs, cached = answer(s)
        assert cached == 0
        return message, logprobs


def test_memory(nibble, tiny, cold):
    with closing(Server(nibble, tiny, "-q")) as s:
        assert answer(s) == (*cold, 0)
        message, logprobs, cached = answer(s)
        assert (message, logprobs) == cold and cached > 100
        assert s.metric("nibble_prefix_hits_total") >= 1 and s.metric("nibble_prefix_files") == 0


def test_folder_outlives_the_server(nibble, tiny, cold, tmp_path):
    where = tmp_path / "kept"
    with closing(Server(nibble, tiny, "--cache-dir", where, "--cache-dir-size", "64M")) as s:
        assert "0 states" in s.said("N-PREFIX-DIR")[0]
        assert answer(s) == (*cold, 0)
    assert stat.S_IMODE(where.stat().st_mode) == 0o700 and any(where.iterdir())
    with closing(Server(nibble, tiny, "--cache-dir", where)) as s:
        assert "0 states" not in s.said("N-PREFIX-DIR")[0]
        assert s.metric("nibble_prefix_files") > 0 and s.metric("nibble_prefix_file_bytes") > 0
        message, logprobs, cached = answer(s)
        assert (message, logprobs) == cold and cached > 100
        assert s.metric("nibble_prefix_loaded_total") >= 1
    for f in where.iterdir():
        data = bytearray(f.read_bytes())
        data[len(data) // 2] ^= 1
        f.write_bytes(data)
    with closing(Server(nibble, tiny, "--cache-dir", where)) as s:
        message, logprobs, cached = answer(s)
        assert (message, logprobs) == cold and cached == 0
        s.wait_said("W-PREFIX-FILE")


def test_refusals(nibble, tiny, tmp_path):
    def refused(*args, exit):
        return nibble.full("serve", tiny, "--port", 0, *map(str, args), exit=exit).stderr.decode().splitlines()[-1]

    assert "leave out --prefix-cache 0" in refused("--cache-dir", tmp_path, "--prefix-cache", 0, exit=2)
    assert "name it with --cache-dir" in refused("--cache-dir-size", "1G", exit=2)
    (tmp_path / "file").write_text("")
    assert "E-PREFIX-DIR" in refused("--cache-dir", tmp_path / "file", exit=3)
    with closing(Server(nibble, tiny, "--prefix-cache", 1000, "--cache-dir", tmp_path / "d")) as s:
        assert len(s.said("W-PREFIX-SMALL")) == 2 and not s.said("N-PREFIX-DIR")


def test_full_folder(nibble, tiny, cold, tmp_path):
    """The bound holds, and what does not fit costs nothing but computing."""
    with closing(Server(nibble, tiny, "--cache-dir", tmp_path, "--cache-dir-size", 1, "-q")) as s:
        assert answer(s) == (*cold, 0)
    assert sum(os.path.getsize(f) for f in tmp_path.iterdir()) <= 1
