"""Does speculation pay here, with your model and your prompts, and with which drafter?

In turns, until `--minutes` are over, a prompt is decoded plainly, plainly again, by each drafter
that fits the model, and by `auto`, in an order by chance. A drafter has a fixed K, so that it
always drafts: the best K by the cost curve if .7 of its tokens are right. The table is shown after
1, 2, 4, … turns and at the end. Ctrl-C is an early end.

`of_plain` is the speed in that of plain decoding, prompts included; `by_prompt` has the slowest and
the fastest one. `tok_pass` counts the tokens after the first one per target pass. `accepted` is a
share of the drafted tokens, and `needed` the share that pays for them: what a token takes to draft
and to verify, in plain passes. Of each prompt the median run counts. Nobody wins who gains no more
than the noise: it is how far two plain decodings of a turn differ, in nine turns of ten, and less
where there were many turns.

    python -m benchmarks.audition [--prompts FILE] [--each 3] [--raw] [--minutes 3] [--tokens 96]
        [--model NAME_OR_PATH] [--draft-model …] [--mtp …] [--eagle3 …] [--dflash …]
        [--dtype packed] [--quantize int8] [--drafters ngram auto mine.py:Bigram] [--k K]
        [--temperature 0] [--json]

FILE has a prompt per line; or, if its name ends with .jsonl, an object {"prompt": …} per line. A
chat model gets them in its chat template, unless --raw is given. Without FILE it gets `--each` of
each kind in benchmarks/chat.jsonl, and another model the demo's. Past outputs, which a server may
look up for the drafter suffix, are left out: every turn has the same prompts. With --json one
document is all of stdout; there `accepted_at` has the shares of drafts of which 1, 2, … tokens were
accepted.
"""

import argparse
import random
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import cycle
from math import sqrt
from time import perf_counter
from typing import Any, NamedTuple

import benchmarks as bench
import demo
import drafters
from control import Controller
from drafters.pool import PLAIN, TREE
from messages import MAX_SPECULATIVE_TOKENS, Engine, Request, Sampling
from models.catalogue import DEFAULT
from models.prompts import ids_of, prompts_of
from models.reference import system_fingerprint
from serving.curve import Curve
from serving.measurement import Measurement
from serving.options import Options, between, seconds
from serving.parsing import check_fields

LOADED = "model", "draft_model", "mtp", "eagle3", "dflash", "dtype", "quantize"
_LIKELY, _DEFAULT_K, _WARM = 0.7, 3, 8  # α for K, K without a curve, tokens of the first runs
_LEAST, _BUSY = 0.01, 0.1  # noise: at least; from where on it is told
_RARELY = 20  # passes for a drafted token: then its costs are not known
_HIDDEN = {"to_draft", "to_verify", "accepted_at"}  # fields that have no column


class Way(NamedTuple):
    """A way to decode: without a drafter, with a fixed K, or as the controller chooses."""

    name: str
    drafter: str | None = None
    k: int | None = None  # None: the controller chooses

    def __str__(self) -> str:
        return f"{self.name} (K={self.k})" if self.k else self.name


class Run(NamedTuple):
    """One decoding of a prompt."""

    ms: float
    finished: bench.Finished


class Turn(NamedTuple):
    """A prompt, decoded in all ways."""

    prompt: str
    runs: dict[Way, Run]


BASE, AGAIN = Way(PLAIN), Way("none again")


def decode(engine: Engine, flags: Any, way: Way, prompt: list[int], most: int) -> bench.Finished:
    """Decode a prompt so, up to `most` tokens, or fewer where the context has no room."""
    most = min(most, engine.target.max_length - len(prompt))
    k, sampling = (
        way.k or flags.k or Options.num_speculative_tokens,
        Sampling(temperature=flags.temperature),
    )
    how = {"sampling": sampling, "seed": 1, "fixed_k": way.k is not None}
    return bench.run_together(engine, [Request(prompt, most, way.drafter, k, **how)])[0]


def best_k(curve: Curve, name: str) -> int:
    """The K with the most tokens per ms by the curve, if each token has the chance _LIKELY."""
    cost = curve.drafters.get(name) or {"call_ms": 0.0, "step_ms": 0.0}

    def speed(k: int) -> float:
        ms = cost["call_ms"] + k * cost["step_ms"] + curve.pass_ms[k + 1]
        return sum(_LIKELY**i for i in range(k + 1)) / ms

    able = [rows - 1 for rows in curve.pass_ms if 1 < rows <= MAX_SPECULATIVE_TOKENS]
    return max(able, key=speed, default=_DEFAULT_K)


