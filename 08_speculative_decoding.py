"""Speculative decoding in one file: a cheap drafter proposes, the target verifies, nothing is lost.

A language model reads all its weights to produce one token. A pass over four tokens reads the
weights once, too, and gives logits after each of them. So guess tokens, then check them. A cycle
is draft → verify → accept → truncate:

    cached  │ pending  draft
    The cat │ sat      on ✓   a ✗    mat      one target pass over [pending, d1, d2, d3]
            │  ↓       ↓      ↓      ↓
            │  on      the    …      …        the target's choice after each of them
            │
    The cat   sat      on │ the               d1 accepted, d2 rejected, d3 not judged;
                          │  └ pending        the KV cache is truncated to "The cat sat on", in O(1)

The pending token is chosen, but not cached yet. This pass gave two tokens: d1, and "the", which is
*recovered*, as it stands in the place of a rejected token. If all of a draft is accepted, the
choice after it is a *bonus*. The text is the one that the target alone would have written, also
where tokens are sampled: `verify` and `choices` say why. (This is the coupled rule. `Engine` knows
rejection sampling, too, the classical rule: it keeps the distribution, but not the text.)

*When does speculation lose?* A longer pass costs little more, as long as reading weights takes most
of the time. Accepted tokens have to pay for that and for drafting. They cannot where drafts are
mostly wrong, where the drafter is slow, and in large batches, where computing takes the time.

The method comes first: `verify`, `choices`, `speculate` for one request, and `plain_decode`.
What they use follows: KV cache and truncation · cached model · rejection · engine · loading · Flask
app · command line. runtime/ computes, drafters/ guess (drafters/auto/ chooses who drafts, and how
much), and server/ puts engines together and speaks HTTP.

Sources: Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318; Daliri et al., 2408.07978.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import runtime.models.startup  # isort: skip  # noqa: F401  (so that torch fails in one line)
import torch
from flask import Flask, Response
from torch import Tensor

import drafters
from runtime import cache, kernels, statistics, values
from runtime.sampling import Noise, choose, draw, penalise, sample, truncated_softmax
from runtime.sequence import Sequence
from runtime.values import Draft, Judgement, Sampling

sys.modules.setdefault("08_speculative_decoding", sys.modules[__name__])  # once, if it is a script


# -------------------------------------------------------------------------------- the method
def verify(
    draft: Draft, choice_after: Callable[[int], int | None]
) -> tuple[list[Judgement], list[int]]:
    """Walk along the draft for as long as it holds the token that the target chooses itself.

    choice_after(i) is the target's choice after drafted token i, or None where no token may follow;
    choice_after(-1), after the pending token. Token i of a chain has one child, token i + 1. In a
    tree, which holds several guesses, it may have more. Returns the judgements, and the accepted
    tokens' indexes. Where the walk stops, the first child is judged as rejected.

    Only the target's choices are emitted. A choice is made only after all tokens before it matched,
    so it is made as in plain decoding: after the same text, by the same noise and the same logits.
    (They are the same if a pass of one row and of many gives the same bits: docs/exactness.md.)

    Example: choices 4, 9, … and Draft([4, 8, 1]) -> 4 accepted, 8 rejected, 9 recovered; [0].
    """
    judged, accepted, at = list[Judgement](), list[int](), -1
    while True:
        chosen, children = choice_after(at), draft.children(at)
        if chosen is None:  # no token may follow: the last accepted one is pending
            return judged, accepted
        matching = [i for i in children if draft.tokens[i] == chosen]
        if not matching:
            break
        at = matching[0]
        accepted.append(at)
        judged.append(Judgement(chosen, "accepted"))
    if children:
        judged.append(Judgement(draft.tokens[children[0]], "rejected"))
    return [*judged, Judgement(chosen, "recovered" if children else "bonus")], accepted


def choices(
    draft: Draft, scores: Tensor, sampling: Sampling, noise: Noise, num_tokens: int
) -> Callable[[int], int | None]:
    """What `verify` asks for: the target's choice after drafted token i, by row i + 1 of scores.

    scores [n + 1, V] are `penalise`d logits. A greedy choice is the token of the largest score. A
    sampled choice is the first of a race, in which token t takes the time e / w:

        w = exp(score / temperature)   or 0, if top_k, top_p or min_p cuts the token off
        e = −log(1 − v)                v in (0, 1) is a hash of the seed, the position and t

    A token wins with probability w / Σ w. Seed and position fix the noise, so a draft changes no
    choice. *So a drafter can guess even a token that is sampled*: the drafter runs the same
    race with its own w and the same e. The closer its w are to the target's, the more often the
    same token wins. The choice will stand at position num_tokens + (tokens on the path to i).
    """

    def choice_after(i: int) -> int | None:
        position = num_tokens + draft.depth(i)
        return choose(scores, sampling, noise, position, row=i + 1, is_behind_draft=i >= 0)

    return choice_after


def speculate(
    target: "CachedModel", drafter: drafters.Drafter, prompt: list[int], max_tokens: int,
    eos_ids: set[int], sampling: Sampling = values.GREEDY, seed: int = 0, num_drafted: int = 5,
) -> list[int]:  # fmt: skip
    """Decode with a drafter: the text of `plain_decode`, mostly in fewer passes.

    This is the whole method for one request, by the rule of `verify`. `Engine` serves many at once.
    It knows rejection, and trees of drafts. (Of a tree this function verifies the longest branch.)
    """
    sampling, noise = sampling.for_prompt(prompt), Noise(seed)  # some penalties ignore the prompt
    tokens, end = list(prompt), min(len(prompt) + max_tokens, target.max_length)
    with ExitStack() as opened:
        row = target.cache.open_row(opened)
        state = drafter.open(list(prompt), sampling, noise)
        opened.callback(drafter.close, state)
        # For self_int8, which drafts in the target's own row, and truncates it back.
        drafter.attach(state, drafters.DraftedText(values.Request(prompt), noise, row))
        while len(tokens) < end:
            # 1. Draft: guess what comes next. The first pass reads the prompt alone: drafters may
            # need the target's hidden states of it.
            most = min(num_drafted, end - len(tokens) - 1)
            is_first = len(tokens) == len(prompt)
            draft = Draft() if is_first else drafter.propose(state, most).longest()
            # 2. Verify: one pass reads what is not cached yet (mostly the pending token), and the
            # draft. It gives logits after the pending and after each drafted token.
            fed = tokens[target.cache.lengths[row] :] + draft.tokens
            output = target.forward([row], [fed], [len(draft.tokens) + 1], drafter.wanted_layers)
            # 3. Accept: the draft stays for as long as the target chooses the same tokens.
            scores = penalise(output.logits[0], sampling, tokens, draft)
            judged, _ = verify(draft, choices(draft, scores, sampling, noise, len(tokens)))
            emitted = [judgement.id for judgement in judged if judgement.kind != "rejected"]
            # 4. Truncate: the cache keeps all that was emitted except the last, pending token.
            num_cached = len(emitted) - 1
            target.cache.truncate(row, len(tokens) + num_cached)
            for token in emitted:
                tokens.append(token)
                if token in eos_ids or len(tokens) == end:
                    return tokens[len(prompt) :]
            # The drafter learns what became of its draft, and the states of what stays cached.
            num_states = len(fed) - len(draft.tokens) + num_cached
            hidden = drafter.wanted_states(output, num_states)
            drafter.observe(state, values.Verdict(len(draft.tokens), num_cached, emitted, hidden))
        return tokens[len(prompt) :]


def plain_decode(
    target: "CachedModel", prompt: list[int], max_tokens: int, eos_ids: set[int],
    sampling: Sampling = values.GREEDY, seed: int = 0,
) -> list[int]:  # fmt: skip
    """Decode with the target alone, one token a pass: the text to reproduce, and the baseline."""
    sampling, noise = sampling.for_prompt(prompt), Noise(seed)
    fed, output = prompt, list[int]()
    with ExitStack() as opened:
        row = target.cache.open_row(opened)
        for _ in range(min(max_tokens, target.max_length - len(prompt))):
            logits = target.forward([row], [fed], [1]).logits[0]
            output.append(sample(logits[0], prompt + output, sampling, noise)[0])
            if output[-1] in eos_ids:
                break
            fed = output[-1:]
        return output


# ------------------------------------------------------------------- KV cache and truncation
class SlotCache(cache.Slots):
    """A KV cache in which each row has its own length; truncating a row lowers its length.

    A pass writes its tokens' keys and values behind those of its rows, and the rows grow by them.
    runtime/cache/slots.py does that, opens rows for requests, and closes them.
    """

    def truncate(self, row: int, length: int) -> None:
        """Forget row's tokens from `length` on. O(1): old keys are masked, then overwritten."""
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"cannot truncate {self.lengths[row]} cached tokens to {length}")
        self.lengths[row] = length

    def keep(self, row: int, num_drafted: int, accepted: list[int] | range) -> None:
        """Keep, of the last `num_drafted` tokens, those at the rising indexes `accepted`.

        In a chain these are 0, 1, … and nothing moves. A branch of a tree is moved together.
        Example: 9 cached after [pending, d1, d2, d3], d1 accepted: keep(row, 3, [0]) leaves 7.
        """
        begin, count = self.lengths[row] - num_drafted, len(accepted)
        if list(accepted) != list(range(count)):
            self.move(row, [begin + i for i in accepted], begin)
        self.truncate(row, begin + count)


