"""The official `openai` client against `nibble serve`: what applications send and read, streamed and not."""
import json

import pytest

openai = pytest.importorskip("openai", reason="the openai client is not installed (scripts/setup.sh installs it)")

from serving import Server  # noqa: E402

USER = [{"role": "user", "content": "Tom has 3 apples and buys 4. How many?"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}}]


@pytest.fixture(scope="module")
def server(nibble, tiny):
    s = Server(nibble, tiny, "--alias", "tiny", "--api-key", "k")
    yield s
    s.close()


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0, timeout=60)


def test_models(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client):
    r = client.chat.completions.create(model="tiny", messages=USER, temperature=0, max_completion_tokens=300)
    m = r.choices[0].message
    assert r.object == "chat.completion" and m.role == "assistant" and m.content and m.reasoning_content and r.choices[0].finish_reason == "stop"
    assert r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens
    assert 0 < r.usage.completion_tokens_details.reasoning_tokens < r.usage.completion_tokens
    assert r.usage.prompt_tokens_details.cached_tokens >= 0
    parts = list(client.chat.completions.create(model="tiny", messages=USER, temperature=0, max_completion_tokens=300, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].delta.content or "" for p in parts[:-1]) == m.content
    assert "".join(getattr(p.choices[0].delta, "reasoning_content", None) or "" for p in parts[:-1]) == m.reasoning_content
    assert parts[-1].choices == [] and parts[-1].usage.completion_tokens == r.usage.completion_tokens
    assert parts[-2].choices[0].finish_reason == "stop"


def test_accumulating_stream(client):
    with client.chat.completions.stream(model="tiny", messages=USER, temperature=0, max_tokens=300) as s:
        kinds = [e.type for e in s]
        final = s.get_final_completion()
    assert kinds[-1] == "content.done" and "content.delta" in kinds
    assert final.choices[0].message.content == client.chat.completions.create(model="tiny", messages=USER, temperature=0, max_tokens=300).choices[0].message.content


def test_every_field(client):
    r = client.chat.completions.create(
        model="tiny", messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}], max_tokens=5, n=2, seed=3,
        temperature=0.7, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"5": -100}, stop=["\n\n\n"], user="me", metadata={"a": "b"}, logprobs=True,
        top_logprobs=2, tools=TOOLS, tool_choice="auto", parallel_tool_calls=True, response_format={"type": "text"}, store=False, service_tier="auto",
        reasoning_effort="low", modalities=["text"],
        extra_body={"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True, "stop_token_ids": [], "return_token_ids": True, "min_tokens": 1,
                    "separate_reasoning": True, "chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": True, "continue_final_message": False})
    assert len(r.choices) == 2 and all(len(c.logprobs.content) == 5 and len(c.token_ids) == 5 for c in r.choices)


def test_errors(client, server):
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model="tiny", messages=USER, temperature=-1)
    assert e.value.param == "temperature" and e.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x " * 9000}], stream=True)
    assert e.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=USER)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0).models.list()


def test_completions(client):
    r = client.completions.create(model="tiny", prompt="Tom has 3", temperature=0, max_tokens=12, echo=True)
    s = client.completions.create(model="tiny", prompt="Tom has 3", temperature=0, max_tokens=12, stream=True)
    assert r.choices[0].text == "Tom has 3" + "".join(p.choices[0].text for p in s)


def test_cancel(client, server):
    before = server.metric("nibble_requests_cancelled_total", "k")
    s = client.chat.completions.create(model="tiny", messages=USER, stream=True, extra_body={"ignore_eos": True})
    next(iter(s))
    s.close()
    server.wait_metric("nibble_requests_cancelled_total", before + 1, key="k")


def test_tools_render(client, server):
    """A tool loop's second turn: the history with calls and results is accepted as the client sends it."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps({"city": "Paris", "days": 2})}}
    r = client.chat.completions.create(model="tiny", messages=[*USER, {"role": "assistant", "content": None, "tool_calls": [call]},
                                                               {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}], tools=TOOLS, max_tokens=5)
    assert r.usage.completion_tokens <= 5
