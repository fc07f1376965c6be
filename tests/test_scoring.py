"""Scoring: log-probabilities of a prompt's own tokens, and of texts that lm-eval compares.

They have the same bits alone, in company, in chunks, with every drafter and every memory of
prompts; and they are transformers' own but for roundings.
"""

import math
from functools import partial

import pytest
import torch
from conftest import TARGET, application, asked, load, needs_compiler, run, together
from started import CHAT

from runtime.cache.prefix import PrefixCache
from runtime.scoring import scores_of as scores_of_tokens
from runtime.values import Request, RequestError
from server import core, trace
from server.options import Options
from server.worker import Worker

TEXT = torch.randint(4096, (300,), generator=torch.Generator().manual_seed(0)).tolist()
NUM_TOP = 3
DRAFTERS = ("ngram", "suffix", "draft_model", "mtp", "auto", "tree")


def scores_of(s):
    """A sequence's scores, of tokens that were read in this very request."""
    assert not s.failure and s.drafting.num_cached == 0
    return trace.prompt_logprobs(s)


@pytest.fixture(scope="module")
def expected(demo_engine):
    """The scores of TEXT, read at once and alone."""
    sequence, events = run(demo_engine, TEXT, max_tokens=0, prompt_logprobs=NUM_TOP)
    assert sequence.finish_reason == "length" and sequence.output == [] == events
    return scores_of(sequence)


@pytest.mark.parametrize("family", ["embedded", "gemma2", "lfm2", "gpt2"])
def test_scores_are_those_of_transformers(demo_engine, tiny_folder, reference, monkeypatch, family):
    folder = TARGET if family == "embedded" else tiny_folder(family)
    engine = demo_engine if family == "embedded" else load(folder, max_model_len=256)
    monkeypatch.setattr(engine, "prefill_chunk", 50)
    text = TEXT[: engine.target.max_length]  # all that the context holds
    entries = scores_of(run(engine, text, max_tokens=0, prompt_logprobs=NUM_TOP)[0])
    with torch.inference_mode():
        rows = reference(folder)(torch.tensor([text])).logits[0].log_softmax(-1)
    assert entries[0] is None and [e["id"] for e in entries[1:]] == text[1:]
    for entry, row in zip(entries[1:], rows, strict=False):
        own, tops = float(row[entry["id"]]), entry["top_logprobs"]
        assert entry["logprob"] == pytest.approx(own, abs=1e-4)
        num_near = int((row - own).abs().lt(1e-4).sum())
        assert abs(entry["rank"] - 1 - int((row > own).sum())) < num_near
        listed = [top["logprob"] for top in tops]
        assert listed == pytest.approx(row.topk(NUM_TOP).values.tolist(), abs=1e-4)
        assert listed == pytest.approx(row[[top["id"] for top in tops]].tolist(), abs=1e-4)
        assert entry["token"] == engine.target.tokenizer.decode([entry["id"]])
    assert len(entries) == len(text)


@pytest.mark.parametrize("chunk", [1, 64, 1000])
def test_scores_have_the_same_bits_in_chunks_and_in_company(demo_engine, expected, plain, chunk):
    engine = core.Engine(demo_engine.target, demo_engine.pool.drafters, prefill_chunk=chunk)
    scored = Request(TEXT, 4, None, prompt_logprobs=NUM_TOP)
    others = [Request(TEXT[::-1][:90], 5), Request(TEXT, 0, prompt_logprobs=NUM_TOP)]
    first, other, second = together(engine, [scored, *others])
    assert scores_of(first) == scores_of(second) == expected
    assert first.output == plain(TEXT, 4) and other.output == plain(TEXT[::-1][:90], 5)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_scores_depend_on_no_drafter_and_no_prefix_cache(demo_engine, expected, plain, drafter):
    """What is scored is read anew, and is remembered for others, with the states of heads."""
    known = PrefixCache.of(demo_engine.target, 64)
    engine = core.Engine(demo_engine.target, demo_engine.pool.drafters, prefixes=known)
    fields = {"drafter": drafter, "prompt_logprobs": NUM_TOP}
    for max_tokens in (0, 9):
        s, _ = run(engine, TEXT, max_tokens=max_tokens, **fields)
        assert scores_of(s) == expected and s.output == plain(TEXT, max_tokens)
        again, _ = run(engine, TEXT, max_tokens=9, drafter=drafter)
        assert again.drafting.num_cached == 256 and again.output == plain(TEXT, 9)
    assert engine.target.cache.lengths == [0] * engine.target.cache.num_rows


