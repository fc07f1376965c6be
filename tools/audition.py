"""Does speculation pay here, with your model and your prompts, and with which drafter?

In turns, until `--minutes` are over, a prompt is decoded plainly, plainly again, by each drafter
that fits the model, and by `auto`, in an order by chance. A drafter has a fixed K, so that it
always drafts: the best K by the cost curve if .7 of its tokens are right. The table is shown after
1, 2, 4, … turns and at the end. Ctrl-C is an early end.

`of_plain` is the speed in that of plain decoding, prompts included, with the quartiles of turns.
`tok_pass` counts the tokens after the first one per target pass. `accepted` is a share of the
drafted tokens, and `needed` the share that pays for them: what a token takes, in plain passes,
`to_draft` and `to_verify`. `differing` counts texts that are not plain decoding's. Nobody wins who
gains no more than the noise: what two plain decodings differ by, and more of few turns.

    python -m tools.audition [--prompts FILE] [--each 3] [--raw] [--minutes 3] [--tokens 96]
        [--model NAME_OR_PATH] [--draft-model …] [--mtp …] [--eagle3 …] [--dflash …]
        [--dtype packed] [--drafters ngram auto mine.py:Bigram] [--k K]
        [--temperature 0] [--json]

FILE has a prompt per line; or, if its name ends with .jsonl, an object {"prompt": …} per line. A
chat model gets them in its chat template, unless --raw is given. Without FILE it gets `--each` of
each kind in tools/chat.jsonl, and another model the demo's. Past outputs, which a server may
look up for the drafter suffix, are left out: every turn has the same prompts. With --json one
document is all of stdout; there `accepted_at` has, for each position, how many of the drafts that
have it were accepted as far.
"""

import argparse
import random
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, product
from math import sqrt
from time import perf_counter
from typing import Any, NamedTuple

import drafters
import tools as bench
from drafters.auto import Controller
from drafters.pool import TREE
from runtime.models.catalogue import with_model
from runtime.models.reference import system_fingerprint
from runtime.values import MAX_SPECULATIVE_TOKENS, PLAIN, Engine, Request, Sampling
from server import demo
from server.comparison import costs_of
from server.curve import Curve
from server.measurement import Measurement
from server.options import MOST_K, Options, arguments, between
from server.parsing import check_fields

LOADED = "model", "draft_model", "mtp", "eagle3", "dflash", "dtype"
AGAIN = "none again"
_LIKELY, _DEFAULT_K, _WARM = 0.7, 3, 8  # α for K, K without a curve, tokens of the first runs
_LEAST, _BUSY = 0.01, 0.1  # noise: at least; from where on it is told
_RARELY = 20  # passes for a drafted token: then its costs are not known
Ways = dict[str, dict[str, Any]]  # fields of a request, by the way's name


class Run(NamedTuple):
    """One decoding of a prompt."""

    prompt: str
    ms: float
    finished: bench.Finished


Turns = list[dict[str, Run]]  # of one prompt each, by way


class Raced(NamedTuple):
    """What came of a race, and what it was about."""

    ways: Ways
    kinds: bench.Kinds
    curve: Curve
    turns: Turns


def cycle_ms(curve: Curve, name: str, token_ms: float = 0.0) -> dict[int, float]:
    """What a draft of K tokens and its pass take by the curve, by K, where that pass was measured.

    A token of a drafter that is not in the curve takes `token_ms`.
    """
    cost = curve.drafters.get(name) or {"call_ms": 0.0, "step_ms": token_ms}
    able = [k for k in range(1, MAX_SPECULATIVE_TOKENS + 1) if k + 1 in curve.pass_ms]
    return {k: cost["call_ms"] + k * cost["step_ms"] + curve.pass_ms[k + 1] for k in able}


def best_k(curve: Curve, name: str) -> int:
    """The K with the most tokens per ms by the curve, if each token has the chance _LIKELY."""
    ms = cycle_ms(curve, name)
    able = [k for k in ms if k <= MOST_K]
    return max(able, key=lambda k: (1 - _LIKELY ** (k + 1)) / ms[k], default=_DEFAULT_K)


def race(
    run: Callable[[str, str], bench.Finished], ways: Ways, prompts: list[str], limit_s: float
) -> Iterator[Turns]:
    """Run turns until the next would end too late, but one at least. Yields all so far."""
    chance, began, turns = random.Random(0), perf_counter(), Turns()
    for prompt in cycle(prompts):
        turn, order = dict[str, Run](), chance.sample([*ways], len(ways))
        for way in bench.tqdm(order, f"prompt {prompt}", leave=False, disable=None):
            before, finished = perf_counter(), run(way, prompt)
            turn[way] = Run(prompt, (perf_counter() - before) * 1e3, finished)
        turns.append(turn)
        yield turns
        if (perf_counter() - began) * (1 + 1 / len(turns)) > limit_s:
            return


