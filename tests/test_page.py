"""The teaching page, in a real browser against the real server process.

    python -m pytest tests/test_page.py    needs playwright and chromium

What its files alone can tell is in test_operations.py. No test may leave an error on the browser's
console, nor a violation of the page's policy. The check for accessibility needs axe-core, which
`python .ci/fetch_axe.py` fetches; where NEEDS_AXE is set, its absence is a failure.
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
from server import ROOT, Gate, call, generate, health, serving, until, wait_until_idle

pytestmark = pytest.mark.browser

SAMPLED = {"prompt": "def read(path):", "drafter": "draft_model", "num_speculative_tokens": 4}
SAMPLED |= {"temperature": 0.8, "seed": 1, "max_tokens": 60}
COLOURS = {"prompt": COLOUR_LIST, "drafter": "ngram", "max_tokens": 40}
ENDLESS = {"prompt": COUNTING["prompt"], "num_speculative_tokens": 0, "max_tokens": 1900}
ENDLESS |= {"temperature": 0}
KINDS = ("accepted", "recovered", "bonus")
TOKENS = "#text .tokens .token"
AXE = ROOT / ".ci" / "axe.min.js"
VIEWS = ("story", "try", "text", "race", "whatif", "statistics", "model")
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 400, "height": 800}
each_size = pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "400"])
WATCH = """document.addEventListener("securitypolicyviolation",
    (event) => console.error("policy: " + event.violatedDirective));"""


# ------------------------------------------------------------------------------------ fixtures


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium")
    if program is None:
        assert "NEEDS_AXE" not in os.environ, "chromium is not installed"
        pytest.skip("chromium is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def port(browser):
    """Drafts have a fixed length: what is drafted and kept does not depend on the clock."""
    with serving("--fixed-k") as server:
        yield server.port


@pytest.fixture(scope="module")
def chatting(browser, chat_folder):
    """Of one with a chat template, a K of its own and a controller."""
    arguments = ("--model", str(chat_folder("llama")), "--num-speculative-tokens", "3")
    with serving(*arguments) as server:
        yield server.port


@pytest.fixture
def complaints():
    """What the browser's console says in anger; a test that provokes some takes them out."""
    return []


@pytest.fixture
def open_page(browser, port, complaints):
    """Opens the page, of a server of one's own if need be; at the end nothing must be wrong."""
    contexts = []

    def open_one(at=port, is_ready=True, address="", **options):
        options = {"viewport": WIDE, "reduced_motion": "reduce"} | options
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda said: said.type == "error" and complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.add_init_script(WATCH)
        page.goto(f"http://127.0.0.1:{at}/{address}")
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


def fill(page, **fields):
    if not page.locator("#seed").is_visible():
        page.locator("#settings-button").click()
    for name, value in fields.items():
        field = page.locator(f"#{name}")
        if name in ("drafter", "verification"):
            field.select_option(value)
        else:
            field.fill(str(value))


def wait_for_status(page, words):
    page.locator("#status", has_text=words).wait_for()


def run(page, button="#run", **fields):
    """Fill the form in, press, and wait for the end."""
    fill(page, **fields)
    page.locator(button).click()
    wait_for_status(page, "Finished")


def show(page, view):
    page.locator(f"#tab-{view}").click()


def open_cycle(page, step):
    set_slider(page, "cycle-number", step)
    page.locator("#cycle-count", has_text=f"{step} of").wait_for()


def set_slider(page, name, value):
    slide = """(slider, value) => {
        slider.value = value;
        slider.dispatchEvent(new Event("input", {bubbles: true}));
    }"""
    page.locator(f"#{name}").evaluate(slide, value)


def say(page, message):
    """Send a message of a conversation."""
    page.fill("#message", message)
    page.locator("#send").click()


def refuse(page, words):
    """Press, and wait for what is said to be wrong."""
    page.locator("#run").click()
    page.locator("#error", has_text=words).wait_for()


def text_of(page, selector):
    return page.locator(selector).text_content()


def counts(page, *selectors):
    return [page.locator(selector).count() for selector in selectors]


def explains(page, words):
    """Whether the card beside what is pointed at says so."""
    return page.locator("#popup", has_text=words).is_visible()


def visible(text):
    return text.replace("\n", "↵").replace(" ", "␣")


def posted(page):
    """The bodies of what the page sends from now on."""
    sent = []
    page.on("request", lambda r: r.post_data and sent.append(json.loads(r.post_data)))
    return sent


def story_of(port):
    return json.loads(call(port, "GET", "/page/story.json")[2])


def traced(port, fields, rule="coupled"):
    """What the server answers to the fields of a run."""
    return generate(port, **fields, verification=rule, trace=True)[1]


def violations(page, **options):
    """What axe-core finds wrong with a page, as words. It may skip the rest of a test."""
    if not AXE.exists():
        assert "NEEDS_AXE" not in os.environ, "python .ci/fetch_axe.py has not fetched axe-core"
        pytest.skip("axe-core is not there: python .ci/fetch_axe.py")
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text("utf-8"))
    options = {"resultTypes": ["violations"]} | options
    found = page.evaluate("(options) => axe.run(document, options)", options)["violations"]
    return [
        f"{v['id']}: {n['html'][:150]} {n['failureSummary']}" for v in found for n in v["nodes"]
    ]


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


# ------------------------------------------------------------------------------ the first minute


def test_the_page_opens_on_a_recorded_cycle_and_generates_nothing(open_page, port):
    figures, story = health(port)["speculative_decoding"], story_of(port)
    page = open_page(reduced_motion="no-preference")
    label = page.locator("#story-label", has_text="Recorded when this server started")
    assert f"{story['model']}; drafter: {story['drafter']}" in label.text_content()
    page.locator("#story-picture button.slot .chip.on").first.wait_for()  # by itself
    assert text_of(page, "#story-play") == "Pause"
    page.locator("#story-play").click()
    assert text_of(page, "#story-play") == "Play"
    assert health(port)["speculative_decoding"] == figures


