"""Task 8. A batch with rollback

(Page: http://127.0.0.1:5000/#chapter-8, 8. When it loses)

A server has many users. One pass reads several texts, a batch, and loads the weights once for all.
But drafts differ in length, and so does what is accepted of them, while an array is a rectangle. So
shorter rows are padded, here on the right (·), and each row of the cache has a length of its own:

                        the pass reads         kept       the row then holds
    text 1 (5 cached)   red ,✓ green✗ ,        , blue     7 tokens, the last are red ,
    text 2 (2 cached)   7   8✓   ·    ·        8 9        4 tokens, the last are 7 8

A token sees only tokens before it in its own row. So padding on the right changes nothing for the
tokens before it. The pass writes it into the row, and truncation removes it with the rejected
guesses, in each row by itself (the rollback). A row of logits comes for padding, too: the
choices of text b are those behind its own pending token and its own draft.

    target.read([0, 2], [[5, 6], [7, 0]])      one pass over rows 0 and 2: logits [2, 2, V]
    row.index, row.length, row.truncate(n)     of each text; row.index is what target.read asks for

Write `cycle`. Then: python -m course 8
"""

from course.lab import Model, Row, verify


def cycle(target: Model, rows: list[Row], texts: list[list[int]], drafts: list[list[int]]) -> None:
    """One greedy cycle of several texts, in one pass. Each text is extended in place.

    rows[b], texts[b] and drafts[b] belong together. Any token will do as padding.
    """
    raise NotImplementedError
