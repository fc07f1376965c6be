"""The compiled blocks compute what the blocks in Python do, keep bits alone and in company, and
step aside where there is no compiler or where a model has what they do not know."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import speculative_decoding as core
import torch
import transformers
from conftest import FAMILIES, ROOT, TARGET, run
from test_batching import together
from test_eagle3 import new_head, target_folder  # noqa: F401

from fastpath import forward, int8, linear, native, recurrent
from fastpath.block import is_same
from serving import answers
from serving.worker import Worker

needs_compiler = pytest.mark.skipif(
    native.why_not() is not None or not linear.can_pack(torch.float32),
    reason="no C++ compiler here, or no packed layers",
)
TEXT = [311, 42, 7, 900, 13, 42, 7, 900, 55, 1024, 3, 42]
# What the blocks in C++ know; the others have soft caps, other norms or a part of their own.
COMPILED = {"llama", "qwen3", "mistral", "qwen2", "granite", "gemma3_text", "phi3"}
KINDS = [("float32", None), ("bfloat16", None), ("float32", "int8"), ("bfloat16", "int8")]


def load(folder, **changes):
    options = {"drafter": "ngram", "fixed_k": True} | changes
    return core.load_engine(core.Options(model=str(folder), **options))


def logits(engine, text=TEXT):
    """Of every token of a text, read in two forwards."""
    row = engine.target.cache.open_row(len(text))
    parts = [
        engine.target.forward([row], [part], [len(part)]).logits[0] for part in (text[:7], text[7:])
    ]
    engine.target.cache.close_row(row)
    return torch.cat(parts)


@needs_compiler
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_families_it_knows_get_the_same_logits(family, tiny_folder):
    apart, compiled = (load(tiny_folder(family), compile=c, bitwise=False) for c in (False, None))
    assert compiled.target.fast.is_compiled == (family in COMPILED)
    assert not apart.target.fast.is_compiled
    assert is_same(logits(compiled), logits(apart))


@needs_compiler
@pytest.mark.parametrize(("dtype", "quantize"), KINDS)
def test_speculation_alone_and_in_a_batch_keeps_every_bit(dtype, quantize, tiny_folder):
    if quantize and int8.inputs() is None or not linear.can_pack(getattr(torch, dtype)):
        pytest.skip("not on this CPU")
    engine = load(tiny_folder("qwen3"), dtype=dtype, quantize=quantize)
    assert engine.target.fast.is_compiled and engine.target.report.is_exact
    prompts = [TEXT, TEXT[2:] * 4, TEXT[::-1], TEXT[:3]]
    requests = [core.Request(prompt, 24, "ngram") for prompt in prompts]
    plain = [core.plain_decode(engine.target, p, 24, engine.eos_ids) for p in prompts]
    alone = [run(engine, p, max_tokens=24, drafter="ngram")[0].output for p in prompts]
    assert alone == plain
    assert [s.output for s in together(engine, requests)] == plain


@needs_compiler
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(5, 1, 40), (4, 4, 24), (6, 2, 80)])
def test_attention_of_any_shape_gives_what_torch_s_gives(heads, kv_heads, width, tmp_path):
    """Groups of 5, 1 and 3 queries; widths that 16 does not divide; texts in blocks and behind."""
    config = transformers.Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=width, vocab_size=4096, max_position_embeddings=640,
        use_sliding_window=True, sliding_window=37, max_window_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(TARGET).save_pretrained(tmp_path)
    text = torch.randint(4096, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    for compiled in (False, True):
        engine = load(tmp_path, compile=compiled)
        assert engine.target.fast.is_compiled == compiled and engine.target.report.is_exact
        row = engine.target.cache.open_row(len(text))
        found.append(engine.target.forward([row], [text], [600]).logits[0])
    assert engine.target.shapes.prompt_rows == native.PROMPT_ROWS > engine.target.shapes.rows[-1]
    assert is_same(*found)


@needs_compiler
def test_keys_that_a_token_does_not_see_are_not_read(tiny_folder):
    """What lies behind a text is left over from others; numbers that are none do not matter."""
    target = load(tiny_folder("llama")).target
    row = target.cache.open_row(len(TEXT))
    target.forward([row], [TEXT], [1])
    found = []
    for left in (0.0, torch.nan):
        with torch.inference_mode():
            for layer in target.cache.layers:
                layer.keys[:, :, len(TEXT) :] = layer.values[:, :, len(TEXT) :] = left
        found.append(target.forward([row], [TEXT[:2]], [2]).logits[0])
        target.cache.truncate(row, len(TEXT))
    assert target.fast.is_compiled and torch.equal(*found)


@needs_compiler
def test_an_int8_block_differs_from_python_by_roundings_only(tiny_folder):
    """Random weights make jumps large; a wrong scale or a lost norm would be far larger."""
    if int8.inputs() is None:
        pytest.skip("no exact int8 here")
    apart, compiled = (
        load(tiny_folder("qwen2"), quantize="int8", compile=c) for c in (False, True)
    )
    ours, theirs = logits(compiled), logits(apart)
    assert compiled.target.fast.is_compiled
    assert torch.nn.functional.cosine_similarity(ours, theirs).min() > 0.995


@needs_compiler
def test_a_row_without_numbers_is_not_hidden_by_integers(tiny_folder):
    if int8.inputs() is None:
        pytest.skip("no exact int8 here")
    engine = load(tiny_folder("llama"), quantize="int8")
    embedding = engine.target.model.get_input_embeddings()
    embedding.scales[900] = torch.nan
    found = logits(engine)
    # The rows behind it get it through its keys and values alone.
    assert found[3:].isnan().all()


@needs_compiler
@pytest.mark.parametrize("drafter", ["mtp", "draft_model", "auto"])
def test_the_embedded_models_and_the_mtp_head_are_compiled(drafter, prompts):
    engine = core.load_engine(core.Options(model="embedded", drafter=drafter, fixed_k=True))
    prompt = prompts["code_class"]
    plain = core.plain_decode(engine.target, prompt, 32, engine.eos_ids)
    sequence, events = run(engine, prompt, max_tokens=32, drafter=drafter)
    assert sequence.output == plain and sum(event["accepted_count"] for event in events) > 3
    assert engine.target.fast.is_compiled and engine.draft_model.fast.is_compiled
    if drafter == "mtp":
        assert engine.panel.drafters["mtp"]._fused[0]._stack.is_compiled


@needs_compiler
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_an_eagle_head_reads_two_inputs(norm_before_residual, target_folder, tmp_path):  # noqa: F811
    new_head(tmp_path / "head", norm_before_residual=norm_before_residual)
    found = []
    for compiled in (False, True):
        engine = load(
            target_folder, eagle3=str(tmp_path / "head"), drafter="eagle3", compile=compiled
        )
        assert engine.panel.drafters["eagle3"]._head.fused.is_compiled == compiled
        sequence, events = run(engine, TEXT, max_tokens=24, drafter="eagle3")
        found.append((sequence.output, [event["accepted_count"] for event in events]))
    assert found[0] == found[1]


@needs_compiler
@pytest.mark.parametrize(("width", "columns"), [(8, 16), (24, 20), (128, 72)])
def test_the_gated_delta_rule_keeps_a_token_s_bits_however_its_text_is_cut(width, columns):
    """And gives what Python gives but for roundings, leaving the state before as it was."""
    native.use(True)
    rule, count, random = recurrent.GatedDelta(), 70, torch.Generator().manual_seed(1)
    shapes = (2, width), (2, width), (4, columns), (4,), (4,)  # two heads of values to one of keys
    query, key, value, g, beta = (torch.randn(1, count, *s, generator=random) for s in shapes)
    options = {"use_qk_l2norm_in_kernel": True}
    inputs = tuple(x[0] for x in rule.prepare(query, key, value, -g.abs(), beta.abs(), **options))
    state = torch.randn(4, width, columns, generator=random)
    before, parts, after = state.clone(), [], state
    expected = rule.run(state, inputs)
    whole = native.delta_steps(state, *inputs)
    for begin, end in ((0, 1), (1, 30), (30, 33), (33, count)):
        after, part = native.delta_steps(after, *(x[begin:end] for x in inputs))
        parts.append(part)
    assert torch.equal(after, whole[0]) and torch.equal(torch.cat(parts), whole[1])
    assert torch.equal(state, before)
    for ours, theirs in zip(whole, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@needs_compiler
def test_heads_that_are_too_wide_go_through_the_rule_in_python():
    native.use(True)
    assert native.delta_steps(torch.zeros(1, 513, 8), *[torch.zeros(1)] * 5) is None


@needs_compiler
@pytest.mark.parametrize("compiled", [None, False])
def test_a_delta_net_goes_through_the_compiled_rule_where_blocks_may_be(tiny_folder, compiled):
    engine = load(tiny_folder("qwen3_5_text"), compile=compiled)
    layers = engine.target.cache.recurrent
    assert len(layers) == 3 and all(layer._is_compiled == (compiled is None) for layer in layers)
    assert engine.target.report.is_exact
    plain = core.plain_decode(engine.target, TEXT, 24, engine.eos_ids)
    assert run(engine, TEXT, max_tokens=24, drafter="ngram")[0].output == plain


@needs_compiler
def test_a_compiled_rule_that_computes_something_else_is_not_used(monkeypatch):
    native.use(True)
    assert recurrent.can_compile(recurrent.GatedDelta())
    assert not recurrent.can_compile(recurrent.Mamba2())
    steps = native.delta_steps
    monkeypatch.setattr(native, "delta_steps", lambda *given: (given[0], steps(*given)[1]))
    assert not recurrent.can_compile(recurrent.GatedDelta())


@needs_compiler
def test_a_block_that_computes_something_else_stays_in_python(tiny_folder, monkeypatch):
    monkeypatch.setitem(native._ACTIVATIONS, "SiLUActivation", True)  # which is not gelu
    monkeypatch.setitem(native._ACTIVATIONS, "SiLU", True)
    engine = load(tiny_folder("llama"), bitwise=False)
    assert not engine.target.fast.is_compiled


@needs_compiler
def test_health_says_whether_it_is_compiled(demo_engine):
    worker = Worker(demo_engine, core.Options())
    assert answers.health(demo_engine, worker, core.Options())["compiled"] is False
    engine = core.load_engine(core.Options(model="embedded", drafter="ngram"))
    assert answers.health(engine, worker, core.Options())["compiled"] is True


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(native, "_is_loaded", False)
    monkeypatch.setenv("CXX", "no-such-compiler")


def test_without_a_compiler_the_blocks_run_in_python(no_compiler, tiny_folder):
    engine = load(tiny_folder("llama"), bitwise=False)
    assert not engine.target.fast.is_compiled
    with pytest.raises(ValueError, match="--compile needs a C\\+\\+ compiler"):
        load(tiny_folder("llama"), compile=True)


@needs_compiler
def test_a_compiler_that_fails_costs_nothing_but_a_line(tmp_path, monkeypatch, caplog):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'native.cpp:1: error: no such header' >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(native, "_is_loaded", False)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(
        ValueError, match="the compiler failed: native.cpp:1: error: no such header"
    ):
        native.use(True)
    native.use(None)  # it does not try again, unless it is asked to
    assert not native.is_used and list((tmp_path / "cache").rglob("*.so")) == []
    assert "it failed before" in caplog.text
    with pytest.raises(ValueError, match="the compiler failed"):
        native.use(True)


@needs_compiler
def test_a_folder_where_others_may_write_is_not_run_from(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_is_loaded", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "speculative-decoding" / "compiled"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="or others may write there"):
        native.use(True)


@needs_compiler
def test_what_was_compiled_is_used_again_and_a_broken_file_is_made_anew(tmp_path):
    """In processes of their own: a library is loaded once."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    script = "from fastpath import native; native.use(True); print(native.is_used)"
    times = []
    for damage in (False, False, True):
        if damage:  # half a library would end a process that opens it
            (file,) = tmp_path.rglob("*.so")
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.stdout == "True\n", done.stderr
        (file,) = tmp_path.rglob("*.so")
        times.append(Path(file).stat().st_mtime_ns)
    assert times[0] == times[1] < times[2]


