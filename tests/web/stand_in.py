"""A server that gives the page and answers the way the test says: what a real model cannot be made to do at will."""
import http.server
import json
import pathlib
import queue
import threading

PAGE = pathlib.Path(__file__).parents[2] / "src/serve/page.html"


class StandIn:
    """`script` is called with the handler and the body of each chat request; `seen` are these bodies."""

    def __init__(self):
        stand_in = self
        self.script, self.seen, self.headers, self.key, self.gone = None, [], [], None, queue.Queue()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def plain(self, status, kind, data, **headers):
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                for k, v in headers.items():
                    self.send_header(k.replace("_", "-"), v)
                self.end_headers()
                self.wfile.write(data)

            def fault(self, status, message, **headers):
                self.plain(status, "application/json", json.dumps({"error": {"message": message, "type": "x"}}).encode(), **headers)

            def refused(self):
                if stand_in.key and self.headers.get("Authorization") != "Bearer " + stand_in.key:
                    self.fault(401, "no or wrong key")
                    return True
                return False

            def do_GET(self):
                if self.path == "/":
                    self.plain(200, "text/html; charset=utf-8", PAGE.read_bytes())
                elif self.path == "/v1/models":
                    if not self.refused():
                        self.plain(200, "application/json", b'{"object":"list","data":[{"id":"stand-in"}]}')
                else:
                    self.fault(404, "nothing here")

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stand_in.seen.append(body)
                stand_in.headers.append(dict(self.headers))
                if self.refused():
                    return
                try:
                    stand_in.script(self, body)
                except (BrokenPipeError, ConnectionResetError):
                    stand_in.gone.put(True)
                self.close_connection = True

            def stream(self):
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()

            def raw(self, data):
                self.wfile.write(data)
                self.wfile.flush()

            def event(self, data):
                self.raw(b"data: " + (data if isinstance(data, str) else json.dumps(data)).encode() + b"\n\n")

            def delta(self, tokens=None, finish=None, **delta):
                chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
                if tokens is not None:
                    chunk["usage"] = {"prompt_tokens": 12, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 5},
                                      "speculative": {"rounds": max(1, tokens // 2), "accept_length": 2.25}}
                self.event(chunk)

            def answer(self, text, thought=""):
                self.stream()
                self.delta(role="assistant")
                n = 0
                for name, whole in (("reasoning_content", thought), ("content", text)):
                    for i in range(0, len(whole), 7):
                        n += 2
                        self.delta(tokens=n, **{name: whole[i:i + 7]})
                self.delta(tokens=n, finish="stop")
                self.event("[DONE]")

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = "http://127.0.0.1:%d/" % self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
