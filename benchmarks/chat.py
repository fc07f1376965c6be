"""Does speculation pay with a real chat model? All drafters against plain decoding and generate().

Up to 24 prompts of three kinds, none of them in any training data of ours: talk, summaries of
texts, code. Each goes through the model's chat template. Every way of decoding has every prompt,
in turn; speeds are tokens per second as medians of runs, prompts included. `of_plain` and
`of_generate` are speeds in that of our plain decoding and of transformers' generate() in the same
run; llama.cpp's methods name its type of weights. `tok_pass` counts the tokens after the first one
per target pass. `at_1` … are the shares of drafts whose first, second, … token was accepted, with
all before it.

    python -m benchmarks.chat [--model smollm2] [--dtype float32] [--k 4] [--fixed-k] [--tokens 128]
        [--temperature 0] [--drafters eagle3 ngram auto] [--each 3] [--runs 3] [--alone] [--json]
        [--quantize int8] [--llama q8_0 q4_1]

`--alone` leaves generate() out, and `--fixed-k` the controller: so is a head's acceptance measured.
`--llama` adds llama.cpp, plain and with the prompt lookup of its Python package, where
llama-cpp-python and gguf are installed; and the time of its passes and of ours.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import benchmarks as bench
from benchmarks import llama_peer
from benchmarks.peers import Peer
from messages import Request, Sampling
from models.catalogue import folder_of
from models.prompts import chat_ids
from serving.options import between
from serving.parsing import MAX_SPECULATIVE_TOKENS

_TEXTS = (
    "The heron stands still for a long time. It waits in shallow water until a fish comes near. "
    "Then its neck moves faster than the eye can follow. Farmers who keep fish do not like it, and "
    "stretch nets over their ponds. But most of what it eats is of no use to anybody.",
    "In the town of Arlen the tram runs every ten minutes. Last year they decided that "
    "children may ride without a ticket. Since then twice as many pupils take the tram, and there "
    "are fewer cars in front of the schools. The tram company says that it has lost less money "
    "than it feared.",
    "To make paper by hand, old rags are cut up and soaked for days. They are beaten until nothing "
    "but single fibres swim in the water. A sieve is dipped into the vat, lifted and shaken. What "
    "stays on it is pressed between felts and hung up to dry.",
    "Our meeting on Tuesday was about the new kitchen. Mara has three offers, and the cheapest one "
    "cannot begin before June. Tom wants to keep the old oven. We agreed to ask the second company "
    "whether it could work at weekends, and to decide next week.",
)
PROMPTS = {
    "talk": (
        "Why do leaves fall in autumn?",
        "I slept badly and have an exam today. What should I do?",
        "Tell me a story about a lighthouse keeper and a seal.",
        "What should I see in a day in Lisbon?",
        "Write a birthday wish for my aunt who loves roses.",
        "How does a refrigerator keep food cold?",
        "Give me three ideas for dinner with lentils.",
        "Which is better for a small flat, a rabbit or a parrot?",
    ),
    "summary": (
        *(f"Summarise this text in two sentences:\n\n{text}" for text in _TEXTS),
        *(f"What is this text about? Name its most important points.\n\n{text}" for text in _TEXTS),
    ),
    "code": (
        "Write a Python function that checks whether the brackets in a string are balanced.",
        "Write a Python class for a bank account with deposit and withdraw.",
        "How do I read a JSON file in Python and print one of its fields?",
        "Write a JavaScript function that shuffles an array.",
        "Write a SQL query that lists the ten customers with the most orders.",
        "Explain this code:\n\n```python\nfor i, c in enumerate(s):\n    seen[c] = i\n```",
        "Write a Python function that turns Roman numerals into numbers.",
        "Write a shell script that renames all .txt files in a folder to .md.",
    ),
}


def ways(
    engine: Any, peer: Peer | None, workers: dict[str, llama_peer.Worker], given: Any
) -> dict[tuple[str, str], Callable[[Any], Any]]:
    """(who, method) -> a function from a prompt's ids to its result."""
    sampling = Sampling(temperature=given.temperature)

    def ours(drafter: str | None) -> Callable[[list[int]], Any]:
        def run(prompt: list[int]) -> bench.Finished:
            request = Request(prompt, given.tokens, drafter, given.k, sampling=sampling, seed=1)
            return bench.run(engine, request)

        return run

    found: dict[tuple[str, str], Callable[[Any], Any]] = {("ours", "plain"): ours(None)}
    found |= {("ours", name): ours(name) for name in given.drafters}
    for method in ("greedy", "ngram") if peer else ():
        found["generate", method] = lambda p, m=method: peer.generate(m, p, given.tokens)

    def theirs(worker: llama_peer.Worker, k: int) -> Callable[[list[int]], Any]:
        return lambda prompt: Written(
            *worker.write(prompt, given.tokens, k, sorted(engine.eos_ids))
        )

    for kind, worker in workers.items():
        found["llama.cpp", kind] = theirs(worker, 0)
        found["llama.cpp", f"{kind}, lookup"] = theirs(worker, given.k)
    return found


class Written(NamedTuple):
    """What llama.cpp wrote, and how long it took without the pauses around it."""

    ms: float
    tokens: list[int]


