#!/usr/bin/env python3
"""Runs the cases of tests/cli/*.cases against the nibble program and prints cmocka's lines.

usage: run_cli.py [-v] [WORD...]         (cases whose "file: name" holds every WORD)
NIBBLE = the program, RUNNER_FOR_CHILD = a prefix such as qemu-aarch64, CLI_TIMEOUT = seconds for one case (60).

A case, one after another in a file ("#" starts a comment between cases):
    == name of the case
    $ nibble tokenize $TINY --text "2 + 2"     shell lines (bash); several make one script; runs in an empty folder
    ? 3                                        exit status, 0 when absent
    > [22, 223]                                a line of stdout, exact          >~ like that, * matches anything
    >*                                         any number of lines             >| the line before has no newline
    !~ nibble: E-X: *                          a line of stderr, * matches     !* any number of lines     !- no line at all
Without any ">" stdout must be empty. Without any "!" stderr may hold anything after success; after a failure it must be one
line that starts with "nibble: E-". Variables: TINY (embedded model), ORACLE (tests/oracle/qwen36-tiny), ROOT (source tree).
"""
import concurrent.futures
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def parse(path):
    cases, case = [], None
    for n, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("== "):
            case = {"name": f"{path.stem}: {line[3:].strip()}", "sh": [], "out": [], "err": [], "exit": 0, "newline": True, "silent": False}
            cases.append(case)
        elif not line.strip() or line.startswith("#"):
            continue
        elif case is None:
            sys.exit(f"{path}:{n}: text before the first case")
        elif line == ">*" or line == "!*":
            case["out" if line[0] == ">" else "err"].append(("any", ""))
        elif line == "!-":
            case["silent"] = True
        elif line == ">|":
            case["newline"] = False
        elif m := re.match(r"([$>!?])(~?)(?: (.*))?$", line):
            kind, glob, text = m[1], "glob" if m[2] else "exact", m[3] or ""
            if kind == "$":
                case["sh"].append(text)
            elif kind == "?":
                case["exit"] = int(text)
            else:
                case["out" if kind == ">" else "err"].append((glob, text))
        else:
            sys.exit(f"{path}:{n}: not understood: {line}")
    return cases


def matches(kind, want, got):
    return got == want if kind == "exact" else re.fullmatch(".*".join(map(re.escape, want.split("*"))), got) is not None


def lines_match(wanted, got):
    """Do the lines `got` match the patterns in order? ("any" stands for any number of lines)"""
    reach = {0}
    for kind, want in wanted:
        if kind == "any":
            reach = set(range(min(reach), len(got) + 1)) if reach else set()
        else:
            reach = {i + 1 for i in reach if i < len(got) and matches(kind, want, got[i])}
    return len(got) in reach


def text_lines(raw):
    s = raw.decode("utf-8", "backslashreplace")
    return s[:-1].split("\n") if s.endswith("\n") else s.split("\n") if s else []


def run(case, env, limit):
    with tempfile.TemporaryDirectory(prefix="nibble-cli-") as folder:
        script = 'nibble() { $NIBBLE_CALL "$@"; }\n' + "\n".join(case["sh"]) + "\n"
        try:
            p = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, stdin=subprocess.DEVNULL, timeout=limit)
        except subprocess.TimeoutExpired:
            return [f"no end after {limit} s"]
    out, err, bad = text_lines(p.stdout), text_lines(p.stderr), []
    if p.returncode != case["exit"]:
        bad.append(f"exit status {p.returncode}, expected {case['exit']}")
    if not lines_match(case["out"], out):
        bad.append("stdout differs; expected:")
        bad += [f"    {'...' if k == 'any' else w}" for k, w in case["out"]]
    if case["out"] and case["out"][-1][0] != "any" and p.stdout and p.stdout.endswith(b"\n") != case["newline"]:
        bad.append("stdout " + ("lacks its last newline" if case["newline"] else "ends in a newline"))
    if case["silent"] and err:
        bad.append("stderr should be empty")
    elif case["err"]:
        if not lines_match(case["err"], err):
            bad.append("stderr differs; expected:")
            bad += [f"    {'...' if k == 'any' else w}" for k, w in case["err"]]
    elif case["exit"] not in (0, 1):
        noted = [s for s in err if not s.startswith(("nibble: N-", "nibble: W-"))]
        if len(noted) != 1 or not re.match(r"nibble: E-[A-Z0-9-]+: .", noted[0]):
            bad.append("stderr should be one line `nibble: E-...`")
    if bad:
        bad += ["stdout:"] + [f"    {s}" for s in out[:40]] + ["stderr:"] + [f"    {s}" for s in err[:40]]
    return bad


def main():
    args = [a for a in sys.argv[1:] if a != "-v"]
    program = os.environ.get("NIBBLE") or str(ROOT / "build/nibble")
    call = os.environ.get("RUNNER_FOR_CHILD", "").split() + [str(pathlib.Path(program).resolve())]
    limit = float(os.environ.get("CLI_TIMEOUT", "60")) * (10 if len(call) > 1 else 1)
    env = {**os.environ, "NIBBLE_CALL": shlex.join(call), "TINY": str(ROOT / "assets/qwen36-tiny"), "ROOT": str(ROOT),
           "ORACLE": str(ROOT / "tests/oracle/qwen36-tiny"), "LC_ALL": "C.UTF-8", "TERM": "dumb"}
    cases = [c for f in sorted((ROOT / "tests/cli").glob("*.cases")) for c in parse(f)]
    cases = [c for c in cases if all(a in c["name"] for a in args)]
    print(f"[==========] Running {len(cases)} test(s).")
    failed = 0

    def timed(case):
        t = time.time()
        return run(case, env, limit), time.time() - t
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("CLI_JOBS", "2"))) as pool:
        for case, (bad, seconds) in zip(cases, pool.map(timed, cases)):
            print(f"[ RUN      ] {case['name']}")
            if bad:
                failed += 1
                print("\n".join(["    $ " + s for s in case["sh"]] + ["    " + b for b in bad]))
            print(f"[{'  FAILED  ' if bad else '       OK '}] {case['name']}" + (f" ({seconds:.2f} s)" if "-v" in sys.argv else ""), flush=True)
    print(f"[==========] {len(cases)} test(s) run.")
    return failed > 0 or not cases


sys.exit(main())
