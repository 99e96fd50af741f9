"""nibble eval on the embedded model: what is known beforehand comes out, and what is wrong is named."""
import http.server
import itertools
import json
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
AMAX = ROOT / "tests/oracle/qwen36-tiny/nvfp4/modelopt-cuda/amax.safetensors"
MATH = ROOT / "assets/qwen36-tiny/word_problems.jsonl"


@pytest.fixture(scope="module")
def nvfp4(nibble, tiny, tmp_path_factory):
    d = tmp_path_factory.mktemp("nvfp4") / "m"
    nibble("quantize", tiny, "-o", d, "--amax", AMAX, "--mtp-scales", "generous", "-q")
    return d


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    f = tmp_path_factory.mktemp("ids") / "ids.json"
    f.write_text(json.dumps([[(7 * i + 3 * k * k) % 1500 + 20 for k in range(n)] for i, n in enumerate((24, 17, 40))]))
    return f


# ---- kl and ppl


def log_softmax(x):
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_kl_is_numpys(nibble, tiny, nvfp4, ids, tensors, tmp_path):
    """Against a model and against its saved logits, the figures that numpy makes of the same logits."""
    for name, model in (("a", nvfp4), ("b", tiny)):
        nibble("logits", model, "--ids", ids, "-o", tmp_path / f"{name}.safetensors", "-q")
    a, b = tensors(tmp_path / "a.safetensors"), tensors(tmp_path / "b.safetensors")
    kl, same, nll = [], [], []
    for i, seq in enumerate(json.loads(ids.read_text())):
        p, q = log_softmax(b[f"{i}.logits"]), log_softmax(a[f"{i}.logits"])
        kl += list((np.exp(p) * (p - q)).sum(-1))
        same += list(p.argmax(-1) == q.argmax(-1))
        nll += [-q[t, seq[t + 1]] for t in range(len(seq) - 1)]
    for against in (tiny, tmp_path / "b.safetensors"):
        r = nibble.json("eval", "kl", nvfp4, "--against", against, "--ids", ids, "--json")
        f = r["all"]
        assert r["schema"] == "nibble.eval.kl/1" and f["texts"] == 3 and f["positions"] == len(kl)
        assert f["kl_mean"][0] == pytest.approx(np.mean(kl), rel=1e-9) and f["kl_max"] == pytest.approx(max(kl), rel=1e-9)
        assert f["kl_mean"][1] <= f["kl_mean"][0] <= f["kl_mean"][2]
        assert f["same_top"][0] == pytest.approx(np.mean(same)) and f["nll"][0] == pytest.approx(np.mean(nll), rel=1e-9)


def test_kl_of_a_model_with_itself(nibble, tiny, ids):
    f = nibble.json("eval", "kl", tiny, "--against", tiny, "--ids", ids, "--json", "--threads", 1)["all"]
    assert f["kl_mean"] == [0, 0, 0] and f["same_top"][0] == 1 and f["nll"] == f["reference_nll"] and f["nll_difference"] == [0, 0, 0]


def test_parts(nibble, tiny, nvfp4, tmp_path):
    r = nibble.json("eval", "kl", nvfp4, "--against", tiny, "--samples", 6, "--seq", 48, "--per-layer", "--html", tmp_path / "r.html", "--json")
    parts = {p["name"]: p["kl_mean"][0] for p in r["parts"]}
    assert len(parts) == 6 + 8 and parts["all router"] == parts["all head"] == 0  # they are not quantized
    assert parts["all gdn"] > 0 and parts["all attention"] > 0 and parts["all experts"] > 0 and parts["all shared"] > 0
    assert all(parts[f"layer {i} ({'attention' if i % 4 == 3 else 'gdn'})"] > 0 for i in range(8))
    kinds = {g["name"]: g for g in r["by_kind"]}
    assert len(kinds) > 3 and sum(g["positions"] for g in kinds.values()) == r["all"]["positions"] == sum(g["positions"] for g in r["by_position"])
    html = (tmp_path / "r.html").read_text()
    assert html.startswith("<!doctype html>") and html.count("<svg") == 2 and "layer 7 (attention)" in html and "src=" not in html and "nan" not in html


