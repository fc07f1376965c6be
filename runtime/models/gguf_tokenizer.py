"""The tokenizer of a GGUF file: a text becomes the ids that llama.cpp makes of it.

A file holds a vocabulary, and a few keys that say how it is used. It is of one of two kinds:

    gpt2     bytes, merged by a list; a text is first split into words, and the file has only the
             name of the rule for that
    llama    sentencepiece: characters, merged by the score of what they become; other characters
             are bytes; a text, and each text behind a special token, gets a space in front

With another rule the model reads other tokens than it was trained on, and nothing else shows it. So
a rule that is not held here is refused, and so is a key that nobody reads. A control token and a
user-defined one stand for their text wherever it occurs, before anything is split.

Rules are those of llama.cpp's src/llama-vocab.cpp; models/ggml-vocab-* there are its examples.
"""

import re
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges

from .fim import fim_of
from .gguf_file import BadFile, GgufFile, Texts

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASED = (  # letters that have a case, in the Unicode of DeepSeek's time
    r"A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ"
    r"-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉ"
    r"ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_MARKS, _CHINESE = "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", "[一-龥\u0800-一\uac00-\ud7ff]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_RULES = {  # the expressions that split a text one after the other, and the names of that rule
    (_GPT2,): "gpt-2 mpt olmo jais trillion granite-docling phi-2 gigachat a.x-4.0 mellum exaone4",
    (r"\p{N}", _GPT2): "smollm starcoder refact codeshell command-r exaone minerva-7b mellum2",
    (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"): "falcon",
    ("[\r\n]", rf"\s?[{_CASED}]+", _MARKS, r"\s+$", _CHINESE, r"\p{N}+"): "deepseek-llm",
    ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}"): "deepseek-coder",
    (_BLOOM,): "bloom gpt3-finnish poro-chat",
    (_BLOOM, r"\p{N}"): "viking",
    (GGUF_PRE_TOKENIZER_SPLITS["qwen2"],): "stablelm2",
}  # fmt: skip

_SPLITS = {name: split for split, names in _RULES.items() for name in names.split()}
_SPLITS |= {name: (split,) for name, split in GGUF_PRE_TOKENIZER_SPLITS.items()}
# Under these rules a word that is a token is not merged, and BOS comes first by default.
_WHOLE_WORDS = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "jina-v5-nano", "tekken",
}  # fmt: skip
_ENDS = {  # of texts and turns: control tokens that end an answer, whatever a file says of them
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<|eom_id|>", "<EOT>", "_<EOT>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "</s>", "<eos>",
    "[EOT]", "[EOS]", "<|return|>", "<|call|>",
}  # fmt: skip
_TEMPLATE = "tokenizer.chat_template"
_READ = {  # keys, and what they hold
    "model": str, "pre": str, "tokens": Texts, "merges": Texts, "scores": np.ndarray,
    "token_type": np.ndarray, "add_bos_token": bool, "add_eos_token": bool,
    "add_space_prefix": bool, "eos_token_ids": np.ndarray, _TEMPLATE: str, "architecture": str,
}  # fmt: skip
# Of no effect on a text's ids.
_NO_MATTER = r".*_token_id|token_type_count|tokenizer\.(huggingface|rwkv|chat_templates?)(\..*)?"
_NAMED = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # here; in transformers
_TURN_ENDS = "eot_token_id", "eom_token_id"
_FIM = {f"fim_{part}_token_id" for part in ("pre", "suf", "mid", "rep", "sep", "pad")}  # see fim.py
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # types of tokens
_NOT_RSTRIP = "<unk>", "<s>", "<|endoftext|>"  # the special tokens of Phi-3 that leave spaces
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
_TRIED = "a", " Hello  world", "\n\n\t1", "e\u0301 日本\0", "👩\u200d🚀"
_last: list[tuple[dict[str, Any], Tokenizer]] = []  # what the last one was made of, and it


