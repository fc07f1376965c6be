"""A request's text ends at one place, and text, logprobs, trace and figures all end there.

A trace says what decided about each token. A comparison says how fast the request was against plain
decoding, and where the texts differ. What is refused is in test_bad_inputs.py, seeds and the
answer's shape are in test_server.py.
"""

import dataclasses
import doctest
import math
import sys
from copy import copy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import finished, probabilities, run, scripted_engine

from runtime.statistics import Statistics
from runtime.text import TextStream
from runtime.values import Request
from server import answers, comparison, core, trace
from server.comparison import costs_of, predicted_speedup
from server.events import event as event_of

DRAFTERS = ("ngram", "suffix", "draft_model", "mtp")
SAMPLING = core.Sampling(1.1, 0.9, 100, 0.95, 0.001)
REJECTION = dataclasses.replace(SAMPLING, verification="rejection")


def cut_run(engine, prompts, plain, offset, end, way):
    """A run whose drafter knows the text of a seed: it is cut at `offset` of a block, by `end`."""
    texts = ((prompt, plain(prompt, 20, **way)) for prompt in prompts.values())
    prompt, truth = next(
        (prompt, truth)
        for prompt, truth in texts
        if len(truth) == 20
        and truth[1 + offset] not in truth[: 1 + offset]
        and engine.target.tokenizer.decode(truth[1 + offset]).strip().isalnum()
    )
    known = [*truth[: 3 + offset], *[7] * 20] if end == "eos, then a wrong draft" else truth
    engine = scripted_engine(engine, lambda tokens, n: known[len(tokens) - len(prompt) :][:n])
    fields = {"max_tokens": 20, "drafter": "scripted", "logprobs": 1, "trace": True} | way
    if end.startswith("eos"):
        engine.eos_ids = {truth[1 + offset]}
    elif end == "max_tokens":
        fields["max_tokens"] = 2 + offset
    else:
        fields["stop"] = (engine.target.tokenizer.decode(truth[1 + offset]),)
    return engine, *run(engine, prompt, **fields), truth


@pytest.mark.parametrize("end", ["eos", "eos, then a wrong draft", "stop", "max_tokens"])
@pytest.mark.parametrize("offset", [0, 7])
def test_one_cut_is_seen_by_everything(demo_engine, prompts, plain, offset, end, way):
    engine, sequence, events, truth = cut_run(demo_engine, prompts, plain, offset, end, way)
    kept, s = len(sequence.output), sequence.statistics
    assert sequence.output == truth[:kept]
    assert kept == 2 + offset or (end == "stop" and kept < 2 + offset)  # it stood earlier
    assert sequence.finish_reason == ("length" if end == "max_tokens" else "stop")
    assert s.completion_tokens == kept == sum(event["emitted_count"] for event in events)
    assert kept == sum(len(event["target_top"]) for event in events)
    assert [token["id"] for event in events for token in event["tokens"]] == sequence.output
    accepted = [t for event in events for t in event["tokens"] if t["kind"] == "accepted"]
    assert s.num_accepted_draft_tokens == len(accepted) == sum(s.accepted_at)
    assert sum(event["accepted_count"] for event in events) == len(accepted)
    assert s.num_accepted_draft_tokens == s.num_draft_tokens  # what was cut off was not judged
    assert sum(n * count for n, count in enumerate(s.acceptance_histogram)) == len(accepted)
    assert sum(s.acceptance_histogram) == s.num_spec_steps
    assert sum(s.drafted_at) == s.num_draft_tokens
    assert s.target_passes + 1 == len(events)
    assert [e["id"] for e in sequence.logprobs] == sequence.output
    assert not any(event["rejected"] for event in events)
    streamed = "".join(text for event in events for text, _ in event["pieces"])
    written = sequence.output[: kept - end.startswith("eos")]  # an end of text is no text
    whole = engine.target.tokenizer.decode(written, skip_special_tokens=True)
    cut = whole.find(sequence.request.stop[0]) if end == "stop" else len(whole)
    assert streamed == sequence.text.text == whole[:cut]
    assert engine.totals.by_drafter["scripted"].completion_tokens == kept
    for counts in zip(*engine.totals.recent, strict=True):  # drafted, and accepted
        assert sum(counts) == len(accepted)
    assert engine.target.cache.lengths == [0] * engine.target.cache.num_rows


def test_greedy_output_does_not_depend_on_the_seed_and_knows_the_penalty(
    demo_engine, demo_reference, prompts, plain
):
    prompt, penalised = prompts["repetitive_colours"], core.Sampling(repetition_penalty=1.8)
    ids = torch.tensor([prompt])
    theirs = demo_reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False,
        repetition_penalty=1.8,
    )  # fmt: skip
    expected = plain(prompt, 30, sampling=penalised)
    assert expected == theirs[0, len(prompt) :].tolist() != plain(prompt, 30)
    for seed, drafter in enumerate(DRAFTERS):
        fields = {"max_tokens": 30, "drafter": drafter, "sampling": penalised, "seed": seed}
        assert run(demo_engine, prompt, **fields)[0].output == expected


