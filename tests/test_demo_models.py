"""The embedded models continue what repeats or counts, and can be trained anew from nothing.

Their files are those whose checksums are documented, and they are small enough for a repository.
All stages of training run here in miniature, from synthetic text to models that are served.
"""

import hashlib
import json

import pytest
import torch
from conftest import ROOT, run
from transformers import AutoModelForCausalLM

from runtime.models.chat import chat_ids
from server import assembly, core
from server.options import Options
from tools import train
from tools.training import hybrid, recipe, synthetic

MODELS = ROOT / "demo_models"


@pytest.mark.parametrize(("prompt", "continued"), [
    ("The quick brown fox jumps over the lazy dog. " * 2 + "The quick",
     " brown fox jumps over the lazy dog. The quick" * 30),
    ("1, 2, 3, 4, 5,", " 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16"),
])  # fmt: skip
def test_the_target_continues_what_repeats_or_counts_for_30_tokens(demo_engine, prompt, continued):
    tokenizer = demo_engine.target.tokenizer
    output = run(demo_engine, tokenizer(prompt)["input_ids"], max_tokens=30)[0].output
    assert len(output) == 30 and continued.startswith(tokenizer.decode(output))


def test_the_documented_checksums_are_those_of_the_files():
    report = json.loads((MODELS / "training.json").read_text())
    report["hybrid"] = json.loads((MODELS / "hybrid" / "training.json").read_text())
    readme = (MODELS / "README.md").read_text("utf-8")
    for name in ("target", "draft", "hybrid"):
        digest = hashlib.sha256((MODELS / name / "model.safetensors").read_bytes()).hexdigest()
        assert report[name]["sha256"] == digest and digest in readme
    assert sum(f.stat().st_size for f in MODELS.rglob("*") if f.is_file()) < 75e6


def test_the_draft_model_that_comes_along_is_whole_and_small(monkeypatch):
    """It stands beside smollm2, and writes text by itself. --dtype unpacks the target alone."""
    file = MODELS / "smollm2_draft" / "draft.gguf"
    assert Options(model="smollm2").model_of("draft_model") == str(file)
    with monkeypatch.context() as patched:
        patched.setattr(core, "load_model", lambda name, options: (name, options.dtype))
        for dtype, expected in {"float32": "auto", "packed": "packed"}.items():
            loaded = assembly.load_draft(Options(model="smollm2", dtype=dtype))
            assert loaded == (str(file), expected)
    assert file.stat().st_size < 14e6
    engine = core.load_engine(Options(model=str(file), drafter="none"))
    assert engine.target.vocab_size == 49_152
    ids = chat_ids("Why do leaves fall in autumn?", engine.target.tokenizer, 1000)
    assert len(set(run(engine, ids, max_tokens=24)[0].output)) > 12


def test_synthetic_text_is_the_same_for_the_same_seed():
    once, again = synthetic.documents(3, 40_000), synthetic.documents(3, 40_000)
    assert once == again != synthetic.documents(4, 40_000)


def test_a_hybrid_begins_with_the_numbers_of_its_target():
    """Attention that stays gives the same, in Qwen3.5's form."""
    how = {"dtype": "float32", "attn_implementation": recipe.TRAIN}
    target = AutoModelForCausalLM.from_pretrained(MODELS / "target", **how)
    converted, length = hybrid.convert(target), 12
    x, mask = torch.randn(1, length, 192), recipe.additive(recipe.causal(length))
    positions = torch.arange(length)[None]

    def through(model, i, **kind):
        rotations = model.model.rotary_emb(x, positions, **kind)
        return model.model.layers[i](
            x, attention_mask=mask, past_key_values=None, position_embeddings=rotations
        )

    for i in (3, 7):
        expected = through(target, i, layer_type="full_attention")
        assert torch.allclose(through(converted, i), expected, rtol=1e-4)


@pytest.mark.slow  # half a minute: four trainings
def test_a_target_and_the_hybrid_of_it_are_made_and_serve_with_an_mtp_layer(tmp_path, capsys):
    """The second time everything is done: the run goes on from its checkpoints, and only writes.

    Each training is a few steps, in this process. test_recipe.py has an MTP layer of the target.
    """

    def trained(kind, *options):
        folder = tmp_path / f"{kind}_work"
        few = ["--tokens", "1200", "--epochs", "0.1", "--work", str(folder)]
        train.main([kind, "--toy", *few, "--out", str(tmp_path / kind), *options])
        return json.loads(capsys.readouterr().out)

    reports = [trained("target") for _ in range(2)]
    assert reports[0] == reports[1] and reports[0]["tokens"] > 0
    assert trained("hybrid", "--target", str(tmp_path / "target"))["step"] > 0
    trained("mtp", "--target", model := str(tmp_path / "hybrid"))
    engine = core.load_engine(Options(model=model, mtp=str(tmp_path / "mtp"), drafter="mtp"))
    assert "mtp" in engine.pool.drafters and len(engine.target.cache.recurrent) == 3
