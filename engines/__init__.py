"""Engines of others behind this server's interface, where they run already.

    --engine http://host:8000   relay.py sends requests there, client.py speaks HTTP with it

app.py puts them behind the routes, and advice.py says how to start one. docs/engines.md says what
such an engine can and cannot do.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from flask import Flask

from messages import Engine
from models.catalogue import with_model
from serving.measurement import Measurement
from serving.options import Options
from serving.service import Service
from serving.worker import Worker


def load_app(
    options: Options, load_engine: Callable[[Options], Engine], create_app: Callable[[Any], Flask]
) -> Flask:
    """The application, of this server's engine or of another one behind it.

    `load_engine` and `create_app` are the core's. The worker's thread loads and runs the models; no
    other thread does.
    """
    if options.engine:
        from .app import connect

        return create_app(connect(options))

    def load(worker: Worker) -> tuple[Engine, Flask]:
        chosen = with_model(options)
        engine = load_engine(chosen)
        service = Service(engine, chosen, worker)
        worker.measurement = Measurement(engine, service.fingerprint)
        return engine, create_app(service)

    return Worker(None, options, load).app


def show_plan(engine: Engine, options: Options, flags: Namespace, *_: Any) -> int:
    """Print how another engine would serve these models; returns the exit status."""
    from . import advice

    return advice.show_advice(engine, options, flags)
