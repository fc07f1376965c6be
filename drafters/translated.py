"""A draft model with another tokenizer: its tokens and the target's are matched by their bytes.

    text       The c│at sat         as the target has it
    read       The │c│at│ sat       each of its tokens in the draft model's tokens
    draft      on│ the│ mat         freely, or among the words that both have
    proposed   on│ the m│at         as the target's tokenizer writes that text

What is read is each token for itself, so a verdict never changes what was read before. How a draft
is made depends on the request:

    greedy        The draft model writes freely. Its text is encoded by the target's tokenizer. The
                  last token is dropped, as more text might make it longer, unless the draft model
                  itself ended a token of these bytes there.
    drawn,        Only words that both have are drafted: all others get −inf. Scores stand at the
    or masked     target's ids, so the noise is the target's (coupled), q covers its vocabulary
                  (rejection), and penalties and masks hold.

How much that brings depends on the pair: server/trial.py tries it before it is used. Sources: Timor
et al., arXiv 2502.05202, for rejection among common words. Not covered: draft models with recurrent
layers, what a grammar forces.
"""

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from math import inf

import torch
from torch import Tensor

from runtime.models.token_bytes import all_bytes
from runtime.sampling import Noise
from runtime.values import Draft, Model, Sampling, Verdict

from .base import Chain, Context, ModelState
from .draft_model import DraftModelDrafter

_TAIL = 8  # of the text's tokens, behind which a draft's text is encoded
_LONGEST = 64  # bytes of a word that is looked for


def usual_end(model: Model, ends: Collection[int]) -> int:
    """The one of these tokens that mostly ends the model's texts."""
    end = model.tokenizer.eos_token_id
    return end if end in ends else min(ends)


