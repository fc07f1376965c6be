"""What is served: the engine inside this server, or another one that runs already.

--engine http://host:8000   relay.py hands requests on to it (docs/engines.md)
"""

import queue
import threading
from argparse import Namespace
from dataclasses import replace
from functools import partial
from math import inf

import torch
from flask import Flask

from runtime.models.catalogue import FALLBACK, with_model
from server import core, http
from server.curve import cpu_name
from server.measurement import Measurement
from server.options import Options
from server.parsing import model_id
from server.service import Service
from server.worker import Worker


def load_app(options: Options) -> Flask:
    """The application, of this server's engine or of another one behind it.

    The worker's thread loads and runs the models; no other thread does. Raises what fails in it.
    """
    if options.engine:
        from . import relay

        return relay.create_app(options)

    results: queue.SimpleQueue[Flask | BaseException] = queue.SimpleQueue()

    def load_and_run() -> None:
        try:
            chosen = with_model(options)
            engine = core.load_engine(chosen)
            service = Service(engine, chosen, worker := Worker(engine, chosen))
            worker.measurement = Measurement(engine, service.fingerprint)
            results.put(core.create_app(service))
        except BaseException as error:
            return results.put(error)
        worker.run()

    threading.Thread(target=load_and_run, name="engine", daemon=True).start()
    if isinstance(result := http.wait_for(results), BaseException):
        raise result
    return result


def serve(flags: Namespace, options: Options) -> int:
    """Serve the application, or write the page with answers of it; returns the exit status."""
    if flags.port:
        from server.dialects import ERROR_FORMS

        load = partial(load_app, options)
        return http.serve(load, flags.port, options, ERROR_FORMS)
    from server.page import export

    def load_named() -> tuple[str, Flask]:
        chosen = replace(with_model(options), api_key=None)  # no one else can ask
        name = FALLBACK if chosen.is_embedded else model_id(chosen.title)
        app = load_app(chosen)
        app.extensions["worker"].measurement.left_ms = inf  # nobody waits for anything else
        return name, app

    count = torch.get_num_threads()
    machine = f"{cpu_name()}, {count} thread{'s' * (count > 1)}"
    return export.write(flags.export, load_named, machine)
