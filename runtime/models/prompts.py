"""From a text or ids to a prompt's token ids, or an error that names the field; chats: chat.py.

Long texts are read one at a time and with pauses, so that reading never holds up decoding.
"""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from runtime.values import RequestError, in_short

from .catalogue import ROOT


class FairLock:
    """Lets requests do long work one at a time and with pauses, so that decoding keeps its pace.

    The engine's thread needs the interpreter's lock for every operation, and each thread that wants
    it as well makes it wait for milliseconds. Work of a size up to `short` needs no turn. Other
    work begins when the work before has ended, and `pause` seconds times its size have passed. Who
    waits or works has one of the `places`, as each holds a thread of the server.
    """

    def __init__(self, what: str, short: int, pause: float, places: threading.Semaphore) -> None:
        self._what, self._short, self._pause, self._places = what, short, pause, places
        self._turn, self._next = threading.Lock(), 0.0

    @contextmanager
    def take(self, size: int) -> Iterator[None]:
        """Wait for the turn. Raises RequestError 429 where no place is free."""
        if size <= self._short:
            yield
            return
        if not self._places.acquire(blocking=False):
            raise RequestError(f"too many {self._what} at once", status=429, code="queue_full")
        try:
            with self._turn:
                time.sleep(max(0.0, self._next - time.monotonic()))
                try:
                    yield
                finally:
                    self._next = time.monotonic() + size * self._pause
        finally:
            self._places.release()


LONG_TEXT = 20_000  # characters
_places = threading.BoundedSemaphore(8)
large_bodies = FairLock("large bodies", 32 << 10, 5e-8, _places)  # bytes; pauses of 50 ms for 1 MiB
long_texts = FairLock("long prompts", LONG_TEXT, 1e-6, _places)  # of 1 s for 1 MB


@contextmanager
def panics_caught() -> Iterator[None]:
    """Within it a panic of a library in Rust, which is no Exception, is a RuntimeError."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RuntimeError(f"the tokenizer failed: {in_short(error)}") from error


# Whatever reads or writes texts by a tokenizer of the library does so by one of these.
TokenizersBackend._encode_plus = panics_caught()(TokenizersBackend._encode_plus)
TokenizersBackend._decode = panics_caught()(TokenizersBackend._decode)


def bad_field(what: str) -> RequestError:
    """A caller's mistake in the field that this sentence begins with."""
    return RequestError(what, param=re.match(r"\w+", what)[0])


def is_text(value: Any) -> bool:
    """A string, not empty, without lone surrogates (which JSON can write, and UTF-8 cannot)."""
    try:
        return isinstance(value, str) and value.encode("utf-8") != b""
    except UnicodeEncodeError:
        return False


@lru_cache(1)
def _longest_token(tokenizer: Tokenizer) -> int:
    return max(map(len, tokenizer.get_vocab()))  # which takes 0.1 s where there are many


def check_characters(
    count: int, tokenizer: Tokenizer, max_length: int, name: str = "prompt"
) -> None:
    """Raises RequestError if a text of so many characters cannot fit `max_length` tokens."""
    # Twice, as a normaliser may shorten the text.
    if count > LONG_TEXT and count > 2 * _longest_token(tokenizer) * max_length:
        raise RequestError(
            f"the {name}'s {count} characters are more than a context of {max_length} tokens holds",
            param=name,
            code="context_length_exceeded",
        )


def tokenize(
    text: str, tokenizer: Tokenizer, max_length: int, name: str = "prompt", **options: Any
) -> list[int]:
    """The ids of a text, the request's field `name`, which has to fit `max_length` tokens.

    Reading a text of 1 MB can take seconds. So what cannot fit is refused unread (400), and long
    ones are read one at a time: the requests of the others need the processor, too.
    """
    check_characters(len(text), tokenizer, max_length, name)
    with long_texts.take(len(text)):
        return tokenizer(text, verbose=False, **options)["input_ids"]


class Conversation(list[int]):
    """The ids of a prompt that a chat template wrote."""

    goes_on = False  # whether its last message is continued


def prompt_ids(value: Any, tokenizer: Tokenizer, max_length: int) -> list[int]:
    """The ids of a prompt that is continued as it stands: a text, or ids already.

    Raises RequestError for anything else, and for a text that cannot fit `max_length` tokens.
    """
    if isinstance(value, str) and value:
        if not is_text(value):
            raise bad_field("prompt holds a lone surrogate, which is not text")
        if ids := tokenize(value, tokenizer, max_length):
            return ids
    elif isinstance(value, list) and value and all(type(i) is int for i in value):  # no bool
        return value
    raise bad_field("prompt must be a non-empty string or a non-empty list of token ids")


def kind_of(name: str) -> str:
    """The kind of a demo prompt. Example: easy_facts -> easy."""
    return name.partition("_")[0]


def read_prompts(is_chat: bool = False) -> dict[str, str]:
    """The demo prompts by name; a file's last line break is not part of its prompt.

    Those of the kind chat come first, and only where they are put into a chat template.
    """
    files = {path.stem: path for path in (ROOT / "demo_prompts").glob("*.txt")}
    names = [name for name in files if is_chat or kind_of(name) != "chat"]
    names.sort(key=lambda name: (kind_of(name), name))
    return {name: files[name].read_text("utf-8").removesuffix("\n") for name in names}
