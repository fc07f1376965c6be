"""A visitor of the page in a browser: what is done there, what is seen, answers of our own making.

Tests are tables of steps, (what is done, where, {selector: what is seen then}); `Visitor.act` walks
one. Where NEEDS_AXE is set, the absence of axe-core or chromium is a failure.
"""

import json
import os
import re
import shutil
from contextlib import ExitStack

import pytest
from started import ROOT, events_of, until

try:
    import playwright.sync_api as api
except ImportError:
    api = None

AXE = ROOT / ".ci" / "axe.min.js"
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
LATER = pytest.param(NARROW, marks=pytest.mark.slow)
SIZES = pytest.mark.parametrize("size", [WIDE, LATER], ids=["1440", "390"])
READY = {"#demo-prompt option >> nth=1": 1}  # the prompts are there
DONE = {"#status": "Finished"}
WATCH = """document.addEventListener("securitypolicyviolation",
    (event) => console.error("policy: " + event.violatedDirective));"""
# What is wrong in a window: what should be in sight and is not, is too wide, or has small letters.
FLAWS = """(inside) => {
    const flaws = [...document.querySelectorAll("#workbench :not(.bars, .marks)")].filter((one) => {
        const {overflowX, fontSize} = getComputedStyle(one);
        const isText = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        return one.checkVisibility() && (isText && parseFloat(fontSize) < 13
            || one.clientWidth && one.scrollWidth > one.clientWidth + 1 && overflowX === "visible");
    });
    flaws.push(...inside.map((name) => document.querySelector(name)).filter((one) => {
        const {top, bottom, left, right, width} = one.getBoundingClientRect();
        const isIn = top >= -1 && bottom <= innerHeight + 1 && left >= -1;
        return !(width && isIn && right <= innerWidth + 1);
    }));
    if (document.documentElement.scrollWidth > innerWidth) flaws.push(document.documentElement);
    return flaws.map((one) => one.outerHTML.slice(0, 200));
}"""


class Visitor:
    """A page and who looks at it: a playwright page with more words."""

    def __init__(self, page, url, home, refusals):
        self.page, self.home, self.refusals = page, home, [*refusals]
        self.sent, self.complaints = [], []
        page.set_default_timeout(20_000)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._note)
        page.add_init_script(WATCH)
        page.goto(url)

    def __getattr__(self, name):
        return getattr(self.page, name)

    def _note(self, request):
        """Keep what is sent; nothing is asked for that is not of its home."""
        if not request.url.startswith(self.home):
            self.complaints.append(f"{request.method} {request.url}")
        if request.post_data:
            self.sent.append(json.loads(request.post_data))

    def _hear(self, said):
        """Keep an error on the console, unless it is on an answer that the test asked for."""
        is_load = "Failed to load resource" in said.text
        if said.type == "error" and not (is_load and any(map(said.text.count, self.refusals))):
            self.complaints.append(said.text)

    def act(self, *steps):
        """What is done is a word, a key, a slider's value, a drag (from, to) or #an-address.

        Or fields, which are filled in before a click. Who looks does nothing.
        """
        for what, where, expected in steps:
            if isinstance(what, int | float):
                self.fill(where, str(what))
            elif isinstance(what, tuple):
                self._drag(self.locator(where), *what)
            elif isinstance(what, dict):
                self.fill_in(**what)
                self.click(where)
            elif what in ("click", "hover", "focus"):
                getattr(self, what)(where)
            elif what == "reach":
                self.locator(f"[data-chapter={where}]").evaluate("node => node.scrollIntoView()")
                self.see({f"#scene[data-at={where}]": 1})
            elif what == "answer":
                self.mock(**where)
            elif what.startswith("#"):
                self.evaluate("(address) => location.hash = address", what)
            elif what != "look":
                self.press(where, what)
            self.see(expected)

    def see(self, expected):
        """Wait until each selector has so many elements, these words or texts, or this is true."""
        for selector, wanted in expected.items():
            seen = self.locator(selector)
            if callable(wanted):
                until(lambda seen=seen, wanted=wanted: wanted(seen))
            elif isinstance(wanted, int):
                api.expect(seen).to_have_count(wanted)
            else:
                if isinstance(wanted, list):  # of which a text may be missing, for playwright
                    api.expect(seen).to_have_count(len(wanted))
                for words in wanted if isinstance(wanted, tuple) else (wanted,):
                    api.expect(seen).to_contain_text(words)

    def _drag(self, figure, at, to):
        """From one value of a figure's axis to another, with the mouse."""
        axis = figure.evaluate("({dataset: d}) => [d.from, d.to, d.left, d.right].map(Number)")
        begin, end, left, right = axis
        x, other = (left + (right - left) * (value - begin) / (end - begin) for value in (at, to))
        places = {"source_position": {"x": x, "y": 9}, "target_position": {"x": other, "y": 9}}
        figure.drag_to(figure, **places)

    def fill_in(self, **fields):
        """Fill in a part of the form, which shows its settings for that."""
        for name, value in fields.items():
            if not self.locator(f"#{name}").is_visible():
                self.click("#more summary")
            is_choice = self.locator(f"select#{name}").count()
            (self.select_option if is_choice else self.fill)(f"#{name}", str(value))

    def run(self, **fields):
        """Run what the form says then. Returns the events that came."""
        with self.expect_response("**/generate") as response:
            self.act((fields, "#run", DONE))
        return events_of(response.value.body())

    def mock(self, body, status=200, **answer):
        """/generate answers so from now on."""
        self.refusals += [f"status of {status}"]
        self.route("**/generate", lambda route: route.fulfill(body=body, status=status, **answer))

    def unfold(self, is_open=True):
        """Open, or close, whatever can be folded in the workbench."""
        folds = "for (const one of document.querySelectorAll('#workbench details'))"
        self.evaluate(f"{folds} one.open = {int(is_open)}")

    def flaws(self, *inside):
        return self.evaluate(FLAWS, inside)

    def violations(self, within="#workbench"):
        """What axe-core finds wrong with a part of it, as words, and with its colours in the dark.

        Nothing else depends on the scheme. It may skip the rest of a test.
        """
        if not AXE.exists():
            assert "NEEDS_AXE" not in os.environ, "python .ci/fetch_axe.py has not fetched axe-core"
            pytest.skip("axe-core is not there: python .ci/fetch_axe.py")
        if not self.evaluate("'axe' in window"):
            self.evaluate(AXE.read_text("utf-8"))
        found = []
        for scheme, only in (("dark", {"runOnly": ["color-contrast"]}), ("light", {})):
            self.emulate_media(color_scheme=scheme)
            options = {"resultTypes": ["violations"]} | only
            told = self.evaluate("(some) => axe.run(...some)", [within, options])
            found += [(one["id"], one["nodes"]) for one in told["violations"]]
        return found


