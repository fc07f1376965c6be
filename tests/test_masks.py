"""Penalties are OpenAI's formula and masks transformers', on each branch of a draft.

    logit[j] += logit_bias[j]
    logit[j] -= count[j] * frequency_penalty + (count[j] > 0) * presence_penalty

count[j] says how often token j was generated before; the prompt's tokens do not count. The formula
is written here a second time, token by token. Typical sampling is transformers' as well. Stop
strings end a text wherever a token ends.
"""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from conftest import decoded_by, grammar_of, run, scripted_engine, together
from transformers import TypicalLogitsWarper
from transformers.generation import logits_process

from drafters.pool import AUTO, TREE
from drafters.tree import ranked
from runtime.grammars import REGEX
from runtime.sampling import Noise, penalise
from runtime.text import TextStream
from runtime.values import Draft, Request
from server import core

COMMA, GREEN, RED = 12, 1381, 1117  # tokens of repetitive_colours
PENALTIES = {
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 0.8},
    "rewarded": {"presence_penalty": -2.0, "frequency_penalty": -0.5},
    "bias": {"logit_bias": ((COMMA, -100.0), (GREEN, 2.0), (700, 3.5))},
    "all penalties": {
        "presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2,
        "logit_bias": ((COMMA, -3.0), (GREEN, 1.5)),
    },
}  # fmt: skip
SETTINGS = PENALTIES | {
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


def scored(logits, sampling, prompt, generated):
    """The scores [V]: the formula, repetition_penalty after the bias, as we say, and then masks."""
    scores = logits.clone()
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in {*prompt, *generated}:
        factor = sampling.repetition_penalty
        scores[token] *= factor if scores[token] < 0 else 1 / factor
    for token, count in Counter(generated).items():
        scores[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    scores, ids = scores[None], torch.tensor([prompt + generated])
    if allowed := sampling.allowed_token_ids:
        others = sorted({*range(logits.shape[-1])} - {*allowed})
        scores = logits_process.SuppressTokensLogitsProcessor(others)(ids, scores)
    if sampling.min_tokens:
        counts = len(prompt), sampling.min_tokens, list(sampling.end_ids)
        scores = logits_process.MinNewTokensLengthLogitsProcessor(*counts)(ids, scores)
    if words := [list(word) for word in sampling.bad_words]:
        text = torch.tensor([generated], dtype=torch.long)
        scores = logits_process.NoBadWordsLogitsProcessor(words)(text, scores)
    if sampling.typical_p < 1 and not sampling.is_greedy:
        cut = TypicalLogitsWarper(sampling.typical_p)(ids, scores.double() / sampling.temperature)
        scores = scores.masked_fill(cut == -torch.inf, -torch.inf)
    return scores[0]


@pytest.mark.parametrize("way", ["greedy", "sampled"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_text_is_that_of_the_formula_and_of_transformers(demo_engine, prompts, name, way):
    """Of plain decoding; drafters write the same (test_lossless.py)."""
    target, sampling = demo_engine.target, core.Sampling(**SETTINGS[name], **WAYS[way])
    without, has_changed = core.Sampling(**WAYS[way]), False
    ends = set() if name in PENALTIES else {GREEN}
    for prompt in map(prompts.get, ("repetitive_colours", "hard_docs")):
        decoded = target, prompt, 20, ends
        expected = decoded_by(
            lambda logits, output, prompt=prompt: scored(logits, sampling, prompt, output),
            ends.__contains__, *decoded[:3], sampling,
        )  # fmt: skip
        assert core.plain_decode(*decoded, sampling, 3) == expected
        has_changed |= expected != core.plain_decode(*decoded, without, 3)
    assert has_changed or (way, name) == ("greedy", "typical")


@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_masks_go_with_a_grammar_which_comes_first(demo_engine, prompts, way):
    """Typical tokens are those of what the grammar allows."""
    target, prompt = demo_engine.target, prompts["repetitive_colours"]
    grammar = grammar_of(demo_engine, REGEX, "( (green|red|pink),){9}")
    sampling = core.Sampling(bad_words=((GREEN,),), typical_p=0.5, **WAYS[way])
    matcher = grammar.matcher()

    def rule(logits, output):
        return scored(matcher.mask(logits[None], Draft())[0], sampling, prompt, output)

    expected = decoded_by(rule, matcher.consume, target, prompt, 30, sampling)
    for drafter in (None, "auto"):
        fields = {"max_tokens": 30, "drafter": drafter, "sampling": sampling, "seed": 3}
        s, _ = run(demo_engine, prompt, grammar=grammar, **fields)
        assert s.output == expected and s.finish_reason == "stop", drafter


TREES = [  # a prompt, what was generated, and a draft: a token stands on two branches, twice on one
    ([5, GREEN, 5], [7, COMMA, 7], [7, 9, 7, GREEN, 9]),
    ([5, RED, 5], [7, RED, 7, COMMA], [RED, 9, COMMA, GREEN, RED]),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SETTINGS)
def test_each_row_of_a_tree_is_scored_by_its_own_branch(name, way):
    sampling = core.Sampling(**SETTINGS[name], **WAYS[way])
    for prompt, generated, drafted in TREES:
        torch.manual_seed(0)
        draft, known = core.Draft(drafted, parents=[-1, -1, 0, 1, 3]), prompt + generated
        a, b, c, d, e = drafted
        logits = torch.randn(6, 2000) * 3
        rows = penalise(logits, sampling.for_prompt(prompt), known, draft)
        for i, path in enumerate([[], [a], [b], [a, c], [b, d], [b, d, e]]):
            expected = scored(logits[i], sampling, prompt, generated + path)
            torch.testing.assert_close(rows[i], expected, rtol=1e-6, atol=1e-6)
        if name == "bad":  # a small model may lack the last tokens
            few = penalise(logits[:, :1300], sampling.for_prompt(prompt), known, draft)
            torch.testing.assert_close(few, rows[:, :1300])
        assert penalise(logits, core.Sampling(**WAYS[way]), [5], draft) is logits


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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", ["grammar", "stop", "stop_token_ids", "nothing"])
def test_a_draft_may_reach_the_end_of_a_text_behind_which_nothing_may_come(
    demo_engine, prompts, way, end
):
    """Plain decoding never asks what follows there. Where the text goes on, it asks and fails.

    So a request whose masks leave nothing ends in one sentence, whichever rule judges its drafts.
    """
    target, prompt, fields = demo_engine.target, prompts["repetitive_colours"], {}
    masks = {"allowed_token_ids": (COMMA, RED), "bad_words": ((COMMA, COMMA), (COMMA, RED))}
    if end == "grammar":  # behind it only the model's end might come
        fields["grammar"] = grammar_of(demo_engine, REGEX, " (red|green), pink")
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
        assert end != "nothing" or "together allow no token" in str(ours.failure)
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


def test_model_drafters_draw_by_the_same_penalties(demo_engine, prompts):
    """Masks and the text leave one token at each place, so all that a model drafts is right."""
    prompt = prompts["hard_prose"]
    turns = core.Sampling(allowed_token_ids=(GREEN, RED), bad_words=((GREEN, GREEN), (RED, RED)))
    sampling = replace(turns, end_ids=(RED,), min_tokens=1)  # so the first one is GREEN
    for drafter in demo_engine.pool.choices.keys() - {"ngram", "suffix", "grammar", "prediction"}:
        fields = {"max_tokens": 12, "drafter": drafter, "sampling": sampling}
        sequence, _ = run(demo_engine, prompt, **fields)
        assert sequence.output == [GREEN, RED] * 6
        figures = sequence.statistics
        assert figures.num_accepted_draft_tokens > 0, drafter
        if drafter not in (AUTO, TREE):  # which also ask others, and whose branches differ
            assert figures.draft_acceptance_rate == 1, drafter
    biased = core.Sampling(logit_bias=((GREEN, 100.0),))
    ((token, chance), _) = ranked(torch.zeros(4096), prompt, biased, Noise(0), 2)
    assert token == GREEN and chance > 0.99
