"""Before a model is served, its logits are compared with those of transformers' plain forward.

A model may fail in ways that raise no error: a mask that is laid over the wrong keys, a position
that is counted from the wrong end, a cache that a layer reads in another order. So two random texts
go through transformers' modules, each in one piece and without a cache. Then the first one goes
through the KV cache in chunks, alone and in batches with the second, with refused drafts between.

    model.reference = Reference.of(model)   before runtime/kernels/ take the modules' weights
    check(model)                            when all is prepared, see loading.py

`of` also sets `contents`, a hash of the weights, and `is_known`: the model was compared before.

Both sides compute with the same config and weights. So the weights of a GGUF file that is served as
it is are compared with gguf's, too. That a model was compared is noted in the user's cache folder,
and its next start does without.

Sums of floats depend on their order, so equal means equal but for roundings. How much a model makes
of a rounding is measured: its embeddings are changed by one rounding each. In a mixture of experts
a rounding may also choose another expert for a token, which changes that token a lot and those
after it a little. So there it is the median token that has to be near.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime import kernels
from runtime.values import Model, in_short

from . import StartError, required
from .catalogue import ROOT, cache_folder
from .loading import refusal, title_of

_LENGTHS = 320, 48  # tokens of the two texts, where the context holds as many
_LENGTHS_PACKED = 24, 8  # of weights in blocks: large models, whose modules are slow
_NUM_COMPARED = 128  # the last tokens of a text
_ROUNDINGS = 32  # of the largest logit, that may add up
_SHAKES = 8  # times the effect of shaken embeddings; about 2 was the most that was seen
_SHARE_OF_LARGEST = 1e-3  # in mixtures: another expert for one token moves those after it by less
_SHARE_PACKED = 0.05  # where a rounding may make an input another number of 8 bits
# What a comparison depends on: the core, and no user's file beside it.
_CODE = "0*.py", "runtime/**/*.py", "runtime/kernels/c/*"
_OF_THE_COPY = "_name_or_path", "transformers_version"  # in a configuration
_SAMPLED = 128  # numbers of a weight, three times
_FOREIGN = "transformers_modules"  # code that a model's folder brings, which may change

# In turn: tokens of the text, of its neighbour, and of a draft behind the text's, which is refused.
_BATCHES = (6, 1, 2), (1, 4, 2), (3, 6, 2), (2, 2, 2)


@dataclass(frozen=True)
class Reference:
    """Two texts, and the logits [n, V] that transformers gives for the last tokens of each."""

    texts: list[list[int]]
    logits: list[Tensor]
    tolerance: float
    is_mixture: bool
    note: Path | None  # to be written when all logits are equal

    @classmethod
    @torch.inference_mode()
    def of(cls, cached: Model) -> "Reference | None":
        """The reference of a CachedModel whose modules are still those of transformers.

        None if the same model was compared before, with the same code.
        Raises StartError if transformers itself cannot run it.
        """
        model, length = cached.model, cached.max_length
        cached.contents, note = contents_of(model), None
        if type(model).__module__.split(".")[0] != _FOREIGN:
            note = _note(cached)
            cached.is_known = bool(note and os.path.exists(note))  # not, where it may not be read
            if cached.is_known:
                return None
        if cached.fingerprint:
            required("runtime.models.gguf_compare", cached.name).compare(model)
        # The layers of a packed model are compared one by one as well.
        lengths = _LENGTHS_PACKED if cached.fingerprint else _LENGTHS
        texts = random_texts(cached, [min(each, length) for each in lengths])
        try:
            logits = [_plain(model, text) for text in texts]
            with model.get_input_embeddings().register_forward_hook(_shaken):
                shaken = _plain(model, texts[1])
        except Exception as error:
            raise StartError(f"transformers cannot run {cached.name}: {in_short(error)}") from error
        largest = max(float(expected.abs().nan_to_num(posinf=0).max()) for expected in logits)
        if any(expected.isnan().any() for expected in logits) or not largest:
            raise StartError(f"{cached.name} gives no numbers: are its weights damaged?")
        rounding = torch.finfo(model.dtype).eps * largest
        moved = float(_distances(shaken, logits[1]).max())
        tolerance, is_mixture = max(_ROUNDINGS * rounding, _SHAKES * moved), cached.has_experts
        if is_mixture:
            tolerance = max(tolerance, _SHARE_OF_LARGEST * largest)
        if cached.fingerprint:
            tolerance = max(tolerance, _SHARE_PACKED * largest)
        return cls(texts, logits, tolerance, is_mixture, note)

    def check(self, cached: Model) -> None:
        """Raises StartError if the CachedModel, as it is now, gives other logits."""
        parts = [torch.zeros(1)]  # how far the logits of each token are from those expected
        with refusal(cached), torch.inference_mode():
            for text, end, logits in _readings(cached, self.texts):
                first = len(self.texts[text]) - len(self.logits[text])  # the first token compared
                if end > first:
                    expected = self.logits[text][: end - first][-len(logits) :]
                    parts.append(_distances(logits[-len(expected) :], expected).cpu())
        distances = torch.cat(parts)
        distance = float(distances.median() if self.is_mixture else distances.max())
        if not distance <= self.tolerance:  # as NaN is not
            raise StartError(
                f"{title_of(cached)} cannot be served: its logits are {distance:.2g} away from "
                f"transformers' own, where roundings explain {self.tolerance:.2g}"
            )
        # Blocks that differed from their modules are to be compared at the next start, too.
        if self.note and cached.compiled and cached.compiled.is_compiled:
            with suppress(OSError):  # then the next start compares again
                self.note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.note.touch()


def _note(cached: Model) -> Path | None:
    """Where it is noted that a model was compared with this code, on this kind of machine.

    None where there is no home for a cache.
    """
    known = cached.fingerprint, cached.contents, cached.max_length, cached.model.device.type
    machine = kernels.instructions() if kernels.are_used() else "modules"
    with suppress(RuntimeError):
        return cache_folder() / "compared" / _digest(*map(str, known), machine)
    return None


def _digest(*what: str) -> str:
    """A hash of these texts, of the code that computes, and of what it computes with."""
    code = [path.read_bytes() for part in _CODE for path in sorted(ROOT.glob(part))]
    versions = torch.__version__, transformers.__version__
    return hashlib.sha256(b"".join(code) + " ".join((*what, *versions)).encode()).hexdigest()


def contents_of(model: PreTrainedModel) -> str:
    """A hash of a model's configuration, and of the first, middle and last bytes of each weight.

    To be taken before runtime/kernels/ take the weights. It reads three pages of each.
    """
    config = model.config.to_dict()
    known = {n: str(config[n]) for n in sorted(config) if n not in _OF_THE_COPY}
    digest = hashlib.sha256(str(known).encode())
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {weight.dtype} {[*weight.shape]}".encode())
        flat = weight.detach().flatten()
        for begin in (0, len(flat) // 2, max(0, len(flat) - _SAMPLED)):
            part = flat[begin : begin + _SAMPLED].cpu().contiguous()
            digest.update(part.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def system_fingerprint(cached: Model, quantize: str | None) -> str | None:
    """A short hash of the target's weights, its dtype, and the code and the machine's kernels.

    With the same seed and the same hash the same text may be expected. It begins with b, as
    llama.cpp's do. None of a model whose contents were not taken.
    """
    contents, fast, report = cached.contents, cached.compiled, cached.report
    if not contents:
        return None
    known = cached.fingerprint, cached.model.dtype, quantize, fast and fast.description
    return f"b{_digest(contents, *map(str, known), str(report and report.is_exact))[:15]}"


def _readings(cached: Model, texts: list[list[int]]) -> Iterator[tuple[int, int, Tensor]]:
    """Feed texts to a KV cache in chunks, steps and batches, as a server would.

    Gives (text, tokens fed of it, logits [n, V] of the last of them).
    """
    cache, texts = cached.cache, texts[: cached.cache.num_rows]
    length, fed = len(texts[0]), [0] * len(texts)
    chunks = [(length * 3 // 5, 0, 0), (length * 3 // 10, 0, 0), (1, len(texts[-1]) // 2, 4)]
    with ExitStack() as opened:
        rows = [cache.open_row(opened) for _ in texts]
        for *counts, num_refused in chain(chunks, cycle(_BATCHES)):
            if fed == [len(text) for text in texts]:
                return
            ahead = zip(texts, fed, counts, strict=False)  # texts may be fewer
            new = [text[begin : begin + count] for text, begin, count in ahead]
            fed = [begin + len(tokens) for begin, tokens in zip(fed, new, strict=True)]
            draft = texts[0][: min(num_refused, length - fed[0])] if new[0] else []
            if not (active := [i for i, tokens in enumerate(new) if tokens]):
                continue  # in a short context
            num_logits = [min(len(new[i]), _NUM_COMPARED) for i in active]
            if draft:
                new[0], num_logits[0] = new[0] + draft, num_logits[0] + len(draft)
            tokens = [new[i] for i in active]
            logits = cached.forward([rows[i] for i in active], tokens, num_logits).logits
            if draft:
                cache.truncate(rows[0], fed[0])
                logits[0] = logits[0][: -len(draft)]
            for i, scores in zip(active, logits, strict=True):
                yield i, fed[i], scores


def random_texts(cached: Model, lengths: list[int]) -> list[list[int]]:
    """Texts of random tokens, without those that stand for ends, pads or pictures."""
    config = cached.model.config
    special = set(cached.tokenizer.all_special_ids)
    for part in (config, config.get_text_config()):
        for name, value in part.to_dict().items():
            if name.endswith(("_token_id", "_token_index")):
                special |= set(value if isinstance(value, list) else [value])
    ordinary = [i for i in range(min(cached.vocab_size, len(cached.tokenizer))) if i not in special]
    ordinary = ordinary or list(range(cached.vocab_size))
    chance = torch.Generator().manual_seed(0)
    return [
        [ordinary[i] for i in torch.randint(len(ordinary), (n,), generator=chance).tolist()]
        for n in lengths
    ]


def _plain(model: PreTrainedModel, text: list[int]) -> Tensor:
    """[n, V] float32 of the text's last tokens: one forward without a cache."""
    ids = torch.tensor([text], device=model.device)
    return model(input_ids=ids, use_cache=False).logits[0, -_NUM_COMPARED:].float().clone()


def _shaken(module: nn.Module, args: object, output: Tensor) -> Tensor:
    """A forward hook: each number changed by about one rounding, always in the same directions."""
    signs = torch.randint(2, output.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    return output * (1 + torch.finfo(output.dtype).eps * signs.to(output))


def _distances(actual: Tensor, expected: Tensor) -> Tensor:
    """[n]: each token's largest difference, NaN where there is one. Equal infinities are equal."""
    return (actual - expected).masked_fill_(actual == expected, 0).abs().amax(-1)
