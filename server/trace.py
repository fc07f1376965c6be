"""What a request may ask to know about a cycle: log-probabilities, and a trace of all of it.

docs/api.md says what each field means.
"""

from collections.abc import Callable
from functools import cache
from itertools import chain
from math import inf, isfinite

import numpy as np
import torch
from torch import Tensor

from runtime.models.prompts import Tokenizer
from runtime.sampling import truncated_softmax
from runtime.scoring import TokenScores, scores_of
from runtime.values import Cycle, Json, RequestError, TextSequence

from .fields import NAMES, TRUTH, Check, integer

_PROMPT_SHOWN, _TAIL_SHOWN = 2000, 16  # tokens of a prompt that a trace repeats
_BY_P, _BY_Q = 8, 4  # tokens of a distribution that a trace shows, the likeliest by p and by q
MAX_PROMPT_SCORES = 1 << 19  # log-probabilities of a request's prompts: 60 bytes of JSON each
CHECKS: dict[str, Check] = {  # of the fields that ask for it
    "trace": TRUTH,
    NAMES: TRUTH,
    "logprobs": (
        lambda value: isinstance(value, bool) or integer(0, 20)[0](value),
        "true, false or an integer from 0 to 20",
    ),
    "prompt_logprobs": integer(0, 20),
}
_FORBIDDEN = 3  # tokens that a grammar forbids and a trace shows, the likeliest ones


def check_scores(num_tokens: int, num_top: int | None, num_choices: int) -> None:
    """Raises RequestError for more log-probabilities of prompts than an answer may have."""
    if num_top is not None and num_tokens * (1 + num_top) * num_choices > MAX_PROMPT_SCORES:
        most = MAX_PROMPT_SCORES // (1 + num_top) // num_choices
        why = f"prompt_logprobs: so many likeliest tokens are for up to {most} tokens of prompts"
        raise RequestError(why, param="prompt_logprobs")


def add_details(fields: Json, s: TextSequence, cycle: Cycle) -> None:
    """Add to the event of a sequence's latest cycle what its request asked for."""
    if s.request.logprobs is not None:
        logits, new = cycle.along(cycle.logits), [token.id for token in cycle.tokens]
        count, has_names = s.request.logprobs, NAMES in s.request.returns
        fields["logprobs"] = token_logprobs(logits, new, count, s.tokenizer, has_names)
        s.logprobs += fields["logprobs"]
    if s.request.trace:
        fields |= summary(cycle)
        fields |= _details(s, cycle, fields)


def word_of(token: int, tokenizer: Tokenizer) -> str:
    """A token as it stands inside a text. Alone, a piece would lose the space before it."""
    text = tokenizer.decode([token])
    word = (tokenizer.convert_ids_to_tokens(token) or "").replace("\u2581", " ")
    return word if word.startswith(" ") and word[1:] == text else text


def summary(cycle: Cycle) -> Json:
    """What a cycle did, without texts and numbers of a model.

    `proposals` is the whole draft; the other fields are about the tokens left after a cut.
    """
    tree = cycle.draft.parents and zip(cycle.draft.tokens, cycle.draft.parents, strict=True)
    rows = {"from": cycle.held, "to": cycle.cached, "stepped": cycle.num_stepped}
    num_layers = len(cycle.recurrent)
    return {
        "proposals": cycle.proposals,
        "tree": tree and [{"id": token, "parent": parent} for token, parent in tree],
        "accepted_count": cycle.num_accepted,
        "emitted_count": cycle.num_kept,
        "rejected": cycle.rejected and cycle.rejected.as_dict(),
        "cached": [cycle.held, cycle.cached],
        "recurrent": {"layers": num_layers} | rows if num_layers else None,
    }


