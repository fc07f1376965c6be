"""What the command line sets, with its defaults, and how it is read.

A field of Options is an option of the command line. HELP says in which group the help shows it, and
what it does. What nobody needs to change is a constant of the class.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from urllib.parse import urlsplit

from drafters import NAMES
from runtime.models.catalogue import CATALOGUE, DEFAULT, EMBEDDED, FALLBACK, PAIRS, ROOT, entry_of
from runtime.models.prompts import Tokenizer, kind_of, read_prompts
from runtime.values import MAX_SPECULATIVE_TOKENS, PLAIN, Json, Request, Sampling, one_line

from .parsing import chat, check_fields

KEY_VARIABLE = "SPECULATIVE_API_KEY"
MAX_QUEUED = 4096  # a thread waits for each request
MOST_K = 15  # where the controller chooses K for each draft; else the request sets it
REMEMBERED = 50_000  # tokens of past outputs: 0.4 kB each


@dataclass(frozen=True)
class Options:
    """What the command line sets, and its defaults. None: something else decides; see HELP."""

    # The longest text that fits the default context takes a model of 1.5B four minutes.
    request_timeout: ClassVar[float] = 600.0  # seconds until a request ends with status 504
    # Of one cycle, until /health says stuck. A large model reads a piece of a prompt for seconds.
    stall_limit: ClassVar[float] = 120.0
    grace_period: ClassVar[float] = 30.0  # seconds to finish after SIGTERM: what Kubernetes gives
    # Seconds of a call to a drafter from a file, for which all texts wait.
    drafter_timeout: ClassVar[float] = 10.0

    model: str | None = None
    drafter: str | None = None
    num_speculative_tokens: int = MOST_K
    max_tokens: int | None = None
    raw: bool = False
    draft_model: str | None = None
    mtp: str | None = None
    eagle3: str | None = None
    dflash: str | None = None
    max_model_len: int | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    fixed_k: bool = False
    strict: bool = False
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1
    suffix_cache: int | None = None
    suffix_corpus: tuple[str, ...] = ()
    temperature: float = Sampling.temperature
    top_k: int = Sampling.top_k
    top_p: float = Sampling.top_p
    min_p: float = Sampling.min_p
    verification: str = Sampling.verification
    seed: int | None = None
    max_running: int = 8
    max_queued: int = 512
    prefix_cache_mb: int = 512
    host: str = "127.0.0.1"
    allowed_host: tuple[str, ...] = ()
    allow_origin: str | None = None
    api_key: str | None = None
    kernels: bool = True
    dtype: str = "auto"
    device: str = "auto"
    engine: str | None = None

    @property
    def title(self) -> str:
        """The name of what is loaded, as shown while clients wait."""
        return self.engine or self.model or DEFAULT

    @property
    def quantize(self) -> str | None:
        """What weights are rounded to when they are read, if to anything."""
        return self.dtype if self.dtype == "int8" else None

    @property
    def for_requests(self) -> Json:
        """Defaults for the fields that a request leaves out."""
        names = "temperature", "top_k", "top_p", "min_p", "verification", "seed"
        defaults = {n: getattr(self, n) for n in (*names, "num_speculative_tokens")}
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

    def is_chat(self, tokenizer: Tokenizer) -> bool:
        """Whether --demo, --prompt and the page put a prompt into the model's chat template."""
        return bool(chat and tokenizer.chat_template) and not self.raw

    @property
    def for_drafters(self) -> Json:
        """The options that a drafters.Context gets, by its field names."""
        models = ("draft_model", "mtp", "eagle3", "dflash")
        lookup = "prompt_lookup_max", "prompt_lookup_min"
        alike = "quantize", "prefix_cache_mb", "allow_pickle", "suffix_corpus", *lookup
        # Where users other than the operator may call, timing reveals their answers to each other.
        is_local = self.host in ("localhost", "127.0.0.1", "::1")
        is_own = is_local and not (self.api_key or self.allowed_host or self.allow_origin)
        named = [name for name in models if getattr(self, name) is not None]
        return {name: getattr(self, name) for name in alike} | {
            "fast": self.kernels,
            "timeout_s": self.drafter_timeout,
            "named": named + ["suffix"] * bool(self.suffix_corpus),
            **{name: self.model_of(name) for name in models[1:]},
            "suffix_cache": REMEMBERED * is_own if self.suffix_cache is None else self.suffix_cache,
        }

    @property
    def is_embedded(self) -> bool:
        """Whether the target is the one of this repository, however it is spelt."""
        folder = Path(EMBEDDED[FALLBACK]).resolve()
        return self.model == FALLBACK or Path(self.title).resolve() == folder


