"""One contract for all drafters, and what is particular to each."""

import json
import random
import re
import sys
import threading
import time

import pytest
import speculative_decoding as core
import torch
from conftest import ROOT, WAYS, run, scripted_engine
from transformers import AutoModelForCausalLM, AutoTokenizer

import drafters
import messages
from drafters.ngram import NgramDrafter, NgramIndex
from drafters.timed import TimedDrafter
from serving import faults

DRAFTERS = ("ngram", "draft_model", "mtp")
GREEDY = core.Sampling()


@pytest.fixture(scope="module", params=DRAFTERS)
def name(request):
    return request.param


# ---------------------------------------------------------------------------- the contract of all


def test_drafts_are_known_ids_and_no_more_than_asked_for(demo_engine, prompts, name):
    for k in (1, 3, 8):
        sequence, events = run(
            demo_engine,
            prompts["repetitive_colours"],
            max_tokens=30,
            drafter=name,
            num_speculative_tokens=k,
        )
        assert sequence.seat.warnings == []
        assert any(event["proposals"] for event in events)
        for event in events:
            assert len(event["proposals"]) <= k
            assert all(0 <= token < 4096 for token in event["proposals"])


def proposals_of_a_fresh_state(engine, drafter, tokens, limit, sampling=GREEDY, noise=None):
    """What the drafter proposes for `tokens` when it has seen no draft before."""
    target = engine.target
    row = target.cache.open_row()
    state = drafter.open(tokens[:-1], sampling, noise)
    output = target.forward([row], [tokens[:-1]], [1], drafter.hidden_layers)
    hidden = output.hidden[-1][0] if drafter.needs_hidden else None
    drafter.observe(state, messages.Verdict(0, 0, tokens[-1:], hidden))
    proposed = drafter.propose(state, limit).tokens
    drafter.close(state)
    target.cache.close_row(row)
    return proposed


REPLAYED = ("repetitive_counting", "code_class", "hard_story", "easy_facts", "hard_docs")


def replay_differences(engine, prompts, name, sampling=GREEDY, k=4):
    """Cycles in which a used state and a fresh one on the same text propose different tokens."""
    drafter = engine.panel.drafters[name]
    compared = differences = 0
    for prompt in REPLAYED:
        sequence = engine.open(core.Request(prompts[prompt], 40, name, k, sampling=sampling))
        while sequence.finish_reason is None:
            limit = min(k, sequence.remaining - 1)
            tokens = list(sequence.tokens)
            cycle = engine.step([sequence])[sequence]
            if cycle.number and limit:
                fresh = proposals_of_a_fresh_state(
                    engine, drafter, tokens, limit, sampling, sequence.noise
                )
                compared += 1
                differences += fresh != cycle.proposals
        engine.close(sequence)
    assert compared > 25
    return differences


@pytest.mark.parametrize("sampling", [GREEDY, core.Sampling(1.2, 1.0, 50)], ids=str)
def test_a_rolled_back_state_proposes_like_a_fresh_one(demo_engine, prompts, name, sampling):
    assert replay_differences(demo_engine, prompts, name, sampling) == 0


@pytest.mark.parametrize("name_", ["draft_model", "mtp"])
def test_the_replay_test_notices_a_missing_rollback(demo_engine, prompts, monkeypatch, name_):
    """A test of the test above: without truncation in the drafter's cache it must fail."""
    drafter = demo_engine.panel.drafters[name_]
    cache = drafter._draft.cache if name_ == "draft_model" else drafter._cache
    monkeypatch.setattr(cache, "truncate", lambda row, length: None)
    assert replay_differences(demo_engine, prompts, name_) > 0


def test_a_batch_of_states_proposes_like_each_alone(demo_engine, prompts, name):
    """Unequal texts, unequal limits, one of them 0 while the engine leaves that request out."""
    drafter, target = demo_engine.panel.drafters[name], demo_engine.target
    texts = [prompts[p] for p in ("repetitive_letters", "code_function", "hard_prose")]
    limits = [3, 1, 6]
    alone = [
        proposals_of_a_fresh_state(demo_engine, drafter, text, limit)
        for text, limit in zip(texts, limits, strict=True)
    ]
    states = []
    for text in texts:
        row = target.cache.open_row()
        state = drafter.open(text[:-1], GREEDY, core.Noise(0))
        output = target.forward([row], [text[:-1]], [1], drafter.hidden_layers)
        hidden = output.hidden[-1][0] if drafter.needs_hidden else None
        drafter.observe(state, messages.Verdict(0, 0, text[-1:], hidden))
        target.cache.close_row(row)
        states.append(state)
    together = [draft.tokens for draft in drafter.propose_batch(states, limits)]
    for state in states:
        drafter.close(state)
    assert together == alone


