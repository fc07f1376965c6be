"""--plan: the best drafter and K for a model and its prompts, as vLLM's and SGLang's command lines.

    python 08_speculative_decoding.py --plan [--model M] [--prompts FILE] [--drafter …] [--json]

Each drafter drafts K tokens in every cycle of the same prompts, as it would in those engines, which
have no controller. That gives a_i, the share of all passes in which its first i tokens were
accepted. It belongs to the model, the drafter and the text, and not to the machine. Hence

    E(K) = 1 + a_1 + … + a_K                tokens that a pass gives
    T(K) = steps · c + t_verify             its time, in passes of plain decoding
    E / T                                   the speed-up to expect, for one request at a time

What was timed here does not hold there, so T comes from sizes. A device that decodes spends its
time reading weights: c is the weights that a draft step reads, in those of the target. t_verify is
what control/estimates.py believes before it has measured: 2 % more for each further row.

Not covered: batches, in which a pass has rows for many requests, and stops being free of cost.
"""

import json
import os
import shlex
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

import demo
from control.estimates import Costs
from control.planner import Controller
from drafters import NAMES
from drafters.pool import PLAIN
from drafters.vllm_proposer import TOKENS_ONLY, VARIABLE, Proposer
from messages import Engine, Json, Request, check_prompt
from models.catalogue import entry_of, place_of
from models.prompts import ids_of, prompts_of
from serving.options import ROOT, RUNNING_ELSEWHERE, Options
from serving.parsing import model_id
from serving.statistics import Statistics

_LONGEST = 8  # drafts that are tried, unless --num-speculative-tokens is larger
_WORTHWHILE = 1.05  # the least speed-up: speculation has more costs in an engine
_PORT = 8000
_FRONT_LINE = f"python 08_speculative_decoding.py --port 5000 --engine http://127.0.0.1:{_PORT}"
# vLLM's method for custom drafters, with our class.
_OURS = {"method": "custom_class", "model": f"{Proposer.__module__}.{Proposer.__name__}"}
# SGLang's names of what it has. A custom drafter cannot be named there.
_SGLANG = {
    "ngram": "NGRAM", "suffix": "NGRAM", "draft_model": "STANDALONE", "eagle3": "EAGLE3",
    "mtp": "NEXTN", "dflash": "DFLASH",
}  # fmt: skip
_COLUMNS = ("drafter", "K", "tokens/pass", "c", "cost", "expected", "pays below")
_ROW = "{:14}{:>3} {:>12} {:>6} {:>6} {:>9} {:>11}"


@dataclass(frozen=True)
class Offer:
    """The speed-up that a drafter promises at a K, and the figures behind it."""

    drafter: str
    k: int
    tokens_per_pass: float
    c: float  # a draft step, in passes of plain decoding
    cost: float  # a cycle, in passes of plain decoding
    expected_speedup: float
    t_verify_break_even: float  # a pass that takes so many plain ones makes it as slow as plain

    @property
    def pays(self) -> bool:
        return self.expected_speedup >= _WORTHWHILE

    @property
    def why(self) -> str:
        """The figures in one sentence."""
        gain = (
            f"{self.tokens_per_pass:.2f} tokens a pass in the time of {self.cost:.2f} plain passes"
        )
        if not self.pays:
            return f"{self.drafter} gives {gain}, which gains less than 5 %"
        return (
            f"{self.drafter} with K={self.k} gives {gain}, so {self.expected_speedup:.2f} times "
            "the speed of plain decoding is expected, and it gains for as long as a pass over "
            f"{self.k + 1} rows takes less than {self.t_verify_break_even:.2f} plain ones"
        )


def offer(name: str, counted: Statistics, costs: Costs, k: int) -> Offer:
    """What a drafter promises at K, from what was counted with drafts at least as long.

    Example: 10 passes, the first token accepted in 6 and the second in 3, and a step that reads a
    tenth of the weights -> K = 2 gives 1.9 tokens in 0.2 + 1.04 passes, 1.53 times the speed.
    """
    passes, c = max(1, counted.target_passes), costs.shares[name]
    tokens = 1 + sum(counted.accepted_at[:k]) / passes
    rows = 1 + sum(counted.drafted_at[:k]) / passes
    steps = c if name in costs.at_once else k * c
    cost = steps + costs.a_pass(1, rows) / costs.a_pass(1, 1)
    return Offer(name, k, tokens, c, cost, tokens / cost, tokens - steps)


