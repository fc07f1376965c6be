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

BUILD_S = 0.3  # of a processor; the server needs as long again
MOST_FORCED = 1 << 14


def reason_of(matcher: Any) -> str:
    """Why llguidance's matcher cannot go on, without the state that it dumps; "" if it can.

    Before each mask the library tokenises all text that must follow: 4 ms for so many bytes.
    """
    if matcher.is_error():
        return matcher.get_error().partition("<state>")[0].strip()
    is_long = len(matcher.compute_ff_bytes()) > MOST_FORCED
    return f"more than {MOST_FORCED} bytes must follow at once" if is_long else ""


class Probe(Child):
    """The child that tries grammars for one vocabulary."""

    def check(self, grammar: str) -> None:
        """Raises ValueError, saying why, for a grammar that cannot be used."""
        try:
            why = self.ask(grammar)
        except TimeoutError:
            with self._lock:
                self.start()  # to be ready by the next grammar
            raise ValueError(f"takes longer than {BUILD_S:g} s to build") from None
        except EOFError:
            raise ValueError("takes too much memory to build") from None
        if why:
            raise ValueError(why)


def _main() -> None:
    import json

    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer(*json.loads(sys.stdin.buffer.readline()))
    # The first grammar of a process also prepares the vocabulary.
    LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema({"type": "object"})).compute_bitmask()

    def check(grammar: str) -> str:
        signal.setitimer(signal.ITIMER_PROF, BUILD_S)
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if why := reason_of(matcher):
            return why
        matcher.compute_bitmask()
        return reason_of(matcher)

    os.nice(5)  # requests that run come first
    bound_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process within any operation
    serve(check, lambda: signal.setitimer(signal.ITIMER_PROF, 0))


if __name__ == "__main__":
    _main()
