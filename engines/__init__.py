"""Engines of others behind this server's interface, where they run already.

    --engine http://host:8000   relay.py sends requests there, client.py speaks HTTP with it

app.py puts them behind the routes, and plan.py says how to start one. docs/engines.md says what
such an engine can and cannot do.
"""

import os
from collections.abc import Callable
from typing import Any

from flask import Flask

from messages import RequestError
from models.loading import StartError
from serving.options import Options

KEY_VARIABLE = "SPECULATIVE_ENGINE_KEY"  # which an engine at an address asks for


def load(options: Options, own: Callable[[Options], Flask]) -> Flask:
    """The application in front of the engine that was asked for; `own` makes that of this server's.

    Raises StartError if there is no answer, or none of an engine.
    """
    if not options.engine:
        return own(options)
    from . import app, client  # only who asks for an engine pays for it

    try:
        engine = client.Engine.ask(client.Client(options.engine, os.environ.get(KEY_VARIABLE)))
    except RequestError as error:
        raise StartError(f"cannot use --engine {options.engine}: {error}") from error
    return app.create_app(engine, options)


def show_plan(*given: Any) -> int:
    """What plan.show_plan takes and does."""
    from . import plan

    return plan.show_plan(*given)