def count(
    engine: Engine, drafts: dict[str, int], prompts: dict[str, list[int]], options: Options,
    title: str,
) -> dict[str, Statistics]:  # fmt: skip
    """What became of each drafter's drafts, of so many tokens each, in all prompts."""
    statistics = {name: Statistics() for name in drafts}
    with tqdm(total=len(drafts) * len(prompts), desc=title) as progress:
        for prompt in prompts.values():
            for name, k in drafts.items():
                request = demo.request_of(prompt, name, options)
                request = replace(request, num_speculative_tokens=k, fixed_k=True)
                ((sequence, _),) = deque(engine.generate(request), maxlen=1)
                if sequence.warnings and name not in sequence.drafting.states:
                    raise ValueError(f"cannot plan with {name}: {sequence.warnings[0]}")
                statistics[name] += sequence.statistics
                progress.update()
    return statistics


def measure(
    engine: Engine, names: list[str], prompts: dict[str, list[int]], options: Options
) -> list[Offer]:
    """Each drafter at its best K; what promises most stands first."""
    costs = Controller.of(engine.target, engine.pool.drafters).costs
    longest = max(_LONGEST, options.num_speculative_tokens)
    most = {name: min(longest, costs.at_once.get(name, longest)) for name in names}
    statistics = count(engine, most, prompts, options, "drafts of all drafters")
    chosen = {}
    for name, counted in statistics.items():
        offers = [offer(name, counted, costs, k) for k in range(1, most[name] + 1)]
        chosen[name] = max(offers, key=lambda one: one.expected_speedup).k
    # With a smaller K cycles begin elsewhere in the text, so each is measured at the K it got.
    fewer = {n: k for n, k in chosen.items() if k < most[n]}
    statistics |= count(engine, fewer, prompts, options, "at the best K")
    offers = [offer(name, statistics[name], costs, k) for name, k in chosen.items()]
    return sorted(offers, key=lambda one: -one.expected_speedup)


# ------------------------------------------------------------------------------- command lines


def speculative_config(options: Options) -> Json | None:
    """The drafter as vLLM's --speculative-config has it; None is plain decoding."""
    drafter = str(options.drafter)
    if drafter == PLAIN:
        return None
    config: Json = {"num_speculative_tokens": options.num_speculative_tokens}
    if ":" in drafter:
        return _OURS | config
    config["method"] = drafter
    if drafter == "ngram":
        config["prompt_lookup_max"] = options.prompt_lookup_max
        config["prompt_lookup_min"] = options.prompt_lookup_min
    elif drafter == "suffix" and not options.num_remembered:
        config["suffix_decoding_max_cached_requests"] = 0
    elif drafter in ("draft_model", "eagle3", "dflash"):
        config["model"] = options.model_of(drafter)
    return config


def environment(drafter: str) -> dict[str, str]:
    """The variables with which vLLM finds a drafter of ours, which the config _OURS asks for."""
    file, colon, name = drafter.rpartition(":")
    location = f"{Path(file).resolve()}:{name}" if colon else drafter
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {VARIABLE: location, "PYTHONPATH": os.pathsep.join(paths)}


def place_for(model: str) -> str:
    """What another engine loads: of the catalogue the public model, which is in no GGUF file."""
    entry = entry_of(model)
    return entry.origin if entry else place_of(model)


def loading_words(options: Options, length_flag: str) -> list[str]:
    """How the model is loaded; engines differ only in their flag for the context's length."""
    words = [length_flag, str(options.max_model_len)] if options.max_model_len else []
    words += [] if options.dtype == "auto" else ["--dtype", options.dtype]
    return words + ["--trust-remote-code"] * options.trust_remote_code


def vllm_line(options: Options, is_ours: bool = False) -> str:
    """What starts vLLM with the options' drafter; `is_ours`: with this project's code for it."""
    config, variables = speculative_config(options), ""
    if is_ours:
        config = _OURS | {"num_speculative_tokens": options.num_speculative_tokens}
    if config and config["method"] == _OURS["method"]:
        pairs = environment(str(options.drafter)).items()
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in pairs)
    words = ["vllm", "serve", place_for(options.model)]
    words += ["--served-model-name", model_id(options.model)]
    words += ["--host", "127.0.0.1", "--port", str(_PORT), "--disable-uvicorn-access-log"]
    words += ["--max-num-seqs", str(options.max_running)]
    if config:
        words += ["--speculative-config", json.dumps(config)]
        words += ["--per-request-spec-decode-metrics", "summary"]
    return variables + shlex.join([*words, *loading_words(options, "--max-model-len")])


