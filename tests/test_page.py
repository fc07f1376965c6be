"""The teaching page, in a real browser against the real server process.

    python -m pytest tests/test_page.py    needs playwright and chromium

What its files alone can tell is in test_operations.py. No test may leave an error on the browser's
console, nor a violation of the page's policy.
"""

import json
import re
import shutil

import pytest
from server import ENDLESS as COUNTING
from server import Gate, generate, serving, until, wait_until_idle, wait_until_running

pytestmark = pytest.mark.browser

SAMPLED = {"prompt": "def read(path):", "drafter": "draft_model", "num_speculative_tokens": 4}
SAMPLED |= {"temperature": 0.8, "seed": 1, "max_tokens": 60}
COLOURS = {"prompt": "red, green, blue, red, green,", "drafter": "ngram", "max_tokens": 40}
ENDLESS = {"prompt": COUNTING["prompt"], "num_speculative_tokens": 0, "max_tokens": 1900}


# ------------------------------------------------------------------------------------ fixtures


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium")
    if program is None:
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


@pytest.fixture
def complaints():
    """What the browser's console says in anger; a test that provokes some takes them out."""
    return []


@pytest.fixture
def open_page(browser, port, complaints):
    """Opens the page, of a server of one's own if need be; at the end nothing must be wrong."""
    contexts = []

    def open_one(at=port, is_ready=True, **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda said: said.type == "error" and complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.add_init_script(
            """document.addEventListener("securitypolicyviolation",
                   (event) => console.error("policy: " + event.violatedDirective));"""
        )
        page.goto(f"http://127.0.0.1:{at}/")
        if is_ready:
            page.locator("#demo-prompt optgroup").first.wait_for(state="attached")
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def page(open_page):
    return open_page()


@pytest.fixture
def adaptive_page(open_page):
    """Of a server whose controller chooses K, and measures what it costs."""
    with serving("--no-bitwise") as server:
        yield open_page(server.port)


def expect_failed_load(complaints, status):
    """Take out what the browser says of an answer that the test asked for."""
    wanted = [text for text in complaints if "Failed to load resource" in text]
    assert wanted and all(status in text for text in wanted)
    complaints[:] = [text for text in complaints if text not in wanted]


def test_the_page_shows_that_the_model_is_loading_and_then_reloads_itself(
    open_page, complaints, tmp_path, tiny_folder
):
    gate = Gate(tmp_path, tiny_folder("llama"))
    gate.shut("load")
    with serving(*gate.arguments, wait=False) as server:
        until(lambda: "until then" in server.log())
        page = open_page(server.port, is_ready=False)
        said = page.locator("#server")
        said.get_by_text("The server loads llama").wait_for()
        assert "reading the weights" in said.inner_text()
        gate.open("load")
        page.locator("#demo-prompt optgroup").first.wait_for(state="attached")
        assert said.inner_text().startswith("Target: llama")
    expect_failed_load(complaints, "503")


def fill(page, **fields):
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


def text_of(page, selector):
    return page.locator(selector).text_content()


def counts(page, *selectors):
    return [page.locator(selector).count() for selector in selectors]


def event(step, tokens, before, num_prompt=5, **more):
    """One cycle's event as the server would send it; `tokens` are (text, kind)."""
    drafted = [i for i, (_, kind) in enumerate(tokens) if kind == "accepted"]
    ids = list(range(len(tokens)))
    cached = [num_prompt] * 2 if step == 0 else [before + 1 + len(drafted)] * 2
    return {
        "step": step,
        "proposals": drafted,
        "accepted_count": len(drafted),
        "emitted_count": len(tokens),
        "tokens": [
            {"id": i, "kind": kind, "p": 0.5, "q": None if kind == "bonus" else 0.4, "u": 0.25}
            for i, (_, kind) in enumerate(tokens)
        ],
        "rejected": None,
        "cached": cached,
        "target_argmax": ids,
        "target_top": [],
        "texts": {str(i): text for i, (text, _) in enumerate(tokens)},
        "ms": {"draft": 0.5, "verify": 1.0, "other": 0.1},
        "text": "".join(text for text, _ in tokens),
    } | more


def answer_of(cycles):
    text = "".join(cycle["text"] for cycle in cycles)
    num_tokens = sum(len(cycle["tokens"]) for cycle in cycles)
    return {
        "text": text,
        "finish_reason": "length",
        "seed": 1,
        "warnings": [],
        "usage": {"completion_tokens": num_tokens},
        "metrics": {"speculative_decoding": {"num_draft_tokens": 1, "target_passes": 1}},
        "timings": {"predicted_ms": 1.0, "predicted_n": num_tokens, "draft_ms": 1, "verify_ms": 1},
    }


def mock(page, cycles, end=None):
    """/generate answers with `cycles` at once, then with `end` (default: the answer and [DONE])."""
    end = [answer_of(cycles)] if end is None else end
    body = "".join(f"data: {json.dumps(data)}\n\n" for data in [*cycles, *end])
    body += "data: [DONE]\n\n" if end else ""
    kind = "text/event-stream"
    page.route("**/generate", lambda route: route.fulfill(body=body, content_type=kind))


# --------------------------------------------------------------------------------------- claims


def test_a_run_shows_the_answers_text_with_each_token_marked_by_its_origin(page, port):
    """In the text and in the charts."""
    _, body = generate(port, **SAMPLED, trace=True)
    run(page, **SAMPLED)
    assert text_of(page, "#tokens") == body["text"]
    assert text_of(page, "#prompt-text") == SAMPLED["prompt"]
    metrics = body["metrics"]["speculative_decoding"]
    shown = counts(page, *(f"#tokens .token.{k}" for k in ("accepted", "recovered", "bonus")))
    names = ("accepted_draft", "recovered", "bonus")
    assert shown == [metrics[f"num_{name}_tokens"] for name in names]
    assert min(shown) > 0
    assert text_of(page, "[data-figure=passes]") == str(metrics["target_passes"])
    tokens_per_pass = f"{metrics['tokens_per_pass']:.2f}"
    assert text_of(page, "[data-figure=tokensPerPass]") == tokens_per_pass
    # Origins differ without colour: in the underline's style.
    styles = page.evaluate(
        """["accepted", "recovered", "bonus"].map((kind) =>
            getComputedStyle(document.querySelector(`#tokens .${kind}`)).borderBottomStyle)"""
    )
    assert styles == ["solid", "dashed", "double"]
    accepted = [cycle["accepted_count"] for cycle in body["trace"][1:]]
    drafted = [len(cycle["proposals"]) for cycle in body["trace"][1:]]
    bars = ["#chart-accepted .accepted-bar", "#chart-accepted .drafted-bar"]
    assert counts(page, *bars) == [sum(map(bool, accepted)), sum(map(bool, drafted))]
    assert counts(page, "#chart-positions .diamond") == [max(drafted)]
    assert text_of(page, "#time-split").count("ms") == 3


def test_characters_of_several_tokens_and_special_tokens_keep_the_text_whole(page):
    cycles = [
        event(0, [("caf", "bonus")], 0),
        event(1, [("\ufffd", "accepted"), ("\ufffd", "recovered")], 5, text="é"),
        event(2, [("!", "accepted"), ("<|end|>", "bonus")], 7, text="!"),
    ]
    mock(page, cycles)
    run(page)
    assert text_of(page, "#tokens") == "café!<|end|>"  # which has no text but its name
    assert counts(page, "#tokens .token") == [5]


def test_step_advances_exactly_one_cycle_and_run_on_shows_the_rest(page, port):
    _, body = generate(port, **SAMPLED, trace=True)
    fill(page, **SAMPLED)
    num_tokens = 0
    for step, cycle in enumerate(body["trace"][:6]):
        page.locator("#step").click()
        num_tokens += cycle["emitted_count"]
        page.locator("#cycle-count", has_text=f"{step} of {step}").wait_for()
        assert counts(page, "#tokens .token") == [num_tokens]
        verified, kept = cycle["cached"]
        slots = "#draft .accepted.slot", "#draft .rejected.slot", "#cache .tail"
        rejected = cycle["rejected"] is not None
        assert counts(page, *slots) == [cycle["accepted_count"], rejected, verified - kept]
        assert "Finished" not in text_of(page, "#status")
    page.locator("#run", has_text="Run on").click()
    wait_for_status(page, "Finished")
    assert text_of(page, "#tokens") == body["text"]


def test_a_token_and_the_slider_lead_back_to_its_cycle(page, port):
    _, body = generate(port, **SAMPLED, trace=True)
    run(page, **SAMPLED)
    last = len(body["trace"]) - 1
    assert text_of(page, "#cycle-count") == f"{last} of {last}"
    page.locator("#tokens .token").nth(1).click()
    assert text_of(page, "#cycle-count") == f"1 of {last}"
    page.locator("#cycle-number").focus()
    page.keyboard.press("ArrowRight")
    assert text_of(page, "#cycle-count") == f"2 of {last}"
    assert "Cycle 2:" in text_of(page, "#cycle-says")


def test_stop_frees_the_servers_slot(page, port):
    fill(page, **ENDLESS)
    page.locator("#run").click()
    page.locator("#tokens .token").first.wait_for()
    wait_until_running(port)
    assert text_of(page, "#status") == "Running."  # it streams: tokens come before the end
    page.locator("#stop").click()
    wait_for_status(page, "Stopped")
    wait_until_idle(port)
    (shown,) = counts(page, "#tokens .token")
    assert 0 < shown < ENDLESS["max_tokens"]
    run(page, **COLOURS | {"num_speculative_tokens": 5})


def test_a_race_ends_with_equal_texts_and_shows_measured_and_predicted(page):
    run(page, "#race", **COLOURS)
    ours, theirs = (text_of(page, f"#lane-{lane} .text") for lane in ("speculative", "plain"))
    assert ours == theirs == text_of(page, "#tokens") != ""
    says = text_of(page, "#race-says")
    busy = r"( \(disturbed: [^)]*\))?"  # as the machine may be
    assert re.search(rf"Measured speed-up \d+\.\d\d×{busy}, predicted \d+\.\d\d×", says)
    assert "identical, token for token" in says
    lanes = [f"#lane-{lane} [data-count=tokens]" for lane in ("speculative", "plain")]
    assert [text_of(page, lane) for lane in lanes] == ["40", "40"]
    assert text_of(page, "#lane-plain [data-count=passes]") == "39"
    assert int(text_of(page, "#lane-speculative [data-count=passes]")) < 39
    assert counts(page, "#chart-race rect", "#chart-whatif .measured") == [2, 1]
    assert "the last race" in text_of(page, "#measured-says")


def test_a_race_that_only_a_busy_machine_explains_is_called_disturbed(page):
    """The answer's own word is shown, with the spread; and What if? says so, too."""

    def disturb(route):
        response = route.fetch()
        *events, answer, done, rest = response.text().split("\n\n")
        body = json.loads(answer.removeprefix("data: "))
        body["compare"] |= {"disturbed": True, "spread": [0.6, 1.4]}
        events += [f"data: {json.dumps(body)}", done, rest]
        route.fulfill(response=response, body="\n\n".join(events))

    page.route("**/generate", disturb)
    run(page, "#race", **COLOURS)
    says = text_of(page, "#race-says")
    assert "disturbed: the machine was busy, 3 runs gave 0.60× to 1.40×" in says
    assert "the last race, disturbed: the machine was busy" in text_of(page, "#measured-says")


def test_a_race_compares_sampled_texts_unless_they_are_verified_by_rejection(page):
    fields = SAMPLED | {"max_tokens": 12}
    run(page, "#race", **fields)
    assert "identical, token for token" in text_of(page, "#race-says")
    run(page, "#race", **fields, verification="rejection")
    assert "not compared" in text_of(page, "#race-says")


def refused_words(page, body):
    """What the first recovered token's card says, which names what was rejected in its place."""
    page.locator("#tokens .token.recovered").first.hover()
    words = text_of(page, "#token-card")
    cycle = next(cycle for cycle in body["trace"] if cycle["rejected"])
    refused = cycle["texts"][str(cycle["rejected"]["id"])]
    assert refused.replace(" ", "␣").replace("\n", "↵") in words
    return words


def test_pointing_at_a_token_or_focusing_it_shows_p_q_and_u(page, port):
    _, body = generate(port, **SAMPLED, verification="rejection", trace=True)
    run(page, **SAMPLED, verification="rejection")
    tokens = [token for cycle in body["trace"] for token in cycle["tokens"]]
    plain = [all(0.001 < (t[name] or 0) < 0.999 for name in "pqu") for t in tokens]
    index = next(i for i, t in enumerate(tokens) if t["kind"] == "accepted" and plain[i])
    page.locator("#tokens .token").nth(index).hover()
    card = page.locator("#token-card")
    card.wait_for()
    words = card.text_content()
    assert re.search(r"p target.*q drafter.*u uniform", words)
    for name in "pqu":
        assert f"{tokens[index][name]:.3f}".removeprefix("0") in words
    assert "accepted" in words and "< p/q" in words
    page.keyboard.press("Escape")
    card.wait_for(state="hidden")

    page.mouse.move(0, 0)
    assert counts(page, "#tokens [tabindex='0']") == [1]  # a single tab stop
    page.locator("#tokens [tabindex='0']").focus()
    assert "prefill" in card.text_content().lower() and card.is_visible()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.index") == "1"
    assert page.locator("#tokens [tabindex='0']").get_attribute("data-index") == "1"
    assert page.locator(":focus").get_attribute("aria-describedby") == "token-card"
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.dataset.index") == "59"
    page.keyboard.press("Escape")
    card.wait_for(state="hidden")
    words = refused_words(page, body)
    assert "norm(max(0, p − q))" in words and "≥ p/q" in words


def test_a_coupled_token_shows_its_score_the_noise_and_the_runner_up(page, port):
    _, body = generate(port, **SAMPLED, trace=True)
    run(page, **SAMPLED)
    tokens = [(cycle, i) for cycle in body["trace"] for i in range(len(cycle["tokens"]))]
    kinds = [cycle["tokens"][i]["kind"] for cycle, i in tokens]
    for kind in ("accepted", "recovered", "bonus"):
        index = kinds.index(kind)
        cycle, i = tokens[index]
        token, (_, second, *_) = cycle["tokens"][i], cycle["target_top"][i]
        page.locator("#tokens .token").nth(index).hover()
        card = page.locator("#token-card", has_text=f"{kind}, cycle {cycle['step']}")
        words = card.text_content()
        shown = [token["score"], token["total"], second["total"]]
        assert all(f"{value:z.3f}".replace("-", "−") in words for value in shown)
        assert "runner-up" in words
        assert "the target’s own choice" in words and "p/q" not in words
    assert "p/q" not in refused_words(page, body)
    # A greedy token has its score alone.
    page.mouse.move(0, 0)
    run(page, **COLOURS, temperature=0)
    page.locator("#tokens .token.accepted").first.hover()
    words = text_of(page, "#token-card")
    assert "target’s score" in words and "noise" not in words


def test_a_bad_value_is_told_in_the_servers_words_and_its_field_is_marked(page, complaints):
    fill(page, **COLOURS | {"num_speculative_tokens": 99})
    page.locator("#run").click()
    alert = page.locator("#error p")
    alert.wait_for()
    assert "num_speculative_tokens must be an integer from 0 to 16" in alert.text_content()
    assert page.locator("#error").get_attribute("role") == "alert"
    field = page.locator("#num_speculative_tokens")
    assert field.get_attribute("aria-invalid") == "true"
    expect_failed_load(complaints, "400")
    run(page, num_speculative_tokens=4)
    assert counts(page, "#error p") == [0] and field.get_attribute("aria-invalid") == "false"


def test_a_server_that_goes_away_is_told_in_the_middle_and_after(open_page, complaints):
    with serving("--no-bitwise") as server:
        page = open_page(server.port)
        fill(page, **ENDLESS)
        page.locator("#run").click()
        page.locator("#tokens .token").first.wait_for()
    page.locator("#error", has_text="broke off").wait_for()
    assert counts(page, "#tokens .token")[0] > 0
    page.locator("#run").click()
    page.locator("#error", has_text="The server cannot be reached").wait_for()
    complaints[:] = [text for text in complaints if "ERR_" not in text]


@pytest.mark.parametrize(
    ("status", "error", "headers", "words"),
    [
        (429, "64 requests wait already", {"Retry-After": "7"}, "is busy .*Try again in 7 s"),
        (503, "the server is shutting down", {}, "cannot do this now: the server is shutting down"),
        (401, "a key is needed", {}, "asks for an API key"),
    ],
)
def test_refusals_are_told_in_words(page, complaints, status, error, headers, words):
    body = json.dumps({"error": {"message": error, "type": "x", "param": None, "code": None}})
    answer = {"status": status, "body": body, "headers": headers}
    page.route("**/generate", lambda route: route.fulfill(**answer))
    page.locator("#run").click()
    page.locator("#error", has_text=re.compile(words)).wait_for()
    expect_failed_load(complaints, str(status))


def test_an_api_key_is_asked_for_sent_and_kept_in_memory_only(page, complaints):
    sent = []

    def guard(route):
        sent.append(route.request.headers.get("authorization"))
        if sent[-1] == "Bearer secret":
            route.continue_()
        else:
            route.fulfill(status=401, body=json.dumps({"error": {"message": "no key"}}))

    page.route("**/generate", guard)
    assert not page.locator("#key").is_visible()
    page.locator("#run").click()
    page.locator("#key").wait_for()
    run(page, **COLOURS | {"key": "secret"})
    assert sent == [None, "Bearer secret"] and counts(page, "#error p") == [0]
    kept = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
    assert kept == [0, 0, ""]
    expect_failed_load(complaints, "401")


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ([{"error": {"message": "the engine failed: out of memory"}}], "out of memory"),
        ([], "broke off"),
    ],
)
def test_an_error_in_the_middle_of_a_stream_is_told_behind_its_tokens(page, end, words):
    mock(page, [event(0, [("a", "bonus")], 0)], end)
    page.locator("#run").click()
    page.locator("#error", has_text=words).wait_for()
    assert text_of(page, "#tokens") == "a"


