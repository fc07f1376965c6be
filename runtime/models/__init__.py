"""From a name or a file to a model that can be served."""

from typing import Any

from runtime import lack, plug


class StartError(ValueError):
    """What the command line asks for cannot be had; one line that says what to do."""

    def __init__(self, message: str) -> None:
        from runtime.values import one_line  # not before startup.py, as torch comes with it

        super().__init__(one_line(message))


def required(name: str, what: str) -> Any:
    """The plug `name`. Raises StartError if it is not there: `what` needs it."""
    if module := plug(name):
        return module
    raise StartError(f"{what} needs {lack(name)}, which is not there")
