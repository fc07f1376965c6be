"""Requests share forwards and nothing else: each comes out as if it had been alone.

A long prompt does not stop the others, and a forward or a step that fails loses no token.
"""

import random
import threading
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import conftest
import pytest
from conftest import WAYS, ScriptedDrafter, before, failing, finish, run, scripted_engine, together
from started import at_once, until

from runtime.statistics import Statistics
from runtime.values import Request
from server import core, retry
from server.events import event
from server.options import Options
from server.worker import _REST_S, Job, Worker

DRAFTERS = (None, "ngram", "suffix", "draft_model", "mtp")
SAMPLINGS = (core.Sampling(), core.Sampling(1.1, 0.9, 50, 0.95))


@pytest.fixture(scope="module")
def engine(demo_engine):
    """The embedded models with a small chunk, and a drafter that fails now and then."""
    chance = random.Random(0)

    def poisoned(tokens, limit):
        if chance.random() < 0.2:
            raise RuntimeError("poisoned")
        return tokens[-limit:] if chance.random() < 0.5 else [-1]

    loaded = demo_engine.pool.drafters | {"poisoned": ScriptedDrafter(poisoned)}
    return core.Engine(demo_engine.target, loaded, prefill_chunk=24)


def is_idle(engine):
    """Nothing is held: every row of every cache is free, and empty."""
    model, mtp = (engine.pool.drafters[name] for name in ("draft_model", "mtp"))
    caches = engine.target.cache, model._draft.cache, mtp._cache
    free = all(len(cache._free) == cache.num_rows and not cache.rows for cache in caches)
    return free and not any(any(cache.lengths) for cache in caches)


def events_of(job):
    return (event for news in job.read() for _, event in news)


def request_at_random(chance, prompts):
    return Request(
        (chance.choice(list(prompts.values())) * 8)[: chance.randint(1, 120)],
        max_tokens=chance.randint(1, 20),
        drafter=chance.choice([*DRAFTERS, "poisoned"]),
        num_speculative_tokens=chance.randint(0, 8),
        stop=chance.choice([(), (), ("e", "the")]),
        sampling=chance.choice(SAMPLINGS),
        seed=chance.randrange(100),
    )


def test_many_requests_over_eight_rows_all_equal_their_solo_runs(engine, demo_engine, prompts):
    """Random lengths, drafters, K, sampling; some clients leave, some drafters are poisoned."""
    chance, num_requests = random.Random(20), 20
    worker = Worker(engine, Options(max_running=8, max_queued=num_requests)).start()
    before = sum(engine.totals.by_drafter.values(), Statistics()).completion_tokens
    requests = [request_at_random(chance, prompts) for _ in range(num_requests)]
    jobs = list(map(worker.submit, requests))

    def client(job, leaves_after):
        for seen, _ in enumerate(events_of(job)):
            if seen == leaves_after:
                job.cancel()

    leaving = [chance.choice([None, None, None, 2]) for _ in jobs]
    at_once(*((client, *each) for each in zip(jobs, leaving, strict=True)))
    worker.drain(60)
    assert is_idle(engine) and worker.num_running == worker.num_waiting == 0
    finished = [job for job in jobs if not job.cancelled]
    assert len(finished) > num_requests / 2
    for sequence in (job.runs[0].sequence for job in finished):
        assert sequence.finish_reason in ("stop", "length")
        plain = replace(sequence.request, drafter=None)
        *_, (alone, _) = demo_engine.generate(plain)
        assert sequence.output == alone.output
        assert sequence.text.text == alone.text.text
    after = sum(engine.totals.by_drafter.values(), Statistics()).completion_tokens
    begun = filter(None, (job.runs[0].sequence for job in jobs))
    assert after - before == sum(len(sequence.output) for sequence in begun)