# ------------------------------------------------------------------------------- command line

ABOUT = """\
Speculative decoding: a cheap drafter guesses tokens, the model checks them all in one pass. The
text stays the model's own; only the time changes."""
BEGIN = """\
Begin:  python 08_speculative_decoding.py --demo
        python 08_speculative_decoding.py --port 5000     then open http://127.0.0.1:5000"""
USAGE = "%(prog)s (--demo | --prompt TEXT | --port PORT | --export DIR) [options]"
# The help's groups with their options: how one is written, its range | what it does.
HELP = f"""
Do one of these
--demo | race every drafter against plain decoding on the demo prompts
--prompt TEXT | continue TEXT here, and mark where each token came from
--port PORT 1…65535 | serve the page and the HTTP interface at http://127.0.0.1:PORT
--export DIR | write the page into DIR, with recorded answers

Change what runs
--model NAME | the model: {", ".join([*CATALOGUE, *PAIRS, *EMBEDDED])}, a folder, a .gguf file or a
  Hugging Face name (default: {DEFAULT}, which is downloaded once; {FALLBACK} where that fails)
--drafter NAME | who guesses: auto picks one in every cycle; none is plain decoding;
  {", ".join(NAMES)}, tree, or yours as file.py:Class (default: auto)
--num-speculative-tokens K 1…{MAX_SPECULATIVE_TOKENS} | the most tokens to guess at once
  (default: {MOST_K}; {Request.num_speculative_tokens} with --fixed-k)
--max-tokens N 1…1000000 | tokens to write
  (default: {Request.max_tokens}; in chats with a server, until the context is full)
--temperature T | 0 takes the likeliest token, more draws more freely
--top-k K | draw among the K likeliest tokens; 0 is off
--top-p P | draw among the fewest tokens whose probabilities sum to P; 1 is off
--min-p P | leave out what is less likely than P times the likeliest
--verification {{coupled,rejection}} | the rule that accepts drafts of sampled text: both keep its
  distribution, and coupled the text of a seed, too
--seed SEED | the same seed gives the same text (default: drawn anew for each request)
--explain [N] 1…1000 | with --prompt: show the first N cycles (4) step by step

More for --demo and --prompt
--raw | do not put prompts into the model's chat template; for the page, too
--prompts NAME… | with --demo: run these of demo_prompts/, by name or kind (chat, code, …)
--repeats N 1…100 | with --demo: times are medians of N runs (default: 1)
--json | with --demo: print one JSON document
--stop TEXT | with --prompt: end before this text; may be repeated
--help | show this page and exit

Models
--draft-model NAME | the small model that guesses (default: none; {", ".join(PAIRS)}, {DEFAULT} and
  {FALLBACK} have one)
--mtp NAME | the model's MTP head, a folder or a Hugging Face name (default: what the model has)
--eagle3 NAME | an EAGLE-3 head for it, named like --mtp (default: none; {DEFAULT} has one)
--dflash NAME | a DFlash head for it, named like --mtp (default: none; {FALLBACK} has one)
--max-model-len N 1…1000000 | tokens that a prompt and its answer may have together
  (default: what the model says, at most 8192)
--no-kernels | run transformers' own modules, and not the C that has equal bits
--dtype {{auto,packed,float32,bfloat16,int8}} | the type of the weights; auto is packed for a .gguf
  file, float32 for others on a CPU; int8 is a smaller, faster model than the one in the file
--device NAME | where to compute: auto, cpu, cuda, …
--trust-remote-code | run code that comes with the model
--allow-pickle | load weights that are not safetensors; such files can run code

Drafting
--fixed-k | always guess K tokens, whether it pays or not
--strict | an error in a drafter fails its request, for those who write one
--prompt-lookup-max N 1…1000000 | the longest run of tokens that ngram looks up
--prompt-lookup-min N 1…1000000 | the shortest run of tokens that ngram looks up
--suffix-cache N 0…10000000 | tokens of past outputs in which suffix looks; 0 is none
  (default: {REMEMBERED}, or 0 where others may call)
--suffix-corpus FILE… | files with texts like those to come, in which suffix looks, too

Serving
--max-running N 1…256 | requests that run at once; each holds a row of the KV cache
--max-queued N 1…{MAX_QUEUED} | requests that may wait; more are refused with status 429
--prefix-cache-mb MB 0…1048576 | megabytes for prompts already read, which are not read again;
  0 is off
--engine URL | let the vLLM, SGLang or llama-server that runs at URL compute

Who may call
--host ADDRESS | the address to serve on
--allowed-host NAME | a name by which the server may be called; may be repeated; * is any
--allow-origin ORIGIN | the site whose pages may call, as https://example.org; * is any
--api-key KEY | require KEY; other users of this machine can see it in ps
  (default: none; ${KEY_VARIABLE} is read)
"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2, without the usage."""
        print(f"error: {one_line(message, 2000)}", file=sys.stderr)
        raise SystemExit(2)


