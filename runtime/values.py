"""The values that are passed between the modules. This file imports no other file of the project.

Request ──→ engine ──→ drafter: Draft ──→ verify: Judgement ──→ drafter: Verdict
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # runtime/models/ahead.py works while torch is imported
    from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a request wants its tokens chosen: transforms of the logits (see runtime/sampling.py).

    At temperature 0 the likeliest token is taken (greedy), and typical_p, top_k, top_p, min_p and
    verification have no effect. These values switch a transform off: repetition_penalty 1, top_k 0
    or less, top_p 1, typical_p 1, min_p 0, presence_penalty 0, frequency_penalty 0, min_tokens 0,
    and what is empty.
    """

    repetition_penalty: float = 1.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    verification: str = "coupled"  # or "rejection": how drafts of sampled text are judged
    presence_penalty: float = 0.0  # taken from the logit of each token that was generated before
    frequency_penalty: float = 0.0  # and as many times as it was generated
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, and what is added to their logits
    prompt_length: int = 0  # of the text's first tokens, which were not generated
    allowed_token_ids: tuple[int, ...] = ()  # no other tokens are generated
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids that are not generated in this order
    min_tokens: int = 0  # so many tokens are generated before one of `end_ids` may be
    end_ids: tuple[int, ...] = ()
    typical_p: float = 1.0  # keep the most typical tokens until their probability reaches this
    # For drafters:
    is_traced: bool = False  # a trace also shows a coupled draft's q
    isolated: bool = False  # of a measurement: no text that was read or written before helps

    def for_prompt(self, prompt: list[int]) -> "Sampling":
        """This sampling for a text that begins with the prompt."""
        return replace(self, prompt_length=len(prompt))

    @property
    def penalties(self) -> dict[str, Any]:
        """What changes logits before a token is drawn, by name, as far as it is switched on."""
        return {n: value for n in _PENALTIES if (value := getattr(self, n)) != getattr(Sampling, n)}

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-6  # softmax would be one-hot, but for overflow

    @property
    def is_coupled(self) -> bool:
        """Whether a drafted token is accepted if the target chooses it too; always if greedy."""
        return self.is_greedy or self.verification == "coupled"

    @property
    def rule(self) -> str:
        """The name under which drafts are counted: greedy, coupled or rejection."""
        return "greedy" if self.is_greedy else self.verification

    @property
    def needs_q(self) -> bool:
        """Whether a drafter that draws tokens must give the distribution q that it drew from."""
        return not self.is_coupled or (self.is_traced and not self.is_greedy)

    @property
    def transforms(self) -> tuple[float, int, float, float]:
        """What turns penalised logits into probabilities: temperature, top_k, top_p, min_p."""
        return self.temperature, self.top_k, self.top_p, self.min_p


_PENALTIES = (
    "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "allowed_token_ids", "bad_words", "min_tokens", "typical_p",
)  # fmt: skip
GREEDY = Sampling()


def check_prompt(prompt: list[int], context: int, vocab_size: int, max_tokens: int = 1) -> None:
    """Raises ValueError if a prompt is empty, leaves no room in the context or has unknown ids.

    It needs no room if no token is to follow.
    """
    length, largest = len(prompt), vocab_size - 1
    if not prompt:
        raise ValueError("the prompt is empty")
    if length + min(max_tokens, 1) > context:
        raise ValueError(f"the prompt's {length} tokens leave no room in a context of {context}")
    if not all(0 <= token <= largest for token in prompt):
        raise ValueError(f"the prompt has a token id outside 0 to {largest}")