def test_no_prompt_is_put_where_somebody_is_about_to_write(page):
    held = []
    page.route("**/prompts", lambda route: held.append(route))
    page.reload()
    page.locator("#prompt").focus()
    until(lambda: page.title() and held)
    held.pop().continue_()
    wait_until_ready(page)
    assert page.locator("#prompt").input_value() == ""
    page.keyboard.type("x")
    assert page.locator("#prompt").input_value() == "x"


def lit(page):
    """What is seen of the story's cycle: guesses, the pass, verdicts, the cut tail."""
    parts = [".slot .chip.on:not(.own)", ".beam.lit", ".verdict.on", ".cell.tail"]
    return counts(page, *(f"#story-picture {part}" for part in parts))


def test_the_story_goes_guess_by_guess_one_pass_verdicts_and_the_cut(page, port):
    """By buttons and by arrow keys, forth and back; less motion begins with the whole picture."""
    story = story_of(port)
    step = int(re.search(r"Cycle (\d+) of", text_of(page, "#story-label"))[1])
    cycle, cost = story["cycles"][step], story["costs"][story["drafter"]]
    n, tail = len(cycle["proposals"]), cycle["cached"][0] - cycle["cached"][1]
    assert n > cycle["accepted_count"] > 0 and tail > 0  # it tells all that can happen
    assert lit(page) == [n, 1, n, tail]
    for _ in range(2 * n + 4):
        page.locator("#story-back").click()
    assert lit(page) == [0, 0, 0, 0] and "pending" in text_of(page, "#story-says")
    bars = [f"#timeline .{kind}" for kind in ("plain-pass", "draft-step", "verify-pass")]
    assert counts(page, *bars) == [n + 1, n, 1]
    spoilers = ["#story-picture .cut:visible", "#timeline .plain-pass.more"]
    for guesses in range(1, n + 1):
        page.locator("#story-on").click()
        assert lit(page) == [guesses, 0, 0, 0]
    assert counts(page, *spoilers) == [0, 0]
    timeline = page.locator("#timeline-says")
    assert "This cycle gave" not in timeline.text_content()
    page.locator("#story-on").press("ArrowRight")
    assert lit(page) == [n, 1, 0, 0] and "One pass" in text_of(page, "#story-says")
    assert text_of(page, ".stages [aria-current]") == "2 verify"
    page.keyboard.press("ArrowLeft")
    assert lit(page) == [n, 0, 0, 0]
    for _ in range(n + 3):
        page.locator("#story-on").click()
    assert counts(page, *spoilers) == [1, n + 1 - cycle["emitted_count"]]
    cycles = story["cycles"][1:]
    whole = sum(len(c["proposals"]) * cost["step_ms"] + cost["verify_ms"] for c in cycles)
    alone = sum(c["emitted_count"] for c in cycles) * story["plain_ms"]
    ratios = cost["verify_ms"] / story["plain_ms"], alone / whole
    for words in (f"gave {cycle['emitted_count']} token", *(f"{ratio:.2f}×" for ratio in ratios)):
        assert words in timeline.text_content()


def test_a_server_that_loads_and_one_that_goes_away_are_told(
    open_page, complaints, tmp_path, chat_folder
):
    """First a stored story is told. An answer that is stopped while it is held up is no turn."""
    gate = Gate(tmp_path, chat_folder("llama"))
    gate.shut("load")
    with serving(*gate.arguments, wait=False) as server:
        until(lambda: "all else answers 503" in server.log())
        page = open_page(server.port, is_ready=False)
        said = page.locator("#server")
        said.get_by_text(re.compile("The server loads llama.*: reading the weights")).wait_for()
        assert "Recorded earlier, as an example" in text_of(page, "#story-label")
        for name in ("run", "step", "race"):
            assert page.locator(f"#{name}").get_attribute("aria-disabled") == "true"
        gate.open("load")
        wait_until_ready(page)
        assert said.inner_text().startswith("Target: llama")
        assert page.locator("#run").get_attribute("aria-disabled") == "false"
        expect_failed_load(complaints, "503")
        gate.shut()
        show(page, "chat")
        say(page, "Go on")
        page.locator(".turn .token").first.wait_for()
        page.locator("#stop").click()
        page.locator(".turn .note", has_text="it does not count as a turn").wait_for()
        gate.open()
        wait_until_idle(server.port)
        gate.shut()
        page.locator("#run").click()
        page.locator(TOKENS).first.wait_for()
    page.locator("#error", has_text="broke off").wait_for()
    assert counts(page, TOKENS)[0] > 0
    assert said.inner_text() == "The server does not answer."
    refuse(page, "The server cannot be reached")
    page.close()  # its console has no more to say
    complaints[:] = [text for text in complaints if "ERR_" not in text]


# ----------------------------------------------------------------------------------- the layout

OUTSIDE = """(selectors) => selectors.filter((selector) => {
    const box = document.querySelector(selector).getBoundingClientRect();
    const bar = document.querySelector("#bar").getBoundingClientRect();
    const top = document.querySelector(selector).closest("#bar") ? 0 : bar.bottom - 1;
    return !(box.width && box.top >= top && box.bottom <= innerHeight + 1
        && box.right <= innerWidth + 1);
})"""
MARKED_OUTSIDE = """() => {
    const [box, ...marked] = [...document.querySelectorAll("#text, #text .current")]
        .map((one) => one.getBoundingClientRect());
    return marked.filter(({ top, bottom }) => top < box.top - 1 || bottom > box.bottom + 1).length;
}"""
CYCLE = ["#cycle-says", "#picture"]
LANES = ["#lane-speculative .text", "#lane-plain .text"]
SEEN = {  # what each button changes, and what of it is seen in the wide window besides
    "#story-back": (["#story-picture", "#story-says", "#story-play"], []),
    "#run": (["#status", *CYCLE], ["#text .tokens .token.current:last-child", "#distribution"]),
    "#back": (["#cycle-count", *CYCLE, "#picture .cache"], []),
    "#step": (["#status", *CYCLE, "#picture .cache"], ["#distribution", "#text"]),
    "#race": (["#status", *LANES, "#race-clock"], ["#chart-race", "#race-says"]),
}
LONG = {"prompt": "x" * 300 + "\ndef read(path):" * 40, "drafter": "ngram", "temperature": 0}
LONG |= {"num_speculative_tokens": 16, "max_tokens": 300}


