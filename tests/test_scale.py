"""docs/speed.md: the cost model, the simulation, and that its tables are what the script prints."""

import json
import random
import re
from dataclasses import replace
from math import sqrt

import pytest
from conftest import ROOT

from benchmarks import cycle_times, scale
from benchmarks.scale import LLAMA_1B, LLAMA_70B, QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B, Machine
from benchmarks.simulation import DRAFT, IN_ORDER, LAUNCH, SKIP, Costs, Text, drained, steady
from control.formulas import expected_speedup, expected_tokens

ONE = Machine()


def gain(shape, batch, machine=ONE, context=500, k=4, draft=None, on=None):
    return scale.gain(shape, machine, batch, context, 0.75, k, draft, on)


def test_the_weights_of_a_pass_are_those_of_the_models_cards():
    """Billions: all but the input's embeddings, which are looked up and not read."""
    for shape, experts, billions in (
        (QWEN3_8B, 1, 8.19 - 0.62),
        (LLAMA_70B, 1, 70.55 - 1.05),
        (LLAMA_1B, 1, 1.24),  # one matrix is both embeddings
        (QWEN3_06B, 1, 0.596),
        (QWEN3_30B_A3B, 128, 30.53 - 0.31),
        (QWEN3_30B_A3B, 8, 3.35 - 0.31),
    ):
        assert shape.weights(experts) / 1e9 == pytest.approx(billions, rel=0.01)
    assert QWEN3_8B.kv_bytes == 147_456


def test_so_many_experts_are_touched_as_by_rows_that_choose_at_random():
    """The mean of 2,000 draws; five standard errors are a false alarm in 1 of 10 million."""
    chance = random.Random(1)
    for rows in (1, 5, 40):
        draws = [
            len({e for _ in range(rows) for e in chance.sample(range(128), 8)}) for _ in range(2000)
        ]
        mean = sum(draws) / 2000
        error = sqrt(sum((n - mean) ** 2 for n in draws)) / 2000
        assert abs(QWEN3_30B_A3B.experts_touched(rows) - mean) <= 5 * error + 1e-9
    assert QWEN3_8B.experts_touched(7) == 1


def test_a_pass_takes_what_its_bytes_or_its_numbers_take():
    fast = replace(ONE, bandwidth_share=1.0, flop_share=1.0)
    numbers = QWEN3_8B.weights(1)
    assert scale.pass_s(QWEN3_8B, fast, 1, 1, 0) == pytest.approx(2 * numbers / 3.35e12)
    assert scale.pass_s(QWEN3_8B, fast, 1000, 5, 0) == pytest.approx(10_000 * numbers / 989e12)
    behind = scale.pass_s(QWEN3_8B, fast, 2, 5, 1000) - scale.pass_s(QWEN3_8B, fast, 2, 5, 0)
    assert behind == pytest.approx(2 * 1000 * QWEN3_8B.kv_bytes / 3.35e12)  # not once for each row
    four = replace(fast, devices=4, all_reduce_s=1e-5, link_bytes_per_s=1e99)
    alone = scale.pass_s(QWEN3_8B, fast, 1, 1, 0)
    assert scale.pass_s(QWEN3_8B, four, 1, 1, 0) == pytest.approx(alone / 4 + 2 * 36 * 1e-5)


def test_the_gain_falls_with_the_batch_and_stays_longer_behind_long_texts():
    gains = [gain(QWEN3_8B, batch, draft=QWEN3_06B)["speedup"] for batch in (1, 8, 32, 64, 128)]
    assert gains == sorted(gains, reverse=True) and gains[0] > 2 and gains[-1] < 1
    eight = replace(ONE, devices=8)
    behind = [gain(LLAMA_70B, 64, eight, context)["speedup"] for context in (500, 4000, 16_000)]
    assert behind == sorted(behind) and behind[-1] > 1.2 * behind[0]
    assert gain(LLAMA_70B, 256, eight, 64_000)["speedup"] is None  # does not fit
    draft = [gain(QWEN3_8B, 4, ONE, n, draft=QWEN3_06B)["c"] for n in (500, 16_000)]
    assert draft[1] > 2 * draft[0]  # a draft model reads keys as well