def test_every_row_is_given_back(demo_engine, prompts, name):
    caches = [demo_engine.target.cache]
    caches += [getattr(demo_engine.panel.drafters["draft_model"], "_draft").cache]  # noqa: B009
    caches += [demo_engine.panel.drafters["mtp"]._cache]
    free = [len(cache._free) for cache in caches]
    generation = demo_engine.generate(core.Request(prompts["code_class"], 30, name))
    next(generation)
    next(generation)
    generation.close()  # the client left
    run(demo_engine, prompts["code_class"], max_tokens=8, drafter=name)
    assert [len(cache._free) for cache in caches] == free


@pytest.mark.parametrize("name_", ["draft_model", "mtp"])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_draft_knows_the_repetition_penalty_and_its_own_tokens(
    demo_engine, prompts, name_, temperature
):
    """Under a penalty that forbids any repetition no token is drafted twice."""
    sampling = core.Sampling(repetition_penalty=100.0, temperature=temperature)
    for prompt in ("repetitive_letters", "code_class"):
        sequence, events = run(
            demo_engine, prompts[prompt], max_tokens=20, drafter=name_, sampling=sampling
        )
        text = list(prompts[prompt])
        for event in events:
            assert len(set(event["proposals"])) == len(event["proposals"])
            assert not set(event["proposals"]) & set(text)
            text += [token["id"] for token in event["tokens"]]
        assert sequence.statistics.num_draft_tokens > 5


def test_the_q_that_is_handed_over_is_the_draft_model_s_own(
    demo_engine, reference, prompts, monkeypatch
):
    """Row by row against a forward of the draft model over the whole text, without cache."""
    drafter, handed = demo_engine.panel.drafters["draft_model"], []
    propose = drafter.propose_batch

    def spy(states, limits):
        drafts = propose(states, limits)
        handed.append((list(states[0].tokens), drafts[0]))
        return drafts

    monkeypatch.setattr(drafter, "propose_batch", spy)
    sampling = core.Sampling(1.3, 0.9, 30, 0.95, verification="rejection")
    run(demo_engine, prompts["code_class"], max_tokens=24, drafter="draft_model", sampling=sampling)
    assert len(handed) > 3
    small = reference(core.ROOT / "demo_models" / "draft")
    for text, draft in handed:
        with torch.inference_mode():
            logits = small(torch.tensor([text + draft.tokens])).logits[0]
        for i, q in enumerate(draft.probs):
            known = text + draft.tokens[:i]
            scores = core.penalise(logits[None, len(known) - 1], 1.3, known, [])
            torch.testing.assert_close(
                q, core.probabilities(scores, sampling)[0], rtol=0, atol=1e-4
            )


# ------------------------------------------------------------------------------- faults of drafters


def raising(tokens, limit):
    raise RuntimeError("out of ideas\nand of lines")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (raising, "out of ideas and of lines"),
        (lambda tokens, limit: [4096], "proposed 4096"),
        (lambda tokens, limit: [-1], "proposed -1"),
        (lambda tokens, limit: ["a"], "proposed 'a'"),
        (lambda tokens, limit: [5] * (limit + 1), "tokens proposed"),
        (lambda tokens, limit: None, "NoneType"),
        (lambda tokens, limit: (5, 6), "proposed a tuple"),
    ],
)
def test_a_drafter_that_fails_costs_its_request_the_speculation_never_the_answer(
    demo_engine, prompts, plain, script, reason
):
    engine = scripted_engine(demo_engine, script)
    sequence, _ = run(engine, prompts["easy_json"], max_tokens=20, drafter="scripted")
    assert sequence.output == plain(prompts["easy_json"], 20)
    assert len(sequence.seat.warnings) == 1 and reason in sequence.seat.warnings[0]
    assert engine.panel.num_failures == 1
    assert engine.panel.drafters["scripted"].num_open == 0


