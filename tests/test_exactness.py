"""Equal logits are equal bits, wherever the server says so; and where it says so was checked.

The machine at hand has one set of kernels. Others' are tried in two ways. Settings of the libraries
make them run another machine's code, each in a process of its own (tests/exactness.py). And kernels
are put in that are wrong on purpose, which the check has to find.
"""

import json
import os
import subprocess
import sys

import pytest
import speculative_decoding as core
import torch
from conftest import FAMILIES, ROOT, make_exact, run
from torch import nn

from fastpath import activation, attention, exact, linear
from fastpath.exact import KEY_BLOCK, Shapes
from fastpath.forward import RaggedPlace, speed_up
from fastpath.linear import Weights


def examined(model, **settings):
    """What tests/exactness.py finds, in a process of its own."""
    # Threads that wait for each other must not spin: another test has the cores meanwhile.
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    environment |= {k: v for k, v in settings.items() if k.isupper()}
    flags = [f"--{k}={v}" for k, v in settings.items() if k.islower()]
    result = subprocess.run(
        [sys.executable, "-m", "tests.exactness", f"--model={model}", *flags],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


def assert_claim_holds(found):
    """Nothing differs that was said to be equal; and it was not an empty comparison."""
    assert found["rows_compared"] > 50 and found["texts"] > 0
    if found["is_exact"]:
        assert not found["rows_differing"] and not found["texts_differing"], found


# Settings that a CPU does not have do nothing, so that every machine runs what it can.
MACHINES = [
    {},
    {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"},
    {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_said_to_be_exact_is(dtype):
    found = examined("demo", dtype=dtype, rounds=12, texts=8, threads=2)
    assert_claim_holds(found)
    if dtype == "float32":  # any CPU sums 8 rows and 512 keys in one order
        assert found["is_exact"], found["report"]


def test_odd_widths_and_a_large_vocabulary_are_exact():
    found = examined("llama", rounds=8, texts=4, threads=2)
    assert_claim_holds(found)
    assert found["is_exact"], found["report"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: "-".join(m.values()) or "own")
@pytest.mark.parametrize("model", ["demo", "llama"])
def test_the_claim_holds_with_other_machines_kernels(model, machine, dtype):
    found = examined(model, dtype=dtype, rounds=16, texts=8, threads=2, **machine)
    assert_claim_holds(found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["gemma2", "gpt2"])
def test_the_claim_holds_for_models_of_transformers_own_modules(model, dtype):
    assert_claim_holds(examined(model, dtype=dtype, rounds=40, texts=8, threads=2))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 3, 4])
@pytest.mark.parametrize("model", ["demo", "llama"])
def test_the_claim_holds_with_any_number_of_threads(model, threads, dtype):
    found = examined(model, dtype=dtype, rounds=16, texts=8, threads=threads)
    assert_claim_holds(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact_or_says_that_it_is_not(family, dtype, tiny_folder):
    """16 decoded tokens against verifies, batches and chunks."""
    options = core.Options(dtype=dtype, max_running=6)
    target = core.load_model(str(tiny_folder(family)), options)
    speed_up(target)
    if not make_exact(target):
        assert target.report.doubt
        return
    random = torch.Generator().manual_seed(5)
    text = torch.randint(4096, (61,), generator=random).tolist()
    one, two, *others = [target.cache.open_row(45) for _ in range(6)]
    target.forward([one], [text[:45]], [1])
    alone = [target.forward([one], [[token]], [1]).logits[0][0] for token in text[45:]]
    for chunk in (text[:13], text[13:14], text[14:45]):
        target.forward([two], [chunk], [1])
    for i, other in enumerate(others):  # the longest sees more keys
        length = min(150 * i + 1, target.max_length - 30)
        fed = torch.randint(4096, (length,), generator=random).tolist()
        target.forward([other], [fed], [1])
    position = 45
    for count, neighbours in ((1, others), (6, others), (2, []), (5, others[:2]), (2, others)):
        rows = [two, *neighbours]
        fed = [text[position : position + count]]
        fed += [text[: 1 + (3 * i + count) % 6] for i in range(len(neighbours))]
        logits = target.forward(rows, fed, [len(new) for new in fed]).logits[0]
        for i in range(count):
            assert torch.equal(logits[i], alone[position - 45 + i]), (family, position, i)
        position += count
    assert position == 61


# ------------------------------------------------------------------ kernels of other machines


@pytest.fixture
def tiny(tiny_folder):
    """A tiny fast model in bfloat16, not yet checked."""

    def load(**options):
        target = core.load_model(str(tiny_folder("llama")), core.Options(**options))
        speed_up(target)
        return target

    return load


def one_bit_off(x):
    return torch.nextafter(x, x + 1)


@pytest.fixture
def kernel(monkeypatch):
    """Put a kernel that is wrong on purpose in the place of every linear layer's."""
    right = Weights.__call__

    def put(wrong):
        def call(self, x, residual=None):
            return wrong(right(self, x, residual), x.numel() // x.shape[-1])

        monkeypatch.setattr(Weights, "__call__", call)

    return put


def test_where_many_rows_are_summed_otherwise_prompts_run_in_blocks_of_their_own(tiny, kernel):
    """AMX in bfloat16 is so: from 33 rows on it takes another way."""
    kernel(lambda result, rows: one_bit_off(result) if rows > 32 else result)
    target = tiny()
    assert make_exact(target), target.report
    assert target.shapes.rows[-1] == 32 and target.shapes.prompt_rows == 256
    random = torch.Generator().manual_seed(3)
    # The context of 256 holds no whole block: let blocks be of 40.
    target.shapes.prompt_rows = 40
    text = torch.randint(4096, (101,), generator=random).tolist()
    outputs = []
    for pieces in ([101], [7, 50, 44], [40, 40, 21], [99, 2]):
        row, begin = target.cache.open_row(len(text)), 0
        for size in pieces:
            fed = text[begin : begin + size]
            output = target.forward([row], [fed], [1], layers=(-1,))
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
        whole = rows_by_position(length, [length])
        assert whole == [256] * (length // 256 * 256) + [0] * (length % 256)
        for chunk in (1, 7, 100, 256, 260):
            chunks = [chunk] * (length // chunk) + ([length % chunk] if length % chunk else [])
            assert rows_by_position(length, chunks) == whole
    # What is generated is never computed as a prompt, however it is fed again.
    assert rows_by_position(10, [300])[10:] == [0] * 290


@pytest.mark.parametrize(
    "wrong",
    [
        lambda result, rows: one_bit_off(result),  # everything alike: exact
        lambda result, rows: one_bit_off(result) if rows == 1 else result,
        lambda result, rows: one_bit_off(result) if rows in (16, 48) else result,
    ],
    ids=["all", "one", "some"],
)
def test_numbers_of_rows_with_other_bits_are_not_run(tiny, kernel, wrong):
    kernel(wrong)
    target = tiny()
    assert make_exact(target), target.report
    odd = {
        rows for rows in activation.ROWS if wrong(torch.ones(1), rows) != wrong(torch.ones(1), 8)
    }
    assert set(target.shapes.rows) == set(activation.ROWS) - odd


def test_an_output_layer_that_is_run_in_parts_needs_the_parts_to_be_equal(monkeypatch):
    """It is checked at 32 rows at most: 48 are computed as 32 and 16, 96 as three times 32."""
    large = Weights(torch.randn(linear.LARGE + 8, 16), None)
    if large.most_rows is None:
        pytest.skip("this machine packs no weights")
    right, seen = Weights.__call__, set()

    def unequal(odd):
        def call(self, x, residual=None):
            seen.add(len(x))
            result = right(self, x, residual)
            return one_bit_off(result) if len(x) == odd else result

        monkeypatch.setattr(Weights, "__call__", call)
        rows, _, _ = exact.equal_rows([large])
        monkeypatch.setattr(Weights, "__call__", right)
        return set(rows)

    assert not {16, 48} & unequal(16) and max(unequal(32)) == 24
    assert max(seen) == 32
    x = torch.randn(80, 16)
    assert torch.equal(large(x), torch.cat([large(part) for part in x.split(32)]))


def test_a_row_that_depends_on_its_place_is_not_called_exact(tiny, kernel):
    def last_row_differs(result, rows):
        flat = result.reshape(rows, -1).clone()
        flat[-1] = one_bit_off(flat[-1])
        return flat.view_as(result)

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
    assert not make_exact(tiny())


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


def test_only_the_target_has_to_be_exact():
    """What a draft model computes changes no token, so nothing is spent on its bits."""
    engine = core.load_engine(core.Options())
    assert engine.is_exact and engine.draft_model.report is None


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
def test_steady_activations_compute_the_same_in_every_place(name, module, dtype):
    function = getattr(activation, name)
    x = torch.cat([torch.randn(40, 1376) * 4, torch.tensor([[-1e4, -88.0, 0.0, 1e4] * 344])])
    x = x.to(dtype)
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    expected = module(x.double()).to(dtype)
    torch.testing.assert_close(function(x), expected, **tolerance)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            alone = torch.cat([function(row[None, :99]) for row in x])
            for count in (2, 33, 41):
                assert torch.equal(function(x[:count, :99]), alone[:count])
    finally:
        torch.set_num_threads(before)


def test_an_activation_is_left_alone_where_no_share_ends_within_a_vector():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert activation.steady(nn.SiLU(), 1376 + 32, torch.float32) is not activation.silu
        assert activation.steady(nn.SiLU(), 1376 + 31, torch.float32) is activation.silu
        torch.set_num_threads(3)
        assert activation.steady(nn.SiLU(), 11008, torch.float32) is activation.silu
        tanh = nn.Tanh()
        assert activation.steady(tanh, 7, torch.float32) is tanh
    finally:
        torch.set_num_threads(before)


# ----------------------------------------------------------------------------- probabilities


def test_probabilities_do_not_depend_on_the_other_positions():
    """Sums over a large vocabulary are split otherwise for one row than for six."""
    scores = torch.randn(6, 49152, generator=torch.Generator().manual_seed(0)) * 4
    scores[3, :600] = 9.0  # ties: a row of many columns beside rows of few
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for sampling in (
            core.Sampling(temperature=0.8),
            core.Sampling(temperature=0.8, top_k=50),
            core.Sampling(temperature=1.1, top_p=0.9),
            core.Sampling(temperature=1.0, top_k=40, top_p=0.9, min_p=0.02),
        ):
            together = core.probabilities(scores, sampling)
            alone = torch.cat([core.probabilities(row[None], sampling) for row in scores])
            assert torch.equal(together, alone), sampling
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------------ shapes


def test_forwards_run_in_few_numbers_of_rows(tiny, monkeypatch):
    """For each number of rows oneDNN makes code of its own and keeps it."""
    target, seen, right = tiny(), set(), Weights.__call__

    def note(self, x, residual=None):
        seen.add(x.numel() // x.shape[-1])
        return right(self, x, residual)

    assert make_exact(target)
    monkeypatch.setattr(Weights, "__call__", note)
    for length in range(1, 255, 3):
        row = target.cache.open_row(length)
        target.forward([row], [[1] * length], [1])
        target.cache.close_row(row)
    rows = [target.cache.open_row() for _ in range(8)]
    for most in range(1, 33, 5):
        fed = [[1] * (1 + (i * most) % 32) for i in range(8)]
        target.forward(rows, fed, [len(f) for f in fed])
        for row in rows:
            target.cache.truncate(row, 0)
    assert seen <= set(target.shapes.rows)


def test_a_batch_of_more_rows_than_may_be_run_is_run_in_several_forwards(tiny):
    target = tiny(max_running=8)
    assert make_exact(target)
    random = torch.Generator().manual_seed(1)
    texts = torch.randint(4096, (8, 30), generator=random).tolist()
    rows = [target.cache.open_row() for _ in texts]
    wanted = [5, 30, 1, 2, 30, 7, 3, 4]
    expected = target.forward(rows, texts, wanted, True)
    for row in rows:
        target.cache.truncate(row, 0)
    target.shapes.rows = (2, 8, 16)
    actual = target.forward(rows, texts, wanted, True)
    found, wanted = (out.logits + out.hidden[-1] for out in (actual, expected))
    for pair in zip(found, wanted, strict=True):
        assert torch.equal(*pair)
    assert [len(logits) for logits in actual.logits] == wanted


def test_exactness_can_be_turned_off(tiny_folder):
    engine = core.load_engine(core.Options(model=str(tiny_folder("llama")), bitwise=False))
    assert not engine.is_exact and engine.target.shapes.key_steps == ()
    assert engine.target.report is None


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


def test_the_report_says_what_was_checked(tiny, caplog):
    with caplog.at_level("INFO", "serving.exact"):
        report = make_exact(target := tiny()) and target.report
    assert report.num_matrices == 9 == report.num_matrices_checked
    assert report.num_logits_compared > 40 and report.num_threads == torch.get_num_threads()
    assert report.seconds > 0 and "equal bits" in caplog.text and "9 of 9" in caplog.text


@pytest.mark.parametrize("min_rows", [2, 4, 8])
def test_padding_to_more_rows_changes_no_token(demo_engine, prompts, plain, min_rows):
    """A prompt of one token too: then there are fewer positions than rows."""
    engine = core.load_engine(core.Options())
    engine.target.shapes.min_rows = min_rows
    for drafter in (None, "ngram", "draft_model", "mtp"):
        for prompt in (prompts["code_class"], prompts["code_class"][:1]):
            sequence, _ = run(engine, prompt, max_tokens=24, drafter=drafter)
            assert sequence.output == plain(prompt, 24)
