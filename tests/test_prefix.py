"""A prompt that begins like an earlier one gets the same answer, to the last bit, and sooner; its
drafters draft as if they had read it, and what is kept stays within its memory."""

import pytest
import speculative_decoding as core
import torch
from conftest import ScriptedDrafter, run
from test_kernels import needs_compiler

from kernels.prefix import PrefixCache
from serving import answers, metrics
from serving.worker import Worker

SHARED = torch.randint(4096, (560,), generator=torch.Generator().manual_seed(0)).tolist()
FIRST, SECOND = [*SHARED, 5, 6, 7], [*SHARED, 8, 9, 8, 9, 8]
MTP, SIZE = "mtp", 64
MOST = len(SHARED) // SIZE * SIZE  # of its tokens lie in whole blocks


@pytest.fixture
def engine(demo_engine):
    """The embedded target and its drafters, with an empty memory of prompts."""
    return with_prefixes(demo_engine)


def with_prefixes(engine, capacity_mb=64, drafters=None, **options):
    known = PrefixCache.of(engine.target, capacity_mb)
    drafters = engine.panel.drafters if drafters is None else drafters
    return core.Engine(engine.target, drafters, prefixes=known, **options)


@pytest.mark.parametrize(
    ("drafter", "chunk"),
    [(None, 256), ("ngram", 100), ("draft_model", 256), (MTP, 256), (MTP, 100), ("auto", 256)],
)
def test_a_hit_changes_neither_the_text_nor_a_bit_nor_a_draft(demo_engine, drafter, chunk, way):
    """In C a prompt's blocks run in another kernel than its end, and than what is generated."""
    engine = with_prefixes(demo_engine, prefill_chunk=chunk)
    apart = core.Engine(demo_engine.target, demo_engine.panel.drafters, prefill_chunk=chunk)
    fields = {"max_tokens": 24, "drafter": drafter, "logprobs": 2} | way
    expected, drafts = run(apart, SECOND, **fields)
    run(engine, FIRST, **fields)
    found, same_drafts = run(engine, SECOND, **fields)
    assert found.seat.num_cached == MOST > 256 and expected.seat.num_cached == 0
    assert found.output == expected.output and found.logprobs == expected.logprobs
    assert [event["proposals"] for event in same_drafts] == [e["proposals"] for e in drafts]


def test_only_what_is_shared_from_the_beginning_counts(engine):
    size = SIZE
    run(engine, FIRST, max_tokens=1)
    run(engine, SHARED[::-1], max_tokens=1)
    for prompt, expected in (
        ([*SHARED[::-1][:size], *SHARED[size:]], size),
        (SHARED[1:], 0),
        ([*SHARED[: size - 1], 1, *SHARED[size:]], 0),
        ([*SHARED[: size + 1], 1, 2, *SHARED], size),
        (SHARED[: 2 * size], size),  # its last token has to be fed
        (FIRST, MOST),
    ):
        assert run(engine, prompt, max_tokens=2)[0].seat.num_cached == expected
    assert engine.panel.prefixes.as_dict()["hit_tokens"] == 3 * size + MOST


def test_a_head_waits_for_the_hidden_states_that_it_needs(engine):
    """Without them it would draft worse than after reading the prompt."""
    found = [
        run(engine, FIRST, max_tokens=4, drafter=name)[0].seat.num_cached
        for name in (None, "ngram", MTP, MTP, "ngram")
    ]
    assert found == [0, MOST, 0, MOST, MOST]


def test_a_stranger_s_drafter_gets_all_hidden_states(engine):
    class Reading(ScriptedDrafter):
        needs_hidden, hidden_layers = True, (0, -1)

    drafter = Reading(lambda state, limit: state[-1:])
    reading = with_prefixes(engine, drafters={"scripted": drafter})
    for prompt in (FIRST, SECOND):
        run(reading, prompt, max_tokens=4, drafter="scripted")
    seen = [verdict.hidden for verdict in drafter.verdicts if len(verdict.hidden) > 500]
    assert [len(states) for states in seen] == [len(FIRST), len(SECOND)]
    assert torch.equal(seen[0][: len(SHARED)], seen[1][: len(SHARED)])


def test_the_draft_model_remembers_its_own_keys(demo_engine):
    drafter = demo_engine.panel.drafters["draft_model"]
    known = drafter._prefixes
    before, prompt = known.num_found, [7, *SHARED]
    for _ in range(2):
        run(demo_engine, prompt, max_tokens=8, drafter="draft_model")
    assert known.num_found - before > 256
    held, rejecting = known.num_found, core.Sampling(temperature=1, verification="rejection")
    run(demo_engine, prompt, max_tokens=8, drafter="draft_model", sampling=rejecting)
    assert known.num_found == held  # drafts decide the text there, and roundings with them


def test_memory_is_bounded_and_the_least_recently_used_goes_first(demo_engine):
    engine = with_prefixes(demo_engine, capacity_mb=3)
    known, texts = engine.panel.prefixes, [[i, *SHARED[:300]] for i in range(9)]
    for text in texts:
        run(engine, text, max_tokens=1)
        run(engine, texts[0], max_tokens=1)  # in use all the time
        assert known.num_bytes <= known.capacity_bytes
        assert known.num_bytes == sum(block.num_bytes for block in known._blocks.values())
    first, *others = (run(engine, text, max_tokens=1)[0].seat.num_cached for text in texts)
    assert first >= 256 and not all(others)


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning(engine):
    known, size = engine.panel.prefixes, SIZE
    texts = [SHARED[: 2 * size + 1], SHARED[::-1][: 2 * size + 1]]
    for text in texts:
        run(engine, text, max_tokens=1)
        known.capacity_bytes = known.num_bytes * 3 // 2  # three blocks of four
    found = [run(engine, text, max_tokens=1)[0].seat.num_cached for text in texts[::-1]]
    assert found == [2 * size, size]