def test_ppl(nibble, tiny, ids):
    r = nibble.json("eval", "ppl", tiny, "--ids", ids, "--json")
    assert r["all"]["perplexity"] == pytest.approx(np.exp(r["all"]["nll"][0])) and "kl_mean" not in r["all"]
    skipped = nibble.json("eval", "ppl", tiny, "--ids", ids, "--skip", 10, "--json")["all"]
    assert skipped["positions"] == r["all"]["positions"] - 30


def test_kl_errors(nibble, tiny, nvfp4, ids, tmp_path):
    def error(*args, exit=3):
        line = nibble.full("eval", *args, exit=exit).stderr.decode().splitlines()[-1]
        return re.match(r"nibble: (\S+): ", line)[1]
    assert error("kl", tiny, exit=2) == error(exit=2) == error("kk", exit=2) == "E-USAGE"
    other = tmp_path / "other.json"
    other.write_text("[[1, 2, 3], [4, 5, 6], [7, 8], [9, 10]]")
    nibble("logits", tiny, "--ids", other, "-o", tmp_path / "l.safetensors", "-q")
    three = tmp_path / "five.json"
    three.write_text("[[1, 2, 3], [4, 5, 6], [7, 8], [9, 10], [11, 12]]")
    assert error("kl", tiny, "--against", tmp_path / "l.safetensors", "--ids", three) == "E-EVAL-LOGITS"
    assert error("kl", tiny, "--against", tmp_path / "l.safetensors", "--ids", other, "--per-layer", exit=2) == "E-USAGE"
    assert error("ppl", tiny, "--ids", ids, "--skip", 1000) == "E-CALIB-EMPTY"


def test_models_of_other_shapes(nibble, tiny, ids, tmp_path):
    small = "--hidden 64 --heads 2 --kv-heads 1 --lin-k-heads 1 --lin-v-heads 2 --lin-dim 16 --head-dim 32 --experts 2 --topk 1 --moe-inter 32".split()
    for name, options in (("a", ["--layers", "4", "--vocab", "2048"]), ("b", ["--layers", "8", "--vocab", "2048"])):
        subprocess.run([sys.executable, ROOT / "tools/make_model.py", tmp_path / name, *small, "--tokenizer", "/nonexistent", *options], check=True, capture_output=True)
    for id, args in (("E-EVAL-VOCAB", (tiny, "--against", tmp_path / "a")), ("E-EVAL-SHAPE", (tmp_path / "a", "--against", tmp_path / "b", "--per-layer"))):
        assert f"nibble: {id}: " in nibble.full("eval", "kl", *args, "--ids", ids, exit=3).stderr.decode().splitlines()[-1]


@pytest.mark.parametrize("kind", [("ppl", "--samples", 0, "--seq", 0), ("accept", "--depth", 0), ("ab",)], ids=lambda k: k[0])
def test_interrupted(nibble, tiny, kind):
    models = [tiny, tiny] if kind[0] == "ab" else [tiny]
    p = subprocess.Popen([nibble.path, "eval", *map(str, kind), *map(str, models), "--limit" if kind[0] != "ppl" else "--seed", "0", "--threads", "1", "-v"],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    time.sleep(1)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=60)
    if p.returncode == 0:
        pytest.skip("was done before the signal came")
    assert p.returncode == 130 and out == b"" and err.decode().splitlines()[-1].startswith("nibble: E-EVAL-STOPPED: "), err


# ---- accept


