"""A drafter's fault costs the speculation and never a token.

A target's fault costs the request that it belongs to, and nobody else's. Both are called up in the
real process, on a real socket, and the client and /health are told of them. Faults that need no
process are in test_drafters.py, test_controller.py and test_batching.py.
"""

import gc
import logging
import signal
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import application
from faulty_server import DRAFTER_FAULTS, FIRST_ID, TARGET_FAULTS
from started import COLOURS, ENDLESS, FAULTY, PATHS, end_of, serving, until

from runtime.values import Request
from server.options import Options
from server.worker import Worker

FIELDS = {"prompt": COLOURS, "max_tokens": 40}
IDS = [5, 6, 7, 8, 5, 6, 7]


@pytest.fixture(scope="module")
def server():
    options = ("--drafter", "ngram", "--fixed-k")
    with serving(*options, module=FAULTY, constants={"drafter_timeout": 0.7}) as server:
        yield server
        assert server.health()["status"] == "ok"
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0


@pytest.fixture(scope="module")
def plain_ids(server):
    return server.generate(**FIELDS, speculative=False)[1]["token_ids"]


def poisoned(fault, **fields):
    """A request whose prompt calls the target's fault up."""
    prompt = [FIRST_ID + list(TARGET_FAULTS).index(fault), *IDS]
    return {"prompt": prompt, "max_tokens": 40} | fields


def is_sound(server):
    """Whether /health says that all is well, once nothing runs or is kept."""
    server.wait_until_idle()
    return server.health()["status"] == "ok"


