"""/v1/responses and /v1/messages through the official clients, streamed and not: the same answers as /v1/chat/completions."""
import json
import re
import subprocess
import urllib.error
import urllib.request

import anthropic
import openai
import pytest

QUESTION = "Ada has 12 apples. Ben has 30 apples. How many apples do they have together?"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASK_WEATHER = "What is the weather in Paris?"
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def url(nibble, tiny):
    p = subprocess.Popen([nibble.path, "serve", str(tiny), "--port", "0", "--log-format", "off", "--api-key", "k"], stderr=subprocess.PIPE, text=True)
    try:
        yield next(m[1] for m in (re.search(r"ready (http://\S+)", line) for line in p.stderr) if m)
        p.terminate()
        assert p.wait(60) == 0
    finally:
        p.kill()
        p.stderr.close()


@pytest.fixture(scope="module")
def o(url):
    return openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0)


@pytest.fixture(scope="module")
def a(url):
    return anthropic.Anthropic(base_url=url, api_key="k", max_retries=0)


@pytest.fixture(scope="module")
def chat(o):
    """What the chat endpoint answers."""
    def ask(**kw):
        r = o.chat.completions.create(model="qwen36-tiny", temperature=0, **kw)
        return r.choices[0].message, r
    return ask


def post(url, path, body, key="k"):
    r = urllib.request.Request(url + path, json.dumps(body).encode() if not isinstance(body, bytes) else body,
                               {"Content-Type": "application/json", "Authorization": "Bearer " + key})
    try:
        with urllib.request.urlopen(r, timeout=60) as f:
            return f.status, f.read(), f.headers
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read(), e.headers


def events(raw):
    """(event, data) of a stream; every line is one of the two, or a comment."""
    out, name = [], None
    for line in raw.decode().split("\n"):
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            out.append((name, json.loads(line[6:])))
            name = None
        else:
            assert line == "" or line.startswith(":"), line
    return out


# ---- /v1/responses ----

def test_response(o, chat):
    want, r0 = chat(messages=[{"role": "user", "content": QUESTION}])
    r = o.responses.create(model="qwen36-tiny", input=QUESTION, temperature=0)
    assert [i.type for i in r.output] == ["reasoning", "message"]
    assert r.output_text == want.content and "42" in want.content
    assert r.output[0].content[0].text == want.reasoning_content
    assert r.id.startswith("resp_") and r.object == "response" and r.status == "completed" and r.error is None and r.store is False
    u = r.usage
    assert (u.input_tokens, u.output_tokens, u.total_tokens) == (r0.usage.prompt_tokens, r0.usage.completion_tokens, r0.usage.total_tokens)
    assert 0 < u.output_tokens_details.reasoning_tokens < u.output_tokens
    assert 1 <= getattr(u, "speculative", {"accept_length": 1})["accept_length"] <= 6  # absent when no drafts were made


def test_response_stream(o):
    whole = o.responses.create(model="qwen36-tiny", input=QUESTION, temperature=0)
    with o.responses.stream(model="qwen36-tiny", input=QUESTION, temperature=0) as s:
        got = list(s)
        final = s.get_final_response()
    assert [e.sequence_number for e in got] == list(range(len(got)))
    kinds = [e.type for e in got]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    squeezed = [k for i, k in enumerate(kinds) if i == 0 or kinds[i - 1] != k]
    part = ["response.output_item.added", "response.content_part.added", "%s.delta", "%s.done", "response.content_part.done", "response.output_item.done"]
    assert squeezed[2:-1] == [p.replace("%s", "response.reasoning_text") for p in part] + [p.replace("%s", "response.output_text") for p in part]
    assert "".join(e.delta for e in got if e.type == "response.output_text.delta") == whole.output_text == final.output_text
    thought = "".join(e.delta for e in got if e.type == "response.reasoning_text.delta")
    assert thought == whole.output[0].content[0].text
    ids = {i.id for i in final.output}
    assert {e.item_id for e in got if hasattr(e, "item_id")} == ids and len(ids) == 2
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert [(i.type, i.status, i.content[0].text) for i in final.output] == [(i.type, i.status, i.content[0].text) for i in whole.output]


