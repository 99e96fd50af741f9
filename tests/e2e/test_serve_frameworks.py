"""What agent frameworks, proxies and odd HTTP clients send: paths, methods, framing, null fields, messages sent back as they came."""
import gzip
import http.client
import json
import signal
import socket
import subprocess
import time

import pytest

from serving import Server

USER = {"role": "user", "content": "What is the weather in Paris?"}
CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [USER], "max_tokens": 2, "temperature": 0}).encode()
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


@pytest.fixture(scope="module")
def server(nibble, tiny):
    s = Server(nibble, tiny, "--max-seqs", 4, "--alias", "tiny", "--alias", "owner/tiny")
    yield s
    s.close()


def answer(raw):
    """Status, headers (lower case) and body of the one answer in these bytes."""
    head, body = raw.split(b"\r\n\r\n", 1)
    lines = head.decode().split("\r\n")
    return int(lines[0].split()[1]), {k.lower(): v for k, v in (s.split(": ", 1) for s in lines[1:])}, body


def ask(server, method, path, headers=b"", body=b"", version=b"1.1"):
    return answer(server.raw(method + b" " + path + b" HTTP/" + version + b"\r\nHost: x\r\nConnection: close\r\n" + headers + b"\r\n" + body))


# ---- paths and methods ----


@pytest.mark.parametrize("path", ["/health", "/version", "/v1/models", "/v1/models/tiny", "/", "/nothing", CHAT])
def test_head_has_no_body(server, path):
    """Else the next answer on the connection would be read as the rest of this one."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as s:
        s.sendall(b"HEAD %s HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path.encode())
        raw = b""
        while chunk := s.recv(65536):
            raw += chunk
    status, headers, rest = answer(raw)
    want = server.request("GET", path)
    assert status == want[0] and rest.startswith(b"HTTP/1.1 200 ") and answer(rest)[2] == b'{"status":"ok"}'
    assert headers["content-length"] == want[1]["content-length"]


def test_paths(server):
    for path in ("/v1/models/", "/v1//models", "//v1/models", "/v1/models?limit=3", "/v1/models#x"):
        assert ask(server, b"GET", path.encode())[0] == 200, path
    for path in ("/v1/models/owner/tiny", "/v1/models/owner%2Ftiny", "/v1/models/owner%2ftiny/"):
        assert server.get(path)[2]["id"] == "owner/tiny"
    for path in (CHAT + "/", "/v1//chat/completions", CHAT + "?api-version=1"):
        assert server.request("POST", path, BODY)[0] == 200
    for path in ("/v1/models/owner%2", "/v1/models/%00", "/v1/models/%ff", "/v1/../health", "/chat/completions"):
        status, _, out = server.get(path)
        assert status == 404 and out["error"]["message"], path
    assert ask(server, b"GET", b"http://x/health")[0] == 200
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("/v1/models", "/v1/models/tiny", "/health"):
            status, h, out = server.request(method, path, {} if method == "POST" else None)
            assert (status, h["allow"], out["error"]["code"]) == (405, "GET, HEAD, OPTIONS", "method_not_allowed")
    assert ask(server, b"OPTIONS", b"*")[0] == 204 and server.request("OPTIONS", CHAT)[0] == 204


# ---- framing ----


def length(n):
    return b"Content-Length: %d\r\n" % n


CHUNKS = b"".join(b"%x\r\n%s\r\n" % (len(BODY[i:i + 7]), BODY[i:i + 7]) for i in range(0, len(BODY), 7))


def test_bodies_that_are_read(server):
    for headers, body in [(length(len(BODY)), BODY), (b"Transfer-Encoding: chunked\r\n", CHUNKS + b"0\r\n\r\n"), (length(len(BODY)) * 2, BODY),
                          (length(len(BODY)) + b"Content-Encoding: identity\r\n", BODY), (length(len(BODY)) + b"Content-Type: text/plain\r\n", BODY)]:
        status, _, out = ask(server, b"POST", CHAT.encode(), headers, body)
        assert status == 200 and json.loads(out)["usage"]["completion_tokens"] == 2, headers


def test_bodies_that_are_refused(server):
    packed = gzip.compress(BODY)
    for headers, body, status in [(length(len(packed)) + b"Content-Encoding: gzip\r\n", packed, 415), (length(len(BODY)) + length(5), BODY, 400), (length(5) + length(len(BODY)), BODY, 400),
                                  (b"Content-Length: -5\r\n", BODY, 400), (b"Transfer-Encoding: gzip, chunked\r\n", CHUNKS + b"0\r\n\r\n", 400), (b"", b"", 400),
                                  (b"Transfer-Encoding: chunked\r\n", b"zz\r\nabc\r\n0\r\n\r\n", 413), (b"Expect: something\r\n" + length(len(BODY)), BODY, 417),
                                  (b"X: " + b"a" * 70000 + b"\r\n", b"", 431)]:
        got, _, out = ask(server, b"POST", CHAT.encode(), headers, body)
        assert got == status and json.loads(out)["error"]["message"], (headers[:60], got)
    assert ask(server, b"GET", b"/" + b"a" * 70000)[0] == 431


def test_expect_continue(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as s:
        s.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n" % CHAT.encode() + length(len(BODY)) + b"\r\n")
        assert s.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        s.sendall(BODY)
        assert s.recv(1000).startswith(b"HTTP/1.1 200 ")
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as s:
        s.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n" % CHAT.encode() + length(10 ** 9) + b"\r\n")
        assert s.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_http_1_0(server):
    stream = BODY[:-1] + b', "stream": true}'
    status, h, out = ask(server, b"POST", CHAT.encode(), length(len(BODY)), BODY, b"1.0")
    assert status == 200 and "transfer-encoding" not in h and json.loads(out)["choices"]
    status, h, out = ask(server, b"POST", CHAT.encode(), length(len(stream)), stream, b"1.0")
    assert status == 200 and "transfer-encoding" not in h and out.startswith(b"data: {") and out.endswith(b"data: [DONE]\n\n")


def test_pipelined(server):
    """Requests sent before the answers come are answered in their order, behind a stream too."""
    stream = BODY[:-1] + b', "stream": true}'
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as s:
        for body in (BODY, stream, BODY):
            s.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\n" % CHAT.encode() + length(len(body)) + b"\r\n" + body)
        s.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        raw = b""
        while chunk := s.recv(65536):
            raw += chunk
    order = [raw.index(b'"object":"chat.completion"'), raw.index(b"data: [DONE]"), raw.rindex(b'"object":"chat.completion"'), raw.index(b'{"version"')]
    assert order == sorted(order) and raw.count(b"HTTP/1.1 200 ") == 4


# ---- access and information ----


@pytest.mark.parametrize("act,want", [("auto", "fp4"), ("int8", "int8"), ("bf16", "bf16")])
def test_inputs_of_quantized_linears_are_told(nibble, tiny, server, tmp_path, act, want):
    nibble("quantize", tiny, "-o", tmp_path / "m", "--no-calib", "-q")
    s = Server(nibble, tmp_path / "m", "--act", act)
    assert s.get("/server_info")[2]["act"] == want and any(f"inputs of quantized ones: {want}" in line for line in s.said("N-SERVE-MODEL"))
    s.close()
    assert server.get("/server_info")[2]["act"] == "none"


def test_more_answers_than_can_ever_wait(nibble, tiny):
    """Not 429: trying again would not help."""
    s = Server(nibble, tiny, "--max-seqs", 1, "--max-queue", 2, "-q", "--log-format", "off")
    assert len(s.post(CHAT, {"messages": [USER], "n": 3, "max_tokens": 1})["choices"]) == 3
    assert s.post(CHAT, {"messages": [USER], "n": 4, "max_tokens": 1}, 400)["error"]["param"] == "n"
    s.close()


def test_either_key_will_do(nibble, tiny):
    """Anthropic's client may send both headers."""
    s = Server(nibble, tiny, "--api-key", "right", "--log-format", "off", "-q")
    for bearer, key, status in [("right", "wrong", 200), ("wrong", "right", 200), ("wrong", "wrong", 401)]:
        assert s.request("GET", "/v1/models", headers={"Authorization": f"Bearer {bearer}", "X-Api-Key": key})[0] == status
    s.close()


