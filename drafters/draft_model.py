"""A small model of the target's family drafts, token by token.

    text        The cat │ sat           its KV cache holds "The cat", as the target's does
    forward 1             sat → on      feeds what is not cached yet, and draws d1
    forward 2              on → a       feeds d1, and draws d2: the draft is "on a"
    verdict     on ✓ a ✗ the            its cache keeps "The cat sat on": "a" was never fed

One rule keeps its cache in step with the target's: after a verdict, truncate to what is both cached
and committed; before the next draft, feed every committed token that is not cached. The rule covers
full acceptance (the last drafted token was never fed), a cycle without a draft, and the first call
(the whole prompt is fed).

Compiled code makes a draft in one call, where Python has no say in it (runtime/kernels/chain.py).
Where text is copied, it feeds the model guesses and checks them, as the target does with drafts.
The draft stays the same.

Source: Leviathan et al., arXiv 2211.17192. A draft model with another tokenizer: translated.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from runtime import kernels, plug
from runtime.sampling import Noise
from runtime.values import Draft, Model, Sampling, Verdict

from .base import Chain, Context, ModelDrafter, ModelState


class DraftModelDrafter(ModelDrafter):
    """Runs `--draft-model`, one batched forward per draft step for all requests that use it."""

    name: ClassVar[str] = "draft_model"
    accepts_forced_prefix = True

    @classmethod
    def build(cls, context: Context) -> ModelDrafter:
        """Raises ValueError without a draft model, or with one that does not fit the target."""
        target, draft = context.target, context.draft
        if draft is None:
            raise ValueError(
                "the drafter draft_model needs a model: give --draft-model DIR_OR_HUB_ID"
            )
        if draft.cache.recurrent:  # a draft takes several forwards, and few states are stored
            raise ValueError(
                f"draft model {draft.name} has recurrent layers, which only a target may have: "
                "give another --draft-model, or use --drafter ngram"
            )
        models = draft, target
        backends = [getattr(model.tokenizer, "backend_tokenizer", model) for model in models]
        if backends[0] is not backends[1]:
            words = [model.tokenizer.get_vocab() for model in models]
            if not have_same_words([model.name for model in models], words):
                return plug("drafters.translated").TranslatedDrafter(context, draft)
        if draft.max_length < target.max_length:
            raise ValueError(
                f"draft model {draft.name} holds {draft.max_length} tokens and the target "
                f"{target.max_length}: give --max-model-len {draft.max_length} or less"
            )
        return cls(context, draft)

    def __init__(self, context: Context, draft: Model) -> None:
        """`draft` is a cached model with the target's tokens."""
        self._draft = draft
        self.num_step_weights = draft.num_weights
        prefix = plug("runtime.cache.prefix")
        self._prefixes = prefix and prefix.PrefixCache.of(draft, context.prefix_cache_mb)
        # Embeddings may be padded. Ids that only one of the two models has are never drafted.
        self._vocab_size = context.target.vocab_size
        self._shared = min(draft.vocab_size, self._vocab_size)
        # A call of C chooses among some of these words.
        self._words = kernels.FrequentWords(draft, self._shared) if kernels.are_used() else None

    def open(self, prompt: Sequence[int], sampling: Sampling, noise: Noise) -> ModelState:
        row = self._draft.cache.open_row()
        return ModelState(row=row, text=list(prompt), sampling=sampling, noise=noise)

    def propose_batch(self, states: list[ModelState], max_tokens: list[int]) -> list[Draft]:
        """A draft for each state; the first forward also feeds what is not cached yet."""
        model, cache = self._draft, self._draft.cache
        for state in states:
            self._rewind(state)
            held, count = cache.lengths[state.row], len(state.text)
            assert held < count, f"its cache holds {held} tokens of a text of {count}: truncate it"
        fed = [[*state.text[cache.lengths[state.row] :], *state.forced] for state in states]
        # A target of more (padded) rows may read an id that the draft model cannot read.
        limits = [
            limit if max(ids) < model.vocab_size else 0
            for limit, ids in zip(max_tokens, fed, strict=True)
        ]
        is_compiled = model.compiled and model.compiled.is_compiled
        # What the grammar forces is fed, too. The draft begins with it.
        free = [max(0, n - len(s.forced)) for n, s in zip(limits, states, strict=True)]
        if is_compiled and kernels.can_chain(cache, states, fed, free):
            words, rarer = self._words.of(states)
            drafts = kernels.draft_chain(
                model.compiled.decoder, cache, states, fed, free, words, rarer=rarer
            )
            begins = [s.forced[:n] for s, n in zip(states, limits, strict=True)]
            return [begun(*each) for each in zip(begins, drafts, strict=True)]
        chains = list(map(Chain, states, limits))
        while active := [i for i, each in enumerate(chains) if each.is_open]:
            rows = [states[i].row for i in active]
            output = model.forward(rows, [fed[i] for i in active], num_logits=[1] * len(active))
            for i, logits in zip(active, output.logits, strict=True):
                fed[i] = [chains[i].extend(logits[0, : self._shared])]
        return [each.draft(self._vocab_size) for each in chains]

    def _rewind(self, state: ModelState) -> None:
        """Truncate the cache to the text, or fill an empty one with a beginning that is known.

        The last token is always left to be fed. Tokens of a draft that failed are dropped.
        """
        cache, row = self._draft.cache, state.row
        # Under the rule of rejection drafts decide the text, and so would roundings of keys.
        may_restore = state.sampling.is_coupled and not state.sampling.isolated
        if self._prefixes and may_restore and not cache.lengths[row]:
            self._prefixes.restore(row, self._fed_text(state))
        cache.truncate(row, min(cache.lengths[row], len(self._fed_text(state)) - 1))

    def _fed_text(self, state: ModelState) -> list[int]:
        return state.text  # in the model's own tokens

    def observe(self, state: ModelState, verdict: Verdict) -> None:
        cache = self._draft.cache
        # Before the append, len(state.text) of the cached tokens are committed text; of the draft
        # after them, `accepted` tokens are.
        committed = len(state.text) + verdict.accepted
        cache.truncate(state.row, min(cache.lengths[state.row], committed))
        state.text.extend(verdict.tokens)

    def close(self, state: ModelState) -> None:
        try:
            if self._prefixes and not state.sampling.isolated:
                self._prefixes.remember(state.row, self._fed_text(state))
        finally:
            self._draft.cache.close_row(state.row)


def begun(forced: Sequence[int], draft: Draft) -> Draft:
    """A draft that begins with what the grammar forces."""
    if not forced:
        return draft
    sure = draft.confidence and [1.0] * len(forced) + draft.confidence
    return replace(draft, tokens=[*forced, *draft.tokens], confidence=sure)


def have_same_words(names: list[str], words: list[dict[str, int]]) -> bool:
    """Whether a draft model and its target have the same tokens with the same ids.

    They are compared by content, because vocabularies of one size may differ. GGUF files fill up
    their vocabularies with tokens such as [PAD151665], which are never written: Qwen2.5's 7B has
    more of them than its 0.5B. Raises ValueError if they differ and nobody translates.
    """
    differing = words[0].items() ^ words[1].items()
    written = {(token, i) for token, i in differing if token != f"[PAD{i}]"}
    if written and not plug("drafters.translated"):
        token, i = min(written, key=lambda entry: entry[1])
        raise ValueError(
            f"draft model {names[0]} and target {names[1]} have different tokenizers "
            f"(only one of them has {token!r} as id {i}): "
            "give a --draft-model of the same family, or use --drafter ngram"
        )
    return not written
