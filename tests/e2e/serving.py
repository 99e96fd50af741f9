"""`nibble serve` for tests: started on a free port, spoken to with http.client or raw sockets, ended with SIGTERM."""
import contextlib
import ctypes
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time


class Frozen:
    """One thread of a process of ours, stopped from outside until the block ends; None when that is not allowed here."""
    SEIZE, INTERRUPT, DETACH, WALL = 0x4206, 0x4207, 17, 0x40000000

    def __init__(self, pid, name):
        end = time.time() + 5  # a thread takes its name soon after its start
        while True:
            self.tids = [int(t) for t in os.listdir(f"/proc/{pid}/task") if open(f"/proc/{pid}/task/{t}/comm").read() == name + "\n"]
            if self.tids or time.time() > end:
                break
            time.sleep(0.01)
        assert len(self.tids) == 1, f"{len(self.tids)} threads are called {name}"
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

    def ptrace(self, request):
        if self.libc.ptrace(request, self.tids[0], None, None) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def __enter__(self):
        self.ptrace(self.SEIZE)
        self.ptrace(self.INTERRUPT)
        os.waitpid(self.tids[0], self.WALL)
        return self

    def __exit__(self, *exc):
        self.ptrace(self.DETACH)


class Server:
    def __init__(self, nibble, *args, env=None):
        self.p = subprocess.Popen([nibble.path, "serve", "--port", "0", *map(str, args)], stdin=subprocess.DEVNULL,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})
        self.lines, self.port = [], None
        self.known = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self.known.wait(60), self.lines
        assert self.port, "\n".join(self.lines)

    def _read(self):
        for line in self.p.stderr:
            self.lines.append(line.rstrip("\n"))
            if m := re.match(r"ready http://.*:(\d+)$", line):
                self.port = int(m[1])
                self.known.set()
        self.known.set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def said(self, id):
        return [s for s in self.lines if s.startswith(f"nibble: {id}: ")]

    def access(self):
        return [json.loads(s) for s in self.lines if s.startswith("{")]

    def request(self, method, path, body=None, headers=None, timeout=60):
        """Status, headers (lower case), body (parsed when it is JSON)."""
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        c.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        r = c.getresponse()
        raw = r.read()
        h = {k.lower(): v for k, v in r.getheaders()}
        c.close()
        return r.status, h, json.loads(raw) if raw and "json" in h.get("content-type", "") else raw

    def get(self, path, **headers):
        return self.request("GET", path, headers=headers)

    def post(self, path, body, expect=200, **kw):
        status, _, out = self.request("POST", path, body, **kw)
        assert status == expect, out
        return out

    def chat(self, text="Tom has 3 apples and buys 4. How many?", expect=200, **body):
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "temperature": 0, **body}, expect)

    def events(self, path, body, **kw):
        """The data lines of a stream, parsed; [DONE] must end it."""
        status, h, raw = self.request("POST", path, {**body, "stream": True}, **kw)
        assert status == 200 and h["content-type"].startswith("text/event-stream"), raw
        data = [s[6:] for s in raw.decode().split("\n") if s.startswith("data: ")]
        assert data[-1] == "[DONE]" and raw.endswith(b"data: [DONE]\n\n")
        return [json.loads(s) for s in data[:-1]]

    def raw(self, data, timeout=20):
        """Bytes in, all bytes out until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as s:
            s.sendall(data)
            out = b""
            while chunk := s.recv(65536):
                out += chunk
            return out

    def open_stream(self, body, path="/v1/chat/completions"):
        """A connection that has read nothing of the answer yet."""
        s = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        data = json.dumps(body).encode()
        s.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data)) + data)
        return s

    def metric(self, name, key="", **labels):
        text = self.get("/metrics", Authorization=f"Bearer {key}")[2].decode()
        for line in text.splitlines():
            if line.startswith(name + "{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"{name} {labels} is not among the metrics")

    def wait_metric(self, name, value, seconds=20, key="", **labels):
        end = time.time() + seconds
        while (got := self.metric(name, key, **labels)) != value:
            assert time.time() < end, f"{name} {labels} is {got}, not {value}"
            time.sleep(0.02)

    @contextlib.contextmanager
    def frozen(self, thread="engine"):
        """A thread of the server stopped, and not where it holds a lock that others wait for."""
        while True:
            with Frozen(self.p.pid, thread):
                try:
                    self.request("GET", "/metrics", timeout=3)
                except TimeoutError:
                    continue
                yield
                return

    def wait_said(self, id, seconds=20):
        end = time.time() + seconds
        while not self.said(id):
            assert time.time() < end, self.lines[-20:]
            time.sleep(0.02)

    def stop(self, sig=signal.SIGTERM, exit=0, timeout=60):
        self.p.send_signal(sig)
        assert self.p.wait(timeout) == exit, "\n".join(self.lines[-20:])

    def close(self):
        """The normal end; a server that crashed or cannot end fails the test."""
        if self.p.poll() is None:
            self.stop()
        assert self.p.returncode == 0, "\n".join(self.lines[-20:])
