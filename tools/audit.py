"""Is a server lossless? Asks any OpenAI endpoint (vLLM, SGLang, llama.cpp, this one), and judges.

    python -m tools.audit http://127.0.0.1:5000 --off '{"speculative": false}'
    python -m tools.audit http://127.0.0.1:8080 --baseline http://127.0.0.1:8081 [--chat]
        [--model NAME] [--texts 16] [--samples 600] [--fields JSON] [--state FILE] [--json]

Plain decoding to compare with is a second endpoint, or the same one with the fields of --off. Then:

greedy    the same texts again, alone and in company, and those of plain decoding. Where two differ,
          log-probabilities tell a near-tie, which rounding decides, from an error
sampled   the second and the third token, in bulk: their distribution is plain decoding's, and the
          one that log-probabilities give; the same with answers that a JSON schema bounds
answers   JSON fits its schema, log-probabilities are some, acceptance is possible

A p-value below 1e-6 is an error. Exit status: 0 nothing found, 1 not lossless, 2 not checked. With
--state answers are kept, and asked for again nowhere. The key is read from OPENAI_API_KEY.

Not covered: what happens only behind longer prompts, under more load or with other parameters.
"""

import hashlib
import json
import math
import os
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from threading import Lock
from typing import Any, NamedTuple

from tqdm import tqdm

import tools as bench
from runtime.models.prompts import read_prompts
from tools.lossless import ChiSquared, chi_squared, same_distribution

NEAR = 0.1  # two log-probabilities that are nearer may change places by rounding
BROKEN = 1e-6  # a p-value below it is no chance
NOT_ANSWERED = "no answer"
AT_ONCE, SHORT, TOP = 8, 4, 10  # requests in company; tokens of a sample; log-probabilities
LARGEST = 1 << 24  # bytes of an answer
GUESSABLE = ["A B C A B", "1 2 3 1 2", "C B A C B A C"]  # drafters propose, and are often wrong
WORDS = ["red", "green", "blue", "black", "white", "brown"]
COLOUR = {"type": "string", "enum": WORDS}
CITY = {"city": {"type": "string", "maxLength": 20}, "old": {"type": "boolean"}}


class NoAnswer(RuntimeError):
    """An endpoint did not answer as its protocol says; the message is a sentence."""


class Answer(NamedTuple):
    """A text, its tokens, and what is likely at each of them, if the endpoint tells."""

    text: str
    tokens: list[str]
    chosen: list[float]  # log-probabilities of the tokens
    likely: list[dict[str, float]]  # log-probabilities by token, the likeliest first
    length: int | None = None
    drafted: int | None = None
    accepted: int | None = None


def answer_of(body: Any) -> Answer:
    """Read an answer of either protocol. Raises NoAnswer."""
    try:
        choice, usage = body["choices"][0], body.get("usage") or {}
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        told, likely = choice.get("logprobs") or {}, list[dict[str, float]]()
        if content := told.get("content"):  # as chats have them
            tokens, chosen = [x["token"] for x in content], [x["logprob"] for x in content]
            for each in content:
                likely.append({x["token"]: x["logprob"] for x in each.get("top_logprobs") or ()})
        else:
            tokens, chosen = told.get("tokens") or [], told.get("token_logprobs") or []
            likely = [dict(each or {}) for each in told.get("top_logprobs") or ()]
        figures = body.get("metrics", {}).get("speculative_decoding") or body.get("timings") or {}
        names = ("num_draft_tokens", "draft_n"), ("num_accepted_draft_tokens", "draft_n_accepted")
        counts = [next((figures[n] for n in pair if n in figures), None) for pair in names]
        chosen, length = [float(x) for x in chosen], usage.get("completion_tokens")
        assert isinstance(text, str) and len(tokens) == len(chosen) >= len(likely)
        return Answer(text, list(map(str, tokens)), chosen, likely, length, *counts)
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise NoAnswer(f"its answer is none of the protocol's: {str(body)[:120]!r}") from error


