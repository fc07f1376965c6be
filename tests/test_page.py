"""The page's workbench shows what the server's answer says, token by token, in a real browser.

Each number and word that it shows is compared with the server's answer to the same request. It
survives refusals, broken streams and a server that leaves, can be used by keyboard, and has no
fault that axe-core finds. What the page's files alone can tell is in test_operations.py.

    python .ci/fetch_axe.py; python -m pytest -m browser    needs playwright and chromium
"""

import json
import re
from itertools import pairwise

import browsing
import pytest
from browsing import DONE, FIRST, NARROW, READY, SIZES, event, exactly, lines, value, whole
from engine import replaying
from started import COLOURS as COLOUR_LIST
from started import ENDLESS as COUNTING
from started import Gate, module_server, serving, until

pytestmark = pytest.mark.browser
browser, open_page = browsing.browser, browsing.open_page

SAMPLED = {"prompt": "def read(path):", "drafter": "draft_model", "num_speculative_tokens": 4}
SAMPLED |= {"temperature": 0.8, "seed": 1, "max_tokens": 60}
COLOURS = {"prompt": COLOUR_LIST, "drafter": "ngram", "max_tokens": 40}
FEW = COLOURS | {"max_tokens": 12}
ENDLESS = {"prompt": COUNTING["prompt"], "num_speculative_tokens": 0, "max_tokens": 1900}
ENDLESS |= {"temperature": 0}
TOKENS, COUNT, CYCLE = "#text .tokens .token", "#cycle-count", "#cycle-number"
LANES = ("#lane-speculative .text", "#lane-plain .text")

server = module_server("--fixed-k")  # what is drafted and kept does not depend on the clock
# With a chat template, a K of its own and a controller.
chatting = module_server("--drafter", "auto", "--num-speculative-tokens", "3", chat="llama")


@pytest.fixture
def page(open_page, server):
    return open_page(server)


# ------------------------------------------------- views of a run: what is done, what is seen then


def ran(fields):
    return fields, "#run", DONE


def came(*cycles, button="#run", **answer):
    """Steps of a run that gives these cycles, and an answer with these fields."""
    return answered(whole(*cycles, **answer)), ("click", button, DONE)


def answered(body, **more):
    return "answer", {"body": body} | more, {}


GREEDY = COLOURS | {"temperature": 0, "verification": "rejection", "seed": 1}
COUPLED = {"verification": "coupled"}
ACCEPTED, RECOVERED = (f"{TOKENS}.{kind} >> nth=-1" for kind in ("accepted", "recovered"))
POPUP, TAB_STOP = "#popup:visible", "#text .tokens [tabindex='0']"  # there is one stop
NO_Q = {"#distribution .bar.q": 0}
DRAWN = {"#distribution .bar.q >> nth=0": 1}
REJECTED = {"id": 7, "kind": "rejected", "p": 0.1, "q": 0.4, "u": 0.9}
STATES = {"layers": 6, "from": 5, "to": 5, "stepped": 0}
CHANCES = [{"id": i, "score": -i, "p": p, "q": q} for i, (p, q) in enumerate(
    [(0.3, 0.6), (0.4, 0.2), (0.2, 0.1), (0.1, 0.1)])]  # fmt: skip
JUDGED = event(1, [("b", "accepted"), ("c", "bonus")], 5, distributions=[CHANCES, CHANCES])
JUDGED["tokens"][0] |= {"p": 0.3, "q": 0.6, "u": 0.2}
FAILED = {"error": {"message": "the engine failed: out of memory"}}
ATTACK = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
BOTH = {"id": 0, "score": 1.0, "p": 0.5, "q": 0.4}, {"id": 1, "score": 0.9, "p": 0.4, "q": 0.6}
REFUSALS = [
    (429, "64 requests wait already", "is busy .*Try again in 7 s"),
    (503, "the server is shutting down", "cannot do this now: the server is shutting down"),
    (401, "a key is needed", "asks for an API key"),
    (400, ATTACK, re.escape(ATTACK))]  # fmt: skip