# ------------------------------------------------------------------------------ cached model
class CachedModel:
    """A causal language model with a SlotCache: the target, or a draft model."""

    def __init__(self, loaded: Any, name: str, num_rows: int) -> None:
        """`loaded` is a Loaded of runtime/models/loading.py; the KV cache gets `num_rows` rows."""
        self.model, self.tokenizer, self.name = loaded.model, loaded.tokenizer, name
        self.max_length, self.eos_ids = loaded.length, loaded.eos_ids
        self.vocab_size: int = self.model.config.get_text_config().vocab_size
        self.num_weights = kernels.num_weights(self.model)
        self.windows = loaded.structure.windows  # how far back each kind of layer sees; None: all
        self.has_experts = loaded.structure.has_experts
        self.fingerprint, self.pack_copy = loaded.fingerprint, loaded.pack_copy  # of GGUF files
        self.cache = self.new_cache(loaded.structure.num_cache_layers, num_rows)
        self.compiled, self.quantize = None, None  # the forward in C, and what it rounds to, if any
        self.report: Any = None  # whether a token's bits depend on how it is computed
        # Of runtime/models/reference.py: a hash of the weights, and what they are compared with.
        self.contents, self.reference, self.is_known = "", None, False

    def new_cache(self, num_layers: int, num_rows: int, spare: int = 0) -> SlotCache:
        """An empty cache whose rows hold `spare` tokens more than this model's context."""
        return SlotCache(num_layers, num_rows, self.max_length + spare, self.model.device)

    def forward(
        self, rows: list[int], tokens: list[list[int]], num_logits: list[int],
        layers: tuple[int, ...] = (), parents: list[list[int] | None] | None = None,
    ) -> values.Output:  # fmt: skip
        """Feed tokens[b] (at least one) after what cache row rows[b] holds.

        Prefill feeds many tokens, plain decoding one, verifying n + 1. Returns logits of each
        text's last num_logits[b] >= 1 tokens, and hidden states of all its tokens at `layers`.
        Where text b ends in a draft that branches, parents[b] are that Draft's (compiled only).
        """
        if self.compiled:
            return self.compiled(rows, tokens, num_logits, layers, parents)
        assert not any(parents or []), "transformers' modules verify chains only"
        place = self.cache.place(rows, [len(fed) for fed in tokens])
        ids = place.arrange([torch.tensor(fed, device=self.cache.device) for fed in tokens])
        logits, states = cache.run_modules(self, ids, place, max(num_logits), layers)
        self.cache.advance(place)
        last = [text[-n:].float() for text, n in zip(logits, num_logits, strict=True)]
        return values.Output(last, {i: place.part(hidden) for i, hidden in states.items()})