@each_size
def test_nothing_that_a_button_does_is_off_screen(open_page, size):
    """Nor does anything scroll sideways, and the box of the text follows the cycle."""
    page = open_page(viewport=size)
    assert counts(page, "#story-picture .slot") == [6]
    tops = "slots => new Set(slots.map((slot) => slot.getBoundingClientRect().top)).size"
    assert page.locator("#story-picture .draft > li").evaluate_all(tops) == 1
    for button, (changed, if_wide) in SEEN.items():
        if button == "#run":
            fill(page, **SAMPLED | {"max_tokens": 24})
        if button != "#story-back":
            page.evaluate("scrollTo(0, document.body.scrollHeight)")
            assert page.evaluate(OUTSIDE, [button]) == []  # the bar stays
        page.locator(button).click()
        if button in ("#run", "#race"):
            wait_for_status(page, "Finished")
        assert page.evaluate(OUTSIDE, changed + (size is WIDE) * if_wide) == [], button
    show(page, "text")
    run(page, **LONG)
    last, place = int(page.locator("#cycle-number").get_attribute("max")), page.evaluate("scrollY")
    for share in (1, 0.5, 0.1, 0.9):
        open_cycle(page, round(share * last))
        assert counts(page, "#text .current")[0] > 0 and page.evaluate(MARKED_OUTSIDE) == 0, share
        assert size is NARROW or page.evaluate("scrollY") == place
    slots = page.locator("#picture button.slot").all()
    assert len(slots) >= 16
    for slot in slots:
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        slot.evaluate("slot => slot.click()")
        assert page.evaluate(OUTSIDE, ["#verdict"]) == []
    page.locator(TOKENS).last.focus()
    box = page.locator("#popup").bounding_box()
    assert 0 <= box["x"] and box["x"] + box["width"] <= size["width"]
    for view in VIEWS:
        show(page, view)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, view


def test_views_are_tabs_and_words_with_a_dotted_line_explain_themselves(page):
    page.locator("#tab-story").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-try"
    assert page.locator("[role=tabpanel]:visible").get_attribute("id") == "view-try"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.id") == "tab-model"  # around
    assert counts(page, "[role=tab][tabindex='0']", "[aria-selected=true][role=tab]") == [1, 1]
    show(page, "story")
    legend = page.locator("#view-story .kinds")
    assert legend.locator(".token").all_text_contents() == [*KINDS]
    legend.locator(".recovered").focus()
    assert explains(page, "in the place of the first rejected one")
    popup, words = page.locator("#popup"), page.locator("#view-story .word")
    for word in words.all():
        word.focus()
        assert popup.is_visible() and len(popup.text_content()) > 40
        assert word.evaluate("w => getComputedStyle(w).borderBottomStyle") == "dotted"
    page.keyboard.press("Escape")
    assert popup.is_hidden()
    words.first.hover()
    assert popup.is_visible()
    page.locator("#tab-text").evaluate("tab => tab.click()")
    popup.wait_for(state="hidden")
    run(page, **SAMPLED)
    page.locator("#picture [data-word=pending]").hover()
    assert popup.is_visible()
    set_slider(page, "cycle-number", 0)  # which has no pending token
    popup.wait_for(state="hidden")


# ---------------------------------------------------------------------------------- runs, cycles


def test_a_run_marks_each_token_by_its_origin_leads_to_its_cycles_and_tells_the_noise(page, port):
    """By tokens, the slider, buttons and arrow keys."""
    run(page, **SAMPLED, verification="coupled")
    answer = traced(port, SAMPLED)
    metrics, cycles = answer["metrics"]["speculative_decoding"], answer["trace"]
    assert text_of(page, "#text .tokens") == answer["text"]
    assert text_of(page, "#text .prompt") == SAMPLED["prompt"]
    names = ("accepted_draft", "recovered", "bonus")
    shown = counts(page, *(f"{TOKENS}.{kind}" for kind in KINDS))
    assert shown == [metrics[f"num_{name}_tokens"] for name in names] and min(shown) > 0
    line = "token => getComputedStyle(token).borderBottomStyle"  # without colour they differ, too
    styles = [page.locator(f"{TOKENS}.{kind}").first.evaluate(line) for kind in KINDS]
    assert styles == ["solid", "dashed", "double"]
    count, last = page.locator("#cycle-count"), len(cycles) - 1
    assert count.text_content() == f"{last} of {last}"
    page.locator("#step").click()
    wait_for_status(page, "This is the last cycle")
    page.locator(TOKENS).nth(1).click()
    assert count.text_content() == f"1 of {last}"
    assert counts(page, f"{TOKENS}.current") == [cycles[1]["emitted_count"]]
    for selector, key, step in (
        ("#cycle-number", "ArrowRight", 2),
        ("#step", "ArrowRight", 3),
        ("#step", "ArrowLeft", 2),
    ):
        page.locator(selector).press(key)
        assert count.text_content() == f"{step} of {last}"
    page.locator("#back").click()
    assert count.text_content() == f"1 of {last}" and "Cycle 1:" in text_of(page, "#cycle-says")
    show(page, "statistics")
    assert text_of(page, "[data-figure='target passes']") == str(metrics["target_passes"])
    tokens_per_pass = f"{metrics['tokens_per_pass']:.2f}"
    assert text_of(page, "[data-figure='tokens per pass']") == tokens_per_pass
    accepted = [cycle["accepted_count"] for cycle in cycles[1:]]
    drafted = [len(cycle["proposals"]) for cycle in cycles[1:]]
    heights = "all => all.filter((bar) => parseFloat(bar.style.height)).length"
    for name, values in (("accepted", accepted), ("drafted", drafted)):
        bars = page.locator(f"#chart-accepted .{name}")
        assert bars.evaluate_all(heights) == sum(map(bool, values))
    assert counts(page, "#chart-positions .row") == [max(drafted)]
    assert text_of(page, "#chart-time").count("ms") == 3
    show(page, "text")
    coupled_rule_is_shown_as_the_same_noise_on_both(page, cycles)


