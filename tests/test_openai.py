"""Tools that people have work unchanged: the client of the package openai, and Prometheus.

/v1 answers them with the text and the figures of /generate, in their shapes, and asks for the key
that the server was started with. What /v1 refuses is in test_bad_inputs.py.
"""

import json
import re
from functools import partial
from types import SimpleNamespace

import openai
import pytest
import torch
from conftest import TARGET
from flask import Flask, g
from prometheus_client.parser import text_string_to_metric_families
from started import AT_WORK, BODIES, COLOURS, is_error, module_server, request, until
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from runtime.models.prompts import Conversation
from runtime.models.reference import contents_of, system_fingerprint
from runtime.models.token_bytes import bytes_of
from runtime.sequence import Sequence
from runtime.values import Request
from server import core
from server.dialects.completions import Completion
from server.options import Options

*_, MESSAGES, COUNT, _ = BODIES
KEY, ORIGIN = "secret key", "https://example.org"
GUARDED = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
server = module_server("--api-key", KEY, "--allow-origin", ORIGIN, "--fixed-k")
chatting = module_server(chat="qwen3")
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "red, green,"}]
AS_TEXT = "system: Be brief.\nuser: red, green,\nassistant:"  # by the template of conftest.py


@pytest.fixture(scope="module")
def client(server):
    with server.openai(KEY) as client:
        yield client


@pytest.fixture(scope="module")
def creates(chatting):
    """What asks for an answer to TURNS: as a chat, and as a completion of the text they make."""
    with chatting.openai() as client:
        (model,) = client.models.list().data
        yield {
            "chat": partial(client.chat.completions.create, model=model.id, messages=TURNS),
            "completion": partial(client.completions.create, model=model.id, prompt=AS_TEXT),
        }


def generate(server, **fields):
    """The answer of /generate to a caller who has the key."""
    status, body = server.post("/generate", GUARDED, **fields)
    assert status == 200, body
    return body


def test_an_answer_tells_its_times_and_what_they_come_to(client, server):
    result = client.completions.create(model="embedded", prompt=COLOURS, max_tokens=20, seed=1)
    timings, again = result.timings, generate(server, prompt=COLOURS, max_tokens=1)
    assert timings["predicted_n"] == 20 and result.seed == 1
    assert timings["prompt_n"] + timings["cache_n"] == result.usage.prompt_tokens
    for part, count in (("prompt", timings["prompt_n"]), ("predicted", 19)):  # one comes with it
        ms = timings[f"{part}_per_token_ms"] * count
        assert ms == pytest.approx(timings[f"{part}_ms"]) and ms > 0
        assert timings[f"{part}_per_second"] == pytest.approx(1e3 * count / ms)
    assert again["timings"]["predicted_per_second"] == 0
    times = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "tokens_per_second"}
    assert times <= again["metrics"].keys() and "mean_itl_ms" not in again["metrics"]
    assert all(result.metrics[name] >= 0 for name in (*times, "mean_itl_ms"))
    spent = result.metrics["mean_itl_ms"] * 19
    assert spent == pytest.approx(result.metrics["generation_time_ms"], abs=0.1)


def test_generate_puts_a_prompt_into_the_chat_template_where_it_is_asked_to(chatting, server):
    """/health tells the page to ask for it. That of a text is in good_requests.txt."""
    answer = generate(chatting, prompt=TURNS, chat=True, max_tokens=8, trace=True)
    first, second, *_ = answer["trace"]
    assert first["prompt_text"] == AS_TEXT and "prompt_text" not in second
    for path, fields, said in (
        ("/generate", {"prompt": "a", "chat": True}, "this model has no chat template"),
        ("/v1/chat/completions", {"messages": TURNS}, "no chat template: use /v1/completions"),
    ):
        status, body = server.post(path, GUARDED, **fields)
        assert status == 400 and said in body["error"]["message"]
    assert chatting.health()["chat_template"] is True and server.health()["chat_template"] is False


def test_an_answer_tells_what_ended_it(client, server):
    text = generate(server, prompt=COLOURS, max_tokens=20)["text"]
    ask = partial(client.completions.create, model="embedded", prompt=COLOURS)
    last = generate(server, prompt=COLOURS, max_tokens=3)["token_ids"][-1]
    for fields, stop, matched in (
        ({"stop": text[5:8]}, text[5:8], text[5:8]),
        ({"extra_body": {"stop_token_ids": [last]}}, None, last),
        ({"max_tokens": 3}, None, None),
        ({"extra_body": {"choice": [text[:5]]}}, None, None),
        ({"extra_body": {"regex": "(?s:.*)", "stop_token_ids": [last]}}, None, last),
    ):
        choice = ask(**fields).choices[0]
        assert (choice.stop_reason, choice.matched_stop) == (stop, matched)
        assert choice.token_ids is None and choice.prompt_logprobs is None


