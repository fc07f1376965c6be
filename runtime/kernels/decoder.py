"""A decoder of plain blocks as decoder.h describes it: weights in panels, a forward in one call.

How one is made of a model of transformers stands in reading.py.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from runtime.values import KeyCache

from . import library
from .library import address, empty_f32
from .parts import Norm, Parts, norm_of, shape_of
from .patches import panels_of, put_panels
from .recurrent import Convolution, Rule
from .structs import STRUCTS
from .weights import PackedMatrix

MOST_ROWS = 256  # of one call: their numbers lie in memory at once
_LITTLE = 1 << 26  # bytes of weights times rows
# By the names of torch's and transformers' modules, as in decoder.h.
ACTIVATIONS = {
    "SiLU": 0, "SiLUActivation": 0, "GELUTanh": 1, "NewGELUActivation": 1, "PytorchGELUTanh": 1,
    "GELUActivation": 2, "ReLU": 3, "ReLUSquaredActivation": 4, "QuickGELUActivation": 5,
}  # fmt: skip
_Int = ctypes.c_int32
_Norm, Rope, _Delta, _Passing = map(STRUCTS.get, ("norm", "rope", "delta", "net_batch"))
BlockStruct, _Decoder, Batch = map(STRUCTS.get, ("block", "decoder", "batch"))
_Vocabulary = STRUCTS["vocabulary"]


def in_panels(layers: Sequence[nn.Module]) -> list[PackedMatrix]:
    """The weights of linear layers of one input, which compute with these panels from now on."""
    for layer in layers:
        put_panels(layer, panels_of(layer))
    matrices = [layer.panels for layer in layers]
    read_alike(matrices)
    return matrices


def read_alike(matrices: list[PackedMatrix]) -> None:
    """Let matrices of one input read it in one way, as it is rounded for all."""
    if len({panels.reads for panels in matrices}) > 1:
        for panels in matrices:
            panels.to_floats()


@dataclass
class DeltaStates:
    """Tensors that a delta net reads of each text of a forward, and those that it writes."""

    tails: list[Tensor | None]  # [taps - 1, channels] each; None: nothing came before
    states: list[Tensor | None]  # [heads, width, columns]
    new_tails: list[Tensor]
    new_states: list[Tensor]
    fed: Tensor  # [rows, channels]: the convolution's inputs
    mixed: Tensor  # [rows, channels]: its outputs, which are queries, keys and values
    logs: Tensor  # [rows, heads] of decays
    betas: Tensor

    def struct(self, references: list[Any]) -> _Passing:
        """decoder.h's `net_batch`; `references` holds the memory that it points to."""
        after = self.new_tails, self.new_states
        lists = [
            (ctypes.c_void_p * len(by_text))(*(address(x, *like[0].shape) for x in by_text))
            for by_text, like in zip((self.tails, self.states, *after), after * 2, strict=True)
        ]
        references.append(lists)
        tensors = self.fed, self.mixed, self.logs, self.betas
        return _Passing(*map(ctypes.addressof, lists), *map(address, tensors))


class DeltaNet:
    """The weights and sizes of a gated delta net, in decoder.h's `delta`."""

    def __init__(self, net: nn.Module) -> None:
        """`net` is transformers' module; a RecurrentLayer may keep its states."""
        self.layer = getattr(net, "recurrent", None)
        self._references: list[Any] = []
        at, weight = partial(_floats_at, self._references), net.conv1d.weight.squeeze(1).T
        self.rule = Rule(
            net.num_v_heads, net.num_k_heads, net.head_k_dim, net.head_v_dim, True, True,
            net.head_k_dim**-0.5,
        )  # fmt: skip
        self.taps, self.channels = weight.shape
        norm = Norm(net.norm.variance_epsilon, net.norm.weight)
        self.struct = _Delta(
            Convolution(self.channels, self.taps, True, at(weight), at(net.conv1d.bias)),
            self.rule, norm_struct(norm, self._references), at(-net.A_log.float().exp()),
            at(net.dt_bias),
        )  # fmt: skip

    def passed(
        self, tails: list[Tensor | None], states: list[Tensor | None], num_rows: int
    ) -> DeltaStates:
        """Room for what a forward of `num_rows` rows writes of texts with these states."""
        rule = self.rule
        state = rule.heads, rule.width, rule.columns
        rows = (self.channels, self.channels, rule.heads, rule.heads)
        return DeltaStates(
            tails, states,
            [empty_f32(self.taps - 1, self.channels) for _ in tails],
            [empty_f32(*state) for _ in states],
            *(empty_f32(num_rows, width) for width in rows),
        )  # fmt: skip