def ms_of(turns: Turns, way: str) -> list[float]:
    """What each turn took."""
    return [turn[way].ms for turn in turns]


def differ_by(turns: Turns) -> float:
    """How much longer one of two plain decodings takes than the other, in nine turns of ten."""
    pairs = zip(ms_of(turns, PLAIN), ms_of(turns, AGAIN), strict=True)
    return sorted(max(pair) / min(pair) - 1 for pair in pairs)[int(0.9 * len(turns))]


def noise_of(turns: Turns) -> float:
    """What may look like a gain: three times the error of a ratio of sums, more of a few turns.

    The error is what two plain decodings tell. The best of several ways is to be more than it.
    """
    plain, again, count = ms_of(turns, PLAIN), ms_of(turns, AGAIN), len(turns)
    least = min(sum(plain), sum(again))
    error = sqrt(sum((a - b) ** 2 for a, b in zip(plain, again, strict=True))) / least
    in_all = abs(sum(plain) - sum(again)) / least
    return max(in_all, 3 * error * (1 + 2 / count), 2 * _BUSY / count, _LEAST)


def row_of(turns: Turns, way: str) -> dict[str, Any]:
    """The figures of a way to decode."""
    plain, own = ([turn[one] for turn in turns] for one in (PLAIN, way))
    texts, total = [run.finished.output for run in own], bench.total(run.finished for run in own)
    # Of a token: where bits differ, texts may differ in length.
    plain_ms, own_ms = (
        [run.ms / max(1, len(run.finished.output)) for run in runs] for runs in (plain, own)
    )
    drafted, passes = total.num_draft_tokens, total.target_passes
    note, costs = "", dict.fromkeys(("to_draft", "to_verify", "needed"))
    if drafted * _RARELY > passes:  # in plain passes: an accepted token saves one
        known = costs_of(total, bench.total(run.finished for run in plain))
        parts = known["c"], max(0.0, known["t_verify"] - 1) * passes / drafted
        costs = {n: round(x, 2) for n, x in zip(costs, (*parts, sum(parts)), strict=True)}
    elif way not in (PLAIN, AGAIN):
        note = "rarely drafted" if drafted else "never drafted"
    return {
        "drafter": way, "of_plain": round(sum(plain_ms) / sum(own_ms), 3),
        "quartiles": bench.speedup(plain_ms, own_ms).quartiles,
        "tokens_per_s": round(1e3 * sum(map(len, texts)) / sum(run.ms for run in own), 1),
        "tok_pass": bench.places(total.tokens_per_pass, 2), **costs,
        "accepted": bench.places(total.draft_acceptance_rate, 2),
        "differing": sum(a.finished.output != b for a, b in zip(plain, texts, strict=True)),
        "note": note,
    }  # fmt: skip


def table_of(turns: Turns) -> list[dict[str, Any]]:
    """A row for each way, the fastest first."""
    return sorted((row_of(turns, way) for way in turns[0]), key=lambda row: -row["of_plain"])


def show(turns: Turns) -> None:
    """Print the table so far."""
    count = len({turn[PLAIN].prompt for turn in turns})
    print(f"\n{len(turns)} turns, different prompts: {count}, noise: {noise_of(turns):.2f}")
    print(bench.table(table_of(turns)), flush=True)


def accepted(turns: Turns, kinds: bench.Kinds) -> list[dict[str, Any]]:
    """Of each way and kind of prompts the shares of drafts accepted up to each position."""
    rows = []
    for kind, way in product(kinds, turns[0]):
        own = [turn[way].finished for turn in turns if turn[way].prompt in kinds[kind]]
        shares = (total := bench.total(own)).per_position()["acceptance_rate_per_position"]
        row = {"prompts": kind, "drafter": way, "tok_pass": total.tokens_per_pass}
        rows += [row | {"accepted_at": shares}] if shares else []
    return rows


