"""The terminal: text with the origin of each token, the demo's tables.

Colours where the terminal has them, brackets where not (or where NO_COLOR is set).
"""

import os
import sys
from collections.abc import Iterable
from typing import Any

_COLOURS = {"accepted": "\033[32m", "recovered": "\033[33m", "bonus": "\033[36m"}
_BRACKETS = {"accepted": "[]", "recovered": "<>", "bonus": "{}"}
_MEANING = {
    "accepted": "drafted and accepted",
    "recovered": "the target's, where a draft was refused",
    "bonus": "the target's, nothing having been refused",
}
_COLUMNS = ("passes", "ms", "tok/pass", "accepted", "rate", "fewer passes", "speed-up")
_ROW = "{:14}{:>8} {:>8} {:>9} {:>9} {:>6} {:>13} {:>9}"


def has_colour() -> bool:
    """Whether stdout shows colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def mark(pieces: Iterable[tuple[str, str]], colour: bool) -> str:
    """(text, kind) pieces as one string that tells the kinds apart.

    Example: mark([("a b", "accepted"), (" c", "bonus")], colour=False) -> "[a b]{ c}"
    """
    if colour:
        return "".join(f"{_COLOURS[kind]}{text}\033[0m" for text, kind in pieces)
    return "".join(_BRACKETS[kind][0] + text + _BRACKETS[kind][1] for text, kind in pieces)


def legend(colour: bool) -> str:
    """What the colours or brackets mean."""
    return " · ".join(f"{mark([(kind, kind)], colour)} {_MEANING[kind]}" for kind in _MEANING)


def explain(event: dict[str, Any]) -> str:
    """One cycle of a trace, step by step: draft, verdicts with what decided, the cut.

    Of a prefill only what it cached and chose.
    """
    texts, (verified, kept) = event["texts"], event["cached"]
    drafted, tokens = event["proposals"], event["tokens"]
    held = verified - 1 - len(drafted)
    lines = [f"cycle {event['step']}"]
    if event["step"] == 0:
        lines[0] += f": prefill, {verified} tokens of the prompt are cached now"
    else:
        shown = " ".join(repr(texts[i]) for i in drafted) or "nothing"
        lines.append(f"  draft     {shown}")
        lines.append(
            f"  verify    pending and {len(drafted)} drafted in one forward: "
            f"cache {held} -> {verified}"
        )
    if event.get("controller"):
        lines.append(f"  decided   {event['controller']}")
    judged = [t for t in tokens if t["kind"] == "accepted"]
    judged += [event["rejected"]] if event["rejected"] else []
    for i, token in enumerate(judged, 1):
        lines.append(f"  d{i:<8} {texts[token['id']]!r:12} {_why(token)}: {token['kind']}")
    if tokens[-1]["kind"] != "accepted" and len(judged) < len(drafted):
        rest = ", ".join(f"d{i}" for i in range(len(judged) + 1, len(drafted) + 1))
        lines.append(f"  {'':9} {rest}: not judged, as the text before changed")
    for token in tokens:
        if token["kind"] != "accepted":
            lines.append(f"  target's  {texts[token['id']]!r:12} {_why(token)}: {token['kind']}")
    cut = f"cache {verified} -> {kept}" if kept < verified else f"nothing to cut, cache {kept}"
    return "\n".join([*lines, f"  truncate  {cut}; pending {texts[tokens[-1]['id']]!r}"])


def _why(token: dict[str, Any]) -> str:
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
    if total == score:  # greedy
        return f"score {score:.2f}"
    return f"log p {score:.2f} + noise {total - score:.2f} = {total:.2f}"


def print_figures(finish_reason: str, statistics: Any) -> None:
    """The closing line of one generation."""
    s, rate = statistics, statistics.draft_acceptance_rate
    print(
        f"\n\n{s.completion_tokens} tokens ({finish_reason})"
        f" · {s.target_passes} passes after prefill"
        f" · {s.tokens_per_pass or 0:.2f} tokens per pass"
        f" · {'nothing drafted' if rate is None else format(rate, '.0%') + ' accepted'}"
        f" · ms: prefill {s.prompt_ms:.0f}, draft {s.draft_ms:.0f}, verify {s.verify_ms:.0f}, "
        f"other {s.other_ms:.0f}"
    )


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _verdict(identical: list[bool | None]) -> str:
    if None in identical:
        return "not compared (verified by rejection)"
    return "yes" if all(identical) else "NO"


def _doubt(run: dict[str, Any]) -> str:
    """What to say behind a speed-up that only a busy machine explains."""
    if not run["disturbed"]:
        return ""
    least, most = run["spread"]
    return f" disturbed: {least:.2f} to {most:.2f}×"


def print_demo(document: dict[str, Any], shown: str, colour: bool) -> None:
    """The demo's document as tables, with the text of drafter `shown` marked by origin."""
    for result in document["prompts"]:
        standard = result["standard"]
        print(f"\n━━ {result['name']} " + "━" * max(0, 78 - len(result["name"])))
        print(_ROW.format("", *_COLUMNS))
        passes, ms = standard["target_passes"], standard["ms"]
        print(_ROW.format("standard", passes, f"{ms:.1f}", "1.00", "", "", "", "").rstrip())
        for name, run in result["speculative"].items():
            length = run["mean_acceptance_length"]
            # Sampled texts may be of different lengths: ms and passes count per token.
            share = len(run["token_ids"]) / len(standard["token_ids"])
            print(
                _ROW.format(
                    name,
                    run["target_passes"],
                    f"{run['ms']:.1f}",
                    _or_dash(run["tokens_per_pass"], ".2f"),
                    _or_dash(None if length is None else length - 1, ".2f"),
                    _or_dash(run["draft_acceptance_rate"], ".0%"),
                    f"{1 - run['target_passes'] / (passes * share) if passes else 0:.0%}",
                    f"{ms * share / run['ms']:.2f}×",
                )
                + _doubt(run)
            )
        for name, run in result["speculative"].items():
            if run["controller"]:
                print(f"  {name if name == 'auto' else 'last'}: {run['controller']}")
            for warning in run["warnings"]:
                print(f"{name}: {warning}")
        same = [run["identical"] for run in result["speculative"].values()]
        print(f"identical output: {_verdict(same)}        text as {shown} wrote it:\n")
        print(result["prompt"] + mark(result["speculative"][shown]["pieces"], colour))
    print(f"\n{legend(colour)}")
    if worked := document["worked_cycle"]:
        print(f"\n━━ one cycle of {worked['name']}, by {shown} " + "━" * 40)
        print(explain(worked["event"]))
    print("\n━━ in all " + "━" * 72)
    standard = document["totals"]["standard"]
    for method, total in document["totals"].items():
        same = "" if method == "standard" else f"identical: {_verdict([total['identical']])}"
        speed_up = standard["ms"] / standard["tokens"] * total["tokens"] / total["ms"]
        print(
            f"{method:14}{total['tokens']:6} tokens {total['target_passes']:6} passes "
            f"{total['ms']:8.0f} ms {total['tokens_per_pass'] or 0:6.2f} tok/pass "
            f"{speed_up:5.2f}×{_doubt(total)}  {same}".rstrip()
        )