class Endpoint:
    """An endpoint, and the fields that each request to it has."""

    def __init__(self, url: str, fields: dict[str, Any], flags: Any) -> None:
        self.url, self.fields, self.timeout_s = url.rstrip("/").removesuffix("/v1"), fields, 0.0
        self.key, self.timeout_s, self.chat = os.environ.get("OPENAI_API_KEY"), flags.timeout, False
        self.model = flags.model or self._names()[0]
        self.chat = flags.chat
        self.others = set[str]()  # names of models that answered instead

    def _names(self) -> list[str]:
        try:
            return [str(model["id"]) for model in self._send("/v1/models")["data"]][:1] + [""]
        except (LookupError, TypeError) as error:
            raise NoAnswer(f"{self.url}/v1/models names no model: give --model") from error

    def ask(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """The answer to a prompt, as it came. Raises NoAnswer."""
        asked: dict[str, Any] = {"prompt": prompt, "logprobs": TOP}
        if self.chat:
            asked = {"messages": [{"role": "user", "content": prompt}]}
            asked |= {"logprobs": True, "top_logprobs": TOP}
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        body = self._send(path, {"model": self.model} | asked | fields | self.fields)
        answer_of(body)
        return body

    def _send(self, path: str, fields: dict[str, Any] | None = None) -> Any:
        """The JSON that comes back. Raises NoAnswer, also where it does not end in time."""
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        data, until = fields and json.dumps(fields).encode(), time.monotonic() + self.timeout_s
        whole = bytearray()
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                while piece := response.read1(1 << 16):
                    whole += piece
                    if len(whole) > LARGEST:
                        raise NoAnswer("its answer does not end")
                    if time.monotonic() > until:
                        raise TimeoutError
            return json.loads(whole)
        except TimeoutError:
            reason = f"it did not answer in {self.timeout_s:.0f} s"
        except urllib.error.HTTPError as error:
            reason = f"status {error.code}: {error.read(300).decode(errors='replace')}"
        except (OSError, HTTPException) as error:
            reason = f"it does not answer: {getattr(error, 'reason', None) or error!r}"
        except ValueError:
            reason = f"its answer is no JSON: {bytes(whole[:80])!r}"
        except NoAnswer as error:
            reason = str(error)
        reason = " ".join(reason.replace(self.key or "\0", "…").split())
        raise NoAnswer(f"{self.url}{path}: {reason[:300]}")


class Finding(NamedTuple):
    """What a check says: passed, near-ties, failed, not checked or no answer; and why."""

    check: str
    verdict: str
    evidence: str


class Audit:
    """Asks, remembers and judges."""

    def __init__(self, endpoint: Endpoint, plain: Endpoint | None, flags: Any) -> None:
        self.endpoint, self.plain, self.flags = endpoint, plain, flags
        self._known, self._lock, self._file = dict[str, Any](), Lock(), None
        self.answers = list[Answer]()  # of the endpoint that is judged
        if flags.state:
            self._known = _kept(flags.state)
            self._file = open(flags.state, "a", encoding="utf-8")
        prompts = [*read_prompts(flags.chat).values()]
        self.prompts = [f"{prompts[i % len(prompts)]}{' ' * (i // len(prompts))}"
                        for i in range(flags.texts)]  # fmt: skip
        ways = 2 if plain else 1
        total = flags.texts * (3 + (ways - 1)) + ways * (flags.samples * 4 // 3 * 3 // 2) + 8
        self.progress = tqdm(total=total, desc="requests", disable=None)

    def ask(self, asked: list[tuple[str, dict[str, Any]]], at_once: int = 1, again: int = 0,
            plain: bool = False) -> list[Answer]:  # fmt: skip
        """Ask for all answers, `at_once` of them in company. Raises NoAnswer."""
        endpoint = self.plain if plain and self.plain else self.endpoint

        def one(each: tuple[str, dict[str, Any]]) -> Answer:
            words = [endpoint.url, endpoint.fields, endpoint.model, endpoint.chat, *each]
            key = hashlib.sha256(json.dumps([*words, at_once, again]).encode()).hexdigest()
            if (body := self._known.get(key)) is None:
                body = endpoint.ask(each[0], **each[1])
                with self._lock:
                    if self._file:
                        print(json.dumps([key, body]), file=self._file, flush=True)
            self.progress.update()
            if body.get("model") not in (None, endpoint.model):
                endpoint.others.add(str(body["model"])[:80])
            return answer_of(body)

        with ThreadPoolExecutor(at_once) as pool:
            try:
                answers = list(pool.map(one, asked))
            except NoAnswer:
                pool.shutdown(cancel_futures=True)
                raise
        if endpoint is self.endpoint:
            self.answers += answers
        return answers

    # ------------------------------------------------------------------------------- the checks
    def greedy(self) -> Iterable[Finding]:
        """The same texts again, in company, and by plain decoding."""
        fields = {"temperature": 0, "max_tokens": self.flags.tokens}
        asked = [(prompt, fields) for prompt in self.prompts]
        first = self.ask(asked)
        yield _compared("greedy, asked again", first, self.ask(asked, again=1))
        yield _compared("greedy, in company", first, self.ask(asked, at_once=AT_ONCE))
        if not self.plain:
            yield Finding("greedy, plain decoding", "not checked", "give --baseline or --off")
            return
        yield _compared("greedy, plain decoding", self.ask(asked, plain=True), first)

    def sampled(self) -> Iterable[Finding]:
        """Distributions of short texts."""
        each = self.flags.samples // len(GUESSABLE)
        for prompt in GUESSABLE:
            ours = self.ask(asked := _draws(prompt, each), AT_ONCE)
            yield _known_sizes(f"sampled, log-probabilities, {prompt!r}", ours)
            if self.plain:
                theirs = self.ask(asked, AT_ONCE, plain=True)
                tests = [same_distribution(map(cut, ours), map(cut, theirs)) for cut in _CUTS]
                yield _judged(f"sampled, plain decoding, {prompt!r}", tests, each)
        if not self.plain:
            yield Finding("sampled, plain decoding", "not checked", "give --baseline or --off")

    def bounded(self) -> Iterable[Finding]:
        """Answers that a JSON schema bounds: they fit, and are drawn as plain decoding draws."""
        schema = _object({"colour": COLOUR, "other": COLOUR})
        count = self.flags.samples // 2
        asked = _draws("A colour, and another one, as JSON: ", count, 60, schema)
        ours = self.ask(asked, AT_ONCE)
        city = {"max_tokens": 200, "temperature": 1, "response_format": _object(CITY)}
        cities = self.ask([(f"City {i} as JSON: ", city | {"seed": i}) for i in range(8)])
        wrong = [a.text for a in ours if not _fits(a.text, {"colour": WORDS, "other": WORDS})]
        wrong += [a.text for a in cities if not _fits(a.text, {"city": str, "old": bool})]
        said = f"{len(wrong)} of {count + 8} do not fit" + "".join(
            f": {x[:80]!r}" for x in wrong[:1]
        )
        yield Finding("JSON schemas, answers fit", "failed" if wrong else "passed", said)
        if self.plain:
            theirs = self.ask(asked, AT_ONCE, plain=True)
            test = same_distribution((a.text for a in ours), (a.text for a in theirs))
            yield _judged("JSON schemas, plain decoding", [test], count)

    def figures(self) -> Iterable[Finding]:
        """What the answers say of themselves."""
        wrong = [reason for a in self.answers if (reason := _why_no_probabilities(a))]
        told = sum(bool(a.likely) for a in self.answers)
        yield Finding(
            "log-probabilities", "failed" if wrong else "passed" if told else "not checked",
            wrong[0] if wrong else f"{told} answers have some",
        )  # fmt: skip
        counted = [a for a in self.answers if a.drafted is not None and a.accepted is not None]
        drafted = sum(a.drafted for a in counted)
        accepted = sum(a.accepted for a in counted)
        wrong = [
            f"{a.accepted} of {a.drafted} drafted tokens accepted in a text of {a.length}"
            for a in counted
            if not 0 <= a.accepted <= a.drafted or a.accepted > (a.length or math.inf)
        ]
        verdict = "failed" if wrong else "passed" if drafted else "not checked"
        said = f"{accepted} of {drafted} drafted tokens were accepted"
        nothing = "the answers tell of no drafted token: is speculation on?"
        yield Finding("acceptance", verdict, wrong[0] if wrong else said if drafted else nothing)
        if others := self.endpoint.others:
            words = f"asked for {self.endpoint.model}, {min(others)} answered"
            yield Finding("the model's name", "failed", words)


def _kept(path: str) -> dict[str, Any]:
    """Answers of an earlier run, by what was asked; lines that are none do not count."""
    found = dict[str, Any]()
    if os.path.exists(path):
        for line in open(path, encoding="utf-8", errors="replace"):
            try:
                key, found[key] = json.loads(line)
            except (ValueError, TypeError):
                continue
    return found


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    """The response_format of an object with just these properties."""
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    schema["additionalProperties"] = False
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _draws(
    prompt: str, count: int, tokens: int = SHORT, schema: Any = None
) -> list[tuple[str, dict[str, Any]]]:
    """Requests for `count` sampled texts, each with a seed of its own."""
    fields: dict[str, Any] = {"temperature": 1, "max_tokens": tokens}
    if schema:
        fields["response_format"] = schema
    return [(prompt, fields | {"seed": 1000 + i}) for i in range(count)]


def _fits(text: str, kinds: dict[str, Any]) -> bool:
    """Whether a text is a JSON object with these keys, each of a type or one of some words."""
    try:
        found = json.loads(text)
        return found.keys() == kinds.keys() and all(
            found[key] in kind if isinstance(kind, list) else isinstance(found[key], kind)
            for key, kind in kinds.items()
        )
    except (ValueError, AttributeError, TypeError):
        return False


def _part(begin: int, end: int) -> Callable[[Answer], Any]:
    return lambda answer: tuple(answer.tokens[begin:end]) if answer.tokens else answer.text


_CUTS = [_part(1, 2), _part(2, 3), _part(0, 3)]  # the second token, the third, the first three


def _compared(check: str, texts: list[Answer], others: list[Answer]) -> Finding:
    """Whether greedy texts are the same; if not, whether rounding may be the reason."""
    gaps = [_gap(a, b) for a, b in zip(texts, others, strict=True) if a.text != b.text]
    count = f"{len(gaps)} of {len(texts)} texts differ"
    if not gaps:
        sure = f"with 95 % confidence fewer than {300 / len(texts):.0f} of 100 would"
        return Finding(check, "passed", f"{count}; {sure}")
    if None in gaps:
        return Finding(check, "failed", f"{count}, and no log-probabilities tell whether near-ties")
    largest = max(gaps)
    said = f"{count}; where they part, the token was up to {largest:.3g} less likely (log)"
    return Finding(check, "failed" if largest > NEAR else "near-ties", said)


def _gap(text: Answer, other: Answer) -> float | None:
    """How much less likely than the text's token the other's is, where the two part.

    None if that is not told; infinite for a token that is not among the likely ones.
    """
    pairs = enumerate(zip(text.tokens, other.tokens, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(text.tokens), len(other.tokens)))
    if at >= len(text.likely) or at >= len(other.tokens):
        return None
    likely = text.likely[at]
    return abs(text.chosen[at] - likely.get(other.tokens[at], -math.inf)) if likely else None


def _known_sizes(check: str, answers: list[Answer]) -> Finding:
    """Whether later tokens come as often as their log-probabilities say."""
    groups = defaultdict[tuple, list[tuple[str, dict[str, float]]]](list)
    for answer in answers:
        for at in range(1, min(3, len(answer.likely))):
            before = tuple(answer.tokens[:at])
            groups[before].append((answer.tokens[at], answer.likely[at]))
    tests = list[ChiSquared]()
    for group in groups.values():
        sizes = {token: math.exp(p) * len(group) for token, p in group[0][1].items()}
        cells = [token for token, size in sizes.items() if size >= 5]
        seen = Counter(token for token, _ in group)
        rest = len(group) - sum(sizes[token] for token in cells)
        if cells and rest >= 5:
            observed = [float(seen[token]) for token in cells]
            observed.append(len(group) - sum(observed))
            tests.append(chi_squared(observed, [*(sizes[token] for token in cells), rest]))
    if not tests:
        return Finding(check, "not checked", "too few log-probabilities, or too few samples")
    return _judged(check, tests, len(answers))


def _judged(check: str, tests: list[ChiSquared], count: int) -> Finding:
    """What tests of so many samples say together."""
    least = min(test.p_value for test in tests)
    verdict = "failed" if least * len(tests) < BROKEN else "passed"
    shift = 6 * math.sqrt(0.5 / count)
    said = f"least of {len(tests)} p-values {least:.2g}; {count} samples show a share that is off"
    return Finding(check, verdict, f"{said} by {min(1.0, shift):.2f}")


def _why_no_probabilities(answer: Answer) -> str | None:
    """What is wrong with an answer's log-probabilities, if it has any."""
    for at, likely in enumerate(answer.likely):
        values = [answer.chosen[at], *likely.values()]
        if not all(value <= 1e-4 for value in values):  # NaN is not, either
            return f"a log-probability of {max(values)} at token {at}"
        if (total := sum(map(math.exp, likely.values()))) > 1.001:
            return f"the likeliest tokens at place {at} have a probability of {total:.3f} together"
        held = likely.get(answer.tokens[at])
        if held is not None and abs(held - answer.chosen[at]) > 1e-3:
            return f"token {at} has two log-probabilities, {held} and {answer.chosen[at]}"
    return None


def verdict_of(findings: list[Finding]) -> tuple[str, int]:
    """A sentence in plain words, and the exit status."""
    by = defaultdict[str, list[Finding]](list)
    for finding in findings:
        by[finding.verdict].append(finding)
    compared = [f for f in findings if "plain" in f.check and f.verdict != "not checked"]
    if failed := by["failed"]:
        return f"not lossless, or not trustworthy: {failed[0].check}: {failed[0].evidence}", 1
    if lost := by[NOT_ANSWERED]:
        return f"not told: {lost[0].evidence}", 2
    if not compared:
        return "not told: nothing was compared with plain decoding (--baseline or --off)", 2
    if near := by["near-ties"]:
        return f"lossless but for rounding: {near[-1].check}: {near[-1].evidence}", 0
    return "lossless, as far as these answers tell", 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    options = bench.parser(__doc__, runs=None)
    options.add_argument("url", help="of the endpoint that is judged")
    options.add_argument("--baseline", metavar="URL", help="an endpoint without speculation")
    options.add_argument("--off", type=json.loads, metavar="JSON", help="fields for plain decoding")
    options.add_argument("--fields", type=json.loads, default={}, metavar="JSON",
                         help="fields of each request")  # fmt: skip
    options.add_argument("--model", help="the name to ask for (default: the first of /v1/models)")
    options.add_argument("--chat", action="store_true", help="ask for chats")
    options.add_argument("--state", metavar="FILE", help="keeps the answers, to go on from")
    bench.add_count(options, "--texts", 1, 1000, 16, "greedy texts")
    bench.add_count(options, "--tokens", 2, 4096, 64, "tokens of a greedy text")
    bench.add_count(options, "--samples", 30, 10**5, 600, "sampled texts of a kind")
    bench.add_count(options, "--timeout", 1, 3600, 120, "seconds for an answer")
    flags = options.parse_args(arguments)
    findings = list[Finding]()

    def note(finding: Finding) -> None:
        findings.append(finding)
        if not flags.json:
            tqdm.write(f"{finding.verdict:12}{finding.check}: {finding.evidence}")

    try:
        endpoint, plain = Endpoint(flags.url, flags.fields, flags), None
        if flags.baseline or flags.off:
            url, fields = flags.baseline or flags.url, flags.fields | (flags.off or {})
            plain = Endpoint(url, fields, flags)
        audit = Audit(endpoint, plain, flags)
    except (NoAnswer, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for check in (audit.greedy, audit.sampled, audit.bounded, audit.figures):
        try:
            for finding in check():
                note(finding)
        except NoAnswer as error:
            note(Finding(check.__name__, NOT_ANSWERED, str(error)))
    said, status = verdict_of(findings)
    document = {"verdict": said, "findings": [finding._asdict() for finding in findings]}
    print(json.dumps(document) if flags.json else f"\n{said}")
    return status


if __name__ == "__main__":
    sys.exit(main())