def measure(
    engine: Any, peer: Peer | None, workers: dict[str, llama_peer.Worker], given: Any
) -> tuple[list[Any], list[Any]]:
    """One row per way, and one per drafter and kind of prompts."""
    tokenizer, length = engine.target.tokenizer, engine.target.max_length
    ids = {
        (kind, i): chat_ids(text, tokenizer, length)
        for kind, texts in PROMPTS.items()
        for i, text in enumerate(texts[: given.each])
    }
    methods = ways(engine, peer, workers, given)
    calls = {
        (way, place): lambda run=run, prompt=prompt: run(prompt)
        for place, prompt in ids.items()
        for way, run in methods.items()
    }
    timed = bench.interleave(calls, given.runs, "prompts")
    speeds, rows, kinds = {}, [], []
    for way in methods:
        of_runs = zip(*(timed[way, place] for place in ids), strict=True)
        speeds[way] = [sum(map(ms_of, run)) / sum(map(num_tokens, run)) for run in of_runs]
    first = {way: [timed[way, place][0].result for place in ids] for way in methods}
    plain = [result.output for result in first["ours", "plain"]]
    for who, name in methods:
        own = speeds[who, name]
        row = {"who": who, "method": name, "tokens_per_s": round(1e3 / bench.median(own), 1)}
        row["of_plain"] = bench.speedup(speeds["ours", "plain"], own).median
        if peer:
            row["of_generate"] = bench.speedup(speeds["generate", "greedy"], own).median
        outputs = [tokens_of(result) for result in first[who, name]]
        row["equal_outputs"] = sum(a == b for a, b in zip(outputs, plain, strict=True))
        ours = bench.total(first[who, name]) if who == "ours" else None
        row["tok_pass"] = ours and bench.places(ours.tokens_per_pass, 2)
        rows.append(row)
    for name in given.drafters:
        for kind in (*PROMPTS, "all"):
            of_kind = [timed[("ours", name), p][0].result for p in ids if kind in (p[0], "all")]
            total = bench.total(of_kind)
            shares = total.per_position()["acceptance_rate_per_position"]
            shares += [None] * (given.k - len(shares))  # places that no draft reached
            at = {f"at_{i}": bench.places(share, 2) for i, share in enumerate(shares, 1)}
            tok_pass = bench.places(total.tokens_per_pass, 2)
            kinds.append({"drafter": name, "prompts": kind, "tok_pass": tok_pass} | at)
    return rows, kinds


def compare(engine: Any, peer: Peer | None, given: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """What `measure` gives, and our passes beside llama.cpp's."""
    text, passes = bench.random_tokens(engine.target.vocab_size, 200), []
    with TemporaryDirectory() as folder, ExitStack() as closing:
        for kind in given.llama:
            passes += llama_peer.measure(peer.model, engine.target, kind, text, given.runs)
        workers = {kind: llama_peer.start(peer.model, kind, folder, 1024) for kind in given.llama}
        for worker in workers.values():
            closing.callback(worker.close)
        rows, kinds = measure(engine, None if given.alone else peer, workers, given)
    return rows, kinds, passes


def tokens_of(result: Any) -> list[int]:
    """What was generated, by ours or by generate()."""
    return result.output if isinstance(result, bench.Finished) else result.tokens


def ms_of(call: bench.Timed) -> float:
    return call.result.ms if isinstance(call.result, Written) else call.ms


def num_tokens(call: bench.Timed) -> int:
    return len(tokens_of(call.result))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__, 3)
    options.add_argument("--model", default="smollm2", help="a chat model (default: %(default)s)")
    options.add_argument("--eagle3", help="a head for it (default: the one that comes with it)")
    options.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options.add_argument("--k", type=between(1, MAX_SPECULATIVE_TOKENS), default=4)
    options.add_argument("--fixed-k", action="store_true", help="without the controller")
    options.add_argument("--quantize", choices=["int8"], help="of our target")
    options.add_argument("--llama", nargs="+", choices=llama_peer.TYPES, default=[])
    options.add_argument("--alone", action="store_true", help="without generate()")
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--drafters", nargs="+", help="(default: all that fit, and auto)")
    bench.add_count(options, "--each", 1, 8, 3, "prompts of each kind")
    bench.add_count(options, "--tokens", 2, 1000, 128, "a request, at most")
    given = options.parse_args(arguments)
    if given.temperature and not given.alone:
        options.error("--temperature goes with --alone: generate() draws other tokens")
    engine = bench.load_engine(
        model=given.model, eagle3=given.eagle3, dtype=given.dtype, fixed_k=given.fixed_k,
        num_speculative_tokens=given.k, max_running=2, max_model_len=1024, drafter=bench.AUTO,
        quantize=given.quantize,
    )  # fmt: skip
    choices = list(engine.panel.choices)
    given.drafters = given.drafters or choices
    if unknown := set(given.drafters) - set(choices):
        options.error(f"no drafter {min(unknown)}: choose from {', '.join(choices)}")
    if lacking := llama_peer.missing() if given.llama else None:
        print(lacking, file=sys.stderr)
        given.llama = []
    peer = None
    if given.llama or not given.alone:
        folder, device = folder_of(given.model), engine.target.model.device
        peer = Peer(folder, given.dtype, device, given.k, False)
    rows, kinds, passes = compare(engine, peer, given)
    tables = {"results": rows, "accepted": kinds, "passes": passes}
    bench.report(__spec__.name, arguments, given, tables, list(tables))


if __name__ == "__main__":
    main()
