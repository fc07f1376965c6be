"""The teaching page shows what the server's answer says, token by token, in a real browser.

Each number and word that it shows is compared with the server's answer to the same request. The
page survives refusals, broken streams and a server that leaves, can be used by keyboard, and has no
fault that axe-core finds. No test may leave an error on the browser's console, nor a violation of
the page's policy. What the page's files alone can tell is in test_operations.py.

    python .ci/fetch_axe.py; python -m pytest tests/test_page.py    needs playwright and chromium

Where NEEDS_AXE is set, the absence of axe-core or chromium is a failure.
"""

import json
import os
import re
import shutil
from urllib.parse import urlencode

import pytest
from engine import replaying
from server import COLOURS as COLOUR_LIST
from server import ENDLESS as COUNTING
from server import ROOT, Gate, module_server, serving, until

pytestmark = pytest.mark.browser
api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
api.expect.set_options(timeout=20_000)

SAMPLED = {"prompt": "def read(path):", "drafter": "draft_model", "num_speculative_tokens": 4}
SAMPLED |= {"temperature": 0.8, "seed": 1, "max_tokens": 60}
COLOURS = {"prompt": COLOUR_LIST, "drafter": "ngram", "max_tokens": 40}
FEW = COLOURS | {"max_tokens": 12}
ENDLESS = {"prompt": COUNTING["prompt"], "num_speculative_tokens": 0, "max_tokens": 1900}
ENDLESS |= {"temperature": 0}
KINDS = ("accepted", "recovered", "bonus")
TOKENS = "#text .tokens .token"
AXE = ROOT / ".ci" / "axe.min.js"
VIEWS = ("story", "try", "text", "race", "whatif", "statistics", "model")
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 400, "height": 800}
WATCH = """document.addEventListener("securitypolicyviolation",
    (event) => console.error("policy: " + event.violatedDirective));"""


# ------------------------------------------------------------------------------------ fixtures


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


server = module_server("--fixed-k")  # what is drafted and kept does not depend on the clock


@pytest.fixture(scope="module")
def chatting(browser, chat_folder):
    """Of one with a chat template, a K of its own and a controller."""
    arguments = ("--model", str(chat_folder("llama")), "--num-speculative-tokens", "3")
    with serving(*arguments) as server:
        yield server


@pytest.fixture
def complaints():
    """What the browser's console says in anger; a test that provokes some takes them out."""
    return []


@pytest.fixture
def open_page(browser, server, complaints):
    """Opens the page of a server; at the test's end nothing must have gone wrong."""
    contexts = []

    def open_one(at=server, is_ready=True, address="", **options):
        options = {"viewport": WIDE, "reduced_motion": "reduce"} | options
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda said: said.type == "error" and complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.add_init_script(WATCH)
        page.goto(f"http://127.0.0.1:{at.port}/{address}")
        if is_ready:
            wait_until_ready(page)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def page(open_page):
    return open_page()


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
        page.click("#settings-button")
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


def traced(server, fields):
    """What the server answers to the fields of a run, whose verification is coupled."""
    return server.generate(**fields, verification="coupled", trace=True)[1]


def violations(page, **options):
    """What axe-core finds wrong with a page, as words. It may skip the rest of a test."""
    if not AXE.exists():
        assert "NEEDS_AXE" not in os.environ, "python .ci/fetch_axe.py has not fetched axe-core"
        pytest.skip("axe-core is not there: python .ci/fetch_axe.py")
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text("utf-8"))
    options = {"resultTypes": ["violations"]} | options
    found = page.evaluate("(options) => axe.run(document, options)", options)["violations"]
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


# ------------------------------------------------------------------------------- runs and cycles


def test_a_run_shows_the_text_of_the_server_s_answer(page, server):
    run(page, **SAMPLED, verification="coupled")
    assert page.text_content("#text .prompt") == SAMPLED["prompt"]
    assert page.text_content("#text .tokens") == traced(server, SAMPLED)["text"]


def test_a_run_marks_each_token_by_its_origin_and_leads_to_its_cycles(page, server):
    """By tokens, the slider, buttons and arrow keys; and its figures are drawn."""
    run(page, **SAMPLED, verification="coupled")
    answer = traced(server, SAMPLED)
    metrics, cycles = answer["metrics"]["speculative_decoding"], answer["trace"]
    line = "token => getComputedStyle(token).borderBottomStyle"  # without colour they differ, too
    names = ("accepted_draft", "recovered", "bonus")
    for kind, name, style in zip(KINDS, names, ("solid", "dashed", "double"), strict=True):
        see(page, {f"{TOKENS}.{kind}": metrics[f"num_{name}_tokens"]})
        assert page.locator(f"{TOKENS}.{kind}").first.evaluate(line) == style
        token = next(t for cycle in cycles for t in cycle["tokens"] if t["kind"] == kind)
        total = f"= {token['total']:z.2f}".replace("-", "−")
        act(page, ("hover", f"{TOKENS}.{kind} >> nth=0", {"#popup": total}))
    at, last = "#cycle-count", len(cycles) - 1
    marked = {f"{TOKENS}.current": cycles[1]["emitted_count"]}
    act(
        page,
        ("click", "#step", {"#status": "This is the last cycle", at: f"{last} of {last}"}),
        ("click", f"{TOKENS} >> nth=1", {at: "1 of"} | marked),
        ("ArrowRight", "#cycle-number", {at: "2 of"}),
        ("ArrowRight", "#step", {at: "3 of"}),
        ("ArrowLeft", "#step", {at: "2 of"}),
        ("click", "#back", {at: "1 of", "#cycle-says": "Cycle 1:"}),
    )
    accepted = [cycle["accepted_count"] for cycle in cycles[1:]]
    drafted = [len(cycle["proposals"]) for cycle in cycles[1:]]
    page.click("#tab-statistics")
    see(page, {
        "[data-figure='target passes']": re.compile(f"^{metrics['target_passes']}$"),
        "[data-figure='tokens per pass']": re.compile(f"^{metrics['tokens_per_pass']:.2f}$"),
        "#chart-positions .row": max(drafted),
        "#chart-time": re.compile("(ms.*){3}"),
        "#chart-accepted .accepted:not([style*=' 0%'])": sum(map(bool, accepted)),
        "#chart-accepted .drafted:not([style*=' 0%'])": sum(map(bool, drafted)),
    })  # fmt: skip


