"""The embedded models: what they can do, that their folders are whole, and that training runs."""

import hashlib
import json
import math
import os
import re
import subprocess
import sys

import pytest
import speculative_decoding as core
import synthetic
from conftest import ROOT
from safetensors import safe_open
from transformers import AutoModelForCausalLM

MODELS = ROOT / "demo_models"


@pytest.mark.parametrize(
    ("prompt", "period"),
    [
        ("A B C D A B C D A B C", " D A B C"),
        ("red, green, blue, red, green,", " blue, red, green,"),
        ("The quick brown fox jumps over the lazy dog. " * 2 + "The quick",
         " brown fox jumps over the lazy dog. The quick"),
    ],
)  # fmt: skip
def test_the_target_continues_what_repeats_for_30_tokens(demo_engine, prompt, period):
    tokenizer = demo_engine.target.tokenizer
    ids = tokenizer(prompt)["input_ids"]
    output = core.plain_decode(demo_engine.target, ids, 30, demo_engine.eos_ids)
    assert len(output) == 30
    text = tokenizer.decode(output)
    assert (period * 30).startswith(text)


def test_the_target_counts_for_30_tokens(demo_engine):
    tokenizer = demo_engine.target.tokenizer
    ids = tokenizer("1, 2, 3, 4, 5,")["input_ids"]
    output = tokenizer.decode(core.plain_decode(demo_engine.target, ids, 30, demo_engine.eos_ids))
    assert " 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16".startswith(output)


def test_text_does_not_collapse_into_loops(demo_engine, prompts, plain):
    """At least 60 % of the 4-grams of 128 greedy tokens are distinct on most prompts."""
    varied = []
    names = [name for name in prompts if not name.startswith("repetitive")]
    for name in names:
        tokens = plain(prompts[name], 128)
        grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
        varied.append(not grams or len(set(grams)) >= 0.6 * len(grams))
    assert sum(varied) > len(names) / 2, dict(zip(names, varied, strict=True))


def test_the_documented_checksums_are_those_of_the_files():
    report = json.loads((MODELS / "training.json").read_text())
    readme = (MODELS / "README.md").read_text("utf-8")
    for name in ("target", "draft"):
        digest = hashlib.sha256((MODELS / name / "model.safetensors").read_bytes()).hexdigest()
        assert report[name]["sha256"] == digest
        assert digest in readme
    assert sum(f.stat().st_size for f in MODELS.rglob("*") if f.is_file()) < 40e6


def test_the_folders_load_with_plain_transformers():
    target = AutoModelForCausalLM.from_pretrained(MODELS / "target")
    draft = AutoModelForCausalLM.from_pretrained(MODELS / "draft")
    with safe_open(MODELS / "target" / "model.safetensors", framework="pt") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]
    parameters = sum(math.prod(shape) for shape in shapes)
    assert 4e6 < parameters < 15e6  # the MTP head included
    assert target.config.vocab_size == draft.config.vocab_size == 4096
    assert str(target.dtype) == "torch.bfloat16"


def test_synthetic_text_is_the_same_for_the_same_seed_and_of_every_kind():
    once, again = synthetic.documents(3, 40_000), synthetic.documents(3, 40_000)
    assert once == again != synthetic.documents(4, 40_000)
    text = "\n".join(document for document, _ in once)
    for sign in ("Question: ", "Once upon a time", '"id": 1', "| id |", "1, 2, 3", "Answer: "):
        assert sign in text
    # A story keeps its hero, a list of facts repeats no question.
    for document, _ in once:
        questions = re.findall(r"(?:Question|Q): (.*)", document)
        assert len(questions) == len(set(questions))


def test_training_runs_end_to_end_and_its_folders_serve(tmp_path):
    """train.py --smoke: every stage in miniature; the result drafts with all three drafters."""
    command = [sys.executable, str(MODELS / "train.py"), "--smoke", "--threads", "1"]
    command += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["stages"]["target"]["tokens"] > 0
    out = tmp_path / "out"
    assert report == json.loads((out / "training.json").read_text())
    options = core.Options(model=str(out / "target"), draft_model=str(out / "draft"))
    engine = core.load_engine(options)
    assert set(engine.panel.drafters) == {"ngram", "draft_model", "mtp", "auto"}
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0  # everything is done: it resumes, and only exports
    assert (
        json.loads(again.stdout.splitlines()[-1])["target"]["sha256"] == report["target"]["sha256"]
    )
