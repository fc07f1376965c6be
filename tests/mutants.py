"""Faults on purpose: each mutant breaks one piece of the source, and the tests named must notice.

    python -m tests.mutants
    python -m tests.mutants --only "truncation keeps one token too many"

Each in a fork of its own: put the broken code into the function that everybody holds already, run
its few tests, and see one of them fail. The models are loaded once, before the forks. First the
same tests run with nothing broken, and must pass. A mutant that survives is a hole in the tests. A
piece that does not occur exactly once in its function is an error, so the list cannot go stale in
silence. Prints a table; exits with 1 if any survives.

Not covered: constants of modules and the bodies of classes; what runs only while models are loaded.
"""

import argparse
import gc
import importlib
import inspect
import mmap
import multiprocessing
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

from kernels.library import why_not

LIMIT_S = 120.0  # a mutant may hang: then it was noticed
ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    "core": "08_speculative_decoding", "messages": "messages", "panel": "drafters.panel",
    "base": "drafters.base", "ngram": "drafters.ngram",
    "small_model": "drafters.small_model", "mtp_head": "drafters.mtp_head",
    "dflash": "drafters.dflash", "timed": "drafters.timed", "planner": "control.planner",
    "acceptance": "control.acceptance", "controller": "control.controller",
    "rest": "control.rest",
    "costs": "control.costs",
    "statistics": "control.statistics", "buffers": "kernels.buffers",
    "sampling": "sampling", "faults": "serving.faults", "trace": "serving.trace",
    "text": "sampling", "parsing": "serving.parsing", "prompts": "models.prompts",
    "worker": "serving.worker", "head": "drafters.head", "suffix": "drafters.suffix",
    "comparison": "serving.comparison", "connection": "serving.connection",
    "prefix": "kernels.prefix", "modules": "kernels.modules", "experts": "kernels.experts",
    "kernels": "kernels.forward", "decoder": "kernels.decoder",
    "story": "serving.story", "tree": "drafters.tree",
    "recurrent": "kernels.states", "rules": "kernels.recurrent", "rowwise": "kernels.rowwise",
}  # fmt: skip


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
    inner = (getattr(found, name, None) for name in ("fget", "func", "__func__"))
    return inspect.unwrap(next(filter(None, inner), found))


def broken(mutant: Mutant) -> tuple[FunctionType, FunctionType]:
    """The function, and what it becomes."""
    short, path = mutant.place.split(":")
    module = importlib.import_module(MODULES[short])
    function = function_at(module, path)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutant.old) == 1, f"{mutant.old!r} is not in {mutant.place} exactly once"
    scope = ModuleType(module.__name__)
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


