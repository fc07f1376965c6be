"""Train a drafter for a target of your own, or make the embedded models anew.

    python -m tools.training.train eagle3 --target FOLDER --work /tmp/work --out /tmp/head
    python -m tools.training.train draft  --target smollm2 --work /tmp/work --out /tmp/draft
    python -m tools.training.train mtp    --target FOLDER --work /tmp/work --out /tmp/model --toy

    eagle3, dflash    a head for the target                 mtp      the target with an MTP layer
    draft             a small model of its tokenizer        target   the embedded target
                                                            hybrid   the embedded hybrid

Drafters go one path: answers of the target → its states → training → a folder in the layout that
drafters/ read (recipe.py). Every stage writes to --work as it goes, and goes on from there when the
command is given again; several drafters share a --work and its answers. The last line on stdout is
JSON with the figures: what is accepted at each position of a draft, on answers that are held out.
"""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads cost 10x on busy cores

import torch
from transformers import PreTrainedModel

from runtime.models.catalogue import resolve_model
from runtime.models.loading import load_pretrained
from server.options import Options

from . import answers, corpus, embedded, recipe
from .heads import DFlash, Draft, Eagle3, Mtp
from .hybrid import Hybrid

STUDENTS = {"eagle3": Eagle3, "dflash": DFlash, "mtp": Mtp, "draft": Draft, "hybrid": Hybrid}


@dataclass
class Plan:
    """One run: what is trained, of which target, and how much."""

    kind: str
    target: str  # a folder
    work: Path
    out: Path
    tokens: float = 3e6  # of answers; of text for the embedded target
    epochs: float = 4.0
    rate: float = 2e-3
    batch_tokens: int = 1024  # of a step
    max_answer: int = answers.MAX_TOKENS
    draft_words: int = 10_240  # that an EAGLE-3 head knows
    verifier: str = ""  # the target's public name
    begin: Path | None = None  # a trained head that an EAGLE-3 or MTP head begins as
    corpus_bytes: int | None = None  # of each source of text; None: all
    is_toy: bool = False


OF_TARGET = {"tokens": 27e6, "batch_tokens": 4096}
TOY = {
    "tokens": 4_000, "epochs": 5.0, "rate": 3e-3, "batch_tokens": 512, "max_answer": 48,
    "draft_words": 512, "corpus_bytes": corpus.LITTLE, "is_toy": True,
}  # fmt: skip


def run(plan: Plan, stage: str | None = None) -> dict[str, Any]:
    """All stages, or up to this one. Returns the figures."""
    torch.manual_seed(0)
    recipe.keep_memory()
    plan.work.mkdir(parents=True, exist_ok=True)
    if plan.kind == "target":
        return embedded.train(plan)
    answers.make(plan.target, plan.work / "answers", int(plan.tokens), plan.max_answer)
    if stage == "answers":
        return {}
    target, data, student = student_of(plan)
    figures = recipe.train(student, rows_of(target), data, plan)
    student.save(plan.out)
    return figures


def rows_of(target: PreTrainedModel) -> torch.Tensor:
    """[V, D]: of the target's output layer, which tells what a student should say."""
    return target.get_output_embeddings().weight.to(recipe.fast_dtype())


def student_of(plan: Plan) -> tuple[PreTrainedModel, recipe.Data, recipe.Student]:
    """A target, its answers with the states that are made where they are missing, and a student."""
    kind, dtype = STUDENTS[plan.kind], str(recipe.fast_dtype()).removeprefix("torch.")
    # As it is served: transformers' own reader drops keys of a GGUF file.
    options = Options(dtype=dtype, device=str(torch.get_default_device()))
    target = load_pretrained(plan.target, options).model
    target.requires_grad_(False)
    states = recipe.make_states(target, plan.work, kind.layers_of(target.config.num_hidden_layers))
    data = recipe.Data(plan.work, states)
    return target, data, kind(target, data, plan)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=[*STUDENTS, "target"], help="what is trained")
    parser.add_argument("--target", default="embedded", help="a folder or a name of the catalogue")
    parser.add_argument("--work", type=Path, required=True, help="answers, states, checkpoints")
    parser.add_argument("--out", type=Path, help="the folder that is made (default: WORK/KIND)")
    parser.add_argument("--stage", choices=["answers"], help="end behind this one")
    parser.add_argument("--tokens", type=float, help="of answers, or of text (default: 3e6)")
    parser.add_argument("--epochs", type=float, help="of a drafter's training (default: 4)")
    parser.add_argument("--batch-tokens", type=int, help="of a step (default: 1024)")
    parser.add_argument("--rate", type=float, help="the highest learning rate (default: 2e-3)")
    parser.add_argument("--verifier", default="", help="the target's public name")
    parser.add_argument("--begin", type=Path, help="a trained head (eagle3, mtp) to go on from")
    parser.add_argument("--device", help="where to compute: cuda (default: cpu)")
    parser.add_argument("--toy", action="store_true", help="a toy, to see that every stage runs")
    given = parser.parse_args(arguments)
    if given.begin and given.kind not in ("eagle3", "mtp"):
        parser.error("--begin goes with eagle3 and mtp")
    torch.set_default_device(given.device)
    sizes = TOY if given.toy else OF_TARGET if given.kind == "target" else {}
    chosen = {n: getattr(given, n) for n in ("tokens", "epochs", "batch_tokens", "rate")}
    sizes = sizes | {name: value for name, value in chosen.items() if value}
    plan = Plan(
        given.kind, resolve_model(given.target), given.work, given.out or given.work / given.kind,
        verifier=given.verifier or given.target, begin=given.begin, **sizes,
    )  # fmt: skip
    print(json.dumps(run(plan, given.stage)))


if __name__ == "__main__":
    main()
