"""Task 2. Truncate: one cycle with a KV cache

(Page: http://127.0.0.1:5000/#chapter-1, 1. One token at a time; #chapter-6, 6. The cut)

As described so far each pass would read the whole text again. But what the model computes for a
token (vectors called keys and values) depends on that token and those before it alone. So they are
kept, in the KV cache, and a pass reads only what the cache lacks. In plain decoding that is one
token, the pending one: it was chosen by the last pass, and no pass has read it.

With drafts a pass also writes keys and values of guesses that are then rejected. To truncate is to
forget them; else later tokens would look at a text that was never written. One cycle:

    the text            The cat sat             cached: The cat          sat is pending
    read [sat on a mat]                         cached: The cat sat on a mat
    keep [on the]       The cat sat on the
    truncate to 4                               cached: The cat sat on   the is pending

After each cycle the last token of the text is pending, and the cache ends before it. Truncating
costs nothing: the cache is one array for the longest text, with a length beside it. Lowering the
length hides what stands behind it, and the next pass overwrites that.

`target` is one row of the cache of a small model (a `Row`). You need of it:

    target.length             how many tokens of the text the cache holds; 0 before the first cycle
    target.read([12, 7])      one pass over tokens that follow those in the cache, which then holds
                              them, too. It gives logits [2, V], a numpy array: row 0 says what may
                              follow token 12, row 1 what may follow 7; V is the vocabulary's size
    target.truncate(4)        the cache forgets all but its first 4 tokens

In the first cycle the cache is empty, and the pass reads the whole prompt and the draft. The
largest of a row of logits is a choice, and `verify` needs those of the last len(draft) + 1
rows: what follows the pending token, and what follows each guess.

Write `cycle`. Then: python -m course 2
"""

from course.lab import Row, verify  # task 1, solved: verify(draft, choices)


def cycle(target: Row, text: list[int], draft: list[int]) -> None:
    """One greedy cycle: read, verify, accept, truncate.

    Extends `text` in place by what is kept. Makes one pass, which reads nothing that is cached.
    """
    raise NotImplementedError
