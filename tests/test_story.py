"""The page opens from any file server, without a server of ours, and then a recording answers.

An export holds what the server answers, is complete or leaves nothing. Whatever the browser asks
for elsewhere is a failure, as is a word on its console. What the chapters say was worked out here
once more, from what was recorded.

    python -m pytest -m browser tests/test_story.py    all but exports needs playwright and chromium
"""

import hashlib
import json
import re
import shutil
from copy import deepcopy
from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from unittest.mock import Mock
from urllib.parse import urlencode

import browsing
import numpy as np
import pytest
from browsing import DONE, NARROW, READY, SIZES, WIDE, event, exactly, value
from started import until

from course import lab
from drafters.auto.planner import Controller
from server import core
from server.page import FOLDER, INDEX, export, files

browser, open_page = browsing.browser, browsing.open_page
SAYS, COUNT, NEXT = "#scene-says", "#cycle-count", "#scene-movers >> text=Next pass"


def read(folder, name):
    return json.loads((folder / "recordings" / f"{name}.json").read_text("utf-8"))


def cycles_of(run):
    return [event for event in run["events"] if "step" in event]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The export of the embedded model, as the command line makes it."""
    folder = tmp_path_factory.mktemp("files") / "export"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(export._GREEDY, "max_tokens", 24)
        assert core.main(["--export", str(folder), "--model", "embedded"]) == 0
    return folder


@pytest.fixture(scope="module")
def site(exported):
    """A file server's address, with an export and the repository's page."""
    shutil.copytree(FOLDER, exported.parent / "page")
    handler = partial(SimpleHTTPRequestHandler, directory=exported.parent)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def open_story(site, open_page):
    """Opens the repository's page, whose recording is SmolLM2's."""
    return partial(open_page, f"{site}page/", expected=DONE)


# ------------------------------------------------------------------------- what was recorded


def lanes_of(prompt):
    """The cycles of plain decoding, and of each drafter's greedy run of a prompt."""
    runs = [r for r in TOLD["runs"] if r["prompt"] == prompt and not r["request"]["temperature"]]
    drafted = {run["request"]["drafter"]: cycles_of(run) for run in runs}
    return {"plain": [e["plain"] for e in runs[0]["events"] if "plain" in e]} | drafted


def spent(prompt):
    """The ms of all cycles behind the prefill, by lane; `auto` chooses among the others."""
    lanes = {name: lane for name, lane in lanes_of(prompt).items() if name != "auto"}
    return {name: sum(sum(c["ms"].values()) for c in lane[1:]) for name, lane in lanes.items()}


def fastest(prompt):
    return min(ms := spent(prompt), key=ms.get)


def nearly_first(prompt):
    """The places of those that take at most a tenth more: that is the clock's noise."""
    ms = [*spent(prompt).values()]
    return [i for i, each in enumerate(ms) if each < 1.1 * min(ms)]


def pass_ms(num_texts):
    """The time of a pass by its positions in each text; between measured ones a straight line."""
    known = sorted((int(n), ms) for n, ms in TOLD["curve"]["pass_ms"].items())
    measured = [*zip(*known, strict=True)]
    return {n: float(np.interp(n * num_texts, *measured)) for n in range(1, 17)}


def times(factor):
    """As JavaScript rounds: half of a digit goes up, so 1.625 is 1.63."""
    return f"{Decimal(factor).quantize(Decimal('0.01'), ROUND_HALF_UP)}×"


TOLD = read(FOLDER, "smollm2")
CYCLES = lanes_of("first")["draft_model"]
TEXT = "".join(cycle["text"] for cycle in CYCLES)
CUT = next(cycle for cycle in CYCLES if cycle["rejected"])
WHOLE = next(len(c["proposals"]) for c in CYCLES[1:] if len(c["tokens"]) > len(c["proposals"]))
PLAIN_MS, DRAFTED_MS = spent("first")["plain"], spent("first")["draft_model"]
ONE, EIGHT = pass_ms(1), pass_ms(8)
PARTS_MS = TOLD["curve"]["drafters"]["draft_model"]
DRAFT_MS = PARTS_MS["call_ms"] / 5 + PARTS_MS["step_ms"]
COURSE = lab.load(lab.path_of(7, "solutions"))  # its formulas
FIVE = partial(COURSE.speedup, 0.8, 5)  # tokens, each right with 0.8
TEN_GB = f"{10 * TOLD['health']['target']['weight_bytes'] / 1e9:.1f} GB"
SAMPLED = next(run["events"][-1] for run in TOLD["runs"] if run["request"]["temperature"])