def test_models_are_listed_under_the_name_that_requests_may_use(client):
    (model,) = client.models.list().data
    assert (model.id, model.root, model.max_model_len) == ("embedded", "embedded", 2048)
    assert client.models.retrieve("embedded") == model
    assert client.completions.create(model=model.id, prompt="x", max_tokens=2).model == "embedded"
    with pytest.raises(openai.NotFoundError, match="unknown model 'gpt-9'"):
        client.models.retrieve("gpt-9")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_an_answer_whole_or_streamed_has_the_choices_and_figures_of_generate(
    creates, chatting, kind, n
):
    fields = {"temperature": 1.0, "seed": 5, "max_tokens": 16, "n": n}
    expected, whole = chatting.generate(prompt=AS_TEXT, **fields)[1], creates[kind](**fields)
    said = [(c.text if kind == "completion" else c.message.content) for c in whole.choices]
    texts = [body["text"] for body in expected.get("choices", [expected])]
    assert said == texts and [choice.index for choice in whole.choices] == [*range(n)]
    assert whole.usage.model_dump(exclude_none=True) == expected["usage"]
    figures = whole.metrics["speculative_decoding"].keys()
    assert figures == expected["metrics"]["speculative_decoding"].keys()
    names = {"chat": ("chatcmpl-", "chat.completion"), "completion": ("cmpl-", "text_completion")}
    assert (whole.id[: whole.id.index("-") + 1], whole.object) == names[kind]
    chunks = [*creates[kind](**fields, stream=True)]
    for i, choice in enumerate(whole.choices):
        first, *_, last = mine = [c for chunk in chunks for c in chunk.choices if c.index == i]
        if kind == "completion":
            assert "".join(part.text for part in mine) == texts[i] and last.text == ""
        else:
            assert "".join(part.delta.content or "" for part in mine) == texts[i]
            assert (first.delta.role, first.delta.content) == ("assistant", "")
            assert last.delta.content is None
        reasons = [part.finish_reason for part in mine]
        assert reasons == [None] * (len(mine) - 1) + [choice.finish_reason]
    *_, last = chunks
    assert last.metrics["speculative_decoding"] and last.timings["predicted_n"] > 0
    assert last.usage is None and len({chunk.id for chunk in chunks}) == 1
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}
    *others, usage = creates[kind](**fields, stream=True, stream_options={"include_usage": True})
    assert {chunk.object for chunk in (*others, usage)} == {chunks[0].object}
    assert usage.choices == [] and usage.usage == whole.usage and usage.metrics and usage.timings
    for chunk in others:  # as OpenAI and vLLM have it: a null, and figures at the end alone
        assert chunk.usage is None and "usage" in chunk.model_fields_set
        assert not chunk.model_extra.keys() & {"metrics", "timings"}


def test_the_newer_protocol_makes_calls(chatting):
    city = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tools = [{"type": "function", "name": "weather", "parameters": city}]
    with chatting.openai() as client:
        named = {"model": client.models.list().data[0].id}
        forced = named | {"tools": tools, "tool_choice": "required"}
        with client.responses.stream(input="Rome?", **forced) as stream:
            (call,) = stream.get_final_response().output
        assert json.loads(call.arguments) == {"city": "Rome"}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
        history = [{"role": "user", "content": "Rome?"}, call, result]
        assert client.responses.create(input=history, max_output_tokens=4, **named).output_text


def test_a_fingerprint_changes_with_weights_dtype_and_kernels(tiny_folder):
    """One number of one weight is enough here: all are small."""
    engine = core.load_engine(Options(model=str(tiny_folder("llama")), kernels=False))
    target, seen = engine.target, []

    def take(**changed):
        vars(target).update(changed)
        seen.append(system_fingerprint(target, None))

    take()
    take()
    assert seen[0] == seen.pop() and re.fullmatch("b[0-9a-f]{15}", seen[0])
    assert system_fingerprint(target, "int8") not in seen
    take(compiled=SimpleNamespace(description="other kernels"))
    with torch.inference_mode():
        [*target.model.parameters()][-1][-1] += 1
    take(contents=contents_of(target.model))
    target.model.to(torch.bfloat16)
    take()
    assert len({*seen}) == 4


