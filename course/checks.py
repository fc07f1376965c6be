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
from itertools import chain, product
from numbers import Real
from operator import add, eq, index
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


def token_list(value: Any, name: str) -> list[int]:
    """What `name` returned, as a list of token ids."""
    try:
        return [index(token) for token in value]
    except TypeError:
        raise Mistake("no tokens", name=name, told=f"{value!r:.60}") from None


def ids(values: Sequence[Any]) -> str:
    """Tokens that have no words."""
    return " ".join(map(str, values)) or "nothing"


# --------------------------------------------------------------------------- cycles (1, 2, 6, 8)
@cache
def plain(tokens: tuple[int, ...], count: int, name: str = "target", seed: int = 0) -> list[int]:
    """The next tokens by plain decoding without a cache, sampled if there is a seed."""
    text = [*tokens]
    while len(text) < len(tokens) + count:
        text.append(chosen(Model(name).open().read(text)[-1], len(text), seed))
    return text[len(tokens) :]


def chosen(logits: np.ndarray, position: int, seed: int, temperature: float = 0.8) -> int:
    """The likeliest token; with a seed, the race's winner: the largest log-weight minus log e."""
    e = lab.noise(seed, position, len(logits)) if seed else 1.0
    return int((logits.astype(float) / temperature - np.log(e)).argmax())


def kept_of(draft: list[int], choices: list[int]) -> list[int]:
    """The choices as far as the draft agrees, and one more."""
    return choices[: [*map(eq, draft, choices), False].index(False) + 1]


# Drafts: what is added to the right tokens. So 1 makes a wrong one, and what follows it is dropped.
PLANS = [(0, 0, 0), (1, 0), (), (0, 0, 1, 0), (0, 0, 0, 0), (0, 1), (1,), (0, 0)]


def walk(cycle: Callable, prompts: Sequence[str], seed: int = 0) -> Iterator[Case]:
    """Cycles with drafts that are right and wrong, of one text or of several in one pass."""
    model = Model("target", num_rows=len(prompts))
    texts, rows = [encode(prompt) for prompt in prompts], [model.open() for _ in prompts][::-1]
    given = list(texts)  # which are to be extended, and not replaced
    written = [text + plain(tuple(text), 30, seed=seed) for text in texts]
    for i in range(len(PLANS)):
        befores, length = [list(text) for text in given], rows[0].length
        coming = [all_[len(text) :] for all_, text in zip(written, given, strict=True)]
        drafts = [[*map(add, tokens, PLANS[i - b])] for b, tokens in enumerate(coming)]
        lab.asked.clear()
        model.passes.clear()
        if len(prompts) > 1:
            cycle(model, rows, texts, [list(draft) for draft in drafts])
            told = [f"passes of {each} texts" for each in ([3], [*map(len, model.passes)])]
            yield "", *told, "one pass"
        else:
            (before,), (draft,), (after,) = befores, drafts, given
            cycle(*rows, *texts, list(draft), *((0.8, seed) if seed else ()))
            if seed:
                right = range(len(before), len(after))
                at = sorted({position for _, position in lab.asked})[: len(right)]
                shown = f"  a text of {len(before)} tokens: the positions of the noise"
                yield shown, ids(right), ids(at), "other noise"
            fed = " then ".join(f"“{decode(tokens)}”" for (tokens,) in model.passes)
            shown = f"  text: {decode(before)}; cached: {length} tokens; draft: {decode(draft)}"
            yield shown, f"reads “{decode(before[length:] + draft)}”", f"reads {fed}", "other read"
        held = [model.held[row.index] for row in rows]
        for each in zip(befores, drafts, given, held, strict=True):
            yield from cycle_cases(*each, seed)


def cycle_cases(
    before: list[int], draft: list[int], after: list[int], held: list[int], seed: int
) -> Iterator[Case]:
    """What a cycle made of a text and of its row of the cache, which now holds `held`."""
    logits = Model("target").open().read([*before, *draft])[len(before) - 1 :]
    choices = [chosen(row, len(before) + i, seed) for i, row in enumerate(logits)]
    shown = picture(before[:-1], before[-1], draft, choices)
    text = [*before, *kept_of(draft, choices)]
    told = [f"keeps “{decode(each[len(before) :])}”" for each in (text, after)]
    yield shown, *told, "other tokens" if len(after) > len(before) else "not extended"
    told = [f"caches {len(each)} tokens: …{decode(each[-6:])}" for each in (text[:-1], held)]
    yield shown, *told, "forgets" if len(held) < len(text) - 1 else "not truncated"


