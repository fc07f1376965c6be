"""The checks of the eight tasks: cases, each with a picture, what is expected, and what was got.

What is expected never comes from a solution: texts come from plain decoding without a cache,
guesses from a search of the whole text, distributions from every way that chance can go.

A mistake is recognised by what it does. mistakes.txt has wrong solutions, each with its sentence.
The first case that fails is given to them, too, and who gives the same has made the same mistake.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache, partial
from itertools import product
from operator import index
from types import ModuleType
from typing import Any

import numpy as np

from . import lab
from .lab import Mistake, Model, Row, decode, encode, picture

# A picture, what is expected, what was got, and the mistake if it is not one of the known ones.
Case = tuple[str, str, str, str]
Failure = tuple[int, str, Exception]  # the case's number, what was got, what is to be raised


def check(number: int, solution: ModuleType) -> str:
    """What the last case has shown. Raises Mistake, or what the solution raises."""
    found, shown = first_failure(number, solution)
    if found is None:
        return shown
    *_, error = found
    source = lab.path_of(number, "solutions").read_text("utf-8")
    for name, task, old, new in lab.read_mistakes()[1]:
        if task == number and not isinstance(error, NotImplementedError):
            wrong = ModuleType(name)
            exec(source.replace(old, new), vars(wrong))
            other, _ = first_failure(number, wrong)
            if other and other[:2] == found[:2]:
                raise Mistake(name, getattr(error, "picture", ""))
    raise error


def first_failure(number: int, solution: ModuleType) -> tuple[Failure | None, str]:
    """The first failure, if any, and the last picture."""
    count, shown = 0, ""
    try:
        for shown, expected, got, name in TASKS[number - 1](solution):
            if got != expected:
                shown = f"{shown}\n  expected: {expected}\n  yours:    {got}"
                return (count, got, Mistake(name, shown)), shown
            count += 1
    except Exception as error:
        return (count, f"{type(error).__name__} {error}", error), shown
    return None, shown


def part(solution: ModuleType, name: str) -> Callable:
    """A function or class of the solution."""
    found = getattr(solution, name, None)
    if not callable(found):
        raise Mistake("no part", name=name)
    return found


def token_list(value: Any, name: str) -> list[int]:
    """What `name` returned, as a list of token ids."""
    if value is None:
        raise Mistake("returns nothing", name=name)
    try:
        return [index(token) for token in value]
    except TypeError:
        raise Mistake("no tokens", name=name, told=f"{value!r:.60}") from None


def number_of(value: Any, name: str) -> str:
    """What `name` returned, to three digits."""
    try:
        return "None" if value is None else f"{float(value + 0):.3f}"
    except (TypeError, ValueError):
        raise Mistake("no number", name=name, told=f"{value!r:.60}") from None


def ids(values: Sequence[Any]) -> str:
    """Tokens that have no words."""
    return " ".join(map(str, values)) or "nothing"


# --------------------------------------------------------------------------- cycles (1, 2, 6, 8)
@cache
def plain(prompt: str, seed: int = 0) -> list[int]:
    """A prompt and 30 tokens by plain decoding, sampled if there is a seed."""
    return [*encode(prompt), *lab.plain(encode(prompt), 30, choose=partial(chosen, seed=seed))]


def chosen(logits: np.ndarray, position: int, seed: int, temperature: float = 0.8) -> int:
    """The likeliest token; with a seed, the race's winner: the largest log-weight minus log e."""
    e = lab.noise(seed, position, len(logits)) if seed else 1.0
    return int((logits.astype(float) / temperature - np.log(e)).argmax())


def kept_of(draft: list[int], choices: list[int]) -> list[int]:
    """The choices as far as the draft agrees, and one more."""
    return choices[: [*map(int.__eq__, draft, choices), False].index(False) + 1]


def unlike(right: Sequence[int], got: Sequence[int]) -> str:
    """The mistake of keeping `got` in place of the right tokens."""
    if len(got) == len(right):
        return "other tokens"
    return "more tokens" if len(got) > len(right) else "fewer tokens"


# Drafts: so many tokens are right, and of the others the first is wrong.
PLANS = [(3, 0), (0, 2), (0, 0), (2, 2), (4, 0), (1, 1), (0, 1), (2, 0)]


