"""Is a server lossless? Asks any OpenAI endpoint (vLLM, SGLang, llama.cpp, this one), and judges.

    python -m tools.audit http://127.0.0.1:5000 --off '{"speculative": false}'
    python -m tools.audit http://127.0.0.1:8080 --baseline http://127.0.0.1:8081
        [--model NAME] [--texts 16] [--samples 600] [--fields JSON] [--state FILE] [--json]

Plain decoding is what a second endpoint does, or the same one if asked with the fields of --off.

greedy    the same texts again, alone and in company, and those of plain decoding. Where two differ,
          log-probabilities tell a near-tie, which rounding decides, from an error
sampled   short texts, after prompts at which drafts are often wrong: they are distributed as plain
          decoding's are, and as log-probabilities say; the same where a JSON schema bounds them
answers   JSON fits its schema, log-probabilities are some, acceptance is possible

A p-value below 1e-6 counts as an error; there are six. Exit status: 0 nothing found, 1 not
lossless, 2 not told. With --state a second run asks only for what the first one did not get. A null
in --fields takes a field out of all requests. The key is read from OPENAI_API_KEY.

Not covered: chats, streams, long prompts, more load, and parameters that are not asked for here.
"""

import hashlib
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

import tools as bench
from runtime.models.prompts import read_prompts
from tools.endpoint import Answer, Asked, Endpoint, NoAnswer, answer_of
from tools.lossless import ChiSquared, chi_squared, deviance, p_value_of

NEAR = 0.3  # log-probabilities that are nearer to each other may change places by rounding
BROKEN = 1e-6  # a p-value below it is no chance
AT_ONCE, SHORT = 8, 4  # requests in company; tokens of a sample
PASSED, NEAR_TIES, FAILED, NOT_CHECKED = "passed", "near-ties", "failed", "not checked"

# Drafters propose something after these, and are often wrong.
GUESSABLE = ["x, 1, x, 1, x, 1", "B C A B C A B", "X Y X Y"]
# All of the distribution is drawn from, whatever the server's own defaults are.
DRAWN = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
ARRAYS = "[1, 2, 3, 1, 2, 3, "  # then drafts are as often allowed by SCHEMA as not
ITEMS = {"type": "integer", "enum": [3, 7, 9]}
FITS = re.compile(r"\s*\[\s*[379]\s*,\s*[379]\s*\]\s*")
SCHEMA = {"type": "array", "items": ITEMS, "minItems": 2, "maxItems": 2}
BOUNDED = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SCHEMA}}


class Finding(NamedTuple):
    """What a check says: a verdict, and why."""

    check: str
    verdict: str
    evidence: str


