"""What the terminal shows: one generation (--prompt), or all demo prompts by all methods (--demo).

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
from statistics import median, median_low

import huggingface_hub
import torch
import transformers
from tqdm import tqdm

from drafters.pool import TREE
from runtime.models import StartError, ahead
from runtime.models.prompts import chat_ids, kind_of, prompt_ids, read_prompts
from runtime.models.startup import is_shortage, print_error, report_shortage
from runtime.statistics import Statistics, ratio
from runtime.values import (
    LONGEST_LINE,
    PLAIN,
    Engine,
    Json,
    Request,
    RequestError,
    TextSequence,
    one_line,
)
from server import core, trace
from server.answers import setting
from server.comparison import steadiness
from server.options import Options
from server.parsing import parse_request

_COLOURS = {"accepted": 32, "recovered": 33, "bonus": 36, "end": 2}
_BRACKETS = {"accepted": "[]", "recovered": "<>", "bonus": "{}", "end": ("", "")}
_MEANING = {
    "accepted": "drafted and accepted",
    "recovered": "the model's own, where a drafted token was rejected",
    "bonus": "the model's own next token",
}
_CHOICES = (
    "The controller chooses K, the most tokens to draft; K=0 is none. α is the chance that a\n"
    "token is accepted, c the time to draft it, in passes. Drafting pays if α is above break-even."
)
_REASONS = {  # why a token is chosen, by rule
    "greedy": "The score is the target's logit. It chooses the token with the highest score.",
    "coupled": "The target chooses the token with the highest sum of log p (p: its chance) and\n"
    "noise, which is made from the seed and the position alone.",
    "rejection": "p and q are the chances that target and drafter give a token. It is accepted if\n"
    "the random number u is below p / q.",
}
_ENDS = {"length": "the limit is reached", "stop": "the text has ended"}
_PLAIN = "plain decoding"
_DEMO_S, _MOST_S = 60.0, 120.0  # that repeats may take, and a single run
_FEW, _SHORTEST = 8, 32  # tokens to generate: when timing a run, and in a text at the least
_FIGURES = (  # of a drafter's run, as its statistics have them
    "target_passes", "tokens_per_pass", "draft_acceptance_rate", "mean_acceptance_length",
    "num_draft_tokens", "num_accepted_draft_tokens",
)  # fmt: skip
_COLUMNS = ("passes", "ms", "tok/pass", "accepted", "rate", "fewer passes", "speed-up")
_WORDS = "accepted: drafted tokens that were kept in a cycle; rate: their share of drafted tokens"
_ROW = "{:14}{:>8} {:>8} {:>9} {:>9} {:>6} {:>13} {:>9}"

Prompts = dict[str, tuple[str, list[int]]]  # by name: text, and token ids


def keep_standard_files() -> None:
    """Open what was closed at the start (`>&-`): no other file may get the number of stdout."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")


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
    except (StartError, RequestError, ValueError, OSError) as error:
        print_error(one_line(error))
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        return report_shortage(error)
    finally:
        ahead.end()  # or Python would wait for it


# ------------------------------------------------------------------------------ one prompt


