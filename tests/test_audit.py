"""tools.audit: endpoints that lie or fail, our own server, and our server with a mutant.

Seeds are fixed: what is drawn is the same in each run. `main` serves with a mutant.
"""

import importlib
import itertools
import json
import math
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from mutants import Mutant, broken
from started import CORE, module_server, serving

from tools import audit, endpoint

KEY = "sk-very-secret"
OFF = ("--off", '{"speculative": false}')
FEW = ("--texts", "3", "--tokens", "16", "--samples", "80", "--timeout", "60")
MODELS = {"data": [{"id": "fake"}]}
NGRAM = {"drafter": "ngram"}
DRAWN = {"drafter": "draft_model", "fixed_k": True}  # the same noise draws for drafter and target
REJECTION = DRAWN | {"verification": "rejection"}
MUTANTS = {  # name: place, old code, new code; and the fields of requests that meet it
    "a refused token is emitted": (
        ("core:verify", "Judgement(chosen, \"recovered\" if children",
         "Judgement(judged[-1].id if children else chosen, \"recovered\" if children"), NGRAM),
    "the first drafted token is always right": (
        ("core:verify", "draft.tokens[i] == chosen", "draft.tokens[i] == chosen or not accepted"),
        NGRAM),
    "refused tokens stay in the cache": (
        ("core:Engine.accept", "slots.keep(s.row, len(draft.tokens), path[: num_kept - 1])",
         "pass"), NGRAM),
    "p and q are swapped": (
        ("core:verify_by_rejection", "u * float(q[token]) < float(p[i, token])",
         "u * float(p[i, token]) < float(q[token])"), REJECTION),
    "the residual is forgotten": (
        ("core:verify_by_rejection", "draw(residual(p[i], q), u)", "draw(p[i], u)"), REJECTION),
    "the bonus is drawn from the row before": (
        ("core:verify_by_rejection", "draw(p[-1], u)", "draw(p[-2:][0], u)"), REJECTION),
    "one number judges all drafted tokens": (
        ("core:verify_by_rejection", " + i, noise.ACCEPT", ", noise.ACCEPT"), REJECTION),
    "all rows of a draft have the first mask": (
        ("runtime.grammars:Matcher._walk", "masks[node + 1]\n", "masks[0]\n"), DRAWN),
    "a grammar drops drafted tokens": (
        ("runtime.grammars:Matcher.cut", "if is_drawn:", "if False:"), REJECTION),
    "noise is the same at all places of a draft": (
        ("core:choices", "num_tokens + draft.depth(i)", "num_tokens"), DRAWN),
}  # fmt: skip
QUICK = ("the first drafted token is always right", "a refused token is emitted")


def main(arguments):
    """Serve with a mutant, whose name follows --mutant."""
    at = arguments.index("--mutant")
    place, old, new = MUTANTS[arguments[at + 1]][0]
    function, other = broken(Mutant("", place, old, new, ()))
    function.__code__ = other.__code__
    return importlib.import_module(CORE).main(arguments[:at] + arguments[at + 2 :])


server = module_server()


def fair(asked):
    """An answer: each token is " a" or " b", with a probability of one half; " a" if greedy."""
    chance = random.Random(f"{asked['prompt']} {asked.get('seed')} {asked.get('speculative')}")
    tokens = [chance.choice([" a", " b"]) for _ in range(asked["max_tokens"])]
    tokens = tokens if asked["temperature"] else [" a"] * asked["max_tokens"]
    text = "".join(tokens)
    if "response_format" in asked:
        tokens = [text := f"[{chance.choice([3, 7])}, 9]"]
    count, half = len(tokens), math.log(0.5)
    top = [{token: half, "-": half} if "[" in token else {" a": half, " b": half}
           for token in tokens]  # fmt: skip
    told = {"tokens": tokens, "token_logprobs": [half] * count, "top_logprobs": top}
    return {
        "model": "fake",
        "choices": [{"text": text, "logprobs": told}],
        "usage": {"completion_tokens": count},
        "timings": {"draft_n": 2, "draft_n_accepted": min(2, count)},
    }


