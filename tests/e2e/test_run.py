"""`nibble run`: the oracle's greedy continuations and draft rounds, options that must not change the text, the JSON report."""
import json

import pytest


@pytest.fixture(scope="module")
def cases(oracle):
    return json.loads((oracle / "greedy.json").read_text())


def run(nibble, tiny, *args, **kw):
    return nibble.json("run", tiny, "--json", *args, **kw)


def test_greedy_continuations_and_rounds(nibble, tiny, cases):
    accepted = rounds = 0
    for c in cases["cases"]:
        r = run(nibble, tiny, "--ids", json.dumps(c["prompt_ids"]), "--temperature", 0, "--spec", 2, "--kv", "f32",
                "--max-tokens", len(c["output_ids"]), "--trace-rounds")
        assert r["schema"] == "nibble.run/1"
        assert r["output_ids"] == c["output_ids"], c["prompt"]
        assert [{k: x[k] for k in ("known", "draft", "target", "accepted")} for x in r["rounds"]] == c["rounds"], c["prompt"]
        s = r["speculative"]
        assert s["rounds"] == len(c["rounds"]) and s["drafted"] == 2 * s["rounds"]
        accepted, rounds = accepted + s["accepted"], rounds + s["rounds"]
    assert (accepted + rounds) / rounds == pytest.approx(cases["mean_accept_length"], abs=1e-12)


@pytest.mark.parametrize("options", [("--spec", 0), ("--spec", 5), ("--threads", 1), ("--isa", "ref"), ("--device", "ref")])
@pytest.mark.parametrize("sampling", [("--temperature", 0), ("--temperature", 1, "--top-k", 20, "--top-p", 0.95, "--seed", 7)])
def test_text_does_not_depend_on_it(nibble, tiny, options, sampling):
    ask = ("-p", "Tell me a story about a brave fox.", "--max-tokens", 48, *sampling)
    assert run(nibble, tiny, *ask, *options)["output_ids"] == run(nibble, tiny, *ask)["output_ids"]


def test_seed_decides(nibble, tiny):
    ask = ("-p", "Tell me a story about a brave fox.", "--temperature", 1.5, "--top-k", 0, "--top-p", 1, "--max-tokens", 32)
    a, b, c = (run(nibble, tiny, *ask, "--seed", s)["output_ids"] for s in (1, 1, 2))
    assert a == b != c


def test_answers_a_word_problem(nibble, tiny):
    problems = [json.loads(s) for s in (tiny / "word_problems.jsonl").read_text().splitlines()[:10]]
    for p in problems:
        r = run(nibble, tiny, "-p", p["question"], "--temperature", 0, "--no-think", "--max-tokens", 200)
        assert r["text"].split("####")[-1].strip() == p["answer"].split("####")[-1].strip()
        assert r["finish_reason"] == "stop"
        assert r["usage"]["completion_tokens"] == len(r["output_ids"]) and r["usage"]["prompt_tokens"] == len(r["prompt_ids"])


def test_thinking_is_kept_apart(nibble, tiny):
    r = run(nibble, tiny, "-p", "Ada has 12 apples. Ben has 30 apples. How many apples do they have together?", "--temperature", 0,
            "--think", "--max-tokens", 300)
    assert r["reasoning"] and "</think>" not in r["text"] and "42" in r["text"]


def test_stop_text_cuts_before_it(nibble, tiny):
    ask = ("-p", "Ada has 12 apples. Ben has 30 apples. How many apples do they have together?", "--temperature", 0, "--no-think")
    whole = run(nibble, tiny, *ask)["text"]
    assert "####" in whole
    cut = run(nibble, tiny, *ask, "--stop", "####")
    assert cut["text"] == whole.split("####")[0] and cut["finish_reason"] == "stop"


def test_length_limit(nibble, tiny):
    r = run(nibble, tiny, "-p", "Tell me a story.", "--temperature", 0, "--max-tokens", 3)
    assert len(r["output_ids"]) == 3 and r["finish_reason"] == "length"


def test_plain_output_is_the_text(nibble, tiny):
    ask = ("-p", "Ada has 12 apples. Ben has 30 apples. How many apples do they have together?", "--temperature", 0, "--no-think")
    assert nibble("run", tiny, *ask).decode().rstrip("\n") == run(nibble, tiny, *ask)["text"].rstrip("\n")