def tokenizer_of(file: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer of an opened model, tried on a few texts.

    Its `turn_ends` are ids that end an answer as EOS does; files seldom name them all. Those in
    `user_defined` are tokens also where the texts of special tokens are text. A draft's
    file mostly has its target's vocabulary. Then both share what was made of it. Raises BadFile, or
    what tokenizers raises for a vocabulary without sense.
    """
    facts = _facts_of(file.metadata)
    made_of = {  # in forms that are quickly compared, and take little memory
        key: value.tobytes() if isinstance(value, Texts | np.ndarray) else value
        for key, value in facts.items()
        if "template" not in key
    }
    is_new = not _last or _last[0][0] != made_of
    if is_new:
        words = [word or f"[EMPTY_{i}]" for i, word in enumerate(facts["tokens"])]
        kinds = facts["token_type"].tolist() if "token_type" in facts else [_NORMAL] * len(words)
        if reason := _why_not(facts, words, kinds):
            raise BadFile(f"{file.name}: {reason}")
        _last[:] = [(made_of, _made_of(facts, words, kinds))]
    # As `tokenizer_object` it would be copied through JSON, in 0.5 s.
    tokenizer = PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast)
    tokenizer._tokenizer = backend = _last[0][1]
    options = {key: facts[key] for key in ("add_bos_token", "add_eos_token")}
    options["chat_template"] = facts.get(_TEMPLATE)
    for here, there in _NAMED.items():  # transformers makes a special token of each
        index, is_text = facts.get(f"{here}_token_id"), _names_text(facts, here)
        options[f"{there}_token"] = None if index is None or is_text else backend.id_to_token(index)
    tokenizer.__init__(**options)
    ends = [facts.get("eos_token_id"), *map(facts.get, _TURN_ENDS)]
    ends += map(int, facts.get("eos_token_ids", ()))
    tokenizer.turn_ends = {*ends, *map(backend.token_to_id, _ENDS)} - {None}
    tokenizer.fim_ids = {key[4:7]: facts[key] for key in facts if key in _FIM}
    fim = fim_of(tokenizer)  # whose tokens stand for no text
    defined = np.flatnonzero(facts.get("token_type", np.empty(0)) == _USER_DEFINED).tolist()
    tokenizer.user_defined = {*defined} - ({*fim[:3], *fim.ends} if fim else set())
    if is_new and (reason := _why_wrong(tokenizer, len(facts["tokens"]))):
        _last.clear()
        raise BadFile(f"{file.name}: {reason}")
    return tokenizer


def _names_text(facts: dict[str, Any], name: str) -> bool:
    """Whether a file's bos, say, is an ordinary token, which stays one in texts."""
    index = facts.get(f"{name}_token_id")
    if index is None or "token_type" not in facts:
        return False
    return facts["token_type"][index] == _NORMAL and facts["tokens"][index] not in _ENDS


def _facts_of(metadata: dict[str, Any]) -> dict[str, Any]:
    """What a file says of its tokenizer, and llama.cpp's defaults."""
    keys = (key for key in metadata if key.startswith("tokenizer."))
    entries = {key.removeprefix("tokenizer.ggml."): metadata[key] for key in keys}
    if not 0 <= entries.get("padding_token_id", 0) < len(entries["tokens"]):
        del entries["padding_token_id"]  # nothing is padded by it
    architecture, is_piece = metadata["general.architecture"], entries["model"] == "llama"
    facts = {
        "architecture": architecture,
        "add_bos_token": is_piece or entries.get("pre") in _WHOLE_WORDS,
        "add_eos_token": False,
        "add_space_prefix": is_piece and not architecture.startswith("gemma"),
    }
    if is_piece:
        facts |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return facts | entries


def _why_not(facts: dict[str, Any], words: list[str], kinds: list[int]) -> str | None:
    """Why no tokenizer can be made of this that is surely right."""
    for key, value in facts.items():
        is_set = len(value) > 0 if hasattr(value, "__len__") else bool(value)
        if not isinstance(value, _READ.get(key, object)):
            return f"its tokenizer's {key!r:.80} has a wrong type"
        if key not in _READ and not re.fullmatch(_NO_MATTER, key) and is_set:
            return f"its tokenizer has the key {key!r:.80}, which is not supported yet"
    model, rule, tokens = facts["model"], facts.get("pre"), set(words)
    if model not in ("gpt2", "llama"):
        return f"tokenizers of the kind {model!r:.80} are not supported yet"
    if model == "gpt2" and rule not in _SPLITS:
        return f"the rule that splits texts, tokenizer.ggml.pre, is {rule!r:.80}, which is unknown"
    # For rules of one split original tokenizers heed add_space_prefix, and llama.cpp does not.
    heeds_prefix = model == "gpt2" and _SPLITS[rule] == (_GPT2,)
    if heeds_prefix and facts["add_space_prefix"]:
        return f"add_space_prefix is not supported yet for tokenizers of the kind {model!r}"
    if (key := "scores" if model == "llama" else "merges") not in facts:
        return f"its tokenizer has no {key}"
    if len({len(facts.get(key, words)) for key in ("tokens", "scores", "token_type")}) > 1:
        return "its tokenizer has not as many scores and types as tokens"
    if len(tokens) < len(words):
        return "its tokenizer has a token twice"
    for key in (*(f"{name}_token_id" for name in _NAMED), *_TURN_ENDS, *_FIM):
        if type(index := facts.get(key, 0)) is not int or not 0 <= index < len(words):
            return f"tokenizer.ggml.{key} is {index!r:.80}, which is no token's id"
    for name in ("bos", "eos"):
        if facts[f"add_{name}_token"] and f"{name}_token_id" not in facts:
            return f"its tokenizer adds {name.upper()}, and has no {name}_token_id"
        if facts[f"add_{name}_token"] and _names_text(facts, name):
            return f"its tokenizer adds an ordinary token as {name.upper()}"
    if model == "llama" and (lacking := _BYTES - tokens):
        return f"its tokenizer lacks {len(lacking)} of the bytes, first {min(lacking)}"
    # tokenizers merges no character that is not a token itself. llama.cpp does.
    normal = (word for word, kind in zip(words, kinds, strict=True) if kind == _NORMAL)
    if model == "llama" and (lacking := set().union(*normal) - tokens):
        return f"its tokenizer has words with {min(lacking)!r}, and not that character alone"
    return None


def _made_of(facts: dict[str, Any], words: list[str], kinds: list[int]) -> Tokenizer:
    """The tokenizer of these words, which are of these types."""
    is_piece, vocabulary = facts["model"] == "llama", {word: i for i, word in enumerate(words)}
    if is_piece:
        scores, has_prefix = facts["scores"].tolist(), facts["add_space_prefix"]
        merges = generate_merges(vocabulary, dict(zip(words, scores, strict=True)))
        backend = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
        prefix = [normalizers.Prepend("▁")] * has_prefix
        backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
        pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*pieces, *[decoders.Strip(" ", 1, 0)] * has_prefix])
    else:
        rule = facts["pre"]
        merges = [(m[: (at := m.find(" ", 1))], m[at + 1 :]) for m in facts["merges"]]
        is_whole = rule in _WHOLE_WORDS
        backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=is_whole))
        splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[rule]]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
        backend.decoder = decoders.ByteLevel()
    is_phi = is_piece and facts["architecture"] == "phi3"
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for word, kind in zip(words, kinds, strict=True):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or word in _ENDS:
            strips = is_phi and word not in _NOT_RSTRIP
            token = AddedToken(word, normalized=False, rstrip=strips)
            (plain if kind == _USER_DEFINED else special).append(token)
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
    return backend


def _why_wrong(tokenizer: PreTrainedTokenizerFast, num_tokens: int) -> str | None:
    """Why a tokenizer cannot serve, once it is tried."""
    for text in _TRIED:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if (back := tokenizer.decode(ids)) != text:
            return f"its tokenizer makes {back!r:.80} of {text!r}"
    for word in tokenizer.special_tokens_map.values():
        ids = tokenizer(f"a{word}a", add_special_tokens=False)["input_ids"]
        if tokenizer.convert_tokens_to_ids(word) not in ids:
            return f"its tokenizer cuts {word!r:.80}"
    if len(tokenizer) != num_tokens:
        return f"its tokenizer has {num_tokens} tokens, and needs {len(tokenizer)}"
    return None
