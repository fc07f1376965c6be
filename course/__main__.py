"""The course's command line.

python -m course                     the way so far
python -m course 3                   grade task 3
python -m course 3 --file mine.py    grade another file; the exit status is 0 if it is solved
"""

import argparse
from pathlib import Path

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
    print(*(ahead or ["All is done. docs/exercises.md leads on to the engine."])[:1])
    return 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser("python -m course", description="A course that grades.")
    parser.add_argument("number", type=int, nargs="?", choices=range(1, 9), help="of the task")
    parser.add_argument("--file", type=Path, help="your solution; else the one in course/tasks")
    options = parser.parse_args()
    if options.number is None:
        return show_way()
    told = grade(options.number, options.file or path_of(options.number))
    print(told.printed and f"Your file has printed:\n{told.printed}\n", end="")
    print("Solved." if told.is_solved else f"Not yet. {told.sentence}", told.picture, sep="\n\n")
    return 0 if told.is_solved else 1


if __name__ == "__main__":
    raise SystemExit(main())
