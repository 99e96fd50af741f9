"""The template interpreter against jinja2 3.1 set up as HF sets it up: random templates, values, broken templates,
and chat templates in the styles that checkpoints ship. SEED=n chooses other ones (the default is fixed, so that a run says
something about the change it tests), COUNT=n how many.

The program under test is build/ARCH-*/tests/unit/test_jinja --lines (JSON lines in and out, one process for all cases).
"""
import json
import os
import pathlib
import random
import re
import subprocess
import warnings

import pytest

jinja2 = pytest.importorskip("jinja2")
import jinja2.ext  # noqa: E402
from jinja2 import nodes  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402

import jinja_gen  # noqa: E402
import jinja_styles  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
SEED = int(os.environ.get("SEED") or 1)
COUNT = int(os.environ.get("COUNT") or 1500)


class Generation(jinja2.ext.Extension):
    """{% generation %} as HF has it, without the bookkeeping."""
    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_run"), [], [], body).set_lineno(lineno)

    def _run(self, caller):
        return caller()


def hf_environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    return env


ENV = hf_environment()


def reference(template, context):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return True, ENV.from_string(template).render(**context)
    except RecursionError:
        return None, "recursion"
    except Exception as x:  # every error counts the same: only that there is one has to agree
        return False, f"{type(x).__name__}: {x}"


@pytest.fixture(scope="module")
def ours():
    found = os.environ.get("TEST_JINJA") or max(ROOT.glob(f"build/{os.uname().machine}-*/tests/unit/test_jinja"), key=lambda p: p.stat().st_mtime, default=None)
    if not found:
        pytest.skip("tests/unit/test_jinja is not built: run make tests")
    with subprocess.Popen([str(found), "--lines"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as p:
        def render(template, context):
            p.stdin.write(json.dumps({"template": template, "context": context}, ensure_ascii=False).encode() + b"\n")
            p.stdin.flush()
            line = p.stdout.readline()
            assert line, f"the program ended on {template!r}"
            r = json.loads(line)
            return ("text" in r), r.get("text", f"{r.get('id')}: {r.get('error')}")
        yield render
        p.stdin.close()
        assert p.wait() == 0


def known(want, got):
    """Differences that are documented in docs/TEMPLATE.md, not faults."""
    if want[0] is None:
        return True
    if want[0] and not got[0]:
        # 64-bit integers; no complex numbers; jinja2 folds slices of constants that have none into undefined
        return bool(re.search(r"64 bits|complex|not subscriptable|'slice'", got[1]))
    return want[0] and bool(re.search(r"(?i) at 0x[0-9a-f]+|built-in|<bound|<function|<class|itertools|gener.tor.obj", want[1]))


def compare(ours, cases):
    same = 0
    bad = []
    for template, context in cases:
        want, got = reference(template, context), ours(template, context)
        if want == got or (want[0] is False and got[0] is False):
            same += 1
        elif not known(want, got):
            bad.append(f"{template!r}\n  with {context if len(str(context)) < 300 else '...'}\n  jinja2: {want}\n  nibble: {got}")
    assert not bad, f"SEED={SEED}: {len(bad)} differ\n" + "\n".join(bad[:10])
    return same


def test_random_templates(ours):
    assert compare(ours, ((t, jinja_gen.CONTEXT) for t in jinja_gen.templates(SEED, COUNT))) > COUNT * 0.95


def test_broken_templates(ours):
    """Small edits of good templates: both accept or both refuse, and what is accepted gives the same text."""
    rnd = random.Random(SEED)
    # jinja2 drops the dead half of a constant and/or before it looks at its filters
    cases = ((jinja_gen.mutate(rnd, t), jinja_gen.CONTEXT) for t in jinja_gen.templates(SEED + 1, COUNT // 2))
    compare(ours, (c for c in cases if not re.search(r"\b(or|and)\b[^}%]*\|", c[0])))


def test_numbers(ours):
    compare(ours, jinja_gen.number_cases(random.Random(SEED), COUNT // 3))


def test_strings(ours):
    compare(ours, jinja_gen.string_cases(random.Random(SEED), COUNT // 3))


@pytest.mark.parametrize("style", sorted(jinja_styles.TEMPLATES))
def test_chat_styles(ours, style):
    rnd = random.Random(SEED)
    template = jinja_styles.TEMPLATES[style]
    chats = [jinja_styles.chat(rnd) for _ in range(60)]
    assert compare(ours, ((template, c) for c in chats)) == len(chats)
    assert sum(reference(template, c)[0] for c in chats) >= 10, "the style refuses nearly every chat: it tests nothing"
