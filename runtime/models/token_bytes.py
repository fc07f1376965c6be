"""The bytes that tokens stand for: a token may be a part of a character.

Not covered: WordPiece, whose words have no space and whose parts begin with ##.
"""

from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level BPE
_SPACE, _PIECES_SPACE = "Ġ", "▁"  # how the two kinds of tokenizers write a space


def bytes_of(token: int, tokenizer: Tokenizer) -> bytes:
    """What a token is in UTF-8, or a part of it; nothing for an id that the tokenizer lacks."""
    if (word := tokenizer.convert_ids_to_tokens(token)) is None:  # the model has more rows
        return b""
    if _is_byte(word):
        return bytes.fromhex(word[3:5])
    if word.startswith(_PIECES_SPACE):  # which decoding it alone would lose
        return word.replace(_PIECES_SPACE, " ").encode()
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    is_part = "\ufffd" in text and all(character in _BYTES for character in word)
    return bytes(map(_BYTES.__getitem__, word)) if is_part else text.encode()


def all_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The bytes of all tokens by id, each as it stands inside a text: with the space before it."""
    ids = tokenizer.get_vocab()
    is_byte_level = any(_SPACE in word for word in ids)
    found = dict[int, bytes]()
    for word, i in ids.items():
        if is_byte_level and all(character in _BYTES for character in word):
            found[i] = bytes(map(_BYTES.__getitem__, word))
        elif _is_byte(word):
            found[i] = bytes.fromhex(word[3:5])
        else:
            found[i] = word.replace(_PIECES_SPACE, " ").encode()
    return found


def _is_byte(word: str) -> bool:
    """Whether it is written as one byte of a vocabulary of pieces. Example: <0x0A>."""
    return word.startswith("<0x") and word.endswith(">") and len(word) == len("<0xFF>")
