"""SuffixDecoding: propose what mostly followed the longest known suffix, here or in past outputs.

    text                             … the quick brown
    longest suffix in the own text             brown → bear                score 0.5
    and in what the server wrote before  quick brown → fox jumps over      score 0.8 + 0.7 + 0.6
    draft                                              fox jumps over

A step of the draft is worth count / (total + 1 / length): how often the token has followed so long
a context, of all that has. The longer the context, the more a single case says. The product of
these is the chance that the draft is accepted up to there. It goes on for as long as that is 0.05,
so it is long where the text repeats itself and short where it might; K is only the upper limit. The
sum is the draft's score: the tokens that may be expected of it. Where past outputs know a longer
suffix than the own text, the draft with the better score is proposed.

No model and nothing drawn: q is one-hot, as it is with ngram. Past outputs change times, never a
text. (Under the rule of rejection drafts decide which text of the distribution comes, so there they
are not looked at.) But times tell: whoever may ask can find out what others were answered.

Source: Oliaro et al., arXiv 2411.04975. It chooses among all suffixes by score; here the longest
one is taken, as the others gained nothing (benchmarks/LOG.md). Nothing of it is a tree of drafts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from messages import Draft, Sampling, Verdict
from sampling import Noise

from .base import Context, Drafter
from .suffix_tree import DEPTH, END, Place, Step, SuffixAutomaton

LEAST_CHANCE = 0.05  # of being accepted, of a token that is worth drafting


class PastOutputs:
    """What the server wrote last: at most `capacity` tokens, the oldest being forgotten first.

    It has two halves. When the young one is full it becomes the old one, and what was old is
    forgotten at once: so from half the capacity on it always holds at least that half.
    """

    def __init__(self, capacity: int) -> None:
        self._half = capacity // 2
        self.halves = (SuffixAutomaton(), SuffixAutomaton())  # young and old
        self.version = 0  # changes with what is held

    def __len__(self) -> int:
        """The number of tokens, each output's end counting as one."""
        return sum(map(len, self.halves))

    def add(self, output: Sequence[int]) -> None:
        """Remember an output, or the end of one that is longer than a half."""
        room = self._half - 1
        if room < 1 or not output:
            return
        kept, (young, old) = [*output[-room:], END], self.halves
        if len(young) + len(kept) > self._half:
            young, old = SuffixAutomaton(), young
        young.extend(kept)
        self.halves, self.version = (young, old), self.version + 1


@dataclass(eq=False)
class State:
    """A request's text, and where its end stands in past outputs."""

    num_prompt_tokens: int
    reads_past: bool  # if its rule of acceptance allows for that
    is_alone: bool = False  # neither reads past outputs nor adds to them; the panel sets it
    tokens: list[int] = field(default_factory=list)
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    places: list[Place] = field(default_factory=list)  # one in each half
    version: int = -1  # of the past outputs that `places` belong to

    @property
    def looks_back(self) -> bool:
        """Whether past outputs may be proposed to it."""
        return self.reads_past and not self.is_alone

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. Drafts never come here, so a rejected one needs no rollback."""
        tokens = list(tokens)
        self.tokens += tokens
        self.own.extend(tokens)

    def find(self, past: PastOutputs, num_new: int) -> None:
        """Bring `places` up to date, `num_new` tokens having come since the last time."""
        if self.version != past.version:  # another output: matches may be longer now
            self.places, self.version, num_new = [Place(), Place()], past.version, DEPTH
        new = self.tokens[-num_new:] if num_new else []
        pairs = zip(past.halves, self.places, strict=True)
        self.places = [half.follow(place, new) for half, place in pairs]


class SuffixDrafter(Drafter):
    """Proposes from the request's own text and from past outputs of the server."""

    name: ClassVar[str] = "suffix"
    keeps_outputs = True

    def __init__(self, capacity: int = 0) -> None:
        """`capacity`: tokens of past outputs that are kept; 0 for none."""
        self.past = PastOutputs(capacity)

    @classmethod
    def build(cls, context: Context) -> "SuffixDrafter":
        return cls(context.suffix_cache)

    def open(self, prompt: Sequence[int], sampling: Sampling, noise: Noise) -> State:
        state = State(len(prompt), reads_past=sampling.is_coupled)
        state.extend(prompt)
        return state

    def guess(self, state: State, max_tokens: int) -> list[int]:
        """What `propose` would propose: the controller asks, to know what it would be worth."""
        return self._draft(state, max_tokens)

    def evidence(self, state: State) -> int:
        """How many tokens of the text a proposal rests on, of own text or past outputs."""
        places = state.places if state.looks_back else []
        return max([state.own.num_known, *(place.length for place in places)])

    def propose(self, state: State, max_tokens: int) -> Draft:
        return Draft(self._draft(state, max_tokens))

    def _draft(self, state: State, max_tokens: int) -> list[int]:
        tokens, best = likely(state.own.walk(state.own.end), max_tokens)
        if state.looks_back:
            state.find(self.past, 0)
            for half, place in zip(self.past.halves, state.places, strict=True):
                if place.length > state.own.num_known:
                    others, score = likely(half.walk(place), max_tokens)
                    if score > best:
                        tokens, best = others, score
        return tokens

    def observe(self, state: State, verdict: Verdict) -> None:
        state.extend(verdict.tokens)
        if state.looks_back:
            state.find(self.past, len(verdict.tokens))

    def close(self, state: State) -> None:
        if not state.is_alone:
            self.past.add(state.tokens[state.num_prompt_tokens :])


def likely(steps: Iterable[Step], max_tokens: int) -> tuple[list[int], float]:
    """The beginning of a walk that is worth drafting, and how much of it may be accepted.

    Example: a token that followed 3 of 4 times behind 2 tokens, and then one that always did, once
    -> both, 0.67 + 0.67 · 0.75.
    """
    tokens, chance, score = list[int](), 1.0, 0.0
    for step in steps:
        if len(tokens) == max_tokens:
            break
        chance *= step.count / (step.total + 1 / step.length)
        if chance < LEAST_CHANCE:
            break
        tokens.append(step.token)
        score += chance
    return tokens, score