# ------------------------------------------------------------------------------- the chapters


def pays(alpha, k, c):
    """Steps that set all three, with what follows from them."""
    even = COURSE.break_even(k, c * ONE[1], ONE)
    best = COURSE.best_k(alpha, c * ONE[1], ONE)
    words = (
        f"K = {best} is best" if best else "not to draft is best",
        f"pays from α = {even:.2f} on".replace("0.", ".") if even else "It cannot pay",
    )
    gain = times(COURSE.speedup(alpha, k, c * ONE[1], ONE))
    return [(alpha, "#move-alpha", {}), (k, "#move-k", {}), (c, "#move-c", {
        SAYS: words,
        f"#scene-plot .half:last-child svg[aria-label*='{gain}']": 1,
        "#scene-pass .position": lambda shown: sum(map(float, shown.all_text_contents()))
            == pytest.approx(COURSE.tokens(alpha, k), abs=0.1)})]  # fmt: skip


def race(way):
    """Steps to a race's end, with a bar for each token of each drafter and of plain decoding."""
    bars = sum(len(cycle["tokens"]) for lane in lanes_of(way).values() for cycle in lane)
    return [("click", f"[data-way={way}]", {}), (100, "#move-share", {"#scene-plot .fate": bars})]


def rounds():
    """Steps of the game: four passes, with a wrong guess at these places of each.

    What the recorded target said judges; the drafter's own cycles from there are its score.
    """
    first, *rivals = lanes_of("new")["draft_model"]
    said, mine, theirs = [token["id"] for c in rivals for token in c["tokens"]], 0, 0
    for number, (wrong, gives) in enumerate([([], 5), ([1], 2), ([0, 2], 1), ([3], 4)], 1):
        for at, token in enumerate(said[mine : mine + 4]):
            button = f"button:not([data-id='{token}'])" if at in wrong else f"[data-id='{token}']"
            yield "click", f"#scene-movers {button} >> nth=0", {}
        kept, mine = min([*wrong, 4]), mine + gives
        theirs += len(rivals[number - 1]["tokens"])
        lanes = mine, theirs, number  # of the reader, the draft model and plain decoding
        yield "look", "", {
            SAYS: (f"Accepted: {kept} of your 4", f"gives {gives} token"),
            "#scene-pass .slot.accepted": kept, "#scene-pass .slot.rejected": len(wrong[:1]),
            "#scene-pass .slot.bonus": int(not wrong), "#scene-pass .cell.tail": 4 - kept,
            "#scene-text .token": len(first["tokens"]) + mine,
            **{f"#scene-plot .row >> nth={i} >> .bar": n for i, n in enumerate(lanes)},
        }  # fmt: skip
        if number < 4:
            yield "click", NEXT, {SAYS: "choose 4 more", "#scene-movers button": 3}
    winner = "you win" if mine > theirs else "a draw" if mine == theirs else "it wins"
    yield "look", "", {SAYS: f"You have {mine} tokens, draft_model has {theirs}: {winner}."}


def chances_of(rows):
    """p, q and what was drawn of the rows' tokens."""
    found = re.findall(r"p (\S+), q (\S+), drawn (\S+?)(?:;|$)", rows.get_attribute("aria-label"))
    return np.array(found, float).T


def as_p_says(rows):
    """Each came as often as p says: within three standard deviations of 2,000 draws."""
    p, _, drawn = chances_of(rows)
    return len(p) > 5 and (abs(drawn - p) < 0.034).all()


def same_of(p, q):
    """How often the same noise lands on one token of both."""
    noise = np.random.default_rng(1).gumbel(size=(10**5, len(p)))
    scores = (np.log(np.maximum(chances, 1e-9)) + noise for chances in (p, q))
    lands = [each.argmax(1) for each in scores]
    return (lands[0] == lands[1]).mean()