def test_an_impossible_token_has_a_logprob_that_json_can_hold(demo_engine):
    logits = torch.tensor([[0.0, -math.inf, 1.0]])
    (entry,) = trace.token_logprobs(logits, [2], 3, demo_engine.target.tokenizer)
    assert [top["id"] for top in entry["top_logprobs"]] == [2, 0, 1]
    assert entry["top_logprobs"][2]["logprob"] == -9999.0


@pytest.mark.parametrize("byte", [b"x", b"\x80"], ids=["text", "bytes that are no character"])
def test_a_token_costs_the_same_however_long_the_text_is(byte):
    """Counted in lines that run in TextStream and in tokens that are decoded."""

    def count(length):
        cost = 0

        def decode(tokens, skip_special_tokens):
            nonlocal cost
            cost += len(tokens)
            return bytes(tokens).decode("utf-8", "replace")

        def note(frame, event, _):
            nonlocal cost
            cost += event == "line"
            return note if frame.f_globals["__name__"] == TextStream.__module__ else None

        growing, before = TextStream(SimpleNamespace(decode=decode), ("xy",)), sys.gettrace()
        sys.settrace(note)
        try:
            for _ in range(length):
                growing.push(*byte, "bonus")
                list(growing.release())
        finally:
            sys.settrace(before)
        return cost

    assert count(1600) < 2.2 * count(800)


def test_bytes_at_the_end_may_complete_a_stop_string(demo_engine):
    """max_tokens ends the text amid a character; what the tokenizer writes for it is text, too."""
    tokenizer = demo_engine.target.tokenizer
    first = tokenizer("🙂")["input_ids"][0]
    request = Request([5], max_tokens=1, stop=("\ufffd",))
    sequence = core.Sequence(request, 0, tokenizer)
    assert sequence.append([core.Judgement(first, "bonus", 1, None, 0)], set()) == 1
    assert sequence.finish_reason == "stop" and sequence.text.text == ""


def assert_decided(token, top, scores, sampling, draft, exponentials):
    """A token of an event against its place's penalised logits [1, V] and noise."""
    p = probabilities(scores, sampling)[0]
    numbers = ["score", "total"] if sampling.is_coupled else ["p", "q", "u"]
    assert list(token) == ["id", "kind", *numbers]
    if token["kind"] == "accepted":
        assert token["id"] == draft
    if not sampling.is_coupled:
        assert token["p"] == pytest.approx(float(p[token["id"]]), abs=1e-3)
        assert top[0]["id"] == int(scores.argmax())
        assert token["kind"] != "accepted" or token["u"] * token["q"] < token["p"]
        return
    assert top[0]["id"] == token["id"] and top[0]["total"] == token["total"]  # the choice leads
    assert top == sorted(top, key=lambda entry: -entry["total"])
    expected = scores[0] if sampling.is_greedy else p.log()
    for entry in top:
        assert entry["score"] == pytest.approx(float(expected[entry["id"]]), abs=1e-3)
        noise = 0.0
        if not sampling.is_greedy:
            noise = -math.log(exponentials(np.array([entry["id"]]))[0])
        assert entry["total"] - entry["score"] == pytest.approx(noise, abs=1e-6)


def assert_refused(event, is_coupled):
    refused, own = event["rejected"], event["tokens"][-1]
    assert refused["id"] == event["proposals"][event["accepted_count"]]
    assert own["kind"] == "recovered" and list(refused) == list(own)
    if is_coupled:
        assert refused["total"] is None or refused["total"] < own["total"]
    else:
        assert refused["u"] * refused["q"] >= refused["p"]


def assert_shown(entries, token, draft, p, has_q, exponentials):
    """The likeliest by the target's p [V] and by the drafter's q; noise finds both choices."""
    ids = np.array([entry["id"] for entry in entries])
    assert len(ids) <= 14 and {token["id"], draft} - {None} <= set(ids)
    assert [e["p"] for e in entries] == pytest.approx(p[ids].tolist(), abs=1e-3)
    assert entries == sorted(entries, key=lambda entry: -entry["p"])
    assert all(("q" in entry) is has_q for entry in entries)
    if not exponentials:
        return
    noise = -np.log(exponentials(ids))
    assert [entry["noise"] for entry in entries] == pytest.approx(noise, abs=1e-4)
    for name, choice in (("p", token["id"]), ("q", draft))[: 1 + has_q]:
        totals = np.log([entry[name] or 1e-99 for entry in entries]) + noise
        assert ids[totals.argmax()] == choice


