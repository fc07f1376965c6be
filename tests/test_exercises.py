"""README's exercises, solved: what each of them finds out. (Exercise 4 is in test_sampling.py.)"""

import pytest
import speculative_decoding as core
from conftest import run
from test_docs import blocks, read

from control.formulas import break_even_alpha, expected_speedup
from control.statistics import Statistics
from messages import Draft, Judgement


def readme_drafter():
    """The class in README, as a reader would have it."""
    (source,) = blocks(read("README.md"), "python")
    names = {}
    exec(source, names)  # noqa: S102
    return names["EarliestMatch"]


def totals(demo_engine, prompts, drafters):
    """Outputs and statistics over all demo prompts, by drafter; its K is fixed."""
    engine = core.Engine(demo_engine.target, drafters)
    found = {}
    for name in drafters:
        sequences = [run(engine, p, max_tokens=40, drafter=name)[0] for p in prompts.values()]
        statistics = sum((s.statistics for s in sequences), Statistics())
        found[name] = [s.output for s in sequences], statistics
    return found


def test_1_the_latest_match_and_the_longest_suffix_both_help(demo_engine, prompts):
    """Earliest match of two tokens, latest match of two tokens, and n-gram (latest of four to one).

    All of them accept the same text in the end.
    """
    earliest = readme_drafter()

    class LatestMatch(earliest):
        name = "latest"

        def propose(self, state, max_tokens):
            for i in range(len(state) - 1, 1, -1):
                if state[i - 2 : i] == state[-2:]:
                    return Draft(state[i : i + max_tokens])
            return Draft()

    drafters = {d.name: d for d in (earliest(), LatestMatch(), demo_engine.panel.drafters["ngram"])}
    found = totals(demo_engine, prompts, drafters)
    outputs = [output for output, _ in found.values()]
    assert outputs[0] == outputs[1] == outputs[2]
    rates = {name: s.draft_acceptance_rate for name, (_, s) in found.items()}
    assert rates["latest"] > rates["earliest"] + 0.01  # of what was drafted, more is accepted
    per_pass = {name: s.tokens_per_pass for name, (_, s) in found.items()}
    assert per_pass["ngram"] > per_pass["latest"] + 0.1  # and more is drafted
    assert per_pass["ngram"] > per_pass["earliest"] + 0.1


def test_2_a_draft_model_that_forgets_to_truncate_changes_no_output(
    demo_engine, prompts, monkeypatch
):
    """Its cache is soon longer than the text; it is given up, and the answers go on without it."""
    drafter = demo_engine.panel.drafters["draft_model"]
    outputs, sound = totals(demo_engine, prompts, {"draft_model": drafter})["draft_model"]
    monkeypatch.setattr(drafter._draft.cache, "truncate", lambda row, length: None)
    same, worse = totals(demo_engine, prompts, {"draft_model": drafter})["draft_model"]
    assert same == outputs
    assert worse.num_spec_steps < sound.num_spec_steps / 4


def test_3_a_verify_that_accepts_everything_is_noticed(monkeypatch, capsys):
    def credulous(draft, choices):
        kept = [Judgement(token, "accepted") for token in draft.tokens]
        return [*kept, Judgement([*choices][-1], "bonus")]

    monkeypatch.setattr(core, "verify", credulous)
    assert core.main(["--demo", "--model", "embedded", "--max-tokens", "16", "--fixed-k"]) == 1
    assert "identical output: NO" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("c", "k", "needed"), [(0.0, 5, 0.0), (0.25, 1, 0.25), (0.25, 5, 0.571), (1.0, 1, 1.0)]
)
def test_5_a_longer_draft_has_to_be_better(c, k, needed):
    assert break_even_alpha(k, c) == pytest.approx(needed, abs=1e-3)
    assert expected_speedup(needed, k, c) == pytest.approx(1, abs=1e-3)
