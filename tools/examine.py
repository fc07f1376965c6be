"""Is a drafter from a file right? The course's last task is graded by this (course/drafter.py).

    load → two texts at once → race on all prompts → fresh states → q → sampled, eight at once

The drafter cannot know that it is examined: it is called as a server calls it, and what it proposes
is compared. Each finding has a name and details. course/mistakes.txt has the sentence of each.

    python -m tools.examine '{"drafter": "mine.py:Mine", "model": "embedded", "draft_model": null,
        "dtype": "auto", "tokens": 32}' RESULT

RESULT becomes a file of JSON: an exit status, tables, and a document.

Not covered: q behind a draft's third token, and noise that one draft has in common with the next.
"""

import argparse
import json
import logging
import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, zip_longest
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import tools as bench
from drafters import Noise, Verdict
from drafters.checks import checked_drafts
from drafters.from_file import class_from_file
from runtime.models.catalogue import with_model
from runtime.models.prompts import kind_of, read_prompts
from runtime.values import PLAIN, Draft, Engine, Request, RequestError, Sampling, TextSequence
from server.options import MOST_K, Options

from . import audition
from .lossless import deviance, p_value_of

K, AT_ONCE = 4, 8
KINDS = {  # of text, by how its prompts' names begin
    "talk": ("talk", "chat", "hard"), "code": ("code",), "copying": ("summary", "easy", "rep"),
}  # fmt: skip
_LEFT_OUT = "chat_summary"  # of all prompts; without it there are forty
_MOST_COMPARED, _ROUNDED = 400, 0.02  # cycles; the share that roundings may explain
_RACED = 3  # of so many prompts one is for other drafters, too: they are only compared
_TEMPERATURE = 0.8
# Drafts by which q is tested, of so many tokens, and the odds at which it is wrong. What was drawn
# chooses the cells, so p is too small: by this one a right drafter fails less than once in 10⁶.
DRAWS, _PLACES, _LEAST_P = 400, 3, 1e-9
_DRAWN = Sampling(temperature=1.3, top_k=20, verification="rejection")


class Finding(Exception):
    """A mistake: its name, and what its sentence tells."""


class Step(NamedTuple):
    """A cycle of a text: what was drafted behind which tokens."""

    text: list[int]
    drafter: str
    limit: int
    draft: Draft


class Walk(NamedTuple):
    """A text that has ended, and its cycles."""

    sequence: TextSequence
    steps: list[Step]

    @property
    def drafts(self) -> dict[int, list[int]]:
        """What was drafted, by the length of the text before it."""
        return {len(step.text): step.draft.tokens for step in self.steps}


def walk(engine: Engine, requests: list[Request]) -> list[Walk]:
    """Run requests side by side to their ends. Raises the error of one that fails."""
    walks = list[Walk]()
    with ExitStack() as opened:  # a drafter may fail to close: then the others are closed, too
        for request in requests:
            walks.append(Walk(engine.open(request), []))
            opened.callback(engine.close, walks[-1].sequence)
        while running := [each for each in walks if not each.sequence.finish_reason]:
            lengths = [len(each.sequence.tokens) for each in running]
            cycles = engine.step([each.sequence for each in running])
            for (s, steps), length in zip(running, lengths, strict=True):
                if s.failure:
                    raise s.failure
                if s in cycles and cycles[s].number:  # the first one reads the prompt
                    task, draft = s.drafting.task, cycles[s].draft
                    steps.append(Step(s.tokens[:length], task.drafter, task.limit, draft))
    return walks


