"""What the command line sets, with its defaults, and how it is read.

A field of Options is an option of the command line. Its metadata say in which group the help shows
it, what it does, and how argparse reads it. What nobody needs to change is a constant of the class.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from urllib.parse import urlsplit

from drafters import NAMES
from runtime.models.catalogue import CATALOGUE, DEFAULT, EMBEDDED, FALLBACK, PAIRS, entry_of
from runtime.models.gguf_file import is_gguf
from runtime.models.prompts import Tokenizer, kind_of, read_prompts
from runtime.values import MAX_SPECULATIVE_TOKENS, PLAIN, Json, Request, RequestError, Sampling

from .parsing import SAMPLING_FIELDS, check_fields

KEY_VARIABLE = "SPECULATIVE_API_KEY"
RUNNING_ELSEWHERE = 64  # requests at once in an engine outside this server
MAX_QUEUED = 4096  # a thread waits for each request
MOST_K = 15  # where the controller chooses K for each draft; else the request sets it
_DEPENDING = "max_running", "num_speculative_tokens"  # options whose default others decide
REMEMBERED = 50_000  # tokens of past outputs: 0.4 kB each
ROOT = Path(__file__).resolve().parent.parent

_ABOUT = """\
Speculative decoding: a cheap drafter guesses tokens, the model checks them all in one pass. The
text stays the model's own; only the time changes."""
_BEGIN = """\
Begin:  python 08_speculative_decoding.py --demo
        python 08_speculative_decoding.py --port 5000     then open http://127.0.0.1:5000"""