def set_slider(page, name, value):
    page.locator(f"#{name}").evaluate(
        """(slider, value) => {
            slider.value = value;
            slider.dispatchEvent(new Event("input"));
        }""",
        value,
    )


def test_what_if_draws_the_formulas_curve_and_moves_with_the_sliders(page):
    for name, value in {"alpha": 0.5, "whatif-k": 1, "cost": 0.5, "verify-cost": 1}.items():
        set_slider(page, name, value)
    assert "K=1: expected 1.00×, it pays from α .50 on" in text_of(page, "#whatif-says")
    assert counts(page, "#chart-whatif .break-even", "#chart-whatif .dot") == [1, 17]

    def curve():
        return page.locator("#chart-whatif .curve").get_attribute("points")

    for name, value in {"alpha": 0.9, "cost": 0.05, "verify-cost": 1.2}.items():
        before = curve()
        set_slider(page, name, value)
        assert curve() != before
    ring = page.locator("#chart-whatif .ring").get_attribute("cx")
    page.locator("#whatif-k").focus()
    page.keyboard.press("ArrowRight")
    assert text_of(page, "#whatif-k-value") == "2"
    assert page.locator("#chart-whatif .ring").get_attribute("cx") != ring
    assert text_of(page, "#whatif-says").startswith("K=2: expected 2.08×")