def _details(s: TextSequence, cycle: Cycle, event: Json) -> Json:
    """What a trace adds; a part of a character has the text "�".

    The prefill's has the end of the prompt as the target read it, with what a chat template wrote.
    """
    asked, scores = Json(), cycle.along(cycle.scores)
    if s.drafting.task.decision:
        asked["controller"] = str(s.drafting.task.decision)
    if cycle.proposals:
        asked["drafter"] = s.drafting.task.drafter
    if cycle.number == 0:
        prompt = s.request.prompt
        asked["prompt_text"] = s.tokenizer.decode(prompt[-_PROMPT_SHOWN:])
        asked["prompt_tail"] = [word_of(i, s.tokenizer) for i in prompt[-_TAIL_SHOWN:]]
    asked["target_argmax"] = scores.argmax(-1).tolist()
    kept, sampling = scores[: cycle.num_kept], s.request.sampling
    p, judged, noise = kept.softmax(-1), kept, None
    if not sampling.is_greedy:
        log_p = truncated_softmax(kept, *sampling.transforms).double().log()
        p = log_p.exp()
        if sampling.is_coupled:
            judged, noise = log_p, _noise(s, kept)
    asked["target_top"] = _leaders(s, event, judged, noise)
    asked["distributions"] = _distributions(cycle, kept, p, noise)
    asked["grammar"] = _grammar(cycle) if s.matcher else None
    ids = {*cycle.draft.tokens, *asked["target_argmax"]}
    forbidden = (place["forbidden"] for place in asked["grammar"] or ())
    shown = chain(event["tokens"], *asked["target_top"], *asked["distributions"], *forbidden)
    ids |= {token["id"] for token in shown}
    asked["texts"] = {i: word_of(i, s.tokenizer) for i in sorted(ids)}
    asked["ms"] = dict(zip(("draft", "verify", "other"), cycle.spans_ms, strict=True))
    return asked


def _noise(s: TextSequence, scores: Tensor) -> Tensor:
    """What the coupled rule adds to log p and to log q where each row of scores [n, V] was."""
    begin, ids = len(s.tokens) - len(scores), np.arange(scores.shape[-1])
    races = [s.noise.exponentials(begin + i, ids) for i in range(len(scores))]
    return -torch.tensor(np.stack(races)).log()


def _leaders(
    s: TextSequence, event: Json, scores: Tensor, noise: Tensor | None
) -> list[list[Json]]:
    """The first five tokens of each row of scores [n, V], as {id, score}.

    Of a coupled request the choice is the first of them. It goes by the total of score and noise,
    which its entries have, too; and so do the event's judged tokens, which are changed here.
    """
    is_coupled = s.request.sampling.is_coupled
    totals = scores if noise is None else scores.cpu() + noise

    def entry(row: int, token: int) -> Json:
        scored = {"id": token, "score": _number(scores[row, token])}
        return scored | ({"total": _number(totals[row, token])} if is_coupled else {})

    if is_coupled:
        rejected = [event["rejected"]] if event["rejected"] else []  # judged where the last was
        for row, token in [*enumerate(event["tokens"]), *((len(scores) - 1, r) for r in rejected)]:
            token |= entry(row, token["id"])
    result = []
    for row, place in enumerate(totals):
        able = [i for i in _likeliest(place, 5) if place[i] > -inf]
        if is_coupled:  # of equal ones the chosen one comes first
            able.sort(key=lambda i: i != event["tokens"][row]["id"])
        result.append([entry(row, i) for i in able])
    return result


def _distributions(
    cycle: Cycle, scores: Tensor, p: Tensor, noise: Tensor | None
) -> list[list[Json]]:
    """The likeliest tokens where each new one was chosen: those of the target and of the drafter.

    An entry is {id, score, p}, by falling p; the drafted and the chosen token are among them.
    `score` is the penalised logit, None for a token that a grammar forbids. `p` is the probability
    by the request's transforms; at temperature 0, where nothing is drawn, that of temperature 1.
    Where the drafter drew from probabilities there is `q`, and under the coupled rule `noise`,
    which is added to log p and to log q.
    """
    probs = None if cycle.draft.probs is None else cycle.along(cycle.draft.probs)
    result = []
    for row, token in enumerate(cycle.tokens):
        q = probs[row] if probs is not None and row < len(probs) else None
        able = [i for i in _likeliest(p[row], _BY_P) if scores[row, i] > -inf]
        ids = {token.id, *cycle.proposals[row : row + 1], *able}
        ids |= set() if q is None else set(_likeliest(q, _BY_Q))
        columns = {"score": scores[row], "p": p[row], "q": q}
        columns["noise"] = None if noise is None else noise[row]
        result.append([
            {"id": i} | {n: _short(of[i]) for n, of in columns.items() if of is not None}
            for i in sorted(ids, key=lambda i: -float(p[row, i]))
        ])  # fmt: skip
    return result


