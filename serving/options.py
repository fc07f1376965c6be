"""What the command line sets, with its defaults, and how it is read."""

import argparse
import os
import sys
from dataclasses import dataclass, fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from drafters import NAMES
from drafters.panel import PLAIN
from messages import Request, Sampling

from .catalogue import CATALOGUE, DEFAULT, EMBEDDED, FALLBACK, entry_of
from .errors import RequestError
from .parsing import MAX_SPECULATIVE_TOKENS, SAMPLING_FIELDS, check_fields

KEY_VARIABLE = "SPECULATIVE_API_KEY"
RUNNING_ELSEWHERE = 64  # requests at once in an engine that is not this server's own
REMEMBERED = 50_000  # tokens of past outputs: 0.5 kB each
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Options:
    """What the command line sets, and its defaults."""

    model: str | None = None  # DEFAULT, or FALLBACK where that cannot be fetched
    draft_model: str | None = None  # beside the embedded target: the embedded draft
    eagle3: str | None = None  # a head for the target; smollm2 has one
    dflash: str | None = None  # a head of another kind; the embedded target has one
    drafter: str | None = None  # auto, or mtp or ngram, whichever fits
    num_speculative_tokens: int = Request.num_speculative_tokens
    fixed_k: bool = False
    strict: bool = False
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1
    suffix_cache: int | None = None  # REMEMBERED, or 0 where the server is exposed
    raw: bool = False
    max_tokens: int | None = None  # 128; in a chat as many as the context holds
    repetition_penalty: float = Sampling.repetition_penalty
    temperature: float = Sampling.temperature
    top_k: int = Sampling.top_k
    top_p: float = Sampling.top_p
    min_p: float = Sampling.min_p
    verification: str = Sampling.verification
    seed: int | None = None  # where a request names none: a new one by chance
    max_running: int = 8  # 64 with --engine
    max_queued: int = 64
    prefill_chunk: int = 256
    prefix_cache_mb: int = 512
    request_timeout: float = 600.0  # seconds, as the next three
    drafter_timeout: float = 10.0
    stall_limit: float = 120.0
    grace_period: float = 30.0
    host: str = "127.0.0.1"
    allowed_host: tuple[str, ...] = ()  # names of this server beside --host and localhost
    api_key: str | None = None
    allow_origin: str | None = None
    log_prompts: bool = False
    trust_remote_code: bool = False
    allow_pickle: bool = False
    mmap: bool = False
    max_model_len: int | None = None  # the model's context, at most LONGEST_DEFAULT
    fastpath: bool = True
    compile: bool | None = None  # None: where there is a compiler
    bitwise: bool = True
    dtype: str = "auto"
    device: str = "auto"
    quantize: str | None = None
    engine: str | None = None  # vllm, a program of that name, or the address of one that runs
    tensor_parallel_size: int | None = None  # of --engine vllm, as the next two
    pipeline_parallel_size: int | None = None
    engine_arguments: tuple[str, ...] = ()  # what follows --

    @property
    def has_address(self) -> bool:
        """Whether the engine is one that runs already."""
        return bool(self.engine) and self.engine.startswith(("http://", "https://"))

    @property
    def title(self) -> str:
        """What is loaded, for those who wait for it."""
        return str(self.engine) if self.has_address else self.model or DEFAULT

    @property
    def sampling(self) -> Sampling:
        """Where a request does not say."""
        return Sampling(**{field.name: getattr(self, field.name) for field in fields(Sampling)})

    @property
    def draft_folder(self) -> str | None:
        """The draft model: what was named, or the embedded one beside the embedded target."""
        embedded = str(ROOT / "demo_models" / "draft") if self.is_embedded else None
        return embedded if self.draft_model is None else self.draft_model

    def is_chat(self, tokenizer: Any) -> bool:
        """Whether --demo, --prompt and the page put a prompt into the model's chat template."""
        return bool(tokenizer.chat_template) and not self.raw

    @property
    def is_compiled(self) -> bool | None:
        """Whether blocks run in C++; None: where they can."""
        return self.compile if self.fastpath else False

    @property
    def card(self) -> dict[str, Any] | None:
        """Where a model of the catalogue comes from."""
        entry = entry_of(self.title)
        return entry and entry.card

    @property
    def eagle3_folder(self) -> str | None:
        """The EAGLE-3 head: what was named, or what goes with a model of the catalogue."""
        entry = entry_of(self.title)
        known = entry and entry.eagle3
        if self.eagle3 is None and known and Path(known).exists():
            return known
        return self.eagle3

    @property
    def dflash_folder(self) -> str | None:
        """The DFlash head: what was named, or the embedded one, where that drafter was named."""
        is_asked = self.is_embedded and self.drafter == "dflash"
        embedded = str(ROOT / "demo_models" / "target_dflash") if is_asked else None
        return embedded if self.dflash is None else self.dflash

    @property
    def is_exposed(self) -> bool:
        """Whether others than who started the server may be meant to call it."""
        if self.api_key or self.allowed_host or self.allow_origin:
            return True
        try:
            return not ip_address(self.host).is_loopback
        except ValueError:
            return self.host != "localhost"

    @property
    def for_drafters(self) -> dict[str, Any]:
        """What a drafter's context has of this, by its names there."""
        return {
            "num_rows": self.max_running,
            "prompt_lookup_max": self.prompt_lookup_max,
            "prompt_lookup_min": self.prompt_lookup_min,
            "fast": self.fastpath,
            "quantize": self.quantize,
            "timeout_s": self.drafter_timeout,
            "mmap": self.mmap,
            "prefix_cache_mb": self.prefix_cache_mb,
            "eagle3": self.eagle3_folder,
            "dflash": self.dflash_folder,
            "allow_pickle": self.allow_pickle,
            "suffix_cache": self.num_remembered,
        }

    @property
    def num_remembered(self) -> int:
        """Tokens of past outputs that help to draft: times tell what others were answered."""
        if self.suffix_cache is None:
            return 0 if self.is_exposed else REMEMBERED
        return self.suffix_cache

    @property
    def is_embedded(self) -> bool:
        """Whether the target is the one of this repository, however it is spelt."""
        folder = Path(EMBEDDED[FALLBACK]).resolve()
        return self.model == FALLBACK or Path(self.title).resolve() == folder


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> Any:
        """Print the error without the usage, and exit with status 2."""
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(2)