def coupled_rule_is_shown_as_the_same_noise_on_both(page, cycles):
    tokens = [token for cycle in cycles for token in cycle["tokens"]]
    for kind in KINDS:
        total = next(token["total"] for token in tokens if token["kind"] == kind)
        page.locator(f"{TOKENS}.{kind}").first.hover()
        words = page.locator("#popup", has_text=f"= {total:z.2f}".replace("-", "−")).text_content()
        assert "the target’s own choice" in words and "p/q" not in words
    kept = next(cycle for cycle in cycles if cycle["accepted_count"] > 0)
    open_cycle(page, kept["step"])
    page.locator("#picture [data-place='0']").click()
    assert re.search("both land on.*kept", text_of(page, "#verdict"))
    refused = next(cycle for cycle in cycles if cycle["rejected"])
    open_cycle(page, refused["step"])
    ids = refused["rejected"]["id"], refused["tokens"][-1]["id"]
    words = [visible(refused["texts"][str(i)]) for i in ids]
    verdict = text_of(page, "#verdict")
    assert "the drafter lands on “{}”, the target on “{}”: rejected".format(*words) in verdict
    assert counts(page, "#distribution .mark-p")[0] > 3 and "p / q" not in verdict
    set_slider(page, "needle", 3)
    assert "Noise made here" in text_of(page, "#verdict")
    page.get_by_role("button", name="What is the noise?").focus()
    assert explains(page, "made from the seed and the place")


def test_a_text_is_shown_whole_and_a_cycle_with_the_states_of_a_hybrid(page):
    """Characters of several tokens, special tokens, and 2,001 tokens with one tab stop."""
    cycles = [
        event(0, [("caf", "bonus")]),
        event(1, [("\ufffd", "accepted"), ("\ufffd", "recovered")], 5, text="é"),
        event(2, [("!", "accepted"), ("<|end|>", "bonus")], 7, text="!"),
    ]
    mock(page, stream_of(cycles))
    run(page)
    assert text_of(page, "#text .tokens") == "café!<|end|>"  # which has no text but its name
    assert counts(page, TOKENS, "#picture .cache", "#picture .states") == [5, 1, 0]
    words = [(f" word{i}", "accepted") for i in range(3)] + [(" end", "bonus")]
    cycles = [event(0, [("Start", "bonus")])]
    cycles += [event(step, words, 5 + 4 * (step - 1)) for step in range(1, 501)]
    mock(page, stream_of(cycles))
    page.locator("#run").click()
    wait_for_status(page, "Finished (length): 2001 tokens")
    assert counts(page, "#text .tokens [role=option]", "#text .tokens [tabindex='0']") == [2001, 1]
    assert text_of(page, "#text .tokens") == "".join(cycle["text"] for cycle in cycles)
    assert counts(page, "#picture .cell")[0] <= 16 + 17
    assert "more" in text_of(page, "#picture .cache .more >> nth=0")
    states_of_a_hybrid_go_back_beside_the_cache(page)


def states_of_a_hybrid_go_back_beside_the_cache(page):
    def states(begin, end, stepped):
        return {"recurrent": {"layers": 6, "from": begin, "to": end, "stepped": stepped}}

    rejected = {"id": 7, "kind": "rejected", "p": 0.1, "q": 0.4, "u": 0.9}
    drafted = {"proposals": [0, 7, 8], "cached": [9, 7], "rejected": rejected} | states(9, 7, 2)
    drafted["texts"] = {"0": " b", "1": " c", "7": " x", "8": " y"}
    cycles = [
        event(0, [("a", "bonus")], **states(5, 5, 0)),
        event(1, [(" b", "accepted"), (" c", "recovered")], 5, **drafted),
        event(2, [(" d", "accepted"), (" e", "bonus")], 7, **states(9, 9, 0)),
    ]
    page.set_viewport_size(NARROW)
    mock(page, stream_of(cycles))
    run(page)
    row = page.locator("#picture .states")
    assert row.locator(".cell").all_text_contents() == ["after ␣d"]  # all was accepted
    page.locator("#back").click()
    page.locator("#cycle-count", has_text="1 of 2").wait_for()
    assert row.locator(".cell").all_text_contents() == ["after ␣y", "after ␣b"]
    assert row.locator(".tail").all_text_contents() == ["after ␣y"]
    assert "of 6 layers, 2 tokens stepped again" in row.text_content()
    assert row.evaluate("row => row.scrollWidth <= row.clientWidth")
    row.locator("button").focus()
    assert explains(page, "one state, which every token changes")


def test_step_advances_one_cycle_run_on_shows_the_rest_and_stop_frees_the_slot(page, port):
    answer, num_tokens = traced(port, SAMPLED), 0
    fill(page, **SAMPLED)
    for step, cycle in enumerate(answer["trace"][:6]):
        page.locator("#step").click()
        num_tokens += cycle["emitted_count"]
        page.locator("#cycle-count", has_text=f"{step} of {step}").wait_for()
        verified, kept = cycle["cached"]
        slots = (f"#picture {slot}" for slot in (".slot.accepted", ".slot.rejected", ".cell.tail"))
        judged = [cycle["accepted_count"], cycle["rejected"] is not None, verified - kept]
        assert counts(page, TOKENS, *slots) == [num_tokens, *judged]
        assert "Finished" not in text_of(page, "#status")
    page.locator("#back").click()  # what has come stays, and can be gone through
    page.locator("#cycle-count", has_text="4 of 5").wait_for()
    page.locator("#step").click()
    page.locator("#cycle-count", has_text="5 of 5").wait_for()
    assert counts(page, TOKENS) == [num_tokens]
    page.locator("#run", has_text="Run on").click()
    wait_for_status(page, "Finished")
    assert text_of(page, "#text .tokens") == answer["text"]
    fill(page, **ENDLESS)
    page.locator("#run").click()
    page.locator(TOKENS).first.wait_for()
    assert health(port)["num_requests_running"] == 1
    assert text_of(page, "#status") == "Running."  # it streams: tokens come before the end
    page.locator("#stop").click()
    wait_for_status(page, "Stopped")
    wait_until_idle(port)
    assert 0 < counts(page, TOKENS)[0] < ENDLESS["max_tokens"]
    run(page, **COLOURS | {"num_speculative_tokens": 5})


