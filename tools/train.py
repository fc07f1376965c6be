"""Train a drafter for a target of your own in an hour, or make the embedded models anew.

    python -m tools.train --target FOLDER                                   an EAGLE-3 head
    python -m tools.train draft --target smollm2 --minutes 120 --out /tmp/draft
    python -m tools.train mtp   --target FOLDER --tokens 3e6 --work /tmp/work --out /tmp/head

    eagle3, dflash    a head for the target                 mtp      the target with an MTP layer
    draft             a small model of its tokenizer        target   the embedded target
                                                            hybrid   the embedded hybrid

Drafters go one path: answers of the target → its states → training → a folder in the layout that
drafters/ read (training/recipe.py). A first file of answers, and a few steps of a student that is
then thrown away, say how many answers --minutes allow. Too few for a drafter is an error, which
says how long it would take. Training ends early where held-out answers show no more gain.

Every stage writes to --work as it goes, and goes on from there when the command is given again;
several drafters share a --work and its answers. The last line on stdout is JSON with the figures:
what is accepted at each position of a draft, on answers that are held out; and `served`, what the
server has with this drafter for these prompts.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads cost 10x on busy cores

import torch
from transformers import PreTrainedModel

import tools
from runtime.models.catalogue import cache_folder, resolve_model
from runtime.models.loading import load_pretrained
from runtime.values import Request
from server.options import Options

from .training import answers, corpus, embedded, recipe
from .training.heads import DFlash, Draft, Eagle3, Mtp
from .training.hybrid import Hybrid

STUDENTS = {"eagle3": Eagle3, "dflash": DFlash, "mtp": Mtp, "draft": Draft, "hybrid": Hybrid}
OPTION = {"eagle3": "eagle3", "dflash": "dflash", "mtp": "mtp", "draft": "draft_model"}
LEAST = 250_000  # tokens of answers: with fewer a head hardly drafts
FOR_OTHERS = 60.0  # seconds of the time: loading the models, and measuring what is served
_SERVED, _SERVED_TOKENS = 16, 64  # prompts, and tokens of each


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
    minutes: float | None = None  # that all may take, in place of `tokens`


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
    if plan.minutes:
        plan = fitted(plan)
    answers.make(plan.target, plan.work / "answers", int(plan.tokens), plan.max_answer)
    if stage == "answers":
        return {}
    target, data, student = student_of(plan)
    figures = recipe.train(student, rows_of(target), data, plan)
    student.save(plan.out)
    if plan.kind in OPTION and not plan.is_toy:
        del target, student
        figures["served"] = served(plan, data)
    return figures


def fitted(plan: Plan) -> Plan:
    """The plan with as many tokens as its minutes allow. Raises SystemExit if these are too few.

    What was decided is in --work: who gives the command again goes on with that.
    """
    file = plan.work / f"{plan.kind}.json"
    if file.exists():
        return replace(plan, tokens=json.loads(file.read_text("utf-8"))["tokens"])
    began = time.monotonic()
    print("how fast is this machine? A first file of answers, and a few steps", file=sys.stderr)
    words, (write_s, num_tokens) = plan.work / "words.npy", _first_answers(plan)
    had_words = words.exists()
    before = time.monotonic()
    target, data, student = student_of(plan)
    read_s = time.monotonic() - before  # the states, and loading
    every = data.num_tokens / num_tokens  # tokens with those of prompts
    train_s = recipe.seconds_a_token(student, rows_of(target), data, plan) * plan.epochs * every
    if not had_words:
        words.unlink()  # they are those of all answers
    each = write_s + read_s / num_tokens + train_s
    left = 60 * plan.minutes - FOR_OTHERS - (time.monotonic() - began)
    tokens = int(left / each)
    if tokens < LEAST:
        hours = (LEAST * each + FOR_OTHERS) / 3600
        raise SystemExit(
            f"error: {plan.minutes:g} minutes are too few here: a drafter needs {LEAST:,} tokens "
            f"of answers, which take {hours:.1f} hours: give --minutes {hours * 60 + 5:.0f}, or a "
            "smaller target"
        )
    parts = [tokens * s / 60 for s in (write_s, read_s / num_tokens, train_s)]
    print("{:,} tokens of answers: {:.0f} minutes to write, {:.0f} to read, {:.0f} to train".format(
        tokens, *parts), file=sys.stderr)  # fmt: skip
    file.write_text(json.dumps({"tokens": tokens}), "utf-8")
    return replace(plan, tokens=tokens)


def _first_answers(plan: Plan) -> tuple[float, int]:
    """Seconds that a token takes, and tokens of the first file of answers, which is made here."""
    folder = plan.work / "answers"
    seconds = answers.make(plan.target, folder, answers.num_in(folder) + 1, plan.max_answer)
    newest = answers.load(answers.files(folder)[-1])
    return seconds / answers.num_answered(newest), answers.num_in(folder)


def served(plan: Plan, data: recipe.Data) -> dict[str, float]:
    """What the server has with the drafter, for prompts that are held out."""
    name = OPTION[plan.kind]
    options = {name: str(plan.out), "drafter": name, "fixed_k": True}
    engine = tools.load_engine(model=plan.target, device=str(torch.get_default_device()), **options)
    texts = [text for text, _ in data.held_out[:_SERVED]]
    prompts = [text.tokens[: text.prompt_length].tolist() for text in texts]
    total = tools.total(
        tools.run_together(
            engine, [Request(p, _SERVED_TOKENS, name, 4) for p in prompts], at_once=1
        )
    )
    return {
        "tokens_per_pass": round(total.mean_acceptance_length or 1.0, 3),
        "acceptance": round(total.draft_acceptance_rate or 0.0, 4),
    }


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
    kinds = [*STUDENTS, "target"]
    parser.add_argument("kind", nargs="?", default="eagle3", choices=kinds, help="what is trained")
    parser.add_argument("--target", default="smollm2", help="a folder, a file or a known name")
    parser.add_argument("--minutes", type=float, help="that all may take (default: 60)")
    parser.add_argument("--work", type=Path, help="answers, states, checkpoints (default: a cache)")
    parser.add_argument("--out", type=Path, help="the folder that is made (default: WORK/KIND)")
    parser.add_argument("--stage", choices=["answers"], help="end behind this one")
    parser.add_argument(
        "--tokens", type=float, help="of answers, or of text, in place of --minutes"
    )
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
    if given.minutes and (given.tokens or given.kind not in OPTION):
        parser.error("--minutes goes with a drafter, and not with --tokens")
    torch.set_default_device(given.device)
    sizes = TOY if given.toy else OF_TARGET if given.kind == "target" else {}
    chosen = {n: getattr(given, n) for n in ("tokens", "epochs", "batch_tokens", "rate")}
    sizes = sizes | {name: value for name, value in chosen.items() if value}
    is_timed = given.kind in OPTION and "tokens" not in sizes
    work = given.work or cache_folder() / "training" / Path(given.target).stem
    plan = Plan(
        given.kind, resolve_model(given.target), work, given.out or work / given.kind,
        verifier=given.verifier or given.target, begin=given.begin,
        minutes=(given.minutes or 60.0) if is_timed else None, **sizes,
    )  # fmt: skip
    print(json.dumps(run(plan, given.stage)))


if __name__ == "__main__":
    main()
