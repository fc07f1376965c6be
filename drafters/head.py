"""What the drafters share that run a head: layers trained to read the target's hidden states.

The hidden states come with each verdict, at no extra forward of the target. An MTP or EAGLE head
reads a pair (hidden state the target had at position j, token j + 1) and predicts token j + 2. Fed
its own output it predicts on. (DFlash drafts otherwise: dflash.py.)

    true pairs      (h₀,x₁) (h₁,x₂) … (hₙ₋₂,xₙ₋₁)           cached: n tokens give n − 1 pairs
    recursive rows                                (g,d₁) (g,d₂) …   truncated before the next draft

A head may have several layers. Each was trained for one draft step, so layer i drafts token i + 1,
and the last layer drafts all that follow. Layer i reads what layer i − 1 gave at position j, and
token j + i + 1. Each layer has a KV cache of its own, as its true pairs end one position earlier:

    layer 0     (h₀,x₁) (h₁,x₂) … (hₙ₋₂,xₙ₋₁)               n − 1 true pairs; drafts d₁
    layer 1     (g₀,x₂) (g₁,x₃) … (gₙ₋₃,xₙ₋₁) │ (gₙ₋₂,d₁)   n − 2 true pairs; drafts d₂
                                              └ truncated; gₙ₋₂ waits for the token to come

The caches are of the core's kind.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from runtime import kernels
from runtime.cache import Placement
from runtime.models.files import unmap_weights
from runtime.models.weights import check_numbers, read_folder, reading
from runtime.sampling import Noise
from runtime.values import Draft, Model, Sampling, Verdict

from .base import Chain, Context, ModelDrafter, ModelState

_SHARPER = 1.2  # SmolLM2's heads accept 3 % more tokens so; 1.35 is alike


def sharpened_sampling(sampling: Sampling) -> Sampling:
    """How a head should draw to find the target's choice: at a lower temperature.

    A head is less sure than the target, so the noise decides more often what it draws. A lower
    temperature makes up for that. The rejection rule judges drafts by q, so there q stays. Draft
    models do without it: one that is close to its target draws what the target draws.
    """
    if sampling.is_greedy or not sampling.is_coupled:
        return sampling
    return replace(sampling, temperature=sampling.temperature / _SHARPER)


def layer_config(content: dict[str, Any], family: str) -> PreTrainedConfig:
    """The config of a head's layers, which are of this family of transformers'."""
    layer = AutoConfig.for_model(**content | {"model_type": family})
    layer._attn_implementation = "sdpa"
    return layer


def check_layers(ids: Iterable[Any], first: int, target: Model) -> None:
    """Raises ValueError if a head reads a layer that the target has not; `first` is the lowest."""
    num_layers = target.model.config.get_text_config().num_hidden_layers
    for i in ids:
        if type(i) is not int or not first <= i < num_layers:
            raise ValueError(f"it reads layer {i!r}, and can read {first} to {num_layers - 1}")


@dataclass(slots=True, kw_only=True)
class HeadState(ModelState):
    """A layer's next pair stands where its KV cache ends; its token is in `text` once known."""

    hidden: list[list[Tensor]]  # by layer, [pairs, D] each: the states that it has not read yet
    tree: type[Chain] | None = None  # makes a draft that branches; None: a chain. Set by the pool


