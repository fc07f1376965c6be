"""Where the server says that it is exact, a token's logits have the same bits in every batch.

It compares them at its start. What torch computes between the kernels differs from machine to
machine, so settings of its libraries make them compute as on others; and operations that are wrong
on purpose show that the comparison finds them.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from conftest import ROOT, load, make_exact, open_rows
from exactness import LONGEST, assert_same_bits
from families import save_small
from torch import nn

from runtime.kernels import library
from runtime.kernels.forward import KernelForward
from runtime.kernels.patches import PanelLinear
from runtime.kernels.rowwise import RowWise
from runtime.kernels.start import speed_up
from server import core
from server.options import Options

ODD = {  # widths that no vector divides
    "llama": {
        "hidden_size": 160, "intermediate_size": 1376, "num_hidden_layers": 3, "vocab_size": 49157,
        "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 32,
    },
    "gemma2": {"hidden_size": 96, "intermediate_size": 200, "head_dim": 24, "sliding_window": 300},
    "gpt2": {"n_embd": 100, "n_head": 5},
    "qwen3_5_text": {  # recurrent layers beside attention
        "hidden_size": 100, "intermediate_size": 200, "head_dim": 24, "linear_num_key_heads": 3,
        "linear_num_value_heads": 6, "linear_key_head_dim": 20, "linear_value_head_dim": 36,
    },
}  # fmt: skip
EXACT = [  # model, type and threads
    ("embedded", "bfloat16", 2), ("llama", "float32", 2), ("gemma2", "bfloat16", 1),
    ("gpt_oss", "bfloat16", 1), ("qwen3_5_text", "float32", 2),
]  # fmt: skip
LATER = [
    ("embedded", "float32", 1), ("gemma2", "float32", 3), ("gpt2", "float32", 3),
    ("qwen3_5_text", "bfloat16", 4),
    *((name, "bfloat16", 1) for name in ("llama", "qwen2", "gpt2", "opt")),
]  # fmt: skip
EXACT += (pytest.param(*case, marks=pytest.mark.slow) for case in LATER)


@pytest.mark.parametrize(("model", "dtype", "count"), EXACT)
def test_what_is_said_to_be_exact_is(model, dtype, count, threads, tmp_path):
    """Some models have odd widths, one a large vocabulary."""
    threads(count)
    if model != "embedded":
        length = {"n_positions" if model == "gpt2" else "max_position_embeddings": LONGEST + 20}
        save_small(model, tmp_path, **ODD.get(model, {}), **length)
        model = tmp_path
    target = load(model, dtype=dtype, max_running=8).target
    assert target.report.is_exact, target.report
    assert_same_bits(target, 6, Random(1))


@pytest.fixture
def tiny(tiny_folder):
    """Load a tiny model with sums in C, which nothing has compared yet."""

    def load_model(family="gpt_neox", **options):
        target = core.load_model(str(tiny_folder(family)), Options(**options))
        speed_up(target)
        assert target.compiled.is_compiled == (family == "llama")
        return target

    return load_model


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_health_says_what_may_differ_on_another_cpu(family, dtype, tiny, monkeypatch):
    target = tiny(family, dtype=dtype)
    for cpu in ("AVX-512 VNNI AMX", "AVX-512 VNNI BF16", "AVX2"):
        monkeypatch.setattr(library, "instructions", lambda cpu=cpu: cpu)
        report = target.compiled.report()
        assert report.as_dict()["exception"] == report.exception
        assert bool(report.exception) == (dtype == "bfloat16" and cpu != "AVX2")


@pytest.mark.parametrize(("num_bytes", "count"), [(1 << 20, 6), (8 << 30, 2)])
def test_a_large_model_is_tried_on_two_rows_at_its_start(tiny, num_bytes, count, monkeypatch):
    """On any machine: no clock decides how much is compared."""
    target, fed = tiny("llama"), list[int]()

    def wrong_alone(rows, ids, wanted):
        fed.extend(wanted)
        output = forward(rows, ids, wanted)
        return replace(output, logits=[x + (len(x) == 1) for x in output.logits])

    forward = target.compiled.__call__
    monkeypatch.setattr(KernelForward, "__call__", lambda _, *rows: wrong_alone(*rows))
    monkeypatch.setattr(KernelForward, "num_bytes", num_bytes)
    assert target.compiled.report().doubt == "decoding and verifying differ"
    assert fed == [6, *[1] * count]


MACHINES = [  # what a CPU must have, or would compute as without the settings; the settings
    ("avx2", {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}),
    ("avx512bw", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512"}),
    ("avx512_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}),
    ("amx_tile", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}),
    ("avx2", {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "default",
              "MKL_ENABLE_INSTRUCTIONS": "AVX2"}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "environment"), MACHINES, ids=str)
def test_all_this_holds_with_other_machines_kernels(flag, environment):
    if flag not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("not this CPU")
    command = [sys.executable, "-m", "pytest", "-n0", "-q", __file__]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True, timeout=900)


# ---------------------------------------------------------------- mistakes that the start finds
def off_where(is_shaken):
    """An operation that changes one bit in some places."""
    return lambda x, place: torch.nextafter(x, x + 1) if is_shaken(place) else x


# A product of torch's may have equal bits in every trial, and others with other numbers.
SHAKY = {
    "at once and in pieces": off_where(lambda place: place.positions.shape[1] == 11),
    "alone and in a batch": off_where(lambda place: len(place.slots) > 1),
    "in pieces differs": off_where(lambda at: at.positions.min() > 10 and at.counts == [1]),
    "depend on the number of rows (matmul)": lambda x, _: x @ torch.eye(x.shape[-1]),
}


@pytest.mark.parametrize("doubt", SHAKY)
def test_an_operation_between_the_layers_that_depends_on_company_is_found(tiny, monkeypatch, doubt):
    target = tiny()
    assert make_exact(target)
    norm = target.model.get_decoder().final_layer_norm
    right, shaky = norm.forward, SHAKY[doubt]
    monkeypatch.setattr(norm, "forward", lambda x: shaky(right(x), target.cache.current))
    assert not make_exact(target) and doubt in target.report.doubt
    assert target.cache.lengths == [0] * target.cache.num_rows and not target.cache.rows


def test_a_family_that_attends_by_code_of_its_own_is_served_and_not_called_exact(tiny_folder):
    target = load(tiny_folder("xglm")).target
    assert target.compiled is None and type(target.model.lm_head) is PanelLinear
    assert "attend by code of their own" in target.report.doubt


@pytest.mark.parametrize("family", ["gpt_oss", "opt"])
def test_a_branch_of_a_tree_has_the_bits_of_a_chain_in_modules_too(tiny, family):
    target, text = tiny(family), [*range(30, 50)]
    parents = [-1, -1, 0, 2]  # of what stands behind the first token, which is pending
    with open_rows(target, text) as rows:
        tree = target.forward(rows, [[60, 61, 62, 63, 64]], [5], (-1,), parents=[parents])
        target.cache.truncate(*rows, len(text))
        chain = target.forward(rows, [[60, 61, 63, 64]], [4], (-1,))
    for branch, expected in ((tree.logits, chain.logits), (tree.hidden[-1], chain.hidden[-1])):
        assert torch.equal(branch[0][[0, 1, 3, 4]], expected[0])


# ---------------------------------------------------------------------------- row by row
FUNCTIONS = {
    "silu": nn.SiLU(), "gelu": nn.GELU(), "gelu tanh": nn.GELU("tanh"), "sigmoid": nn.Sigmoid(),
    "softplus": nn.Softplus(), "softplus 4": nn.Softplus(4, 30),
    "rsqrt": lambda x: x.abs().clamp(min=0.1).rsqrt(),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_compute_the_same_in_every_place(name, dtype, threads):
    module = FUNCTIONS[name]
    some = torch.randn(40, 1376, generator=torch.Generator().manual_seed(0)) * 4
    x = torch.cat([some, torch.tensor([[-1e4, -88.0, 0.0, 1e4] * 344])])
    x, tolerance = x.to(dtype), 4 * torch.finfo(dtype).eps
    expected = module(x.double()).to(dtype)
    with RowWise(nn.Module()):
        torch.testing.assert_close(module(x), expected, rtol=tolerance, atol=tolerance)
        x = x[:, :99].contiguous()  # a row ends within a vector
        for count in (1, 3):
            threads(count)
            alone = torch.cat([module(row[None]) for row in x])
            for rows in (2, 33, 41):
                assert torch.equal(module(x[:rows]), alone[:rows])


TWO_FORMS = {
    "matmul": lambda x: x @ x.T,
    "einsum": lambda x: torch.einsum("nd,md->nm", x, x),
    "mish": nn.functional.mish,
    "pow": lambda x: x.abs() ** 1.5,
    "softmax": lambda x: x.softmax(0),
    "scaled_dot_product_attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
}


@pytest.mark.parametrize("name", TWO_FORMS)
def test_functions_that_have_two_forms_are_noted(name):
    x = torch.ones(3, 20)
    with (mode := RowWise(nn.Module())), torch.inference_mode():
        nn.functional.softmax(x, dim=-1), x**2, torch.pow(x, 3.0)
        assert not mode.unsteady
        TWO_FORMS[name](x)
    assert mode.unsteady == {name}
