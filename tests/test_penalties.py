"""Penalties and biases are OpenAI's formula, and each branch of a draft counts its own tokens.

    logit[j] += logit_bias[j]
    logit[j] -= count[j] * frequency_penalty + (count[j] > 0) * presence_penalty

count[j] says how often token j was generated before; the prompt's tokens do not count. The formula
is written here a second time, token by token.
"""

from collections import Counter

import pytest
import torch
from conftest import asked, assert_decided_by, module_client, run
from started import CHAT, COLOURS, COMPLETIONS, GENERATE, text_of

from drafters.pool import AUTO, TREE
from drafters.tree import ranked
from runtime.kernels import can_chain
from runtime.sampling import Noise, penalise
from server import core

COMMA, GREEN = 12, 1381  # tokens of COLOURS
SETTINGS = {
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 0.8},
    "rewarded": {"presence_penalty": -2.0, "frequency_penalty": -0.5},
    "bias": {"logit_bias": ((COMMA, -100.0), (GREEN, 2.0), (700, 3.5))},
    "all": {
        "presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2,
        "logit_bias": ((COMMA, -3.0), (GREEN, 1.5)),
    },
}  # fmt: skip
WAYS = {"greedy": {}, "sampled": {"temperature": 0.9, "top_p": 0.95}}


def scored(logits, sampling, prompt, generated):
    """The logits [V] that OpenAI's formula gives; repetition_penalty after the bias, as we say."""
    scores = logits.clone()
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    for token in {*prompt, *generated}:
        factor = sampling.repetition_penalty
        scores[token] *= factor if scores[token] < 0 else 1 / factor
    for token, count in Counter(generated).items():
        scores[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    return scores


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_text_is_that_of_the_formula(demo_engine, prompts, name, way):
    sampling, without = core.Sampling(**SETTINGS[name], **WAYS[way]), core.Sampling(**WAYS[way])
    has_changed = False
    for prompt in map(prompts.get, ("repetitive_colours", "hard_docs")):
        text = assert_decided_by(scored, demo_engine, prompt, sampling, set())
        has_changed |= text != core.plain_decode(demo_engine.target, prompt, 20, set(), without, 3)
    assert has_changed


@pytest.mark.parametrize("name", SETTINGS)
def test_each_branch_of_a_tree_counts_its_own_tokens(name):
    """The rows of a tree, where one token stands on two branches, and twice on one."""
    torch.manual_seed(0)
    prompt, generated = [5, GREEN, 5], [7, COMMA, 7]
    sampling = core.Sampling(**SETTINGS[name]).for_prompt(prompt)
    draft = core.Draft([7, 9, 7, GREEN, 9], parents=[-1, -1, 0, 1, 3])
    logits = torch.randn(6, 2000) * 3
    rows = penalise(logits, sampling, prompt + generated, draft)
    for i, path in enumerate([[], [7], [9], [7, 7], [9, GREEN], [9, GREEN, 9]]):
        expected = scored(logits[i], sampling, prompt, generated + path)
        torch.testing.assert_close(rows[i], expected, rtol=1e-6, atol=1e-6)
    assert penalise(logits, core.Sampling(temperature=1.0), [5], draft) is logits


def test_model_drafters_draw_by_the_same_penalties(demo_engine, prompts):
    """A bias of 100 leaves one token, so all that a model drafts is that token, and right."""
    prompt, sampling = prompts["hard_prose"], core.Sampling(logit_bias=((GREEN, 100.0),))
    for drafter in demo_engine.pool.choices.keys() - {"ngram", "suffix", "grammar", "prediction"}:
        fields = {"max_tokens": 12, "drafter": drafter, "sampling": sampling}
        sequence, _ = run(demo_engine, prompt, **fields)
        assert sequence.output == [GREEN] * 12
        figures = sequence.statistics
        assert figures.num_accepted_draft_tokens > 0, drafter
        if drafter not in (AUTO, TREE):  # which also ask others, and whose branches differ
            assert figures.draft_acceptance_rate == 1, drafter
    leaders = ranked(torch.zeros(4096), prompt, sampling, Noise(0), 2)
    assert leaders[0][0] == GREEN and leaders[0][1] > 0.99


@pytest.mark.parametrize("name", SETTINGS)
def test_a_chain_in_c_is_refused_where_logits_are_changed(demo_engine, name):
    drafter = demo_engine.pool.drafters["draft_model"]
    cache = demo_engine.draft_model.cache
    for fields, expected in (({}, True), (SETTINGS[name], False)):
        state = drafter.open([5, 6], core.Sampling(**fields), Noise(0))
        assert can_chain(cache, [state], [[5, 6]], [3]) is expected
        drafter.close(state)


client = module_client(max_tokens=12)
FIELDS = {"presence_penalty": 1, "frequency_penalty": 0.5, "logit_bias": {"12": -100, "7": 15}}


def test_all_routes_take_them_and_name_an_id_outside_of_the_vocabulary(client):
    texts, chat = [], [{"role": "user", "content": COLOURS}]
    said = "logit_bias has token id 4096: the largest one is 4095"
    ways = (GENERATE, {}), (COMPLETIONS, {}), (GENERATE, {"prompt": chat, "chat": True}), (CHAT, {})
    for route, more in ways:
        given = {"prompt": COLOURS, "seed": 1} | more
        ours, plain = (text_of(asked(client, route, **given, **more)[1]) for more in (FIELDS, {}))
        assert ours != plain
        texts.append(ours)
        status, body = asked(client, route, **given, logit_bias={"3": 1, "4096": 1})
        assert status == 400 and body["error"]["message"] == said
    assert texts[0] == texts[1] and texts[2] == texts[3]
