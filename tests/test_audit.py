"""tools.audit: endpoints that lie or fail, our own server, and our server with a mutant.

Seeds are fixed: what is drawn is the same in each run. `main` serves with a mutant.
"""

import importlib
import inspect
import itertools
import json
import math
import operator
import textwrap
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from conftest import application, mutants
from fake_endpoint import fair, fake
from started import module_server

from server import core
from server.options import Options
from tools import audit
from tools import endpoint as client

KEY = "sk-very-secret"
OFF = ("--off", '{"speculative": false}')
FEW = ("--texts", "3", "--tokens", "16", "--samples", "80", "--timeout", "60")
NGRAM = {"drafter": "ngram", "fixed_k": True}  # whatever the clock says of drafts
DRAWN = {"drafter": "draft_model", "fixed_k": True}  # the same noise draws for drafter and target
REJECTION = DRAWN | {"verification": "rejection"}
# Mutants of mutants.txt: the fields of requests that meet one, the check that has to find it (no
# other one is made), and the samples of a prompt that this takes: few are quick.
FOUND = {
    "the first draft is always right": (NGRAM, "greedy, plain decoding", 30),
    "p and q are swapped": (REJECTION, "sampled, plain decoding, 2nd token", 60),
    "all drafts are judged by one number": (REJECTION, "sampled, log-probabilities", 500),
    "noise is the same at each place of a draft": (
        DRAWN, "sampled, plain decoding, repetition", 120),
    "a rejected token may come back": (REJECTION, "JSON, plain decoding", 300),
    "all tokens of a draft have one mask": (DRAWN, "bounded", 40),
    "a refused draft stays in the cache": (NGRAM, "greedy", 30),
}  # fmt: skip


@contextmanager
def broken(name):
    """Break the function that a line of mutants.txt names, for all who hold it, for a while."""
    (mutant,) = [each for each in mutants() if each.name == name]
    scope = vars(importlib.import_module(mutant.module))
    function = inspect.unwrap(operator.attrgetter(mutant.path)(SimpleNamespace(**scope)))
    source, names = textwrap.dedent(inspect.getsource(function)), dict(scope)
    assert source.count(mutant.old) == 1
    exec(source.replace(mutant.old, mutant.new), names)  # noqa: S102
    sound, function.__code__ = function.__code__, inspect.unwrap(names[function.__name__]).__code__
    try:
        yield
    finally:
        function.__code__ = sound


@pytest.fixture(scope="module")
def app():
    """Our server in this process, where it can be broken; it remembers no text."""
    options = Options("embedded", prefix_cache_mb=0, suffix_cache=0)
    with application(core.load_engine(options), options) as visitor:
        yield visitor.application


server = module_server()


def audited(capsys, url, *arguments):
    """(exit status, all that was printed, the document)."""
    status = audit.main([url, "--json", *FEW, *arguments])
    out, error = capsys.readouterr()
    assert "Traceback" not in out + error and KEY not in out + error
    return status, out + error, json.loads(out) if out else None


def with_logprobs(**lists):
    """A function that answers with other log-probabilities, the same for each token."""

    def answer(asked):
        body = fair(asked)
        told = body["choices"][0]["logprobs"]
        told |= {name: [one] * len(told["tokens"]) for name, one in lists.items()}
        return body

    return answer


def unless_plain(other):
    """A function that answers so, but fairly where plain decoding is asked for."""
    return lambda asked: fair(asked) if "speculative" in asked else other(asked)


FAULTS = {  # what each request is answered with, the exit status, and what is said
    "hangs": (lambda _: None, 2, "did not answer in 1 s"),
    "closes": (lambda _: b"", 2, "does not answer"),
    "garbage": (lambda _: b"\x00\xff\x00 1 2 3\r\n\r\n", 2, "does not answer"),
    "no_json": (lambda _: (200, '{"choices": ['), 2, "is no JSON"),
    "html": (lambda _: (200, "<html>Welcome"), 2, "is no JSON: '<html>Welcome'"),
    "nested": (lambda _: (200, "[" * 100_000), 2, "is no JSON"),
    "error": (lambda _: (500, "out of\nmemory"), 2, "status 500: out of memory"),
    "endless": (lambda _: (200, ...), 2, "is no JSON"),
    "redirects": (lambda _: b"HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1:9/elsewhere\r\n\r\n",
                  2, "status 302"),
    "another_form": (lambda _: {"choices": [{"text": 3}]}, 2, "none of the protocol's"),
    "another_model": (lambda asked: fair(asked) | {"model": "other"}, 2, "answers as other"),
    "its_key": (lambda asked: (401, f"bad key {asked['key']}"), 2, "bad key Bearer …"),
    "its_key_as_garbage": (lambda asked: f"{asked['key']}\r\n".encode(), 2, "does not answer"),
    "fails_with_speculation": (unless_plain(lambda _: (500, "a bug")), 1, "a bug"),
    "json_does_not_fit": (unless_plain(
        lambda asked: fair(asked) | {"choices": [{"text": "[1"}]}), 1, "do not fit: '[1'"),
    "sums_to_two": (with_logprobs(top_logprobs={" a": 0.0, " b": 0.0}), 1, "2.000 together"),
    "no_number": (with_logprobs(token_logprobs=math.nan), 1, "log-probability of nan"),
    "accepts_too_many": (
        lambda asked: fair(asked) | {"timings": {"draft_n": 2, "draft_n_accepted": 3}}, 1,
        "3 of 2"),
}  # fmt: skip


