"""The page opens from any file server, without a server of ours, and then a recording answers.

An export and the repository's own folder are opened from `python -m http.server`. Whatever else the
browser asks for is refused, and is a failure, as is a word on its console.

    python -m pytest tests/test_story.py    needs playwright and chromium
"""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from urllib.request import urlopen

import pytest
import speculative_decoding as core
from server import ROOT, free_port, until

pytestmark = pytest.mark.browser
api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
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
    told, said = json.loads(file.read_text("utf-8")), open_page(address).evaluate(ASK)
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


def test_a_recording_takes_its_time_where_pictures_may_move(open_page):
    page = open_page("export/", reduced_motion="no-preference")
    page.clock.install()
    page.clock.pause_at(2e12)
    page.evaluate(f"void ({SLOWLY})()")
    page.wait_for_function("window.got")
    assert page.evaluate("got.length") == 0
    until(lambda: page.clock.run_for(1000) or page.evaluate("'usage' in (got.at(-1) ?? {})"))
