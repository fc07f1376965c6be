"""What may not be generated, and what ends a text: a request's fields as the core takes them.

    ignore_eos                      the model's end of text gets −inf, always
    min_tokens                      it and stop_token_ids get −inf, until so many tokens are there
    allowed_token_ids, bad_words    all others, or a word's last token behind the ones before it
    stop_token_ids                  each ends the text

Masks are transforms of logits, so no draft changes the text.
"""

from dataclasses import replace

from runtime.values import Json, Model, Request

from .fields import TRUTH, Check, integer, is_stop, list_of, wrong

_MOST_WORDS, _MOST_IDS = 64, 1024
_LONGEST_WORD = 32  # tokens


def _ids(least: int) -> Check:
    what = f"a list of {least} to {_MOST_IDS} token ids"
    return list_of(integer(0, 1 << 31)[0], least, _MOST_IDS), what


CHECKS: dict[str, Check] = {
    "ignore_eos": TRUTH,
    "include_stop_str_in_output": TRUTH,
    "min_tokens": integer(0, 1_000_000),
    "stop_token_ids": _ids(0),
    "allowed_token_ids": _ids(1),
    "bad_words": (
        list_of(lambda word: is_stop(word) and word.strip(), 0, _MOST_WORDS),
        f"a list of at most {_MOST_WORDS} texts of up to 1000 characters, none of them blank",
    ),
}


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


def masked(request: Request, sent: Json, target: Model) -> Request:
    """The request with what these checked fields ask for. Raises RequestError, naming the field."""
    for name in ("stop_token_ids", "allowed_token_ids"):
        if (largest := max(sent.get(name, []), default=0)) >= target.vocab_size:
            raise wrong(name, f"has token id {largest}: the largest one is {target.vocab_size - 1}")
    if (least := sent.get("min_tokens", 0)) > request.max_tokens:
        raise wrong("min_tokens", f"must be at most max_tokens, which is {request.max_tokens}")
    words, ends = _bad_words(sent.get("bad_words", []), target), sorted(target.eos_ids)
    words += [(token,) for token in ends if sent.get("ignore_eos")]
    stops = frozenset(sent.get("stop_token_ids", []))
    sampling = replace(
        request.sampling,
        allowed_token_ids=tuple(dict.fromkeys(sent.get("allowed_token_ids", []))),
        bad_words=tuple(dict.fromkeys(words)),
        min_tokens=least,
        end_ids=(*ends, *sorted(stops)) if least else (),
    )
    includes_stop = sent.get("include_stop_str_in_output", False)
    return replace(request, sampling=sampling, stop_token_ids=stops, include_stop=includes_stop)