def test_what_if_takes_what_the_last_run_measured(adaptive_page):
    page = adaptive_page
    run(page, **COLOURS | {"num_speculative_tokens": 5})
    says = page.locator("#measured-says", has_text="the last run")
    says.wait_for()
    assert counts(page, "#chart-whatif .measured") == [1]
    page.locator("#take-measured").click()
    alpha = float(re.search(r"with α ([\d.]+)", says.text_content())[1])
    assert float(text_of(page, "#alpha-value")) == pytest.approx(alpha, abs=0.011)


def test_nothing_scrolls_sideways_at_400_pixels(open_page):
    page = open_page(viewport={"width": 400, "height": 800})

    def excess():
        return page.evaluate("document.documentElement.scrollWidth - innerWidth")

    assert excess() <= 0
    run(page, **SAMPLED | {"num_speculative_tokens": 16, "prompt": "x" * 300, "max_tokens": 40})
    assert excess() <= 0
    page.locator("#tokens .token").last.focus()
    box = page.locator("#token-card").bounding_box()
    assert 0 <= box["x"] and box["x"] + box["width"] <= 400
    run(page, "#race", **COLOURS | {"max_tokens": 16})
    assert excess() <= 0


def test_2000_tokens_keep_the_page_responsive(page):
    words = [(f" word{i}", "accepted") for i in range(3)] + [(" end", "bonus")]
    cycles = [event(0, [("Start", "bonus")], 0)]
    cycles += [event(step, words, 5 + 4 * (step - 1)) for step in range(1, 501)]
    mock(page, cycles)
    page.locator("#run").click()
    set_slider(page, "alpha", 0.33)
    assert text_of(page, "#alpha-value") == ".33"
    wait_for_status(page, "Finished")
    assert counts(page, "#tokens [role=option]", "#tokens [tabindex='0']") == [2001, 1]
    assert text_of(page, "#tokens") == "".join(cycle["text"] for cycle in cycles)
    # A frame lays out the last stretch of the text, not all of it.
    stretches = page.evaluate(
        "[...document.querySelectorAll('#tokens > *')].map((stretch) => stretch.childElementCount)"
    )
    assert len(stretches) > 10 and max(stretches) < 300
    assert counts(page, "#cache .cell")[0] <= 32 + 17
    assert "more" in text_of(page, "#cache .more")