class Audit:
    """Asks, remembers and judges."""

    def __init__(self, endpoint: Endpoint, plain: Endpoint | None, flags: Any) -> None:
        self.endpoint, self.plain, self.flags = endpoint, plain, flags
        # Of the endpoint that is judged, and of plain decoding.
        self.answers, self.plain_answers = list[Answer](), list[Answer]()
        self._known, self._lock = _kept(flags.state) if flags.state else {}, Lock()
        ways = 2 if plain else 1
        total = flags.texts * (2 + ways) + flags.samples * ways * (len(GUESSABLE) + 1) + 1
        self._progress = tqdm(total=total, desc="requests")

    def ask(
        self, asked: list[Asked], at_once: int = 1, again: int = 0, plain: bool = False
    ) -> list[Answer]:
        """Ask for all answers, `at_once` of them in company. Raises NoAnswer."""
        endpoint = self.plain if plain else self.endpoint

        def one(each: Asked) -> Answer:
            about = [endpoint.url, endpoint.fields, endpoint.model, *each, at_once, again]
            key = hashlib.sha256(json.dumps(about).encode()).hexdigest()
            if (body := self._known.get(key)) is None:
                body = endpoint.ask(*each)
            with self._lock:
                if self.flags.state and key not in self._known:
                    with open(self.flags.state, "a", encoding="utf-8") as file:
                        # The run before may have been cut off within a line.
                        file.write(f"\n{json.dumps([key, body])}")
                self._progress.update()
            return answer_of(body)

        answers = list[Answer]()
        try:
            with ThreadPoolExecutor(at_once) as pool:
                try:
                    answers.extend(pool.map(one, asked))
                finally:
                    pool.shutdown(cancel_futures=True)
        except NoAnswer as error:
            if plain or not self.plain or error.is_busy:
                raise
            # What plain decoding says of the same request, alone, shows whose fault it is.
            self.plain.ask(*asked[len(answers)])
            said = f"{error} (plain decoding answers the same request)"
            raise NoAnswer(said, FAILED) from error
        (self.plain_answers if plain else self.answers).extend(answers)
        return answers

    # ------------------------------------------------------------------------------- the checks
    def greedy(self) -> Iterable[Finding]:
        """The same texts again, in company, and by plain decoding."""
        prompts, fields = [*read_prompts().values()], {"temperature": 0}
        fields["max_tokens"] = self.flags.tokens
        rounds = [divmod(i, len(prompts)) for i in range(self.flags.texts)]
        asked = [(prompts[i] + " " * blanks, fields) for blanks, i in rounds]
        first = self.ask(asked)
        if not any(answer.text for answer in first):
            raise NoAnswer(f"{self.endpoint.url} answers all greedy requests with empty texts")
        yield _compared("greedy, asked again", first, self.ask(asked, again=1))
        yield _compared("greedy, in company", first, self.ask(asked, AT_ONCE))
        if self.plain:
            yield _compared("greedy, plain decoding", self.ask(asked, plain=True), first)

    def sampled(self) -> Iterable[Finding]:
        """Distributions of short texts."""
        # Each prompt has seeds of its own: p-values take all samples for independent.
        count, asked = self.flags.samples, list[Asked]()
        for i, prompt in enumerate(GUESSABLE):
            asked += _draws(prompt, count, SHORT, first=1000 + i * count)
        prompts, ours = [prompt for prompt, _ in asked], self.ask(asked, AT_ONCE)
        check, test = "sampled, log-probabilities", _against_sizes(prompts, ours)
        if self.plain:
            theirs = self.ask(asked, AT_ONCE, plain=True)
            told = all(answer.tokens or not answer.text for answer in ours + theirs)
            for name, view in (VIEWS if told else {"texts": None}).items():
                views = [_viewed(prompts, answers, view) for answers in (ours, theirs)]
                yield _judged(f"sampled, plain decoding, {name}", _paired(*views), ours, theirs)
            control = _against_sizes(prompts, theirs)
            if control and control.p_value < BROKEN:
                why = "plain decoding's samples do not follow them, either"
                yield Finding(check, NOT_CHECKED, f"{why} (p = {control.p_value:.2g})")
                return
        if test:
            yield _judged(check, test, ours)
        else:
            yield Finding(check, NOT_CHECKED, "there are too few of them")

    def bounded(self) -> Iterable[Finding]:
        """Answers that a JSON schema bounds: they fit, and are drawn as plain decoding draws."""
        bounds = {"response_format": BOUNDED}
        (probe,) = self.ask(_draws(ARRAYS, 1, 30, **bounds))
        if not FITS.fullmatch(probe.text):
            bounds = {"json_schema": SCHEMA}  # llama.cpp's name for it in completions
        asked = _draws(ARRAYS, self.flags.samples, 30, **bounds)
        ours = self.ask(asked, AT_ONCE)
        theirs = self.ask(asked, AT_ONCE, plain=True) if self.plain else []
        mine, others = [a.text for a in ours], [a.text for a in theirs]
        wrong = [text for text in mine if not FITS.fullmatch(text)]
        verdict, said = PASSED, f"{len(wrong)} of {len(ours)} do not fit"
        if wrong:
            verdict, said = FAILED, f"{said}: {wrong[0][:80]!r}"
        if not all(map(FITS.fullmatch, others)):
            verdict, said = NOT_CHECKED, f"{said}; nor do plain decoding's"
        yield Finding("JSON, answers fit", verdict, said)
        if self.plain:
            yield _judged("JSON, plain decoding", _paired(mine, others), ours, theirs)

    def figures(self) -> Iterable[Finding]:
        """What the answers say of themselves."""
        wrong = [reason for a in self.answers if (reason := _why_impossible(a))]
        told = sum(bool(a.likely) for a in self.answers)
        drafted = sum(a.drafted or 0 for a in self.answers)
        accepted = sum(a.accepted or 0 for a in self.answers)
        said = f"{told} of {len(self.answers)} have log-probabilities; {accepted} of {drafted}"
        said += " drafted tokens were accepted" + (": is speculation on?" if not drafted else "")
        verdict = FAILED if wrong else PASSED if told and drafted else NOT_CHECKED
        yield Finding("what answers tell", verdict, wrong[0] if wrong else said)
        if any(answer.drafted for answer in self.plain_answers):
            raise NoAnswer("plain decoding has drafted tokens: --off or --baseline does not end it")
        if {0} == {answer.drafted for answer in self.answers}:
            raise NoAnswer(f"{self.endpoint.url} has drafted nothing: is speculation on?")


