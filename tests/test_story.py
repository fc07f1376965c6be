"""The page opens from any file server, without a server of ours, and then a recording answers.

An export and the repository's own folder are opened from `python -m http.server`. Whatever else the
browser asks for is refused, and is a failure, as is a word on its console.

    python -m pytest tests/test_story.py    needs playwright and chromium
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from urllib.parse import quote
from urllib.request import urlopen

import numpy as np
import pytest
import speculative_decoding as core
from browsing import NARROW, SLIDE, WIDE, act, api, module_browser, see, unfold, violations
from server import ROOT, free_port, until

pytestmark = pytest.mark.browser
# Where the page is, and which recording it has then.
ADDRESSES = {"export/": "embedded", "page/": "smollm2", "page/?model=embedded": "embedded"}
# What page/stream.js gives: of each recorded request, of others, and of one that is broken off.
ASK = """async () => {
    const stream = await import(new URL("stream.js", document.baseURI));
    const {prompts, runs} = await stream.recording;
    const asked = runs.map(({prompt, request}) => ({...request, prompt: prompts[prompt]}));
    const all = async (request, signal = null) => {
        const events = [];
        for await (const event of stream.generate(request, "", signal)) events.push(event);
        return events;
    };
    const words = (request, signal) => all(request, signal).then(() => null, String);
    return {
        isRecorded: stream.isRecorded, offered: await stream.getJson("prompts"),
        health: await stream.getJson("health"), curve: await stream.getJson("curve"),
        raced: await Promise.all(asked.map((request) => all({...request, compare: true}))),
        alone: await Promise.all(asked.map((request) => all(request))),
        longer: await all({...asked[0], num_speculative_tokens: 7}),
        refused: await Promise.all([{prompt: "mine"}, {...asked[0], drafter: "auto"},
            {...asked[0], temperature: 1}, {...asked[0], json_schema: "{}"}].map((r) => words(r))),
        stopped: await words(asked[0], AbortSignal.abort()),
    };
}"""
SLOWLY = """async () => {
    const {generate, recording} = await import(new URL("stream.js", document.baseURI));
    const {prompts, runs: [{prompt, request}]} = await recording;
    const events = generate({...request, prompt: prompts[prompt]}, "", null);
    window.got = [];
    for await (const event of events) got.push(event);
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A file server's address and its folder, with an export and the repository's page."""
    folder, url = tmp_path_factory.mktemp("files"), f"http://127.0.0.1:{(port := free_port())}/"
    assert core.main(["--export", str(folder / "export"), "--model", "embedded"]) == 0
    shutil.copytree(ROOT / "page", folder / "page")
    command = [sys.executable, "-m", "http.server", "-b", "127.0.0.1", "-d", folder, str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:

        def is_up():
            with suppress(OSError), urlopen(url):
                return True

        until(is_up)
        yield url, folder
        process.kill()


browser = module_browser()


@pytest.fixture
def open_page(browser, site):
    """Opens a page; nothing may go wrong, or be asked for that is not a file beside it."""
    contexts, wrong = [], []

    def open_one(address, **options):
        contexts.append(browser.new_context(**{"reduced_motion": "reduce"} | options))
        page, folder = contexts[-1].new_page(), site[0] + address.rpartition("/")[0] + "/"

        def watch(route):
            asked = f"{route.request.method} {route.request.url}"
            if asked.startswith(f"GET {folder}"):
                return route.continue_()
            wrong.append(asked)
            return route.abort()

        page.route("**", watch)
        page.on("console", lambda said: said.type == "error" and wrong.append(said.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(site[0] + address)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_page_from_any_file_server_answers_from_its_recording(address, site, open_page):
    file = site[1] / address.rpartition("/")[0] / "recordings" / f"{ADDRESSES[address]}.json"
    told, page = json.loads(file.read_text("utf-8")), open_page(address)
    said = page.evaluate(ASK)
    assert said["isRecorded"] and said["offered"] == {"prompts": told["prompts"]}
    assert (said["health"], said["curve"]) == (told["health"], told["curve"])
    assert said["raced"] == [run["events"] for run in told["runs"]]
    for events, run in zip(said["alone"], told["runs"], strict=True):
        answer = {name: value for name, value in run["events"][-1].items() if name != "compare"}
        assert events == [event for event in run["events"] if "step" in event] + [answer]
    assert "recorded with num_speculative_tokens 5." in said["longer"][-1]["warnings"][-1]
    for words in said["refused"]:
        assert "This page has no server" in words and told["recorded_at"] in words
        assert "ngram" in words and words.endswith("08_speculative_decoding.py --port 5000")
    assert said["stopped"].startswith("AbortError")
    page.click("#race")  # the form begins with what was recorded, and offers no more
    api.expect(page.locator("#race-says")).to_contain_text("Medians of three runs")
    api.expect(page.locator("#server")).to_contain_text(f"Recorded on {told['recorded_at']}")
    assert {run["request"]["drafter"] for run in told["runs"]} == {
        *page.locator("#drafter option").all_text_contents()
    }


def test_a_recording_takes_its_time_where_pictures_may_move(open_page):
    page = open_page("export/", reduced_motion="no-preference")
    page.clock.install()
    page.clock.pause_at(2e12)
    page.evaluate(f"void ({SLOWLY})()")
    page.wait_for_function("window.got")
    assert page.evaluate("got.length") == 0
    until(lambda: page.clock.run_for(1000) or page.evaluate("'usage' in (got.at(-1) ?? {})"))


# --------------------------------------------------------------------------------- the chapters

SMOLLM2, SAYS = "page/", "#scene-says"
CHAPTERS = "start stream positions guess reject you cache pays loses sampling rejection who".split()


@pytest.fixture(scope="module")
def told():
    return json.loads((ROOT / "page" / "recordings" / "smollm2.json").read_text("utf-8"))


def pass_ms(told, rows):
    """Between measured numbers of positions it is a straight line."""
    known = sorted((int(n), ms) for n, ms in told["curve"]["pass_ms"].items())
    return float(np.interp(rows, *zip(*known, strict=True)))


def tokens_of(alpha, k):
    return sum(alpha**i for i in range(k + 1))


def speedup(told, k, alpha, c, batch=1):
    cycle = k * c * pass_ms(told, 1) + pass_ms(told, batch * (k + 1))
    return tokens_of(alpha, k) * pass_ms(told, batch) / cycle


def runs_of(told, prompt):
    """The greedy runs of a prompt, by drafter: events of the cycles."""
    runs = (r for r in told["runs"] if r["prompt"] == prompt and not r["request"]["temperature"])
    return {r["request"]["drafter"]: [e for e in r["events"] if "step" in e] for r in runs}


def spent(told, prompt):
    """The ms of each drafter's cycles behind the prefill, and of plain decoding's."""
    plain = next(r["events"] for r in told["runs"] if r["prompt"] == prompt)
    lanes = runs_of(told, prompt) | {"plain": [e["plain"] for e in plain if "plain" in e]}
    return {name: sum(sum(c["ms"].values()) for c in lane[1:]) for name, lane in lanes.items()}


def fastest(told, prompt):
    return min(ms := spent(told, prompt), key=ms.get)


def show(page, chapter):
    page.locator(f"[data-chapter={chapter}]").evaluate("node => node.scrollIntoView()")
    page.locator(f"#scene[data-at={chapter}]").wait_for()


def move(page, name, value, *words):
    act(page, (value, f"#move-{name}", {SAYS: words}))


def test_each_chapter_asks_first_and_the_recording_answers(open_page, told):
    """What is said was worked out here once more."""
    cycles = runs_of(told, "first")["draft_model"][1:]
    drafted = [cycle for cycle in cycles if len(cycle["proposals"]) > 1]
    whole = next(c for c in drafted if c["accepted_count"] == len(c["proposals"]))
    parts = told["curve"]["drafters"]["draft_model"]
    c = (parts["call_ms"] / 5 + parts["step_ms"]) / pass_ms(told, 1)
    weights = told["health"]["target"]["weight_bytes"]
    plain, drafted = spent(told, "first")["plain"], spent(told, "first")["draft_model"]

    def gain_of(readers):
        return speedup(told, 5, 0.8, c, readers)

    answers = {
        "start": (None, [f"{plain / drafted:.2f}×"]),
        "stream": (1, [f"{10 * weights / 1e9:.1f} GB"]),
        "positions": (0, [f"{pass_ms(told, 6) / pass_ms(told, 1):.2f}×"]),
        "guess": (
            whole["accepted_count"],
            [f"{len(whole['proposals'])} of {len(whole['proposals'])}"],
        ),
        "reject": (1, ["recovered"]),
        "you": (1, ["Three"]),
        "cache": (2, ["The length goes from"]),
        "pays": (2, [f"{tokens_of(0.8, 5):.2f}"]),
        "loses": (
            1,
            [f"{gain:.2f}×" for gain in (*map(gain_of, (1, 8)), speedup(told, 5, 0.8, 0.9))],
        ),
        "sampling": (1, ["belongs to the seed"]),
        "rejection": (1, ["Both together make p"]),
        "who": (
            None,
            [f"On the copied text {fastest(told, 'copy')}", f"story {fastest(told, 'new')}"],
        ),
    }
    assert [*answers] == CHAPTERS
    page = open_page(SMOLLM2, viewport=WIDE)
    for chapter, (right, words) in answers.items():
        show(page, chapter)
        article = page.locator(f"[data-chapter={chapter}]")
        said, buttons = article.locator(".answer-says"), article.locator(".answer-button")
        assert said.text_content() == "" and article.locator(".is-true, .is-false").count() == 0
        for at in range(buttons.count()):  # each may be chosen, and one is right
            buttons.nth(at).click()
            api.expect(said).to_contain_text("Yes." if at == right else re.compile("Yes|Not so"))
            if right is not None:
                assert article.locator(".is-false").count() == (at != right)
        assert article.locator(".is-true").count() == 1
        for each in words:
            assert each in said.text_content(), (chapter, each)


def test_what_is_moved_moves_the_picture_and_the_numbers(open_page, told):
    page, one = open_page(SMOLLM2, viewport=WIDE), pass_ms(told, 1)
    text = "".join(cycle["text"] for cycle in runs_of(told, "first")["draft_model"])
    show(page, "stream")
    move(page, "tokens", 5, "5 tokens")
    shown = page.locator("#scene-text .token")
    assert text.startswith("".join(shown.all_text_contents())) and shown.count() == 5
    show(page, "positions")
    for rows in (1, 7, 64):
        move(page, "rows", rows, f"{pass_ms(told, rows) / one:.2f}× the time of one")
        read = page.locator("#scene-pass :is(.draft .chip:not(.own), .position)")
        assert read.count() == rows
    show(page, "cache")
    move(page, "phase", 0, "Before the pass")
    cached = [cycle["cached"] for cycle in runs_of(told, "first")["draft_model"]]
    held = int(re.search(r"\d+", page.text_content(SAYS))[0])
    _, (_, kept), (end, _) = cached[[length for _, length in cached].index(held) :][:3]
    move(page, "phase", 3, "over what was cut")
    written = page.locator("#scene-plot .array .pass small").all_text_contents()
    assert [int(place) for place in written] == [*range(kept, end)]
    show(page, "pays")
    for alpha, k, c in ((0.5, 2, 0.1), (0.9, 10, 0.02), (0.3, 5, 0.9)):
        for name, value in {"alpha": alpha, "k": k, "c": c}.items():
            move(page, name, value)
        label = page.get_attribute("#scene-plot .half:last-child svg", "aria-label")
        assert f"{speedup(told, k, alpha, c):.2f}×" in label
        chances = map(float, page.locator("#scene-pass .position").all_text_contents())
        assert sum(chances) == pytest.approx(sum(alpha**i for i in range(k + 1)), abs=0.1)
        even = [a / 1000 for a in range(1001) if speedup(told, k, a / 1000, c) >= 1]
        pays = re.search(r"pays from α = (\S+) on", page.text_content(SAYS))
        assert bool(pays) == bool(even) and (
            not even or float(pays[1]) == pytest.approx(even[0], abs=0.006)
        )
        best = max(range(16), key=lambda n: speedup(told, n, alpha, c))
        words = f"K = {best} is best" if best else "not to draft is best"
        assert words in page.text_content(SAYS)
    show(page, "loses")
    for way in page.locator("[data-way]").all():
        way.click()
        api.expect(page.locator(f"{SAYS}")).to_contain_text(way.inner_text())
    show(page, "who")
    for way, prompt in (("copy", "copy"), ("new", "new")):
        page.click(f"[data-way={way}]")
        move(page, "share", 100)
        drafted = runs_of(told, prompt)
        num_tokens = sum(len(cycle["tokens"]) for cycle in drafted["ngram"])
        lanes = page.locator("#scene-plot .bar.fate")
        assert lanes.count() == num_tokens * (1 + len(drafted))  # and plain decoding's


def drag(page, figure, at, value, to):
    """Drag from one value of a figure's axis to another, with the mouse."""
    box, data = figure.bounding_box(), figure.evaluate("svg => ({...svg.dataset})")
    begin, end, left, right = (float(data[name]) for name in ("from", "to", "left", "right"))
    for step, place in ((page.mouse.down, at), (page.mouse.up, to)):
        x = left + (right - left) * (place - begin) / (end - begin)
        page.mouse.move(box["x"] + x, box["y"] + box["height"] / 2)
        step()
    assert page.input_value(f"#move-{data['moves']}") == str(value)


def test_a_figure_s_handle_is_dragged(open_page):
    """In a batch the positions of a pass are a multiple of K + 1."""
    page = open_page(SMOLLM2, viewport=WIDE)
    show(page, "positions")
    drag(page, page.locator("#scene-plot svg"), 6, 40, 40)
    see(page, {SAYS: "A pass over 40 positions"})
    show(page, "loses")
    page.click("[data-way=batch]")
    drag(page, page.locator("#scene-plot .half:first-child svg"), 5, 3, 3)
    drag(page, page.locator("#scene-plot .half:last-child svg"), 3, 7, 15)  # 64 positions


def test_the_opening_writes_both_texts_on_one_clock(open_page, told):
    """At half of the slower one's time plain decoding has half of its tokens, the drafter more."""
    page, ends = open_page(SMOLLM2, viewport=WIDE), spent(told, "first")
    text = page.locator(".writing .line")
    see(page, {".writing >> nth=1": "waits for your answer"})  # it would tell
    page.click("[data-chapter=start] .answer-button >> nth=0")
    move(page, "share", 50)
    plain, drafted = text.all_text_contents()
    assert drafted.startswith(plain) and len(drafted) > 1.3 * len(plain)
    move(page, "share", 100)
    see(page, {".writing": [f"all in {round(ends[name])} ms" for name in ("plain", "draft_model")]})
    assert len(set(text.all_text_contents())) == 1


def test_fonts_come_along_with_their_licence_and_are_what_it_names(open_page):
    page = open_page(SMOLLM2, viewport=WIDE)
    licence = (ROOT / "page" / "fonts" / "OFL.txt").read_text("utf-8")
    files = {path.name: path.read_bytes() for path in (ROOT / "page" / "fonts").glob("*.woff2")}
    assert re.findall(r"^(\S+\.woff2) ", licence, re.MULTILINE) == [
        "inter.woff2",
        "newsreader.woff2",
        "jetbrains-mono.woff2",
    ]
    assert {*re.findall(r"SHA-256 (\S+)", licence)} == {
        hashlib.sha256(data).hexdigest() for data in files.values()
    }
    loaded = "document.fonts.ready.then(() => [...document.fonts].map(f => f.status))"
    assert page.evaluate(loaded) == ["loaded"] * len(files)
    assert sum(map(len, files.values())) < 150_000


def test_with_the_same_noise_both_texts_and_the_scores_are_in_the_picture(open_page, told):
    page = open_page(SMOLLM2, viewport=WIDE)
    show(page, "sampling")
    assert page.locator(".twin:visible").count() == 0
    answer = next(r["events"][-1] for r in told["runs"] if r["request"]["temperature"])
    act(page, ("click", "[data-chapter=sampling] .answer-button >> nth=1", {}))
    see(page, {".twin": 2, "#scene-pass": (answer["text"][-40:], "with drafts", "without")})
    see(page, {"#scene-plot .row.drafting": 1, "#scene-plot .row.recovered": 1, SAYS: "rejected"})
    marks = page.locator("#scene-plot .mark")
    before = marks.evaluate_all("all => all.map((mark) => mark.style.left)")
    move(page, "noise", 3)
    assert marks.evaluate_all("all => all.map((mark) => mark.style.left)") != before


def test_by_rejection_one_draw_goes_step_by_step_and_many_come_to_p(open_page, told):
    page = open_page(SMOLLM2, viewport=WIDE)
    show(page, "rejection")
    see(page, {SAYS: "drawn from the shaded part", "#scene-plot .slot": 3})  # by itself
    assert page.locator("#move-draws-value").text_content() == "1"
    move(page, "draws", 0, "The drafter guesses")
    see(page, {"#scene-plot .slot": 1, "#scene-plot .row.drafting": 1, "#scene-plot .drawn": 0})
    move(page, "draws", 1, "is kept if u is below")
    see(page, {"#scene-plot .slot": 2, "#scene-plot .slot.rejected": "≥", "#scene-plot .drawn": 0})
    move(page, "draws", 2)
    see(page, {"#scene-plot .slot.recovered": 1, "#scene-plot .row.rejected": 1})
    see(page, {"#scene-plot .drawn": 1, "#scene-plot .mark": 0})
    act(page, ("click", "[data-chapter=rejection] .answer-button >> nth=1", {SAYS: "2000 draws"}))
    label = page.get_attribute("#scene-plot .rows", "aria-label")
    shares = re.findall(r"(\S+) p (\S+), drawn (\S+?)(?:;|$)", label)
    assert len(shares) == 7 and shares[-1][0] == "others"
    # Each came as often as p says: three standard deviations of 2,000 draws.
    assert all(abs(float(drawn) - float(p)) < 0.034 for _, p, drawn in shares)
    # The token that is asked about is the drafter's favourite, of which q is far above p.
    question = page.locator("[data-chapter=rejection] h3").text_content()
    token, q, p = re.search(r"“(.+)” too much: q is (\S+), p is (\S+)\.", question).groups()
    assert (token, p) == shares[0][:2] and float(q) > 1.5 * float(p) > 0.3


def play(page, said, given, places):
    """Choose the wrong token at these places of a round, and else what the target says there."""
    for at in range(4):
        right = f"[data-id='{said[given + at]}']"
        button = f"button:not({right})" if at in places else right
        act(page, ("click", f"#scene-movers {button} >> nth=0", {}))


def test_the_reader_drafts_in_rounds_against_the_drafter(open_page, told):
    """What the recorded target said judges; the drafter's own cycles from there are its score."""
    page = open_page(SMOLLM2, viewport=WIDE)
    show(page, "you")
    begin = page.locator("#scene-text .token").count()
    cycles, tokens = runs_of(told, "first")["draft_model"], []
    while len(tokens) < begin:
        tokens += cycles.pop(0)["tokens"]
    said = [token["id"] for cycle in cycles for token in cycle["tokens"]]
    theirs, mine = 0, 0
    wrong = ([], [1], [0, 2], [3])
    for number, (places, gives) in enumerate(zip(wrong, (5, 2, 1, 4), strict=True), 1):
        if number > 1:
            act(page, ("click", "#scene-movers >> text=Next pass", {SAYS: "choose 4 more tokens"}))
        see(page, {"#scene-movers button": 3})
        play(page, said, mine, places)
        mine, theirs = mine + gives, theirs + len(cycles[number - 1]["tokens"])
        kept = min([*places, 4])
        see(page, {SAYS: (f"Right: {kept} of your 4", f"gives {gives} token")})
        see(page, {"#scene-pass .slot.accepted": kept, "#scene-text .token": begin + mine})
        see(page, {"#scene-pass .slot.rejected": len(places[:1])})
        see(page, {"#scene-pass .cell.tail": 4 - kept, "#scene-pass .slot.bonus": int(not places)})
        rows = page.locator("#scene-plot .row:not(.scale)")
        for row, count in enumerate((mine, theirs, number)):
            api.expect(rows.nth(row).locator(".bar")).to_have_count(count)
            api.expect(rows.nth(row)).to_contain_text(
                f"{count} token{'s' * (count > 1)} in {number} pass"
            )
        label = page.get_attribute("#scene-plot .rows", "aria-label")
        assert f"you: {mine} tokens in {number} pass" in label and f"plain: {number} token" in label
    winner = "you win" if mine > theirs else "it wins"
    see(page, {SAYS: f"You have {mine} tokens, draft_model has {theirs}: {winner}."})
    act(page, ("click", "text=Begin anew", {SAYS: "choose 4 more tokens", "#scene-plot .bar": 0}))
    act(page, ("click", "#scene-movers button >> nth=0", {SAYS: "choose 3 more tokens"}))


def test_a_chapter_plays_up_to_its_question_and_on_with_the_answer(open_page):
    page = open_page(SMOLLM2, viewport=WIDE, reduced_motion="no-preference")
    show(page, "guess")
    see(page, {"#scene-pass .chip.on:not(.own)": 5})  # by itself
    assert page.locator("#scene-pass .verdict.on").count() == 0
    act(page, ("click", "[data-chapter=guess] .answer-button >> nth=2", {}))
    see(page, {"#scene-pass .verdict.on": 6, SAYS: "Nothing to cut"})


OUTSIDE = """(names) => names.filter((name) => {
    const {top, bottom, left, right, width} = document.querySelector(name).getBoundingClientRect();
    const isIn = top >= -1 && bottom <= innerHeight + 1 && left >= -1 && right <= innerWidth + 1;
    return !(width && isIn);
})"""
CUT = """() => [...document.querySelectorAll("#scene-plot:has(.rows), #scene")].filter((one) => (
    one.scrollHeight > one.clientHeight + 1)).map((one) => one.id)"""
PARTS = ["#scene", "#scene-movers", "#scene-legend", SAYS]


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1440", "390"])
def test_figure_legend_and_text_are_in_sight_and_axe_finds_nothing_wrong(open_page, size):
    """At both ends of each slider nothing overflows, and words of the glossary pop up in sight."""
    page = open_page(SMOLLM2, viewport=size)
    for chapter in CHAPTERS:
        show(page, chapter)
        page.click(f"[data-chapter={chapter}] .answer-button >> nth=0")
        for pick in range(16 if chapter == "you" else 0):  # with a bonus, and with a cut
            if pick and pick % 4 == 0:
                page.click("#scene-movers >> text=Next pass")
            page.locator("#scene-movers button").nth(pick % 3).click()
            assert page.evaluate(OUTSIDE, PARTS) + page.evaluate(CUT) == [], pick
        for slider in page.locator("#scene-movers input").all():
            for end in ("max", "min"):
                slider.evaluate(f"(s) => ({SLIDE})(s, s.{end})")
                assert page.evaluate(CUT) == [], chapter
                assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
                assert page.evaluate(OUTSIDE, PARTS) == [], chapter
        for word in page.locator(f"[data-chapter={chapter}] .word").all():
            word.focus()
            assert page.evaluate(OUTSIDE, ["#popup"]) == [], (chapter, word.text_content())
        assert violations(page, "#story") == [], chapter
        page.emulate_media(color_scheme="dark")
        assert violations(page, "#story", runOnly=["color-contrast"]) == [], chapter
        page.emulate_media(color_scheme="light")


def test_the_story_is_read_by_keyboard_and_leads_to_the_workbench(open_page, told):
    page = open_page(SMOLLM2, viewport=WIDE)
    page.focus("[data-chapter=reject] .answer-button >> nth=1")
    act(
        page,
        (
            "Enter",
            ":focus",
            {"[data-chapter=reject] .answer-says": "Yes.", "#scene[data-at=reject]": 1},
        ),
        ("Tab", ":focus", {}),
        ("Tab", ":focus", {"[data-chapter=reject] .skip:focus": 1}),
        ("Enter", ":focus", {"#move-phase:focus": 1}),
        ("Home", ":focus", {SAYS: "It is pending."}),
        ("ArrowRight", ":focus", {SAYS: "The drafter guesses"}),
    )
    cut = next(c for c in runs_of(told, "first")["draft_model"][1:] if c["rejected"])
    page.click("[data-chapter=reject] .quiet")
    see(page, {"#status": "Finished", "#prompt": 1, "#cycle-count": "of"})
    assert page.input_value("#prompt") == told["prompts"]["first"] and cut["step"] >= 1


# ---------------------------------------------------------------------------- the workbench


def test_the_workbench_begins_with_the_text_the_cycle_and_the_race(open_page):
    """They fill a desktop's window. All else is folded, until a key or a link opens it."""
    page, folds = open_page(SMOLLM2, viewport=WIDE), ("#more", "#statistics", "#whatif", "#model")
    see(page, {f"{fold}[open]": 0 for fold in folds} | {"#model-number": "134.5 M parameters"})
    act(page, ("click", "#race", {"#status": "Finished", "#race-says": "Medians of three runs"}))
    page.evaluate("document.querySelector('#workbench').scrollIntoView()")
    parts = ["#request", "#text", "#cycle", "#racing", "#race-says", "#model"]
    assert page.evaluate(OUTSIDE, parts) == []
    ends = "(all) => all.map((one) => document.querySelector(one).getBoundingClientRect().bottom)"
    assert min(page.evaluate(ends, ["#racing", "#model"])) > 800
    see(page, {"#statistics-number": "2.61 tokens per pass", "#settings-now": "K = 5, greedy"})
    for fold in folds:
        act(page, ("Enter", f"{fold} > summary", {f"{fold}[open]": 1}))
    act(page, ("click", "#run", {"#status": "Finished"}))
    see(page, {f"{fold}[open]": 1 for fold in folds})
    see(page, {"#statistics": "α counts a guess only if all before it were accepted"})
    page = open_page(f"{SMOLLM2}#whatif", viewport=WIDE)
    see(page, {"#whatif[open]": 1, "#model[open]": 0})
    page.click("[data-chapter=sampling] .quiet")  # a run with settings that are not as usual
    see(page, {"#status": "Finished", "#more[open]": 1, "#settings-now": "temperature 0.8"})


def test_what_if_follows_the_drafter_of_the_form_and_names_its_point(open_page, told):
    """The others' names come with the focus or the pointer."""
    page = open_page(f"{SMOLLM2}#whatif", viewport=WIDE)
    names = """() => [...document.querySelectorAll("#whatif-gain .measured + text")].map((one) => (
        one.checkVisibility({visibilityProperty: true}) ? one.textContent : null))"""
    for drafter in ("eagle3", "ngram"):
        page.select_option("#drafter", drafter)
        (compare,) = (
            r["events"][-1]["compare"] for r in told["runs"]
            if (r["prompt"], r["request"]["drafter"]) == ("first", drafter)
        )  # fmt: skip
        alpha = f"{compare['costs']['alpha']:.2f}".lstrip("0")
        speed = f"With {drafter} it was {compare['measured_speedup']:.2f}× as fast"
        see(page, {"#whatif-alpha-value": alpha, "#measured": speed, "#whatif-number": alpha})
        see(page, {"#status": "Finished"})  # the run that the choice began draws the figure anew
        assert sorted(page.evaluate(names), key=str) == [*[None] * 5, drafter]
    page.focus("#whatif-gain .measured[aria-label=self_int8]")
    assert {*page.evaluate(names)} == {None, "ngram", "self_int8"}
    assert violations(page, "#whatif") == []


def test_what_a_finger_presses_is_44_px_high_or_has_as_much_room(open_page):
    page = open_page(SMOLLM2, viewport=NARROW, has_touch=True, is_mobile=True)
    act(page, ("click", "#race", {"#status": "Finished", "#race-says": "Medians of three runs"}))
    unfold(page)
    small = page.locator("#workbench").evaluate("""(workbench) => {
        const pressed = "button, select, input, summary, textarea, .tokens .token";
        return [...workbench.querySelectorAll(pressed)].filter((one) => {
            const room = parseFloat(getComputedStyle(one, "::after").height) || 0;
            return one.checkVisibility() && Math.max(room, one.offsetHeight) < 44;
        }).map((one) => one.outerHTML);
    }""")
    assert small == [] and page.locator("#text .token").count() > 40
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert violations(page) == []


def test_a_recorded_page_speaks_of_no_server_and_keeps_what_was_measured(open_page):
    page = open_page(SMOLLM2, viewport=WIDE)
    words = page.locator("#workbench").text_content()
    act(page, ("click", "#race", {"#status": "Finished", "#race-says": "Medians of three runs"}))
    act(page, ("click", "#run", {"#status": "Finished"}))  # whatever is asked for once more
    words += page.locator("#workbench").text_content()
    assert re.findall(".{30}[Ss]erver.{30}", words) == []
    see(page, {"#measured": "the last race"})


def test_a_recorded_page_has_a_run_to_look_at_and_keeps_it_where_no_other_was_recorded(open_page):
    """Nobody has asked for the first one: the page stays where it is, and so does its address."""
    page = open_page(SMOLLM2, viewport=WIDE)
    kept = {"#status": "Finished", "#cycle-says": "tells most"}
    see(page, kept)
    assert "#" not in page.url and page.evaluate("scrollY") == 0
    page.click("#more summary")
    see(page, {"#more": "A recorded run keeps its settings", "#more input:visible": 0})
    address = f"#prompt={quote(page.input_value('#prompt'))}&temperature=1"
    page.evaluate("(address) => location.hash = address", address)
    see(page, kept | {"#error": "This page has no server"})
    page.click("#race")
    see(page, kept | {"#error": "This page has no server", "#track:visible": 0})
    page.select_option("#drafter", "mtp")
    see(page, kept | {"#cycle-says": "mtp proposed", "#settings-now": "greedy"})  # by itself
    act(page, ("click", "#race", {"#race-says": "The texts are identical", "#track:visible": 1}))
    page.click("[data-chapter=sampling] .quiet")
    see(page, {"#settings-now": "temperature 0.8", "#status": "Finished", "#track:visible": 0})
    assert page.input_value("#demo-prompt") == "new"
    page.select_option("#demo-prompt", "copy")
    see(page, kept | {"#settings-now": "greedy", "#error": re.compile("^$")})
    page = open_page(SMOLLM2, viewport=WIDE)
    see(page, kept)
    act(page, ("click", "#link", {"#status": "it holds the request"}))
    assert "prompt=" in page.url


def test_a_model_without_a_drafter_has_its_story_too(browser, site, told):
    """Whatever a chapter would show of drafts, it shows of plain cycles, and nothing fails."""
    run, failed = told["runs"][0], []
    cached, events = run["events"][0]["cached"][1], []
    for at, event in enumerate(e["plain"] for e in run["events"] if "plain" in e):
        texts = {str(event["tokens"][0]["id"]): event["text"]}
        fields = {
            "proposals": [],
            "tree": None,
            "rejected": None,
            "recurrent": None,
            "texts": texts,
        }
        events.append(event | fields | {"cached": [cached + at] * 2, "distributions": [[]]})
    events += run["events"][len(runs_of(told, "first")["ngram"]) :]
    run |= {"request": run["request"] | {"drafter": "none"}, "events": events}
    runs = [run | {"prompt": name} for name in told["prompts"]]
    curve = told["curve"] | {"drafters": {}}
    body = json.dumps(told | {"runs": runs, "curve": curve})
    with browser.new_context(viewport=WIDE, reduced_motion="reduce") as context:
        page = context.new_page()
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.route("**/recordings/*", lambda route: route.fulfill(body=body))
        page.goto(f"{site[0]}page/")
        for chapter in CHAPTERS:
            show(page, chapter)
            page.click(f"[data-chapter={chapter}] .answer-button >> nth=0")
            see(page, {f"[data-chapter={chapter}] .answer-says": re.compile("Yes|Not so")})
        assert failed == []


def test_a_page_without_its_recording_says_so(browser, site):
    with browser.new_context(viewport=WIDE) as context:
        page = context.new_page()
        page.goto(f"{site[0]}page/?model=nobody")
        see(
            page,
            {"#story": "There is no recording recordings/nobody.json", "#error": "no recording"},
        )