_USAGE = "%(prog)s (--demo | --prompt TEXT | --port PORT | --export DIR) [options]"
# The groups of the help, in order.
_GROUPS = DO, CHANGE, MORE, MODELS, DRAFTING, SAMPLING, SERVING, CALLERS, SPEED, ENGINES = (
    "Do one of these", "Change what runs", "More for --demo and --prompt", "Models",
    "Drafting", "Sampling, where a request does not say", "Serving", "Who may call", "Speed",
    "Other engines",
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2, without the usage."""
        if message.startswith("one of the arguments"):
            message = "say what to do: --demo (start here), --prompt TEXT, --port PORT or "
            message += "--export DIR"
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(2)


def between(low: int, high: int, hint: str = "") -> Callable[[str], int]:
    """An argparse type: an integer from low to high; the hint says what else to write."""

    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, not {value}{hint}")
        return value

    parse.__name__ = "integer"  # argparse names the type in its error
    return parse


def seconds(text: str) -> float:
    """An argparse type: a time of more than 0 s and at most a day."""
    value = float(text)
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most 86400, not {text}")
    return value


def address(text: str) -> str:
    """An argparse type: a URL at which an engine listens."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise argparse.ArgumentTypeError(f"{text} is no address such as http://host:8000")
    return text


_COUNTED: Json = {"type": between(1, 1_000_000), "metavar": "N"}
_SWITCH = {"action": "store_true"}
_NAME = {"metavar": "NAME"}


def _option(group: str, default: Any, text: str, shown: str | None = None, **details: Any) -> Any:
    """A field of Options; `details` are what argparse's add_argument takes.

    `shown` is the default as the help names it; "": it names none. Where `details` do not say how
    the option is read, the default's type does: False makes a switch.
    """
    if default is False:
        details["action"] = "store_true"
    elif type(default) in (int, float):
        details = {"type": type(default)} | details
    if shown is None:
        shown = "" if default is None or default is False else str(default)
    text = (text + (f" (default: {shown})" if shown else "")).replace("%", "%%")
    return dataclasses.field(default=default, metadata={"group": group, "text": text} | details)


def _flag(name: str) -> str:
    """A field as the command line spells it. Example: max_tokens -> --max-tokens."""
    return "--no-kernels" if name == "kernels" else f"--{name.replace('_', '-')}"


def _head(kind: str, shown: str) -> Any:
    text = f"{kind} head for the model: a folder or a Hugging Face name"
    return _option(MODELS, None, text, shown, **_NAME)


@dataclass(frozen=True)
class Options:
    """What the command line sets, and its defaults."""

    # The longest text that fits the default context takes a model of 1.5B four minutes.
    request_timeout: ClassVar[float] = 600.0  # seconds until a request ends with status 504
    # Of one cycle, until /health says stuck. A large model reads a piece of a prompt for seconds.
    stall_limit: ClassVar[float] = 120.0
    grace_period: ClassVar[float] = 30.0  # seconds to finish after SIGTERM: what Kubernetes gives
    # Seconds of a call to a drafter from a file, for which all texts wait.
    drafter_timeout: ClassVar[float] = 10.0
    # Tokens of a long prompt that are read between two cycles, for which the other texts wait.
    prefill_chunk: ClassVar[int] = 256

    model: str | None = _option(
        CHANGE, None,
        f"the model: {', '.join([*CATALOGUE, *PAIRS, *EMBEDDED])}, a folder, a .gguf file or a "
        "Hugging Face name", f"{DEFAULT}, which is downloaded once; {FALLBACK} where that fails",
        **_NAME,
    )  # fmt: skip
    draft_model: str | None = _option(
        MODELS, None, "the small model that the drafter draft_model asks; named like --model",
        "none; smollm2 and embedded have one", **_NAME,
    )  # fmt: skip
    mtp: str | None = _head("an MTP", f"the model's own; {DEFAULT} has one")
    eagle3: str | None = _head("an EAGLE-3", f"none; {DEFAULT} has one")
    dflash: str | None = _head("a DFlash", "none; the embedded model has one")
    drafter: str | None = _option(
        CHANGE, None,
        "who guesses: auto picks one in every cycle; none is plain decoding; "
        f"{', '.join(NAMES)}, tree, or yours as file.py:Class", "auto", **_NAME,
    )  # fmt: skip
    num_speculative_tokens: int = _option(
        CHANGE, MOST_K, f"the most tokens to guess at once, 1 to {MAX_SPECULATIVE_TOKENS}",
        f"{MOST_K}; {Request.num_speculative_tokens} with --fixed-k or --engine",
        type=between(1, MAX_SPECULATIVE_TOKENS, " (--drafter none guesses none)"), metavar="K",
    )  # fmt: skip
    fixed_k: bool = _option(DRAFTING, False, "always guess K tokens, whether it pays or not")
    strict: bool = _option(
        DRAFTING, False, "an error in a drafter fails its request, for those who write one"
    )
    prompt_lookup_max: int = _option(
        DRAFTING, 4, "the longest run of tokens that ngram looks up", **_COUNTED
    )
    prompt_lookup_min: int = _option(
        DRAFTING, 1, "the shortest run of tokens that ngram looks up", **_COUNTED
    )
    suffix_cache: int | None = _option(
        DRAFTING, None, "tokens of past outputs in which suffix looks; 0 is none",
        f"{REMEMBERED}, or 0 where others may call", type=between(0, 10_000_000), metavar="N",
    )  # fmt: skip
    raw: bool = _option(
        MORE, False, "do not put prompts into the model's chat template; for the page, too"
    )
    max_tokens: int | None = _option(
        CHANGE, None, "tokens to write",
        f"{Request.max_tokens}; in a chat, until the context is full", **_COUNTED,
    )  # fmt: skip
    temperature: float = _option(
        CHANGE, Sampling.temperature, "0 takes the likeliest token, more draws more freely",
        metavar="T",
    )  # fmt: skip
    top_k: int = _option(
        SAMPLING, Sampling.top_k, "draw among the K likeliest tokens; 0 is off", metavar="K"
    )
    top_p: float = _option(
        SAMPLING, Sampling.top_p,
        "draw among the fewest tokens whose probabilities sum to P; 1 is off", metavar="P",
    )  # fmt: skip
    min_p: float = _option(
        SAMPLING, Sampling.min_p, "leave out what is less likely than P times the likeliest",
        metavar="P",
    )  # fmt: skip
    verification: str = _option(
        SAMPLING, Sampling.verification,
        "the rule that accepts drafts of sampled text: both keep its distribution, and coupled "
        "the text of a seed, too", choices=["coupled", "rejection"],
    )  # fmt: skip
    seed: int | None = _option(
        SAMPLING, None, "the same seed gives the same text", "drawn anew for each request",
        type=int, metavar="SEED",
    )  # fmt: skip
    max_running: int = _option(
        SERVING, 8, "requests that run at once; each holds a row of the KV cache",
        f"8, or {RUNNING_ELSEWHERE} with --engine", type=between(1, 256), metavar="N",
    )  # fmt: skip
    max_queued: int = _option(
        SERVING, 512, "requests that may wait; more are refused with status 429",
        type=between(1, MAX_QUEUED), metavar="N",
    )  # fmt: skip
    prefix_cache_mb: int = _option(
        SERVING, 512, "megabytes for prompts already read, which are not read again; 0 is off",
        type=between(0, 1 << 20), metavar="MB",
    )  # fmt: skip
    max_model_len: int | None = _option(
        MODELS, None, "tokens that a prompt and its answer may have together",
        "what the model says, at most 8192", **_COUNTED,
    )  # fmt: skip
    host: str = _option(CALLERS, "127.0.0.1", "the address to serve on", metavar="ADDRESS")
    allowed_host: tuple[str, ...] = _option(
        CALLERS, (), "a name by which the server may be called; may be repeated; * is any",
        "", action="append", **_NAME,
    )  # fmt: skip
    allow_origin: str | None = _option(
        CALLERS, None, "the site whose pages may call, as https://example.org; * is any",
        "", metavar="ORIGIN",
    )  # fmt: skip
    api_key: str | None = _option(
        CALLERS, None, "require KEY; other users of this machine can see it in ps",
        f"none; ${KEY_VARIABLE} is read", metavar="KEY",
    )  # fmt: skip
    trust_remote_code: bool = _option(MODELS, False, "run code that comes with the model")
    allow_pickle: bool = _option(
        MODELS, False, "load weights that are not safetensors; such files can run code"
    )
    kernels: bool = _option(
        SPEED, True, "run transformers' own modules, and not the C that has equal bits", "",
        action="store_false", dest="kernels",
    )  # fmt: skip
    dtype: str = _option(
        SPEED, "auto",
        "the type of the weights; auto is packed for a .gguf file, float32 for others on a CPU", "",
        choices=["auto", "packed", "float32", "bfloat16"],
    )  # fmt: skip
    device: str = _option(SPEED, "auto", "where to compute: auto, cpu, cuda, …", metavar="NAME")
    quantize: str | None = _option(
        SPEED, None,
        "round weights to 8 bits: another model than the one in the file, smaller and faster",
        "", choices=["int8"],
    )  # fmt: skip
    engine: str | None = _option(
        ENGINES, None,
        "let the vLLM, SGLang or llama-server that runs at URL compute", "",
        type=address, metavar="URL",
    )  # fmt: skip

    @property
    def title(self) -> str:
        """The name of what is loaded, as shown while clients wait."""
        return self.engine or self.model or DEFAULT

    @property
    def sampling(self) -> Sampling:
        """The sampling of a request that sets none."""
        known = {field.name for field in fields(Sampling)}
        return Sampling(**{n: value for n, value in vars(self).items() if n in known})

    @property
    def for_requests(self) -> Json:
        """Defaults for the fields that a request leaves out."""
        names = (*SAMPLING_FIELDS, "num_speculative_tokens")
        defaults = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return defaults | {"max_tokens": self.max_tokens or Request.max_tokens}

    def model_of(self, drafter: str) -> str | None:
        """A drafter's model: the one that an option names, or the one for the target.

        The embedded DFlash head is used only where that drafter was named.
        """
        named, part = getattr(self, drafter), drafter.removesuffix("_model")
        if named is not None:
            return named
        if part == "draft" and self.title in PAIRS:
            return PAIRS[self.title][1]
        place = getattr(entry_of(self.title), part, None)
        if self.is_embedded and part in ("draft", self.drafter):
            place = str(ROOT / "demo_models" / ("draft" if part == "draft" else f"target_{part}"))
        return place if place and Path(place).exists() else None

    @property
    def for_draft(self) -> "Options":
        """What the draft model is loaded with: --dtype unpacks the target's file alone.

        A draft model from a GGUF file is faster as it is, and its guesses change no text.
        """
        unpacks = self.dtype != "packed" and is_gguf(self.model_of("draft_model") or "")
        return replace(self, dtype="auto") if unpacks else self

    def is_chat(self, tokenizer: Tokenizer) -> bool:
        """Whether --demo, --prompt and the page put a prompt into the model's chat template."""
        return bool(tokenizer.chat_template) and not self.raw

    @property
    def is_exposed(self) -> bool:
        """Whether the server may be meant for users other than its operator."""
        if self.api_key or self.allowed_host or self.allow_origin:
            return True
        try:
            return not ip_address(self.host).is_loopback
        except ValueError:
            return self.host != "localhost"

    @property
    def for_drafters(self) -> Json:
        """The options that a drafters.Context gets, by its field names."""
        models = ("draft_model", "mtp", "eagle3", "dflash")
        alike = ("prompt_lookup_max", "prompt_lookup_min", "quantize", "prefix_cache_mb")
        return {name: getattr(self, name) for name in (*alike, "allow_pickle")} | {
            "fast": self.kernels,
            "timeout_s": self.drafter_timeout,
            "named": tuple(name for name in models if getattr(self, name)),
            **{name: self.model_of(name) for name in models[1:]},
            "suffix_cache": self.num_remembered,
        }

    @property
    def num_remembered(self) -> int:
        """Tokens of past outputs that help to draft: timing reveals other users' answers."""
        if self.suffix_cache is None:
            return 0 if self.is_exposed else REMEMBERED
        return self.suffix_cache

    @property
    def is_embedded(self) -> bool:
        """Whether the target is the one of this repository, however it is spelt."""
        folder = Path(EMBEDDED[FALLBACK]).resolve()
        return self.model == FALLBACK or Path(self.title).resolve() == folder


# ------------------------------------------------------------------------------- command line


def _parser() -> Parser:
    """A parser of all options."""
    words = {"usage": _USAGE, "description": _ABOUT, "epilog": _BEGIN}
    parser = Parser(**words, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False)
    groups = {name: parser.add_argument_group(name) for name in _GROUPS}
    actions = groups[DO].add_mutually_exclusive_group(required=True)

    def add(group: str, flag: str, text: str, **details: Any) -> None:
        place = actions if group == DO else groups[group]
        place.add_argument(flag, help=text, **details)

    add(DO, "--demo", "race every drafter against plain decoding on the demo prompts", **_SWITCH)
    add(DO, "--prompt", "continue TEXT here, and mark where each token came from", metavar="TEXT")
    port = {"type": between(1, 65535), "metavar": "PORT"}
    add(DO, "--port", "serve the page and the HTTP interface at http://127.0.0.1:PORT", **port)
    add(DO, "--export", "write the page into DIR, with recorded answers", metavar="DIR")
    for field in fields(Options):
        default = None if field.name in _DEPENDING else field.default
        default = list(default) if isinstance(default, tuple) else default
        add(flag=_flag(field.name), default=default, **field.metadata)
    few = {"type": between(1, 1000), "nargs": "?", "const": 4, "default": 0, "metavar": "N"}
    add(CHANGE, "--explain", "with --prompt: show the first N cycles (4) step by step", **few)
    some = "with --demo: run these of demo_prompts/, by name or kind (chat, code, …)"
    add(MORE, "--prompts", some, nargs="+", metavar="NAME")
    times = "with --demo: times are medians of N runs (default: 3, or fewer "
    add(MORE, "--repeats", times + "to end in a minute)", type=between(1, 100), metavar="N")
    add(MORE, "--json", "with --demo: print one JSON document", **_SWITCH)
    until = "with --prompt: end before this text; may be repeated"
    add(MORE, "--stop", until, action="append", metavar="TEXT")
    groups[MORE].add_argument("-h", "--help", action="help", help="show this page and exit")
    return parser


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, Options]:
    """The command line, and the options in it. A mistake is one line on stderr and exit 2."""
    parser = _parser()
    flags = parser.parse_args(arguments)
    _check(flags, parser)
    try:
        flags.api_key = read_key(flags.api_key, os.environ.get(KEY_VARIABLE))
    except ValueError as error:
        parser.error(f"cannot use the API key: {error}")
    values = {field.name: getattr(flags, field.name) for field in fields(Options)}
    values["max_running"] = flags.max_running or (RUNNING_ELSEWHERE if flags.engine else 8)
    chosen = Request if flags.fixed_k or flags.engine else Options
    values["num_speculative_tokens"] = flags.num_speculative_tokens or chosen.num_speculative_tokens
    return flags, Options(**values)