class Fake:
    """An endpoint that answers as a function of the request's fields says, and notes requests.

    The function returns a body as a dictionary, (status, text), or bytes that are sent as they are.
    None keeps the client waiting, and ... sends without an end.
    """

    def __init__(self, answer, models=MODELS):
        self.asked, self.closed, lock = [], threading.Event(), threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler):
                self.send(handler, models)

            def do_POST(handler):
                length = int(handler.headers["Content-Length"])
                asked = json.loads(handler.rfile.read(length))
                with lock:
                    self.asked.append(asked)
                asked = asked | {"key": handler.headers["Authorization"]}
                self.send(handler, answer(asked))

            def log_message(handler, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.socket.listen(64)  # by default those in company have to ask twice
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def send(self, handler, said):
        if said is None:
            self.closed.wait()
        elif isinstance(said, bytes):
            handler.wfile.write(said)
        else:
            status, text = (200, json.dumps(said)) if isinstance(said, dict) else said
            handler.send_response(status)
            handler.send_header("Location", "http://127.0.0.1:9/elsewhere")
            handler.end_headers()
            try:
                while text is ...:
                    handler.wfile.write(b" " * 4096)
                handler.wfile.write(text.encode())
            except OSError:
                pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()


def audited(capsys, url, *arguments):
    """(exit status, all that was printed, the document)."""
    status = audit.main([url, "--json", *FEW, *arguments])
    out, error = capsys.readouterr()
    assert "Traceback" not in out + error and KEY not in out + error
    return status, out + error, json.loads(out) if out else None


def told(change):
    """An answer with a change to its log-probabilities."""

    def answer(asked):
        body = fair(asked)
        change(body["choices"][0]["logprobs"])
        return body

    return answer


FAULTS = {  # what each request is answered with, the exit status, and what is said
    "hangs": (lambda _: None, 2, "did not answer in 1 s"),
    "closes": (lambda _: b"", 2, "does not answer"),
    "garbage": (lambda _: b"\x00\xff\x00 1 2 3\r\n\r\n", 2, "does not answer"),
    "no_json": (lambda _: (200, '{"choices": ['), 2, "is no JSON"),
    "html": (lambda _: (200, "<html>Welcome"), 2, "is no JSON: '<html>Welcome'"),
    "nested": (lambda _: (200, "[" * 100_000), 2, "is no JSON"),
    "error": (lambda _: (500, "out of\nmemory"), 2, "status 500: out of memory"),
    "endless": (lambda _: (200, ...), 2, "is no JSON"),
    "redirects": (lambda _: (302, ""), 2, "status 302"),
    "another_form": (lambda _: {"choices": [{"text": 3}]}, 2, "none of the protocol's"),
    "another_model": (lambda asked: fair(asked) | {"model": "other"}, 2, "answers as other"),
    "its_key": (lambda asked: (401, f"bad key {asked['key']}"), 2, "bad key Bearer …"),
    "only_speculation_fails": (
        lambda asked: fair(asked) if "speculative" in asked else (500, "a bug"), 1, "a bug"),
    "sums_to_two": (
        told(lambda x: x.update(top_logprobs=[{" a": 0.0, " b": 0.0}] * len(x["tokens"]))), 1,
        "a probability of 2.000 together"),
    "not_a_number": (
        told(lambda x: x.update(token_logprobs=[float("nan")] * len(x["tokens"]))), 1,
        "log-probability of nan"),
    "accepts_too_many": (
        lambda asked: fair(asked) | {"timings": {"draft_n": 2, "draft_n_accepted": 3}}, 1,
        "3 of 2"),
    "json_does_not_fit": (
        lambda asked: fair(asked) | {"choices": [{"text": "[1"}]}, 1, "do not fit: '[1'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_an_endpoint_that_fails_or_lies_gets_a_sentence(fault, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(endpoint, "LARGEST", 1 << 18)
    answer, expected, words = FAULTS[fault]
    with Fake(answer) as fake:
        few = ("--timeout", "1") if fault == "hangs" else ()
        status, _, document = audited(capsys, fake.url, *OFF, *few)
    assert status == expected
    assert words in document["verdict"] or words in str(document["findings"])


@pytest.mark.parametrize("models", [{}, {"data": []}, (404, "no")])
def test_an_endpoint_that_names_no_model_gets_a_sentence(models, capsys):
    with Fake(fair, models) as fake:
        status, said, _ = audited(capsys, fake.url)
    assert status == 2 and said.startswith("error: ")


@pytest.mark.parametrize("url", ["file:///etc/passwd", "nonsense", "http://127.0.0.1:1"])
def test_what_is_no_endpoint_gets_a_sentence(url, capsys):
    status, said, _ = audited(capsys, url)
    assert status == 2 and said.startswith("error: ") and "root" not in said


def test_without_plain_decoding_nothing_is_told(capsys):
    with Fake(fair) as fake:
        status, _, document = audited(capsys, fake.url)
    assert status == 2 and "--baseline or --off" in document["verdict"]


@pytest.mark.parametrize(("b", "verdict", "expected"), [(-0.72, "near-ties", 0), (-3, "failed", 1)])
def test_a_near_tie_is_told_from_an_error(b, verdict, expected, capsys):
    def answer(asked):
        body = fair(asked)
        if not asked["temperature"] and "speculative" not in asked:
            told = body["choices"][0]["logprobs"]
            told["tokens"] = [" b", *told["tokens"][1:]]
            body["choices"][0]["text"] = "".join(told["tokens"])
        for each in body["choices"][0]["logprobs"]["top_logprobs"] * (not asked["temperature"]):
            each[" b"] = b
        return body

    with Fake(answer) as fake:
        status, _, document = audited(capsys, fake.url, *OFF)
    (found,) = [f for f in document["findings"] if f["check"] == "greedy, plain decoding"]
    assert found["verdict"] == verdict and "3 of 3 texts differ (100 in 100)" in found["evidence"]
    assert verdict == "near-ties" or status == expected


def test_an_interrupted_audit_asks_for_what_is_missing_alone(capsys, tmp_path):
    state, most, count = tmp_path / "state", 100, itertools.count()

    def answer(asked):
        return fair(asked) if next(count) < most else (500, "")

    with Fake(answer) as fake:
        assert audited(capsys, fake.url, *OFF, "--state", str(state))[0] == 2
        kept = sum(1 for line in state.read_text().splitlines() if line)
        assert kept == most
        state.write_bytes(state.read_bytes() + b'\n[1, 2]\n"\xff\n{"cut off')
        fake.asked.clear()
        most = math.inf
        status, _, document = audited(capsys, fake.url, *OFF, "--state", str(state))
        assert status == 0
        assert len(fake.asked) == 3 * 4 + 1 + 2 * (3 + 1) * 80 - kept
        fake.asked.clear()
        assert audited(capsys, fake.url, *OFF, "--state", str(state))[2] == document
        assert not fake.asked


@pytest.mark.parametrize("told_by", ["plain decoding", "log-probabilities"])
def test_samples_of_another_distribution_are_found(told_by, capsys):
    def answer(asked):
        body = fair(asked)
        if "speculative" not in asked or told_by == "log-probabilities":
            tokens = body["choices"][0]["logprobs"]["tokens"]
            if "response_format" not in asked:
                tokens[1:] = [" a"] * len(tokens[1:])
                body["choices"][0]["text"] = "".join(tokens)
        return body

    plain = OFF if told_by == "plain decoding" else ()
    with Fake(answer) as fake:
        status, _, document = audited(capsys, fake.url, *plain)
    failed = {f["check"] for f in document["findings"] if f["verdict"] == "failed"}
    assert status == 1 and any(told_by in check for check in failed)


@pytest.mark.parametrize("fields", [{}, NGRAM, REJECTION], ids=["default", "ngram", "rejection"])
def test_our_server_passes(fields, server, capsys):
    fields, url = f"--fields={json.dumps(fields)}", f"http://127.0.0.1:{server.port}"
    status, _, document = audited(capsys, url, *OFF, fields)
    assert status == 0, document
    assert document["verdict"].startswith("lossless, as far as 10 checks tell")


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=[] if m in QUICK else [pytest.mark.slow]) for m in MUTANTS]
)
def test_a_mutant_is_found(name, capsys):
    """Each by itself: a broken engine may fail its server as well as its texts."""
    few = ("--texts", "6", "--tokens", "32", "--samples", "80" if name in QUICK else "600")
    fields = f"--fields={json.dumps(MUTANTS[name][1])}"
    with serving("--mutant", name, module="test_audit") as broken_server:
        url = f"http://127.0.0.1:{broken_server.port}"
        status, _, document = audited(capsys, url, *OFF, fields, *few)
    assert status == 1, document
    with capsys.disabled():
        failed = [f for f in document["findings"] if f["verdict"] == "failed"]
        print("\n", name, *(f"  {f['check']}: {f['evidence']}"[:150] for f in failed), sep="\n")