def test_compile_goes_with_the_fast_path(capsys):
    with pytest.raises(SystemExit):
        core.parse_arguments(["--demo", "--compile", "--no-fastpath"])
    assert "--compile goes with the fast path" in capsys.readouterr().err


def test_one_line_says_what_is_computed_with(demo_engine, tiny_folder, monkeypatch):
    options = core.Options(model="embedded")
    line = answers.setting(demo_engine, options)
    assert line.startswith("the target runs in float32: its blocks fused in ")
    assert line.endswith("1 thread, with equal bits, checked")
    monkeypatch.setattr(forward, "computes_bfloat16", lambda: True)
    assert "--dtype bfloat16" not in answers.setting(demo_engine, options)
    folder = tiny_folder("llama")
    engine = load(folder, compile=False, bitwise=False)
    line = answers.setting(engine, core.Options(model=str(folder)))
    assert "fused in Python" in line and "without equal bits; this CPU computes bfloat16" in line
    engine = load(folder, fastpath=False)
    assert "float32: transformers' modules" in answers.setting(engine, options)


@needs_compiler
def test_rows_that_lie_apart_are_fed_without_the_one_between_them(tiny_folder):
    """The second of three requests waits: the others' slots do not lie side by side."""
    engine = load(tiny_folder("llama"))
    target = engine.target
    texts = [TEXT, TEXT[::-1], TEXT[3:] + TEXT[:3]]

    def fed(together):
        rows = [target.cache.open_row(len(text)) for text in texts]
        for row, text in zip(rows, texts, strict=True):
            target.forward([row], [text], [1])
        one, _, other = rows
        steps = (
            [([one, other], [[5, 6], [7]])] if together else [([one], [[5, 6]]), ([other], [[7]])]
        )
        found = [
            logits
            for given, tokens in steps
            for logits in target.forward(given, tokens, [len(fed) for fed in tokens]).logits
        ]
        buffers = [layer.keys.clone() for layer in target.cache.layers]
        for row in rows:
            target.cache.close_row(row)
        return found, buffers

    apart, side_by_side = fed(together=False), fed(together=True)
    assert target.fast.is_compiled
    for ones, others in zip(apart, side_by_side, strict=True):
        assert all(map(torch.equal, ones, others))


@needs_compiler
def test_a_short_context_has_short_tables(prompts):
    engine = core.load_engine(
        core.Options(model="embedded", drafter="mtp", max_model_len=6, bitwise=False)
    )
    assert engine.panel.drafters["mtp"]._fused[0]._stack.is_compiled


@needs_compiler
def test_the_int8_twin_is_compiled_on_the_target_s_cache(tiny_folder):
    if int8.inputs() is None:
        pytest.skip("no exact int8 here")
    engine = load(tiny_folder("llama"), drafter="self_int8")
    assert engine.panel.drafters["self_int8"]._draft.fast.is_compiled
    plain = core.plain_decode(engine.target, TEXT, 32, engine.eos_ids)
    sequence, events = run(engine, TEXT, max_tokens=32, drafter="self_int8")
    assert sequence.output == plain and sum(event["accepted_count"] for event in events) > 8