def is_kept_as_told(says):
    """By rejection and with the same noise, as often as draws from the rows' chances."""
    found = re.search(r"At this place (\S+) of all .* would keep (\S+)\.", says.inner_text())
    rows = says.page.locator("#scene-plot .row:not(.scale)").all_text_contents()
    p, q = np.array([re.findall(r"\.\d\d", row)[-3:-1] for row in rows], float).T
    told = [*map(float, found.groups())]
    return told == pytest.approx([np.minimum(p, q).sum(), same_of(p, q)], abs=0.03)


IN_TIME = {".writing": [f"all in {round(ms)} ms" for ms in (PLAIN_MS, DRAFTED_MS)]}
READ = "#scene-pass :is(.draft .chip:not(.own), .position)"
WRITTEN = [exactly(str(at)) for at in range(CUT["cached"][1], CYCLES[CUT["step"] + 1]["cached"][0])]
# By name: what is seen before the answer, which one is true, words of it, and the steps behind it.
CHAPTERS = {
    "start": ({".writing >> nth=1": "waits for your answer"},
        int(np.searchsorted([1.25, 3], PLAIN_MS / DRAFTED_MS)), [times(PLAIN_MS / DRAFTED_MS)],
        (100, "#move-share", IN_TIME | {".writing .line": lambda lines: len({
            *lines.all_text_contents()}) == 1})),
    "stream": ({}, 1, [TEN_GB],
        (5, "#move-tokens", {SAYS: "5 tokens", "#scene-text .token": lambda shown: (
            shown.count() == 5 and TEXT.startswith("".join(shown.all_text_contents())))})),
    "positions": ({}, 0, [times(ONE[6] / ONE[1])],
        *((rows, "#move-rows", {READ: rows, SAYS: f"{times(ONE[rows] / ONE[1])} the time"})
          for rows in (7, 16)),
        ((6, 12), "#scene-plot svg", {"#move-rows": value(12), SAYS: "A pass over 12 positions"})),
    "guess": ({"#scene-pass .verdict.on": 0}, 2, [f"{WHOLE} of {WHOLE} guesses"]),
    "reject": ({"#scene-pass .verdict.on": 0}, 1, ["recovered"]),
    "you": ({}, 1, ["Three"], *rounds()),
    "cache": ({}, 2, ["The length goes from {} to {}".format(*CUT["cached"])],
        (3, "#move-phase", {SAYS: "over what was cut", "#scene-plot .array .pass small": WRITTEN})),
    "pays": ({"#scene-plot .token-line": 0}, 2, [f"{COURSE.tokens(0.8, 5):.2f}"],
        *pays(0.5, 2, 0.1), *pays(0.9, 10, 0.02), *pays(0.3, 5, 0.9)),
    "loses": ({}, 2 if FIVE(DRAFT_MS, EIGHT) < 1.02 else 1,
        [*map(times, (FIVE(DRAFT_MS, ONE), FIVE(DRAFT_MS, EIGHT), FIVE(0.9 * ONE[1], ONE)))],
        *(("click", f"#scene-movers >> text={words}", {SAYS: words}) for words in (
            "1 user", "a surprising text", "a slow guesser", "a mixture of experts")),
        ("click", "[data-way=batch]", {  # whose pass has 8 × (K + 1) positions
            SAYS: "8 users", "#scene-pass .position.plain": 8, ".position.drafting": 40})),
    "sampling": ({".twin:visible": 0}, 1, ["comes from the seed"],
        (10, "#move-draws", {"#scene-plot .rows": as_p_says}),
        (11, "#move-draws", {
            ".twin": 2, "#scene-pass": (SAMPLED["text"][-40:], "with drafts", "without"),
            "#scene-plot .row.drafting": 1, "#scene-plot .row.recovered": 1, SAYS: "rejected"})),
    "rejection": ({SAYS: "drawn from the shaded part", "#scene-plot .slot": 3},
        1, ["Together that is p"],
        ("focus", "#move-draws", {SAYS: "2000 draws", "#scene-plot .rows": as_p_says,
                                  "[data-chapter=rejection] .answer-says": is_kept_as_told}),
        (1, "#move-draws", {SAYS: "is kept if u is below", "#scene-plot .slot": 2,
                            "#scene-plot .slot.rejected": "≥", "#scene-plot .drawn": 0}),
        (2, "#move-draws", {"#scene-plot .slot.recovered": 1, "#scene-plot .drawn": 1})),
    "who": ({}, nearly_first("copy"),
        [f"On the copied text {fastest('copy')}", f"story {fastest('new')}"],
        *race("copy"), *race("new")),
}  # fmt: skip
IN_SIGHT = "#scene", "#scene-movers", "#scene-legend", SAYS


