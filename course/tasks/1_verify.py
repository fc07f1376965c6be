"""Task 1. Verify: which guesses stay?

(Page: http://127.0.0.1:5000/#chapter-3, 3. Guess, then check; #chapter-4, 4. A wrong guess)

A language model reads a text as tokens, words or pieces of words, written as numbers. It gives each
token that it knows a score for coming next; all scores together are the logits. Greedy decoding
appends the token with the largest score and asks again. One run of the model is a pass.

In a pass all weights of the model come from memory, which takes nearly all of its time. So a pass
over five tokens takes little longer than a pass over one, and after each token that it reads the
model says what it would write next. Hence the trick: something cheap, the drafter, guesses a few
tokens, the draft. One pass of the model, the target, reads them all and so checks them all:

    The cat │ sat      on ✓   a ✗    mat      one pass over [sat, on, a, mat]; draft = [on, a, mat]
            │  ↓       ↓      ↓      ↓
            │  on      the    …      …        choices: what the target writes after each of them
            │
    The cat   sat      on   the               "on" and "the" are kept

"sat" is the pending token: chosen before, part of the text, but not read by the target yet. So it
leads the pass, and the choice after it, choices[0], judges draft[0]; choices[1] judges draft[1].

  - A guess that the target chooses itself is accepted.
  - The first one that it does not choose is rejected. The target's choice takes its place: it is
    recovered. All guesses behind it are dropped unjudged: they continue another text.
  - If all are accepted, the choice after the last one is kept, too: the bonus.

Only choices of the target are kept, so the text is what it writes alone, one token a pass. And each
pass gives at least one token, so a bad draft costs time, but never changes the text.

Write `verify` in this file. Then: python -m course 1
"""


def verify(draft: list[int], choices: list[int]) -> list[int]:
    """The tokens that are kept, in a list of at least one.

    choices: the target's token after the pending token and after each of the draft, so
    len(choices) == len(draft) + 1. Examples:

        verify([5, 6, 7], [5, 9, 1, 2]) -> [5, 9]      5 is accepted, 6 rejected, 9 recovered
        verify([5, 6], [5, 6, 8])       -> [5, 6, 8]   both are accepted, 8 is the bonus
        verify([], [4])                 -> [4]         nothing was guessed: plain decoding
    """
    raise NotImplementedError
