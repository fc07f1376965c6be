"""The values that are passed between the modules. This file imports no other one of the project.

Request ──→ engine ──→ drafter: Draft ──→ verify: Judgement ──→ drafter: Verdict
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a request wants its tokens chosen: transforms of the logits, applied in this order.

    At temperature 0 the likeliest token is taken (greedy), and what follows in the list is without
    effect. Off are: repetition_penalty 1, top_k 0 or less, top_p 1, min_p 0.
    """

    repetition_penalty: float = 1.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    verification: str = "coupled"  # or "rejection": how drafts of sampled text are judged

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-6  # softmax would be one-hot, but for overflow

    @property
    def is_coupled(self) -> bool:
        """Whether a draft is accepted for being the target's own choice; greedy always is."""
        return self.is_greedy or self.verification == "coupled"

    @property
    def rule(self) -> str:
        """The name under which drafts are counted: greedy, coupled or rejection."""
        return "greedy" if self.is_greedy else self.verification

    @property
    def needs_q(self) -> bool:
        """Whether a drafter that draws has to tell the distribution that it drew from."""
        return not self.is_coupled

    @property
    def transforms(self) -> tuple[float, int, float, float]:
        """What makes probabilities of penalised logits."""
        return self.temperature, self.top_k, self.top_p, self.min_p


class TracedSampling(Sampling):
    """The same for a traced request's drafters: a trace shows q under the coupled rule, too."""

    @property
    def needs_q(self) -> bool:
        return not self.is_greedy


@dataclass(frozen=True)
class Request:
    """One generation. Without a drafter, or with 0 speculative tokens, it is plain decoding."""

    prompt: list[int]
    max_tokens: int = 128
    drafter: str | None = None  # the name of a loaded one
    num_speculative_tokens: int = 5
    stop: tuple[str, ...] = ()
    sampling: Sampling = Sampling()
    seed: int = 0
    logprobs: int | None = None  # of each token, and of this many likeliest ones; None = none
    trace: bool = False  # events say what the target thought, too
    fixed_k: bool = False  # each draft has as many tokens as allowed, whether that pays or not
    is_alone: bool = False  # drafted without what others were answered, as measurements are

    @property
    def drafting(self) -> Sampling:
        """What its drafters are told of the sampling."""
        return TracedSampling(**vars(self.sampling)) if self.trace else self.sampling


@dataclass(frozen=True, slots=True)
class Draft:
    """Up to K proposed tokens: a chain, or a tree where `parents` are given.

    parents[i] is the index of the token that token i follows, below i, or -1: the pending token.
    Where trees cannot be verified, the longest chain of one is.

    `probs` [n, V] float32 is the distribution q that each token was drawn from. None says that
    nothing was drawn (q is one-hot). Rejection needs q; otherwise q is only displayed. Under
    rejection two mistakes change the distribution of the output: to report a q that the token was
    not drawn from, and to drop a token because of what was drawn.

    `confidence` [n] says how likely each token was by the drafter's own softmax, where it tells.
    """

    tokens: list[int] = field(default_factory=list)
    probs: Tensor | None = None
    parents: list[int] | None = None
    confidence: list[float] = field(default_factory=list)

    def q(self, i: int, like: Tensor) -> Tensor:
        """The distribution [V] that token i was drawn from; one-hot where nothing was drawn."""
        if self.probs is not None:
            return self.probs[i].to(like)
        q = torch.zeros_like(like)
        q[self.tokens[i]] = 1.0
        return q


class Judgement(NamedTuple):
    """What became of one token; under the rule of rejection with the numbers that decided it."""

    id: int
    kind: str  # accepted | rejected | recovered | bonus
    p: float | None = None  # the target's probability of it here
    q: float | None = None  # the drafter's; None for a bonus, where nothing was drafted
    u: float | None = None  # from [0, 1): compared with p / q, or what drew the token


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's judgement of one draft.

    Example: [a, b, c] drafted, b rejected and B recovered -> Verdict(drafted=3, accepted=1,
    tokens=[a, B]). `hidden` [accepted + 1, D] (after prefill: [prompt, D]) holds the target's
    hidden states at the newly cached positions: hidden[-1] produced tokens[-1]. With
    several `hidden_layers` their states stand side by side. None unless `needs_hidden`. A drafter
    that was passed over gets the same tokens with drafted=0; `accepted` still counts the other's.
    """

    drafted: int
    accepted: int
    tokens: list[int]
    hidden: Tensor | None = None

    def __post_init__(self) -> None:
        assert len(self.tokens) == self.accepted + 1, (
            "a verdict is the accepted drafts and one target token"
        )


Layers = tuple[int, ...]  # -1 is the final norm's output, i that of block i (but not the last)


@dataclass(frozen=True, slots=True)
class Output:
    """What a forward gives, text by text."""

    logits: list[Tensor]  # [num_logits, V] float32
    hidden: dict[int, list[Tensor]]  # [tokens fed, D] of each layer asked for


class KeyCache(Protocol):
    """The core's SlotCache, as those know it who draft and compute: rows that have a length each.

    A forward places its tokens, writes their keys and values, and advances.
    """

    lengths: list[int]  # by row
    rows: list[int]  # the open ones, by slot
    layers: list[Any]  # with keys and values [slots, heads, capacity, width]
    recurrent: list[Any]  # layers that keep a state in the place of keys
    max_length: int

    def open_row(self) -> int: ...
    def close_row(self, row: int) -> None: ...
    def slot(self, row: int) -> int: ...
    def place(self, rows: list[int], counts: list[int]) -> Any: ...
    def advance(self, place: Any) -> None: ...
    def truncate(self, row: int, length: int) -> None: ...


class Model(Protocol):
    """The core's CachedModel: a model of transformers with a KV cache, and its forward."""

    name: str
    model: Any  # of transformers
    tokenizer: Any
    vocab_size: int
    max_length: int
    num_weights: int
    cache: KeyCache
    tolerance: float  # of its logits, for roundings
    fast: Any  # its forward in C, or None
    forward: Callable[..., Output]

    def new_cache(self, num_layers: int, num_rows: int, spare: int = 0) -> KeyCache: ...


