"""Integer weights: sums that are exact or refused, a model of its own, and a draft of the model."""

import gc
import weakref
from dataclasses import replace
from random import Random

import pytest
import speculative_decoding as core
import torch
from conftest import assemble, assert_lossless, run, together
from families import save_small
from test_eagle3 import new_head, target_folder  # noqa: F401
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks import quality
from control.planner import FixedK
from kernels import library, start
from kernels.experts import experts_of
from kernels.patches import PanelEmbedding, PanelLinear
from kernels.reading import decoder_of, release
from messages import Request
from models import loading
from models.structure import examine
from serving import answers, retry
from serving.options import Options
from serving.worker import Worker

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason="no C compiler here")
TEXT = [311, 42, 7, 900, 13, 42, 7, 900, 55, 1024]


def load(model, **options):
    return core.load_engine(Options(model=str(model), fixed_k=True, **options))


@pytest.fixture(scope="module")
def engine(tiny_folder):
    """An int8 target; ngram drafts."""
    return load(tiny_folder("llama"), quantize="int8")


@pytest.fixture(scope="module")
def twins(tiny_folder):
    """A float target, and itself in int8 to draft."""
    return load(tiny_folder("llama"), drafter="self_int8")


# ------------------------------------------------------------------------------ a whole model
def test_it_is_another_model_of_integers_a_near_one_and_health_says_so(
    engine, reference, tiny_folder
):
    target, options = engine.target, Options(quantize="int8")
    assert not any(type(part) is nn.Linear for part in target.model.modules())
    decoder = target.compiled.decoder
    every = [p for b in decoder.blocks for part in b.matrices.values() for p in part]
    assert {p.form for p in (*every, decoder.embedding, decoder.output)} == {"Q8"}
    floats = sum(weight.numel() for weight in target.model.parameters())
    assert floats < 0.01 * target.num_weights  # norms
    worker = Worker(engine, Options())
    health = answers.health(engine, worker, options)
    worker.drain(1)
    assert health["quantization"] == "int8" and health["bitwise_lossless"] is True
    with torch.inference_mode():
        expected = reference(tiny_folder("llama"))(torch.tensor([TEXT])).logits[0]
    row = target.cache.open_row()
    found = target.forward([row], [TEXT], [len(TEXT)]).logits[0]
    target.cache.close_row(row)
    distance = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 1e-4 < distance.median() < 0.15


@pytest.mark.parametrize("family", "llama qwen3 gpt2 gemma2 gemma3_text opt gpt_oss".split())
def test_families_are_served_in_int8(tiny_folder, family):
    """The experts of a mixture, too."""
    engine = load(tiny_folder(family), quantize="int8")
    experts = [p for part in experts_of(engine.target.model) for p in sum(part.matrices, [])]
    assert len(experts) == (2 * 2 * 4 if family == "gpt_oss" else 0)
    embedding = engine.target.model.get_input_embeddings()
    assert type(embedding) is PanelEmbedding and {p.form for p in experts} <= {"Q8"}
    assert engine.target.report.is_exact
    assert_lossless(engine, TEXT, 24, "ngram")


@pytest.mark.parametrize("name", ["embedded", "llama"])
def test_a_wrong_forward_is_found_in_int8_too(tiny_folder, name, monkeypatch):
    """The tolerance is that of floats, not of the jumps between integers."""
    right, model = start.decoder_of, name if name == "embedded" else str(tiny_folder(name))

    def wrong(*args):
        found = right(*args)
        found.blocks[1].struct.scaling *= 1.5
        return found

    monkeypatch.setattr(start, "decoder_of", wrong)
    with pytest.raises(loading.StartError, match="logits are .* away"):
        assemble(Options(model=model, quantize="int8", draft_model=""))


def test_a_model_whose_norms_have_no_weights_keeps_its_type(tmp_path):
    save_small("olmo", tmp_path)
    engine = load(tmp_path, quantize="int8")
    assert engine.target.model.dtype == torch.float32
    assert_lossless(engine, TEXT, 8, "ngram")


def assert_quantised(drafter):
    """All matrices of a head, those of its target that it uses included."""
    modules = [m.panels for m in drafter._head.modules() if isinstance(m, PanelLinear)]
    blocks = [block for layer in drafter._kernels for block in layer.decoder.blocks]
    every = [p for block in blocks for part in block.matrices.values() for p in part]
    assert {panels.form for panels in (*modules, *every)} == {"Q8"} and len(drafter._kernels) == 1


def test_an_eagle_head_is_quantised_with_its_target(target_folder, tmp_path):  # noqa: F811
    new_head(tmp_path)
    engine = load(target_folder, eagle3=str(tmp_path), quantize="int8")
    assert_quantised(engine.pool.drafters["eagle3"])
    assert_lossless(engine, TEXT, 24, "eagle3")


def test_mtp_head_and_output_layer_are_quantised_with_the_target(prompts):
    engine = load("embedded", quantize="int8")
    assert_quantised(engine.pool.drafters["mtp"])
    for name in ("mtp", "draft_model", "ngram"):
        s = assert_lossless(engine, prompts["code_class"], 40, name)
        assert not s.warnings
    assert s.statistics.tokens_per_pass > 1


