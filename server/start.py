"""What is served: the engine inside this server, or another one that runs already.

--engine http://host:8000   relay.py hands requests on to it (docs/engines.md)
"""

from argparse import Namespace
from functools import partial

from flask import Flask

from runtime.models.catalogue import with_model
from runtime.values import Engine
from server import core, http
from server.measurement import Measurement
from server.options import Options
from server.service import Service
from server.worker import Worker


def load_app(options: Options) -> Flask:
    """The application, of this server's engine or of another one behind it.

    The worker's thread loads and runs the models; no other thread does.
    """
    if options.engine:
        from . import relay

        return relay.create_app(options)

    def load(worker: Worker) -> tuple[Engine, Flask]:
        chosen = with_model(options)
        engine = core.load_engine(chosen)
        service = Service(engine, chosen, worker)
        worker.measurement = Measurement(engine, service.fingerprint)
        return engine, core.create_app(service)

    return Worker(None, options, load).app


def serve(flags: Namespace, options: Options) -> int:
    """Serve the application, or write the page with answers of it; returns the exit status."""
    if flags.port:
        from server.dialects import ERROR_FORMS

        return http.serve(partial(load_app, options), flags.port, options, ERROR_FORMS)
    from server.page import export

    return export.write(flags.export, load_app, options)
