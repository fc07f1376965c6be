"""Text leaves whole and exact: multi-byte characters, stop strings, and what is held back."""

import pytest
import speculative_decoding as core
from conftest import run, scripted_engine

from serving.text import TextStream


@pytest.fixture(scope="module")
def tokenizer(demo_engine):
    return demo_engine.target.tokenizer


def stream(tokenizer, text, stop=()):
    """Push a text's tokens one by one: (text, pieces released, whether it stopped)."""
    growing, pieces = TextStream(tokenizer, stop), []
    stopped = False
    for token in tokenizer(text)["input_ids"]:
        stopped = growing.push(token, "accepted")
        pieces.append("".join(piece for piece, _ in growing.release()))
        if stopped:
            break
    growing.finish()
    pieces.append("".join(piece for piece, _ in growing.release(final=True)))
    return growing.text, pieces, stopped


@pytest.mark.parametrize(
    "text",
    ["plain words", "naïve café – 20 €", "日本語のテキスト", "🙂👩‍🚀 done", "\ufffd odd", ""],
)
def test_streamed_text_joined_equals_the_text_and_no_character_is_split(tokenizer, text):
    whole, pieces, _ = stream(tokenizer, text)
    assert whole == text == "".join(pieces)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_never_become_a_character_are_not_lost(tokenizer):
    ids = tokenizer("é🙂")["input_ids"][:-1]  # the last byte of the emoji is missing
    growing = TextStream(tokenizer)
    for token in ids:
        growing.push(token, "accepted")
    assert "\ufffd" not in growing.text
    growing.finish()
    assert growing.text == tokenizer.decode(ids)


def test_a_stop_string_is_cut_exactly_across_token_borders(tokenizer):
    text = "The function returns None. The caller waits. The end."
    for begin in range(1, len(text) - 3):
        stop = text[begin : begin + 3]
        whole, pieces, stopped = stream(tokenizer, text, (stop,))
        assert stopped
        assert whole == text[: text.find(stop)] == "".join(pieces)


def test_the_earliest_of_several_stop_strings_counts(tokenizer):
    assert stream(tokenizer, "one two three", ("three", "two"))[0] == "one "


def test_a_partial_stop_string_is_held_back_until_it_is_none(tokenizer):
    growing = TextStream(tokenizer, ("ENDING",))
    shown = []
    for token in tokenizer("the END of it")["input_ids"]:
        growing.push(token, "bonus")
        shown.append("".join(piece for piece, _ in growing.release()))
    assert not any(piece.rstrip().endswith(("E", "EN", "END")) for piece in shown)
    assert "".join(shown) == "the END of it"


def test_pieces_know_where_their_text_came_from(tokenizer):
    growing = TextStream(tokenizer)
    for word, kind in [("a", "accepted"), (" b", "accepted"), (" c", "recovered"), (" d", "bonus")]:
        (token,) = tokenizer(word)["input_ids"]
        growing.push(token, kind)
    assert growing.stretches() == [("a b", "accepted"), (" c", "recovered"), (" d", "bonus")]
    assert growing.stretches(2, 5) == [("b", "accepted"), (" c", "recovered")]


@pytest.mark.parametrize("offset", range(12))
def test_a_stop_string_inside_an_accepted_draft_ends_there(demo_engine, prompts, plain, offset):
    """The stop begins at every offset in turn; cache, counters and text all end with it."""
    prompt = prompts["easy_facts"]
    truth = plain(prompt, 30)
    text = demo_engine.target.tokenizer.decode(truth)
    stop = text[6 + offset : 6 + offset + 4]
    engine = scripted_engine(
        demo_engine,
        lambda tokens, n: truth[len(tokens) - len(prompt) :][:n],
    )
    sequence, events = run(engine, prompt, max_tokens=30, drafter="scripted", stop=(stop,))
    alone, _ = run(demo_engine, prompt, max_tokens=30, stop=(stop,))
    assert sequence.finish_reason == "stop"
    assert sequence.text.text == text[: text.find(stop)] == alone.text.text
    assert sequence.output == alone.output == truth[: len(sequence.output)]
    assert "".join(piece for event in events for piece, _ in event["pieces"]) == sequence.text.text
    statistics = sequence.statistics
    assert statistics.completion_tokens == len(sequence.output)
    assert statistics.draft_acceptance_rate in (1.0, None)


def test_the_parts_of_the_statistics_agree(demo_engine, prompts):
    for name, prompt in prompts.items():
        for drafter in demo_engine.drafters:
            sequence, events = run(demo_engine, prompt, max_tokens=40, drafter=drafter)
            s = sequence.statistics
            assert s.completion_tokens == len(sequence.output), name
            assert s.completion_tokens == sum(event["emitted_count"] for event in events)
            assert s.num_accepted_draft_tokens == sum(e["accepted_count"] for e in events)
            assert sum(s.acceptance_histogram) == s.num_spec_steps
            assert s.num_accepted_draft_tokens == sum(
                length * cycles for length, cycles in enumerate(s.acceptance_histogram)
            )
            assert sum(s.drafted_at) == s.num_draft_tokens
            assert sum(s.accepted_at) == s.num_accepted_draft_tokens
            assert s.target_passes + 1 == len(events)
            assert core.ratio(1, 0) is None
