"""Drafts that branch: one pass verifies a tree, and the target's choices lead along one path of it.

Each token has the bits that a chain would give it, so the text stays; and each drafter learns how
far its branch came.
"""

import random

import pytest
import torch
from conftest import ScriptedDrafter, run, run_beside_fresh
from test_kernels import TEXT, load, needs_compiler

from drafters.base import ModelState
from drafters.tree import TreeBuilder, merged
from runtime.sampling import Noise
from runtime.values import Cycle, Draft, Request
from server import core

pytestmark = needs_compiler
SAMPLED = core.Sampling(repetition_penalty=1.1, temperature=0.9, top_k=50, top_p=0.95)
COUNT = 24


def test_a_path_goes_on_behind_what_the_target_refused():
    """It chooses 2, 3 and 9; of what was drafted behind 3 first children are shown."""
    tree = Draft([1, 2, 4, 3, 5, 6, 7], None, [-1, -1, 1, 1, 3, 3, 4])
    choices = {-1: 2, 1: 3, 3: 9}
    judged, path = core.verify(tree, choices.__getitem__)
    kinds = [(2, "accepted"), (3, "accepted"), (5, "rejected"), (9, "recovered")]
    assert (judged, path) == ([core.Judgement(*kind) for kind in kinds], [1, 3])
    logits = torch.arange(8.0)
    cycle = Cycle(1, tree, tree.continued(path), judged, 3, 9, 4, [], logits, logits)
    assert (cycle.proposals, cycle.path, cycle.num_beside) == ([2, 3, 5, 7], [1, 3, 4, 6], 3)
    assert cycle.along(logits).tolist() == [0, 2, 4, 5, 7]
    assert cycle.along(torch.arange(10.0)).tolist() == [0, 1, 2, 4, 6, 7, 9]


class TreeDrafter(ScriptedDrafter):
    """Knows the text that is to come, and hides it in trees of any shape."""

    def __init__(self, text, chance):
        super().__init__(None)
        self.text, self.chance, self.needs_hidden = text, chance, True

    def propose(self, state, max_tokens):
        chance, tree = self.chance, Draft([], None, [])
        for i in range(chance.randint(1, max_tokens)):
            tree.parents.append(chance.randrange(-1, i))
            coming = self.text[len(state) + tree.depth(i) - 1 :]
            is_right = coming and chance.random() < 0.5
            tree.tokens.append(coming[0] if is_right else chance.randrange(10, 4000))
        return tree