def test_a_draft_that_branched_shows_all_branches_and_what_the_cache_keeps(page, port):
    if not health(port)["trees"]:
        pytest.skip("no compiled blocks here")
    run(page, **SAMPLED | {"drafter": "tree", "num_speculative_tokens": 8, "temperature": 0})
    labels = []
    for step in range(1, 9):
        open_cycle(page, step)
        lengths = re.findall(r"\d+", text_of(page, "#picture .more.length"))
        before, verified, kept = map(int, (*lengths, lengths[-1])[:3])
        slots = (f"#picture {slot}" for slot in (".slot.accepted", ".cell.new", ".cell.tail"))
        assert counts(page, *slots) == [kept - before - 1, verified - before, verified - kept]
        labels += page.locator("#picture .slot .label").all_inner_texts()
    assert any(" or " in label for label in labels)


def test_a_link_restores_a_run_with_its_seed_and_its_place(open_page, page):
    run(page, **SAMPLED | {"seed": ""})
    page.locator(TOKENS).nth(9).click()
    again = open_page(address=page.evaluate("location.hash"))
    wait_for_status(again, "Finished")
    for selector in ("#text .tokens", "#cycle-count"):
        assert text_of(again, selector) == text_of(page, selector)
    assert again.locator("#drafter").input_value() == SAMPLED["drafter"]
    again.goto("about:blank")
    wrong = urlencode({"prompt": "x", "temperature": "hot"})
    again.goto(f"{page.url.partition('#')[0]}#{wrong}")
    again.locator("#error", has_text="“hot” is not a number").wait_for()


# --------------------------------------------------------------------------------- distributions


def shown_number(value):
    """A probability as words.js writes it, for values that are plain."""
    return f"{value:.3f}".removeprefix("0") if value < 1 else f"{value:.2f}"


def test_rejection_is_told_to_the_pointer_and_the_keyboard_and_the_needle_changes_it(page, port):
    run(page, **SAMPLED, verification="rejection")
    cycles = traced(port, SAMPLED, "rejection")["trace"]
    pointing_at_a_token_or_focusing_it_tells_the_reason(page, cycles)
    temperature_and_top_p_change_the_bars(page)  # of the last cycle
    step, place, token = next(
        (cycle["step"], place, token)
        for cycle in cycles
        for place, token in enumerate(cycle["tokens"])
        if token["kind"] == "accepted"
        and all(0.01 < token[name] < 0.99 for name in "pqu")
        and token["p"] < 0.9 * token["q"]
    )
    open_cycle(page, step)
    page.locator(f"#picture [data-place='{place}']").click()
    verdict = page.locator("#verdict")
    for words in (*(shown_number(token[name]) for name in "pqu"), "kept"):
        assert words in verdict.text_content()
    num_p, num_q, num_more = counts(page, *(f"#distribution .bar-{n}" for n in ("p", "q", "more")))
    assert num_p == num_q > 3 and num_more > 0  # max(0, p − q)
    set_slider(page, "needle", min(0.999, token["p"] / token["q"] + 0.05))
    assert "rejected" in verdict.text_content()
    assert f"The run had u = {shown_number(token['u'])}" in verdict.text_content()
    set_slider(page, "needle", (token["p"] + token["p"] / token["q"]) / 2)  # above p alone
    assert "kept" in verdict.text_content()
    page.locator("#needle").press("End")
    assert "rejected" in verdict.text_content()
    open_cycle(page, 0)  # nothing was drafted there
    page.get_by_role("button", name="What is u?").focus()
    assert explains(page, "in the vocabulary’s order")


def pointing_at_a_token_or_focusing_it_tells_the_reason(page, cycles):
    page.locator(f"{TOKENS}.accepted").first.hover()
    assert explains(page, "accepted") and explains(page, "< p/q")
    page.keyboard.press("Escape")
    page.locator("#popup").wait_for(state="hidden")
    page.mouse.move(0, 0)
    single, focused = page.locator("#text .tokens [tabindex='0']"), page.locator(":focus")
    single.focus()  # there is one tab stop
    assert explains(page, "prefill")
    last = sum(len(cycle["tokens"]) for cycle in cycles) - 1
    for key, index in (("ArrowRight", "1"), ("End", str(last))):
        page.keyboard.press(key)
        assert single.get_attribute("data-index") == focused.get_attribute("data-index") == index
    assert focused.get_attribute("aria-describedby") == "popup"
    page.keyboard.press("Escape")
    page.locator(f"{TOKENS}.recovered").first.hover()
    cycle = next(cycle for cycle in cycles if cycle["rejected"])
    rejected = visible(cycle["texts"][str(cycle["rejected"]["id"])])
    for words in (rejected, "norm(max(0, p − q))", "≥ p/q"):
        assert words in text_of(page, "#popup")
    page.keyboard.press("Escape")


def temperature_and_top_p_change_the_bars(page):
    def widths():
        bars = page.locator("#distribution .bar-p")
        return bars.evaluate_all("all => all.map((bar) => parseFloat(bar.style.width))")

    as_sent = widths()
    set_slider(page, "heat", 0.05)
    cold = widths()
    assert cold != as_sent and max(cold) == pytest.approx(sum(cold), rel=0.05)  # nearly greedy
    assert "Worked out here" in text_of(page, "#distribution .note")
    set_slider(page, "heat", 2)
    assert max(widths()) < max(cold)
    set_slider(page, "nucleus", 0.05)
    assert sum(width > 1 for width in widths()) == 1
    set_slider(page, "heat", 0.8)
    set_slider(page, "nucleus", 1)
    assert widths() == as_sent and "as the server had them" in text_of(page, "#distribution .note")


WHO = r"Cycle \d+: (ngram|suffix|mtp|draft_model) proposed"
WAYS = [  # what is asked for, the token that is looked at, and what is said of it where
    ({"drafter": "draft_model"}, "accepted", "#verdict", "target’s best is the draft, “.*”: kept"),
    ({"drafter": "draft_model"}, "recovered", "#verdict", "rejected"),
    ({"drafter": "draft_model"}, "recovered", "#distribution .note", "there is no u"),
    ({"drafter": "auto"}, "accepted", "#cycle-says", WHO),
    ({"drafter": "none"}, "bonus", "#verdict", r"Nothing was drafted\."),
    ({"temperature": 0.5}, "accepted", "#distribution .note", "This drafter draws nothing"),
    ({"temperature": 0.5}, "accepted", "#verdict", "/ 1 ="),  # all of its q is on the draft
]


