"""Recurrent layers beside attention: what a text leaves in them, and how a draft is taken back.

Such a layer keeps no keys. It keeps a state of one size, and every token changes it:

    x → linear layers → convolution over k tokens → rule: (state, token) → (state, output) → …

A refused draft has changed the state, and what was there before does not follow from what is there
now. So each layer keeps marks of each text, the states at some of its lengths, and beside a mark
the inputs of the rule for the tokens behind it:

    tokens     … 39 │ pending  d1  d2 │ d3  d4  d5 │     3 of 6 tokens stay
    marks           40 ─── recorded ─────────────→ 46
    rolled back     40 ── stepped again ─→ 43

There is no call for a rollback. The next forward begins where the KV cache says that the text
ends: a mark there is taken, marks behind are dropped, and what is missing is stepped again from the
record. Where all was accepted, that costs nothing. A forward that fails leaves no trace
either. What it wrote lies behind the length that the text still has, where the next forward drops
it or writes it again; and the mark where the core's call began stays until the next call, however
many forwards the call is cut into.

The rule goes token by token, in every forward and in one shape: so a token has the same bits
decoded, verified or beside others, however its prompt was cut. Python between the tokens takes
longer than their arithmetic, so where there is a compiler convolutions and rules run in C, for all
texts in one call (kernels/c/recurrent.c). transformers has another rule for several tokens at once.
Its forward runs here all the same, with our convolution and our rule in the place of transformers'.

Sources: gated delta networks, arXiv 2412.06464; Mamba-2, 2405.21060. Not covered: Mamba-1, KDA,
branches of a draft, and prefixes: a state cannot be cut into blocks.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from runtime import kernels
from runtime.kernels import DeltaNet, DeltaStates, Rule, softplus
from runtime.values import KeyCache, Model

NUM_MARKS = 3  # of a text that are kept in any case: the checks at load go back by two calls
_STATES = {"get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state"}
_RULED = {"get_recurrent_state", "update_recurrent_state"}  # what layers with a rule call


class GatedDelta:
    """S ← decay · S + k ⊗ β (v − decay · Sᵀk), read by q."""

    name = "torch_chunk_gated_delta_rule"  # of transformers' function, which `read` stands in for

    def read(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
    ) -> tuple[Rule, tuple[Tensor, ...]]:
        """The rule, and its inputs for each token, tensors [B, T, …], as for kernels.step."""
        (num_keys, width), (heads, columns) = key.shape[2:], value.shape[2:]
        has_norm = options.get("use_qk_l2norm_in_kernel", False)
        rule = Rule(heads, num_keys, width, columns, True, has_norm, width**-0.5)
        return rule, (key, query, value, g, beta)

    def finish(self, outputs: Tensor, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """What transformers' function returns, of outputs [B, T, H, V]."""
        return outputs.to(query.dtype), None


class Mamba2:
    """S ← decay · S + B ⊗ x, read by C."""

    name = "mamba2_chunk_scan"

    def read(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor,
        dt_bias: Tensor | None = None, dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, torch.inf), **_: Any,
    ) -> tuple[Rule, tuple[Tensor, ...]]:  # fmt: skip
        """The rule and its inputs: x [B, T, H, P], dt [B, T, H], a [H], b, c [B, T, groups, N]."""
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
        rule = Rule(*x.shape[2:3], *b.shape[2:], x.shape[3], False, False, 1.0)
        return rule, (b, c, x, a * dt, dt)

    def finish(
        self, outputs: Tensor, x: Tensor, *_: Any, D: Tensor | None = None, **__: Any
    ) -> Tensor:
        """What transformers' function returns, of outputs [B, T, H, P]."""
        return outputs if D is None else outputs + D[:, None] * x.float()


Kind = GatedDelta | Mamba2
RULES: dict[str, Kind] = {rule.name: rule for rule in (GatedDelta(), Mamba2())}


@dataclass(slots=True)
class Mark:
    """What a layer holds of a text of `length` tokens, and the record of the forward behind it."""

    length: int
    tail: Tensor  # [k - 1, C]: the convolution's last inputs
    state: Tensor | None = None  # the rule's; None before the first token
    fed: Tensor | None = None  # [t, C]: the convolution's next inputs
    inputs: tuple[Tensor, ...] = ()  # [t, …] each: the rule's next inputs

    @property
    def reach(self) -> int:
        """The longest text whose state can be made from here."""
        return self.length + (0 if self.fed is None else len(self.fed))