def between(low: int, high: int) -> Any:
    """An argparse type: an integer from low to high."""

    def parse(text: str) -> int:
        """Read the integer. Raises ArgumentTypeError where it is out of range."""
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, not {value}")
        return value

    parse.__name__ = "integer"  # argparse names the type in its error
    return parse


def seconds(text: str) -> float:
    """An argparse type: a time of more than 0 s and at most a day."""
    value = float(text)
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most 86400, not {text}")
    return value


_COUNT = between(1, 1_000_000)
_SWITCH = argparse.BooleanOptionalAction
_MODEL = {"metavar": "NAME_OR_PATH"}
# How each field of Options is written on the command line: what argparse's add_argument takes.
_FLAGS: dict[str, dict[str, Any]] = {
    "model": _MODEL
    | {
        "help": f"the target: {', '.join([*CATALOGUE, *EMBEDDED])}, a folder, a .gguf file or "
        f"a hub id (default: {DEFAULT}, downloaded once, or {FALLBACK} where that fails)"
    },
    "draft_model": _MODEL | {"help": "for the drafter draft_model; named like the target"},
    "eagle3": _MODEL | {"help": "an EAGLE-3 head for the target: a folder or a hub id"},
    "dflash": _MODEL | {"help": "a DFlash head for the target: a folder or a hub id"},
    "drafter": {"help": f"{', '.join(NAMES)}, auto, tree, none or file.py:Class"},
    "num_speculative_tokens": {"type": between(1, MAX_SPECULATIVE_TOKENS), "help": "K"},
    "fixed_k": {"action": "store_true", "help": "always draft K, whether it pays or not"},
    "strict": {"action": "store_true", "help": "a drafter's fault fails the request"},
    "prompt_lookup_max": {"type": _COUNT, "help": "longest suffix that ngram looks up"},
    "prompt_lookup_min": {"type": _COUNT, "help": "shortest suffix that ngram looks up"},
    "suffix_cache": {
        "type": between(0, 10_000_000),
        "metavar": "N",
        "help": "tokens of past outputs that suffix looks up, 0 for none (default: "
        f"{REMEMBERED}, 0 where the server is exposed)",
    },
    "raw": {
        "action": "store_true",
        "help": "--demo, --prompt and the page send prompts as they stand, without the model's "
        "chat template",
    },
    "max_tokens": {
        "type": _COUNT,
        "help": "tokens to generate, where a request does not say (default: "
        f"{Request.max_tokens}; in a chat as many as the context holds)",
    },
    "repetition_penalty": {"type": float, "help": "where a request does not say; 1 = off"},
    "temperature": {"type": float, "help": "where a request does not say; 0 = greedy"},
    "top_k": {"type": int, "help": "where a request does not say; 0 = off"},
    "top_p": {"type": float, "help": "where a request does not say; 1 = off"},
    "min_p": {"type": float, "help": "where a request does not say; 0 = off"},
    "verification": {
        "choices": ["coupled", "rejection"],
        "help": "rule for drafts of sampled text, where a request does not say",
    },
    "seed": {"type": int, "help": "where a request names none (default: by chance)"},
    "max_running": {
        "type": between(1, 256),
        "help": f"rows of the KV cache (default: 8; {RUNNING_ELSEWHERE} with --engine)",
    },
    "max_queued": {"type": between(1, 1000), "help": "requests that may wait"},
    "prefix_cache_mb": {
        "type": between(0, 1 << 20),
        "help": "memory for prompts read before, which need not be read again; 0 = off",
    },
    "prefill_chunk": {"type": _COUNT, "help": "tokens of a prompt read between two cycles"},
    "request_timeout": {"type": seconds, "help": "after which a request ends with 504"},
    "drafter_timeout": {"type": seconds, "help": "of a call to a drafter from a file"},
    "stall_limit": {"type": seconds, "help": "of one cycle, after which /health says stuck"},
    "grace_period": {"type": seconds, "help": "to finish what runs after SIGTERM"},
    "host": {"help": "the address to serve on"},
    "allowed_host": {
        "action": "append",
        "metavar": "NAME",
        "help": "a name by which the server may be called (may be repeated; * for any)",
    },
    "api_key": {"help": "asked of /generate, /v1 and /metrics; others see it in ps"},
    "allow_origin": {"help": "whose pages may call (CORS), as https://example.org or *"},
    "log_prompts": {"action": "store_true", "help": "write prompts and outputs to the log"},
    "trust_remote_code": {"action": "store_true", "help": "run code that comes with --model"},
    "allow_pickle": {
        "action": "store_true",
        "help": "load weights that are not safetensors; such files can run code",
    },
    "mmap": {
        "action": "store_true",
        "help": "map the files of the weights and do not read them into memory: saves memory, and "
        "trusts that nobody changes these files while the server runs",
    },
    "max_model_len": {"type": _COUNT, "help": "context length"},
    "fastpath": {"action": _SWITCH, "help": "packed and fused layers where they fit"},
    "compile": {
        "action": _SWITCH,
        "help": "blocks in C++, compiled once (default: where there is a compiler)",
    },
    "bitwise": {"action": _SWITCH, "help": "shapes that keep equal logits equal bits"},
    "dtype": {"choices": ["auto", "float32", "bfloat16"], "help": "auto: float32 on a CPU"},
    "device": {"help": "auto, cpu, cuda, …"},
    "quantize": {
        "choices": ["int8"],
        "help": "weights of 8 bits: another model than the one in the file, smaller and faster",
    },
    "engine": {
        "metavar": "vllm|PROGRAM|URL",
        "help": "have vLLM run the model: it is started, or one that runs at URL is used",
    },
    "tensor_parallel_size": {"type": _COUNT, "help": "of --engine vllm: devices for each layer"},
    "pipeline_parallel_size": {"type": _COUNT, "help": "of --engine vllm: groups of layers"},
}