class HeadDrafter(ModelDrafter):
    """Drafts from the target's hidden states, with separate KV caches, batched over requests."""

    needs_hidden = True
    title: ClassVar[str]  # of its heads in files, for messages

    @classmethod
    def build(cls, context: Context) -> "HeadDrafter":
        """The drafter with the head that the option of the drafter's name selects.

        The head is in the type and on the device of the target's embeddings. Raises ValueError,
        with one line, if no head is named, or if this one cannot be used.
        """
        name = getattr(context, cls.name)
        if name is None:
            raise ValueError(
                f"the drafter {cls.name} needs a head: give --{cls.name} DIR_OR_HUB_ID"
            )
        with reading(f"{cls.title} head {name}"):
            like = context.target.model.get_input_embeddings().weight
            head = cls.make_head(*read_folder(name, context.allow_pickle), context.target)
            check_numbers(head)
            head = head.to(like.device, like.dtype).eval()
            # Rotations stay in float32, as transformers keeps them: bfloat16 errs in long texts.
            head.rotary_emb = type(head.rotary_emb)(head.config.layer).to(like.device)
            unmap_weights(head)
            return cls(head, context)

    @staticmethod
    def make_head(content: dict[str, Any], weights: dict[str, Tensor], target: Model) -> nn.Module:
        """The head for a target, of what its config.json says and of the file's weights.

        Raises ValueError for what is not supported or does not fit the target, and if a weight is
        missing, unknown or of another size.
        """
        raise NotImplementedError

    def __init__(self, context: Context, num_layers: int = 1, spare: int = 0) -> None:
        """Its KV cache has `num_layers` layers, and `spare` tokens beyond the longest text."""
        target = context.target
        self._cache = target.new_cache(num_layers, target.cache.num_rows, spare)
        self._caches = [self._cache]  # of layers that each have one

    def _count_weights(self, *modules: nn.Module) -> None:
        """Say that a draft step reads the weights of these modules."""
        weights = [weight for module in modules for weight in module.parameters()]
        self.num_step_weights = sum(weight.numel() for weight in weights)

    @abstractmethod
    def _draft(self, states: list[HeadState], max_tokens: list[int]) -> list[Draft]:
        """A draft for each; their cache rows hold what was read of the text, and nothing else."""

    def open(self, prompt: Sequence[int], sampling: Sampling, noise: Noise) -> HeadState:
        rows = [cache.open_row() for cache in self._caches]
        assert len(set(rows)) == 1, "the caches' rows are opened and closed together"
        return HeadState(
            row=rows[0], text=list(prompt), sampling=sharpened_sampling(sampling), noise=noise,
            hidden=[[] for _ in rows],
        )  # fmt: skip

    @torch.inference_mode()
    def propose_batch(self, states: list[HeadState], max_tokens: list[int]) -> list[Draft]:
        """A draft for each state, all in the same forwards."""
        for state in states:  # what the last draft has left goes, whether it failed or not
            length = len(state.text) - 1  # each known token but the first one ends a pair
            for cache, hidden in zip(self._caches, state.hidden, strict=True):
                length -= sum(map(len, hidden))
                cache.truncate(state.row, length)
        return self._draft(states, max_tokens)

    def observe(self, state: HeadState, verdict: Verdict) -> None:
        assert verdict.hidden is not None, (
            "the engine hands hidden states to a drafter that needs them"
        )
        state.text.extend(verdict.tokens)
        state.hidden[0].append(verdict.hidden)

    def close(self, state: HeadState) -> None:
        for cache in self._caches:
            cache.close_row(state.row)