def test_step_advances_one_cycle_run_on_shows_the_rest_and_stop_frees_the_slot(page, server):
    answer, num_tokens = traced(server, SAMPLED), 0
    fill(page, **SAMPLED)
    for step, cycle in enumerate(answer["trace"][:6]):
        num_tokens += cycle["emitted_count"]
        verified, cached = cycle["cached"]
        judged = (cycle["accepted_count"], int(cycle["rejected"] is not None), verified - cached)
        slots = (f"#picture {slot}" for slot in (".slot.accepted", ".slot.rejected", ".cell.tail"))
        came = {"#cycle-count": f"{step} of {step}", TOKENS: num_tokens}
        act(page, ("click", "#step", came | dict(zip(slots, judged, strict=True))))
        assert "Finished" not in page.text_content("#status")
    act(
        page,  # what has come stays, and can be gone through
        ("click", "#back", {"#cycle-count": "4 of 5"}),
        ("click", "#step", {"#cycle-count": "5 of 5", TOKENS: num_tokens, "#run": "Run on"}),
        ("click", "#run", {"#status": "Finished"}),
    )
    assert page.text_content("#text .tokens") == answer["text"]
    fill(page, **ENDLESS)
    page.click("#run")
    page.locator(TOKENS).first.wait_for()
    assert server.health()["num_requests_running"] == 1
    assert page.text_content("#status") == "Running."  # it streams: tokens come before the end
    act(page, ("click", "#stop", {"#status": "Stopped"}))
    server.wait_until_idle()
    assert 0 < page.locator(TOKENS).count() < ENDLESS["max_tokens"]
    run(page, **FEW)


def test_a_text_is_shown_whole_and_a_cycle_with_the_states_of_a_hybrid(page):
    """Characters of several tokens, special tokens; states go back beside the cache."""
    cycles = [
        event(0, [("caf", "bonus")]),
        event(1, [("\ufffd", "accepted"), ("\ufffd", "recovered")], 5, text="é"),
        event(2, [("!", "accepted"), ("<|end|>", "bonus")], 7, text="!"),
    ]
    mock(page, stream_of(cycles))
    run(page)
    see(page, {TOKENS: 5, "#picture .cache": 1, "#picture .states": 0})
    assert page.text_content("#text .tokens") == "café!<|end|>"  # which has no text but its name

    def states(begin, end, stepped):
        return {"recurrent": {"layers": 6, "from": begin, "to": end, "stepped": stepped}}

    rejected = {"id": 7, "kind": "rejected", "p": 0.1, "q": 0.4, "u": 0.9}
    drafted = {"proposals": [0, 7, 8], "cached": [9, 7], "rejected": rejected} | states(9, 7, 2)
    drafted["texts"] = {"0": " b", "1": " c", "7": " x", "8": " y"}
    cycles = [FIRST | states(5, 5, 0)]
    cycles.append(event(1, [(" b", "accepted"), (" c", "recovered")], 5, **drafted))
    mock(page, stream_of(cycles))
    run(page)
    row = page.locator("#picture .states")
    see(page, {"#picture .states": "of 6 layers, 2 tokens stepped again"})
    assert row.locator(".cell").all_text_contents() == ["after ␣y", "after ␣b"]
    assert row.locator(".tail").all_text_contents() == ["after ␣y"]


def test_a_draft_that_branched_shows_all_branches_and_what_the_cache_keeps(page, server):
    if not server.health()["trees"]:
        pytest.skip("no compiled blocks here")
    run(page, **SAMPLED | {"drafter": "tree", "num_speculative_tokens": 8, "temperature": 0})
    labels = []
    for step in range(1, 9):
        open_cycle(page, step)
        lengths = re.findall(r"\d+", page.text_content("#picture .more.length"))
        before, verified, kept = map(int, (*lengths, lengths[-1])[:3])
        see(page, {
            "#picture .slot.accepted": kept - before - 1,
            "#picture .cell.new": verified - before,
            "#picture .cell.tail": verified - kept,
        })  # fmt: skip
        labels += page.locator("#picture .slot .label").all_inner_texts()
    assert any(" or " in label for label in labels)