@dataclass
class Cycle:
    """What one cycle did to one sequence.

    A cut (an end of text, a stop string, max_tokens) shortens the draft as well: what comes after
    it does not count. proposals, judged, emitted, held, logits and scores are as they were before;
    tokens, num_drafted, num_accepted and rejected are what stays.
    """

    number: int  # 0 is the prefill
    tree: Draft  # as it was verified
    places: Sequence[int]  # in it, of the tokens of the chain that the text took
    draft: Draft  # that chain; where nothing branches, the same
    judged: list[Judgement]
    num_kept: int  # of the emitted tokens
    held: int  # tokens in the KV cache after the verify
    cached: int  # and after the truncation
    recurrent: Sequence[Any]  # the target's layers that keep a state in the place of keys
    logits: Tensor  # [n + 1, V] of the target
    scores: Tensor  # [n + 1, V], penalised
    times: list[float] = field(default_factory=list)  # s: began, drafted, passed, done

    @property
    def proposals(self) -> list[int]:
        return self.draft.tokens

    @cached_property
    def emitted(self) -> list[Judgement]:
        """The accepted drafts and the target's own token, also where the text ends before it."""
        return [judgement for judgement in self.judged if judgement.kind != "rejected"]

    @property
    def tokens(self) -> list[Judgement]:
        """The emitted tokens that stay."""
        return self.emitted[: self.num_kept]

    @property
    def kinds(self) -> list[str]:
        """Of the tokens that stay."""
        return [judgement.kind for judgement in self.tokens]

    @property
    def spans_ms(self) -> list[float]:
        """How long it took to draft, to verify, and what else it did; in milliseconds."""
        return [(end - begin) * 1e3 for begin, end in pairwise(self.times)]

    @property
    def num_stepped(self) -> int:
        """Accepted tokens that recurrent layers replay from the saved state, after a rejection."""
        begin = self.held - len(self.tree.tokens) - 1
        return self.cached - begin if self.number and self.cached < self.held else 0

    @property
    def is_whole(self) -> bool:
        """Whether nothing was cut."""
        return self.num_kept == len(self.emitted)

    @property
    def num_drafted(self) -> int:
        return len(self.proposals) if self.is_whole else self.num_kept

    @property
    def num_beside(self) -> int:
        """Drafted tokens of other branches than the one that the text took."""
        return len(self.tree.tokens) - len(self.proposals) if self.is_whole else 0

    @property
    def num_accepted(self) -> int:
        return min(len(self.emitted) - 1, self.num_kept)

    @property
    def rejected(self) -> Judgement | None:
        judged = [j for j in self.judged if j.kind == "rejected"]
        return judged[0] if judged and self.is_whole else None

    def verdict(self) -> Verdict:
        """For drafters; without hidden states."""
        tokens = [judgement.id for judgement in self.tokens]
        return Verdict(len(self.proposals), len(tokens) - 1, tokens)


def in_short(error: Exception) -> str:
    """What an error says, on one line and not beyond measure."""
    return " ".join(str(error).split())[:300] or type(error).__name__


class RequestError(Exception):
    """A caller's mistake, or a state in which nothing can be served; becomes the error body."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, Any]:
        # HTTP has 501 for odd encodings, 505 for odd versions.
        is_callers = self.status < 500 or self.status in (501, 505)
        kind = "invalid_request_error" if is_callers else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


def engine_failure(error: Exception) -> RequestError:
    """What a client is told of a fault that is not its own, once its traceback has been logged."""
    # The frames hold the request, which holds the error: a cycle, with all tensors of a forward.
    error.__traceback__ = None
    message = f"the engine failed: {type(error).__name__}: {in_short(error)}"
    return RequestError(message, status=500, code="engine_failed")