@dataclass(frozen=True)
class Request:
    """One generation. Without a drafter, or with 0 speculative tokens, it is plain decoding."""

    prompt: list[int]
    max_tokens: int = 128  # 0: the prompt is read, and nothing is generated
    drafter: str | None = None  # the name of a loaded one
    num_speculative_tokens: int = 5
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()  # each ends the text as the model's end does
    include_stop: bool = False  # whether the text has the stop string or token that ended it
    sampling: Sampling = GREEDY
    seed: int = 0
    logprobs: int | None = None  # of each token, and of this many likeliest ones; None = none
    trace: bool = False  # whether events also show the target's choices and their probabilities
    fixed_k: bool = False  # each draft has as many tokens as allowed, whether that pays or not
    isolated: bool = False  # past outputs and cached prompts are not used, as in measurements
    grammar: Any = None  # a Grammar of runtime/grammars/, which the text obeys
    prediction: tuple[int, ...] = ()  # the expected text; by rejection the noise depends on it
    returns: frozenset[str] = frozenset()  # what else events and answers have: see server/fields.py
    # Log-probabilities of the prompt's tokens, and of this many likeliest ones; None = none.
    prompt_logprobs: int | None = None
    n: int = 1  # texts that are wanted of the prompt; a request to the engine is for one of them
    num_prompts: int = 1  # of the list that this one is of

    @property
    def texts(self) -> int:
        """How many texts are wanted: the choices for each prompt of the list."""
        return self.n * self.num_prompts

    @property
    def ends(self) -> tuple[tuple[str, ...], frozenset[int], bool, int]:
        """What ends its text, as a TextStream takes it."""
        return self.stop, self.stop_token_ids, self.include_stop, self.sampling.min_tokens

    @property
    def choices(self) -> list["Request"]:
        """A request for each of the n texts; their seeds are seed, seed + 1 and so on.

        The prompt is scored once, for the first.
        """
        first, *others = (replace(self, seed=self.seed + i) for i in range(self.n))
        return [first, *(replace(other, prompt_logprobs=None) for other in others)]

    def admitted(self, target: "Model", drafters: Collection[str]) -> tuple["Request", list[str]]:
        """The request as it can be served, and warnings.

        Fewer tokens where the context has no room for more; no drafter where none may be drafted.
        Raises ValueError for a bad prompt, or a drafter that is none of these.
        """
        context, vocab_size = target.max_length, target.vocab_size
        if self.drafter not in (None, *drafters):
            raise ValueError(f"unknown drafter {self.drafter!r}")
        check_prompt(self.prompt, context, vocab_size, self.max_tokens)
        room, warnings = context - len(self.prompt), list[str]()
        if room < self.max_tokens:
            what = f"max_tokens was lowered from {self.max_tokens} to {room}"
            warnings = [f"{what}: the context holds {context} tokens"]
        drafter = self.drafter if self.num_speculative_tokens else None
        sampling, max_tokens = self.sampling.for_prompt(self.prompt), min(self.max_tokens, room)
        return replace(self, max_tokens=max_tokens, drafter=drafter, sampling=sampling), warnings

    @property
    def drafting(self) -> Sampling:
        """The sampling as its drafters see it."""
        return replace(self.sampling, is_traced=self.trace, isolated=self.isolated)


@dataclass(frozen=True, slots=True)
class Draft:
    """Up to K proposed tokens: a chain, or a tree where `parents` are given.

    parents[i] < i is the index of the token that token i follows; -1 is the pending token. Where a
    tree cannot be verified, its longest chain is verified instead.

    `probs` [n, V] float32 is the distribution q that each token was drawn from. None says that
    nothing was drawn (q is one-hot). Rejection needs q; otherwise q is only displayed. Under
    rejection two mistakes change the distribution of the output: to report a q that the token was
    not drawn from, and to drop a token because of what was drawn.

    `confidence` [n] is each token's probability by the drafter's own softmax; empty if not known.
    `num_forwards` of a model were run for it; 0 if the drafter does not say.
    """

    tokens: list[int] = field(default_factory=list)
    probs: "Tensor | None" = None
    parents: list[int] | None = None
    confidence: list[float] = field(default_factory=list)
    num_forwards: int = 0

    def children(self, node: int) -> list[int]:
        """Indexes of the tokens that follow token `node`; -1 is the pending token."""
        if self.parents is None:
            return [node + 1] if node + 1 < len(self.tokens) else []
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def depth(self, node: int) -> int:
        """The number of drafted tokens on the path to token `node`; 0 for the pending token, -1."""
        if self.parents is None:
            return node + 1
        return 0 if node < 0 else 1 + self.depth(self.parents[node])

    def paths(self) -> list[list[int]]:
        """The path to each token: indexes from a child of the pending token to its own."""
        paths = list[list[int]]()
        for i in range(len(self.tokens)):
            parent = i - 1 if self.parents is None else self.parents[i]
            paths.append([*(paths[parent] if parent >= 0 else []), i])
        return paths

    def continued(self, path: list[int]) -> Sequence[int]:
        """This path, and first children behind it to the end; of a chain, all of it."""
        if self.parents is None:
            return range(len(self.tokens))
        path = list(path)
        while children := self.children(path[-1] if path else -1):
            path.append(children[0])
        return path

    def chain(self, path: Sequence[int]) -> "Draft":
        """The tokens of a path, as a chain."""
        probs = self.probs if self.probs is None else self.probs[list(path)]
        confidence = [self.confidence[i] for i in path] if self.confidence else []
        return Draft([self.tokens[i] for i in path], probs, confidence=confidence)

    def longest(self) -> "Draft":
        """The tokens of its longest branch, the first one of several; of a chain, the draft."""
        return self if self.parents is None else self.chain(max(self.paths(), key=len, default=[]))

    def q(self, i: int, like: "Tensor") -> "Tensor":
        """The distribution [V] that token i was drawn from; one-hot where nothing was drawn."""
        if self.probs is not None:
            return self.probs[i].to(like)
        q = like.new_zeros(like.shape)
        q[self.tokens[i]] = 1.0
        return q


