"""The built-in page in a browser. Pictures of it go to NIBBLE_PICTURES, when that names a folder."""
import os
import pathlib
import re
import subprocess
import time

import pytest

from browser import Browser, find
from stand_in import StandIn

assert find(), "no chromium here (scripts/test.sh web installs it)"

ANSWER = """## How a *list* works

Here is **bold**, `code`, and a [link](https://example.org/a?b=c). See https://example.org/x.

1. First
   - inner one
   - inner `two`
2. Second

| width | bits |
|---|---:|
| nibble | 4 |
| byte | 8 |

> Quoted text
> on two lines

```c
int main(void) {
    return 1 < 2 && "<b>";
}
```

Done."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    b = Browser(str(tmp_path_factory.mktemp("chromium")))
    b.size(1100, 800)
    yield b
    b.close()


@pytest.fixture
def server():
    s = StandIn()
    yield s
    s.close()


@pytest.fixture
def page(browser, server):
    browser.scheme("light")
    browser.size(1100, 800)
    browser.go(server.url)
    browser.wait("document.querySelector('#model').textContent !== ''")
    return browser


def picture(browser, name):
    if os.environ.get("NIBBLE_PICTURES"):
        browser.picture(os.path.join(os.environ["NIBBLE_PICTURES"], name + ".png"))


def ask(b, text):
    b.click("#text")
    b.type(text)
    b.key("Enter")


def done(b):
    b.wait("!document.body.classList.contains('running')")


def test_answer_with_thought(page, server):
    server.script = lambda h, body: h.answer(ANSWER, "Let me think about lists.\nThey have items.")
    picture(page, "empty")
    ask(page, "How do lists work?")
    done(page)
    assert page.js("document.querySelector('.user').innerText") == "How do lists work?"
    assert page.js("document.querySelector('.thought > div').textContent") == "Let me think about lists.\nThey have items."
    assert page.js("document.querySelector('.thought').open") is False
    assert page.js("document.querySelector('.body h4').innerHTML") == "How a <em>list</em> works"
    assert page.js("document.querySelector('.body p').innerHTML") == (
        'Here is <strong>bold</strong>, <code>code</code>, and a <a href="https://example.org/a?b=c" target="_blank" rel="noopener noreferrer nofollow">link</a>.'
        ' See <a href="https://example.org/x" target="_blank" rel="noopener noreferrer nofollow">https://example.org/x</a>.')
    assert page.js("document.querySelector('.body > ol').innerHTML") == "<li>First<ul><li>inner one</li><li>inner <code>two</code></li></ul></li><li>Second</li>"
    assert page.js("[...document.querySelectorAll('.body td')].map(e => e.textContent)") == ["nibble", "4", "byte", "8"]
    assert page.js("document.querySelector('.body pre').textContent") == 'int main(void) {\n    return 1 < 2 && "<b>";\n}'
    assert page.js("document.querySelector('.body blockquote').innerText") == "Quoted text\non two lines"
    foot = page.js("document.querySelector('.foot').innerText")
    assert "2.25 accept length" in foot and "12 in the prompt, 5 cached" in foot and "tokens" in foot, foot
    page.click(".thought summary")
    assert page.js("document.querySelector('.thought').open") is True
    picture(page, "light")
    page.click("#theme")
    assert page.js("document.documentElement.dataset.theme") == "dark"
    page.click("#gear")
    picture(page, "dark")
    page.click("#gear")
    page.size(390, 780, 2)
    picture(page, "narrow-dark")
    page.click("#gear")
    picture(page, "narrow-settings")
    page.click("#gear")
    page.click("#theme")
    picture(page, "narrow-light")
    assert page.js("document.documentElement.scrollWidth <= innerWidth")
    assert page.complaints() == []
    assert all(u.startswith((server.url, "data:")) for u in page.requests()), page.requests()


def test_what_is_sent(page, server):
    server.script = lambda h, body: h.answer("two", "one")
    page.click("#gear")
    page.js("document.querySelector('#s-think').value = 'off', document.querySelector('#s-think').dispatchEvent(new Event('input'))")
    for name, value in (("temperature", "0.5"), ("top_k", "7"), ("seed", "3"), ("system", "Be brief.")):
        page.click("#s-" + name)
        page.type(value)
    ask(page, "a")
    done(page)
    ask(page, "b")
    done(page)
    first, second = server.seen
    assert first["model"] == "stand-in" and first["stream"] is True
    assert (first["temperature"], first["top_k"], first["seed"]) == (0.5, 7, 3) and "top_p" not in first
    assert first["chat_template_kwargs"] == {"enable_thinking": False}
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    assert second["messages"][2:] == [{"role": "assistant", "content": "two", "reasoning_content": "one"}, {"role": "user", "content": "b"}]
    # kept over a reload, also the conversation; and given up again
    page.go(server.url)
    assert page.js("document.querySelector('#s-temperature').value") == "0.5"
    assert page.js("document.querySelectorAll('.user').length") == 2
    page.click("#gear")
    page.click("#reset")
    assert page.js("document.querySelector('#s-temperature').value") == ""
    page.click("#new")
    assert page.js("document.querySelectorAll('article').length") == 0
    ask(page, "c")
    done(page)
    assert server.seen[2]["messages"] == [{"role": "user", "content": "c"}] and "temperature" not in server.seen[2]


HOSTILE = """<script>window.hit = 1</script><img src=x onerror="window.hit = 1">