def between(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: an integer from low to high."""

    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, not {value}")
        return value

    parse.__name__ = "integer"  # argparse names the type in its error
    return parse


# How argparse reads an option, beyond what HELP and the type of its default say.
_READ: dict[str, Json] = {
    "help": {"action": "help"},
    "explain": {"nargs": "?", "const": 4, "default": 0},
    "prompts": {"nargs": "+"},
    "allowed_host": {"action": "append", "default": []},
    "no_kernels": {"action": "store_false", "dest": "kernels", "default": True},
    "num_speculative_tokens": {"default": None},  # it depends on other options
    "stop": {"action": "append"},
    "suffix_corpus": {"nargs": "+"},
    "seed": {"type": int},
}


def arguments() -> Iterator[tuple[str, str, Json]]:
    """Each option of HELP: its group, its flag, and what argparse's add_argument takes."""
    for group, *rows in (re.split(r"\n(?=--)", part) for part in HELP.strip().split("\n\n")):
        for row in rows:
            written, _, text = " ".join(row.split()).partition(" | ")
            flag, value, *bounds = [*written.split(), ""]
            name = flag[2:].replace("-", "_")
            default = getattr(Options, name, None)
            details: Json = {"default": default, **_READ.get(name, {})}
            if value.startswith("{"):
                details["choices"] = value[1:-1].split(",")
            elif value:
                details["metavar"] = value.strip("[]…")
                if bounds[0]:
                    details["type"] = between(*map(int, bounds[0].split("…")))
                elif isinstance(default, int | float):
                    details.setdefault("type", type(default))
            elif "action" not in details:
                details["action"] = "store_true"
            if type(default) in (int, float, str) and "(default: " not in text:
                text += f" (default: {default})"
            yield group, flag, details | {"help": text.replace("%", "%%")}


def _parser() -> Parser:
    """A parser of all options."""
    words = {"usage": USAGE, "description": ABOUT, "epilog": BEGIN}
    parser = Parser(**words, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False)
    groups = dict[str, Any]()
    for name, flag, details in arguments():
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
            if len(groups) == 1:  # what is done: one of these
                groups[name] = groups[name].add_mutually_exclusive_group()
        flags = ["-h", flag] if flag == "--help" else [flag]
        groups[name].add_argument(*flags, **details)
    return parser


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, Options]:
    """The command line, and the options in it. A mistake is one line on stderr and exit 2.

    Raises RequestError for what no request could have as its default.
    """
    parser = _parser()
    flags = parser.parse_args(arguments)
    if (key := os.environ.get(KEY_VARIABLE)) is not None:
        if flags.api_key is not None:
            parser.error(f"cannot use the API key: give it once: --api-key or ${KEY_VARIABLE}")
        flags.api_key = key
    if mistake := _mistake_in(flags):
        parser.error(mistake)
    values = {field.name: getattr(flags, field.name) for field in fields(Options)}
    chosen = Request if flags.fixed_k else Options
    values["num_speculative_tokens"] = flags.num_speculative_tokens or chosen.num_speculative_tokens
    options = Options(**values)
    check_fields(options.for_requests)
    return flags, options


