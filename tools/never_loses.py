"""Does `auto` ever lose to plain decoding? Kinds of prompts × temperatures × clients, one server.

In a round of a cell, so many clients ask prompts of the same kind in the same moment, once with
`auto` and twice without a drafter. The second time is the control: what noise makes of two equal
ways. A round's time is what its clients wait on average. Rounds go over all cells, in an order by
chance, and the ways change places, so that a busy minute hits no cell and no way alone. Each prompt
is in one round only, and nothing is remembered of prompts and texts.

`auto_of_plain` is the speed of `auto` in plain decoding's, `control` that of the other plain
decoding: medians of rounds, with quartiles; the worst cell comes first. `until_last` is that of
`auto` if a round's time ends with its last answer. With --fixed each drafter and K named there is
asked, too: `best_way` is the fastest of these and plain decoding, and `of_best` the speed of `auto`
in that one's. With --order pairs each kind comes behind each other kind in a run. The summary has
geometric means, and `below_1`, a share of cells. `differing` counts texts that are not plain
decoding's.

    python -m tools.never_loses [--kinds chat code …] [--temperatures 0 0.8 1.2] [--runs 7]
        [--clients 1 2 4 8 16] [--tokens 96] [--model smollm2] [--draft-model NAME]
        [--order pairs] [--fixed draft_model:3 ngram:5] [--json]

Ctrl-C ends the rounds and shows what they gave. The memory's speed is measured before and after.
"""

import argparse
import random
import tomllib
from collections import defaultdict
from itertools import count, islice, permutations, product
from operator import ne
from pathlib import Path
from statistics import geometric_mean, mean, median
from typing import Any, NamedTuple

import tools as bench
from runtime.values import PLAIN, RequestError
from server.options import between
from server.parsing import check_fields
from tools.servers import Server, at_once, memory_gb_per_s, our_command, started

WAYS = bench.AUTO, "plain", "control"
ORDERS = [*permutations(WAYS)]

# --------------------------------------------------------------------------------- the prompts
DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
WORDS = {name: DATA[f"{name}s"].split() for name in ("name", "town", "thing")}
WORDS["number"] = [*map(str, range(11, 100))]
TEXTS = {"CODE": DATA["code"], "ARTICLE": DATA["article"].rstrip()}
KINDS: dict[str, list[str]] = DATA["kinds"]
MORE: dict[str, Any] = DATA["more"]  # fields of the requests of a kind


def prompt(kind: str, number: int) -> str:
    """One of a kind's prompts: 1,334 in a row, two times 23 × 29, are all different."""
    template = KINDS[kind][number % len(KINDS[kind])]
    for name, text in TEXTS.items():
        template = template.replace(name, text)
    return template.format(**{name: words[number % len(words)] for name, words in WORDS.items()})


# --------------------------------------------------------------------------------- the rounds
class Cell(NamedTuple):
    """What is asked at once."""

    kind: str
    temperature: float
    clients: int


class Answers(NamedTuple):
    """What one way wrote in a round, and how long it took."""

    ms: float  # a client's, on average
    texts: list[str]
    last_ms: float  # until all are there


Round = dict[str, Answers]  # by way


def ask(server: Server, is_chat: bool, bodies: list[dict[str, Any]], way: str) -> Answers:
    """All requests in the same moment."""
    route = "/v1/chat/completions" if is_chat else "/v1/completions"
    name, _, k = way.partition(":")
    drafter = {"drafter": name if k or way == bench.AUTO else PLAIN}
    drafter |= {"fixed_k": True, "num_speculative_tokens": int(k)} if k else {}
    last_ms, told = at_once(server.port, route, [body | drafter for body in bodies])
    choices = [answer.events[-1]["choices"][0] for answer in told]
    texts = [choice["message"]["content"] if is_chat else choice["text"] for choice in choices]
    return Answers(mean(answer.at_ms[-1] for answer in told), texts, last_ms)


def fixed_way(text: str) -> str:
    """An argparse type: a drafter and its K. Example: ngram:5."""
    name, _, k = text.partition(":")
    if not name or not k.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a drafter and K, as ngram:5, not {text}")
    return f"{bench.drafter(name)}:{k}"


def in_order(count: int, order: str, chance: random.Random) -> list[int]:
    """The cells of a run: by chance, or so that each comes behind each other one."""
    if order == "pairs" and count > 1:
        return [i for pair in permutations(range(count), 2) for i in pair]
    return chance.sample(range(count), count)