def race(
    run: Callable[[Way, str], bench.Finished], ways: list[Way], prompts: list[str], limit_s: float
) -> Iterator[list[Turn]]:
    """Run turns until the next would end too late, but one at least. Yields all so far."""
    chance, began, turns = random.Random(0), perf_counter(), list[Turn]()
    for name in cycle(prompts):
        turn, order = Turn(name, {}), chance.sample(ways, len(ways))
        for way in bench.tqdm(order, f"prompt {name}", leave=False, disable=None):
            before, finished = perf_counter(), run(way, name)
            turn.runs[way] = Run((perf_counter() - before) * 1e3, finished)
        turns.append(turn)
        yield turns
        if (perf_counter() - began) * (1 + 1 / len(turns)) > limit_s:
            return


def differ_by(turns: list[Turn]) -> float:
    """How much longer one of two plain decodings takes than the other, in nine turns of ten."""
    pairs = [sorted((turn.runs[BASE].ms, turn.runs[AGAIN].ms)) for turn in turns]
    return sorted(slow / fast - 1 for fast, slow in pairs)[int(0.9 * len(pairs))]


def noise_of(turns: list[Turn]) -> float:
    """What may look like a gain: what turns differ by, but less of many; of a few, a tenth."""
    return max(2 * differ_by(turns) / sqrt(len(turns)), _BUSY / len(turns), _LEAST)


