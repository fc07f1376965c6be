"""The last task's command: a drafter of one's own on a real model.

python -m course drafter mine.py:Mine
python -m course drafter mine.py:Mine --model embedded --json      quick; for a teacher's list

tools/examine.py examines the drafter, in a process of its own; this file has the words. A drafter
passes if it is right. How fast it is, is told.
"""

import argparse
import json
import sys
from pathlib import Path

from .grade import alone
from .lab import Mistake, picture

_HEADS = """of plain: speed, where plain decoding has 1. tok pass: tokens that a pass of the target
gives. accepted: share of the drafted tokens. cycles: those compared, or in which `auto` chose so.
differing: those where another draft came alone, or from a fresh state; kept and fresh: the shares
accepted of both. equal: texts that are plain decoding's. p of q: the odds of draws like these."""
LIMIT_S = 7200.0  # a call of the drafter, and its start, have limits of their own


def main(arguments: list[str]) -> int:
    """Run the command line: 0 if it passes, 1 if not, 2 if that cannot be told."""
    parser = argparse.ArgumentParser("python -m course drafter", description="Grade a drafter.")
    parser.add_argument("drafter", metavar="FILE.py:Class", help="your drafter")
    parser.add_argument("--model", help="the target, as the server takes it; embedded is quick")
    parser.add_argument("--draft-model", help="the small model that it is compared with")
    types = "auto", "packed", "float32", "bfloat16"
    parser.add_argument("--dtype", default="auto", choices=types, help="packed is quicker")
    parser.add_argument("--tokens", type=int, default=24, help="of each text (default: 24)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    flags = parser.parse_args(arguments)
    path, _, name = flags.drafter.rpartition(":")
    if not name or not Path(path).is_file():
        parser.error(f"there is no file {path!r}: write FILE.py:Class")
    if not 8 <= flags.tokens <= 1000:  # in a few tokens nothing is rejected
        parser.error("--tokens must be from 8 to 1000")
    given = vars(flags) | {"drafter": f"{Path(path).absolute()}:{name}"}
    is_json = given.pop("json")
    outcome, ended, printed = alone(["tools.examine", json.dumps(given)], LIMIT_S, None, {})
    status, tables, document = outcome or (1, "", {"drafter": flags.drafter, "passed": False})
    if status == 2:
        print(f"error: {tables}", file=sys.stderr)
        return 2
    found = document.pop("found", [])
    says = [Mistake(name, **details).sentence for name, details in found] or [ended] * status
    if any("NotImplementedError" in line for line in says):
        says = [Mistake("nothing yet", path=path).sentence]
    if is_json:
        print(json.dumps(document | {"says": says}))
    else:
        print(printed and f"Your file has printed:\n{printed}\n", end="")
        passed = "Not passed." if status else "Passed: what is checked is right."
        print(tables, tables and _HEADS, passed, *says, sep="\n")
        for cycle in (details["cycle"] for _, details in found if "cycle" in details):
            print(picture(*cycle, lambda words: "".join(words).replace("\n", "⏎")))
        if "by_chance" in document:
            print("Not checked, as its drafts have a chance of their own: rollback, shared state.")
    return status