def test_a_link_restores_a_run_with_its_seed_and_its_place(open_page, page):
    run(page, **SAMPLED | {"seed": ""})
    page.click(f"{TOKENS} >> nth=9")
    again = open_page(address=page.evaluate("location.hash"))
    see(again, {"#status": "Finished"})
    for selector in ("#text .tokens", "#cycle-count"):
        assert again.text_content(selector) == page.text_content(selector)
    assert again.input_value("#drafter") == SAMPLED["drafter"]
    again.goto("about:blank")
    wrong = urlencode({"prompt": "x", "temperature": "hot"})
    again.goto(f"{page.url.partition('#')[0]}#{wrong}")
    see(again, {"#error": "“hot” is not a number"})


SCHEMA = """{"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"], "additionalProperties": false}"""


def test_a_json_schema_is_sent_and_the_reasons_tell_what_the_grammar_forbade_and_forced(
    open_page, page, server
):
    fields = FEW | {"json_schema": SCHEMA.replace("\n", "")}
    sent = posted(page)
    run(page, **fields)
    assert sent[-1]["json_schema"] == fields["json_schema"]
    answer = traced(server, fields)
    assert page.text_content("#text .tokens") == answer["text"]
    told = [place for cycle in answer["trace"] for place in cycle["grammar"]]
    texts = {i: text for cycle in answer["trace"] for i, text in cycle["texts"].items()}
    kinds = [(place["forced"], place["overruled"]) for place in told]
    assert {forced for forced, _ in kinds} == {over for _, over in kinds} == {False, True}
    for kind in set(kinds):
        at = kinds.index(kind)
        place, (first, *_) = told[at], told[at]["forbidden"]
        count = "forces this token" if kind[0] else f"allows {place['allowed']} of 4,096 tokens"
        best = ", which the model liked best." if kind[1] else ")."
        text = texts[str(first["id"])].replace(" ", "␣").replace("\n", "↵")
        words = f"The grammar {count}", f"It forbade “{text}” (p ", best
        act(
            page,
            ("hover", f"{TOKENS} >> nth={at}", {"#popup": words}),
            ("click", f"{TOKENS} >> nth={at}", {"#grammar": words}),
        )
    again = open_page(address=page.evaluate("location.hash"))
    see(again, {"#status": "Finished"})
    assert again.text_content("#text .tokens") == answer["text"]
    run(page, **FEW, json_schema="")
    assert "json_schema" not in sent[-1]
    act(page, ("click", f"{TOKENS} >> nth=1", {"#grammar:visible": 0, "#verdict": "target"}))


# ---------------------------------------------------------------- what decided about each token


def rejecting():
    """A prefill, a draft that was accepted, and one that was not."""
    chances = enumerate([(0.3, 0.6), (0.4, 0.2), (0.2, 0.1), (0.1, 0.1)])
    bars = [{"id": i, "score": -i, "p": p, "q": q} for i, (p, q) in chances]
    accepted = event(1, [("b", "accepted"), ("c", "bonus")], 5, distributions=[bars, bars])
    accepted["tokens"][0] |= {"p": 0.3, "q": 0.6, "u": 0.2}
    rejected = event(2, [("r", "recovered")], 7, proposals=[7], cached=[9, 8])
    rejected["rejected"] = {"id": 7, "kind": "rejected", "p": 0.1, "q": 0.4, "u": 0.9}
    rejected["texts"] = {"0": "r", "7": " x"}
    return [FIRST, accepted, rejected]


def test_rejection_is_told_to_the_pointer_and_the_keyboard_and_the_needle_changes_it(page):
    mock(page, stream_of(rejecting()))
    run(page)
    single, told = "#text .tokens [tabindex='0']", "#popup:visible"  # there is one tab stop
    as_it_was = {"#verdict": (".200 < p / q = .300 / .600", "kept")}
    act(
        page,
        ("hover", f"{TOKENS}.accepted", {told: ("accepted", "< p/q")}),
        ("Escape", "body", {told: 0}),
        ("focus", single, {told: "prefill"}),
        ("ArrowRight", single, {f"{single}[data-index='1'][aria-describedby=popup]:focus": 1}),
        ("End", single, {f"{single}[data-index='3']:focus": 1}),
        ("hover", f"{TOKENS}.recovered", {told: ("␣x", "norm(max(0, p − q))", "≥ p/q")}),
        ("click", f"{TOKENS}.accepted", as_it_was),
        (0.55, "#needle", {"#verdict": ("rejected", "The run had u = .200")}),
        (0.4, "#needle", {"#verdict": "kept"}),  # above p alone
        ("End", "#needle", {"#verdict": "rejected"}),
    )
    see(page, {f"#distribution .bar-{name}": n for name, n in {"p": 4, "q": 4, "more": 2}.items()})


