"""`nibble serve` for tests: started on a free port, spoken to with http.client or raw sockets, ended with SIGTERM."""
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time


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
