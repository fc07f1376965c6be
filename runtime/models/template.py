"""Writes conversations as texts, in a child with bounds of time and memory.

A chat template is code that comes with a model, and one operation of it may ask for any time and
memory. In the child a function of transformers renders it.
"""

import signal
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # then Python looks for modules beside no file of ours
    sys.path.append(str(Path(__file__).parents[2]))

from runtime.models.child import MOST_BYTES, Child, bound_memory, serve

_MOST_CHARACTERS = 1 << 24


class Renderer(Child):
    """The child that renders."""

    def render(self, limit_s: float, asked: dict[str, Any]) -> str:
        """What transformers' render_jinja_template makes of `asked`.

        Raises ValueError for whatever the template does instead, and TimeoutError if it takes more
        than `limit_s` of a processor.
        """
        try:
            text, why = self.ask(limit_s, asked)
        except EOFError as error:
            raise ValueError(f"ended its process: {error}") from None
        if why:
            raise ValueError(why)
        return text


def _main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(limit_s: float, asked: dict[str, Any]) -> tuple[str, str | None]:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        text, why = "", None
        try:
            ((text,), _) = render_jinja_template(**asked)
        except MemoryError:
            why = f"needs more than {MOST_BYTES >> 20} MiB of memory"
        except Exception as error:  # templates raise what they like, about roles and their order
            why = f"refused: {str(error)[:1000]}"
        if len(text) > _MOST_CHARACTERS:
            text, why = "", f"writes {len(text)} characters"
        return text, why

    bound_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process within any operation
    serve(render)


renderer = Renderer(__file__)
if __name__ == "__main__":
    _main()
