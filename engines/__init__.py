"""What is served: the engine inside this server, or another one that runs already.

--engine http://host:8000   relay.py hands requests on to it (docs/engines.md)
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch
from flask import Flask

from messages import Engine
from models.catalogue import FALLBACK, with_model
from serving import http
from serving.curve import cpu_name
from serving.measurement import Measurement
from serving.options import Options
from serving.parsing import model_id
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
        from . import relay

        return relay.create_app(options)

    def load(worker: Worker) -> tuple[Engine, Flask]:
        chosen = with_model(options)
        engine = load_engine(chosen)
        service = Service(engine, chosen, worker)
        worker.measurement = Measurement(engine, service.fingerprint)
        return engine, create_app(service)

    return Worker(None, options, load).app


def serve(
    flags: Namespace, options: Options,
    load_engine: Callable[[Options], Engine], create_app: Callable[[Any], Flask],
) -> int:  # fmt: skip
    """Serve the application, or write the page with answers of it; returns the exit status."""
    if flags.port:
        from serving.dialects import ERROR_FORMS

        load = partial(load_app, options, load_engine, create_app)
        return http.serve(load, flags.port, options, ERROR_FORMS)
    from page import export

    def load_named() -> tuple[str, Flask]:
        chosen = replace(with_model(options), api_key=None)  # no one else can ask
        name = FALLBACK if chosen.is_embedded else model_id(chosen.title)
        app = load_app(chosen, load_engine, create_app)
        app.extensions["worker"].measurement.left_ms = inf  # nobody waits for anything else
        return name, app

    count = torch.get_num_threads()
    machine = f"{cpu_name()}, {count} thread{'s' * (count > 1)}"
    return export.write(flags.export, load_named, machine)
