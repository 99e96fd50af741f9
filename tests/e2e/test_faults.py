"""What befalls files while they are in use."""
import os
import shutil
import signal
import subprocess

import pytest


def model_copy(tiny, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder, copy_function=shutil.copyfile)
    return folder, max(folder.glob("*.safetensors"), key=lambda f: f.stat().st_size)


@pytest.mark.parametrize("threads", [1, 3])
def test_weights_cut_short(nibble, tiny, tmp_path, threads):
    """Between two questions of a chat: one line that names the file, from whichever thread reads beyond the new end."""
    folder, weights = model_copy(tiny, tmp_path)
    chat = subprocess.Popen([nibble.path, "chat", folder, "--no-think", "--max-tokens", "4", "--quiet", "--threads", str(threads)],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        chat.stdin.write(b"hello\n")
        chat.stdin.flush()
        assert chat.stdout.read(1), chat.stderr.read()
        os.truncate(weights, 4096)
        _, said = chat.communicate(b"again\n", timeout=60)
    finally:
        chat.kill()
    assert chat.returncode == 4, said
    assert said.decode().startswith(f"nibble: E-FILE-LOST: {weights}: "), said
    assert said.count(b"\n") == 1 and said.endswith(b"\n"), said


def test_sent_signal_keeps_its_effect(nibble, tiny):
    chat = subprocess.Popen([nibble.path, "chat", tiny, "--no-think", "--max-tokens", "1", "--quiet"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)
    try:
        chat.stdin.write(b"hello\n")
        chat.stdin.flush()
        assert chat.stdout.read(1)
        chat.send_signal(signal.SIGBUS)
        _, said = chat.communicate(timeout=60)
    finally:
        chat.kill()
    assert chat.returncode == -signal.SIGBUS and said == b""