def measure(server: Server, cells: list[Cell], flags: Any) -> dict[Cell, list[Round]]:
    """The rounds of each cell."""
    is_chat, numbers = server.health()["chat_template"], defaultdict[str, Any](count)
    found, chance = {cell: list[Round]() for cell in cells}, random.Random(0)

    def body(cell: Cell, number: int) -> dict[str, Any]:
        text = prompt(cell.kind, number)
        asked = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        asked |= {"max_tokens": flags.tokens, "temperature": cell.temperature, "seed": number}
        return asked | MORE.get(cell.kind, {})

    warm = [body(cells[0], -1) | {"max_tokens": 4, "seed": 0}] * max(flags.clients)
    ask(server, is_chat, warm, "plain")
    in_a_run = len(in_order(len(cells), flags.order, random.Random(0)))
    rounds = bench.tqdm(total=flags.runs * in_a_run, desc="rounds")
    with rounds as progress, bench.kept_at_the_end(lambda: any(found.values())):
        for run_index in range(flags.runs):
            for i in in_order(len(cells), flags.order, chance):
                cell, order = cells[i], [*ORDERS[(run_index + i) % len(ORDERS)], *flags.fixed]
                if flags.fixed:
                    chance.shuffle(order)
                bodies = [body(cell, number) for number in islice(numbers[cell.kind], cell.clients)]
                found[cell].append({way: ask(server, is_chat, bodies, way) for way in order})
                progress.update()
    return {cell: rounds for cell, rounds in found.items() if rounds}


FIGURES = (bench.AUTO, "auto_of_plain", ""), ("control", "control", "control_")


def row_of(cell: Cell, rounds: list[Round]) -> dict[str, Any]:
    """The figures of a cell."""

    def of(way: str, field: str = "ms") -> list[Any]:
        return [getattr(each[way], field) for each in rounds]

    row, texts = cell._asdict(), sum(of("plain", "texts"), [])
    for way, name, begin in FIGURES:
        row[name], row[f"{begin}quartiles"] = bench.speedup(of("plain"), of(way))
        row[f"{begin}differing"] = sum(map(ne, texts, sum(of(way, "texts"), [])))
    fixed = [way for way in rounds[0] if ":" in way]
    speeds = {way: bench.speedup(of("plain"), of(way)).median for way in ("plain", *fixed)}
    best = max(speeds, key=lambda way: speeds[way])
    row |= {"best_way": best, "of_best": round(row["auto_of_plain"] / speeds[best], 3)}
    row["until_last"] = bench.speedup(of("plain", "last_ms"), of(bench.AUTO, "last_ms")).median
    return row | {"plain_ms": round(median(of("plain")))}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the cells have in common: all, and those of each number of clients."""
    found = []
    for clients in ("all", *sorted({row["clients"] for row in rows})):
        group = [row for row in rows if clients in ("all", row["clients"])]
        found.append({"clients": str(clients), "cells": len(group)})
        for _, name, begin in FIGURES:
            figures = [row[name] for row in group]
            found[-1] |= {
                f"{begin}worst": min(figures),
                f"{begin}mean": round(geometric_mean(figures), 3),
                f"{begin}below_1": round(sum(each < 1 for each in figures) / len(figures), 3),
                f"{begin}differing": sum(row[f"{begin}differing"] for row in group),
            }
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__, 7)
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    options.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8, 1.2])
    options.add_argument("--clients", nargs="+", type=between(1, 16), default=[1, 2, 4, 8, 16])
    bench.add_count(options, "--tokens", 2, 1000, 96, "a request, at most")
    options.add_argument("--model", default="embedded", help="the target (default: ours)")
    options.add_argument("--draft-model", help="for draft_model, where the target brings none")
    options.add_argument("--order", choices=("chance", "pairs"), default="chance")
    options.add_argument("--fixed", nargs="+", type=fixed_way, default=[], metavar="DRAFTER:K")
    flags = options.parse_args(arguments)
    try:
        for temperature in flags.temperatures:
            check_fields({"temperature": temperature})
    except RequestError as error:
        options.error(str(error))
    models = {"model": flags.model, "draft_model": flags.draft_model}
    cells = [Cell(*each) for each in product(flags.kinds, flags.temperatures, flags.clients)]
    before = memory_gb_per_s()
    with started(our_command(**models, max_running=max(flags.clients))) as server:
        rounds = measure(server, cells, flags)
    if not rounds:
        raise KeyboardInterrupt
    memory = {"memory_gb_per_s": [before, memory_gb_per_s()]}
    rows = sorted((row_of(*each) for each in rounds.items()), key=lambda row: row["auto_of_plain"])
    found = memory | {"results": rows, "summary": summary(rows)}
    bench.report(__spec__.name, arguments, flags, found)


if __name__ == "__main__":
    main()
