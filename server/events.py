"""A cycle as an event: what it committed, in values that JSON has (docs/api.md).

What else a request may ask to know about a cycle is trace.py's to say.
"""

from runtime import kernels, plug
from runtime.values import Cycle, Json, TextSequence

trace = plug("server.trace")


@kernels.exclusive()  # torch's threads would take the cores from the next pass
def event(s: TextSequence, cycle: Cycle) -> Json:
    """The event of a sequence's latest cycle: {step, tokens, pieces}, and what was asked for.

    tokens are those that stay. pieces is the text that may be shown now, as (text, kind).
    """
    fields: Json = {
        "step": cycle.number,
        "tokens": [token.as_dict() for token in cycle.tokens],
        "pieces": s.text.release(s.finish_reason is not None),
    }
    if trace:
        trace.add_details(fields, s, cycle)
    return fields


def public(event: Json) -> Json:
    """A cycle's event as a trace shows it, without what stands beside it: text and logprobs."""
    return {name: value for name, value in event.items() if name not in ("pieces", "logprobs")}


def brief(event: Json) -> Json:
    """A cycle's event as a stream shows it without a trace: what it committed."""
    tokens = [{"id": token["id"], "kind": token["kind"]} for token in event["tokens"]]
    return {"step": event["step"], "tokens": tokens}
