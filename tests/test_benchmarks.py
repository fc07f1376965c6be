"""Benchmarks run as README says, and their last line is one JSON document."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

OWN = """
import torch
from drafters import Draft, Drafter

class Liar(Drafter):
    name = "liar"

    def open(self, prompt, sampling, rng):
        return list(prompt), rng

    def propose(self, state, max_tokens):
        prompt, rng = state
        places = torch.randint(0, len(prompt), (max_tokens,), generator=rng)
        tokens = [prompt[place] for place in places]
        return Draft(tokens, torch.full((max_tokens, 4096), 1 / 4096))  # not what it drew from

    def observe(self, state, verdict):
        pass
"""


def call(name, *arguments):
    result = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    *table, line = result.stdout.splitlines()
    return table, json.loads(line)


def test_the_benchmark_of_losslessness_shows_a_drafter_that_lies_about_its_q(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    table, rows = call("lossless", "--samples", "160", "--drafter", f"{tmp_path}/own.py:Liar")
    assert len(table) == 1 + len(rows) == 1 + 7 * 4
    views = ("2nd token", "3rd token", "all three")
    for row in rows:
        smallest = min(row[view]["p_value"] for view in views)
        if row["drafter"] != "liar":
            assert smallest > 1e-6
        elif row["sampling"] == "temperature 1.3":
            assert smallest < 1e-6


def test_the_benchmark_of_sampling_times_every_case():
    table, document = call("sampling", "--vocab", "6400", "--runs", "1")
    assert len(table) == 1 + len(document["rows"]) == 17
    assert all(row["ours_ms"] > 0 < row["transformers_ms"] for row in document["rows"])


def test_the_benchmark_of_batches_compares_outputs_and_measures_gaps():
    table, document = call("batch", "--tokens", "3", "--runs", "1")
    assert len(document["batches"]) == 5 * 4 and len(document["gaps"]) == 5
    assert len(table) == 1 + 20 + 2 + 5
    assert all(row["identical"] and row["ratio"] > 0 for row in document["batches"])
    assert all(row["longest_gap_ms"] > 0 for row in document["gaps"])


@pytest.mark.parametrize("name", ["lossless", "sampling", "batch"])
def test_a_benchmark_refuses_what_measures_nothing(name):
    option = {"lossless": "--samples", "sampling": "--runs", "batch": "--runs"}[name]
    result = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", option, "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and "must be from" in result.stderr
    assert "Traceback" not in result.stderr
