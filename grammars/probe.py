"""Tries a grammar in a child, with a bound of time: some grammars take hours to build, or forever.

The library's limits bound states and items, not seconds: forty patterns that must all match took
nine minutes. What the child builds in time, the server builds, too. And llguidance translates GBNF
in Python, which may take seconds, so the child does that for the server.
"""

import json
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
_MOST_CHARACTERS = 4096  # of a message
MOST_FORCED = 1 << 14
TOO_WIDE = "Current row has"  # in an error that comes of the text alone, and so comes again


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
        self._tried("build", grammar)

    def in_lark(self, rules: str) -> str:
        """GBNF as rules of Lark's. Raises ValueError as `check` does."""
        return self._tried("translate", rules)

    def _tried(self, what: str, rules: str) -> str:
        try:
            why, text = self.ask(what, rules)
        except EOFError:
            why = _TOO_LARGE
        if why:
            raise ValueError(why)
        return text


def _main() -> None:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance.gbnf_to_lark import gbnf_to_lark

    tokenizer = LLTokenizer(*json.loads(sys.stdin.buffer.readline()))
    # The first grammar of a process also prepares the vocabulary.
    LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema({"type": "object"})).compute_bitmask()

    def built(grammar: str) -> tuple[str, str]:
        """What is wrong with a grammar at its first mask, or behind what is forced at first."""
        matcher = build(tokenizer, grammar)
        if why := reason_of(matcher):
            return why, ""
        matcher.compute_bitmask()
        matcher.consume_tokens(matcher.compute_ff_tokens())  # all texts begin with these
        matcher.compute_bitmask()
        return reason_of(matcher), ""

    def translated(rules: str) -> tuple[str, str]:
        """What is wrong with GBNF, or the same in Lark."""
        try:
            return "", gbnf_to_lark(rules)
        except MemoryError:
            raise
        except Exception as error:  # it has many kinds
            return f"is no GBNF: {error}", ""

    def attempt(what: str, rules: str, answer: int) -> None:
        """In a process that may be ended within any operation."""
        signal.setitimer(signal.ITIMER_PROF, BUILD_S)
        why, text = {"build": built, "translate": translated}[what](rules)
        with open(answer, "w") as pipe:
            json.dump((why[:_MOST_CHARACTERS], text), pipe)
        os._exit(0)

    def tried(what: str, rules: str) -> tuple[str, str]:
        reader, writer = os.pipe()
        if not (pid := os.fork()):  # the vocabulary is there, and stays if it has to be ended
            attempt(what, rules, writer)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            answer = pipe.read()
        ended_by = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if ended_by:
            return (_TOO_LONG if ended_by == -signal.SIGPROF else _TOO_LARGE), ""
        return json.loads(answer)

    os.nice(5)  # requests that run come first
    bound_memory()
    serve(tried)


if __name__ == "__main__":
    _main()
