"""The course's command line.

python -m course                     the way so far
python -m course 3                   grade task 3
python -m course 3 --file mine.py    grade another file; the exit status is 0 if it is solved
python -m course drafter mine.py:Mine    grade a drafter of your own, which is task 9
"""

import argparse
import sys
from pathlib import Path

from . import drafter
from .grade import grade
from .lab import FOLDER, path_of


def show_way() -> int:
    """Grade all tasks; say which are done, and what is next."""
    ahead = []
    for number in range(1, 9):
        path = path_of(number).relative_to(FOLDER.parent)
        is_solved = grade(number, path_of(number)).is_solved
        ahead += [] if is_solved else [f"Next: read {path}, and write what it asks for."]
        print("done   " if is_solved else "not yet", path, flush=True)
    last = path_of(9).relative_to(FOLDER.parent)
    print(f"by hand {last}    python -m course drafter {last}:Mine")
    print(*(ahead or ["Next: task 9, in the engine, where docs/exercises.md leads on."])[:1])
    return 0


def main() -> int:
    """Run the command line."""
    if sys.argv[1:2] == ["drafter"]:
        return drafter.main(sys.argv[2:])
    parser = argparse.ArgumentParser("python -m course", description="A course that grades.")
    parser.add_argument("number", type=int, nargs="?", choices=range(1, 10), help="of the task")
    parser.add_argument("--file", type=Path, help="your solution; else the one in course/tasks")
    options = parser.parse_args()
    if options.number is None:
        return show_way()
    if options.number == 9:
        return drafter.main([f"{options.file or path_of(9)}:Mine"])
    told = grade(options.number, options.file or path_of(options.number))
    print(told.printed and f"Your file has printed:\n{told.printed}\n", end="")
    print("Solved." if told.is_solved else f"Not yet. {told.sentence}", told.picture, sep="\n\n")
    return 0 if told.is_solved else 1


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None
