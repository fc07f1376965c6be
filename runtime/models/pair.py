"""A draft model is refused before its target is read, which takes long."""

from collections.abc import Callable

from .catalogue import resolve_model
from .files import is_gguf
from .gguf_file import Texts
from .gguf_model import open_model, opened
from .loading import ModelOptions, check_folder, explained


def check_pair(
    target: str, draft: str, options: ModelOptions, compare: Callable[..., None]
) -> None:
    """Raises StartError for a draft model that is broken or missing.

    And what `compare` raises for the names and the tokens of two GGUF files.
    """
    names, vocabularies = [draft, target], list[Texts | None]()
    for name in names:
        with explained(name, "", options):
            vocabularies.append(_tokens_of(resolve_model(name)))
    if all(vocabularies) and vocabularies[0].tobytes() != vocabularies[1].tobytes():
        with explained(draft, "its tokens: ", options):
            ids = [{token: i for i, token in enumerate(tokens)} for tokens in vocabularies]
        compare(names, ids)


def _tokens_of(place: str) -> Texts | None:
    """The vocabulary of a GGUF file; None of other models. Raises BadFile or StartError."""
    if not is_gguf(place):
        check_folder(place)
        return None
    file = opened[place] = open_model(place)
    return file.metadata["tokenizer.ggml.tokens"]