@pytest.mark.browser
@SIZES
def test_each_chapter_asks_first_and_what_it_answers_and_shows_is_true_and_in_sight(
    size, open_story, subtests
):
    """At both ends of each slider, too; words of the glossary pop up, and axe finds nothing."""
    page, num_first = open_story(viewport=size), 0
    for number, (chapter, (before, right, words, *steps)) in enumerate(CHAPTERS.items(), 1):
        with subtests.test(chapter):
            page.act(("reach", chapter, {}))
            article = page.locator(f"[data-chapter={chapter}]")
            said, marked = article.locator(".answer-says"), article.locator(".is-true, .is-false")
            right = right if isinstance(right, list) else [right]
            assert said.text_content() == "" and marked.count() == 0
            page.see(before if size == WIDE else {})
            for at, button in enumerate(article.locator(".answer-button").all()):
                button.click()
                verdict = "Yes." if at in right else "Not so."
                page.see({f"[data-chapter={chapter}] .answer-says": verdict})
                assert marked.count() == len(right) + (at not in right)
            num_first += 0 in right
            page.see({"#answered": f"{number} of 12 questions, {num_first} of them right"})
            assert [each for each in words if each not in said.text_content()] == []
            page.act(*steps if size == WIDE else ())
            for slider in page.locator("#scene-movers input").all():
                for end in ("End", "Home"):
                    page.act((end, f"#{slider.get_attribute('id')}", {}))
                    assert page.flaws(*IN_SIGHT) == [], (chapter, end)
            for word in article.locator(".word").all():
                word.focus()
                assert page.flaws("#popup") == [], word.text_content()
            assert page.violations("#scene") == [], chapter
    assert page.violations("#story") == []


# --------------------------------------------------------------------- the recording's workbench


@pytest.mark.browser
def test_each_recorded_run_is_the_answer_to_its_request(site, exported, open_page):
    page, told = open_page(f"{site}export/", DONE), read(exported, "embedded")
    prompts, day = told["prompts"], f"Recorded on {told['recorded_at']} with {told['model']} on "
    page.see({"#demo-prompt option": 1 + len(prompts), "#server": day + told["machine"]})
    requests = [run["request"] for run in told["runs"]]
    sampled = [f"sampled, {r['verification']}" for r in requests if r["temperature"]]
    offered = page.locator("#drafter option").all_text_contents()
    assert offered == [*dict.fromkeys(request["drafter"] for request in requests), *sampled]
    for run in told["runs"]:
        answer, last, request = run["events"][-1], len(cycles_of(run)) - 1, run["request"]
        raced, tokens = answer["compare"], answer["usage"]["completion_tokens"]
        seen = DONE | {
            "#whole-text": exactly(f"The whole text: {answer['text']}"),
            "#drafter": value(request["drafter"]), COUNT: f"{last} of {last}"}  # fmt: skip
        address = urlencode(request | {"prompt": prompts[run["prompt"]], "at": 99})
        page.act((f"#{address}", "", seen))
        # Of a story nobody may have drafted, and `auto` nothing where the machine is busy.
        if run["prompt"] == "copy" and request["drafter"] != "auto" or request["temperature"]:
            same = "identical" if raced["identical"] else "not compared"
            page.act(("click", "#race", seen | {
                COUNT: f"of {last}", "#lane-speculative .text": exactly(answer["text"]),
                "#lane-plain .text": exactly(raced["plain"]["text"]),
                "#chart-race .row:not(.scale)": 2,
                "#lane-plain .counts": f"{tokens} tokens · {tokens - 1} passes",
                "#lane-speculative .counts": f"{tokens} tokens · {last} passes",
                "#race-says": (same, times(raced["measured_speedup"]))}))  # fmt: skip