@needs_compiler
@pytest.mark.parametrize("vocab", [3, 1000, 49_152])
def test_scores_in_c_are_those_of_torch(vocab, monkeypatch):
    """Of equal logits the lower id is the likelier, and a row's bits depend on that row alone."""
    rows = torch.randn(40, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    rows[3, 1:], rows[4, 2] = rows[3, 1], -math.inf
    tokens = [i % vocab for i in range(1, 41)]
    ours = scores_of_tokens(rows, tokens, NUM_TOP)
    alone = [scores_of_tokens(rows[i : i + 1], tokens[i : i + 1], NUM_TOP) for i in range(40)]
    for whole, parts in zip(ours, zip(*alone, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts))
    tied = sorted(range(vocab), key=lambda i: (-float(rows[3, i]), i))[:NUM_TOP]
    assert ours.top[3].tolist() == tied
    with monkeypatch.context() as patched:
        patched.setattr("runtime.kernels.can_choose", lambda: False)
        theirs = scores_of_tokens(rows, tokens, NUM_TOP)
        for bad in (math.nan, math.inf):
            with pytest.raises(ValueError, match="no probabilities"):
                scores_of_tokens(torch.tensor([[0.0, bad, 1.0]]), [0], 1)
    assert torch.equal(ours.ranks, theirs.ranks)
    for name in ("logprobs", "top_logprobs"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=2e-5, rtol=0)
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="no probabilities"):
            scores_of_tokens(torch.tensor([[0.0, bad, 1.0]]), [0], 1)
    with pytest.raises(IndexError):
        scores_of_tokens(rows, [*tokens[1:], vocab], 1)


def test_a_fault_while_a_prompt_is_scored_changes_no_score(demo_engine, expected, monkeypatch):
    """Rows of logits are few at a time, however many tokens are read at once."""
    engine, calls = core.Engine(demo_engine.target, {}, prefill_chunk=1000), []
    forward = engine.target.forward

    def faulty(rows, tokens, num_logits, *rest):
        output = forward(rows, tokens, num_logits, *rest)
        calls.append(max(num_logits))
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        if len(calls) == 5:
            output.logits[0][-1, 5] = torch.nan
        return output

    monkeypatch.setattr(engine.target, "forward", faulty)
    assert scores_of(run(engine, TEXT, max_tokens=0, prompt_logprobs=NUM_TOP)[0]) == expected
    assert max(calls) <= 128 < sum(calls)
    again, _ = run(engine, TEXT, max_tokens=0, prompt_logprobs=NUM_TOP)  # the NaN is read again
    assert scores_of(again) == expected


def test_an_answer_has_a_prompts_scores(demo_engine, expected):
    """Without a cycle, too, a request is one that went well."""
    with application(demo_engine, Options()) as client:
        ask = partial(asked, client, "/generate", prompt=TEXT)
        worker = client.application.extensions["worker"]
        worker._failures_in_a_row = 9
        status, body = ask(max_tokens=0, prompt_logprobs=NUM_TOP)
        assert status == 200 and body["prompt_logprobs"] == expected
        assert body["text"] == "" and body["finish_reason"] == "length"
        assert worker.status == "ok"
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] == len(TEXT)
        _, body = ask(max_tokens=2, n=2, prompt_logprobs=NUM_TOP, logprobs=1)
        assert body["prompt_logprobs"] == expected and len(body["logprobs"]) == 2
        assert ask(prompt=[5], max_tokens=0, prompt_logprobs=0)[1]["prompt_logprobs"] == [None]
        context = demo_engine.target.max_length
        full = ask(prompt=[5] * context, max_tokens=0)[1]
        assert full["usage"]["prompt_tokens"] == context and full["finish_reason"] == "length"
        assert ask(max_tokens=0, compare=True)[1]["compare"]["identical"] is True


# ------------------------------------------------------------ /v1/completions: echo and lists
CAT = "The cat sat, and the cat sat"
PROMPTS = ["x = [1, 2,", TEXT[:40], "red, green, blue, red,", "a"]


@pytest.fixture(scope="module")
def ask(demo_engine):
    with application(demo_engine, Options(max_running=2, max_queued=1)) as client:

        def ask(path="/v1/completions", status=200, **fields):
            answered, body = asked(client, path, **{"max_tokens": 6, "seed": 7} | fields)
            assert answered == status, body
            return body

        yield ask


def joined(chunks):
    """The choices that chunks of a stream come to."""
    choices = {}
    for one in (one for chunk in chunks for one in chunk["choices"]):
        whole = choices.setdefault(one["index"], {"index": one["index"], "text": ""})
        whole["text"] += one["text"]
        for name, part in (one["logprobs"] or {}).items():
            whole[name] = whole.get(name, []) + part
        whole["finish_reason"] = one["finish_reason"]
    return [choices[i] for i in sorted(choices)]