def test_accept(nibble, tiny):
    r = nibble.json("eval", "accept", tiny, "--data", f"math={MATH}", "--limit", 6, "--no-think", "--depth", "0,1,2", "--concurrency", "1,3", "--sampling",
                    "both", "--json")
    rows = {(x["sampling"], x["concurrency"], x["depth"]): x for x in r["rows"]}
    assert r["schema"] == "nibble.eval.accept/1" and len(rows) == 12
    for (sampling, seqs, depth), x in rows.items():
        assert x["workload"] == "math" and x["prompts"] == 6 and x["tokens_per_second"] > 0
        assert x["tokens"] == rows[(sampling, 1, 0)]["tokens"], "drafts and company change no output"
        if depth == 0:
            assert x["accept_length"] is None
        else:
            assert x["accept_length"] == rows[(sampling, 1, depth)]["accept_length"] and 1.5 < x["accept_length"] <= depth + 1
            assert x["accept_length"] == pytest.approx(1 + sum(np.cumprod([x[f"rate_{i}"] for i in range(1, depth + 1)])), rel=0.05)


def test_accept_of_the_built_in_workloads(nibble, tiny):
    r = nibble.json("eval", "accept", tiny, "--limit", 3, "--depth", 2, "-n", 24, "--json")
    assert [x["workload"] for x in r["rows"]] == ["math", "code", "chat", "tools", "stories"] and all(x["prompts"] == 3 for x in r["rows"])


def test_accept_of_conversations(nibble, tiny, tmp_path):
    line = {"messages": [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}], "kind": "chat"}
    (tmp_path / "c.jsonl").write_text(json.dumps(line) + "\n\n" + json.dumps({"prompt": "Tell me a story."}) + "\n" + json.dumps({"ids": [1, 2, 3]}) + "\n")
    r = nibble.json("eval", "accept", tiny, "--data", tmp_path / "c.jsonl", "--depth", 2, "-n", 12, "--json")
    assert [x["workload"] for x in r["rows"]] == ["c.jsonl"] and r["rows"][0]["prompts"] == 3
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{"nothing": 1}\n')
    err = nibble.full("eval", "accept", tiny, "--data", tmp_path / "bad.jsonl", exit=3).stderr.decode().splitlines()[-1]
    assert err.startswith("nibble: E-EVAL-LINE: ") and "line 2" in err


# ---- ab


def test_heads(nibble, tiny, tmp_path):
    """The open question of the published checkpoint, answered in one command: what a quantized draft head costs."""
    p = nibble.full("eval", "ab", "--heads", tiny, "--limit", 24, "-n", 64, "--samples", 24, "--work", tmp_path / "w", "--json")
    r = json.loads(p.stdout)
    arms = {x["arm"]: x for x in r["rows"]}
    assert list(arms) == ["BF16", "calibrated", "generous", "borrowed KV", "KV scale 1.0", "KV scale wrong", "W4A16"]
    assert all(x["different_outputs"] == 0 and x["tokens"] == arms["BF16"]["tokens"] for x in arms.values())
    assert arms["BF16"]["formats"] == "BF16, KV BF16" and arms["W4A16"]["formats"].startswith("NVFP4 W4A16")
    lo, hi = map(float, arms["KV scale wrong"]["difference_95"].split(" to "))
    assert lo < hi < 0, "a deliberately wrong scale is seen"
    assert abs(arms["calibrated"]["difference"]) < 0.1
    assert sorted(f.name for f in (tmp_path / "w").iterdir()) == ["amax.safetensors", "bf16", "borrow", "calibrated", "generous"]
    # and again on a trunk that is there: the calibrated arm is the same
    again = nibble.json("eval", "ab", "--heads", tiny, "--trunk", tmp_path / "w/calibrated", "--limit", 6, "-n", 32, "--samples", 24, "--json", "-q")
    assert len(again["rows"]) == 7 and all(x["different_outputs"] == 0 for x in again["rows"])


def test_models(nibble, tiny, nvfp4):
    r = nibble.json("eval", "ab", tiny, nvfp4, "--data", MATH, "--limit", 4, "--no-think", "--json", "--one-at-a-time")
    assert [x["arm"] for x in r["rows"]] == [str(tiny), str(nvfp4)] and any("one arm after the other" in n for n in r["notes"])
    nibble.full("eval", "ab", tiny, exit=2)
    nibble.full("eval", "ab", tiny, nvfp4, "--trunk", nvfp4, exit=2)