def draft_of(written: list[int], begin: int, right: int, wrong: int) -> list[int]:
    """A draft of what is written from `begin` on, with a wrong token behind the right ones."""
    draft = written[begin : begin + right + wrong]
    if wrong:
        draft[right] += 1
    return draft


def cycle_cases(
    before: list[int], draft: list[int], after: list[int], held: list[int], seed: int = 0
) -> Iterator[Case]:
    """What a cycle made of a text and of its row of the cache, which now holds `held`."""
    logits = Model("target").open().read([*before, *draft])[len(before) - 1 :]
    choices = [chosen(row, len(before) + i, seed) for i, row in enumerate(logits)]
    shown = picture(before[:-1], before[-1], draft, choices)
    text = [*before, *kept_of(draft, choices)]
    kept = [f"keeps “{decode(each[len(before) :])}”" for each in (text, after)]
    yield shown, *kept, unlike(text, after)
    told = [f"caches {len(each)} tokens: …{decode(each[-6:])}" for each in (text[:-1], held)]
    yield shown, *told, "forgets" if len(held) < len(text) - 1 else "not truncated"


def walk(
    cycle: Callable[[Row, list[int], list[int]], Any], prompt: str, seed: int = 0
) -> Iterator[Case]:
    """Cycles with drafts that are right and wrong."""
    text, row = encode(prompt), Model("target").open()
    for plan in PLANS:
        before, held = list(text), row.length
        draft = draft_of(plain(prompt, seed), len(text), *plan)
        lab.asked.clear()
        row.model.passes.clear()
        cycle(row, text, list(draft))
        if seed:
            at = sorted({position for _, position in lab.asked})[: len(text) - len(before)]
            shown = f"  a text of {len(before)} tokens: the positions of the noise"
            yield shown, ids(range(len(before), len(text))), ids(at), "shifted noise"
        fed = " then ".join(f"“{decode(tokens)}”" for (tokens,) in row.model.passes)
        shown = f"  text: {decode(before)}; cached: {held} tokens; draft: {decode(draft)}"
        yield shown, f"reads “{decode(before[held:] + draft)}”", f"reads {fed}", "other read"
        yield from cycle_cases(before, draft, text, row.model.held[0], seed)


def task_1(solution: ModuleType) -> Iterator[Case]:
    """All small drafts and choices."""
    verify = part(solution, "verify")
    hand = [([7, 8], [7, 8, 9]), ([], [4]), ([5, 6, 7], [5, 9, 1, 2]), ([5, 6], [8, 6, 7])]
    rest = product(product((1, 2), repeat=3), product((1, 2, 3), repeat=4))
    for draft, choices in [*hand, *((list(a), list(b)) for a, b in rest)]:
        got = token_list(verify(list(draft), list(choices)), "verify")
        right, shown = kept_of(draft, choices), picture([1, 2, 3], 4, draft, choices, ids)
        yield shown, f"keeps {ids(right)}", f"keeps {ids(got)}", unlike(right, got)


def task_2(solution: ModuleType) -> Iterator[Case]:
    """The text of plain decoding, and a cache in step."""
    for prompt in "1, 2, 3, 4, 5,", "class Stack:\n    def":
        yield from walk(part(solution, "cycle"), prompt)


def task_6(solution: ModuleType) -> Iterator[Case]:
    """The choice by another formula; then the same text with any draft."""
    choose, dice = part(solution, "choose"), np.random.default_rng(6)
    rows = {place: dice.normal(size=8) * 2 + 1000 for place in product((1, 2), range(20))}
    right = [chosen(row, at, seed, 0.7) for (seed, at), row in rows.items()]
    got, again = (
        token_list([choose(row.copy(), 0.7, *at) for at, row in rows.items()], "choose")
        for _ in range(2)
    )
    yield "  choices at 40 positions, twice", ids(got), ids(again), "fresh noise"
    yield "  choices at 40 positions", ids(right), ids(got), "other race"
    for seed in (1, 2):
        cycle = part(solution, "cycle")
        yield from walk(lambda *given: cycle(*given, 0.8, seed), "Once upon a time", seed)  # noqa: B023
    told = [f"  seed {seed}: {decode(plain('Once upon a time', seed=seed))}" for seed in (1, 2)]
    yield "\n".join(told), "", "", ""


