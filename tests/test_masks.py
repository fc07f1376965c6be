"""Masks are those of transformers, written there for its own loop, on each branch of a draft.

Typical sampling is transformers' as well. Stop strings end a text wherever a token ends.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from conftest import assert_decided_by, run, scripted_engine, together
from transformers import TypicalLogitsWarper
from transformers.generation import logits_process

from runtime.grammars import REGEX, source_of, vocabulary_of
from runtime.sampling import Noise, penalise
from runtime.text import TextStream
from runtime.values import Draft, Request
from server import core

COMMA, GREEN, RED = 12, 1381, 1117
SETTINGS = {
    "allowed": {"allowed_token_ids": (COMMA, GREEN, 9, 7)},
    "bad": {"bad_words": ((GREEN,), (RED, COMMA), (COMMA, RED))},
    "least": {"min_tokens": 9, "end_ids": (GREEN, 0)},
    "typical": {"typical_p": 0.4},
    "all": {
        "bad_words": ((RED, COMMA), (9,)), "min_tokens": 5, "end_ids": (GREEN,), "typical_p": 0.8,
        "allowed_token_ids": (*range(6, 2000), COMMA), "frequency_penalty": 0.5,
    },
}  # fmt: skip
WAYS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95},
    "rejection": {"temperature": 0.9, "top_p": 0.95, "verification": "rejection"},
}


def processed(logits, sampling, prompt, generated):
    """The scores [V] by transformers' processors; what they lack is penalise's own."""
    simple = replace(sampling, allowed_token_ids=(), bad_words=(), min_tokens=0, typical_p=1.0)
    scores = penalise(logits[None], simple.for_prompt(prompt), prompt + generated, Draft())
    ids, text = torch.tensor([prompt + generated]), torch.tensor([generated], dtype=torch.long)
    if allowed := sampling.allowed_token_ids:
        others = sorted({*range(logits.shape[-1])} - {*allowed})
        scores = logits_process.SuppressTokensLogitsProcessor(others)(ids, scores)
    if sampling.min_tokens:
        counts = len(prompt), sampling.min_tokens, list(sampling.end_ids)
        scores = logits_process.MinNewTokensLengthLogitsProcessor(*counts)(ids, scores)
    if words := [list(word) for word in sampling.bad_words]:
        scores = logits_process.NoBadWordsLogitsProcessor(words)(text, scores)
    if sampling.typical_p < 1 and not sampling.is_greedy:
        cut = TypicalLogitsWarper(sampling.typical_p)(ids, scores.double() / sampling.temperature)
        scores = scores.masked_fill(cut == -torch.inf, -torch.inf)
    return scores[0]


@pytest.mark.parametrize("way", ["greedy", "sampled"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_text_is_that_of_transformers(demo_engine, prompts, name, way):
    sampling, without = core.Sampling(**SETTINGS[name], **WAYS[way]), core.Sampling(**WAYS[way])
    has_changed, ends = False, {GREEN}
    for prompt in map(prompts.get, ("repetitive_colours", "hard_docs")):
        text = assert_decided_by(processed, demo_engine, prompt, sampling, ends)
        has_changed |= text != core.plain_decode(demo_engine.target, prompt, 20, ends, without, 3)
    assert has_changed or (way, name) == ("greedy", "typical")


@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_masks_go_with_a_grammar_which_comes_first(demo_engine, prompts, way):
    """Typical tokens are those of what the grammar allows."""
    target, prompt, written = demo_engine.target, prompts["repetitive_colours"], []
    words = target.tokenizer, target.vocab_size, frozenset(target.eos_ids)
    grammar = vocabulary_of(*words).compiled(source_of(REGEX, "( (green|red|pink),){9}"))
    sampling = core.Sampling(bad_words=((GREEN,),), typical_p=0.5, **WAYS[way])
    row, noise, matcher, fed = target.cache.open_row(), Noise(3), grammar.matcher(), prompt
    while len(written) < 30:
        logits = matcher.mask(target.forward([row], [fed], [1]).logits[0], Draft())
        scores = processed(logits[0], sampling, prompt, written)
        fed = [core.choose(scores, sampling, noise, len(prompt) + len(written))]
        written += fed
        if matcher.consume(*fed):
            break
    target.cache.close_row(row)
    for drafter in (None, "auto"):
        fields = {"max_tokens": 30, "drafter": drafter, "sampling": sampling, "seed": 3}
        s, _ = run(demo_engine, prompt, grammar=grammar, **fields)
        assert s.output == written and s.finish_reason == "stop", drafter


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SETTINGS)
def test_each_row_of_a_tree_is_masked_by_its_own_branch(name, way):
    torch.manual_seed(0)
    prompt, generated = [5, RED, 5], [7, RED, 7, COMMA]
    sampling = core.Sampling(**SETTINGS[name], **WAYS[way])
    draft = core.Draft([RED, 9, COMMA, GREEN, RED], parents=[-1, -1, 0, 1, 3])
    logits = torch.randn(6, 2000) * 3
    rows = penalise(logits, sampling.for_prompt(prompt), prompt + generated, draft)
    paths = [[], [RED], [9], [RED, COMMA], [9, GREEN], [9, GREEN, RED]]
    for i, path in enumerate(paths):
        expected = processed(logits[i], sampling, prompt, generated + path)
        torch.testing.assert_close(rows[i], expected)
    if name == "bad":  # a small model may lack the last tokens
        few = penalise(logits[:, :1300], sampling.for_prompt(prompt), prompt + generated, draft)
        torch.testing.assert_close(few, rows[:, :1300])


@pytest.mark.parametrize("temperature", [0.4, 3.0])
def test_typical_tokens_are_those_of_transformers_for_any_spread(temperature):
    torch.manual_seed(1)
    for size, spread in ((3, 1.0), (5000, 0.1), (30_000, 6.0)):
        logits = torch.randn(4, size) * spread
        logits[1, : size // 2] = -torch.inf  # a grammar's
        logits[2] = logits[2].round()  # many are equal
        for mass in (0.01, 0.5, 0.95, 0.999):
            sampling = core.Sampling(temperature=temperature, typical_p=mass)
            ours = penalise(logits, sampling, [], Draft([1, 2, 3]))
            theirs = TypicalLogitsWarper(mass)(None, logits[[0, 2, 3]].double() / temperature)
            assert torch.equal(ours[[0, 2, 3]] == -torch.inf, theirs == -torch.inf)
            half = penalise(logits[1:2, size // 2 :], sampling, [], Draft())
            assert torch.equal(ours[1:2, size // 2 :], half)


def test_masks_that_leave_nothing_end_a_request_in_one_sentence(demo_engine, prompts):
    """Under each rule, and also where a draft went on to that place."""
    for way in WAYS.values():
        for words in ([(COMMA,)], [(COMMA, COMMA)]):
            only = {"allowed_token_ids": (COMMA,), "bad_words": tuple(words)}
            fields = {"sampling": core.Sampling(**only, **way), "drafter": "ngram"}
            with pytest.raises(core.values.RequestError, match="together allow no token"):
                run(demo_engine, prompts["repetitive_colours"], **fields)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", ["grammar", "stop", "stop_token_ids", "nothing"])
def test_a_draft_may_reach_the_end_of_a_text_behind_which_nothing_may_come(
    demo_engine, prompts, way, end
):
    """Plain decoding never asks what follows there. Where the text goes on, it asks and fails."""
    target, prompt, fields = demo_engine.target, prompts["repetitive_colours"], {}
    masks = {"allowed_token_ids": (COMMA, RED), "bad_words": ((COMMA, COMMA), (COMMA, RED))}
    if end == "grammar":  # behind it only the model's end might come
        words = vocabulary_of(target.tokenizer, target.vocab_size, frozenset(target.eos_ids))
        fields["grammar"] = words.compiled(source_of(REGEX, " (red|green), pink"))
        masks = {"bad_words": tuple((token,) for token in target.eos_ids)}
    elif end != "nothing":
        fields[end] = (",",) if end == "stop" else {COMMA}
    fields |= {"max_tokens": 30, "sampling": core.Sampling(**masks, **WAYS[way])}
    oracle = scripted_engine(demo_engine, lambda text, limit: known[len(text) :][:limit])
    strict = core.Engine(target, demo_engine.pool.drafters, is_strict=True)
    num_accepted = 0
    for seed in range(3):
        (s,) = together(demo_engine, [Request(prompt, seed=seed, **fields)])
        known = s.tokens
        assert (s.finish_reason == "error") == (end == "nothing")
        (ours,) = together(oracle, [Request(prompt, drafter="scripted", seed=seed, **fields)])
        assert ours.finish_reason == s.finish_reason
        assert ours.output == s.output or way == "rejection"
        models = {"draft_model", "mtp", "tree"} & strict.pool.choices.keys()
        for drafter in models if end != "nothing" else ():
            own, _ = run(strict, prompt, drafter=drafter, seed=seed, **fields)
            assert not own.warnings and (own.output == s.output or way == "rejection")
        num_accepted += ours.statistics.num_accepted_draft_tokens
        if end in ("stop_token_ids", "nothing") and way != "rejection":
            ends = {COMMA} if end == "stop_token_ids" else set()
            method = prompt, 30, ends, fields["sampling"], seed
            with nullcontext() if ends else pytest.raises(core.values.RequestError):
                drafter = oracle.pool.drafters["scripted"]
                assert core.speculate(target, drafter, *method) == s.output
    assert num_accepted > 2
    assert target.cache.lengths == [0] * target.cache.num_rows


class Letters:
    """A tokenizer whose tokens are pairs of letters."""

    def decode(self, tokens, skip_special_tokens):
        return "".join(f"{token:02d}" for token in tokens)


def test_a_text_may_keep_what_ended_it_and_is_not_ended_too_soon():
    def text_of(tokens, **how):
        growing, shown = TextStream(Letters(), **how), ""
        for i, token in enumerate(tokens):
            if growing.push(token, "bonus"):
                growing.finish()
                return i, shown + "".join(part for part, _ in growing.release(final=True))
            shown += "".join(part for part, _ in growing.release())
        return None, shown

    tokens = [11, 22, 33, 44, 22, 33, 55]
    assert text_of(tokens, stop=["33", "2"]) == (1, "11")
    assert text_of(tokens, stop=["33", "2"], include_stop=True) == (1, "112")
    assert text_of(tokens, stop=["223", "22334"], include_stop=True) == (2, "11223")
    assert text_of(tokens, stop=["2233"], min_tokens=3) == (5, "11223344")
    assert text_of(tokens, stop=["2233"], min_tokens=2) == (2, "11")  # across the last of them
    assert text_of(tokens, stop=["33"], stop_ids={33}) == (2, "1122")
    assert text_of(tokens, stop_ids={44}) == (3, "112233")
    assert text_of(tokens, stop_ids={44}, include_stop=True) == (3, "11223344")
    assert text_of(tokens, stop=["555"]) == (None, "112233442233")  # "55" may still become one