@pytest.mark.parametrize("fault", [
    pytest.param(each, marks=[pytest.mark.slow] * (each == "hangs")) for each in FAULTS
])  # fmt: skip
def test_an_endpoint_that_fails_or_lies_gets_a_sentence(fault, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(client, "LARGEST", 1 << 18)
    answer, expected, words = FAULTS[fault]
    few = ("--timeout", "1") if fault == "hangs" else OFF
    with fake(answer) as endpoint:
        status, _, document = audited(capsys, endpoint.url, *few)
    assert status == expected
    assert words in document["verdict"] or words in str(document["findings"])


@pytest.mark.parametrize("models", [{}, {"data": []}, (404, "no")])
def test_an_endpoint_that_names_no_model_gets_a_sentence(models, capsys):
    with fake(fair, models) as endpoint:
        status, said, _ = audited(capsys, endpoint.url)
    assert status == 2 and said.startswith("error: ")


@pytest.mark.parametrize("url", ["file:///etc/passwd", "nonsense", "http://127.0.0.1:1"])
def test_what_is_no_endpoint_gets_a_sentence(url, capsys):
    status, said, _ = audited(capsys, url)
    assert status == 2 and said.startswith(f"error: {url}") and "root" not in said


@pytest.mark.parametrize(("b", "says", "verdict", "expected"), [
    (-0.72, -0.72, "near-ties", 0), (-3, -3, "failed", 1),
    (-3, -0.7, "failed", 1),  # who errs says that it is nearly right
])  # fmt: skip
def test_a_near_tie_is_told_from_an_error(b, says, verdict, expected, capsys):
    def answer(asked):
        body = fair(asked)
        if not asked["temperature"]:
            told = body["choices"][0]["logprobs"]
            is_plain = "speculative" in asked
            top = {" a": math.log(0.5), " b": b if is_plain else says}
            told["top_logprobs"] = [top] * len(told["tokens"])
            if not is_plain:
                told["tokens"][0] = " b"
                told["token_logprobs"][0] = says
                body["choices"][0]["text"] = "".join(told["tokens"])
        return body

    with fake(answer) as endpoint:
        status, _, document = audited(capsys, endpoint.url, *OFF)
    (found,) = [f for f in document["findings"] if f["check"] == "greedy, plain decoding"]
    assert found["verdict"] == verdict and "3 of 3 texts differ (100 in 100)" in found["evidence"]
    assert status == expected


def test_an_interrupted_audit_asks_for_what_is_missing_alone(capsys, tmp_path):
    state, most, count = tmp_path / "state", 100, itertools.count()

    def answer(asked):
        return fair(asked) if next(count) < most else (500, "")

    with fake(answer) as endpoint:
        assert audited(capsys, endpoint.url, *OFF, "--state", str(state))[0] == 2
        kept = sum(1 for line in state.read_text().splitlines() if line)
        assert kept == most
        state.write_bytes(state.read_bytes() + b'\n[1, 2]\n"\xff\n{"cut off')
        endpoint.asked.clear()
        most = math.inf
        status, _, document = audited(capsys, endpoint.url, *OFF, "--state", str(state))
        assert status == 0
        assert len(endpoint.asked) == 3 * 4 + 1 + 2 * (3 + 1) * 80 - kept
        endpoint.asked.clear()
        assert audited(capsys, endpoint.url, *OFF, "--state", str(state))[2] == document
        assert not endpoint.asked


@pytest.mark.parametrize("check", ["in company", "plain decoding"])
def test_texts_that_differ_where_nothing_tells_why_are_no_proof(check, capsys):
    count = itertools.count()

    def answer(asked):
        body = fair(asked)
        if not asked["temperature"]:
            is_late = next(count) in (7, 8)
            is_other = "speculative" in asked if check == "plain decoding" else is_late
            body["choices"][0] = {"text": "a" if is_other else "b"}
        return body

    with fake(answer) as endpoint:
        status, said, document = audited(capsys, endpoint.url, *OFF)
    assert status == 2 and document["verdict"].startswith(f"not told: greedy, {check}: ")


def silent(asked):
    body = fair(asked)
    del body["choices"][0]["logprobs"]
    return body


def empty(asked):
    return fair(asked) | {"choices": [{"text": ""}]}


def idle(asked):
    return fair(asked) | {"timings": {"draft_n": 0, "draft_n_accepted": 0}}


def busy(asked):
    return (429, "too many") if "seed" in asked and "speculative" not in asked else fair(asked)


def wrong_or_short(asked):
    """Of three greedy texts one goes on where plain decoding has ended, and two are wrong."""
    body = fair(asked)
    if not asked["temperature"] and "speculative" not in asked:
        told, is_short = body["choices"][0]["logprobs"], asked["prompt"].startswith("tick")
        told["tokens"] = told["tokens"][:8] if is_short else [" b", *told["tokens"][1:]]
        for name in ("token_logprobs", "top_logprobs"):
            told[name] = told[name][: len(told["tokens"])]
        if not is_short:
            told["token_logprobs"][0] = told["top_logprobs"][0][" b"] = -6.0
        body["choices"][0]["text"] = "".join(told["tokens"])
    return body


@pytest.mark.parametrize(("answer", "expected", "words"), [
    (lambda asked: silent(asked) if "speculative" in asked else fair(asked), 0, "lossless, as far"),
    (unless_plain(silent), 0, "lossless, as far"),  # only one side tells its tokens
    (lambda asked: fair({n: x for n, x in asked.items() if n != "speculative"}), 2,
     "plain decoding has drafted tokens"),
    (empty, 2, "all greedy requests with empty texts"),
    (idle, 2, "has drafted nothing: is speculation on?"),
    (busy, 2, "status 429"),
], ids=["plain is silent", "ours is silent", "plain drafts", "empty", "idle", "busy"])  # fmt: skip
def test_what_was_not_compared_is_no_verdict(answer, expected, words, capsys):
    with fake(answer) as endpoint:
        status, _, document = audited(capsys, endpoint.url, *OFF)
    assert status == expected and words in document["verdict"], document


def test_a_text_that_ends_early_hides_no_error(capsys):
    with fake(wrong_or_short) as endpoint:
        _, _, document = audited(capsys, endpoint.url, *OFF)
    (found,) = [f for f in document["findings"] if f["check"] == "greedy, plain decoding"]
    assert found["verdict"] == "failed", document


def test_what_cannot_be_printed_is_no_verdict(capsys, monkeypatch):
    def full(*texts, **options):
        if options.get("file") is None:
            raise OSError("no space left")

    with fake(fair) as endpoint:
        monkeypatch.setattr("builtins.print", full)
        assert audit.main([endpoint.url, "--json", *FEW, *OFF]) == 2


def test_a_state_that_cannot_be_written_is_one_line(capsys, tmp_path):
    state = str(tmp_path / "no" / "state")
    with fake(fair) as endpoint:
        status, said, _ = audited(capsys, endpoint.url, *OFF, "--state", state)
    assert status == 2 and f"'{state}'" in said


@pytest.mark.parametrize("plain", [OFF, ()], ids=["plain decoding", "log-probabilities"])
def test_samples_of_another_distribution_are_found(plain, capsys):
    def always_a(asked):
        body = fair(asked | {"temperature": 0})
        return fair(asked) if "response_format" in asked else body

    with fake(unless_plain(always_a)) as endpoint:
        status, _, document = audited(capsys, endpoint.url, *plain)
    failed = {f["check"] for f in document["findings"] if f["verdict"] == "failed"}
    assert status == 1 and "sampled, log-probabilities" in failed
    assert not plain or "sampled, plain decoding, 2nd token" in failed


@pytest.mark.parametrize("fields", [
    {}, pytest.param(REJECTION, marks=pytest.mark.slow),
], ids=["default", "rejection"])  # fmt: skip
def test_our_server_passes(fields, server, capsys):
    given, url = f"--fields={json.dumps(fields)}", f"http://127.0.0.1:{server.port}"
    status, _, document = audited(capsys, url, *OFF, given, "--samples", "40")
    assert status == 0, document
    assert document["verdict"].startswith("lossless, as far as 11 checks tell")


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=[pytest.mark.slow] * (FOUND[m][2] > 100)) for m in FOUND]
)
def test_a_mutant_is_found(name, app, capsys, monkeypatch):
    def send(endpoint, path, fields=None):
        answer = app.test_client().open(path, method="POST" if fields else "GET", json=fields)
        if answer.status_code != 200:
            raise client.NoAnswer(f"status {answer.status_code}: {answer.text}")
        return answer.json

    monkeypatch.setattr(client.Endpoint, "_send", send)  # in the place of sockets
    fields, check, samples = FOUND[name]
    kind = check.split(",")[0].replace("JSON", "bounded")
    for other in {"greedy", "sampled", "bounded"} - {kind}:
        monkeypatch.setattr(audit.Audit, other, lambda self: [])
    few = "--texts", "6", "--tokens", "32", "--samples", str(samples)
    off = () if check == "sampled, log-probabilities" else OFF  # it needs none
    with broken(name):
        given = *off, f"--fields={json.dumps(fields)}", *few
        status, _, document = audited(capsys, "http://here", *given)
    found = [finding["check"] for finding in document["findings"] if finding["verdict"] == "failed"]
    assert status == 1 and check in found, document
