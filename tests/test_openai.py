"""The tools people have work unchanged: the real openai client and a Prometheus parser, sockets."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_server import COLOURS, call, generate, start, wait_until_running

KEY = "secret key"
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "red, green,"}]


@pytest.fixture(scope="module")
def serving():
    """The demo model behind an API key."""
    process, port = start("--api-key", KEY, "--max-running", "2", "--max-queued", "1")
    with process:
        try:
            yield port
        finally:
            process.kill()


@pytest.fixture(scope="module")
def chatting(chat_folder):
    """A model whose tokenizer has a chat template."""
    process, port = start("--model", str(chat_folder("qwen3")), "--drafter", "ngram")
    with process:
        try:
            yield port
        finally:
            process.kill()


def client_of(port, key=KEY, **options):
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, **options
    )


@pytest.fixture(scope="module")
def client(serving):
    with client_of(serving) as client:
        yield client


@pytest.fixture(scope="module")
def chat(chatting):
    with client_of(chatting) as client:
        yield client.chat.completions


def own(port, **fields):
    """/generate's answer."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    status, _, data = call(port, "POST", "/generate", fields, headers)
    assert status == 200, data
    return json.loads(data)


def test_models_are_listed_under_the_name_that_requests_may_use(client):
    (model,) = client.models.list().data
    assert model.id == "target" and client.models.retrieve("target") == model
    assert client.completions.create(model=model.id, prompt="x", max_tokens=2).model == "target"
    with pytest.raises(openai.NotFoundError, match="unknown model 'gpt-9'"):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="gpt-9", prompt="x")
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize("prompt", [COLOURS, [COLOURS], [4, 8, 15], [[4, 8, 15]]], ids=str)
def test_a_completion_is_what_generate_answers(client, serving, prompt):
    result = client.completions.create(model="target", prompt=prompt, max_tokens=20, seed=1)
    single = prompt[0] if isinstance(prompt[0], (str, list)) and prompt != COLOURS else prompt
    expected = own(serving, prompt=single, max_tokens=20)
    (choice,) = result.choices
    assert choice.text == expected["text"] and choice.finish_reason == expected["finish_reason"]
    assert result.object == "text_completion" and result.id.startswith("cmpl-")
    assert result.usage.model_dump(exclude_none=True) == expected["usage"]
    figures = result.metrics["speculative_decoding"]
    assert set(figures) == set(expected["metrics"]["speculative_decoding"])
    assert result.timings["predicted_n"] == 20 and result.seed == 1


def test_a_completion_streams_its_text_and_its_figures(client):
    fields = {"model": "target", "prompt": COLOURS, "max_tokens": 20}
    whole = client.completions.create(**fields)
    *chunks, last = client.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * len(chunks)
    assert last.choices[0].finish_reason == "length" and last.choices[0].text == ""
    assert last.metrics["speculative_decoding"]["num_draft_tokens"] > 0
    assert last.timings["predicted_n"] == 20 and last.usage is None
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    options = {"include_usage": True}
    *_, end, usage = client.completions.create(**fields, stream=True, stream_options=options)
    assert end.choices[0].finish_reason == "length"
    assert usage.choices == [] and usage.usage == whole.usage


def test_our_own_fields_go_along(client):
    ask = client.completions.create
    extra = {"drafter": "ngram", "num_speculative_tokens": 3, "trace": True, "top_k": 1}
    result = ask(model="target", prompt=COLOURS, max_tokens=12, temperature=1, extra_body=extra)
    assert result.metrics["speculative_decoding"]["drafter"] == "ngram"
    assert result.metrics["speculative_decoding"]["num_spec_tokens"] == 3
    assert len(result.trace) == result.metrics["speculative_decoding"]["target_passes"] + 1
    assert ask(model="target", prompt="x", max_tokens=2, user="me").warnings == [
        "unknown field 'user' was ignored"
    ]


def test_log_probabilities_have_the_shape_of_completions(client, serving):
    ask = client.completions.create
    fields = {"model": "target", "prompt": COLOURS, "max_tokens": 6, "logprobs": 2}
    listed = ask(**fields).choices[0].logprobs
    expected = own(serving, prompt=COLOURS, max_tokens=6, logprobs=2)["logprobs"]
    assert listed.tokens == [entry["token"] for entry in expected]
    assert listed.token_logprobs == [entry["logprob"] for entry in expected]
    assert all(len(top) == 2 for top in listed.top_logprobs)
    assert listed.text_offset[:2] == [0, len(listed.tokens[0])]
    chunks = [chunk.choices[0] for chunk in ask(**fields, stream=True)]
    streamed = [token for choice in chunks if choice.logprobs for token in choice.logprobs.tokens]
    assert streamed == listed.tokens
    offsets = [at for choice in chunks if choice.logprobs for at in choice.logprobs.text_offset]
    assert offsets == listed.text_offset


