"""Training: every drafter learns, what is trained is what drafts, and a run can be stopped."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import speculative_decoding as core
import torch
from conftest import ROOT, TARGET
from test_drafters import fresh_state, propose_and_close
from transformers import AutoModelForCausalLM

from demo_models import answers, heads, recipe, train
from models import mimo

KINDS = {"eagle3": "eagle3", "dflash": "dflash", "mtp": "mtp", "draft": "draft_model"}
K = 4


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """A toy of the embedded target, whose answers are there."""
    work = tmp_path_factory.mktemp("recipe")
    made = train.Plan("draft", TARGET, work, work / "draft", **train.TOY)
    train.run(made, "answers")
    return made


def load(kind, folder):
    name = {"mtp": "model", "draft": "draft_model"}.get(kind, kind)
    given = {"model": TARGET, "drafter": KINDS[kind], "fixed_k": True} | {name: str(folder)}
    return core.load_engine(core.Options(**given))


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_learns_and_what_is_trained_is_what_drafts(kind, plan, monkeypatch):
    """In float32, where no rounding decides which of two tokens is the likelier one."""
    monkeypatch.setattr(recipe, "fast_dtype", lambda: torch.float32)
    monkeypatch.setattr("drafters.eagle3.Eagle3Drafter.kept_as", None)
    own = replace(plan, kind=kind, out=plan.work / kind)
    target, data, student = train.student_of(own)
    figures = recipe.train(student, recipe.rows_of(target, student), data, own)
    lines = (plan.work / f"{kind}.jsonl").read_text("utf-8").splitlines()
    assert figures["accepted"][0] > json.loads(lines[0])["accepted"][0] + 0.05
    student.save(own.out)
    student.module.bfloat16().float()  # as the file has it
    engine = load(kind, own.out)
    drafter = engine.panel.drafters[KINDS[kind]]
    text = data.train[0][0].tokens.astype(np.int64)
    batch = data.batch(data.train[:1])
    with torch.no_grad():
        found = [
            student.words[student.logits(hidden.float())[0].argmax(-1)]
            for _, hidden in zip(range(K), student.steps(batch, batch.every), strict=False)
        ]
    num_equal = 0
    for place in range(20, 36):  # drafts after place + 1, as long as the text goes on with them
        seen = text[: place + 2].tolist()
        (draft,) = propose_and_close(drafter, [fresh_state(engine, drafter, seen)], [K])
        for step, token in enumerate(draft):
            assert token == found[step][place], (place, step)
            num_equal += 1
            if kind != "dflash" and token != text[place + 2 + step]:
                break
    assert num_equal > 16


def test_the_command_of_the_docs_makes_answers(tmp_path, capsys):
    text = (ROOT / "docs" / "models.md").read_text("utf-8")
    (command,) = re.findall(r"^ +\.venv/bin/python -m demo_models\.train (.*)$", text, re.MULTILINE)
    toy = ["--toy", "--tokens", "9", "--target", "embedded", "--work", str(tmp_path)]
    train.main([*command.split(), *toy, "--stage", "answers"])
    assert capsys.readouterr().out == "{}\n" and answers.files(tmp_path / "answers")


def test_a_large_vocabulary_is_factorised(plan, monkeypatch):
    """A word gets few numbers, the first factor of the target's embedding."""
    _, data, whole = train.student_of(plan)
    monkeypatch.setattr(heads.Draft, "EMBEDDING", 4096 * 32)
    target, _, student = train.student_of(plan)
    embedding, like = (m.get_input_embeddings().weight for m in (student.module, target))
    assert embedding.shape == (4096, 32) and whole.module.config.hidden_size == 128
    like = like.float()
    coordinates = torch.linalg.lstsq(embedding, like).solution
    lost = (embedding @ coordinates - like).norm() / like.norm()
    first = torch.linalg.svdvals(like)
    assert lost < 1.05 * first[32:].norm() / first.norm()
    own = replace(plan, work=plan.work / "factorised", epochs=15)
    own.work.mkdir()
    figures = recipe.train(student, recipe.rows_of(target, student), data, own)
    lines = (own.work / "draft.jsonl").read_text("utf-8").splitlines()
    assert figures["accepted"][0] > json.loads(lines[0])["accepted"][0] + 0.05


def test_a_llama_with_an_mtp_layer_is_written_as_mimo(tiny_folder, tmp_path, reference):
    """The texts are the Llama's own; the layer lies in a file of its own."""
    folder = tiny_folder("llama")
    model = reference(folder)
    student = heads.Mtp(model, None, SimpleNamespace(target=str(folder)))
    student.save(tmp_path)
    mimo.register()
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    ids = torch.arange(5, 60)[None]
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16").float()(ids).logits
    torch.testing.assert_close(again(ids).logits, expected)
    engine = core.load_engine(core.Options(model=str(tmp_path), drafter="mtp"))
    assert engine.target.model.config.model_type == "mimo" and "mtp" in engine.panel.drafters
    layer = {name for name in load_names(tmp_path / "model-00002-of-00002.safetensors")}
    assert all(name.startswith("model.mtp_layers.0.") for name in layer)


def load_names(file):
    from safetensors import safe_open

    with safe_open(file, "pt") as weights:
        return list(weights.keys())


def test_a_chat_model_answers_writes_and_reads_again(chat_folder, tmp_path):
    """Prompts of three kinds; and what was stopped goes on with the same texts."""
    folder = str(chat_folder("llama"))
    answers.make(folder, tmp_path, 1500, max_tokens=12)
    files = answers.files(tmp_path)
    assert len(files) >= 2 and sum(answers.num_answered(answers.load(f)) for f in files) >= 1500
    text = answers.load(files[0])[-1]
    decoded = answers.Writer(folder).tokenizer.decode(text.tokens)
    assert decoded.startswith("user: ") and "assistant:" in decoded
    before = files[-1].read_bytes()
    files[-1].unlink()
    (tmp_path / "00009.part").write_bytes(b"half a file")
    answers.make(folder, tmp_path, 1500, max_tokens=12)
    assert files[-1].read_bytes() == before


def test_training_that_was_stopped_ends_with_the_same_weights(tmp_path):
    def run(file, stops_at=None):
        torch.manual_seed(0)
        module = torch.nn.Linear(4, 4)
        training = recipe.Training(module, file, 20, 1e-2)

        def loss_of(number):
            if number == stops_at:
                raise KeyboardInterrupt
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
            return (module(x) - x.flip(1)).square().mean()

        training.run(loss_of, every=5)
        return module.weight

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b.pt", stops_at=13)
    assert torch.equal(run(tmp_path / "a.pt"), run(tmp_path / "b.pt"))
