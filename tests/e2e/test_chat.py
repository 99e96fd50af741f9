"""`nibble chat`: each turn is what `nibble run` answers to the whole conversation, from no more than its new tokens."""
import os
import json
import re
import signal
import subprocess

import pytest

TURNS = ("Ada has 12 apples. Ben has 30 apples. How many apples do they have together?", "How so?", "And if Tom has 5 more?", "Tell me a story about a fox.")


def talk(nibble, tiny, *args, lines, **kw):
    """Standard output and the statistics of each turn: prompt, output and kept tokens."""
    p = nibble.full("chat", tiny, *args, stdin="\n".join(lines).encode() + b"\n", **kw)
    said = p.stderr.decode()
    return p.stdout.decode(), [tuple(map(int, m)) for m in re.findall(r"\((\d+) \+ (\d+) tokens, (\d+) kept from before, ", said)], said


class Asked:
    """The same conversation, each turn a `run` of its own."""

    def __init__(self, nibble, tiny, path, *args, think=None, system=None):
        self.nibble, self.tiny, self.path, self.args, self.think = nibble, tiny, path / "request.json", args, think
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, text):
        self.messages.append({"role": "user", "content": text})
        self.path.write_text(json.dumps({"messages": self.messages, **({} if self.think is None else {"enable_thinking": self.think})}))
        r = self.nibble.json("run", self.tiny, "--request", self.path, "--json", *self.args)
        self.messages.append({"role": "assistant", "content": r["text"], **({"reasoning_content": r["reasoning"]} if r["reasoning"] else {})})
        return r


def header(ids):
    """Where the last turn of a rendered prompt begins: the words after which the model speaks."""
    return len(ids) - 1 - ids[::-1].index(ids[0])


@pytest.mark.parametrize("sampling", [("--temperature", 0), ("--temperature", 1, "--seed", 11), ("--temperature", 1, "--seed", 11, "--spec", 0, "--presence-penalty", 1),
                                      ("--temperature", 0, "--stop", "=", "--spec", 5, "--head", "screened")])
@pytest.mark.parametrize("think", [False, True])
def test_turns(nibble, tiny, tmp_path, sampling, think):
    args = (*sampling, "--max-tokens", 48)
    out, turns, _ = talk(nibble, tiny, *args, "--think" if think else "--no-think", lines=TURNS)
    asked = Asked(nibble, tiny, tmp_path, *args, think=think)
    results = [asked.ask(t) for t in TURNS]
    assert out == "".join(r["text"] + "\n" for r in results)
    assert [t[:2] for t in turns] == [(len(r["prompt_ids"]), len(r["output_ids"])) for r in results]
    known = [0] + [header(r["prompt_ids"]) for r in results[:-1]]
    for (prompt, _, kept), before, r in zip(turns, known, results):
        assert before <= kept < prompt, "a turn computed again what an earlier one had"
        assert r["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert known[1] > 20


def test_commands(nibble, tiny, tmp_path):
    args = ("--temperature", 0, "--max-tokens", 40)
    out, turns, _ = talk(nibble, tiny, *args, "--no-think", lines=(TURNS[0], "/reset", TURNS[0], "/think", TURNS[1], "/system Be brief.", TURNS[1], "/help", "/quit", TURNS[2]))
    a = Asked(nibble, tiny, tmp_path, *args, think=False)
    first = a.ask(TURNS[0])
    a.think = True
    second = a.ask(TURNS[1])
    third = Asked(nibble, tiny, tmp_path, *args, think=True, system="Be brief.").ask(TURNS[1])
    new = "(a new conversation)\n"
    shown = "".join((first["text"] + "\n", new, first["text"] + "\n", second["text"] + "\n", new, third["text"] + "\n"))
    assert out.startswith(shown + "/reset ") and len(turns) == 4
    assert second["reasoning"] and turns[1][2] == turns[1][0] - 1, "the same conversation again is known too"
    assert turns[2][2] >= header(first["prompt_ids"])


def test_thought_goes_to_standard_error(nibble, tiny, tmp_path):
    out, _, said = talk(nibble, tiny, "--temperature", 0, "--max-tokens", 200, "--think", lines=TURNS[:1])
    r = Asked(nibble, tiny, tmp_path, "--temperature", 0, "--max-tokens", 200, think=True).ask(TURNS[0])
    assert r["reasoning"] and r["reasoning"].strip() in said and out == r["text"] + "\n"


def test_failed_turn_ends_a_script(nibble, tiny):
    out, turns, said = talk(nibble, tiny, "--ctx", 64, "--max-tokens", 4, "--no-think", "--temperature", 0, lines=("hi", "word " * 100, "hi"), exit=3)
    assert len(turns) == 1 and "E-ENGINE-CONTEXT" in said and out.count("\n") == 1


def test_full_context_is_said(nibble, tiny):
    _, turns, said = talk(nibble, tiny, "--ctx", 64, "--ignore-eos", "--no-think", "--temperature", 0, lines=("hi",))
    assert "(the context of 64 tokens is full: /reset starts anew)" in said and sum(turns[0][:2]) == 65


def test_without_memory_for_earlier_turns(nibble, tiny):
    """A limit between what the sequence needs and what the cache would like: the same answers, computed whole."""
    args = ("--temperature", 0, "--max-tokens", 24, "--no-think")
    plan = nibble.full("run", tiny, "-v", "-p", "hi", "--max-tokens", 1, "--no-think").stderr.decode()
    total = float(re.search(r"N-ENGINE-MEMORY: .*?: ([0-9.]+) GB: ", plan)[1])
    want, kept, _ = talk(nibble, tiny, *args, lines=TURNS)
    got, turns, said = talk(nibble, tiny, *args, "--memory", int((total + 0.02) * 1e9), lines=TURNS)
    assert got == want and [t[2] for t in turns] == [0] * len(TURNS) and "E-MACHINE-PLAN" not in said
    assert sum(t[2] for t in kept) > 60
    talk(nibble, tiny, *args, "--memory", "1MB", lines=TURNS, exit=4)


def test_interrupt_stops_the_answer_only(nibble, tiny):
    p = subprocess.Popen([nibble.path, "chat", tiny, "--temperature", "0", "--no-think", "--ignore-eos", "--max-tokens", "30000"], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    try:
        for line in TURNS[:2]:
            p.stdin.write(line.encode() + b"\n")
            p.stdin.flush()
            assert p.stdout.read(1)
            p.send_signal(signal.SIGINT)
            while (said := p.stderr.readline()) and b"(stopped)" not in said:
                pass
            assert b"(stopped)" in said
            turn = re.match(rb"\((\d+) \+ (\d+) tokens, (\d+) kept", p.stderr.readline())
            assert turn and int(turn[2]) < 30000
            os.set_blocking(p.stdout.fileno(), False)  # all of the answer is there: what comes next is the next one's
            while p.stdout.read(1 << 16):
                pass
            os.set_blocking(p.stdout.fileno(), True)
        assert int(turn[3]) > 0, "what came before an interrupt is known afterwards"
        p.stdin.close()
        assert p.wait(60) == 0
    finally:
        p.kill()
        p.wait()
