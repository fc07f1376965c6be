"""What may not be generated, and what ends a text: a request's fields as the core takes them.

    ignore_eos                      the model's end of text gets −inf, always
    min_tokens                      it and stop_token_ids get −inf, until so many tokens are there
    allowed_token_ids, bad_words    all others, or a word's last token behind the ones before it
    stop_token_ids                  each ends the text

Masks are transforms of logits, so no draft changes the text.
"""

from runtime.values import Json, Model

from .fields import wrong

NAMES = (
    "ignore_eos", "min_tokens", "stop_token_ids", "bad_words", "allowed_token_ids",
    "include_stop_str_in_output",
)  # fmt: skip
MOST_WORDS, MOST_IDS = 64, 1024
_LONGEST_WORD = 32  # tokens


def _bad_words(words: list[str], target: Model) -> list[tuple[int, ...]]:
    """The token ids of words, each as it stands at the beginning and behind a space."""
    ids = list[tuple[int, ...]]()
    for i, word in enumerate(words):
        texts = [word.lstrip(), f" {word.lstrip()}"]
        for tokens in target.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
            if not 0 < len(tokens) <= _LONGEST_WORD:
                why = f"has {len(tokens)} tokens: it must have 1 to {_LONGEST_WORD}"
                raise wrong(f"bad_words[{i}]", why)
            ids.append(tuple(tokens))
    return ids


def masks_of(sent: Json, max_tokens: int, target: Model) -> Json:
    """The fields of Sampling that these checked fields of a request ask for.

    Raises RequestError, naming the field.
    """
    for name in ("stop_token_ids", "allowed_token_ids"):
        if (largest := max(sent.get(name, []), default=0)) >= target.vocab_size:
            raise wrong(name, f"has token id {largest}: the largest one is {target.vocab_size - 1}")
    if (least := sent.get("min_tokens", 0)) > max_tokens:
        raise wrong("min_tokens", f"must be at most max_tokens, which is {max_tokens}")
    words, ends = _bad_words(sent.get("bad_words", []), target), sorted(target.eos_ids)
    words += [(token,) for token in ends if sent.get("ignore_eos")]
    stops = sorted({*sent.get("stop_token_ids", [])})
    return {
        "allowed_token_ids": tuple(dict.fromkeys(sent.get("allowed_token_ids", []))),
        "bad_words": tuple(dict.fromkeys(words)),
        "min_tokens": least,
        "end_ids": (*ends, *stops) if least else (),
    }