def test_markup_in_prompts_outputs_and_errors_stays_text(page, complaints):
    attack = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
    fields = COLOURS | {"prompt": attack}
    run(page, **fields)
    assert text_of(page, "#prompt-text") == attack
    cycles = [
        event(0, [(attack, "bonus")], 0),
        event(1, [(attack, "accepted"), (attack, "bonus")], 5, controller=attack),
    ]
    mock(page, cycles, [answer_of(cycles) | {"warnings": [attack]}])
    run(page)
    page.locator("#tokens .token").nth(1).hover()
    assert text_of(page, "#tokens") == attack * 3
    assert attack in text_of(page, "#warnings") and attack in text_of(page, "#controller-says")
    page.unroute("**/generate")
    body = json.dumps({"error": {"message": attack}})
    page.route("**/generate", lambda route: route.fulfill(status=400, body=body))
    page.locator("#run").click()
    page.locator("#error", has_text=attack).wait_for()
    expect_failed_load(complaints, "400")
    assert page.evaluate("window.hacked") is None
    assert counts(page, "img", "body script") == [0, 0]


CONTRAST = """(selectors) => {
    const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const shade = (colour) => {
        const [r, g, b] = parse(colour).map((v) => v / 255)
            .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const colour = getComputedStyle(at).backgroundColor;
            if (parse(colour)[3] !== 0) return colour;
        }
        return "rgb(255, 255, 255)";
    };
    return Object.fromEntries(selectors.map((selector) => {
        const element = document.querySelector(selector);
        const own = getComputedStyle(element).color;
        const [low, high] = [shade(own), shade(ground(element))].sort((a, b) => a - b);
        return [selector, (high + 0.05) / (low + 0.05)];
    }));
}"""