def test_fewer_drafts_than_requests_cost_the_drafter(demo_engine, prompts, plain):
    engine = scripted_engine(demo_engine, lambda tokens, limit: [])
    engine.panel.drafters["scripted"].propose_batch = lambda states, limits: []
    sequence, _ = run(engine, prompts["easy_json"], max_tokens=12, drafter="scripted")
    assert sequence.output == plain(prompts["easy_json"], 12)
    assert (
        len(sequence.seat.warnings) == 1 and "0 drafts for 1 requests" in sequence.seat.warnings[0]
    )


def uniform(tokens, limit, vocab=4096):
    return torch.full((limit, vocab), 1 / vocab)


@pytest.mark.parametrize(
    ("probs", "reason"),
    [
        (lambda tokens, limit: uniform(tokens, limit + 1), "probs of shape [6, 4096] for 5 tokens"),
        (lambda tokens, limit: uniform(tokens, limit, 4000), "probs of shape [5, 4000]"),
        (lambda tokens, limit: uniform(tokens, limit)[0], "probs of shape [4096]"),
        (lambda tokens, limit: uniform(tokens, limit) * 2, "probs are no distributions"),
        (lambda tokens, limit: uniform(tokens, limit) * torch.nan, "probs are no distributions"),
        (lambda tokens, limit: -uniform(tokens, limit), "probs are no distributions"),
        (lambda tokens, limit: uniform(tokens, limit).index_copy_(
            1, torch.tensor([0, 1]), torch.tensor([[-1.0, 1 + 2 / 4096]] * limit)),
         "probs are no distributions"),
        (lambda tokens, limit: uniform(tokens, limit).index_fill_(1, torch.tensor([7]), 0),
         "probs are no distributions that the tokens can be drawn from"),
        (lambda tokens, limit: uniform(tokens, limit).tolist(), "'list' object has no attribute"),
    ],
)  # fmt: skip
def test_probs_that_cannot_be_are_a_failure_of_the_drafter_where_they_are_read(
    demo_engine, prompts, plain, probs, reason
):
    """Proposes token 7 with a q that it cannot have been drawn from."""
    engine = scripted_engine(demo_engine, lambda tokens, limit: [7] * limit, probs)
    prompt, given = prompts["easy_json"], {"max_tokens": 12, "drafter": "scripted"}
    rejection = core.Sampling(temperature=1.0, verification="rejection")
    sequence, _ = run(engine, prompt, **given, sampling=rejection)
    assert len(sequence.output) == 12
    assert len(sequence.seat.warnings) == 1 and reason in sequence.seat.warnings[0]
    for way in WAYS.values():  # nothing that a drafter says of its chances counts here
        sequence, _ = run(engine, prompt, **given, **way)
        assert sequence.output == plain(prompt, 12, **way) and sequence.seat.warnings == []


def test_a_drafter_s_honest_probs_are_taken(demo_engine, prompts, plain):
    """Also in another precision, and in greedy decoding, where the target's argmax decides."""
    for script in (uniform, lambda tokens, limit: uniform(tokens, limit).double()):
        engine = scripted_engine(demo_engine, lambda tokens, limit: [7] * limit, script)
        sequence, _ = run(engine, prompts["easy_json"], max_tokens=12, drafter="scripted")
        assert sequence.seat.warnings == []
        assert sequence.output == plain(prompts["easy_json"], 12)


@pytest.mark.parametrize("method", ["open", "observe", "close"])
def test_a_drafter_may_fail_anywhere(demo_engine, prompts, plain, monkeypatch, method):
    engine = scripted_engine(demo_engine, lambda tokens, limit: tokens[-limit:])

    def fail(*args):
        raise KeyError(method)

    monkeypatch.setattr(engine.panel.drafters["scripted"], method, fail)
    sequence, _ = run(engine, prompts["easy_json"], max_tokens=20, drafter="scripted")
    assert sequence.output == plain(prompts["easy_json"], 20)
    assert method in sequence.seat.warnings[0]


# ------------------------------------------------------------------------ a drafter's limit of time


class Unruly(core.Drafter):
    """Does as its state says; "block" waits outside of Python."""

    name = "unruly"

    def __init__(self):
        self.may_go_on, self.closed = threading.Event(), []

    def propose(self, state, max_tokens):
        end = time.monotonic() + 20
        while state == "loop" and time.monotonic() < end:
            pass
        if state == "block":
            self.may_go_on.wait(20)
        if state == "exit":
            sys.exit("enough")
        return core.Draft([max_tokens])

    def close(self, state):
        self.closed.append(state)