def run_tests(tests: tuple[str, ...], mutant: Mutant | None, output: int) -> None:
    """In a process of its own: exits as pytest does, and speaks to the file `output`."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 3
    try:
        options = ["-q", "--tb=short", "-o", "addopts=-m 'not slow'", "-p", "no:cacheprovider"]
        if mutant:
            put_in(mutant)
            options.append("-x")
        nodes = [f"tests/test_{test.replace('::', '.py::', 1)}" for test in tests]
        code = int(pytest.main([*options, *nodes]))
        sys.stdout.flush()
    finally:  # whatever it was, and with threads that hang
        os._exit(code)


class Run:
    """Tests under way in a fork, with one mutant or none."""

    def __init__(self, tests: tuple[str, ...], mutant: Mutant | None) -> None:
        self.mutant, self.began, self.output = mutant, time.monotonic(), tempfile.TemporaryFile()
        given = tests, mutant, self.output.fileno()
        self.process = multiprocessing.get_context("fork").Process(target=run_tests, args=given)
        self.process.start()
        self.limit_s = LIMIT_S if mutant else 10 * LIMIT_S

    def fate(self) -> str | None:
        """passed; failed, if a test did or the process crashed; hung; None while it runs."""
        if self.process.is_alive() and time.monotonic() < self.began + self.limit_s:
            return None
        is_hanging = self.process.is_alive()
        self.process.kill()
        self.process.join()
        code = self.process.exitcode or 0  # below 0 it was a signal's
        assert is_hanging or code < 2, f"pytest could not run:\n{self.said()}"
        return "hung" if is_hanging else "failed" if code else "passed"

    def said(self) -> str:
        """What pytest printed."""
        self.output.seek(0)
        return self.output.read().decode(errors="replace")


def ended(jobs: int, wanted: list[tuple[tuple[str, ...], Mutant | None]]) -> Iterator[Run]:
    """Run these tests, each with its mutant, `jobs` at a time; as they end."""
    waiting, running = wanted[::-1], list[Run]()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(Run(*waiting.pop()))
        wait([run.process.sentinel for run in running], 1.0)
        for run in list(running):
            if run.fate():
                running.remove(run)
                yield run


def load_once() -> None:
    """Import all, and load the engine of the fixture `demo_engine`, which every fork inherits.

    A test that loads an engine gets another one, as in the ordinary run: it may spoil it.
    """
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take longer to start than a test
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    core = importlib.import_module("conftest").core
    for file in {test.partition("::")[0] for mutant in MUTANTS for test in mutant.tests}:
        importlib.import_module(f"test_{file}")
    # What a fork writes to the KV cache is its own: mmap's default would share it with all.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    importlib.import_module("kernels.buffers").mmap = partial(mmap.mmap, flags=flags)
    load = core.load_engine
    engine = load(core.Options(model="embedded", fixed_k=True, kernels=False))

    def load_or_inherit(options: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        in_python = replace(options, kernels=False)  # where the mutants are, but for the kernels'
        if caller == "conftest":
            return engine
        return load(options if caller in ("test_cache", "test_kernels", "test_tree") else in_python)

    core.load_engine = load_or_inherit
    gc.collect()
    gc.freeze()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", help="this mutant alone, or those that begin so")
    parser.add_argument("--part", default="1/1", help="2/4: of four parts the second")
    parser.add_argument("--jobs", type=int, default=2, help="so many at a time")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    size = -(-len(MUTANTS) // parts)
    chosen = MUTANTS[(part - 1) * size : part * size]
    chosen = [mutant for mutant in chosen if mutant.name.startswith(options.only or "")]
    if not chosen:
        parser.error(f"no mutant's name begins with {options.only!r}")
    began = time.monotonic()
    load_once()
    for mutant in chosen:
        broken(mutant)
    every = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
    shares = [every[i :: options.jobs] for i in range(min(options.jobs, len(every)))]
    for run in ended(options.jobs, [(tests, None) for tests in shares]):
        if run.fate() != "passed":
            print("these tests do not pass without any mutant:", run.said(), sep="\n")
            return 1
    print(f"{len(every)} tests pass with none; {time.monotonic() - began:.0f} s", flush=True)
    survivors = 0
    for i, run in enumerate(ended(options.jobs, [(each.tests, each) for each in chosen]), 1):
        survivors += run.fate() == "passed"
        fate = {"passed": "SURVIVES", "failed": "killed", "hung": "hung"}[run.fate()]
        took_s = time.monotonic() - run.began
        print(f"{i:3}/{len(chosen)}  {fate:8}  {took_s:4.1f} s  {run.mutant.name}", flush=True)
    print(f"{survivors} of {len(chosen)} survive; {time.monotonic() - began:.0f} s")
    return int(survivors > 0)


RAGGED = "cache::test_ragged_rows_with_random_truncation_equal_a_cache_free_recompute"
NO_NAN = "cache::test_a_forward_that_fails_leaves_no_nan_to_the_next_request"
BRANCH = "cache::test_what_is_kept_of_a_branch_is_cached_as_if_it_had_been_fed_alone"
COMPACT = "batching::test_rows_stay_compact_and_keep_what_they_hold"
MANY = "batching::test_many_requests_over_eight_rows_all_equal_their_solo_runs"
NO_TRACE = "batching::test_a_forward_that_fails_once_leaves_no_trace"
UNVERIFIED = "batching::test_a_draft_that_cannot_be_verified_costs_the_speculation[greedy]"
PREFIX = "lossless::test_exactly_the_prefix_before_the_first_wrong_token_is_kept"
ADVANCES = "lossless::test_the_kv_cache_advances_by_what_was_emitted_not_by_what_was_proposed"
REFUSED = "choosing::test_rows_that_are_no_numbers_are_refused"
EVERY_P_Q = "sampling::test_verify_emits_exactly_p_for_every_small_p_and_q"
ONLY_SHARED = "prefix::test_only_what_is_shared_from_the_beginning_counts"
KEEPS_P = "sampling::test_verify_keeps_the_target_distribution"
GIVEN_BACK = "drafters::test_every_row_is_given_back"
COSTS_IT = "drafters::test_a_drafter_that_fails_costs_its_request_the_speculation_never_the_answer"
ANYWHERE = "drafters::test_a_drafter_may_fail_anywhere"
BAD_PROBS = "drafters::test_probs_that_cannot_be_are_a_failure_of_the_drafter_where_they_are_read"
PENALTY = "drafters::test_a_draft_knows_the_repetition_penalty_and_its_own_tokens"
BRUTE_FORCE = "drafters::test_the_index_agrees_with_a_brute_force_search"
ONE_LOST = "controller::test_of_several_drafters_only_the_one_that_fails_is_lost"
NO_DRAFT = "controller::test_who_was_passed_over_is_told_of_no_draft"
WHAT_CAME = "controller::test_a_drafter_that_costs_nothing_is_judged_by_what_came[0.0]"
MEASURED = "controller::test_passes_are_measured_with_all_their_rows_and_prefills_not_at_all"
AGES = (
    "controller::test_a_record_ages_with_the_text_and_knows_how_often_there_was_nothing_to_propose"
)
EVIDENCE = "controller::test_proposals_with_more_evidence_have_a_record_of_their_own"
STOPPED = "controller::test_where_a_draft_stopped_counts_as_reached_and_not_accepted"
SEVERAL_FORGET = "mtp::test_every_layer_forgets_what_was_refused"
DOUBTS = "controller::test_a_model_s_draft_ends_with_the_token_that_it_doubts[mtp]"
RESTS = "controller::test_where_drafts_lose_by_the_clock_nothing_is_chosen_for_a_while[22.0]"
OTHERS_REST = "controller::test_batches_of_other_sizes_and_others_who_may_draft_rest_by_themselves"
COMES_BACK = "controller::test_a_request_that_drafts_nothing_beside_others_that_do_comes_back"
JOINS = "controller::test_a_new_request_ends_a_rest_as_far_as_it_may_be_different"
KEPT = "controller::test_requests_that_go_on_keep_what_was_chosen_until_another_one_joins"
PAUSED = "controller::test_what_rests_drafts_nothing_says_so_and_knows_what_was_missed[coupled]"
EACH_PLACE = "controller::test_the_record_estimates_each_position_by_itself"
PROBES = "controller::test_without_drafts_it_probes_now_and_then_and_comes_back"
BEST_K = "controller::test_the_choice_is_the_best_of_all_k_by_the_formula"
BEST_OF_ALL = "controller::test_one_choice_for_all_is_nearly_the_best_of_all_choices"
TOLD_LATE = "controller::test_who_is_told_late_proposes_as_if_it_had_been_told_at_once[greedy]"
NOT_DEAR = "controller::test_neither_text_to_read_nor_a_cycle_slow_as_a_whole_makes_a_step_dear"
FIGURES = "requests::test_figures_divide_what_their_formulas_say"
SLOW_SENDERS = "connection::test_a_client_has_so_much_time_for_what_it_sends"
TAKEN_BACK = "recurrent::test_what_was_taken_back_leaves_no_trace[qwen3_5_text-1]"
SLOW_READERS = "connection::test_a_client_has_to_take_its_answer"
ANY_CUT = "connection::test_a_request_is_read_alike_however_it_is_cut"
PEP_3333 = "connection::test_an_environ_is_what_pep_3333_has"
PREDICTION = "requests::test_the_prediction_is_the_formula_of_the_field"

MUTANTS = [Mutant(name, place, old, new, tuple(tests)) for name, place, old, new, *tests in [
    # ---------------------------------------------------------------- KV cache and truncation
    ("truncation keeps one token too many", "core:SlotCache.truncate",
     "self.lengths[row] = length", "self.lengths[row] = min(length + 1, self.lengths[row])",
     "cache::test_truncating_touches_no_tensor"),
    ("truncation lengthens a row", "core:SlotCache.truncate",
     "<= self.lengths[row]:", "<= self.max_length:",
     "cache::test_a_row_cannot_be_truncated_to_more_than_it_holds"),
    ("a branch is not moved", "core:SlotCache.keep",
     "buffer[slot, :, begin : begin + count] = buffer[slot, :, moved]", "pass", BRANCH),
    ("a branch is moved over the pending token", "core:SlotCache.keep",
     "buffer[slot, :, begin : begin + count] =", "buffer[slot, :, begin - 1 : begin + count - 1] =",
     BRANCH),
    ("one token too many is kept", "core:SlotCache.keep",
     "self.truncate(row, begin + count)", "self.truncate(row, begin + count + 1)", ADVANCES),
    ("one token too few is kept", "core:SlotCache.keep",
     "self.truncate(row, begin + count)", "self.truncate(row, begin + count - 1)", ADVANCES),
    ("one token more than the cache holds is let in", "core:SlotCache.place",
     "end > self.max_length", "end > self.max_length + 1",
     "cache::test_a_row_that_would_outgrow_the_cache_is_refused_before_anything_is_written"),
    ("what a failed forward wrote is not noted", "core:SlotCache.place",
     "max(self._written[slot], last)", "self._written[slot]", NO_NAN),
    ("a pad counts as the text's token", "core:Place.real",
     "width - counts[:, None]", "width - counts[:, None] - 1", f"{RAGGED}[llama-plain]"),
    ("a moved row loses its last token", "core:SlotCache.close_row",
     "buffer[slot, :, :length] = buffer[source, :, :length]",
     "buffer[slot, :, : length - 1] = buffer[source, :, : length - 1]", COMPACT, MANY),
    ("closing a row moves none into the gap", "core:SlotCache.close_row",
     "for buffer in buffers:", "for buffer in ():", COMPACT, MANY),
    ("a closed row keeps its length", "core:SlotCache.close_row",
     "self.lengths[row] = self._written[slot] = 0", "self._written[slot] = 0",
     f"{GIVEN_BACK}[ngram]"),
    ("a closed row is not given back", "core:SlotCache.close_row",
     "self._free.append(row)", "pass", f"{GIVEN_BACK}[ngram]"),
    ("a dirty slot is not scrubbed", "core:SlotCache.close_row",
     "scrub(buffers, slot, self._written[slot])", "pass", NO_NAN),
    ("scrubbing leaves the values", "buffers:scrub",
     "for buffer in buffers:", "for buffer in buffers[::2]:", NO_NAN),
    ("texts are padded on the right", "core:Place.arrange",
     "arranged[b, -len(row) :] = row", "arranged[b, : len(row)] = row", f"{RAGGED}[llama-plain]"),
    ("states of pads are handed out", "core:Place.part",
     "row[len(row) - n :]", "row[:n]", f"{RAGGED}[llama-plain]"),
    ("a token sees the next one", "core:Place.mask",
     "keys > queries", "keys > queries + 1", f"{RAGGED}[llama-plain]"),
    ("the window is one token longer", "core:Place.mask",
     "keys <= queries - window", "keys < queries - window", f"{RAGGED}[mistral-plain]"),
    ("all layers have the mask of the first", "core:CachedModel._mask",
     "len(set(self.windows.values())) > 1", "False", f"{RAGGED}[gemma2-plain]"),
    # -------------------------------------------------------------------------- probabilities
    ("each row is penalised for the whole draft", "sampling:penalise",
     "draft[:i] + text[:1] * (len(draft) - i)", "draft",
     "requests::test_greedy_output_does_not_depend_on_the_seed_and_knows_the_penalty"),
    ("the penalty knows the last token alone", "sampling:penalise",
     "list(set(text))", "text[-1:]",
     "requests::test_greedy_output_does_not_depend_on_the_seed_and_knows_the_penalty"),
    ("noise is the same at each place of a draft", "core:own_choices",
     "position + i", "position", f"{PREFIX}[sampled-1]"),
    ("greedy choices are not checked for NaN", "sampling:choose",
     "not abs(float(score)) < inf", "False", f"{REFUSED}[None-python-7]"),
    ("scores are not checked for NaN", "sampling:survivors",
     "not isfinite(largest := float(s.max()))", "not (largest := float(s.max()))",
     f"{REFUSED}[nan-python-7]"),
    ("a token that begins within top-p is cut", "sampling:survivors",
     "np.cumsum(whole) - whole", "np.cumsum(whole)",
     "choosing::test_c_chooses_what_python_chooses[(1.3, 0, 0.95, 0.0)]"),
    ("what equals the k-th is cut", "sampling:survivors",
     "s >= s[order[top_k - 1]]", "s > s[order[top_k - 1]]",
     "choosing::test_c_chooses_what_python_chooses[(0.7, 40, 1.0, 0.0)]"),
    ("noise of plain decoding is one position off", "core:sample",
     "len(text))), q", "len(text) - 1)), q", f"{PREFIX}[sampled-0]"),
    ("a drafter penalises the first token alone", "core:sample",
     "text, [])", "text[:1], [])", PENALTY),
    ("weights are taken to sum to 1", "sampling:draw",
     "u * total", "u", "sampling::test_a_token_without_weight_is_never_drawn"),
    ("noise does not know the position", "sampling:Noise._key",
     "self.seed ^ position", "self.seed",
     "noise::test_choices_are_distributed_as_the_weights_and_neighbours_are_independent"),
    ("all uses have the same numbers", "sampling:Noise._key",
     ") + use)", ") + 0)", "noise::test_uniform_numbers_are_uniform_and_their_uses_independent"),
    ("seeds of both signs are one", "sampling:Noise.__init__",
     "+ (seed < 0)", "", "noise::test_every_bit_of_a_seed_counts"),
    ("weights are not checked for NaN", "sampling:Noise.choose",
     "not 0 < w.max() < np.inf", "False",
     "noise::test_weights_that_are_no_numbers_are_an_error[10]"),
    ("the last of equally fast tokens wins", "sampling:Noise.race",
     "times.min()].min()", "times.min()].max()", "choosing::test_of_equal_times_the_lower_id_wins"),
    # --------------------------------------------------------------------------------- verify
    ("the refused draft is emitted", "core:verify",
     'Judgement(chosen, "recovered")', 'Judgement(drafted, "recovered")', f"{PREFIX}[greedy-1]"),
    ("the first draft is always right", "core:verify",
     "drafted != chosen", "drafted != chosen and judged", f"{PREFIX}[greedy-0]"),
    ("p and q are swapped", "core:verify_by_rejection",
     "u * float(q[token]) < float(p[i, token])", "u * float(p[i, token]) < float(q[token])",
     EVERY_P_Q),
    ("p and q are swapped in the residual", "core:verify_by_rejection",
     "residual(p[i], q)", "residual(q, p[i])", EVERY_P_Q),
    ("a rejected token may come back", "core:verify_by_rejection",
     "draw(residual(p[i], q), u)", "draw(p[i], u)", EVERY_P_Q),
    ("the bonus is drawn from the row before", "core:verify_by_rejection",
     "draw(p[-1], u)", "draw(p[-2], u)", f"{KEEPS_P}[model q]"),
    ("all drafts are judged by one number", "core:verify_by_rejection",
     "position + i, ACCEPT", "position, ACCEPT", f"{KEEPS_P}[model q]"),
    ("every draft is judged by the first q", "messages:Draft.q",
     "self.probs[i]", "self.probs[0]", f"{KEEPS_P}[model q]"),
    ("what was not drawn has no q", "messages:Draft.q", "= 1.0", "= 0.0", f"{KEEPS_P}[one-hot q]"),
    ("nothing is recovered from a residual of nothing", "core:residual",
     "more if more.sum() > 0 else p", "more",
     "sampling::test_a_residual_of_nothing_falls_back_to_p"),
    ("the residual is both differences", "core:residual", "clamp_(min=0)", "abs()", EVERY_P_Q),
    # ------------------------------------------------------------------------------- sequence
    ("a cut loses the end of text itself", "core:Sequence.append",
     "return kept\n", "return kept - 1\n",
     "lossless::test_end_of_text_is_cut_at_every_offset_of_a_block[greedy-0]"),
    ("an end of text amid a draft is passed over", "core:Sequence.append",
     "token.id in eos_ids", "kept == len(emitted) and token.id in eos_ids",
     "lossless::test_end_of_text_is_cut_at_every_offset_of_a_block[greedy-0]"),
    ("a stop string amid a draft is passed over", "core:Sequence.append",
     "if self.text.push(token.id, token.kind)",
     "if self.text.push(token.id, token.kind) and kept == len(emitted)",
     "requests::test_a_stop_string_inside_an_accepted_draft_ends_there[0]"),
    ("max_tokens is met one token late", "core:Sequence.append",
     "self.remaining == 1", "self.remaining == 0",
     "lossless::test_max_tokens_inside_a_block_is_met_exactly[greedy-1]"),
    ("the refused token is appended, too", "core:Sequence.append",
     'if judgement.kind != "rejected"', "if True", f"{PREFIX}[greedy-1]"),
    ("the last bytes complete no stop string", "core:Sequence.append",
     "if self.text.finish():", "if False:",
     "requests::test_bytes_at_the_end_may_complete_a_stop_string"),
    ("what may become a stop string is shown", "text:TextStream.release",
     "self._tail.endswith(s[:n])", "False",
     "requests::test_a_partial_stop_string_is_held_back_until_it_is_none"),
    ("what is cut off counts as drafted", "messages:Cycle.num_drafted",
     "len(self.proposals) if self.is_whole else self.num_kept", "len(self.proposals)",
     "lossless::test_end_of_text_is_cut_at_every_offset_of_a_block[greedy-0]"),
    ("what is cut off counts as accepted", "messages:Cycle.num_accepted",
     "min(len(self.emitted) - 1, self.num_kept)", "len(self.emitted) - 1",
     "requests::test_a_cut_before_a_rejection_hides_it_from_everything[0]"),
    # --------------------------------------------------------------------------------- engine
    ("a prompt that fills the context is let in", "prompts:check_prompt",
     "length >= context", "length > context",
     "requests::test_a_prompt_that_cannot_be_is_refused_before_it_has_a_row"),
    ("negative token ids are let in", "prompts:check_prompt",
     "0 <= token <= largest", "token <= largest",
     "requests::test_a_prompt_that_cannot_be_is_refused_before_it_has_a_row"),
    ("max_tokens is not lowered to the room there is", "core:Engine.open",
     "min(request.max_tokens, room)", "request.max_tokens",
     "requests::test_max_tokens_beyond_the_context_is_lowered_and_said"),
    ("the drafters' states are not closed", "core:Engine.close",
     "self.panel.close(s.seat)", "pass", f"{GIVEN_BACK}[draft_model]"),
    ("the cache row is not given back", "core:Engine.close",
     "self.target.cache.close_row(s.row)", "pass", f"{GIVEN_BACK}[ngram]"),
    ("who is still reading takes part in the cycle", "core:Engine.read_prompts",
     "if s not in reading", "if True", "batching::test_a_long_prompt_does_not_stop_the_others"),
    ("hidden states of a prompt's chunks are forgotten", "core:Engine.read_prompts",
     "s.seat.hidden[cached] = {", "_ = {", f"{NO_TRACE}[greedy-1-mtp]"),
    ("a chunk that is read again counts twice", "core:Engine.read_prompts",
     "s.seat.hidden[cached] =", "s.seat.hidden[began] =",
     "batching::test_a_neighbour_s_fault_does_not_let_a_chunk_of_a_prompt_count_twice"),
    ("only the pending token is fed", "core:Engine.forward",
     "s.tokens[lengths[s.row] :]", "s.tokens[-1:]", f"{PREFIX}[greedy-0]"),
    ("prefills are measured as passes", "core:Engine.step",
     "None if has_prefill else times", "times", MEASURED),
    ("the penalty forgets what was generated", "core:Engine.accept",
     "s.tokens, draft.tokens)\n", "s.request.prompt, draft.tokens)\n",
     "requests::test_greedy_output_does_not_depend_on_the_seed_and_knows_the_penalty"),
    ("a refused draft stays in the cache", "core:Engine.accept",
     "cache.keep(s.row, len(tree.tokens), places[: kept - 1])", "pass", ADVANCES),
    ("the pending token is kept in the cache", "core:Engine.accept",
     "places[: kept - 1]", "places[: min(kept, len(draft.tokens))]", ADVANCES),
    ("noise counts positions from the answer's start", "core:Engine.judge",
     "len(s.tokens)", "len(s.output)", f"{PREFIX}[sampled-0]"),
    ("sampled text is always judged by rejection", "core:Engine.judge",
     "sampling.is_coupled", "sampling.is_greedy", f"{PREFIX}[sampled-2]"),
    ("plain decoding has one seed", "core:plain_decode",
     "Noise(seed)", "Noise(0)", f"{PREFIX}[sampled-0]"),
    ("a measurement warms up and counts", "story:uncounted",
     "Totals(engine.panel.choices)", "engine.totals",
     "controller::test_all_is_run_at_one_and_k_plus_1_rows_before_a_measurement_counts"),
    # --------------------------------------------------------------------------------- faults
    ("a forward that failed is not tried again", "faults:_step",
     "cycles |= _step_alone(engine, s, held[s])", "s.fail(KeyError())",
     f"{NO_TRACE}[greedy-3-ngram]"),
    ("a step that failed is not rolled back", "faults:_step_alone",
     "engine.target.cache.truncate(s.row, held)", "pass", f"{NO_TRACE}[greedy-0-ngram]",
     f"{NO_TRACE}[greedy-4-ngram]"),
    ("a draft that failed is not rolled back", "faults:_step_alone",
     "engine.target.cache.truncate(s.row, held)",
     "can_go_on and engine.target.cache.truncate(s.row, held)", UNVERIFIED),
    ("a draft that cannot be verified fails the request", "faults:_step_alone",
     "in (True, False)", "in (False,)", UNVERIFIED),
    ("the drafter stays after an unverified draft", "faults:_step_alone",
     'engine.panel.leave(s.seat, f"a forward failed ({in_short(failure)})")', "pass", UNVERIFIED),
    # ---------------------------------------------------------------------------------- panel
    ("a drafter that cannot open ends the request", "panel:Panel.open",
     "failed[name] = error", "raise", f"{ANYWHERE}[open]"),
    ("one faulty state costs all their drafts", "panel:Panel._ask",
     "if len(seats) > 1:", "if False:",
     "controller::test_a_batch_with_one_faulty_state_keeps_the_speculation_of_the_others"),
    ("too few drafts are not noticed", "panel:Panel._ask",
     "len(proposed) != len(seats)", "False",
     "drafters::test_fewer_drafts_than_requests_cost_the_drafter"),
    ("a bad draft ends the request", "panel:Panel._ask",
     "self._lose(seat, name, error)", "raise", COSTS_IT),
    ("a draft longer than asked for is taken", "panel:Panel._check",
     "count > limit", "False", COSTS_IT),
    ("negative probs are taken", "panel:Panel._check",
     "draft.probs.min() >= 0 and ", "", BAD_PROBS),
    ("a token that q excludes is taken", "panel:Panel._check",
     "drawn.min() > 0 and ", "", BAD_PROBS),
    ("probs that do not sum to 1 are taken", "panel:Panel._check", "off < 1e-3", "True", BAD_PROBS),
    ("probs of another shape are taken", "panel:Panel._check",
     "draft.probs.shape != (count, self._vocab_size)", "False", BAD_PROBS),
    ("probs are checked where nobody reads them", "panel:Panel._check",
     "if count and draft.probs is not None and not sampling.is_coupled",
     "if count and draft.probs is not None", BAD_PROBS),
    ("negative ids are proposed", "panel:Panel._check_tokens", "0 <= token <", "token <", COSTS_IT),
    ("the first drafter always proposes", "panel:Panel.propose",
     "(name, limit) if limit", "(next(iter(seat.states)), limit) if limit", NO_DRAFT),
    ("a draft that was not judged is made anew", "panel:Panel.propose",
     "if seat.draft is None]", "]", f"{NO_TRACE}[greedy-3-mtp]"),
    ("a draft that was judged is handed out again", "panel:Panel.observe",
     "kept), {}, None", "kept), {}, seat.draft", NO_DRAFT,
     f"{PREFIX}[greedy-1]"),
    ("a guess that fails ends the request", "panel:Panel.guess",
     "self._lose(seat, name, error)", "raise",
     "controller::test_a_guess_that_fails_costs_the_drafter_and_not_the_answer"),
    ("a hidden state too many is handed out", "panel:Panel.observe",
     "len(own) - num_rejected]", "len(own) - num_rejected + 1]",
     "drafters::test_drafts_are_known_ids_and_no_more_than_asked_for"),
    ("blocks of a prompt are known by their own tokens", "prefix:PrefixCache._keys",
     "digest.update(", "digest = sha256(", ONLY_SHARED),
    ("the last token of a prompt need not be fed", "prefix:PrefixCache._keys",
     "len(prompt), _SIZE)", "len(prompt) + 1, _SIZE)", ONLY_SHARED),
    ("blocks without hidden states will do", "prefix:PrefixCache.restore",
     "block is None or not block.hidden.keys() >= set(layers)", "block is None",
     "prefix::test_a_head_waits_for_the_hidden_states_that_it_needs"),
    ("the beginning of a prompt is forgotten first", "prefix:PrefixCache._touch",
     "reversed(keys)", "keys",
     "prefix::test_the_end_of_a_prompt_is_forgotten_before_its_beginning"),
    ("a prompt is remembered before it is known to be sound", "core:Engine.forward",
     "lengths, pairs = self.target.cache.lengths,",
     "lengths, pairs = [self.panel.remember_prompt(s.seat, {}) for s in batch]"
     " and self.target.cache.lengths,",
     "prefix::test_a_prompt_that_failed_is_not_remembered"),
    ("chunks of hidden states are handed out backwards", "panel:Seat.read",
     "[*self.hidden.values(), hidden]", "[hidden, *self.hidden.values()]",
     "batching::test_a_prompt_read_in_chunks_gives_the_output_of_one_read_at_once"),
    ("who was passed over does not observe", "panel:Panel.observe",
     "seat.missed.append(came)", "pass", NO_DRAFT),
    ("who drafted hears of it twice", "panel:Panel.observe",
     "seat.heard |= dict.fromkeys(seat.drafts, len(seat.missed))", "pass", NO_DRAFT),
    ("who was passed over is told of a draft", "panel:Panel._catch_up",
     "Verdict(0, ", "Verdict(1, ", NO_DRAFT),
    ("who is asked has not heard of all", "panel:Panel.propose",
     "self._catch_up(seat, name)", "pass", NO_DRAFT),
    ("who is looked at has not heard of all", "panel:Panel.guess",
     "self._catch_up(seat, name)", "pass", TOLD_LATE),
    ("a drafter that cannot catch up ends the request", "panel:Panel._catch_up",
     "self._lose(seat, name, error)", "raise", f"{ONE_LOST}[observe]"),
    ("a drafter that cannot observe ends the request", "panel:Panel.observe",
     "self._lose(seat, name, error)", "raise",
     "controller::test_who_cannot_hear_of_its_own_draft_is_lost"),
    ("a lost drafter is not closed", "panel:Panel._lose",
     "self._close(seat, name)", "seat.states.pop(name, None)", COSTS_IT),
    ("a fault ends the others' drafters", "panel:Panel._lose",
     "self._close(seat, name)", "self.close(seat)", f"{ONE_LOST}[observe]"),
    ("a lost drafter goes without a warning", "panel:Panel._lose",
     "seat.warnings.append(", "str(", COSTS_IT),
    ("of several drafters one stays open", "panel:Panel.close",
     "for name in list(seat.states):", "for name in list(seat.states)[:1]:", f"{ONE_LOST}[close]"),
    ("a drafter that cannot close ends the request", "panel:Panel._close",
     'seat.warnings.append(f"drafter {name} failed to close: {in_short(error)}")', "raise",
     f"{ANYWHERE}[close]"),
    # ------------------------------------------------------------------------------- drafters
    ("the earliest match is proposed", "ngram:NgramIndex.extend",
     "self._followed_at[tuple(text[end - size : end])] = end",
     "self._followed_at.setdefault(tuple(text[end - size : end]), end)", BRUTE_FORCE),
    ("the shortest suffix is looked up first", "ngram:NgramIndex.__init__",
     "range(largest, smallest - 1, -1)", "range(smallest, largest + 1)", BRUTE_FORCE),
    ("a periodic draft is one token off", "ngram:NgramIndex.continuation",
     "len(text) - start\n", "len(text) - start - 1 or 1\n",
     "drafters::test_a_draft_reads_on_into_itself_in_periodic_text"),
    ("n-grams miss the target's own token", "ngram:NgramDrafter.observe",
     "verdict.tokens", "verdict.tokens[: verdict.accepted]",
     "drafters::test_a_rolled_back_state_proposes_like_a_fresh_one"),
    ("the rarest continuation is proposed", "suffix:SuffixIndex.likely",
     "max(found, key=found.count)", "min(found, key=found.count)",
     "suffix::test_a_draft_agrees_with_a_brute_force_search"),
    ("a match is as long as the n-gram that was looked up", "suffix:SuffixIndex.match",
     "while longer and length < most:", "while False:",
     "suffix::test_a_draft_agrees_with_a_brute_force_search"),
    ("a draft reads beyond the end of the text", "suffix:SuffixIndex.likely",
     "ends[0] == len(own)", "False", "suffix::test_a_draft_agrees_with_a_brute_force_search"),
    ("nothing is ever forgotten", "suffix:PastOutputs.add",
     "if len(young.tokens) + len(kept) > self._half:", "if not kept:",
     "suffix::test_the_oldest_outputs_are_forgotten_first"),
    ("past outputs choose the text under the rule of rejection", "suffix:SuffixDrafter.open",
     "sampling.is_coupled", "True",
     "suffix::test_what_others_were_answered_changes_times_and_no_text"),
    ("a comparison finds what its first run wrote", "panel:Panel.open",
     "seat.states[name].is_alone = seat.is_alone", "pass",
     "suffix::test_a_comparison_is_not_helped_by_its_own_first_run"),
    ("the last tokens of an output are not kept", "panel:Panel.observe",
     "if is_last and not self.drafters[name].keeps_outputs:", "if is_last:",
     "suffix::test_what_others_were_answered_changes_times_and_no_text"),
    ("what comes after a stop string is kept", "messages:Cycle.verdict",
     "in self.tokens]", "in self.emitted]",
     "suffix::test_what_comes_after_a_stop_string_is_not_kept"),
    ("what a failed draft left behind is kept", "small_model:SmallModelDrafter.propose_batch",
     "cache.truncate(state.row, length)", "pass",
     "controller::test_a_fault_in_a_batch_of_model_drafts_leaves_the_others_as_if_alone"),
    ("a draft does not know its own tokens", "base:Chain.extend",
     "self.text.append(token)", "self._state.text and self.text.insert(0, token)", PENALTY),
    ("the draft model keeps its row", "small_model:SmallModelDrafter.close",
     "self._draft.cache.close_row(state.row)", "pass", f"{GIVEN_BACK}[draft_model]"),
    ("the head forgets the true pairs", "head:_Reading.keep_what_is_true",
     "max(0, num_pairs - layer)", "self._held[layer]",
     "lossless::test_acceptance_is_in_the_expected_range[mtp-code_class]"),
    ("a layer of a head keeps pairs of drafted tokens", "head:_Reading.keep_what_is_true",
     "num_pairs - layer)", "num_pairs)", f"{SEVERAL_FORGET}[glm4_moe-3-modules-0]"),
    ("a layer of a head keeps what drafted tokens gave", "head:_Reading.keep_what_is_true",
     "- (layer - 1)", "", f"{SEVERAL_FORGET}[glm4_moe-3-modules-0]"),
    ("the layers of a head after the first are not used", "head:HeadDrafter._layer",
     "len(self._caches) - 1", "0",
     "mtp::test_each_of_several_layers_drafts_its_token[glm4_moe-3-modules-17]"),
    ("a block is causal", "dflash:DFlashDrafter._masks", "queries[:, :, -1:]", "queries",
     "dflash::test_a_head_drafts_as_the_paper_says[as published-packed]"),
    ("a block stays in the head's cache", "dflash:DFlashDrafter._draft",
     "cache.lengths[state.row] - size", "cache.lengths[state.row]",
     "dflash::test_a_block_may_stand_behind_the_end_of_the_context"),
    ("a draft of many tokens costs many steps", "costs:Costs._draft",
     "elif name in self.at_once", "elif False",
     "controller::test_who_drafts_at_once_is_paid_once[0.5-0.7]"),
    ("a drafter that hung once is never tried again", "timed:TimedDrafter._call",
     "if self._thread.is_alive():", "if True:", "drafters::test_a_loop_in_a_drafter_is_ended"),
    ("states of a drafter that hangs are not closed", "timed:TimedDrafter.close",
     "self._unclosed.append(state)", "pass",
     "drafters::test_a_drafter_that_blocks_is_left_alone_until_it_returns"),
    # -------------------------------------------------------------------------------- planner
    ("text that was read stays unread", "planner:Planner.learn",
     "cycle.cached + 1", "0", WHAT_CAME),
    ("text that was missed is thought to be read", "planner:Planner.learn",
     "seat.drafts.keys() & seat.records.keys()", "seat.records", WHAT_CAME),
    ("a guess is never right", "planner:_came_true",
     "guessed[came_true] == tokens[came_true]", "False", WHAT_CAME),
    ("who has nothing to propose may be chosen", "planner:Planner._able",
     "guess is None or guess.tokens", "True",
     "controller::test_who_has_nothing_to_propose_is_not_chosen"),
    ("passes are measured as if of one row each", "planner:Planner.timed",
     "len(draft.tokens) + 1 for", "1 for", MEASURED),
    # ------------------------------------------------------------------------- controller, costs
    ("evidence has no record of its own", "acceptance:Acceptance.with_evidence",
     "if not evidence", "if True", EVIDENCE),
    ("what is typical of evidence is not shared", "acceptance:Acceptance.with_evidence",
     "self.typical.with_evidence(evidence) if self.typical else self", "self", EVIDENCE),
    ("a draft's stop is not counted", "acceptance:Acceptance._count",
     "min(asked, accepted + 1)", "min(drafted, accepted + 1)", STOPPED),
    ("each step is thought to be taken", "acceptance:Acceptance.taken",
     "return self._taken[:count]", "return [1.0] * count", STOPPED),
    ("a drafter's confidence is believed", "acceptance:Calibration.chance",
     "self._accepted[tenth] / self._reached[tenth]", "confidence",
     "controller::test_a_draft_goes_on_while_the_next_token_pays_for_its_step"),
    ("nobody shares a step", "controller:Choice.decision",
     "price.first_ms / sharers", "price.first_ms",
     "controller::test_what_a_step_must_bring_is_what_it_costs"),
    ("time is worth what plain decoding makes of it", "controller:Controller.plan",
     "if ask.pace.time else", "if False else",
     "controller::test_time_is_worth_what_the_text_gives_on_average"),
    ("drafts that lose by the clock go on", "rest:Rest.begin",
     "lost > _LITTLE * self.time", "False", RESTS),
    ("the controller never rests", "rest:Rest.begin", "return is_rest", "return False", RESTS),
    ("rests are as long whatever was lost", "rest:Rest.begin",
     "int(_LOOK * lost / self.cycles / _COST)", "8", RESTS),
    ("a little loss is a reason to rest", "rest:Rest.begin", "_LITTLE * self.time", "0",
     "controller::test_where_drafts_lose_by_the_clock_nothing_is_chosen_for_a_while[20.4]"),
    ("others share a rest", "controller:Controller.rest",
     "size = batch.bit_length()", "size, who = batch.bit_length(), None", OTHERS_REST),
    ("a new request ends no rest", "rest:Rest.join", "self.left -= self.left // batch**2", "pass",
     JOINS),
    ("what was seen before a rest counts as ever", "rest:Rest.begin",
     "self._fade(_OLD_KEPT)", "pass",
     "controller::test_drafts_that_pay_again_end_short_looks"),
    ("a choice is made in each cycle", "planner:Planner.plan", "if self._left and", "if False and",
     KEPT),
    ("a choice is kept whoever joins", "planner:Planner.plan",
     "s.seat in self._plan or not s.num_steps", "True", KEPT),
    ("choosing is the engine's own time", "planner:Planner.took",
     " - choice_ms)", ")",
     "controller::test_the_time_of_choosing_is_no_part_of_the_engine_s_own"),
    ("what was missed in a pause is forgotten", "planner:Planner._missed",
     "len(s.tokens) - min(", "0 * min(", PAUSED),
    ("a pause takes a fixed draft, too", "planner:Planner._resting",
     "if s.request.fixed_k:", "if False:", PAUSED),
    ("a text's pace is never learnt", "controller:Controller.plan",
     "ask.pace.add(1 + option.tokens, ms / plain_ms)", "pass",
     "controller::test_time_is_worth_what_the_text_gives_on_average"),
    ("a draft never stops early", "base:Chain.is_open",
     "goes_on(self._confidence)", "True", DOUBTS),
    ("a doubtful token is dropped", "base:Chain.draft",
     "Draft(self.tokens, probs, confidence=self._confidence)",
     "Draft(self.tokens[:-1], None, confidence=self._confidence[:-1])", DOUBTS),
    ("records do not age without drafts", "acceptance:Acceptance.observe",
     "_KEPT ** min(1 + self.since, _OLDEST)", "_KEPT", AGES),
    ("positions behind a refusal count as reached", "acceptance:Acceptance._count",
     "min(asked, accepted + 1)", "asked", EACH_PLACE),
    ("an old reach is used again", "acceptance:Acceptance._tire",
     "self._reach, self._taken = [], []", "pass", PROBES),
    ("coverage stays 1", "acceptance:Acceptance.observe",
     "(1 - _KEPT) * ((drafted > 0) - self.coverage)", "0", AGES),
    ("the refused token counts as accepted", "acceptance:Acceptance._count",
     "range(accepted)", "range(min(asked, accepted + 1))", EACH_PLACE),
    ("old cycles count as much as new ones", "acceptance:Shares.add",
     "[kept * n for n in self.cases]", "self.cases",
     "controller::test_old_cycles_fade_however_many_there_are"),
    ("a position that failed once is never tried again", "acceptance:Shares.add",
     "self.cases = [kept * n for n in self.cases]",
     "self.cases = [n * (kept if i < cases else 1) for i, n in enumerate(self.cases)]", COMES_BACK),
    ("probes are never made", "controller:Controller._probe",
     "saved.get(name, 0.0) + budget", "0.0 * budget", PROBES),
    ("who is not probed saves nothing", "controller:Controller._probe",
     "sorted(idle, key=lambda name: -saved[name])", "idle[:1]",
     "controller::test_requests_that_may_choose_share_one_model_in_a_cycle[1]"),
    ("a probe pays for a step that is taken anyway", "controller:Choice.probe",
     "0.0 if name in self.model_ms else price.first_ms", "40 * price.first_ms", COMES_BACK),
    ("probes cost more than their share", "controller:Controller._probe",
     "budget / len(idle)", "8 * budget", PROBES),
    ("the slowest choice counts for all", "rest:Rest.serves",
     "median_low(self.efforts)", "max(self.efforts)",
     "controller::test_a_choice_is_kept_for_as_long_as_it_takes_to_make"),
    ("rows cost nothing", "controller:Choice._drafts",
     "record.coverage * self.prices.row_ms", "0.0", f"{BEST_K}[0.0-0.5]"),
    ("steps of a model are free", "controller:Choice._share",
     "price.step_ms * (1 - prod(1 - chance for chance in chances))", "0.0", f"{BEST_K}[0.1-0.3]"),
    ("shared steps cost nobody anything", "controller:Choice._share",
     "sum(more) - self.rate * ms", "sum(more)", f"{BEST_OF_ALL}[4]"),
    ("two models draft in one cycle", "controller:Choice.__init__",
     "asking -= {i for i in asking if name in asks[i].records}", "models.remove(name)",
     "controller::test_requests_that_may_choose_share_one_model_in_a_cycle[4]"),
    ("a step is taken however few take part", "controller:Choice._share",
     "if gain > best[0]:", "if k == 0:", f"{BEST_OF_ALL}[20]"),
    ("what was measured cold is kept", "costs:Line.observe",
     "other_ms <= self._most(other, size, ms)", "True",
     "controller::test_after_a_cold_pass_and_a_cold_draft_drafting_resumes_within_20_cycles",
     "controller::test_no_order_of_cold_measurements_shuts_a_drafter_off_that_pays"),
    ("a line goes through the slowest measurements", "costs:_low_median",
     "(len(ordered) - 1) // 2", "-1", "controller::test_a_drafter_that_becomes_slower_is_noticed"),
    ("a slow cycle is the drafter's fault", "costs:Costs._learn",
     "max(1.0, ms / believed) if believed else 1.0", "1.0", NOT_DEAR),
    ("what reads a prompt first makes steps free", "costs:Costs._learn_draft",
     "is_reading = self", "self.drafts.setdefault(name, {1: Line()}); is_reading = self",
     "controller::test_a_first_draft_that_reads_the_prompt_says_nothing_of_a_step"),
    ("a call of a drafter costs nothing", "costs:Costs._draft",
     "line.fixed, line.slope", "0.0, line.slope",
     "controller::test_a_draft_has_a_price_whatever_its_length_and_one_by_its_steps"),
    ("batches of all sizes have one line", "costs:Costs._learn",
     "self.passes.setdefault(batch.bit_length()", "self.passes.setdefault(1",
     "controller::test_batches_of_other_sizes_have_costs_of_their_own"),
    ("reading counts as drafting", "costs:Costs._learn_draft",
     "unread > _FEW_UNREAD * len(num_tokens)", "False", NOT_DEAR),
    ("a first measurement is believed whatever it is", "costs:Costs._draft",
     "not line.is_confirmed", "False",
     "controller::test_a_first_measurement_far_above_does_not_end_drafting"),
    # ------------------------------------------------------- statistics, traces and comparisons
    ("refused positions count as reached", "statistics:Statistics.record",
     "min(drafted, accepted + 1)", "drafted", PREDICTION),
    ("the histogram counts what was drafted", "statistics:Statistics.record",
     "accepted = kinds.count", "accepted = drafted if kinds else kinds.count", FIGURES),
    ("the prefill's token counts per pass", "statistics:Statistics.tokens_per_pass",
     " - self.prefills", "", FIGURES),
    ("the engine's own time is not in a token's", "statistics:Statistics.ms_per_token",
     " + self.other_ms", "", FIGURES),
    ("prefills count as passes", "statistics:Statistics.record_times",
     "if is_prefill:", "if False:", FIGURES),
    ("sums forget the other's positions", "statistics:Statistics.__add__",
     "_add(getattr(total, name), theirs)", "pass", FIGURES),
    ("alpha is the share of all that was drafted", "statistics:Statistics.costs",
     "sum(self.reached_at)", "self.num_draft_tokens", PREDICTION),
    ("conditional acceptance divides by what was drafted", "statistics:Statistics.per_position",
     "map(ratio, accepted, reached)", "map(ratio, accepted, self.drafted_at)", FIGURES),
    ("logprobs are those of the last rows", "trace:token_logprobs",
     "logits[: len(tokens)]", "logits[-len(tokens) :]",
     "requests::test_logprobs_are_equal_with_speculation_on_and_off"),
    ("a trace's bars have the noise of the next place", "trace:_distributions",
     "len(s.tokens) - count + row", "len(s.tokens) - count + row + 1",
     "story::test_a_trace_shows_the_distributions_that_decided[draft_model-coupled]"),
    ("a trace has the noise of the next place", "trace:_leaders",
     "len(s.tokens) - len(scores), np", "len(s.tokens) - len(scores) + 1, np",
     "requests::test_a_trace_says_what_decided_about_each_token"),
    ("every difference is a near-tie", "comparison:_first_difference",
     'is_tie = ours in totals and top[0]["total"] - totals[ours] <= near_tie', "is_tie = True",
     "requests::test_a_wrong_token_is_called_a_bug"),
    ("no difference is a near-tie", "comparison:_first_difference",
     '"near-tie" if is_tie else ', "",
     "requests::test_a_difference_between_equal_scores_is_called_a_near_tie[1.0-near-tie]"),
    ("the slowest run is the median", "comparison:_median_run",
     "(len(runs) - 1) // 2", "-1",
     "requests::test_a_comparison_of_three_runs_takes_medians_and_says_when_it_was_disturbed"),
    # ------------------------------------------------------------------------- recurrent layers
    ("a refused draft stays in the state", "recurrent:RecurrentLayer._at",
     "marks[-1].length > length", "marks[-1].length > length + 4", TAKEN_BACK),
    ("a token too many is stepped again", "recurrent:RecurrentLayer._at",
     "x[:missing] for", "x[: missing + 1] for", TAKEN_BACK),
    ("the convolution stays where the draft began", "recurrent:RecurrentLayer._at",
     "torch.cat([last.tail, last.fed[:missing]])[missing:], None", "last.tail, None", TAKEN_BACK),
    ("a step writes over the state before it", "rules:step_in_python",
     "state * decay[:, None, None]", "state.mul_(decay[:, None, None])",
     "recurrent::test_what_was_taken_back_leaves_no_trace[granitemoehybrid in Python-1]"),
    ("a new text goes on with the state of another", "recurrent:RecurrentLayer._at",
     "if not length:", "if not marks:",
     "recurrent::test_a_text_keeps_its_state_while_others_come_and_go[lfm2]"),
    ("the mark where a call began is dropped", "recurrent:RecurrentLayer._record",
     "m.length == begin or", "",
     "recurrent::test_a_call_of_many_forwards_that_fails_is_done_again[lfm2]"),
    ("a verify keeps its last three forwards alone", "recurrent:RecurrentLayer._record",
     "end - _MOST_RECORDED", "end",
     "recurrent::test_a_verify_cut_into_four_forwards_is_taken_back[lfm2-8]"),
    ("a sigmoid depends on its place", "rowwise:RowWise.__torch_function__",
     "if name in _FUNCTIONS", "if False",
     "exactness::test_functions_compute_the_same_in_every_place[sigmoid-module3-dtype0]"),
    ("a product of torch's own goes unnoticed", "rowwise:RowWise.__torch_function__",
     "self.unsteady.add(name)", "pass",
     "exactness::test_functions_that_have_two_forms_are_noted[einsum-<lambda>]"),
    # -------------------------------------------------------------------------- the connection
    ("a head may take for ever", "connection:Connection.watch",
     "self.head and waited > self.limit_s", "False", SLOW_SENDERS),
    ("a body may take for ever", "connection:Connection.watch",
     "self.state is State.BODY and", "False and", SLOW_SENDERS),
    ("an answer has to be ready in the time of a head", "connection:Connection.watch",
     "self.state is State.HEAD and waited", "waited", SLOW_SENDERS),
    ("who reads nothing is waited for", "connection:Connection.watch",
     "now - self.all_taken_at > _READ_S", "False and _READ_S", SLOW_READERS),
    ("who reads slowly is not waited for", "connection:Connection.watch",
     " + (num_taken - self.num_taken) / _PACE", "", SLOW_READERS),
    ("what nobody reads piles up", "connection:Connection.send",
     "self.num_unread > _MAX_UNREAD_BYTES", "False",
     "connection::test_what_nobody_reads_does_not_fill_the_memory"),
    ("a second request may follow chunks", "connection:Connection.answer",
     "self.is_last |= self.environ.pop", "self.environ.pop", ANY_CUT),
    ("the end of a head is sought in its last bytes", "connection:Connection.read_head",
     "len(self.head) - 3", "len(self.head)", ANY_CUT),
    ("memory of a body is never given back", "connection:Connection.drop_body",
     "-len(self.body)", "0", ANY_CUT),
    ("an answer that contradicts its head is left to hang", "connection:Connection._say",
     "self.abort()", "pass",
     "connection::test_an_answer_that_contradicts_its_head_ends_the_connection"),
    ("a length beside an encoding is no matter", "connection:environ_of",
     '"HTTP_CONTENT_LENGTH" in environ', "False", PEP_3333),
    ("a header with _ is one with -", "connection:environ_of", '"_" in name', "False", PEP_3333),
]]  # fmt: skip

_APART = "kernels::test_rows_that_lie_apart_are_fed_without_the_one_between_them"
_ALONE = "kernels::test_speculation_alone_and_in_a_batch_keeps_every_bit[float32-None]"
_SHAPES = "kernels::test_attention_of_any_shape_gives_what_torch_s_gives[5-1-40]"
_TREE = "tree::test_a_tree_s_output_is_plain_decoding_s_to_the_bit[float32-None-greedy]"
_OWN_BITS = "tree::test_each_token_of_a_tree_gets_the_bits_of_its_own_chain[llama]"
_BRANCH_IN_MODULES = (
    "exactness::test_a_branch_of_a_tree_has_the_bits_of_a_chain_in_modules_too[opt]"
)
_SEVERAL = "tree::test_several_drafters_make_one_tree[greedy]"
if why_not() is None:  # without a compiler nobody runs these
    MUTANTS += [
        Mutant(
            "all rows are cached in the first slot", "decoder:Rows.chain",
            "[slot] * count", "[0] * count", (_APART, _ALONE),
        ),
        Mutant(
            "a text's positions begin anew", "decoder:Rows.chain",
            "self.positions += range(begin, begin + count)", "self.positions += range(count)",
            (_ALONE,),
        ),
        Mutant(
            "kernels see behind the window", "decoder:Block._attend",
            "window or 0", "0", (_SHAPES,),
        ),
        Mutant(
            "a branch's token stands where it is cached", "decoder:Rows.tree",
            "first + len(line) - 1", "first + line[-1]", (_TREE, _OWN_BITS),
        ),
        Mutant(
            "a branch sees the one before it", "kernels:lines_of",
            "[*lines[before], i] if i else [i]", "list(range(i + 1))", (_TREE, _OWN_BITS),
        ),
        Mutant(
            "of a branch's text the last token is left out", "decoder:Rows.tensors",
            "range(position + 1 - depth, position + 1 - len(line))",
            "range(position - depth, position - len(line))", (_TREE, _OWN_BITS),
        ),
        Mutant(
            "modules' rows are cached where they stand", "modules:FlatPlace.write",
            "slots, _, places", "slots, places, _", (_BRANCH_IN_MODULES,),
        ),
        Mutant(
            "modules see behind the window", "modules:FlatPlace.mask",
            "self, window", "self, None", (f"{RAGGED}[gpt_oss-modules]",),
        ),
        Mutant(
            "a row's experts have each other's weights", "experts:experts_forward",
            "top_k_weights[rows, places, None]", "top_k_weights[rows, places.flip(0), None]",
            (f"{RAGGED}[gpt_oss-modules]",),
        ),
        Mutant(
            "the first tokens of a tree are kept", "core:Engine.accept",
            "places[: kept - 1]", "range(kept - 1)", (_TREE,),
        ),
        Mutant(
            "a branch is judged by its neighbour's logits", "tree:Line.of",
            "logits[[0, *(place + 1 for place in places)]]", "logits[: len(places) + 1]", (_TREE,),
        ),
        Mutant(
            "any branch is gone along", "tree:Line.of",
            "draft.tokens[i] == chosen), at)", "True), at)",
            ("tree::test_a_line_goes_on_behind_what_the_target_refused",),
        ),
        Mutant(
            "a drafter takes another's branch for its own", "tree:heard",
            "own = max(own, len(way))", "own = verdict.accepted", (_SEVERAL,),
        ),
        Mutant(
            "a drafter is given states of another branch", "tree:Line.of",
            "[*range(first), *(first + place for place in places)]", "range(first + len(places))",
            (_SEVERAL,),
        ),
    ]  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