@pytest.mark.parametrize("fault", DRAFTER_FAULTS)
@pytest.mark.parametrize("way", [{}, {"temperature": 0.9, "seed": 5, "stream": True}])
def test_a_drafter_s_fault_never_changes_a_token(server, fault, way):
    """The client gets the target's own text and a warning, /health counts the loss."""
    one = FIELDS | {"max_tokens": 1, "drafter": fault}
    until(lambda: not server.generate(**one)[1]["warnings"])  # a late thread has ended
    before, fields = server.health()["warnings"], FIELDS | way
    status, body = end_of(server.call("POST", "/generate", fields | {"drafter": fault}))
    expected = server.generate(**fields | {"stream": False, "speculative": False})[1]
    assert status == 200
    for name in ("token_ids", "text", "finish_reason"):
        assert body[name] == expected[name]
    assert body["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0  # until it failed
    assert len(body["warnings"]) == 1 and fault in body["warnings"][0]
    assert is_sound(server)
    after = server.health()["warnings"]
    assert any(f"failures of {fault}: " in warning for warning in after) and after != before


@pytest.mark.parametrize("path", PATHS)
def test_a_target_s_fault_fails_its_own_request_alone(server, plain_ids, path):
    """The client gets a 500, or an error event; who shares its batch gets what it would alone."""
    ways = (("ngram", False), ("mtp", False), ("draft_model", True), ("auto", True))
    with ThreadPoolExecutor(8) as pool:
        beside = [pool.submit(server.generate, **FIELDS, drafter=drafter) for drafter, _ in ways]
        asked = [poisoned("raises", stream=stream, drafter=drafter) for drafter, stream in ways]
        answers = [pool.submit(server.call, "POST", path, fields) for fields in asked]
        assert [n.result()[1]["token_ids"] for n in beside] == [plain_ids] * 4
    for (_, is_stream), answer in zip(ways, answers, strict=True):
        status, body = end_of(answer.result())
        assert status == (200 if is_stream else 500)
        assert body["error"]["type"] == "server_error" and body["error"]["code"] == "engine_failed"
        assert body["error"]["message"].startswith("the engine failed: ")
    assert server.generate(**FIELDS)[1]["token_ids"] == plain_ids  # these may have failed in a row
    assert is_sound(server) and any("failed forwards" in w for w in server.health()["warnings"])
    assert b"engine_faults_total 0" not in server.call("GET", "/metrics")[2]


def test_clients_mistakes_say_nothing_of_the_engine(server):
    """Here a text of which no token is left, which only its pass tells."""
    wrong = FIELDS | {"allowed_token_ids": [0], "ignore_eos": True}
    assert [server.generate(**wrong)[0] for _ in range(4)] == [400] * 4
    assert server.is_ready()


@pytest.mark.parametrize("how", ["raises_at_once", "raises"])  # or behind the prefill
def test_an_engine_that_fails_time_and_again_says_so_and_goes_on_trying(server, plain_ids, how):
    """Choices of one request count once: it may be to blame itself."""
    assert server.generate(**FIELDS)[1]["token_ids"] == plain_ids  # no failure comes before these
    for more in ({}, {"n": 4}, {}):
        assert server.is_ready()
        assert server.generate(**poisoned(how) | more)[0] == 500
    assert server.call("GET", "/health")[0] == 503 and server.health()["status"] == "failing"
    assert server.generate(**FIELDS)[1]["token_ids"] == plain_ids
    assert server.is_ready()


def test_who_leaves_amid_a_text_shows_that_the_engine_works():
    """Editors cancel most of what they ask for."""
    worker = Worker(Mock(), Options())

    def end(first_token, error=None):
        job = worker.submit(Request([1]))
        ((_, run),) = worker._give_places()
        run.sequence, run.first_token = SimpleNamespace(finish_reason=None), first_token
        worker._end(job, run, error)
        return worker.status

    failed = [end(1.0, RuntimeError("broken")) for _ in range(3)]
    assert failed == ["ok", "ok", "failing"] and [end(None), end(1.0)] == ["failing", "ok"]


def test_a_failed_request_is_forgotten_at_once(demo_engine, monkeypatch):
    """With the tensors of its forward: a traceback would hold them until garbage is collected."""
    failed = []

    def fail(s, *_):
        failed.append(weakref.ref(s))
        raise ValueError("this one fails")

    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's keep what was logged
    gc.disable()
    try:
        with application(demo_engine, Options()) as client:
            with monkeypatch.context() as broken:
                broken.setattr(demo_engine, "judge", fail)
                for more in ({}, {"stream": True}):
                    assert b"this one fails" in client.post("/generate", json=FIELDS | more).data
            assert client.post("/generate", json=FIELDS).status_code == 200  # the engine goes on
            assert failed and all(sequence() is None for sequence in failed)
    finally:
        gc.enable()


def test_an_engine_that_stalls_is_said_to_be_stuck_and_recovers(gate):
    """Meanwhile /health is 503 and new requests are refused; what was taken is answered."""
    fields = {"prompt": IDS, "max_tokens": 20}
    limit = {"constants": {"stall_limit": 0.5}}
    with serving(*gate.arguments, **limit) as server, ThreadPoolExecutor(1) as pool:
        expected = server.generate(**fields)[1]["token_ids"]
        gate.shut()
        taken = pool.submit(server.generate, **fields)
        until(lambda: server.call("GET", "/health")[0] == 503)
        assert server.health()["status"] == "stuck"
        assert "the engine does not answer" in server.refusal("/v1/completions")
        gate.open()
        assert taken.result()[1]["token_ids"] == expected
        until(server.is_ready)
        assert server.generate(**fields)[1]["token_ids"] == expected


def test_an_engine_that_dies_tells_everybody(gate):
    """Those who run, those who wait and those who come; and SIGTERM still ends the process."""
    limits = ("--max-running", "4")
    with serving(*gate.arguments, *limits, module=FAULTY) as server, ThreadPoolExecutor(8) as pool:
        held = {"prompt": IDS, "max_tokens": 200}
        dying = poisoned("dies", speculative=False, max_tokens=200)
        asked = (held, ENDLESS | {"stream": True}, ENDLESS, dying, ENDLESS)
        answers = gate.hold(pool, server, zip(PATHS * 3, asked, strict=False))
        gate.open()
        statuses, bodies = zip(*(end_of(answer.result()) for answer in answers), strict=True)
        assert statuses == (500, 200, 500, 500, 503) and answers[-1].result()[1]["Retry-After"]
        assert bodies[1]["error"]["code"] == "engine_dead"  # the stream's
        assert server.call("GET", "/health")[0] == 503 and server.health()["status"] == "dead"
        assert "the engine has stopped" in server.refusal()
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0


def test_if_the_http_side_dies_the_process_ends_with_1():
    with serving(module=FAULTY) as server:
        server.send(signal.SIGUSR1)
        assert server.exit_code() == 1 and "the HTTP side has died" in server.log()