@pytest.mark.parametrize(("scheme", "motion"), [("light", "reduce"), ("dark", "no-preference")])
def test_text_has_contrast_and_the_truncation_is_animated_unless_less_motion_is_wanted(
    open_page, port, scheme, motion
):
    """The rejected tail ends dashed either way."""
    _, body = generate(port, **SAMPLED, trace=True)
    page = open_page(color_scheme=scheme, reduced_motion=motion)
    run(page, **SAMPLED)
    kinds = ("accepted", "recovered", "bonus")
    selectors = [f"#tokens .token.{kind}" for kind in kinds]
    selectors += "h1 figcaption .hint #run #step #prompt-text #status .formula .verdict".split()
    ratios = page.evaluate(CONTRAST, selectors)
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}
    cut = next(c["step"] for c in body["trace"] if c["cached"][0] > c["cached"][1])
    set_slider(page, "cycle-number", cut)
    style = "(cell) => [getComputedStyle(cell).animationName, getComputedStyle(cell).borderStyle]"
    name, border = page.locator("#cache .tail").first.evaluate(style)
    assert name == ("none" if motion == "reduce" else "truncate")
    assert border == "dashed" or motion != "reduce"


def test_every_control_has_a_name_and_the_status_is_polite(page):
    nameless = page.evaluate(
        """[...document.querySelectorAll("input, select, textarea, button")]
            .filter((field) => !(field.labels?.length || field.textContent.trim()))
            .map((field) => field.id)"""
    )
    assert nameless == []
    assert page.locator("#status").get_attribute("role") == "status"
    assert page.locator("#tokens").get_attribute("aria-live") is None  # not per token