@contextmanager
def blamed(limit_s: float = 0.0) -> Iterator[None]:
    """What goes wrong in here is the drafter's mistake. So is it, with a limit, to take longer."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"this took longer than {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    except (ValueError, OSError, RequestError) as error:
        raise Finding("fault", {"what": str(error)}) from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def cells_of(tokens: Sequence[int], qs: Sequence[Tensor]) -> list[tuple[float, float]]:
    """How often tokens were drawn, and would be on average if each was drawn from its q [V].

    Each frequent token has a cell; the others have two, of about the same share, by their ids.
    """
    expected = torch.stack([*qs]).double().sum(0)
    drawn = torch.tensor(tokens, device=expected.device).bincount(minlength=len(expected))
    both = torch.stack([drawn.double(), expected], 1)  # [V, 2]
    is_often = both.amax(1) >= max(10, len(tokens) / 16)
    rare = both.masked_fill(is_often[:, None], 0)
    middle = int((rare[:, 1].cumsum(0) < rare[:, 1].sum() / 2).sum())
    cells = [*both[is_often], rare[:middle].sum(0), rare[middle:].sum(0)]
    return [tuple(cell.tolist()) for cell in cells]


def groups_of(drafts: list[Draft]) -> dict[tuple, list[tuple[int, Tensor]]]:
    """Drawn tokens, each with its q, by place and by the half of its q where the one before fell.

    Who draws at two places by the same noise has the right shares, but not of what follows what.
    """
    groups = defaultdict[tuple, list[tuple[int, Tensor]]](list)
    for draft in drafts:
        is_low = False
        drawn = [] if draft.probs is None else zip(draft.tokens, draft.probs, strict=True)
        for i, (token, q) in enumerate(drawn):
            groups[i, is_low].append((token, q))
            is_low = float(q[:token].sum()) < 0.5
    return groups


def p_value(cells: list[tuple[float, float]]) -> float:
    """The odds of cells as unlike as these, counted and expected."""
    return p_value_of(deviance(*zip(*cells, strict=True)), len(cells))


class Exam:
    """A drafter, the engine that it is to serve, and what was found of it."""

    def __init__(self, file: str, options: Options, num_tokens: int, bar: Any = bench.tqdm) -> None:
        """Load all. Raises Finding if the drafter is wrong, and else what loading a model does."""
        self.file, self.options, self.num_tokens, self.bar = file, options, num_tokens, bar
        with blamed(options.drafter_timeout):
            class_from_file(file)  # first, as a model takes seconds to load
        self.base = bench.core.load_engine(with_model(options))
        self.engine, self.target = self.new(), self.base.target
        *_, self.name = self.engine.pool.drafters
        self.drafter, choices = self.engine.pool.drafters[self.name], self.engine.pool.choices
        choices[bench.AUTO] = (*choices[bench.AUTO], self.name)
        audition.measurement(self.engine, options)
        chats, demo = bench.flat(bench.CHATS), read_prompts(is_chat=True)
        raw = {name: demo.pop(name) for name in [*demo] if kind_of(name) != "chat"}
        texts = chats | {name: text for name, text in demo.items() if name != _LEFT_OUT}
        self.prompts = bench.ids_of(texts, self.target) | bench.ids_of(raw, self.target, True)
        self.prompts["a prompt of one token"] = [*self.prompts.values()][-1][-1:]
        self.found, self.tables = list[tuple[str, dict[str, Any]]](), defaultdict[str, list](list)

    def new(self) -> Engine:
        """An engine with the drafter built anew."""
        with blamed(self.options.drafter_timeout):
            engine, _ = audition.with_own(self.base, self.options, [self.file])
        engine.pool.is_strict = True
        return engine

    def of_kind(self, kind: str) -> dict[str, list[int]]:
        """The prompts of a kind by name."""
        return {name: ids for name, ids in self.prompts.items() if name.startswith(KINDS[kind])}

    def request(self, prompt: list[int], drafter: str | None, seed: int = 0) -> Request:
        """A request for a text, sampled if there is a seed. All but `auto` draft with a fixed K."""
        count, is_auto = self.target.max_length - len(prompt), drafter == bench.AUTO
        return Request(
            prompt, min(self.num_tokens, count), drafter, MOST_K if is_auto else K,
            sampling=Sampling(temperature=_TEMPERATURE if seed else 0.0), seed=seed,
            fixed_k=not is_auto, isolated=True,
        )  # fmt: skip

    def take(self) -> None:
        """Find all mistakes. Raises Finding for one behind which no more can be found."""
        with blamed():
            self.run_two()
            greedy = self.race()
            self.examine_q()
            self.sample(greedy)
        if changed := self.drafter.changed_settings:
            self.found.append(("settings", {"names": " and ".join(sorted(changed))}))

    def run_two(self) -> None:
        """Does what it drafts for a text depend on another one?"""
        prompts = [*self.of_kind("copying").values()][-2:]  # where most is drafted
        # Two of the texts have one prompt: a state is not known by that, either.
        texts = [self.request(ids, self.name, i) for i, ids in enumerate([prompts[0], *prompts])]
        each = self.bar([*texts, *texts], "alone")
        alone = [walk(self.new(), [request])[0].drafts for request in each]
        if self.note_chance(alone[:3] != alone[3:]):
            return
        engine = self.new()
        beside = [*walk(engine, texts), *walk(engine, texts)]  # the second time it may know them
        pairs = [(known, each.drafts, each) for known, each in zip(alone, beside, strict=True)]
        both = [(a[n], b[n], n, each) for a, b, each in pairs for n in sorted(a.keys() & b)]
        unlike = [each for each in both if each[0] != each[1]]
        told = {"cycles": len(both), "differing": len(unlike)}
        self.tables["two_at_once"] = [told]
        for a, b, n, (s, _) in unlike[:1]:
            self.found.append(("shared", told | self.shown(s.tokens[:n], b, s.tokens[n:], a)))

    def shown(self, text: list[int], draft: list[int], came: list[int], other: list[int]) -> dict:
        """A cycle in words, for its picture, and two drafts of it."""
        decode = self.target.tokenizer.decode
        size = min(len(draft), len(came) - 1)
        parts = text[-9:-1], draft[:size], came[: size + 1]
        cached, drafted, right = ([decode([token]) for token in part] for part in parts)
        cycle = cached, decode(text[-1:]), drafted, right
        return {"cycle": cycle, "own": decode(draft), "other": decode(other)}

    def note_chance(self, is_unlike: bool) -> bool:
        """Whether the same request gets other drafts. Such a drafter's drafts are not compared."""
        if is_unlike:
            self.tables["by_chance"] = [{"draws": "by a chance of its own: `noise` gives the same"}]
        return is_unlike

    def race(self) -> list[Walk]:
        """Decode prompts plainly and with the drafter, some with each. Returns plain texts."""
        others = {"ngram", "suffix", "draft_model"} & self.base.pool.drafters.keys()
        ways = PLAIN, self.name, *sorted(others), bench.AUTO
        walks: dict[str, dict[str, Walk]] = {way: {} for way in ways}

        def run(way: str, name: str) -> bench.Finished:
            request = self.request(self.prompts[name], None if way == PLAIN else way)
            (walks[way][name],) = walk(self.engine, [request])
            s = walks[way][name].sequence
            return bench.Finished(s.output, s.statistics)

        few = [name for kind in KINDS for name in [*self.of_kind(kind)][::_RACED]]
        raced = islice(audition.race(run, ways, few, inf), len(few))
        turns = [*self.bar(raced, "race", len(few))][-1]
        for name in self.bar([name for name in self.prompts if name not in few], "other prompts"):
            for way in ways[:2]:
                run(way, name)
        for kind in KINDS:
            own = [turn for turn in turns if turn[PLAIN].prompt in self.of_kind(kind)]
            rows = (audition.row_of(own, way) for way in ways)
            shown = "drafter", "tok_pass", "of_plain", "accepted"
            self.tables["results"] += [{"text": kind} | {n: r[n] for n in shown} for r in rows]
        chosen = Counter(s.drafter or PLAIN for w in walks[bench.AUTO].values() for s in w.steps)
        self.tables["auto"] = [{"auto_chose": way, "cycles": n} for way, n in chosen.items()]
        plain, mine = ([walks[way][name] for name in self.prompts] for way in ways[:2])
        self.compare("greedy", mine, plain)
        if not any(step.draft.tokens for each in mine for step in each.steps):
            raise Finding("no drafts", {})
        # Else a fresh state drafts by what another text has left.
        if not self.found and "by_chance" not in self.tables:
            self.compare_fresh(mine)
        return plain

    def compare(self, what: str, ours: list[Walk], theirs: list[Walk]) -> None:
        """Count the texts that are plain decoding's, and say where the first other one differs."""
        outputs = ([each.sequence.output for each in walks] for walks in (ours, theirs))
        unlike = [each for each in zip(self.prompts, *outputs, strict=True) if each[1] != each[2]]
        told = {"texts": what, "equal": len(ours) - len(unlike), "of": len(ours)}
        self.tables["equal"].append(told)
        report = self.target.report
        if unlike and report and report.is_exact:  # else roundings may have done that
            name, *both = unlike[0]
            pairs = enumerate(zip_longest(*both))
            at, ids = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
            decode = self.target.tokenizer.decode
            words = ["its end" if i is None else repr(decode([i])) for i in ids]
            where = {"name": name, "at": at, "words": " for ".join(words)}
            self.found.append(("other text", told | where))

    def compare_fresh(self, walks: list[Walk]) -> None:
        """Does a state that saw drafts rejected propose what a fresh one does?"""
        steps = [(step, s.tokens) for s, own in walks for step in own[1:] if step.limit]
        unlike, drafted = list[dict[str, Any]](), 0
        counts = {"kept": Counter[str](), "fresh": Counter[str]()}
        for step, whole in self.bar(steps[:: 1 + len(steps) // _MOST_COMPARED], "fresh states"):
            given = step.text, self.request(step.text, self.name), step.limit
            draft = self.fresh(*given)
            both, came = (draft.tokens, step.draft.tokens), whole[len(step.text) :]
            drafted += any(both)
            # One that only stops earlier than the other may have learnt from verdicts.
            is_begun = all(both) and all(a == b for a, b in zip(*both, strict=False))
            if any(both) and not is_begun:
                if self.note_chance(self.fresh(*given).tokens != draft.tokens):
                    return
                unlike.append(self.shown(step.text, both[1], came, both[0]))
            for name, each in ("kept", step.draft), ("fresh", draft):
                paths = ([each.tokens[i] for i in path] for path in each.paths())
                right = max((len(p) for p in paths if p == came[: len(p)]), default=0)
                counts[name].update(accepted=right, drafted=len(each.tokens))
        rates = {n: round(c["accepted"] / max(1, c["drafted"]), 2) for n, c in counts.items()}
        told = {"cycles": drafted, "differing": len(unlike)} | rates
        self.tables["fresh_states"] = [told]
        if len(unlike) > drafted * _ROUNDED:
            self.found.append(("rollback", told | unlike[0]))

    def fresh(self, text: list[int], request: Request, limit: int) -> Draft:
        """What a new state proposes behind this text. Raises ValueError for a fault."""
        drafter, hidden, size = self.drafter, None, self.target.vocab_size
        if drafter.needs_hidden:
            row, layers = self.target.cache.open_row(), tuple(sorted({*drafter.hidden_layers}))
            output = self.target.forward([row], [text[:-1]], [1], layers)
            hidden = drafter.wanted_states(output, len(text) - 1)
            self.target.cache.close_row(row)
        check = partial(checked_drafts, asked=[(request, limit)], vocab_size=size)
        sampling = replace(request.drafting, prompt_length=len(text) - 1)
        try:
            state = drafter.call("open", text[:-1], sampling, Noise(request.seed))
            drafter.call("observe", state, Verdict(0, 0, text[-1:], hidden))
            (draft,) = drafter.call("propose_batch", [state], [limit], then=check)
            drafter.call("close", state)
        except Exception as error:
            where = drafter.line_of(error, "propose_batch")
            raise ValueError(f"drafter {self.name} failed ({error}){where}") from error
        return draft

    def examine_q(self) -> None:
        """Is a token drawn from the q that is reported? By many seeds behind a few texts."""
        cells = list[tuple[tuple[float, float], dict[str, int]]]()
        for kind in self.bar(KINDS, "q"):
            text = [*self.of_kind(kind).values()][-1]
            request = replace(self.request(text, self.name), sampling=_DRAWN)
            drafts = [self.fresh(text, replace(request, seed=i), _PLACES) for i in range(DRAWS)]
            for (i, _), drawn in groups_of(drafts).items():
                short = sum(len(draft.tokens) <= i for draft in drafts)
                told = {"place": i + 1, "draws": len(drawn), "short": short, "drafts": DRAWS}
                cells += [(cell, told) for cell in cells_of(*zip(*drawn, strict=True))]
        if cells:
            p = p_value([cell for cell, _ in cells])
            self.tables["q"] = [{"drafts_of_a_text": DRAWS, "p_of_q": round(p, 4)}]
            if p < _LEAST_P:
                (seen, right), told = max(cells, key=lambda each: abs(each[0][0] - each[0][1]))
                self.found.append(("q", told | {"seen": seen, "right": right}))

    def sample(self, greedy: list[Walk]) -> None:
        """Are sampled texts plain decoding's, and those of eight at once, greedy and sampled?"""
        prompts, seeds = [*self.prompts.values()], [*range(1, len(self.prompts) + 1)]

        def texts(what: str, drafter: str | None, seeds: list[int], at_once: int) -> list[Walk]:
            pairs = zip(prompts, seeds, strict=True)
            requests = [self.request(prompt, drafter, seed) for prompt, seed in pairs]
            groups = [requests[i : i + at_once] for i in range(0, len(requests), at_once)]
            return [each for group in self.bar(groups, what) for each in walk(self.engine, group)]

        plain = texts("plain sampled", None, seeds, AT_ONCE)  # neighbours change no text
        self.compare("sampled", texts("sampled", self.name, seeds, 1), plain)
        mixed = [seed if seed % 2 else 0 for seed in seeds]
        right = [(plain if seed % 2 else greedy)[seed - 1] for seed in seeds]
        self.compare("eight at once", texts("eight at once", self.name, mixed, AT_ONCE), right)


def examine(given: dict[str, Any], bar: Any = bench.tqdm) -> tuple[int, str, dict[str, Any]]:
    """The exit status (2: nothing could be told), tables to be read, and the document."""
    exam, found = None, list[tuple[str, dict[str, Any]]]()
    chosen = {name: given[name] for name in ("model", "draft_model", "dtype")}
    common = bench.FORGETFUL | {"drafter": bench.AUTO, "max_running": AT_ONCE}
    try:
        exam = Exam(given["drafter"], Options(**common | chosen), given["tokens"], bar)
        exam.take()
    except Finding as finding:
        found = [finding.args]
    except (ValueError, OSError, RequestError) as error:
        return 2, str(error), {}
    if exam:
        found = exam.found + found
    tables, flags = exam.tables if exam else {}, argparse.Namespace(**given, passed=not found)
    words = bench.as_words({name: given[name] for name in given if name != "drafter"})
    document = bench.document("course drafter", [given["drafter"], *words], flags)
    return int(bool(found)), bench.tables(tables)[:-1], document | tables | {"found": found}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    progress = os.fdopen(os.dup(2), "w")
    os.dup2(1, 2)  # what the file prints is counted, wherever it prints
    logging.getLogger().addHandler(logging.NullHandler())  # the pool logs tracebacks
    logging.getLogger("progress.once").setLevel(logging.INFO)
    logging.getLogger("progress.once").addHandler(logging.StreamHandler(progress))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    bar = partial(bench.tqdm, file=progress, leave=False, mininterval=1.0)
    outcome = examine(json.loads(sys.argv[1]), bar)
    Path(sys.argv[2]).write_text(json.dumps(outcome), "utf-8")
    sys.stdout.flush()
    os._exit(0)  # and so do threads that hang