def test_logprobs(nibble, tiny):
    r = run(nibble, tiny, "-p", "What is 2 + 2?", "--temperature", 0, "--max-tokens", 5, "--logprobs", 3)
    assert len(r["logprobs"]) == len(r["output_ids"])


def test_tool_call(nibble, tiny, tmp_path, oracle):
    request = next(c["request"] for c in json.loads((oracle / "chat.json").read_text()) if c["name"] == "tools only")
    (tmp_path / "r.json").write_text(json.dumps({**request, "enable_thinking": False}))
    r = run(nibble, tiny, "--request", tmp_path / "r.json", "--temperature", 0, "--max-tokens", 200)
    assert isinstance(r["tool_calls"], list) and r["finish_reason"] in ("stop", "tool_calls", "length")


PENALTIES = ("--presence-penalty", 1.1, "--frequency-penalty", 0.2, "--repetition-penalty", 1.1, "--logit-bias", "17=1.5")


@pytest.mark.parametrize("sampling", [("--temperature", 0), ("--temperature", 1, "--top-k", 20, "--top-p", 0.95, "--seed", 7)])
def test_penalties_with_and_without_drafts(nibble, tiny, sampling):
    ask = ("-p", "Tell me a story about a brave fox.", "--max-tokens", 48, *sampling)
    off = run(nibble, tiny, *ask, *PENALTIES, "--spec", 0)
    assert off["output_ids"] != run(nibble, tiny, *ask)["output_ids"]
    assert off["sampling"]["presence_penalty"] == 1.1 and off["sampling"]["repetition_penalty"] == 1.1
    for depth in (1, 2, 3):
        assert run(nibble, tiny, *ask, *PENALTIES, "--spec", depth)["output_ids"] == off["output_ids"]


def test_penalties_of_the_checkpoint(nibble, tiny, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for f in tiny.iterdir():
        if f.name != "generation_config.json":
            (model / f.name).symlink_to(f.resolve())
    own = json.loads((tiny / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**own, "repetition_penalty": 1.3}))
    ask = ("-p", "Tell me a story about a brave fox.", "--max-tokens", 40, "--temperature", 0)
    plain, given = run(nibble, tiny, *ask), run(nibble, tiny, *ask, "--repetition-penalty", 1.3)
    assert run(nibble, model, *ask)["output_ids"] == given["output_ids"] != plain["output_ids"]
    assert run(nibble, model, *ask, "--repetition-penalty", 1)["output_ids"] == plain["output_ids"]


def test_bias_stop_ids_and_min_tokens(nibble, tiny):
    ask = ("-p", "What is 2 + 2?", "--temperature", 0, "--no-think", "--max-tokens", 40)
    plain = run(nibble, tiny, *ask)
    first, third, last = plain["output_ids"][0], plain["output_ids"][2], plain["output_ids"][-1]
    assert plain["finish_reason"] == "stop" and len(plain["output_ids"]) < 30
    assert run(nibble, tiny, *ask, "--logit-bias", f"{first}=-100")["output_ids"][0] != first
    forced = run(nibble, tiny, *ask, "--logit-bias", f"{third}=100", "--max-tokens", 5)
    assert forced["output_ids"] == [third] * 5
    stopped = run(nibble, tiny, *ask, "--stop-id", third)
    assert stopped["output_ids"] == plain["output_ids"][:plain["output_ids"].index(third) + 1]
    assert stopped["finish_reason"] == "stop"
    longer = run(nibble, tiny, *ask, "--min-tokens", 35)["output_ids"]
    assert len(longer) >= 36 and last not in longer[:35]
    on = run(nibble, tiny, *ask, "--ignore-eos")
    assert len(on["output_ids"]) == 40 and on["finish_reason"] == "length" and last in on["output_ids"]


def test_min_tokens_holds_for_stop_texts(nibble, tiny):
    ask = ("-p", "Ada has 12 apples. Ben has 30 apples. How many apples do they have together?", "--temperature", 0, "--no-think")
    whole = run(nibble, tiny, *ask)
    n = len(whole["output_ids"])
    assert run(nibble, tiny, *ask, "--stop", "####", "--min-tokens", n - 1)["text"] == whole["text"]
    assert run(nibble, tiny, *ask, "--stop", "####", "--min-tokens", 2)["text"] == whole["text"].split("####")[0]