def test_temperature_and_top_p_change_the_bars_of_a_distribution(page):
    def widths(**moved):
        act(page, *((value, f"#{name}", {}) for name, value in moved.items()))
        bars = page.locator("#distribution .bar-p")
        return bars.evaluate_all("all => all.map((bar) => parseFloat(bar.style.width))")

    run(page, **SAMPLED, verification="rejection")
    as_sent, cold = widths(), widths(heat=0.05)
    assert cold != as_sent and max(cold) == pytest.approx(sum(cold), rel=0.05)  # nearly greedy
    see(page, {"#distribution .note": "Worked out here"})
    assert max(widths(heat=2)) < max(cold)
    assert sum(width > 1 for width in widths(nucleus=0.05)) == 1
    assert widths(heat=0.8, nucleus=1) == as_sent
    see(page, {"#distribution .note": "as the server had them"})


PROPOSER = re.compile(r"Cycle \d+: (ngram|suffix|mtp|draft_model) proposed")
KEPT = re.compile("target’s best is the draft, “.*”: kept")
RULES = [  # what is asked for, and what is said where of a token of each kind
    ({"drafter": "draft_model"},
     {"accepted": {"#verdict": KEPT},
      "recovered": {"#verdict": "rejected", "#distribution .note": "there is no u"}}),
    ({"drafter": "auto"}, {"accepted": {"#cycle-says": PROPOSER}}),
    ({"drafter": "none"}, {"bonus": {"#verdict": "Nothing was drafted."}}),
    ({"temperature": 0.5},  # all of its q is on the draft
     {"accepted": {"#distribution .note": "This drafter draws nothing", "#verdict": "/ 1 ="}}),
    (SAMPLED | {"verification": "coupled"},
     {"accepted": {"#verdict": re.compile("both land on.*kept")},
      "recovered": {"#verdict": re.compile("the drafter lands on “.*”, the target on “.*”: rej")}}),
]  # fmt: skip


def test_who_drafted_and_what_decided_is_said_of_every_rule(page):
    for fields, told in RULES:
        defaults = {"temperature": 0, "seed": 1, "verification": "rejection"}
        run(page, **COLOURS | defaults | fields)
        for kind, words in told.items():
            act(page, ("click", f"{TOKENS}.{kind} >> nth=-1", words))
            drawn = page.locator("#distribution :is(input, .bar-q)").count()
            assert bool(drawn) == (fields.get("temperature", 0) > 0)
        shown = page.text_content("#cycle-says") + page.text_content("#picture")
        assert fields.get("drafter") != "none" or "bonus" not in shown
    assert "p / q" not in page.text_content("#verdict")
    act(page, (3, "#needle", {"#verdict": "Noise made here"}))


# ------------------------------------------------------------------------------ the first minute


def test_the_page_opens_on_a_recorded_cycle_and_generates_nothing(open_page, server):
    """It is told guess by guess, by itself, by buttons and by arrow keys: pass, verdicts, cut."""
    figures = server.health()["speculative_decoding"]
    story = json.loads(server.call("GET", "/page/stored_story.json")[2])
    page = open_page(reduced_motion="no-preference")
    label = f"An example, recorded earlier with {story['model']}; drafter: {story['drafter']}"
    see(page, {"#story-label": label, "#story-play": "Pause"})
    page.locator("#story-picture button.slot .chip.on").first.wait_for()  # by itself
    assert server.health()["speculative_decoding"] == figures

    def lit(*numbers):
        """What is seen of the cycle: guesses, the pass, verdicts, the cut tail."""
        parts = (".slot .chip.on:not(.own)", ".beam.lit", ".verdict.on", ".cell.tail")
        return dict(zip((f"#story-picture {part}" for part in parts), numbers, strict=True))

    page = open_page()  # less motion begins with the whole picture
    step = int(re.search(r"Cycle (\d+) of", page.text_content("#story-label"))[1])
    cycle, cost = story["cycles"][step], story["costs"][story["drafter"]]
    n, tail = len(cycle["proposals"]), cycle["cached"][0] - cycle["cached"][1]
    assert n > cycle["accepted_count"] > 0 and tail > 0  # it tells all that can happen
    ratio = f"{cost['verify_ms'] / story['plain_ms']:.2f}×"
    see(page, lit(n, 1, n, tail) | {"#timeline .draft-step": n, "#timeline .verify-pass": 1})
    see(page, {"#timeline-says": (f"gave {cycle['emitted_count']} token", ratio)})
    for _ in range(1 + cycle["accepted_count"]):
        page.click("#story-back")
    act(
        page,
        ("click", "#story-back", lit(n, 1, 0, 0) | {"#story-says": "One pass"}),
        ("ArrowLeft", "#story-on", lit(n, 0, 0, 0)),
        ("ArrowLeft", "#story-on", lit(n - 1, 0, 0, 0)),
        ("ArrowRight", "#story-on", lit(n, 0, 0, 0)),
    )


def test_no_prompt_is_put_where_somebody_is_about_to_write(page):
    held = []
    page.route("**/prompts", lambda route: held.append(route))
    page.reload()
    page.focus("#prompt")
    until(lambda: page.title() and held)
    held.pop().continue_()
    wait_until_ready(page)
    page.press("#prompt", "x")
    assert page.input_value("#prompt") == "x"


