"""Where this program stores what it makes on a machine: compiled kernels, and measured times."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path


def own_folder() -> Path:
    """A folder that only the user can write to, as code in it is run.

    Raises PermissionError if others could put another one in its place: whoever may write to a
    folder on the way there, or owns it or a link. In /tmp they may write, and not rename what is
    ours.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
    folder = root / "speculative-decoding" / "compiled"
    for place in (folder.parent, folder):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for place in _passed(folder):
        mode, owners = place.stat().st_mode, {place.stat().st_uid, place.lstat().st_uid}
        is_tmp = mode & stat.S_ISVTX and not place.samefile(folder)
        if owners - {0, os.geteuid()} or (mode & 0o022 and not is_tmp):
            hint = f"chmod go-w {place}, or XDG_CACHE_HOME names another place"
            raise PermissionError(f"{place} belongs to others, or others may write there ({hint})")
    return folder


def _passed(path: Path) -> Iterator[Path]:
    """The folders and links that are gone through on the way to a path, and the path."""
    for place in (*reversed(path.parents), path):
        if place.is_symlink():
            yield from _passed(place.parent / place.readlink())
        yield place