def show_prompt(engine: Engine, options: Options, flags: Namespace) -> int:
    """One generation, streamed to the terminal with the origin of each token, then its figures.

    Of the first cycles, as many as --explain says, every step is shown before the text; the
    prefill is one of them. Those that are only timed do not count. Returns 0, the exit status.
    """
    is_chat, num_explained = options.is_chat(engine.target.tokenizer), flags.explain
    body = {"prompt": flags.prompt, "stop": flags.stop, "chat": is_chat}
    wanted, *_ = parse_request(body, engine, options.for_requests)
    colour = has_colour()
    heading = [legend(colour), *([_CHOICES] if engine.controller and wanted.drafter else [])]
    if num_explained:
        heading.append(_REASONS[wanted.sampling.rule])
    print(*heading, sep="\n", end="\n\n")
    if num_explained:
        # Alone: or the run that is timed would draft from this one's text, among past outputs.
        for sequence, cycle in engine.generate(replace(wanted, trace=True, isolated=True)):
            said = sequence.drafting.task.decision
            if said and said.is_timing:
                print(f"cycle {cycle.number}: {said}", end="\n\n")
                continue
            print(explain(trace.event(sequence, cycle)), end="\n\n")
            if not (num_explained := num_explained - 1):
                break
    print(engine.target.tokenizer.decode(wanted.prompt), end="", flush=True)
    try:
        for s, _ in engine.generate(wanted):
            print(mark(s.text.release(s.finish_reason is not None), colour), end="", flush=True)
    except RequestError:
        print(flush=True)  # the error starts on a new line
        raise
    print(mark([(end_of_text(engine, s), "end")], colour), end="")
    print_figures(s.finish_reason, s.statistics)
    if s.drafting.task.decision:
        print(f"the controller's last choice: {s.drafting.task.decision}")
    if not wanted.sampling.is_greedy:
        print(f"seed {wanted.seed}")
    for warning in s.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def has_colour() -> bool:
    """Whether stdout shows colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def mark(pieces: Iterable[tuple[str, str]], colour: bool) -> str:
    """(text, kind) pieces as one string that tells the kinds apart.

    Example: mark([("a b", "accepted"), (" c", "bonus")], colour=False) -> "[a b]{ c}"
    """
    if colour:
        return "".join(f"\033[{_COLOURS[kind]}m{text}\033[0m" for text, kind in pieces)
    return "".join(_BRACKETS[kind][0] + text + _BRACKETS[kind][1] for text, kind in pieces)


def end_of_text(engine: Engine, sequence: TextSequence) -> str:
    """The token that ended a text or a turn, as it is written; nothing if none did."""
    last, tokenizer = sequence.tokens[-1], engine.target.tokenizer
    has_text = tokenizer.decode([last], skip_special_tokens=True)  # and is in the text already
    if last not in engine.eos_ids or has_text:
        return ""
    return str(tokenizer.convert_ids_to_tokens(last))


def legend(colour: bool) -> str:
    """What the colours or brackets mean."""
    return " · ".join(f"{mark([(kind, kind)], colour)} {_MEANING[kind]}" for kind in _MEANING)


def explain(event: Json) -> str:
    """One cycle of a trace, step by step: draft, verdicts with what decided, the cut.

    A prefill shows only what it cached and which token it chose.
    """
    texts, (verified, after) = event["texts"], event["cached"]
    drafted, tokens = event["proposals"], event["tokens"]
    tree = event.get("tree") or [{"id": id, "parent": i - 1} for i, id in enumerate(drafted)]
    held = verified - 1 - len(tree)
    lines = [f"cycle {event['step']}"]
    if event["step"] == 0:
        lines[0] += f": the prompt is read (prefill), its {verified} tokens are cached now"
    if event.get("controller"):
        lines.append(f"  decide    {event['controller']}")
    if event["step"]:
        read = f"the pending token and {len(tree)} drafted" if tree else "the pending token"
        lines.append(f"  draft     {_branches(tree, texts) or 'nothing'}")
        lines.append(f"  verify    one pass over {read}: cache {held} -> {verified} tokens")
    judged = [t for t in tokens if t["kind"] == "accepted"]
    judged += [event["rejected"]] if event["rejected"] else []
    for i, token in enumerate(judged, 1):
        lines.append(f"  d{i:<8} {texts[token['id']]!r:12} {_why(token)}: {token['kind']}")
    if tokens[-1]["kind"] != "accepted" and len(judged) < len(drafted):
        rest = ", ".join(f"d{i}" for i in range(len(judged) + 1, len(drafted) + 1))
        lines.append(f"  {'':9} {rest}: dropped behind the rejected token")
    for token in tokens:
        if token["kind"] != "accepted":
            lines.append(f"  target's  {texts[token['id']]!r:12} {_why(token)}: {token['kind']}")
    cut = f"cache {verified} -> {after} tokens" if after < verified else f"nothing, {after} stay"
    if (states := event.get("recurrent")) and after < verified:
        again = f", and replay {states['stepped']} of the tokens" if states["stepped"] else ""
        lines.append(f"  states    of {states['layers']} layers go back, like the cache{again}")
    return "\n".join([*lines, f"  truncate  {cut}; pending next: {texts[tokens[-1]['id']]!r}"])


def _branches(tree: list[dict[str, int]], texts: dict[int, str], at: int = -1) -> str:
    """What was drafted behind a token of a tree. Example: 'a' ('b' | 'c' 'd')."""
    branches = [
        f"{texts[token['id']]!r} {_branches(tree, texts, i)}".strip()
        for i, token in enumerate(tree)
        if token["parent"] == at
    ]
    return f"({' | '.join(branches)})" if len(branches) > 1 else "".join(branches)


def _why(token: Json) -> str:
    """What decided on a token: numbers under the rule of rejection, else the target's choice."""
    kind = token["kind"]
    if "u" in token:
        if kind in ("accepted", "rejected"):
            sign = "<" if kind == "accepted" else ">="
            return f"u {token['u']:.3f} {sign} p / q = {token['p']:.3f} / {token['q']:.3f}"
        source = "from norm(max(0, p - q))" if kind == "recovered" else "from p"
        return f"p {token['p']:.3f}, {source}"
    total, score = token["total"], token["score"]
    if score is None:
        return "has no chance here (p = 0)"
    less = ", the target's choice has more" if kind == "rejected" else ""
    if total == score:  # greedy
        return f"score {score:.2f}{less}"
    return f"log p {score:.2f} + noise {total - score:.2f} = {total:.2f}{less}"