class RecurrentLayer:
    """A module of transformers that keeps states, made to keep them for the rows of a KV cache."""

    most_recorded = 32  # tokens of a forward that can be taken back in part: no draft has as many

    def __init__(self, mixer: nn.Module, cache: KeyCache, kind: Kind | None) -> None:
        """`cache` is the core's SlotCache. Puts itself in the place of the module's forward."""
        self._cache, self._kind, self._is_compiled = cache, kind, kernels.are_used()
        self._rule: Rule | None = None  # once it is known
        self._marks: dict[int, list[Mark]] = {}  # by row, in order of their lengths
        self._begins: dict[int, int] = {}  # by row, its length where the core's last call began
        mixer.recurrent = self
        self._theirs, plain = mixer.forward, inspect.unwrap(type(mixer).forward)
        names = inspect.signature(plain).parameters
        self._name = "cache_params" if "cache_params" in names else "past_key_values"
        functions: dict[str, Callable[..., Any]] = {"causal_conv1d_fn": self.convolve}
        if kind:
            functions[kind.name] = self.scan
        self._ours = kernels.with_globals(mixer, plain, functions)
        mixer.forward = self._forward

    def follow(self, net: DeltaNet) -> None:
        """A decoder in C steps the states from now on: the module's weights may go."""
        self.net, self._rule, self._ours, self._theirs = net, net.rule, None, None

    def passed(self, rows: list[int], counts: list[int]) -> DeltaStates:
        """What the net reads and writes of these rows in a forward of `counts` tokens of each."""
        empty = torch.zeros(self.net.taps - 1, self.net.channels, dtype=torch.float32, device="cpu")
        marks = [self._at(row, empty) for row in rows]
        states = [mark.state for mark in marks]
        return self.net.passed([mark.tail for mark in marks], states, sum(counts))

    def note(self, rows: list[int], counts: list[int], passed: DeltaStates) -> None:
        """Set marks with the states behind a forward, and with inputs to step again."""
        parts, rule = (passed.fed, passed.mixed, passed.logs, passed.betas), self.net.rule
        keys = rule.key_heads * rule.width
        texts = zip(*(part.split(counts) for part in parts), strict=True)
        for i, (row, (fed, mixed, logs, betas)) in enumerate(zip(rows, texts, strict=True)):
            self._record(row, self._marks[row][-1], fed, passed.new_tails[i])
            both = mixed[:, : 2 * keys].unflatten(1, (2, rule.key_heads, rule.width))
            query, key = both.unbind(1)
            value = mixed[:, 2 * keys :].unflatten(1, (rule.heads, rule.columns))
            self._finish(row, passed.new_states[i], (key, query, value, logs, betas))

    def begin(self, rows: list[int]) -> None:
        """A call of several forwards begins: if it fails, these rows go back to where they are."""
        self._begins |= {row: self._cache.lengths[row] for row in rows}

    def _forward(self, *args: Any, **options: Any) -> Tensor:
        """The module's forward; with another cache, or without one, it is transformers'."""
        if options.get(self._name) is not self._cache:
            return self._theirs(*args, **options)
        # Without a cache it takes every text to begin here; our functions know where each is.
        return self._ours(*args, **options | {self._name: None, "attention_mask": None})

    def _rows(self) -> list[int]:
        """The rows of the current forward."""
        return [self._cache.rows[slot] for slot in self._cache.current.slots]

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
        **_: Any,
    ) -> Tensor:  # fmt: skip
        """x [B, C, T], arranged as the forward's tokens are, weight [C, k] -> [B, C, T]."""
        place, empty = self._cache.current, x.new_zeros(weight.shape[1] - 1, x.shape[1])
        texts = place.part(x.transpose(1, 2))
        marks = [self._at(row, empty) for row in self._rows()]
        call = kernels.convolve if self._is_compiled else kernels.convolve_in_python
        results, tails = call(texts, [mark.tail for mark in marks], weight.T, bias)
        for row, mark, fed, tail in zip(self._rows(), marks, texts, tails, strict=True):
            self._record(row, mark, fed, tail.to(x.dtype))
        result = place.arrange(results).to(x.dtype)
        return (ACT2FN[activation](result) if activation else result).transpose(1, 2)

    def scan(self, *args: Any, **options: Any) -> Any:
        """The rule over all tokens, from where each text was."""
        place, kind = self._cache.current, self._kind
        assert kind is not None
        self._rule, inputs = kind.read(*args, **options)
        texts = list(zip(*map(place.part, inputs), strict=True))
        marks = [self._marks[row][-2] for row in self._rows()]
        assert all(mark.state is not None or not mark.length for mark in marks)
        results = self._run([mark.state for mark in marks], texts)
        for row, text, (state, _) in zip(self._rows(), texts, results, strict=True):
            self._finish(row, state, text)
        return kind.finish(place.arrange([outputs for _, outputs in results]), *args, **options)

    def _run(
        self, states: list[Tensor | None], texts: list[tuple[Tensor, ...]]
    ) -> list[tuple[Tensor, Tensor]]:
        """The state behind some tokens of each text, and their outputs. States stay as they are."""
        assert self._rule is not None
        call = kernels.step if self._is_compiled else kernels.step_in_python
        return call(self._rule, texts, states)

    def _record(self, row: int, mark: Mark, fed: Tensor, tail: Tensor) -> None:
        """Set a mark where the row will be; its state follows. Drop marks that are not needed.

        A call that fails goes back to its beginning, and a verify by less than `most_recorded`.
        """
        marks, begin = self._marks[row], self._begins.get(row, mark.length)
        # Copies: what is fed here is a part of a forward of more texts, or with pads.
        mark.fed = fed.clone() if len(fed) <= self.most_recorded else None
        end = mark.length + len(fed)
        marks.append(Mark(end, tail.clone()))
        marks[:-NUM_MARKS] = [
            m
            for m in marks[:-NUM_MARKS]
            if m.length == begin or (m.length > begin and m.reach > end - self.most_recorded)
        ]

    def _finish(self, row: int, state: Tensor, inputs: tuple[Tensor, ...]) -> None:
        """The rule's part of what `_record` began: the state now, and what has led to it."""
        mark, after = self._marks[row][-2:]
        after.state = state
        mark.inputs = tuple(x.clone() for x in inputs) if mark.fed is not None else ()

    def _at(self, row: int, empty: Tensor) -> Mark:
        """The mark at the length of the row, after a rollback. `empty` is a text's first tail."""
        length = self._cache.lengths[row]
        if row not in self._marks:  # a good time to let go of rows that were closed
            self._marks = {r: m for r, m in self._marks.items() if r in self._cache.rows}
        marks = self._marks.setdefault(row, [])
        if not length:
            marks[:] = [Mark(0, empty)]
        while marks and marks[-1].length > length:
            marks.pop()
        if not marks or marks[-1].reach < length:
            raise ValueError(f"a recurrent layer cannot go back to {length} tokens")
        last, missing = marks[-1], length - marks[-1].length
        if missing:
            tail, state = torch.cat([last.tail, last.fed[:missing]])[missing:], None
            if self._kind:
                ((state, _),) = self._run([last.state], [tuple(x[:missing] for x in last.inputs)])
            marks.append(Mark(length, tail, state))  # last: the step may have failed
        return marks[-1]


def follow_rows(cached: Model) -> None:
    """Let a CachedModel's recurrent layers, if any, keep their states by the rows of its cache.

    Raises ValueError, with a sentence, where they are of a kind that is not known here.
    """
    model, cache = cached.model, cached.cache
    for module in model.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        names = set(code.co_names) if code else set()
        if not names & _STATES:
            continue
        rules = [rule for name, rule in RULES.items() if name in names]
        if "causal_conv1d_fn" not in names or (names & _RULED and not rules):
            raise ValueError(
                f"{cached.name} ({model.config.get_text_config().model_type}) has recurrent layers "
                f"of a kind that is not supported yet ({type(module).__name__})"
            )
        cache.recurrent.append(RecurrentLayer(module, cache, rules[0] if rules else None))