def _grammar(cycle: Cycle) -> list[Json]:
    """What the grammar, and all else that forbids tokens, said where each new one was chosen.

    `allowed` is the number of tokens that might come there, of `vocabulary`; where it is one,
    `forced` is true. `forbidden` are the likeliest of the others, as {id, p}, by falling p; p is
    the probability by the target's logits alone. `overruled`: the likeliest token is among them.
    """
    result, scores = [], cycle.along(cycle.scores)
    for logits, row in zip(cycle.along(cycle.logits), scores[: cycle.num_kept], strict=False):
        p = logits.softmax(-1)
        is_forbidden = row == -inf
        allowed = len(row) - int(is_forbidden.sum())
        best = _likeliest(p.where(is_forbidden, 0), min(_FORBIDDEN, len(row) - allowed))
        place = {"allowed": allowed, "vocabulary": len(row), "forced": allowed == 1}
        place["forbidden"] = [{"id": i, "p": _short(p[i])} for i in best]
        result.append(place | {"overruled": bool(is_forbidden[logits.argmax()])})
    return result


def _likeliest(weights: Tensor, count: int) -> list[int]:
    return weights.topk(min(count, len(weights))).indices.tolist()


def _number(value: Tensor) -> float | None:
    """A number for JSON, which has no infinity: what is impossible has none."""
    return float(value) if isfinite(value) else None


def _short(value: Tensor) -> float | None:
    """A number to six digits, as nobody sees more of a bar."""
    number = _number(value)
    return number and float(f"{number:.6g}")


def token_logprobs(
    logits: Tensor, tokens: list[int], num_top: int, tokenizer: Tokenizer, has_names: bool = False
) -> list[Json]:
    """Log-probabilities of `tokens` and of the `num_top` likeliest by the target's raw logits.

    logits [at least len(tokens), V]: row i is where token i was chosen. Before every transform, so
    they do not depend on the request's sampling. With `has_names` a token's text is "token_id:7".
    """
    return _entries(tokens, scores_of(logits, tokens, num_top), _naming(tokenizer, has_names))


def prompt_logprobs(s: TextSequence) -> list[Json | None]:
    """Log-probabilities of a prompt's tokens; nothing stands before the first one, which has none.

    Beside what `token_logprobs` gives, an entry has the token's `rank`.
    """
    listed: list[Json | None] = [None]
    # Many tokens come again and again.
    text_of = cache(_naming(s.tokenizer, NAMES in s.request.returns))
    for tokens, scores in s.reading.scores:
        entries = _entries(tokens, scores, text_of)
        ranks = scores.ranks.tolist()
        listed += [e | {"rank": rank} for e, rank in zip(entries, ranks, strict=True)]
    return listed


def _naming(tokenizer: Tokenizer, has_names: bool) -> Callable[[int], str]:
    """What gives a token's text."""
    return lambda token: f"token_id:{token}" if has_names else word_of(token, tokenizer)


def _entries(tokens: list[int], scores: TokenScores, text_of: Callable[[int], str]) -> list[Json]:
    def entry(token: int, logprob: float) -> Json:
        # JSON has no -inf: -9999 is what the field sends for it.
        return {"id": token, "token": text_of(token), "logprob": max(logprob, -9999.0)}

    columns = scores.logprobs.tolist(), scores.top.tolist(), scores.top_logprobs.tolist()
    return [
        entry(token, logprob) | {"top_logprobs": list(map(entry, ids, values))}
        for token, logprob, ids, values in zip(tokens, *columns, strict=True)
    ]