def test_a_mixture_of_experts_gains_less_in_small_batches_and_more_in_large_ones():
    dense, mixture = (
        [gain(shape, batch)["speedup"] for batch in (1, 4, 64, 128)]
        for shape in (QWEN3_8B, QWEN3_30B_A3B)
    )
    assert max(mixture[:2]) < 1.1 < min(dense[:2])
    assert mixture[2] > dense[2] and mixture[3] > dense[3]


def test_devices_make_the_draft_dearer_and_all_reduces_make_verifying_cheaper():
    eight, slow = Machine(devices=8), Machine(devices=8, all_reduce_s=1e-4)
    for machine in (eight, slow):
        on_one = gain(LLAMA_70B, 1, machine, draft=LLAMA_1B, on=ONE)
        assert on_one["c"] > gain(LLAMA_70B, 1, Machine(devices=2), draft=LLAMA_1B, on=ONE)["c"]
    assert gain(LLAMA_70B, 64, slow)["t_verify"] < gain(LLAMA_70B, 64, eight)["t_verify"]
    at = {m: gain(LLAMA_70B, 1, m, draft=LLAMA_1B, on=m)["speedup"] for m in (eight, slow)}
    assert at[slow] < at[eight]  # a draft that is split as well waits for each step's all-reduces


CHEAP = Costs(lambda batch: 0.1, lambda batch, rows: 1.0 + 0.01 * rows, lambda batch: 0.2)


@pytest.mark.parametrize(("alpha", "k"), [(0.3, 1), (0.75, 4), (0.9, 8)])
def test_one_request_gains_what_the_formula_says(alpha, k):
    """Within five standard errors of 40,000 cycles: a false alarm in 1 of 2 million."""
    cycles, costs = 40_000, CHEAP._replace(other=lambda batch: 0.0)
    plain = 1 / costs.verify(1, 1)
    found = steady([Text.of(alpha, k)], costs, cycles, random.Random(3)) / plain
    expected = expected_speedup(alpha, k, 0.1 / k * plain, costs.verify(1, k + 1) * plain)
    mean = expected_tokens(alpha, k)
    chances = [alpha**i * (1 - alpha) for i in range(k)] + [alpha**k]
    variance = sum(p * (i + 1 - mean) ** 2 for i, p in enumerate(chances))
    assert found == pytest.approx(expected, rel=5 * sqrt(variance / cycles) / mean)


def test_a_batch_drains_as_requests_end():
    """Without drafts: twice as many cycles of one request as of both."""
    costs = Costs(lambda batch: 0.0, lambda batch, rows: float(rows), lambda batch: 0.5)
    plain, sure = Text({(0, 0): 1}, 0.0), Text({(3, 3): 1}, 1.0)
    assert drained([plain, plain], costs, 8, random.Random(0)) == 8 * 2.5
    # `sure` leaves after two cycles of five rows; six of one row are left
    assert drained([plain, sure], costs, 8, random.Random(0)) == 2 * 5.5 + 6 * 1.5


def test_optimistic_scheduling_hides_what_was_guessed_and_no_more():
    def speeds(alpha, batch):
        texts = [Text.of(alpha, 4)] * batch
        return {
            schedule: steady(texts, CHEAP, 4000, random.Random(5), schedule)
            for schedule in (IN_ORDER, LAUNCH, DRAFT, SKIP)
        }

    sure, never = speeds(1.0, 4), speeds(0.0, 4)
    assert sure[IN_ORDER] == pytest.approx(20 / (0.1 + 1.2 + 0.2))
    assert sure[LAUNCH] == pytest.approx(20 / (0.1 + 1.2))
    assert sure[DRAFT] == sure[SKIP] == pytest.approx(20 / (1.2 + 0.2))
    for schedule in (LAUNCH, DRAFT):  # all is done again
        assert never[schedule] == pytest.approx(never[IN_ORDER])
    one, many = speeds(0.8, 1), speeds(0.8, 16)
    assert one[DRAFT] / one[IN_ORDER] > 1.005 * many[DRAFT] / many[IN_ORDER]
    assert one[SKIP] < one[DRAFT] and one[LAUNCH] > one[IN_ORDER]


