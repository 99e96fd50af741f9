"""Enforced answers over HTTP: response_format and tool_choice, streamed and not, with thinking and without."""
import json

import pytest

from serving import Server

USER = [{"role": "user", "content": "Tom has 3 apples and buys 4. How many?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = [{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}, "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
          "required": ["a", "b"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {
    "city": {"type": "string", "maxLength": 10}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["city", "days"], "additionalProperties": False}}}
         for name in ("get_weather", "get_time")]


@pytest.fixture(scope="module")
def server(nibble, tiny):
    s = Server(nibble, tiny)
    yield s
    s.close()


def both(server, body):
    """The message of the whole answer; the streamed one must be the same."""
    whole = server.post(CHAT, body)["choices"][0]
    text, thought, calls, finish, opened = "", "", [], None, []
    for e in server.events(CHAT, body):
        c = e["choices"][0]
        text += c["delta"].get("content") or ""
        thought += c["delta"].get("reasoning_content") or ""
        for t in c["delta"].get("tool_calls", []):
            if "id" in t:
                assert t["index"] == len(calls) and t["function"]["arguments"] == "" and t["type"] == "function"
                opened.append(t["id"])
                calls.append([t["function"]["name"], ""])
            else:
                calls[t["index"]][1] += t["function"]["arguments"]
        finish = c["finish_reason"] or finish
    m = whole["message"]
    assert (text, thought, finish) == (m["content"] or "", m.get("reasoning_content", ""), whole["finish_reason"])
    assert calls == [[t["function"]["name"], t["function"]["arguments"]] for t in m.get("tool_calls", [])]
    assert len(set(opened)) == len(opened)
    return m, whole["finish_reason"]


def fits(v):
    return (isinstance(v, dict) and {"a", "b"} <= set(v) <= {"a", "b", "c"} and type(v["a"]) is int and 0 <= v["a"] <= 99 and v["b"] in ("x", "y") and
            (len(v.get("c", [])) <= 3 and all(type(x) is bool for x in v.get("c", []))))


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_schema(server, thinking, seed):
    body = {"messages": USER, "seed": seed, "max_tokens": 600, "chat_template_kwargs": {"enable_thinking": thinking},
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}}
    m, finish = both(server, body)
    if finish == "stop":
        assert fits(json.loads(m["content"]))
        assert bool(m.get("reasoning_content")) == thinking
    else:
        assert finish == "length" and thinking


def test_schema_cut_inside_thinking(server):
    m, finish = both(server, {"messages": USER, "temperature": 0, "max_tokens": 5, "response_format": {"type": "json_object"}})
    assert m["content"] is None and m["reasoning_content"] and finish == "length"


@pytest.mark.parametrize("depth", [0, 2, 5])
def test_object_does_not_depend_on_drafts(nibble, tiny, server, depth):
    s = Server(nibble, tiny, "--spec", depth)
    body = {"messages": USER, "seed": 3, "max_tokens": 300, "response_format": {"type": "json_object"}, "chat_template_kwargs": {"enable_thinking": False}}
    want, _ = both(server, body)
    assert both(s, body)[0] == want and isinstance(json.loads(want["content"]), dict)
    s.close()


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_calls(server, thinking, choice):
    body = {"messages": USER, "temperature": 0, "max_tokens": 600, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False,
            "chat_template_kwargs": {"enable_thinking": thinking}}
    m, finish = both(server, body)
    assert finish == "tool_calls" and m["content"] is None and len(m["tool_calls"]) == 1
    call = m["tool_calls"][0]["function"]
    assert call["name"] == "get_time" if isinstance(choice, dict) else call["name"] in ("get_time", "get_weather")
    args = json.loads(call["arguments"])
    assert set(args) == {"city", "days"} and len(args["city"]) <= 10 and 1 <= args["days"] <= 9