def assert_logprobs(entry, token, logits, tokenizer):
    """The target's own, before every transform."""
    row, top = logits.log_softmax(-1), entry["top_logprobs"]
    assert entry["id"] == token["id"] and entry["token"] == tokenizer.decode([token["id"]])
    assert [t["id"] for t in top] == row.topk(3).indices.tolist()
    for each in (entry, *top):
        assert each["logprob"] == pytest.approx(float(row[each["id"]]), abs=1e-4)


@pytest.mark.parametrize("sampling", [core.Sampling(), SAMPLING, REJECTION], ids=str)
@pytest.mark.parametrize("drafter", [None, "ngram", "draft_model", "mtp"])
def test_a_trace_says_what_decided(demo_engine, demo_reference, prompts, drafter, sampling):
    """Every number in it is checked against a forward of the whole text, without cache."""
    fields = {"max_tokens": 24, "drafter": drafter, "sampling": sampling, "seed": 1, "logprobs": 3}
    sequence, events = run(demo_engine, prompts["code_function"], trace=True, **fields)
    with torch.inference_mode():
        logits = demo_reference(torch.tensor([sequence.tokens])).logits[0]
    place, judged = len(sequence.request.prompt), 0
    for event in events:
        assert len(event["target_argmax"]) == len(event["proposals"]) + 1
        assert {*event["proposals"], *event["target_argmax"]} <= set(event["texts"])
        lists = (event[name] for name in ("target_top", "distributions", "tokens", "logprobs"))
        for i, (top, shown, token, logprob) in enumerate(zip(*lists, strict=True)):
            known, row = sequence.tokens[:place], logits[None, place - 1]
            scores = core.penalise(row, sampling, known, core.Draft())
            assert event["target_argmax"][i] == int(scores.argmax())
            draft = (event["proposals"] + [None])[i]
            exponentials = partial(sequence.noise.exponentials, place)
            assert_decided(token, top, scores, sampling, draft, exponentials)
            if drafter == "ngram" and "q" in token and token["kind"] == "accepted":
                assert token["q"] == 1.0
            is_greedy = sampling.is_greedy
            p = (scores.softmax(-1) if is_greedy else probabilities(scores, sampling))[0]
            has_q = draft is not None and drafter in ("draft_model", "mtp") and not is_greedy
            noise = exponentials if sampling.is_coupled and not is_greedy else None
            assert_shown(shown, token, draft, p, has_q, noise)
            assert_logprobs(logprob, token, row[0], sequence.tokenizer)
            assert {entry["id"] for entry in (*shown, *top)} <= set(event["texts"])
            place += 1
        judged += event["accepted_count"] + bool(event["rejected"])
        if event["rejected"]:
            assert_refused(event, sampling.is_coupled)
    assert place == len(sequence.tokens) and (judged > 5 or not drafter)
    assert [e for event in events for e in event["logprobs"]] == sequence.logprobs


def run_both_ways(engine, prompt, **fields):
    """Two finished runs, as the answers take them: a request's, and the same by plain decoding."""
    request = Request(prompt, max_tokens=24, **fields)
    runs = []
    for each in (request, dataclasses.replace(request, drafter=None, trace=True)):
        events = []
        for sequence, cycle in engine.generate(each):
            events.append(event_of(sequence, cycle))
        runs.append(finished(sequence, events))
    return runs


def compared(runs):
    return answers.answer(runs, [], torch.float32)["compare"]


def test_a_comparison_of_three_takes_medians_and_says_when_it_was_disturbed(demo_engine, prompts):
    """One slow run of three changes nothing; where plain decoding was slow every time, it shows."""
    both = run_both_ways(demo_engine, prompts["repetitive_colours"], drafter="ngram")

    def taking(run, pass_ms):
        sequence = copy(run.sequence)
        verify_ms = pass_ms * sequence.statistics.target_passes
        times = {"draft_ms": 0.0, "verify_ms": verify_ms, "other_ms": 0.0}
        sequence.statistics = dataclasses.replace(sequence.statistics, **times)
        return finished(sequence, run.events)

    def compare(ours, theirs):
        pairs = zip(ours, theirs, strict=True)
        return compared([taking(*each) for pair in pairs for each in zip(both, pair, strict=True)])

    quiet = compare([5.0] * 3, [5.0] * 3)
    one_slow = compare([5.0, 500.0, 5.0], [5.0, 5.0, 300.0])
    per_pass = quiet["measured_speedup"]
    assert per_pass > 2 and quiet["spread"] == [per_pass, per_pass] and quiet["num_runs"] == 3
    assert one_slow["measured_speedup"] == per_pass and one_slow["costs"]["t_verify"] == 1.0
    assert one_slow["speculative"]["timings"]["verify_ms"] < 100
    assert one_slow["spread"] == pytest.approx([per_pass / 100, per_pass * 60], rel=0.01)
    assert not quiet["disturbed"] and not one_slow["disturbed"]
    assert compare([5.0] * 3, [9.0] * 3)["disturbed"]  # faster than passes explain
    assert compare([25.0] * 3, [5.0] * 3)["disturbed"]  # t_verify 5