def test_a_server_that_loads_and_one_that_goes_away_are_told(
    open_page, complaints, tmp_path, chat_folder
):
    """The story is told at once. An answer that is stopped while it is held up is no turn."""
    gate = Gate(tmp_path, chat_folder("llama"))
    gate.shut("load")
    with serving(*gate.arguments, wait=False) as server:
        until(lambda: "all else answers 503" in server.log())
        page = open_page(server, is_ready=False)
        loads = re.compile("The server loads llama.*: reading the weights")
        see(page, {"#server": loads, "#story-label": "An example, recorded earlier"})
        see(page, {f"#{name}[aria-disabled=true]": 1 for name in ("run", "step", "race")})
        gate.open("load")
        wait_until_ready(page)
        see(page, {"#server": "Target: llama", "#run[aria-disabled=false]": 1})
        expect_failed_load(complaints, "503")
        gate.shut()
        page.click("#tab-chat")
        say(page, "Go on", {".turn .token": 1})
        act(page, ("click", "#stop", {".turn .note": "it does not count as a turn"}))
        gate.open()
        server.wait_until_idle()
        gate.shut()
        act(page, ("click", "#run", {TOKENS: 1}))
    see(page, {"#error": "broke off", "#server": "The server does not answer.", TOKENS: 1})
    act(page, ("click", "#run", {"#error": "The server cannot be reached"}))
    page.close()  # its console has no more to say
    complaints[:] = [text for text in complaints if "ERR_" not in text]


# ---------------------------------------------------------------------- the screen, the keyboard

OUTSIDE = """(selectors) => selectors.filter((selector) => {
    const box = document.querySelector(selector).getBoundingClientRect();
    return !(box.width && box.top >= 0 && box.bottom <= innerHeight + 1
        && box.left >= 0 && box.right <= innerWidth + 1);
})"""
LANES = ["#lane-speculative .text", "#lane-plain .text"]
SEEN = {  # what each button changes
    "#run": ["#status", "#cycle-says", "#picture"],
    "#back": ["#cycle-count", "#cycle-says", "#picture"],
    "#race": ["#status", *LANES],
}


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "400"])
def test_what_a_button_changes_is_on_the_screen_and_nothing_scrolls_sideways(open_page, size):
    page = open_page(viewport=size)
    fill(page, **SAMPLED | {"max_tokens": 24})
    for button, changed in SEEN.items():
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        assert page.evaluate(OUTSIDE, [button]) == []  # the bar stays
        act(page, ("click", button, {"#status": "Finished"}))
        assert page.evaluate(OUTSIDE, changed) == [], button
    page.click("#tab-text")
    page.locator(TOKENS).last.focus()
    assert page.evaluate(OUTSIDE, ["#popup"]) == []
    for view in VIEWS:
        page.click(f"#tab-{view}")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, view


def test_views_are_tabs_and_words_with_a_dotted_line_explain_themselves(page):
    page.focus("#tab-story")
    for key, view in (("ArrowRight", "try"), ("ArrowLeft", "story"), ("ArrowLeft", "model")):
        page.keyboard.press(key)  # around
        chosen = f"#tab-{view}[tabindex='0'][aria-selected=true]:focus"
        see(page, {chosen: 1, "[role=tab][tabindex='0']": 1, "[role=tab][aria-selected=true]": 1})
        see(page, {"[role=tabpanel]:visible": 1, f"#view-{view}:visible": 1})
    page.click("#tab-story")
    assert page.locator("#view-story .kinds .token").all_text_contents() == [*KINDS]
    for word in page.locator("#view-story .word").all():
        word.focus()
        see(page, {"#popup:visible": re.compile(".{40}")})
        assert word.evaluate("w => getComputedStyle(w).borderBottomStyle") == "dotted"
    act(
        page,
        ("Escape", "#view-story .word >> nth=-1", {"#popup:visible": 0}),
        ("hover", "#view-story .word >> nth=0", {"#popup:visible": 1}),
    )
    page.evaluate("document.getElementById('tab-text').click()")
    see(page, {"#popup:visible": 0})


def test_axe_finds_nothing_wrong_with_any_view(page):
    """Wide and narrow; nothing but the colours depends on the scheme."""
    run(page, "#race", **SAMPLED | {"max_tokens": 40})
    for size in (WIDE, NARROW):
        page.set_viewport_size(size)
        fill(page, temperature="abc")
        page.click("#run")
        for view in VIEWS:
            page.click(f"#tab-{view}")
            if view == "text":
                page.locator(f"{TOKENS}.recovered").first.click()
                page.locator(f"{TOKENS}.bonus").first.focus()
            assert violations(page) == [], (view, size)
            page.emulate_media(color_scheme="dark")
            assert violations(page, runOnly=["color-contrast"]) == [], (view, size)
            page.emulate_media(color_scheme="light")


# ------------------------------------------------------------------------------ race and what if


