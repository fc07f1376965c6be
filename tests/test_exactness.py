"""Equal logits are equal bits, wherever the server says so; and where it says so was checked.

The machine at hand has one set of kernels. Others' are tried in two ways. Settings of the libraries
make them run another machine's code, each in a process of its own (tests/exactness.py). And kernels
are put in that are wrong on purpose, which the check has to find.
"""

import json
import os
import subprocess
import sys
from random import Random

import pytest
import speculative_decoding as core
import torch
from conftest import ROOT, make_exact, run
from exactness import ODD, compare_forwards, examine
from torch import nn

from fastpath import activation, attention, exact, linear
from fastpath.activation import ROWS
from fastpath.exact import KEY_BLOCK, Shapes
from fastpath.forward import RaggedPlace, speed_up
from fastpath.linear import Weights
from sampling import truncated_softmax


@pytest.fixture
def threads():
    """Set the number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def assert_claim_holds(found):
    """Nothing differs that was said to be equal; and it was not an empty comparison."""
    assert found["rows_compared"] > 50 and found["texts"] > 0
    if found["is_exact"]:
        assert not found["rows_differing"] and not found["texts_differing"], found


@pytest.mark.parametrize(
    ("model", "dtype"), [("demo", "float32"), ("demo", "bfloat16"), ("llama", "float32")]
)
def test_what_is_said_to_be_exact_is(model, dtype, threads):
    """The embedded models, and one of odd widths and a large vocabulary."""
    threads(2)
    found = examine(model, dtype, rounds=6, num_texts=4)
    assert_claim_holds(found)
    if dtype == "float32":  # any CPU sums 8 rows and 512 keys in one order
        assert found["is_exact"], found["report"]


# oneDNN and MKL ignore a setting that the CPU does not have: every machine runs what it can.
MACHINES = [  # (threads, environment, flags)
    (1, {}, []),
    (2, {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}, []),
    (3, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512"}, []),
    (2, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, []),
    (4, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, []),
    (2, {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}, []),
    (3, {"ATEN_CPU_CAPABILITY": "default"}, ["--unpacked"]),
]

HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"


@pytest.mark.slow
@pytest.mark.parametrize(("count", "environment", "flags"), MACHINES, ids=str)
def test_the_claim_holds_with_other_machines_kernels_and_threads(count, environment, flags):
    """With the machine's own kernels also for models that run in transformers' own modules."""
    models = ["demo", *ODD] if not environment else ["demo", "llama"]
    # torch obeys ATEN_CPU_CAPABILITY even where the CPU has no such instructions, and is killed.
    if environment.get("ATEN_CPU_CAPABILITY") == "avx512" and not HAS_AVX512:
        environment = {k: v for k, v in environment.items() if k != "ATEN_CPU_CAPABILITY"}
    # Threads that wait for each other must not spin: another test has the cores meanwhile.
    result = subprocess.run(
        [sys.executable, "-m", "tests.exactness", f"--threads={count}", "--rounds=8", *flags,
         "--texts=4", "--dtype", "float32", "bfloat16", "--model", *models],
        cwd=ROOT, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"} | environment,
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    found = list(map(json.loads, result.stdout.splitlines()))
    assert len(found) == 2 * len(models)
    for one in found:
        assert_claim_holds(one)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt2", "opt", "gpt_oss"])
def test_a_family_is_exact_in_bfloat16_or_says_that_it_is_not(family, tiny_folder):
    """Those in float32 are seen by test_families.py."""
    target = core.load_model(str(tiny_folder(family)), core.Options(dtype="bfloat16"))
    speed_up(target)
    if not make_exact(target):
        assert target.report.doubt
        return
    compared, differing = compare_forwards(target, 4, Random(5))
    assert compared > 50 and not differing


# ------------------------------------------------------------------ kernels of other machines


@pytest.fixture
def tiny(tiny_folder):
    """A tiny fast model, not yet checked, with its blocks in Python."""

    def load(**options):
        options = {"compile": False} | options
        target = core.load_model(str(tiny_folder("llama")), core.Options(**options))
        speed_up(target)
        return target

    return load


def one_bit_off(x):
    return torch.nextafter(x, x + 1)


@pytest.fixture
def kernel(monkeypatch):
    """Put a kernel in the place of every linear layer's: row by row it is right on any machine, and
    then `wrong` makes something else of it.
    """

    def keep(self, weight, bias):
        self.out_features, self.in_features = weight.shape
        self.dtype, self.most_rows = weight.dtype, None
        self._weight, self._bias = weight.detach().clone(), bias

    def put(wrong):
        def call(self, x, residual=None):
            rows = x.reshape(-1, x.shape[-1])
            result = torch.stack([self._weight.mv(row) for row in rows])
            result = result if residual is None else result + residual.view_as(result)
            return wrong(result, len(rows)).view(*x.shape[:-1], -1)

        monkeypatch.setattr(linear, "can_pack", lambda *_: True)
        monkeypatch.setattr(Weights, "__init__", keep)
        monkeypatch.setattr(Weights, "__call__", call)

    return put


def test_where_many_rows_are_summed_otherwise_prompts_run_in_blocks_of_their_own(tiny, kernel):
    """AMX in bfloat16 is so: from 33 rows on it takes another way."""
    kernel(lambda result, rows: one_bit_off(result) if rows > 32 else result)
    target = tiny()
    assert make_exact(target), target.report
    assert target.shapes.rows[-1] == 32 and target.shapes.prompt_rows == 256
    target.shapes.prompt_rows = 40  # the context of 256 holds no whole block of 256
    text, outputs = list(range(7, 108)), []
    for pieces in ([101], [7, 50, 44], [40, 40, 21], [99, 2]):
        row, begin = target.cache.open_row(len(text)), 0
        for size in pieces:
            output = target.forward([row], [text[begin : begin + size]], [1])
            begin += size
        outputs.append(output.logits[0])
        target.cache.close_row(row)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_a_prompts_rows_depend_on_its_length_and_the_position_alone():
    shapes = Shapes((2, 8, 32), prompt_rows=256)

    def rows_by_position(prompt_length, chunks):
        rows, begin = [], 0
        for chunk in chunks:
            for count, num_rows in shapes.pieces(begin, chunk, prompt_length):
                rows += [num_rows] * count
                begin += count
        return rows

    for length in (1, 31, 255, 256, 300, 512, 700):
        whole = [256] * (length // 256 * 256) + [0] * (length % 256)
        for chunk in (1, 7, 100, 256, 260, length):
            chunks = [chunk] * (length // chunk) + [length % chunk] * (length % chunk > 0)
            assert rows_by_position(length, chunks) == whole
    # What is generated is never computed as a prompt, however it is fed again.
    assert rows_by_position(10, [300])[10:] == [0] * 290


@pytest.mark.parametrize("odd", [set(), {1}, {16, 48}, {*ROWS}], ids=len)
def test_numbers_of_rows_with_other_bits_are_not_run(tiny, kernel, odd):
    """Where all of them are other bits, all are the same."""
    kernel(lambda result, rows: one_bit_off(result) if rows in odd else result)
    target = tiny()
    assert make_exact(target), target.report
    assert set(target.shapes.rows) == {*ROWS} - odd or odd == {*ROWS} == {*target.shapes.rows}


def test_an_output_layer_that_is_run_in_parts_needs_the_parts_to_be_equal(monkeypatch):
    """It is checked at 32 rows at most: 48 are computed as 32 and 16, 96 as three times 32."""
    large = Weights(torch.randn(linear.LARGE + 8, 16), None)
    if large.most_rows is None:
        pytest.skip("this machine packs no weights")
    right, seen = Weights.__call__, set()

    def equal(but_for=None):
        def call(self, x, residual=None):
            seen.add(len(x))
            result = right(self, x, residual)
            return one_bit_off(result) if len(x) == but_for else result

        monkeypatch.setattr(Weights, "__call__", call)
        rows, _, _ = exact.equal_rows([large])
        monkeypatch.setattr(Weights, "__call__", right)
        return set(rows)

    assert equal(16) == equal() - {16, 48} and equal(32) == {n for n in equal() if n < 32}
    assert max(seen) == 32
    x = torch.randn(80, 16)
    assert torch.equal(large(x), torch.cat([large(part) for part in x.split(32)]))


def test_a_row_that_depends_on_its_place_is_not_called_exact(tiny, kernel):
    def last_row_differs(result, rows):
        return torch.cat([result[:-1], one_bit_off(result[-1:])])

    kernel(last_row_differs)
    target = tiny()
    assert not make_exact(target) and not target.report.is_exact
    assert target.shapes.key_steps and target.shapes.rows  # the nearest is kept


def test_numbers_of_keys_with_other_bits_are_not_attended_to(tiny, monkeypatch):
    """Of 384 keys an Intel CPU makes other sums than of 512."""
    right = nn.functional.scaled_dot_product_attention

    def other(query, key, value, **options):
        result = right(query, key, value, **options)
        return one_bit_off(result) if key.shape[2] % KEY_BLOCK in (192, 384) else result

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", other)
    target = tiny()
    assert make_exact(target), target.report
    assert not {192, 384} & set(target.shapes.key_steps) and KEY_BLOCK in target.shapes.key_steps


@pytest.mark.parametrize("condition", ["batch", "queries", "keys"])
def test_attention_that_depends_on_company_is_not_called_exact(tiny, monkeypatch, condition):
    right = nn.functional.scaled_dot_product_attention

    def other(query, key, value, **options):
        result = right(query, key, value, **options)
        size = {"batch": len(query), "queries": query.shape[2] // 24, "keys": key.shape[2] // 600}
        return one_bit_off(result) if size[condition] > (condition == "batch") else result

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", other)
    assert not make_exact(target := tiny()) and "attention" in target.report.doubt


def test_scores_summed_in_another_order_are_found_though_bfloat16_hides_them(tiny, monkeypatch):
    """Rounded to bfloat16, weights of the same keys nearly always come out the same."""

    def by_parts(query, key, value, attn_mask, scale):
        parts = 1 if query.shape[2] > 8 else 2
        pairs = zip(query.float().chunk(parts, -1), key.float().chunk(parts, -1), strict=True)
        scores = sum(part @ other.mT for part, other in pairs) * scale + attn_mask
        return (scores.softmax(-1).to(value.dtype).float() @ value.float()).to(value.dtype)

    target = tiny(dtype="bfloat16")
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", by_parts)
    assert not make_exact(target) and "attention" in target.report.doubt


def test_one_head_of_one_text_is_not_left_to_all_threads(monkeypatch):
    """They would split its sums: with three threads, in bfloat16, it had other bits for that."""
    right, sizes = nn.functional.scaled_dot_product_attention, []

    def note(query, key, value, **options):
        sizes.append(query.shape[:2].numel())
        return right(query, key, value, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", note)
    key, value = torch.randn(2, 1, 1, 40, 16)
    for count, tasks in ((1, 2), (8, 2), (9, 1)):  # of more rows torch makes more tasks itself
        query = torch.randn(1, count, 4, 16)
        mask = attention.grouped_mask(torch.zeros(1, 1, count, 40), 4)
        result = attention.attend(query, key, value, mask)
        expected = right(query.transpose(1, 2), key, value).transpose(1, 2).flatten(2)
        torch.testing.assert_close(result, expected)
        assert sizes[-1] == tasks


def test_an_operation_between_the_layers_that_depends_on_the_batch_is_found(tiny, monkeypatch):
    target = tiny()
    run_rows = target.fast._run

    def shaky(place, *given):
        logits, hidden = run_rows(place, *given)
        is_shared = isinstance(place, RaggedPlace)
        return [one_bit_off(row) for row in logits] if is_shared else logits, hidden

    assert make_exact(target)
    monkeypatch.setattr(target.fast, "_run", shaky)
    assert not make_exact(target) and "batch" in target.report.doubt
    assert target.cache.lengths == [0] * target.cache.num_rows


# ------------------------------------------------------------------------------ activations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("silu", nn.SiLU()),
        ("gelu", nn.GELU()),
        ("gelu_tanh", nn.GELU("tanh")),
        ("quick_gelu", lambda x: x * torch.sigmoid(1.702 * x)),
    ],
)
def test_steady_activations_compute_the_same_in_every_place(name, module, dtype, threads):
    function = getattr(activation, name)
    x = torch.cat([torch.randn(40, 1376) * 4, torch.tensor([[-1e4, -88.0, 0.0, 1e4] * 344])])
    x = x.to(dtype)
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(function(x), module(x.double()).to(dtype), **tolerance)
    for count in (1, 2, 3):
        threads(count)
        alone = torch.cat([function(row[None, :99]) for row in x])
        for rows in (2, 33, 41):
            assert torch.equal(function(x[:rows, :99]), alone[:rows])


def test_only_a_plain_call_of_an_activation_is_replaced():
    x, functional = torch.linspace(-3, 25, 64), torch.nn.functional
    many = torch.linspace(-9, 9, 5000)  # of which torch's own vectors round some otherwise
    expected = functional.softplus(x, beta=4), functional.softplus(x, 2, 30), functional.silu(x)
    with activation.SteadyMode():
        assert torch.equal(functional.softplus(x, beta=4), expected[0])
        assert torch.equal(functional.softplus(x, 2, 30), expected[1])
        assert torch.allclose(torch.sigmoid(input=x), x.sigmoid())
        assert torch.equal(torch.sigmoid(many), activation.sigmoid(many))
        assert functional.silu(y := x.clone(), inplace=True) is y
        for silu in (functional.silu, torch.nn.SiLU()):
            assert torch.equal(silu(x), activation.silu(x))
    torch.testing.assert_close(y, expected[2])


def test_an_activation_is_left_alone_where_no_share_ends_within_a_vector(threads):
    silu, tanh = nn.SiLU(), nn.Tanh()
    threads(2)
    assert activation.steady(silu, 1376 + 32, torch.float32) is silu
    assert activation.steady(silu, 1376 + 31, torch.float32) is activation.silu
    threads(3)
    assert activation.steady(silu, 11008, torch.float32) is activation.silu
    assert activation.steady(tanh, 7, torch.float32) is tanh


def test_probabilities_do_not_depend_on_the_other_positions(threads):
    """Sums over a large vocabulary are split otherwise for one row than for six."""
    scores = torch.randn(6, 49152, generator=torch.Generator().manual_seed(0)) * 4
    scores[3, :600] = 9.0  # ties: a row of many columns beside rows of few
    threads(2)
    for way in ((0.8, 0, 1.0, 0.0), (0.8, 50, 1.0, 0.0), (1.1, 0, 0.9, 0.0), (1.0, 40, 0.9, 0.02)):
        alone = torch.cat([truncated_softmax(row[None], *way) for row in scores])
        assert torch.equal(truncated_softmax(scores, *way), alone), way


# ------------------------------------------------------------------------------------ shapes


@pytest.mark.parametrize("bitwise", [True, False], ids=["exact", "a draft model"])
def test_forwards_run_in_few_numbers_of_rows(tiny, monkeypatch, bitwise):
    """For each number of rows oneDNN makes code of its own and keeps it."""
    target, seen, right = tiny(), set(), Weights.__call__

    def note(self, x, residual=None):
        seen.add(x.numel() // x.shape[-1])
        return right(self, x, residual)

    report = exact.calibrate(target, bitwise=bitwise)
    assert report.is_exact if bitwise else report is None
    monkeypatch.setattr(Weights, "__call__", note)
    rows = [target.cache.open_row() for _ in range(8)]
    alone = [[length] for length in range(1, 255, 6)]
    for lengths in alone + [[1 + i * most % 32 for i in range(8)] for most in range(1, 33, 5)]:
        batch = rows[: len(lengths)]
        target.forward(batch, [[1] * length for length in lengths], lengths)
        for row in batch:
            target.cache.truncate(row, 0)
    assert seen and seen <= set(target.shapes.rows) <= {*ROWS}


def test_a_batch_of_more_rows_than_may_be_run_is_run_in_several_forwards(tiny):
    target = tiny(max_running=8)
    assert make_exact(target)
    random = torch.Generator().manual_seed(1)
    texts = torch.randint(4096, (8, 30), generator=random).tolist()
    rows = [target.cache.open_row() for _ in texts]
    counts = [5, 30, 1, 2, 30, 7, 3, 4]
    expected = target.forward(rows, texts, counts, (-1,))
    for row in rows:
        target.cache.truncate(row, 0)
    target.shapes.rows = tuple(rows for rows in target.shapes.rows if rows <= 16)
    actual = target.forward(rows, texts, counts, (-1,))
    found, wanted = (out.logits + out.hidden[-1] for out in (actual, expected))
    assert all(map(torch.equal, found, wanted))
    assert [len(logits) for logits in actual.logits] == counts


def test_exactness_can_be_turned_off(tiny_folder):
    target = core.load_engine(core.Options(model=str(tiny_folder("opt")), bitwise=False)).target
    assert target.shapes.key_steps == () and target.report is None


def test_the_clock_chooses_among_numbers_of_rows_with_equal_bits(tiny, monkeypatch):
    """On a clock of our own: four rows are worth it if they take a tenth less than one."""
    target = tiny()
    now, costs, forward = [0.0], {1: 1.0, 2: 1.2, 4: 0.95, 8: 2.0}, target.forward

    def slow(*given):
        now[0] += costs.get(target.shapes.min_rows, 9.0)
        return forward(*given)

    monkeypatch.setattr(target, "forward", slow)
    monkeypatch.setattr(exact.time, "perf_counter", lambda: now[0])
    assert exact.by_speed(target) == [1, 4, 2, 8]
    costs[4] = 0.8
    assert exact.by_speed(target) == [4, 1, 2, 8]
    target.shapes.rows = (2, 8, 16)
    assert exact.by_speed(target) == [2, 8]


def test_the_report_says_what_was_checked(tiny, monkeypatch, caplog):
    monkeypatch.setattr(exact, "_BUDGET_S", 600.0)  # for the second matrix of each shape
    with caplog.at_level("INFO", "serving.exact"):
        report = make_exact(target := tiny()) and target.report
    assert report.num_matrices == 15 == report.num_matrices_checked
    assert report.num_logits_compared > 40 and report.num_threads == torch.get_num_threads()
    assert report.seconds > 0 and "equal bits" in caplog.text and "15 of 15" in caplog.text


@pytest.mark.parametrize("min_rows", [2, 8])
def test_padding_to_more_rows_changes_no_token(demo_engine, prompts, plain, monkeypatch, min_rows):
    """A prompt of one token too: then there are fewer positions than rows."""
    whole = prompts["code_class"]
    ways = [(prompt, drafter) for prompt in (whole, whole[:1]) for drafter in (None, "mtp")]
    expected = [plain(prompt, 16) for prompt, _ in ways]
    monkeypatch.setattr(demo_engine.target.shapes, "min_rows", min_rows)
    for (prompt, drafter), output in zip(ways, expected, strict=True):
        assert run(demo_engine, prompt, max_tokens=16, drafter=drafter)[0].output == output