def test_who_drafted_and_what_decided_is_said_of_every_way(page):
    asked = None
    for fields, kind, place, words in WAYS:
        if asked != fields:
            asked = fields
            defaults = {"temperature": 0, "seed": 1, "verification": "rejection"}
            run(page, **COLOURS | defaults | fields)
        page.locator(f"{TOKENS}.{kind}").nth(-1).click()
        assert re.search(words, text_of(page, place)), words
        bars = counts(page, "#distribution input", "#distribution .bar-q")
        assert (bars == [0, 0]) == (fields.get("temperature", 0) == 0)
        shown = text_of(page, "#cycle-says") + text_of(page, "#picture")
        assert fields.get("drafter") != "none" or "bonus" not in shown


# ------------------------------------------------------------------------------ race and what if

FEW = {"max_tokens": 12}


def comparison_of(port, **changes):
    """What the server tells of a short race, but for these changes."""
    return generate(port, **COLOURS | FEW, compare=True)[1]["compare"] | changes


def test_a_race_shows_measured_and_predicted_and_says_what_it_was(page, port):
    """And What if? has its place for it, however large."""
    run(page, "#race", **COLOURS)
    ours, theirs = (text_of(page, lane) for lane in LANES)
    assert ours == theirs == text_of(page, "#text .tokens") != ""
    says = page.locator("#race-says")
    busy = r"( \(disturbed: [^)]*\))?"  # as the machine may be
    for words in (
        "^Medians of three runs.",
        "Speculative decoding was (about as fast as|faster than|slower than)",
        rf"Measured speed-up \d+\.\d\d×{busy}, predicted \d+\.\d\d×",
        "identical, token for token",
    ):
        assert re.search(words, says.text_content())
    assert text_of(page, "#lane-plain .counts") == "40 tokens · 39 passes"
    assert re.match(r"40 tokens · [12]?\d passes", text_of(page, "#lane-speculative .counts"))
    assert text_of(page, "#chart-race").count("ms per token") == 2
    words = says.locator(".word")
    assert words.all_text_contents() == ["α", "c", "t_verify"]
    words.last.focus()
    assert explains(page, "t_verify, the time")
    assert "as fast as plain decoding in that race" in text_of(page, "#measured")
    run(page, "#race", **COLOURS | FEW | {"drafter": "none"})
    assert re.match("Nothing was drafted, so this was no race[^×]*$", says.text_content())
    assert counts(page, "#chart-race .row") == [0]
    run(page, "#race", **SAMPLED | FEW | {"verification": "rejection"})
    assert "not compared" in says.text_content()

    cycles = [event(0, [("a", "bonus")])]
    costs = {"alpha": 0.62, "c": 4.2, "t_verify": 2.5}
    slow = comparison_of(port, costs=costs, disturbed=True, spread=[0.6, 1.4])
    mock(page, stream_of(cycles, [answer_of(cycles, compare=slow)]))
    run(page, "#race")
    for words in ("disturbed: the machine was busy, 3 runs gave 0.60× to 1.40×",
                  "busy or computes slowly just now", "2.50× the time of one"):  # fmt: skip
        assert words in says.text_content()
    assert "the last race, disturbed: " in text_of(page, "#measured")
    show(page, "whatif")
    page.get_by_role("button", name="Take draft_model").last.click()
    assert [text_of(page, f"#{name}-value") for name in ("alpha", "cost")] == [".62", "4.20"]


def test_a_race_tells_how_far_it_has_come_and_is_replayed_on_one_clock(open_page, port):
    """By the server's times: at half the slower lane's neither lane shows what came later."""
    page, held = open_page(reduced_motion="no-preference"), []
    by_hand = "window.frames = []; requestAnimationFrame = (draw) => window.frames.push(draw);"
    page.add_init_script(by_hand)
    page.reload()
    wait_until_ready(page)
    fast = [event(0, [("a", "bonus")]), event(1, [("b", "accepted"), ("c", "bonus")], 5)]
    slow = [{"plain": event(i, [(text, "bonus")], 4 + i)} for i, text in enumerate("abc")]

    def frame(now):
        draw = """(now) => {
            performance.now = () => now;
            window.frames.splice(0).forEach((draw) => draw(now));
        }"""
        page.evaluate(draw, now)

    page.route("**/generate", lambda route: held.append(route))
    with page.expect_request("**/generate"):
        page.locator("#race").click()
    page.locator("#race-pace", has_text="Speculative decoding has written 0 tokens").wait_for()
    assert "three times each" in text_of(page, "#race-says")
    answer = answer_of(fast, compare=comparison_of(port))
    held[0].fulfill(**stream_of(fast, [*slow, answer]))
    until(lambda: frame(0) or page.locator("#race-again").is_visible())
    assert "350 times slower" in text_of(page, "#race-pace")  # 20 ms in seven seconds
    seen = []
    for now in (0, 3400, 3600, 7100):
        frame(now)
        seen.append([text_of(page, lane) for lane in LANES])
    assert seen == [["a", "a"], ["a", "a"], ["abc", "ab"], ["abc", "abc"]]
    assert text_of(page, "#race-clock") == "20 ms"


# ------------------------------------------------------------------------- experiments and words


def test_a_named_drafter_drafts_k_tokens_and_with_auto_the_controller_decides(open_page, chatting):
    """K is what the server was started with, whatever was asked since."""
    generate(chatting, **COLOURS, num_speculative_tokens=12, fixed_k=True)
    page = open_page(chatting)
    assert page.input_value("#num_speculative_tokens") == "3"
    sent = posted(page)
    says = {"ngram": "You named the drafter", "none": "It decided nothing", "auto": "Cycle "}
    for drafter, words in says.items():
        run(page, **SAMPLED | {"drafter": drafter, "max_tokens": 12})
        show(page, "statistics")
        assert text_of(page, "#controller-says").startswith(words)
    assert [body.get("fixed_k", False) for body in sent] == [True, True, False]
    run(page, **COLOURS | {"num_speculative_tokens": 5})  # What if? knows what it has timed
    page.locator("#measured", has_text="all runs of ngram so far").wait_for(state="attached")


