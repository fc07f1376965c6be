"""vLLM as a child process: started with our command line in its words, and ended with us.

    child = Child(options)     starts `vllm serve …` on the loopback, with a key of its own
    child.wait()               shows what it says until it answers
    child.at_death = …         called when it ends by itself

It ends when we do: in order, or by Linux's parent-death signal where we are killed.
"""

import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from drafters.panel import PLAIN
from drafters.vllm_proposer import VARIABLE, Proposer
from messages import Json, RequestError
from models.catalogue import ends_with_us, entry_of, place_of
from models.loading import StartError
from serving.http import say
from serving.options import ROOT, Options
from serving.parsing import model_id

from .client import Client

LOG = logging.getLogger("engine")
PROGRESS = logging.getLogger("progress")

_POLL_S = 0.25
_LAST_WORDS = 3  # lines that a failure is told with
_END_S = 5.0  # to end in order
# PR_SET_PDEATHSIG is 1. A parent that has ended before that sends no signal.
_LAUNCH = """
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
except (OSError, AttributeError):
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


# vLLM's own class for drafters of others, and ours in it.
OURS = {"method": "custom_class", "model": f"{Proposer.__module__}.{Proposer.__name__}"}


def speculative_config(options: Options) -> Json | None:
    """The drafter as vLLM's --speculative-config has it; None is plain decoding.

    Raises StartError for a drafter that vLLM has not.
    """
    drafter = options.drafter
    models = {name: options.model_of(name) for name in ("draft_model", "eagle3", "dflash")}
    if drafter in (None, "auto"):  # what was named, or what every model has
        drafter = next((name for name, model in models.items() if model), "ngram")
    if drafter == PLAIN:
        return None
    config: Json = {"num_speculative_tokens": options.num_speculative_tokens}
    if ":" in drafter:
        if not Path(drafter.rpartition(":")[0]).is_file():
            raise StartError(f"--drafter {drafter}: no such file (vLLM needs file.py:Class)")
        return OURS | config
    config["method"] = drafter
    if drafter == "ngram":
        config["prompt_lookup_max"] = options.prompt_lookup_max
        config["prompt_lookup_min"] = options.prompt_lookup_min
    elif drafter == "suffix" and not options.num_remembered:
        config["suffix_decoding_max_cached_requests"] = 0
    elif drafter in models:
        if not models[drafter]:
            flag = f"--{drafter.replace('_', '-')}"
            raise StartError(f"--drafter {drafter} with --engine vllm needs {flag}")
        config["model"] = models[drafter]
    elif drafter not in ("suffix", "mtp"):
        known = "ngram, suffix, draft_model, mtp, eagle3, dflash, file.py:Class and none"
        raise StartError(f"vLLM has no drafter {drafter}: with --engine vllm there are {known}")
    return config


def environment(drafter: str) -> dict[str, str]:
    """The variables with which vLLM finds a drafter of ours, which the config OURS asks for."""
    file, colon, name = drafter.rpartition(":")
    given = f"{Path(file).resolve()}:{name}" if colon else drafter
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {VARIABLE: given, "PYTHONPATH": os.pathsep.join(paths)}


def place_for(model: str) -> str:
    """What another engine loads: of the catalogue the public model, which is in no GGUF file."""
    entry = entry_of(model)
    return entry.origin if entry else place_of(model)


def command(options: Options, port: int, config: Json | None) -> list[str]:
    """What starts vLLM with a speculative config. Raises StartError for a model."""
    words = [str(options.engine), "serve", place_for(options.model)]
    words += ["--served-model-name", model_id(options.model)]
    words += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    words += ["--max-num-seqs", str(options.max_running)]
    if config:
        words += ["--speculative-config", json.dumps(config)]
        words += ["--per-request-spec-decode-metrics", "summary"]
    return [*words, *loading_words(options, "--max-model-len"), *options.engine_arguments]


def loading_words(options: Options, length_flag: str) -> list[str]:
    """How the model is loaded; engines have names of their own for the context's length alone."""
    words = [length_flag, str(options.max_model_len)] if options.max_model_len else []
    words += [] if options.dtype == "auto" else ["--dtype", options.dtype]
    return words + ["--trust-remote-code"] * options.trust_remote_code


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Child:
    """A vLLM of our own."""

    def __init__(self, options: Options) -> None:
        """Start it. Raises StartError if it is not installed."""
        if shutil.which(str(options.engine)) is None:
            raise StartError(
                f"--engine {options.engine}: there is no such program; install vLLM, or give the "
                "path of the program in its own environment"
            )
        port, key = free_port(), secrets.token_urlsafe(24)
        words = command(options, port, speculative_config(options))
        ours = environment(options.drafter) if ":" in (options.drafter or "") else {}
        self.client = Client(f"http://127.0.0.1:{port}", key)
        self.at_death: Callable[[], None] = lambda: None
        self.has_died = self._is_ready = self._is_ending = False
        self._said: deque[str] = deque(maxlen=_LAST_WORDS)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _LAUNCH, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | ours | {"VLLM_API_KEY": key},  # not in ps, as an argument would be
            start_new_session=True,  # Ctrl-C is for us: first we finish what runs
        )
        ends_with_us(self)
        threading.Thread(target=self._listen, name="engine's output", daemon=True).start()
        threading.Thread(target=self._watch, name="engine's end", daemon=True).start()

    def wait(self) -> None:
        """Until it answers. Raises StartError if it ends before."""
        try:
            while True:
                if self._process.poll() is not None:
                    status, said = self._process.returncode, "; ".join(self._said)
                    raise StartError(f"vLLM has ended with status {status} while loading: {said}")
                with suppress(RequestError):
                    self.client.ask("/health", limit_s=2.0)
                    self._is_ready = True
                    return
                time.sleep(_POLL_S)
        except BaseException:
            self.kill()
            raise

    def _listen(self) -> None:
        """Show what it says while it loads, then its faults alone."""
        with self._process.stdout as lines:
            for text in filter(None, (line.decode(errors="replace").rstrip() for line in lines)):
                self._said.append(text)
                if not self._is_ready:
                    PROGRESS.info("vllm: %s", text[:200])
                    say(text)
                elif " ERROR " in text or " CRITICAL " in text:
                    LOG.warning("vllm: %s", text[:1000])

    def _watch(self) -> None:
        """Tell of its end. Not by that of its output: its own children hold that open, too."""
        status = self._process.wait()
        if self._is_ready and not self._is_ending:
            self.has_died = True
            self._signal(signal.SIGKILL)  # they would go on without it
            LOG.error("vLLM has ended with status %d: %s", status, "; ".join(self._said)[-1000:])
            self.at_death()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End it and what it has started: in order, or at once after a while."""
        self._is_ending = True
        for number, wait_s in ((signal.SIGTERM, _END_S), (signal.SIGKILL, 1.0)):
            self._signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
