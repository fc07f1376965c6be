"""Task 5. Rejection, with its residual

(Page: http://127.0.0.1:5000/#chapter-10, 10. Or by rejection)

So far the likeliest token was taken. To sample is to draw the token by chance: x with probability
p(x), the exponential of its logit, divided by the sum of all (the softmax). The drafter draws its
guesses, too, from probabilities q of its own. Which may stay, if each text is to be exactly as
likely as without drafts? The classical rule (Leviathan et al., Chen et al., 2023), for a guess x:

  - It is accepted with chance min(1, p(x) / q(x)): always, where the target likes it better.
  - If it is rejected, another token is drawn from the residual, max(0, p - q), divided by its sum.
    That is the part of p that q lacks. The guesses behind it are dropped.
  - If all are accepted, a bonus is drawn from p behind the last one.

    token    0           1         2
    p        ██▒▒▒▒▒▒▒▒  ██▒▒▒▒    ████               ▒ p above q: the residual
    q        ██          ██        ████░░░░░░░░░░░░   ░ q above p: of token 2 so much is rejected

Why that is exact: x is guessed and accepted with q(x) · min(1, p(x) / q(x)) = min(p(x), q(x)). What
is missing from p(x) is max(0, p(x) - q(x)), and the residual fills just this.

It is exact only if q is what the guess was drawn from. Drafters often cut their probabilities
before they draw: top-k keeps the k likeliest tokens. Then the cut q, which sums to 1 again, is the
one to report.

Randomness comes in as two functions, so that the checks can try every way that it can go: use no
other. chance(x) is True with probability x. draw(weights) gives an index into all the weights that
it gets; these are 0 or more and need not sum to 1.
Probabilities are lists of fractions, with which you calculate as with floats.

Write `propose` and `judge`. Then: python -m course 5
"""


def propose(weights, top_k, draw):
    """The drafter's half: one guess and its q, as a tuple (token, q).

    weights [V] sum to 1. Only the top_k likeliest may be drawn (there are no ties). Example: of
    [.2, .1, .7] and top_k 2, q is [2/9, 0, 7/9], and the token is 0 or 2.
    """
    raise NotImplementedError


def judge(draft, p, q, chance, draw):
    """The tokens that are kept, in a list: accepted guesses and one more.

    p [n + 1][V] is the target's distribution after the pending token and after each of the n
    guesses; q [n][V] is what each guess was drawn from. Example: draft [2], p[0] [.5, .3, .2] and
    q[0] [.1, .1, .8]: 2 stays with chance 1/4; if not, 0 comes with chance 2/3, 1 with 1/3.
    """
    raise NotImplementedError