TIMED = {"timings": {"predicted_ms": 10.0, "predicted_n": 3}}
COMPARED = {
    "identical": True, "num_runs": 3, "speculative": TIMED, "plain": TIMED, "disturbed": True,
    "costs": {"alpha": 0.62, "c": 4.2, "t_verify": 2.5}, "spread": [0.6, 1.4],
    "measured_speedup": 0.9, "predicted_speedup": 1.1}  # fmt: skip


def is_not_hacked(body):
    return body.evaluate("'hacked' in window") is False


VIEWS = {  # by what is claimed: first of runs on the server, then of runs that are answered by us
    "greedy: the best is taken and nothing is drawn": (ran(GREEDY | {"drafter": "draft_model"}),
        ("click", ACCEPTED, NO_Q | {
            "#distribution .legend": exactly("● p, the target"),
            "#verdict": re.compile("target’s best is the draft, “.*”: accepted")}),
        ("click", RECOVERED, NO_Q | {
            "#verdict": "rejected", "#distribution .note": "nothing is drawn"})),
    "coupled noise: both land, and another noise is made here": (ran(SAMPLED | COUPLED),
        ("click", ACCEPTED, DRAWN | {"#verdict": re.compile("both land on.*accepted")}),
        ("click", RECOVERED, DRAWN | {
            "#verdict": re.compile("the drafter lands on “.*”, the target on “.*”: rej"),
            "#verdict:has-text('p / q')": 0, "#distribution .legend": "in nats",
            "#distribution .marks .tick >> nth=1": 1})),  # an axis of noise
    "rejection: why, by pointer and keyboard": (
        *came(FIRST, JUDGED, event(2, [("r", "recovered")], 7, proposals=[7], cached=[9, 8],
                                   rejected=REJECTED, texts={"0": "r", "7": " x"})),
        ("hover", ACCEPTED, {POPUP: ("accepted", "< p/q")}),
        ("Escape", "body", {POPUP: 0}),
        ("focus", TAB_STOP, {POPUP: "first token, after the prefill"}),
        ("ArrowRight", TAB_STOP, {f"{TAB_STOP}[data-index='1'][aria-describedby=popup]:focus": 1}),
        ("End", TAB_STOP, {f"{TAB_STOP}[data-index='3']:focus": 1}),
        ("hover", RECOVERED, {POPUP: ("“␣x” was drafted", "max(0, p − q)", "≥ p/q")}),
        ("click", ACCEPTED, {
            "#verdict": (".200 < p / q = .300 / .600", "accepted"),
            "#distribution .bar.p": 4, "#distribution .bar.q": 4, "#distribution .bar.recovered": 2,
            "#distribution .bars .tick": [*map(exactly, ("0", ".2", ".4", ".6", ".8", "1"))]})),
    "parts of characters, and a token that has but a name": (
        *came(event(0, [("caf", "bonus")]),
              event(1, [("\ufffd", "accepted"), ("\ufffd", "bonus")], 5, text="é"),
              event(2, [("!", "accepted"), ("<|end|>", "bonus")], 7, text="!")),
        ("hover", f"{TOKENS} >> nth=1", {
            "#popup": "a part of a character", "#text .tokens": exactly("café!<|end|>"),
            TOKENS: 5, "#picture .cache": 1, "#picture .states": 0})),
    "a text in Hebrew stays apart from the words around it, beside a cache of 8000": (
        ({"prompt": "עברית"}, "#cycle-title", {}),
        *came(event(0, [("שלום", "bonus")], cached=[8000] * 2), event(1, [(" x", "bonus")], 8000)),
        ("look", "", {"#picture .cache": "7996 more …", "#cycle-says": "Cycle 1"}),
        ("click", f"{TOKENS} >> nth=0", {
            "#cycle-says": "gave \u2068“שלום”\u2069", "#text .prompt": exactly("עברית")})),
    "a hybrid, whose states go back": (
        *came(FIRST | {"recurrent": STATES},
              event(1, [(" b", "accepted"), (" c", "recovered")], 5, proposals=[0, 7, 8],
                    cached=[9, 7], rejected=REJECTED,
                    texts={"0": " b", "1": " c", "7": " x", "8": " y"},
                    recurrent=STATES | {"from": 9, "to": 7, "stepped": 2})),
        ("focus", CYCLE, {
            "#picture .states": "of 6 layers, 2 tokens stepped again",
            "#picture .states .cell": [exactly("after ␣y"), exactly("after ␣b")],
            "#picture .states .tail": [exactly("after ␣y")]})),
    "a race is told with its costs": (
        *came(FIRST, button="#race", compare=COMPARED),
        ("look", "", {
            "#race-says": (
                "Speculative decoding was slower than plain decoding. Measured speed-up 0.90× "
                "(disturbed: the machine was busy, 3 runs gave 0.60× to 1.40×), predicted 1.10×",
                "t_verify 2.50).")})),
    **{f"a stream that ends with {words} tells it": (
        answered(lines(*events)),
        ("click", "#run", {"#error": words, "#text .tokens": exactly("a"), COUNT: "0 of 0"}))
       for events, words in (([FIRST, FAILED], "out of memory"), ([FIRST], "broke off"))},
    **{f"a refusal with {status} is told, and the old run goes": (
        *came(FIRST),
        answered(json.dumps({"error": {"message": message}}), status=status,
                 headers={"Retry-After": "7"}),
        ("click", "#run", {"#error": re.compile(words), COUNT: exactly(""), "img": 0,
                           "#cycle-number:disabled": 1, "body": is_not_hacked}))
       for status, message, words in REFUSALS},
    "markup stays text, in prompts and outputs": (
        ({"prompt": ATTACK}, "#cycle-title", {}),
        *came(event(0, [(ATTACK, "bonus")]),
              event(1, [(ATTACK, "accepted"), (ATTACK, "bonus")], 5, controller=ATTACK,
                    distributions=[BOTH, BOTH]), warnings=[ATTACK]),
        ("click", "#picture button.slot >> nth=0", {"#text .prompt": ATTACK}),
        ("hover", f"{TOKENS} >> nth=1", {"#text .tokens": ATTACK * 3}),
        ("click", "#picture button.slot >> nth=1", {
            "#notes": ATTACK, "#controller-says": ATTACK, "img": 0, "body script": 0,
            "body": is_not_hacked})),
    "the model has no chat, a link is judged": (
        ("#prompt=x&temperature=hot", "", {
            "#error": "“hot” is not a number", "#chat-field:visible": 0}),),
}  # fmt: skip


