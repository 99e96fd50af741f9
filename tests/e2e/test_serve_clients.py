"""Both official clients under what else happens to a server: every field in a stream, tool loops, structured answers, leaving, overload, drain."""
import json
import signal
import time

import anthropic
import openai
import pydantic
import pytest

from serving import Server
from test_messages import edit_tensors

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": CITY}}]
OWN_TOOLS = [{"name": "get_weather", "description": "Weather of a city", "input_schema": CITY}]
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


class Step(pydantic.BaseModel):
    n: int = pydantic.Field(ge=0, le=9)
    done: bool


class Plan(pydantic.BaseModel):
    kind: str = pydantic.Field(pattern="^[a-z]{1,5}$")
    steps: list[Step] = pydantic.Field(min_length=1, max_length=2)
    note: int | None


def clients(s):
    return (openai.OpenAI(base_url=s.url + "/v1", api_key="k", max_retries=0, timeout=60), anthropic.Anthropic(base_url=s.url, api_key="k", max_retries=0, timeout=60))


@pytest.fixture(scope="module")
def o(server):
    return clients(server)[0]


@pytest.fixture(scope="module")
def a(server):
    return clients(server)[1]


def test_every_field_of_the_clients_is_known(server):
    """None is ignored as unknown: what is not served is refused. A new field of a newer client shows here."""
    from anthropic.types import message_count_tokens_params, message_create_params
    from openai.types import completion_create_params as text
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    key = {"Authorization": "Bearer k"}
    for path, params, body in [("/v1/chat/completions", chat.CompletionCreateParamsBase, {"messages": ASK, "max_tokens": 1}), ("/v1/completions", text.CompletionCreateParamsBase, {"prompt": "x", "max_tokens": 1}),
                               ("/v1/responses", responses.ResponseCreateParamsBase, {"input": "x", "max_output_tokens": 1}),
                               ("/v1/messages", message_create_params.MessageCreateParamsBase, {"messages": ASK, "max_tokens": 1}),
                               ("/v1/messages/count_tokens", message_count_tokens_params.MessageCountTokensParams, {"messages": ASK})]:
        names = set().union(*(getattr(c, "__annotations__", {}) for c in params.__mro__))
        assert len(names) > 5
        status, headers, out = server.request("POST", path, {**dict.fromkeys(names), **body}, key)
        assert status == 200 and "x-nibble-ignored" not in headers, (path, headers.get("x-nibble-ignored"), out)
    for path, body, names in [("/v1/chat/completions", {"messages": ASK}, ("moderation", "prediction", "audio", "web_search_options", "functions", "function_call")),
                              ("/v1/responses", {"input": "x"}, ("background_options", "context_management", "access_programs", "moderation", "image", "conversation", "prompt")),
                              ("/v1/messages", {"messages": ASK, "max_tokens": 1}, ("container", "mcp_servers", "context_management"))]:
        for name in names:
            out = server.post(path, {**body, name: {"x": 1}}, 400, headers=key)
            assert name in out["error"]["message"], out