def test_a_chat_model_gets_the_prompt_in_its_template(open_page, chat_folder):
    """Unless the box is not ticked; a demo prompt of the kind chat is offered first."""
    with serving("--model", str(chat_folder("llama"))) as server:
        page = open_page(server.port)
        assert page.locator("#demo-prompt").input_value().startswith("chat_")
        sent = []
        page.on("request", lambda request: sent.append(request.post_data))
        page.fill("#prompt", "Hi")
        page.fill("#max_tokens", "2")
        for is_chat in (True, False):
            page.set_checked("#chat", is_chat)
            page.get_by_role("button", name="Run", exact=True).click()
            page.get_by_text("Finished").wait_for()
            body = json.loads([data for data in sent if data][-1])
            assert body.get("chat", False) is is_chat
            page.reload()
            page.locator("#demo-prompt optgroup").first.wait_for(state="attached")
            page.fill("#prompt", "Hi")
            page.fill("#max_tokens", "2")


def test_a_model_without_template_has_no_box_to_tick(page):
    assert page.locator("#chat-field").is_hidden()
    assert page.locator("#demo-prompt").input_value() == "code_function"
    names = page.locator("#demo-prompt option").evaluate_all("all => all.map((o) => o.value)")
    assert not [name for name in names if name.startswith("chat")]
