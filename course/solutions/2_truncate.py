"""Task 2, solved."""

from course.lab import Row, verify


def cycle(target: Row, text: list[int], draft: list[int]) -> None:
    unread = text[target.length :]
    logits = target.read(unread + draft)
    choices = logits.argmax(-1).tolist()[len(unread) - 1 :]
    text += verify(draft, choices)
    target.truncate(len(text) - 1)
