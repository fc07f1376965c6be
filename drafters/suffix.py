"""SuffixDecoding: propose what mostly followed the longest known suffix, here or in past outputs.

    text                                … the quick brown
    longest suffix in this text               brown → bear                score 0.5
    and in what the server wrote before   quick brown → fox jumps over    score 0.8 + 0.7 + 0.6
    draft                                               fox jumps over

A token's chance is count / (total + 1 / length): how often it followed this context of `length`
tokens, among all tokens that did. The longer the context, the more a single case counts. The
product of these chances is the chance that the draft is accepted up to there. The draft goes on
while that is at least 0.05, so it is long where the text repeats itself; K is only the upper limit.
The sum of these products is the draft's score: the number of tokens to expect of it. If past
outputs have a longer suffix than the request's text, the draft with the better score is proposed.
A corpus (corpus.py) is looked in as past outputs are.

No model runs and nothing is drawn: q is one-hot, as in ngram. Past outputs change times, never a
text. (Under the rule of rejection the text depends on the drafts, so neither they nor a corpus are
used there. Earlier answers tell the numbers that would judge them again.) But times reveal them: a
caller can find out what others were answered.

Source: Oliaro et al., arXiv 2411.04975. It keeps a suffix tree, and chooses among all suffixes by
score; here n-grams are hashed and the longest suffix is taken, as the others gained nothing
(tools/LOG.md). A draft here is a chain, not a tree.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from runtime.models import required
from runtime.sampling import Noise
from runtime.values import Sampling, Verdict

from .base import Context, GuessingDrafter

LEAST_CHANCE = 0.05  # of being accepted, of a token that is worth drafting
SIZES = 8, 4, 2, 1  # of the n-grams that are looked up
DEPTH = SIZES[0]  # tokens of the longest match
MOST = 32  # places of a match that are counted
END = -1  # between two texts: no token, so no draft goes on beyond it


class Match(NamedTuple):
    """A string that occurs in a text: its length, and the places just after it, latest first."""

    length: int = 0
    ends: Sequence[int] = ()


class SuffixIndex:
    """A growing text, and for each n-gram in it all places just after it.

    Example: after extend([1, 2, 3, 1, 2, 4, 1, 2]) the text's longest suffix that was followed
    is Match(2, [5, 2]). Two tokens of it -> [4, 1], 0.4 + 0.4 · 0.75.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._followed_at: dict[tuple[int, ...], int] = {}  # the latest place of an n-gram
        self._before: dict[int, list[int]] = {size: [] for size in SIZES}  # the one before each; 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. An n-gram enters once its continuation is known: none finds itself."""
        text, latest = self.tokens, self._followed_at
        for token in tokens:
            end = len(text)
            for size, before in self._before.items():
                if size <= end:
                    ngram = tuple(text[end - size :])
                    before.append(latest.get(ngram, 0))
                    latest[ngram] = end
                else:
                    before.append(0)
            text.append(token)

    def match(self, text: Sequence[int]) -> Match:
        """The longest suffix of `text`, of at most DEPTH tokens, that was followed in this one."""
        tokens, longest = self.tokens, min(DEPTH, len(text))
        for length in (size for size in SIZES if size <= longest):
            ends, before = list[int](), self._before[length]
            end = self._followed_at.get(tuple(text[-length:]), 0)
            while end and len(ends) < MOST:
                ends.append(end)
                end = before[end]
            longer = ends
            while longer and length < longest:
                last = text[-length - 1]
                longer = [e for e in ends if e > length and tokens[e - length - 1] == last]
                length, ends = (length + 1, longer) if longer else (length, ends)
            if ends:
                return Match(length, ends)
        return Match()


def likely(text: Sequence[int], match: Match, max_tokens: int) -> tuple[list[int], float]:
    """What mostly follows a string in a text, as far as worth drafting, and the draft's score.

    Among equally frequent tokens the first end's is taken. At the end of the text the draft goes on
    after `match`, so it continues a periodic text.
    """
    length, ends = match
    draft, chance, score = list[int](), 1.0, 0.0
    while ends and len(draft) < max_tokens:
        next_ones = [text[end] for end in ends]
        token = max(next_ones, key=next_ones.count) if len(next_ones) > 1 else next_ones[0]
        chance *= next_ones.count(token) / (len(next_ones) + 1 / length)
        if token == END or chance < LEAST_CHANCE:
            break
        draft.append(token)
        score += chance
        ends = [end + 1 for end in ends if text[end] == token]
        if ends[0] == len(text):
            del ends[0]
        length, ends = (length + 1, ends) if ends else match
    return draft, score


