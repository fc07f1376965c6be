"""A model in int8 is another model, near the first one, and speculation is exact for it, too.

Sums of integers are exact, so all bits are equal in any company. A model in floats may draft with
its int8 twin, which shares its KV cache and leaves no trace there.
"""

import conftest
import pytest
import torch
from conftest import assemble, assert_lossless, load, logits_of, run
from test_heads import new_eagle3, target_folder  # noqa: F401
from transformers import AutoModelForCausalLM

from runtime.kernels import start
from runtime.kernels.experts import experts_of
from runtime.kernels.patches import PanelEmbedding, PanelLinear
from runtime.kernels.reading import decoder_of
from runtime.models import loading
from runtime.models.structure import examine
from server import answers
from server.options import Options

pytestmark = conftest.needs_compiler
TEXT = [311, 42, 7, 900, 13, 42, 7, 900, 55, 1024]


@pytest.fixture(scope="module")
def twins(tiny_folder):
    """A float target, and itself in int8 to draft."""
    return load(tiny_folder("llama"), drafter="self_int8")


# ------------------------------------------------------------------------------ a whole model
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "opt", "gpt_oss", "olmo"])
def test_a_family_in_int8_is_another_model_near_the_first_one(tiny_folder, reference, family):
    """The experts of gpt_oss are quantised, too; norms of olmo have no weights.

    What gemma2 embeds with is its output layer, too, and is not held twice.
    """
    target = load(folder := tiny_folder(family), dtype="int8").target
    assert target.report.is_exact and target.model.dtype == torch.float32
    experts = [p for part in experts_of(target.model) for p in sum(part.matrices, [])]
    assert len(experts) == (4 * 2 * 4 if family == "gpt_oss" else 0)
    forms = {panels.form for panels in (*experts, *target.compiled.panels)}
    assert forms == ({"Q8", "FLOAT"} if family == "gpt2" else {"Q8"})  # positions are no matrix
    assert type(target.model.get_input_embeddings()) is PanelEmbedding
    if family in ("llama", "gemma2"):
        left = {id(t): t for t in (*target.model.parameters(), *target.model.buffers())}
        num_bytes = sum(t.numel() * t.element_size() for t in left.values())
        assert target.compiled.num_bytes + num_bytes <= 1.25 * target.num_weights
    with torch.inference_mode():
        expected = reference(folder)(torch.tensor([TEXT])).logits[0]
    distance = (logits_of(target, TEXT) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 1e-4 < distance.median() < 0.15


@pytest.mark.parametrize("name", ["embedded", "llama"])
def test_a_wrong_forward_is_found_in_int8_too(tiny_folder, name, monkeypatch):
    """The tolerance is that of floats, not of the jumps between integers."""
    right, model = start.decoder_of, name if name == "embedded" else str(tiny_folder(name))

    def wrong(*args):
        decoder = right(*args)
        decoder.blocks[1].struct.scaling *= 1.5
        return decoder

    monkeypatch.setattr(start, "decoder_of", wrong)
    with pytest.raises(loading.StartError, match="^[^:]+ cannot be served: its logits are"):
        assemble(Options(model=model, dtype="int8"))


@pytest.mark.parametrize("head", ["eagle3", "mtp"])
def test_a_head_is_quantised_with_its_target(target_folder, tmp_path, head):  # noqa: F811
    """All its matrices are, and those of the target that it uses."""
    new_eagle3(tmp_path)
    model, path = (target_folder, str(tmp_path)) if head == "eagle3" else ("embedded", None)
    engine = load(model, eagle3=path, dtype="int8")
    drafter = engine.pool.drafters[head]
    (kernel,) = drafter._kernels
    modules = [m.panels for m in drafter._head.modules() if isinstance(m, PanelLinear)]
    assert {matrix.form for matrix in (*modules, *kernel.decoder.panels)} == {"Q8"}
    s = assert_lossless(engine, TEXT, 40, head)
    assert not s.warnings and s.statistics.num_draft_tokens > 10


# ------------------------------------------------------------------------------ the drafter
def test_the_model_in_int8_drafts_what_the_model_says(twins):
    """It leaves the target's cache as it was, whose bits decide the log-probabilities."""
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


def test_neither_a_draft_that_fails_nor_its_nan_reaches_the_target(twins, monkeypatch):
    monkeypatch.setattr("runtime.kernels.can_chain", lambda *_: False)
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


def test_what_is_not_compiled_tells_its_bytes_too(tiny_folder):
    target = load(tiny_folder("xglm"), dtype="int8").target
    assert target.compiled is None
    assert answers.weights_of(target)["weight_bytes"] == target.num_weights


# ------------------------------------------------------------------------------ four bits
@pytest.mark.parametrize("options", [{}, {"dtype": "int8"}], ids=str)
def test_a_large_draft_model_has_four_bits_and_changes_no_text(monkeypatch, prompts, options):
    monkeypatch.setattr("drafters.MANY_WEIGHTS", 10**9)  # as a small one, it stays as it is
    usual = load("embedded", drafter="draft_model", **options)
    monkeypatch.setattr("drafters.MANY_WEIGHTS", 0)
    engine = load("embedded", drafter="draft_model", **options)
    whole, weights = (answers.weights_of(each.draft_model) for each in (usual, engine))
    assert weights["forms"] == ["Q4"] != whole["forms"] and weights["dtype"] == "int4"
    assert weights["weight_bytes"] < 0.7 * whole["weight_bytes"]
    assert answers.weights_of(engine.target) == answers.weights_of(usual.target)
    drafted = accepted = 0
    for prompt in list(prompts.values())[:3]:
        counts = assert_lossless(engine, prompt, 24, "draft_model").statistics
        drafted += counts.num_draft_tokens
        accepted += counts.num_accepted_draft_tokens
    assert accepted > 0.2 * drafted > 0


def test_where_four_bits_cannot_hold_a_matrix_those_beside_it_read_what_it_reads(tiny_folder):
    """A draft model still gives numbers: a query in floats would take its inputs for blocks."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype="float32")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[3, 5] = 1e7
    decoder = decoder_of(model, 128, examine(model, 128).windows, is_known=True)
    weights = [panels.unpacked() for panels in decoder.blocks[0].matrices["qkv"]]
    decoder.quantise("int4")
    first, second = (block.matrices for block in decoder.blocks[:2])
    assert {panels.form for panels in first["qkv"]} == {"FLOAT"}
    assert {panels.form for panels in (*first["down"], *second["qkv"])} == {"Q4"}
    assert torch.equal(first["qkv"][0].unpacked(), weights[0])
    error = first["qkv"][1].unpacked() - weights[1]
    assert 0 < error.norm() < 0.2 * weights[1].norm()  # it was rounded before


@pytest.mark.parametrize(("options", "is_there"), [
    ({}, True), ({"drafter": "auto", "fixed_k": True}, True),
    ({"drafter": "ngram"}, False), ({"fixed_k": True}, False),
])  # fmt: skip
def test_it_takes_memory_only_where_someone_can_use_it(tiny_folder, monkeypatch, options, is_there):
    options = Options(model=str(tiny_folder("llama")), **options)
    assert "self_int8" not in assemble(options).pool.drafters  # it is too small
    monkeypatch.setattr("drafters.self_int8.MANY_WEIGHTS", 0)
    assert ("self_int8" in assemble(options).pool.drafters) is is_there
