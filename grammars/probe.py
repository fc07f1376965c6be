"""Tries a grammar in a child, with a bound of time: some grammars take hours to build, or forever.

The library's limits bound states and items, not seconds: forty patterns that must all match took
nine minutes. What the child builds in time, the server builds, too.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # then Python looks for modules beside no file of ours
    sys.path.append(str(Path(__file__).parents[1]))

from models.child import Child, bound_memory, serve

BUILD_S = 0.2  # of a processor; the server needs as long again
_TOO_LONG = f"takes longer than {BUILD_S:g} s to build"
_TOO_LARGE = "takes too much memory to build"
_MOST_BYTES = 4096  # of a message
MOST_FORCED = 1 << 14


def build(tokenizer: Any, grammar: str) -> Any:
    """A matcher of llguidance's. A mask that takes it more than some milliseconds is an error.

    It runs in the engine's thread, so the limit of a mask is half of the library's.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(step_lexer_fuel=100_000)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def reason_of(matcher: Any) -> str:
    """Why llguidance's matcher cannot go on, without the state that it dumps; "" if it can.

    Before each mask the library tokenises all text that must follow: 4 ms for so many bytes.
    """
    if matcher.is_error():
        error = matcher.get_error().partition("<state>")[0].strip()
        return "no text obeys it" if error.startswith("NoExtension") else error
    is_long = len(matcher.compute_ff_bytes()) > MOST_FORCED
    return f"more than {MOST_FORCED} bytes must follow at once" if is_long else ""


class Probe(Child):
    """The child that tries grammars for one vocabulary."""

    def check(self, grammar: str) -> None:
        """Raises ValueError, saying why, for a grammar that cannot be used."""
        try:
            why = self.ask(grammar)
        except EOFError:
            why = _TOO_LARGE
        if why:
            raise ValueError(why)


def _main() -> None:
    import json

    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer(*json.loads(sys.stdin.buffer.readline()))
    # The first grammar of a process also prepares the vocabulary.
    LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema({"type": "object"})).compute_bitmask()

    def attempt(grammar: str, answer: int) -> None:
        """In a process that may be ended within any operation: write what is wrong."""
        signal.setitimer(signal.ITIMER_PROF, BUILD_S)
        matcher = build(tokenizer, grammar)
        why = reason_of(matcher)
        if not why:
            matcher.compute_bitmask()
            why = reason_of(matcher)
        os.write(answer, why.encode()[:_MOST_BYTES])
        os._exit(0)

    def check(grammar: str) -> str:
        reader, writer = os.pipe()
        if not (pid := os.fork()):  # the vocabulary is there, and stays if it has to be ended
            attempt(grammar, writer)
        os.close(writer)
        ended_by = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with os.fdopen(reader, "rb") as pipe:
            why = pipe.read().decode(errors="replace")
        if ended_by:
            return _TOO_LONG if ended_by == -signal.SIGPROF else _TOO_LARGE
        return why

    os.nice(5)  # requests that run come first
    bound_memory()
    serve(check)


if __name__ == "__main__":
    _main()