def task_8(solution: ModuleType) -> Iterator[Case]:
    """Each text is the one that it would be alone."""
    cycle, model = part(solution, "cycle"), Model("target", num_rows=3)
    prompts = "1, 2, 3, 4, 5,", "red, green, blue, red,", "class Stack:\n    def"
    texts, rows = [encode(prompt) for prompt in prompts], [model.open() for _ in prompts][::-1]
    given = list(texts)  # which are to be extended, and not replaced
    for i in range(len(PLANS)):
        befores = [list(text) for text in given]
        drafts = [draft_of(plain(p), len(given[b]), *PLANS[i - b]) for b, p in enumerate(prompts)]
        model.passes.clear()
        cycle(model, rows, texts, [list(draft) for draft in drafts])
        yield "", "passes of [3] texts", f"passes of {[*map(len, model.passes)]} texts", "one pass"
        held = [model.held[row.index] for row in rows]
        for each in zip(befores, drafts, given, held, strict=True):
            yield from cycle_cases(*each)


# ------------------------------------------------------------------------------- drafters (3, 4)
def looked_up(text: list[int], limit: int) -> list[int]:
    """What followed the last two tokens, by a search of the whole text."""
    ends = [i for i in range(2, len(text)) if text[i - 2 : i] == text[-2:]]
    return text[ends[-1] :][:limit] if ends else []


def ngram_cases(drafter: Any, state: Any, text: list[int], name: str) -> Iterator[Case]:
    """Drafts behind a text, each asked for twice."""
    for limit in (2, 1, 5):
        shown, right = f"  text: {ids(text)}; at most {limit} tokens", looked_up(text, limit)
        for mistake in (name, "learns from draft"):
            got = token_list(drafter.propose(state, limit), "propose")
            yield shown, f"drafts {ids(right)}", f"drafts {ids(got)}", mistake


def task_3(solution: ModuleType) -> Iterator[Case]:
    """Known texts, then random ones; alone, then two at a time; then one with the target."""
    Ngram, dice = part(solution, "Ngram"), random.Random(3)
    hand = [[5, 6, 7, 8, 5, 6], [5, 6, 1, 5, 6, 2, 5, 6], [1, 2, 3], [5, 6], [1], [6, 7, 6]]
    for text in hand + [[dice.randrange(3) for _ in range(12)] for _ in range(60)]:
        drafter, begin = Ngram(), dice.randint(1, len(text))
        state = drafter.open(text[:begin])
        drafter.observe(state, text[begin:])
        yield from ngram_cases(drafter, state, text, "other draft")
    drafter, texts = Ngram(), ([1, 2, 3, 4, 1, 2], [9, 1, 2, 5, 6, 1, 2])
    states = [drafter.open(text) for text in texts]
    for state, text in zip(states, texts, strict=True):
        yield from ngram_cases(drafter, state, text, "state")
    prompt, passes = "red, green, blue, red, green,", 0
    text, written = encode(prompt), plain(prompt)
    state = drafter.open(list(text))
    while len(text) < len(written):
        kept = kept_of(drafter.propose(state, 4), [*written[len(text) :], -1])
        drafter.observe(state, kept)
        text, passes = text + kept, passes + 1
    yield f"  With it the target writes 30 tokens in {passes} passes: {decode(written)}", "", "", ""


def task_4(solution: ModuleType) -> Iterator[Case]:
    """The drafts of the draft model alone, and a cache in step; one text, then two."""
    for count, prompts in enumerate((["def push(self, item):\n    "], ["1, 2,", "red, green,"]), 1):
        model = Model("draft", num_rows=count)
        drafter = part(solution, "DraftModel")(model)
        texts = [encode(prompt) for prompt in prompts]
        states = [drafter.open(list(text)) for text in texts]
        for drafted, accepted in (3, 1), (2, 2), (0, 0), (4, 0), (1, 1), (3, 3), (2, 0):
            for each in zip(states, texts, (Row(model, 0), Row(model, 1)), strict=False):
                for *case, name in draft_model_cases(drafter, *each, drafted, accepted):
                    yield *case, name if count == 1 else "state"