def test_a_loop_in_a_drafter_is_ended():
    drafter = TimedDrafter(Unruly(), 0.5)
    thread = drafter._thread
    with pytest.raises(TimeoutError, match="propose did not return within 0.5 s"):
        drafter.propose("loop", 3)
    thread.join(10)
    assert not thread.is_alive()
    assert drafter.propose("", 3).tokens == [3]


def test_a_drafter_that_blocks_is_left_alone_until_it_returns():
    inner = Unruly()
    drafter = TimedDrafter(inner, 0.5)
    thread = drafter._thread
    with pytest.raises(TimeoutError, match="propose did not return within 0.5 s"):
        drafter.propose("block", 3)
    with pytest.raises(TimeoutError, match="still busy with an earlier call"):
        drafter.propose("", 3)
    drafter.close("one")  # another request ends meanwhile
    assert inner.closed == []
    inner.may_go_on.set()
    thread.join(10)
    assert drafter.propose("", 3).tokens == [3] and inner.closed == ["one"]


def test_an_exit_in_a_drafter_is_an_error_like_any_other():
    drafter = TimedDrafter(Unruly(), 10.0)
    with pytest.raises(RuntimeError, match="SystemExit: enough"):
        drafter.propose("exit", 3)
    assert drafter.propose("", 3).tokens == [3]


# --------------------------------------------------------------------------------------- n-gram


def brute_force(tokens, smallest, largest, limit):
    """The longest suffix that stands earlier too, its latest place, read on into itself."""
    for size in range(min(largest, len(tokens)), smallest - 1, -1):
        for start in range(len(tokens) - 1, size - 1, -1):
            if tokens[start - size : start] == tokens[-size:]:
                grown = list(tokens)
                for i in range(limit):
                    grown.append(grown[start + i])
                return grown[len(tokens) :]
    return []


def test_the_index_agrees_with_a_brute_force_search():
    chance = random.Random(0)
    for _ in range(300):
        smallest = chance.randint(1, 3)
        largest = smallest + chance.randint(0, 3)
        index, tokens = NgramIndex(smallest, largest), []
        for _ in range(chance.randint(1, 12)):
            new = [chance.randrange(4) for _ in range(chance.randint(1, 5))]
            tokens += new
            index.extend(new)
            limit = chance.randint(1, 8)
            expected = brute_force(tokens, smallest, largest, limit)
            assert index.continuation(limit) == expected


def test_a_draft_reads_on_into_itself_in_periodic_text():
    index = NgramIndex(1, 3)
    index.extend([1, 2, 3, 1, 2])
    assert index.continuation(7) == [3, 1, 2, 3, 1, 2, 3]


def test_a_lookup_does_not_slow_down_with_the_text():
    """Work, not time: at 100 times the text a lookup reads no more of it."""

    class Counting(list):
        reads = 0

        def __getitem__(self, item):
            Counting.reads += 1
            return super().__getitem__(item)

    counts = []
    for length in (1_000, 100_000):
        index = NgramIndex(2, 4)
        chance = random.Random(1)
        index.extend([chance.randrange(50) for _ in range(length)])
        index.tokens = Counting(index.tokens)
        Counting.reads = 0
        for _ in range(20):
            index.continuation(8)
        counts.append(Counting.reads)
    assert counts[1] <= counts[0] + 20 * 3


def test_impossible_lookup_sizes_are_refused():
    with pytest.raises(ValueError, match=r"prompt_lookup_min \(3\) must be at least 1 and at most"):
        NgramDrafter(prompt_lookup_max=2, prompt_lookup_min=3)


# ------------------------------------------------------------------------------ loading and fitting


def context(engine):
    return drafters.Context(engine.target, core.sample, num_rows=8)


def test_an_unknown_name_is_told_the_choices(demo_engine):
    with pytest.raises(ValueError, match="choose ngram, draft_model, mtp, auto or file.py:Class"):
        drafters.load("telepathy", context(demo_engine))


@pytest.mark.parametrize(
    ("text", "name_", "message"),
    [
        (None, "nowhere.py:Mine", "not found"),
        ("x = 1\n", "mine.py:Mine", "has no Drafter class 'Mine'"),
        ("class Mine: pass\n", "mine.py:Mine", "has no Drafter class 'Mine'"),
        ("def broken(:\n", "mine.py:Mine", "failed to load"),
    ],
)
def test_a_drafter_file_that_will_not_do_is_one_clear_line(
    demo_engine, tmp_path, monkeypatch, text, name_, message
):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        drafters.load(name_, context(demo_engine))


