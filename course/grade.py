"""Grade a solution in a process of its own, so that whatever it does ends in a sentence.

    grade(3, Path("mine.py"))
    python -m course.grade 3 mine.py RESULT     what the process runs: it writes RESULT, as JSON

The process has limits of output, time and (on Linux) memory. It is no prison: a solution can cheat.
"""

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from tempfile import TemporaryDirectory
from threading import Event, Timer
from traceback import walk_tb
from typing import Any, NamedTuple

from . import checks
from .lab import FOLDER, Mistake, load

LIMIT_S, MOST_BYTES, MOST_PRINTED = 60.0, 4 << 30, 100_000
ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


class Grade(NamedTuple):
    """Whether it is solved, what is said of it, the picture, and what the file has printed."""

    is_solved: bool
    sentence: str
    picture: str = ""
    printed: str = ""


def grade(number: int, path: Path, limit_s: float = LIMIT_S) -> Grade:
    """Run the checks of a task on a file."""
    command = ["course.grade", str(number), str(path.absolute())]
    outcome, sentence, printed = alone(command, limit_s, STDOUT, ALONE)
    return Grade(*(outcome or (False, sentence, "")), printed)


def alone(
    command: list[str], limit_s: float, errors: int | None, environ: dict[str, str]
) -> tuple[Any, str, str]:
    """Run a module in a process, and tell it as its last argument where to write its result.

    Returns the result, or None; then a sentence says why there is none. Last is what was printed.
    """
    with TemporaryDirectory() as folder:
        result, is_late = Path(folder) / "result", Event()
        process = Popen(
            [sys.executable, "-m", *command, result], cwd=FOLDER.parent, env=os.environ | environ,
            start_new_session=True, stdin=DEVNULL, stdout=PIPE, stderr=errors,
        )  # fmt: skip

        def stop() -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started

        timer = Timer(limit_s, lambda: (is_late.set(), stop()))
        timer.start()
        try:
            printed = process.stdout.read(MOST_PRINTED + 1)
            if len(printed) <= MOST_PRINTED:
                process.wait()
        finally:
            timer.cancel()
            stop()
            process.communicate()
        text = printed[:2000].decode("utf-8", "replace")
        with suppress(OSError, ValueError):
            return json.loads(result.read_text("utf-8")), "", text
    name = "prints" if len(printed) > MOST_PRINTED else "endless" if is_late.is_set() else "ends"
    return None, Mistake(name, seconds=limit_s, status=process.returncode).sentence, text


def check(number: int, path: Path) -> str:
    """The picture of success. Raises Mistake, whatever the solution raises."""
    try:
        return checks.check(number, load(path))
    except Mistake:
        raise
    except NotImplementedError:
        raise Mistake("nothing yet", path=path.name) from None
    except BaseException as error:
        told = f"{type(error).__name__}{place_of(error, str(path))}: {error!s:.200}"
        raise Mistake("raises", told=told) from None


def place_of(error: BaseException, file: str) -> str:
    """The line of the file that raised it, and the arguments of the call that led there."""
    own = [at for at in walk_tb(error.__traceback__) if at[0].f_code.co_filename == file]
    if not own:
        return ""
    (frame, _), (_, line) = own[0], own[-1]
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    given = [f"{name} = {frame.f_locals[name]!r:.80}" for name in names]
    given = [each for each in given if " at 0x" not in each]  # such as self
    return f" in line {line}" + (f", in a call with {', '.join(given)}" if given else "")


if __name__ == "__main__":
    number, path, result = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CPU, (90, 90))  # if nobody is left who would stop it
    with suppress(ValueError):  # on macOS, where more is mapped from the beginning
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    try:
        outcome = True, "", check(int(number), Path(path))
    except Mistake as mistake:
        outcome = False, mistake.sentence, mistake.picture
    Path(result).write_text(json.dumps(outcome), "utf-8")
    sys.stdout.flush()
    os._exit(0)  # and so do threads that it has left running