class Judgement(NamedTuple):
    """What became of one token. Under rejection it has the numbers that decided."""

    id: int
    kind: str  # accepted | rejected | recovered | bonus
    p: float | None = None  # the target's probability of it here
    q: float | None = None  # the drafter's probability; None for a bonus: nothing was drafted here
    u: float | None = None  # in [0, 1): was compared with p / q, or the token was drawn by it

    def as_dict(self) -> dict[str, Any]:
        """It in an event: p, q and u only where they decided."""
        return {"id": self.id, "kind": self.kind} if self.u is None else self._asdict()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's judgement of one draft.

    Example: [a, b, c] drafted, b rejected and B recovered -> Verdict(drafted=3, accepted=1,
    tokens=[a, B]). `hidden` (mostly [accepted + 1, D], after prefill [prompt, D]) holds the
    target's hidden states at the newly cached positions: hidden[-1] produced tokens[-1]. With
    several `hidden_layers` their states stand side by side. None unless `needs_hidden`. A drafter
    that was not asked gets the same tokens with drafted=0 and accepted=len(tokens) - 1.
    """

    drafted: int
    accepted: int
    tokens: list[int]
    hidden: "Tensor | None" = None

    def __post_init__(self) -> None:
        assert len(self.tokens) == self.accepted + 1, (
            "a verdict is the accepted drafts and one target token"
        )


Json = dict[str, Any]  # an object of JSON, or what is to become one


@dataclass(frozen=True, slots=True)
class Output:
    """What a pass gives, text by text."""

    logits: "list[Tensor]"  # [num_logits, V] float32
    hidden: "dict[int, list[Tensor]]"  # by layer asked for, [tokens fed, D] of each text


# Names for the core's classes in annotations. No file can import the core: it is the main program.
KeyCache = Any  # SlotCache: a KV cache with a row for each text
Model = Any  # CachedModel: a model with a KV cache
TextSequence = Any  # Sequence: a request under way
Engine = Any


@dataclass
class Cycle:
    """What one cycle did to one sequence.

    An accepted token may end the text, and what was drafted after it does not count. proposals,
    judged, emitted, held, logits and scores are as before this cut; tokens, num_drafted,
    num_accepted and rejected are what stays after it.
    """

    number: int  # 0 is the prefill
    draft: Draft
    path: Sequence[int]  # the text's in it: accepted tokens, and first children behind them
    judged: list[Judgement]
    num_kept: int  # of the emitted tokens
    held: int  # tokens in the KV cache after the verify
    cached: int  # and after the truncation
    recurrent: Sequence[Any]  # the target's layers that keep a state instead of keys and values
    logits: "Tensor"  # [n + 1, V] of the target, after the pending and each drafted token
    scores: "Tensor"  # [n + 1, V], penalised
    times: list[float] = field(default_factory=list)  # seconds: began, drafted, verified, done

    def __post_init__(self) -> None:
        # Once: these are asked for several times in every cycle. What is emitted is accepted, or
        # the target's own; what stays of it is in `tokens`.
        self.emitted = [judgement for judgement in self.judged if judgement.kind != "rejected"]
        self.tokens = self.emitted[: self.num_kept]
        # Else the text was cut, or nothing may follow.
        self.is_whole = self.num_kept == len(self.emitted) and self.tokens[-1].kind != "accepted"
        self.num_drafted = len(self.path) if self.is_whole else self.num_kept
        beside = len(self.draft.tokens) - len(self.path)  # in other branches than the text's
        self.num_beside = beside if self.is_whole else 0
        self.num_accepted = self.kinds.count("accepted")

    @property
    def proposals(self) -> list[int]:
        """The drafted tokens on the text's path."""
        return [self.draft.tokens[i] for i in self.path]

    def along(self, rows: "Tensor") -> "Tensor":
        """The text's part of rows [m + n, …]: the first m, and those of its path in the draft."""
        if self.draft.parents is None:
            return rows
        first = len(rows) - len(self.draft.tokens)
        return rows[[*range(first), *(first + i for i in self.path)]]

    @property
    def kinds(self) -> list[str]:
        """The kinds of the tokens that stay."""
        return [judgement.kind for judgement in self.tokens]

    @property
    def spans_ms(self) -> list[float]:
        """Milliseconds of the draft, of the pass, and of the rest."""
        return [(end - begin) * 1e3 for begin, end in pairwise(self.times)]

    @property
    def num_stepped(self) -> int:
        """Tokens, the pending and accepted ones, that recurrent layers replay after a rejection."""
        begin = self.held - len(self.draft.tokens) - 1
        return self.cached - begin if self.number and self.cached < self.held else 0

    @property
    def rejected(self) -> Judgement | None:
        judged = [j for j in self.judged if j.kind == "rejected"]
        return judged[0] if judged and self.is_whole else None

    def verdict(self) -> Verdict:
        """The verdict for drafters, without hidden states."""
        tokens = [judgement.id for judgement in self.tokens]
        return Verdict(len(self.path), len(tokens) - 1, tokens)