def read_key(option: str | None, variable: str | None) -> str | None:
    """The API key from the command line or the environment; None where both are None.

    Raises ValueError for a key that no client could send.
    """
    if None not in (option, variable):
        raise ValueError(f"give it once: --api-key or ${KEY_VARIABLE}")
    if (key := option if variable is None else variable) is None:
        return None
    if not key:
        raise ValueError("it is empty: leave it out for none")
    if key != key.strip() or not key.isprintable():  # bytes that are not UTF-8 are not printable
        raise ValueError("it must be UTF-8, without control characters and spaces around it")
    return key


def _check(flags: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse flags that do not go together, and defaults that no request could have."""
    is_one, is_plain = flags.prompt, flags.drafter == PLAIN
    for is_wrong, why in (
        (flags.demo and is_plain, "--demo compares drafters: --drafter none does not go with it"),
        (flags.quantize and not flags.kernels, "--quantize computes in C: leave out --no-kernels"),
        (flags.json and not flags.demo, "--json goes with --demo"),
        (flags.prompts and not flags.demo, "--prompts goes with --demo"),
        (flags.repeats and not flags.demo, "--repeats goes with --demo"),
        (flags.explain and is_one is None, "--explain goes with --prompt"),
        (flags.stop and is_one is None, "--stop goes with --prompt (requests have a field for it)"),
        (not flags.host.strip(),
         f"--host is empty: give {Options.host} for this machine alone, 0.0.0.0 for all networks"),
        (flags.prompt_lookup_min > flags.prompt_lookup_max,
         f"--prompt-lookup-min ({flags.prompt_lookup_min}) must be at most --prompt-lookup-max "
         f"({flags.prompt_lookup_max})"),
        (flags.engine and flags.port is None,
         "--engine goes with --port: the engine is served, not looked into"),
    ):  # fmt: skip
        if is_wrong:
            parser.error(why)
    own = "mtp", "quantize", "kernels", "fixed_k", "strict", "device", "allow_pickle"
    for name in own if flags.engine else ():
        if getattr(flags, name) != getattr(Options, name):
            why = "is for this server's own engine: it does not go with --engine"
            parser.error(f"{_flag(name)} {why}")
    names = read_prompts(is_chat=True)
    known = sorted({*names, *map(kind_of, names)})
    if unknown := set(flags.prompts or ()) - set(known):
        parser.error(f"no demo prompt {min(unknown)!r}: choose {', '.join(known)}")
    try:
        check_fields({name: getattr(flags, name, None) for name in SAMPLING_FIELDS})
    except RequestError as error:
        name = str(error.param)
        parser.error(str(error).replace(name, _flag(name), 1))
