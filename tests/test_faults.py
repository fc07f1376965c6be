"""Faults of our own, in the real process on a real socket: what the client and /health saw.

faulty_server.py builds them in. A drafter's fault costs the speculation and never a token; a
target's fault costs the request that it belongs to, and nobody else's.
"""

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from faulty_server import DRAFTER_FAULTS, FIRST_ID, PROPOSALS, TARGET_FAULTS
from test_server import COLOURS, call, events_of, generate, health, seconds_until, start

OPTIONS = ("--drafter", "ngram", "--drafter-timeout", "1", "--stall-limit", "1")
FIELDS = {"prompt": COLOURS, "max_tokens": 40}
ENDLESS = {"prompt": "1, 2, 3, 4, 5,", "max_tokens": 1900, "speculative": False}
IDS = [5, 6, 7, 8, 5, 6, 7]


@pytest.fixture(scope="module")
def port():
    """One server that survives everything the tests do to it, but for what ends its engine."""
    process, port = start(*OPTIONS, script="tests/faulty_server.py")
    with process:
        yield port
        assert health(port)["status"] == "ok"
        process.terminate()
        assert process.wait(40) == 0


@pytest.fixture(scope="module")
def plain(port):
    """What the target alone writes."""
    return generate(port, **FIELDS, speculative=False)[1]


SAMPLED = {"temperature": 0.9, "seed": 5}
Q_FAULTS = [fault for fault in PROPOSALS if fault.split("_")[0] == "has" and "_q" in fault]


@pytest.fixture(scope="module")
def plain_sampled(port):
    return generate(port, **FIELDS, **SAMPLED, speculative=False)[1]


def poisoned(fault, **fields):
    """A request whose prompt calls the target's fault up."""
    prompt = [FIRST_ID + list(TARGET_FAULTS).index(fault), *IDS]
    return {"prompt": prompt, "max_tokens": 40} | fields


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", DRAFTER_FAULTS)
def test_a_drafter_s_fault_never_changes_a_token(port, plain, plain_sampled, fault, stream):
    """The client gets the target's own text and a warning, /health counts the loss."""
    if fault in PROPOSALS:  # one that blocked may still be at it
        seconds_until(
            lambda: not generate(port, **FIELDS | {"max_tokens": 1}, drafter=fault)[1]["warnings"]
        )
    before = health(port)["warnings"]
    fields = FIELDS | {"drafter": fault, "stream": stream}
    if stream:
        fields, plain = fields | SAMPLED, plain_sampled
    status, _, data = call(port, "POST", "/generate", fields)
    body = events_of(data)[-1] if stream else json.loads(data)
    assert status == 200
    assert body["token_ids"] == plain["token_ids"] and body["text"] == plain["text"]
    assert body["finish_reason"] == plain["finish_reason"]
    is_noticed = fault not in Q_FAULTS  # nobody reads what chances it says its tokens had
    assert [fault in warning for warning in body["warnings"]] == [True] * is_noticed
    after = health(port)
    assert after["status"] == "ok" and after["num_requests_running"] == 0
    assert after["kv_cache_usage_perc"] == 0
    if fault in PROPOSALS and is_noticed:
        assert body["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0  # until it failed
        assert "requests lost their drafter to an error" in after["warnings"][0]
        assert after["warnings"] != before


@pytest.mark.parametrize("fault", Q_FAULTS)
def test_a_q_that_cannot_be_costs_the_speculation_where_it_counts(port, fault):
    fields = FIELDS | SAMPLED | {"drafter": fault, "verification": "rejection"}
    status, body = generate(port, **fields)
    assert status == 200 and len(body["token_ids"]) == 40
    assert [fault in warning for warning in body["warnings"]] == [True]


def test_all_drafters_faults_at_once_change_no_token(port, plain):
    """Eight at a time in one batch: through /generate and /v1, and beside sound drafters."""
    names = [*DRAFTER_FAULTS, "mtp", "draft_model", "ngram"]

    def ask(name):
        if len(name) % 2:
            return generate(port, **FIELDS, drafter=name)[1]["text"]
        status, _, data = call(port, "POST", "/v1/completions", FIELDS | {"drafter": name})
        assert status == 200
        return json.loads(data)["choices"][0]["text"]

    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(ask, names)) == [plain["text"]] * len(names)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("fault", ["raises", "gives_no_numbers"])