[a](javascript:window.hit=1) [b](https://example.org/"onmouseover="window.hit=1) **<svg onload=window.hit=1>**

```"><script>window.hit=1</script>
</code></pre><script>window.hit=1</script>
```

| <b>x</b> | `<i>` |
|---|---|
| <script>window.hit=1</script> | y |
"""


def test_nothing_of_the_model_becomes_markup(page, server):
    server.script = lambda h, body: h.answer(HOSTILE, "<img src=x onerror=window.hit=1>")
    ask(page, "<script>window.hit = 1</script>")
    done(page)
    assert page.js("window.hit") is None
    assert page.js("document.querySelectorAll('#log article script, #log article img, #log .body svg, #log .body b, #log .body i').length") == 0
    assert page.js("[...document.querySelectorAll('.body a')].every(a => a.protocol === 'https:')")
    assert all(u.startswith((server.url, "data:")) for u in page.requests())
    assert "<script>window.hit = 1</script>" in page.js("document.querySelector('.body').textContent")


def test_streams_and_stops(page, server):
    def script(h, body):
        h.stream()
        h.raw(b": keep-alive\n\n")
        h.delta(role="assistant")
        for i in range(2000):
            h.delta(tokens=2 * i + 2, content="word%d " % i)
            time.sleep(0.02)

    server.script = script
    ask(page, "Go on")
    page.wait("document.querySelector('.body')?.textContent.includes('word3')")
    page.wait("/[0-9.]+ tokens\\/s/.test(document.querySelector('.foot').innerText)")
    picture(page, "streaming")
    assert page.js("document.querySelector('#go').ariaLabel") == "Stop"
    page.key("Escape")
    done(page)
    assert server.gone.get(timeout=10)   # the server was told
    assert "stopped" in page.js("document.querySelector('.foot').innerText")
    assert "word3" in page.js("document.querySelector('.body').textContent")
    # what there is stays part of the conversation
    server.script = lambda h, body: h.answer("fine")
    ask(page, "More")
    done(page)
    assert [m["role"] for m in server.seen[1]["messages"]] == ["user", "assistant", "user"]
    # a new chat in the middle of an answer ends it
    server.script = script
    ask(page, "Again")
    page.wait("document.querySelectorAll('.answer')[2]?.textContent.includes('word3')")
    page.click("#new")
    assert server.gone.get(timeout=10)
    done(page)
    assert page.js("document.querySelectorAll('article').length") == 0


def test_text_in_any_chunking(page, server):
    whole = "h\u00e9llo \U0001f30a w\u00f6rld"

    def script(h, body):
        h.stream()
        data = b""
        for c in ("", whole[:6], whole[6:]):
            data += ('data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\r\n\r\n' % c).encode()
        data += b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        for i in range(len(data)):
            h.raw(data[i:i + 1])

    server.script = script
    ask(page, "x")
    done(page)
    assert page.js("document.querySelector('.body').textContent") == whole
    assert page.js("document.querySelector('.error').hidden")


def test_errors_are_shown(page, server):
    def cases():
        yield (lambda h, b: h.fault(400, "max_tokens: must be positive")), "Error 400: max_tokens: must be positive"
        yield (lambda h, b: h.fault(429, "the queue is full", Retry_After="7")), "try again in 7 s"
        yield (lambda h, b: h.plain(502, "text/html", b"<h1>Bad gateway</h1>")), "Error 502: <h1>Bad gateway</h1>"

        def late(h, b):
            h.stream()
            h.delta(content="half an ")
            h.event({"error": {"message": "the engine failed"}})
        yield late, "the engine failed"

        def cut(h, b):
            h.stream()
            h.delta(content="half an ")
        yield cut, "ended before the answer did"

    for script, want in cases():
        server.script = script
        ask(page, "x")
        done(page)
        assert want in page.js("document.querySelector('.answer:last-of-type .error').innerText")
    picture(page, "error")
    # again, in its place
    server.script = lambda h, body: h.answer("now it works")
    before = page.js("document.querySelectorAll('article').length")
    page.js("document.querySelector('.answer:last-of-type .acts .mini:last-child').click()")
    page.wait("document.querySelector('.answer:last-of-type .body').textContent === 'now it works'")
    done(page)
    assert page.js("document.querySelectorAll('article').length") == before
    assert page.js("document.querySelector('.answer:last-of-type .error').hidden")


def test_key(page, server):
    server.key = "s3cret"
    server.script = lambda h, body: h.answer("hello")
    page.go(server.url)
    page.wait("document.querySelector('#model').textContent.includes('API key')")
    assert page.js("document.activeElement.id") == "s-key"
    page.type("s3cret")
    page.key("Tab")
    page.wait("document.querySelector('#model').textContent === 'stand-in'")
    ask(page, "x")
    done(page)
    assert server.headers[-1]["Authorization"] == "Bearer s3cret"
    assert page.js("sessionStorage.getItem('nibble.key')") == "s3cret"
    assert page.js("JSON.stringify(localStorage)").find("s3cret") < 0


def test_keyboard(page, server):
    server.script = lambda h, body: h.answer("ok")
    assert page.js("document.activeElement.id") == "text"
    page.type("one")
    page.key("Enter", modifiers=8, text="\r")
    page.type("two")
    assert page.js("document.querySelector('#text').value") == "one\ntwo"
    page.key("Enter")
    done(page)
    assert server.seen[0]["messages"][0]["content"] == "one\ntwo"
    page.key(",", code="Comma", modifiers=2)
    assert page.js("document.querySelector('#side').hidden") is False
    page.key("Escape")
    assert page.js("document.querySelector('#side').hidden") is True
    page.key("O", code="KeyO", modifiers=10)
    assert page.js("document.querySelectorAll('article').length") == 0
    page.key("Enter")   # nothing to send
    assert len(server.seen) == 1


def test_system_theme(browser, server):
    browser.scheme("dark")
    browser.go(server.url)
    browser.js("localStorage.removeItem('nibble.theme')")
    browser.go(server.url)
    assert browser.js("document.documentElement.dataset.theme") == "dark"
    browser.scheme("light")
    browser.wait("document.documentElement.dataset.theme === 'light'")


@pytest.fixture(scope="module")
def nibble():
    """The real server with the embedded model; its URL."""
    root = pathlib.Path(__file__).parents[2]
    p = subprocess.Popen([os.environ["NIBBLE"], "serve", str(root / "assets/qwen36-tiny"), "--port", "0", "--log-format", "off"], stderr=subprocess.PIPE, text=True)
    try:
        url = next(m[1] for m in (re.search(r"ready (http://\S+)", line) for line in p.stderr) if m)
        yield url + "/"
    finally:
        p.terminate()
        p.stderr.close()
        assert p.wait(30) == 0


def test_with_the_real_server(browser, nibble):
    browser.scheme("light")
    browser.size(1100, 800)
    browser.go(nibble)
    browser.wait("document.querySelector('#model').textContent === 'qwen36-tiny'")
    browser.js("localStorage.setItem('nibble.settings', JSON.stringify({temperature: '0'}))")
    browser.go(nibble)
    ask(browser, "Ada has 12 apples. Ben has 30 apples. How many apples do they have together?")
    done(browser)
    assert browser.js("document.querySelector('.error').hidden")
    assert "42" in browser.js("document.querySelector('.answer .body').textContent")
    assert browser.js("document.querySelector('.answer .thought > div').textContent.length") > 0
    foot = browser.js("document.querySelector('.foot').innerText")
    assert re.search(r"[0-9]+ tokens", foot), foot
    assert re.search(r"[123]\.[0-9]+ accept length", foot) or "accept" not in foot, foot  # absent when no drafts were made
    picture(browser, "real")
    assert browser.complaints() == []
    assert all(u.startswith((nibble, "data:")) for u in browser.requests())
