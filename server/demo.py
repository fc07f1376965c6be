"""What the terminal shows: all demo prompts by all methods (--demo). generation.py shows one.

Each token is shown with its origin, in colours where the terminal has them, in brackets where not
(or where NO_COLOR is set). Everything here is handed an engine.
"""

import json
import logging
import os
import platform
import signal
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median

import huggingface_hub
import torch
import transformers
from tqdm import tqdm

from drafters.pool import TREE
from runtime import kernels
from runtime.models import required
from runtime.models.catalogue import entry_of
from runtime.models.prompts import kind_of, read_prompts
from runtime.models.startup import end_ahead, keep_standard_files, print_error
from runtime.statistics import Statistics, ratio
from runtime.values import (
    LONGEST_LINE,
    PLAIN,
    Engine,
    Json,
    Model,
    Request,
    RequestError,
    TextSequence,
    one_line,
)
from server import core
from server.answers import setting
from server.options import Options
from server.parsing import parse_request

_KINDS = {  # of tokens: their colour, their brackets, and what they are
    "accepted": (32, "[]", "drafted and accepted"),
    "recovered": (33, "<>", "the model's own, where a drafted token was rejected"),
    "bonus": (36, "{}", "the model's own next token"),
}
_END = (2, ("", ""), "the end of the text")
PACKED = "--dtype packed"  # stands for the target with the weights of its file, which runs plainly
_VERDICTS = {True: "yes", False: "NO", None: "not compared (verified by rejection)"}


def exit_status(act: Callable[[], int]) -> int:
    """Run a command: what `act` returns, 2 if it could not be carried out, 130 if interrupted."""
    keep_standard_files()
    sys.stdout.reconfigure(errors="replace")  # a terminal without "·" gets "?" and its text
    transformers.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()
    # On a terminal a warning or an error line tells of what has a traceback in a server's log.
    logging.lastResort.format = lambda record: one_line(record.getMessage(), LONGEST_LINE)
    logging.lastResort.addFilter(lambda record: not record.exc_info)
    once = logging.getLogger("progress.once")  # a model is fetched, blocks are compiled
    once.setLevel(logging.INFO)
    once.addHandler(logging.StreamHandler())
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # startup.py has set that
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = act()
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has seen enough (| head); nor can the rest be flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (RequestError, ValueError, OSError) as error:  # for the others see startup.py
        print_error(one_line(error))
        return 2
    finally:
        end_ahead()  # or Python would wait for it


def mark(pieces: Iterable[tuple[str, str]]) -> str:
    """(text, kind) pieces as one string that tells the kinds apart.

    Example: mark([("a b", "accepted"), (" c", "bonus")]) -> "[a b]{ c}", without colours
    """
    marked, has_colours = "", sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for text, kind in pieces:
        colour, (begin, end), _ = _KINDS.get(kind, _END)
        marked += f"\033[{colour}m{text}\033[0m" if has_colours else begin + text + end
    return marked


def end_of_text(engine: Engine, sequence: TextSequence) -> tuple[str, str]:
    """The token that ended a text or a turn, as it is written; nothing if none did."""
    last, tokenizer = sequence.tokens[-1], engine.target.tokenizer
    is_text = tokenizer.decode([last], skip_special_tokens=True)  # and stands there already
    is_shown = last in engine.eos_ids and not is_text
    return str(tokenizer.convert_ids_to_tokens(last)) if is_shown else "", "end"


def print_heading(engine: Engine, drafter: str | None) -> None:
    """What the marks mean, and the words of the controller where one decides."""
    print(" · ".join(f"{mark([(kind, kind)])} {means}" for kind, (*_, means) in _KINDS.items()))
    if engine.controller and drafter:
        print(engine.controller.LEGEND)


def request_of(prompt: str, engine: Engine, options: Options, **fields: Json) -> Request:
    """The request that the command line asks for."""
    fields |= {"prompt": prompt, "chat": options.is_chat(engine.target.tokenizer)}
    return parse_request(fields, engine, options.for_requests)[0]


def show_of(flags: Namespace) -> Callable[[Engine, Options, Namespace], int]:
    """What shows the demo, or one generation (--prompt). Raises StartError if it is not there."""
    return show_demo if flags.demo else required("server.generation", "--prompt").show


# -------------------------------------------------------------------------------- the demo


def show_demo(engine: Engine, options: Options, flags: Namespace) -> int:
    """Race all methods on the demo prompts, and print each prompt's result as it is done.

    Returns 1 if a drafter's text was not that of plain decoding, else 0.
    """
    shown, repeats, results = engine.default_drafter, flags.repeats or 1, list[Json]()
    is_chat = options.is_chat(engine.target.tokenizer)
    prompts, packed = chosen_prompts(is_chat, flags.prompts), packed_target(engine, options)
    if not flags.json:
        print(setting(engine, options))
        print_heading(engine, shown)
    for name, text in tqdm(prompts.items(), desc="demo prompts"):
        request = replace(request_of(text, engine, options, seed=options.seed or 0), isolated=True)
        results.append({"name": name, "prompt": text} | race(engine, request, repeats, packed))
        if not flags.json:
            tqdm.write(report(results[-1], shown, "\n" if is_chat else ""))
    totals = totals_of(results)
    if flags.json:
        versions = {each.__name__: each.__version__ for each in (torch, transformers)}
        versions |= {"python": platform.python_version()}
        where = {"device": str(engine.target.model.device), "versions": versions}
        for result in results:
            for run in result["speculative"].values():
                del run["pieces"]  # which is for the terminal
        print(json.dumps({"prompts": results, "totals": totals} | where))
    else:
        runs = "one run" if repeats == 1 else f"medians of {repeats} runs"
        print(f"\n━━ in all ({runs}) ".ljust(81, "━"), *table(totals), sep="\n")
    return int(any(total["identical"] is False for total in totals.values()))


