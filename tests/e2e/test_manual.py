"""The man page and `--help` name the same options, command by command."""
import re

import pytest

COMMANDS = ("run", "chat", "serve", "logits", "inspect", "quantize", "check", "tokenize", "detokenize", "render", "bench", "selftest", "eval", "trace")
KINDS = ("eval kl", "eval ppl", "eval gsm8k", "eval accept", "eval ab", "eval load", "eval card")


def man_sections(root):
    """Options (long names) by heading of docs/nibble.1; `, -name` behind a flag counts as one."""
    out, name = {}, None
    for line in (root / "docs/nibble.1").read_text().splitlines():
        if line.startswith((".Ss ", ".Sh ")):
            name = line[4:]
            out[name] = (set(), [])
        elif name:
            out[name][1].append(line)
            if line.startswith(".It Fl "):
                out[name][0].update("-" + f for f in re.findall(r"(?:Fl|,) (-[a-z][a-z-]*)", line))
    return out


def help_options(nibble, command):
    text = nibble(*command.split(), "--help").decode().split("\nExamples\n")[0]
    return set(re.findall(r"^(?:  -\w, |      )(--[a-z][a-z-]*)", text, re.M))


def test_serving_reference(nibble, root):
    """docs/SERVING.md names every option, endpoint, field and error code of the server."""
    page = (root / "docs/SERVING.md").read_text()
    sources = {p.name: p.read_text() for p in (root / "src/serve").glob("*.c")}
    text = "\n".join(sources.values())
    fields = {n for p, s in sources.items() if p.startswith("api_") for names in re.findall(r"(?:known|unserved)\[\] = \{(.*?)\};", s, re.S) for n in re.findall(r'"(\w+)"', names)}
    paths = re.findall(r'\.path = "(.+?)"', text) + [p for p in re.findall(r'\{ "(/.*?)", get_', text)]
    codes = set(re.findall(r'(?:fault_set|refuse)\([^;"]*?\b(?:\d{3}), "([a-z_]+)"', text))
    assert len(fields) > 60 and len(paths) > 12 and len(codes) > 10, "nothing found in the sources: has their form changed?"
    assert sorted(o for o in help_options(nibble, "serve") if not re.search(re.escape(o) + r"(?![\w-])", page)) == []
    assert sorted(n for n in fields if not re.search(rf"\b{n}\b", page)) == []
    assert sorted(p for p in paths if f"`{p}`" not in page) == [] == sorted(c for c in codes if f"`{c}`" not in page)


def test_deployment_files(nibble, root):
    unit, manifest = ((root / "deploy" / name).read_text() for name in ("nibble.service", "kubernetes.yaml"))
    command = re.search(r"^ExecStart=(.*)$", unit, re.M)[1] + re.search(r"args: \[(.*)\]", manifest)[1]
    named = set(re.findall(r"--[a-z][a-z-]*", command))
    assert len(named) >= 5 and named <= help_options(nibble, "serve")
    drain, grace, sleep = (int(re.search(p, manifest)[1]) for p in (r'--drain, "(\d+)"', r"GracePeriodSeconds: (\d+)", r"seconds: (\d+)"))
    assert 5 <= sleep and drain + sleep < grace
    assert set(re.findall(r"httpGet: \{path: (\S+),", manifest)) == {"/ready", "/health"} and "NIBBLE_API_KEY" in manifest


def test_every_command_is_there(nibble, root):
    listed = re.findall(r"^  (\w+) ", nibble("--help").decode().split("\nexamples:")[0], re.M)
    assert sorted(listed) == sorted(COMMANDS)
    page = (root / "docs/nibble.1").read_text()
    assert [c for c in COMMANDS if f"\n.Cm {c}\n" not in page] == []


def test_every_kind_is_there(nibble):
    assert [f"eval {k}" for k in re.findall(r"^  (\w+) ", nibble("eval", "--help").decode().split("\nexamples:")[0], re.M)] == list(KINDS)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "eval"] + list(KINDS))
def test_options(nibble, root, command):
    sections = man_sections(root)
    mine = next(k for k in sections if command in k.split(", "))
    ours = help_options(nibble, command)
    assert len(ours) > 5, "no options found in the help: has its form changed?"
    named = sections[mine][0] | sections["Common"][0]
    if "apply." in sections[mine][1]:
        named |= sections["Generation"][0]
    assert sorted(ours - named) == [], "options that the man page lacks"
    if len(mine.split(", ")) == 1:
        assert sorted(named - ours) == [], "options that the command does not have"
