"""Tries a grammar in a child process, because a grammar may crash the library or exhaust memory.

What the child builds, the server builds, too. measure.py refuses what is known to take long, by
sizes that are the same on every machine. So the child's limit of time is for what nobody foresaw:
it is our fault, and no client's. llguidance translates GBNF in Python, which may take seconds, so
the child does that for the server.
"""

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # then Python looks for modules beside no file of ours
    sys.path.append(str(Path(__file__).parents[2]))

from runtime.models.child import Child, bound_memory, serve

BUILD_S = 20.0  # of a processor: ten times what the largest grammar needs that is not refused
_STACK_BYTES = 1 << 20  # a thread of the server has 8 MiB, so deep rules cannot end the server
_TOO_LARGE = "is nested too deeply, or takes too much memory to build"
_MOST_CHARACTERS = 4096  # of a message
MOST_FORCED = 1 << 14
# In errors that come of the text alone, and so come again: a row, or all rows of a mask, too wide.
OF_THE_TEXT = "Current row has", "Too many items"


def build(tokenizer: Any, grammar: str, row: int, mask: int) -> Any:
    """A matcher of llguidance's, whose steps and memory are bounded: see Limits in measure.py.

    Fuel: half of the library's limit, 5 to 70 ms; words in any script need 85,000 of it. States:
    15,000 of them take up to 42 MB.
    """
    from llguidance import LLMatcher, LLParserLimits

    bounds = {"max_items_in_row": row, "step_max_items": mask, "max_lexer_states": 15_000}
    limits = LLParserLimits(step_lexer_fuel=100_000, **bounds)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def reason_of(matcher: Any) -> str:
    """Why llguidance's matcher cannot go on, without what it dumps; "" if it can.

    Before each mask the library tokenises all text that must follow: 4 ms for so many bytes.
    """
    if matcher.is_error():
        error = re.split("<state>|<backtrace>", matcher.get_error())[0].strip()
        return "no text obeys it" if error.startswith("NoExtension") else error
    is_long = len(matcher.compute_ff_bytes()) > MOST_FORCED
    return f"more than {MOST_FORCED} bytes must follow at once" if is_long else ""


class Probe(Child):
    """The child that tries grammars for one vocabulary."""

    def check(self, grammar: str, row: int, mask: int) -> None:
        """Raises ValueError, saying why, for a grammar that cannot be used.

        Raises TimeoutError where BUILD_S are over: then measure.py has missed something.
        """
        self._tried("build", grammar, row, mask)

    def in_lark(self, rules: str) -> str:
        """GBNF as rules of Lark's. Raises what `check` raises."""
        return self._tried("translate", rules)

    def _tried(self, *asked: Any) -> str:
        try:
            why, text = self.ask(*asked)
        except EOFError:
            why = _TOO_LARGE
        if why is None:
            raise TimeoutError
        if why:
            raise ValueError(why)
        return text


def _translated(rules: str) -> tuple[str, str]:
    """What is wrong with GBNF, or the same in Lark."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return "", gbnf_to_lark(rules)
    except MemoryError:
        raise
    except Exception as error:  # it has many kinds
        return f"is no GBNF: {error}", ""


def _main() -> None:
    from llguidance import LLMatcher, LLTokenizer

    limit_s, *words = json.loads(sys.stdin.buffer.readline())
    tokenizer = LLTokenizer(*words)
    # The first grammar of a process also prepares the vocabulary.
    LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema({"type": "object"})).compute_bitmask()

    def built(grammar: str, *limits: int) -> tuple[str, str]:
        """What is wrong with a grammar at its first mask, or behind what is forced at first."""
        matcher = build(tokenizer, grammar, *limits)
        if why := reason_of(matcher):
            return why, ""
        matcher.compute_bitmask()
        matcher.consume_tokens(matcher.compute_ff_tokens())  # all texts begin with these
        matcher.compute_bitmask()
        return reason_of(matcher), ""

    def attempt(answer: int, what: str, *asked: Any) -> None:
        """In a process that may be ended within any operation."""
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        why, text = {"build": built, "translate": _translated}[what](*asked)
        with open(answer, "w") as pipe:
            json.dump((why[:_MOST_CHARACTERS], text), pipe)
        os._exit(0)

    def tried(*asked: Any) -> tuple[str | None, str]:
        """What is wrong, None where the time was over, and the text that was asked for."""
        reader, writer = os.pipe()
        if not (pid := os.fork()):  # the vocabulary is there, and stays if it has to be ended
            threading.stack_size(_STACK_BYTES)
            worker = threading.Thread(target=attempt, args=(writer, *asked))
            worker.start()
            worker.join()
            os._exit(1)  # it has failed, and has said so
        os.close(writer)
        with os.fdopen(reader) as pipe:
            answer = pipe.read()
        ended_by = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if ended_by:
            return (None if ended_by == -signal.SIGPROF else _TOO_LARGE), ""
        return json.loads(answer)

    os.nice(5)  # requests that run come first
    bound_memory()
    serve(tried)


if __name__ == "__main__":
    _main()
