"""Task 8, solved."""

from course.lab import Row, verify


def cycle(target, rows: list[Row], texts: list[list[int]], drafts: list[list[int]]) -> None:
    fed = [text[row.length :] + draft for row, text, draft in zip(rows, texts, drafts)]
    width = max(len(tokens) for tokens in fed)
    padded = [tokens + [0] * (width - len(tokens)) for tokens in fed]
    logits = target.read([row.index for row in rows], padded)
    for b, (row, text, draft) in enumerate(zip(rows, texts, drafts)):
        pending = len(fed[b]) - len(draft) - 1
        choices = logits[b, pending : len(fed[b])].argmax(-1).tolist()
        text += verify(draft, choices)
        row.truncate(len(text) - 1)
