"""Task 6, solved."""

import numpy as np

from course.lab import Row, noise, verify


def choose(logits: np.ndarray, temperature: float, seed: int, position: int) -> int:
    weights = np.exp((logits - logits.max()) / temperature)
    times = noise(seed, position, len(logits)) / weights
    return int(times.argmin())


def cycle(target: Row, text: list[int], draft: list[int], temperature: float, seed: int) -> None:
    unread = text[target.length :]
    logits = target.read(unread + draft)[len(unread) - 1 :]
    choices = [choose(row, temperature, seed, len(text) + i) for i, row in enumerate(logits)]
    text += verify(draft, choices)
    target.truncate(len(text) - 1)
