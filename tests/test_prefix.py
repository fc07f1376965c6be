"""A prompt that begins like an earlier one is not read from there again, and no bit differs.

Its drafters draft as if they had read it. What is remembered stays within its memory, and what
cannot be trusted is not remembered.
"""

import pytest
import torch
from conftest import WAYS, finished, run

from runtime.cache.prefix import PrefixCache
from runtime.values import Output
from server import answers, core, metrics
from server.options import Options
from server.worker import Worker

SHARED = torch.randint(4096, (560,), generator=torch.Generator().manual_seed(0)).tolist()
FIRST, SECOND = [*SHARED, 5, 6, 7], [*SHARED, 8, 9, 8, 9, 8]
MTP, SIZE = "mtp", 64
MOST = len(SHARED) // SIZE * SIZE  # of its tokens lie in whole blocks


@pytest.fixture
def engine(demo_engine):
    """The embedded target and its drafters, with an empty memory of prompts."""
    return with_prefixes(demo_engine)


def with_prefixes(engine, capacity_mb=64, **options):
    known, drafters = PrefixCache.of(engine.target, capacity_mb), engine.pool.drafters
    return core.Engine(engine.target, drafters, prefixes=known, **options)


def num_cached(engine, prompt, max_tokens=1, **fields):
    """How many tokens of a prompt need not be read."""
    return run(engine, prompt, max_tokens=max_tokens, **fields)[0].drafting.num_cached


@pytest.mark.parametrize(("drafter", "chunk", "way"), [
    (None, 256, "sampled"), ("draft_model", 256, "sampled"), (MTP, 100, "sampled"),
    ("auto", 256, "greedy"),
])  # fmt: skip
def test_a_chat_reads_each_token_once_bit_for_bit(demo_engine, drafter, chunk, way, monkeypatch):
    """And drafts are equal. A turn's last, incomplete block and its pending token are read again.

    In C a prompt's blocks run in another kernel than its end, and than what is generated.
    """
    engine, apart = (with_prefixes(demo_engine, size, prefill_chunk=chunk) for size in (64, 0))
    keeps_all, fed, forward = engine.target.report.is_exact, [], engine.target.forward

    def counted(rows, tokens, *rest, **options):
        fed.extend(tokens)
        return forward(rows, tokens, *rest, **options)

    fields = {"max_tokens": 30, "drafter": drafter, "logprobs": 2} | WAYS[way]
    prompt, held = SHARED[:400], 0
    for turn in range(4):
        prompt = prompt + FIRST[turn * 9 : turn * 9 + 30]
        expected, drafts = run(apart, prompt, **fields)
        with monkeypatch.context() as patched:
            patched.setattr(engine.target, "forward", counted)
            s, events = run(engine, prompt, **fields)
        assert s.output == expected.output and s.logprobs == expected.logprobs
        assert [e["proposals"] for e in events] == [e["proposals"] for e in drafts]
        assert s.drafting.num_cached == held // SIZE * SIZE and expected.drafting.num_cached == 0
        num_fed = len(prompt) - s.drafting.num_cached + len(events) - 1
        assert sum(map(len, fed)) == num_fed + sum(len(event["proposals"]) for event in events)
        fed.clear()
        held = len(s.tokens) - 1 if keeps_all else len(prompt)
        prompt = s.tokens
    assert held > 500


def test_only_what_is_shared_from_the_beginning_counts(engine):
    other = SHARED[::-1]
    for prompt in (FIRST, other):
        run(engine, prompt, max_tokens=1)
    for prompt, expected in (
        ([*other[:SIZE], *SHARED[SIZE:]], SIZE),
        (SHARED[1:], 0),
        ([*SHARED[: SIZE - 1], 1, *SHARED[SIZE:]], 0),
        ([*SHARED[: SIZE + 1], 1, 2, *SHARED], SIZE),
        (SHARED[: 2 * SIZE], SIZE),  # its last token has to be fed
        (FIRST, MOST),
    ):
        assert num_cached(engine, prompt, max_tokens=2) == expected
    assert engine.pool.prefixes.as_dict()["hit_tokens"] == 3 * SIZE + MOST