# -------------------------------------------------------------------------------- rejection
@torch.inference_mode()
def verify_by_rejection(draft: Draft, p: Tensor, noise: Noise, position: int) -> list[Judgement]:
    """Rejection sampling, the classical rule: the output is distributed exactly as p.

    p [n + 1, V] is the target's distribution after pending, d1, …, dn; 0 where no token may follow.
    A drafted token is accepted if u < p / q. The first rejected one is replaced by one drawn from
    norm(max(0, p - q)). Without a rejection the last row gives a bonus. The chance of x is then
    q(x) min(1, p(x) / q(x)) + (1 - Σ min(p, q)) norm(max(0, p - q))(x) = p(x), whatever q is.
    No rule for one token accepts more: the chance is Σ min(p, q). But the text depends on drafts.
    """
    judged, end = [], next((i for i in range(1, len(p)) if not p[i].any()), None)
    for i, token in enumerate(draft.tokens[:end]):  # up to where nothing may follow
        q = draft.q(i, like=p[i])
        u = noise.uniform(position + i, noise.ACCEPT)
        kind = "accepted" if u * float(q[token]) < float(p[i, token]) else "rejected"
        judged.append(Judgement(token, kind, float(p[i, token]), float(q[token]), u))
        if kind == "rejected":
            u = noise.uniform(position + i, noise.RECOVER)
            token = draw(residual(p[i], q), u)
            judged.append(Judgement(token, "recovered", float(p[i, token]), float(q[token]), u))
            return judged
    if end is not None:
        return judged
    u = noise.uniform(position + len(draft.tokens), noise.DRAW)
    token = draw(p[-1], u)
    return [*judged, Judgement(token, "bonus", float(p[-1, token]), None, u)]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The positive part of p [V] - q [V], not normalised, because draw() does that."""
    more = (p - q).clamp_(min=0)
    return more if more.sum() > 0 else p  # p = q: then the rejection was mere rounding


# ------------------------------------------------------------------------------------ engine
class Engine:
    """Runs cycles over any number of sequences, each with its own K and drafters, or with none."""

    def __init__(
        self, target: CachedModel, loaded: dict[str, drafters.Drafter], default: str | None = None,
        prefill_chunk: int = 256, controller: Any = None,
        draft_model: CachedModel | None = None, is_strict: bool = False,
        prefixes: Any = None,
    ) -> None:  # fmt: skip
        """Without a controller every draft has the length that its request asks for."""
        self.target, self.draft_model, self.prefill_chunk = target, draft_model, prefill_chunk
        self.eos_ids, self.default_drafter, self.controller = target.eos_ids, default, controller
        self.pool = drafters.DrafterPool(
            loaded, target.vocab_size, default, is_strict, prefixes,
            can_branch=bool(target.compiled and target.compiled.can_branch),
        )  # fmt: skip
        self.planner = controller.planner(self.pool) if controller else drafters.FixedK()
        self.totals = statistics.Totals(self.pool.choices)
        self.now = statistics.clock(target.model.device)

    def open(self, request: values.Request) -> Sequence:
        """Admit a request; caps max_tokens. ValueError: bad prompt or drafter, or no free row."""
        admitted, warnings = request.admitted(self.target, self.pool.choices)
        with ExitStack() as opened:  # if one of these raises, the others are closed
            s = Sequence(admitted, self.target.cache.open_row(opened), self.target.tokenizer)
            s.drafting = drafters.DraftedText(admitted, s.noise, s.row, s.matcher)
            s.warnings.extend(warnings)
            opened.callback(lambda: self.pool.close(s.drafting, s.finish_reason is None))
            self.pool.open(s.drafting)
            self.planner.open(s)
            opened.callback(self.planner.close, s)
            s.opened = opened.pop_all()
        return s

    def close(self, s: Sequence) -> None:
        """Free what a sequence holds; call it once for each. With --strict it may raise."""
        with s.opened:
            self.totals.add(s.request.drafter, s.request.sampling.rule, s.statistics)
            if s.failure is None and self.target.report and self.target.report.is_exact:
                self.pool.remember(s.drafting, s.tokens)

    def generate(self, request: values.Request) -> Iterator[tuple[Sequence, values.Cycle]]:
        """Run a request, cycle by cycle. Stopping early is fine. Raises the sequence's failure."""
        s = self.open(request)
        try:
            while s.finish_reason is None:
                for cycle in self.step([s]).values():
                    yield s, cycle
            if s.failure:
                raise s.failure
        finally:
            self.close(s)

    @kernels.exclusive()  # so that torch's threads leave the cores to the kernels
    def step(
        self, sequences: list[Sequence], cycles: dict[Sequence, values.Cycle] | None = None
    ) -> dict[Sequence, values.Cycle]:
        """Run one cycle of each sequence: draft → verify → accept → truncate.

        The first cycle is the prefill: it feeds the prompt and drafts nothing. A sequence that
        fails or still reads its prompt returns no cycle. If it raises, `cycles` has what was done.
        """
        batch, cycles = self.read_prompts(sequences), {} if cycles is None else cycles
        has_prefill, times = not all(s.num_steps for s in batch), [self.now()]
        plan = self.planner.plan(batch)
        self.pool.propose([s.drafting for s in batch], plan.tasks)
        if not (batch := self.pool.settled(batch)):  # a text may wait for its grammar
            return cycles
        drafts = [s.drafting.draft for s in batch]
        times.append(self.now())
        output = self.forward(batch, drafts)  # one pass verifies all
        times.append(self.now())
        for i, (s, draft) in enumerate(zip(batch, drafts, strict=True)):
            try:
                cycles[s] = self.accept(s, draft, output, i, plan)
            except Exception as error:  # ends this sequence alone
                s.fail(error)
        times.append(self.now())
        for s, cycle in cycles.items():
            cycle.times = times
            s.statistics.record_times(times, is_prefill=cycle.number == 0)
            if s.drafting.failure:  # a drafter's fault, with --strict
                s.fail(s.drafting.failure)
        self.planner.record_cycle(plan, drafts, cycles.values(), None if has_prefill else times)
        return cycles

    def read_prompts(self, sequences: list[Sequence]) -> list[Sequence]:
        """Read a chunk of one long prompt; others wait. Returns those with a cycle to run."""
        lengths, size = self.target.cache.lengths, self.prefill_chunk
        reading = {s: fed for s in sequences if (fed := s.reading.chunk(lengths[s.row], size))}
        for s, fed in list(reading.items())[:1]:
            began, cached, layers = self.now(), lengths[s.row], self.pool.layers([s.drafting])
            output = self.target.forward([s.row], [fed], [s.reading.num_logits(fed)], layers)
            s.drafting.hidden[cached] = {i: states for i, (states,) in output.hidden.items()}
            s.finish_reason = s.reading.note(cached, fed, output.logits[0])
            s.statistics.prompt_ms += (self.now() - began) * 1e3
        return self.pool.settled([s for s in sequences if s not in reading])

    def forward(self, batch: list[Sequence], drafts: list[Draft]) -> values.Output:
        """Run one pass for all: each text's uncached tokens (mostly the pending one) and draft."""
        lengths, pairs = self.target.cache.lengths, list(zip(batch, drafts, strict=True))
        return self.target.forward(
            rows=[s.row for s in batch],
            tokens=[s.tokens[lengths[s.row] :] + draft.tokens for s, draft in pairs],
            num_logits=[len(draft.tokens) + 1 for draft in drafts],
            layers=self.pool.layers([s.drafting for s in batch]),
            parents=[draft.parents for draft in drafts],
        )

    def accept(
        self, s: Sequence, draft: Draft, output: values.Output, i: int, plan: drafters.Plan
    ) -> values.Cycle:
        """Judge the draft, append what stays, truncate; planner and drafters learn what came."""
        logits = output.logits[i]
        # A grammar is one more transform: what it forbids gets −inf.
        masked = s.matcher.mask(logits, draft) if s.matcher else logits
        scores = penalise(masked, s.request.sampling, s.tokens, draft)
        judged, path = self.judge(s, draft, scores)
        slots, held = self.target.cache, self.target.cache.lengths[s.row]
        num_kept = s.append(judged, self.eos_ids)
        slots.keep(s.row, len(draft.tokens), path[: num_kept - 1])  # the last one is pending
        cycle = values.Cycle(
            number=s.num_steps, draft=draft, path=draft.continued(path), judged=judged,
            num_kept=num_kept, held=held, cached=slots.lengths[s.row], recurrent=slots.recurrent,
            logits=logits, scores=scores,
        )  # fmt: skip
        s.num_steps += 1
        s.statistics.record(cycle.num_drafted, cycle.kinds, cycle.num_beside)
        self.totals.note(cycle.num_drafted + cycle.num_beside, cycle.num_accepted)
        self.planner.learn(plan, s, cycle)
        hidden = {layer: cycle.along(states[i]) for layer, states in output.hidden.items()}
        self.pool.observe(s.drafting, cycle.verdict(), hidden, is_last=bool(s.finish_reason))
        return cycle

    def judge(self, s: Sequence, draft: Draft, scores: Tensor) -> tuple[list[Judgement], list[int]]:
        """Judge by the request's rule, and return what `verify` returns; scores [n + 1, V]."""
        sampling, position = s.request.sampling, len(s.tokens)
        if sampling.is_coupled:
            return verify(draft, choices(draft, scores, sampling, s.noise, position))
        p = truncated_softmax(scores, *sampling.transforms)
        judged = verify_by_rejection(draft, p, s.noise, position)
        return judged, [i for i, judgement in enumerate(judged) if judgement.kind == "accepted"]