PLAIN = "none"  # a request's name for no drafter
MAX_SPECULATIVE_TOKENS = 16  # drafted tokens of a request in a cycle
LONGEST_LINE = 1000  # characters of a line of the log, or of a warning


def one_line(text: Any, longest: int = 300) -> str:
    """What strangers' bytes may be in, for a terminal: escaped, of at most `longest` characters."""
    text, most = str(text), 10 * longest
    if len(text) > 2 * most:  # an error's text may be of megabytes
        text = f"{text[:most]} … {text[-most:]}"
    words = " ".join(text.split())
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)
    # A hint is last.
    return line if len(line) <= longest else f"{line[: longest - 100]}…{line[-99:]}"


def in_short(error: BaseException, has_kind: bool = False) -> str:
    """An error's message on one line, of at most 300 characters, after its class if asked.

    It never raises, whatever a stranger's error does where it is asked for its words.
    """
    kind = "an error"
    try:
        kind = one_line(type(error).__name__)
        text = one_line(error)
        has_kind |= isinstance(error, (KeyError, SystemExit))  # whose text is a key, or a status
    except BaseException:
        return f"{kind}, whose text cannot be read"
    return f"{kind}: {text}" if text and has_kind else text or kind


TOO_SLOW = "machine_too_slow"  # the code of an error that comes again here, whenever it is tried


class RequestError(Exception):
    """A caller's mistake, or a reason why the server cannot serve; becomes the error body."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message := one_line(message))
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> Json:
        # 501 (encoding not known) and 505 (HTTP version not known) are the caller's mistakes, too.
        is_callers = self.status < 500 or self.status in (501, 505)
        kind = "invalid_request_error" if is_callers else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def engine_failure(error: Exception) -> RequestError:
    """The error for a client whose request the engine failed. Log the traceback before."""
    # The frames hold the request, which holds the error. This cycle would keep a pass's tensors.
    error.__traceback__ = None
    message = f"the engine failed: {in_short(error, has_kind=True)}"
    return RequestError(message, status=500, code="engine_failed")