def task_1(solution: ModuleType) -> Iterator[Case]:
    """All small drafts and choices."""
    hand = [([7, 8], [7, 8, 9]), ([], [4]), ([5, 6, 7], [5, 9, 1, 2]), ([5, 6], [8, 6, 7])]
    rest = product(product((1, 2), repeat=3), product((1, 2, 3), repeat=4))
    for draft, choices in [*hand, *((list(a), list(b)) for a, b in rest)]:
        got = token_list(solution.verify(list(draft), list(choices)), "verify")
        right, shown = kept_of(draft, choices), picture([1, 2, 3], 4, draft, choices, ids)
        yield shown, f"keeps {ids(right)}", f"keeps {ids(got)}", "other tokens"


def task_2(solution: ModuleType) -> Iterator[Case]:
    """The text of plain decoding, and a cache in step."""
    for prompt in "1, 2, 3, 4, 5,", "class Stack:\n    def":
        yield from walk(solution.cycle, [prompt])


def task_6(solution: ModuleType) -> Iterator[Case]:
    """The choice by another formula; then the same text with any draft."""
    choose, dice = solution.choose, np.random.default_rng(6)
    rows = {place: dice.normal(size=8) * 2 + 1000 for place in product((1, 2), range(20))}
    right = [chosen(row, at, seed, 0.7) for (seed, at), row in rows.items()]
    got = token_list([choose(row.copy(), 0.7, *at) for at, row in rows.items()], "choose")
    yield "  choices at 40 positions", ids(right), ids(got), "other race"
    for seed in (1, 2):
        yield from walk(solution.cycle, ["Once upon a time"], seed)


def task_8(solution: ModuleType) -> Iterator[Case]:
    """Each text is the one that it would be alone."""
    prompts = "1, 2, 3, 4, 5,", "red, green, blue, red,", "class Stack:\n    def"
    yield from walk(solution.cycle, prompts)


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
    """Known texts, then random ones; alone, then two at a time."""
    Ngram, dice = solution.Ngram, random.Random(3)
    hand = [[5, 6, 7, 8, 5, 6], [5, 6, 1, 5, 6, 2, 5, 6], [1, 2, 3], [5, 6], [1], [6, 7, 6]]
    for text in hand + [[dice.randrange(3) for _ in range(12)] for _ in range(60)]:
        drafter, begin = Ngram(), dice.randint(1, len(text))
        state = drafter.open(text[:begin])
        for part in (text[begin:][:2], text[begin:][2:]):
            drafter.observe(state, part)
        yield from ngram_cases(drafter, state, text, "other draft")
    drafter, texts = Ngram(), ([1, 2, 3, 4, 1, 2], [9, 1, 2, 5, 6, 1, 2])
    states = [drafter.open(text) for text in texts]
    for state, text in zip(states, texts, strict=True):
        yield from ngram_cases(drafter, state, text, "state")


def task_4(solution: ModuleType) -> Iterator[Case]:
    """The drafts of the draft model alone, and a cache in step; one text, then two."""
    for count, prompts in enumerate((["def push(self, item):\n    "], ["1, 2,", "red, green,"]), 1):
        model = Model("draft", num_rows=count)
        drafter = solution.DraftModel(model)
        texts = [encode(prompt) for prompt in prompts]
        states = [drafter.open(list(text)) for text in texts]
        for drafted, accepted in (3, 1), (2, 2), (0, 0), (4, 0), (1, 1), (3, 3), (2, 0):
            given = zip(states, texts, (Row(model, 0), Row(model, 1)), strict=False)
            each = [draft_model_cases(drafter, *one, drafted, accepted) for one in given]
            for *case, name in chain(*zip(*each, strict=True)):  # both drafts, then both verdicts
                yield *case, name if count == 1 else "state"