def typical(turns: list[Turn], way: Way) -> list[Run]:
    """The median run of each prompt; of two the faster."""
    runs = defaultdict[str, list[Run]](list)
    for turn in turns:
        runs[turn.prompt].append(turn.runs[way])
    return [sorted(each, key=lambda run: run.ms)[(len(each) - 1) // 2] for each in runs.values()]


def row_of(turns: list[Turn], way: Way) -> dict[str, Any]:
    """The figures of a way to decode."""
    plain, own = typical(turns, BASE), typical(turns, way)
    base, total = (bench.total([run.finished for run in runs]) for runs in (plain, own))
    plain_ms, ms = (sum(run.ms for run in runs) for runs in (plain, own))
    gains = [round(one.ms / other.ms, 2) for one, other in zip(plain, own, strict=True)]
    texts = [[turn.runs[one].finished.output for one in (BASE, way)] for turn in turns]
    drafted, passes = total.num_draft_tokens, total.target_passes
    costs, note = dict.fromkeys(("to_draft", "to_verify", "needed")), ""
    if drafted * _RARELY > passes:  # of a token, in plain passes: one accepted saves a whole pass
        verify_ms = total.verify_ms + total.other_ms - passes * base.ms_per_token
        parts = [x / drafted / base.ms_per_token for x in (total.draft_ms, max(0.0, verify_ms))]
        costs = {n: round(x, 2) for n, x in zip(costs, (*parts, sum(parts)), strict=True)}
    elif way.drafter:
        note = "rarely drafted" if drafted else "never drafted"
    return {
        "drafter": way.name, "k": way.k,
        "tokens_per_s": round(1e3 * sum(len(run.finished.output) for run in own) / ms, 1),
        "of_plain": round(plain_ms / ms, 3), "by_prompt": [min(gains), max(gains)],
        "tok_pass": bench.places(total.tokens_per_pass, 2),
        "accepted": bench.places(total.draft_acceptance_rate, 2), **costs,
        "accepted_at": total.per_position()["acceptance_rate_per_position"],
        "differing": sum(one != other for one, other in texts), "note": note,
    }  # fmt: skip


def table_of(turns: list[Turn]) -> list[dict[str, Any]]:
    """A row for each way, the fastest first."""
    return sorted((row_of(turns, way) for way in turns[0].runs), key=lambda row: -row["of_plain"])


def show(turns: list[Turn]) -> None:
    """Print the table so far."""
    prompts = len({turn.prompt for turn in turns})
    print(f"\nturns: {len(turns)}, prompts: {prompts}, noise: {noise_of(turns):.2f}")
    rows = table_of(turns)
    bench.print_table([{k: v for k, v in row.items() if k not in _HIDDEN} for row in rows])
    sys.stdout.flush()


def verdict(turns: list[Turn], flags: Any) -> dict[str, Any]:
    """Whether speculation pays, why, and the command line to use."""
    table, least, says = table_of(turns), 1 + noise_of(turns), list[str]()
    rows = [row for row in table if row["needed"] is not None]
    # Where passes gave no more tokens, it was not drafts that were faster.
    winners = [row for row in rows if min(row["of_plain"], row["tok_pass"]) > least]
    if (share := differ_by(turns)) > _BUSY:
        says.append(f"The machine is busy: plain decoding differs from itself by {share:.0%}.")
    if unlike := ", ".join(row["drafter"] for row in table if row["differing"]):
        says.append(f"Texts differ from plain decoding's with {unlike}: see docs/exactness.md.")
    words = ["python", "08_speculative_decoding.py", "--port", "5000"]
    for name in LOADED:
        if (value := getattr(flags, name)) not in (None, getattr(Options, name)):
            words += [f"--{name.replace('_', '-')}", value]
    words += ["--drafter"]
    if not rows:
        says.append("Nobody drafted enough to tell whether speculation pays here.")
    else:
        # `auto` watches each text: it is preferred where only noise is faster.
        liked = {bench.AUTO: least}
        best = max(winners or rows, key=lambda row: row["of_plain"] * liked.get(row["drafter"], 1))
        begin = "Speculation pays here" if winners else "Speculation does not pay here"
        if not winners and best["of_plain"] > 1:
            begin = f"Nobody gains more than the noise ({least - 1:.2f})"
        says.append(
            f"{begin}: {Way(best['drafter'], k=best['k'])} has {best['of_plain']:.2f} times the "
            f"speed of plain decoding. A pass gave {best['tok_pass']:.2f} tokens. To draft a token "
            f"took {best['to_draft']:.2f} of a plain pass, and to verify it "
            f"{best['to_verify']:.2f}: {best['needed']:.2f} of the drafted tokens have to be "
            f"accepted, and {best['accepted']:.2f} were."
        )
    if winners:
        words += [flags.own.get(best["drafter"], best["drafter"])]
        words += ["--fixed-k"] if best["k"] else []
        most = best["k"] or flags.k
        words += ["--num-speculative-tokens", str(most)] if most else []
    command_line = shlex.join(words if winners else [*words, PLAIN])
    return {"pays": bool(winners), "noise": least - 1, "says": says, "command_line": command_line}


def parser() -> argparse.ArgumentParser:
    """The models, and what is asked of them."""
    options = bench.parser(__doc__, runs=None)
    text = "a prompt per line, or in a .jsonl file an object with the field prompt"
    options.add_argument("--prompts", metavar="FILE", help=text)
    bench.add_count(options, "--each", 1, 8, 3, "prompts of each kind, without FILE")
    options.add_argument("--raw", action="store_true", help="without the chat template")
    text = "for how long, beside loading (default: %(default)g)"
    options.add_argument("--minutes", type=seconds, default=3.0, help=text)
    bench.add_count(options, "--tokens", 2, 100_000, 96, "a request, at most")
    for name in LOADED:
        told = {**Options.__dataclass_fields__[name].metadata, "default": getattr(Options, name)}
        del told["group"]
        options.add_argument(f"--{name.replace('_', '-')}", help=told.pop("text"), **told)
    options.set_defaults(model=DEFAULT)
    text = "names, or yours as file.py:Class (default: all that fit, and auto)"
    options.add_argument("--drafters", nargs="+", default=[], metavar="NAME", help=text)
    text = "tokens of each draft; of auto's at most (default: as the cost curve says)"
    options.add_argument("--k", type=between(1, MAX_SPECULATIVE_TOKENS), help=text)
    options.add_argument("--temperature", type=float, default=0.0)
    return options


def check(flags: argparse.Namespace, options: Options) -> dict[str, str]:
    """Refuse what cannot be, before anything is loaded. Returns the prompts of FILE by name.

    Raises ValueError, OSError or RequestError.
    """
    if flags.raw and not flags.prompts:
        raise ValueError("--raw goes with --prompts")
    check_fields({"temperature": flags.temperature})
    for name in flags.drafters:
        drafters.check_name(name)
        if ":" in name:
            drafters.class_from_file(name)
        elif name in bench.SPECIAL:
            raise ValueError(f"{name} drafts only for requests that bring a {name}")
        elif name in ("draft_model", "eagle3", "dflash") and not options.model_of(name):
            raise ValueError(f"{flags.model} has no {name}: add --{name.replace('_', '-')}")
    return prompts_of(flags.prompts) if flags.prompts else {}


def load(flags: argparse.Namespace, options: Options) -> tuple[Engine, list[Way]]:
    """The engine, as a server has it after its first idle seconds, and the ways to race."""
    engine = bench.core.load_engine(options)
    target, draft = engine.target, engine.draft_model
    context = drafters.Context(target, bench.core.sample, draft, **options.for_drafters)
    own = {name: drafters.load(name, context) for name in flags.drafters if ":" in name}
    flags.own = {drafter.name: name for name, drafter in own.items()}
    loaded, auto = dict(engine.pool.drafters), engine.pool.choices[bench.AUTO]
    if taken := flags.own.keys() & {*loaded, bench.AUTO, TREE, PLAIN}:
        raise ValueError(f"the name {min(taken)!r} is taken: give your drafter another")
    if own:
        loaded |= {drafter.name: drafter for drafter in own.values()}
        control = Controller.of(target, loaded)
        engine = bench.core.Engine(target, loaded, controller=control, draft_model=draft)
        engine.pool.choices[bench.AUTO] = auto  # which has its own in a server, too
    measurement = Measurement(engine, system_fingerprint(target, options.quantize))
    while not measurement.is_done:
        measurement.measure()
    ways = [BASE, AGAIN]
    for name in flags.drafters or [*bench.names_of(engine), bench.AUTO]:
        name = own[name].name if name in own else name
        if name not in (*engine.pool.choices, PLAIN):
            raise ValueError(f"{name} does not fit {flags.model}: {', '.join(loaded)} do")
        if name != PLAIN:
            model = engine.pool.choices[name][0]  # a tree costs what its model does
            k = None if name == bench.AUTO else flags.k or best_k(measurement.curve, model)
            ways.append(Way(name, name, k))
    return engine, list(dict.fromkeys(ways))


def act(arguments: list[str] | None) -> int:
    """Announce, load, race and judge. Returns the exit status."""
    flags = parser().parse_args(arguments)
    common = bench.FORGETFUL | {"drafter": bench.AUTO, "max_running": 1}
    options = Options(**common | {name: getattr(flags, name) for name in LOADED})
    texts, who = check(flags, options), ", ".join(flags.drafters) or "all drafters that fit"
    print(
        f"Race of plain decoding (twice: what differs is noise) and {who}: {flags.minutes:g} "
        f"minutes, in turns,\n{flags.tokens} tokens a text. Ctrl-C ends it early. First "
        f"{flags.model} is loaded.", file=sys.stderr if flags.json else None, flush=True,
    )  # fmt: skip
    engine, ways = load(flags, options)
    own = ids_of(texts, engine.target, flags.raw)
    kinds = {"all": own} if own else bench.chats(engine, flags.each)
    prompts, turns = bench.flat(kinds), list[Turn]()
    order = random.Random(0).sample([*prompts], len(prompts))  # so that a few are of all kinds
    run = partial(decode, engine, flags)
    with suppress(KeyboardInterrupt):
        for way in ways:  # first calls are slow
            run(way, prompts[order[0]], _WARM)
        timed = lambda way, name: run(way, prompts[name], flags.tokens)  # noqa: E731
        for turns in race(timed, ways, order, 60 * flags.minutes):
            if not (flags.json or len(turns) & (len(turns) - 1)):  # 1, 2, 4, …
                show(turns)
    if not turns:  # of which a table could be made
        raise KeyboardInterrupt
    told = verdict(turns, flags)
    if flags.json:
        parts = {k: [turn for turn in turns if turn.prompt in names] for k, names in kinds.items()}
        by_kind = {kind: table_of(each) for kind, each in parts.items() if each}
        found = {"results": table_of(turns), "verdict": told, "by_kind": by_kind}
        bench.report(__spec__.name, arguments, flags, found)
        return 0
    if len(turns) & (len(turns) - 1):
        show(turns)
    print("", *told["says"], told["command_line"], sep="\n")
    return 0


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    if status := demo.exit_status(partial(act, arguments)):
        raise SystemExit(status)


if __name__ == "__main__":
    main()