def test_what_is_done_is_seen(page, subtests):
    for claim, steps in VIEWS.items():
        with subtests.test(claim):
            page.act(*steps)


# ------------------------------------------------------------------------------- runs and cycles

STYLES = {"accepted": "solid", "recovered": "dashed", "bonus": "double", "plain": "dotted"}


def test_a_run_marks_each_token_by_its_origin_and_leads_to_its_cycles(page):
    """By tokens, the slider, buttons and arrow keys; first the cycle is shown that tells most."""
    *cycles, answer = page.run(**SAMPLED | COUPLED)
    texts = {"#text .prompt": SAMPLED["prompt"], "#text .tokens": answer["text"]}
    page.see({part: exactly(text) for part, text in texts.items()})
    metrics = answer["metrics"]["speculative_decoding"]
    for kind, style in STYLES.items():
        one = f"{TOKENS}.{kind} >> nth=0"
        own = [  # what follows no draft is plain, which the metrics call a bonus, too
            token for cycle in cycles for token in cycle["tokens"]
            if kind == ("plain" if not cycle["proposals"] and token["kind"] == "bonus"
                        else token["kind"])]  # fmt: skip
        line = "token => getComputedStyle(token).borderBottomStyle"  # they differ without colour
        assert page.locator(one).evaluate(line) == style
        total = f"= {own[0]['total']:z.2f}".replace("-", "−")
        page.act(("hover", one, {"#popup": total, f"{TOKENS}.{kind}": len(own)}))
    last, kept = len(cycles) - 1, [c["accepted_count"] * bool(c["rejected"]) for c in cycles]
    step = kept.index(most := max(kept))
    shown = f"Cycle {step} of {last}, which tells most: {most} accepted, then a rejection."
    page.see({COUNT: f"{step} of {last}", "#cycle-says": shown, f"{TOKENS}.current": most + 1})
    page.act(
        ("click", "#step", {COUNT: f"{step + 1} of {last}", "#cycle-says": f"Cycle {step + 1}: "}),
        ("End", CYCLE, {COUNT: f"{last} of {last}"}),
        ("ArrowRight", "#step", {"#status": "This is the last cycle"}),
        ("click", f"{TOKENS} >> nth=1", {
            COUNT: "1 of", f"{TOKENS}.current": cycles[1]["emitted_count"]}),
        ("ArrowRight", "#step", {COUNT: "2 of"}),
        ("click", "#back", {COUNT: "1 of", "#cycle-says": "Cycle 1:"}))  # fmt: skip
    accepted = [cycle["accepted_count"] for cycle in cycles[1:]]
    drafted = [len(cycle["proposals"]) for cycle in cycles[1:]]
    reached = sum(accepted) + sum(cycle["rejected"] is not None for cycle in cycles)
    page.see({
        "[data-figure='target passes']": exactly(f"{metrics['target_passes']}"),
        "[data-figure='tokens per pass']": exactly(f"{metrics['tokens_per_pass']:.2f}"),
        "[data-figure='α']": f"{sum(accepted) / reached:.2f}".lstrip("0"),
        "#chart-positions .row:not(.scale)": max(drafted),
        "#chart-time": re.compile("(ms.*){3}"), "#chart-time[aria-label*='pass ']": 1,
        "#statistics-number": f"{metrics['tokens_per_pass']:.2f} tokens per pass",
    })  # fmt: skip