# ---- bodies ----


def test_null_is_absent(server):
    nulls = dict.fromkeys("""model temperature top_p n stop stream stream_options max_completion_tokens presence_penalty frequency_penalty logit_bias user seed logprobs
        top_logprobs tools tool_choice parallel_tool_calls response_format functions function_call reasoning_effort metadata store service_tier modalities audio prediction
        web_search_options verbosity top_k min_p repetition_penalty ignore_eos stop_token_ids return_token_ids continue_final_message add_generation_prompt separate_reasoning
        chat_template_kwargs priority min_tokens prompt_cache_key prompt_cache_retention safety_identifier""".split())
    plain = server.post(CHAT, {"messages": [USER], "max_tokens": 9, "seed": 1})
    got = server.post(CHAT, {**nulls, "messages": [USER], "max_tokens": 9, "seed": 1})
    assert got["choices"] == plain["choices"]


@pytest.mark.parametrize("messages", [
    [USER, {"role": "assistant", "content": None}, USER],
    [USER, {"role": "assistant", "content": [], "refusal": None, "audio": None, "function_call": None, "annotations": [], "tool_calls": None}, USER],
    [USER, {"role": "assistant", "refusal": None, "reasoning_content": None, "tool_calls": [{**CALL, "index": 0}]}, {"role": "tool", "tool_call_id": "c1", "content": None}],
    [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": [{"type": "text", "text": "sunny"}]}],
    [{"role": "system", "content": ""}, USER],
    [{"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]}, {**USER, "name": "bob", "id": "m1", "timestamp": 3}],
    [{"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": " the weather in Paris?"}]}],
    [{"role": "user", "content": ""}]], ids=range(8))
def test_messages_that_come_back(server, messages):
    for more in ({}, {"tools": []}, {"tools": [], "tool_choice": "auto"}, {"tool_choice": "auto"}, {"tool_choice": "none", "tools": [TOOL]}, {"tools": [TOOL]}):
        assert server.post(CHAT, {"messages": messages, "max_tokens": 1, **more})["usage"]["completion_tokens"] == 1


def test_a_turn_sent_back_whole(server):
    """Every message that the server makes is one that it takes: cut inside the thought, cut behind it, a call."""
    for n, tools in [(3, None), (60, None), (300, None), (300, [TOOL])]:
        body = {"temperature": 0, "max_tokens": n, "tools": tools, "chat_template_kwargs": {"enable_thinking": not tools}}
        m = server.post(CHAT, {"messages": [USER], **body})["choices"][0]["message"]
        assert tools is None or m["tool_calls"]
        more = [{"role": "tool", "tool_call_id": m["tool_calls"][0]["id"], "content": "sunny"}] if tools else [USER]
        server.post(CHAT, {"messages": [USER, m, *more], **body})


def test_legacy_functions_are_refused_by_name(server):
    for param, more in [("functions", {"functions": [{"name": "f", "parameters": {}}]}), ("function_call", {"function_call": "auto"}),
                        ("messages[1].function_call", {"messages": [USER, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}, USER]}),
                        ("messages[1].role", {"messages": [USER, {"role": "function", "name": "f", "content": "x"}]}),
                        ("tool_choice", {"tool_choice": "required", "tools": []}), ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
                        ("stream_options", {"stream": False, "stream_options": {"include_usage": True}})]:
        e = server.post(CHAT, {"messages": [USER], **more}, 400)["error"]
        assert e["param"] == param and e["type"] == "invalid_request_error", e