# ----------------------------------------------------------------------------------- loading
def load_model(name: str, options: Any) -> CachedModel:
    """Load the model `name` and give it a KV cache. Raises StartError if it cannot be loaded."""
    from runtime.models import loading

    kernels.setup(options.quantize, options.device, options.kernels)
    loaded = loading.load_pretrained(name, options)
    model = CachedModel(loaded, name, options.max_running)
    loading.prepare(model, loaded.structure)
    return model


def load_engine(options: Any) -> Engine:
    """The target with all drafters that fit it, checked and run once; see server/assembly.py."""
    from server import assembly

    return assembly.load_engine(options)


# --------------------------------------------------------------------------------- Flask app
def create_app(service: Any) -> Flask:
    """The web application; `service` is an engine and its worker (server/service.py)."""
    from server.service import read_body

    app = service.new_app()  # the page, GET /metrics and /curve, and other engines' protocols

    @app.post("/generate")
    def generate() -> Response | dict[str, Any]:
        """Answer with the whole text, or stream it."""
        return service.respond(read_body())

    @app.get("/health")
    def get_health() -> tuple[dict[str, Any], int]:
        health = service.health()
        return health, 200 if health["status"] == "ok" else 503

    return app


# ------------------------------------------------------------------------------ command line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 0; 1: outputs differ; 2: not carried out; 130: interrupted."""
    from runtime.models.catalogue import with_model
    from server import demo, options, start

    def act() -> int:
        wanted, chosen = options.parse_arguments(arguments)
        if wanted.port or wanted.export is not None:
            return start.serve(wanted, chosen)
        show = demo.show_of(wanted)
        return show(load_engine(chosen := with_model(chosen)), chosen, wanted)

    return demo.exit_status(act)


if __name__ == "__main__":
    sys.exit(main())
