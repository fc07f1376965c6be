"""`n` choices of one request: each is the text of a request of its own, with the next seed.

    {"prompt": …, "n": 3, "seed": 5}  →  what the seeds 5, 6 and 7 give

They run side by side, and the prompt is read once.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
from conftest import LIMIT_S
from started import COLOURS, ENDLESS, JSON, ROUTES, is_error, module_server, serving, until

from runtime.values import Request, RequestError
from server import core
from server.options import Options
from server.worker import Job, Worker

LONG = COLOURS + " red, green, blue, red, green, blue," * 12  # of more than two blocks
FIELDS = {"prompt": LONG, "temperature": 1.0, "seed": 5, "max_tokens": 16}
CHAT = [{"role": "user", "content": LONG}]
NAMES = ("text", "token_ids", "finish_reason", "seed", "logprobs")
LISTED = {"prompt": [ENDLESS["prompt"]] * 6}
server = module_server(chat="qwen3")


@pytest.fixture(scope="module")
def asked(server):
    with server.openai() as client:
        (model,) = client.models.list().data

        def ask(is_chat, **fields):
            given = FIELDS | fields | {"model": model.id}
            prompt = given.pop("prompt")
            if is_chat:
                return client.chat.completions.create(messages=CHAT, **given)
            return client.completions.create(prompt=prompt, **given)

        yield ask


def of_a_choice(body):
    return {name: body[name] for name in NAMES}


@pytest.mark.parametrize("fields", [{}, {"temperature": 0}, {"drafter": "none"}], ids=str)
def test_each_choice_is_the_text_of_its_seed_alone(server, fields):
    fields = FIELDS | {"logprobs": 1} | fields
    alone = [server.generate(**fields | {"seed": seed})[1] for seed in (5, 6, 7)]
    status, body = server.generate(**fields, n=3)
    assert status == 200 and [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert list(map(of_a_choice, body["choices"])) == list(map(of_a_choice, alone))
    assert of_a_choice(body) == of_a_choice(alone[0])
    assert ({each["text"] for each in alone} == {alone[0]["text"]}) == (fields["temperature"] == 0)
    usage, lengths = body["usage"], [each["usage"]["completion_tokens"] for each in alone]
    assert usage["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == sum(lengths)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert [c["timings"]["predicted_n"] for c in body["choices"]] == lengths


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_the_openai_client_gets_the_same_choices_whole_and_streamed(asked, server, is_chat):
    prompt = {"prompt": CHAT, "chat": True} if is_chat else {}
    expected = server.generate(**FIELDS | prompt, n=3)[1]
    texts = [choice["text"] for choice in expected["choices"]]
    result = asked(is_chat, n=3)
    said = [c.message.content if is_chat else c.text for c in result.choices]
    assert said == texts and [choice.index for choice in result.choices] == [0, 1, 2]
    assert result.usage.completion_tokens == expected["usage"]["completion_tokens"]
    *chunks, usage = asked(is_chat, n=3, stream=True, stream_options={"include_usage": True})
    assert usage.usage.completion_tokens == result.usage.completion_tokens
    listed = [chunk.choices[0] for chunk in chunks]
    for i, text in enumerate(texts):
        first, *_, last = mine = [choice for choice in listed if choice.index == i]
        parts = [(c.delta.content if is_chat else c.text) or "" for c in mine]
        assert "".join(parts) == text
        assert not is_chat or first.delta.role == "assistant"
        assert last.finish_reason == expected["choices"][i]["finish_reason"]
        assert [c.finish_reason for c in mine[:-1]] == [None] * (len(mine) - 1)


def test_log_probabilities_and_their_offsets_are_those_of_each_choice(asked):
    whole = [choice.logprobs for choice in asked(False, n=2, logprobs=2).choices]
    chunks = [chunk.choices[0] for chunk in asked(False, n=2, logprobs=2, stream=True)]
    for i, expected in enumerate(whole):
        assert expected.text_offset[0] == 0
        parts = [c.logprobs for c in chunks if c.index == i and c.logprobs]
        assert sum([part.tokens for part in parts], []) == expected.tokens
        assert sum([part.text_offset for part in parts], []) == expected.text_offset
    assert whole[0].tokens != whole[1].tokens
    for choice in asked(True, n=2, logprobs=True, top_logprobs=1).choices:
        assert all(len(entry.top_logprobs) == 1 for entry in choice.logprobs.content)


def test_a_stream_of_generate_names_the_choice_of_each_event(server):
    *events, body = server.stream(**FIELDS, n=2, trace=True)
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


def test_choices_and_texts_of_a_list_wait_as_one_and_end_when_their_client_leaves():
    asked = ("/generate", {"n": 4, "temperature": 1}), ("/v1/completions", LISTED)
    with serving("--model", "embedded", "--max-running", "2") as server:
        for (path, fields), is_streamed in product(asked, (False, True)):
            with server.connect(path, ENDLESS | fields | {"stream": is_streamed}):
                server.wait_until_running(2)
                assert server.health()["num_requests_waiting"] == 1
            server.wait_until_idle()
        until(lambda: server.log().count('"status": 499') == 2)  # of those without a stream
        server.end_well()


def test_the_choices_of_a_request_wait_as_one_until_the_last_of_them_has_a_place():
    """Also where there are more of them than places to run."""
    worker = Worker(None, Options(max_running=2, max_queued=2))

    def submit(n):
        job = worker.submit(*[Request([1], n=n)] * n)
        worker._give_places()
        return job

    one, job, more = submit(1), submit(8), submit(8)
    assert (worker.num_running, worker.num_waiting) == (2, 2)
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
    compared = Job([Request([1], 9)] * 2, 60)
    assert [compared.waiting, compared.later] == [[run] for run in compared.runs]


def test_a_silent_stream_pings_ever_more_rarely():
    """Hundreds may wait, and each ping takes a core from the running pass."""
    pauses, job = [], Job([Request([1], 9)], 60)
    job._sleep = pauses.append
    seen = job.read()
    assert [next(seen) for _ in range(9)] == [[]] * 9
    assert pauses[:3] == [0.1, 0.2, 0.4] and pauses[-1] == 10
    job.push_event(*job.runs, {})
    assert next(seen) == [(0, {})] and next(seen) == [] and pauses[-1] < 0.2


@pytest.mark.parametrize("path", ROUTES)
def test_what_does_not_go_with_choices_is_refused(server, path):
    prompt = {"messages": CHAT} if "chat" in path else {"prompt": COLOURS}
    wrong = [({"n": 2, "compare": True}, "n"), ({"n": 2, "seed": 2**64 - 1}, "seed")]
    if path != "/generate":
        wrong += [({"n": 2, "best_of": 3}, "best_of"), ({"n": 2, "best_of": 1}, "best_of")]
    for fields, name in wrong:
        status, _, data = server.call("POST", path, prompt | fields)
        assert status == 400 and is_error(data, name), data
    right = [{"n": 2, "seed": 2**64 - 2}, {"n": 1, "compare": True}]
    right += [{"n": 2, "best_of": 2}, {"best_of": 1}] if path != "/generate" else []
    for fields in right:
        assert server.call("POST", path, prompt | {"max_tokens": 2} | fields)[0] == 200


def test_the_log_counts_the_tokens_of_all_choices(server):
    marked = JSON | {"X-Request-Id": "three-choices"}
    _, body = server.post("/generate", marked, **FIELDS | {"n": 3, "max_tokens": 7})
    until(lambda: "three-choices" in server.log())
    (line,) = [json.loads(t) for t in server.log().splitlines() if "three-choices" in t]
    assert line["tokens"] == body["usage"]["completion_tokens"]