def draft_model_cases(
    drafter: Any, state: Any, text: list[int], row: Row, drafted: int, accepted: int
) -> Iterator[Case]:
    """A draft, and its verdict."""
    held, passes = row.model.held[row.index], row.model.passes
    right, unread = plain(tuple(text), drafted, "draft"), text[len(held) :]
    passes.clear()
    shown = f"  text: {decode(text)}\n  the draft model's cache: {decode(held) or 'nothing'}"
    got = token_list(drafter.propose(state, drafted), "propose")
    fed = [tokens for (tokens,) in passes]
    needed = [unread, *([token] for token in right)][:-1]
    read = [" then ".join(f"“{decode(tokens)}”" for tokens in each) for each in (needed, fed)]
    if drafted:
        yield shown, f"reads {read[0]}", f"reads {read[1]}", "other draft read"
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
        self.share *= normed(*weights)[self._path[self._at - 1]]
        return self._path[self._at - 1]


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
    """Every way that chance can go is tried, and what comes counted: distributions are exact."""
    propose, judge = solution.propose, solution.judge
    weights, right = normed(2, 1, 4, 3), normed(2, 0, 4, 3)
    ways = each_way(lambda chance: propose(list(weights), 3, chance.draw))
    for chance, result in ways:
        if not (isinstance(result, tuple) and len(result) == 2 and len(chance.drawn) == 1):
            raise Mistake("not token and q")
    drawn = [sum(c.share for c, (token, _) in ways if token == i) for i in range(len(weights))]
    for _, (_, q) in ways:
        each = [f"draws by {bars(a)}, reports {bars(b)}" for a, b in ((right, right), (drawn, q))]
        yield f"  weights {bars(weights)}, top_k 3", *each, "top k" if drawn == [*q] else "other q"
    after = [normed(*p) for p in ((5, 2, 2, 1), (0, 1, 3, 4), (2, 2, 1, 1), (1, 6, 0, 2))]

    def target(path: Sequence[int]) -> list[Fraction]:
        return after[(len(path) + sum(path)) % 4]

    def run(asked: list[list[Fraction]], chance: Chance) -> tuple[Any, tuple[int, ...]]:
        pairs = [propose(list(each), 3, chance.draw) for each in asked]
        draft, q = [token for token, _ in pairs], [q for _, q in pairs]
        p = [target(draft[:i]) for i in range(len(asked) + 1)]
        kept = judge(list(draft), p, q, chance.chance, chance.draw)
        return (draft, p, q), tuple(token_list(kept, "judge"))

    asked = [weights, normed(3, 4, 1, 2)]
    ways = [(chance, *result) for chance, result in each_way(partial(run, asked))]
    none = [(chance, *result) for chance, result in each_way(partial(run, []))]
    for chance, (draft, p, q), kept in none + ways:
        rows = [f"  {x}[{i}] {bars(s)}" for x, of in (("p", p), ("q", q)) for i, s in enumerate(of)]
        said = iter(chance.said)  # what is certain need not be asked
        stays = [p[i][x] >= q[i][x] or next(said, False) for i, x in enumerate(draft)]
        shown = "\n".join([*rows, f"  draft: {ids(draft)}, accepted: {chance.said}"])
        counts = [[*each, False].index(False) + 1 for each in (stays, chance.said)]
        told = [f"keeps {n} tokens" for n in (counts[counts[0] != len(kept)], len(kept))]
        yield shown, *told, "other tokens"
    for each, size in product((none, ways), range(3)):
        for begin in sorted({kept[:size] for *_, kept in each if len(kept) > size}):
            found = [(c.share, kept[size]) for c, _, kept in each if kept[:size] == begin < kept]
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
    """Tokens by accepted guesses, speed-up, K and break-even: of a 1.5B on an EPYC, and others."""
    measured = dict(enumerate((15.3, 17.4, 20.1, 24.0, 24.9, 25.8, 27.1, 28.4, 36.7), 1))
    steep, steps = {n: 10.0 * n + 2 for n in measured}, {n: min(16.0 * n, 32.0) for n in measured}

    def even(k: int, ms: float, curve: dict[int, float]) -> float | None:
        alphas = np.linspace(0, 1, 2001)
        paces = [pace(alpha, k, ms, curve) for alpha in alphas]
        return None if paces[-1] < 1 else round(float(np.interp(1, paces, alphas)), 3)

    def best(*given: Any) -> int:
        return max(range(9), key=lambda k: pace(given[0], k, *given[1:]))

    for name, right, *values in (
        ("tokens", gain, (0.5, 0.8, 1.0, 0.0), (4, 1, 0)),
        ("speedup", pace, (0.3, 0.8), (4, 1, 0), (0.5, 9.0), (measured, steep)),
        ("best_k", best, (0.05, 0.5, 0.95), (0.5, 9.0), (measured, steep, steps)),
        ("break_even", even, (1, 4), (0.5, 9.0), (measured, steep)),
    ):
        for case in product(*values):
            got, exact = getattr(solution, name)(*case), right(*case)
            exact = exact if exact is None else round(exact, 3)
            is_near = isinstance(got, Real) and exact is not None and abs(got - exact) < 0.002
            yield f"  {name}{case}", f"{exact}", f"{exact if is_near else got}", "other number"


TASKS = (task_1, task_2, task_3, task_4, task_5, task_6, task_7, task_8)
