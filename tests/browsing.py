"""A browser with the page in it: what is done there, what is seen, answers of our own making.

Where NEEDS_AXE is set, the absence of axe-core or chromium is a failure. A page must not leave an
error on the browser's console, nor a violation of its policy.
"""

import json
import os
import shutil
from contextlib import contextmanager

import pytest
from server import ROOT

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
api.expect.set_options(timeout=20_000)

AXE = ROOT / ".ci" / "axe.min.js"
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
WATCH = """document.addEventListener("securitypolicyviolation",
    (event) => console.error("policy: " + event.violatedDirective));"""


def module_browser():
    """A fixture: chromium, for the tests of a module."""

    @pytest.fixture(scope="module")
    def browser():
        program = shutil.which("chromium")
        if program is None:
            assert "NEEDS_AXE" not in os.environ, "chromium is not installed"
            pytest.skip("chromium is not installed")
        with api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            yield browser
            browser.close()

    return browser


@contextmanager
def pages(browser, server, complaints):
    """Opens the page of a server; at the end nothing must have gone wrong."""
    contexts = []

    def open_one(at=server, is_ready=True, address="", **options):
        options = {"viewport": WIDE, "reduced_motion": "reduce"} | options
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda said: said.type == "error" and complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.add_init_script(WATCH)
        page.goto(f"http://127.0.0.1:{at.port}/page/{address}")
        if is_ready:
            wait_until_ready(page)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert complaints == []


def wait_until_ready(page):
    page.locator("#demo-prompt option").nth(1).wait_for(state="attached")


def expect_failed_load(complaints, status):
    """Take out what the browser says of an answer that the test asked for."""
    wanted = [text for text in complaints if "Failed to load resource" in text]
    assert wanted and all(status in text for text in wanted)
    complaints[:] = [text for text in complaints if text not in wanted]


# ------------------------------------------------------------------ what is done, and what is seen


def fill(page, **fields):
    if not page.locator("#seed").is_visible():
        page.click("#more summary")
    for name, value in fields.items():
        if name in ("drafter", "verification"):
            page.select_option(f"#{name}", value)
        else:
            page.fill(f"#{name}", str(value))


def run(page, button="#run", **fields):
    """Fill the form in, press, and wait for the end."""
    fill(page, **fields)
    act(page, ("click", button, {"#status": "Finished"}))


SLIDE = """(slider, value) => {
    slider.value = value;
    slider.dispatchEvent(new Event("input", {bubbles: true}));
}"""


def act(page, *steps):
    """Each is (what is done, where, what is seen then): a verb, a key, or a slider's value."""
    for what, where, expected in steps:
        if not isinstance(what, str):
            page.locator(where).evaluate(SLIDE, what)
        elif what in ("click", "hover", "focus"):
            getattr(page, what)(where)
        else:
            page.press(where, what)
        see(page, expected)


def see(page, expected):
    """Wait until each selector has so many elements, or all these words in its text."""
    for selector, wanted in expected.items():
        seen = api.expect(page.locator(selector))
        if isinstance(wanted, int):
            seen.to_have_count(wanted)
        else:
            for words in wanted if isinstance(wanted, tuple) else (wanted,):
                seen.to_contain_text(words)


def unfold(page):
    """Open whatever is folded in the workbench."""
    page.evaluate("for (const one of document.querySelectorAll('#workbench details')) one.open = 1")


def open_cycle(page, step):
    act(page, (step, "#cycle-number", {"#cycle-count": f"{step} of"}))


def say(page, message, expected):
    """Send a message of a conversation."""
    page.fill("#message", message)
    act(page, ("click", "#send", expected))


def posted(page):
    """The bodies of what the page sends from now on."""
    sent = []
    page.on("request", lambda r: r.post_data and sent.append(json.loads(r.post_data)))
    return sent


def violations(page, within="#workbench", **options):
    """What axe-core finds wrong with a part of a page, as words. It may skip the rest of a test."""
    if not AXE.exists():
        assert "NEEDS_AXE" not in os.environ, "python .ci/fetch_axe.py has not fetched axe-core"
        pytest.skip("axe-core is not there: python .ci/fetch_axe.py")
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text("utf-8"))
    options = {"resultTypes": ["violations"]} | options
    run = "([within, options]) => axe.run(within, options)"
    found = page.evaluate(run, [within, options])["violations"]
    return [(v["id"], n["html"], n["failureSummary"]) for v in found for n in v["nodes"]]


# --------------------------------------------------------------------- answers of our own making


def event(step, tokens, before=0, **more):
    """One cycle's event as the server would send it; `tokens` are (text, kind)."""
    drafted = [i for i, (_, kind) in enumerate(tokens) if kind == "accepted"]
    return {
        "step": step,
        "proposals": drafted,
        "tokens": [
            {"id": i, "kind": kind, "p": 0.5, "q": None if kind == "bonus" else 0.4, "u": 0.25}
            for i, (_, kind) in enumerate(tokens)
        ],
        "rejected": None,
        "cached": [before + 1 + len(drafted) if step else 5] * 2,
        "texts": {str(i): text for i, (text, _) in enumerate(tokens)},
        "ms": {"draft": 1.0, "verify": 8.0, "other": 1.0},
        "text": "".join(text for text, _ in tokens),
    } | more


FIRST = event(0, [("a", "bonus")])  # a prefill's


def answer_of(cycles, **more):
    figures = {"drafter": "draft_model", "num_draft_tokens": 1, "target_passes": 1}
    figures["tokens_per_pass"] = 2.0
    return {
        "text": "".join(cycle["text"] for cycle in cycles),
        "finish_reason": "length",
        "seed": 1,
        "warnings": [],
        "metrics": {"speculative_decoding": figures},
    } | more


def stream_of(cycles, end=None):
    """An answer with these events, and then with `end` (default: the last event and [DONE])."""
    end = [answer_of(cycles)] if end is None else end
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in [*cycles, *end])
    body += "data: [DONE]\n\n" if end else ""
    return {"body": body, "content_type": "text/event-stream"}


def mock(page, answer):
    """/generate answers so from now on."""
    page.route("**/generate", lambda route: route.fulfill(**answer))