KEPT = DONE | {"#cycle-says": "tells most"}
FIRST, TITLE = TOLD["prompts"]["first"], "#cycle-title"  # where a click does nothing
OTHERS = [{"prompt": "mine"}, {"json_schema": "{}"}, {"temperature": 1}]  # than were recorded
REFUSAL = "This page has no server", "ngram", "08_speculative_decoding.py --port 5000"
REFUSED = KEPT | {"#error": (*REFUSAL, TOLD["recorded_at"]), "#track:visible": 0}
BY_REJECTION = TOLD["runs"][-1]["events"][-1]
RACED_NOW = DONE | {"#race-says": "Medians of three runs"}


def is_left_alone(html):
    """The page stays where it is, and so does its address."""
    return html.evaluate("scrollY + location.hash") == "0"


def speaks_of_no_server(workbench):
    return re.findall(".{30}[Ss]erver.{30}", workbench.text_content()) == []


@pytest.mark.browser
def test_a_recorded_page_shows_a_run_that_nobody_asked_for_and_each_that_is_chosen(open_story):
    """It speaks of no server, keeps what it shows where no other was recorded, and needs no mouse.

    In a desktop's window the text, the cycle and the race stand side by side.
    """
    page = open_story()
    page.act(
        ("look", "", KEPT | {"html": is_left_alone, "#workbench": speaks_of_no_server,
                             "#settings-now": "K = 5, greedy", "#workbench details[open]": 0}),
        (f"#{urlencode({'prompt': FIRST, 'drafter': 'foo'})}", "", {
            "#error": "“foo” is not offered here"}),
        *((f"#{urlencode({'prompt': FIRST} | other)}", "", REFUSED) for other in OTHERS),
        ("click", "#race", REFUSED),
        ({"drafter": "mtp"}, TITLE, KEPT | {"#cycle-says": "mtp proposed"}),
        ("click", "#race", RACED_NOW | {"#workbench": speaks_of_no_server}))  # fmt: skip
    page.evaluate("document.querySelector('#workbench').scrollIntoView()")
    assert page.flaws("#request", "#text", "#cycle", "#racing", "#race-says") == []
    page.act(
        ("click", "[data-chapter=sampling] .quiet", DONE | {  # has settings that are not as usual
            "#settings-now": "temperature 0.8", "#track:visible": 0, "#more[open]": 1}),
        ({"drafter": "sampled, rejection"}, TITLE, DONE | {
            "#settings-now": "temperature 0.8, rejection", "#demo-prompt": value("new"),
            "#whole-text": exactly(f"The whole text: {BY_REJECTION['text']}")}),
        ({"demo-prompt": "copy"}, TITLE, KEPT | {
            "#settings-now": "greedy", "#error": exactly(""),
            "#drafter option:checked": exactly("draft_model")}),
        ("focus", "[data-chapter=reject] .answer-button >> nth=1", {}),
        ("Enter", ":focus", {
            "[data-chapter=reject] .answer-says": "Yes.", "#scene[data-at=reject]": 1}),
        ("Tab", ":focus", {}),
        ("Tab", ":focus", {"[data-chapter=reject] .skip:focus": 1}),
        ("Enter", ":focus", {"#move-phase:focus": 1}),
        ("Home", ":focus", {SAYS: "It is pending."}),
        ("ArrowRight", ":focus", {SAYS: "The drafter guesses"}),
        ("click", "[data-chapter=reject] .quiet", DONE | {
            "#prompt": value(FIRST), COUNT: f"{CUT['step']} of"}),
        ("Enter", "#statistics > summary", {"#statistics[open]": 1}))  # fmt: skip
    assert page.flaws() == page.violations() == []
    page = open_story(address="#statistics")  # a link opens a fold
    page.see({"#statistics[open]": 1, "#more[open]": 0})


