"""`n` choices of one request: each is the text of a request of its own, with the next seed.

    {"prompt": …, "n": 3, "seed": 5}  →  what the seeds 5, 6 and 7 give

They run side by side, and the prompt is read once.
"""

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from conftest import LIMIT_S, asked, module_client
from started import COLOURS, GENERATE

from runtime.values import Request, RequestError
from server import core
from server.options import Options
from server.worker import Job, Worker

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
    worker = Worker(engine, options).start()
    job = worker.submit(*wanted.choices)
    assert round(job.deadline - job.runs[0].submitted, 3) == options.request_timeout
    job.wait()
    worker.drain(LIMIT_S)
    assert together[0] == 1 and max(together) > 1
    for i, run in enumerate(job.runs):
        assert run.sequence.output == plain(prompt, 12, sampling=sampling, seed=3 + i)
        assert run.sequence.drafting.num_cached == (128 if i and megabytes else 0)


def test_events_are_read_in_the_order_in_which_they_come(monkeypatch):
    """By one thread; a choice that has ended is not waited for."""
    monkeypatch.setattr("server.worker.POLL_S", 3600)
    monkeypatch.setattr("server.worker._REST_S", 0)
    job = Job([Request([1], 9, n=3)] * 3, 7200)
    seen = job.read()
    for news in ([(1, "a")], [(0, "b"), (1, "c")], [(2, "d")]):
        for number, event in news:
            job.push_event(job.runs[number], event)
        assert next(seen) == news
    job.end_run()
    job.push_event(job.runs[2], "e")
    assert next(seen) == [(2, "e")]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, seen)  # and woken by any of them
        job.push_event(job.runs[1], "f")
        assert waiting.result(LIMIT_S) == [(1, "f")]
    job.push_event(job.runs[1], "g")
    job.end_run(RequestError("it failed"))
    assert next(seen) == [(1, "g")]
    with pytest.raises(RequestError, match="it failed"):
        next(seen)


def test_the_choices_of_a_request_wait_as_one_until_the_last_of_them_has_a_place():
    """Also where there are more of them than places to run."""
    worker = Worker(None, Options(max_running=2, max_queued=2))

    def submit(n):
        job = worker.submit(*[Request([1], n=n)] * n)
        worker._give_places()
        return job

    one, job, more = submit(1), submit(8), submit(8)
    assert (worker.num_running, worker.num_waiting, worker.num_jobs) == (2, 2, 3)
    for n in (1, 8):
        with pytest.raises(RequestError, match="2 requests wait already.*--max-queued"):
            submit(n)
    with pytest.raises(RequestError, match="2 requests wait already"):
        worker.expect_place()
    worker._end(one, *one.runs)
    for run in job.runs[:6]:
        assert worker.num_waiting == 2 and worker._running[0] == (job, run)
        run.first_token = 1.0
        worker._give_places()
        worker._end(job, run)
        worker._give_places()
    assert worker._running == [(job, job.runs[6]), (job, job.runs[7])]
    assert worker.num_waiting == 1
    worker.submit(Request([1]))
    more.cancel()
    worker.expect_place()
    assert worker.num_waiting == 1 and all(run.ended for run in more.runs)


def test_a_choice_begins_when_the_prompt_is_read_and_another_run_gets_the_place_of_the_first():
    job = Job([Request([1], 9, n=2)] * 2, 60)
    first, second = job.runs
    assert job.ready() == [first] and not job.later
    first.first_token = 1.0
    assert job.ready() == [first, second]


def test_runs_of_a_comparison_take_one_place_in_turn_and_end_with_the_first_that_fails():
    """Each has as long as if it came alone."""
    worker = Worker(Mock(), options := Options(max_queued=1, max_running=1))
    job = worker.submit(*[Request([1], 9)] * 3)
    assert worker._give_places() == [(job, job.runs[0])] and worker.num_waiting == 0
    worker._end(job, job.runs[0])
    assert worker._running == [(job, job.runs[1])] and job.runs[1].began
    assert round(job.deadline - job.runs[0].submitted, 3) == 2 * options.request_timeout
    worker._end(job, job.runs[1], RuntimeError("broken"))
    assert job.cancelled and worker._running == [] and not job.runs[2].began


def test_a_silent_stream_pings_ever_more_rarely():
    """Hundreds may wait, and each ping takes a core from the running pass."""
    pauses, job = [], Job([Request([1], 9)], 60)
    job._sleep = pauses.append
    seen = job.read()
    assert [next(seen) for _ in range(9)] == [[]] * 9
    assert pauses[:3] == [0.1, 0.2, 0.4] and pauses[-1] == 10
    job.push_event(*job.runs, {})
    assert next(seen) == [(0, {})] and next(seen) == [] and pauses[-1] < 0.2
