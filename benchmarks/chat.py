"""Does speculation pay with a real chat model? All drafters against plain decoding.

Up to 24 prompts of three kinds, none of them in any training data of ours: talk, summaries of
texts, code. Each goes through the model's chat template; a model without one gets the demo's
prompts. Every drafter has every prompt, in turn; speeds are tokens per second as medians of runs,
prompts included, and `of_plain` is a speed in that of plain decoding in the same run. `tok_pass`
counts the tokens after the first one per target pass. `at_1` … are the shares of drafts whose
first, second, … token was accepted, with all before it.

    python -m benchmarks.chat [--model smollm2] [--dtype float32] [--quantize int8] [--k 4]
        [--fixed-k] [--tokens 128] [--temperature 0] [--drafters eagle3 ngram auto] [--each 3]
        [--runs 3] [--json]

`--fixed-k` leaves the controller out: so is a head's acceptance measured.
"""

from typing import Any

import benchmarks as bench
from benchmarks import audition
from models.prompts import ids_of

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


def prompts_of(engine: Any, each: int) -> dict[str, dict[str, list[int]]]:
    """Token ids by kind and name, `each` of a kind at most: PROMPTS, or the demo's without chat."""
    kinds = bench.demo_prompts(engine)
    if engine.target.tokenizer.chat_template:
        kinds = {
            kind: ids_of({f"{kind} {i}": text for i, text in enumerate(texts)}, engine.target)
            for kind, texts in PROMPTS.items()
        }
    return {kind: dict(list(group.items())[:each]) for kind, group in kinds.items()}


def accepted(kinds: Any, found: audition.Found, given: Any) -> list[dict[str, Any]]:
    """One row per drafter and kind of prompts."""
    rows = []
    for drafter in given.drafters:
        for kind, names in (kinds | {"all": bench.flat(kinds)}).items():
            total = bench.total([found[drafter, name] for name in names])
            shares = total.per_position()["acceptance_rate_per_position"]
            shares += [None] * (given.k - len(shares))  # places that no draft reached
            row = {"drafter": drafter, "prompts": kind}
            row["tok_pass"] = bench.places(total.tokens_per_pass, 2)
            row |= {f"at_{i}": bench.places(share, 2) for i, share in enumerate(shares, 1)}
            rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = audition.parser(__doc__, 3, 4, "float32")
    options.add_argument("--fixed-k", action="store_true", help="without the controller")
    options.add_argument("--drafters", nargs="+", help="(default: all that fit, and auto)")
    bench.add_count(options, "--each", 1, 8, 3, "prompts of each kind")
    given = options.parse_args(arguments)
    engine = audition.load(given, fixed_k=given.fixed_k, max_model_len=1024)
    choices = list(engine.panel.choices)
    given.drafters = given.drafters or choices
    if unknown := set(given.drafters) - set(choices):
        options.error(f"no drafter {min(unknown)}: choose from {', '.join(choices)}")
    kinds = prompts_of(engine, given.each)
    rows, found = audition.measure(engine, bench.flat(kinds), given.drafters, given)
    tables = {"results": rows, "accepted": accepted(kinds, found, given)}
    bench.report(__spec__.name, arguments, given, tables)


if __name__ == "__main__":
    main()
