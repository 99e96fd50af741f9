"""examples/embed.c is what docs/EMBEDDING.md says: it builds from nothing but the library, and answers as `nibble run` does."""
import pathlib
import re
import shlex
import subprocess

import pytest


def text_of(nibble, tiny, text, tokens):
    return nibble.json("run", tiny, "--json", "--temperature", 0, "--no-think", "-p", text, "--max-tokens", tokens)


@pytest.fixture(scope="module")
def example(nibble):
    path = pathlib.Path(nibble.path).parent / "examples/embed"
    assert path.is_file(), f"{path} is missing: run make"
    return path


def test_answers(nibble, example, tiny):
    p = subprocess.run([example, tiny], capture_output=True, text=True, timeout=60)
    assert p.returncode == 0, p.stderr
    answers = {word: text for text, word in re.findall(r"(.*?)\n\[(\w+): [^\]]*\]\n", p.stdout, re.S)}
    whole, cut = text_of(nibble, tiny, "Tom has 3 apples and buys 4. How many?", 64), text_of(nibble, tiny, "Tell me a story.", 8)
    assert whole["finish_reason"] == "stop"
    assert answers == {"stop": whole["text"], "cancelled": cut["text"]}
    for word, r in ("stop", whole), ("cancelled", cut):
        assert f"[{word}: {len(r['prompt_ids'])} prompt tokens, {len(r['output_ids'])} new, accept length " in p.stdout
    assert p.stdout.endswith("\n1 finished, 1 cancelled\n")


def test_errors(example, tmp_path):
    for args, status, said in ((), 2, "E-USAGE"), ((tmp_path,), 3, "E-CKPT-DIR"):
        p = subprocess.run([example, *args], capture_output=True, text=True, timeout=60)
        assert p.returncode == status and said in p.stderr


def test_the_page(root, example, tmp_path):
    """The commands of the page, with this build's library."""
    page = (root / "docs/EMBEDDING.md").read_text()
    command, = re.findall(r"^    (gcc (?:.*\\\n)*.*)", page, re.M)
    flags = example.parents[1] / "nvflags"  # there when CUDA is in the library
    if flags.exists():
        cuda = pathlib.Path(flags.read_text().split()[0]).parents[1]
        more, = re.findall(r"`(-lcudart_static[^`]*)`", page)
        command += " " + " ".join(f"-L{shlex.quote(str(p))}" for p in cuda.glob("lib*")) + " " + more
    library = example.parents[1] / "libnibble.a"
    command = command.replace("build/x86_64-gcc/libnibble.a", shlex.quote(str(library))).replace("-o embed", f"-o {shlex.quote(str(tmp_path / 'embed'))}")
    p = subprocess.run(["bash", "-ec", command], cwd=root, capture_output=True, text=True, timeout=100)
    assert p.returncode == 0, p.stderr
    assert (tmp_path / "embed").is_file()