def test_a_conversation_is_written_by_the_tokenizers_template(chat, chatting):
    text = "system: Be brief.\nuser: red, green,\nassistant:"
    expected = generate(chatting, prompt=text, max_tokens=8)[1]
    name = chat._client.models.list().data[0].id
    result = chat.create(model=name, messages=TURNS, max_completion_tokens=8)
    (choice,) = result.choices
    assert choice.message.role == "assistant" and choice.message.content == expected["text"]
    assert result.object == "chat.completion" and result.id.startswith("chatcmpl-")
    assert result.usage.prompt_tokens == expected["usage"]["prompt_tokens"]
    assert result.metrics["speculative_decoding"]["drafter"] == "ngram"
    parts = [{"type": "text", "text": "red, "}, {"type": "text", "text": "green,"}]
    again = chat.create(
        model=name, messages=[TURNS[0], {"role": "user", "content": parts}], max_tokens=8
    )
    assert again.choices == result.choices


def test_a_conversation_streams_in_the_usual_order(chat):
    name = chat._client.models.list().data[0].id
    fields = {"model": name, "messages": TURNS, "max_tokens": 8}
    whole = chat.create(**fields).choices[0].message.content
    options = {"include_usage": True}
    first, *chunks, last, usage = chat.create(**fields, stream=True, stream_options=options)
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == whole
    assert last.choices[0].finish_reason == "length" and last.choices[0].delta.content is None
    assert usage.usage.completion_tokens == 8 and usage.timings["predicted_n"] == 8
    assert {chunk.object for chunk in (first, last, usage)} == {"chat.completion.chunk"}


def test_the_clients_stream_helper_puts_the_answer_together(chat):
    name = chat._client.models.list().data[0].id
    fields = {"model": name, "messages": TURNS, "max_tokens": 8}
    # The helper calls an answer that was cut by max_tokens an error, so it has to stop.
    fields["stop"] = chat.create(**fields).choices[0].message.content[5:8]
    whole = chat.create(**fields).choices[0]
    with chat.stream(**fields) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0]
    assert "".join(deltas) == final.message.content == whole.message.content
    assert final.finish_reason == "stop"


def test_log_probabilities_have_the_shape_of_chat(chat):
    name = chat._client.models.list().data[0].id
    fields = {"model": name, "messages": TURNS, "max_tokens": 3, "logprobs": True}
    entries = chat.create(**fields, top_logprobs=2).choices[0].logprobs.content
    assert len(entries) == 3
    for entry in entries:
        assert entry.bytes == list(entry.token.encode()) and len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob >= entry.logprob - 1e-6
    assert chat.create(**fields).choices[0].logprobs.content[0].top_logprobs == []


