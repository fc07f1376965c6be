"""Faults of our own, in the real process on a real socket: what the client and /health saw.

faulty_server.py builds them in. A drafter's fault costs the speculation and never a token; a
target's fault costs the request that it belongs to, and nobody else's.
"""

import gc
import json
import logging
import signal
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import speculative_decoding as core
from faulty_server import DRAFTER_FAULTS, FIRST_ID, PROPOSALS, TARGET_FAULTS
from server import (
    COLOURS,
    ENDLESS,
    FAULTY,
    at_once,
    call,
    events_of,
    generate,
    health,
    serving,
    until,
    wait_until_idle,
    wait_until_taken,
)

FIELDS = {"prompt": COLOURS, "max_tokens": 40}
SAMPLED = {"temperature": 0.9, "seed": 5}
IDS = [5, 6, 7, 8, 5, 6, 7]
Q_FAULTS = [fault for fault in PROPOSALS if fault.split("_")[0] == "has" and "_q" in fault]


@pytest.fixture(scope="module")
def port():
    """One server that survives everything the tests do to it, but for what ends its engine."""
    options = ("--drafter", "ngram", "--fixed-k", "--drafter-timeout", "0.7")
    with serving(*options, module=FAULTY) as server:
        yield server.port
        assert health(server.port)["status"] == "ok"
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0


@pytest.fixture(scope="module")
def adaptive():
    """Its controller asks drafters what they would propose."""
    with serving("--drafter", "ngram", module=FAULTY) as server:
        yield server


@pytest.fixture(scope="module")
def plain(port):
    """What the target alone writes."""
    return generate(port, **FIELDS, speculative=False)[1]


@pytest.fixture(scope="module")
def plain_sampled(port):
    return generate(port, **FIELDS, **SAMPLED, speculative=False)[1]


def poisoned(fault, **fields):
    """A request whose prompt calls the target's fault up."""
    prompt = [FIRST_ID + list(TARGET_FAULTS).index(fault), *IDS]
    return {"prompt": prompt, "max_tokens": 40} | fields


def is_sound(port):
    """Whether /health says that all is well, once nothing runs or is kept."""
    wait_until_idle(port)
    return health(port)["status"] == "ok"


def error_of(answer):
    """(status, error) of an answer, or of a stream's end."""
    status, headers, data = answer
    assert b"Traceback" not in data
    is_stream = headers["Content-Type"].startswith("text/event-stream")
    return status, (events_of(data)[-1] if is_stream else json.loads(data))["error"]


# -------------------------------------------------------------------------------- of a drafter