def test_a_head_waits_for_the_hidden_states_that_it_needs(engine):
    """Without them it would draft worse than after reading the prompt."""
    assert num_cached(engine, FIRST, isolated=True) == 0  # what is measured leaves nothing
    expected = (None, 0), ("ngram", MOST), (MTP, 0), (MTP, MOST), ("ngram", MOST)
    for name, count in expected:
        assert num_cached(engine, FIRST, max_tokens=4, drafter=name) == count
    assert num_cached(engine, FIRST, isolated=True) == 0  # and reads its prompt


def test_the_draft_model_remembers_its_own_keys(demo_engine):
    known = demo_engine.pool.drafters["draft_model"]._prefixes

    def num_found(begin, **fields):
        before = known.num_hits
        run(demo_engine, [begin, *SHARED], max_tokens=8, drafter="draft_model", **fields)
        return known.num_hits - before

    num_found(7)
    assert num_found(7) > 256
    # By this rule drafts decide the text, and their roundings with them.
    assert num_found(7, sampling=core.Sampling(1, 1, verification="rejection")) == 0
    # What is measured, again and again, reads its prompt and leaves nothing.
    for begin, isolated in ((7, True), (8, True), (8, False)):
        assert num_found(begin, isolated=isolated) == 0


def test_memory_is_bounded_and_the_least_recently_used_goes_first(demo_engine):
    engine = with_prefixes(demo_engine, capacity_mb=3)
    known, texts = engine.pool.prefixes, [[i, *SHARED[:300]] for i in range(9)]
    for text in texts:
        for each in (text, texts[0]):  # the latter is in use all the time
            run(engine, each, max_tokens=1)
        assert known.num_bytes <= known.capacity_bytes
        assert known.num_bytes == sum(block.num_bytes for block in known._blocks.values())
    first, *others = (num_cached(engine, text) for text in texts)
    assert first >= 256 and not all(others)


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning(engine):
    known = engine.pool.prefixes
    texts = [SHARED[: 2 * SIZE + 1], SHARED[::-1][: 2 * SIZE + 1]]
    for text in texts:
        run(engine, text, max_tokens=1)
        known.capacity_bytes = known.num_bytes * 3 // 2  # three blocks of four
    assert [num_cached(engine, text) for text in texts[::-1]] == [2 * SIZE, SIZE]


def test_a_prompt_that_failed_is_not_remembered(engine, monkeypatch):
    forward = engine.target.forward

    def broken(*arguments, **options):
        output = forward(*arguments, **options)
        return Output([logits * torch.nan for logits in output.logits], output.hidden)

    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "forward", broken)
        with pytest.raises(ValueError, match="no numbers|not a number|NaN"):
            run(engine, FIRST, max_tokens=2)
    assert num_cached(engine, FIRST) == 0


def test_health_metrics_and_answers_tell(engine):
    for prompt in (FIRST, SECOND):
        sequence, _ = run(engine, prompt, max_tokens=2)
    worker = Worker(engine, Options())
    health = answers.health(engine, worker, Options())["prefix_cache"]
    assert health["hit_tokens"] == sequence.drafting.num_cached > 0
    assert health["queried_tokens"] == len(FIRST) + len(SECOND)
    families = {family.name: family for family in metrics.Meter(engine, worker).collect()}
    assert families["prefix_cache_hits"].samples[0].value == health["hit_tokens"]
    usage = answers.answer([finished(sequence)], [], torch.float32)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": health["hit_tokens"]}


def test_of_a_target_without_equal_bits_only_prompts_are_kept(demo_engine, monkeypatch):
    engine = with_prefixes(demo_engine)
    monkeypatch.setattr(engine.target, "report", None)
    s, _ = run(engine, SHARED[:100], max_tokens=60)
    assert num_cached(engine, s.tokens + [5]) == SIZE
