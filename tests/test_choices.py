"""`n` choices of one request: each is the text of a request of its own, with the next seed.

    {"prompt": …, "n": 3, "seed": 5}  →  what the seeds 5, 6 and 7 give

They run side by side, and the prompt is read once.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from conftest import LIMIT_S, asked, module_client
from started import COLOURS, GENERATE

from runtime.values import Request, RequestError
from server import core
from server.options import Options
from server.worker import Admission, Job, Worker, read

LONG = COLOURS + " red, green, blue, red, green, blue," * 12  # of more than two blocks
FIELDS = {"prompt": LONG, "temperature": 1.0, "seed": 5, "max_tokens": 16}
NAMES = ("text", "token_ids", "finish_reason", "seed", "logprobs")
client = module_client(drafter="ngram")


def of_a_choice(body):
    return {name: body[name] for name in NAMES}


@pytest.mark.parametrize("fields", [{}, {"temperature": 0}, {"drafter": "none"}], ids=str)
def test_each_choice_is_the_text_of_its_seed_alone(client, fields):
    fields = FIELDS | {"logprobs": 1} | fields
    alone = [asked(client, GENERATE, **fields | {"seed": seed})[1] for seed in (5, 6, 7)]
    status, body = asked(client, GENERATE, **fields, n=3)
    assert status == 200 and [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert list(map(of_a_choice, body["choices"])) == list(map(of_a_choice, alone))
    assert of_a_choice(body) == of_a_choice(alone[0])
    assert ({each["text"] for each in alone} == {alone[0]["text"]}) == (fields["temperature"] == 0)
    usage, lengths = body["usage"], [each["usage"]["completion_tokens"] for each in alone]
    assert usage["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == sum(lengths)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert [c["timings"]["predicted_n"] for c in body["choices"]] == lengths


def test_a_stream_of_generate_names_the_choice_of_each_event(client):
    _, (*events, body) = asked(client, GENERATE, **FIELDS, n=2, trace=True, stream=True)
    for i, choice in enumerate(body["choices"]):
        mine = [event for event in events if event["index"] == i]
        assert [event["step"] for event in mine] == list(range(len(mine)))
        assert "".join(event.pop("text") for event in mine) == choice["text"]
        assert [{"index": i} | event for event in choice["trace"]] == mine
    assert len(events) == sum(len(choice["trace"]) for choice in body["choices"])


@pytest.mark.parametrize("megabytes", [64, 0])
def test_choices_run_together_and_the_prompt_is_read_once(prompts, plain, monkeypatch, megabytes):
    """Where there is no prefix cache each reads it; the text is the same."""
    options = Options(model="embedded", drafter="mtp", prefix_cache_mb=megabytes, max_running=4)
    engine, together = core.load_engine(options), []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda s, *rest: together.append(len(s)) or step(s, *rest))
    prompt = (prompts["code_function"] * 3)[:150]
    sampling = core.Sampling(temperature=0.9)
    wanted = Request(prompt, 12, "mtp", sampling=sampling, seed=3, n=4)
    worker = Worker(engine, options)
    jobs = worker.submit(*wanted.choices)
    for job in jobs:
        job.wait()
    worker.drain(LIMIT_S)
    assert together[0] == 1 and max(together) > 1
    for i, job in enumerate(jobs):
        assert job.sequence.output == plain(prompt, 12, sampling=sampling, seed=3 + i)
        assert job.sequence.drafting.num_cached == (128 if i and megabytes else 0)
    assert {round(job.deadline - job.submitted, 3) for job in jobs} == {options.request_timeout}


def test_events_are_read_in_the_order_in_which_they_come(monkeypatch):
    """By one thread; a choice that has ended is not waited for."""
    monkeypatch.setattr("server.worker.POLL_S", 3600)
    monkeypatch.setattr("server.worker._REST_S", 0)
    wanted = Request([1], 9, n=3)
    first = Job(wanted, 7200)
    jobs = [first, Job(wanted, 7200, first), Job(wanted, 7200, first)]
    seen = read(jobs)
    for number, event in ((1, "a"), (0, "b"), (1, "c"), (2, "d")):
        jobs[number].put(event)
        assert next(seen) == (number, [event])
    first.end()
    jobs[2].put("e")
    assert next(seen) == (2, ["e"])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, seen)  # and woken by any of them
        jobs[1].put("f")
        assert waiting.result(LIMIT_S) == (1, ["f"])
    jobs[1].end(RequestError("it failed"))
    with pytest.raises(RequestError, match="it failed"):
        next(seen)


def test_the_choices_of_a_request_wait_as_one_until_the_last_of_them_has_a_place():
    """Also where there are more of them than places to run."""
    places = Admission(Options(max_running=2, max_queued=2))

    def submit(n):
        jobs = [Job(Request([1], n=n), 60)]
        jobs += [Job(Request([1], n=n), 60, None, jobs[0]) for _ in range(1, n)]
        places._queue(jobs)
        places._give_places()
        return jobs

    (one,), jobs, more = submit(1), submit(8), submit(8)
    assert (places.num_running, places.num_waiting) == (2, 2)
    for n in (1, 8):
        with pytest.raises(RequestError, match="2 requests wait already.*--max-queued"):
            submit(n)
    with pytest.raises(RequestError, match="2 requests wait already"):
        places.expect_place()
    for job in (one, *jobs[:6]):
        job.cancel()
        if job in places._running:
            places._running.remove(job)
        places._give_places()
    assert jobs[7] in places._running and (places.num_running, places.num_waiting) == (2, 1)
    for job in more[1:]:
        job.cancel()
    places.expect_place()
    assert places.num_waiting == 1 and all(job.ended for job in more[1:])
    more[0].cancel()
    assert places.num_waiting == 0


def test_a_choice_begins_when_the_prompt_is_read_and_another_run_gets_the_place_of_the_first():
    wanted = Request([1], 9, n=2)
    first = Job(wanted, 60)
    second = Job(wanted, 60, first)
    assert not second.may_begin and first.then is None
    first.note_first()
    assert second.may_begin
    run = Job(replace(wanted, n=1), 60, first)
    assert first.then is run


def test_a_silent_stream_pings_ever_more_rarely():
    """Hundreds may wait, and each ping takes a core from the running pass."""
    pauses, job = [], Job(Request([1], 9), 60)
    job._sleep = lambda limit_s, *_: pauses.append(limit_s)
    seen = read([job])
    assert [next(seen) for _ in range(9)] == [(0, [])] * 9
    assert pauses[:3] == [0.1, 0.2, 0.4] and pauses[-1] == 10
    job.put({})
    assert next(seen) == (0, [{}]) and next(seen) == (0, []) and pauses[-1] < 0.2
