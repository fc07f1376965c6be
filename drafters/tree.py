"""Drafts that branch: several guesses of what comes next, verified in one pass over a tree.

                 ┌ the ─ lazy                            0    1     2    3     4
    pending ─────┤                     tokens            the  lazy  a    dog   cat
                 └ a ─┬ dog            parents          −1    0    −1    2     2
                      └ cat            in the KV cache   pending the lazy a dog cat

Each token sees only its ancestors, and its position is the one that it would have in a chain. So it
has the same logits as in a chain (kernels/c/attention.c). The target chooses a token after the
pending one. If a child of the pending token is that choice, the target chooses again after this
child, and so on (see `verify`). All later code, from the verdict to the page, sees the tokens on
this way as a chain. The KV cache keeps the accepted ones.

A tree needs the coupled rule, which accepts a token if it is the target's own choice: then one
choice judges all branches. The rule of rejection would have to correct for each rejected branch, so
there drafts are chains. They are also chains without compiled kernels.

Sources: Miao et al., SpecInfer, arXiv 2305.09781; Cai et al., Medusa, arXiv 2401.10774.
"""

from dataclasses import replace

from torch import Tensor

from messages import Draft, Verdict
from sampling import ranked

from .base import ModelState, Sample

_BESIDE = 3  # at most so many other tokens beside each token of the long branch
_SURE = 0.7  # the assumed chance of a token without a confidence, after an accepted one


class Comb:
    """A tree of a model's likeliest tokens: one long branch, and others beside each of its tokens.

    The model runs along the long branch only, so the other tokens cost no steps. A token's chance
    is the product of the model's probabilities up to it. The tree takes the tokens with the largest
    chances, best first. It is done when no token of a longer branch could be among them.
    """

    def __init__(self, state: ModelState, limit: int) -> None:
        """For at most `limit` tokens."""
        self._state, self._limit, self._branch = state, limit, list[int]()
        self._chance = 1.0  # of the whole branch
        self._ways: list[tuple[float, list[int], float]] = []  # each with those before it, and p

    def extend(self, logits: Tensor, _: Sample) -> int:
        """Add what the model's logits [V] say; returns the token that the branch goes on with."""
        given = [*self._state.text, *self._branch], self._state.sampling, self._state.noise
        return self.grow(ranked(logits, *given, _BESIDE + 1))

    def grow(self, able: list[tuple[int, float]]) -> int:
        """Add what may follow the branch: tokens with their probabilities, the next one first.

        Returns that one, which the branch goes on with.
        """
        self._ways += [(self._chance * p, [*self._branch, token], p) for token, p in able]
        token, p = able[0]
        self._branch.append(token)
        self._chance *= p
        return token

    @property
    def is_open(self) -> bool:
        """Whether a longer branch would change the draft."""
        return sum(chance >= self._chance for chance, *_ in self._ways) < self._limit

    def draft(self) -> Draft:
        """The tree."""
        best = sorted(self._ways, key=lambda way: (-way[0], len(way[1])))[: self._limit]
        places = {(): -1} | {tuple(way): i for i, (_, way, _) in enumerate(best)}
        nodes = [(way[-1], places[tuple(way[:-1])]) for _, way, _ in best]
        return tree_of(nodes, [p for *_, p in best])


def longest(draft: Draft) -> Draft:
    """The longest chain of a draft, the first one of several."""
    return draft if draft.parents is None else draft.chain(max(draft.paths(), key=len, default=[]))


def merged(drafts: list[Draft], most: int) -> Draft:
    """One draft of several: their `most` likeliest tokens; what begins alike is drafted once.

    A token's chance is its drafter's confidence times the chance of the token before it. If a
    drafter gives no confidence, its token gets the share _SURE of that chance, less what other
    tokens beside it have taken.

    Example: chains 1 2 3 and 1 4 5, at most 4 -> tokens 1 2 3 4, parents -1 0 1 0.
    """
    if len(drafts) == 1:
        return drafts[0]
    known: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    chances, left, depths = list[float](), {-1: 1.0}, {-1: 0}  # of nodes; left for those behind
    for draft in sorted(drafts, key=lambda draft: not draft.confidence):
        nodes = {-1: -1}
        for way in draft.paths():
            parent = nodes[way[-2] if len(way) > 1 else -1]
            key, node = (parent, draft.tokens[way[-1]]), len(known)
            if key not in known:
                known[key], depths[node] = node, depths[parent] + 1
                own = _SURE * left[parent]
                if draft.confidence:
                    own = draft.confidence[way[-1]] * (chances[parent] if parent >= 0 else 1.0)
                chances.append(own)
                left[node], left[parent] = chances[node], max(0.0, left[parent] - chances[node])
            nodes[way[-1]] = known[key]
    best = sorted(known.values(), key=lambda node: (-chances[node], depths[node]))[:most]
    places, pairs = {-1: -1} | {node: i for i, node in enumerate(best)}, list(known)
    return tree_of([(pairs[node][1], places[pairs[node][0]]) for node in best], [])


def tree_of(nodes: list[tuple[int, int]], confidence: list[float]) -> Draft:
    """From each token and the place of the one that it follows; a chain has no parents."""
    parents = [parent for _, parent in nodes]
    is_chain = parents == list(range(-1, len(parents) - 1))
    return Draft([token for token, _ in nodes], None, None if is_chain else parents, confidence)


def heard(verdict: Verdict, draft: Draft | None) -> list[Verdict]:
    """What a drafter is told if its draft was merged into a tree.

    First it is told how far its own draft was accepted. The other accepted tokens came from another
    drafter, so they are told as text.

    Example: 5 6 7 accepted, then 8; of a draft 5 9 -> [5, 6] with 1 of 2 accepted, and then [7, 8].
    """
    if draft is None:
        return [verdict]
    accepted, own = verdict.tokens[:-1], 0
    for way in draft.paths():
        tokens = [draft.tokens[place] for place in way]
        if tokens == accepted[: len(way)]:
            own = max(own, len(way))
    rest, hidden = verdict.accepted - own, verdict.hidden
    first = replace(
        verdict, drafted=len(draft.tokens), accepted=own, tokens=verdict.tokens[: own + 1]
    )
    if not rest:
        return [first]
    others = Verdict(0, rest - 1, verdict.tokens[own + 1 :])
    if hidden is not None:
        first, others = (
            replace(first, hidden=hidden[:-rest]),
            replace(others, hidden=hidden[-rest:]),
        )
    return [first, others]