def print_figures(finish_reason: str | None, statistics: Statistics) -> None:
    """The closing line of one generation."""
    s, rate = statistics, statistics.draft_acceptance_rate
    print(
        f"\n\n{s.completion_tokens} tokens ({_ENDS.get(finish_reason, finish_reason)})"
        f" · {s.target_passes} passes after the prompt's"
        f" · {s.tokens_per_pass or 0:.2f} tokens per pass"
        f" · {'nothing drafted' if rate is None else format(rate, '.0%') + ' accepted'}"
        f" · ms: prompt {s.prompt_ms:.0f}, draft {s.draft_ms:.0f}, verify {s.verify_ms:.0f}, "
        f"other {s.other_ms:.0f}"
    )


# -------------------------------------------------------------------------------- the demo


def chosen_prompts(engine: Engine, options: Options, names: list[str] | None) -> Prompts:
    """The demo prompts to run: those of some names or kinds, or all that suit the model.

    A chat model gets those of the kind chat. Raises ValueError where another model is to have one.
    """
    tokenizer, length = engine.target.tokenizer, engine.target.max_length
    is_chat = options.is_chat(tokenizer)
    every = read_prompts(is_chat)
    wanted = names or (["chat"] if is_chat else list(every))
    choices = dict.fromkeys([*map(kind_of, every), *every])
    for name in wanted:
        if name not in choices:  # the options have refused all others
            why = "chat needs a model with a chat template"
            raise ValueError(f"no demo prompt {name!r} ({why}): choose {', '.join(choices)}")
    encode = chat_ids if is_chat else prompt_ids
    return {
        name: (text, encode(text, tokenizer, length))
        for name, text in every.items()
        if name in wanted or kind_of(name) in wanted
    }


