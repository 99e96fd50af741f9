"""A crowd of clients, good and bad ones, against a running server. Used by test_serve_hostile.py and by bench/bench_serve.py."""
import collections
import json
import random
import socket
import struct
import threading
import time

CHAT = "/v1/chat/completions"
QUESTIONS = ["Tom has 3 apples and buys 4. How many?", "What is 12 + 30?", "Hello", "Write a list of colours.", "Where is Vienna?"]


def body_of(question, **more):
    return {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 60, **more}


def post(body, extra=b""):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (extra, len(data)) + data


class Crowd:
    """`run` (text, tokens -> what `nibble run --json` says): good answers are the same as without a server."""

    def __init__(self, server, run, seed=1):
        self.server, self.seed = server, seed
        self.counts, self.wrong = collections.Counter(), []
        self.lock = threading.Lock()
        self.want = {q: server.post(CHAT, body_of(q))["choices"][0]["message"] for q in QUESTIONS}
        for q, m in self.want.items():
            alone = run(q, 60)
            assert (m["content"] or "", m.get("reasoning_content", "")) == (alone["text"], alone["reasoning"]), (q, m, alone)

    def connect(self):
        s = socket.create_connection(("127.0.0.1", self.server.port), timeout=60)
        return s

    def note(self, problem):
        with self.lock:
            self.wrong.append(problem)

    # ---- those who want an answer ----

    def whole(self, r):
        q = r.choice(QUESTIONS)
        status, _, out = self.server.request("POST", CHAT, body_of(q))
        if status == 429:
            return
        m = out["choices"][0]["message"] if status == 200 else None
        if m != self.want[q]:
            self.note(f"{q}: {status} {out}")

    def stream(self, r):
        q = r.choice(QUESTIONS)
        status, _, raw = self.server.request("POST", CHAT, body_of(q, stream=True))
        if status == 429:
            return
        text, thought = "", ""
        for line in raw.decode().split("\n"):
            if line.startswith("data: {"):
                d = json.loads(line[6:])["choices"][0]["delta"]
                text += d.get("content") or ""
                thought += d.get("reasoning_content") or ""
        if not raw.endswith(b"[DONE]\n\n") or (text, thought) != (self.want[q]["content"] or "", self.want[q].get("reasoning_content", "")):
            self.note(f"{q}: {raw[-300:]}")

    def pipelined(self, r):
        with self.connect() as s:
            s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
            got = b""
            while got.count(b'"ok"') < 3:
                chunk = s.recv(4096)
                if not chunk:
                    return self.note(f"pipelined: {got}")
                got += chunk

    # ---- those who leave ----

    def leave(self, s, r):
        if r.random() < 0.5:  # a reset instead of a close
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()

    def leave_stream(self, r):
        s = self.connect()
        s.sendall(post(body_of(r.choice(QUESTIONS), stream=True, ignore_eos=True, max_tokens=2000)))
        for _ in range(r.randrange(4)):
            s.recv(500)
        time.sleep(r.random() * 0.2)
        self.leave(s, r)

    def leave_whole(self, r):
        s = self.connect()
        s.sendall(post(body_of(r.choice(QUESTIONS), ignore_eos=True, n=r.choice((1, 1, 3)))))
        time.sleep(r.random() * 0.05)
        self.leave(s, r)

    def leave_half_sent(self, r):
        s = self.connect()
        data = post(body_of("x" * 2000))
        s.sendall(data[:r.randrange(len(data))])
        self.leave(s, r)

    def half_open(self, r):
        s = self.connect()
        s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost:")
        time.sleep(r.random() * 2)
        self.leave(s, r)

    def never_reads(self, r):
        s = self.connect()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.sendall(post(body_of("Hello", stream=True, ignore_eos=True, logprobs=True, top_logprobs=20, max_tokens=200)))
        time.sleep(r.random())
        self.leave(s, r)

    # ---- those who send nonsense ----

    def refuses(self, data, r):
        with self.connect() as s:
            try:
                s.sendall(data)
                s.shutdown(socket.SHUT_WR)
                got = s.recv(65536)
                if got.startswith(b"HTTP/1.1 100"):  # the server looked whether the other direction is open
                    got = got[25:] or s.recv(65536)
            except OSError:
                return  # refused by a reset while still sending
            if got and not (got.startswith(b"HTTP/1.") and got[9:10] == b"4"):
                self.note(f"{data[:60]!r}: {got[:200]!r}")

    def bad_json(self, r):
        data = json.dumps(body_of("x")).encode()
        at = r.randrange(1, len(data))
        self.refuses(post(r.choice((data[:at], b"[" * 50000, b"\xff" * 10, b"", b"{}", data + b"x", json.dumps(body_of("x", temperature="hot")).encode()))), r)

    def bad_header(self, r):
        self.refuses(post(body_of("x"), b"X-Long: " + b"a" * 100000 + b"\r\n"), r)

    def bad_http(self, r):
        self.refuses(r.choice((bytes(r.randrange(256) for _ in range(300)) + b"\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n",
                               b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
                               b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n",
                               b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")), r)

    def slow(self, r):
        with self.connect() as s:
            try:
                for c in post(body_of("x"))[:r.randrange(5, 30)]:
                    s.sendall(bytes([c]))
                    time.sleep(0.05)
            except OSError:
                pass

    # ---- the whole crowd ----

    ACTIONS = [("whole", 6), ("stream", 6), ("pipelined", 1), ("leave_stream", 4), ("leave_whole", 4), ("leave_half_sent", 2), ("half_open", 1), ("never_reads", 1),
               ("bad_json", 4), ("bad_header", 1), ("bad_http", 2), ("slow", 1)]

    def run(self, seconds=None, requests=None, clients=12):
        end = time.time() + seconds if seconds else None
        names, weights = zip(*self.ACTIONS)

        def client(k):
            r = random.Random(f"{self.seed} {k}")
            while not self.wrong and (not end or time.time() < end) and (not requests or sum(self.counts.values()) < requests):
                name = r.choices(names, weights)[0]
                try:
                    getattr(self, name)(r)
                except OSError as e:
                    if name in ("whole", "stream", "pipelined"):
                        self.note(f"{name}: {e!r}")
                with self.lock:
                    self.counts[name] += 1

        threads = [threading.Thread(target=client, args=(k,)) for k in range(clients)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    def settle(self, seconds=40):
        """Nothing of the crowd is left in the server."""
        self.server.wait_metric("vllm:num_requests_running", 0, seconds)
        self.server.wait_metric("vllm:num_requests_waiting", 0, seconds)
        self.server.wait_metric("nibble_connections", 1, seconds)

    def rss(self):
        for line in open(f"/proc/{self.server.p.pid}/status"):
            if line.startswith("VmRSS"):
                return int(line.split()[1])