class Translation:
    """The tokens of a target and of a draft model, matched by their bytes.

    An id that a model itself lacks is never read or written, whatever its tokenizer has.
    """

    def __init__(self, target: Model, draft: Model) -> None:
        self._tokenizer, self._size = target.tokenizer, target.vocab_size
        self._bytes, self._draft_bytes = all_bytes(target.tokenizer), all_bytes(draft.tokenizer)
        # The draft model's ids. Of two tokens with the same bytes the last one stays: vocabularies
        # of pieces begin with all single bytes, which are rarely written.
        known = sorted(self._draft_bytes.items())
        self._ids = {word: i for i, word in known if word and i < draft.vocab_size}
        ours = [(i, word) for i, word in sorted(self._bytes.items()) if i < self._size]
        self.alike = {i: self._ids[word] for i, word in ours if word in self._ids}
        self._target_ids = {draft_id: i for i, draft_id in self.alike.items()}
        self.share = len(self.alike) / max(1, len(self._bytes))  # of the target's tokens
        # Ends of a text that are written in different ways stand for each other.
        ends = {i for i in target.eos_ids if i < self._size}
        self.draft_ends = {i for i in draft.eos_ids if i < draft.vocab_size}
        if ends and self.draft_ends:
            for draft_end in self.draft_ends:
                self._target_ids.setdefault(draft_end, usual_end(target, ends))
            draft_end = usual_end(draft, self.draft_ends)
            self.alike |= dict.fromkeys(ends - self.alike.keys(), draft_end)
        device = target.cache.device
        self._places = torch.tensor(list(self.alike), device=device, dtype=torch.int64)
        self._columns = torch.tensor(list(self.alike.values()), device=device, dtype=torch.int64)
        first, self._first = draft.tokenizer.bos_token_id, target.tokenizer.bos_token_id
        begins = first in draft.tokenizer("").input_ids and first < draft.vocab_size
        self._begin = [first] if begins else []  # of each of the draft model's texts
        self.draft_ids = cache(self._split)

    def read(self, prompt: Sequence[int]) -> list[int]:
        """A prompt in the draft model's tokens. Its beginning stands for the target's, if any."""
        has_first = list(prompt[:1]) == [self._first]
        is_told = has_first and (self._begin or self._first not in self.alike)
        rest = prompt[1:] if is_told else prompt
        return [*self._begin, *(i for token in rest for i in self.draft_ids(token))]

    def _split(self, token: int) -> list[int]:
        """A token of the target in the draft model's: one, or the longest that make its bytes.

        The draft model's tokenizer often spells it in another way, which brought nothing more.
        """
        if token in self.alike:
            return [self.alike[token]]
        word, found = self._bytes.get(token, b""), list[int]()
        while word:
            lengths = range(min(len(word), _LONGEST), 1, -1)
            length = next((n for n in lengths if word[:n] in self._ids), 1)
            found += [self._ids[word[:length]]] if word[:length] in self._ids else []
            word = word[length:]
        return found

    def scores(self, logits: Tensor) -> Tensor:
        """The draft model's logits [V] at the target's ids; −inf for what only the target has."""
        scores = logits.new_full((self._size,), -inf)
        scores[self._places] = logits[self._columns]
        return scores

    def encoded(self, text: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """The target's tokens of what the draft model wrote behind a text of the target."""
        is_end = bool(drafted) and drafted[-1] in self.draft_ends
        written = drafted[:-1] if is_end else drafted
        words = [self._draft_bytes.get(i, b"") for i in written]
        before = b"".join(self._bytes.get(i, b"") for i in text[-_TAIL:])
        # Bytes that begin amid a character are left out, and so are those that end amid one.
        decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        whole = decoder.decode(before + b"".join(words))
        rest = sum(map(len, words)) - len(decoder.getstate()[0])
        ids = self._tokenizer(whole, add_special_tokens=False).input_ids if words else []
        begin = len(ids)
        while begin and rest > 0:
            begin -= 1
            rest -= len(self._bytes.get(ids[begin], b""))
        if rest:  # a token stands across the border: the target spells its text in another way
            known = [self._target_ids.get(i) for i in written]
            return known[: [*known, None].index(None)]
        tokens = list(takewhile(self._size.__gt__, ids[begin:]))
        if is_end and len(tokens) == len(ids) - begin:
            end = self._target_ids.get(drafted[-1])
            return tokens if end is None else [*tokens, end]
        is_whole = tokens and self._bytes.get(tokens[-1]) == words[-1]
        return tokens if is_whole else tokens[:-1]


@dataclass(slots=True, kw_only=True)
class _State(ModelState):
    """`text` has the target's tokens, and `read` the draft model's of the same text."""

    read: list[int]
    drafted: list[int] = field(default_factory=list)  # what its cache may hold behind them


class _Freely(Chain):
    """A draft of the draft model's likeliest tokens."""

    def __init__(self, state: _State, limit: int, words: Translation) -> None:
        super().__init__(replace(state, text=state.read), limit)
        self._whole, self._words = state.text, words

    @property
    def is_open(self) -> bool:
        return super().is_open and not self._words.draft_ends & {*self.tokens[-1:]}

    def draft(self, vocab_size: int = 0) -> Draft:
        """The target's tokens of what was written."""
        return Draft(self._words.encoded(self._whole, self.tokens)[: self._limit])


class _InCommon(Chain):
    """A draft among the words that both have, chosen as the target chooses."""

    def __init__(self, state: _State, limit: int, words: Translation) -> None:
        super().__init__(state, limit)
        self._words = words

    def extend(self, logits: Tensor) -> int:
        """Choose the next token by the draft model's logits [V]. Returns the draft model's id."""
        return self._words.alike.get(super().extend(self._words.scores(logits)), 0)


class TranslatedDrafter(DraftModelDrafter):
    """Runs a `--draft-model` that has another tokenizer than the target."""

    accepts_forced_prefix = False

    def __init__(self, context: Context, draft: Model) -> None:
        super().__init__(context, draft)
        self.words = Translation(context.target, draft)

    def open(self, prompt: Sequence[int], sampling: Sampling, noise: Noise) -> _State:
        read, row = self.words.read(prompt), self._draft.cache.open_row()
        return _State(row=row, text=list(prompt), sampling=sampling, noise=noise, read=read)

    def _fed_text(self, state: _State) -> list[int]:
        return state.read

    def propose_batch(self, states: list[_State], max_tokens: list[int]) -> list[Draft]:
        """A draft for each state; the first forward also feeds what is not cached yet."""
        model, cache, drafts = self._draft, self._draft.cache, list[Chain]()
        for state, limit in zip(states, max_tokens, strict=True):
            state.drafted = []  # a draft that failed may have left some
            if has_room := bool(state.read) and len(state.read) + limit <= model.max_length:
                self._rewind(state)
            is_free = state.sampling.is_greedy and not state.sampling.penalties
            kind = _Freely if is_free else _InCommon
            drafts.append(kind(state, limit if has_room else 0, self.words))
        fed = [state.read[cache.lengths[state.row] :] for state in states]
        while active := [i for i, draft in enumerate(drafts) if draft.is_open]:
            rows = [states[i].row for i in active]
            output = model.forward(rows, [fed[i] for i in active], num_logits=[1] * len(active))
            for i, logits in zip(active, output.logits, strict=True):
                fed[i] = [drafts[i].extend(logits[0])]
                states[i].drafted += fed[i]
        return [draft.draft() for draft in drafts]

    def observe(self, state: _State, verdict: Verdict) -> None:
        count = len(state.read)
        state.text += verdict.tokens
        for token in verdict.tokens:
            state.read += self.words.draft_ids(token)
        pairs = zip(state.drafted, state.read[count:], strict=False)
        num_alike = [*(ours == theirs for ours, theirs in pairs), False].index(False)
        cache = self._draft.cache
        cache.truncate(state.row, min(cache.lengths[state.row], count + num_alike))
        state.drafted = []