def test_log_probabilities_of_completions_name_the_place_of_each_token(client):
    """Where a character is several tokens, too. What else they hold is in test_scoring.py."""
    ask, fields = client.completions.create, {"model": "embedded", "prompt": COLOURS, "logprobs": 2}
    fields |= {"max_tokens": 30, "extra_body": {"choice": ["🙃🙃"]}}
    listed = ask(**fields).choices[0].logprobs
    assert {*listed.text_offset} == {0, 1} and listed.text_offset.count(1) > 1
    two = fields | {"n": 2, "temperature": 3, "seed": 5}
    choices, chunks = ask(**two).choices, ask(**two, stream=True)
    told = [choice for chunk in chunks for choice in chunk.choices if choice.logprobs]
    for i, choice in enumerate(choices):
        parts = [part.logprobs for part in told if part.index == i]
        assert sum([part.text_offset for part in parts], []) == choice.logprobs.text_offset
    wild = {"prompt": "日本語", "temperature": 3, "seed": 7, "max_tokens": 40, "n": 3}
    for choice in ask(model="embedded", logprobs=1, **wild).choices:  # with invalid bytes
        for token, at in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
            assert "\ufffd" in token or choice.text.startswith(token, at), (token, at)
    echoed = ask(**fields, echo=True).choices[0].logprobs.text_offset
    assert echoed[-len(listed.tokens) :] == [len(COLOURS) + at for at in listed.text_offset]


@pytest.fixture
def stripping():
    """A tokenizer that decodes a first word without the space before it."""
    words = {word: i for i, word in enumerate(["<unk>", "▁tick", ",", "▁tock"])}
    made = Tokenizer(models.WordLevel(words, "<unk>"))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize(("goes_on", "text"), [(True, " tock"), (False, "tock")])
def test_an_answer_that_continues_a_message_keeps_its_first_space(stripping, goes_on, text):
    (prompt := Conversation([1, 2])).goes_on = goes_on
    sequence = Sequence(Request(prompt, 5), 0, stripping)
    sequence.text.push(3, "")
    assert sequence.text.text == text


def test_a_place_counts_the_space_that_a_first_word_keeps_behind_its_prompt(stripping):
    request, app = Request([1, 2], 5), Flask("x")
    sequence = Sequence(request, 0, stripping)
    with app.test_request_context():
        g.id, app.extensions = "x", dict.fromkeys(["model", "fingerprint"], "x")
        shape = Completion(SimpleNamespace(tokenizer=stripping), {})
    shape.job = SimpleNamespace(request=request, runs=[SimpleNamespace(sequence=sequence)])
    entries = [{"id": i, "token": "", "logprob": 0.0, "top_logprobs": None} for i in (3, 2, 1)]
    for entry in entries:
        sequence.text.push(entry["id"], "")
    choice = shape._choice(0, sequence.text.text, entries)
    assert choice["text"] == " tock, tick" and choice["logprobs"]["text_offset"] == [0, 5, 6]


