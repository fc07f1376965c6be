"""From a name or a file to a model that can be served."""


class StartError(ValueError):
    """What the command line asks for cannot be had; one line that says what to do."""
