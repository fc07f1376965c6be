"""Filling in the middle: the prompt of a model that was trained to write what a text lacks.

    the text     def area(r):⏎    return █⏎print(area(2))        █ is the gap
    the prompt   PREFIX def area(r):⏎    return  SUFFIX ⏎print(area(2)) MIDDLE
    the answer   3.14159 * r * r END

The three tokens are special, and each family of models has its own. A GGUF file may name their ids
(tokenizer.ggml.fim_pre_token_id and so on), else they are found by their texts in the vocabulary.
Their order is that of the models here: prefix, suffix, middle (PSM).

The prompt has what stands behind the gap, so drafters that look up find it there: on functions of
this repository that gives 1.34 times the tokens a pass (ngram; suffix 1.37) of lookups in the
prefix alone.

Source: Bavarian et al., arXiv 2207.14255; the Qwen2.5-Coder report, arXiv 2409.12186.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerBase as Tokenizer

from runtime.values import RequestError

from .prompts import check_characters, long_texts, panics_caught, tokenize

_NONE = "-"  # no such token; as a word every vocabulary has it
# Of each family: prefix, suffix, middle; then tokens that end a middle.
_FAMILIES = (
    "<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|repo_name|> <|file_sep|> <|fim_pad|>",  # Qwen
    "<fim_prefix> <fim_suffix> <fim_middle> <repo_name> <file_sep> <fim_pad>",  # StarCoder2
    "<fim-prefix> <fim-suffix> <fim-middle> <reponame> <filename> <fim-pad>",  # SantaCoder
    "<｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜> - - <｜end▁of▁sentence｜>",  # DeepSeek-Coder
    "▁<PRE> ▁<SUF> ▁<MID> - - ▁<EOT>",  # CodeLlama
    "<|code_prefix|> <|code_suffix|> <|code_middle|> - - -",  # GLM
)
_MORE_ENDS = "<|endoftext|>", "<|fim_pad|>", "<fim_pad>"
_NAMED = "pre", "suf", "mid", "rep", "sep", "pad"  # in a GGUF file's tokenizer.ggml.fim_…_token_id


class Fim(NamedTuple):
    """The ids of a family's tokens."""

    prefix: int
    suffix: int
    middle: int
    ends: frozenset[int]  # what ends a middle, beside the model's own ends of texts
    is_piece: bool  # whether a text gets a space in front, and one behind the gap must not


def infill_prompt(
    prefix: str, suffix: str, tokenizer: Tokenizer, model: str, max_length: int
) -> list[int]:
    """The ids of a text with a gap, of at most `max_length`. Texts of special tokens are no tokens.

    Raises RequestError for a model without such tokens, and for a text that cannot fit, under the
    names prompt and suffix.
    """
    if (fim := fim_of(tokenizer)) is None:
        why = f"{model} has no tokens for filling in; Qwen2.5-Coder has, for example"
        raise RequestError(f"suffix is not supported: {why}", param="suffix")

    def ids(text: str, name: str = "prompt") -> list[int]:
        return tokenize_plain(text, tokenizer, max_length, name) if text else []

    bos = [tokenizer.bos_token_id] if getattr(tokenizer, "add_bos_token", False) else []
    behind = _behind(suffix, ids, fim)
    return [*bos, fim.prefix, *ids(prefix), fim.suffix, *behind, fim.middle]


def _behind(suffix: str, ids: Callable[[str, str], list[int]], fim: Fim) -> list[int]:
    """The ids of what stands behind the gap, which begins amid a text."""
    mark = ids("☺", "suffix") if fim.is_piece else []
    found = ids(f"☺{suffix}", "suffix") if mark else []
    is_found = mark and found[: len(mark)] == mark
    return found[len(mark) :] if is_found else ids(suffix, "suffix")


@lru_cache(4)
def fim_of(tokenizer: Tokenizer) -> Fim | None:
    """The tokens by which a tokenizer's model fills in; None if it has none."""

    def id_of(token: str) -> int | None:
        found = tokenizer.convert_tokens_to_ids(token)
        is_known = found is not None and tokenizer.convert_ids_to_tokens(found) == token != _NONE
        return found if is_known else None

    named = getattr(tokenizer, "fim_ids", {})
    families = [family.split() for family in _FAMILIES]
    # A file may name tokens: then its family is that of the first of them, if there is one.
    for family in sorted(families, key=lambda words: id_of(words[0]) != named.get("pre", -1)):
        found = [named.get(name, id_of(token)) for name, token in zip(_NAMED, family, strict=True)]
        if None not in found[:3]:
            ends = {*found[3:], *map(id_of, _MORE_ENDS)} - {None}
            return Fim(*found[:3], frozenset(ends), family[0] == "▁<PRE>")
    return None


@lru_cache(4)
def _backend_of_text(tokenizer: Tokenizer) -> Backend | None:
    """A tokenizer's parts without its special and added tokens; None of one in Python.

    Runs of spaces that were added as tokens stay tokens, and so do those that a GGUF file calls
    user-defined. Other added ones may steer the model, as those of infill do. Ids behind the
    vocabulary cannot be kept.
    """
    if (whole := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return None
    backend = Backend(whole.model)  # which both share
    for part in ("normalizer", "pre_tokenizer"):
        if value := getattr(whole, part):
            setattr(backend, part, value)
    added, defined = whole.get_added_tokens_decoder(), getattr(tokenizer, "user_defined", ())
    kept = [(i, each) for i, each in added.items() if each.content.isspace() or i in defined]
    backend.add_tokens([each for i, each in kept if backend.token_to_id(each.content) == i])
    return backend


def tokenize_plain(
    text: str, tokenizer: Tokenizer, max_length: int, name: str = "prompt"
) -> list[int]:
    """The ids of a text in which the texts of special tokens are text; otherwise as `tokenize`."""
    if (backend := _backend_of_text(tokenizer)) is None:
        return tokenize(text, tokenizer, max_length, name, add_special_tokens=False)
    check_characters(len(text), tokenizer, max_length, name)
    with long_texts.take(len(text)), panics_caught():
        return backend.encode(text, add_special_tokens=False).ids
