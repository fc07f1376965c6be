"""Engines of others behind this server's interface: one that runs already, or one it starts itself.

    --engine http://host:8000   relay.py sends requests there, client.py speaks HTTP with it
    --engine vllm               the same, and child.py starts it and ends with it

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

    Raises StartError if an engine does not start, or does not answer as one.
    """
    if not options.engine:
        return own(options)
    from . import app, child, client  # only who asks for an engine pays for it

    started = None if options.has_address else child.Child(options)
    try:
        if started:
            started.wait()
            config = child.speculative_config(options) or {}
            drafting = config.get("method"), config.get("num_speculative_tokens")
            engine = client.Engine.ask(started.client, *drafting)
        else:
            key = os.environ.get(KEY_VARIABLE)
            engine = client.Engine.ask(client.Client(str(options.engine), key))
    except RequestError as error:
        if started:
            started.kill()
        raise StartError(f"cannot use --engine {options.engine}: {error}") from error
    made = app.create_app(engine, options)
    made.extensions["engine"] = started
    return made


def show_plan(*given: Any) -> int:
    """What plan.show_plan takes and does."""
    from . import plan

    return plan.show_plan(*given)