def test_a_model_without_chat_template_says_so(client):
    with pytest.raises(openai.BadRequestError, match="no chat template: use /v1/completions"):
        client.chat.completions.create(model="target", messages=TURNS)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"), ({"echo": True}, "echo"), ({"suffix": "x"}, "suffix"),
        ({"presence_penalty": 0.5}, "presence_penalty"), ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"prompt": ["a", "b"]}, "prompt"), ({"prompt": []}, "prompt"), ({"best_of": 3}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": 1}, "stream_options"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 2}, "top_p"), ({"drafter": "zzz"}, "drafter"), ({"logprobs": 999}, "logprobs"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_supported_is_refused_and_not_ignored(client, fields, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.post("/completions", body={"prompt": "x"} | fields, cast_to=object)
    assert error.value.param == param and error.value.type == "invalid_request_error"


def test_values_that_change_nothing_are_taken(client):
    fields = {"n": 1, "echo": False, "presence_penalty": 0, "frequency_penalty": 0.0, "best_of": 1}
    result = client.completions.create(model="target", prompt="x", max_tokens=2, **fields)
    assert result.warnings == []


@pytest.mark.parametrize("key", ["wrong", "", "secret", "é"])
def test_a_wrong_key_is_no_key(serving, key):
    for method, path in (("POST", "/v1/completions"), ("POST", "/generate"), ("GET", "/metrics")):
        headers = {"Authorization": f"Bearer {key}".encode(), "Content-Type": "application/json"}
        status, answered, data = call(serving, method, path, {"prompt": "x"}, headers)
        assert status == 401 and answered["WWW-Authenticate"] == "Bearer"
        assert json.loads(data)["error"]["code"] == "invalid_api_key"
    assert call(serving, "GET", "/health")[0] == call(serving, "GET", "/")[0] == 200


def test_a_missing_key_is_the_clients_authentication_error(serving):
    with client_of(serving, "nonsense") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_full_queue_is_a_rate_limit_with_a_time_to_wait(serving, client):
    """Two run and one waits: of those after them each is told to come back."""
    long = {
        "model": "target",
        "prompt": COLOURS,
        "max_tokens": 1500,
        "extra_body": {"drafter": "ngram"},
    }

    def leave_when_told(stream):
        with stream:
            for _ in stream:
                if told:
                    return

    told = []
    with ThreadPoolExecutor() as pool:
        streams = [client.completions.create(**long, stream=True) for _ in range(3)]
        readers = [pool.submit(leave_when_told, stream) for stream in streams]
        try:
            wait_until_running(serving)
            with pytest.raises(openai.RateLimitError) as error:
                for _ in range(100):  # until all three have arrived
                    client.completions.create(model="target", prompt="x", max_tokens=1)
            assert error.value.response.headers["Retry-After"] == "1"
            assert error.value.code == "queue_full"
        finally:
            told.append(True)
        for reader in readers:
            reader.result()


def test_an_error_within_a_stream_reaches_the_client():
    process, port = start("--request-timeout", "0.4")
    with process:
        try:
            with client_of(port) as client:
                ask = {"model": "target", "prompt": COLOURS, "max_tokens": 1900}
                stream = client.completions.create(**ask, stream=True)
                with pytest.raises(openai.APIError, match="took too long"):
                    for _ in stream:
                        pass
                with pytest.raises(openai.InternalServerError) as error:
                    client.completions.create(**ask)
                assert error.value.status_code == 504
        finally:
            process.kill()


def test_metrics_are_what_prometheus_reads(serving):
    before = own(serving, prompt=COLOURS, max_tokens=20, drafter="ngram")
    headers = {"Authorization": f"Bearer {KEY}"}
    status, answered, data = call(serving, "GET", "/metrics", headers=headers)
    assert status == 200 and answered["Content-Type"] == "text/plain; version=0.0.4"
    families = {f.name: f for f in text_string_to_metric_families(data.decode())}
    health = json.loads(call(serving, "GET", "/health")[2])["speculative_decoding"]

    def value(name):
        (sample,) = families[name].samples
        return sample.value

    assert value("spec_decode_num_drafts") == health["num_spec_steps"] > 0
    assert value("spec_decode_num_draft_tokens") == health["num_draft_tokens"] > 0
    accepted = health["num_accepted_draft_tokens"]
    assert value("spec_decode_num_accepted_tokens") == accepted
    assert accepted >= before["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    positions = families["spec_decode_num_accepted_tokens_per_pos"].samples
    assert [sample.labels["position"] for sample in positions] == [*map(str, range(len(positions)))]
    assert sum(sample.value for sample in positions) == accepted
    assert value("engine_faults") == value("drafter_failures") == 0
    assert {f.type for f in families.values()} == {"counter", "gauge", "histogram"}
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert families[name].type == "gauge" and value(name) == 0
    first = {
        s.name + str(s.labels): s.value for s in families["time_to_first_token_seconds"].samples
    }
    assert first["time_to_first_token_seconds_count{}"] >= 1
    assert first["time_to_first_token_seconds_sum{}"] > 0
    buckets = [v for name, v in first.items() if "_bucket" in name]
    assert (
        buckets == sorted(buckets) and buckets[-1] == first["time_to_first_token_seconds_count{}"]
    )


def test_other_origins_may_call_only_where_that_was_allowed(serving):
    assert "Access-Control-Allow-Origin" not in call(serving, "GET", "/health")[1]
    process, port = start("--allow-origin", "https://example.org", "--api-key", KEY)
    with process:
        try:
            asks = {"Access-Control-Request-Headers": "authorization, x-stainless-lang"}
            allowed = call(port, "OPTIONS", "/v1/completions", headers=asks)[1]
            assert allowed["Access-Control-Allow-Headers"] == "authorization, x-stainless-lang"
            status, headers, _ = call(port, "OPTIONS", "/v1/completions")
            assert status == 204
            assert headers["Access-Control-Allow-Origin"] == "https://example.org"
            assert "Authorization" in headers["Access-Control-Allow-Headers"]
            status, headers, _ = call(port, "POST", "/v1/completions", {"prompt": "x"})
            assert status == 401
            assert headers["Access-Control-Allow-Origin"] == "https://example.org"
        finally:
            process.kill()


def test_a_client_that_leaves_frees_its_slot(serving, client):
    stream = client.completions.create(
        model="target",
        prompt=COLOURS,
        max_tokens=1900,
        stream=True,
        extra_body={"speculative": False},
    )
    next(iter(stream))
    wait_until_running(serving)
    stream.close()
    deadline = time.monotonic() + 5
    while json.loads(call(serving, "GET", "/health")[2])["num_requests_running"]:
        assert time.monotonic() < deadline
