"""Train a drafter for a target of your own in an hour, or make the embedded models anew.

    python -m tools.train --target FOLDER                        the head that fits the target
    python -m tools.train draft --target smollm2 --minutes 120 --out /tmp/draft.gguf
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
import shutil
import sys
import time
from dataclasses import dataclass, replace
from hashlib import sha256
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads cost 10x on busy cores

import torch
from transformers import AutoConfig, PreTrainedModel

import tools
from runtime.models.catalogue import cache_folder, resolve_model
from runtime.models.files import is_gguf
from runtime.models.gguf_config import config_of
from runtime.models.gguf_model import open_model
from runtime.models.loading import load_pretrained
from runtime.values import Request, RequestError, in_short
from server.options import Options, between

from .training import answers, corpus, embedded, recipe
from .training.heads import DFlash, Draft, Eagle3, Mtp
from .training.hybrid import Hybrid

STUDENTS = {"eagle3": Eagle3, "dflash": DFlash, "mtp": Mtp, "draft": Draft, "hybrid": Hybrid}
OPTION = {"eagle3": "eagle3", "dflash": "dflash", "mtp": "mtp", "draft": "draft_model"}
# The kinds of targets (transformers' model_type) that a head is made for; a draft is for all.
FITS = {
    "eagle3": {"llama", "mistral", "qwen3", "mellum"},
    "mtp": {"llama", "qwen2", "qwen3_5_text", "mellum", "mimo"},
    "dflash": {"qwen3", "mellum"},
    "hybrid": {"mellum"},  # it is a target with states, not a head
}
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
    name: str = ""  # and its name on the command line
    begin: Path | None = None  # a trained head that an EAGLE-3 or MTP head begins as
    corpus_bytes: int | None = None  # of each source of text; None: all
    is_toy: bool = False
    minutes: int | None = None  # that all may take, in place of `tokens`


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
    check_work(plan)
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


def kind_for(target: str, wanted: str | None) -> str:
    """What is trained: what was asked for, or the first head that fits, or else a draft model.

    Raises SystemExit where that does not fit the target, before anything is loaded.
    """
    if wanted == "target":
        return wanted
    try:
        if is_gguf(target):
            with open_model(target) as file:
                config = config_of(file)
        else:
            config = AutoConfig.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: cannot read the target: {in_short(error)}") from error
    family = config.get_text_config().model_type
    able = [*(kind for kind, families in FITS.items() if family in families), "draft"]
    if wanted not in (None, *able):
        raise SystemExit(f"error: no {wanted} head fits a {family}: train {' or '.join(able)}")
    return wanted or able[0]


def check_work(plan: Plan) -> None:
    """Raises SystemExit if the work folder has another target's answers."""
    file = plan.work / "target.txt"
    if file.exists() and (other := file.read_text("utf-8")) != plan.target:
        raise SystemExit(f"error: {plan.work} has answers of {other}: give another --work")
    tools.write_text(file, plan.target)


def fitted(plan: Plan) -> Plan:
    """The plan with as many tokens as its minutes allow. Raises SystemExit if these are too few.

    What was decided is in --work: who gives the command again goes on with that.
    """
    file, began = plan.work / f"{plan.kind}.json", time.monotonic()
    if file.exists() and (known := json.loads(file.read_text("utf-8")))["minutes"] == plan.minutes:
        return replace(plan, tokens=known["tokens"])
    writer, folder = answers.Writer(plan.target), plan.work / "answers"
    refuse_if_slow(plan, writer.seconds_a_token())
    before = answers.num_in(folder)
    write_s = answers.make(plan.target, folder, before + 1, plan.max_answer, writer)
    num_tokens = answers.num_in(folder)
    write_s /= num_tokens - before
    del writer
    each_s = write_s, *seconds_a_token(plan)
    refuse_if_slow(plan, sum(each_s))
    left = 60 * plan.minutes - FOR_OTHERS - (time.monotonic() - began) + write_s * num_tokens
    if (tokens := int(left / sum(each_s))) < num_tokens:  # which are written already
        tokens = int((left - write_s * num_tokens) / sum(each_s[1:]))
    tokens = max(tokens, LEAST)
    minutes = [tokens * s / 60 for s in each_s]
    said = "{:,} tokens of answers: {:.0f} minutes to write them, {:.0f} to read, {:.0f} to learn"
    print(said.format(tokens, *minutes), file=sys.stderr)
    tools.write_text(file, json.dumps({"minutes": plan.minutes, "tokens": tokens}))
    return replace(plan, tokens=tokens)


def refuse_if_slow(plan: Plan, each_s: float) -> None:
    """Raises SystemExit if LEAST tokens take too long, at so many seconds for each."""
    needed = (LEAST * each_s + FOR_OTHERS) / 60
    if needed > plan.minutes:
        raise SystemExit(
            f"error: {plan.minutes} minutes are too few here: a drafter needs {LEAST:,} tokens of "
            f"answers, which take {needed:.0f} minutes or more: give --minutes "
            f"{1.2 * needed:.0f}, or a smaller target"
        )


def seconds_a_token(plan: Plan) -> tuple[float, float]:
    """What reading a token of answers takes, and training: tried with the newest file of them.

    A student learns a few steps in a folder of its own, and is thrown away.
    """
    newest = answers.files(plan.work / "answers")[-1]
    with TemporaryDirectory(dir=plan.work) as folder:
        trial = replace(plan, work=Path(folder))
        (trial.work / "answers").mkdir()
        shutil.copy(newest, trial.work / "answers")
        target, began = target_of(plan), time.monotonic()
        states = states_of(trial, target)
        read_s = time.monotonic() - began
        data = recipe.Data(trial.work, states)
        student = STUDENTS[plan.kind](target, data, trial)
        train_s = recipe.seconds_a_token(student, rows_of(target), data, trial)
    num_tokens = answers.num_answered(answers.load(newest))
    every = data.num_tokens / num_tokens  # the student learns prompts, too
    return read_s / num_tokens, train_s * plan.epochs * every