def test_figures_divide_what_their_formulas_say():
    one = Statistics()
    one.record(0, ["bonus"])
    one.record_times([0, 0, 0.050, 0.060], is_prefill=True)
    for drafted, kinds in (3, "accepted recovered"), (2, "accepted accepted bonus"), (0, "bonus"):
        one.record(drafted, kinds.split())
        one.record_times([0, 0.002, 0.009, 0.010], is_prefill=False)
    for s, times in ((one, 1), (one + one, 2)):
        counted = {"num_spec_steps": 2, "num_draft_tokens": 5, "num_accepted_draft_tokens": 3}
        counted |= {"completion_tokens": 7, "prefills": 1, "target_passes": 3}
        assert {name: getattr(s, name) / times for name in counted} == counted
        assert s.acceptance_histogram == [0, times, times]
        assert s.draft_acceptance_rate == 0.6 and s.mean_acceptance_length == 2.5
        assert s.tokens_per_pass == 2.0 and s.ms_per_token == 5.0
        assert s.per_position() == {
            "acceptance_rate_per_position": [1.0, 0.5, 0.0],
            "conditional_acceptance_rate_per_position": [1.0, 0.5, None],
        }
    assert one.timings()["prompt_ms"] == 60.0 and one.timings()["predicted_ms"] == 30.0


def test_the_prediction_is_the_formula_of_the_field():
    """(1 - α^(K+1)) / (1 - α) / (K·c + t_verify) for full drafts of K = 4."""
    ours, plain = Statistics(), Statistics()
    for accepted in (4, 2, 0, 1):
        kinds = ["accepted"] * accepted + ["bonus" if accepted == 4 else "recovered"]
        ours.record(4, kinds)
        ours.record_times([0, 0.008, 0.038, 0.039], is_prefill=False)
    plain.record_times([0, 0, 0.020, 0.021], is_prefill=False)
    alpha, c, t_verify = 7 / 10, 2 / 20, 30 / 20
    assert costs_of(ours, plain) == {"alpha": alpha, "c": c, "t_verify": t_verify}
    expected = (1 - alpha**5) / (1 - alpha) / (4 * c + t_verify)
    assert predicted_speedup(ours, plain) == pytest.approx(expected, abs=1e-3)
    (none := Statistics()).record_times([0, 0.008, 0.028, 0.029], is_prefill=False)
    assert predicted_speedup(none, plain) == 1.0  # choosing is no drafting
    assert predicted_speedup(Statistics(), plain) is None


@pytest.mark.parametrize(("sampling", "verdict"), [
    (core.Sampling(), "bug"),
    (core.Sampling(temperature=0.5), "bug"),
    (core.Sampling(temperature=0.5, top_p=0.9), None),
], ids=str)  # fmt: skip
def test_a_difference_is_a_near_tie_or_a_bug_unless_a_border_may_have_moved(
    demo_engine, prompts, sampling, verdict
):
    """Between equal scores, between others, to a token not shown, and where one text ends early."""
    prompt = prompts["code_class"]
    runs = run_both_ways(demo_engine, prompt, sampling=sampling)
    tokens, (first, second, *_) = runs[0].sequence.tokens, runs[1].events[1]["target_top"][0]
    place = len(prompt) + 1
    for token, gap, expected in (
        (second["id"], 1e-4, "near-tie"), (second["id"], 1e-2, verdict), (7, 1e-4, verdict),
    ):  # fmt: skip
        second["total"] = first["total"] - gap
        tokens[place] = token  # as other rounding might have chosen
        result = compared(runs)
        difference = result["first_difference"]
        assert result["identical"] is False and difference["verdict"] == expected
        assert (difference["position"], difference["speculative_token"]) == (1, token)
        assert difference["plain_token"] == difference["target_top"][0]["id"] == first["id"]
        assert difference["top_2_gap"] == pytest.approx(gap)
    tokens[place] = first["id"]
    del tokens[-2:]
    difference = compared(runs)["first_difference"]
    assert difference["speculative_token"] is None and difference["verdict"] == verdict
    assert difference["position"] == 22


def test_the_examples_in_docstrings_are_right():
    assert doctest.testmod(comparison) == (0, 2)
