"""A headless Chromium, driven over --remote-debugging-pipe: messages of its protocol, NUL between them, on two pipes."""
import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time


def find():
    """The program, or None."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if shutil.which(name):
            return shutil.which(name)
    return None


class Browser:
    """One browser with one page."""

    def __init__(self, folder):
        to_read, self.out = os.pipe()
        self.inp, to_write = os.pipe()
        self.fds = (to_read, to_write)
        # The browser wants them as 3 and 4.
        moved = [os.dup2(to_read, 200), os.dup2(to_write, 201)]
        self.log = open(os.path.join(folder, "chromium.log"), "w")
        self.proc = subprocess.Popen(
            ["bash", "-c", 'exec "$@" 3<&200 4>&201 200<&- 201>&-', "bash", find(), "--headless=new", "--no-sandbox", "--disable-gpu",
             "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions", "--disable-background-networking",
             "--hide-scrollbars", "--remote-debugging-pipe", "--user-data-dir=" + os.path.join(folder, "profile"), "about:blank"],
            pass_fds=moved, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True,
            env={**os.environ, "HOME": folder})
        for fd in (to_read, to_write, *moved):
            os.close(fd)
        self.buf, self.n, self.session, self.messages = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Runtime.enable")
        self.call("Network.enable")
        self.call("Log.enable")

    def close(self):
        try:
            os.killpg(self.proc.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.proc.wait()
        os.close(self.out)
        os.close(self.inp)
        self.log.close()

    def read(self, timeout):
        """One message, or None when the time is over."""
        end = time.monotonic() + timeout
        while b"\0" not in self.buf:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.inp], [], [], left)[0]:
                return None
            got = os.read(self.inp, 1 << 16)
            assert got, "the browser ended"
            self.buf += got
        one, self.buf = self.buf.split(b"\0", 1)
        return json.loads(one)

    def call(self, method, **params):
        self.n += 1
        msg = {"id": self.n, "method": method, "params": params}
        if self.session:
            msg["sessionId"] = self.session
        os.write(self.out, json.dumps(msg).encode() + b"\0")
        end = time.monotonic() + 60
        while time.monotonic() < end:
            got = self.read(60)
            if got and got.get("id") == self.n:
                assert "error" not in got, (method, got["error"])
                return got["result"]
            if got and "method" in got:
                self.messages.append(got)
        raise AssertionError(method + ": no answer")

    def go(self, url):
        self.messages.clear()
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href.startsWith('http')")

    def js(self, code):
        """Value of an expression; promises are awaited."""
        got = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def wait(self, code, timeout=30):
        """Until the expression is true; gives its value."""
        end = time.monotonic() + timeout
        while True:
            got = self.js(code)
            if got:
                return got
            assert time.monotonic() < end, "never true: " + code + "\n" + str(self.js("document.body.innerText"))
            time.sleep(0.03)

    def key(self, key, code=None, modifiers=0, text=None):
        """modifiers: 1 alt, 2 control, 8 shift."""
        vk = {"Enter": 13, "Escape": 27, "Tab": 9}.get(key) or ord(key[0].upper())
        extra = {"text": text} if text else {"text": "\r"} if key == "Enter" and not modifiers else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=code or key, modifiers=modifiers, windowsVirtualKeyCode=vk, **extra)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=code or key, modifiers=modifiers, windowsVirtualKeyCode=vk)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def click(self, selector):
        """With the mouse, in the middle of what is seen of it."""
        x, y = self.js("(() => { const e = document.querySelector(%s); e.scrollIntoView({block: 'nearest'}); const r = e.getBoundingClientRect();"
                       " return [r.x + r.width / 2, r.y + r.height / 2]; })()" % json.dumps(selector))
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def size(self, width, height, scale=1):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=width < 600)

    def scheme(self, name):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def picture(self, path):
        with open(path, "wb") as f:
            f.write(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def complaints(self):
        """What the console was told and what was refused: errors only."""
        self.js("1")
        bad = []
        for m in self.messages:
            p = m.get("params", {})
            if m["method"] == "Runtime.exceptionThrown":
                bad.append(str(p["exceptionDetails"]))
            if m["method"] == "Log.entryAdded" and p["entry"]["level"] == "error":
                bad.append(p["entry"]["text"])
        return bad

    def requests(self):
        self.js("1")
        return [m["params"]["request"]["url"] for m in self.messages if m["method"] == "Network.requestWillBeSent"]