def show_demo(engine: Engine, options: Options, flags: Namespace) -> int:
    """Run the demo, and print each prompt's result as it is done.

    Interrupted, it goes on to the totals of what was done. Returns 1 if a drafter's text was not
    that of plain decoding, else 130 if it was interrupted.
    """
    shown, colour = engine.default_drafter, has_colour()
    is_chat = options.is_chat(engine.target.tokenizer)
    prompts = chosen_prompts(engine, options, flags.prompts)
    if not flags.json:
        heading = [setting(engine, options), legend(colour), _WORDS]
        print(*heading, *([_CHOICES] if engine.controller else []), sep="\n", flush=True)
    document: Json = {"prompts": [], "interrupted": False}
    seconds_a_token(engine, options)  # first calls are slow
    if (repeats := flags.repeats) is None:
        token_s = seconds_a_token(engine, options)
        options, prompts, repeats, said = fitting(token_s, options, prompts)
        if said and not flags.json:
            print(said, flush=True)
    try:
        for name, (text, ids) in tqdm(prompts.items(), desc="demo prompts"):
            compared = compare(engine, ids, options, repeats)
            result = {"name": name, "prompt": text} | compared
            document["prompts"].append(result)
            if not flags.json:
                with tqdm.external_write_mode(sys.stdout):
                    print_prompt(result, shown, colour, is_chat)
        document["worked_cycle"] = worked_cycle(engine, prompts, options)
    except KeyboardInterrupt:
        if not document["prompts"]:
            raise
        document |= {"interrupted": True, "worked_cycle": None}
    document["totals"] = demo_totals(document["prompts"], options.sampling.is_coupled)
    document["device"] = str(engine.target.model.device)
    libraries = {each.__name__: each.__version__ for each in (torch, transformers)}
    document["versions"] = {"python": platform.python_version()} | libraries
    if flags.json:
        for run in (run for p in document["prompts"] for run in p["speculative"].values()):
            del run["pieces"]
        print(json.dumps(document))
    else:
        print_summary(document, shown, len(prompts))
    if any(total["identical"] is False for total in document["totals"].values()):
        return 1
    return 130 if document["interrupted"] else 0


def request_of(prompt: list[int], drafter: str, options: Options, trace: bool = False) -> Request:
    """One demo prompt as the command line wants it decoded."""
    return Request(
        prompt, options.max_tokens or Request.max_tokens, drafter, options.num_speculative_tokens,
        sampling=options.sampling, seed=options.seed or 0, trace=trace, isolated=True,
    )  # fmt: skip


