"""Drafts that branch: several guesses of what comes next, verified in one pass over a tree.

                 ┌ the ─ lazy                            0    1     2    3     4
    pending ─────┤                     tokens            the  lazy  a    dog   cat
                 └ a ─┬ dog            parents          −1    0    −1    2     2
                      └ cat            in the KV cache   pending the lazy a dog cat

Each token sees only its ancestors, and its position is the one that it would have in a chain. So it
has the same logits as in a chain (kernels/c/attention.c). The target chooses a token after the
pending one. If a child of the pending token is that choice, the target chooses again after this
child, and so on (see `verify`). All later code, from the verdict to the page, sees the tokens on
this path as a chain. The KV cache keeps the accepted ones.

A tree comes from one model (TreeBuilder), or from several drafters at once (`merged`). It needs the
coupled rule, which accepts a token if it is the target's choice: then one choice judges all
branches. The rule of rejection would have to correct for each rejected branch, so there drafts are
chains. They are also chains without compiled kernels.

Sources: Miao et al., SpecInfer, arXiv 2305.09781; Cai et al., Medusa, arXiv 2401.10774.
"""

import numpy as np
from torch import Tensor

from runtime import kernels
from runtime.sampling import Noise, NothingLeft, no_draw, penalise, survivors, total
from runtime.values import Draft, Sampling

from .base import ModelState

_BESIDE = 3  # at most so many other tokens beside each token of the long branch
_SURE = 0.7  # the assumed chance of a token without a confidence, after an accepted one
_FIRST = 32  # `ranked` looks at so many tokens with the largest weights

Path = tuple[int, ...]  # the tokens from behind the pending one up to a token of a tree


def likeliest(chances: dict[Path, float], most: int, confidence: dict[Path, float]) -> Draft:
    """The tree of the `most` likeliest paths; a path is no likelier than its beginning.

    `confidence` has the drafter's of each path's last token, or nothing at all.

    Example: {(1,): .6, (2,): .3, (1, 3): .5}, at most 2 -> the chain 1 3.
    """
    paths = sorted(chances, key=lambda path: (-chances[path], len(path)))[:most]
    places = {path: i for i, path in enumerate([(), *paths], -1)}
    parents = [places[path[:-1]] for path in paths]
    is_chain = parents == list(range(-1, len(parents) - 1))
    sure = [confidence[path] for path in paths] if confidence else []
    return Draft([path[-1] for path in paths], None, None if is_chain else parents, sure)


class TreeBuilder:
    """A tree of a model's likeliest tokens: one long branch, and others beside each of its tokens.

    The model runs along the long branch only, so the other tokens cost no steps. A token's chance
    is the product of the model's probabilities up to it. The tree takes the tokens with the largest
    chances, best first. It is done when no token of a longer branch could be among them.
    """

    def __init__(self, state: ModelState, limit: int) -> None:
        """A tree of at most `limit` tokens."""
        self._state, self._limit = state, limit
        self._branch: Path = ()
        self._chances: dict[Path, float] = {}
        self._confidence: dict[Path, float] = {}
        self._has_ended = False

    @property
    def _chance(self) -> float:
        """The chance that the whole branch is accepted."""
        return self._chances.get(self._branch, 1.0)

    def extend(self, logits: Tensor) -> int:
        """Add what the model's logits [V] say; returns the token that the branch goes on with."""
        state, text = self._state, [*self._state.text, *self._branch]
        try:
            return self.grow(ranked(logits, text, state.sampling, state.noise, _BESIDE + 1))
        except NothingLeft:  # the text may end here
            self._has_ended = True
            return 0  # for nobody

    def grow(self, candidates: list[tuple[int, float]]) -> int:
        """Add what may follow the branch: tokens with their probabilities, the next one first.

        Returns that one, which the branch goes on with.
        """
        branch, chance = self._branch, self._chance
        for token, probability in candidates:
            path = (*branch, token)
            self._chances[path], self._confidence[path] = chance * probability, probability
        self._branch = (*branch, candidates[0][0])
        return candidates[0][0]

    @property
    def is_open(self) -> bool:
        """Whether a longer branch would change the draft."""
        least = self._chance
        count = sum(chance >= least for chance in self._chances.values())
        return count < self._limit and not self._has_ended

    def draft(self) -> Draft:
        """The tree."""
        return likeliest(self._chances, self._limit, self._confidence)


def merged(drafts: list[Draft], most: int) -> Draft:
    """One draft of several: their `most` likeliest tokens; what begins alike is drafted once.

    A token's chance is its drafter's confidence times the chance of the token before it. If a
    drafter gives no confidence, its token gets the share _SURE of that chance, less what other
    tokens beside it have taken.

    Example: chains 1 2 3 and 1 4 5, at most 4 -> tokens 1 2 3 4, parents -1 0 1 0.
    """
    chances, left = dict[Path, float](), {(): 1.0}  # left for what may follow a path
    for draft in sorted(drafts, key=lambda draft: not draft.confidence):
        for indexes in draft.paths():
            path = tuple(draft.tokens[i] for i in indexes)
            if path in chances:
                continue
            before = path[:-1]
            chance = _SURE * left[before]
            if draft.confidence:
                chance = draft.confidence[indexes[-1]] * chances.get(before, 1.0)
            chances[path] = left[path] = chance
            left[before] = max(0.0, left[before] - chance)
    return likeliest(chances, most, {})


def ranked(
    logits: Tensor, text: list[int], sampling: Sampling, noise: Noise, count: int
) -> list[tuple[int, float]]:
    """The `count` tokens that a model would choose first after `text`, by logits [V].

    Each comes with a chance. Greedy: the most likely tokens, with their probabilities. Sampled: the
    fastest tokens of the race, each with its share of the sum of weight / e.
    """
    scores = penalise(logits[None], sampling, text, Draft())[0]
    if sampling.is_greedy:
        weights, ids, sum_of_all = _leaders(scores, (1.0, 0, 1.0, 0.0), count)
        return list(zip(ids.tolist(), (weights / sum_of_all).tolist(), strict=True))
    weights, ids, _ = _leaders(scores, sampling.transforms, _FIRST)
    speeds = weights / noise.exponentials(len(text), ids)
    order = np.argsort(-speeds, kind="stable")[:count]
    return list(zip(ids[order].tolist(), (speeds / speeds.sum())[order].tolist(), strict=True))


def _leaders(
    scores: Tensor, transforms: tuple[float, int, float, float], count: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Weights and ids of the `count` best survivors, best first, and the sum of all weights."""
    if kernels.can_choose():
        try:
            return kernels.leaders(scores, transforms, count)
        except ValueError:
            raise no_draw(float(scores.max())) from None
    weights, ids = survivors(scores, *transforms)
    first = np.argsort(-scores.numpy(force=True)[ids], kind="stable")[:count]
    return weights[first], ids[first], total(weights)