def verdict(turns: Turns) -> tuple[str | None, list[str]]:
    """The way that wins, or None; and sentences that say why."""
    table, least, says = table_of(turns), 1 + noise_of(turns), list[str]()
    if (share := differ_by(turns)) > _BUSY:
        says.append(f"The machine is busy: plain decoding differs from itself by {share:.0%}.")
    if unlike := ", ".join(row["drafter"] for row in table if row["differing"]):
        says.append(f"Texts differ from plain decoding's with {unlike}: see docs/exactness.md.")
    rows = [row for row in table if row["needed"] is not None]
    # Where passes gave no more tokens, it was not drafts that were faster.
    winners = [row for row in rows if min(row["of_plain"], row["tok_pass"]) > least]
    if not rows:
        return None, [*says, "Nobody drafted enough to tell whether speculation pays here."]
    # Of winners `auto` is preferred where only noise is faster: it watches each text.
    liked = {bench.AUTO: least} if winners else {}
    best = max(winners or rows, key=lambda row: row["of_plain"] * liked.get(row["drafter"], 1))
    begin = "Speculation pays here" if winners else "Speculation does not pay here"
    if not winners and best["of_plain"] * least > 1:
        begin = f"Nobody gains more than the noise ({least - 1:.2f})"
    must = f"{best['needed']:.2f} of the" if best["needed"] <= 1 else "more than all"
    says.append(
        f"{begin}: {best['drafter']} has {best['of_plain']:.2f} times the speed of plain decoding. "
        f"A pass gave {best['tok_pass']:.2f} tokens. To draft a token took {best['to_draft']:.2f} "
        f"of a plain pass, and to verify it {best['to_verify']:.2f}, so {must} drafted tokens must "
        f"be accepted: {best['accepted']:.2f} were."
    )
    return best["drafter"] if winners else None, says


def command_line(fields: dict[str, Any]) -> str:
    """The server's, with these options as far as they are not the defaults.

    The K that is the default elsewhere is not that of a fixed one.
    """
    is_fixed = fields.get("fixed_k", False)
    chosen = {
        name: value
        for name, value in fields.items()
        if value not in (None, getattr(Options, name))
        or (is_fixed and name == "num_speculative_tokens")
    }
    words = ["python", "08_speculative_decoding.py", "--port", "5000", *bench.as_words(chosen)]
    return shlex.join(words)


def seconds(text: str) -> float:
    """An argparse type: a time of more than 0 s and at most a day."""
    value = float(text)
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most 86400, not {text}")
    return value


def add_options(options: argparse.ArgumentParser) -> None:
    """The models, and what is asked of them."""
    options.add_argument("--prompts", metavar="FILE", help="a prompt per line, or .jsonl")
    bench.add_count(options, "--each", 1, 8, 3, "prompts of each kind, without FILE")
    options.add_argument("--raw", action="store_true", help="without the chat template")
    options.add_argument("--minutes", type=seconds, default=3.0, help="of racing (default: 3)")
    bench.add_count(options, "--tokens", 2, 100_000, 96, "a request, at most")
    for _, flag, details in arguments():
        if flag[2:].replace("-", "_") in LOADED:
            options.add_argument(flag, **details)
    text = "names, or yours as file.py:Class (default: all that fit, and auto)"
    options.add_argument(
        "--drafters", nargs="+", type=bench.drafter, default=[], metavar="NAME", help=text
    )
    options.add_argument(
        "--k", type=between(1, MAX_SPECULATIVE_TOKENS), help="tokens of each draft"
    )
    options.add_argument("--temperature", type=float, default=0.0)


def check(flags: argparse.Namespace) -> tuple[Options, dict[str, str]]:
    """Refuse what cannot be, before anything is loaded. Returns also the prompts of FILE by name.

    Raises ValueError, OSError or RequestError.
    """
    common = bench.FORGETFUL | {"drafter": bench.AUTO, "max_running": 1}
    options = Options(**common | {name: getattr(flags, name) for name in LOADED})
    check_fields({"temperature": flags.temperature})
    if flags.raw and not flags.prompts:
        raise ValueError("--raw goes with --prompts")
    for name in flags.drafters:
        if name in bench.SPECIAL:
            raise ValueError(f"{name} drafts only for requests that bring a {name}")
        if name in ("draft_model", "eagle3", "dflash") and not options.model_of(name):
            raise ValueError(f"{options.title} has no {name}: add --{name.replace('_', '-')}")
    return options, bench.prompts_of(flags.prompts) if flags.prompts else {}


def with_own(
    engine: Engine, options: Options, names: list[str]
) -> tuple[Engine, dict[str, drafters.Drafter]]:
    """An engine that has these drafters from files, too; and they, by what was given for each.

    `auto` does not choose them. Raises ValueError, as `drafters.load` does.
    """
    target, draft, auto = engine.target, engine.draft_model, engine.pool.choices[bench.AUTO]
    context = drafters.Context(target, draft, **options.for_drafters)
    own = {name: drafters.load(name, context) for name in names}
    loaded = dict(engine.pool.drafters)
    names = Counter(drafter.name for drafter in own.values())
    twice = {name for name, count in names.items() if count > 1}
    if taken := twice | names.keys() & {*loaded, bench.AUTO, TREE, PLAIN}:
        raise ValueError(f"the name {min(taken)!r} is taken: give your drafter another")
    if own:
        loaded |= {drafter.name: drafter for drafter in own.values()}
        control = Controller.of(target, loaded)
        engine = bench.core.Engine(target, loaded, controller=control, draft_model=draft)
        engine.pool.choices[bench.AUTO] = auto  # which has its own in a server, too
    return engine, own