@pytest.mark.parametrize("sampling", [core.Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("family", "dtype"), [
    *(("qwen3", dtype) for dtype in ("float32", "bfloat16", "int8")),
    ("gemma3_text", "float32"), ("mistral", "float32"),
])  # fmt: skip
def test_a_tree_s_output_is_plain_decoding_s(family, dtype, sampling, tiny_folder):
    """The same tokens and log-probabilities, where windows of 12 keys end inside a tree, too."""
    engine = load(tiny_folder(family), dtype=dtype)
    assert engine.target.report.is_exact
    chance, moved = random.Random(1), 0
    for seed in range(2):
        prompt = TEXT[seed:]
        fields = {"sampling": sampling, "seed": seed, "max_tokens": COUNT, "logprobs": 2}
        plain, _ = run(engine, prompt, **fields)
        drafter = TreeDrafter(prompt + plain.output, chance)
        tree = core.Engine(engine.target, {"scripted": drafter}, "scripted")
        for k in (3, 7, 15):
            fields |= {"drafter": "scripted", "num_speculative_tokens": k}
            ours, events = run(tree, prompt, **fields)
            assert ours.output == plain.output and ours.logprobs == plain.logprobs
            assert ours.statistics.num_accepted_draft_tokens > 3 and not ours.warnings
            moved += sum(e["accepted_count"] > 0 and e["tree"] is not None for e in events)
    assert moved > 6


@pytest.fixture(scope="module")
def several():
    """The embedded models, compiled."""
    return load("embedded", drafter="tree", suffix_cache=0)


def test_several_drafters_make_one_tree(several, prompts, way):
    """And each of them goes on as if it had read the text alone, whoever's branch was taken."""
    members = {"ngram", "suffix", "mtp"}
    assert several.pool.can_branch
    assert {*several.pool.choices["tree"]} - several.pool.special == members
    engine = core.Engine(several.target, several.pool.drafters | {}, "tree")
    engine.pool.choices["tree"] = ("draft_model", *several.pool.choices["tree"])
    branched = 0
    for name in ("code_class", "hard_story", "easy_json"):
        s, cycles = run_beside_fresh(engine, Request(prompts[name], COUNT, "tree", 7, **way))
        branched += sum(cycle.draft.parents is not None for cycle in cycles)
        assert not s.warnings
    assert branched > 5


@pytest.mark.parametrize(
    ("named", "model"), [(None, "mtp"), ("ngram", "mtp"), ("draft_model",) * 2]
)
def test_a_tree_has_the_named_model_or_the_first_choice(several, named, model):
    drafters = {name: several.pool.drafters[name] for name in ("draft_model", "ngram", "mtp")}
    engine = core.Engine(several.target, drafters, named)
    assert engine.pool.choices["tree"] == (model, "ngram")


def test_where_the_classical_rule_judges_a_draft_is_a_chain(several, prompts):
    sampling = core.Sampling(temperature=0.8, verification="rejection")
    fields = {"max_tokens": COUNT, "drafter": "tree", "sampling": sampling}
    _, events = run(several, prompts["repetitive_counting"], **fields)
    assert sum(event["accepted_count"] for event in events) > 3
    assert all(event["tree"] is None for event in events)


def test_where_nothing_is_compiled_the_longest_branch_is_the_draft(several, prompts, plain):
    """In the method in one function it is so anywhere."""
    drafter, tokens, parents = ScriptedDrafter(None), [5, 6, 7, 8], [-1, -1, 1, 0]
    slow = load("embedded", drafter=None, kernels=False)
    engine = core.Engine(slow.target, {"scripted": drafter}, "scripted")
    drafter.propose = lambda _, limit: Draft(tokens[:limit], None, parents[:limit])
    ours, events = run(engine, prompts["hard_prose"], max_tokens=12, drafter="scripted")
    assert ours.output == plain(prompts["hard_prose"], 12) and "tree" not in engine.pool.choices
    assert [event["proposals"] for event in events[1:-3]] == [[6, 7]] * 8
    drafter.verdicts.clear()
    text = core.speculate(several.target, drafter, prompts["hard_prose"], 12, set())
    assert text == ours.output and {verdict.drafted for verdict in drafter.verdicts[:-3]} == {0, 2}
    with pytest.raises(ValueError, match="--drafter tree needs two drafters, and forwards in C"):
        core.Engine(slow.target, slow.pool.drafters, "tree")


TREE, SURE = Draft([1, 2, 3], None, [-1, -1, 1]), Draft([8, 9], None, [-1, -1], [0.2, 0.1])


@pytest.mark.parametrize(("drafts", "most", "tokens", "parents"), [
    ([[1, 2, 3], [1, 4, 5]], 4, [1, 2, 3, 4], [-1, 0, 1, 0]),
    ([[1, 2], [1, 2, 3]], 5, [1, 2, 3], None),
    ([[1, 2], [3], [1, 4]], 9, [1, 2, 3, 4], [-1, 0, -1, 0]),
    ([[1, 2], [3, 4]], 1, [1], None),
    ([[], [3, 4], []], 5, [3, 4], None),
    ([[], []], 5, [], None),
    ([[1, 2], [3, 2, 9]], 3, [1, 2, 3], [-1, 0, -1]),
    ([[1, 2, 4], [3, 2]], 3, [1, 2, 4], None),
    ([[2, 3, 4], TREE], 9, [2, 3, 4, 1], [-1, 0, 1, -1]),
    ([[5, 6], SURE], 3, [5, 6, 8], [-1, 0, -1]),  # .49, .343 and .2
], ids=str)  # fmt: skip
def test_drafts_that_begin_alike_share_their_beginning(drafts, most, tokens, parents):
    drafts = [each if isinstance(each, Draft) else Draft(each) for each in drafts]
    draft = merged(drafts, most)
    assert (draft.tokens, draft.parents) == (tokens, parents)
    assert TREE.longest().tokens == [2, 3]


def test_a_model_s_tree_has_the_likeliest_tokens_of_one_branch_and_beside_it():
    """It is done when no longer branch could have one of them: .5 · .8 < .45."""
    state = ModelState(text=[], sampling=core.Sampling(), noise=Noise(0))
    tree = TreeBuilder(state, 3)
    assert tree.grow([(7, 0.5), (8, 0.45), (9, 0.01)]) == 7 and tree.is_open
    assert tree.grow([(5, 0.8), (6, 0.1)]) == 5 and not tree.is_open
    assert (tree.draft().tokens, tree.draft().parents) == ([7, 8, 5], [-1, -1, 0])
    sure = TreeBuilder(state, 2)
    sure.grow([(7, 0.9), (8, 0.1)])
    assert sure.is_open and sure.grow([(5, 0.9), (6, 0.1)]) == 5
    assert (sure.draft().tokens, sure.draft().parents) == ([7, 5], None)