@pytest.mark.parametrize("fault", DRAFTER_FAULTS)
def test_a_drafter_s_fault_never_changes_a_token(port, adaptive, plain, plain_sampled, fault):
    """The client gets the target's own text and a warning, /health counts the loss."""
    port = adaptive.port if "guess" in fault else port
    before = health(port)["warnings"]
    is_noticed = fault not in Q_FAULTS  # nobody reads what chances it says its tokens had
    for expected, more in ((plain, {}), (plain_sampled, SAMPLED | {"stream": True})):
        if fault in PROPOSALS:  # one that blocked may still be at it
            one = FIELDS | {"max_tokens": 1, "drafter": fault}
            until(lambda one=one: not generate(port, **one)[1]["warnings"])
        status, _, data = call(port, "POST", "/generate", FIELDS | more | {"drafter": fault})
        body = events_of(data)[-1] if more else json.loads(data)
        assert status == 200
        for name in ("token_ids", "text", "finish_reason"):
            assert body[name] == expected[name]
        assert [fault in warning for warning in body["warnings"]] == [True] * is_noticed
        assert is_sound(port)
        if fault in PROPOSALS:
            assert body["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0  # until it fails
    if fault in PROPOSALS and is_noticed:
        after = health(port)["warnings"]
        assert "times a drafter failed" in after[0] and after != before


@pytest.mark.parametrize("fault", Q_FAULTS)
def test_a_q_that_cannot_be_costs_the_speculation_where_it_counts(port, fault):
    fields = FIELDS | SAMPLED | {"drafter": fault, "verification": "rejection"}
    status, body = generate(port, **fields)
    assert status == 200 and len(body["token_ids"]) == 40
    assert [fault in warning for warning in body["warnings"]] == [True]


def test_all_drafters_faults_at_once_change_no_token(port, plain):
    """Eight at a time in one batch: through /generate and /v1, and beside sound drafters."""

    def ask(name):
        if len(name) % 2:
            return generate(port, **FIELDS, drafter=name)[1]["text"]
        status, _, data = call(port, "POST", "/v1/completions", FIELDS | {"drafter": name})
        assert status == 200
        return json.loads(data)["choices"][0]["text"]

    names = [*DRAFTER_FAULTS, "mtp", "draft_model", "ngram"]
    assert at_once(*((ask, name) for name in names)) == [plain["text"]] * len(names)


# ------------------------------------------------------------------------------- of the target


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("fault", ["raises", "gives_no_numbers"])
def test_a_target_s_fault_fails_its_own_request_alone(port, plain, fault, path):
    """The client gets a 500, or an error event; who shares its batch gets what it would alone."""
    with ThreadPoolExecutor(8) as pool:
        neighbours = [pool.submit(generate, port, **FIELDS, drafter=name)
                      for name in ("ngram", "mtp", "draft_model", "auto")]  # fmt: skip
        streams = (False, False, True, True)
        answers = at_once(
            *((call, port, "POST", path, poisoned(fault, stream=stream, drafter=name))
              for stream, name in zip(streams, ("mtp", "ngram") * 2, strict=True))
        )  # fmt: skip
        assert [n.result()[1]["token_ids"] for n in neighbours] == [plain["token_ids"]] * 4
    for stream, answer in zip(streams, answers, strict=True):
        status, error = error_of(answer)
        assert status == (200 if stream else 500)
        assert error["type"] == "server_error" and error["code"] == "engine_failed"
    assert is_sound(port)


@pytest.mark.parametrize("fault", ["fails_once", "lacks_memory"])
def test_a_target_s_fault_that_another_try_overcomes_costs_nobody_a_token(port, fault):
    """A passing fault, and memory that is enough for one request and not for the batch."""
    fields = poisoned(fault, drafter="mtp")
    sound = fields | {"prompt": [FIRST_ID - 1, *fields["prompt"][1:]]}
    with ThreadPoolExecutor(4) as pool:
        asked = [fields, sound, fields, sound]
        answers = list(pool.map(lambda each: generate(port, **each), asked))
    for each, (status, body) in zip(asked, answers, strict=True):  # alone there is memory
        expected = generate(port, **each | {"speculative": False})[1]
        assert status == 200 and body["token_ids"] == expected["token_ids"]
        assert body["warnings"] == []  # nor the speculation
    state = health(port)
    assert state["status"] == "ok" and any("tried again" in w for w in state["warnings"])
    assert b"engine_faults_total 0" not in call(port, "GET", "/metrics")[2]


@pytest.mark.parametrize("drafter", ["mtp", "draft_model", "ngram"])
def test_a_fault_that_has_passed_does_not_change_what_a_seed_draws(port, drafter):
    """The draft is verified again, with the noise that belongs there."""
    fields = {"max_tokens": 30, "temperature": 0.5, "seed": 5, "drafter": drafter}
    undisturbed, disturbed = (
        generate(port, **poisoned("fails_on_and_off", **fields))[1] for _ in range(2)
    )
    assert disturbed["warnings"] == [] and len(disturbed["token_ids"]) == 30
    assert disturbed["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    alone = generate(port, **poisoned("fails_on_and_off", **fields), speculative=False)[1]
    assert disturbed["token_ids"] == undisturbed["token_ids"] == alone["token_ids"]


def test_a_draft_that_the_target_cannot_take_costs_the_speculation(port):
    """Its forward fails each time, and the one without it does not."""
    fields = poisoned("takes_no_drafts", drafter="mtp")
    status, body = generate(port, **fields)
    assert status == 200 and "a forward failed (no room for a draft)" in body["warnings"][0]
    expected = generate(port, **fields | {"speculative": False})[1]
    assert body["token_ids"] == expected["token_ids"] and expected["warnings"] == []


@pytest.mark.parametrize(("repeats", "drafter"), [(1, "mtp"), (10, "ngram"), (100, "mtp")])
def test_a_fault_behind_the_forward_leaves_nothing_in_the_cache(port, drafter, repeats):
    """When a prompt is read: at once, by itself beside a short one's, and in chunks."""
    fields = poisoned("fails_behind_the_forward", drafter=drafter, temperature=0.5, seed=1)
    fields["prompt"] *= repeats
    short = {"prompt": IDS, "max_tokens": 40, "drafter": "mtp"}
    expected = generate(port, **short)[1]["token_ids"]
    with ThreadPoolExecutor(2) as pool:
        disturbed = pool.submit(generate, port, **fields)
        beside = pool.submit(generate, port, **short)
        first, second = disturbed.result()[1], beside.result()[1]
    undisturbed = generate(port, **fields)[1]
    assert first["token_ids"] == undisturbed["token_ids"] and first["warnings"] == []
    assert second["token_ids"] == expected and second["warnings"] == []


def test_an_engine_that_fails_time_and_again_says_so_and_goes_on_trying(port, plain):
    for _ in range(3):
        assert call(port, "GET", "/health")[0] == 200
        assert generate(port, **poisoned("raises_at_once"))[0] == 500
    assert call(port, "GET", "/health")[0] == 503 and health(port)["status"] == "failing"
    assert generate(port, **FIELDS)[1]["token_ids"] == plain["token_ids"]
    assert call(port, "GET", "/health")[0] == 200


def test_a_long_prompt_that_fails_costs_its_neighbours_nothing(port, plain):
    """Neither an answer nor the speculation: its chunks are read by themselves."""
    with ThreadPoolExecutor(4) as pool:
        beside = [pool.submit(generate, port, **FIELDS, drafter="mtp") for _ in range(3)]
        fields = poisoned("raises_at_once")
        prompt = fields["prompt"] * 100
        assert generate(port, **fields | {"prompt": prompt})[0] == 500
        for status, body in (future.result() for future in beside):
            assert status == 200 and body["token_ids"] == plain["token_ids"]
            assert body["warnings"] == []


def test_a_failed_request_is_forgotten_at_once(demo_engine, monkeypatch):
    """With the tensors of its forward: a traceback would hold them until garbage is collected."""
    failed = []

    def fail(s, *_):
        failed.append(weakref.ref(s))
        raise ValueError("this one fails")

    app = core.create_app(demo_engine, core.Options())
    client = app.test_client()
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest keeps it all
    gc.disable()
    try:
        with monkeypatch.context() as broken:
            broken.setattr(demo_engine, "judge", fail)
            for more in ({}, {"stream": True}):
                assert b"this one fails" in client.post("/generate", json=FIELDS | more).data
        assert client.post("/generate", json=FIELDS).status_code == 200  # the engine has gone on
        assert failed and all(sequence() is None for sequence in failed)
    finally:
        gc.enable()
        app.extensions["worker"].drain(60)


# ------------------------------------------------------------------------------ of the engine


def test_an_engine_that_stalls_is_said_to_be_stuck_and_recovers(gate):
    """Meanwhile /health is 503 and new requests are refused; what was taken is answered."""
    fields = {"prompt": IDS, "max_tokens": 20}
    with serving(*gate.arguments, "--stall-limit", "0.5") as server, ThreadPoolExecutor(1) as pool:
        port = server.port
        expected = generate(port, **fields)[1]["token_ids"]
        gate.shut()
        taken = pool.submit(generate, port, **fields)
        until(lambda: call(port, "GET", "/health")[0] == 503)
        assert health(port)["status"] == "stuck"
        status, headers, data = call(port, "POST", "/v1/completions", fields)
        assert status == 503 and headers["Retry-After"] == "1"
        assert json.loads(data)["error"]["message"] == "the engine does not answer"
        gate.open()
        assert taken.result()[1]["token_ids"] == expected
        until(lambda: call(port, "GET", "/health")[0] == 200)
        assert generate(port, **fields)[1]["token_ids"] == expected


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_an_engine_that_dies_tells_everybody(gate, path):
    """Those who run, those who wait and those who come; and SIGTERM still ends the process."""
    limits = ("--max-running", "4")
    with serving(*gate.arguments, *limits, module=FAULTY) as server, ThreadPoolExecutor(8) as pool:
        port, answers = server.port, []
        gate.shut()  # until all have come
        plain = {"speculative": False, "max_tokens": 200}
        held = {"prompt": IDS, "max_tokens": 200}
        dying, waiting = poisoned("dies", **plain), ENDLESS
        asked = (held, ENDLESS, ENDLESS | {"stream": True}, dying, waiting)
        for i, fields in enumerate(asked, 1):
            answers.append(pool.submit(call, port, "POST", path, fields))
            gate.wait_until_held()
            wait_until_taken(port, i)
        gate.open()
        *running, stream, first, last = [error_of(answer.result()) for answer in answers]
        assert [status for status, _ in (*running, first)] == [500] * 3
        assert answers[-1].result()[1]["Retry-After"] and last[0] == 503
        assert stream[0] == 200 and stream[1]["code"] == "engine_dead"
        status, _, data = call(port, "GET", "/health")
        assert status == 503 and json.loads(data)["status"] == "dead"
        status, headers, data = call(port, "POST", "/generate", FIELDS)
        assert status == 503 and headers["Retry-After"]
        assert json.loads(data)["error"]["message"] == "the engine has stopped"
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0


def test_if_the_http_side_dies_the_process_ends_with_1(adaptive):
    """The last test here, as it is the end of that server."""
    adaptive.send(signal.SIGUSR1)
    assert adaptive.exit_code() == 1 and "the HTTP side has died" in adaptive.log()