class PastOutputs:
    """What the server wrote last: at most `capacity` tokens, the oldest being forgotten first.

    It has two halves. When the young one is full it becomes the old one, and what was old is
    forgotten at once: so from half the capacity on it always holds at least that half.
    """

    def __init__(self, capacity: int) -> None:
        self._half = capacity // 2
        self.halves = (SuffixIndex(), SuffixIndex())  # young and old

    def __len__(self) -> int:
        """The number of tokens, each output's end counting as one."""
        return sum(len(half.tokens) for half in self.halves)

    def add(self, output: Sequence[int]) -> None:
        """Remember an output, or the end of one that is longer than a half."""
        room = self._half - 1
        if room < 1 or not output:
            return
        latest, (young, old) = [*output[-room:], END], self.halves
        if len(young.tokens) + len(latest) > self._half:
            young, old = SuffixIndex(), young
        young.extend(latest)
        self.halves = young, old


@dataclass(eq=False)
class SuffixState:
    """A request's text."""

    num_prompt_tokens: int
    reads_past: bool  # if its rule of acceptance allows for that
    isolated: bool = False  # neither reads past outputs nor adds to them
    evidence: int = 0  # tokens of the text that the last guess rests on
    forced: Sequence[int] = ()  # tokens with which a guess begins; the pool sets it
    index: SuffixIndex = field(default_factory=SuffixIndex)  # of the text


class SuffixDrafter(GuessingDrafter):
    """Proposes from the text of its request and from past outputs of the server."""

    name: ClassVar[str] = "suffix"
    accepts_forced_prefix = True
    keeps_outputs = True

    @classmethod
    def build(cls, context: Context) -> "SuffixDrafter":
        if not context.suffix_corpus:
            return cls(context.suffix_cache)
        plug, target = required("drafters.corpus", "--suffix-corpus"), context.target
        corpus = plug.load(context.suffix_corpus, target.tokenizer, target.vocab_size)
        return cls(context.suffix_cache, corpus)

    def __init__(self, capacity: int = 0, corpus: Any = None) -> None:
        """`capacity`: tokens of past outputs that are stored; 0 for none."""
        self.past, self.corpus = PastOutputs(capacity), corpus

    def open(self, prompt: Sequence[int], sampling: Sampling, noise: Noise) -> SuffixState:
        state = SuffixState(len(prompt), sampling.is_coupled, sampling.isolated)
        state.index.extend(prompt)
        return state

    def guess(self, state: SuffixState, max_tokens: int) -> list[int]:
        """What followed the longest match, here or elsewhere, while it is likely."""
        indexes, text = [state.index], state.index.tokens
        if state.forced:
            text, max_tokens = [*text[-DEPTH:], *state.forced], max_tokens - len(state.forced)
        if state.reads_past and not state.isolated:
            indexes += self.past.halves
        if state.reads_past and self.corpus:
            indexes.append(self.corpus)
        matches = [index.match(text) for index in indexes]
        state.evidence = max(match.length for match in matches)
        drafts = [
            likely(index.tokens, match, max_tokens)
            for index, match in zip(indexes, matches, strict=True)
            if index is state.index or match.length > matches[0].length
        ]
        draft, _ = max(drafts, key=lambda draft: draft[1])  # of equal scores that from the text
        return [*state.forced, *draft]

    def evidence(self, state: SuffixState) -> int:
        """How many tokens the last guess rests on, of the text or of past outputs."""
        return state.evidence

    def observe(self, state: SuffixState, verdict: Verdict) -> None:
        state.index.extend(verdict.tokens)

    def close(self, state: SuffixState) -> None:
        if not state.isolated:
            self.past.add(state.index.tokens[state.num_prompt_tokens :])