@pytest.mark.browser
def test_what_a_finger_presses_is_44_px_high_or_has_as_much_room(open_story):
    page = open_story(viewport=NARROW, has_touch=True, is_mobile=True)
    page.act(("click", "#race", RACED_NOW))
    page.unfold()
    small = page.locator("#workbench").evaluate("""(workbench) => {
        const pressed = "button, select, input, summary, textarea, .tokens .token";
        return [...workbench.querySelectorAll(pressed)].filter((one) => {
            const room = parseFloat(getComputedStyle(one, "::after").height) || 0;
            return one.checkVisibility() && Math.max(room, one.offsetHeight) < 44;
        }).map((one) => one.outerHTML);
    }""")
    assert small == [] and page.locator("#text .token").count() > 40
    assert page.flaws() == page.violations() == []


@pytest.mark.browser
def test_a_recording_takes_its_time_where_pictures_may_move_and_can_be_stopped(open_story):
    page = open_story(expected=READY, reduced_motion="no-preference")
    page.clock.install(time=0)
    page.clock.pause_at(100_000)
    page.reload()
    page.see(READY | {"#status": "Running", "#text .token": 0})
    page.click("#stop")
    page.clock.run_for(100)
    page.act(("hover", "#run", {"#status": "Stopped"}), ("click", "#run", {"#status": "Running"}))
    until(lambda: page.clock.run_for(1000) or "Finished" in page.text_content("#status"))
    page.see({"#whole-text": TEXT.split("<")[0]})


@pytest.mark.browser
def test_a_model_without_a_drafter_has_its_story_too_and_a_page_without_recording_says_so(
    open_story,
):
    """Whatever a chapter would show of drafts, it shows of plain cycles, and nothing fails."""
    run = TOLD["runs"][0]
    texts = [event["plain"]["text"] for event in run["events"] if "plain" in event]
    cycles = [event(i, [(text, "bonus")], 39 + i, distributions=[[]])
              for i, text in enumerate(texts)]  # fmt: skip
    run = run | {"request": run["request"] | {"drafter": "none"},
                 "events": cycles + run["events"][len(cycles_of(run)) :]}  # fmt: skip
    told = TOLD | {"runs": [run | {"prompt": name} for name in TOLD["prompts"]],
                   "curve": TOLD["curve"] | {"drafters": {}}}  # fmt: skip
    seen = {"#error": "no recording", "#story": "There is no recording recordings/nobody.json"}
    page = open_story(address="?model=nobody", expected=seen, refusals=["status of 404"])
    page.act(("#prompt=mine", "", seen))
    page.route("**/recordings/*", lambda route: route.fulfill(json=told))
    page.reload()
    for chapter in CHAPTERS:
        answer = f"[data-chapter={chapter}] .answer-"
        says = {f"{answer}says": re.compile("Yes|Not so")}
        page.act(("reach", chapter, {}), ("click", f"{answer}button >> nth=0", says))


@pytest.mark.browser
def test_texts_that_near_ties_parted_are_not_called_the_same(open_story):
    """Where bits are not equal: one run of each text has another token here."""
    told = deepcopy(TOLD)
    for name in ("first", "new"):
        run = next(run for run in told["runs"] if run["prompt"] == name)
        cycles_of(run)[-1]["tokens"][-1]["id"] += 1
    page = open_story()
    page.route("**/recordings/*", lambda route: route.fulfill(json=told))
    page.reload()
    says = {"[data-chapter=start] .answer-says": "and near-ties part the texts of some"}
    page.act(
        ("reach", "start", {}), ("click", "[data-chapter=start] .answer-button >> nth=0", says)
    )
    page.act(("reach", "who", {}), ("click", "[data-chapter=who] .answer-button >> nth=0", {}))
    for way, words in (("copy", "All write the same text"), ("new", "near-ties part some")):
        page.act(("click", f"[data-way={way}]", {}), (60, "#move-share", {SAYS: words}))


@pytest.mark.browser
def test_fonts_come_along_with_their_licence_and_are_what_it_names(open_story):
    folder = FOLDER / "fonts"
    licence = (folder / "OFL.txt").read_text("utf-8")
    files = {path.name: path.read_bytes() for path in folder.glob("*.woff2")}
    assert {*re.findall(r"^(\S+\.woff2) ", licence, re.MULTILINE)} == files.keys()
    hashes = {hashlib.sha256(data).hexdigest() for data in files.values()}
    assert {*re.findall(r"SHA-256 (\S+)", licence)} == hashes and len(hashes) == 3
    loaded = "document.fonts.ready.then(() => [...document.fonts].map(font => font.status))"
    assert open_story().evaluate(loaded) == ["loaded"] * 3


