"""The exercises of docs/, solved: each shows what a change of the method does, and what it cannot.

A better drafter has more of its tokens accepted, and a broken one fewer: neither changes the text.
Only a broken `verify` does. Exercise 4, about distributions, is in test_sampling.py.
"""

import re

import pytest
from conftest import credulous, run
from test_docs import blocks, read

from runtime.statistics import Statistics
from runtime.values import Draft, RequestError
from server import core


def readme_drafter():
    """The class in README, as a reader would have it."""
    (source,) = blocks(read("README.md"), "python")
    names = {}
    exec(source, names)  # noqa: S102
    return names["Bigram"]


def totals(demo_engine, prompts, drafters):
    """Outputs and statistics over all demo prompts, by drafter; its K is fixed."""
    engine = core.Engine(demo_engine.target, drafters)
    by_drafter = {}
    for name in drafters:
        sequences = [run(engine, p, max_tokens=40, drafter=name)[0] for p in prompts.values()]
        statistics = sum((s.statistics for s in sequences), Statistics())
        by_drafter[name] = [s.output for s in sequences], statistics
    return by_drafter


def test_1_a_longer_context_helps(demo_engine, prompts):
    """What followed one token, two tokens, and n-gram (the latest match of four to one)."""
    bigram = readme_drafter()

    class Trigram(bigram):
        name = "trigram"

        def open(self, prompt, sampling, noise):
            state = {"last": (None, prompt[0]), "next": {}}
            self.learn(state, prompt[1:])
            return state

        def propose(self, state, max_tokens):
            tokens, pair = [], state["last"]
            while len(tokens) < max_tokens and pair in state["next"]:
                tokens.append(state["next"][pair])
                pair = pair[1], tokens[-1]
            return Draft(tokens)

        def learn(self, state, tokens):
            for token in tokens:
                state["next"][state["last"]] = token
                state["last"] = state["last"][1], token

    drafters = {d.name: d for d in (bigram(), Trigram(), demo_engine.pool.drafters["ngram"])}
    by_drafter = totals(demo_engine, prompts, drafters)
    outputs = [output for output, _ in by_drafter.values()]
    assert outputs[0] == outputs[1] == outputs[2]
    rates = {name: s.draft_acceptance_rate for name, (_, s) in by_drafter.items()}
    assert rates["trigram"] > rates["bigram"] + 0.1  # of what was drafted, more is accepted
    per_pass = {name: s.tokens_per_pass for name, (_, s) in by_drafter.items()}
    assert per_pass["ngram"] > per_pass["bigram"] + 0.1  # and it always has a guess


def test_2_a_draft_model_that_never_truncates_changes_no_text(demo_engine, prompts, monkeypatch):
    """It is given up. The exercise names the lines that truncate, and quotes what is said."""
    drafter = demo_engine.pool.drafters["draft_model"]
    (asked,) = re.findall(r"^2\. (.+?)^3\. ", read("docs/exercises.md"), re.MULTILINE | re.DOTALL)
    assert "both `cache.truncate`" in asked
    assert read("drafters/draft_model.py").count("  cache.truncate(") == 2
    outputs, sound = totals(demo_engine, prompts, {"draft_model": drafter})["draft_model"]
    monkeypatch.setattr(drafter._draft.cache, "truncate", lambda row, length: None)
    same, worse = totals(demo_engine, prompts, {"draft_model": drafter})["draft_model"]
    assert same == outputs
    assert worse.num_spec_steps < sound.num_spec_steps / 4
    engine = core.Engine(demo_engine.target, {"draft_model": drafter}, is_strict=True)
    with pytest.raises(RequestError, match=re.escape(" ".join(asked.split("*")[1].split()))):
        run(engine, next(iter(prompts.values())), max_tokens=40, drafter="draft_model")


def test_3_a_verify_that_accepts_everything_is_noticed(main, monkeypatch):
    monkeypatch.setattr(core, "verify", credulous)
    status, out, _ = main("--demo", "--max-tokens", "16", "--fixed-k")
    assert status == 1 and "identical: NO" in out


@pytest.mark.parametrize(("k", "needed"), [(1, 0.25), (5, 0.571)])
def test_5_a_longer_draft_has_to_be_better(k, needed):
    def speedup(alpha):
        return sum(alpha**i for i in range(k + 1)) / (k * 0.25 + 1)

    assert speedup(needed) == pytest.approx(1, abs=1e-3)
    assert speedup(needed - 0.01) < 1 < speedup(needed + 0.01)