def test_schema_of_a_tagged_union(server):
    """As pydantic writes it: the discriminator only repeats what the branches say."""
    def branch(name, **more):
        return {"type": "object", "title": name, "properties": {"kind": {"const": name, "default": name, "type": "string"}, **more}, "required": ["kind", *more], "additionalProperties": False}

    schema = {"$defs": {"A": branch("a", n={"type": "integer", "minimum": 0, "maximum": 9}), "B": branch("b", ok={"type": "boolean"})}, "type": "object",
              "properties": {"x": {"discriminator": {"propertyName": "kind", "mapping": {"a": "#/$defs/A", "b": "#/$defs/B"}}, "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}},
              "required": ["x"], "additionalProperties": False}
    for seed in range(4):
        got = server.post(CHAT, {"messages": [USER], "seed": seed, "max_tokens": 300, "chat_template_kwargs": {"enable_thinking": False},
                                 "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}})["choices"][0]
        x = json.loads(got["message"]["content"])["x"]
        assert got["finish_reason"] == "stop" and (type(x["n"]) is int if x["kind"] == "a" else type(x["ok"]) is bool)


def test_older_logprobs_hold_the_chosen_token(server):
    body = {"prompt": "Tom has", "max_tokens": 3, "temperature": 0, "logprobs": 2}
    token = server.post("/tokenize", {"prompt": "&"})["tokens"][0]
    for more, sizes in ({}, [2] * 3), ({"logit_bias": {token: 100}}, [3] * 3):
        lp = server.post("/v1/completions", {**body, **more})["choices"][0]["logprobs"]
        assert [len(t) for t in lp["top_logprobs"]] == sizes
        assert [t[name] for t, name in zip(lp["top_logprobs"], lp["tokens"])] == lp["token_logprobs"]


@pytest.mark.parametrize("text", ["\U0001F30A x \U0001F468\u200d\U0001F469 \ud55c\uad6d \U00020000 \u00e9\n\"q\\", "</param \ud55c <tag>"])
def test_characters_of_many_tokens(server, text):
    """Enforced, so that every byte is a token of its own: no chunk holds a part of a character."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": text}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"s": {"const": text}}, "required": ["s"], "additionalProperties": False}}}]
    for more in ({"response_format": form}, {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}):
        body = {"messages": [USER], "temperature": 0, "max_tokens": 400, "chat_template_kwargs": {"enable_thinking": False}, **more}
        deltas = [e["choices"][0]["delta"] for e in server.events(CHAT, body)]
        streamed = "".join((d.get("content") or "") + "".join(t["function"]["arguments"] for t in d.get("tool_calls", [])) for d in deltas)
        m = server.post(CHAT, body)["choices"][0]["message"]
        assert streamed == (m["content"] or m["tool_calls"][0]["function"]["arguments"])
        assert json.loads(streamed) == (text if "tools" not in more else {"s": text})


def test_json_object_with_a_schema(server):
    """Another form of json_schema; to ignore it would be to promise what is not kept."""
    body = {"messages": [USER], "temperature": 0, "max_tokens": 100, "chat_template_kwargs": {"enable_thinking": False}}
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    got = server.post(CHAT, {**body, "response_format": {"type": "json_object", "schema": schema}})["choices"][0]["message"]["content"]
    assert set(json.loads(got)) == {"ok"}
    assert server.post(CHAT, {**body, "response_format": {"type": "json_object", "schema": [1]}}, 400)["error"]["param"] == "response_format.schema"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_there_is_room(server, field):
    got = server.post(CHAT, {"messages": [USER], field: 10 ** 6, "stop": ["a"]})
    assert got["choices"][0]["finish_reason"] in ("stop", "length")
    one = server.post(CHAT, {"messages": [USER], "max_tokens": 50, "max_completion_tokens": 3, "ignore_eos": True})
    assert one["usage"]["completion_tokens"] == 3  # the newer name counts


# ---- ends ----


def test_what_outlives_the_drain_is_told(nibble, tiny):
    """--drain: a stream gets an error event and its end, in the form of its dialect, a plain request a 503."""
    s = Server(nibble, tiny, "--drain", 0.3, "--max-seqs", 6)
    chat = {"messages": [USER], "ignore_eos": True}
    dialects = [(CHAT, chat), ("/v1/completions", {"prompt": "Tom has 3", "ignore_eos": True, "max_tokens": 4000}), ("/v1/responses", {"input": "hi", "ignore_eos": True}),
                ("/v1/messages", {**chat, "max_tokens": 4000})]
    slow = {"logprobs": True, "top_logprobs": 20}
    plain = s.open_stream({**chat, "n": 64})
    streams = [s.open_stream({**body, "stream": True, **(slow if path == CHAT else {}), "n": 64} if path in (CHAT, "/v1/completions") else {**body, "stream": True}, path)
               for path, body in dialects]
    s.wait_metric("vllm:num_requests_running", 6)
    outs = [x.recv(65536) for x in streams]
    s.p.send_signal(signal.SIGTERM)
    for i, x in enumerate(streams):
        while chunk := x.recv(65536):
            outs[i] += chunk
    told = b""
    while chunk := plain.recv(65536):
        told += chunk
    status, h, body = answer(told.split(b"HTTP/1.1 100 Continue\r\n\r\n")[-1])
    assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down") and int(h["retry-after"]) >= 1
    assert outs[0].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b'data: {"error":{"message":"the server is shutting down' in outs[0]
    assert outs[1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b'data: {"error":{' in outs[1]
    for out, event in ((outs[2], b"event: response.failed\n"), (outs[3], b"event: error\n")):
        assert b"the server is shutting down" in out.split(event)[1] and out.endswith(b"\r\n0\r\n\r\n")
    assert s.p.wait(20) == 0


def test_prompts_are_logged_when_asked_for(nibble, tiny):
    s = Server(nibble, tiny, "--log-prompts")
    s.chat("a secret word", max_tokens=1)
    s.post("/v1/completions", {"prompt": "another secret<|im_end|>", "max_tokens": 1})
    s.stop()
    assert [("secret word" in x["prompt"], x["prompt"] == "another secret<|im_end|>") for x in s.access()] == [(True, False), (False, True)]


def test_who_left_is_in_the_log(nibble, tiny):
    s = Server(nibble, tiny, "--max-seqs", 1)
    for stream in (True, False, True):  # generated, waiting, waiting
        x = s.open_stream({"messages": [USER], "ignore_eos": True, "stream": stream})
        s.wait_metric("vllm:num_requests_running", 1)
        left = (x, s.open_stream({"messages": [USER], "ignore_eos": True, "stream": not stream}))
        s.wait_metric("vllm:num_requests_waiting", 1)
        for x in reversed(left):
            x.close()
        s.wait_metric("vllm:num_requests_running", 0)
    s.stop()
    lines = [x for x in s.access() if x["path"] != "/metrics"]
    assert [(x["method"], x["path"], x["finish"]) for x in lines] == [("POST", CHAT, "cancelled")] * 6
    assert [x["status"] for x in lines] == [0 if not x["stream"] else 200 for x in lines]


def test_answers_while_loading(nibble, tiny):
    """It listens at once and says that it is loading."""
    with socket.create_server(("127.0.0.1", 0)) as x:
        port = x.getsockname()[1]
    p = subprocess.Popen([nibble.path, "serve", tiny, "--port", str(port), "-q", "--log-format", "off", "-t", "1", "--isa", "ref"], stderr=subprocess.DEVNULL)
    seen, end = {}, time.time() + 30
    while ("/ready", 200) not in seen:
        assert time.time() < end and p.poll() is None
        for method, path in (("POST", CHAT), ("POST", "/v1/messages"), ("GET", "/health"), ("GET", "/version"), ("GET", "/metrics"), ("GET", "/server_info"), ("GET", "/ready")):
            c = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            try:
                c.request(method, path, b"{}")
                r = c.getresponse()
                seen[path, r.status] = r.headers["retry-after"], r.read()
            except ConnectionRefusedError:
                time.sleep(0.001)
            c.close()
    for path in (CHAT, "/v1/messages", "/health", "/ready"):
        retry, body = seen[path, 503]
        assert retry == "5" and b"load" in body
    p.send_signal(signal.SIGTERM)
    assert p.wait(20) == 0


def test_limits_by_option(nibble, tiny):
    s = Server(nibble, tiny, "--max-body", 1024, "--max-connections", 3, "-q", "--log-format", "off")
    assert s.request("POST", CHAT, {"messages": [{**USER, "content": "x" * 2000}]})[0] == 413
    open_ = [socket.create_connection(("127.0.0.1", s.port), timeout=20) for _ in range(5)]
    for c in open_:
        c.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    for c in open_[:3]:
        assert c.recv(1000).endswith(b'{"status":"ok"}')
    open_[4].settimeout(0.3)
    with pytest.raises(TimeoutError):
        open_[4].recv(1000)
    for c in open_[:3]:
        c.close()
    open_[4].settimeout(20)
    assert open_[3].recv(1000).endswith(b'{"status":"ok"}') and open_[4].recv(1000).endswith(b'{"status":"ok"}')
    for c in open_:
        c.close()
    s.close()


def test_defaults_by_option(nibble, tiny):
    s = Server(nibble, tiny, "--ctx", 512, "--temperature", 0, "--top-k", 7, "--top-p", 0.5, "--min-p", 0.05, "--presence-penalty", 0.3, "--no-think", "--kv", "bf16", "--kv-memory", "1M",
               "--draft-head", 512, "--head", "screened", "--chunk", 64, "-t", 1, "--isa", "ref", "--memory", "200M", "--prefix-cache", 0, "--spec", 1, "-q")
    i = s.get("/server_info")[2]
    assert (i["context"], i["kv_cache"], i["chunk"], i["threads"], i["isa"], i["depth"]) == (512, "BF16", 64, 1, "ref", 1)
    want = {"temperature": 0, "top_k": 7, "top_p": 0.5, "min_p": 0.05, "presence_penalty": 0.3}
    assert {k: i["sampling_defaults"][k] for k in want} == want
    one, two = (s.post(CHAT, {"messages": [USER], "max_tokens": 9, **more}) for more in ({}, want))
    assert one["choices"] == two["choices"] and "reasoning_content" not in one["choices"][0]["message"] and two["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert s.post(CHAT, {"messages": [USER], "max_tokens": 9, "chat_template_kwargs": {"enable_thinking": True}})["choices"][0]["message"]["reasoning_content"]
    assert s.lines[0].startswith("ready ")
    s.close()