def fates_in(cycle):
    """What the picture of a cycle shows of its draft, and of the cache."""
    verified, kept = cycle["cached"]
    return {
        "#picture .cell.tail": verified - kept, "#picture .slot.accepted": cycle["accepted_count"],
        "#picture .slot.rejected": int(cycle["rejected"] is not None),
    }  # fmt: skip


def test_step_advances_one_cycle_run_on_shows_the_rest_and_stop_frees_the_slot(page, server):
    answer, num_tokens = server.generate(**SAMPLED | COUPLED, trace=True)[1], 0
    page.fill_in(**SAMPLED)
    for step, cycle in enumerate(answer["trace"][:6]):
        num_tokens += cycle["emitted_count"]
        page.act(("click", "#step", fates_in(cycle) | {
            COUNT: f"{step} of {step}", TOKENS: num_tokens,
            "#status": re.compile("^(?!Finished)"),
        }))  # fmt: skip
    page.act(  # what has come stays, and can be gone through
        ("click", "#back", {COUNT: "4 of 5"}),
        ("click", "#step", {COUNT: "5 of 5", TOKENS: num_tokens, "#run": "Run on"}),
        ("click", "#run", DONE | {"#text .tokens": answer["text"]}),
        (ENDLESS, "#run", {f"{TOKENS} >> nth=0": 1}))  # fmt: skip
    assert server.health()["num_requests_running"] == 1
    page.act(("click", "#stop", {"#status": "Stopped"}))
    server.wait_until_idle()
    assert 0 < page.locator(TOKENS).count() < ENDLESS["max_tokens"]
    page.run(**FEW)


def test_a_draft_that_branched_shows_all_branches_and_what_the_cache_keeps(page, server):
    if not server.health()["trees"]:
        pytest.skip("no compiled blocks here")
    fields = SAMPLED | {"drafter": "tree", "num_speculative_tokens": 8, "temperature": 0}
    *cycles, answer = page.run(**fields)
    share = answer["metrics"]["speculative_decoding"]["draft_acceptance_rate"]
    page.see({"[data-figure='draft acceptance rate']": f"{share:.2f}".lstrip("0")})
    labels = []
    for last, cycle in pairwise(cycles[:9]):
        before, (verified, kept) = last["cached"][1], cycle["cached"]
        lengths = [before, verified, kept][: 2 + (kept < verified)]
        page.act((cycle["step"], CYCLE, fates_in(cycle) | {
            COUNT: f"{cycle['step']} of", "#picture .cell.new": verified - before,
            "#picture .length": exactly(" → ".join(map(str, lengths)) + " tokens")}))  # fmt: skip
        labels += page.locator("#picture .slot .label").all_inner_texts()
    assert any(" or " in label for label in labels)