def test_every_field_in_a_stream(o):
    ask = dict(model="tiny", messages=[{"role": "developer", "content": "Be brief."}, *ASK], max_tokens=12, n=2, seed=3, temperature=0.7, top_p=0.9, presence_penalty=0.5,
               frequency_penalty=0.5, logit_bias={"5": -100}, stop=["\n\n\n"], user="me", metadata={"a": "b"}, logprobs=True, top_logprobs=2, tools=TOOLS, tool_choice="auto",
               parallel_tool_calls=True, response_format={"type": "text"}, store=False, service_tier="auto", reasoning_effort="low", modalities=["text"],
               extra_body={"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True, "stop_token_ids": [], "return_token_ids": True, "min_tokens": 1, "priority": 1,
                           "separate_reasoning": True, "chat_template_kwargs": {"enable_thinking": True}, "add_generation_prompt": True, "continue_final_message": False})
    whole = o.chat.completions.create(**ask)
    parts = list(o.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    assert [p.choices[0].delta.role for p in parts[:2]] == ["assistant"] * 2 and parts[-1].choices == []
    counts = [p.usage.completion_tokens for p in parts]
    assert counts == sorted(counts) and counts[-1] == counts[-2] == whole.usage.completion_tokens == 24
    for c in whole.choices:
        mine = [p.choices[0] for p in parts if p.choices and p.choices[0].index == c.index]
        assert "".join(getattr(x.delta, "reasoning_content", None) or "" for x in mine) == c.message.reasoning_content
        assert [t for x in mine if x.logprobs for t in x.logprobs.content] == c.logprobs.content
        assert [t for x in mine for t in getattr(x, "token_ids", [])] == c.token_ids
        assert [x.finish_reason for x in mine if x.finish_reason] == [c.finish_reason] == ["length"]


def test_tool_loop_in_streams(o, a):
    def turn(messages):
        with o.chat.completions.stream(model="tiny", messages=messages, tools=TOOLS, temperature=0, max_tokens=200, extra_body=OFF) as s:
            kinds = [e.type for e in s]
            return kinds, s.get_final_completion()

    kinds, first = turn(ASK)
    m = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls" and "tool_calls.function.arguments.done" in kinds and json.loads(m.tool_calls[0].function.arguments) == {"city": "Paris"}
    history = [*ASK, m.model_dump(exclude={"parsed"}), {"role": "tool", "tool_call_id": m.tool_calls[0].id, "content": "sunny"}]
    assert turn(history)[1].choices[0].message.content
    history = list(ASK)
    for kind in ("tool_use", "end_turn"):
        with a.messages.stream(model="tiny", max_tokens=200, tools=OWN_TOOLS, messages=history, extra_body={"temperature": 0}) as s:
            m = s.get_final_message()
        assert m.stop_reason == kind and m.content
        history += [{"role": "assistant", "content": [b.model_dump(exclude={"parsed_output"}) for b in m.content]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": b.id, "content": "sunny"} for b in m.content if b.type == "tool_use"]}]


def test_structured_answers(o, a):
    """The clients' own helpers, streamed and not: what comes back has been parsed and validated."""
    schema = {"format": {"type": "json_schema", "schema": {**Plan.model_json_schema(), "additionalProperties": False}}}
    for seed in range(2):
        more = {"seed": seed, **OFF}
        ask = dict(model="tiny", messages=ASK, response_format=Plan, max_tokens=400, extra_body=more)
        plan = o.chat.completions.parse(**ask).choices[0].message.parsed
        with o.chat.completions.stream(**ask) as s:
            list(s)
            assert s.get_final_completion().choices[0].message.parsed == plan and isinstance(plan, Plan)
        tool = openai.pydantic_function_tool(Plan, name="plan")
        call = o.chat.completions.parse(model="tiny", messages=ASK, tools=[tool], tool_choice={"type": "function", "function": {"name": "plan"}}, parallel_tool_calls=False, max_tokens=400,
                                        extra_body=more).choices[0].message.tool_calls[0]
        assert isinstance(call.function.parsed_arguments, Plan)
        assert isinstance(o.responses.parse(model="tiny", input="Hi", text_format=Plan, max_output_tokens=400, reasoning={"effort": "none"}, extra_body={"seed": seed}).output_parsed, Plan)
        with a.messages.stream(model="tiny", max_tokens=400, messages=ASK, extra_body={"seed": seed, "output_config": schema}) as s:
            assert isinstance(Plan.model_validate_json(s.get_final_text()), Plan)


def test_images_are_refused(o, a):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    for messages in ([{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}], [*ASK, {"role": "assistant", "content": "x"}, {"role": "user", "content": [part]}]):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="not served"):
                o.chat.completions.create(model="tiny", messages=messages, stream=stream)
    with pytest.raises(openai.BadRequestError, match="not served"):
        o.responses.create(model="tiny", input=[{"role": "user", "content": [{"type": "input_image", "image_url": "https://x/y.png", "detail": "auto"}]}])
    for block in ({"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}, {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}):
        for content in ([block], [{"type": "tool_result", "tool_use_id": "t", "content": [block]}]):
            with pytest.raises(anthropic.BadRequestError, match="not served"):
                a.messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": content}])


def test_leaving(server, o, a):
    forever = {"ignore_eos": True}
    ways = [lambda: o.chat.completions.create(model="tiny", messages=ASK, stream=True, extra_body=forever), lambda: o.completions.create(model="tiny", prompt="Hi", max_tokens=4000, stream=True, extra_body=forever),
            lambda: o.responses.create(model="tiny", input="Hi", stream=True, extra_body=forever),
            lambda: a.messages.create(model="tiny", max_tokens=4000, messages=ASK, stream=True, extra_body=forever)]
    before = server.metric("nibble_requests_cancelled_total", "k")
    for i, begin in enumerate(ways):
        s = begin()
        next(iter(s))
        s.close()
        server.wait_metric("nibble_requests_cancelled_total", before + i + 1, key="k", seconds=5)
    hasty = [lambda: o.with_options(timeout=0.3).chat.completions.create(model="tiny", messages=ASK, n=8, extra_body=forever),
             lambda: a.with_options(timeout=0.3).messages.create(model="tiny", messages=ASK, max_tokens=4000, extra_body=forever)]
    for begin in hasty:
        with pytest.raises((openai.APITimeoutError, anthropic.APITimeoutError)):
            begin()
    server.wait_metric("vllm:num_requests_running", 0, key="k", seconds=5)


def test_values_that_are_not_finite(nibble, tiny, tmp_path):
    """The engine fails at one token: before the answer a 500, within a stream an error event, which the clients raise; the others go on."""
    def spoil(t):
        name = "model.language_model.embed_tokens.weight"
        dtype, shape, data = t[name]
        at = 5 * len(data) // shape[0]  # the row of "&"
        t[name] = (dtype, shape, data[:at] + b"\xc0\x7f" + data[at + 2:])

    s = Server(nibble, edit_tensors(tiny, tmp_path / "m", spoil), "--alias", "tiny")
    o, a = clients(s)
    bad = [{"role": "user", "content": "this & that"}]
    with pytest.raises(openai.InternalServerError) as e:
        o.chat.completions.create(model="tiny", messages=bad)
    assert e.value.status_code == 500 and e.value.code == "E-ENGINE-NONFINITE"
    with pytest.raises(anthropic.InternalServerError, match="not finite"):
        a.messages.create(model="tiny", messages=bad, max_tokens=5)
    said = []
    with pytest.raises(openai.APIError, match="not finite"):
        for p in o.chat.completions.create(model="tiny", messages=ASK, stream=True, logit_bias={"5": 100}):
            said.append(p.choices[0].delta)
    assert said[0].role == "assistant" and said[1].reasoning_content == "&"
    with pytest.raises(anthropic.APIError, match="not finite"):
        list(a.messages.create(model="tiny", messages=bad, max_tokens=5, stream=True))
    events = list(o.responses.create(model="tiny", input="this & that", stream=True))
    assert events[-1].type == "response.failed" and "not finite" in events[-1].response.error.message
    assert s.metric("nibble_requests_failed_total") == 5 and o.chat.completions.create(model="tiny", messages=ASK, max_tokens=3).usage.completion_tokens == 3
    s.stop()
    assert [(x["status"], x["finish"]) for x in s.access() if x["method"] == "POST"] == [(500, "failed")] * 2 + [(200, "failed")] * 3 + [(200, "length")]


def test_overload_and_drain(nibble, tiny):
    """429 and 503 come as the clients' own exceptions, with the time to wait; a client that tries again gets its answer."""
    s = Server(nibble, tiny, "--alias", "tiny", "--max-seqs", 1, "--max-queue", 1, "-q", "--log-format", "off")
    o, a = clients(s)
    busy = [s.open_stream({"messages": ASK, "ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 20}) for _ in range(2)]
    s.wait_metric("vllm:num_requests_waiting", 1)
    ways = [lambda **k: o.chat.completions.create(model="tiny", messages=ASK, max_tokens=3, **k), lambda **k: o.completions.create(model="tiny", prompt="Hi", max_tokens=3, **k),
            lambda **k: o.responses.create(model="tiny", input="Hi", max_output_tokens=16, **k), lambda **k: a.messages.create(model="tiny", messages=ASK, max_tokens=3, **k)]
    for way in ways:
        for stream in (False, True):
            with pytest.raises((openai.RateLimitError, anthropic.RateLimitError)) as e:
                way(stream=stream)
            assert int(e.value.response.headers["retry-after"]) >= 1
    busy[1].close()
    s.wait_metric("vllm:num_requests_waiting", 0)
    busy[0].close()
    assert ways[0]().usage.completion_tokens == 3 and ways[3]().usage.output_tokens == 3
    going = o.chat.completions.create(model="tiny", messages=ASK, stream=True, max_tokens=600, extra_body={"ignore_eos": True}, logprobs=True, top_logprobs=20)
    parts = [next(going)]
    o.models.list()  # connections that stay open
    a.messages.count_tokens(model="tiny", messages=ASK)
    s.p.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    for way, error in ((ways[0], openai.InternalServerError), (ways[3], anthropic.ServiceUnavailableError)):
        with pytest.raises(error) as e:
            way()
        assert e.value.status_code == 503 and int(e.value.response.headers["retry-after"]) >= 1
    parts += going
    assert parts[-1].choices[0].finish_reason == "length" and sum(len(p.choices[0].logprobs.content) for p in parts if p.choices[0].logprobs) == 600
    assert s.p.wait(30) == 0
