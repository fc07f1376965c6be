"""Task 4. A draft model, in step

(Page: http://127.0.0.1:5000/#chapter-11, 11. Who guesses?)

New text has no earlier match. There a small model of the same family guesses: token by token, each
in a pass of its own, which is cheap as the model is small. It has a KV cache, too, and that has to
stay in step with a text of which the draft model guessed only a part:

    text    The cat sat │ cached: The cat
    pass 1  reads sat, says on        pass 2  reads on, says a        the draft: on a
            cached: The cat sat on    ("a" was chosen, but never read)
    observe 1 accepted, tokens [on, the]       what became of the draft: the verdict
            cached: The cat sat on    text: The cat sat on the

Two rules keep it so. After a verdict, truncate to the text before the draft and what was accepted
of it; a shorter cache stays as it is. Before a draft, read every token of the text that is not
cached. Behind an accepted [on, a] and a bonus two are unread: "a" is text now, but no pass has read
it.

`model` is a `Model` of course/lab.py; row = model.open() gives a text its own row of the cache,
with row.length, row.read(tokens) and row.truncate(length) as in task 2.

Write `DraftModel`. Then: python -m course 4
"""

from course.lab import Model


class DraftModel:
    """Drafts what a small model would write, greedily."""

    def __init__(self, model: Model) -> None:
        """Keep the model. Nothing of a text belongs here: many share this object."""
        self.model = model

    def open(self, prompt: list[int]) -> object:
        """The state of a new text: its row, and the tokens so far. Nothing need be read yet."""
        raise NotImplementedError

    def propose(self, state: object, max_tokens: int) -> list[int]:
        """max_tokens guesses (0: none), one pass for each, which reads no token that is cached."""
        raise NotImplementedError

    def observe(self, state: object, accepted: int, tokens: list[int]) -> None:
        """The first `accepted` guesses of the last draft stay; `tokens` are these and one more.

        Append them, and let the cache forget the rejected guesses, and no more.
        """
        raise NotImplementedError