def sglang_line(options: Options) -> str:
    """What starts SGLang with the options' drafter, by its documentation.

    --speculative-num-draft-tokens counts the rows of a pass: K, and the token before them.
    """
    config = speculative_config(options) or {}
    words = ["python", "-m", "sglang.launch_server", "--model-path", place_for(options.model)]
    words += ["--served-model-name", model_id(options.model)]
    words += ["--host", "127.0.0.1", "--port", str(_PORT)]
    words += ["--max-running-requests", str(options.max_running)]
    if config:
        k, algorithm = options.num_speculative_tokens, _SGLANG[config["method"]]
        words += ["--speculative-algorithm", algorithm]
        if "model" in config:
            words += ["--speculative-draft-model-path", config["model"]]
        if algorithm == "NGRAM":
            words += ["--speculative-ngram-max-bfs-breadth", "1"]  # chains, as here
        elif algorithm != "DFLASH":
            words += ["--speculative-num-steps", str(k), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(k + 1)]
    return shlex.join([*words, *loading_words(options, "--context-length")])


def command_lines(offers: list[Offer], options: Options) -> dict[str, str]:
    """By what is started; each with the best drafter that it has, if one pays."""

    def best(are_named: Callable[[str], bool] = bool) -> Options:
        for one in offers:
            name = one.drafter if one.drafter in NAMES else str(options.drafter)
            if one.pays and are_named(name):
                return replace(options, drafter=name, num_speculative_tokens=one.k)
        return replace(options, drafter=PLAIN)

    chosen = best()
    lines = {"vLLM": vllm_line(chosen)}
    if chosen.drafter in TOKENS_ONLY:
        lines["vLLM, with the very drafter that was measured"] = vllm_line(chosen, is_ours=True)
    lines["SGLang"] = sglang_line(best(_SGLANG.__contains__))
    lines["this server in front of either"] = _FRONT_LINE
    return lines


# ------------------------------------------------------------------------------------- to show


def prompts_for(engine: Engine, options: Options, flags: Namespace) -> dict[str, list[int]]:
    """The prompts of a file, or demo prompts by name or kind. Raises ValueError, RequestError."""
    if flags.prompts and Path(flags.prompts[0]).is_file():
        prompts = ids_of(prompts_of(flags.prompts[0]), engine.target, options.raw)
    else:
        chosen = demo.chosen_prompts(engine, options, flags.prompts)
        prompts = {name: ids for name, (_, ids) in chosen.items()}
    for ids in prompts.values():
        check_prompt(ids, engine.target.max_length, engine.target.vocab_size)
    return prompts


def show_plan(engine: Engine, options: Options, flags: Namespace) -> int:
    """Print how another engine would serve these models. Returns 0, the exit status.

    Raises ValueError where it cannot be done.
    """
    names, left_out = [], ["self_int8", "tree"]
    for name, drafter in engine.pool.drafters.items():
        if name in engine.pool.special:  # requests bring what they draft from
            continue
        if name in _SGLANG or (name not in NAMES and not drafter.needs_hidden):
            names.append(name)
        elif name not in left_out and not drafter.needs:  # no prompt here has what it needs
            left_out.append(name)
    options = replace(options, max_running=flags.max_running or RUNNING_ELSEWHERE)
    prompts = prompts_for(engine, options, flags)
    offers = measure(engine, names, prompts, options)
    document = {
        "model": model_id(options.model),
        "prompts": len(prompts),
        "max_tokens": options.max_tokens or Request.max_tokens,
        "drafters": [vars(one) | {"pays": one.pays} for one in offers],
        "best": offers[0].drafter if offers[0].pays else PLAIN,
        "why": offers[0].why if offers[0].pays else "plain decoding is best: no drafter gains 5 %",
        "reasons": {one.drafter: one.why for one in offers},
        "command_lines": command_lines(offers, options),
        "left_out": left_out,
        "read_on": "docs/engines.md says what of this is measured and what is assumed",
    }
    print(json.dumps(document) if flags.json else text_of(document))
    return 0


def text_of(document: Json) -> str:
    """The advice as a terminal shows it."""
    lines = [
        f"{document['model']}: {document['prompts']} prompts, at most {document['max_tokens']} "
        "tokens each",
        "",
        _ROW.format(*_COLUMNS),
    ]
    for one in document["drafters"]:
        figures = (one["tokens_per_pass"], one["c"], one["cost"], one["expected_speedup"])
        shown = [f"{value:.2f}" for value in (*figures, one["t_verify_break_even"])]
        lines.append(_ROW.format(one["drafter"], one["k"], *shown))
    lines += ["", f"best: {document['why']}"]
    lines += [f"  {why}" for name, why in document["reasons"].items() if name != document["best"]]
    left_out = ", ".join(document["left_out"])
    lines += ["", f"{left_out} and auto have no counterpart there; {document['read_on']}"]
    for title, line in document["command_lines"].items():
        lines += ["", f"{title}:", f"  {line}"]
    return "\n".join(lines)