def test_a_race_shows_measured_and_predicted_and_says_what_it_was(page, server):
    """And What if? has its place for it, however large."""
    run(page, "#race", **COLOURS)
    ours, theirs = map(page.text_content, LANES)
    assert ours == theirs == page.text_content("#text .tokens") != ""
    see(page, {
        "#race-says": ("Medians of three runs.", "identical, token for token"),
        "#lane-plain .counts": "40 tokens · 39 passes",
        "#lane-speculative .counts": re.compile(r"^40 tokens · [12]?\d passes"),
        "#chart-race .row": 2,
        "#measured": "as fast as plain decoding in that race",
    })  # fmt: skip
    run(page, "#race", **FEW | {"drafter": "none"})
    no_race = re.compile("^Nothing was drafted, so this was no race[^×]*$")
    see(page, {"#race-says": no_race, "#chart-race .row": 0})
    run(page, "#race", **SAMPLED | {"max_tokens": 12, "verification": "rejection"})
    see(page, {"#race-says": "not compared"})

    told = server.generate(**FEW, compare=True)[1]["compare"]
    told |= {"costs": {"alpha": 0.62, "c": 4.2, "t_verify": 2.5}}
    told |= {"disturbed": True, "spread": [0.6, 1.4]}
    told |= {"measured_speedup": 0.9, "predicted_speedup": 1.1}
    mock(page, stream_of([FIRST], [answer_of([FIRST], compare=told)]))
    run(page, "#race")
    said = (
        "Speculative decoding was slower than plain decoding. Measured speed-up 0.90× (disturbed: "
        "the machine was busy, 3 runs gave 0.60× to 1.40×), predicted 1.10×",
        "t_verify 2.50).",
    )
    see(page, {"#race-says": said, "#measured": "the last race, disturbed: "})
    taken = {"#alpha-value": ".62", "#cost-value": "4.20"}
    act(page, ("click", "#tab-whatif", {}), ("click", "text=Take draft_model >> nth=-1", taken))


def test_a_race_tells_how_far_it_has_come_and_is_replayed_on_one_clock(open_page, server):
    """By the server's times: at half the slower lane's neither lane shows what came later."""
    page, held = open_page(reduced_motion="no-preference"), []
    page.clock.install(time=0)
    page.reload()
    wait_until_ready(page)
    fast = [FIRST, event(1, [("b", "accepted"), ("c", "bonus")], 5)]
    slow = [{"plain": event(i, [(text, "bonus")], 4 + i)} for i, text in enumerate("abc")]
    page.route("**/generate", lambda route: held.append(route))
    with page.expect_request("**/generate"):
        page.click("#race")
    see(page, {"#race-pace": "Speculative decoding has written 0 tokens"})
    page.clock.pause_at(100_000)
    answer = answer_of(fast, compare=server.generate(**FEW, compare=True)[1]["compare"])
    held[0].fulfill(**stream_of(fast, [*slow, answer]))
    until(lambda: page.clock.run_for(10) or page.locator("#race-again").is_visible())
    see(page, {"#race-pace": "350 times slower"})  # 20 ms in seven seconds
    seen = []
    for waited_ms in (0, 3400, 200, 3500):
        page.clock.run_for(waited_ms)
        seen.append([*map(page.text_content, LANES)])
    assert seen == [["a", "a"], ["a", "a"], ["abc", "ab"], ["abc", "abc"]]
    see(page, {"#race-clock": re.compile("^20 ms$")})


WHAT_IF = [  # what is moved, and what is said then
    ({"alpha": 0.5, "whatif-k": 1, "cost": 0.5, "row-cost": 0},
     "K=1: expected 1.00×, t_verify 1.00, it pays from α .50"),
    # 2.71 tokens in 2 · .05 + 1 + 2 · .1 passes
    ({"alpha": 0.9, "whatif-k": 2, "cost": 0.05, "row-cost": 0.1},
     "K=2: expected 2.08×, t_verify 1.20"),
    ({"whatif-k": 0}, "K=0: expected 1.00×, t_verify 1.00"),
]  # fmt: skip


def test_the_model_card_the_drafters_and_what_if_have_their_figures(page, server):
    """What if? draws the formula's curve. A model without a template has no chat."""
    assert page.input_value("#demo-prompt") == "code_function"
    absent = ("#chat-field:visible", "#tab-chat:visible", "#demo-prompt option[value^=chat]")
    see(page, dict.fromkeys(absent, 0))
    target = server.health()["target"]
    figures = (f"{target['parameters'] / 1e6:.1f} M", target["dtype"], "to the bit")
    see(page, {"#model-card": (*figures, "by the rule of rejection only the distribution is")})
    see(page, {"#drafters": ("ngram", "mtp", "draft_model")})
    page.click("#tab-whatif")
    for moved, words in WHAT_IF:
        act(page, *((value, f"#{name}", {}) for name, value in moved.items()))
        see(page, {"#whatif-says": words, "#chart-whatif .break-even": 1, "#chart-whatif .dot": 17})


# ------------------------------------------------------------------------- experiments and words


def test_a_named_drafter_drafts_k_tokens_and_with_auto_the_controller_decides(open_page, chatting):
    """K is what the server was started with, whatever was asked since."""
    chatting.generate(**COLOURS, num_speculative_tokens=12, fixed_k=True)
    page = open_page(chatting)
    assert page.input_value("#num_speculative_tokens") == "3"
    sent = posted(page)
    says = {"none": "^It decided nothing", "auto": "^Cycle ", "ngram": "^You named the drafter"}
    for drafter, words in says.items():
        run(page, **SAMPLED | {"drafter": drafter, "max_tokens": 12})
        act(page, ("click", "#tab-statistics", {"#controller-says": re.compile(words)}))
    assert [body.get("fixed_k", False) for body in sent] == [True, False, True]
    see(page, {"#measured": "all runs of ngram so far"})  # What if? knows what it has timed
    see(page, {"#drafters": ("for each guess, c = ",)})
    until(lambda: b'"measured"' in chatting.call("GET", "/curve")[2])
    page.reload()
    see(page, {"#model-card": (re.compile(r"cost curve2: \d\.\d\d×, 4: "),)})