def measurement(engine: Engine, options: Options) -> Measurement:
    """What a server measures of its engine in its first idle seconds."""
    measured = Measurement(engine, system_fingerprint(engine.target, options.quantize))
    while not measured.is_done:
        measured.measure()
    return measured


def load(flags: argparse.Namespace, options: Options) -> tuple[Engine, Ways, Curve]:
    """The engine, as a server has it after its first idle seconds, and the ways to race."""
    engine = bench.core.load_engine(with_model(options))
    engine, own = with_own(engine, options, [name for name in flags.drafters if ":" in name])
    flags.own = {drafter.name: name for name, drafter in own.items()}
    measured = measurement(engine, options)
    ways: Ways = {PLAIN: {}, AGAIN: {}}
    for name in flags.drafters or [*bench.names_of(engine), bench.AUTO]:
        name = own[name].name if name in own else name
        if name not in (*engine.pool.choices, PLAIN):
            others = ", ".join(engine.pool.drafters)
            raise ValueError(f"{name} does not fit {options.title}: {others} do")
        if name == bench.AUTO:
            ways[name] = {"drafter": name, "num_speculative_tokens": flags.k or MOST_K}
        elif name != PLAIN:  # a tree costs what its model does, the first of its drafters
            k = flags.k or best_k(measured.curve, engine.pool.choices[name][0])
            how = {"drafter": name, "num_speculative_tokens": k, "fixed_k": True}
            ways[f"{name}, K={k}"] = how
    return engine, ways, measured.curve


def hold(
    flags: argparse.Namespace, options: Options, texts: dict[str, str],
    at_turn: Callable[[Turns], None],
) -> Raced:  # fmt: skip
    """Load, and race with `texts`, or with ours if there are none.

    `at_turn` gets the turns so far. Ctrl-C ends the race early, maybe before its first turn.
    """
    engine, ways, curve = load(flags, options)
    own = bench.ids_of(texts, engine.target, flags.raw)
    kinds = {"all": own} if own else bench.chats(engine, flags.each)
    prompts, turns = bench.flat(kinds), Turns()
    order = random.Random(0).sample([*prompts], len(prompts))  # so that a few are of all kinds

    def run(way: str, name: str, most: int = flags.tokens) -> bench.Finished:
        most = min(most, engine.target.max_length - len(prompts[name]))
        sampling = Sampling(temperature=flags.temperature)
        request = Request(prompts[name], most, sampling=sampling, seed=1, **ways[way])
        return bench.run_together(engine, [request])[0]

    with bench.kept_at_the_end(lambda: bool(turns)):
        for way in ways:  # first calls are slow
            run(way, order[0], _WARM)
        for turns in race(run, ways, order, 60 * flags.minutes):
            at_turn(turns)
    return Raced(ways, kinds, curve, turns)


def act(arguments: list[str] | None) -> int:
    """Announce, load, race and judge. Returns the exit status."""
    add_options(line := bench.parser(__doc__, runs=None))
    flags = line.parse_args(arguments)
    (options, texts), who = check(flags), ", ".join(flags.drafters) or "all drafters that fit"
    plan = f"A race of plain decoding (twice, to see what is noise) and {who}: {flags.minutes:g} "
    plan += f"minutes in turns,\n{flags.tokens} tokens a text. Ctrl-C ends it early. First "
    plan += f"{options.title} is loaded."
    print(plan, file=sys.stderr if flags.json else None, flush=True)

    def tell(turns: Turns) -> None:
        if not (flags.json or len(turns) & (len(turns) - 1)):  # 1, 2, 4, …
            show(turns)

    ways, kinds, _, turns = hold(flags, options, texts, tell)
    if not turns:  # of which a table could be made
        raise KeyboardInterrupt
    best, says = verdict(turns)
    fields = ways[best] if best else {"drafter": PLAIN}
    fields = fields | {"drafter": flags.own.get(fields["drafter"], fields["drafter"])}
    command = command_line({name: getattr(flags, name) for name in LOADED} | fields)
    if flags.json:
        found = {"results": table_of(turns), "pays": best is not None, "says": says}
        kinds = kinds | {"all": bench.flat(kinds)}
        found |= {"command_line": command, "accepted": accepted(turns, kinds)}
        bench.report(__spec__.name, arguments, flags, found)
        return 0
    if len(turns) & (len(turns) - 1):
        show(turns)
    print("", *says, command, sep="\n")
    return 0


def main(arguments: list[str] | None = None) -> None:
    """Run the command line as the demo's is run: a mistake is one line."""
    sys.exit(demo.exit_status(partial(act, arguments)))


if __name__ == "__main__":
    main()