def test_a_batch_that_fails_costs_every_request_in_it_its_drafter(demo_engine, prompts, plain):
    engine = scripted_engine(demo_engine, raising)
    sequences = [engine.open(core.Request(prompts[p], 12, "scripted")) for p in REPLAYED[:2]]
    running = sequences
    while running:
        faults.step(engine, running)
        running = [s for s in running if s.finish_reason is None]
    for sequence, name_ in zip(sequences, REPLAYED, strict=False):
        engine.close(sequence)
        assert sequence.output == plain(prompts[name_], 12)
        assert "out of ideas" in sequence.seat.warnings[0]
    assert engine.panel.num_failures == 2 and engine.panel.drafters["scripted"].num_open == 0


def test_one_bad_draft_in_a_batch_costs_only_its_own_request(demo_engine, prompts, plain):
    good, bad = prompts["easy_json"], prompts["hard_prose"]
    engine = scripted_engine(
        demo_engine, lambda tokens, n: [-1] if tokens[: len(bad)] == bad else tokens[-n:]
    )
    sequences = [engine.open(core.Request(p, 12, "scripted")) for p in (good, bad)]
    running = sequences
    while running:
        faults.step(engine, running)
        running = [s for s in running if s.finish_reason is None]
    for sequence, prompt in zip(sequences, (good, bad), strict=True):
        assert sequence.output == plain(prompt, 12)
        assert bool(sequence.seat.warnings) == (prompt is bad)
        engine.close(sequence)


OWN = """
from __future__ import annotations
from dataclasses import dataclass
from drafters import Draft, Drafter
from drafters.ngram import NgramDrafter

@dataclass
class State:
    tokens: list[int]

class Inherits(NgramDrafter):
    def propose(self, state, max_tokens):
        return Draft([7])

class Taken(Drafter):
    name = "ngram"
    def propose(self, state, max_tokens):
        return Draft()

class Unfinished(Drafter):
    pass

class Raises(Inherits):
    @classmethod
    def build(cls, context):
        raise RuntimeError("no luck")
"""


def test_a_drafter_of_one_s_own_is_the_one_that_runs(demo_engine, prompts, tmp_path):
    """Also one that inherits from a built-in drafter, whose name it must not take over."""
    (tmp_path / "own.py").write_text(OWN)
    engine = core.load_engine(core.Options(drafter=f"{tmp_path}/own.py:Inherits", fixed_k=True))
    assert engine.default_drafter == "Inherits"
    _, events = run(engine, prompts["easy_json"], max_tokens=10, drafter="Inherits")
    assert all(event["proposals"] == [7] for event in events[1:-1])