def form_of(page):
    fields = page.locator("#request :is(input, select, textarea)")
    return fields.evaluate_all("all => all.map((field) => [field.id, field.value, field.checked])")


def try_out(page, experiment, words, choice=-1):
    """Make this choice of an experiment, and wait for what it tells."""
    choices = "#experiment .buttons button"
    act(
        page,
        ("click", "#tab-try", {}),
        ("click", f"text={experiment}", {}),
        ("click", f"{choices} >> nth={choice}", {"#experiment .says": re.compile(words)}),
    )


def test_an_experiment_asks_for_a_prediction_runs_and_tells_what_came(page):
    fill(page, **SAMPLED, verification="rejection")
    before = form_of(page)
    try_out(page, "Colours, then a story", "You predicted “a story”; it was “a list", 1)
    said = re.findall(r"\d+\.\d\d", page.text_content("#experiment .says"))
    assert float(said[0]) > float(said[1])
    look, of_the_run = "text=Look at its cycles", f"{said[0]} tokens per pass"
    seen = {"#cycle-count": "1 of", "#text .prompt": COLOURS["prompt"], "#status": of_the_run}
    act(page, ("click", look, seen))
    assert form_of(page) == before  # the reader's own request is not lost
    try_out(page, "Sample", "The same text, in ")
    try_out(page, "Read the cache", "it was “by those kept and one”")
    act(page, ("click", look, {"#picture .slot.rejected": 1}))
    assert page.locator("#picture .slot.accepted").count() > 0


MEDIANS = [  # how slow passes are with K = 2, 6 and 14, what was predicted, what is said
    ([1, 1.05, 3], 0, "You predicted “K = 2”; nothing is proved.*too close to call"),
    ([2, 1, 3], 1, "As you predicted.*Longer drafts cost more than they saved"),
    ([3, 2, 1], 0, "You predicted “K = 2”; it was “K = 14”.*enough guesses were kept"),
]


def test_experiments_of_time_are_judged_by_medians_and_the_reason_follows(page):
    """The first round is disturbed, which the median of three leaves out."""
    asked, ms_of = [], {None: 1, 16: 2}

    def answer(route):
        asked.append(json.loads(route.request.post_data).get("num_speculative_tokens"))
        verify = 500 if len(asked) == 1 else 10 * ms_of[asked[-1]]
        ms = {"draft": 0, "verify": verify, "other": 0}
        route.fulfill(**stream_of([FIRST, event(1, [("b", "bonus")], 5, ms=ms)]))

    page.route("**/generate", answer)
    for slow, choice, words in MEDIANS:
        asked.clear()
        ms_of.update(zip((2, 6, 14), slow, strict=True))
        try_out(page, "Raise K", words, choice)
        assert asked == [2, 6, 14] * 3
    try_out(page, "See it lose", "As you predicted.*more than the passes that they saved")


# ------------------------------------------------------------------------------------------ chat


def test_a_conversation_has_turns_a_template_figures_and_cycles(open_page, chatting):
    """So has a prompt, unless the box is not ticked; one of the kind chat is offered first."""
    page = open_page(chatting)
    assert page.input_value("#demo-prompt").startswith("chat_")
    sent = posted(page)
    page.click("#tab-chat")
    page.fill("#max_tokens", "6")
    page.fill("#system", "Be brief.")
    answers = page.locator(".turn.assistant")
    for i, message in enumerate(("Hello", "And now?")):
        say(page, message, {f".turn.assistant >> nth={i} >> .note": "tokens per pass"})
    first, second = (body["prompt"] for body in sent)
    assert [turn["role"] for turn in second] == ["system", "user", "assistant", "user"]
    assert second[:2] == first and second[3]["content"] == "And now?"
    assert second[2]["content"] in answers.first.locator("[role=listbox]").text_content()
    read = answers.last.locator("pre").text_content()
    assert all(turn["content"] in read for turn in second[:2])
    shown = {"#cycle-count": re.compile("^0 of"), "#view-chat #picture:visible": 1}
    act(page, ("click", ".turn.assistant .token >> nth=0", shown), ("click", "#tab-text", {}))
    for is_chat in (True, False):
        fill(page, prompt="Hi", max_tokens=2)
        page.set_checked("#chat", is_chat)
        run(page)
        assert sent[-1].get("chat", False) is is_chat
    act(page, ("click", "#tab-chat", {}), ("click", ".turn summary >> nth=-1", {}))
    assert violations(page) == []


# ------------------------------------------------------------------------- mistakes and refusals

