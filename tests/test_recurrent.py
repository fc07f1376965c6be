"""Recurrent layers: a state is what the text has left, whatever was drafted, refused or broken.

test_cache.py compares their logits with a cache-free recompute of ragged, truncated rows.
"""

from functools import cache
from random import Random

import pytest
import speculative_decoding as core
import torch
from conftest import HYBRIDS, ScriptedDrafter, assemble, assert_lossless, make_exact, run
from exactness import assert_same_bits
from test_eagle3 import new_head

from cache.states import RecurrentLayer
from kernels.start import speed_up
from messages import Request
from serving import retry
from serving.options import Options

PYTHON = " in Python"
FEW = ["qwen3_5_text", "lfm2", "granitemoehybrid", "lfm2 in Python", "granitemoehybrid in Python"]
TEXT = torch.randint(4096, (230,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.fixture(scope="module")
def target(tiny_folder):
    """A fast target of a family, checked to give equal bits.

    Its rules run in C, or in Python as where there is no compiler.
    """

    @cache
    def load(family):
        model = core.load_model(str(tiny_folder(family.removesuffix(PYTHON))), Options())
        for layer in model.cache.recurrent:
            layer._is_compiled = not family.endswith(PYTHON)
        speed_up(model)
        assert make_exact(model), model.report
        return model

    return load


@pytest.fixture
def row(target, family):
    """Of the target's cache; it has read the first tokens of the text."""
    row = target(family).cache.open_row()
    target(family).forward([row], [TEXT[:20]], [1])
    yield row
    target(family).cache.close_row(row)


def fed(target, row, tokens):
    """Logits of all of them."""
    return target.forward([row], [tokens], [len(tokens)]).logits[0]


def intercept(monkeypatch, layer, name, function):
    """Put a function in the place of a layer's, whether its module calls it or a fused block."""
    monkeypatch.setattr(layer, name, function)
    if layer._ours is not None and name != "_run":
        called = "causal_conv1d_fn" if name == "convolve" else layer._kind.name
        monkeypatch.setitem(layer._ours.__func__.__globals__, called, function)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_token_has_the_same_bits_however_it_is_computed(target, family):
    assert_same_bits(target(family), 8, Random(4))


DRAFTS = {  # tokens drafted, tokens accepted and rows of a forward: one forward, or four
    f"{accepted} of {drafted}": (drafted, accepted, most_rows)
    for drafted, most_rows, taken in ((5, 256, (0, 1, 3, 5)), (24, 8, (0, 7, 8, 15, 24)))
    for accepted in taken
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("family", FEW)
def test_what_was_taken_back_leaves_no_trace(target, family, row, monkeypatch, draft):
    """The bits of what follows are those of a text that had no draft."""
    model, (drafted, accepted, most_rows) = target(family), DRAFTS[draft]
    monkeypatch.setattr("kernels.decoder.MOST_ROWS", most_rows)
    wrong = [7] * (drafted - accepted)
    verified = fed(model, row, [*TEXT[20 : 21 + accepted], *wrong])
    model.cache.keep(row, drafted, range(accepted))
    assert model.cache.lengths[row] == 21 + accepted
    after = [fed(model, row, [token]) for token in TEXT[21 + accepted : 24 + accepted]]
    model.cache.truncate(row, 0)
    fed(model, row, TEXT[:20])
    for token, expected in zip(TEXT[20:], [*verified[: accepted + 1], *after], strict=False):
        assert torch.equal(fed(model, row, [token])[0], expected.flatten())


@pytest.mark.parametrize("family", FEW)
def test_a_forward_that_fails_in_a_layer_leaves_no_trace(target, family, row, monkeypatch):
    """Every other layer has gone on by then; and a neighbour's state is as it was, too.

    Before a draft that was refused in part is taken back, while it is, and after that.
    """
    model, other = target(family), target(family).cache.open_row()
    model.forward([other], [TEXT[50:80]], [1])
    expected, theirs = model.forward([row, other], [TEXT[20:23], TEXT[80:81]], [3, 1]).logits
    for opened, held in ((row, 21), (other, 30)):
        model.cache.truncate(opened, held)
    broken = model.cache.recurrent[-1]
    names = ["passed", "note"] if model.compiled.is_compiled else ["convolve", "scan"]
    for name in ["_run", *names] if broken._kind else ["convolve"]:
        intercept(monkeypatch, broken, name, lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.forward([row, other], [[1, 2, 3, 4], [5]], [4, 1])
        monkeypatch.undo()
    again = model.forward([row, other], [TEXT[21:23], TEXT[80:81]], [2, 1]).logits
    assert torch.equal(again[0], expected[1:]) and torch.equal(again[1], theirs)
    model.cache.close_row(other)


@pytest.mark.parametrize("family", FEW)
def test_a_text_keeps_its_state_while_others_come_and_go(target, family, row):
    model = target(family)
    rows = [model.cache.open_row() for _ in range(2)]
    expected = fed(model, row, TEXT[20:26])
    model.cache.truncate(row, 20)
    model.forward(rows, [TEXT[:9], TEXT[5:40]], [1, 1])
    model.cache.close_row(rows[0])  # the last row takes its slot
    new = model.cache.open_row()
    found = model.forward([rows[1], row, new], [[3], TEXT[20:26], TEXT[:20]], [1, 6, 1]).logits[1]
    assert torch.equal(found, expected)
    assert torch.equal(fed(model, new, TEXT[20:26]), expected)  # in a row that had another text
    for opened in (rows[1], new):
        model.cache.close_row(opened)


@pytest.mark.parametrize("family", FEW)
def test_a_call_of_many_forwards_that_fails_is_done_again(target, family, row, monkeypatch):
    """As the core does: back to where the call began. Few marks are kept on the way."""
    model, layer = target(family), target(family).cache.recurrent[-1]
    expected = fed(model, row, TEXT[20:230])[-1]
    model.cache.truncate(row, 0)
    fed(model, row, TEXT[:20])
    monkeypatch.setattr("kernels.decoder.MOST_ROWS", 8)
    name = "passed" if model.compiled.is_compiled else "convolve"
    inner, calls = getattr(layer, name), []

    def fail(*args, **options):
        calls.append(len(layer._marks[row]))
        return inner(*args, **options) if len(calls) % 12 else 1 / 0

    intercept(monkeypatch, layer, name, fail)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fed(model, row, TEXT[20:230])
        model.cache.truncate(row, 20)
    intercept(monkeypatch, layer, name, inner)
    assert torch.equal(fed(model, row, TEXT[20:230])[-1], expected) and max(calls) <= 6


def test_a_layer_keeps_the_defaults_of_its_options():
    class Mixer(torch.nn.Module):
        def forward(self, x, attention_mask=None, *, past_key_values=None, scale=2):
            return x * scale

    mixer, cache = Mixer(), object()
    RecurrentLayer(mixer, cache, None)
    assert mixer(3, past_key_values=cache) == mixer(3) == 6


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_going_back_too_far_is_an_error_and_not_a_wrong_state(target, family, row):
    model = target(family)
    fed(model, row, TEXT[20:100])  # longer than any draft: nothing is recorded
    model.cache.truncate(row, 60)
    with pytest.raises(ValueError, match="a recurrent layer cannot go back to 60 tokens"):
        fed(model, row, [1])
    model.cache.truncate(row, 0)  # an empty text has a state that everybody knows
    assert torch.isfinite(fed(model, row, TEXT[:3])).all()


@pytest.mark.parametrize("family", FEW)
def test_speculation_writes_the_text_of_plain_decoding(target, family):
    """Drafts right and wrong, requests that join one after the other."""
    model, chance = target(family), Random(1)
    prompts = [TEXT[:3], TEXT[3:150], [*TEXT[150:160]] * 3]
    alone = [run(core.Engine(model, {}), p, max_tokens=30)[0] for p in prompts]

    def script(state, limit):
        """The text to come, up to a mistake at a random place."""
        (text,) = (s.tokens for s, p in zip(alone, prompts, strict=True) if state[: len(p)] == p)
        right = chance.randrange(limit + 1)
        return [*text[len(state) : len(state) + right], *[9] * limit][:limit]

    engine = core.Engine(model, {"scripted": ScriptedDrafter(script)}, "scripted", prefill_chunk=64)
    waiting = [engine.open(Request(p, 30, "scripted", 5)) for p in prompts]
    sequences, running = list(waiting), []
    while waiting or running:
        running += waiting[:1]
        del waiting[:1]
        retry.step(engine, running)
        running = [s for s in running if s.finish_reason is None]
    for s, plain in zip(sequences, alone, strict=True):
        engine.close(s)
        assert s.output == plain.output and not s.warnings
        counted = s.statistics
        assert 0 < counted.num_accepted_draft_tokens < counted.num_draft_tokens


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_a_head_on_a_hybrid_writes_the_text_of_plain_decoding(tiny_folder, tmp_path, family):
    """Its own blocks attend; it reads states of recurrent layers and of others."""
    new_head(tmp_path, layer_ids=(1, 2, 3))
    options = {"drafter": "eagle3", "eagle3": str(tmp_path), "fixed_k": True}
    engine = core.load_engine(Options(model=str(tiny_folder(family)), **options))
    engine.eos_ids = set()
    for prompt in (TEXT[:3], TEXT[3:150]):
        s = assert_lossless(engine, prompt, 24, "eagle3")
        assert s.statistics.num_draft_tokens > 20 and not s.warnings


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"draft_model": "lfm2"}, "has recurrent layers, which only a target may have"),
        ("lfm2", {"drafter": "tree"}, "--drafter tree needs .* a model without recurrent layers"),
    ],
)
def test_what_does_not_go_with_recurrent_layers_is_refused(tiny_folder, family, options, message):
    options = {k: str(tiny_folder(v)) if v == "lfm2" else v for k, v in options.items()}
    with pytest.raises(ValueError, match=message):
        assemble(Options(model=str(tiny_folder(family)), **options))


def test_closed_texts_give_their_memory_back(target):
    model = target("qwen3_5_text")
    layer, rows = model.cache.recurrent[0], [model.cache.open_row() for _ in range(6)]
    model.forward(rows, [[1, 2]] * len(rows), [1] * len(rows))
    for mark in (layer._marks[row][0] for row in rows):  # nothing of its neighbours
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in (mark.fed, *mark.inputs))
    for row in rows:
        model.cache.close_row(row)
    layer._marks.pop(rows[-1])  # opened next: as if it were new
    row = model.cache.open_row()
    model.forward([row], [[1, 2]], [1])
    assert set(layer._marks) == {row}
    model.cache.close_row(row)
