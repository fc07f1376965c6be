"""Text that is shown as it grows is that of a plain string of all tokens, for every input.

Hypothesis looks for an input for which it is not, and prints the smallest one. The inputs are wild
on purpose, and follow from the code and not from chance: a run that passed passes again.
"""

import os

from hypothesis import configuration, given, settings
from hypothesis import strategies as st

from runtime.text import TextStream

settings.register_profile("claims", deadline=None, derandomize=True, database=None)
settings.load_profile("claims")
# Tables of characters and constants would be kept even without a database: in the checkout.
configuration.set_hypothesis_home_dir(os.devnull)

WORDS = [bytes([i]) for i in b"abEND \x80\xa9\xc3\xf0\xff"] + [b"aab", b"END", b"", "é🙂".encode()]
KINDS = st.sampled_from(["accepted", "recovered", "bonus"])
STOPS = ["a", "aab", "abaa", "END", "N", "\ufffda", "é🙂", "🙂é"]


class WordTokenizer:
    """Tokens are indexes of WORDS, some of which are parts of a character."""

    def decode(self, tokens, skip_special_tokens):
        return b"".join(WORDS[i] for i in tokens).decode("utf-8", "replace")


@given(
    st.lists(st.tuples(st.sampled_from(range(len(WORDS))), KINDS, st.booleans()), max_size=40),
    st.lists(st.sampled_from(STOPS), max_size=3),
)
@settings(max_examples=200)
def test_text_grows_as_a_plain_string_of_all_tokens_does(tokens, stops):
    """Each character has its kind; a stop string cuts, and what may become one is not shown yet."""
    tokenizer, growing = WordTokenizer(), TextStream(WordTokenizer(), stops)
    known, shown, is_cut = [], [], False  # characters with their kinds
    for count, (token, kind, is_end_of_cycle) in enumerate(tokens, 1):
        whole = tokenizer.decode([token for token, _, _ in tokens[:count]], True)
        if not whole.endswith("\ufffd"):
            known += [(character, kind) for character in whole[len(known) :]]
            cuts = [whole.index(stop) for stop in stops if stop in whole]
            is_cut, known = bool(cuts), known[: min(cuts, default=None)]
        assert growing.push(token, kind) == is_cut
        text = growing.text
        assert text == "".join(character for character, _ in known)
        if is_cut or is_end_of_cycle:
            shown += growing.release()
            held = {stop[:n] for stop in stops for n in range(1, len(stop))}
            may_be_shown = len(text) - max((len(h) for h in held if text.endswith(h)), default=0)
            assert characters(shown) == known[: max(may_be_shown, len(characters(shown)))]
        if is_cut:
            break
    shown += growing.release(final=True)
    assert characters(shown) == characters(growing.stretches()) == known


def characters(stretches):
    return [(character, kind) for text, kind in stretches for character in text]
