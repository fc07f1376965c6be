"""/generate continues a prompt and says what it wrote, how, and how fast, whole or streamed.

A server frees the row of whoever leaves or is late. All is tested in the real process, on a real
socket. Who waits is served in test_operations.py; who finds no place is refused in test_hostile.py.
"""

import json

import openai
import pytest
from started import COLOURS, ENDLESS, GOOD, PATHS, at_once, end_of, module_server, serving, until

SAMPLED = {"prompt": "def read(path):", "max_tokens": 24, "temperature": 0.9, "top_k": 50}
SAMPLED |= {"top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1}
server = module_server("--fixed-k")  # drafts have the length asked for, whatever the clock says


def generated(body):
    """What two answers have alike if they have the same text."""
    return {name: body[name] for name in ("text", "token_ids", "finish_reason")}


def test_generate_continues_a_prompt_and_its_figures_are_those_of_the_trace(server):
    fields = {"prompt": COLOURS, "max_tokens": 30, "drafter": "ngram", "trace": True}
    status, body = server.generate(**fields, model="embedded")
    assert status == 200 and body["text"].startswith(" blue, red, green, blue,")
    assert body["finish_reason"] == "length" and body["warnings"] == []
    trace, timings, usage = body["trace"], body["timings"], body["usage"]
    assert usage["completion_tokens"] == len(body["token_ids"]) == 30
    assert usage["total_tokens"] == usage["prompt_tokens"] + 30
    metrics = body["metrics"]["speculative_decoding"]
    assert metrics["drafter"] == "ngram" and metrics["num_spec_tokens"] == 5
    assert len(metrics["acceptance_histogram"]) == 6
    assert timings["predicted_n"] == 30 and timings["draft_n"] == metrics["num_draft_tokens"]
    assert timings["draft_n_accepted"] == metrics["num_accepted_draft_tokens"]
    parts = timings["draft_ms"] + timings["verify_ms"] + timings["other_ms"]
    assert timings["predicted_ms"] == pytest.approx(parts, abs=0.01)
    verify_ms = sum(event["ms"]["verify"] for event in trace[1:])
    assert verify_ms == pytest.approx(timings["verify_ms"], abs=0.1)
    assert [event["step"] for event in trace] == list(range(metrics["target_passes"] + 1))
    assert [token["id"] for event in trace for token in event["tokens"]] == body["token_ids"]
    cached = usage["prompt_tokens"] - 1
    for event in trace:
        held, cached = cached + 1 + len(event["proposals"]), cached + event["emitted_count"]
        assert event["cached"] == [held, cached]


@pytest.mark.parametrize("more", [{"stop": "15"}, SAMPLED | {"logprobs": 1, "stop": "return"}])
def test_a_stream_gives_an_event_per_cycle_then_the_answer_then_done(server, more):
    fields = {"prompt": "1, 2, 3, 4, 5,", "max_tokens": 40, "drafter": "ngram", "seed": 1} | more
    _, plain = server.generate(**fields)
    *cycles, last = server.stream(**fields)
    assert [cycle["step"] for cycle in cycles] == list(range(len(cycles)))
    assert "".join(cycle["text"] for cycle in cycles) == plain["text"]
    assert [t["id"] for cycle in cycles for t in cycle["tokens"]] == plain["token_ids"]
    assert generated(last) == generated(plain) and last["seed"] == plain["seed"]
    *full, last = server.stream(**fields, trace=True, stream_options={"include_usage": True})
    assert last["usage"] == plain["usage"]
    assert all("rejected" in cycle for cycle in full) and "rejected" not in cycles[0]
    assert [cycle["text"] for cycle in cycles] == [cycle["text"] for cycle in full]
    for events in (cycles, full):
        assert sum([cycle.get("logprobs", []) for cycle in events], []) == plain.get("logprobs", [])


def test_the_seed_that_was_used_is_returned_and_gives_the_same_output_again(server):
    fields = SAMPLED | {"temperature": 3.0}  # two seeds agree in 3 tokens once in 1,700 times
    first, other = (server.generate(**fields)[1] for _ in range(2))
    assert other["seed"] != first["seed"] and other["token_ids"] != first["token_ids"]
    _, again = server.generate(**fields, seed=first["seed"])
    assert generated(again) == generated(first) and again["seed"] == first["seed"]


def test_a_comparison_runs_the_request_by_plain_decoding_too(server):
    """Of each half's first run the stream has the events; the figures are in test_requests.py."""
    fields = {"prompt": COLOURS, "max_tokens": 40, "drafter": "ngram", "compare": True}
    *cycles, body = server.stream(**fields)
    compare = body["compare"]
    assert compare["plain"]["token_ids"] == body["token_ids"] and "trace" not in body
    assert compare["plain"]["timings"]["draft_n"] == 0 and compare["costs"]["alpha"] > 0.9
    assert compare["speculative"]["timings"]["predicted_n"] == 40
    counted = server.health()["speculative_decoding"]
    assert counted["per_drafter"]["ngram"]["num_draft_tokens"] > 0
    assert 0 < counted["recent_acceptance_rate"] <= 1
    own, plain = cycles[:-40], [cycle["plain"] for cycle in cycles[-40:]]
    assert [event["step"] for event in plain] == list(range(40))
    for events, text in ((own, body["text"]), (plain, compare["plain"]["text"])):
        assert "".join(event["text"] for event in events) == text


@pytest.mark.parametrize(("rule", "identical"), [("coupled", True), ("rejection", None)])
def test_a_sampled_comparison_compares_tokens_where_they_must_be_equal(server, rule, identical):
    """Its other half is the request as it was, seed and all, with speculation off."""
    fields = SAMPLED | {"seed": 11, "stop": [":", "return"], "verification": rule}
    _, body = server.generate(**fields, compare=True, trace=True)
    compare = body["compare"]
    assert compare["identical"] is identical and compare["first_difference"] is None
    assert body["trace"][0]["target_top"]
    _, plain = server.generate(**fields, speculative=False)
    assert generated(compare["plain"]) == generated(plain)
    assert server.health()["speculative_decoding"]["per_rule"][rule]["num_draft_tokens"] > 0


def test_flags_of_the_whole_server_are_followed(server):
    """Defaults of sampling, and exactness, which is checked at the start unless turned off."""
    state = server.health()
    assert state["exactness"]["seconds"] > 0 and state["controller"] is None
    assert state["bitwise_lossless"] == (state["exactness"]["doubt"] is None)
    if state["compiled"]:
        assert state["exactness"]["reason"].startswith("by construction")
    defaults = ("--temperature", "1.1", "--top-k", "30", "--seed", "5")
    with serving("--no-kernels", "--drafter", "none", *defaults) as other:
        assert other.health()["bitwise_lossless"] is False
        body = {"prompt": "Once upon a time", "max_tokens": 24}
        first, second = (other.generate(**body)[1] for _ in range(2))
        assert first["seed"] == 5 and first["token_ids"] == second["token_ids"]
        drafted = other.generate(**body, drafter="ngram")[1]
        nothing = other.generate(**body, drafter="ngram", num_speculative_tokens=0)[1]
        answers = (first, drafted, nothing)
        told = [each["metrics"]["speculative_decoding"]["drafter"] for each in answers]
        assert told == ["none", "ngram", "none"]
        said = {"temperature": 1.1, "top_k": 30, "seed": 5, "top_p": 1, "min_p": 0}
        greedy = other.generate(**body, temperature=0)[1]["token_ids"]
        assert greedy != first["token_ids"]
        assert other.generate(**body, **said)[1]["token_ids"] == first["token_ids"]
        assert server.generate(**body, **said)[1]["token_ids"] == first["token_ids"]
        assert server.generate(**body)[1]["token_ids"] == greedy


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_at_once(server, stream, path):
    with server.connect(path, ENDLESS | {"stream": stream}) as leaver:
        server.wait_until_running()
        assert not stream or leaver.recv(100)
    server.wait_until_idle()
    until(lambda: '"finish": "cancelled"' in server.log().splitlines()[-1])
    line = json.loads(server.log().splitlines()[-1])
    assert line["path"] == path and line["tokens"] < ENDLESS["max_tokens"]
    assert line["status"] == (200 if stream else 499)
    assert server.generate(**GOOD)[0] == 200


def test_a_client_that_stalls_reading_holds_nobody_up(server):
    fields = ENDLESS | {"stream": True, "trace": True, "logprobs": 20, "max_tokens": 150}
    alone = server.generate(prompt=COLOURS, max_tokens=40)[1]
    stalled = [server.connect(path, fields, buffer_bytes=4096) for path in PATHS]
    server.wait_until_running(2)
    beside = [server.generate(prompt=COLOURS, max_tokens=40)[1] for _ in range(2)]
    assert [body["token_ids"] for body in beside] == [alone["token_ids"]] * 2
    server.wait_until_idle()  # it is generated all the same
    for client in stalled:
        client.close()
    assert server.generate(**GOOD)[0] == 200


def test_a_request_past_its_deadline_ends_with_504_and_frees_its_row(gate):
    """Or without one: the queue is long, and it is counted all the same."""
    limit = {"constants": {"request_timeout": 0.7}}
    with serving(*gate.arguments, "--max-running", "2", **limit) as server:
        gate.shut()
        kinds = [(path, stream) for path in PATHS for stream in (False, True)]
        fields = {"prompt": "1, 2, 3,", "max_tokens": 20}
        asked = ((path, fields | {"stream": stream}) for path, stream in kinds)
        answers = at_once(*((server.call, "POST", *each) for each in asked))
        statuses, bodies = zip(*map(end_of, answers), strict=True)
        assert statuses == (504, 200) * 2  # a stream's status line is out long before
        for error in (body["error"] for body in bodies):
            assert error["code"] == "timeout" and "took too long" in error["message"]
        with server.openai() as client, pytest.raises(openai.APIError, match="too long"):
            list(client.completions.create(**fields, model=None, stream=True))
        gate.open()
        server.wait_until_idle()
        until(lambda: server.log().count('"timeout"') >= 10)
        lines = [json.loads(text) for text in server.log().splitlines() if "timeout" in text]
        assert sorted(line["status"] for line in lines) == [200] * 3 + [504] * 2
        for line in lines:
            assert line["finish"] == line["error"] == "timeout" and line.get("tokens", 0) < 20
        counted = b'request_success_total{finished_reason="timeout"} 5.0\n'
        assert counted in server.call("GET", "/metrics")[2]
