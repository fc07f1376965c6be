"""Faults on purpose: each mutant breaks one piece of the source, and the tests named must notice.

    python -m tests.mutants
    python -m tests.mutants --only "truncation keeps one token too many"

One mutant at a time: fork, put the broken code into the function that everybody holds already, run
its few tests, and see one of them fail. The models are loaded once, before the forks. A mutant that
survives is a hole in the tests. A piece that does not occur exactly once in its function is an
error, so the list cannot go stale in silence. Prints a table; exits with 1 if any survives.

Not covered: constants of modules and the bodies of classes; what runs only while models are loaded.
"""

import argparse
import functools
import importlib
import inspect
import multiprocessing
import os
import sys
import textwrap
import time
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

LIMIT_S = 60.0  # a mutant may hang: then it was noticed
ROOT = Path(__file__).resolve().parent.parent


class Mutant(NamedTuple):
    """`place` is "module:function" or "module:Class.method"; tests are "file::test" in tests/."""

    name: str
    place: str
    old: str
    new: str
    tests: tuple[str, ...]


def function_at(module: ModuleType, path: str) -> FunctionType:
    """The plain function there, whatever has been wrapped around it."""
    owner: Any = module
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    found = inspect.getattr_static(owner, name)
    found = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
    return inspect.unwrap(found)


def broken(mutant: Mutant) -> tuple[FunctionType, FunctionType]:
    """The function, and what it becomes."""
    module_name, path = mutant.place.split(":")
    module = importlib.import_module(module_name)
    function = function_at(module, path)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutant.old) == 1, f"{mutant.old!r} is not in {mutant.place} exactly once"
    scope = ModuleType(module_name)
    vars(scope).update(vars(module))
    exec(source.replace(mutant.old, mutant.new), vars(scope))  # noqa: S102
    other = function_at(scope, function.__name__)
    assert function.__code__.co_freevars == other.__code__.co_freevars, "super() needs its class"
    return function, other


def put_in(mutant: Mutant) -> None:
    """Break the code itself: whoever has imported or bound the function is broken with it."""
    function, other = broken(mutant)
    function.__code__ = other.__code__
    function.__defaults__, function.__kwdefaults__ = other.__defaults__, other.__kwdefaults__


def run_tests(tests: tuple[str, ...], mutant: Mutant | None) -> None:
    """In a process of its own: exits as pytest does, and says nothing."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    code = 3
    try:
        if mutant:
            put_in(mutant)
        nodes = [f"tests/test_{test.replace('::', '.py::', 1)}" for test in tests]
        code = pytest.main(["-q", "-x", "-o", "addopts=", "-p", "no:cacheprovider", *nodes])
    finally:  # whatever it was, and with threads that hang
        os._exit(code)


def exit_code(tests: tuple[str, ...], mutant: Mutant | None, limit_s: float = LIMIT_S) -> int:
    """0: all tests passed; 1: one failed, or what they ran hung or crashed."""
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(tests, mutant))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        process.join()
    code = process.exitcode or 0
    assert code < 2, f"pytest could not run {tests} (exit code {code})"
    return int(code != 0)  # below 0 it was a signal's


def load_once() -> None:
    """Import all, and let every fork have the same engine: none of them changes another's."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take longer to start than a test
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    importlib.import_module("conftest")
    core = importlib.import_module("08_speculative_decoding")
    load, usual = core.load_engine, core.Options(fixed_k=True)
    engine = load(usual)
    core.load_engine = functools.wraps(load)(lambda o: engine if o == usual else load(o))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", help="this mutant alone, or those that begin so")
    only = parser.parse_args().only or ""
    chosen = [mutant for mutant in MUTANTS if mutant.name.startswith(only)]
    if not chosen:
        parser.error(f"no mutant's name begins with {only!r}")
    began = time.monotonic()
    load_once()
    for mutant in chosen:
        broken(mutant)
    every = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
    if exit_code(every, None, 600):
        print("these tests fail without any mutant:", *every, sep="\n  ")
        return 1
    survivors = 0
    for i, mutant in enumerate(chosen, 1):
        start = time.monotonic()
        survives = not exit_code(mutant.tests, mutant)
        survivors += survives
        fate, took_s = "SURVIVES" if survives else "killed", time.monotonic() - start
        print(f"{i:3}/{len(chosen)}  {fate:8}  {took_s:4.1f} s  {mutant.name}", flush=True)
    print(f"{survivors} of {len(chosen)} survive; {time.monotonic() - began:.0f} s")
    return int(survivors > 0)


CORE = "08_speculative_decoding"
RAGGED = "cache::test_ragged_rows_with_random_truncation_equal_a_cache_free_recompute"