def test_heads_of_what_is_no_model(nibble, tmp_path):
    err = nibble.full("eval", "ab", "--heads", tmp_path, "--work", tmp_path / "w", exit=3).stderr.decode().splitlines()
    assert err[-1].startswith("nibble: E-EVAL-HEADS: ") and any("E-CKPT-DIR" in s for s in err)


# ---- gsm8k


def records(path):
    lines = [json.loads(s) for s in path.read_text().splitlines()]
    return lines[0], {r["i"]: r for r in lines[1:]}


@pytest.mark.parametrize("mode", ["plain", "thinking"])
def test_accuracy_of_the_oracle(nibble, tiny, oracle, mode):
    """All 500 word problems: the share that transformers' greedy decoding gets right."""
    r = nibble.json("eval", "gsm8k", tiny, "--think" if mode == "thinking" else "--no-think", "--json")
    want = json.loads((oracle / "accuracy.json").read_text())[mode]
    assert r["questions"] == 500 and r["accuracy"][0] == r["accuracy_flexible"][0] == want and r["empty"] == r["truncated"] == r["errors"] == 0
    assert r["accuracy"][1] == pytest.approx(0.9924, abs=1e-4) and r["accept_length"] > 2.9


def test_nvfp4_beside_bf16(nibble, tiny, nvfp4, tmp_path):
    nibble("eval", "gsm8k", tiny, "--no-think", "--limit", 100, "-o", tmp_path / "a.jsonl", "-q")
    r = nibble.json("eval", "gsm8k", nvfp4, "--no-think", "--limit", 100, "--data", MATH, "--compare", tmp_path / "a.jsonl", "--json")
    c = r["compared"]
    assert c["questions"] == 100 and c["both"] + c["only_this"] + c["only_other"] + c["neither"] == 100 and 0 <= c["mcnemar_p"] <= 1
    assert r["accuracy"][0] >= 0.95


def test_wrong_answers_are_seen(nibble, tiny, tmp_path):
    """Answers that are off by one: the model is wrong everywhere, and the gate says so."""
    lines = [json.loads(s) for s in MATH.read_text().splitlines()[:12]]
    for x in lines:
        x["answer"] = str(int(x["answer"].split("####")[1]) + 1)
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    r = nibble.json("eval", "gsm8k", tiny, "--no-think", "--data", tmp_path / "d.jsonl", "--require", 0.5, "--json", exit=1)
    assert r["right"] == 0 and r["errors"] == 0 and r["accuracy"][2] < 0.3


def test_short_answers_are_counted(nibble, tiny):
    r = nibble.json("eval", "gsm8k", tiny, "--think", "--limit", 8, "-n", 4, "--json")
    assert r["truncated"] == 8 and r["empty"] == 8 and r["right"] == 0


def test_shots(nibble, tiny, tmp_path):
    nibble("eval", "gsm8k", tiny, "--shots", 3, "--limit", 4, "--no-think", "-o", tmp_path / "t.jsonl", "-q")
    head, got = records(tmp_path / "t.jsonl")
    lines = [json.loads(s)["question"] for s in MATH.read_text().splitlines()]
    assert head["shots"] == 3 and [got[i]["question"] for i in range(4)] == lines[3:7]