@pytest.fixture(scope="module")
def browser():
    program = api and shutil.which("chromium")
    if not program:
        assert "NEEDS_AXE" not in os.environ, "playwright or chromium is not installed"
        pytest.skip("playwright or chromium is not installed")
    api.expect.set_options(timeout=20_000)
    with api.sync_playwright() as playwright:
        with playwright.chromium.launch(executable_path=program, args=["--no-sandbox"]) as browser:
            yield browser


@pytest.fixture
def open_page(browser):
    """Opens pages; at the end nothing must have gone wrong in them."""
    opened = []

    def open_one(at, expected=READY, address="", refusals=(), **options):
        """Of a server, or in a folder, which has all that it may ask for but what is refused."""
        home = at if isinstance(at, str) else f"http://127.0.0.1:{at.port}/"
        url = home + ("" if home == at else "page/") + address
        options = {"viewport": WIDE, "reduced_motion": "reduce"} | options
        context = contexts.enter_context(browser.new_context(**options))
        opened.append(Visitor(context.new_page(), url, home, refusals))
        opened[-1].see(expected)
        return opened[-1]

    with ExitStack() as contexts:
        yield open_one
    complaints = [said for page in opened for said in page.complaints]
    assert not complaints, complaints


# --------------------------------------------------------------------- answers of our own making


def exactly(text):
    """For `see`: the whole text, with each space of it."""
    return re.compile(f"^{re.escape(text)}$")


def value(wanted):
    """For `see`: what an input or a choice has."""
    return lambda one: one.input_value() == str(wanted)


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
    """Events as the server writes them into a stream."""
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events)


def whole(*cycles, **more):
    """A whole stream: these cycles, and an answer with these fields."""
    told = {"drafter": "draft_model", "num_draft_tokens": 1, "target_passes": 1}
    answer = {
        "text": "".join(cycle["text"] for cycle in cycles),
        "finish_reason": "length", "seed": 1, "warnings": [],
        "metrics": {"speculative_decoding": told | {"tokens_per_pass": 2.0}},
    } | more  # fmt: skip
    return lines(*cycles, answer) + "data: [DONE]\n\n"