def served(plan: Plan, data: recipe.Data) -> dict[str, Any]:
    """What the server has with the drafter, for prompts that are held out; or why it has not."""
    name = OPTION[plan.kind]
    options = {name: str(plan.out), "drafter": name, "fixed_k": True}
    texts = [text for text, _ in data.held_out[:_SERVED]]
    prompts = [text.tokens[: text.prompt_length].tolist() for text in texts]
    requests = [Request(prompt, _SERVED_TOKENS, name, 4) for prompt in prompts]
    try:
        device = str(torch.get_default_device())
        engine = tools.load_engine(model=plan.name or plan.target, device=device, **options)
        total = tools.total(tools.run_together(engine, requests, at_once=1))
    except (ValueError, RuntimeError, RequestError) as error:  # what was trained stays
        return {"error": in_short(error)}
    return {
        "tokens_per_pass": round(total.mean_acceptance_length or 1.0, 3),
        "acceptance": round(total.draft_acceptance_rate or 0.0, 4),
    }


def rows_of(target: PreTrainedModel) -> torch.Tensor:
    """[V, D]: of the target's output layer, which tells what a student should say."""
    return target.get_output_embeddings().weight.to(recipe.fast_dtype())


def target_of(plan: Plan) -> PreTrainedModel:
    """The target as it is served: transformers' own reader drops keys of a GGUF file."""
    dtype = str(recipe.fast_dtype()).removeprefix("torch.")
    options = Options(dtype=dtype, device=str(torch.get_default_device()))
    target = load_pretrained(plan.target, options).model
    return target.requires_grad_(False)


def states_of(plan: Plan, target: PreTrainedModel) -> Path:
    """The folder of the states that a student reads; those that are missing are made."""
    layers = STUDENTS[plan.kind].layers_of(target.config.num_hidden_layers)
    return recipe.make_states(target, plan.work, layers, int(plan.tokens))


def student_of(plan: Plan) -> tuple[PreTrainedModel, recipe.Data, recipe.Student]:
    """A target, its answers with their states, and a student."""
    target = target_of(plan)
    data = recipe.Data(plan.work, states_of(plan, target), int(plan.tokens))
    return target, data, STUDENTS[plan.kind](target, data, plan)


def positive(text: str) -> float:
    """An argparse type: a number above 0."""
    if not 0 < (value := float(text)) < inf:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = [*STUDENTS, "target"]
    what = "what is trained (default: the first that fits of eagle3, mtp and draft)"
    parser.add_argument("kind", nargs="?", choices=kinds, help=what)
    parser.add_argument("--target", default="smollm2", help="a folder, a file or a known name")
    parser.add_argument("--minutes", type=between(1, 100_000), help="for all (default: 60)")
    parser.add_argument("--work", type=Path, help="answers, states, checkpoints (default: a cache)")
    what = "the folder that is made, or the draft's .gguf file (default: WORK/KIND)"
    parser.add_argument("--out", type=Path, help=what)
    parser.add_argument("--stage", choices=["answers"], help="end behind this one")
    parser.add_argument(
        "--tokens", type=positive, help="of answers, or of text, in place of --minutes"
    )
    parser.add_argument("--epochs", type=positive, help="of a drafter's training (default: 4)")
    parser.add_argument("--batch-tokens", type=between(1, 10**9), help="of a step (default: 1024)")
    parser.add_argument("--rate", type=positive, help="the highest learning rate (default: 2e-3)")
    parser.add_argument("--verifier", default="", help="the target's public name")
    parser.add_argument("--begin", type=Path, help="a trained head (eagle3, mtp) to go on from")
    parser.add_argument("--device", help="where to compute: cuda (default: cpu)")
    parser.add_argument("--toy", action="store_true", help="a toy, to see that every stage runs")
    given = parser.parse_args(arguments)
    if given.begin and given.kind not in ("eagle3", "mtp", None):
        parser.error("--begin goes with eagle3 and mtp")
    if given.minutes and (given.tokens or given.kind in ("target", "hybrid")):
        parser.error("--minutes goes with a drafter, and not with --tokens")
    torch.set_default_device(given.device)
    sizes = TOY if given.toy else OF_TARGET if given.kind == "target" else {}
    chosen = {n: getattr(given, n) for n in ("tokens", "epochs", "batch_tokens", "rate")}
    sizes = sizes | {name: value for name, value in chosen.items() if value}
    # The embedded target is made of text alone: no model is fetched for it.
    target = given.target if given.kind == "target" else resolve_model(given.target)
    kind = kind_for(target, given.kind)
    is_timed = kind in OPTION and "tokens" not in sizes
    name = f"{Path(target).name}-{sha256(target.encode()).hexdigest()[:8]}"
    work = given.work or cache_folder() / "training" / name
    work = work / "toy" if given.toy else work  # nothing of it is to be gone on from
    out = given.out or work / kind
    if kind == "draft" and is_gguf(target) and not is_gguf(str(out)):
        out = out.with_name(f"{out.name}.gguf")
    plan = Plan(
        kind, target, work, out,
        verifier=given.verifier or given.target, name=given.target, begin=given.begin,
        minutes=(given.minutes or 60) if is_timed else None, **sizes,
    )  # fmt: skip
    print(json.dumps(run(plan, given.stage)))


if __name__ == "__main__":
    main()