def test_response_fields(o, chat):
    want, _ = chat(messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}], reasoning_effort="none")
    r = o.responses.create(model="qwen36-tiny", instructions="Be brief.", input=[{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}],
                           temperature=0, reasoning={"effort": "none"}, metadata={"a": "b"}, include=["reasoning.encrypted_content"], store=False,
                           truncation="disabled", user="me", extra_body={"seed": 1, "top_k": 5})
    assert [i.type for i in r.output] == ["message"] and r.output_text == want.content
    assert r.instructions == "Be brief." and r.metadata == {"a": "b"} and r.reasoning.effort == "none"
    r = o.responses.create(model="qwen36-tiny", input=QUESTION, temperature=0, max_output_tokens=5)
    assert r.status == "incomplete" and r.incomplete_details.reason == "max_output_tokens" and r.usage.output_tokens == 5
    assert r.output[-1].status == "incomplete"
    kinds = [e.type for e in o.responses.create(model="qwen36-tiny", input=QUESTION, temperature=0, max_output_tokens=5, stream=True)]
    assert kinds[-1] == "response.incomplete"


def test_response_tool_loop(o):
    tool = {"type": "function", "name": "get_weather", "description": "Weather of a city", "parameters": WEATHER, "strict": False}
    history = [{"role": "user", "content": ASK_WEATHER}]
    r = o.responses.create(model="qwen36-tiny", input=history, tools=[tool], temperature=0, reasoning={"effort": "none"})
    call = r.output[-1]
    assert call.type == "function_call" and call.name == "get_weather" and json.loads(call.arguments) == {"city": "Paris"}
    assert r.tools[0].name == "get_weather"
    with o.responses.stream(model="qwen36-tiny", input=history, tools=[tool], temperature=0, reasoning={"effort": "none"}) as s:
        got = list(s)
        final = s.get_final_response()
    assert final.output[-1].arguments == call.arguments
    assert "".join(e.delta for e in got if e.type == "response.function_call_arguments.delta") == call.arguments
    history += [i.to_dict() for i in r.output] + [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 21 degrees"}]
    r = o.responses.create(model="qwen36-tiny", input=history, tools=[tool], temperature=0, reasoning={"effort": "none"})
    assert r.status == "completed" and r.output
    # one call ends the answer, whatever the model would say behind it
    r = o.responses.create(model="qwen36-tiny", input=ASK_WEATHER, tools=[tool], temperature=0, reasoning={"effort": "none"}, parallel_tool_calls=False,
                           extra_body={"ignore_eos": True})
    assert r.status == "completed" and r.output[-1].type == "function_call" and r.output[-1].arguments == call.arguments
    # none: the tools are not even shown
    r = o.responses.create(model="qwen36-tiny", input=ASK_WEATHER, tools=[tool], tool_choice="none", temperature=0)
    assert all(i.type != "function_call" for i in r.output)


@pytest.mark.parametrize("field, value", [
    ("previous_response_id", "resp_1"), ("conversation", "conv_1"), ("prompt", {"id": "p"}), ("store", True), ("background", True),
    ("truncation", "auto"), ("tools", [{"type": "web_search"}]), ("input", [{"type": "item_reference", "id": "x"}]), ("input", []), ("input", 5),
    ("max_output_tokens", 0), ("temperature", "hot"), ("reasoning", {"effort": "huge"}), ("text", {"format": {"type": "xml"}}), ("tool_choice", "any"),
    ("tool_choice", {"type": "function", "name": "nobody"}), ("include", ["message.output_text.logprobs"]), ("stream", "yes"), ("top_logprobs", 3),
    ("instructions", ["x"]), ("metadata", 3), ("model", 5)])
def test_response_refusals(url, field, value):
    status, body, _ = post(url, "/v1/responses", {"input": "x", field: value})
    assert status == 400, body
    error = json.loads(body)["error"]
    assert field.split("_")[0] in error["param"] and error["message"] and error["type"] == "invalid_request_error"


def test_response_errors(url, o):
    with pytest.raises(openai.NotFoundError):
        o.responses.create(model="other", input="x")
    with pytest.raises(openai.BadRequestError, match="context"):
        o.responses.create(model="qwen36-tiny", input="word " * 50000, stream=True)
    assert post(url, "/v1/responses", b"{")[0] == 400
    assert post(url, "/v1/responses", {"input": "x"}, key="wrong")[0] == 401
    assert post(url, "/v1/responses", {"input": "x", "max_output_tokens": 1, "surprise": 1})[2]["X-Nibble-Ignored"] == "surprise"


def test_response_types(url):
    for param, value in [("user", 3), ("prompt_cache_key", []), ("stream_options", {"include_obfuscation": True}), ("metadata", "x"), ("max_tool_calls", 0)]:
        status, raw, _ = post(url, "/v1/responses", {"input": QUESTION, "stream": True, param: value})
        assert status == 400 and json.loads(raw)["error"]["param"] == param, raw


def test_json_or_calls(o):
    """With text.format and tools the answer is one or the other; both are enforced."""
    tool = {"type": "function", "name": "get_weather", "description": "Weather of a city", "parameters": WEATHER, "strict": False}
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}}}
    r = o.responses.create(model="qwen36-tiny", input=ASK_WEATHER, tools=[tool], text=form, temperature=0, reasoning={"effort": "none"})
    assert r.output[-1].type == "function_call" and json.loads(r.output[-1].arguments) == {"city": "Paris"}
    r = o.responses.create(model="qwen36-tiny", input=ASK_WEATHER, tools=[tool], text=form, temperature=0, reasoning={"effort": "none"}, tool_choice="none")
    assert set(json.loads(r.output_text)) == {"ok"}
    with o.chat.completions.stream(model="qwen36-tiny", messages=[{"role": "user", "content": ASK_WEATHER}], temperature=0, max_tokens=300, reasoning_effort="none",
                                   tools=[{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}],
                                   response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": form["format"]["schema"]}}) as s:
        for _ in s:
            pass
        c = s.get_final_completion().choices[0]
    assert c.finish_reason == "tool_calls" and json.loads(c.message.tool_calls[0].function.arguments) == {"city": "Paris"}


# ---- /v1/messages ----

def test_message(a, chat):
    want, r0 = chat(messages=[{"role": "user", "content": QUESTION}], extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    m = a.messages.create(model="qwen36-tiny", max_tokens=300, messages=[{"role": "user", "content": QUESTION}], extra_body=GREEDY)
    assert [b.type for b in m.content] == ["text"] and m.content[0].text == want.content
    assert m.id.startswith("msg_") and m.role == "assistant" and m.type == "message" and m.stop_reason == "end_turn" and m.stop_sequence is None
    assert m.usage.input_tokens + m.usage.cache_read_input_tokens == r0.usage.prompt_tokens and m.usage.output_tokens == r0.usage.completion_tokens
    want, _ = chat(messages=[{"role": "system", "content": "Be brief.\nBe kind."}, {"role": "user", "content": QUESTION}])
    m = a.messages.create(model="qwen36-tiny", max_tokens=300, system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
                          messages=[{"role": "user", "content": [{"type": "text", "text": QUESTION}]}], thinking={"type": "enabled", "budget_tokens": 1024}, extra_body=GREEDY)
    assert [b.type for b in m.content] == ["thinking", "text"] and m.content[0].signature
    assert (m.content[0].thinking, m.content[1].text) == (want.reasoning_content, want.content)
    assert m.usage.output_tokens_details.thinking_tokens > 0


@pytest.mark.parametrize("thinking", ["disabled", "adaptive"])
def test_message_stream(a, url, thinking):
    ask = dict(model="qwen36-tiny", max_tokens=300, messages=[{"role": "user", "content": QUESTION}], thinking={"type": thinking})
    whole = a.messages.create(**ask, extra_body=GREEDY)
    with a.messages.stream(**ask, extra_body=GREEDY) as s:
        text = "".join(s.text_stream)
        final = s.get_final_message()
    assert text == whole.content[-1].text
    assert [b.to_dict() for b in final.content] == [b.to_dict() for b in whole.content]
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == whole.usage.output_tokens
    got = events(post(url, "/v1/messages", {**ask, **GREEDY, "stream": True})[1])
    assert all(name == data["type"] for name, data in got)
    kinds = [name for name, _ in got if name != "ping"]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    squeezed = [k for i, k in enumerate(kinds) if i == 0 or kinds[i - 1] != k]
    assert squeezed[1:-2] == ["content_block_start", "content_block_delta", "content_block_stop"] * len(whole.content)
    assert [d["index"] for n, d in got if n == "content_block_start"] == list(range(len(whole.content)))


def test_message_thinking_left_out(a):
    ask = dict(model="qwen36-tiny", max_tokens=300, messages=[{"role": "user", "content": QUESTION}], thinking={"type": "adaptive", "display": "omitted"})
    whole = a.messages.create(**ask, extra_body=GREEDY)
    with a.messages.stream(**ask, extra_body=GREEDY) as s:
        final = s.get_final_message()
    for m in (whole, final):
        assert [b.type for b in m.content] == ["thinking", "text"] and m.content[0].thinking == "" and m.content[0].signature and "42" in m.content[1].text


def test_message_stops(a):
    ask = dict(model="qwen36-tiny", messages=[{"role": "user", "content": QUESTION}])
    m = a.messages.create(**ask, max_tokens=3, extra_body=GREEDY)
    assert m.stop_reason == "max_tokens" and m.usage.output_tokens == 3
    m = a.messages.create(**ask, max_tokens=300, stop_sequences=["zzz", " = "], extra_body=GREEDY)
    assert (m.stop_reason, m.stop_sequence) == ("stop_sequence", " = ") and m.content[0].text == "12 + 30"
    with a.messages.stream(**ask, max_tokens=300, stop_sequences=["zzz", " = "], extra_body=GREEDY) as s:
        m = s.get_final_message()
    assert (m.stop_reason, m.stop_sequence) == ("stop_sequence", " = ") and m.content[0].text == "12 + 30"


def test_message_prefill(a):
    whole = a.messages.create(model="qwen36-tiny", max_tokens=300, messages=[{"role": "user", "content": QUESTION}], extra_body=GREEDY).content[0].text
    m = a.messages.create(model="qwen36-tiny", max_tokens=300, messages=[{"role": "user", "content": QUESTION}, {"role": "assistant", "content": whole[:7]}], extra_body=GREEDY)
    assert whole[:7] + m.content[0].text == whole


def test_message_tool_loop(a):
    tool = {"name": "get_weather", "description": "Weather of a city", "input_schema": WEATHER}
    ask = dict(model="qwen36-tiny", max_tokens=300, tools=[tool], extra_body=GREEDY)
    history = [{"role": "user", "content": ASK_WEATHER}]
    m = a.messages.create(**ask, messages=history)
    use = m.content[-1]
    assert m.stop_reason == "tool_use" and use.type == "tool_use" and use.id.startswith("toolu_") and use.name == "get_weather" and use.input == {"city": "Paris"}
    with a.messages.stream(**ask, messages=history) as s:
        got = list(s)
        final = s.get_final_message()
    assert final.content[-1].input == use.input and final.stop_reason == "tool_use"
    assert json.loads("".join(e.partial_json for e in got if e.type == "input_json")) == use.input
    alone = {**ask, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "extra_body": {**GREEDY, "ignore_eos": True}}
    one = a.messages.create(**alone, messages=history)  # the call ends the answer, whatever the model would say behind it
    assert one.stop_reason == "tool_use" and one.content[-1].input == use.input
    history += [{"role": "assistant", "content": [b.to_dict() for b in m.content]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny, 21 degrees"}]}]}]
    m = a.messages.create(**ask, messages=history)
    assert m.content and m.stop_reason in ("end_turn", "tool_use")
    m = a.messages.create(**ask, messages=history[:1], tool_choice={"type": "none"})
    assert all(b.type != "tool_use" for b in m.content)


def test_count_tokens(a):
    tool = {"name": "get_weather", "description": "Weather of a city", "input_schema": WEATHER}
    messages = [{"role": "user", "content": QUESTION}]
    n = a.messages.count_tokens(model="qwen36-tiny", messages=messages).input_tokens
    u = a.messages.create(model="qwen36-tiny", max_tokens=1, messages=messages).usage
    assert n == u.input_tokens + u.cache_read_input_tokens
    assert a.messages.count_tokens(model="qwen36-tiny", messages=messages, tools=[tool], system="Be brief.").input_tokens > n
    assert a.messages.count_tokens(model="qwen36-tiny", messages=[{"role": "user", "content": "word " * 50000}]).input_tokens > 32768


SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}, "sure": {"type": "boolean"}}, "required": ["answer", "sure"], "additionalProperties": False}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_message_forced_call(a, choice):
    tool = {"name": "get_weather", "description": "Weather of a city", "input_schema": WEATHER}
    m = a.messages.create(model="qwen36-tiny", max_tokens=300, tools=[tool], tool_choice=choice, messages=[{"role": "user", "content": QUESTION}], extra_body=GREEDY)
    assert m.stop_reason in ("tool_use", "max_tokens")
    uses = [b for b in m.content if b.type == "tool_use"]
    assert uses and all(b.name == "get_weather" and set(b.input) <= {"city"} for b in uses)


def test_message_schema(a):
    m = a.messages.create(model="qwen36-tiny", max_tokens=300, output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
                          messages=[{"role": "user", "content": QUESTION}], thinking={"type": "adaptive"}, extra_body=GREEDY)
    got = json.loads(m.content[-1].text)
    assert type(got["answer"]) is int and type(got["sure"]) is bool and len(got) == 2


def test_response_forced(o):
    tool = {"type": "function", "name": "get_weather", "description": "Weather of a city", "parameters": WEATHER, "strict": True}
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        r = o.responses.create(model="qwen36-tiny", input=QUESTION, tools=[tool], tool_choice=choice, temperature=0, max_output_tokens=300)
        calls = [i for i in r.output if i.type == "function_call"]
        assert calls and all(set(json.loads(i.arguments)) <= {"city"} for i in calls)
    r = o.responses.create(model="qwen36-tiny", input=QUESTION, temperature=0, text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}})
    assert set(json.loads(r.output_text)) == {"answer", "sure"}
    r = o.responses.create(model="qwen36-tiny", input=QUESTION, temperature=0, text={"format": {"type": "json_object"}}, max_output_tokens=300)
    assert r.status == "incomplete" or type(json.loads(r.output_text)) is dict