def draft_model_cases(
    drafter: Any, state: Any, text: list[int], row: Row, drafted: int, accepted: int
) -> Iterator[Case]:
    """A draft, and its verdict."""
    held, passes = row.model.held[row.index], row.model.passes
    right, unread = lab.plain(text, drafted, "draft"), text[len(held) :]
    passes.clear()
    shown = f"  text: {decode(text)}\n  the draft model's cache: {decode(held) or 'nothing'}"
    got = token_list(drafter.propose(state, drafted), "propose")
    fed = [tokens for (tokens,) in passes]
    needed = [unread, *([token] for token in right)][:-1]
    read = [" then ".join(f"“{decode(tokens)}”" for tokens in each) for each in (needed, fed)]
    if drafted:
        yield shown, f"reads {read[0]}", f"reads {read[1]}", "other read"
    yield shown, f"drafts “{decode(right)}”", f"drafts “{decode(got)}”", "other guesses"
    stays = min(len(held), len(text) + accepted)
    tokens = [*got[:accepted], 1000 + accepted]
    text += tokens
    drafter.observe(state, accepted, list(tokens))
    told = [f"caches {len(each)} tokens: …{decode(each[-8:])}" for each in (text[:stays], held)]
    shown = f"  draft: {decode(got)}, accepted: {accepted}\n  text: {decode(text)}"
    yield shown, *told, "draft not truncated" if len(held) > stays else "draft forgets"


# --------------------------------------------------------------------------------- rejection (5)
class Chance:
    """One of the ways that chance can go: `path` says which, as far as it is known."""

    def __init__(self, path: list[int], todo: list[list[int]]) -> None:
        self._path, self._todo, self._at, self.share = path, todo, 0, Fraction(1)
        self.drawn, self.said = list[list[Fraction]](), list[bool]()

    def draw(self, weights: Sequence[Fraction]) -> int:
        """An index, by weights that need not sum to 1."""
        self.drawn.append(list(weights))
        return self._pick(self.drawn[-1])

    def chance(self, share: Fraction) -> bool:
        """True with this probability; above 1 always."""
        self.said.append(not self._pick([min(1, share), 1 - min(1, share)]))
        return self.said[-1]

    def _pick(self, weights: list[Fraction]) -> int:
        if min(weights) < 0 or sum(weights) <= 0:
            raise Mistake("weights", f"  weights: {ids(weights)}")
        if self._at == len(self._path):
            first, *others = [i for i, weight in enumerate(weights) if weight > 0]
            self._todo += [[*self._path, other] for other in others]
            self._path.append(first)
        self._at += 1
        taken = self._path[self._at - 1]
        self.share *= normed(*weights)[taken]
        return taken


def each_way(run: Callable[[Chance], Any]) -> list[tuple[Chance, Any]]:
    """What run(chance) gives in every way that chance can go; the shares sum to 1."""
    todo, results = [list[int]()], []
    while todo:
        chance = Chance(todo.pop(), todo)
        results.append((chance, run(chance)))
    return results


def normed(*weights: Any) -> list[Fraction]:
    """These weights, divided by their sum."""
    return [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]


def bars(shares: Sequence[Fraction]) -> str:
    """Each token's probability."""
    return "  ".join(f"{i}: {float(p):.3f} {'█' * round(10 * p)}" for i, p in enumerate(shares))