def compare(engine: Engine, prompt: list[int], options: Options, repeats: int) -> Json:
    """One prompt by plain decoding and by each drafter, in turn; times are medians."""
    wanted = request_of(prompt, PLAIN, options)
    settings = prompt, wanted.max_tokens, engine.eos_ids, wanted.sampling, wanted.seed
    skipped = {*engine.pool.special, TREE} - {engine.default_drafter}
    methods = [name for name in engine.pool.choices if name not in skipped]
    times: dict[str, list[float]] = {name: [] for name in [PLAIN, *methods]}
    runs: dict[str, list[TextSequence]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, measured in times.items():
            began = time.perf_counter()
            if name == PLAIN:
                ids = core.plain_decode(engine.target, *settings)
            else:
                ((sequence, _),) = deque(engine.generate(replace(wanted, drafter=name)), maxlen=1)
                runs[name].append(sequence)
            measured.append((time.perf_counter() - began) * 1e3)
    text, passes = engine.target.tokenizer.decode(ids, skip_special_tokens=True), len(ids) - 1
    standard = {"target_passes": passes, "tokens_per_pass": ratio(len(ids) - 1, passes)}
    standard |= timed(times[PLAIN]) | {"token_ids": ids, "text": text}
    speculative = {n: demo_run(engine, each, times[n], standard) for n, each in runs.items()}
    return {"standard": standard, "speculative": speculative}


def worked_cycle(engine: Engine, prompts: Prompts, options: Options) -> Json | None:
    """The first cycle of the default drafter that accepts one token and rejects another."""
    for name, (_, prompt) in prompts.items():
        wanted = request_of(prompt, engine.default_drafter, options, trace=True)
        for sequence, cycle in engine.generate(wanted):
            if cycle.num_accepted and cycle.rejected:
                return {"name": name, "event": trace.event(sequence, cycle)}
    return None


def seconds_a_token(engine: Engine, options: Options) -> float:
    """How long all methods together take for a token."""
    few, text = replace(options, max_tokens=_FEW), engine.target.tokenizer("warm up")["input_ids"]
    began = time.perf_counter()
    compare(engine, text, few, 1)
    return (time.perf_counter() - began) / _FEW


def fitting(
    token_s: float, options: Options, prompts: Prompts
) -> tuple[Options, Prompts, int, str]:
    """What fits into the demo's time: options, prompts, repeats, and what was left out, in words.

    Where a pass is slow, texts are shorter first, unless --max-tokens sets their length; then
    prompts are left out.
    """
    count = options.max_tokens or Request.max_tokens
    expected_s = token_s * count * len(prompts)
    repeats = max(1, min(3, int(_DEMO_S / expected_s)))
    if expected_s <= _MOST_S:
        return options, prompts, repeats, ""
    tokens = options.max_tokens or max(_SHORTEST, int(count * _MOST_S / expected_s))
    most = max(2, int(_MOST_S / (token_s * tokens)))
    names = list(prompts)[:: -(-len(prompts) // most)]
    said = (
        f"a pass takes long here: {len(names)} of {len(prompts)} prompts, "
        f"{tokens} tokens each (--repeats 1 runs all of them to their ends)"
    )
    few = {name: prompts[name] for name in names}
    return replace(options, max_tokens=tokens), few, repeats, said


def timed(ms: list[float]) -> Json:
    """The median of several runs, and all of them."""
    return {"ms": round(median(ms), 2), "ms_of_runs": [round(each, 2) for each in ms]}


def demo_run(
    engine: Engine, sequences: list[TextSequence], ms: list[float], standard: Json
) -> Json:
    """One prompt by one drafter, run several times, beside plain decoding of it (`standard`).

    Under the rule of rejection sampled outputs are independent draws, so they are not compared
    (identical: None).
    """
    s, ids = sequences[ms.index(median_low(ms))], standard["token_ids"]
    is_coupled, num_plain = s.request.sampling.is_coupled, len(ids)
    speedups = [
        (plain / num_plain) / (drafted / len(each.output))
        for plain, drafted, each in zip(standard["ms_of_runs"], ms, sequences, strict=True)
    ]
    # Both spend equal time on the prompt; only the drafter's runs measure it apart.
    prompt_ms = median(each.statistics.prompt_ms for each in sequences)
    plain = Statistics(target_passes=num_plain - 1, verify_ms=max(0.0, standard["ms"] - prompt_ms))
    figures = {name: getattr(s.statistics, name) for name in _FIGURES}
    run = {
        "token_ids": s.output,
        "text": s.text.text,
        "controller": s.drafting.task.decision and str(s.drafting.task.decision),
        "warnings": s.warnings,
        "pieces": [*s.text.stretches(), (end_of_text(engine, s), "end")],
        "identical": all(each.output == ids for each in sequences) if is_coupled else None,
    }
    t_verify = s.statistics.costs(plain)["t_verify"]
    return figures | run | timed(ms) | steadiness(speedups, s.statistics.tokens_per_pass, t_verify)


def demo_totals(results: list[Json], is_coupled: bool) -> dict[str, Json]:
    """All prompts together, by method; `results` has one entry for each prompt."""
    totals: dict[str, Json] = {}
    for method in ["standard", *results[0]["speculative"]]:
        runs = [r["speculative"].get(method, r["standard"]) for r in results]
        tokens = sum(len(run["token_ids"]) for run in runs)
        passes = sum(run["target_passes"] for run in runs)
        of_runs = [sum(ms) for ms in zip(*(run["ms_of_runs"] for run in runs), strict=True)]
        total = {
            "tokens": tokens,
            "target_passes": passes,
            "tokens_per_pass": ratio(tokens - len(runs), passes),
            "ms": round(sum(run["ms"] for run in runs), 2),
            "ms_of_runs": [round(ms, 2) for ms in of_runs],
            "identical": all(r.get("identical", True) for r in runs) if is_coupled else None,
        }
        plain = totals.get("standard", total)
        speedups = [
            (before / plain["tokens"]) / (drafted / tokens)
            for before, drafted in zip(plain["ms_of_runs"], of_runs, strict=True)
        ]
        totals[method] = total | steadiness(speedups, total["tokens_per_pass"], None)
    return totals


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _verdict(identical: list[bool | None]) -> str:
    if None in identical:
        return "not compared (verified by rejection)"
    return "yes" if all(identical) else "NO"


def _doubt(run: Json) -> str:
    """What to say behind a speed-up that only a busy machine explains."""
    if not run["disturbed"]:
        return ""
    least, most = run["spread"]
    runs = f" ({least:.2f} to {most:.2f}×)" if least < most else ""
    return f" not reliable, the machine was busy{runs}"


def print_summary(document: Json, shown: str, num_prompts: int) -> None:
    """One worked cycle by the drafter `shown`, and the totals."""
    if document["interrupted"]:
        print(f"\ninterrupted after {len(document['prompts'])} of {num_prompts} prompts")
    if worked := document["worked_cycle"]:
        print(f"\n━━ one cycle of {worked['name']}, by {shown} " + "━" * 40)
        print(explain(worked["event"]))
    standard = document["totals"]["standard"]
    repeats = len(standard["ms_of_runs"])
    runs = "one run" if repeats == 1 else f"medians of {repeats} runs"
    print(f"\n━━ in all ({runs}) ".ljust(81, "━"))
    for method, total in document["totals"].items():
        is_plain = method == "standard"
        name = _PLAIN if is_plain else method
        verdict = "" if is_plain else f"identical: {_verdict([total['identical']])}"
        speed_up = standard["ms"] / standard["tokens"] * total["tokens"] / total["ms"]
        print(
            f"{name:14}{total['tokens']:6} tokens {total['target_passes']:6} passes "
            f"{total['ms']:8.0f} ms {total['tokens_per_pass'] or 0:6.2f} tok/pass "
            f"{speed_up:5.2f}×{_doubt(total)}  {verdict}".rstrip()
        )


def print_prompt(result: Json, shown: str, colour: bool, is_chat: bool = False) -> None:
    """One prompt: a row for each method, and the text by the drafter that is `shown`."""
    standard = result["standard"]
    print(f"\n━━ {result['name']} " + "━" * max(0, 78 - len(result["name"])))
    print(_ROW.format("", *_COLUMNS))
    passes, ms = standard["target_passes"], standard["ms"]
    print(_ROW.format(_PLAIN, passes, f"{ms:.1f}", "1.00", "", "", "", "").rstrip())
    for name, run in result["speculative"].items():
        length = run["mean_acceptance_length"]
        # Sampled texts may be of different lengths: ms and passes count per token.
        share = len(run["token_ids"]) / len(standard["token_ids"])
        fewer = 1 - run["target_passes"] / (passes * share) if passes else 0
        cells = (
            name, run["target_passes"], f"{run['ms']:.1f}", _or_dash(run["tokens_per_pass"], ".2f"),
            _or_dash(None if length is None else length - 1, ".2f"),
            _or_dash(run["draft_acceptance_rate"], ".0%"), f"{fewer:.0%}",
            f"{ms * share / run['ms']:.2f}×",
        )  # fmt: skip
        print(_ROW.format(*cells) + _doubt(run))
    for name, run in result["speculative"].items():
        if run["controller"]:
            print(f"  the last choice of {name}: {run['controller']}")
        for warning in run["warnings"]:
            print(f"{name}: {warning}")
    identical = [run["identical"] for run in result["speculative"].values()]
    print(f"identical output: {_verdict(identical)}        text as {shown} wrote it:\n")
    between = "\n" if is_chat else ""  # the answer does not go on in the prompt's line
    print(result["prompt"] + between + mark(result["speculative"][shown]["pieces"], colour))
