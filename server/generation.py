"""One generation in the terminal (--prompt), with its first cycles step by step (--explain)."""

import sys
from argparse import Namespace

from runtime.values import Engine, Json

from .demo import end_of_text, mark, print_heading, request_of
from .events import event
from .options import Options

_ENDS = {"length": "the limit is reached", "stop": "the text has ended"}
REASONS = {  # why a token is chosen, by rule
    "greedy": "The score is the target's logit. It chooses the token with the highest score.",
    "coupled": "The target chooses the token with the highest sum of log p (p: its chance) and\n"
    "noise, which is made from seed, position and token alone.",
    "rejection": "p and q are the chances that target and drafter give a token. It is accepted if\n"
    "the random number u is below p / q.",
}


def show(engine: Engine, options: Options, flags: Namespace) -> int:
    """One generation, streamed to the terminal with the origin of each token, then its figures.

    Of the first cycles, as many as --explain says, every step is shown before the text; the
    prefill is one of them. Returns 0, the exit status.
    """
    left = flags.explain
    request = request_of(flags.prompt, engine, options, stop=flags.stop, trace=bool(left))
    print_heading(engine, request.drafter)
    if left:
        print(REASONS[request.sampling.rule])
    text = "\n" + engine.target.tokenizer.decode(request.prompt)
    for s, cycle in engine.generate(request):
        shown = event(s, cycle)
        text += mark(shown["pieces"])
        if left:
            print(f"\n{explain(shown)}")
            left -= 1
        if not left or s.finish_reason:
            print(text, end="", flush=True)
            text = ""
    figures, rate = s.statistics, s.statistics.draft_acceptance_rate
    print(
        f"{mark([end_of_text(engine, s)])}\n\n{figures.completion_tokens} tokens "
        f"({_ENDS.get(s.finish_reason, s.finish_reason)})"
        f" · {figures.target_passes} passes after the prompt's"
        f" · {figures.tokens_per_pass or 0:.2f} tokens per pass"
        f" · {'nothing drafted' if rate is None else format(rate, '.0%') + ' accepted'}"
        f" · ms: prompt {figures.prompt_ms:.0f}, draft {figures.draft_ms:.0f}, "
        f"verify {figures.verify_ms:.0f}, other {figures.other_ms:.0f}"
    )
    if decision := s.drafting.task.decision:
        print(f"the controller's last choice: {decision}")
    if not request.sampling.is_greedy:
        print(f"seed {request.seed}")
    for warning in s.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


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
