"""Fixtures of the Python tiers (tests/e2e, tests/diff): the program, the embedded model, the oracle.

NIBBLE names the program; without it build/nibble is used. Everything runs from the root of the source tree.
"""
import json
import os
import pathlib
import struct
import subprocess

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: more than about ten seconds; `-m 'not slow'` leaves it out")


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def tiny():
    """The embedded model's folder."""
    return ROOT / "assets/qwen36-tiny"


@pytest.fixture(scope="session")
def oracle():
    return ROOT / "tests/oracle/qwen36-tiny"


class Program:
    def __init__(self, path):
        self.path = path

    def __call__(self, *args, stdin=None, exit=0, timeout=120, env=None):
        """Run `nibble ARGS...`; returns stdout (bytes). The exit status must be as given."""
        return self.full(*args, stdin=stdin, exit=exit, timeout=timeout, env=env).stdout

    def full(self, *args, stdin=None, exit=0, timeout=120, env=None):
        p = subprocess.run([self.path, *map(str, args)], input=stdin, stdin=None if stdin is not None else subprocess.DEVNULL,
                           capture_output=True, timeout=timeout, cwd=ROOT, env={**os.environ, **(env or {})})
        assert exit is None or p.returncode == exit, f"exit {p.returncode}, not {exit}: nibble {' '.join(map(str, args))[:500]}\n{p.stderr.decode(errors='replace')[-2000:]}"
        return p

    def json(self, *args, **kw):
        return json.loads(self(*args, **kw))


@pytest.fixture(scope="session")
def nibble():
    path = pathlib.Path(os.environ.get("NIBBLE") or ROOT / "build/nibble").resolve()
    assert path.is_file(), f"{path} is missing: run make"
    return Program(str(path))


_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?", "F8_E4M3": "u1"}


def read_tensors(path):
    """name -> numpy array, read from the bytes; BF16 becomes float32, F8_E4M3 its codes."""
    raw = pathlib.Path(path).read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    out = {}
    for name, t in json.loads(raw[8:8 + n]).items():
        if name == "__metadata__":
            continue
        b, e = t["data_offsets"]
        data = raw[8 + n + b:8 + n + e]
        if t["dtype"] == "BF16":
            a = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            a = np.frombuffer(data, _TYPES[t["dtype"]])
        out[name] = a.reshape(t["shape"])
    return out


@pytest.fixture(scope="session")
def tensors():
    return read_tensors