def form_of(page):
    fields = page.locator("#request :is(input, select, textarea)")
    return fields.evaluate_all("all => all.map((field) => [field.id, field.value, field.checked])")


def try_out(page, experiment, words, choice=-1):
    """Make this choice of an experiment, and wait for what it tells."""
    show(page, "try")
    page.get_by_role("button", name=experiment).click()
    page.locator("#experiment .buttons button").nth(choice).click()
    page.locator("#experiment .says", has_text=re.compile(words)).wait_for()


def test_an_experiment_asks_for_a_prediction_runs_and_tells_what_came(page, port):
    fill(page, **SAMPLED, verification="rejection")
    before = form_of(page)
    try_out(page, "Colours, then a story", "You predicted “a story”", 1)
    said = [float(found) for found in re.findall(r"\d+\.\d\d", text_of(page, "#experiment .says"))]
    story = json.loads(call(port, "GET", "/prompts")[2])["prompts"]["hard_story"]
    for shown, prompt in zip(said, (COLOURS["prompt"], story), strict=True):
        fields = {"drafter": "ngram", "num_speculative_tokens": 5, "max_tokens": 48}
        metrics = generate(port, prompt=prompt, **fields)[1]["metrics"]["speculative_decoding"]
        assert shown == pytest.approx(metrics["tokens_per_pass"], abs=0.006)
    look = page.get_by_role("button", name="Look at its cycles")
    look.click()
    assert "1 of" in text_of(page, "#cycle-count")
    assert text_of(page, "#text .prompt") == COLOURS["prompt"]
    assert f"{said[0]:.2f} tokens per pass" in text_of(page, "#status")  # of the run that is shown
    assert form_of(page) == before  # the reader's own request is not lost
    try_out(page, "Sample", "The same text, in ")
    try_out(page, "Read the cache", "it was “by those kept and one”")
    look.click()
    # Of the cycle in the cache some drafts were kept, and one rejected.
    kept, rejected = counts(page, "#picture .slot.accepted", "#picture .slot.rejected")
    assert kept > 0 and rejected == 1


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
        cycles = [event(0, [("a", "bonus")]), event(1, [("b", "bonus")], 5, ms=ms)]
        route.fulfill(**stream_of(cycles))

    page.route("**/generate", answer)
    for slow, choice, words in MEDIANS:
        asked.clear()
        ms_of.update(zip((2, 6, 14), slow, strict=True))
        try_out(page, "Raise K", words, choice)
        assert asked == [2, 6, 14] * 3
    try_out(page, "See it lose", "As you predicted.*more than the passes that they saved")


WHAT_IF = [  # what is moved, and what is said then
    ({"alpha": 0.5, "whatif-k": 1, "cost": 0.5, "row-cost": 0},
     "K=1: expected 1.00×, t_verify 1.00, it pays from α .50"),
    # 2.71 tokens in 2 · .05 + 1 + 2 · .1 passes
    ({"alpha": 0.9, "whatif-k": 2, "cost": 0.05, "row-cost": 0.1},
     "K=2: expected 2.08×, t_verify 1.20"),
    ({"whatif-k": 0}, "K=0: expected 1.00×, t_verify 1.00"),
]  # fmt: skip


def what_if_draws_the_formulas_curve_and_is_1_at_k_0(page):
    show(page, "whatif")
    drawn = set()
    for moved, words in WHAT_IF:
        for name, value in moved.items():
            set_slider(page, name, value)
        assert text_of(page, "#whatif-says").startswith(words)
        drawn.add(page.locator("#chart-whatif .ring").get_attribute("cx"))
        drawn.add(page.locator("#chart-whatif .curve:not(.thin)").get_attribute("points"))
    assert len(drawn) == 3 + 2  # the last move is along the curve
    page.locator("#whatif-k").press("ArrowRight")
    assert text_of(page, "#whatif-k-value") == "1"
    assert counts(page, "#chart-whatif .break-even", "#chart-whatif .dot") == [1, 17]


def test_the_model_card_the_drafters_and_what_if_have_their_figures(page, port):
    """And a model without a template has no chat."""
    assert page.locator("#chat-field").is_hidden() and page.locator("#tab-chat").is_hidden()
    assert page.locator("#demo-prompt").input_value() == "code_function"
    assert counts(page, "#demo-prompt option[value^=chat]") == [0]
    target, costs = health(port)["target"], story_of(port)["costs"]
    for value in (f"{target['parameters'] / 1e6:.1f} M", target["dtype"], "to the bit",
                  "by the rule of rejection only the distribution is"):  # fmt: skip
        assert value in text_of(page, "#model-card")
    for name in ("ngram", "mtp", "draft_model"):
        words = page.locator("#drafters li", has_text=name).first.text_content()
        assert "for each guess" in words and "c = " in words
    read = costs["draft_model"]["parameters"] * target["weight_bytes"] / target["parameters"]
    assert f"A step reads {read / 1e6:.1f} MB" in words
    what_if_draws_the_formulas_curve_and_is_1_at_k_0(page)


# ------------------------------------------------------------------------------------------ chat


def test_a_conversation_has_turns_a_template_figures_and_cycles(open_page, chatting):
    """So has a prompt, unless the box is not ticked; one of the kind chat is offered first."""
    page = open_page(chatting)
    assert page.locator("#demo-prompt").input_value().startswith("chat_")
    sent = posted(page)
    show(page, "chat")
    page.fill("#max_tokens", "6")
    page.fill("#system", "Be brief.")
    answers = page.locator(".turn.assistant")
    for i, message in enumerate(("Hello", "And now?")):
        say(page, message)
        answers.nth(i).locator(".note", has_text="tokens per pass").wait_for()
    first, second = (body["prompt"] for body in sent)
    assert [turn["role"] for turn in second] == ["system", "user", "assistant", "user"]
    assert second[:2] == first and second[3]["content"] == "And now?"
    assert second[2]["content"] in answers.first.locator("[role=listbox]").text_content()
    read = answers.last.locator("pre").text_content()
    assert all(turn["content"] in read for turn in second[:2]) and len(read) > len("Be brief.")
    answers.locator(".token").first.click()
    assert text_of(page, "#cycle-count").startswith("0 of")
    assert page.locator("#view-chat #picture").is_visible()
    show(page, "text")
    for is_chat in (True, False):
        fill(page, prompt="Hi", max_tokens=2)
        page.set_checked("#chat", is_chat)
        run(page)
        assert sent[-1].get("chat", False) is is_chat
    show(page, "chat")
    page.locator(".turn summary").last.click()
    assert violations(page) == []