# ------------------------------------------------------------------------------ the drafter
def test_the_model_in_int8_drafts_what_the_model_says(twins):
    """And leaves the target's cache as it was, whose bits decide the log-probabilities."""
    fields = {"max_tokens": 60, "num_speculative_tokens": 3, "logprobs": 1}
    s, plain = (run(twins, TEXT, drafter=name, **fields)[0] for name in ("self_int8", None))
    assert s.output == plain.output and s.logprobs == plain.logprobs
    # The model is a random one, whose choices are near ties.
    assert s.statistics.draft_acceptance_rate > 0.5 and not s.warnings
    twin, target = twins.pool.drafters["self_int8"]._draft, twins.target
    assert twin.compiled.decoder.embedding is target.compiled.decoder.embedding
    assert twin.cache is target.cache
    shared = {id(weight) for weight in target.model.parameters()}
    assert shared >= {id(weight) for weight in twin.model.parameters()}


def test_auto_takes_it_in_beside_an_mtp_head(monkeypatch, prompts):
    """Both want the output layer of the embedded target, which is shared."""
    monkeypatch.setattr("drafters.self_int8._FEW_WEIGHTS", 0)
    engine, prompt = core.load_engine(Options(model="embedded")), prompts["code_class"]
    assert {"mtp", "self_int8"} < set(engine.pool.choices["auto"])
    assert_lossless(engine, prompt, 40, "auto")
    engine.planner = FixedK()  # the clock may say that it does not pay on a model so small
    assert assert_lossless(engine, prompt, 40, "self_int8").statistics.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("given", "is_there"),
    [
        ({}, True),
        ({"drafter": "auto", "fixed_k": True}, True),
        ({"drafter": "ngram"}, False),
        ({"fixed_k": True}, False),
    ],
)
def test_it_takes_memory_only_where_it_is_asked_for_or_auto_can_use_it(
    tiny_folder, monkeypatch, given, is_there
):
    options = Options(model=str(tiny_folder("llama")), **given)
    assert "self_int8" not in assemble(options).pool.drafters  # it is too small
    monkeypatch.setattr("drafters.self_int8._FEW_WEIGHTS", 0)
    assert ("self_int8" in assemble(options).pool.drafters) is is_there


def test_neither_a_draft_that_fails_nor_its_nan_reaches_the_target(twins, monkeypatch):
    monkeypatch.setattr("kernels.can_chain", lambda *_: False)
    draft, calls = twins.pool.drafters["self_int8"]._draft, []
    inner, cache = draft.forward, draft.cache

    @torch.inference_mode()
    def forward(rows, tokens, num_logits):
        output = inner(rows, tokens, num_logits)
        calls.append(rows)
        if len(calls) == 5:
            cache.layers[0].values[cache.slot(rows[0]), :, cache.lengths[rows[0]] - 1] = torch.nan
            raise RuntimeError("no numbers")
        return output

    monkeypatch.setattr(draft, "forward", forward)
    s = assert_lossless(twins, TEXT, 40, "self_int8", num_speculative_tokens=3)
    assert "drafter self_int8 failed (no numbers)" in s.warnings[0]


@pytest.mark.parametrize(
    ("family", "dtype"), [("mistral", "bfloat16"), ("gemma2", "float32"), ("gpt2", "float32")]
)
def test_windows_chunks_and_the_end_of_the_context(tiny_folder, family, dtype):
    """Requests of many kinds come and go; each text is the one of plain decoding."""
    engine = load(
        tiny_folder(family), dtype=dtype, drafter="self_int8", max_model_len=96, prefill_chunk=16,
        max_running=4,
    )  # fmt: skip
    rng = Random(family)
    requests = [
        Request(
            [rng.randrange(1, 4000) for _ in range(rng.choice([3, 20, 50, 90]))],
            rng.choice([8, 40, 200]), "self_int8", rng.choice([1, 3, 8, 16]),
            sampling=core.Sampling(temperature=rng.choice([0.0, 0.9])), seed=i,
        )
        for i in range(12)
    ]  # fmt: skip
    waiting, running = list(requests), []
    while waiting or running:
        while waiting and len(running) < 4:
            running.append(engine.open(waiting.pop(0)))
        retry.step(engine, running)
        for s in [s for s in running if s.finish_reason]:
            assert not any("failed" in warning for warning in s.warnings)
            engine.close(s)
            running.remove(s)
            assert s.output == together(engine, [replace(s.request, drafter=None)])[0].output
    assert engine.target.cache.lengths == [0] * 4


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        ("llama", {"quantize": "int8"}, "self_int8 does not go with an int8 target"),
        ("llama", {"kernels": False}, "self_int8 needs the kernels in C"),
        ("gpt_oss", {}, "does not go with a mixture of experts"),
        ("lfm2", {}, "does not go with recurrent layers"),
    ],
)
def test_where_it_cannot_be_had_one_sentence_says_so(tiny_folder, family, given, message):
    options = Options(model=str(tiny_folder(family)), drafter="self_int8", **given)
    with pytest.raises(ValueError, match=message):
        assemble(options)


# ---------------------------------------------------------------------------------- memory
def test_weights_take_at_most_a_byte_and_a_quarter_each(tiny_folder):
    """Of a model whose embedding is tied."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("gemma2"), dtype="float32")
    num_weights = sum(weight.numel() for weight in model.parameters())
    freed = weakref.ref(model.get_input_embeddings().weight)
    found = decoder_of(model, 128, examine(model, 128).windows)
    release(found, model)
    found.quantise()
    gc.collect()
    assert freed() is None  # the packed output layer shares nothing with it any more
    assert quality.num_bytes(model, found) <= 1.25 * num_weights
