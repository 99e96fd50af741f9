#!/usr/bin/env python3
"""Every id in the code stands once in docs/ERRORS.md (rules of check: docs/CHECKS.md), and every id there is raised somewhere.

Ids are string literals in src/ ("E-", "W-", "N-" or "C-" and capitals); rows of docs/errors.d/*.md count as part of the page.
"""
import collections
import pathlib
import re
import sys

code, docs = collections.defaultdict(list), collections.defaultdict(list)
for f in sorted(p for p in pathlib.Path("src").rglob("*") if p.suffix in (".c", ".h", ".cu")):
    for n, line in enumerate(f.read_text().splitlines(), 1):
        for m in re.finditer(r'"([EWNC]-[A-Z0-9]+(?:-[A-Z0-9]+)*)"', line):
            if f.suffix != ".h" or not line.lstrip().startswith(("/*", "*", "//")) and "/*" not in line[: m.start()]:
                code[m[1]].append(f"{f}:{n}")
for f in [pathlib.Path("docs/ERRORS.md"), pathlib.Path("docs/CHECKS.md"), *sorted(pathlib.Path("docs/errors.d").glob("*.md"))]:
    for n, line in enumerate(f.read_text().splitlines() if f.is_file() else [], 1):
        if m := re.match(r"\|\s*`?([EWNC]-[A-Z0-9-]+)`?\s*\|", line):
            docs[m[1]].append(f"{f}:{n}")
            if len([c for c in line.split("|") if c.strip()]) < 3:
                print(f"{f}:{n}: {m[1]} needs a meaning and a remedy")
                docs["!"] = ["x", "y"]
bad = [f"{w[0]}: {i} is not in docs/{'CHECKS' if i[0] == 'C' else 'ERRORS'}.md" for i, w in sorted(code.items()) if i not in docs]
bad += [f"{w[0]}: {i} is raised nowhere in src/" for i, w in sorted(docs.items()) if i not in code and i != "!"]
bad += [f"{', '.join(w)}: {i} is described more than once" for i, w in sorted(docs.items()) if len(w) > 1 and i != "!"]
print("\n".join(bad), end="\n" if bad else "")
sys.exit(bool(bad) or "!" in docs)