def test_of_a_long_prompt_the_beginning_is_kept(demo_engine):
    engine = with_prefixes(demo_engine, capacity_mb=1)
    run(engine, FIRST * 2, max_tokens=1)
    found = run(engine, FIRST, max_tokens=1)[0].seat.num_cached
    assert 0 < engine.panel.prefixes.num_bytes <= 1 << 20
    assert found


def test_a_prompt_that_failed_is_not_remembered(engine, monkeypatch):
    def broken(*given, **fields):
        output = right(*given, **fields)
        return core.Output([logits * torch.nan for logits in output.logits], output.hidden)

    right = engine.target.forward
    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "forward", broken)
        with pytest.raises(ValueError, match="no numbers|not a number|NaN"):
            run(engine, FIRST, max_tokens=2)
    assert run(engine, FIRST, max_tokens=2)[0].seat.num_cached == 0


def test_requests_that_run_together_share_what_the_first_one_read(engine):
    one = engine.open(core.Request(FIRST, 8))
    while not one.num_steps:
        engine.step([one])
    other = engine.open(core.Request(SECOND, 8))
    assert other.seat.num_cached == MOST
    while one.finish_reason is None or other.finish_reason is None:
        engine.step([s for s in (one, other) if s.finish_reason is None])
    expected = [core.plain_decode(engine.target, p, 8, engine.eos_ids) for p in (FIRST, SECOND)]
    assert [one.output, other.output] == expected
    engine.close(one), engine.close(other)


def test_health_metrics_and_answers_tell(engine):
    for prompt in (FIRST, SECOND):
        sequence, _ = run(engine, prompt, max_tokens=2)
    worker = Worker(engine, core.Options())
    told = answers.health(engine, worker, core.Options())["prefix_cache"]
    assert told["hit_tokens"] == sequence.seat.num_cached > 0
    assert told["queried_tokens"] == len(FIRST) + len(SECOND)
    assert metrics.figures_of(engine).values["prefix_cache_hits"] == told["hit_tokens"]
    job = type("Job", (), {"sequence": sequence, "events": []})()
    usage = answers.answer([job], [], torch.float32)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": told["hit_tokens"]}


def test_what_is_measured_reads_its_prompt(engine):
    """A comparison or a demo runs the same prompt again and again."""
    for is_alone in (True, False, True):
        sequence, _ = run(engine, FIRST, max_tokens=1, is_alone=is_alone)
        assert sequence.seat.num_cached == 0
    assert run(engine, FIRST, max_tokens=1)[0].seat.num_cached == MOST


def test_it_can_be_turned_off():
    engine = core.load_engine(core.Options(model="embedded", drafter="ngram", prefix_cache_mb=0))
    for _ in range(2):
        assert run(engine, FIRST, max_tokens=1)[0].seat.num_cached == 0
    health = answers.health(engine, Worker(engine, core.Options()), core.Options())
    assert health["prefix_cache"] is None


@needs_compiler
@pytest.mark.parametrize("drafter", [None, "ngram", MTP])
def test_a_chat_of_five_turns_reads_each_token_once(demo_engine, drafter, monkeypatch):
    """But for the last, incomplete block of each turn, and the token that was pending."""
    engine, apart = (with_prefixes(demo_engine, capacity_mb=size) for size in (64, 0))
    assert engine.target.report.is_exact
    fed, right = [], engine.target.forward

    def counted(rows, tokens, *rest, **options):
        fed[-1] += sum(map(len, tokens))
        return right(rows, tokens, *rest, **options)

    prompt, held = SHARED[:150], 0
    for turn in range(5):
        message = FIRST[turn * 9 : turn * 9 + 30]
        prompt = prompt + message
        expected, drafts = run(apart, prompt, max_tokens=40, drafter=drafter, logprobs=1)
        fed.append(0)
        with monkeypatch.context() as patched:
            patched.setattr(engine.target, "forward", counted)
            s, events = run(engine, prompt, max_tokens=40, drafter=drafter, logprobs=1)
        assert s.output == expected.output and s.logprobs == expected.logprobs
        assert [e["proposals"] for e in events] == [e["proposals"] for e in drafts]
        assert s.seat.num_cached == held // 64 * 64
        num_drafted = sum(len(event["proposals"]) for event in events)
        assert fed[-1] == len(prompt) - s.seat.num_cached + len(events) - 1 + num_drafted
        prompt, held = prompt + s.output, len(prompt) + len(s.output) - 1
    assert held > 400


def test_of_a_target_without_equal_bits_only_prompts_are_kept(demo_engine, monkeypatch):
    engine = with_prefixes(demo_engine)
    monkeypatch.setattr(engine.target, "report", None)
    prompt = SHARED[:100]
    s, _ = run(engine, prompt, max_tokens=60)
    again, _ = run(engine, prompt + s.output + [5], max_tokens=1)
    assert again.seat.num_cached == 64