@pytest.mark.parametrize(
    ("name_", "message"),
    [
        ("Taken", "the name 'ngram' is taken"),
        ("Unfinished", "failed to start: Can't instantiate abstract class"),
        ("Raises", "failed to start: no luck"),
    ],
)
def test_a_drafter_of_one_s_own_that_cannot_start_is_one_clear_line(name_, message, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(core.StartError, match=message):
        core.load_engine(core.Options(drafter=f"{tmp_path}/own.py:{name_}"))


def test_the_readme_s_own_drafter_loads_by_path_and_is_lossless(
    demo_engine, prompts, plain, tmp_path
):
    readme = (ROOT / "README.md").read_text("utf-8")
    source = re.search(r"```python\n(.*?class \w+\(Drafter\).*?)```", readme, re.DOTALL).group(1)
    assert len(source.strip().splitlines()) <= 16
    (tmp_path / "mine.py").write_text(source)
    class_name = re.search(r"class (\w+)\(Drafter\)", source).group(1)
    own = drafters.load(f"{tmp_path}/mine.py:{class_name}", context(demo_engine))
    engine = core.Engine(demo_engine.target, {own.name: own}, own.name)
    sequence, _ = run(engine, prompts["repetitive_colours"], max_tokens=40, drafter=own.name)
    assert sequence.output == plain(prompts["repetitive_colours"], 40)
    assert sequence.seat.warnings == []
    assert sequence.statistics.num_accepted_draft_tokens > 10


def test_a_draft_model_with_another_tokenizer_is_refused_at_start(demo_engine, tiny_folder):
    folder = tiny_folder("llama:7")
    tokenizer = core.load_model(str(folder), core.Options()).tokenizer
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(folder)
    options = core.Options(draft_model=str(folder))
    with pytest.raises(
        core.StartError, match="different tokenizers .* give a --draft-model of the"
    ):
        core.load_engine(options)


def test_equal_size_is_not_an_equal_vocabulary(tiny_folder):
    """Two tokens have changed places; ids are then other words to the draft model."""
    folder = tiny_folder("llama:8")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    vocab = tokenizer["model"]["vocab"]
    words = {i: word for word, i in vocab.items()}
    vocab[words[300]], vocab[words[301]] = 301, 300
    path.write_text(json.dumps(tokenizer), "utf-8")
    with pytest.raises(core.StartError, match="only one of them has .* as id 300"):
        core.load_engine(core.Options(draft_model=str(folder)))


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(4096, 4160), (4160, 4096)])
def test_padded_embeddings_are_no_mismatch(tiny_folder, tmp_path, target_rows, draft_rows):
    """Either model may have rows that no token uses; q is as wide as the target either way."""
    folders = []
    for name, rows in (("llama:1", target_rows), ("qwen3:2", draft_rows)):
        model = AutoModelForCausalLM.from_pretrained(tiny_folder(name))
        model.resize_token_embeddings(rows, mean_resizing=False)
        folders.append(tmp_path / name.replace(":", "_"))
        model.save_pretrained(folders[-1])
        AutoTokenizer.from_pretrained(tiny_folder(name)).save_pretrained(folders[-1])
    target, draft = map(str, folders)
    options = core.Options(model=target, draft_model=draft, drafter="draft_model", fixed_k=True)
    engine = core.load_engine(options)
    prompt = [5, 6, 7, 5, 6]
    greedy, _ = run(engine, prompt, max_tokens=30, drafter="draft_model")
    assert greedy.output == core.plain_decode(engine.target, prompt, 30, engine.eos_ids)
    sampled, _ = run(
        engine, prompt, max_tokens=30, drafter="draft_model",
        sampling=core.Sampling(temperature=1.3),
    )  # fmt: skip
    assert greedy.seat.warnings == sampled.seat.warnings == []
    assert sampled.statistics.num_draft_tokens > 10
    if target_rows > draft_rows:  # an id that the draft model cannot read costs that request alone
        sequences = [
            engine.open(core.Request([5, start, 6], 12, "draft_model")) for start in (4150, 7)
        ]
        while all(sequence.finish_reason is None for sequence in sequences):
            faults.step(engine, sequences)
        assert [s.statistics.num_draft_tokens > 0 for s in sequences] == [False, True]
        assert all(s.seat.warnings == [] for s in sequences)
        for sequence in sequences:
            engine.close(sequence)


def test_a_target_without_an_mtp_head_is_refused_at_start(tiny_folder):
    options = core.Options(model=str(tiny_folder("qwen3")), drafter="mtp")
    with pytest.raises(core.StartError, match="has no MTP head .* use --drafter ngram"):
        core.load_engine(options)


def test_a_draft_model_shorter_than_the_target_s_context_is_refused(tiny_folder):
    options = core.Options(draft_model=str(tiny_folder("llama:2")))
    with pytest.raises(core.StartError, match="give --max-model-len 256 or less"):
        core.load_engine(options)


def test_the_mtp_head_is_the_one_that_transformers_loads(demo_engine, demo_reference):
    """Position by position: our recursion's first draft equals MtpModel.forward's."""
    from transformers.modeling_layers import MtpModel

    target = demo_engine.target
    ids = target.tokenizer("def main(argv):\n    parser =")["input_ids"]
    drafter = demo_engine.panel.drafters["mtp"]
    ours = proposals_of_a_fresh_state(demo_engine, drafter, ids, 1)
    head = MtpModel.from_pretrained(demo_reference)
    with torch.inference_mode():
        hidden = demo_reference.model(torch.tensor([ids[:-1]])).last_hidden_state
        embeds = head.embed_tokens(torch.tensor([ids[1:]]))
        positions = torch.arange(1, len(ids))[None]
        mask = torch.full((len(ids) - 1,) * 2, float("-inf")).triu(1)[None, None]
        output = head.layers[0](
            embeds,
            hidden,
            position_embeddings=head.rotary_emb(embeds, positions, layer_type="full_attention"),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=None,
        )
        assert ours == [int(head.shared_head(output)[0, -1].argmax())]