# What is compared of sampled texts. The first token is never drafted.
View = Callable[[list[str]], Any]
VIEWS: dict[str, View] = {
    "2nd token": lambda tokens: tokens[1:2],
    "3rd token": lambda tokens: tokens[2:3],
    "2nd and 3rd": lambda tokens: tokens[1:3],
    "repetition": lambda tokens: [x == y for x, y in pairwise(tokens[1:])],
}


def _kept(path: str) -> dict[str, Any]:
    """Answers of an earlier run, by what was asked; lines that are none do not count."""
    found = dict[str, Any]()
    with open(path, "a+", encoding="utf-8", errors="replace") as lines:
        lines.seek(0)
        for line in lines:
            try:
                key, body = json.loads(line)
                answer_of(body)
                found[key] = body
            except (ValueError, TypeError, RecursionError, NoAnswer):
                continue
    return found


def _viewed(prompts: list[str], answers: list[Answer], view: View | None) -> list[Any]:
    """A view of each answer's tokens; without one, its text."""
    seen = [tuple(view(a.tokens)) if view else a.text for a in answers]
    return list(zip(prompts, seen, strict=True))


def _draws(
    prompt: str, count: int, max_tokens: int, first: int = 1000, **fields: Any
) -> list[Asked]:
    """Requests for `count` sampled texts, with the seeds from `first` on."""
    fields |= DRAWN | {"max_tokens": max_tokens}
    return [(prompt, fields | {"seed": first + i}) for i in range(count)]


def _compared(check: str, texts: list[Answer], others: list[Answer]) -> Finding:
    """Whether greedy texts are the same; if not, whether rounding may be the reason."""
    pairs = [(a, b) for a, b in zip(texts, others, strict=True) if a.text != b.text]
    # What either side tells counts: an endpoint that errs may tell that it is nearly right.
    told = [[gap for gap in (_gap(a, b), _gap(b, a)) if gap is not None] for a, b in pairs]
    gaps = [max(each, default=None) for each in told]
    said = f"{len(pairs)} of {len(texts)} texts differ"
    if not gaps:
        most = min(100, math.ceil(300 / len(texts)))
        return Finding(check, PASSED, f"{said}: fewer than {most} in 100 do, with 95 % confidence")
    said += f" ({100 * len(gaps) / len(texts):.0f} in 100)"
    known = [gap for gap in gaps if gap is not None]
    most = max(known, default=0.0)
    if len(known) < len(gaps) and most <= NEAR:
        return Finding(check, NOT_CHECKED, f"{said}; no log-probabilities tell why")
    said += f"; where they part, one token is {math.exp(-most):.2g} times as likely as the other"
    return Finding(check, FAILED if most > NEAR else NEAR_TIES, f"{said}, or more")