TIMES = {
    "k": 2,
    "tokens": 31,
    "parts": [
        {"drafter": name, "batch": batch, "draft": 0.5 * wide, "verify": 2.0 + 0.1 * batch * rows,
         "other": 0.1 * batch, "rows": batch * rows, "prompts": 0.0, "whole": 60.0 / rows}
        for batch in (1, 4) for name, wide, rows in (("none", 0, 1), ("mtp", 1, 3))
    ],
    "rows": {"1": 2.1, "3": 2.3},
    "texts": {"mtp": [{"2,2": 3, "2,0": 1}] * 4},
}  # fmt: skip


def test_measured_parts_make_a_cycle_of_any_size():
    for costs in (cycle_times.measured(TIMES, "mtp"), cycle_times.from_one(TIMES, "mtp")):
        assert costs.verify(1, 3) == pytest.approx(2.3e-3)
        assert costs.verify(3, 6) == pytest.approx(2.6e-3)
        assert costs.verify(4, 12) == pytest.approx(3.2e-3)
        assert costs.other(3) == pytest.approx(0.3e-3)
        assert costs.draft(1) == pytest.approx(0.5e-3)
    text = cycle_times.replayed(TIMES["texts"]["mtp"][0])
    assert text.alpha == pytest.approx(6 / 7)
    draws = [text.draw(random.Random(i))[1] for i in range(400)]
    assert set(draws) == {0, 2} and sum(draws) / 400 == pytest.approx(1.5, abs=0.22)  # 5 errors


def test_a_prediction_is_the_measured_gain_where_the_costs_are_right():
    """One request without chance: 3 tokens in 0.5 + 2.3 + 0.1 ms, of which plain needs 3 · 2.2."""
    batches = {"batches": [
        {"batch": 1, "drafter": "mtp", "k": "2", "of_none": 2.0, "quartiles": [1.9, 2.1]},
        {"batch": 1, "drafter": "mtp", "k": "controller", "of_none": 9.0, "quartiles": [9, 9]},
    ]}  # fmt: skip
    sure = TIMES | {"texts": {"mtp": [{"2,2": 1}] * 4}}
    one, four = scale.against_measured(sure, batches, random.Random(0))
    assert one["predicted"] == one["from_one"] == round(3 * 2.2 / 2.9, 3)
    assert one["predicted_error"] == round(3 * 2.2 / 2.9 / 3 - 1, 3)  # 60 / 20 was measured
    assert (one["clock_2"], four["clock_2"]) == (2.0, None)
    assert four["predicted"] == pytest.approx(3 * (2.4 + 0.4) / (0.5 + 3.2 + 0.4), abs=1e-3)


def test_the_tables_of_the_page_are_those_that_the_script_prints(capsys):
    scale.main([])
    said = capsys.readouterr().out
    text = (ROOT / "docs" / "speed.md").read_text("utf-8")
    tables = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(tables) == 2 and [table for table in tables if table not in said] == []
    document = json.loads(said.splitlines()[-1])
    for row in document["by_batch"]:
        assert row["simulated"] == pytest.approx(row["speedup"], rel=0.05)


def test_the_parts_of_a_cycle_are_measured(capsys, monkeypatch):
    prompts = {"easy_a": "1, 2, 1, 2,", "hard_b": "def main():"}
    monkeypatch.setattr(cycle_times.bench.demo, "read_prompts", lambda is_chat=False: prompts)
    cycle_times.main(["--runs", "1", "--tokens", "8", "--k", "2", "--sizes", "1", "2", "--json"])
    document = json.loads(capsys.readouterr().out)
    names = {"none", *document["texts"]}
    assert {(row["drafter"], row["batch"]) for row in document["parts"]} == {
        (name, batch) for name in names for batch in (1, 2)
    }
    for row in document["parts"]:
        assert 0 < row["verify"] < row["whole"] and row["batch"] <= row["rows"] <= 3 * row["batch"]
    for counts in document["texts"].values():
        assert len(counts) == 4 and all(counts)  # each prompt twice
