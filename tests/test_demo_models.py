"""The embedded models: what they can do, that their folders are whole, and that training runs."""

import hashlib
import json
import math
import re
import subprocess
import sys

import pytest
import speculative_decoding as core
import synthetic
import torch
import train
import train_hybrid
from conftest import ROOT, run
from safetensors import safe_open
from transformers import AutoModelForCausalLM

MODELS = ROOT / "demo_models"


@pytest.mark.parametrize(
    ("prompt", "continued"),
    [
        ("A B C D A B C D A B C", " D A B C" * 30),
        ("red, green, blue, red, green,", " blue, red, green," * 30),
        ("The quick brown fox jumps over the lazy dog. " * 2 + "The quick",
         " brown fox jumps over the lazy dog. The quick" * 30),
        ("1, 2, 3, 4, 5,", " 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16"),
    ],
)  # fmt: skip
def test_the_target_continues_what_repeats_or_counts_for_30_tokens(demo_engine, prompt, continued):
    tokenizer = demo_engine.target.tokenizer
    ids = tokenizer(prompt)["input_ids"]
    output = run(demo_engine, ids, max_tokens=30, drafter="mtp")[0].output
    assert len(output) == 30
    assert continued.startswith(tokenizer.decode(output))


def test_text_does_not_collapse_into_loops(demo_engine, prompts):
    """At least 60 % of the 4-grams of 128 greedy tokens are distinct on most prompts."""
    varied = {}
    for name in (name for name in prompts if not name.startswith("repetitive")):
        tokens = run(demo_engine, prompts[name], max_tokens=128, drafter="mtp")[0].output
        grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
        varied[name] = not grams or len(set(grams)) >= 0.6 * len(grams)
    assert sum(varied.values()) > len(varied) / 2, varied


def test_the_documented_checksums_are_those_of_the_files():
    report = json.loads((MODELS / "training.json").read_text())
    report["hybrid"] = json.loads((MODELS / "hybrid" / "training.json").read_text())
    readme = (MODELS / "README.md").read_text("utf-8")
    for name in ("target", "draft", "hybrid"):
        digest = hashlib.sha256((MODELS / name / "model.safetensors").read_bytes()).hexdigest()
        assert report[name]["sha256"] == digest
        assert digest in readme
    assert sum(f.stat().st_size for f in MODELS.rglob("*") if f.is_file()) < 50e6


def test_the_folders_load_with_plain_transformers():
    target = AutoModelForCausalLM.from_pretrained(MODELS / "target")
    draft = AutoModelForCausalLM.from_pretrained(MODELS / "draft")
    hybrid = AutoModelForCausalLM.from_pretrained(MODELS / "hybrid")
    for name in ("target", "hybrid"):
        with safe_open(MODELS / name / "model.safetensors", framework="pt") as weights:
            shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]
        parameters = sum(math.prod(shape) for shape in shapes)
        assert 4e6 < parameters < 5e6  # the MTP head included
    assert target.config.vocab_size == draft.config.vocab_size == hybrid.config.vocab_size == 4096
    assert str(target.dtype) == str(hybrid.dtype) == "torch.bfloat16"
    assert hybrid.config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2


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


def test_a_hybrid_begins_with_the_numbers_of_its_target():
    """Attention that stays gives the same, and so does the head; in Qwen3.5's form."""
    target = AutoModelForCausalLM.from_pretrained(
        MODELS / "target", dtype="float32", attn_implementation="train"
    )
    hybrid, length = train_hybrid.convert(target), 12
    x, mask = torch.randn(1, length, 192), train.causal(length)[None, None]
    positions = torch.arange(length)[None]
    rotations = {
        target: target.model.rotary_emb(x, positions, layer_type="full_attention"),
        hybrid: hybrid.model.rotary_emb(x, positions),
    }

    def through(block, model):
        rope = rotations[model]
        return block(x, position_embeddings=rope, attention_mask=mask, past_key_values=None)

    for i in (3, 7):
        expected = through(target.model.layers[i], target)
        assert torch.allclose(through(hybrid.model.layers[i], hybrid), expected, rtol=1e-4)
    with torch.no_grad():
        new = train_hybrid.convert_head(hybrid, target).layers[0]
    old = train.MtpModel.from_pretrained(target).layers[0]
    rest = {"attention_mask": mask, "position_ids": None, "past_key_values": None}
    expected = old(x, x.flip(1), position_embeddings=rotations[target], **rest)
    found = new(x, x.flip(1), position_embeddings=rotations[hybrid], **rest)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def trained(script, folder, *options, timeout_s=600):
    """Run a script's every stage in miniature, into folder/out. Returns the figures it prints."""
    command = [sys.executable, str(MODELS / script), "--smoke", *options]
    command += ["--work", str(folder / "work"), "--out", str(folder / "out")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_hybrid_is_made_and_serves(tmp_path):
    figures = trained("train_hybrid.py", tmp_path)
    assert all(figures["stages"][name]["steps"] for name in ("layers", "hybrid", "mtp"))
    engine = core.load_engine(core.Options(model=str(tmp_path / "out")))
    assert "mtp" in engine.panel.drafters and len(engine.target.cache.recurrent) == 6


@pytest.mark.slow
def test_a_block_head_is_trained_and_serves(tmp_path):
    assert trained("train_dflash.py", tmp_path)["steps"] > 0
    assert (
        "dflash"
        in core.load_engine(
            core.Options(model="embedded", dflash=str(tmp_path / "out"))
        ).panel.drafters
    )


@pytest.mark.slow
def test_training_runs_end_to_end_and_its_folders_serve(tmp_path):
    """train.py --smoke: every stage in miniature; the result drafts with all three drafters."""
    given = "train.py", tmp_path, "--threads", "1"
    # The second time everything is done: it resumes, and only exports.
    reports = [trained(*given, timeout_s=300) for _ in range(2)]
    assert reports[0]["stages"]["target"]["tokens"] > 0
    assert reports[1]["target"]["sha256"] == reports[0]["target"]["sha256"]
    out = tmp_path / "out"
    assert reports[1] == json.loads((out / "training.json").read_text())
    options = core.Options(model=str(out / "target"), draft_model=str(out / "draft"))
    assert set(core.load_engine(options).panel.drafters) == {
        "ngram",
        "suffix",
        "draft_model",
        "mtp",
    }