def chosen_prompts(is_chat: bool, names: list[str] | None) -> dict[str, str]:
    """The demo prompts of some names or kinds; else a chat model's are chats, and others' all.

    Raises ValueError if all of these are chats, and the model is of another kind.
    """
    every = read_prompts(is_chat)
    wanted = {*(names or (["chat"] if is_chat else every))}
    chosen = {name: text for name, text in every.items() if wanted & {name, kind_of(name)}}
    if not chosen:
        raise ValueError("the demo prompts of the kind chat need a model with a chat template")
    return chosen


def packed_target(engine: Engine, options: Options) -> Model | None:
    """The target once more, as its file has it; None where it is served so, or cannot be.

    A model of the catalogue is unpacked to float32, so that memory bounds a pass, as it does with
    large models. What its small weights do by themselves belongs beside that.
    """
    if not entry_of(options.model) or options.dtype != "auto" or not engine.target.compiled:
        return None
    model = core.load_model(options.model, replace(options, dtype="packed"))
    kernels.speed_up(model)
    return model


def race(engine: Engine, request: Request, repeats: int, packed: Model | None = None) -> Json:
    """One prompt by plain decoding and by each drafter, in turn; times are medians.

    The model `packed` decodes plainly, too; its text is another one. Under the rule of rejection
    sampled outputs are independent draws, so they are not compared (identical: None).
    """
    skipped = {*engine.pool.special, TREE} - {engine.default_drafter}
    drafters = [name for name in engine.pool.choices if name not in skipped]
    settings = request.max_tokens, engine.eos_ids, request.sampling, request.seed
    plain = {PLAIN: engine.target} | ({PACKED: packed} if packed else {})
    times = {name: list[float]() for name in [*plain, *drafters]}
    ids, runs = dict[str, list[int]](), {name: list[TextSequence]() for name in drafters}
    for _ in range(repeats):
        for name, ms in times.items():
            began = time.perf_counter()
            if name in plain:
                ids[name] = core.plain_decode(plain[name], request.prompt, *settings)
            else:
                ((s, _),) = deque(engine.generate(replace(request, drafter=name)), maxlen=1)
                runs[name].append(s)
            ms.append(round((time.perf_counter() - began) * 1e3, 2))
    found = {}
    for name, tokens in ids.items():
        num, text = len(tokens), engine.target.tokenizer.decode(tokens, skip_special_tokens=True)
        counted = Statistics(prefills=1, target_passes=num - 1, num_bonus_tokens=num)
        found[name] = counted.counters(0) | {"token_ids": tokens, "text": text}
    for name, (*_, s) in runs.items():
        is_identical = all(each.output == ids[PLAIN] for each in runs[name])
        found[name] = s.statistics.counters(0) | {
            "token_ids": s.output,
            "text": s.text.text,
            "pieces": [*s.text.stretches(), end_of_text(engine, s)],
            "identical": is_identical if request.sampling.is_coupled else None,
            "controller": s.drafting.task.decision and str(s.drafting.task.decision),
            "warnings": s.warnings,
        }
    for name, ms in times.items():
        found[name] |= {"tokens": len(found[name]["token_ids"]), "ms": median(ms), "ms_of_runs": ms}
    others = {PACKED: found.pop(PACKED)} if packed else {}
    return {"standard": found.pop(PLAIN), "speculative": found} | others


def runs_of(result: Json) -> dict[str, Json]:
    """One prompt's runs by method, plain decoding first."""
    runs = {"standard": result["standard"]} | result["speculative"]
    return runs | {PACKED: result[PACKED]} if PACKED in result else runs


def totals_of(results: list[Json]) -> dict[str, Json]:
    """All prompts together, by method; `results` has one entry for each prompt."""
    totals: dict[str, Json] = {}
    every = [runs_of(result) for result in results]
    for method in every[0]:
        runs = [each[method] for each in every]
        total = {n: sum(run[n] for run in runs) for n in ("tokens", "target_passes", "ms")}
        total["tokens_per_pass"] = ratio(total["tokens"] - len(runs), total["target_passes"])
        identical = [run.get("identical", True) for run in runs]
        totals[method] = total | {"identical": None if None in identical else all(identical)}
    return totals


def table(runs: dict[str, Json]) -> list[str]:
    """A line for each method, of which the first one is plain decoding."""
    plain, lines = runs["standard"], list[str]()
    for name, run in runs.items():
        # Sampled texts may be of different lengths: times count per token.
        speed_up = plain["ms"] / plain["tokens"] * run["tokens"] / run["ms"]
        lines.append(
            f"{'plain decoding' if run is plain else name:14}{run['tokens']:6} tokens "
            f"{run['target_passes']:6} passes {run['ms']:8.0f} ms "
            f"{run['tokens_per_pass'] or 0:6.2f} tok/pass {speed_up:5.2f}×"
        )
        if name == PACKED:
            lines[-1] += "  (another model: the file's weights)"
        elif run is not plain:
            lines[-1] += f"  identical: {_VERDICTS[run['identical']]}"
    return lines


def report(result: Json, shown: str, between: str) -> str:
    """One prompt: a line for each method, and the text as the drafter `shown` wrote it."""
    runs, title = result["speculative"], f"\n━━ {result['name']} ".ljust(81, "━")
    lines = [title, *table(runs_of(result))]
    for name, run in runs.items():
        if run["controller"]:
            lines.append(f"the last choice of {name}: {run['controller']}")
        lines += [f"{name}: {warning}" for warning in run["warnings"]]
    text = result["prompt"] + between + mark(runs[shown]["pieces"])
    return "\n".join([*lines, f"the text as {shown} wrote it:\n", text])