def test_a_prompt_read_in_chunks_gives_the_output_of_one_read_at_once(engine, demo_engine, prompts):
    """Lengths around the borders of a chunk of 24, and a prompt of many chunks."""
    long = (prompts["code_class"] + prompts["easy_facts"]) * 4
    for length in (23, 24, 25, 49, 150):
        request = Request(long[:length], 10, "mtp")
        (chunked,), (whole,) = together(engine, [request]), together(demo_engine, [request])
        assert chunked.output == whole.output and chunked.num_steps == whole.num_steps
        assert chunked.statistics.prefills == 1
        assert chunked.statistics.drafted_at == whole.statistics.drafted_at
        assert chunked.statistics.accepted_at == whole.statistics.accepted_at


def test_a_long_prompt_does_not_stop_the_others(engine, prompts):
    """While 200 tokens are read in chunks of 24 the running request gets a token every cycle."""
    running = engine.open(Request(prompts["code_class"], 60, None))
    engine.step([running])
    late = [engine.open(Request([7] * 200, 4, "mtp")) for _ in range(2)]
    cycles = 0
    while not late[0].num_steps:
        cycles_of = engine.step([running, *late])
        assert running in cycles_of and late[1] not in cycles_of  # one prompt is read at a time
        cycles += 1
    assert cycles == 9
    finish(engine, [running, *late])
    assert late[0].output == late[1].output and is_idle(engine)


@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_step_that_fails_loses_no_token(demo_engine, prompts, monkeypatch, num_requests):
    """Nor a log-probability: what has been accepted is not taken again."""
    fields = {"drafter": "ngram", "logprobs": 2, **WAYS["sampled"]}
    texts = list(prompts.values())[:num_requests]

    def answers():
        sequences = [demo_engine.open(Request(text, 12, **fields)) for text in texts]
        while running := [s for s in sequences if not s.finish_reason]:
            for s, cycle in retry.step(demo_engine, running).items():
                event(s, cycle)
        finish(demo_engine, sequences)
        return [(s.output, s.logprobs, s.statistics.num_draft_tokens) for s in sequences]

    expected, faulty = answers(), Mock(side_effect=[0, KeyError(), 0, KeyError(), *[0] * 99])
    monkeypatch.setattr(demo_engine.planner, "record_cycle", faulty)
    assert answers() == expected and faulty.call_count >= 4


def test_an_engine_that_raises_fails_what_is_in_flight_and_goes_on(engine, prompts, monkeypatch):
    """Where not even another try of each by itself can be made."""
    worker, step = Worker(engine, Options()).start(), retry.step
    errors = [RuntimeError("no memory")]

    def faulty(engine, sequences):
        if len(sequences) == 2 and errors:
            raise errors.pop()
        return step(engine, sequences)

    monkeypatch.setattr(retry, "step", faulty)
    jobs = [worker.submit(Request(prompts["hard_prose"], 200)) for _ in range(2)]
    for job in jobs:
        with pytest.raises(RuntimeError, match="no memory"):
            list(job.read())
    job = worker.submit(Request(prompts["hard_prose"], 5))
    assert len(list(events_of(job))) == 5
    worker.drain(60)
    assert is_idle(engine)


@pytest.mark.parametrize("asked, expected", [({}, 0), ({"trace": True}, 9), ({"logprobs": 1}, 9)])
def test_no_event_is_made_that_nobody_reads(demo_engine, monkeypatch, asked, expected):
    made, waiting = Mock(side_effect=event), []
    monkeypatch.setattr("server.worker.event", made)
    monkeypatch.setattr(retry, "step", retry.step)
    before(retry, "step", lambda *_: until(lambda: waiting and not waiting[0].is_read))
    worker = Worker(demo_engine, Options()).start()
    waiting.append(job := worker.submit(Request([1, 2, 3], 9, **asked)))
    job.wait()
    worker.drain(60)
    assert made.call_count == expected and len(job.runs[0].sequence.output) == 9
    assert len(job.runs[0].sequence.text.text) > 0