def task_5(solution: ModuleType) -> Iterator[Case]:
    """Every way that chance can go is tried, so the distributions are exact."""
    propose, judge = part(solution, "propose"), part(solution, "judge")
    weights, right = normed(2, 1, 4, 3), normed(2, 0, 4, 3)
    for chance, result in each_way(lambda chance: propose(list(weights), 3, chance.draw)):
        if not (isinstance(result, tuple) and len(result) == 2 and len(chance.drawn) == 1):
            raise Mistake("not token and q")
        told = [
            f"draws by {bars(normed(*a))} and reports {bars(b)}"
            for a, b in ((right, right), (chance.drawn[0], result[1]))
        ]
        yield f"  weights {bars(weights)}, top_k 3", *told, "top k"
    after = [normed(*p) for p in ((5, 2, 2, 1), (0, 1, 3, 4), (2, 2, 1, 1), (1, 6, 0, 2))]

    def target(path: Sequence[int]) -> list[Fraction]:
        return after[(len(path) + sum(path)) % 4]

    def run(chance: Chance) -> tuple[Any, tuple[int, ...]]:
        asked = weights, normed(3, 4, 1, 2)
        draft, q = zip(*(propose(list(each), 3, chance.draw) for each in asked), strict=True)
        p = [target(draft[:i]) for i in range(3)]
        kept = judge(list(draft), p, list(q), chance.chance, chance.draw)
        return (draft, p, q), tuple(token_list(kept, "judge"))

    for chance, kept in each_way(lambda way: judge([], [right], [], way.chance, way.draw)):
        shown, drawn = f"  no draft; p[0] {bars(right)}", ids([*map(bars, chance.drawn)])
        yield shown, f"draws by {bars(right)}", f"draws by {drawn}", "other chances"
        count = len(token_list(kept, "judge"))
        yield shown, "keeps 1 tokens", f"keeps {count} tokens", "fewer tokens"
    ways = [(chance, *result) for chance, result in each_way(run)]
    for chance, (draft, p, q), kept in ways:
        rows = [f"  p[{i}] {bars(p[i])}\n  q[{i}] {bars(q[i])}" for i in range(2)]
        shown = "\n".join([*rows, f"  draft: {ids(draft)}, accepted: {chance.said}"])
        count = [*chance.said, False].index(False) + 1
        told = f"keeps {count} tokens", f"keeps {len(kept)} tokens"
        yield shown, *told, unlike(range(count), kept)
    for size in range(3):
        for begin in sorted({kept[:size] for *_, kept in ways if len(kept) > size}):
            found = [(c.share, kept[size]) for c, _, kept in ways if kept[:size] == begin < kept]
            got = normed(*(sum(share for share, t in found if t == i) for i in range(4)))
            shown = f"  chances of the token behind {ids(begin)}; first guess by {bars(right)}"
            yield shown, bars(target(begin)), bars(got), "other chances"


# ------------------------------------------------------------------------------ when it pays (7)
def gain(alpha: float, k: int) -> float:
    """Tokens of a cycle: i guesses are accepted, and one more token comes."""
    return sum((i + 1) * alpha**i * (1 - alpha if i < k else 1) for i in range(k + 1))


def pace(alpha: float, k: int, draft_ms: float, pass_ms: dict[int, float]) -> float:
    """Times as fast as plain decoding, by the time of a token."""
    return pass_ms[1] / ((k * draft_ms + pass_ms[k + 1]) / gain(alpha, k))


def task_7(solution: ModuleType) -> Iterator[Case]:
    """Tokens by how many guesses are accepted, then speed-up, K and break-even."""
    flat, steep = ({n: a + n * b for n in range(1, 10)} for a, b in ((16.0, 0.8), (2.0, 10.0)))
    steps = {n: 16.0 if n == 1 else 32.0 for n in range(1, 10)}

    def even(k: int, ms: float, curve: dict[int, float]) -> float | None:
        alphas = np.linspace(0, 1, 2001)
        paces = [pace(alpha, k, ms, curve) for alpha in alphas]
        return None if paces[-1] < 1 else round(float(np.interp(1, paces, alphas)), 3)

    def best(*given: Any) -> int:
        return max(range(9), key=lambda k: pace(given[0], k, *given[1:]))

    for name, right, *values in (
        ("tokens", gain, (0.5, 0.8, 1.0, 0.0), (4, 1, 0)),
        ("speedup", pace, (0.3, 0.8), (4, 1, 0), (0.5, 9.0), (flat, steep)),
        ("best_k", best, (0.05, 0.5, 0.95), (0.5, 9.0), (flat, steep, steps)),
        ("break_even", even, (1, 4), (0.5, 9.0), (flat, steep)),
    ):
        for case in product(*values):
            got, exact = number_of(part(solution, name)(*case), name), number_of(right(*case), name)
            is_near = "None" not in (got, exact) and abs(float(got) - float(exact)) < 0.002
            yield f"  {name}{case}", exact, exact if is_near else got, "other number"
    here = lab.measure()
    told = [f"{solution.best_k(a, 0.1 * here[1], here)} for α = {a}" for a in (0.2, 0.5, 0.8)]
    shown = f"  Here, with a drafter of a tenth of a pass, the best K is {', '.join(told)}."
    yield shown, "", "", ""


TASKS = (task_1, task_2, task_3, task_4, task_5, task_6, task_7, task_8)
