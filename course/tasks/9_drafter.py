"""Task 9. A drafter of your own, on a real model

(Page: http://127.0.0.1:5000/#chapter-11, 11. Who guesses?, has a race.)

You have built all parts on a small model. Here the engine does the rest, for SmolLM2, and you write
what guesses. What is cheap, and often right? Some ideas:

  - what mostly followed the last two tokens, and not what followed last;
  - a table of frequent words that you make once from other texts, when the drafter is built;
  - none where you are not sure: a draft that is rejected costs time.

The interface is that of tasks 3 and 4, with three changes. `open` gets the request's sampling and
noise, too. `propose` returns Draft(tokens). `observe` gets a verdict: verdict.tokens have come, the
accepted ones and one more. drafters/base.py has all of it, and a small one that draws by chance.

    python -m course drafter course/tasks/9_drafter.py:Mine                   some three minutes
    python -m course drafter course/tasks/9_drafter.py:Mine --model embedded  one: nonsense text

Forty prompts are continued: talk, code, and texts that are mostly copied; and one of one token. You
pass if your drafter is right, however slow or rarely accepted: texts are plain decoding's, greedy,
sampled and eight at once; a state that saw drafts rejected proposes what a fresh one does; texts do
not share a state; and what is drawn is drawn from the q that is reported.

One step more, for free: let it draft a tree, two guesses where you doubt. "Trees of drafts" in
docs/inside.md says how; the same command grades it.
"""

from drafters import Draft, Drafter


class Mine(Drafter):
    name = "mine"

    def open(self, prompt, sampling, noise):
        """The state of a new text, of any kind; what belongs to a text stands nowhere else."""
        raise NotImplementedError

    def propose(self, state, max_tokens):
        """Draft of at most max_tokens tokens; Draft([]) where you have no idea."""
        raise NotImplementedError

    def observe(self, state, verdict):
        """Append verdict.tokens to the text, and forget the draft that you made, if you kept it."""
        raise NotImplementedError
