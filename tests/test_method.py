"""The method in one function, `speculate`: it writes what plain decoding and the engine write.

    text = core.speculate(target, drafter, prompt, 40, eos_ids)

So what a reader learns from the core's first function is what the server does, with each drafter,
however tokens are chosen, and whether drafts are chains or trees.
"""

from functools import partial
from unittest.mock import Mock

import pytest
from conftest import run

from server import core

SAMPLINGS = {
    "greedy": core.Sampling(),
    "sampled": core.Sampling(temperature=0.8),
    "penalised": core.Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.2),
}


def assert_one_text(engine, prompts, drafter, name, sampling):
    """`speculate` with a drafter, plain decoding and the engine with the drafter `name` agree."""
    way, passes = {"sampling": sampling, "seed": 7}, []
    for prompt in list(prompts.values())[:3]:
        given = engine.target, prompt, 30, engine.eos_ids
        text = core.speculate(given[0], drafter, *given[1:], **way)
        sequence, _ = run(engine, prompt, max_tokens=30, drafter=name, **way)
        assert text == core.plain_decode(*given, **way) == sequence.output, name
        passes.append(sequence.num_steps < len(text))
    assert engine.target.cache.rows == []
    return any(passes)


@pytest.mark.parametrize("way", SAMPLINGS)
def test_it_writes_what_plain_decoding_and_the_engine_write(demo_engine, prompts, way):
    """With each drafter; and the target runs less often than it writes tokens."""
    check, loaded = partial(assert_one_text, demo_engine, prompts), demo_engine.pool.drafters
    assert any([check(drafter, name, SAMPLINGS[way]) for name, drafter in loaded.items()])
    assert core.speculate(demo_engine.target, loaded["ngram"], [5, 6], 0, set()) == []


@pytest.mark.parametrize("way", SAMPLINGS)
def test_a_tree_gives_the_text_of_a_chain(demo_engine, prompts, monkeypatch, way):
    """The head's own drafts branch here; in the engine they are merged with those of others."""
    if not demo_engine.pool.can_branch:
        pytest.skip("no C compiler here")
    mtp, cache = demo_engine.pool.drafters["mtp"], demo_engine.target.cache
    open_state, keep = mtp.open, Mock(wraps=cache.keep)

    def open_branching(*given):
        state = open_state(*given)
        state.can_branch = True
        return state

    monkeypatch.setattr(mtp, "open", open_branching)
    monkeypatch.setattr(cache, "keep", keep)
    assert assert_one_text(demo_engine, prompts, mtp, "tree", SAMPLINGS[way])
    paths = [[*call.args[2]] for call in keep.call_args_list]
    assert any(p != [*range(len(p))] for p in paths), "no branch was accepted but the first"