@pytest.mark.parametrize("how", ["free", "required", "thought"])
def test_one_call_ends_the_answer(server, how):
    """parallel_tool_calls false: nothing is generated behind the first call, though the model would go on."""
    body = {"messages": WEATHER, "temperature": 0, "max_tokens": 400, "tools": CITY, "return_token_ids": True, "tool_choice": "auto" if how == "free" else "required",
            "ignore_eos": how == "free", "chat_template_kwargs": {"enable_thinking": how == "thought"}, "n": 2}
    more = server.post(CHAT, body)
    one = server.post(CHAT, {**body, "parallel_tool_calls": False})
    assert ("reasoning_content" in one["choices"][0]["message"]) == (how == "thought")
    for a, b in zip(more["choices"], one["choices"]):
        assert b["finish_reason"] == "tool_calls" and len(b["message"]["tool_calls"]) == 1
        assert b["message"]["tool_calls"][0]["function"] == a["message"]["tool_calls"][0]["function"]
        ids = b["token_ids"]
        assert ids == a["token_ids"][:len(ids)] and len(ids) < len(a["token_ids"])
        text = server.post("/detokenize", {"tokens": ids})["prompt"]
        assert text.rstrip().endswith("</function>") and "</function>" not in server.post("/detokenize", {"tokens": ids[:-1]})["prompt"]
    assert one["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in one["choices"])
    m, finish = both(server, {**body, "parallel_tool_calls": False, "n": 1})
    assert finish == "tool_calls" and [t["function"] for t in m["tool_calls"]] == [t["function"] for t in one["choices"][0]["message"]["tool_calls"]]


def test_tool_loop(server):
    """A call, its result, and an answer; the second turn finds the first one's prompt in the cache."""
    body = {"temperature": 0, "max_tokens": 600, "tools": TOOLS}
    first = server.post(CHAT, {**body, "messages": USER, "tool_choice": "required", "parallel_tool_calls": False})
    m = first["choices"][0]["message"]
    history = [*USER, m, {"role": "tool", "tool_call_id": m["tool_calls"][0]["id"], "content": "sunny"}]
    second = server.post(CHAT, {**body, "messages": history})
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0.8 * first["usage"]["prompt_tokens"]
    none = server.post(CHAT, {**body, "messages": history, "tool_choice": "none"})
    assert "tool_calls" not in none["choices"][0]["message"] and none["usage"]["prompt_tokens"] < second["usage"]["prompt_tokens"]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_schema_or_calls(server, thinking, seed):
    """With tools that may be called an answer is JSON that fits or calls that fit; seeds give both."""
    for messages, tools in ((USER, TOOLS), (WEATHER, CITY)):
        body = {"messages": messages, "seed": seed, "max_tokens": 600, "chat_template_kwargs": {"enable_thinking": thinking}, "tools": tools,
                "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
        m, finish = both(server, body)
        if finish == "stop":
            assert fits(json.loads(m["content"])) and "tool_calls" not in m
        elif finish == "tool_calls":
            assert m["content"] is None
            for t in m["tool_calls"]:
                wanted = next(x["function"]["parameters"] for x in tools if x["function"]["name"] == t["function"]["name"])
                args = json.loads(t["function"]["arguments"])
                assert set(wanted["required"]) <= set(args) <= set(wanted["properties"])
        else:
            assert finish == "length"
        one, finish = both(server, {**body, "tool_choice": "required", "parallel_tool_calls": False})
        assert finish == "length" or finish == "tool_calls" and len(one["tool_calls"]) == 1
        none, finish = both(server, {**body, "tool_choice": "none"})
        assert finish == "length" or "tool_calls" not in none and fits(json.loads(none["content"]))


def test_schema_or_calls_gives_both(server):
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    off = {"enable_thinking": False}
    assert server.chat("What is the weather in Paris?", tools=CITY, response_format=schema, max_tokens=300, chat_template_kwargs=off)["choices"][0]["finish_reason"] == "tool_calls"
    brace = {str(server.post("/tokenize", {"prompt": "<tool_call>"})["tokens"][0]): -100, str(server.post("/tokenize", {"prompt": "<"})["tokens"][0]): -100}
    c = server.chat("What is the weather in Paris?", tools=CITY, response_format=schema, max_tokens=300, chat_template_kwargs=off, logit_bias=brace)["choices"][0]
    assert c["finish_reason"] == "stop" and fits(json.loads(c["message"]["content"]))


def test_json_that_spells_a_call(server):
    """A JSON answer is text, whatever its strings say."""
    call = "<tool_call> <function=get_weather> <parameter=city> Rome </parameter> </function> </tool_call>"
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {"const": call}}, "required": ["a"], "additionalProperties": False}}}
    for limit in (300, 20):
        m, finish = both(server, {"messages": WEATHER, "temperature": 0, "max_tokens": limit, "tools": CITY, "response_format": schema, "chat_template_kwargs": {"enable_thinking": False},
                                  "logit_bias": {str(server.post("/tokenize", {"prompt": "<tool_call>"})["tokens"][0]): -100, str(server.post("/tokenize", {"prompt": "<"})["tokens"][0]): -50,
                                                 str(server.post("/tokenize", {"prompt": "{"})["tokens"][0]): 100}})
        assert "tool_calls" not in m
        if finish == "stop":
            assert json.loads(m["content"]) == {"a": call}
        else:
            assert finish == "length" and m["content"].startswith("{") and call.startswith(m["content"].split('"', 3)[3]) and "<function=" in m["content"]


def test_refused(server):
    def why(**more):
        e = server.post(CHAT, {"messages": USER, "max_tokens": 3, **more}, 400)["error"]
        return e["param"], e["message"]

    param, message = why(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {"not": {}}}}}})
    assert param == "response_format" and "not" in message and "a" in message
    assert why(response_format={"type": "json_schema"})[0] == "response_format.json_schema.schema"
    assert why(response_format={"type": "json_object"}, ignore_eos=True)[0] == "ignore_eos"
    assert why(tool_choice={"type": "function", "function": {"name": "f"}}, tools=TOOLS)[0] == "tool_choice"
    bad = json.loads(json.dumps(TOOLS))
    bad[0]["function"]["parameters"]["properties"]["city"] = {"type": "string", "not": {}}
    assert why(tools=bad, tool_choice="required")[0] == "tools"
    assert why(tools=bad, response_format={"type": "json_object"})[0] == "tools"
    assert why(tools=TOOLS, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}})[0] == "response_format"