def flat(choice):
    named = {name: choice[name] for name in ("index", "text", "finish_reason")}
    return named | (choice["logprobs"] or {})


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("prompt", [CAT, TEXT[:40]], ids=["text", "ids"])
def test_an_echo_repeats_the_prompt_with_its_scores(ask, demo_engine, prompt, max_tokens):
    fields, tokenizer = {"prompt": prompt, "max_tokens": max_tokens}, demo_engine.target.tokenizer
    ids = tokenizer(prompt)["input_ids"] if prompt is CAT else prompt
    ours = ask("/generate", **fields, logprobs=2, prompt_logprobs=2)
    entries = [*ours["prompt_logprobs"][1:], *ours["logprobs"]]
    for count in (None, 0, 2, True):
        body = ask(**fields, echo=True, logprobs=count)
        (choice,) = body["choices"]
        text = prompt if prompt is CAT else tokenizer.decode(prompt)
        assert choice["text"] == text + ours["text"] and choice["finish_reason"] == "length"
        assert body["usage"] == ours["usage"] and choice["prompt_logprobs"] is None
        listed = choice["logprobs"]
        assert joined(ask(**fields, echo=True, logprobs=count, stream=True)) == [flat(choice)]
        if count is None:
            assert listed is None
            continue
        assert listed["tokens"] == [tokenizer.decode(ids[:1]), *(e["token"] for e in entries)]
        assert listed["token_logprobs"] == [None, *(e["logprob"] for e in entries)]
        begins = [sum(map(len, listed["tokens"][:i])) for i in range(len(listed["tokens"]))]
        assert listed["text_offset"] == begins and listed["top_logprobs"][0] is None
        for entry, top in zip(entries, listed["top_logprobs"][1:], strict=True):
            kept = entry["top_logprobs"][: 0 if count is True else count]
            assert top == {each["token"]: each["logprob"] for each in [*kept, entry]}


def test_scores_of_prompts_have_the_form_of_vllm(ask, chat_folder):
    ours = ask("/generate", prompt=CAT, prompt_logprobs=2)["prompt_logprobs"]
    body = ask(prompt=[CAT, "a"], n=2, temperature=1, prompt_logprobs=2, echo=True, logprobs=1)
    for choice in body["choices"][:2]:
        assert choice["prompt_logprobs"][0] is None and len(ours) == len(choice["prompt_logprobs"])
        for entry, listed in zip(ours[1:], choice["prompt_logprobs"][1:], strict=True):
            own = {"logprob": entry["logprob"], "rank": entry["rank"]}
            assert listed[str(entry["id"])] == own | {"decoded_token": entry["token"]}
            ranks = [listed[str(top["id"])]["rank"] for top in entry["top_logprobs"]]
            assert ranks == [1, 2] and len(listed) == 2 + (entry["rank"] > 2)
        assert all(len(top) in (1, 2) for top in choice["logprobs"]["top_logprobs"][1:])
    engine = load(chat_folder("llama"))
    turns = [{"role": "user", "content": "hi"}]
    with application(engine, Options()) as client:
        _, body = asked(client, CHAT, "hi", max_tokens=2, prompt_logprobs=0)
        scores = [next(iter(each.values())) for each in body["prompt_logprobs"][1:]]
        _, body = asked(client, "/generate", turns, chat=True, max_tokens=0, prompt_logprobs=0)
        expected = body["prompt_logprobs"][1:]
    assert [each["logprob"] for each in scores] == [each["logprob"] for each in expected]


CHOICES = {"n": 2, "temperature": 1, "echo": True, "logprobs": 0}


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 0, "echo": True, "logprobs": 1}, CHOICES])
def test_each_prompt_of_a_list_is_answered_as_alone(ask, fields):
    n, whole = fields.get("n", 1), ask(prompt=PROMPTS, **fields)
    apart = [ask(prompt=prompt, **fields) for prompt in PROMPTS]
    all_choices = ((i, choice) for i, body in enumerate(apart) for choice in body["choices"])
    expected = [flat(choice) | {"index": i * n + choice["index"]} for i, choice in all_choices]
    assert list(map(flat, whole["choices"])) == expected
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert whole["usage"][name] == sum(body["usage"][name] for body in apart)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = ask(prompt=PROMPTS, **fields, **options)
    assert joined(chunks) == expected
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_a_list_as_long_as_may_be_is_taken_where_fewer_may_wait(ask):
    body = ask(prompt=[[i] for i in range(128)], max_tokens=1, n=2)
    assert [choice["index"] for choice in body["choices"]] == [*range(256)]
    assert body["usage"]["prompt_tokens"] == 128 and body["usage"]["completion_tokens"] == 256


def test_a_list_waits_as_one_and_lets_others_pass():
    worker, wanted = Worker(None, Options(max_running=2, max_queued=2)), Request([5])
    listed = worker.submit(*[Request([5], num_prompts=6)] * 6)
    texts = [(listed, run) for run in listed.runs]
    assert worker.num_waiting == 1 and worker._give_places() == texts[:2]
    other = worker.submit(wanted)
    assert worker.num_waiting == 2
    with pytest.raises(RequestError, match="2 requests wait already"):
        worker.submit(wanted)
    for expected in (texts[2], (other, *other.runs), texts[3]):
        worker._running.pop()
        assert worker._give_places() == [expected]