class AutoregressiveDrafter(HeadDrafter):
    """Drafts token by token: each step reads what the step before gave."""

    branches = True
    output: ClassVar[str]  # the name of its output layer
    # Of weights in C that are not the target's: they are read once for each token drafted, and
    # proposals need no exactness.
    weight_format: ClassVar[str | None] = "int8"

    def __init__(
        self, head: nn.Module, context: Context, words: Tensor | None, is_target_s: bool = False
    ) -> None:
        """`words` [n] are the target's ids of those that the head may draft; None: all.

        `is_target_s` says that its layers are part of the target.
        """
        super().__init__(context)
        target, num_rows = context.target, self._cache.num_rows
        # Layer i is number i to a cache, and the numbers below it take no memory there.
        self._caches += [target.new_cache(i + 1, num_rows) for i in range(1, len(head.layers))]
        self._head, self._words, self._vocab_size = head, words, target.vocab_size
        self._count_weights(head.layers[0], getattr(head, self.output))
        self._kernels: list[Any] = []  # in the place of `_run`, by layer, or none
        self._ends: tuple[nn.Module, nn.Module, Any] | None = None  # see `take`
        if context.fast:
            is_exact = is_target_s or not kernels.are_used()
            quantize = context.quantize if is_exact else self.weight_format
            self._kernels = kernels.speed_up_head(
                head, self.kernel_of, target.max_length, quantize, target.model
            )
        if self._kernels:
            vocabulary = kernels.vocabulary_of(target.vocab_size, words)
            self._ends = head.embed_tokens, getattr(head, self.output), vocabulary
        self._embed = head.embed_tokens

    def _enter(self, hidden: Tensor) -> Tensor:
        """What a layer reads of the target's hidden states [pairs, width] -> [pairs, D]."""
        return hidden

    @staticmethod
    @abstractmethod
    def kernel_of(head: nn.Module, number: int, length: int) -> Any:
        """A layer of the head in C for texts of that length, if there is one: a KernelHead."""

    @abstractmethod
    def _run(self, embeds: Tensor, hidden: Tensor, place: Placement, layer: int) -> Tensor:
        """A layer over pairs that the place has arranged, both [B, T, D] -> [B, T, D].

        Hidden states are what `_enter` makes of the target's at step 0, and later on what the step
        before returned.
        """

    @abstractmethod
    def _scores(self, outputs: Tensor) -> Tensor:
        """What the layer gave [B, D] -> [B, n], of the words that the head knows."""

    def _to_logits(self, outputs: Tensor) -> Tensor:
        """What the head gave [B, D] -> [B, V] float32: of words that it has not, minus infinity."""
        scores = self._scores(outputs).float()
        if self._words is None:
            return scores
        whole = scores.new_full((len(scores), self._vocab_size), -inf)
        whole[:, self._words] = scores
        return whole

    @cached_property
    def _is_compiled(self) -> bool:
        """Whether a draft can be one call: one layer, in C, with its embedding and output packed.

        Valid once the target's layers are packed, because the head shares some of them.
        """
        return bool(self._ends) and len(self._kernels) == 1 and self._kernels[0].take(*self._ends)

    def _draft(self, states: list[HeadState], max_tokens: list[int]) -> list[Draft]:
        """One batched run of a layer per draft step; it reads the true pairs that it has not read.

        A tree has the layer's other likely tokens beside those that it goes on with.
        """
        may_branch = any(state.tree for state in states)
        fed = [state.text[self._cache.lengths[state.row] + 1 :] for state in states]
        can_chain = not may_branch and kernels.can_chain(self._cache, states, fed, max_tokens)
        if can_chain and self._is_compiled:
            return self._in_one_call(states, fed, max_tokens)
        texts = zip(states, max_tokens, strict=True)
        chains = [(state.tree or Chain)(state, n) for state, n in texts]
        pairs = list(map(_Pairs, states))
        for step in count():
            if not (active := [i for i, each in enumerate(chains) if each.is_open]):
                break
            rows = [states[i].row for i in active]
            outputs = self._forward(rows, [pairs[i].unread() for i in active], step)
            logits = self._to_logits(torch.cat([output[-1:] for output in outputs]))  # [B, V]
            for b, i in enumerate(active):
                pairs[i].note(outputs[b], chains[i].extend(logits[b]))
        for read in pairs:
            read.keep_unread()
        return [each.draft() for each in chains]

    def _in_one_call(
        self, states: list[HeadState], fed: list[list[int]], limits: list[int]
    ) -> list[Draft]:
        """The drafts without Python between their tokens."""
        asked = [state for state, limit in zip(states, limits, strict=True) if limit > 0]
        hidden = self._enter(torch.cat([part for state in asked for part in state.hidden[0]]))
        drafts = self._kernels[0].draft(self._cache, states, fed, limits, hidden)
        for state in asked:
            state.hidden[0] = []
        return drafts

    def _forward(
        self, rows: list[int], pairs: list[tuple[Tensor, list[int]]], step: int
    ) -> list[Tensor]:
        """Run a step's layer over each row's pairs; returns its outputs [pairs, D] of each row.

        The pairs of row b come after what its cache row holds.
        """
        counts, layer = [len(tokens) for _, tokens in pairs], min(step, len(self._caches) - 1)
        cache, hidden = self._caches[layer], torch.cat([hidden for hidden, _ in pairs])
        ids = torch.tensor([i for _, tokens in pairs for i in tokens], device=cache.device)
        inputs = self._embed(ids), hidden if step else self._enter(hidden)
        if self._kernels:
            return self._kernels[layer](cache, rows, counts, *inputs)
        place = cache.place(rows, counts)
        embeds, hidden = (place.arrange(list(part.split(counts))) for part in inputs)
        with kernels.exclusive():  # its linear layers are kernels
            output = self._run(embeds, hidden, place, layer)
        cache.advance(place)
        return place.part(output)


class _Pairs:
    """The pairs of one text that a head's layers read while they draft, one layer a step.

    Pair j of layer i ends in token j + i + 1, so n known tokens give it n − 1 − i true pairs.
    """

    def __init__(self, state: HeadState) -> None:
        self._state = state
        self._hidden = [*state.hidden]  # by layer, from the pair behind the cached ones on
        self._drafted: list[int] = []
        self._last: Tensor  # [1, D]

    def unread(self) -> tuple[Tensor, list[int]]:
        """Hidden states [pairs, D] and tokens that the layer of this step has not read."""
        step = len(self._drafted)
        if step >= len(self._hidden):  # the last layer goes on
            return self._last, self._drafted[-1:]
        hidden, text = torch.cat(self._hidden[step]), [*self._state.text, *self._drafted]
        return hidden, text[len(text) - len(hidden) :]

    def note(self, outputs: Tensor, token: int) -> None:
        """The layer gave this [pairs, D], and the next token was drawn from the last of it."""
        self._drafted.append(token)
        self._last, layer = outputs[-1:], len(self._drafted)
        if layer < len(self._hidden):
            self._hidden[layer] = [*self._hidden[layer], outputs]

    def keep_unread(self) -> None:
        """Keep of the hidden states those of true pairs that a layer has yet to read."""
        state, num_steps = self._state, len(self._drafted)
        if num_steps:
            state.hidden[0] = []
        for layer in range(1, min(num_steps + 1, len(self._hidden))):
            *older, new = self._hidden[layer]
            new = new[: max(0, len(new) - (layer - 1))]  # those behind are of drafted tokens
            # The last pair it read has a drafted token. The clone lets the rest be freed.
            has_read = layer < num_steps
            state.hidden[layer] = [new[-1:].clone()] if has_read else [*older, new.clone()]