def test_resume(nibble, tiny, tmp_path):
    """A run that was cut off in the middle of a line goes on to the same answers; other settings are refused."""
    args = ("eval", "gsm8k", tiny, "--no-think", "--limit", 12, "-q")
    nibble(*args, "-o", tmp_path / "whole.jsonl")
    whole = (tmp_path / "whole.jsonl").read_bytes()
    for cut in (len(whole) // 2, len(whole) - 1, 10, 0):
        part = tmp_path / f"{cut}.jsonl"
        part.write_bytes(whole[:cut])
        assert "is there already" in nibble.full(*args, "-o", part, exit=3).stderr.decode()
        nibble(*args, "-o", part, "--resume")
        assert records(part) == records(tmp_path / "whole.jsonl")
    assert "other settings" in nibble.full(*args, "-o", tmp_path / "whole.jsonl", "--resume", "--seed", 5, exit=3).stderr.decode()
    (tmp_path / "bad.jsonl").write_bytes(whole + b"{]\n")
    assert "E-EVAL-TRANSCRIPT" in nibble.full(*args, "--compare", tmp_path / "bad.jsonl", exit=3).stderr.decode()


class Stub(http.server.BaseHTTPRequestHandler):
    """A server with every fault of the field: each question's answer depends on its place."""

    def do_GET(self):
        self.reply(200, {"data": [{"id": "stub"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "stub" and body["temperature"] == 0
        i = self.server.asked.index(body["messages"][-1]["content"])
        if i == 0:
            self.reply(200, {"choices": [{"message": {"content": "#### 1"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 3}})
        elif i == 1:
            self.reply(200, {"choices": [{"message": {"content": None, "reasoning_content": "hm"}, "finish_reason": "length"}]})
        elif i == 2:
            self.reply(503, {"error": {"message": "too busy"}})
        elif i == 3:
            self.close_connection = True  # no answer at all
        elif i == 4:
            self.reply(200, {"nothing": 1})
        else:
            self.reply(200, None)

    def reply(self, status, value):
        body = b"not JSON" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_a_server_with_faults(nibble, tmp_path):
    questions = [f"question {i}" for i in range(6)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"question": q, "answer": "1"}) + "\n" for q in questions))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.asked = questions
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        r = nibble.json("eval", "gsm8k", "--url", url, "--data", tmp_path / "d.jsonl", "-o", tmp_path / "t.jsonl", "--concurrency", 3, "--json")
        assert (r["questions"], r["right"], r["empty"], r["truncated"], r["errors"]) == (6, 1, 1, 1, 4)
        _, got = records(tmp_path / "t.jsonl")
        assert got[1]["reasoning"] == "hm" and "503" in got[2]["error"] and "too busy" in got[2]["error"] and "no answer" in got[3]["error"]
    finally:
        server.shutdown()
        server.server_close()
    last = nibble.full("eval", "gsm8k", "--url", url, "--data", tmp_path / "d.jsonl", exit=4).stderr.decode().splitlines()[-1]
    assert last.startswith("nibble: E-EVAL-SERVER: ") and "connection refused" in last
    assert "E-EVAL-URL" in nibble.full("eval", "gsm8k", "--url", "https://x", "--data", tmp_path / "d.jsonl", exit=2).stderr.decode()


# ---- load


def test_load(nibble, tiny, tmp_path):
    r = nibble.json("eval", "load", tiny, "--requests", 12, "--prompt-words", 30, "-n", 24, "--concurrency", "1,6", "--greedy", "--csv", tmp_path / "l.csv",
                    "--svg", tmp_path / "l.svg", "--json")
    assert r["schema"] == "nibble.eval.load/1" and r["model"] == "qwen36-tiny" and [x["concurrency"] for x in r["rows"]] == [1, 6]
    for x in r["rows"]:
        assert x["failed"] == 0 and x["output_tokens"] == 24 and x["prompt_tokens"] > 30
        assert 0 < x["ttft_p50"] <= x["ttft_p99"] <= x["e2e_p99"] and 0 < x["itl_p50"] <= x["itl_p99"] and x["fairness"] >= 1
        assert x["tokens_per_second"] == pytest.approx(12 * 24 / x["seconds"], rel=1e-6)
    assert (tmp_path / "l.csv").read_text().count("\n") == 3 and "<svg" in (tmp_path / "l.svg").read_text()


def test_load_from_a_trace(nibble, tiny, tmp_path):
    lines = [{"prompt": f"Count {i}.", "at": 0.3 * i, "max_tokens": 3 + i} for i in range(4)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    r = nibble.json("eval", "load", tiny, "--data", tmp_path / "t.jsonl", "--json")
    x, = r["rows"]
    assert x["loop"] == "open" and x["requests"] == 4 and x["output_tokens"] == 4.5 and x["seconds"] > 0.85


class Parrot(http.server.BaseHTTPRequestHandler):
    """Fast and broken: one text for everybody, the same words over and over; every fourth answer fails after it began."""

    def do_GET(self):
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "default" and body["stream"] and body["ignore_eos"]
        n = next(self.server.n)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for _ in range(40):
            self.wfile.write(b'data: {"choices":[{"delta":{"content":"the cat sat on the mat "}}]}\n\n')
        if n % 4 == 3:
            self.wfile.write(b'data: {"error":{"message":"the engine died"}}\n\n')
        self.wfile.write(b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":240}}\n\ndata: [DONE]\n\n')

    log_message = Stub.log_message


def test_collapse_is_seen(nibble):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Parrot)
    server.n = itertools.count()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        r = nibble.json("eval", "load", "--url", f"http://127.0.0.1:{server.server_port}", "--requests", 8, "--concurrency", "2", "--json", exit=1)
    finally:
        server.shutdown()
        server.server_close()
    x, = r["rows"]
    assert x["failed"] == 2 and x["loops"] == 6 and x["same_text"] == 6 and x["type_token"] < 0.1 and x["top_word"] == pytest.approx(1 / 3, abs=0.01)
    assert any("the engine died" in n for n in r["notes"]) and any(n.startswith("FAILED: answers repeat") for n in r["notes"])


def test_load_without_a_server(nibble, tmp_path):
    assert "E-EVAL-SERVER" in nibble.full("eval", "load", "--url", "http://127.0.0.1:9", exit=4).stderr.decode()
    assert "nibble serve did not start: nibble: E-" in nibble.full("eval", "load", tmp_path, exit=3).stderr.decode()


# ---- card


def test_card(nibble, tiny, nvfp4, tmp_path):
    """Figures of the card are those of the results; what was not measured is said; the commands are in it."""
    for name, args in (("check", ("check", nvfp4)), ("kl", ("eval", "kl", nvfp4, "--against", tiny, "--samples", 3, "--seq", 24)),
                       ("ab", ("eval", "ab", tiny, nvfp4, "--data", MATH, "--limit", 3, "--no-think"))):
        (tmp_path / f"{name}.json").write_bytes(nibble(*args, "--json"))
    results = [x for n in ("check", "kl", "ab") for x in ("--results", tmp_path / f"{n}.json")]
    card = nibble("eval", "card", nvfp4, "--name", "Tiny", *results).decode()
    kl = json.loads((tmp_path / "kl.json").read_text())
    assert card.startswith("# Tiny\n") and "Verdict **sound**" in card and f"mean: {kl['all']['kl_mean'][0]:.5f} " in card
    assert kl["command"] == f"nibble eval kl {nvfp4} --against {tiny} --samples 3 --seq 24 --json" and kl["command"] in card
    assert card.count("Not measured.") == 2 and "## Word problems\n\nNot measured." in card and "| experts | NVFP4 | 384 |" in card
    nibble("eval", "card", nvfp4, *results, "-o", tmp_path / "README.md")
    assert (tmp_path / "README.md").read_text().splitlines()[1:] == card.splitlines()[1:]
    (tmp_path / "x.json").write_text('{"schema": "other/1"}')
    assert "nibble: E-EVAL-RESULTS: " in nibble.full("eval", "card", nvfp4, "--results", tmp_path / "x.json", exit=3).stderr.decode()
    hostile = {"schema": "nibble.eval.ab/1", "rows": [1, "x", {"arm": 3}, []], "notes": [7, {}], "command": []}
    (tmp_path / "x.json").write_text(json.dumps(hostile))
    nibble("eval", "card", nvfp4, "--results", tmp_path / "x.json")
