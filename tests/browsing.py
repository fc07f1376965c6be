"""A browser with the page in it: what is done there, what is seen, answers of our own making.

Where NEEDS_AXE is set, the absence of axe-core or chromium is a failure.
"""

import json
import os
import re
import shutil

import pytest
from server import ROOT

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
api.expect.set_options(timeout=20_000)

AXE = ROOT / ".ci" / "axe.min.js"
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
SLIDE = """(slider, value) => {
    slider.value = value;
    slider.dispatchEvent(new Event("input", {bubbles: true}));
}"""
READY = {"#demo-prompt option >> nth=1": 1}  # the server's prompts are there
DONE = {"#status": "Finished"}


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


# ------------------------------------------------------------------ what is done, and what is seen


def fill(page, **fields):
    """Fill in a part of the form, which shows its settings for that."""
    for name, value in fields.items():
        if not page.locator(f"#{name}").is_visible():
            page.click("#more summary")
        put = page.select_option if name in ("drafter", "verification") else page.fill
        put(f"#{name}", str(value))


def run(page, button="#run", **fields):
    """Fill the form in, press, and wait for the end."""
    act(page, (fields, button, DONE))


def act(page, *steps):
    """Each is (what is done, where, what is seen then).

    Done is "click", "hover", "focus", a key, or a slider's value. Fields are filled in before a
    click, if there is one.
    """
    for what, where, expected in steps:
        if isinstance(what, dict):
            fill(page, **what)
        if isinstance(what, int | float):
            page.locator(where).evaluate(SLIDE, what)
        elif what in ("hover", "focus"):
            getattr(page, what)(where)
        elif isinstance(what, dict) or what == "click":
            page.click(where)
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


def exactly(text):
    """For `see`: the whole text, with each space of it."""
    return re.compile(f"^{re.escape(text)}$")


def unfold(page, is_open=True):
    """Open, or close, whatever can be folded in the workbench."""
    folds = "for (const one of document.querySelectorAll('#workbench details'))"
    page.evaluate(f"{folds} one.open = {int(is_open)}")


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
    judged = [
        {"id": i, "kind": kind, "p": 0.5, "q": None if kind == "bonus" else 0.4, "u": 0.25}
        for i, (_, kind) in enumerate(tokens)
    ]
    return {
        "step": step, "proposals": drafted, "tokens": judged, "rejected": None,
        "texts": {str(i): text for i, (text, _) in enumerate(tokens)},
        "text": "".join(text for text, _ in tokens),
        "cached": [before + 1 + len(drafted) if step else 5] * 2,
        "ms": {"draft": 1.0, "verify": 8.0, "other": 1.0},
    } | more  # fmt: skip


FIRST = event(0, [("a", "bonus")])  # a prefill's


def lines(*events):
    """Events as the server writes them into a stream, which ends behind an answer."""
    is_whole = "finish_reason" in (events or [{}])[-1]
    end = "data: [DONE]\n\n" if is_whole else ""
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end


def answer_of(cycles, **more):
    """The last event of a stream with these cycles."""
    told = {"drafter": "draft_model", "num_draft_tokens": 1, "target_passes": 1}
    return {
        "text": "".join(cycle["text"] for cycle in cycles),
        "finish_reason": "length", "seed": 1, "warnings": [],
        "metrics": {"speculative_decoding": told | {"tokens_per_pass": 2.0}},
    } | more  # fmt: skip


def mock(page, body, **answer):
    """/generate answers so from now on."""
    page.route("**/generate", lambda route: route.fulfill(body=body, **answer))


def show(page, *cycles, button="#run", **answer):
    """Let a run give these cycles, and an answer with these fields."""
    mock(page, lines(*cycles, answer_of(cycles, **answer)))
    run(page, button)
