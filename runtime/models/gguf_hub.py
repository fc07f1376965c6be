"""GGUF files of the Hugging Face hub, by the names that people know: OWNER/NAME-GGUF:Q4_K_M.

Behind the colon stands how the weights are packed, as the file's name ends. Without it Q4_K_M
is meant, which is the usual one, or else the first file there is. All parts of a model in several
files are fetched. What is in the hub's cache is taken from there, without a network; so is the
first file there if a name says nothing and the hub cannot be asked.
"""

import re
from pathlib import Path

from huggingface_hub import hf_hub_download, model_info, snapshot_download
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

from runtime.values import in_short

from .gguf_file import PART, BadFile

_NAME = re.compile(r"([\w-][\w.-]*/[\w.-]+?)(?::([\w.-]+))?")
_TYPE = re.compile(r"[a-zA-Z]+\d")  # what a kind begins with; in Q4_0 a _ stands before no kind
_USUAL, _SECONDS = "q4_k_m", 20


def is_named(name: str) -> bool:
    """Whether a name means a GGUF file of the hub; a folder or file of that name comes first."""
    match = _NAME.fullmatch(name)
    is_file = bool(match and (match[2] or match[1].lower().endswith("gguf")))
    return is_file and not Path(name).exists()


def fetch(name: str) -> str:
    """The file on this machine, or its first part. Raises BadFile, in one line that says why."""
    repository, wanted = _NAME.fullmatch(name).groups()
    if cached := on_disk(name):
        return cached
    try:
        files = [entry.rfilename for entry in model_info(repository, timeout=_SECONDS).siblings]
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise BadFile(f"the hub has no {repository}, or it is not for everybody") from error
    except Exception as error:  # no network, or a hub that fails
        if cached := _cached(repository, wanted):
            return cached
        raise BadFile(f"cannot ask the hub for {repository}: {in_short(error)}") from error
    if not (chosen := choose(files, wanted)):
        there = sorted({_kind(file) for file in files if file.lower().endswith(".gguf")})
        if not there:
            raise BadFile(f"{repository} has no GGUF files: give the name of one that has")
        raise BadFile(f"{repository} has no {wanted or _USUAL} file (it has {', '.join(there)})")
    try:
        paths = [hf_hub_download(repository, file) for file in chosen]
    except Exception as error:
        raise BadFile(f"cannot fetch {chosen[0]} of {repository}: {in_short(error)}") from error
    return paths[0]


def on_disk(name: str) -> str | None:
    """The file that `fetch` returns, if nobody need be asked for it."""
    repository, wanted = _NAME.fullmatch(name).groups()
    return _cached(repository, wanted or _USUAL)


def choose(files: list[str], wanted: str | None) -> list[str]:
    """Which of a repository's files a model is, its parts in order; none if it has no such model.

    Example: ["a-q4_0.gguf", "a-q8_0-00001-of-00002.gguf", …-00002-of-00002.gguf], "Q8_0" -> both.
    """
    models = sorted(f for f in files if f.lower().endswith(".gguf") and "mmproj" not in f.lower())
    kind = (wanted or _USUAL).lower().replace("fp16", "f16")
    ends = tuple(mark + kind for mark in ("-./_" if _TYPE.match(kind) else "-./"))
    fitting = [f for f in models if f"/{_stem(f)}".lower().replace("fp16", "f16").endswith(ends)]
    first = next(iter(fitting or (models if wanted is None else [])), None)
    return [] if first is None else [file for file in models if _stem(file) == _stem(first)]


def _stem(file: str) -> str:
    """A file's name without the ending and the number of a part."""
    part = PART.fullmatch(file)
    return part[1] if part else file[: -len(".gguf")]


def _kind(file: str) -> str:
    """What a file's name ends in.

    Example: "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf" -> "q4_k_m".
    """
    return re.split(rf"[-./]|_(?={_TYPE.pattern})", _stem(file))[-1]


def _cached(repository: str, wanted: str | None) -> str | None:
    """The file in the hub's cache, if all its parts are there: nobody is asked for it then."""
    try:
        folder = Path(snapshot_download(repository, local_files_only=True))
    except Exception:
        return None
    chosen = choose([str(path.relative_to(folder)) for path in folder.rglob("*.gguf")], wanted)
    part = PART.fullmatch(chosen[0]) if chosen else None
    is_whole = bool(chosen) and len(chosen) == (int(part[3]) if part else 1)
    return str(folder / chosen[0]) if is_whole else None
