"""Texts that a target writes itself: a drafter learns what its target says, not what is true.

    prompts ─→ our own engine, 16 texts at once, weights of 8 bits ─→ answers/00000.npz, …

A chat model answers. A third of its prompts come from prompts.py, a third it writes itself: it goes
on with its chat template where a user's words would stand (arXiv 2406.08464). A third ask about
paragraphs of its earlier answers, which teaches to copy. Any other model goes on with beginnings of
the text that every machine has (corpus.py). One file in three is drawn at T = 1, the others are
greedy. A file is written when it is whole, and a run goes on with the first one that is missing.
"""

import random
import time
from collections.abc import Iterator
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import tools
from runtime.models.chat import chat_ids
from runtime.values import Request, Sampling

from . import corpus, prompts

BATCH = 16  # texts at once
PER_FILE = 96
MAX_TOKENS = 160  # of an answer
BEGINNING = 40  # tokens of a text that a model without a chat template goes on with
TRIED = 8  # tokens of an answer, to know what one takes
READ_AGAIN = 10  # files whose answers are asked about


class Text(NamedTuple):
    """A prompt in the target's chat template, and its answer."""

    tokens: np.ndarray
    prompt_length: int  # how many of the tokens are prompt


def load(file: Path) -> list[Text]:
    """The texts of one file."""
    with np.load(file) as data:
        parts = np.split(data["tokens"], np.cumsum(data["lengths"], dtype=np.int64)[:-1])
        return [Text(*text) for text in zip(parts, data["prompt_lengths"].tolist(), strict=True)]


def save(file: Path, texts: list[Text]) -> None:
    """Write texts one behind the other."""
    arrays = {
        "tokens": np.concatenate([text.tokens for text in texts]),
        "lengths": np.array([len(text.tokens) for text in texts], np.uint32),
        "prompt_lengths": np.array([text.prompt_length for text in texts], np.uint32),
    }
    tools.write_whole(file, lambda part: np.savez_compressed(part, **arrays))


def files(folder: Path, num_tokens: float = inf) -> list[Path]:
    """The files of answers in a folder, in order, until they have so many tokens."""
    every = sorted(folder.glob("*.npz"))
    if num_tokens < inf:
        before = accumulate((num_answered(load(file)) for file in every), initial=0)
        every = [file for file, tokens in zip(every, before, strict=False) if tokens < num_tokens]
    return every


class Writer:
    """A target in our own engine, that writes."""

    def __init__(self, name: str) -> None:
        device = torch.get_default_device().type
        options = {"device": device, "dtype": "int8" if device == "cpu" else "auto"}
        self.engine = tools.load_engine(model=name, max_running=BATCH, drafter="none", **options)
        self.tokenizer = self.engine.target.tokenizer

    def outputs(self, requests: list[Request]) -> list[list[int]]:
        """What comes of requests, so many of them at once."""
        done = tools.run_together(self.engine, requests, at_once=BATCH)
        return [finished.output for finished in done]

    def seconds_a_token(self) -> float:
        """What a token of an answer takes, tried with a few."""
        texts, began = prompts.prompts()[:BATCH], time.monotonic()
        asked = [self.tokenizer(text)["input_ids"][:BEGINNING] for text in texts]
        written = self.answers(asked, TRIED, None)
        return (time.monotonic() - began) / num_answered(written)

    def answers(self, asked: list[list[int]], max_tokens: int, seed: int | None) -> list[Text]:
        """The answers to prompts: greedy, or drawn at T = 1 from a seed."""
        sampling = Sampling() if seed is None else Sampling(temperature=1.0)
        room = self.engine.target.max_length - max_tokens
        requests = [
            Request(ids, max_tokens, None, 0, sampling=sampling, seed=PER_FILE * (seed or 0) + i)
            for i, ids in enumerate(asked)
            if len(ids) <= room
        ]
        pairs = zip(requests, self.outputs(requests), strict=True)
        return [Text(np.array(r.prompt + new, np.uint32), len(r.prompt)) for r, new in pairs]

    def prompts(self, number: int, earlier: list[Path]) -> list[list[int]]:
        """The prompts of file `number`, in tokens."""
        if not self.tokenizer.chat_template:
            begun = corpus.beginnings(number, PER_FILE)
            return [self.tokenizer(text)["input_ids"][:BEGINNING] for text in begun]
        third, rng = PER_FILE // 3, random.Random(number)
        made = self._written(third, number)
        texts = list(self._paragraphs(earlier))
        about = rng.sample(texts, min(third, len(texts)))
        made += [prompts.about(text, number + i) for i, text in enumerate(about)]
        ready, begin = prompts.prompts(), number * third
        made += [ready[(begin + i) % len(ready)] for i in range(PER_FILE - len(made))]
        return [chat_ids(text, self.tokenizer, self.engine.target.max_length) for text in made]

    def _written(self, number: int, seed: int) -> list[str]:
        """Up to `number` prompts that a chat model writes in its user's place."""
        mark = "\N{OBJECT REPLACEMENT CHARACTER}"
        chat = [{"role": "user", "content": mark}]
        whole = self.tokenizer.apply_chat_template(chat, tokenize=False)
        before, after = (
            self.tokenizer(part, add_special_tokens=False)["input_ids"]
            for part in whole.split(mark)
        )
        sampling = Sampling(temperature=0.9, top_k=40)
        seeds = range(number * seed, number * (seed + 1))
        requests = [Request(before, 64, None, 0, sampling=sampling, seed=s) for s in seeds]
        outputs = [out for out in self.outputs(requests) if after[0] in out]
        ended = [out[: out.index(after[0])] for out in outputs]
        texts = [text.strip() for text in self.tokenizer.batch_decode(ended)]
        return [text for text in texts if len(text) > 12]

    def _paragraphs(self, earlier: list[Path]) -> Iterator[str]:
        """Paragraphs of prose from answers."""
        for text in (text for file in earlier[-READ_AGAIN:] for text in load(file)):
            answer = text.tokens[text.prompt_length :]
            for part in self.tokenizer.decode(answer, skip_special_tokens=True).split("\n\n"):
                part = " ".join(part.split())
                if 150 < len(part) < 500 and part[-1] in ".!?" and "`" not in part:
                    yield part


def make(
    name: str, folder: Path, num_tokens: int, max_tokens: int = MAX_TOKENS,
    writer: Writer | None = None,
) -> float:  # fmt: skip
    """Let the target `name` write answers of `num_tokens` in all, or go on where it stopped.

    `writer` is that target, if it is there already. Returns how many seconds it wrote.
    """
    done = num_in(folder)
    if done < num_tokens and not writer:
        writer = Writer(name)
    began = time.monotonic()
    with tqdm(total=num_tokens, initial=done, unit=" tokens", desc="answers") as progress:
        while progress.n < num_tokens:
            number = len(earlier := files(folder))
            asked = writer.prompts(number, earlier)
            texts = writer.answers(asked, max_tokens, number if number % 3 == 2 else None)
            save(folder / f"{number:05d}.npz", texts)
            progress.update(num_answered(texts))
    return time.monotonic() - began


def num_in(folder: Path) -> int:
    """Tokens of all answers in a folder."""
    return sum(map(num_answered, map(load, files(folder))))


def num_answered(texts: list[Text]) -> int:
    """Tokens of answers, without those of prompts."""
    return sum(len(text.tokens) - text.prompt_length for text in texts)