def parse_arguments(
    description: str, arguments: list[str] | None = None
) -> tuple[argparse.Namespace, Options]:
    """The command line, and the options in it. A mistake is one line on stderr and exit 2."""
    parser = Parser(description=description)
    _add_actions(parser)
    arguments = sys.argv[1:] if arguments is None else arguments
    end = arguments.index("--") if "--" in arguments else len(arguments)
    for name, details in _FLAGS.items():
        default = None if name == "max_running" else getattr(Options(), name)
        default = list(default) if isinstance(default, tuple) else default
        shown = "" if default in (None, []) else " (default: %(default)s)"
        details = details | {"help": details["help"] + shown, "default": default}
        parser.add_argument(f"--{name.replace('_', '-')}", **details)
    given = parser.parse_args(arguments[:end])
    given.engine_arguments = tuple(arguments[end + 1 :])
    _check(given, parser)
    _check_engine(given, parser)
    try:
        given.api_key = read_key(given.api_key, given.api_key_file, os.environ.get(KEY_VARIABLE))
    except (OSError, ValueError) as error:
        parser.error(f"cannot use the API key: {error}")
    values = {field.name: getattr(given, field.name) for field in fields(Options)}
    values["max_running"] = given.max_running or (RUNNING_ELSEWHERE if given.engine else 8)
    if given.plan:  # for engines that have no controller; --max-running is theirs
        values |= {"fixed_k": True, "max_running": 8}
    return given, Options(**values)


