"""The official `openai` client against `nibble serve`: what applications send and read, streamed and not."""
import json

import pytest

openai = pytest.importorskip("openai", reason="the openai client is not installed (scripts/setup.sh installs it)")

USER = [{"role": "user", "content": "Tom has 3 apples and buys 4. How many?"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}}]


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


MANY = ["Tom has 3", "Once", "Mia buys 12 pens and", "Tom has 3 apples"]


def alone(client, prompt, **kw):
    r = client.completions.create(model="tiny", prompt=prompt, **kw)
    return [(c.text, c.finish_reason, c.logprobs and c.logprobs.model_dump()) for c in r.choices], r.usage


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("more", [{"temperature": 0, "max_tokens": 12}, {"temperature": 0, "max_tokens": 6, "logprobs": 2}, {"temperature": 1, "seed": 5, "n": 3, "max_tokens": 8},
                                  {"temperature": 0, "max_tokens": 20, "stop": [" ", "."], "echo": True}, {"temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True},
                                  {"temperature": 1, "seed": 1, "n": 2, "max_tokens": 5, "logprobs": 3, "echo": True}, {"max_tokens": 0, "logprobs": 1, "echo": True}])
def test_several_prompts(client, server, more, as_ids):
    """Choice i * n + k is what prompt i gets as its k-th answer alone, streamed and not; usage is the sum."""
    prompts = [server.post("/tokenize", {"prompt": p}, headers={"Authorization": "Bearer k"})["tokens"] for p in MANY] if as_ids else MANY
    want = [alone(client, p, **more) for p in prompts]
    texts = [c for cs, _ in want for c in cs]
    r = client.completions.create(model="tiny", prompt=prompts, **more)
    assert [c.index for c in r.choices] == list(range(len(MANY) * more.get("n", 1)))
    assert [(c.text, c.finish_reason, c.logprobs and c.logprobs.model_dump()) for c in r.choices] == texts
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(r.usage, key) == sum(getattr(u, key) for _, u in want)
    got, ends, usage = [""] * len(texts), [None] * len(texts), None
    for p in client.completions.create(model="tiny", prompt=prompts, stream=True, stream_options={"include_usage": True}, **more):
        usage = p.usage or usage
        for c in p.choices:
            assert ends[c.index] is None
            got[c.index] += c.text
            ends[c.index] = c.finish_reason
    assert list(zip(got, ends)) == [t[:2] for t in texts] and usage.total_tokens == r.usage.total_tokens


def test_prompt_logprobs(client, server, nibble, tiny, tmp_path):
    """As lm-evaluation-harness asks for them: the log-softmax of the model's logits at every token of the prompt but the first, however long the
    prompts are, and whatever the prefix cache holds; the answer behind is what it is without them."""
    safe = pytest.importorskip("safetensors.numpy")
    np = pytest.importorskip("numpy")
    key = {"headers": {"Authorization": "Bearer k"}}
    texts = [*MANY, "Tom has 3 apples and buys 4. " * 70, "a"]
    ids = [server.post("/tokenize", {"prompt": t}, **key)["tokens"] for t in texts]
    assert len(ids[4]) > 600 and len(ids[5]) == 1
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    nibble("logits", tiny, "--ids", tmp_path / "ids.json", "-o", tmp_path / "l.safetensors")
    logits = safe.load_file(tmp_path / "l.safetensors")
    for text in (texts[4], texts[0]):
        client.completions.create(model="tiny", prompt=text, max_tokens=1)  # into the prefix cache
    ask = {"model": "tiny", "temperature": 0, "logprobs": 1, "echo": True}
    for prompts, more in ((ids, {"max_tokens": 1, "seed": 1234}), (texts, {"max_tokens": 0})):
        r = client.completions.create(prompt=prompts, **ask, **more)
        assert r.usage.prompt_tokens == sum(map(len, ids)) and r.usage.completion_tokens == more["max_tokens"] * len(ids)
        for i, c in enumerate(sorted(r.choices, key=lambda c: c.index)):
            lp, n = c.logprobs, len(ids[i])
            assert {len(x) for x in (lp.tokens, lp.token_logprobs, lp.top_logprobs, lp.text_offset)} == {n + more["max_tokens"]} and "".join(lp.tokens) == c.text
            assert lp.token_logprobs[0] is None and lp.top_logprobs[0] is None and c.finish_reason == "length"
            x = logits[f"{i}.logits"][:, :1570].astype(np.float64)  # ids that the tokenizer knows
            x -= x.max(1, keepdims=True)
            x -= np.log(np.exp(x).sum(1, keepdims=True))
            assert np.allclose(lp.token_logprobs[1:n], x[np.arange(n - 1), ids[i][1:]], rtol=0, atol=1e-6)
            assert np.allclose([max(t.values()) for t in lp.top_logprobs[1:n]], x[:-1].max(1), rtol=0, atol=1e-6)
            assert [t[w] for t, w in zip(lp.top_logprobs[1:], lp.tokens[1:])] == lp.token_logprobs[1:]
            assert [c.text[a:b] for a, b in zip(lp.text_offset, [*lp.text_offset[1:], None])] == lp.tokens
    alone = client.completions.create(model="tiny", prompt=texts[0], temperature=0, logprobs=1, max_tokens=9).choices[0]
    both = client.completions.create(prompt=texts[0], **ask, max_tokens=9).choices[0]
    assert both.text == texts[0] + alone.text and both.logprobs.token_logprobs[len(ids[0]):] == alone.logprobs.token_logprobs
    parts = [c for p in client.completions.create(prompt=[texts[4], "a"], **ask, max_tokens=5, stream=True) for c in p.choices]
    whole = client.completions.create(prompt=[texts[4], "a"], **ask, max_tokens=5).choices
    for i in 0, 1:
        mine = [c.logprobs for c in parts if c.index == i]
        assert [x for m in mine for x in m.token_logprobs] == whole[i].logprobs.token_logprobs
        assert [x for m in mine for x in m.text_offset] == whole[i].logprobs.text_offset and mine[0].token_logprobs[0] is None
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="a", max_tokens=0)


def test_several_prompts_refused(client, server):
    """All or nothing: what is wrong with one prompt is said of it, before anything runs."""
    before = server.metric("nibble_prompt_tokens_total", "k")
    for prompt, said in ((["a", "x " * 9000, "b"], "prompt 1: the prompt has"), ([[1, 2], [1, 99999]], "prompt 1: "), (["a", ""], "prompt 1: prompt must not be empty"),
                         (["a", [1]] + ["b"] * 400, "402 prompts with n 1 are more than the 264"), ([["a"], "b"], "prompt 0: ")):
        with pytest.raises(openai.BadRequestError) as e:
            client.completions.create(model="tiny", prompt=prompt)
        assert said in e.value.message, e.value.message
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model="tiny", prompt=["a"] * 5, n=64)
    assert e.value.param == "prompt"
    assert server.metric("nibble_prompt_tokens_total", "k") == before
    full = client.completions.create(model="tiny", prompt=["a"] * 264, max_tokens=1)
    assert [c.index for c in full.choices] == list(range(264)) and full.usage.completion_tokens == 264


def test_several_prompts_cancelled(client, server):
    before = server.metric("nibble_requests_cancelled_total", "k")
    s = client.completions.create(model="tiny", prompt=MANY * 5, max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
    next(iter(s))
    s.close()
    server.wait_metric("nibble_requests_cancelled_total", before + 1, key="k")
    server.wait_metric("vllm:num_requests_running", 0, key="k")
    server.wait_metric("vllm:num_requests_waiting", 0, key="k")


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
