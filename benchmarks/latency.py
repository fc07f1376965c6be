"""What do tokens cost, and what can speculation gain? Latencies, verify by rows, c, break-even.

Four tables: each model's time per token, to the first one, and a forward's share of the memory
floor (the time to read its weights once, at the bandwidth of summing a large tensor; weights that
fit into a processor's cache may be read faster); a forward over 1 … 17 tokens of one request
(t_verify: in forwards over one); one draft step of each drafter that runs a model (c: in plain
steps, as the engine does both); and by K, from these times: the speed-up if every draft token were
accepted, the alpha at which a drafter neither gains nor loses, and that alpha if t_verify were 1.
The drafter `free` costs nothing, as n-gram nearly does.

    python -m benchmarks.latency [--shape demo|0.6b] [--dtype float32|bfloat16] [--context 300]
        [--tokens 64] [--runs 15] [--json] [--plot FILE.png]
"""

import time
from statistics import mean, median, quantiles
from typing import Any

import torch

from benchmarks import (
    SHAPES,
    core,
    describe,
    finish,
    fixed_engine,
    generate_all,
    interleave,
    model_folder,
    parser,
    places,
)
from benchmarks.forwards import measure_forwards, read_bandwidth, weight_bytes
from benchmarks.plots import lines
from control.formulas import break_even_alpha, expected_speedup
from serving.options import ROOT, between

ROWS = range(1, 18)


def stream(engine: Any, prompt: list[int], num_tokens: int) -> list[float]:
    """Plain decoding: ms to the first token, then from each to the next."""
    times = [time.perf_counter()]
    for _ in engine.generate(core.Request(prompt, num_tokens)):
        times.append(time.perf_counter())
    return [(end - begin) * 1e3 for begin, end in zip(times, times[1:], strict=False)]


def measure_models(
    engines: dict[str, Any], prompt: list[int], num_tokens: int, runs: int, floor: float
) -> list[dict[str, Any]]:
    """One row per model; `floor` in bytes per second."""
    timed = interleave(
        {name: lambda e=e: stream(e, prompt, num_tokens) for name, e in engines.items()},
        runs,
        "tokens",
    )
    rows = []
    for name, engine in engines.items():
        model = engine.target
        first = median(call.result[0] for call in timed[name])
        times = [ms for call in timed[name] for ms in call.result[1:]]
        num_bytes = weight_bytes(model.model.config, model.model.dtype)
        floor_ms = num_bytes / floor * 1e3
        forward_ms = measure_forwards(model, prompt, (1,), max(runs, 5))[0]["ms"]
        row = {
            "mean_ms": mean(times),
            "p50_ms": median(times),
            "p90_ms": quantiles(times, n=10, method="inclusive")[8],
            "time_to_first_token_ms": first,
            "forward_ms": forward_ms,
            "weight_mb": num_bytes / 1e6,
            "floor_ms": floor_ms,
            "floor_share": floor_ms / forward_ms,
        }
        rows.append({"model": name} | {key: round(value, 3) for key, value in row.items()})
    return rows


def measure_drafters(
    engine: Any, prompt: list[int], num_tokens: int, runs: int
) -> list[dict[str, Any]]:
    """One row per drafter that runs a model: a draft token's time, also in plain passes."""
    k = core.Options.num_speculative_tokens
    names = [name for name in engine.drafters if name != "ngram"]
    methods = {
        name: lambda name=name: generate_all(engine, [prompt], num_tokens, name, k).statistics
        for name in [None, *names]
    }
    timed = interleave(methods, runs, "drafters") if names else {}
    sums = {
        name: sum((c.result for c in calls), core.Statistics()) for name, calls in timed.items()
    }
    return [
        {
            "drafter": name,
            "step_ms": round(sums[name].draft_ms / sums[name].num_draft_tokens, 3),
            "c": sums[name].costs(sums[None])["c"],
        }
        for name in names
    ]


def speculate(c: float, t_verify: dict[int, float]) -> list[dict[str, Any]]:
    """What follows for each K; t_verify by rows."""
    return [
        {
            "k": k,
            "ideal_speedup": round(expected_speedup(1.0, k, c, t_verify[k + 1]), 3),
            "break_even_alpha": places(break_even_alpha(k, c, t_verify[k + 1])),
            "break_even_if_t_verify_is_1": places(break_even_alpha(k, c)),
        }
        for k in (1, 2, 3, 4, 5, 6, 8, 12, 16)
    ]


def load_draft(dtype: str) -> Any:
    """The embedded draft model, as the target of an engine."""
    options = core.Options(dtype=dtype)
    draft = core.load_model(str(ROOT / "demo_models" / "draft"), options)
    draft.speed_up()
    draft.make_exact()
    return core.Engine(draft, {})


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: tables, then one JSON line."""
    options = parser(__doc__, runs=15)
    options.add_argument("--shape", choices=["demo", *SHAPES], default="demo", help="of the target")
    options.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options.add_argument("--context", type=between(17, 10**5), default=300, help="tokens before")
    options.add_argument("--tokens", type=between(4, 1000), default=64, help="to generate")
    given = options.parse_args(arguments)
    length = given.context + given.tokens + max(ROWS)
    with model_folder(given.shape, given.dtype) as folder:
        engine = fixed_engine(model=folder, dtype=given.dtype, max_running=2, max_model_len=length)
    engines = {"target": engine}
    if given.shape == "demo":
        engines["draft"] = load_draft(given.dtype)
    for one in engines.values():
        one.eos_ids = set()  # random text may end at any token
    vocabulary = min(one.target.vocab_size for one in engines.values())
    chance = torch.Generator().manual_seed(0)
    prompt = torch.randint(vocabulary, (given.context,), generator=chance).tolist()

    speed = read_bandwidth(engine.target.model.device)
    verify = measure_forwards(engine.target, prompt, ROWS, given.runs)
    drafters = measure_drafters(engine, prompt, given.tokens, given.runs)
    t_verify = {row["rows"]: row["t_verify"] for row in verify}
    costs = {"free": 0.0} | {row["drafter"]: row["c"] for row in drafters}
    document = describe(__spec__.name, arguments) | {
        "shape": given.shape,
        "dtype": given.dtype,
        "context": given.context,
        "runs": given.runs,
        "min_rows": engine.target.shapes.min_rows,  # fewer tokens are filled up to so many
        "is_exact": engine.is_exact,
        "read_gb_per_s": round(speed / 1e9, 2),
        "models": measure_models(engines, prompt, given.tokens, given.runs, speed),
        "verify": verify,
        "drafters": drafters,
        "speculation": [
            {"drafter": name} | row for name, c in costs.items() for row in speculate(c, t_verify)
        ],
    }
    rows, tables = document["speculation"], ["models", "verify", "drafters", "speculation"]
    panels = {
        "ideal speed-up": lines(rows, "drafter", "k", "ideal_speedup"),
        "break-even alpha": lines(rows, "drafter", "k", "break_even_alpha"),
    }
    finish(given, document, tables, {"panels": panels, "x_label": "K", "y_label": ""})


if __name__ == "__main__":
    main()