def _gap(text: Answer, other: Answer) -> float | None:
    """How much less likely than the text's token the other's is, where the two part.

    None if that is not told; infinite for a token that is not among the likely ones.
    """
    pairs = enumerate(zip(text.tokens, other.tokens, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(text.tokens), len(other.tokens)))
    if at >= len(text.likely) or at >= len(other.tokens) or not text.likely[at]:
        return None
    return abs(text.chosen[at] - text.likely[at].get(other.tokens[at], -math.inf))


def _paired(ours: list[Hashable], theirs: list[Hashable]) -> ChiSquared:
    """Stuart and Maxwell's test: have two samples, drawn from the same seeds, one distribution?

    Texts of one seed may depend on each other. So only pairs that differ tell, by how much more
    often a cell is on one side than on the other. Cells too rare to count (< 10) are pooled.
    """
    pairs = [(x, y) for x, y in zip(ours, theirs, strict=True) if x != y]
    seen = Counter(x for pair in pairs for x in pair)
    cells = {x: i for i, x in enumerate((x for x, n in seen.items() if n >= 10), 1)}
    signs = np.zeros((len(pairs), len(cells) + 1))  # the first is the pooled cell
    for row, (x, y) in zip(signs, pairs, strict=True):
        row[cells.get(x, 0)] += 1
        row[cells.get(y, 0)] -= 1
    total, covariance = signs.sum(0), signs.T @ signs
    statistic = float(total @ np.linalg.pinv(covariance) @ total)
    return chi_squared([1 + math.sqrt(statistic)], [1], int(np.linalg.matrix_rank(covariance)))


def _against_sizes(prompts: list[str], answers: list[Answer]) -> ChiSquared | None:
    """Whether the tokens after each beginning come as often as their log-probabilities say."""
    groups = defaultdict[Any, list[tuple[str, dict[str, float]]]](list)
    for prompt, answer in zip(prompts, answers, strict=True):
        for at in range(1, min(SHORT, len(answer.likely))):
            before = prompt, *answer.tokens[:at]
            groups[before].append((answer.tokens[at], answer.likely[at]))
    observed, expected, degrees = list[float](), list[float](), 0
    for group in groups.values():
        likely = next((likely for _, likely in group if likely), {})  # some tell of a part alone
        sizes = {token: math.exp(min(0.0, p)) * len(group) for token, p in likely.items()}
        if sum(sizes.values()) > 1.001 * len(group):
            continue  # no distribution
        cells = [token for token in sorted(sizes, key=sizes.get) if sizes[token] >= 5]
        if len(group) - sum(map(sizes.get, cells)) < 5:
            cells = cells[1:]  # the smallest one and all that are rare are one cell
        if cells:
            seen = Counter(token for token, _ in group)
            for counts, sums in ((seen, observed), (sizes, expected)):
                sums += [float(counts[token]) for token in cells]
                sums.append(len(group) - sum(counts[token] for token in cells))
            degrees += len(cells)
    statistic = deviance(observed, expected)
    return ChiSquared(statistic, degrees, p_value_of(statistic, degrees)) if degrees else None


def _judged(check: str, test: ChiSquared, ours: list[Answer], theirs: Any = None) -> Finding:
    """What a test of samples says."""
    said = f"p = {test.p_value:.2g}, {len(ours)} texts"
    if theirs:
        same = sum(a.text == b.text for a, b in zip(ours, theirs, strict=True))
        said += f"; {same} are plain decoding's of the same seed"
    if test.p_value < BROKEN:
        return Finding(check, FAILED, said)
    return Finding(check, PASSED, said)