MUTANTS: list[Mutant] = [
    Mutant(
        "truncation keeps one token too many",
        f"{CORE}:SlotCache.truncate",
        "self.lengths[row] = length",
        "self.lengths[row] = min(length + 1, self.lengths[row])",
        ("cache::test_truncating_touches_no_tensor",),
    ),
    Mutant(
        "truncation lengthens a row",
        f"{CORE}:SlotCache.truncate",
        "<= self.lengths[row]:",
        "<= self.max_length:",
        ("cache::test_a_row_cannot_be_truncated_to_more_than_it_holds",),
    ),
    Mutant(
        "a row is written one place early",
        f"{CORE}:SlotLayer._write_row",
        "place.end - count, count",
        "max(place.end - count - 1, 0), count",
        (f"{RAGGED}[llama-modules]",),
    ),
    Mutant(
        "a row's pads are cached in place of its tokens",
        f"{CORE}:SlotLayer._write_row",
        "place.offset, count",
        "0, count",
        ("exactness::test_padding_to_more_rows_changes_no_token[2]",),
    ),
    Mutant(
        "ragged pads are cached in place of tokens",
        f"{CORE}:SlotLayer._write_rows",
        "new[: len(slots)]",
        "new[-len(slots) :]",
        (f"{RAGGED}[llama-fast]",),
    ),
    Mutant(
        "scrubbing leaves the values",
        f"{CORE}:SlotLayer.scrub",
        "(self.keys, self.values)",
        "(self.keys,)",
        ("cache::test_a_forward_that_fails_leaves_no_nan_to_the_next_request",),
    ),
    Mutant(
        "a moved row loses its last token",
        f"{CORE}:SlotLayer.move",
        "buffer[target, :, :length] = buffer[source, :, :length]",
        "buffer[target, :, : length - 1] = buffer[source, :, : length - 1]",
        ("batching::test_rows_stay_compact_and_keep_what_they_hold",),
    ),
    Mutant(
        "closing a row moves none into the gap",
        f"{CORE}:SlotCache.close_row",
        "layer.move(source, slot, self.lengths[last])",
        "pass",
        ("batching::test_rows_stay_compact_and_keep_what_they_hold",),
    ),
    Mutant(
        "a closed row keeps its length",
        f"{CORE}:SlotCache.close_row",
        "self.lengths[row] = 0",
        "pass",
        ("drafters::test_every_row_is_given_back[ngram]",),
    ),
    Mutant(
        "a closed row is not given back",
        f"{CORE}:SlotCache.close_row",
        "self._free.append(row)",
        "pass",
        ("drafters::test_every_row_is_given_back[ngram]",),
    ),
    Mutant(
        "a dirty slot is not scrubbed",
        f"{CORE}:SlotCache._clean",
        "not used[-1].is_sound(slot, written)",
        "False",
        ("cache::test_a_forward_that_fails_leaves_no_nan_to_the_next_request",),
    ),
    Mutant(
        "what a failed forward wrote is not noted",
        f"{CORE}:SlotCache.place",
        "max(self._written[slot], last)",
        "self._written[slot]",
        ("cache::test_a_forward_that_fails_leaves_no_nan_to_the_next_request",),
    ),
    Mutant(
        "one token more than the cache holds is let in",
        f"{CORE}:SlotCache.place",
        "end > self.max_length",
        "end > self.max_length + 1",
        ("cache::test_a_row_that_would_outgrow_the_cache_is_refused_before_anything_is_written",),
    ),
    Mutant(
        "each row is penalised for the whole draft",
        f"{CORE}:penalise",
        "draft[:i] + text[:1] * (len(draft) - i)",
        "draft",
        ("sampling::test_transforms_alone_and_together_are_those_of_transformers",),
    ),
    Mutant(
        "the penalty knows the last token alone",
        f"{CORE}:penalise",
        "list(set(text))",
        "text[-1:]",
        ("sampling::test_transforms_alone_and_together_are_those_of_transformers",),
    ),
    Mutant(
        "noise is the same at each place of a draft",
        f"{CORE}:own_choices",
        "position + i",
        "position",
        ("lossless::test_exactly_the_prefix_before_the_first_wrong_token_is_kept[sampled-1]",),
    ),
    Mutant(
        "greedy choices are not checked for NaN",
        f"{CORE}:own_choices",
        "not isfinite(value)",
        "False",
        ("sampling::test_logits_that_are_no_numbers_are_an_error_and_no_token",),
    ),
    Mutant(
        "noise of plain decoding is one position off",
        f"{CORE}:sample",
        "len(text))), None",
        "len(text) - 1)), None",
        ("lossless::test_exactly_the_prefix_before_the_first_wrong_token_is_kept[sampled-0]",),
    ),
    Mutant(
        "a drafter penalises the first token alone",
        f"{CORE}:sample",
        "text, [])",
        "text[:1], [])",
        ("drafters::test_a_draft_knows_the_repetition_penalty_and_its_own_tokens",),
    ),
    Mutant(
        "the refused draft is emitted",
        f"{CORE}:verify",
        'Judgement(chosen, "recovered")',
        'Judgement(drafted, "recovered")',
        ("lossless::test_exactly_the_prefix_before_the_first_wrong_token_is_kept[greedy-1]",),
    ),
    Mutant(
        "the first draft is always right",
        f"{CORE}:verify",
        "drafted != chosen",
        "drafted != chosen and judged",
        ("lossless::test_exactly_the_prefix_before_the_first_wrong_token_is_kept[greedy-0]",),
    ),
    Mutant(
        "p and q are swapped",
        f"{CORE}:verify_by_rejection",
        "u * q_here < p_here",
        "u * p_here < q_here",
        ("sampling::test_verify_emits_exactly_p_for_every_small_p_and_q",),
    ),
    Mutant(
        "p and q are swapped in the residual",
        f"{CORE}:verify_by_rejection",
        "residual(p[i], q)",
        "residual(q, p[i])",
        ("sampling::test_verify_emits_exactly_p_for_every_small_p_and_q",),
    ),
    Mutant(
        "the bonus is drawn from the row before",
        f"{CORE}:verify_by_rejection",
        "draw(p[n], u)",
        "draw(p[n - 1], u)",
        ("sampling::test_verify_keeps_the_target_distribution[model q]",),
    ),
    Mutant(
        "all drafts are judged by one number",
        f"{CORE}:verify_by_rejection",
        "position + i, ACCEPT",
        "position, ACCEPT",
        ("sampling::test_verify_keeps_the_target_distribution[model q]",),
    ),
    Mutant(
        "every draft is judged by the first q",
        f"{CORE}:verify_by_rejection",
        "draft.probs[i]",
        "draft.probs[0]",
        ("sampling::test_verify_keeps_the_target_distribution[model q]",),
    ),
    Mutant(
        "a rejected token may come back",
        f"{CORE}:verify_by_rejection",
        "draw(residual(p[i], q), u)",
        "draw(p[i], u)",
        ("sampling::test_verify_emits_exactly_p_for_every_small_p_and_q",),
    ),
    Mutant(
        "weights are taken to sum to 1",
        f"{CORE}:draw",
        "u * total",
        "u",
        ("sampling::test_a_token_without_weight_is_never_drawn",),
    ),
    Mutant(
        "nothing is recovered from a residual of nothing",
        f"{CORE}:residual",
        "more if more.sum() > 0 else p",
        "more",
        ("sampling::test_a_residual_of_nothing_falls_back_to_p",),
    ),
    Mutant(
        "the residual is both differences",
        f"{CORE}:residual",
        "clamp_(min=0)",
        "abs()",
        ("sampling::test_verify_emits_exactly_p_for_every_small_p_and_q",),
    ),
    Mutant(
        "a cut loses the end of text itself",
        f"{CORE}:Sequence.cut",
        "return kept\n",
        "return kept - 1\n",
        ("requests::test_one_cut_is_seen_by_everything[0-eos]",),
    ),
    Mutant(
        "the last bytes complete no stop string",
        f"{CORE}:Sequence.cut",
        "if self.text.finish():",
        "if False:",
        ("requests::test_bytes_at_the_end_may_complete_a_stop_string",),
    ),
    Mutant(
        "max_tokens is met one token late",
        f"{CORE}:Sequence.cut",
        "kept == self.remaining",
        "kept > self.remaining",
        ("lossless::test_max_tokens_inside_a_block_is_met_exactly[greedy-1]",),
    ),
    Mutant(
        "an end of text amid a draft is passed over",
        f"{CORE}:Sequence.cut",
        "token.id in eos_ids",
        "kept == len(emitted) and token.id in eos_ids",
        ("lossless::test_end_of_text_is_cut_at_every_offset_of_a_block[greedy-0]",),
    ),
    Mutant(
        "a stop string amid a draft is passed over",
        f"{CORE}:Sequence.cut",
        "if self.text.push(token.id, token.kind)",
        "if self.text.push(token.id, token.kind) and kept == len(emitted)",
        ("requests::test_a_stop_string_inside_an_accepted_draft_ends_there[0]",),
    ),
    Mutant(
        "a prompt that fills the context is let in",
        f"{CORE}:Engine.check_prompt",
        "length >= context",
        "length > context",
        ("requests::test_a_prompt_that_cannot_be_is_refused_before_it_has_a_row",),
    ),
    Mutant(
        "negative token ids are let in",
        f"{CORE}:Engine.check_prompt",
        "0 <= token <= largest",
        "token <= largest",
        ("requests::test_a_prompt_that_cannot_be_is_refused_before_it_has_a_row",),
    ),
    Mutant(
        "max_tokens is not lowered to the room there is",
        f"{CORE}:Engine.open",
        "min(request.max_tokens, room)",
        "request.max_tokens",
        ("requests::test_max_tokens_beyond_the_context_is_lowered_and_said",),
    ),
    Mutant(
        "a drafter that cannot open ends the request",
        f"{CORE}:Engine._open_drafter",
        "self._lose_drafter(s, drafter.name, error)",
        "raise",
        ("drafters::test_a_drafter_may_fail_anywhere[open]",),
    ),
    Mutant(
        "the drafter's state is not closed",
        f"{CORE}:Engine.close",
        "self._close_drafter(sequence)",
        "pass",
        ("drafters::test_every_row_is_given_back[draft_model]",),
    ),
    Mutant(
        "the cache row is not given back",
        f"{CORE}:Engine.close",
        "self.target.cache.close_row(sequence.row)",
        "pass",
        ("drafters::test_every_row_is_given_back[ngram]",),
    ),
    Mutant(
        "who is still being filled takes part in the cycle",
        f"{CORE}:Engine.step",
        "if s not in filling",
        "if True",
        ("batching::test_a_long_prompt_does_not_stop_the_others",),
    ),
    Mutant(
        "a chunk that failed is not rolled back",
        f"{CORE}:Engine._fill",
        "self.target.cache.truncate(s.row, cached)",
        "pass",
        ("batching::test_a_forward_that_fails_once_leaves_no_trace[greedy-0-ngram]",),
    ),
    Mutant(
        "hidden states of a prompt's chunks are forgotten",
        f"{CORE}:Engine._fill",
        "s.hidden += output.hidden or []",
        "pass",
        ("batching::test_a_forward_that_fails_once_leaves_no_trace[greedy-1-mtp]",),
    ),
    Mutant(
        "a forward that failed is not tried again",
        f"{CORE}:Engine._cycle",
        "return list(map(self._verify_alone, sequences, drafts, cached))",
        "raise",
        ("batching::test_a_forward_that_fails_once_leaves_no_trace[greedy-3-ngram]",),
    ),
    Mutant(
        "a forward that failed is not rolled back",
        f"{CORE}:Engine._verify_alone",
        "self.target.cache.truncate(s.row, cached)",
        "pass",
        ("batching::test_a_forward_that_fails_once_leaves_no_trace[greedy-4-ngram]",),
    ),
    Mutant(
        "a draft that cannot be verified fails the request",
        f"{CORE}:Engine._verify_alone",
        "(draft, Draft()) if draft.tokens else (draft,)",
        "(draft,)",
        ("batching::test_a_draft_that_cannot_be_verified_costs_the_speculation[greedy]",),
    ),
    Mutant(
        "the drafter stays after an unverified draft",
        f"{CORE}:Engine._verify_alone",
        "if s.drafter:",
        "if False:",
        ("batching::test_a_draft_that_cannot_be_verified_costs_the_speculation[greedy]",),
    ),
    Mutant(
        "only the pending token is fed",
        f"{CORE}:Engine._forward",
        "s.tokens[lengths[s.row] :]",
        "s.tokens[-1:]",
        ("lossless::test_exactly_the_prefix_before_the_first_wrong_token_is_kept[greedy-0]",),
    ),
    Mutant(
        "the penalty forgets what was generated",
        f"{CORE}:Engine._settle",
        "s.tokens, draft.tokens)\n",
        "s.request.prompt, draft.tokens)\n",
        ("requests::test_greedy_output_does_not_depend_on_the_seed_and_knows_the_penalty",),
    ),
    Mutant(
        "prefills are measured as passes",
        f"{CORE}:Engine._settle",
        "all(s.num_steps for s in sequences)",
        "True",
        ("controller::test_passes_are_measured_with_all_their_rows_and_prefills_not_at_all",),
    ),
    Mutant(
        "passes are measured as if of one row each",
        f"{CORE}:Engine._settle",
        "len(draft.tokens) + 1 for",
        "1 for",
        ("controller::test_passes_are_measured_with_all_their_rows_and_prefills_not_at_all",),
    ),
    Mutant(
        "noise counts positions from the answer's start",
        f"{CORE}:Engine._judge",
        "len(s.tokens)",
        "len(s.output)",
        ("lossless::test_exactly_the_prefix_before_the_first_wrong_token_is_kept[sampled-0]",),
    ),
    Mutant(
        "sampled text is always judged by rejection",
        f"{CORE}:Engine._judge",
        "sampling.is_coupled",
        "sampling.is_greedy",
        ("lossless::test_exactly_the_prefix_before_the_first_wrong_token_is_kept[sampled-2]",),
    ),
    Mutant(
        "one faulty state costs all their drafts",
        f"{CORE}:Engine._propose",
        "if len(group) > 1:",
        "if False:",
        ("controller::test_a_batch_with_one_faulty_state_keeps_the_speculation_of_the_others",),
    ),
    Mutant(
        "too few drafts are not noticed",
        f"{CORE}:Engine._propose",
        "len(proposed) != len(group)",
        "False",
        ("drafters::test_fewer_drafts_than_requests_cost_the_drafter",),
    ),
    Mutant(
        "a bad draft ends the request",
        f"{CORE}:Engine._propose",
        "self._lose_drafter(s, drafter.name, error)",
        "raise",
        ("drafters::test_a_drafter_that_fails_costs_its_request_the_speculation_never_the_answer",),
    ),
    Mutant(
        "a draft longer than asked for is taken",
        f"{CORE}:Engine._check_draft",
        "len(draft.tokens) > limit",
        "False",
        ("drafters::test_a_drafter_that_fails_costs_its_request_the_speculation_never_the_answer",),
    ),
    Mutant(
        "negative probs are taken",
        f"{CORE}:Engine._check_draft",
        "draft.probs.min() >= 0 and ",
        "",
        ("drafters::test_probs_that_cannot_be_are_a_failure_of_the_drafter_where_they_are_read",),
    ),
    Mutant(
        "a token that q excludes is taken",
        f"{CORE}:Engine._check_draft",
        "drawn.min() > 0 and ",
        "",
        ("drafters::test_probs_that_cannot_be_are_a_failure_of_the_drafter_where_they_are_read",),
    ),
    Mutant(
        "probs that do not sum to 1 are taken",
        f"{CORE}:Engine._check_draft",
        "off < 1e-3",
        "True",
        ("drafters::test_probs_that_cannot_be_are_a_failure_of_the_drafter_where_they_are_read",),
    ),
    Mutant(
        "probs of another shape are taken",
        f"{CORE}:Engine._check_draft",
        "draft.probs.shape != (len(draft.tokens), self.target.vocab_size)",
        "False",
        ("drafters::test_probs_that_cannot_be_are_a_failure_of_the_drafter_where_they_are_read",),
    ),
    Mutant(
        "probs are checked where nobody reads them",
        f"{CORE}:Engine._check_draft",
        " and not sampling.is_coupled",
        "",
        ("drafters::test_probs_that_cannot_be_are_a_failure_of_the_drafter_where_they_are_read",),
    ),
    Mutant(
        "negative ids are proposed",
        f"{CORE}:Engine._check_tokens",
        "0 <= token <",
        "token <",
        ("drafters::test_a_drafter_that_fails_costs_its_request_the_speculation_never_the_answer",),
    ),
    Mutant(
        "one token too few is truncated",
        f"{CORE}:Engine._commit",
        "self.target.cache.truncate(s.row, len(s.tokens) - 1)",
        "self.target.cache.truncate(s.row, min(verified, len(s.tokens)))",
        ("lossless::test_the_kv_cache_advances_by_what_was_emitted_not_by_what_was_proposed",),
    ),
    Mutant(
        "refused drafts stay in the cache",
        f"{CORE}:Engine._commit",
        "self.target.cache.truncate(s.row, len(s.tokens) - 1)",
        "pass",
        ("lossless::test_the_kv_cache_advances_by_what_was_emitted_not_by_what_was_proposed",),
    ),
    Mutant(
        "a drafter that cannot observe ends the request",
        f"{CORE}:Engine._commit",
        "self._lose_drafter(s, s.drafter.name, error)",
        "raise",
        ("drafters::test_a_drafter_may_fail_anywhere[observe]",),
    ),
    Mutant(
        "text that was read stays unread",
        f"{CORE}:Engine._record",
        "record.unread = 0",
        "pass",
        ("controller::test_a_drafter_that_costs_nothing_is_judged_by_what_came[0.0]",),
    ),
    Mutant(
        "text that was missed is thought to be read",
        f"{CORE}:Engine._record",
        "record.unread += len(tokens)",
        "pass",
        ("controller::test_a_drafter_that_costs_nothing_is_judged_by_what_came[0.0]",),
    ),
    Mutant(
        "a guess that fails ends the request",
        f"{CORE}:Engine._record",
        "return self._lose_drafter(s, name, error)",
        "raise",
        ("controller::test_a_guess_that_fails_costs_the_drafter_and_not_the_answer",),
    ),
    Mutant(
        "who has nothing to propose may be chosen",
        f"{CORE}:Engine._candidates",
        "if self._guess(s, n, 1) != []",
        "if True",
        ("controller::test_who_has_nothing_to_propose_is_not_chosen",),
    ),
    Mutant(
        "a lost drafter goes without a warning",
        f"{CORE}:Engine._go_on_plainly",
        's.warnings.append(f"{why}: went on without speculation")',
        "pass",
        ("drafters::test_a_drafter_that_fails_costs_its_request_the_speculation_never_the_answer",),
    ),
    Mutant(
        "a lost drafter's state is not closed",
        f"{CORE}:Engine._go_on_plainly",
        "self._close_drafter(s)",
        "s.drafter = None",
        ("drafters::test_a_drafter_that_fails_costs_its_request_the_speculation_never_the_answer",),
    ),
    Mutant(
        "a drafter that cannot close ends the request",
        f"{CORE}:Engine._close_drafter",
        's.warnings.append(f"drafter {drafter.name} failed to close: {in_short(error)}")',
        "raise",
        ("drafters::test_a_drafter_may_fail_anywhere[close]",),
    ),
    Mutant(
        "plain decoding has one seed",
        f"{CORE}:plain_decode",
        "Noise(seed)",
        "Noise(0)",
        ("lossless::test_exactly_the_prefix_before_the_first_wrong_token_is_kept[sampled-0]",),
    ),
    Mutant(
        "a measurement warms up and counts",
        f"{CORE}:Engine.warm_up",
        "self._start_counting()",
        "pass",
        ("controller::test_all_is_run_at_one_and_k_plus_1_rows_before_a_measurement_counts",),
    ),
    Mutant(
        "noise does not know the position",
        "drafters.noise:Noise._key",
        "self._seed ^ position",
        "self._seed",
        ("noise::test_choices_are_distributed_as_the_weights_and_neighbours_are_independent",),
    ),
    Mutant(
        "all uses have the same numbers",
        "drafters.noise:Noise._key",
        ") + use)",
        ") + 0)",
        ("noise::test_uniform_numbers_are_uniform_and_their_uses_independent",),
    ),
    Mutant(
        "seeds of both signs are one",
        "drafters.noise:Noise.__init__",
        "+ (seed < 0)",
        "",
        ("noise::test_every_bit_of_a_seed_counts",),
    ),
    Mutant(
        "weights are not checked for NaN",
        "drafters.noise:Noise.choose",
        "not 0 < w[best] < np.inf",
        "False",
        ("noise::test_weights_that_are_no_numbers_are_an_error[10]",),
    ),
    Mutant(
        "the earliest match is proposed",
        "drafters.ngram:NgramIndex.extend",
        "self._followed_at[tuple(text[end - size : end])] = end",
        "self._followed_at.setdefault(tuple(text[end - size : end]), end)",
        ("drafters::test_the_index_agrees_with_a_brute_force_search",),
    ),
    Mutant(
        "an n-gram of a whole text is not found",
        "drafters.ngram:NgramIndex.extend",
        "size <= end",
        "size < end",
        ("drafters::test_the_index_agrees_with_a_brute_force_search",),
    ),
    Mutant(
        "the shortest suffix is looked up first",
        "drafters.ngram:NgramIndex.__init__",
        "range(largest, smallest - 1, -1)",
        "range(smallest, largest + 1)",
        ("drafters::test_the_index_agrees_with_a_brute_force_search",),
    ),
    Mutant(
        "a periodic draft is one token off",
        "drafters.ngram:NgramIndex.continuation",
        "len(text) - start\n",
        "len(text) - start - 1 or 1\n",
        ("drafters::test_a_draft_reads_on_into_itself_in_periodic_text",),
    ),
    Mutant(
        "n-grams miss the target's own token",
        "drafters.ngram:NgramDrafter.observe",
        "verdict.tokens",
        "verdict.tokens[: verdict.accepted]",
        ("controller::test_who_was_passed_over_proposes_as_if_it_had_been_there[ngram]",),
    ),
    Mutant(
        "what a failed draft left behind is kept",
        "drafters.small_model:SmallModelDrafter.propose_batch",
        "cache.truncate(state.row, length)",
        "pass",
        ("controller::test_a_fault_in_a_batch_of_model_drafts_leaves_the_others_as_if_alone",),
    ),
    Mutant(
        "a draft does not know its own tokens",
        "drafters.small_model:SmallModelDrafter.propose_batch",
        "texts[i].append(token)",
        "pass",
        ("drafters::test_a_draft_knows_the_repetition_penalty_and_its_own_tokens",),
    ),
    Mutant(
        "the draft model keeps its row",
        "drafters.small_model:SmallModelDrafter.close",
        "self._draft.cache.close_row(state.row)",
        "pass",
        ("drafters::test_every_row_is_given_back[draft_model]",),
    ),
    Mutant(
        "the head forgets the true pairs",
        "drafters.mtp_head:MtpHeadDrafter._draft",
        "self._cache.lengths[state.row] + len(state.tokens) for",
        "self._cache.lengths[state.row] for",
        ("lossless::test_acceptance_is_in_the_expected_range",),
    ),
    Mutant(
        "who was passed over does not observe",
        "drafters.auto:AutoDrafter.observe",
        "self._drafters[name].observe(own",
        "is_chosen and self._drafters[name].observe(own",
        ("controller::test_who_was_passed_over_proposes_as_if_it_had_been_there[ngram]",),
    ),
    Mutant(
        "who was passed over is told of a draft",
        "drafters.auto:AutoDrafter.observe",
        "replace(verdict, drafted=0)",
        "verdict",
        ("controller::test_who_was_passed_over_is_told_of_no_draft",),
    ),
    Mutant(
        "the first drafter always proposes",
        "drafters.auto:AutoDrafter.select",
        "state.chosen = name",
        "pass",
        ("controller::test_who_was_passed_over_proposes_as_if_it_had_been_there[ngram]",),
    ),
    Mutant(
        "who was opened before a fault is not closed",
        "drafters.auto:AutoDrafter.open",
        "self._close(states)",
        "pass",
        ("controller::test_who_was_opened_before_one_that_raises_is_closed",),
    ),
    Mutant(
        "a drafter that cannot close keeps others open",
        "drafters.auto:AutoDrafter._close",
        "stack.callback(self._drafters[name].close, own)",
        "self._drafters[name].close(own)",
        ("controller::test_all_of_several_drafters_are_closed_also_where_one_raises",),
    ),
    Mutant(
        "a drafter that hung once is never tried again",
        "drafters.timed:TimedDrafter._call",
        "if self._thread.is_alive():",
        "if True:",
        ("drafters::test_a_loop_in_a_drafter_is_ended",),
    ),
    Mutant(
        "calls wait for a drafter that hangs",
        "drafters.timed:TimedDrafter._call",
        "self._is_hanging = True",
        "pass",
        ("drafters::test_a_loop_in_a_drafter_is_ended",),
    ),
    Mutant(
        "records do not age without drafts",
        "control.controller:Acceptance.observe",
        "_KEPT ** min(1 + self.since, _OLDEST)",
        "_KEPT",
        (
            "controller::test_a_record_ages_with_the_text_and_knows_how_often_there_was_nothing_to_propose",
        ),
    ),
    Mutant(
        "positions behind a refusal count as reached",
        "control.controller:Acceptance.observe",
        "self.count(kept, min(drafted, accepted + 1), accepted)",
        "self.count(kept, drafted, accepted)",
        ("controller::test_the_record_estimates_each_position_by_itself",),
    ),
    Mutant(
        "an old reach is used again",
        "control.controller:Acceptance.observe",
        "self._reach = []",
        "pass",
        ("controller::test_without_drafts_it_probes_now_and_then_and_comes_back",),
    ),
    Mutant(
        "coverage stays 1",
        "control.controller:Acceptance.observe",
        "(1 - _KEPT) * ((drafted > 0) - self.coverage)",
        "0",
        (
            "controller::test_a_record_ages_with_the_text_and_knows_how_often_there_was_nothing_to_propose",
        ),
    ),
    Mutant(
        "the refused token counts as accepted",
        "control.controller:Acceptance.count",
        "i < accepted",
        "i <= accepted",
        ("controller::test_the_record_estimates_each_position_by_itself",),
    ),
    Mutant(
        "old cycles count as much as new ones",
        "control.controller:Acceptance.count",
        "[kept * x for x in self.reached] + grown",
        "self.reached + grown",
        ("controller::test_the_record_estimates_each_position_by_itself",),
    ),
    Mutant(
        "probes are never made",
        "control.controller:Controller.plan",
        "self._saved.get(name, 0.0) + cycle.budget()",
        "0.0",
        ("controller::test_without_drafts_it_probes_now_and_then_and_comes_back",),
    ),
    Mutant(
        "the width of a batch is free",
        "control.plans:evaluate",
        "ms += prices.width_ms * width",
        "pass",
        ("controller::test_k_falls_as_the_batch_fills_up",),
    ),
    Mutant(
        "drafts go on where a token is not worth its row",
        "control.plans:gains_of",
        "worth <= cost",
        "False",
        ("controller::test_the_joint_choice_is_the_best_of_all_choices[1-('own', 'free')]",),
    ),
    Mutant(
        "rows cost nothing",
        "control.plans:gains_of",
        "total += worth - cost",
        "total += worth",
        ("controller::test_the_choice_is_the_best_of_all_k_by_the_formula[0.1-0.5]",),
    ),
    Mutant(
        "who joins a model loses nothing",
        "control.plans:_run",
        "gain - lost[i] - before",
        "gain - before",
        ("controller::test_the_joint_choice_is_the_best_of_all_choices[0-('own', 'other')]",),
    ),
    Mutant(
        "steps of a model are free",
        "control.plans:_run",
        "gain - step",
        "gain",
        ("controller::test_the_choice_is_the_best_of_all_k_by_the_formula[0.1-0.3]",),
    ),
    Mutant(
        "the first rate is the last",
        "control.plans:best_plan",
        "rate = found.rate\n",
        "break\n",
        ("controller::test_the_choice_is_the_best_of_all_k_by_the_formula[0.1-0.5]",),
    ),
    Mutant(
        "refused positions count as reached",
        "control.statistics:Statistics.record",
        "[1] * min(drafted, accepted + 1)",
        "[1] * drafted",
        ("requests::test_the_prediction_is_the_formula_of_the_field",),
    ),
    Mutant(
        "the histogram counts what was drafted",
        "control.statistics:Statistics.record",
        "[0] * accepted + [1]",
        "[0] * drafted + [1]",
        ("requests::test_figures_divide_what_their_formulas_say",),
    ),
    Mutant(
        "cycles without a draft are in the statistics",
        "control.statistics:Statistics.record",
        "if drafted:",
        "if True:",
        ("requests::test_figures_divide_what_their_formulas_say",),
    ),
    Mutant(
        "the mean acceptance length leaves out the target's token",
        "control.statistics:Statistics.mean_acceptance_length",
        "1 + accepted",
        "accepted",
        ("requests::test_figures_divide_what_their_formulas_say",),
    ),
    Mutant(
        "the prefill's token counts per pass",
        "control.statistics:Statistics.tokens_per_pass",
        " - self.prefills",
        "",
        ("requests::test_figures_divide_what_their_formulas_say",),
    ),
    Mutant(
        "the engine's own time is not in a token's",
        "control.statistics:Statistics.ms_per_token",
        " + self.other_ms",
        "",
        ("requests::test_figures_divide_what_their_formulas_say",),
    ),
    Mutant(
        "prefills count as passes",
        "control.statistics:Statistics.record_times",
        "if is_prefill:",
        "if False:",
        ("requests::test_figures_divide_what_their_formulas_say",),
    ),
    Mutant(
        "sums forget the other's positions",
        "control.statistics:Statistics.__add__",
        "_add(getattr(total, name), theirs)",
        "pass",
        ("requests::test_figures_divide_what_their_formulas_say",),
    ),
    Mutant(
        "alpha is the share of all that was drafted",
        "control.statistics:Statistics.costs",
        "sum(self.reached_at)",
        "self.num_draft_tokens",
        ("requests::test_the_prediction_is_the_formula_of_the_field",),
    ),
    Mutant(
        "the prediction forgets the passes' own tokens",
        "control.statistics:Statistics.predicted_speedup",
        "(self.target_passes + drafted)",
        "drafted",
        ("requests::test_the_prediction_is_the_formula_of_the_field",),
    ),
    Mutant(
        "conditional acceptance divides by what was drafted",
        "control.statistics:Statistics.per_position",
        "map(ratio, accepted, reached)",
        "map(ratio, accepted, self.drafted_at)",
        ("requests::test_figures_divide_what_their_formulas_say",),
    ),
    Mutant(
        "every difference is a near-tie",
        "serving.comparison:_first_difference",
        'is_tie = ours in totals and top[0]["total"] - totals[ours] <= near_tie',
        "is_tie = True",
        ("requests::test_a_wrong_token_is_called_a_bug",),
    ),
    Mutant(
        "no difference is a near-tie",
        "serving.comparison:_first_difference",
        '"near-tie" if is_tie else ',
        "",
        ("requests::test_a_difference_between_equal_scores_is_called_a_near_tie[1.0-near-tie]",),
    ),
    Mutant(
        "the slowest run is the median",
        "serving.comparison:_median_run",
        "(len(runs) - 1) // 2",
        "-1",
        ("requests::test_a_comparison_of_three_runs_takes_medians_and_says_when_it_was_disturbed",),
    ),
]

if __name__ == "__main__":
    sys.exit(main())
