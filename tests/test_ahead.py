"""What is laid out of a GGUF file while torch is imported is what the model computes with.

Nobody else holds it. Where it is not used it is given back before weights are read, and an error is
the one that reading itself would have met.
"""

import gc
import os
import subprocess
import sys
import weakref
from concurrent.futures import wait

import pytest
import torch
from conftest import ROOT, load, logits_of, needs_compiler
from gguf_files import Q8_0, TINY, Case, write

from runtime.models import ahead, gguf_model
from runtime.models.gguf_file import BadFile, GgufFile

pytestmark = needs_compiler
TEXT = [311, 42, 7, 900, 13]


@pytest.fixture
def begun(tmp_path):
    """Begin with a case's file and more words; the path, and what is laid out by tensors' names."""

    def begin(case=TINY, *words):
        write(path := tmp_path / "model.gguf", case, Q8_0)
        ahead.begin(["--port", "0", "--model", str(path), *words])
        wait(ahead._begun.values())
        made = ahead._files[str(path)].ahead if ahead._files else {}
        wait(made.values())
        return path, {name: weakref.ref(future.result()[name]) for name, future in made.items()}

    yield begin
    ahead.end()


def test_nothing_lies_in_memory_twice_where_weights_are_unpacked(begun, monkeypatch):
    path, made = begun()
    read, alive = gguf_model.for_all_tensors, []

    def watched(work, file):
        alive.append([name for name, matrix in made.items() if matrix() is not None])
        read(work, file)

    monkeypatch.setattr(gguf_model, "for_all_tensors", watched)
    load(path, dtype="float32")
    assert made and alive == [[]]


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_model_computes_with_what_was_laid_out_ahead(name, begun):
    """Rows that llama.cpp has put into another order are left to who knows the order."""
    path, made = begun(Case(name))
    engine = load(path)
    used = {id(panels._data) for panels in engine.target.compiled.decoder.panels}
    assert len(made) > 10 and {id(matrix()) for matrix in made.values()} <= used
    assert any("attn_q.weight" in name for name in made) == (name == "qwen2")
    assert torch.equal(logits_of(engine.target, TEXT), logits_of(load(path).target, TEXT))
    del engine
    gc.collect()
    assert not any(matrix() is not None for matrix in made.values())


def test_what_has_another_order_is_not_taken(begun, monkeypatch):
    """As of a family that is not known to have one."""
    monkeypatch.setattr(ahead, "_MOVED", {})
    path, made = begun()
    assert any("attn_q.weight" in name for name in made)
    ours, usual = (logits_of(load(path).target, TEXT) for _ in range(2))
    assert torch.equal(ours, usual)
    assert not any(matrix() is not None for name, matrix in made.items() if "attn_q.w" in name)


def test_a_command_gives_back_what_it_did_not_open(begun, main):
    _, made = begun()
    assert main("--prompt", "a", "--max-tokens", "1")[0] == 0
    assert not ahead._begun and not any(matrix() is not None for matrix in made.values())


@pytest.mark.parametrize(
    "words", ["--help", "--dtype=float32", "--dtype int8", "--no-kernels", "--device=cuda"]
)
def test_nothing_is_laid_out_where_it_would_not_be_used(words, begun):
    assert begun(TINY, *words.split())[1] == {} and not ahead._begun


@pytest.mark.parametrize("damage", ["another kind", "cut off", "becomes shorter"])
def test_an_error_is_the_one_that_reading_meets(damage, tmp_path, monkeypatch):
    write(path := tmp_path / "model.gguf", TINY, Q8_0)
    content, lay_out, said = path.read_bytes(), GgufFile.lay_out, []
    half = len(content) // 2
    if damage == "becomes shorter":
        monkeypatch.setattr(GgufFile, "lay_out", lambda *a: os.truncate(path, half) or lay_out(*a))
    else:
        content = content[:half] if damage == "cut off" else b"GGML" + content[4:]
    for begins in (False, True):
        path.write_bytes(content)
        if begins:
            ahead.begin(["--model", str(path)])
            wait(ahead._begun.values())
            assert bool(ahead._files) == (damage == "becomes shorter")
        with pytest.raises(BadFile) as error:
            load(path)
        ahead.end()
        said.append(str(error.value))
    assert said[0] == said[1]


def test_the_program_begins_before_torch(tmp_path):
    write(path := tmp_path / "model.gguf", Case("qwen2"), Q8_0)
    code = """
import sys
from contextlib import suppress

sys.argv[0] = "08_speculative_decoding.py"
sys.modules["torch"] = None  # its import fails
with suppress(ImportError):
    import runtime.models.startup
from runtime.models import ahead
ahead.wait(ahead._begun.values())
made = [made.result()[name] for file in ahead._files.values() for name, made in file.ahead.items()]
assert len(made) > 10
"""
    command = [sys.executable, "-c", code, "--model", str(path), "--port", "1"]
    subprocess.run(command, check=True, cwd=ROOT)
