"""The kernels promise bits: what they compute of a row depends on that row alone.

Neighbours in a batch, threads and the CPU change nothing, so a draft that is verified in one pass
gets the logits of plain decoding. They are near those of transformers' modules, which run where
nothing can be compiled.
"""

import hashlib
import math
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import conftest
import gguf
import numpy as np
import pytest
import torch
from conftest import ROOT, assert_lossless, load, logits_of, needs_compiler, run
from families import save_small
from test_heads import new_eagle3, target_folder  # noqa: F401
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from runtime import kernels
from runtime.folders import own_folder
from runtime.kernels import chain, library
from runtime.kernels.decoder import Rows
from runtime.kernels.parts import is_same, norm_of
from runtime.kernels.weights import FORMS, PackedMatrix
from runtime.models import gguf_file
from runtime.values import Request
from server import core, trace

pytestmark = needs_compiler
TEXT = [311, 42, 7, 900, 13, 42, 7, 900, 55, 1024, 3, 42]
# GGUF's names, and where float16 lie in a block's bytes.
TYPES = {
    "FLOAT16": ("F16", [0]), "Q8": ("Q8_0", [0]), "Q4": ("Q4_0", [0]), "Q4M": ("Q4_1", [0, 2]),
    "Q5": ("Q5_0", [0]), "Q5M": ("Q5_1", [0, 2]), "Q4K": ("Q4_K", [0, 2]), "Q5K": ("Q5_K", [0, 2]),
    "Q6K": ("Q6_K", [208]),
}  # fmt: skip


