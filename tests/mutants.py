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
import os
import re
import signal
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

from kernels.library import why_not
from serving.options import Options

LIMIT_S = 120  # a mutant may hang: then it was noticed
ROOT = Path(__file__).resolve().parent.parent


class Mutant(NamedTuple):
    """`place` is "module:function" or "module:Class.method".

    "cache::a_row_that" is the test in test_cache.py whose name alone begins with test_a_row_that.
    """

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
    name, path = mutant.place.split(":")
    module = importlib.import_module("08_speculative_decoding" if name == "core" else name)
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


def node(test: str) -> str:
    """What pytest calls a test of a mutant."""
    file, begin, parameters = re.fullmatch(r"(\w+)::(\w+)(.*)", test).groups()
    source = (ROOT / "tests" / f"test_{file}.py").read_text("utf-8")
    found = re.findall(rf"^def (test_{begin}\w*)\(", source, re.MULTILINE)
    assert len(found) == 1, f"{test} is not one test, but {found}"
    return f"tests/test_{file}.py::{found[0]}{parameters}"


def run_tests(tests: tuple[str, ...], mutant: Mutant | None, output: int) -> None:
    """In a process of its own: exits as pytest does, and speaks to the file `output`."""
    signal.alarm(LIMIT_S if mutant else 10 * LIMIT_S)  # which ends it, wherever it hangs
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 3
    try:
        options = ["-q", "--tb=short", "-o", "addopts=-m 'not slow'", "-p", "no:cacheprovider"]
        # In a folder that is shared one pytest would remove what another one is removing.
        options.append(f"--basetemp={tempfile.gettempdir()}/{os.getpid()}")
        if mutant:
            put_in(mutant)
            options.append("-x")
        code = int(pytest.main([*options, *map(node, tests)]))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:  # whatever it was, and with threads that hang
        os._exit(code)


def ended(
    jobs: int, wanted: list[tuple[tuple[str, ...], Mutant | None]]
) -> Iterator[tuple[str, Mutant | None, str]]:
    """Run these tests, each with its mutant, `jobs` at a time; yields their fate as they end.

    Beside it there is the mutant, and what pytest printed. Who crashes has failed.
    """
    waiting, running = wanted[::-1], {}
    while waiting or running:
        while waiting and len(running) < jobs:
            tests, mutant = waiting.pop()
            output = tempfile.TemporaryFile()
            pid = os.fork()
            if not pid:
                run_tests(tests, mutant, output.fileno())
            running[pid] = mutant, output
        pid, status = os.wait()
        (mutant, output), code = running.pop(pid), os.waitstatus_to_exitcode(status)
        output.seek(0)
        said = output.read().decode(errors="replace")
        assert code < 2, f"{mutant}: pytest could not run:\n{said}"
        yield {0: "passed", -signal.SIGALRM: "hung"}.get(code, "failed"), mutant, said


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
    importlib.import_module("cache.buffers").mmap = partial(mmap.mmap, flags=flags)
    load = core.load_engine
    engine = load(Options(model="embedded", fixed_k=True, kernels=False, suffix_cache=0))

    def load_or_inherit(options: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        in_python = replace(options, kernels=False)  # where the mutants are, but for the kernels'
        if caller == "conftest":
            return engine
        in_c = "test_cache", "test_kernels", "test_sampling", "test_tree"
        return load(options if caller in in_c else in_python)

    core.load_engine = load_or_inherit
    gc.collect()
    gc.freeze()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", help="this mutant alone, or those that begin so")
    parser.add_argument("--jobs", type=int, default=2, help="so many at a time")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if mutant.name.startswith(options.only or "")]
    if not chosen:
        parser.error(f"no mutant's name begins with {options.only!r}")
    with tempfile.TemporaryDirectory() as tempfile.tempdir:
        return judge(chosen, options.jobs)


def judge(chosen: list[Mutant], jobs: int) -> int:
    """Run each mutant's tests without it and with it. Returns 1 if one survives."""
    load_once()
    every = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
    shares = [every[i::jobs] for i in range(min(jobs, len(every)))]
    for fate, _, said in ended(jobs, [(tests, None) for tests in shares]):
        if fate != "passed":
            print("these tests do not pass without any mutant:", said, sep="\n")
            return 1
    survivors = 0
    for fate, mutant, _ in ended(jobs, [(each.tests, each) for each in chosen]):
        survivors += fate == "passed"
        said = {"passed": "SURVIVES", "failed": "killed", "hung": "hung"}[fate]
        print(f"{said:8}  {mutant.name}", flush=True)
    print(f"{survivors} of {len(chosen)} survive")
    return int(survivors > 0)


