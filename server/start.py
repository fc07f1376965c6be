"""What is served: the engine inside this server, or another one that runs already.

--engine http://host:8000   relay.py hands requests on to it (docs/engines.md)
"""

import queue
import threading
from argparse import Namespace
from contextlib import suppress
from functools import partial
from typing import Any

from flask import Flask

from runtime import plug
from runtime.models import required
from runtime.models.catalogue import with_model
from server import core, http
from server.options import Options
from server.service import Service
from server.worker import Worker


def wait_for(reports: "queue.SimpleQueue[Any]") -> Any:
    """Wait in the main thread until the queue has an item, and return it.

    A signal that comes just before the thread sleeps does not wake it, and its handler is called
    when the thread is awake again. So the thread wakes every second.
    """
    while True:
        with suppress(queue.Empty):
            return reports.get(timeout=1)


def load_app(options: Options) -> Flask:
    """The application, of this server's engine or of another one behind it.

    The worker's thread loads and runs the models; no other thread does. Raises what fails in it.
    """
    if options.engine:
        return required("server.relay", "--engine").create_app(options)

    results: queue.SimpleQueue[Flask | BaseException] = queue.SimpleQueue()

    def load_and_run() -> None:
        try:
            chosen = with_model(options)
            engine = core.load_engine(chosen)
            service = Service(engine, chosen, worker := Worker(engine, chosen))
            if measurement := plug("server.measurement"):
                worker.measurement = measurement.Measurement(engine, service.fingerprint)
            results.put(core.create_app(service))
        except BaseException as error:
            return results.put(error)
        worker.run()

    threading.Thread(target=load_and_run, name="engine", daemon=True).start()
    if isinstance(result := wait_for(results), BaseException):
        raise result
    return result


def serve(flags: Namespace, options: Options) -> int:
    """Serve the application, or write the page with answers of it; returns the exit status."""
    if flags.port:
        serving = plug("server.serving") or http
        return serving.serve(partial(load_app, options), flags.port, options)
    return required("server.page.export", "--export").write(flags.export, load_app, options)