def _add_actions(parser: argparse.ArgumentParser) -> None:
    """What to do, and the flags that go with one action only."""
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument(
        "--demo", action="store_true", help="standard decoding against each drafter"
    )
    action.add_argument("--prompt", help="one generation, streamed to the terminal")
    action.add_argument(
        "--plan", action="store_true", help="the command line for vLLM and SGLang, and why"
    )
    action.add_argument("--port", type=between(1, 65535), help="serve HTTP")
    parser.add_argument(
        "--api-key-file", metavar="FILE", help=f"has the API key (so may ${KEY_VARIABLE})"
    )
    parser.add_argument(
        "--prompts", nargs="+", metavar="NAME",
        help="with --demo and --plan: only these of demo_prompts/, by name or kind (chat, code, "
        "…); or with --plan a file that has a prompt per line",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", type=between(1, 100),
        help="with --demo: times are medians of so many runs (default: 3, or fewer if they take "
        "more than a minute)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="with --demo and --plan: one document")
    parser.add_argument(
        "--stop", action="append", help="with --prompt: end before this text (may be repeated)"
    )
    parser.add_argument(
        "--explain", type=between(1, 1000), nargs="?", const=4, default=0, metavar="CYCLES",
        help="with --prompt: the first cycles (4) step by step, with what decided",
    )  # fmt: skip


def read_key(given: str | None, file: str | None, variable: str | None) -> str | None:
    """The API key from the command line, a file or the environment; None where all are None.

    Raises ValueError for a key that no client could send, OSError for an unreadable file.
    """
    if [given, file, variable].count(None) < 2:
        raise ValueError(f"give it once: --api-key, --api-key-file or ${KEY_VARIABLE}")
    key = given if variable is None else variable
    if file is not None:
        key = Path(file).read_bytes().decode(errors="surrogateescape").strip()
    if key is None:
        return None
    if not key:
        raise ValueError("it is empty: leave it out for none")
    if key != key.strip() or not key.isprintable():  # bytes that are not UTF-8 are not printable
        raise ValueError("it must be UTF-8, without control characters and spaces around it")
    return key


def _check(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse flags that do not go together, and defaults that no request could have."""
    if given.demo and given.drafter == PLAIN:
        parser.error("--demo compares drafters: --drafter none does not go with it")
    if given.quantize and not given.fastpath:
        parser.error("--quantize goes with the fast path: leave out --no-fastpath")
    if given.compile and not given.fastpath:
        parser.error("--compile goes with the fast path: leave out --no-fastpath")
    if given.plan and (given.drafter == PLAIN or given.quantize):
        what = "--quantize" if given.quantize else "--drafter none"
        parser.error(f"--plan compares drafters of a model as it is: {what} does not go with it")
    if given.json and not (given.demo or given.plan):
        parser.error("--json goes with --demo and --plan")
    if given.prompts and not (given.demo or given.plan):
        parser.error("--prompts goes with --demo and --plan")
    stems = {path.stem for path in (ROOT / "demo_prompts").glob("*.txt")}
    known = sorted({*stems, *(stem.partition("_")[0] for stem in stems)})
    is_file = given.plan and len(given.prompts or ()) == 1 and Path(given.prompts[0]).is_file()
    if not is_file and (unknown := set(given.prompts or ()) - set(known)):
        file = " or a file" if given.plan else ""
        parser.error(f"no demo prompt {min(unknown)!r}: choose {', '.join(known)}{file}")
    if given.explain and given.prompt is None:
        parser.error("--explain goes with --prompt")
    if given.stop and given.prompt is None:
        parser.error("--stop goes with --prompt (requests have a field for it)")
    try:
        check_fields({name: getattr(given, name) for name in SAMPLING_FIELDS})
    except RequestError as error:
        parser.error(str(error))


def _check_engine(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse what another engine does not do, and what goes with one alone."""
    own = (given.tensor_parallel_size, given.pipeline_parallel_size)
    if given.engine is None:
        if (any(own) or given.engine_arguments) and not given.plan:
            what = "--tensor-parallel-size, --pipeline-parallel-size and what follows --"
            parser.error(f"{what} go with --engine vllm and --plan")
        return
    if given.port is None:
        parser.error("--engine goes with --port: the engine is served, not looked into")
    if Options(engine=given.engine).has_address:
        try:
            parts = urlsplit(given.engine)
            is_address = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            is_address = False
        if not is_address:
            parser.error(f"--engine {given.engine}: this is no address such as http://host:8000")
        if any(own) or given.engine_arguments:
            parser.error(f"{given.engine} runs already: give its options where it is started")
    elif Path(given.engine).name != "vllm":
        parser.error(f"--engine must be vllm, a program of that name or a URL, not {given.engine}")
    elif given.model is None:
        parser.error(f"--engine {given.engine} needs --model: a folder or a hub id that it knows")
    for name in ("quantize", "compile", "fixed_k", "strict", "device", "mmap", "allow_pickle"):
        if getattr(given, name) != getattr(Options, name):
            flag = f"--{name.replace('_', '-')}"
            parser.error(f"{flag} is for this server's own engine: it does not go with --engine")