@pytest.mark.parametrize("field, value", [
    ("max_tokens", None), ("max_tokens", 0), ("messages", []), ("messages", None), ("system", 5), ("temperature", "hot"), ("stop_sequences", [""]),
    ("thinking", {"type": "huge"}), ("thinking", "on"), ("tools", [{"type": "web_search_20250305", "name": "web_search"}]), ("tools", [{"name": "x"}]),
    ("tool_choice", {"type": "any"}), ("tool_choice", {"type": "some"}), ("container", "c"), ("mcp_servers", []), ("service_tier", "fast"), ("speed", "fast"),
    ("messages", [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}]}]),
    ("output_config", {"format": {"type": "xml"}}), ("output_config", {"effort": "huge"}), ("stream", 1)])
def test_message_refusals(url, field, value):
    status, body, _ = post(url, "/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], field: value})
    assert status == 400, body
    e = json.loads(body)
    assert e["type"] == "error" and e["error"]["type"] == "invalid_request_error" and field.split("_")[0] in e["error"]["message"].replace("format", "output"), e


def test_message_errors(url, a):
    ask = dict(model="qwen36-tiny", max_tokens=5, messages=[{"role": "user", "content": "x"}])
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(**ask)
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        a.messages.create(**{**ask, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="context"):
        a.messages.create(**{**ask, "messages": [{"role": "user", "content": "word " * 50000}]})
    status, body, headers = post(url, "/v1/messages", b"{")
    assert status == 400 and json.loads(body)["type"] == "error"
    assert post(url, "/v1/messages", {**ask, "surprise": 1})[2]["X-Nibble-Ignored"] == "surprise"