_GO_WITH = "json demo, prompts demo, repeats demo, explain prompt, stop prompt, engine port"
_OWN = """model draft_model mtp eagle3 dflash max_model_len dtype kernels device trust_remote_code
allow_pickle raw drafter num_speculative_tokens fixed_k strict prompt_lookup_max prompt_lookup_min
suffix_cache suffix_corpus verification max_running max_queued prefix_cache_mb"""


def _mistake_in(flags: argparse.Namespace) -> str | None:
    """What does not go together, or cannot be used."""
    if not flags.demo and {flags.prompt, flags.port, flags.export} == {None}:
        return "say what to do: --demo (start here), --prompt TEXT, --port PORT or --export DIR"
    for name, other in map(str.split, _GO_WITH.split(", ")):
        if getattr(flags, name) and getattr(flags, other) in (None, False):
            return f"--{name} goes with --{other}"
    if flags.demo and flags.drafter == PLAIN:
        return "--demo compares drafters: --drafter none does not go with it"
    if flags.dtype == "int8" and not flags.kernels:
        return "--dtype int8 computes in C: leave out --no-kernels"
    if missing := [file for file in flags.suffix_corpus if not os.path.exists(file)]:
        return f"--suffix-corpus: there is no file {missing[0]}"
    if (key := flags.api_key) == "":
        return "cannot use the API key: it is empty: leave it out for none"
    if key and (key != key.strip() or not key.isprintable()):  # bytes that are not UTF-8 are not
        what = "UTF-8, without control characters and spaces around it"
        return f"cannot use the API key: it must be {what}"
    if not flags.host.strip():
        return "--host is empty: give 127.0.0.1 for this machine alone, 0.0.0.0 for all networks"
    shortest, longest = flags.prompt_lookup_min, flags.prompt_lookup_max
    if shortest > longest:
        return f"--prompt-lookup-min ({shortest}) must be at most --prompt-lookup-max ({longest})"
    for name in _OWN.split() if flags.engine else ():
        if getattr(flags, name) not in (None, getattr(Options, name)):
            flag = "no-kernels" if name == "kernels" else name.replace("_", "-")
            return f"--{flag} is for this server's own engine: it does not go with --engine"
    try:
        parts = urlsplit("http://none" if flags.engine is None else flags.engine)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        return f"--engine: {flags.engine!r} is no address such as http://host:8000"
    origin = flags.allow_origin or "*"
    if origin != "*" and not re.fullmatch(r"https?://[!-.0-~]+", origin):
        return f"--allow-origin: {origin} is no origin such as https://example.org"
    known = sorted({n for each in read_prompts(is_chat=True) for n in (each, kind_of(each))})
    if unknown := set(flags.prompts or ()) - set(known):
        return f"no demo prompt {min(unknown)!r}: choose {', '.join(known)}"
    return None