@SIZES
@pytest.mark.browser
def test_the_address_of_a_chapter_leads_to_it(size, open_story):
    for number in (1, 11):
        chapter, is_shown = f"#chapter-{number}", {f"#chapter-{number}[data-shown]": 1}
        page = open_story(expected=DONE | is_shown, address=chapter, viewport=size)
        heading = page.locator(f"{chapter} h2").bounding_box()
        assert 0 <= heading["y"] and heading["y"] + heading["height"] <= size["height"]


# ---------------------------------------------------------------------------- exports
COMING_ALONG = sorted(path.stem for path in (FOLDER / "recordings").glob("*.json"))


def entries_under(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_an_export_is_the_page_and_one_recording(exported):
    own = [name for name in files() if not name.startswith("recordings/")]
    found = {name for name in entries_under(exported) if (exported / name).is_file()}
    assert found == {*own, "recordings/embedded.json"}
    for name in own:
        assert name == INDEX or (exported / name).read_bytes() == (FOLDER / name).read_bytes()
    page, ours = ((folder / INDEX).read_text("utf-8") for folder in (exported, FOLDER))
    assert 'data-recording="recordings/embedded.json"' in page and "data-server" not in page
    assert re.sub("<html[^>]*>", "", page) == re.sub("<html[^>]*>", "", ours)


@pytest.mark.parametrize("name", ["", *COMING_ALONG])
def test_a_recording_has_all_that_the_page_asks_for(name, exported):
    """Of every drafter: its text is plain decoding's, and each choice is in what is shown."""
    folder = FOLDER if name else exported
    told = read(folder, name or "embedded")
    assert date.fromisoformat(told["recorded_at"]) <= date.today() and told["machine"]
    assert told["health"]["status"] == "ok" and told["curve"]["status"] == "measured"
    assert {"1", "2", "8"} <= told["curve"]["pass_ms"].keys() and told["curve"]["break_even"]
    drafters = {*told["health"]["drafters"]} - {"auto", "tree", "prediction", "grammar"}
    if told["curve"]["pass_ms"]["1"] >= export._LEAST_MS:
        drafters.add("auto")
    greedy = [run for run in told["runs"] if not run["request"]["temperature"]]
    made = [(run["prompt"], run["request"]["drafter"]) for run in greedy]
    assert sorted(made) == sorted((p, d) for p in ("first", "copy", "new") for d in drafters)
    sampled = told["runs"][len(greedy) :]
    rules = [(run["prompt"], run["request"]["verification"]) for run in sampled]
    assert rules == [("new", "coupled"), ("new", "rejection")]
    for run in told["runs"]:
        request, cycles, answer = run["request"], cycles_of(run), run["events"][-1]
        plain = [event["plain"] for event in run["events"] if "plain" in event]
        is_coupled = request["verification"] == "coupled"
        assert answer["compare"]["identical"] is (True if is_coupled else None)
        assert answer["text"] == "".join(cycle["text"] for cycle in cycles)
        text = "".join(each["text"] for each in plain)
        assert text == answer["compare"]["plain"]["text"]
        assert text == answer["text"] or not is_coupled
        assert [*plain[0]] == ["step", "tokens", "text", "ms"] and "trace" not in answer
        for cycle in cycles:
            for token, entries in zip(cycle["tokens"], cycle["distributions"], strict=True):
                assert token["id"] in {entry["id"] for entry in entries} and len(entries) <= 8
                assert {str(entry["id"]) for entry in entries} <= cycle["texts"].keys()


@pytest.fixture
def short(monkeypatch):
    """Exports have few tokens of one prompt, and wait for no cost curve."""
    monkeypatch.setattr(export, "_CURVE_S", 0.0)
    monkeypatch.setitem(export._GREEDY, "max_tokens", 4)
    monkeypatch.setattr(export, "TEXT", {"new": "hard_prose"})


@pytest.mark.parametrize("is_strict", [True, False])
def test_what_fails_is_told_and_the_rest_is_exported(
    is_strict, failing_drafter, tiny_folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(export, "TEXT", {"new": "hard_prose"})
    model, site = tiny_folder("llama"), tmp_path / "site"
    words = ["--model", str(model), *failing_drafter, *(["--strict"] if is_strict else [])]
    status = core.main(["--export", str(site), *words])
    out, err = capsys.readouterr()
    assert status == 0 and out.endswith(f"python -m http.server -d {site}\n")
    runs = read(site, re.sub("[^a-z0-9_.-]+", "-", model.name.lower()))["runs"]
    made = [run["request"] for run in runs if run["request"]["drafter"] == "fails"]
    assert bool(made) is not is_strict and not any(request["temperature"] for request in made)
    assert ("not recorded: fails on new" in err) is is_strict


@pytest.mark.usefixtures("short")
def test_auto_s_runs_are_recorded_where_a_pass_is_long_and_another_model_stands_beside(
    main, demo_engine, monkeypatch, tmp_path
):
    """It knows the texts then. The other one has no drafters."""
    target, loaded = demo_engine.target, demo_engine.pool.drafters
    engine = core.Engine(target, loaded, "auto", controller=Controller.of(target, loaded))
    monkeypatch.setattr(export, "_LEAST_MS", 0.0)
    for name, made in ("embedded", engine), ("mixture", core.Engine(target, {})):
        monkeypatch.setattr(core, "load_engine", lambda options, made=made: made)
        monkeypatch.setenv("SPECULATIVE_API_KEY", "secret")
        assert main("--export", str(tmp_path), "--model", name)[0] == 0
    runs = read(tmp_path, "embedded")["runs"]
    (chosen,) = (run for run in runs if run["request"]["drafter"] == "auto")
    assert all(cycle["controller"] for cycle in cycles_of(chosen)[1:])
    told = read(tmp_path, "mixture")
    assert {run["request"]["drafter"] for run in told["runs"]} == {"none"}
    assert all(map(cycles_of, told["runs"]))
    assert "recordings/mixture.json" in (tmp_path / INDEX).read_text("utf-8")


NO_ROOM = OSError(28, "No space left on device")
FORBIDDEN = PermissionError(13, "Permission denied")
CANNOT = "error: cannot export into"


# Where to; what breaks, if the place can be had; the exit status, and what is said.
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("place", "broken", "status", "says"), [
    ("a file", None, 2, f"{CANNOT}.*Not a directory"),
    ("a file/site", None, 2, f"{CANNOT}.*Not a directory"),
    ("no/where", None, 2, f"{CANNOT}.*No such file"),
    ("full", None, 2, f"{CANNOT}.*it is neither empty nor an earlier export"),
    ("", None, 2, f"{CANNOT}.*neither"),
    ("site", (core, "load_engine", KeyboardInterrupt()), 130, ""),
    ("site", (Path, "write_bytes", NO_ROOM), 2, "No space left"),
    ("site", (export, "_run", ValueError("the context is too short")), 2, "too short"),
    ("site", (export, "TemporaryDirectory", FORBIDDEN), 2, f"{CANNOT}.*Permission denied"),
])  # fmt: skip
def test_an_export_that_cannot_be_made_says_so_and_leaves_all_as_it_was(
    place, broken, status, says, main, monkeypatch, tmp_path
):
    """A folder that cannot be had is one line, before anything is loaded."""
    owner, name, error = broken or (core, "load_engine", AssertionError)
    monkeypatch.setattr(owner, name, Mock(side_effect=error))
    (tmp_path / "full").mkdir()
    for mine in ("a file", "full/index.html"):
        (tmp_path / mine).write_text("mine")
    before = entries_under(tmp_path)
    done, out, err = main("--export", place and str(tmp_path / place))
    assert (done, out) == (status, "") and re.search(says, err) and "Traceback" not in err
    assert broken or err.count("\n") == 1
    assert entries_under(tmp_path) == before and (tmp_path / "full" / INDEX).read_text() == "mine"
