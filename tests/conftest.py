"""The core under an importable name, the demo engine, and tiny models of several families."""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import pytest
import torch
import transformers
from started import CHAT, LIMIT_S, ROOT, Gate, events_of, naming_a_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafters import Drafter
from drafters.plan import limit_of
from drafters.tree import TreeBuilder
from runtime.grammars import source_of, vocabulary_of
from runtime.kernels import library, start
from runtime.models.prompts import read_prompts
from runtime.sampling import Noise, truncated_softmax
from runtime.values import Request, Verdict
from server import assembly, core, demo, retry, trace
from server.events import event
from server.options import Options
from server.service import Service
from server.worker import Run
from tools.lossless import BATCH

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # in pytest's workers threads that wait do not spin
TARGET = str(ROOT / "demo_models" / "target")
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)  # the models here are small: a second thread costs more than it brings
needs_compiler = pytest.mark.skipif(library.why_not() is not None, reason="no C compiler here")

_SMALL = {
    "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    "initializer_range": 0.3,  # large enough that the next token depends on the text
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {  # quick to load; families.py makes all others
    "llama": _SMALL,
    "qwen3": _SMALL | {"head_dim": 16},
    "mistral": _SMALL | {"sliding_window": 12, "head_dim": 8},
    "gemma3_text": _SMALL | {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 12},
}  # fmt: skip
HYBRIDS = (  # recurrent layers beside attention
    "qwen3_5_text", "qwen3_next", "olmo_hybrid", "lfm2", "granitemoehybrid", "bamba", "falcon_h1",
)  # fmt: skip

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def pytest_configure(config: pytest.Config) -> None:
    """All but `-m gpu` runs on the CPU, in fp32, whatever else there is."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session", autouse=True)
def notes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder where it is noted which models were compared with transformers."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("runtime.models.reference.cache_folder", lambda: folder)
        yield folder


@pytest.fixture(autouse=True)
def _nothing_noted(notes: Path) -> None:
    """No test depends on what was compared in another one, or by the user."""
    shutil.rmtree(notes / "compared", ignore_errors=True)


@pytest.fixture(scope="session")
def demo_engine() -> Any:
    """The embedded target with every drafter. None may remember a text: all tests share it."""
    return core.load_engine(Options(model="embedded", fixed_k=True, suffix_cache=0))


@pytest.fixture(scope="session")
def many() -> Any:
    """The embedded models with a short cache of many rows: samples come in batches."""
    drafter = None if library.why_not() else "self_int8"
    sizes = {"max_running": BATCH, "max_model_len": 32}
    return load("embedded", drafter=drafter, suffix_cache=0, **sizes)


@pytest.fixture
def main(demo_engine: Any, monkeypatch: Any, capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """The command line on the engine that is loaded, and few demo prompts: (status, out, err)."""
    prompts = read_prompts()
    few = {name: prompts[name] for name in ("repetitive_colours", "easy_facts", "hard_prose")}
    monkeypatch.setattr(core, "load_engine", lambda options: demo_engine)
    monkeypatch.setattr(demo, "read_prompts", lambda is_chat=False: few)

    def run(*arguments: str) -> tuple[int, str, str]:
        return core.main(naming_a_model(arguments)), *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def reference() -> Callable[[Any], Any]:
    """transformers' own modules of a folder, as oracles: nothing in them is packed or fused."""
    return cache(
        lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    )


@pytest.fixture(scope="session")
def demo_reference(reference: Callable[[Any], Any]) -> Any:
    return reference(TARGET)


@pytest.fixture(scope="session")
def prompts() -> dict[str, list[int]]:
    """The demo prompts as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    return {name: tokenizer(text)["input_ids"] for name, text in read_prompts().items()}


@pytest.fixture(scope="session")
def plain(demo_engine: Any) -> Callable[[list[int], int], list[int]]:
    """Plain decoding on the demo target, remembered."""
    return partial(plain_text, demo_engine)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of small random models, by family; `family:seed` gives another of FAMILIES."""
    from families import save_small  # which needs this file

    @cache
    def make(name: str) -> Path:
        family, _, seed = name.partition(":")
        folder = tmp_path_factory.mktemp(family)
        if family not in FAMILIES:
            save_small(family, folder)
            return folder
        torch.manual_seed(int(seed or 0))
        config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(TARGET).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def chat_folder(tiny_folder: Callable[[str], Path]) -> Callable[[str], Path]:
    """Folders of tiny random models with a chat template, which the embedded models have not."""

    def make(name: str) -> Path:
        folder = tiny_folder(f"{name}:0")  # another one than tiny_folder(name), which has no chat
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def gate(tmp_path: Path, tiny_folder: Callable[[str], Path]) -> Gate:
    """It holds up the server of a tiny model."""
    return Gate(tmp_path, tiny_folder("llama"))


@pytest.fixture
def failing_drafter(tmp_path: Path) -> tuple[str, str]:
    """The command line's words for a drafter of one's own, `fails`, that raises in each draft."""
    (tmp_path / "own.py").write_text("""
from drafters import Drafter
class Fails(Drafter):
    name = "fails"
    def propose(self, state, max_tokens):
        raise ValueError("on purpose")
""")
    return "--drafter", f"{tmp_path / 'own.py'}:Fails"


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set the number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def before(thing: Any, method: str, do: Callable[..., Any]) -> None:
    """From now on each call of the method is preceded by a call of `do` with the same."""
    inner = getattr(thing, method)
    setattr(thing, method, lambda *arguments: (do(*arguments), inner(*arguments))[1])


class Numbers(Noise):
    """In the place of noise: one number accepts or rejects each draft, and the last one draws."""

    def __init__(self, numbers: list[float]) -> None:
        *self.accepting, self.drawing = numbers

    def uniform(self, position: int, use: int) -> float:
        return self.accepting[position] if use == self.ACCEPT else self.drawing


def credulous(draft: Any, choice_after: Callable[[int], int]) -> tuple[list[Any], list[int]]:
    """In the place of `verify`: everything is accepted."""
    tokens, count = [core.Judgement(token, "accepted") for token in draft.tokens], len(draft.tokens)
    return [*tokens, core.Judgement(choice_after(count - 1), "bonus")], list(range(count))


def judge(draft: Any, p: torch.Tensor, numbers: list[float]) -> Any:
    """What the rule of rejection makes of a draft if these are the numbers from [0, 1)."""
    assert len(numbers) == len(draft.tokens) + 1
    return core.verify_by_rejection(draft, p, Numbers(numbers), 0)


def probabilities(scores: torch.Tensor, sampling: Any) -> torch.Tensor:
    """p [n, V] of penalised logits [n, V]; greedy is the limit of low temperature, one-hot."""
    if sampling.is_greedy:
        return torch.zeros_like(scores).scatter_(1, scores.argmax(-1, keepdim=True), 1.0)
    return truncated_softmax(scores, *sampling.transforms)


def make_exact(target: Any) -> bool:
    """Whether its bits are equal, as far as it is seen at start."""
    target.report = start.report_of(target)
    return target.report.is_exact


@contextmanager
def only_modules() -> Iterator[None]:
    """Models that are loaded meanwhile run in transformers' modules, with the kernels' sums."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(start, "decoder_of", lambda *_: None)
        yield


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampling": core.Sampling(temperature=0.9, top_p=0.95), "seed": 5},
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How tokens are chosen: what holds for greedy text holds for the text of a seed, too."""
    return WAYS[request.param]


@contextmanager
def application(engine: Any, options: Options) -> Iterator[Any]:
    """A client of the server's application on an engine, in this process and without a socket."""
    app = core.create_app(Service(engine, options))
    yield app.test_client()
    app.extensions["worker"].drain(LIMIT_S)


def module_client(**options: Any) -> Any:
    """A fixture: a client for the tests of a module, of a tiny model that all routes can serve."""

    @pytest.fixture(scope="module")
    def client(chat_folder: Callable[[str], Path]) -> Iterator[Any]:
        chosen = Options(str(chat_folder("llama")), **options)
        with application(core.load_engine(chosen), chosen) as client:
            yield client

    return client


def asked(client: Any, route: str, prompt: Any = "x = 1", **fields: Any) -> tuple[int, Any]:
    """(status, body) that an application answers a route; of a stream its events are the body."""
    turns = {"messages": [{"role": "user", "content": prompt}]}
    answer = client.post(route, json=(turns if route == CHAT else {"prompt": prompt}) | fields)
    is_stream = answer.mimetype == "text/event-stream"
    return answer.status_code, events_of(answer.data) if is_stream else answer.json


def closed(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has all these properties, and no others."""
    known = {"type": "object", "properties": properties, "required": [*properties]}
    return known | {"additionalProperties": False}


def grammar_of(engine: Any, kind: str, value: Any) -> Any:
    """A grammar as the server builds it."""
    target = engine.target
    words = target.tokenizer, target.vocab_size, frozenset(target.eos_ids)
    return vocabulary_of(*words).compiled(source_of(kind, value))


def assemble(options):
    """An engine of the core's classes that was neither checked nor run yet."""
    return assembly.assemble_engine(options)


def load(model: Any, **options: Any) -> Any:
    """An engine that is checked; ngram drafts a fixed K if no option says else."""
    named = {name: str(o) if isinstance(o, Path) else o for name, o in options.items()}
    return core.load_engine(Options(str(model), **{"drafter": "ngram", "fixed_k": True} | named))


@contextmanager
def open_rows(target: Any, *texts: list[int]) -> Iterator[list[int]]:
    """Rows of the target's cache that have read these texts; they are closed in the end."""
    rows = [target.cache.open_row() for _ in texts]
    try:
        for row, text in zip(rows, texts, strict=True):
            if text:
                target.forward([row], [text], [1])
        yield rows
    finally:
        for row in rows:
            target.cache.close_row(row)


def read(target: Any, row: int, tokens: list[int]) -> torch.Tensor:
    """Let a row read more tokens at once: the logits [t, V] of all of them."""
    return target.forward([row], [tokens], [len(tokens)]).logits[0]


def logits_of(target: Any, text: list[int]) -> torch.Tensor:
    """Logits [t, V] of a text that is read at once, alone."""
    with open_rows(target, []) as (row,):
        return read(target, row, text)


def run(engine: Any, prompt: list[int], **fields: Any) -> tuple[Any, list[dict[str, Any]]]:
    """One request to its end, as the worker runs it: the finished sequence and its events."""
    sequence, events = engine.open(Request(prompt, **fields)), []
    try:
        while sequence.finish_reason is None:
            for cycle in retry.step(engine, [sequence]).values():
                events.append(trace.summary(cycle) | event(sequence, cycle))
        if sequence.failure:
            raise sequence.failure
    finally:
        engine.close(sequence)
    return sequence, events


def finish(engine: Any, sequences: list[Any]) -> list[Any]:
    """Step all of them to their ends, and give back what they hold."""
    while running := [s for s in sequences if not s.finish_reason]:
        retry.step(engine, running)
    for sequence in sequences:
        engine.close(sequence)
    return sequences


def finished(sequence, events=()):
    """The run of a sequence that has ended, as the answers take it."""
    return Run(sequence.request, 0, sequence, [*events])


def together(engine: Any, requests: list[Any]) -> list[Any]:
    """Run these requests side by side to their ends; their sequences."""
    return finish(engine, [engine.open(request) for request in requests])


def failing(engine: Any, monkeypatch: Any, fails: Callable[[int, list[int]], bool]) -> None:
    """The target's forward raises where fails(which call it is, num_logits), its work done."""
    forward, calls = engine.target.forward, itertools.count()

    def faulty(rows: Any, tokens: Any, num_logits: list[int], *given: Any, **named: Any) -> Any:
        output = forward(rows, tokens, num_logits, *given, **named)
        if fails(next(calls), num_logits):
            raise RuntimeError("out of memory")
        return output

    monkeypatch.setattr(engine.target, "forward", faulty)


_TEXTS: WeakKeyDictionary[Any, dict[Any, list[int]]] = WeakKeyDictionary()


def plain_text(engine: Any, prompt: list[int], max_tokens: int, **way: Any) -> list[int]:
    """What plain decoding writes, remembered for as long as the target is there."""
    known = _TEXTS.setdefault(engine.target, {})
    key = str((prompt, max_tokens, engine.eos_ids, way))
    if key not in known:
        given = engine.target, prompt, max_tokens, engine.eos_ids
        known[key] = core.plain_decode(*given, **way)
    return [*known[key]]


def assert_lossless(
    engine: Any, prompt: list[int], max_tokens: int, drafter: str, **fields: Any
) -> Any:
    """One request, whose text has to be plain decoding's; the finished sequence."""
    sequence, _ = run(engine, prompt, max_tokens=max_tokens, drafter=drafter, **fields)
    way = {name: fields[name] for name in ("sampling", "seed") if name in fields}
    assert sequence.output == plain_text(engine, prompt, max_tokens, **way), drafter
    return sequence


def decoded_by(
    rule: Callable[[torch.Tensor, list[int]], torch.Tensor],
    is_end: Callable[[int], bool],
    target: Any,
    prompt: list[int],
    max_tokens: int,
    sampling: Any,
    seed: int = 3,
) -> list[int]:
    """Plain decoding by the scores [V] that a test's own rule makes of logits [V] and an output."""
    noise, fed, output = Noise(seed), prompt, list[int]()
    with open_rows(target, []) as rows:
        while len(output) < max_tokens:
            scores = rule(target.forward(rows, [fed], [1]).logits[0][0], output)
            fed = [core.choose(scores, sampling, noise, len(prompt) + len(output))]
            output += fed
            if is_end(*fed):
                break
    return output


GREEDY = core.Sampling()


def fresh_state(
    engine: Any, drafter: Any, tokens: list[int], sampling: Any = GREEDY, noise: Any = None
) -> Any:
    """A drafter's state on a text, a prompt and its first token, that it has seen no draft of."""
    target = engine.target
    row, state = target.cache.open_row(), drafter.open(tokens[:-1], sampling, noise)
    output = target.forward([row], [tokens[:-1]], [1], tuple(sorted(set(drafter.hidden_layers))))
    hidden = None
    if drafter.needs_hidden:
        hidden = torch.cat([output.hidden[layer][0] for layer in drafter.hidden_layers], -1)
    drafter.observe(state, Verdict(0, 0, tokens[-1:], hidden))
    target.cache.close_row(row)
    return state


def propose_and_close(drafter: Any, states: list[Any], limits: list[int]) -> list[list[int]]:
    """The tokens that a drafter proposes for these states, which end then."""
    drafts = drafter.propose_batch(states, limits)
    for state in states:
        drafter.close(state)
    return [draft.tokens for draft in drafts]


def run_beside_fresh(engine: Any, request: Request, *others: Request) -> tuple[Any, list[Any]]:
    """A request to its end, with others in its batch; and its cycles.

    Each draft of each request is that of a state that has seen none and is asked alone.
    """
    cycles, running = [], [engine.open(each) for each in (request, *others)]
    first = running[0]
    while running:
        before = [(s, limit_of(s), list(s.tokens)) for s in running]
        begun = [(s, n) for s, n, _ in before if s.matcher and len(s.drafting.states) > 1]
        forced = {s: s.matcher.forced(limit) for s, limit in begun}
        came = engine.step(running)
        cycles += [came[first]] if first in came else []
        for s, limit, tokens in before:
            drafts = s.drafting.drafts if limit and s in came else {}
            for name, draft in drafts.items():
                drafter, begin = engine.pool.drafters[name], forced.get(s)
                if drafter.drafts_forced or (begin and not drafter.accepts_forced_prefix):
                    continue
                state = fresh_state(engine, drafter, tokens, s.request.sampling, s.noise)
                if drafter.branches:
                    state.tree = TreeBuilder if len(drafts) > 1 else None
                if begin:
                    state.forced = begin
                    assert draft.tokens[: len(begin)] == begin[: len(draft.tokens)], name
                assert propose_and_close(drafter, [state], [limit]) == [draft.tokens], name
        for s in [s for s in running if s.finish_reason]:
            engine.close(s)
            running.remove(s)
    return first, cycles


Script = Callable[[list[int], int], list[int]]


class ScriptedDrafter(Drafter):
    """Proposes by a function of (tokens so far, limit); what it observes is kept for the test."""

    name = "scripted"

    def __init__(self, script: Script, probs: Callable[..., Any] | None = None) -> None:
        self.script, self.probs = script, probs
        self.verdicts: list[Any] = []
        self.num_open = 0

    def open(self, prompt: Any, sampling: Any, noise: Any) -> list[int]:
        self.num_open += 1
        return list(prompt)

    def propose(self, state: list[int], max_tokens: int) -> Any:
        probs = self.probs(state, max_tokens) if self.probs else None
        return core.Draft(self.script(state, max_tokens), probs)

    def observe(self, state: list[int], verdict: Any) -> None:
        self.verdicts.append(verdict)
        super().observe(state, verdict)

    def close(self, state: list[int]) -> None:
        self.num_open -= 1


def scripted_engine(engine: Any, script: Script, probs: Callable[..., Any] | None = None) -> Any:
    """The engine's target with a scripted drafter of its own, which may claim probs."""
    return core.Engine(engine.target, {"scripted": ScriptedDrafter(script, probs)}, "scripted")


# --------------------------------------------------------------------------- faults on purpose
class Mutant(NamedTuple):
    """A fault of mutants.txt: `old` becomes `new` in a function `path` of a module."""

    name: str
    tests: list[str]  # that notice it
    module: str
    path: str
    old: str
    new: str


def mutants() -> list[Mutant]:
    """The faults of mutants.txt, in its order."""
    lines = (ROOT / "tests" / "mutants.txt").read_text("utf-8").splitlines()
    lines, found = [line for line in lines if line and not line.startswith("#")], list[Mutant]()
    for fault, change in zip(lines[::2], lines[1::2], strict=True):
        name, *tests = fault.split(" | ")
        place, code = change.strip().replace("\\n", "\n").split(" | ", 1)
        old, new = code.split(" →", 1)
        where = place.replace("core:", "08_speculative_decoding:").split(":")
        found.append(Mutant(name, tests, *where, old, new.removeprefix(" ")))
    return found
