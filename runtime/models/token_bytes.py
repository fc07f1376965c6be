"""The bytes that tokens stand for: a token may be a part of a character.

Not covered: WordPiece, whose words have no space and whose parts begin with ##.
"""

from collections import Counter
from functools import lru_cache

from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level BPE
_SPACE, _PIECES_SPACE = "Ġ", "▁"  # how the two kinds of tokenizers write a space


def bytes_of(token: int, tokenizer: Tokenizer) -> bytes:
    """What a token is in UTF-8, or a part of it; nothing for an id that the tokenizer lacks."""
    word = tokenizer.convert_ids_to_tokens(token)
    return b"" if word is None else _in_utf8(word, _is_byte_level(tokenizer))


def all_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The bytes of all tokens by id, each as it stands inside a text: with the space before it."""
    is_byte_level = _is_byte_level(tokenizer)
    return {i: _in_utf8(word, is_byte_level) for word, i in tokenizer.get_vocab().items()}


@lru_cache(4)
def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether its words are of characters that each stand for a byte, and not of pieces.

    A large vocabulary of pieces may have the letter Ġ, too.
    """
    first = Counter(word[:1] for word in tokenizer.get_vocab())
    return first[_SPACE] > first[_PIECES_SPACE]


def _in_utf8(word: str, is_byte_level: bool) -> bytes:
    if is_byte_level and all(character in _BYTES for character in word):
        return bytes(map(_BYTES.__getitem__, word))
    if word.startswith("<0x") and word.endswith(">") and len(word) == len("<0x0A>"):
        return bytes.fromhex(word[3:5])  # a byte in a vocabulary of pieces
    return (word if is_byte_level else word.replace(_PIECES_SPACE, " ")).encode()