@pytest.mark.parametrize(("pause_ms", "wakes"), [(21, [0, 1, 2, 3]), (12, [1, 3, 5]), (3, [6])])
def test_an_event_wakes_who_reads_once_it_has_rested(monkeypatch, pause_ms, wakes):
    """Each time costs the running pass a core. A rest: 20 ms."""
    clock = Mock(return_value=100.0)
    monkeypatch.setattr("time.monotonic", clock)
    job, woken = Job([Request([1], 9)], 7200), []
    job._changed.notify = lambda: woken.append(number)
    for number in range(10):
        if woken[-1:] == [number - 1] or not number:  # it has looked, and rests
            job._rests_until = clock() + _REST_S
        clock.return_value += pause_ms / 1e3
        job.push_event(*job.runs, {})
    assert woken[: len(wakes)] == wakes


@pytest.mark.parametrize("tells", ["push_event", "end_run", "cancel"])
def test_an_event_the_end_and_leaving_wake_who_reads(monkeypatch, tells):
    monkeypatch.setattr("server.worker.POLL_S", 3600)
    job, seen = Job([Request([1], 9)], 7200), []
    reader = threading.Thread(target=lambda: seen.append(next(events_of(job), None)), daemon=True)
    reader.start()
    told = getattr(job, tells)
    if tells == "push_event":
        told = partial(told, *job.runs, "an event")
    threading.Timer(0.05, told).start()
    reader.join(30)
    assert seen == ["an event" if tells == "push_event" else None]


@pytest.mark.parametrize(
    "drafter", ["ngram", "mtp", pytest.param("tree", marks=conftest.needs_compiler)]
)
@pytest.mark.parametrize("call", range(5))
def test_a_forward_that_fails_once_leaves_no_trace(
    demo_engine, prompts, plain, monkeypatch, call, drafter, way
):
    """Of the prompt's three chunks, or of a verify: what was cached by then is cached anew."""
    prompt = prompts["repetitive_sentence"]
    target, loaded = demo_engine.target, demo_engine.pool.drafters
    engine = core.Engine(target, loaded, prefill_chunk=len(prompt) // 3 + 1)
    expected = plain(prompt, 12, **way)
    failing(engine, monkeypatch, lambda i, _: i == call)
    sequence, _ = run(engine, prompt, max_tokens=12, drafter=drafter, **way)
    assert (sequence.output, sequence.warnings, engine.totals.num_faults) == (expected, [], 1)
    assert sequence.statistics.num_draft_tokens > 3


def test_a_draft_that_cannot_be_verified_is_lost(demo_engine, prompts, plain, monkeypatch, way):
    expected = plain(prompts["hard_prose"], 12, **way)
    engine = scripted_engine(demo_engine, lambda tokens, limit: [7] * limit)
    failing(engine, monkeypatch, lambda _, num_logits: max(num_logits) > 1)
    sequence, _ = run(engine, prompts["hard_prose"], max_tokens=12, drafter="scripted", **way)
    assert sequence.output == expected and engine.totals.num_faults == 2  # together and alone
    assert sequence.warnings == ["a forward failed (out of memory): went on without speculation"]
    assert engine.pool.drafters["scripted"].num_open == 0


def test_a_neighbour_s_fault_lets_no_chunk_count_twice(demo_engine, prompts, plain, monkeypatch):
    """A chunk is read, then the others' forward fails: the chunk's hidden states came already."""
    engine = core.Engine(demo_engine.target, demo_engine.pool.drafters, prefill_chunk=16)
    running = engine.open(Request(prompts["easy_json"], 12))
    while not running.num_steps:
        retry.step(engine, [running])
    text = (prompts["code_class"] * 3)[:60]
    late = engine.open(Request(text, 12, "mtp"))
    failing(engine, monkeypatch, lambda i, _: i == 1)
    finish(engine, [running, late])
    assert engine.totals.num_faults == 1 and late.warnings == []
    assert late.statistics.num_draft_tokens > 5 and late.output == plain(text, 12)
    assert running.output == plain(prompts["easy_json"], 12)