def test_a_target_s_fault_fails_its_own_request_alone(port, plain, fault, path):
    """The client gets a 500, or an error event; who shares its batch gets what it would alone."""
    with ThreadPoolExecutor(8) as pool:
        neighbours = [pool.submit(generate, port, **FIELDS, drafter=name)
                      for name in ("ngram", "mtp", "draft_model", "auto")]  # fmt: skip
        failing = [
            pool.submit(call, port, "POST", path, poisoned(fault, stream=stream, drafter=name))
            for stream in (False, True)
            for name in ("mtp", "ngram")
        ]
        answers = [future.result() for future in failing]
        assert [n.result()[1]["token_ids"] for n in neighbours] == [plain["token_ids"]] * 4
    for status, headers, data in answers:
        is_stream = headers["Content-Type"].startswith("text/event-stream")
        assert status == (200 if is_stream else 500)
        error = (events_of(data)[-1] if is_stream else json.loads(data))["error"]
        assert error["type"] == "server_error" and error["code"] == "engine_failed"
        assert b"Traceback" not in data
    assert health(port)["status"] == "ok" and health(port)["kv_cache_usage_perc"] == 0


@pytest.mark.parametrize("fault", ["fails_once", "lacks_memory"])
def test_a_target_s_fault_that_another_try_overcomes_costs_nobody_a_token(port, fault):
    """A passing fault, and memory that is enough for one request and not for the batch."""
    fields = poisoned(fault)
    sound = fields | {"prompt": [FIRST_ID - 1, *fields["prompt"][1:]]}
    expected = {}
    for asked in (sound, fields):  # alone there is enough memory; the passing fault comes later
        if fault == "lacks_memory" or asked is sound:
            expected[str(asked)] = generate(port, **asked, speculative=False)[1]["token_ids"]
    with ThreadPoolExecutor(4) as pool:
        asked = [fields, sound, fields, sound]
        answers = list(pool.map(lambda each: generate(port, **each, drafter="mtp"), asked))
    if fault == "fails_once":
        expected[str(fields)] = generate(port, **fields, speculative=False)[1]["token_ids"]
    for each, (status, body) in zip(asked, answers, strict=True):
        assert status == 200 and body["token_ids"] == expected[str(each)]
    assert [body["warnings"] for _, body in answers] == [[]] * 4  # nor the speculation
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


@pytest.mark.parametrize("repeats", [1, 10, 100])
@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
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
        failing = pool.submit(generate, port, **fields | {"prompt": prompt})
        assert failing.result()[0] == 500
        for status, body in (future.result() for future in beside):
            assert status == 200 and body["token_ids"] == plain["token_ids"]
            assert body["warnings"] == []


def test_an_engine_that_stalls_is_said_to_be_stuck_and_recovers(port, plain):
    """Meanwhile /health is 503 and new requests are refused; what was taken is answered."""
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(generate, port, **FIELDS)
        stalled = pool.submit(generate, port, **poisoned("stalls"))
        seconds_until(lambda: call(port, "GET", "/health")[0] == 503)
        assert health(port)["status"] == "stuck"
        status, headers, data = call(port, "POST", "/v1/completions", FIELDS)
        assert status == 503 and headers["Retry-After"] == "1"
        assert json.loads(data)["error"]["message"] == "the engine does not answer"
        assert stalled.result()[0] == 200
        assert beside.result()[1]["token_ids"] == plain["token_ids"]
    assert call(port, "GET", "/health")[0] == 200
    assert generate(port, **FIELDS)[1]["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_an_engine_that_dies_tells_everybody(path):
    """Those who run, those who wait and those who come; and SIGTERM still ends the process."""
    process, port = start(*OPTIONS, "--max-running", "3", script="tests/faulty_server.py")
    try:
        with ThreadPoolExecutor(8) as pool:
            running = [
                pool.submit(call, port, "POST", path, ENDLESS | {"stream": stream})
                for stream in (False, True)
            ]
            fields = poisoned("dies", max_tokens=1000, speculative=False)
            dying = pool.submit(call, port, "POST", path, fields)
            seconds_until(lambda: health(port)["num_requests_running"] == 3)
            waiting = pool.submit(call, port, "POST", path, ENDLESS)
            seconds_until(lambda: health(port)["num_requests_waiting"] == 1)
            assert dying.result()[0] == running[0].result()[0] == 500
            status, headers, _ = waiting.result()
            assert status == 503 and headers["Retry-After"]
            status, _, data = running[1].result()
            assert status == 200 and events_of(data)[-1]["error"]["code"] == "engine_dead"
        status, _, data = call(port, "GET", "/health")
        assert status == 503 and json.loads(data)["status"] == "dead"
        status, headers, data = call(port, "POST", "/generate", FIELDS)
        assert status == 503 and headers["Retry-After"]
        assert json.loads(data)["error"]["message"] == "the engine has stopped"
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0
    finally:
        process.kill()
        process.wait()