class Block:
    """One block: decoder.h's `block`, and the memory that it points to."""

    def __init__(self, parts: Parts, kind: str, window: int | None, scale: float = 1.0) -> None:
        """A token sees the last `window` tokens, or all, as others of its `kind` of attention.

        What the block adds to its input is multiplied by `scale`. Its linear layers are put in
        panels, and the originals are freed.
        """
        self.kind, self.dtype, self._references = kind, parts.down.weight.dtype, []
        names = "input_norm", "out_norm", "mlp_norm", "down_norm"
        norms = (norm_struct(norm and norm_of(norm), self._references) for norm in parts.norms)
        self.struct = BlockStruct(
            **dict(zip(names, norms, strict=True)),
            rope=-1, activation=ACTIVATIONS[type(parts.activation).__name__],
            is_gated=parts.is_gated, residual_scale=scale,
        )  # fmt: skip
        self.net: DeltaNet | None = None
        if parts.is_recurrent:
            self.net = DeltaNet(parts.attention)
            self.struct.net = ctypes.pointer(self.net.struct)
        else:
            self._attend(parts, window)
        layers = [*parts.qkv, *parts.gates], [parts.out], parts.up, [parts.down]
        names = "qkv", "out", "up", "down"
        self.matrices = {name: in_panels(group) for name, group in zip(names, layers, strict=True)}
        for name, matrices in self.matrices.items():
            setattr(self.struct, name, PackedMatrix.side_by_side(matrices))

    def _attend(self, parts: Parts, window: int | None) -> None:
        """Fill in the fields of the structure that attention reads."""
        attention = parts.attention
        widths, width = [shape_of(layer)[0] for layer in parts.qkv], attention.head_dim
        groups = getattr(attention, "num_key_value_groups", 1)
        self.kv_heads, self.layer_idx = sum(widths) // width // (groups + 2), attention.layer_idx
        self.width = width
        self.is_rotated = bool(getattr(attention, "use_rope", True))  # SmolLM3 skips some layers
        norms, struct = list(map(norm_of, parts.qk_norms)) or [None, None], self.struct
        struct.query_norm, struct.key_norm = (norm_struct(n, self._references) for n in norms)
        struct.has_wide_norms = norms[0] is not None and len(norms[0].weight) != width
        struct.heads, struct.kv_heads = groups * self.kv_heads, self.kv_heads
        struct.width = struct.value_width = width
        struct.window, struct.has_gates = window or 0, bool(parts.gates)
        struct.is_half, struct.scaling = self.dtype == torch.bfloat16, attention.scaling
        struct.softcap = getattr(attention, "attn_logit_softcapping", None) or 0

    def attach(self, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values in these buffers [slots, heads, capacity, width]."""
        self.struct.slots, self.struct.capacity = keys.shape[0], keys.shape[2]
        shape = keys.shape[0], self.kv_heads, keys.shape[2], self.width
        self.struct.keys = address(keys, *shape, dtype=self.dtype)
        self.struct.values = address(values, *shape, dtype=self.dtype)


def norm_struct(norm: Norm | None, references: list[Any]) -> _Norm:
    """decoder.h's `norm`; `references` holds its weights in float32."""
    if norm is None:
        return _Norm()
    weights = (_floats_at(references, tensor) for tensor in (norm.weight, norm.bias))
    return _Norm(2 if norm.is_layer_norm else 1, norm.epsilon, *weights)


def _floats_at(references: list[Any], tensor: Tensor | None) -> ctypes.c_void_p:
    """The address of a float32 copy of `tensor`, which `references` holds."""
    references.append(None if tensor is None else tensor.detach().float().contiguous().clone())
    return address(references[-1])


class Rows:
    """What the N rows of a forward are fed, and where they stand: lists of N numbers."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.positions: list[int] = []
        self.places: list[int] = []  # where in the slot a row's keys and values lie
        self.lines: list[list[int]] = []  # in trees: places of a row's ancestors and itself
        self.ids: list[int] = []  # token ids; empty where embeddings are fed
        self.ends: list[int] = []  # where blocks look ahead: the end of the keys that a row sees
        self.wanted: list[int] = []  # the rows whose logits are asked for, rising

    def chain(self, slot: int, begin: int, count: int) -> None:
        """Add the tokens from `begin` on of a text that lie where they stand."""
        self.slots += [slot] * count
        self.positions += range(begin, begin + count)
        self.places += range(begin, begin + count)

    def tree(self, slot: int, first: int, lines: list[list[int]]) -> None:
        """Add tokens that lie from place `first` on; each sees the text before, and its line."""
        self.slots += [slot] * len(lines)
        self.positions += [first + len(line) - 1 for line in lines]
        self.places += range(first, first + len(lines))
        self.lines += [[first + j for j in line] for line in lines]

    def parts(self) -> Iterator["Rows"]:
        """The rows in turn, as many at once as one forward takes."""
        for begin in range(0, len(self.slots), MOST_ROWS):
            part, end = Rows(), begin + MOST_ROWS
            for name, numbers in vars(self).items():
                setattr(part, name, numbers[begin:end])
            part.wanted = [row - begin for row in self.wanted if begin <= row < end]
            yield part

    def batch(self, references: list[Any], **others: Any) -> Batch:
        """decoder.h's `batch` with `others`, more fields; `references` holds what it points to."""
        count, depth, lines = len(self.slots), max(map(len, self.lines), default=0), list[int]()
        assert all(len(each) in (0, count) for each in (self.ids, self.ends, self.lines))
        for position, line in zip(self.positions, self.lines, strict=False):  # if there are any
            lines += [*range(position + 1 - depth, position + 1 - len(line)), *line]
        parts = {
            "slots": self.slots, "positions": self.positions, "places": self.places, "line": lines,
            "ids": self.ids, "ends": self.ends, "wanted": self.wanted,
        }  # fmt: skip
        # One array for all: after a pass Python's code is cold, and calls of torch are slow.
        numbers = [number for part in parts.values() for number in part]
        memory = (ctypes.c_int64 * len(numbers))(*numbers)
        references.append(memory)
        at, pointers = ctypes.addressof(memory), {}
        for name, part in parts.items():
            pointers[name], at = at if part else None, at + 8 * len(part)
        return Batch(rows=count, num_wanted=len(self.wanted), depth=depth, **pointers, **others)


class Decoder:
    """The forward of a causal language model whose layers are all plain blocks."""

    embedding: PackedMatrix | None = None
    positions: PackedMatrix | None = None
    output: PackedMatrix | None = None
    entrance: PackedMatrix | None = None
    _cache: KeyCache | None = None

    def __init__(self, blocks: Sequence[Block], ropes: dict[str, Rope]) -> None:
        self.blocks, self.num_threads = list(blocks), torch.get_num_threads()
        self.ropes, self.references = ropes, list[Any]()  # what the structure points to
        kinds = list(ropes)
        self.attending = [block for block in blocks if block.net is None]
        self.nets = [block.net for block in blocks if block.net]
        for block in self.attending:
            is_turned = block.kind in ropes and block.is_rotated
            block.struct.rope = kinds.index(block.kind) if is_turned else -1
        self.hidden = blocks[0].matrices["down"][0].outputs
        structs = (BlockStruct * len(blocks))(*(block.struct for block in blocks))
        for block, struct in zip(blocks, structs, strict=True):
            block.struct = struct  # where C reads it
        self.struct = _Decoder(
            hidden=self.hidden, num_blocks=len(blocks), blocks=structs,
            ropes=(Rope * len(ropes))(*ropes.values()), embedding_scale=1, logit_scale=1,
        )  # fmt: skip

    def point(self) -> None:
        """Let the structure point to the matrices at both ends."""
        for name in ("embedding", "positions", "output", "entrance"):
            panels = getattr(self, name)
            setattr(self.struct, name, panels and ctypes.pointer(panels.struct))

    def attach(self, buffers: Sequence[Sequence[Tensor]]) -> None:
        """Keep each block's keys and values in its buffers [slots, heads, capacity, width]."""
        for block, pair in zip(self.attending, buffers, strict=True):
            block.attach(*pair)
        self._buffers, self._cache = list(buffers), None

    def attach_zeros(self, length: int) -> None:
        """Keep keys and values of one text of up to `length` tokens, to try the decoder."""
        shapes = [(1, block.kv_heads, length, block.width) for block in self.attending]
        dtype = self.blocks[0].dtype
        self.attach([[torch.zeros(shape, dtype=dtype) for _ in "kv"] for shape in shapes])

    def share_embedding(self, other: "Decoder") -> None:
        """Read embeddings where another decoder of the same model does."""
        if self.embedding is not other.embedding:
            self.embedding = other.embedding
            self.point()

    @property
    def panels(self) -> set[PackedMatrix]:
        """All matrices, each once."""
        ends = {self.embedding, self.positions, self.output, self.entrance} - {None}
        return ends.union(*(group for block in self.blocks for group in block.matrices.values()))

    @cached_property
    def num_bytes(self) -> int:
        """The bytes of all matrices."""
        return sum(panels.num_bytes for panels in self.panels)

    def follow(self, cache: KeyCache) -> None:
        """Keep keys and values in a cache of the core's from now on."""
        if self._cache is cache:
            return
        buffers = []
        for block in self.attending:
            layer = cache.layers[block.layer_idx]
            if not layer.is_initialized:
                like = empty_f32(1, block.kv_heads, 0, block.width).to(block.dtype)
                layer.lazy_initialization(like, like)
            buffers.append((layer.keys, layer.values))
        self.attach(buffers)
        self._cache = cache

    def chain(
        self, rows: Rows, drafts: ctypes.Array[Any], words: ctypes.Structure,
        hidden: Tensor | None = None, shift: int = 0, layer: int = -1, most_wanted: int = 0,
        rarer: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Draft for texts that are fed `rows`: fill in chain.h's `draft` of each; see `__call__`.

        Tokens are chosen among `words`, chain.h's `vocabulary`, and `rarer` ones behind these. A
        model that reads states reads `hidden` [N, D] for the N `rows`, then what comes out behind
        `layer`. A forward gives the logits of one row of each text, and with guesses of up to
        `most_wanted` rows. Raises ValueError for logits that are no numbers.
        """
        assert len(rows.wanted) == len(drafts) and not self.nets
        outputs = self.output.outputs if words.ids else words.count  # no others are computed
        assert 0 < words.count and outputs <= self.output.outputs
        assert bool(self.struct.has_states) == (hidden is not None)
        logits = empty_f32(max(len(drafts), most_wanted), outputs + len(rarer))
        state_layers, references = (_Int * 1)(layer), list[Any]()
        struct, output = (type(x).from_buffer_copy(x) for x in (self.struct, self.output.struct))
        output.outputs, struct.output = outputs, ctypes.pointer(output)
        if rarer:
            ids = torch.cat([torch.arange(outputs), torch.tensor(rarer)])
            panels = self.output.some(ids[outputs:])
            struct.rarer = ctypes.pointer(panels.struct)
            words = _Vocabulary(max(rarer) + 1, address(ids, dtype=torch.int64))
        others: dict[str, Any] = {"logits": address(logits), "shift": shift}
        if hidden is not None:
            hidden, states = self._states(hidden), empty_f32(len(hidden), self.hidden)
            others |= {"input_states": address(hidden), "states": address(states), "num_states": 1}
        batch = rows.batch(references, **others, state_layers=ctypes.addressof(state_layers))
        structs = ctypes.byref(struct), ctypes.byref(batch), drafts, ctypes.byref(words)
        library.compute("run_chain", *structs, most_wanted, threads=self._threads(len(drafts)))

    def __call__(
        self, rows: Rows, input_states: Tensor | None = None, layers: tuple[int, ...] = (),
        shift: int = 0, counts: Sequence[int] = (), passed: Sequence[DeltaStates] = (),
        only_keys: bool = False,
    ) -> tuple[Tensor, dict[int, Tensor]]:  # fmt: skip
        """Logits [n, V] of the rows wanted, and hidden states [N, D] behind blocks `layers`.

        `input_states` are [N, D] if the model reads states, or without ids [N, 2 D], embeddings
        and states side by side. Layer -1 is behind the last norm. A token is rotated as if it stood
        `shift` positions further on. Where there are delta nets, `counts` are the texts' rows, and
        `passed` has the states of each net. With `only_keys`, only keys and values of states are
        computed.
        """
        count, references = len(rows.slots), list[Any]()
        logits = empty_f32(len(rows.wanted), self.output.outputs if self.output else 0)
        others: dict[str, Any] = {"logits": address(logits), "shift": shift, "only_keys": only_keys}
        if layers:
            states = empty_f32(len(layers), count, self.hidden)
            layer_numbers = (_Int * len(layers))(*layers)
            others |= {"states": address(states), "num_states": len(layers)}
            others["state_layers"] = ctypes.addressof(layer_numbers)
        if input_states is not None:
            num_parts = 1 if rows.ids or not self.struct.has_states else 2
            input_states = self._states(input_states, num_parts)
            assert len(input_states) == count
            others["input_states"] = address(input_states)
        assert len(passed) == len(self.nets)
        if passed:
            assert sum(counts) == count
            text_rows = (_Int * len(counts))(*counts)
            passings = (_Passing * len(passed))(*(each.struct(references) for each in passed))
            others |= {"num_texts": len(counts), "text_rows": ctypes.addressof(text_rows)}
            others["net_batches"] = passings
        batch = rows.batch(references, **others)
        structs, threads = map(ctypes.byref, (self.struct, batch)), self._threads(count)
        library.compute("run_decoder", *structs, threads=threads)
        return logits, dict(zip(layers, states.unbind(), strict=True)) if layers else {}

    def _states(self, states: Tensor, parts: int = 1) -> Tensor:
        """States [N, parts · D] as contiguous float32, which C reads."""
        assert states.dim() == 2 and states.shape[1] == parts * self.hidden
        return states.detach().float().contiguous()

    def _threads(self, num_rows: int) -> int:
        """One thread for a small forward, where several would wait longer than they compute."""
        return 1 if self.num_bytes * num_rows < _LITTLE else self.num_threads

    def quantise(self, quantize: str, keeps_embedding: bool = False) -> None:
        """Quantise the weights to int8 or int4, but not an embedding apart if that is kept."""
        self.__dict__.pop("num_bytes", None)
        others = {self.positions, self.embedding} if keeps_embedding else {self.positions}
        chosen = self.panels - (others - {self.output})
        for panels in sorted(chosen, key=lambda panels: panels.num_bytes):  # the largest last
            panels.quantise(quantize)
        for block in self.blocks:  # four bits may not hold each of them
            for group in block.matrices.values():
                read_alike(group)