def weights(form, outputs, inputs):
    """A matrix of a form, and the weight and bias that they hold in float64, as gguf reads them."""
    random = np.random.default_rng(0)
    bias = torch.from_numpy(random.standard_normal(outputs, np.float32))
    if form in ("FLOAT", "HALF"):
        weight = torch.from_numpy(random.standard_normal((outputs, inputs), np.float32))
        weight = weight.bfloat16() if form == "HALF" else weight
        return PackedMatrix.of(weight, bias), weight.double(), bias.double()
    name, halves = TYPES[form]
    kind = gguf.GGMLQuantizationType[name]
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    # Rows are whole blocks, so they may have some more inputs than are asked for.
    rows = random.integers(0, 256, (outputs, -(-inputs // block), num_bytes), dtype=np.uint8)
    for at in halves:
        scales = random.standard_normal(rows.shape[:2]).astype(np.float16)
        rows[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    rows = rows.reshape(outputs, -1)
    weight = torch.from_numpy(gguf.dequantize(rows, kind).astype(np.float64))
    panels = PackedMatrix(form, (outputs, inputs), [rows], bias)
    return panels, weight.view(outputs, -1)[:, :inputs], bias.double()


def numbers(count, width):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


SIZES = [(1, 1), (37, 100), (300, 577)]  # outputs, inputs


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_in_any_company_and_with_any_threads(form, size, threads):
    """And so do some of a matrix's outputs alone."""
    panels, weight, _ = weights(form, *size)
    x = numbers(300, panels.inputs)
    alone = torch.cat([panels(x[i : i + 1]) for i in range(300)])
    for count in (1, 2, 3):
        threads(count)
        for rows in (*range(1, 17), 300):
            assert torch.equal(panels(x[:rows]), alone[:rows])
            assert torch.equal(panels(x[-rows:]), alone[-rows:])
    assert torch.equal(panels.unpacked(), weight.float())  # gguf's numbers, and nothing is lost
    ids = torch.tensor([99, 3, 17, 16, 15, 0, *range(50, 62)]) % panels.outputs
    some = panels.some(ids)
    assert torch.equal(some(x), alone[:, ids])
    assert torch.equal(some.unpacked(), panels.unpacked()[ids])


@pytest.mark.parametrize("form", TYPES)
def test_panels_hold_the_numbers_that_gguf_reads_from_any_bytes(form):
    """Scales that are no numbers, infinite or subnormal are among them; rows come in pieces."""
    assert gguf_file.FORMS[TYPES[form][0]] == form
    kind = gguf.GGMLQuantizationType[TYPES[form][0]]
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(1).integers(0, 256, (200, 3 * num_bytes), dtype=np.uint8)
    panels = PackedMatrix(form, (200, 3 * block), [rows[:16], rows[16:48], rows[48:]])
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.dequantize(rows, kind)
    both = panels.unpacked().numpy(), expected
    # Zeros have their signs, too; a NaN may have any of its bits, among them those of -1.
    assert np.array_equal(*(np.where(np.isnan(x), -1, x.view(np.int32)) for x in both))


@pytest.mark.parametrize("form", TYPES)
def test_matrices_of_a_file_lie_in_panels_as_rows_in_memory_do(form, tmp_path):
    """One is read in pieces of three panels, one in pieces of one: 256 KB are read at once."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[TYPES[form][0]]]
    wide = (1 << 18) // (16 * num_bytes) + 1  # blocks of a row
    small, large = (
        np.random.default_rng(1).bytes(n * num_bytes) for n in (wide // 3 * 100, wide * 40)
    )
    (path := tmp_path / "file").write_bytes(b"GGUF." + small + large)
    places = (5, form, (100, wide // 3 * block)), (5 + len(small), form, (40, wide * block))
    with path.open("rb") as file:
        made = library.lay_out_file(file.fileno(), places)
        os.truncate(path, 5 + len(small + large) - 1)
        with pytest.raises(EOFError):
            library.lay_out_file(file.fileno(), places)
    with pytest.raises(OSError, match="Bad file descriptor"):
        library.lay_out_file(-1, places)
    for data, panels, (_, _, shape) in zip((small, large), made, places, strict=True):
        rows = np.frombuffer(data, np.uint8).reshape(shape[0], -1)
        assert np.array_equal(panels, PackedMatrix(form, shape, [rows])._data)


@pytest.mark.parametrize("odd", [math.nan, -math.inf, 1e7])
def test_a_matrix_that_four_bits_cannot_hold_stays_as_it_is(odd):
    weight = numbers(40, 100)
    weight[33, 99] = odd
    panels = PackedMatrix.of(weight, None, "int4")
    kept, expected = (each.nan_to_num() for each in (panels.unpacked(), weight))
    assert panels.form == "FLOAT" and torch.equal(kept, expected)
    weight[33, 99] = 0
    weight[5] = 0  # no scale is best
    weight[6] *= 1e-9  # float16 has no such scale
    panels = PackedMatrix.of(weight, None, "int4")
    assert panels.form == "Q4" and not panels.unpacked()[5:7].any()


@pytest.mark.parametrize("form", ["Q4", "Q4M", "Q4K"])
def test_what_has_four_bits_keeps_its_numbers(form):
    panels, weight, _ = weights(form, 37, 100)
    panels.quantise("int4")
    assert panels.form == form and torch.equal(panels.unpacked(), weight.float())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_as_near_as_its_roundings_allow(form, size):
    panels, weight, bias = weights(form, *size)
    inputs = panels.inputs
    x = numbers(7, inputs)
    x[1:3] *= torch.tensor([[1e-20], [1e20]])
    error = (panels(x).double() - (x.double() @ weight.T + bias)).abs()
    exact, largest = x.double().abs(), weight.abs()
    roundings = (inputs + 4) * 2**-24 * (exact @ largest.T + bias.abs())
    if form == "HALF":  # a CPU's own product rounds its inputs to bfloat16
        roundings += 2**-8 * exact @ largest.T
    elif form not in ("FLOAT", "FLOAT16"):  # half a step of the block's 127
        blocks = torch.nn.functional.pad(exact, (0, -inputs % 32)).unflatten(1, (-1, 32))
        step = blocks.amax(-1, keepdim=True) / 127 * 0.501
        roundings += step.expand_as(blocks).flatten(1)[:, :inputs] @ largest.T
    assert (error <= roundings).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_nan_and_an_infinity_stay_in_their_row_and_subnormal_numbers_do_no_harm(form):
    panels, weight, bias = weights(form, 20, 70)
    x = numbers(6, panels.inputs)
    x[0, 40], x[1, 3], x[2] = torch.nan, torch.inf, 0
    x[3] = x[4, :32] = 1e-42  # a subnormal number
    product = panels(x)
    assert product[0].isnan().all() and not product[1].isfinite().any()
    assert torch.equal(product[2], bias.float()) and torch.allclose(product[3], bias.float())
    assert product[4:].isfinite().all()
    assert torch.equal(panels(x[5:]), product[5:])


# ------------------------------------------------------------------------------- whole models
# Values narrower than keys; products with experts, with a router and of few terms.
ODD = "deepseek_v3", "llama4_text", "granitemoe", "gemma3n_text"


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "gpt_oss", "opt", "qwen3_5_text", *ODD])
def test_families_are_exact_in_modules_too(family, tiny_folder):
    """test_cache.py compares what modules and blocks in C compute."""
    with conftest.only_modules():
        target = load(tiny_folder(family)).target
    assert not target.compiled.is_compiled and target.report.is_exact
    assert all(layer._is_compiled for layer in target.cache.recurrent)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(5, 1, 40), (4, 4, 24), (6, 2, 80)])
def test_attention_of_any_shape_is_that_of_torch(heads, kv_heads, width, tmp_path, monkeypatch):
    """Groups of 5, 1 and 3 queries; widths that 16 does not divide; texts in blocks and behind."""
    # Rotations stay torch's, whose angles are less exact.
    monkeypatch.setattr("runtime.kernels.forward.recompute_rope_tables", lambda *_: None)
    save_small(
        "qwen3", tmp_path, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=width,
        max_position_embeddings=640, use_sliding_window=True, sliding_window=37,
        layer_types=["full_attention", "sliding_attention"] * 2,
    )  # fmt: skip
    text = torch.randint(4096, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    targets = [load(tmp_path, kernels=is_wanted).target for is_wanted in (False, True)]
    assert [bool(target.compiled) for target in targets] == [False, True]
    assert is_same(*(logits_of(target, text) for target in targets))


def test_a_row_without_numbers_is_not_hidden_by_integers(tiny_folder):
    engine = load(tiny_folder("llama"), dtype="int8")
    panels, block = engine.target.compiled.decoder.embedding, 512 + 32  # of Q8
    scales = panels._data.view(np.float16)
    begin = 900 // 16 * (panels.inputs // 32) * block + 512 + 2 * (900 % 16)
    scales[begin // 2] = torch.nan
    # The rows behind it get it through its keys and values alone.
    assert logits_of(engine.target, TEXT)[3:].isnan().all()


def test_nothing_is_read_or_written_where_nothing_is(tiny_folder):
    decoder = load(tiny_folder("llama")).target.compiled.decoder
    # For lines numbers below 0 are places before the text, which no row sees.
    wrong = [*product(["slots", "positions", "places", "wanted", "ids"], [-1, 1 << 40])]
    for what, number in [*wrong, ("lines", [1 << 40])]:
        rows = Rows()
        rows.chain(0, 0, 3)
        rows.ids, rows.wanted = [5, 6, 7], [0, 1, 2]
        if what == "lines":
            rows.lines = [[0], [1], [2]]
        decoder(rows)
        getattr(rows, what)[-1] = number
        with pytest.raises(IndexError, match="that is not there"):
            decoder(rows)


def write_program(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)


@pytest.fixture
def unloaded(tmp_path, monkeypatch):
    """Nothing was compiled or loaded yet. Call it with the command that CC is to be."""
    library._tell.cache_clear()
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(library, "_failure", "")
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return partial(monkeypatch.setenv, "CC")


def test_without_a_compiler_transformers_modules_run(tiny_folder, unloaded):
    unloaded("no-such-compiler")
    engine = load(tiny_folder("llama"))
    assert engine.target.compiled is None and not engine.target.report.is_exact


SAYS = "echo '{}' >&2\n{}"
FULL = "linear.c:9:1: fatal error: error writing to /tmp/a.s: No space left on device"
COMPILERS = {  # and whether it is called once, as it would say the same again
    SAYS.format("linear.c:1: error: no such header", "exit 1"): True,
    SAYS.format(FULL, "exit 1"): False,
    SAYS.format("linear.c:1: internal compiler error: Killed, an error", "exit 1"): False,
    SAYS.format("linear.c:1: error: all is well", "kill -9 $$"): False,
    "printf 'Speicher ersch\\366pft: an error\\n' >&2; exit 1": False,
}


@pytest.mark.parametrize("script", COMPILERS)
def test_a_compiler_that_refuses_is_not_called_again_and_one_that_could_not_work_is(
    script, unloaded, tmp_path, caplog
):
    write_program(tmp_path / "broken", f"echo $$ >> {tmp_path}/calls\n{script}")
    unloaded("broken")
    for _ in range(2):
        library._tell.cache_clear()
        library._failure = ""  # as in a new process
        library.use(True)
        calls = file.read_text() if (file := tmp_path / "calls").exists() else ""
        library.use(True)  # of a second model
        assert not calls or file.read_text() == calls
    said = [message for message in caplog.messages if "slower: " in message]
    assert not library.is_used and not [*tmp_path.rglob("*.so")]
    assert "the compiler failed: " in said[0] and "error" in said[0]
    assert ("the compiler failed before" in said[1]) == COMPILERS[script]


@pytest.mark.parametrize(("compiler", "mode", "reason"), [
    ('"x', 0o700, "CC is no command: No closing quotation"),
    ("", 0o777, "or others may write there"),
    ("", 0o700, "the kernels cannot be compiled: .*undefined symbol: describe"),
], ids=["no command", "a folder where others may write", "other sources"])  # fmt: skip
def test_a_line_says_why_nothing_is_compiled(
    compiler, mode, reason, unloaded, tmp_path, caplog, monkeypatch
):
    (folder := tmp_path / "speculative-decoding" / "compiled").mkdir(parents=True)
    folder.chmod(mode)
    (tmp_path / "one.c").write_text("int little;\n")
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    unloaded(compiler)
    for _ in range(2):
        library.use(True)
    assert not library.is_used and re.search(reason, caplog.text)
    assert caplog.text.count("which is slower") == 1  # the reason is told once
    assert "\n" not in caplog.messages[-1]
    assert "undefined" in reason or not [*tmp_path.rglob("*.so")]


def test_a_library_that_is_only_looked_for_is_not_compiled(unloaded, tmp_path):
    """So a start tells that it compiles once it can tell anything."""
    with pytest.raises(ValueError, match="not compiled yet"):
        library.load(compiles=False)
    assert not [*tmp_path.rglob("*.so")]


ANOTHER = 12345  # user
PLACES = {  # what is made of the cache folder, and whether code in it is run
    "as it comes": (lambda cache: None, True),
    "others may write to it": (lambda cache: cache.chmod(0o777), False),
    "others may write beside it, and not rename it": (lambda cache: cache.chmod(0o1777), True),
    "others may write a level below": (lambda cache: (cache / APP).chmod(0o770), False),
    "a link of one's own": (lambda cache: link(cache), True),
    "a link where others may write": (lambda cache: (link(cache), cache.chmod(0o777)), False),
    "a link to where others may write": (lambda cache: link(cache).parent.chmod(0o777), False),
    "another's": (lambda cache: os.chown(cache, ANOTHER, ANOTHER), False),
    "a level below is another's": (lambda cache: os.chown(cache / APP, ANOTHER, ANOTHER), False),
    "another's link": (
        lambda cache: (link(cache), cache.chmod(0o1777),
                       os.chown(cache / APP, ANOTHER, ANOTHER, follow_symlinks=False)), False),
}  # fmt: skip
APP = "speculative-decoding"


def link(cache):
    """Put a link in the place of the program's folder, which lies elsewhere now: where it lies."""
    (cache / APP).rename(where := cache.with_name("elsewhere") / APP)
    (cache / APP).symlink_to(where)
    return where


@pytest.mark.parametrize("name", PLACES)
def test_code_is_run_only_where_nobody_else_could_put_it(name, tmp_path, monkeypatch):
    """Neither in the folder nor on the way to it, links followed."""
    change, is_safe = PLACES[name]
    if "another's" in name and os.geteuid():
        pytest.skip("gives folders to another user")
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache := tmp_path / "cache"))
    folder = own_folder()
    assert all(place.stat().st_mode & 0o777 == 0o700 for place in (folder, folder.parent))
    change(cache)
    try:
        assert own_folder().samefile(folder) and is_safe
    except PermissionError as error:
        assert not is_safe and "others may write there (chmod go-w" in str(error)


@pytest.mark.parametrize("compiler", [shutil.which("gcc") or "cc", "g++"])
def test_what_was_compiled_is_used_again_and_a_broken_file_is_made_anew(compiler, tmp_path):
    """Each start is a process, as a library is loaded once. A compiler of C++ compiles C, too."""
    if not shutil.which(compiler):
        pytest.skip("not here")
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "CC": compiler
    }  # fmt: skip
    (tmp_path / "one.c").write_text('const char *describe(void) { return "little"; }\n')
    use = "library._FOLDER = pathlib.Path('.'); library.use(True); print(library.instructions())"
    script = f"import pathlib; from runtime.kernels import library; {use}"
    command, times = [sys.executable, "-c", script], []
    for damaged in (None, None, ".so", ".sha256"):
        if damaged:  # half a library would end a process that opens it
            (file,) = tmp_path.rglob(f"*{damaged}")
            file.write_bytes(b"\xff" + file.read_bytes()[: file.stat().st_size // 2])
        said = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
        (file,) = tmp_path.rglob("*.so")
        assert said == "little\n"
        times.append(file.stat().st_mtime_ns)
    assert times[0] == times[1] < times[2] < times[3]


def test_a_pipe_in_the_place_of_what_was_compiled_is_not_waited_for(tmp_path):
    (place := tmp_path / "a.so").write_bytes(b"library")
    (digest := tmp_path / "a.sha256").write_text(hashlib.sha256(b"library").hexdigest())
    with library._whole(place):
        pass
    for file in (digest, place):
        content = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        assert library._whole(place) is None
        file.unlink()
        file.write_bytes(content)


def test_rotations_are_computed_in_double_and_rounded_once(demo_engine):
    """torch's tables depend on the CPU's instructions."""
    ((kind, rope),) = demo_engine.target.compiled.decoder.ropes.items()
    cos, sin = rope.tables
    length, width = cos.shape
    parameters = demo_engine.target.model.config.rope_parameters
    base = parameters.get(kind, parameters)["rope_theta"]
    frequencies = np.float32([base ** (-i / width) for i in range(width)]).astype(float)
    angles = np.outer(np.arange(length), frequencies)
    for table, function in ((cos, math.cos), (sin, math.sin)):
        assert np.array_equal(table.numpy(), np.float32(np.vectorize(function)(angles)))


def test_a_short_context_has_short_tables():
    assert load("embedded", drafter="mtp", max_model_len=6).pool.drafters["mtp"]._kernels


# ----------------------------------------------------------------------------- other machines
PROGRAM = ROOT / "tests" / "kernels_bits.c"
EXACT = "-O3 -std=gnu11 -ffp-contract=off -fno-math-errno -fno-trapping-math -pthread".split()


def bits(tmp_path, cpu, *options, asked="0 12 2", runner=(), compiler=None, kernels=None):
    """What kernels_bits.c prints if it is `asked` for a first test, so many tests, and threads.

    It is compiled for a CPU, with the library `kernels` or with their sources; without a CPU it
    stays as it was compiled last.
    """
    program = tmp_path / "bits"
    if cpu:
        sources = [kernels] if kernels else sorted((ROOT / "runtime" / "kernels" / "c").glob("*.c"))
        command = [*(compiler or library.compiler()), *EXACT, f"-march={cpu}", *options]
        subprocess.run([*command, "-o", program, PROGRAM, *sources, "-lm"], check=True)
    return subprocess.check_output([*runner, program, *asked.split()], text=True)


def library_bits(tmp_path, asked="0 12 2"):
    """With the library that is loaded here; what calls it may be slow, and is compiled fast."""
    library.load()
    kernels = own_folder() / f"{library._key()}.so"
    return bits(tmp_path, "native", "-O0", asked=asked, kernels=kernels)


@pytest.mark.slow
def test_a_thread_that_leaves_a_job_late_does_not_disturb_the_next_one(tmp_path):
    """Three million pairs of jobs: a fault of this kind was seen in three of four such runs."""
    assert library_bits(tmp_path, asked="jobs 0 2") == "undisturbed\n"


def test_all_that_is_in_c_has_the_same_bits_with_any_threads(tmp_path):
    expected = library_bits(tmp_path)
    assert expected.count("\n") == 12 and "none" not in expected
    assert bits(tmp_path, None, asked="0 12 3") == expected
    two, three = (bits(tmp_path, None, asked=f"0 12 {count} all") for count in (2, 3))
    assert two == three != expected  # with a form more


V3 = {"lm", "avx2", "fma", "f16c"}
VNNI = ["-include", str(PROGRAM.with_name("vnni.h"))]


@pytest.mark.slow
@pytest.mark.parametrize(("cpu", "flags", "options"), [
    ("x86-64", {"lm"}, []), ("x86-64-v2", {"ssse3"}, []), ("x86-64-v3", V3, []),
    ("x86-64-v3", V3, VNNI), ("x86-64-v4", V3 | {"avx512bw", "avx512vl"}, []),
])  # fmt: skip
def test_all_that_is_in_c_has_the_same_bits_on_every_x86(tmp_path, cpu, flags, options):
    """The library here is optimised; most of the time would go into that for these, too."""
    if not flags <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip("not this CPU")
    assert bits(tmp_path, cpu, "-O1", *options) == library_bits(tmp_path)


@pytest.mark.parametrize("flags", ["gcc -march=x86-64", "aarch64-linux-gnu-gcc"])
def test_the_code_is_c_for_other_cpus(flags):
    """Of the CPUs here only one has its code compiled in other tests, but for slow ones."""
    command = flags.split()
    if not shutil.which(command[0]) or (len(command) > 1 and os.uname().machine != "x86_64"):
        pytest.skip("no compiler for it")
    options = [each for each in library._FLAGS if each != "-march=native"]
    sources = sorted(library._FOLDER.glob("*.c"))
    subprocess.run([*command, *options, "-fsyntax-only", *sources], check=True)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="not this CPU")
def test_a_compiler_knows_the_instruction_of_avx_vnni():
    """Which vnni.h has in C."""
    source = ROOT / "runtime" / "kernels" / "c" / "blocks.c"
    flags = "-O0 -march=x86-64-v3 -mavxvnni -S -o-".split()
    assert b"vpdpbusd" in subprocess.check_output([*library.compiler(), *flags, source])


@pytest.mark.slow
@pytest.mark.parametrize("options", [("armv8-a", "-O1"), ("armv8.2-a+dotprod", "-O1")], ids=str)
def test_all_that_is_in_c_has_the_same_bits_on_aarch64(tmp_path, options):
    cross, names = shutil.which("aarch64-linux-gnu-gcc"), ("qemu-aarch64-static", "qemu-aarch64")
    emulator = next(filter(None, map(shutil.which, names)), None)
    if not (cross and emulator):
        pytest.skip("needs Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user-static")
    asked = "6 4 2"  # attention, nets, large rows
    native = library_bits(tmp_path, asked)
    tools = {"runner": [emulator], "compiler": [cross]}
    assert bits(tmp_path, *options, "-static", asked=asked, **tools) == native
    assert native.count("\n") == 4


# Lines are named in reports; to follow variables would double the compiler's time.
SANITIZERS = "-O1 -g1 -fno-var-tracking -fsanitize=address,undefined -fno-sanitize-recover=all"
NO_LEAKS = {"ASAN_OPTIONS": "detect_leaks=0"}  # Python and torch have some


def check_sanitized(tmp_path, cpu, **kernels):
    """Random shapes, with all forms."""
    options = {"asked": "0 60 2 all", "runner": ["env", *map("=".join, NO_LEAKS.items())]}
    assert bits(tmp_path, cpu, *SANITIZERS.split(), **options, **kernels).count("\n") == 60


@pytest.mark.slow
def test_nothing_is_read_or_written_that_is_not_there(tmp_path):
    library.load()
    if library.instructions() == "AVX2" and shutil.which("gcc"):
        pytest.skip("the library here is for these instructions: the next slow test has it")
    check_sanitized(tmp_path, "x86-64-v3")


CALLERS = [f"tests/test_{name}.py" for name in "kernels gguf choosing scoring recurrent".split()]
CALLS = {  # tests of these files that call C with odd sizes, and the entry points that they call
    # Matrices as large as the third are in kernels_bits.c.
    "a_row_has_the_same_bits and not 577": "apply_linear gather read_rows",
    "four_bits_cannot_hold_stays": "round_matrix",
    "panels_hold_the_numbers": "bytes_of repack use_large_pages",
    "matrices_of_a_file": "repack_file",
    "attention_of_any_shape or where_nothing_is": "run_decoder tabulate",
    "exact_in_modules and (gpt_oss or deepseek)": "run_attention",
    "exact_in_modules and qwen3_5 or on_a_stack": "apply_rule",
    "a_convolution_gives": "apply_convolution",
    "in_one_call and (eagle3 or draft_model-0.8)": "run_chain",
    "another_family_is_served and gpt2": "describe",  # packed weights, and so are the next two
    "filled_up_to_different or no_kernel_multiplies": "choose",
    "c_chooses_what and 0.02": "survivors leaders",
    "c_is_as_sure": "confidence",
    "scores_in_c": "score_rows",
}  # fmt: skip


def test_each_entry_point_is_called_under_sanitizers():
    """By a test of the list above. The run itself is a slow one."""
    texts = (path.read_text("utf-8") for path in Path(kernels.__file__).parent.glob("*.py"))
    found = r'(?:compute|_function)\("(\w+)"|(?:load\(\)|call)\.(\w+)\('
    called = {a or b for text in texts for a, b in re.findall(found, text)}
    assert called == {*" ".join(CALLS.values()).split()} and len(called) > 15
    tests = "".join((ROOT / file).read_text("utf-8") for file in CALLERS)
    for part in re.findall(r"\w+_\w+_\w+", " ".join(CALLS)):
        assert re.search(rf"^def test_\w*{part}", tests, re.MULTILINE), part


@pytest.mark.slow
def test_nor_is_it_where_python_calls_the_kernels(tmp_path, unloaded):
    """One or a few tests of each entry point, under both sanitizers."""
    names = ["libasan.so", "libstdc++.so"]
    if not (gcc := shutil.which("gcc")):
        pytest.skip("needs gcc")
    paths = [subprocess.check_output([gcc, f"-print-file-name={n}"], text=True) for n in names]
    preloaded = " ".join(path.strip() for path in paths)
    if names[0] in preloaded.split():  # a name without a folder
        pytest.skip("needs gcc's libasan")
    write_program(compiler := tmp_path / "cc", f'exec {gcc} "$@" {SANITIZERS}')
    unloaded(str(compiler))
    library._compile(file := own_folder() / f"{library._key()}.so")
    check_sanitized(tmp_path, "native", kernels=file)
    # As Python's own allocator would, so that sanitizers see the ends of what ctypes makes.
    environment = os.environ | NO_LEAKS | {"LD_PRELOAD": preloaded, "PYTHONMALLOC": "malloc"}
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-k", " or ".join(CALLS), *CALLERS]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=900)


# ----------------------------------------------------------------------------------- chains
@pytest.fixture(scope="module", params=["draft_model", "self_int8", "mtp", "eagle3"])
def drafting(request, target_folder, tmp_path_factory):  # noqa: F811
    """An engine, and its drafter that drafts several tokens in one call."""
    model, options = "embedded", {}
    if request.param == "eagle3":
        new_eagle3(head := tmp_path_factory.mktemp("head"))
        model, options = target_folder, {"eagle3": str(head)}
    engine = load(model, drafter=request.param, **options)
    return engine, engine.pool.drafters[request.param]


def drafts_of(engine, drafter, texts, limits, sampling, least_confidence=0.0):
    """Drafts for all texts at once, and how many tokens the drafter's cache then holds of each."""
    sequences = [engine.open(Request(text, 8, None)) for text in texts]
    engine.step(sequences)
    begin = partial(conftest.fresh_state, engine, drafter) if drafter.needs_hidden else drafter.open
    states = [begin(s.tokens, sampling, core.Noise(i)) for i, s in enumerate(sequences)]
    for state, s in zip(states, sequences, strict=True):
        state.least_confidence = least_confidence
        state.row = s.row if drafter.name == "self_int8" else state.row
    drafts = drafter.propose_batch(states, limits)
    cache = drafter._cache if drafter.needs_hidden else drafter._draft.cache
    lengths = [cache.lengths[state.row] for state in states]
    for state, s in zip(states, sequences, strict=True):
        drafter.close(state)
        engine.close(s)
    return drafts, lengths


@pytest.mark.parametrize(("temperature", "stops"), [(0.0, False), (0.8, True)])
def test_a_draft_in_one_call_is_that_of_steps(drafting, stops, temperature, prompts, monkeypatch):
    """Drafts of several texts at once, of different lengths, each with its limit."""
    engine, drafter = drafting
    texts = [prompts[name] for name in ("code_class", "hard_prose", "repetitive_letters")]
    sampling, limits = core.Sampling(temperature=temperature, top_p=0.9), [5, 0, 2]
    asked = engine, drafter, texts, limits, sampling, 0.35 if stops else 0.0
    counted = Mock(wraps=chain.draft_chain)
    for module in (chain, kernels):
        monkeypatch.setattr(module, "draft_chain", counted)
    monkeypatch.setattr(chain, "_MANY", 0)  # so that a small model, too, guesses what it will draft
    at_once, held = drafts_of(*asked)
    num_calls = counted.call_count
    monkeypatch.setattr(kernels, "can_chain", lambda *_: False)
    in_steps, held_by_steps = drafts_of(*asked)
    assert num_calls and counted.call_count == num_calls and held == held_by_steps
    # In steps it is torch that norms what an EAGLE-3 head's output layer reads.
    near = pytest.approx if drafter.name == "eagle3" else list
    for one, other in zip(at_once, in_steps, strict=True):
        assert (one.tokens, one.probs) == (other.tokens, other.probs)
        assert near(one.confidence) == other.confidence
    lengths = [len(one.tokens) for one in at_once]
    assert lengths[0] and not lengths[1]
    assert lengths == limits or stops and lengths[0] < 5


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_that_copies_takes_fewer_forwards(temperature, prompts, monkeypatch):
    """The draft model guesses what it will draft, and checks it; its draft is that of steps."""
    engine = load("embedded", drafter="draft_model", fixed_k=False)
    drafter, results = engine.pool.drafters["draft_model"], []
    texts = [prompts["repetitive_colours"], prompts["code_class"], [7], [5, 5], list(range(9))]
    sampling = core.Sampling(temperature=temperature)
    asked = (texts, [9, 3, 16, 1, 2]), (texts[:1], [16]), ((texts * 2)[:8], [4] * 8)
    for least in 0, 1 << 60:
        monkeypatch.setattr(chain, "_MANY", least)
        results.append([drafts_of(engine, drafter, *each, sampling) for each in asked])
    (guessing, held), (stepping, others_held) = (zip(*each, strict=True) for each in results)
    assert held == others_held
    for drafts, others in zip(guessing, stepping, strict=True):
        assert [draft.tokens for draft in drafts] == [draft.tokens for draft in others]
        assert all(draft.num_forwards == len(draft.tokens) for draft in others)
    assert guessing[1][0].num_forwards < 12
    assert [draft.num_forwards for draft in guessing[2]] == [4] * 8  # so many have no room


def test_a_chain_without_numbers_costs_its_draft_only(prompts):
    engine = load("embedded", drafter="draft_model")
    decoder = engine.draft_model.compiled.decoder
    decoder.output._data.view(np.float32)[0] = np.nan
    sequence = assert_lossless(engine, prompts["code_class"], 12, "draft_model")
    assert "no probabilities" in sequence.warnings[0]


def test_of_two_threads_that_compute_alone_each_gets_its_number_back(monkeypatch, threads):
    """Two engines in one process: the first one's end is not the other's."""
    monkeypatch.setattr(library, "is_used", True)
    threads(3)
    one, other = library.exclusive(), library.exclusive()
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(2,)) as pool:
        one.__enter__()
        pool.submit(other.__enter__).result()
        assert (torch.get_num_threads(), library.num_threads()) == (1, 3)
        with library.exclusive():
            assert library.num_threads() == 3
        assert (torch.get_num_threads(), library.num_threads()) == (1, 3)
        one.__exit__(None, None, None)
        assert (torch.get_num_threads(), library.num_threads()) == (3, 3)
        assert pool.submit(library.num_threads).result() == 2
        pool.submit(other.__exit__, None, None, None).result()
        assert pool.submit(torch.get_num_threads).result() == 2


def test_an_event_leaves_the_cores_to_the_next_pass(demo_engine, prompts, threads, monkeypatch):
    """It is made in the engine's thread alone: others of torch's would wait busily behind it."""
    counts = []
    monkeypatch.setattr(library, "is_used", True)
    monkeypatch.setattr(trace, "_details", lambda *_: counts.append(torch.get_num_threads()) or {})
    threads(2)
    run(demo_engine, prompts["code_class"], max_tokens=3, trace=True)
    assert set(counts) == {1} and torch.get_num_threads() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_by_one_more_than_its_weight_adds_in_float32(dtype):
    norm = Gemma2RMSNorm(64).to(dtype)
    norm.weight.data = torch.linspace(-0.4, 0.4, 64).to(dtype)
    assert torch.equal(norm_of(norm).weight.float(), 1 + norm.weight.float())


_FORKED = """
import os, signal, sys, time
import torch
torch.set_num_threads(2)
import tools
from runtime.values import Request
engine = tools.load_engine(model="embedded", drafter="none")
requests = [Request([*range(i, i + 35)], 100, None, 0) for i in (5, 50)]
write = lambda i: tools.run_together(engine, [requests[i]])[0].output
texts = [write(0), write(1)]
time.sleep(0.3)  # now the threads sleep
child = os.fork()
signal.alarm(60)
differ = any(write(not child) != texts[not child] for _ in range(3))
if not child:
    os._exit(differ)
sys.exit(differ or os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
def test_a_forked_process_computes_with_threads_and_a_cache_of_its_own():
    assert subprocess.run([sys.executable, "-c", _FORKED], cwd=ROOT).returncode == 0