ROWS = [  # name, place, old, new and tests
    # ---------------------------------------------------------------- KV cache and truncation
    ("truncation keeps one token too many", "core:SlotCache.truncate", "self.lengths[row] = length",
     "self.lengths[row] = min(length + 1, self.lengths[row])",
     "cache::truncating_touches_no_tensor"),
    ("truncation lengthens a row", "core:SlotCache.truncate", "<= self.lengths[row]:",
     "<= self.max_length:", "cache::what_a_cache_cannot_hold_is_refused"),
    ("one token too many is kept", "core:SlotCache.keep", "self.truncate(row, begin + count)",
     "self.truncate(row, begin + count + 1)",
     "lossless::exactly_the_prefix_before_the_first_wrong_token_is_kept[greedy-1]"),
    ("what a failed forward wrote is not noted", "cache.slots:Slots.place",
     "max(self._written[slot], last)", "self._written[slot]", "cache::a_forward_that_fails_leaves"),
    ("a moved row loses its last token", "cache.slots:Slots.close_row",
     "buffer[slot, :, :length] = buffer[source, :, :length]",
     "buffer[slot, :, : length - 1] = buffer[source, :, : length - 1]",
     "batching::many_requests_over_eight_rows_all"),
    ("a closed row is not given back", "cache.slots:Slots.close_row", "self._free.append(row)",
     "pass", "batching::many_requests_over_eight_rows_all"),
    ("a dirty slot is not scrubbed", "cache.slots:Slots.close_row",
     "scrub(buffers, slot, self._written[slot])", "pass", "cache::a_forward_that_fails_leaves"),
    ("a token sees the next one", "cache.slots:Place.mask", "keys > queries", "keys > queries + 1",
     "cache::ragged_rows_with_random_truncation_equal_a_cache_free_recompute[llama-plain]"),
    ("the window is one token longer", "cache.slots:Place.mask", "keys <= queries - window",
     "keys < queries - window", "cache::ragged_rows_with_random_truncation_equal[mistral-plain]"),
    ("all layers have the mask of the first", "core:CachedModel.run",
     "len(set(self.windows.values())) > 1", "False",
     "cache::ragged_rows_with_random_truncation_equal_a_cache_free_recompute[gemma2-plain]"),
    # -------------------------------------------------------------------------- probabilities
    ("each row is penalised for the whole draft", "sampling:penalise",
     "for i in path]", "for i in range(len(draft.tokens))]", "requests::greedy_output_does_not"),
    ("the penalty knows the last token alone", "sampling:penalise", "list(set(text))", "text[-1:]",
     "requests::greedy_output_does_not_depend_on_the_seed_and_knows_the_penalty"),
    ("noise is the same at each place of a draft", "core:choices", "num_tokens + draft.depth(i)",
     "num_tokens", "lossless::exactly_the_prefix_before_the_first_wrong_token_is_kept[sampled-1]"),
    ("greedy choices are not checked for NaN", "sampling:choose", "not abs(float(score)) < inf",
     "False", "choosing::rows_that_are_no_numbers_are_refused[None-python-7]"),
    ("a token that begins within top-p is cut", "sampling:survivors", "np.cumsum(whole) - whole",
     "np.cumsum(whole)", "choosing::c_chooses_what_python_chooses[(1.3, 0, 0.95, 0.0)]"),
    ("what equals the k-th is cut", "sampling:survivors", "s >= s[order[top_k - 1]]",
     "s > s[order[top_k - 1]]", "choosing::c_chooses_what_python_chooses[(0.7, 40, 1.0, 0.0)]"),
    ("noise of plain decoding is one position off", "core:sample", "len(text)), q",
     "len(text) - 1), q", "lossless::exactly_the_prefix_before_the_first_wrong_token[sampled-0]"),
    ("a drafter penalises the first token alone", "core:sample", "text, Draft", "text[:1], Draft",
     "drafters::a_draft_knows_the_repetition_penalty_and_its_own_tokens"),
    ("weights are taken to sum to 1", "sampling:draw", "u * total", "u",
     "sampling::a_token_without_weight_is_never_drawn"),
    ("noise does not know the position", "sampling:Noise._key", "self.seed ^ position", "self.seed",
     "noise::choices_are_distributed_as_the_weights_and_neighbours_are_independent"),
    ("noise does not know the token", "sampling:_hash", "(ids ^", "(0 * ids ^",
     "noise::noise_of_any_two_tokens_is_independent"),
    ("all uses have the same numbers", "sampling:Noise._key", ") + use)", ") + 0)",
     "noise::uniform_numbers_are_uniform_and_their_uses_independent"),
    ("seeds of both signs are one", "sampling:Noise.__init__", "+ (seed < 0)", "",
     "noise::every_bit_of_a_seed_counts"),
    ("weights are not checked for NaN", "sampling:Noise.choose", "not 0 < w.max() < np.inf",
     "False", "noise::weights_that_are_no_numbers_are_an_error[10]"),
    ("the last of equally fast tokens wins", "sampling:Noise.race", "times.min()].min()",
     "times.min()].max()", "choosing::of_equal_times_the_lower_id_wins"),
    # --------------------------------------------------------------------------------- verify
    ("the refused draft is emitted", "core:verify", 'Judgement(chosen, "recovered" if behind',
     'Judgement(judged[-1].id, "recovered" if behind',
     "lossless::exactly_the_prefix_before_the_first[greedy-1]"),
    ("the first draft is always right", "core:verify", "draft.tokens[i] == chosen",
     "draft.tokens[i] == chosen or not accepted",
     "lossless::exactly_the_prefix_before_the_first[greedy-0]"),
    ("what was rejected stays in the cache of one request", "core:speculate",
     "target.cache.keep(row, len(draft.tokens), accepted)", "pass",
     "method::it_writes_what_plain_decoding_and_the_engine_write[greedy]"),
    ("p and q are swapped", "core:verify_by_rejection", "u * float(q[token]) < float(p[i, token])",
     "u * float(p[i, token]) < float(q[token])", "sampling::verify_emits_exactly_p_for_every"),
    ("a rejected token may come back", "core:verify_by_rejection", "draw(residual(p[i], q), u)",
     "draw(p[i], u)", "sampling::verify_emits_exactly_p_for_every_small_p_and_q"),
    ("the bonus is drawn from the row before", "core:verify_by_rejection", "draw(p[-1], u)",
     "draw(p[-2], u)", "sampling::verify_keeps_the_target_distribution[model q]"),
    ("all drafts are judged by one number", "core:verify_by_rejection", "+ i, noise.ACCEPT",
     ", noise.ACCEPT", "sampling::verify_keeps_the_target_distribution[model q]"),
    ("drafters tell the q of another temperature", "core:sample", "DRAW)), q",
     "DRAW)), truncated_softmax(scores * 0.25, *sampling.transforms)[0]",
     "sampling::speculation_keeps_the_distribution[temperature 0.7-draft_model]"),
    ("what was not drawn has no q", "messages:Draft.q", "= 1.0", "= 0.0",
     "sampling::verify_keeps_the_target_distribution[one-hot q]"),
    ("nothing is recovered from a residual of nothing", "core:residual",
     "more if more.sum() > 0 else p", "more", "sampling::a_residual_of_nothing_falls_back_to_p"),
    # ------------------------------------------------------------------------------- sequence
    ("an end of text amid a draft is passed over", "core:Sequence.append", "token.id in eos_ids",
     "kept == len(emitted) and token.id in eos_ids", "requests::one_cut_is_seen[greedy-0-eos]"),
    ("max_tokens is met one token late", "core:Sequence.append", "self.remaining == 1",
     "self.remaining == 0", "requests::one_cut_is_seen[greedy-0-max_tokens]"),
    ("the last bytes complete no stop string", "core:Sequence.append", "if self.text.finish():",
     "if False:", "requests::bytes_at_the_end_may_complete_a_stop_string"),
    ("what may become a stop string is shown", "text:TextStream.release",
     "self._tail.endswith(s[:n])", "False", "properties::text_grows_as_a_plain_string"),
    ("what is cut off counts as drafted", "messages:Cycle.__post_init__",
     "len(self.path) if self.is_whole else self.num_kept", "len(self.path)",
     "requests::one_cut_is_seen_by_everything[greedy-0-eos]"),
    ("what is cut off counts as accepted", "messages:Cycle.__post_init__",
     "min(len(self.emitted) - 1, self.num_kept)", "len(self.emitted) - 1",
     "requests::one_cut_is_seen_by_everything[greedy-0-eos, then a wrong draft]"),
    # --------------------------------------------------------------------------------- engine
    ("negative token ids are let in", "models.prompts:check_prompt", "0 <= token <= largest",
     "token <= largest", "bad_inputs::a_bad_field_is_refused[/generate-prompt]"),
    ("max_tokens is not lowered to the room there is", "messages:Request.admitted",
     "min(self.max_tokens, room)", "self.max_tokens",
     "bad_inputs::a_field_at_its_limits[max_tokens]"),
    ("the drafters' states are not closed", "core:Engine.close", "self.pool.close(s.drafting)",
     "pass", "batching::many_requests_over_eight_rows_all"),
    ("who is still reading takes part in the cycle", "core:Engine.read_prompts",
     "if s not in reading", "if True", "batching::a_long_prompt_does_not_stop_the_others"),
    ("a chunk that is read again counts twice", "core:Engine.read_prompts",
     "s.drafting.hidden[cached] =", "s.drafting.hidden[began] =", "batching::a_neighbour_s_fault"),
    ("only the pending token is fed", "core:Engine.forward", "s.tokens[lengths[s.row] :]",
     "s.tokens[-1:]", "lossless::exactly_the_prefix_before_the_first_wrong_token[greedy-0]"),
    ("prefills are measured as passes", "core:Engine.step", "None if has_prefill else times",
     "times", "controller::passes_are_measured_with_all_rows_without_choosing"),
    ("the penalty forgets what was generated", "core:Engine.accept", "s.tokens, draft)\n",
     "s.request.prompt, draft)\n", "requests::greedy_output_does_not_depend_on_the_seed"),
    ("a refused draft stays in the cache", "core:Engine.accept",
     "slots.keep(s.row, len(draft.tokens), path[: num_kept - 1])", "pass",
     "lossless::exactly_the_prefix_before_the_first_wrong_token_is_kept[greedy-1]"),
    ("the pending token is kept in the cache", "core:Engine.accept", "path[: num_kept - 1]",
     "range(min(num_kept, len(draft.tokens)))",
     "lossless::exactly_the_prefix_before_the_first_wrong_token_is_kept[greedy-1]"),
    ("noise counts positions from the answer's start", "core:Engine.judge", "len(s.tokens)",
     "len(s.output)", "lossless::exactly_the_prefix_before_the_first_wrong_token[sampled-0]"),
    ("sampled text is always judged by rejection", "core:Engine.judge", "sampling.is_coupled",
     "sampling.is_greedy", "lossless::exactly_the_prefix_before_the_first_wrong_token[sampled-2]"),
    ("a measurement warms up and counts", "serving.worker:uncounted",
     "Totals(engine.pool.choices)", "engine.totals", "controller::each_model_makes_a_whole_draft"),
    # ---------------------------------------------------------------------------------- retry
    ("a forward that failed is not tried again", "serving.retry:step",
     "cycles |= _step_alone(engine, s, held[s])", "s.fail(KeyError())",
     "batching::a_forward_that_fails_once_leaves_no_trace[greedy-3-ngram]"),
    ("a step that failed is not rolled back", "serving.retry:_step_alone",
     "engine.target.cache.truncate(s.row, held)", "pass",
     "batching::a_forward_that_fails_once_leaves_no_trace[greedy-0-ngram]",
     "batching::a_forward_that_fails_once_leaves_no_trace[greedy-4-ngram]"),
    ("a draft that cannot be verified fails the request", "serving.retry:_step_alone",
     "in (True, False)", "in (False,)", "batching::a_draft_that_cannot_be_verified_costs[greedy]"),
    ("a step that failed late is taken again", "serving.retry:step", "s not in cycles and ", "",
     "batching::a_step_that_fails_behind_its_last_token_loses_none[3]"),
    # ----------------------------------------------------------------------------------- pool
    ("torch's settings are not put back", "drafters.base:settings_kept", "put(known)", "pass",
     "drafters::a_drafter_that_changes_torch_s_settings_changes_no_bit[float64-here]",
     "drafters::a_file_that_changes_torch_s_settings"),
    ("states of a tail pass for a prompt's", "drafters.pool:DrafterPool.open",
     "if text.num_cached else", "if hidden else",
     "prefix::hidden_states_are_remembered_where_they_stand[long]"),
    ("one faulty state costs all their drafts", "drafters.pool:DrafterPool._ask",
     "if len(texts) > 1:", "if False:",
     "controller::a_fault_in_a_batch_of_model_drafts_leaves_the_others_as_if_alone"),
    ("a bad draft ends the request", "drafters.pool:DrafterPool._ask",
     'self._lose(text, name, "propose_batch", error)', "raise",
     "drafters::a_drafter_that_fails_costs_its_request_the_speculation_never_the_answer"),
    ("a draft longer than asked for is taken", "drafters.pool:check_draft", "count > limit",
     "False", "drafters::a_drafter_that_fails_costs_its_request_the_speculation_never_the_answer"),
    ("a token that q excludes is taken", "drafters.pool:check_draft", "drawn.min() > 0 and ", "",
     "drafters::probs_that_cannot_be_are_a_failure_of_the_drafter_where_they_are_read"),
    ("probs that do not sum to 1 are taken", "drafters.pool:check_draft", "off < 1e-3", "True",
     "drafters::probs_that_cannot_be_are_a_failure_of_the_drafter_where_they_are_read"),
    ("a guess that fails ends the request", "drafters.pool:DrafterPool.guess",
     'self._lose(text, name, "guess", error)', "raise",
     "controller::of_several_drafters[guess-good]"),
    ("a hidden state too many is handed out", "drafters.pool:DrafterPool.observe",
     "states[:-num_rejected]", "states[: len(states) - num_rejected + 1]",
     "drafters::a_rolled_back_state_proposes_like_a_fresh_one"),
    ("blocks of a prompt are known by their own tokens", "cache.prefix:PrefixCache._keys",
     "digest.update(", "digest = sha256(", "prefix::only_what_is_shared_from_the_beginning_counts"),
    ("blocks without hidden states will do", "cache.prefix:PrefixCache.restore",
     "is None or not block.hidden.keys() >= set(layers)", "is None", "prefix::a_head_waits"),
    ("the beginning of a prompt is forgotten first", "cache.prefix:PrefixCache._touch",
     "reversed(keys)", "keys", "prefix::the_end_of_a_prompt_is_forgotten_before_its_beginning"),
    ("a prompt is remembered before it is known to be sound", "core:Engine.forward",
     "self.target.cache.lengths,",
     "[self.pool.remember_prompt(s.drafting, {}) for s in batch] and self.target.cache.lengths,",
     "prefix::a_prompt_that_failed_is_not_remembered"),
    ("chunks of hidden states are handed out backwards", "drafters.pool:DrafterPool.observe",
     "*text.hidden.values(), hidden", "hidden, *text.hidden.values()", "batching::a_prompt_read"),
    ("who was passed over does not observe", "drafters.pool:DrafterPool.observe",
     "setdefault(name, []).append(came)", "get(name)",
     "controller::who_was_passed_over_is_told_of_no_draft"),
    ("who was passed over is told of a draft", "drafters.pool:DrafterPool._catch_up", "Verdict(0, ",
     "Verdict(1, ", "controller::who_was_passed_over_is_told_of_no_draft"),
    ("who is looked at has not heard of all", "drafters.pool:DrafterPool.guess",
     "self._catch_up(text, name)", "pass", "controller::who_is_told_late_proposes_as_if[greedy]"),
    ("a fault ends the others' drafters", "drafters.pool:DrafterPool._lose",
     "self._close(text, name)", "self.close(text)",
     "controller::of_several_drafters[observe-good]"),
    ("a lost drafter goes without a warning", "drafters.pool:DrafterPool._lose",
     "text.warnings.append(", "str(",
     "drafters::a_drafter_that_fails_costs_its_request_the_speculation_never_the_answer"),
    ("a drafter that cannot close ends the request", "drafters.pool:DrafterPool._close",
     'where = self._where(name, "close", error)', "raise",
     "controller::of_several_drafters[close-good]"),
    # ------------------------------------------------------------------------------- drafters
    ("a periodic draft is one token off", "drafters.ngram:NgramIndex.continuation",
     "len(text) - start\n", "len(text) - start - 1 or 1\n", "drafters::the_index_agrees"),
    ("a draft reads beyond the end of the text", "drafters.suffix:SuffixIndex.likely",
     "ends[0] == len(text)", "False", "suffix::a_draft_agrees_with_a_brute_force_search"),
    ("nothing is ever forgotten", "drafters.suffix:PastOutputs.add",
     "if len(young.tokens) + len(latest) > self._half", "if not latest",
     "suffix::the_oldest_outputs"),
    ("past outputs choose the text under the rule of rejection",
     "drafters.suffix:SuffixDrafter.open", "sampling.is_coupled", "True",
     "suffix::what_others_were_answered_changes_times_and_no_text"),
    ("a comparison finds what its first run wrote", "drafters.pool:DrafterPool.open",
     "state.is_alone = request.is_alone", "pass", "suffix::a_comparison_is_helped"),
    ("what comes after a stop string is kept", "messages:Cycle.verdict", "in self.tokens]",
     "in self.emitted]", "suffix::what_comes_after_a_stop_string_is_not_kept"),
    ("a head reads true pairs again", "drafters.head:_Pairs.keep_unread", "if num_steps:",
     "if False:", "mtp::each_layer_drafts[glm4_moe-3-modules-17]"),
    ("the head forgets the true pairs", "drafters.head:HeadDrafter.propose_batch",
     "length -= sum(map(len, hidden))", "length = 0",
     "mtp::each_layer_drafts[glm4_moe-1-modules-17]"),
    ("a layer of a head keeps pairs of drafted tokens", "drafters.head:_Pairs.keep_unread",
     "len(new) - (layer - 1)", "len(new)", "mtp::each_layer_drafts[glm4_moe-3-modules-17]"),
    ("a block is causal", "drafters.dflash:DFlashDrafter._masks", "queries[:, :, -1:]", "queries",
     "dflash::a_head_drafts_as_the_paper_says[as published-packed]"),
    ("a block stays in the head's cache", "drafters.head:HeadDrafter.propose_batch",
     "cache.truncate(state.row, length)", "pass", "dflash::a_block_may_stand"),
    ("a drafter that hung once is never tried again", "drafters.timed:TimedDrafter._call",
     "if self._thread.is_alive():", "if True:", "drafters::a_drafter_that_blocks_is_left_alone"),
    ("states of a drafter that hangs are not closed", "drafters.timed:TimedDrafter.close",
     "self._unclosed.append(state)", "pass", "drafters::a_drafter_that_blocks_is_left_alone_until"),
    # -------------------------------------------------------------------------------- planner
    ("a guess is never right", "control.planner:_came_true",
     "guessed[came_true] == tokens[came_true]", "False", "controller::a_drafter_that_costs[0.0]"),
    ("who has nothing to propose may be chosen", "control.planner:Planner._able",
     "guess is None or guess.tokens", "True", "controller::who_has_nothing_to_propose"),
    # ------------------------------------------------------------------------- controller, costs
    ("evidence has no record of its own", "control.acceptance:Acceptance.with_evidence",
     "if not evidence", "if True", "controller::proposals_with_more_evidence_have_a_record"),
    ("a draft's stop is not counted", "control.acceptance:Acceptance._count",
     "min(asked, accepted + 1)", "min(drafted, accepted + 1)", "controller::where_a_draft_stopped"),
    ("a drafter's confidence is believed", "control.acceptance:Calibration.chance",
     "self._accepted[tenth] / self._reached[tenth]", "confidence", "controller::a_draft_goes"),
    ("a forward that a guess spared is asked for", "control.controller:Choice.decision",
     "step_ms * record.steps", "step_ms", "controller::a_model_that_guesses_right"),
    ("nothing is guessed in copied text", "kernels.chain:draft_chain", "if can_guess else []",
     "if False else []", "kernels::a_draft_that_copies"),
    ("nobody shares a step", "control.controller:Choice.decision", "price.step_ms / sharers",
     "price.step_ms", "controller::what_a_step_must_bring_is_what_it_costs"),
    ("time is worth what plain decoding makes of it", "control.controller:Throughput.rate",
     "if self.time else", "if False else", "controller::what_a_step_must_bring"),
    ("the controller never rests", "control.rest:Rest.begin", "return is_rest", "return False",
     "controller::where_drafts_lose_by_the_clock_nothing_is_chosen_for_a_while[22.0]"),
    ("a little loss is a reason to rest", "control.rest:Rest.begin", "_LITTLE * self.time", "0",
     "controller::where_drafts_lose_by_the_clock_nothing_is_chosen_for_a_while[20.4]"),
    ("others share a rest", "control.controller:Controller.rest", "size = batch.bit_length()",
     "size, who = batch.bit_length(), None", "controller::batches_of_other_sizes_and_others"),
    ("what was seen before a rest counts as ever", "control.rest:Rest.begin",
     "self._fade(_OLD_KEPT)", "pass", "controller::drafts_that_pay_again_end_short_looks"),
    ("a choice is kept whoever joins", "control.planner:Planner.plan",
     "len(new) <= len(batch) // _FEW", "True", "controller::a_choice_serves_on"),
    ("a copy of the target is doubted", "control.controller:Controller.record",
     "name in self._copies", "False", "controller::a_copy_of_the_target_is_not_doubted_where"),
    ("drafts get no longer", "control.planner:Planner.learn", "candidate.most *= 2", "pass",
     "controller::a_text_drafts_longer_once_all"),
    ("all choose anew with one that joins", "control.planner:Planner.plan",
     "len(new) <= len(batch) // _FEW", "not new", "controller::a_choice_serves_on"),
    ("one that joins is probed", "control.controller:Controller.plan", "if cycles:", "if True:",
     "controller::a_probe_pays_for_what"),
    ("what was missed in a pause is forgotten", "control.planner:Planner._missed",
     "len(s.tokens) - min(", "0 * min(", "controller::what_rests_drafts_nothing_says[coupled]"),
    ("a token of a draft has to pay for the call", "control.planner:Planner._choose",
     "decision.least_chance", "decision.break_even",
     "controller::a_model_s_draft_ends_with_the_token_that_it_doubts[coupled]"),
    ("a draft never stops early", "drafters.base:Chain.is_open", "goes_on(self._confidence)",
     "True", "controller::a_model_s_draft_ends_with_the_token_that_it_doubts[coupled]"),
    ("records do not age without drafts", "control.acceptance:Acceptance.observe",
     "_KEPT ** min(1 + self.since, _OLDEST)", "_KEPT", "controller::a_record_ages_with_the_text"),
    ("positions behind a refusal count as reached", "control.acceptance:Acceptance._count",
     "min(asked, accepted + 1)", "asked", "controller::where_a_draft_stopped"),
    ("old cycles count as much as new ones", "control.acceptance:Shares.add",
     "[kept * n for n in self.cases]", "self.cases", "controller::where_a_draft_stopped"),
    ("probes are never made", "control.controller:Controller._probe",
     "saved.get(name, 0.0) + budget", "0.0 * budget", "controller::without_drafts_it_probes_now"),
    ("a probe pays for a step that is taken anyway", "control.controller:Choice.probe",
     "0.0 if name in self.model_ms else", "1.0 *", "controller::a_probe_pays_for_what"),
    ("probes cost more than their share", "control.controller:Controller._probe",
     "budget / len(idle)", "8 * budget", "controller::without_drafts_it_probes_now_and_then"),
    ("the slowest choice counts for all", "control.rest:Rest.serves", "median_low(self.efforts)",
     "max(self.efforts)", "controller::a_choice_is_kept_for_as_long_as_it_takes_to_make"),
    ("rows cost nothing", "control.controller:Choice._drafts",
     "record.coverage * self.prices.row_ms", "0.0", "controller::the_choice_is[0.0-0-0.5]"),
    ("shared steps cost nobody anything", "control.controller:Choice._share",
     "sum(more) - self.rate * ms", "sum(more)", "controller::one_choice_for_all_is_nearly[4]"),
    ("two models draft in one cycle", "control.controller:Choice.__init__",
     "asking -= {i for i in asking if name in candidates[i].able}", "models.remove(name)",
     "controller::requests_that_may_choose_share_one_model_in_a_cycle"),
    ("what was measured cold is kept", "control.costs:CostLine.observe",
     "other_ms <= self._most(other, size, ms)", "True",
     "controller::no_order_of_cold_measurements"),
    ("a line goes through the slowest measurements", "control.costs:CostLine.fit",
     "median_low(ms - self", "max(ms - self", "controller::neither_text_to_read_nor"),
    ("a slow cycle is the drafter's fault", "control.costs:Costs._learn",
     "max(1.0, ms / believed) if believed else 1.0", "1.0", "controller::neither_text_to_read_nor"),
    ("what reads a prompt first makes steps free", "control.costs:Costs._learn_draft",
     "is_reading = self", "self.drafts.setdefault(name, {1: CostLine(1)}); is_reading = self",
     "controller::a_first_measurement_does_not_end_drafting"),
    ("a call of a drafter costs nothing", "control.costs:Costs._draft", "line.fixed, line.slope",
     "0.0, line.slope", "controller::what_a_step_must_bring_is_what_it_costs"),
    ("batches of all sizes have one line", "control.costs:Costs._learn", "batch.bit_length()", "1",
     "controller::batches_of_other_sizes_have_costs_of_their_own"),
    ("a first measurement is believed whatever it is", "control.costs:Costs._draft",
     "line.count < _WARM", "False", "controller::a_first_measurement_does_not_end_drafting"),
    # ------------------------------------------------------- statistics, traces and comparisons
    ("refused positions count as reached", "control.statistics:Statistics.record",
     "min(drafted, accepted + 1)", "drafted", "requests::the_prediction_is_the_formula"),
    ("the prefill's token counts per pass", "control.statistics:Statistics.tokens_per_pass",
     " - self.prefills", "", "requests::figures_divide_what_their_formulas_say"),
    ("prefills count as passes", "control.statistics:Statistics.record_times", "if is_prefill:",
     "if False:", "requests::figures_divide_what_their_formulas_say"),
    ("conditional acceptance divides by what was drafted",
     "control.statistics:Statistics.per_position", "for n, _, reached in positions",
     "for n, reached, _ in positions", "requests::figures_divide_what_their_formulas_say"),
    ("logprobs are those of the last rows", "serving.trace:token_logprobs", "logits[: len(tokens)]",
     "logits[-len(tokens) :]", "requests::a_trace_says"),
    ("a trace's bars have the noise of the next place", "serving.trace:_distributions",
     "count + row", "count + row + 1", "requests::a_trace_says"),
    ("a trace has the noise of the next place", "serving.trace:_leaders",
     "len(s.tokens) - len(scores),", "len(s.tokens) - len(scores) + 1,", "requests::a_trace_says"),
    ("every difference is a near-tie", "serving.comparison:_first_difference",
     'is_tie = ours in totals and top[0]["total"] - totals[ours] <= near_tie', "is_tie = True",
     "requests::a_wrong_token_is_called_a_bug"),
    ("no difference is a near-tie", "serving.comparison:_first_difference",
     '"near-tie" if is_tie else ', "", "requests::a_difference_is_a_near_tie"),
    ("the slowest run is the median", "serving.comparison:_median_run", "(len(runs) - 1) // 2",
     "-1", "requests::a_comparison_of_three_runs_takes_medians_and_says_when_it_was_disturbed"),
    # ------------------------------------------------------------------------- recurrent layers
    ("a refused draft stays in the state", "cache.states:RecurrentLayer._at",
     "marks[-1].length > length", "marks[-1].length > length + 4",
     "recurrent::what_was_taken_back_leaves_no_trace[qwen3_5_text-1 of 5]"),
    ("a step writes over the state before it", "kernels.recurrent:step_in_python",
     "state * decay[:, None, None]", "state.mul_(decay[:, None, None])",
     "recurrent::what_was_taken_back_leaves_no_trace[granitemoehybrid in Python-1 of 5]"),
    ("a new text goes on with the state of another", "cache.states:RecurrentLayer._at",
     "if not length:", "if not marks:", "recurrent::a_text_keeps_its_state_while_others[lfm2]"),
    ("the mark where a call began is dropped", "cache.states:RecurrentLayer._record",
     "m.length == begin or", "", "recurrent::a_call_of_many_forwards_that_fails[lfm2]"),
    ("a verify keeps its last three forwards alone", "cache.states:RecurrentLayer._record",
     "end - _MOST_RECORDED", "end", "recurrent::what_was_taken_back_leaves_no_trace[lfm2-8 of 24]"),
    ("a sigmoid depends on its place", "kernels.rowwise:RowWise.__torch_function__",
     "if name in _FUNCTIONS", "if False",
     "exactness::functions_compute_the_same_in_every_place[sigmoid-dtype0]"),
    ("a product of torch's own goes unnoticed", "kernels.rowwise:RowWise.__torch_function__",
     "self.unsteady.add(name)", "pass", "exactness::functions_that_have_two[einsum]"),
    # -------------------------------------------------------------------------- the connection
    ("a head may take for ever", "serving.connection:Connection.watch",
     "self.head and waited > self.limit_s", "False", "connection::a_client_has_so_much_time"),
    ("a body may take for ever", "serving.connection:Connection.watch",
     "self.state is State.BODY and", "False and", "connection::a_client_has_so_much_time"),
    ("who reads nothing is waited for", "serving.connection:Connection.watch",
     "now - self.all_taken_at > _READ_S", "False and _READ_S", "connection::a_client_has_to_take"),
    ("what nobody reads piles up", "serving.connection:Connection.send",
     "self.num_unread > _MAX_UNREAD_BYTES", "False", "connection::what_nobody_reads_does_not_fill"),
    ("a second request may follow chunks", "serving.connection:Connection.answer",
     "self.is_last |= self.environ.pop", "self.environ.pop", "connection::a_request_is_read_alike"),
    ("memory of a body is never given back", "serving.connection:Connection.drop_body",
     "-len(self.body)", "0", "connection::a_request_is_read_alike_however_it_is_cut"),
    ("an answer that contradicts its head is left to hang", "serving.connection:Connection._say",
     "self.abort()", "pass", "connection::an_answer_that_contradicts_its_head_ends_the_connection"),
    ("a length beside an encoding is no matter", "serving.connection:environ_of",
     '"HTTP_CONTENT_LENGTH" in environ', "False", "connection::framing_that_is_ambiguous"),
    ("a header with _ is one with -", "serving.connection:environ_of", '"_" in name', "False",
     "connection::an_environ_is_what_pep_3333_has"),
]  # fmt: skip
if why_not() is None:  # without a compiler nobody runs these
    ROWS += [
    ("all rows are cached in the first slot", "kernels.decoder:Rows.chain", "[slot]", "[0]",
     "kernels::speculation_alone_and_in_a_batch[float32-None]"),
    ("kernels see behind the window", "kernels.decoder:Block._attend", "window or 0", "0",
     "kernels::attention_of_any_shape_gives_what_torch_s_gives[5-1-40]"),
    ("a branch sees the one before it", "kernels.forward:lines_of",
     "[*lines[before], i] if i else [i]", "list(range(i + 1))",
     "tree::a_tree_s_output[qwen3-float32-None-greedy]"),
    ("modules' rows are cached where they stand", "kernels.modules:FlatPlace.write",
     "slots, _, places", "slots, places, _", "exactness::a_branch_of_a_tree_has_the_bits[opt]"),
    ("modules see behind the window", "kernels.modules:FlatPlace.mask", "self, window",
     "self, None", "cache::ragged_rows_with_random_truncation_equal_a_cache_free[gpt_oss-modules]"),
    ("a row's experts have each other's weights", "kernels.experts:experts_forward",
     "rows, places,", "rows, places.flip(0),", "cache::ragged_rows_with_random[gpt_oss-modules]"),
    ("a branch is not moved", "core:SlotCache.keep",
     "buffer[slot, :, begin : begin + count] = buffer[slot, :, moved]", "pass",
     "tree::a_tree_s_output_is_plain_decoding_s_to_the_bit[qwen3-float32-None-greedy]"),
    ("the first tokens of a tree are kept", "core:Engine.accept", "path[: num_kept - 1]",
     "range(num_kept - 1)", "tree::a_tree_s_output_is_plain_decoding_s[qwen3-float32-None-greedy]"),
    ("a drafter is given states of another branch", "messages:Cycle.along",
     "(first + i for i in self.path)", "range(first, first + len(self.path))",
     "tree::several_drafters_make_one_tree[greedy]"),
]  # fmt: skip
MUTANTS = [Mutant(name, place, old, new, tuple(tests)) for name, place, old, new, *tests in ROWS]

if __name__ == "__main__":
    sys.exit(main())