def test_log_probabilities_have_the_shape_of_chat(creates):
    chat = creates["chat"]
    entries = chat(max_tokens=3, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in entries] == [2, 2, 2]
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        assert entry.top_logprobs[0].logprob >= entry.logprob - 1e-6
    assert chat(max_tokens=3, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    only = {"choice": ["🙃"]}
    entries = chat(logprobs=True, extra_body=only).choices[0].logprobs.content
    assert b"".join(bytes(e.bytes) for e in entries) == "🙃".encode() and len(entries) > 1
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    assert bytes_of(len(tokenizer), tokenizer) == b""  # a model may have more rows


def test_a_route_that_is_not_there_is_told_what_is(client, server):
    with pytest.raises(openai.NotFoundError, match="POST /v1/chat/completions, POST"):
        client.embeddings.create(model="embedded", input="x")
    status, _, data = server.call("GET", "/v2", headers=GUARDED)
    there = json.loads(data)["error"]["message"].partition("has ")[2].split(", ")
    assert status == 404 and len(there) == 11
    for method, path in map(str.split, there):
        good = 400 if method == "POST" else 302 if path == "/" else 200
        assert server.call(method, path, headers=GUARDED)[0] == good


@pytest.mark.parametrize("given", ["Bearer wrong", "Bearer ", "Bearer secret", "Bearer é", KEY, ""])
def test_a_wrong_key_is_no_key(server, given):
    headers = GUARDED | {"Authorization": given.encode(), "X-Api-Key": given.encode()}
    headers["X-Api-Key"] = b"" if given == KEY else headers["X-Api-Key"]
    for path in ("/v1/completions", "/generate", "/metrics", MESSAGES, COUNT):
        method, is_anthropic = "GET" if path == "/metrics" else "POST", path in (MESSAGES, COUNT)
        status, answered, data = server.call(method, path, {"prompt": "x"}, headers)
        assert status == 401 and answered["WWW-Authenticate"] == "Bearer"
        told = {"type": "authentication_error"} if is_anthropic else {"code": "invalid_api_key"}
        assert json.loads(data)["error"].items() >= told.items()


def test_without_a_key_no_body_is_read_and_the_page_is_shown(server):
    status, _, body = server.raw(request("/generate", b"", "Content-Length: 900000"))
    assert status == 401 and is_error(body)
    assert server.call("GET", "/health")[0] == server.call("GET", "/page/")[0] == 200
    with server.openai("nonsense") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_other_origins_may_call_only_where_that_was_allowed(server, chatting):
    assert "Access-Control-Allow-Origin" not in chatting.call("GET", "/health")[1]
    asks = {"Access-Control-Request-Headers": "authorization, x-stainless-lang"}
    allowed = server.call("OPTIONS", "/v1/completions", headers=asks)[1]
    assert allowed["Access-Control-Allow-Headers"] == "authorization, x-stainless-lang"
    for method, expected in (("OPTIONS", 204), ("POST", 401)):
        status, headers, _ = server.call(method, "/v1/completions", {"prompt": "x"})
        assert status == expected and headers["Access-Control-Allow-Origin"] == ORIGIN
        assert method == "POST" or "Authorization" in headers["Access-Control-Allow-Headers"]


def test_metrics_are_what_prometheus_reads(server):
    before = generate(server, prompt=COLOURS, max_tokens=20, drafter="ngram")
    families = {}

    def value(name):
        (sample,) = families[name].samples
        return sample.value

    def is_at_rest():  # the run that the page opens on has a row for a moment, whenever that is
        status, answered, data = server.call("GET", "/metrics", headers=GUARDED)
        assert status == 200 and answered["Content-Type"] == "text/plain; version=0.0.4"
        families.update((f.name, f) for f in text_string_to_metric_families(data.decode()))
        return not any(map(value, AT_WORK))

    until(is_at_rest)
    counted = server.health()["speculative_decoding"]
    accepted = counted["num_accepted_draft_tokens"]
    assert value("spec_decode_num_drafts") == counted["num_spec_steps"] > 0
    assert value("spec_decode_num_draft_tokens") == counted["num_draft_tokens"] > 0
    assert value("spec_decode_num_accepted_tokens") == accepted > 0
    assert accepted >= before["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    positions = families["spec_decode_num_accepted_tokens_per_pos"].samples
    assert [sample.labels["position"] for sample in positions] == [*map(str, range(len(positions)))]
    assert sum(sample.value for sample in positions) == accepted
    assert value("engine_faults") == value("drafter_failures") == 0
    assert {f.type for f in families.values()} == {"counter", "gauge", "histogram"}
    assert {families[name].type for name in AT_WORK} == {"gauge"}
    *buckets, count, total = (s.value for s in families["time_to_first_token_seconds"].samples)
    assert buckets == sorted(buckets) and buckets[-1] == count >= 1 and total > 0
    for name in (*AT_WORK, "spec_decode_num_drafts", "prompt_tokens", "generation_tokens"):
        assert value(f"vllm:{name}") == value(name)
    assert value("prompt_tokens") > value("prompt_tokens_cached") >= 0
    ended = {s.labels["finished_reason"]: s.value for s in families["request_success"].samples}
    assert ended["length"] >= 1
    for name in ("request_queue_time_seconds", "e2e_request_latency_seconds"):
        assert [s.value for s in families[f"vllm:{name}"].samples if "_count" in s.name] == [count]
    prompts = value("prompt_tokens")
    generate(server, prompt=[*range(300, 500)], max_tokens=0, prompt_logprobs=0)
    until(is_at_rest)
    assert value("prompt_tokens") >= prompts + 200