def _why_impossible(answer: Answer) -> str | None:
    """What is wrong with an answer's log-probabilities or acceptance, if it has any."""
    drafted, accepted = answer.drafted or 0, answer.accepted or 0
    if not 0 <= accepted <= min(drafted, answer.length or math.inf):
        return f"{accepted} of {drafted} drafted tokens accepted in {answer.length} tokens"
    for at, likely in enumerate(answer.likely):
        values = [answer.chosen[at], *likely.values()]
        if not all(value <= 1e-4 for value in values):  # NaN is not, either
            return f"a log-probability of {max(values)} at token {at}"
        if (total := sum(map(math.exp, likely.values()))) > 1.001:
            return f"the likeliest tokens at place {at} have a probability of {total:.3f} together"
    return None


def verdict_of(findings: list[Finding]) -> tuple[str, int]:
    """A sentence in plain words, and the exit status."""
    first = {finding.verdict: finding for finding in reversed(findings)}
    if found := first.get(FAILED):
        return f"not lossless, or not to be trusted: {found.check}: {found.evidence}", 1
    if found := first.get("no answer"):
        return f"not told: {found.evidence}", 2
    if not any("plain decoding" in finding.check for finding in findings):
        return "not told: there is nothing to compare with: give --baseline or --off", 2
    of_greedy = {f.verdict: f for f in reversed(findings) if f.check.startswith("greedy")}
    if found := of_greedy.get(NOT_CHECKED):  # texts differ
        return f"not told: {found.check}: {found.evidence}", 2
    sure = "a correct server fails in fewer than 1 of 100,000 audits"
    if found := of_greedy.get(NEAR_TIES):
        return f"lossless but for rounding: {found.check}: {found.evidence} ({sure})", 0
    checks = sum(finding.verdict == PASSED for finding in findings)
    return f"lossless, as far as {checks} checks tell ({sure})", 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    options = bench.parser(__doc__, runs=None)
    options.add_argument("url", help="of the endpoint that is judged")
    options.add_argument("--baseline", metavar="URL", help="an endpoint without speculation")
    for name, text in (("--off", "of plain decoding"), ("--fields", "of all requests")):
        options.add_argument(name, type=lambda x: dict(json.loads(x)), default={}, metavar="JSON",
                             help=f"fields {text}")  # fmt: skip
    options.add_argument("--model", help="the name to ask for (default: the first of /v1/models)")
    options.add_argument("--state", metavar="FILE", help="keeps the answers, to go on from")
    bench.add_count(options, "--texts", 1, 1000, 16, "greedy texts")
    bench.add_count(options, "--tokens", 2, 4096, 64, "tokens of a greedy text")
    bench.add_count(options, "--samples", 30, 10**5, 600, "sampled texts of a prompt")
    bench.add_count(options, "--timeout", 1, 3600, 120, "seconds for an answer")
    flags, findings, plain = options.parse_args(arguments), list[Finding](), None
    try:
        endpoint = Endpoint(flags.url, flags.fields, flags.model, flags.timeout)
        if flags.baseline or flags.off:
            url, fields = flags.baseline or flags.url, flags.fields | flags.off
            plain = Endpoint(url, fields, flags.model, flags.timeout)
        audit = Audit(endpoint, plain, flags)
        for check in (audit.greedy, audit.sampled, audit.bounded, audit.figures):
            begin = len(findings)
            try:
                findings += check()
            except NoAnswer as error:
                findings.append(Finding(check.__name__, error.verdict, str(error)))
            for finding in findings[begin:]:
                if not flags.json:
                    tqdm.write(f"{finding.verdict:12}{finding.check}: {finding.evidence}")
        said, status = verdict_of(findings)
        document = {"verdict": said, "findings": [finding._asdict() for finding in findings]}
        print(json.dumps(document) if flags.json else f"\n{said}", flush=True)
        return status
    except (NoAnswer, OSError) as error:  # the file of --state cannot be written, for one
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted (with --state a second run goes on)", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
