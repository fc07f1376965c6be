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
    names, vocabularies = [draft, target], list[Texts]()  # of GGUF files
    for name in names:
        with explained(name, "", options):
            if is_gguf(place := resolve_model(name)):
                file = opened[place] = open_model(place)
                vocabularies.append(file.metadata["tokenizer.ggml.tokens"])
            else:
                check_folder(place)
    if len({each.tobytes() for each in vocabularies}) > 1:
        with explained(draft, "its tokens: ", options):
            ids = [{token: i for i, token in enumerate(tokens)} for tokens in vocabularies]
        compare(names, ids)