WRONG = [("temperature", "abc", "“abc” is not a number"), ("seed", "9" * 20, "53 bits"),
         ("num_speculative_tokens", "0x", "“0x” is not a number"),
         ("prompt", "", "Write a prompt first"),  # and what is sent, in the server's words:
         ("num_speculative_tokens", "99", "K must be an integer from 0 to 16"),
         ("json_schema", "{", "json_schema must be a JSON schema")]  # fmt: skip


def test_a_bad_value_is_told_and_its_field_marked_until_it_is_corrected(open_page, complaints):
    """The button is hit although the field that the reader comes from shrinks."""
    page = open_page(viewport=NARROW)
    sent = posted(page)
    fill(page, **COLOURS)
    for name, value, words in WRONG:
        fill(page, **{name: value})
        marked = {f"#{name}[aria-invalid=true]:visible": 1}
        act(page, ("click", "#run", {"#error[role=alert]": words} | marked))
        assert bool(sent) == (value in ("99", "{"))
        fill(page, **{name: "1"})
        see(page, {"#error p": 0, "[aria-invalid=true]": 0})  # as soon as it is right
    expect_failed_load(complaints, "400")
    run(page, json_schema="")


FAILED = {"error": {"message": "the engine failed: out of memory"}}
ATTACK = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
REFUSALS = [
    (429, "64 requests wait already", {"Retry-After": "7"}, "is busy .*Try again in 7 s"),
    (503, "the server is shutting down", {}, "cannot do this now: the server is shutting down"),
    (401, "a key is needed", {}, "asks for an API key"),
    (400, ATTACK, {}, re.escape(ATTACK)),
]


def test_refusals_and_ends_of_streams_are_told_and_markup_stays_text(page, complaints):
    """In prompts, outputs and errors."""
    for end, words in (([FAILED], "out of memory"), ([], "broke off")):
        mock(page, stream_of([FIRST], end))
        act(page, ("click", "#run", {"#error": words, "#text .tokens": re.compile("^a$")}))
    both = {"id": 0, "score": 1.0, "p": 0.5, "q": 0.4}, {"id": 1, "score": 0.9, "p": 0.4, "q": 0.6}
    told = {"controller": ATTACK, "distributions": [both, both]}
    guessed = [(ATTACK, "accepted"), (ATTACK, "bonus")]
    cycles = [event(0, [(ATTACK, "bonus")]), event(1, guessed, 5, **told)]
    mock(page, stream_of(cycles, [answer_of(cycles, warnings=[ATTACK])]))
    run(page, prompt=ATTACK)
    act(
        page,
        ("click", "#picture button.slot >> nth=0", {"#text .prompt": ATTACK}),
        ("hover", f"{TOKENS} >> nth=1", {"#text .tokens": ATTACK * 3}),
        ("click", "#tab-statistics", {"#warnings": ATTACK, "#controller-says": ATTACK}),
    )
    for status, message, headers, words in REFUSALS:
        error = {"error": {"message": message, "type": "x", "param": None, "code": None}}
        mock(page, {"status": status, "json": error, "headers": headers})
        act(page, ("click", "#run", {"#error": re.compile(words)}))
        expect_failed_load(complaints, str(status))
    assert page.evaluate("window.hacked") is None
    see(page, {"img": 0, "body script": 0})


# ------------------------------------------------------------------------- another engine


def test_another_engine_s_key_is_asked_for_and_what_it_does_not_tell_is_said_and_not_drawn(
    open_page, complaints
):
    """Of a recorded vLLM, which gives one of its answers whatever is asked; keys stay in memory."""
    with replaying() as replay, serving("--engine", replay.url, "--api-key", "secret") as server:
        replay.is_lenient = True
        page = open_page(server, is_ready=False)
        see(page, {"#story-label": "vllm 0.32.0 runs this model", "#key:visible": 0})
        asked = posted(page)
        page.fill("#prompt", "x")
        page.click("#run")
        page.locator("#key").wait_for()
        run(page, prompt=COLOUR_LIST, key="secret")
        assert "prompt=" in page.url and "secret" not in page.url
        wait_until_ready(page)  # with a key it asks for the prompts anew, and repeats no run
        assert [body["prompt"] for body in asked] == ["x", COLOUR_LIST]
        kept = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
        assert kept == [0, 0, ""]
        expect_failed_load(complaints, "401")
        hidden = ("#race", "#step", "#drafter", "#tab-race", "#tab-try", "#tab-whatif")
        see(page, {"#error p": 0} | {f"{name}:visible": 0 for name in hidden})
        told = {"#status": "Finished (length): 6 tokens, 5 of 5 drafted ones accepted"}
        act(page, ("click", "#run", told | {"#cycle-says": "It does not tell p, q, u"}))
        text = page.inner_text("#text")  # the second one takes the place of the first
        assert text.endswith(" hi\nassistant") and text.count("assistant") == 1
        figures = {"[data-figure='draft acceptance rate']": "1.00", "#model-card": "vllm"}
        act(page, ("click", "#tab-statistics", figures), ("click", "#tab-chat", {}))
        say(page, "hi", {".answer": "hi", "#status": "Finished"})
        sent = [body for _, body, _ in replay.seen if body and "temperature" in body]
        assert len(sent) == 3 and "messages" in sent[-1]
        page.close()
