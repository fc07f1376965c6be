"""The HTTP contract, against the real server process on a real socket."""

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import speculative_decoding as core
from conftest import ROOT

from serving.worker import Worker

SCRIPT = "08_speculative_decoding.py"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(*arguments, script=SCRIPT, wait=True):
    """The server as a process, ready to answer: (process, port).

    `process.log()` is what it has said so far; in a file, as nobody reads a pipe meanwhile.
    """
    port, file = free_port(), tempfile.TemporaryFile()
    process = subprocess.Popen(
        [sys.executable, script, "--port", str(port), *arguments],
        cwd=ROOT,
        stdout=file,
        stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    weakref.finalize(process, file.close)
    process.log = lambda: os.pread(file.fileno(), 1 << 24, 0).decode()
    while wait and "serving on" not in process.log():
        assert process.poll() is None, process.log()
        time.sleep(0.05)
    return process, port


@pytest.fixture(scope="module")
def port():
    process, port = start()
    with process:
        yield port
        process.terminate()
        assert process.wait(40) == 0
        assert "Traceback" not in process.log()


@pytest.fixture(scope="module")
def fixed_port():
    """Of a server whose drafts have the length asked for, whatever the clock says."""
    process, port = start("--fixed-k", "--drafter", "ngram")
    with process:
        yield port
        process.kill()


def wait_until_running(port):
    """Until the server says that a request is running; fails after 20 s."""
    seconds_until(lambda: health(port)["num_requests_running"])


def call(port, method, path, body=None, headers=None):
    """(status, headers, body) of one request; a dict goes out as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    if isinstance(body, dict):
        body = json.dumps(body)
    headers = {"Content-Type": "application/json"} if headers is None else headers
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, response.headers, data


def generate(port, **fields):
    status, _, data = call(port, "POST", "/generate", fields)
    return status, json.loads(data)


COLOURS = "red, green, blue, red, green,"


def test_generate_answers_by_the_contract(port):
    status, body = generate(port, prompt=COLOURS, max_tokens=30, drafter="ngram", trace=True)
    assert status == 200
    assert list(body) == [
        "text", "token_ids", "finish_reason", "seed", "warnings", "usage", "metrics", "timings",
        "trace",
    ]  # fmt: skip
    assert body["finish_reason"] == "length" and body["warnings"] == []
    assert body["text"].startswith(" blue, red, green, blue,")
    usage = body["usage"]
    assert usage["completion_tokens"] == len(body["token_ids"]) == 30
    assert usage["total_tokens"] == usage["prompt_tokens"] + 30
    metrics = body["metrics"]["speculative_decoding"]
    assert metrics["drafter"] == "ngram" and metrics["num_spec_tokens"] == 5
    assert len(metrics["acceptance_histogram"]) == 6
    assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"]
    drafted, accepted = metrics["num_draft_tokens"], metrics["num_accepted_draft_tokens"]
    assert metrics["draft_acceptance_rate"] == pytest.approx(accepted / drafted, abs=1e-4)
    length = 1 + accepted / metrics["num_spec_steps"]
    assert metrics["mean_acceptance_length"] == pytest.approx(length, abs=1e-4)
    assert metrics["tokens_per_pass"] == pytest.approx(29 / metrics["target_passes"], abs=1e-4)
    timings = body["timings"]
    assert timings["predicted_n"] == 30 and timings["draft_n"] == drafted
    assert timings["draft_n_accepted"] == accepted
    parts = timings["draft_ms"] + timings["verify_ms"] + timings["other_ms"]
    assert timings["predicted_ms"] == pytest.approx(parts, abs=0.01)
    assert len(body["trace"]) == metrics["target_passes"] + 1
    for step, event in enumerate(body["trace"]):
        assert event["step"] == step
        assert len(event["target_argmax"]) == len(event["proposals"]) + 1
        assert event["emitted_count"] == len(event["tokens"])
        kinds = [token["kind"] for token in event["tokens"]]
        assert kinds.count("accepted") == event["accepted_count"]
        assert set(map(str, event["proposals"] + event["target_argmax"])) <= set(event["texts"])
        verified, kept = event["cached"]
        before = body["trace"][step - 1]["cached"][1] if step else usage["prompt_tokens"] - 1
        assert verified == before + 1 + len(event["proposals"])
        assert kept == before + event["emitted_count"] if step else kept == before + 1
        assert list(event["ms"]) == ["draft", "verify", "other"]
    after_prefill = [event["ms"] for event in body["trace"][1:]]
    assert sum(ms["verify"] for ms in after_prefill) == pytest.approx(timings["verify_ms"], abs=0.1)
    ids = [token["id"] for event in body["trace"] for token in event["tokens"]]
    assert ids == body["token_ids"]


def test_speculation_on_or_off_and_every_drafter_give_the_same_tokens(port):
    _, off = generate(port, prompt="class Queue:\n", max_tokens=40, speculative=False)
    assert off["metrics"]["speculative_decoding"]["drafter"] == "none"
    assert off["metrics"]["speculative_decoding"]["tokens_per_pass"] == 1.0
    assert off["metrics"]["speculative_decoding"]["num_spec_tokens"] == 0
    for fields in [
        {"drafter": "ngram"},
        {"drafter": "draft_model", "num_speculative_tokens": 2},
        {"drafter": "mtp", "num_speculative_tokens": 8},
        {"num_speculative_tokens": 0},
        {"temperature": 0, "top_p": 1.0, "top_k": -1, "seed": 3, "stop": None},
    ]:
        status, on = generate(port, prompt="class Queue:\n", max_tokens=40, **fields)
        assert status == 200
        assert on["token_ids"] == off["token_ids"] and on["text"] == off["text"]


def events_of(data):
    lines = [line for line in data.decode().split("\n\n") if line and line != ": ping"]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize(("stop", "temperature"), [(None, 0), ("15", 0), (None, 0.7)])
def test_a_stream_gives_an_event_per_cycle_then_the_answer_then_done(port, stop, temperature):
    fields = {"prompt": "1, 2, 3, 4, 5,", "max_tokens": 40, "drafter": "ngram", "stop": stop}
    fields |= {"temperature": temperature, "seed": 1}
    _, plain = generate(port, **fields)
    status, headers, data = call(port, "POST", "/generate", fields | {"stream": True})
    assert status == 200 and headers["Content-Type"].startswith("text/event-stream")
    *cycles, last = events_of(data)
    assert [cycle["step"] for cycle in cycles] == list(range(len(cycles)))
    assert "".join(cycle["text"] for cycle in cycles) == last["text"] == plain["text"]
    assert last["token_ids"] == plain["token_ids"]
    assert last["finish_reason"] == plain["finish_reason"]
    assert set(last["metrics"]) == set(plain["metrics"])


def test_the_controller_says_what_it_thinks_in_answers_and_health(port):
    answer = generate(port, prompt="red, green, blue, red,", max_tokens=60, drafter="auto")[1]
    decision = answer["metrics"]["controller"]
    assert decision["drafter"] in ("ngram", "draft_model", "mtp") and "α" in decision["says"]
    assert answer["metrics"]["speculative_decoding"]["drafter"] == "auto"
    assert generate(port, prompt="a", max_tokens=4, speculative=False)[1]["metrics"][
        "controller"
    ] is None  # fmt: skip
    state = health(port)["controller"]
    assert state["costs_by_batch"]["1"]["pass_ms"] > 0 and state["last"]


def test_health_says_whether_outputs_are_exact_and_flags_turn_that_and_the_controller_off(port):
    assert health(port)["bitwise_lossless"] is True
    process, other = start("--no-bitwise", "--no-fastpath", "--fixed-k")
    try:
        fields = {"prompt": "def read(path):", "max_tokens": 24}
        assert generate(other, **fields)[1]["token_ids"] == generate(port, **fields)[1]["token_ids"]
        state = json.loads(call(other, "GET", "/health")[2])
        assert state["bitwise_lossless"] is False and state["controller"] is None
    finally:
        process.terminate()
        process.communicate(timeout=40)


@pytest.mark.parametrize("drafter", ["auto", "mtp"])
def test_a_seed_gives_the_same_output_alone_and_in_a_full_batch(port, drafter):
    fields = {"prompt": "def read(path):", "max_tokens": 40, "temperature": 1.0, "seed": 11}
    alone = generate(port, **fields, drafter=drafter)[1]
    with ThreadPoolExecutor(8) as pool:
        beside = [
            pool.submit(generate, port, prompt="1, 2, 3,", max_tokens=80, seed=i, temperature=0.9)
            for i in range(7)
        ]
        again = pool.submit(generate, port, **fields, drafter=drafter).result()[1]
        assert all(future.result()[0] == 200 for future in beside)
    assert again["token_ids"] == alone["token_ids"]


def test_health_counts_what_was_generated(port):
    before = health(port)
    _, answer = generate(port, prompt=COLOURS, max_tokens=20, drafter="ngram")
    status, _, data = call(port, "GET", "/health")
    after = json.loads(data)
    assert status == 200 and after["status"] == "ok"
    mine = answer["metrics"]["speculative_decoding"]
    for scope in (lambda h: h["speculative_decoding"],
                  lambda h: h["speculative_decoding"]["per_drafter"]["ngram"]):  # fmt: skip
        for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"):
            assert scope(after)[name] - scope(before)[name] == mine[name]
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    assert after["kv_cache_usage_perc"] == 0
    assert {"model", "drafter", "uptime_s", "warnings"} <= after.keys()
    block = after["speculative_decoding"]
    assert 0 < block["recent_acceptance_rate"] <= 1
    assert block["acceptance_rate_per_position"][0] <= 1
    assert block["formulas"]["draft_acceptance_rate"] == "accepted / drafted"


def test_concurrent_requests_all_answer_with_their_own_text(port):
    prompts = [COLOURS, "1, 2, 3, 4, 5,", "def main():\n", "Once upon a time", "import os\n"] * 3
    alone = {p: generate(port, prompt=p, max_tokens=24)[1]["token_ids"] for p in set(prompts)}
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda p: generate(port, prompt=p, max_tokens=24), prompts))
    for prompt, (status, body) in zip(prompts, answers, strict=True):
        assert status == 200
        assert body["token_ids"] == alone[prompt]


GOOD = {"prompt": "x = 1", "max_tokens": 2}
SAMPLED = {
    "prompt": "def read(path):",
    "max_tokens": 24,
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
}


@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "mtp", None])
def test_the_seed_that_was_used_is_returned_and_gives_the_same_output_again(port, drafter):
    fields = SAMPLED | ({"drafter": drafter} if drafter else {"speculative": False})
    status, first = generate(port, **fields)
    assert status == 200 and isinstance(first["seed"], int)
    _, other = generate(port, **fields)
    assert other["seed"] != first["seed"] and other["token_ids"] != first["token_ids"]
    _, again = generate(port, **fields, seed=first["seed"])
    assert again["seed"] == first["seed"]
    assert again["token_ids"] == first["token_ids"] and again["text"] == first["text"]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_the_same_seed_gives_the_same_output_in_a_crowd(port, path):
    def text(seed):
        _, _, data = call(port, "POST", path, SAMPLED | {"seed": seed})
        body = json.loads(data)
        return body["text"] if path == "/generate" else body["choices"][0]["text"]

    alone = [text(i) for i in range(4)]
    with ThreadPoolExecutor(12) as pool:
        crowd = list(pool.map(lambda i: text(i % 4), range(12)))
    assert crowd == alone * 3 and len(set(alone)) == 4


def test_each_parameter_of_sampling_has_its_effect(port):
    """What a seed would draw is changed by every one of them, or made greedy by it."""
    base = {"prompt": "Once upon a time", "max_tokens": 30, "temperature": 1.2, "seed": 4}
    unchanged = generate(port, **base)[1]["token_ids"]
    for change in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"repetition_penalty": 1.8},
                   {"temperature": 0.6}):  # fmt: skip
        assert generate(port, **(base | change))[1]["token_ids"] != unchanged
    _, greedy = generate(port, prompt="Once upon a time", max_tokens=30)
    for change in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}, {"temperature": 0}):
        assert generate(port, **(base | change))[1]["token_ids"] == greedy["token_ids"]


@pytest.mark.parametrize("drafter", ["mtp", "draft_model"])
def test_a_whole_number_is_a_number(port, drafter):
    fields = {"prompt": COLOURS, "max_tokens": 8, "drafter": drafter, "seed": 2}
    numbers = {"temperature": 1, "repetition_penalty": 2, "top_p": 1, "min_p": 0}
    status, whole = generate(port, **fields, **numbers)
    assert status == 200
    _, real = generate(port, **fields, **{name: float(n) for name, n in numbers.items()})
    assert whole["token_ids"] == real["token_ids"]


@pytest.mark.parametrize(("wanted", "num_top"), [(True, 0), (0, 0), (3, 3)])
def test_logprobs_come_with_every_token(port, wanted, num_top):
    _, body = generate(port, **SAMPLED, logprobs=wanted, seed=1)
    assert [entry["id"] for entry in body["logprobs"]] == body["token_ids"]
    for entry in body["logprobs"]:
        assert entry["logprob"] <= 0 and isinstance(entry["token"], str)
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == num_top and tops == sorted(tops, reverse=True)
    _, without = generate(port, **SAMPLED, logprobs=False, seed=1)
    assert "logprobs" not in without and without["token_ids"] == body["token_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_comparison_runs_the_request_by_plain_decoding_too(port, stream):
    fields = {"prompt": COLOURS, "max_tokens": 40, "drafter": "ngram", "compare": True}
    status, _, data = call(port, "POST", "/generate", fields | {"stream": stream})
    assert status == 200
    if stream:
        *cycles, body = events_of(data)
        plain = [cycle["plain"] for cycle in cycles if "plain" in cycle]
        assert len(plain) == 40 and [event["step"] for event in plain] == list(range(40))
        assert "".join(event["text"] for event in plain) == body["compare"]["plain"]["text"]
        own = cycles[: len(cycles) - 40]
        assert "".join(event["text"] for event in own) == body["text"]
    else:
        body = json.loads(data)
    compare = body["compare"]
    assert compare["identical"] is True and compare["first_difference"] is None
    assert compare["plain"]["token_ids"] == body["token_ids"]
    assert compare["plain"]["timings"]["draft_n"] == 0
    assert compare["measured_speedup"] > 1 and compare["predicted_speedup"] > 1
    assert set(compare["costs"]) == {"alpha", "c", "t_verify"}
    assert compare["num_runs"] == 3 and type(compare["disturbed"]) is bool
    least, most = compare["spread"]
    assert 0 < least <= most
    assert compare["speculative"]["timings"]["predicted_n"] == 40
    assert "trace" not in body


@pytest.mark.parametrize(("rule", "identical"), [("coupled", True), ("rejection", None)])
def test_a_sampled_comparison_compares_tokens_where_they_must_be_equal(port, rule, identical):
    """Its other half is the request as it was, seed and all, with speculation off."""
    fields = SAMPLED | {"seed": 11, "stop": [":", "return"], "verification": rule}
    _, body = generate(port, **fields, compare=True, trace=True)
    assert body["compare"]["identical"] is identical
    assert body["compare"]["measured_speedup"] > 0
    assert body["trace"][0]["target_top"]
    _, plain = generate(port, **fields, speculative=False)
    for name in ("text", "token_ids", "finish_reason"):
        assert body["compare"]["plain"][name] == plain[name]


def test_a_sampled_stream_is_the_plain_answer_in_pieces(port):
    fields = SAMPLED | {"seed": 9, "logprobs": 1, "stop": "return"}
    _, whole = generate(port, **fields)
    _, _, data = call(port, "POST", "/generate", fields | {"stream": True})
    *cycles, last = events_of(data)
    assert "".join(cycle["text"] for cycle in cycles) == last["text"] == whole["text"]
    _, _, traced = call(port, "POST", "/generate", fields | {"stream": True, "trace": True})
    full = events_of(traced)[:-1]  # which may be other cycles, as the clock decides about these
    for part in ("text", "logprobs"):
        assert sum([[*c[part]] for c in cycles], []) == sum([[*c[part]] for c in full], [])
    assert all("rejected" in cycle for cycle in full)
    assert [t["id"] for cycle in cycles for t in cycle["tokens"]] == whole["token_ids"]
    assert [e for cycle in cycles for e in cycle["logprobs"]] == last["logprobs"]
    assert last["logprobs"] == whole["logprobs"] and last["seed"] == 9


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_a_trace_has_the_numbers_that_decided(fixed_port, rule):
    fields = SAMPLED | ({"temperature": 0} if rule == "greedy" else {"verification": rule})
    _, body = generate(fixed_port, **fields, trace=True, seed=3, drafter="draft_model")
    kinds = set()
    for event in body["trace"]:
        for token in event["tokens"] + ([event["rejected"]] if event["rejected"] else []):
            assert event["texts"][str(token["id"])]
            kinds.add(token["kind"])
            if rule == "rejection":
                assert list(token) == ["id", "kind", "p", "q", "u"]
                assert 0 <= token["p"] <= 1 + 1e-6 and 0 <= token["u"] < 1
            else:
                assert list(token) == ["id", "kind", "score", "total"]
                is_cut = token["score"] is None
                assert (token["score"] == token["total"]) == (rule == "greedy" or is_cut)
    assert kinds == {"accepted", "rejected", "recovered", "bonus"}
    counted = call(fixed_port, "GET", "/health")[2]
    assert json.loads(counted)["speculative_decoding"]["per_rule"][rule]["num_draft_tokens"] > 0


def test_the_text_of_a_seed_is_the_same_in_another_process_by_another_drafter(port, fixed_port):
    first = generate(port, **SAMPLED, seed=2**50 + 1, drafter="mtp")[1]
    second = generate(fixed_port, **SAMPLED, seed=2**50 + 1)[1]
    third = generate(fixed_port, **SAMPLED, seed=2**50 + 2)[1]
    assert first["token_ids"] == second["token_ids"] != third["token_ids"]


def test_server_wide_defaults_of_sampling_are_followed():
    process, port = start("--temperature", "1.1", "--top-k", "30", "--seed", "5")
    with process:
        body = {"prompt": "Once upon a time", "max_tokens": 24}
        first, second = (generate(port, **body)[1] for _ in range(2))
        assert first["seed"] == 5 and first["token_ids"] == second["token_ids"]
        _, said = generate(port, **body, temperature=1.1, top_k=30, seed=5, top_p=1, min_p=0)
        assert said["token_ids"] == first["token_ids"]
        _, greedy = generate(port, **body, temperature=0)
        assert greedy["token_ids"] != first["token_ids"]
        process.kill()


def test_the_model_may_be_named_and_another_is_not_found(port):
    for name in ("target", str(ROOT / "demo_models" / "target"), None):
        status, body = generate(port, **GOOD, model=name)
        assert status == 200 and body["warnings"] == []
    for name in ("gpt-5", "", 7, ["target"]):
        status, body = generate(port, **GOOD, model=name)
        assert status == 404
        assert body["error"]["param"] == "model" and body["error"]["code"] == "model_not_found"


def test_stream_options_are_taken_with_a_stream(port):
    fields = GOOD | {"stream": True, "stream_options": {"include_usage": True}}
    status, _, data = call(port, "POST", "/generate", fields)
    assert status == 200 and events_of(data)[-1]["usage"]["completion_tokens"] == 2


ENDLESS = {"prompt": "1, 2, 3, 4, 5,", "speculative": False}  # counts on and on


def connect(port, path, fields, buffer_bytes=None):
    """A client that has asked and not read; closing it is leaving."""
    client = socket.socket()
    if buffer_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    client.connect(("127.0.0.1", port))
    body = json.dumps(fields)
    client.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    return client


def health(port):
    return json.loads(call(port, "GET", "/health")[2])


def seconds_until(condition):
    """How long it took; fails after 20 s."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + 20
    return time.monotonic() - began


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_at_once(port, stream, path):
    """In 0.3 s, though its request would run for seconds; the best of 3 on a busy machine."""
    times = []
    for _ in range(3):
        with connect(port, path, ENDLESS | {"max_tokens": 2000, "stream": stream}) as leaver:
            wait_until_running(port)
            if stream:
                assert leaver.recv(100)
        times.append(seconds_until(lambda: not health(port)["num_requests_running"]))
    assert min(times) < 0.3
    assert health(port)["kv_cache_usage_perc"] == 0 and generate(port, **GOOD)[0] == 200


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_client_that_stalls_reading_holds_nobody_up(port, path):
    """It asks for a stream with all there is to say, and reads none of it."""
    fields = {"stream": True, "trace": True, "logprobs": 20, "max_tokens": 300}
    alone = generate(port, prompt=COLOURS, max_tokens=40)[1]
    stalled = [connect(port, path, ENDLESS | fields, buffer_bytes=4096) for _ in range(2)]
    wait_until_running(port)
    beside = [generate(port, prompt=COLOURS, max_tokens=40)[1] for _ in range(3)]
    assert [body["token_ids"] for body in beside] == [alone["token_ids"]] * 3
    seconds_until(lambda: not health(port)["num_requests_running"])  # it is generated all the same
    for client in stalled:
        client.close()
    assert health(port)["kv_cache_usage_perc"] == 0 and generate(port, **GOOD)[0] == 200


def test_requests_beyond_the_free_rows_wait_for_one():
    process, port = start("--max-running", "2")
    try:
        with ThreadPoolExecutor(6) as pool:
            fields = {"prompt": COLOURS, "max_tokens": 100, "speculative": False}
            answers = list(pool.map(lambda _: generate(port, **fields), range(6)))
        assert {status for status, _ in answers} == {200}
        assert len({body["text"] for _, body in answers}) == 1
    finally:
        process.kill()
        process.wait()


def test_a_full_queue_answers_429_with_retry_after():
    """60 clients on 8 running and 8 queued: 16 are served, 44 refused, and /health answers."""
    process, port = start("--max-queued", "8")
    try:
        with ThreadPoolExecutor(60) as pool:
            fields = ENDLESS | {"max_tokens": 400}
            answers = [
                pool.submit(call, port, "POST", "/generate", fields | {"seed": i})
                for i in range(60)
            ]
            wait_until_running(port)
            times = [
                seconds_until(lambda: call(port, "GET", "/health")[0] == 200) for _ in range(9)
            ]
            assert sorted(times)[4] < 0.1
            answers = [answer.result() for answer in answers]
        statuses = [status for status, _, _ in answers]
        assert (statuses.count(200), statuses.count(429)) == (16, 44)
        for status, headers, data in answers:
            assert status == 200 or headers["Retry-After"] == "1"
            assert status == 429 or json.loads(data)["usage"]["completion_tokens"] == 400
    finally:
        process.kill()
        process.communicate()


def test_a_request_past_its_deadline_ends_with_504_and_frees_its_row():
    process, port = start("--request-timeout", "0.5")
    try:
        for path, stream in product(("/generate", "/v1/completions"), (False, True)):
            fields = ENDLESS | {"max_tokens": 2000, "stream": stream}
            status, _, data = call(port, "POST", path, fields)
            error = (events_of(data)[-1] if stream else json.loads(data))["error"]
            assert status == (200 if stream else 504)  # a stream's status line is out long before
            assert error["code"] == "timeout" and "took too long" in error["message"]
            seconds_until(lambda: not health(port)["kv_cache_usage_perc"])
            assert generate(port, **GOOD)[0] == 200
    finally:
        process.kill()
        process.communicate()


def test_a_comparison_takes_one_place_and_ends_with_its_first_half(demo_engine):
    """With a single place in the queue it is served; if the first half fails, both are over."""
    options = core.Options(max_queued=1)
    worker = Worker(demo_engine, options)
    client = core.create_app(demo_engine, core.Options(), worker).test_client()
    fields = {"prompt": COLOURS, "max_tokens": 4, "compare": True}
    for _ in range(5):
        assert client.post("/generate", json=fields).status_code == 200
    worker.drain(10)

    def failing(sequences):
        raise RuntimeError("out of memory")

    engine = core.Engine(demo_engine.target, demo_engine.drafters, "ngram")
    engine.step = failing
    worker, taken = Worker(engine, options), []
    submit = worker.submit
    worker.submit = lambda *requests: taken.extend(submit(*requests)) or taken
    client = core.create_app(demo_engine, core.Options(), worker).test_client()
    assert client.post("/generate", json=fields).status_code == 500
    worker.drain(10)
    assert len(taken) == 6 and all(job.cancelled for job in taken)  # three runs of both
    limits = [round(job.deadline - job.submitted, 3) for job in taken]
    assert limits == [options.request_timeout * n for n in range(1, 7)]  # one after the other


def test_queued_clients_that_leave_give_their_place_up():
    process, port = start("--max-queued", "2", "--max-running", "1")
    with process:
        fields = ENDLESS | {"max_tokens": 1500}
        clients = []
        for path in ("/generate", "/generate", "/v1/completions"):
            clients.append(connect(port, path, fields))
            wait_until_running(port)
        seconds_until(lambda: health(port)["num_requests_waiting"] == 2)
        for client in clients[1:]:
            client.close()
        seconds_until(lambda: not health(port)["num_requests_waiting"])
        clients[0].close()
        assert generate(port, **GOOD)[0] == 200
        process.kill()
