#!/usr/bin/env python3
"""Writes src/text/unicode_tables.c: the Unicode properties that HF tokenizers uses when it splits and normalizes.

usage: make_unicode_tables.py [--check] [OUT]     (needs unicodedata2==16.0.0, regex and tokenizers==0.23.3)

HF tokenizers mixes three Unicode versions, found by asking it about every code point:
  split patterns (Oniguruma)          16.0: general categories, White_Space, \\w
  added tokens (Rust regex)           16.0: White_Space, \\w = Alphabetic, M, Nd, Pc, Join_Control
  NFC (unicode-normalization)         older: some 140 code points that compose, decompose or reorder in 16.0 are inert
The first two come from unicodedata2 and regex and are compared with the installed tokenizers; the third is taken from
it. --check writes nothing and fails when the stored file differs.
"""
import os
import sys

import regex
import unicodedata2 as ucd
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

CODES = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
NAMES = "Cn Cc Cf Co Cs Ll Lm Lo Lt Lu Mc Me Mn Nd Nl No Pc Pd Pe Pf Pi Po Ps Sc Sk Sm So Zl Zp Zs".split()
BLOCK = 4096


def hf_class(pattern):
    """Code points that the split engine puts into a class."""
    split, found = pre_tokenizers.Split(Regex(pattern), "removed"), set()
    for i in range(0, len(CODES), BLOCK):
        part = CODES[i:i + BLOCK]
        left = {ord(ch) for piece, _ in split.pre_tokenize_str("".join(map(chr, part))) for ch in piece}
        found.update(c for c in part if c not in left)
    return found


def hf_word():
    """\\w of the added-token matcher: what a single_word token must not touch."""
    t, found = Tokenizer(models.BPE(vocab={"a": 0}, merges=[])), set()
    t.add_tokens([AddedToken("[X]", normalized=False, single_word=True)])
    for i in range(0, len(CODES), BLOCK):
        part = CODES[i:i + BLOCK]
        seen = {a for a, b in t.encode("".join("\u00ac[X]" + chr(c) for c in part)).offsets if b - a == 3}
        found.update(c for k, c in enumerate(part) if 5 * k + 1 not in seen)
    return found


def ranges(value):
    """value[code] -> [(first code, value)], one entry per change."""
    out, last = [], None
    for c in range(0x110000):
        v = value(c)
        if v != last:
            out.append((c, v))
            last = v
    return out


def nfc_classes():
    """0 inert, 1 needs composing (NFC_Quick_Check No or Maybe), 2.. ranks of the combining class, 255 foreign."""
    nfc, nfd = normalizers.NFC().normalize_str, normalizers.NFD().normalize_str
    moves = lambda c: nfd("\u0345" + chr(c)) != "\u0345" + chr(c) or nfd(chr(c) + "\u0334") != chr(c) + "\u0334"
    pairs = {}
    for c in CODES:
        d = [int(x, 16) for x in ucd.decomposition(chr(c)).split() if x[0] != "<"] \
            if not ucd.decomposition(chr(c)).startswith("<") else []
        if len(d) == 2 and ucd.normalize("NFC", chr(c)) == chr(c):
            pairs[c] = d
    second = set(range(0x1161, 0x1176)) | set(range(0x11A8, 0x11C3)) | {d[1] for d in pairs.values()}
    known_pairs = {c: d for c, d in pairs.items() if nfd(chr(c)) != chr(c)}
    known_parts = {x for d in known_pairs.values() for x in d} | set(range(0x1100, 0x1176)) | set(range(0x11A8, 0x11C3))
    parts = {x for d in pairs.values() for x in d} | set(pairs)
    active = lambda c: ucd.combining(chr(c)) or c in parts or c in second or ucd.normalize("NFD", chr(c)) != chr(c)
    ranks = {v: i + 2 for i, v in enumerate(sorted({ucd.combining(chr(c)) for c in CODES} - {0}))}
    value = {}
    for c in CODES:
        if not active(c):
            continue
        inert = nfd(chr(c)) == chr(c) and not moves(c) and c not in known_parts
        if inert:
            value[c] = 255
        elif ucd.normalize("NFC", chr(c)) != chr(c) or c in second:
            value[c] = 1
        elif ucd.combining(chr(c)):
            value[c] = ranks[ucd.combining(chr(c))]
        if (nfc(chr(c)) != chr(c)) != (ucd.normalize("NFC", chr(c)) != chr(c) and not inert):
            sys.exit(f"NFC of U+{c:04X} is not as expected")
    return value


def table(name, entries, comment):
    lines, line = [f"/* {comment} */", f"const uint32_t {name}[] = {{"], "   "
    for e in entries:
        item = f" 0x{e:x},"
        if len(line) + len(item) > 120:
            lines.append(line)
            line = "   "
        line += item
    return lines + [line, "};", f"const size_t {name}_count = ARRAY_LEN({name});", ""]


def main():
    args = [a for a in sys.argv[1:] if a != "--check"]
    out = args[0] if args else os.path.join(os.path.dirname(os.path.abspath(__file__)), "../src/text/unicode_tables.c")
    if ucd.unidata_version != "16.0.0":
        sys.exit(f"unicodedata2 is {ucd.unidata_version}, not 16.0.0")
    category = {c: ucd.category(chr(c)) for c in CODES}
    for prefix in ["L", "M", "N", "P", "S", "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Nd", "Cn"]:
        if hf_class(r"\p{%s}" % prefix) != {c for c in CODES if category[c].startswith(prefix)}:
            sys.exit(f"\\p{{{prefix}}} of the installed tokenizers is not Unicode 16.0's")
    word = {c for c in CODES if category[c] in ("Nd", "Pc", "Mn", "Mc", "Me") or c in (0x200C, 0x200D)
            or (category[c] != "Cn" and regex.match(r"\p{Alphabetic}", chr(c)))}
    if word != hf_word():
        sys.exit("\\w of the installed tokenizers is not as expected")
    if hf_class(r"\w") != (word - {0x200C, 0x200D}) | {0xB2, 0xB3, 0xB9, 0xBC, 0xBD, 0xBE}:
        sys.exit("\\w of the split engine is not as expected")
    nfc = nfc_classes()
    gc = ranges(lambda c: NAMES.index(category.get(c, "Cs")))
    lines = ["/* Generated by tools/make_unicode_tables.py: Unicode 16.0 as HF tokenizers 0.23 applies it. Do not edit. */",
             '#include "text/unicode_tables.h"', "", "/* clang-format off */"]
    lines += table("unicode_gc", [c << 8 | v for c, v in gc], "First code point << 8 | general category (unicode_gc_name order).")
    lines += table("unicode_word", [c << 1 | v for c, v in ranges(lambda c: int(c in word))], "First code point << 1 | is a word character.")
    lines += table("unicode_nfc", [c << 8 | v for c, v in ranges(lambda c: nfc.get(c, 0))],
                   "First code point << 8 | class: 0 inert, 1 may compose or decompose, 2.. combining order, 255 foreign.")
    text = "\n".join(lines).rstrip("\n") + "\n"
    if "--check" in sys.argv:
        sys.exit(0 if open(out, encoding="ascii").read() == text else f"{out} is not what this tool writes")
    with open(out, "w", encoding="ascii") as f:
        f.write(text)
    print(f"{out}: {len(gc)} category ranges, {sum(v == 255 for v in nfc.values())} foreign code points")


if __name__ == "__main__":
    main()
