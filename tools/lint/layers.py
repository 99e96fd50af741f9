#!/usr/bin/env python3
"""Who may include what.

src/LAYERS lists the folders of src/ from low to high; folders on one line are siblings that do not know each other. A file
includes only its own folder and lower ones (src/main.c everything). Libraries stand behind the adapters listed below, ISA
headers in the files whose name carries the ISA.
"""
import pathlib
import re
import sys

# header pattern -> files that may include it (regular expressions over the path below src/)
ADAPTERS = {
    r"yajl/.*|yajl_.*": r"base/json\.c",
    r"pcre2\.h": r"text/pattern\.c",
    r"utf8proc\.h": r"text/(unicode|jinja_uni)\.c",
    r"editline/.*|histedit\.h": r"cmd/cmd_chat\.c",
    r"event2/(http|buffer|bufferevent|listener)\.h": r"serve/http\.c|eval/client\.c",
    r"event2/.*": r"serve/.*|eval/client\.c",
    r"mpi\.h": r"quant/dist_mpi\.c",
    r"cuda.*|nccl.*": r"ops/cuda/.*",
    r"immintrin\.h|x86intrin\.h|[a-z]mmintrin\.h": r".*_(avx2|avx512|amx)\.[ch]",
    r"arm_neon\.h": r".*_(neon|dotprod)\.[ch]",
    r"cpuid\.h|sys/auxv\.h": r"(base|kern)/cpu\.c",
    r"pthread\.h|threads\.h|sched\.h": r"(base|engine|quant|serve)/.*",
}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)


def main():
    level, siblings = {}, {}
    for n, line in enumerate(pathlib.Path("src/LAYERS").read_text().splitlines()):
        for name in line.split("#")[0].split():
            level[name] = n
    bad = []
    for f in sorted(p for p in pathlib.Path("src").rglob("*") if p.suffix in (".c", ".h", ".cu", ".cuh")):
        rel = f.relative_to("src")
        here = rel.parts[0] if len(rel.parts) > 1 else None
        if here is not None and here not in level:
            bad.append(f"{f}: folder '{here}' is not in src/LAYERS")
            continue
        text = f.read_text()
        for m in INCLUDE.finditer(text):
            quote, what = m.groups()
            at = f"{f}:{text.count(chr(10), 0, m.start()) + 1}"
            if quote == "<":
                for pattern, allowed in ADAPTERS.items():
                    if re.fullmatch(pattern, what) and not re.fullmatch(allowed, str(rel)):
                        bad.append(f"{at}: <{what}> belongs into {allowed} only (tools/lint/layers.py)")
                continue
            if not pathlib.Path("src", what).is_file():
                bad.append(f'{at}: "{what}" is not a path below src/')
                continue
            there = pathlib.PurePath(what).parts[0]
            if here is None or here == there:
                continue
            if there not in level:
                bad.append(f"{at}: folder '{there}' is not in src/LAYERS")
            elif level[there] > level[here]:
                bad.append(f"{at}: {here} must not include {there} (a higher layer)")
            elif level[there] == level[here]:
                bad.append(f"{at}: {here} must not include {there} (a sibling)")
    print("\n".join(bad), end="\n" if bad else "")
    return bool(bad)


sys.exit(main())