def test_a_link_restores_a_run_with_its_seed_and_its_place(page, open_page, server):
    page.run(**SAMPLED | {"seed": ""})
    page.click(f"{TOKENS} >> nth=9")
    shown = {name: exactly(page.text_content(name)) for name in ("#text .tokens", COUNT)}
    address = page.evaluate("location.hash")
    open_page(server, DONE | shown | {"#drafter": value(SAMPLED["drafter"])}, address)


SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}}
SCHEMA = json.dumps(SCHEMA | {"required": ["colour"], "additionalProperties": False})


def test_the_reasons_tell_what_a_grammar_forbade_and_forced(page):
    *cycles, answer = page.run(**FEW, json_schema=SCHEMA)
    page.see({"#text .tokens": exactly(answer["text"])})
    told = [place for cycle in cycles for place in cycle["grammar"]]
    texts = {i: text for cycle in cycles for i, text in cycle["texts"].items()}
    kinds = [(place["forced"], place["overruled"]) for place in told]
    assert {forced for forced, _ in kinds} == {over for _, over in kinds} == {False, True}
    for is_forced, is_overruled in set(kinds):
        place = told[at := kinds.index((is_forced, is_overruled))]
        count = "forces this token" if is_forced else f"allows {place['allowed']} of 4,096 tokens"
        best = ", which the model liked best." if is_overruled else ")."
        text = texts[str(place["forbidden"][0]["id"])].replace(" ", "␣").replace("\n", "↵")
        words = (f"The grammar {count}", f"It forbade “{text}” (p ", best)
        for way, box in (("hover", "#popup"), ("click", "#grammar")):
            page.act((way, f"{TOKENS} >> nth={at}", {box: words}))


# ------------------------------------------------------------------ the form, the model, its words


WRONG = [("seed", "9" * 20, "53 bits"),
         ("num_speculative_tokens", "0x", "“0x” is not a number"),
         ("prompt", "", "Write a prompt first"),  # and what is sent, in the server's words:
         ("num_speculative_tokens", "99", "K must be an integer from 0 to 16"),
         ("json_schema", "{", "json_schema must be a JSON schema")]  # fmt: skip


def test_a_bad_value_is_told_and_its_field_marked_until_it_is_corrected(open_page, server):
    """The button is hit although the field that the reader comes from shrinks."""
    page = open_page(server, refusals=["status of 400"], viewport=NARROW)
    page.fill_in(**COLOURS)
    for name, wrong, words in WRONG:
        page.act(({name: wrong}, "#run", {
            "#error[role=alert]": words, f"#{name}[aria-invalid=true]:visible": 1}))  # fmt: skip
        assert bool(page.sent) == (wrong in ("99", "{"))
        page.fill_in(**{name: "1"})
        page.see({"#error p": 0, "[aria-invalid=true]": 0})  # as soon as it is right
    page.run(json_schema="")


def test_a_named_drafter_drafts_k_tokens_and_with_auto_the_controller_decides(open_page, chatting):
    """K is what the server was started with. A prompt is a chat's message if the box is ticked."""
    page = open_page(chatting, READY | {"#num_speculative_tokens": value(3)})
    says = {"none": "^Nobody", "auto": "^Cycle ", "ngram": "^You: a named drafter"}
    for drafter, words in says.items():
        page.run(**SAMPLED | {"drafter": drafter, "max_tokens": 12})
        page.see({"#controller-says": re.compile(words)})
    assert [body.get("fixed_k", False) for body in page.sent] == [True, False, True]
    for is_chat in (True, False):
        page.set_checked("#chat", is_chat)
        page.run(prompt="Hi", max_tokens=2)
        assert page.sent[-1].get("chat", False) is is_chat
    until(lambda: b'"measured"' in chatting.call("GET", "/curve")[2])
    page.reload()
    passes = json.loads(chatting.call("GET", "/curve")[2])["pass_ms"]
    ratio = f"{passes['8'] / passes['1']:.2f}×"
    page.act(  # the story has this server's curve
        ("look", "", DONE | {"#scene-source": "by this server"}),
        ("reach", "positions", {}),
        ("click", "[data-chapter=positions] .answer-button >> nth=0", {}),  # which shows it
        (8, "#move-rows", {"#scene-says": ratio}))  # fmt: skip


