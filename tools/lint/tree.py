#!/usr/bin/env python3
"""The tree itself: sizes, line lengths, stray bytes, links of the pages, nothing of one machine in tracked files."""
import os
import pathlib
import re
import subprocess
import sys

MAX_LINES, MAX_COLUMNS, MAX_BYTES = 1000, 130, 12 << 20
DATA = ("assets/", "tests/oracle/", "tests/fuzz/corpus/")
# Absolute folders that only exist on somebody's machine. Assembled so that this file does not match itself.
MACHINE = re.compile(r"(?<![\w.}~-])/" + r"(home|Users|work|root|opt|mnt|scratch)/" + r"[\w.]")
bad, notes = [], []

files = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture_output=True, check=True).stdout
for name in filter(None, files.decode().split("\0")):
    p = pathlib.Path(name)
    if not p.is_file() or p.is_symlink():
        continue
    if p.stat().st_size > MAX_BYTES:
        bad.append(f"{name}: {p.stat().st_size >> 20} MB is too large for the repository")
    if name.startswith(DATA) and p.suffix != ".md":
        continue
    raw = p.read_bytes()
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        if not name.startswith("tests/"):
            bad.append(f"{name}: not UTF-8")
        continue
    lines = text.split("\n")
    source = p.suffix in (".c", ".h", ".py", ".sh", ".cu")
    for n, line in enumerate(lines, 1):
        if m := MACHINE.search(line):
            bad.append(f"{name}:{n}: a path of one machine ({m[0]}...)")
        if re.match(r"(<{7}|>{7}|={7})( |$)", line):
            bad.append(f"{name}:{n}: merge conflict marker")
        if source and p.suffix in (".c", ".h") and name.startswith("src/") and len(line) > MAX_COLUMNS and "http" not in line:
            bad.append(f"{name}:{n}: {len(line)} columns (at most {MAX_COLUMNS})")
        if source and line.rstrip() != line and not name.startswith("tests/"):
            bad.append(f"{name}:{n}: space at the end of the line")
    if source and text and not text.endswith("\n"):
        bad.append(f"{name}: no newline at its end")
    if source and len(lines) - 1 > MAX_LINES and "table" not in p.stem:
        notes.append(f"{name}: {len(lines) - 1} lines; is there a seam to split at {MAX_LINES}?")
    if p.suffix == ".md":
        for m in re.finditer(r"\]\(([^)#\s]+)(#[^)]*)?\)", text):
            if not re.match(r"[a-z]+:", m[1]) and not (p.parent / m[1]).exists():
                bad.append(f"{name}:{text.count(chr(10), 0, m.start()) + 1}: link to {m[1]}, which does not exist")
    if p.suffix == ".sh" or raw.startswith(b"#!"):
        if not os.access(p, os.X_OK) and not name.endswith(".py"):
            bad.append(f"{name}: a script that is not executable")

print("\n".join([f"note: {n}" for n in notes] + bad), end="\n" if notes or bad else "")
sys.exit(bool(bad))