# ---------------------------------------------------------------------------------------- states

UNSENT = [("temperature", "abc", "“abc” is not a number"), ("seed", "9" * 20, "53 bits"),
          ("num_speculative_tokens", "0x", "“0x” is not a number"),
          ("prompt", "", "Write a prompt first")]  # fmt: skip


def test_a_bad_value_is_told_and_its_field_marked_until_it_is_corrected(open_page, complaints):
    """The button is hit although the field that the reader comes from shrinks."""
    page = open_page(viewport=NARROW)
    sent = posted(page)
    fill(page, **COLOURS)
    in_the_servers_words = ("num_speculative_tokens", "99", "K must be an integer from 0 to 16")
    for name, value, words in (*UNSENT, in_the_servers_words):
        fill(page, **{name: value})
        refuse(page, words)
        field = page.locator(f"#{name}")
        assert field.get_attribute("aria-invalid") == "true" and field.is_visible()
        assert bool(sent) == (value == "99")
        fill(page, **{name: "1"})
        assert counts(page, "#error p", "[aria-invalid=true]") == [0, 0]  # as soon as it is right
    assert page.locator("#error").get_attribute("role") == "alert"
    expect_failed_load(complaints, "400")
    run(page)


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
        mock(page, stream_of([event(0, [("a", "bonus")])], end))
        refuse(page, words)
        assert text_of(page, "#text .tokens") == "a"
    both = {"id": 0, "score": 1.0, "p": 0.5, "q": 0.4}, {"id": 1, "score": 0.9, "p": 0.4, "q": 0.6}
    told = {"controller": ATTACK, "distributions": [both, both]}
    guessed = [(ATTACK, "accepted"), (ATTACK, "bonus")]
    cycles = [event(0, [(ATTACK, "bonus")]), event(1, guessed, 5, **told)]
    mock(page, stream_of(cycles, [answer_of(cycles, warnings=[ATTACK])]))
    run(page, prompt=ATTACK)
    page.locator("#picture button.slot").first.click()
    page.locator(TOKENS).nth(1).hover()
    assert text_of(page, "#text .prompt") == ATTACK
    assert text_of(page, "#text .tokens") == ATTACK * 3
    show(page, "statistics")
    assert ATTACK in text_of(page, "#warnings") and ATTACK in text_of(page, "#controller-says")
    for status, message, headers, words in REFUSALS:
        error = {"error": {"message": message, "type": "x", "param": None, "code": None}}
        mock(page, {"status": status, "json": error, "headers": headers})
        refuse(page, re.compile(words))
        expect_failed_load(complaints, str(status))
    assert page.evaluate("window.hacked") is None
    assert counts(page, "img", "body script") == [0, 0]


def test_axe_finds_nothing_wrong_with_any_view(page):
    """Wide and narrow; nothing but the colours depends on the scheme."""
    run(page, "#race", **SAMPLED | {"max_tokens": 40})
    for size in (WIDE, NARROW):
        page.set_viewport_size(size)
        fill(page, temperature="abc")
        page.locator("#run").click()
        for view in VIEWS:
            show(page, view)
            if view == "text":
                page.locator(f"{TOKENS}.recovered").first.click()
                page.locator(f"{TOKENS}.bonus").first.focus()
            assert violations(page) == [], (view, size)
            page.emulate_media(color_scheme="dark")
            assert violations(page, runOnly=["color-contrast"]) == [], (view, size)
            page.emulate_media(color_scheme="light")


# ------------------------------------------------------------------------- another engine


def test_another_engine_s_key_is_asked_for_and_what_it_does_not_tell_is_said_and_not_drawn(
    open_page, complaints
):
    """Of a recorded vLLM, which gives one of its answers whatever is asked; keys stay in memory."""
    with replaying() as replay, serving("--engine", replay.url, "--api-key", "secret") as server:
        replay.is_lenient = True
        page = open_page(server.port, is_ready=False)
        page.locator("#story-label", has_text="vllm 0.32.0 runs this model").wait_for()
        asked, held = posted(page), []
        page.fill("#prompt", "x")
        assert not page.locator("#key").is_visible()
        page.locator("#run").click()
        page.locator("#key").wait_for()
        # With a key the page asks anew, and gets the last answer after the run.
        page.route("**/prompts", lambda route: held.append(route))
        run(page, prompt=COLOUR_LIST, key="secret")
        assert "prompt=" in page.url and "secret" not in page.url
        until(lambda: page.title() and held)
        with page.expect_response("**/prompts"):
            held.pop().continue_()
        page.wait_for_timeout(200)  # it might repeat the run that its address tells of
        assert [body["prompt"] for body in asked] == ["x", COLOUR_LIST]
        assert counts(page, "#error p") == [0]
        kept = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
        assert kept == [0, 0, ""]
        expect_failed_load(complaints, "401")
        for name in ("#race", "#step", "#drafter", "#tab-race", "#tab-try", "#tab-whatif"):
            assert not page.locator(name).is_visible()
        page.locator("#run").click()  # the second text takes the place of the first
        wait_for_status(page, "Finished (length): 6 tokens, 5 of 5 drafted ones accepted")
        text = page.locator("#text").inner_text()
        assert text.endswith(" hi\nassistant") and text.count("assistant") == 1
        assert "It does not tell p, q, u" in text_of(page, "#cycle-says")
        show(page, "statistics")
        assert text_of(page, "[data-figure='draft acceptance rate']") == "1.00"
        assert "vllm" in text_of(page, "#model-card")
        show(page, "chat")
        say(page, "hi")
        page.locator(".answer", has_text="hi").wait_for()
        wait_for_status(page, "Finished")
        sent = [body for _, body, _ in replay.seen if body and "temperature" in body]
        assert len(sent) == 3 and "messages" in sent[-1]
        page.close()