# ----------------------------------------------------------------------------- what goes wrong


def test_a_server_that_loads_and_one_that_goes_away_are_told(open_page, tmp_path, chat_folder):
    gate = Gate(tmp_path, chat_folder("llama"))
    gate.shut("load")
    with serving(*gate.arguments, wait=False) as server:
        until(lambda: "all else answers 503" in server.log())
        page = open_page(server, {
            "#server": re.compile("The server loads llama.*: reading the weights")
        } | {f"#{name}[aria-disabled=true]": 1 for name in ("run", "step", "race")},
            refusals=["status of 503", "ERR_"])  # fmt: skip
        gate.open("load")
        page.see(READY | {"#server": "llama", "#run[aria-disabled=false]": 1})
        gate.shut()
        page.act(("click", "#run", {TOKENS: 1}), ("click", "#stop", {"#status": "Stopped"}))
        gate.open()
        server.wait_until_idle()
        health = server.health()
        gate.shut()
        page.act(("click", "#run", {TOKENS: 1}))
    gone = {"#error": "broke off", "#server": "The server does not answer.", TOKENS: 1}
    page.act(("look", "", gone), ("click", "#run", {"#error": "The server cannot be reached"}))
    page.route("**/health", lambda route: route.fulfill(json=health))  # it is back
    page.mock(whole(FIRST))
    page.act(("click", "#run", DONE | {"#server": "runs here"}))


def test_a_failing_drafter_or_no_drafter_is_shown_as_it_is(open_page, failing_drafter):
    asked = {"prompt": "x", "max_tokens": 6}
    with serving(*failing_drafter, "--fixed-k") as server:
        page = open_page(server)
        page.act(
            ran(asked | {"drafter": "fails"}),
            ("look", "", {
                "#notes": "drafter fails failed (on purpose)", f"{TOKENS}.plain": 6,
                "#server": "failures of fails: 1;"}))  # fmt: skip
        health = server.health() | {"drafters": [], "drafter": "none"}
        page.route("**/health", lambda route: route.fulfill(json=health))
        page.reload()
        page.see(READY | {"#drafter option": 1})
        no_race = re.compile("^Nothing was drafted, so this was no race[^×]*$")
        told = {"#race-says": no_race, "#chart-race:visible": 0, "#controller-says": "Nobody"}
        page.act((asked, "#race", DONE | told))
        page.close()  # it asks how the server is once more, which ends here


def test_with_an_engine_behind_the_page_shows_its_recording_and_says_why(open_page):
    with replaying() as replay, serving("--engine", replay.url, "--api-key", "secret") as server:
        page = open_page(server, READY | {"#server": "the engine that runs here has no cycles"})
        page.act(("click", "#run", DONE))
        assert page.sent == []
        page.close()


# ---------------------------------------------------------------------- the screen, the keyboard

SEEN = {  # what each button changes
    "#run": ["#status", "#text", "#cycle-says"],
    "#back": [COUNT, "#cycle-says", "#picture"],
    "#race": ["#status", *LANES],
}


@SIZES
def test_all_is_in_sight_nothing_overflows_at_any_k_and_axe_finds_nothing(open_page, server, size):
    page = open_page(server, viewport=size)
    page.fill_in(**SAMPLED | {"max_tokens": 24})
    for button, changed in SEEN.items():
        page.evaluate("scrollTo(0, 500)")
        page.act(("click", button, DONE))
        assert page.flaws(*changed) == [], button
    page.unfold()
    for k in (1, 16):
        page.run(num_speculative_tokens=k)
        for token in page.locator(TOKENS).all()[:5]:
            token.click()
            stays = ["#verdict", "#text", "#reading .legend"] if size == NARROW else []
            assert page.flaws(*stays) == []
            page.mouse.move(0, 0)
            token.hover()
            assert page.flaws("#popup") == []
    page.act(
        ("click", "#race", DONE),
        ({"temperature": "abc"}, "#run", {"#error p": 1}),
        ("click", f"{TOKENS} >> nth=2", {}),
        ("focus", f"{TOKENS} >> nth=3", {}))  # fmt: skip
    for is_open in (True, False):
        page.unfold(is_open)
        assert page.violations() == [], is_open
