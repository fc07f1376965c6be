"""DFlash heads: what is computed, for which target, in which files; and the contract of all."""

import json

import pytest
import speculative_decoding as core
import torch
from conftest import ROOT, assert_lossless, run
from head_contract import BROKEN as COMMON
from head_contract import (  # noqa: F401
    changed,
    changed_weights,
    test_a_batch_is_drafted_like_each_alone_and_rows_are_given_back,
    test_rejection_keeps_the_distribution_of_the_first_tokens,
    test_the_head_is_accepted_and_changes_no_token,
)
from safetensors.torch import load_file, save_file

# The contract of all drafters, for the embedded head: a test is run where it is imported.
from test_drafters import (  # noqa: F401
    fresh_state,
    propose_and_close,
    test_a_batch_of_states_proposes_like_each_alone,
    test_a_rolled_back_state_proposes_like_a_fresh_one,
    test_drafts_are_known_ids_and_no_more_than_asked_for,
)
from test_eagle3 import NUM_LAYERS, WIDTH, normed, rotated, target_folder
from transformers import AutoConfig, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from demo_models.heads import save_dflash
from drafters.dflash import BlockConfig, DFlashHead

__all__ = ["target_folder"]  # a fixture
HEAD = ROOT / "demo_models" / "target_dflash"
MASK, SIZE, WINDOW = 5, 6, 9
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW,
    "use_sliding_window": True,
}  # fmt: skip
KINDS = {
    "as published": {},
    "windows are causal": WINDOWS,
    "windows that are not": WINDOWS | {"is_causal": False},
    "all is causal": WINDOWS | {"is_causal": True},
    "the last state": {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [5]}},
    "a block size of dflash_config's": {
        "block_size": None,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 3, 5], "block_size": 3},
    },
}


def new_head(folder, **fields):
    """Write a head of random weights; `fields` are put into its config. Returns it."""
    torch.manual_seed(0)
    layer = AutoConfig.for_model(
        "qwen3", vocab_size=4096, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
    )  # fmt: skip
    config = BlockConfig(layer, SIZE, MASK, (0, 3, 5), NUM_LAYERS)
    save_dflash(config, torch.nn.Module(), folder)
    changed(folder, **fields)
    head = DFlashHead(BlockConfig.of(json.loads((folder / "config.json").read_text("utf-8"))))
    with torch.no_grad():
        for name, weight in head.named_parameters():
            weight.copy_(torch.randn(weight.shape) * 0.3 + ("norm" in name))
            weight.copy_(weight.bfloat16())
    save_file(head.state_dict(), folder / "model.safetensors")
    return head


# ------------------------------------------------------------------------ a plain reference
@torch.inference_mode()
def reference_logits(head, model, text):
    """[block_size - 1, V] behind a text, by the formulas of the paper, all from scratch."""
    w = {name: weight.float() for name, weight in head.state_dict().items()}
    config, old = head.config, len(text) - 1
    size, at = config.block_size, torch.arange(old + config.block_size)
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    read = torch.cat([states[i + 1][0, :old] for i in config.target_layer_ids], -1)
    context = normed(read @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = model.get_input_embeddings().weight[[text[-1]] + [MASK] * (size - 1)]
    for i, kind in enumerate(config.layer.layer_types):
        own = {key.removeprefix(f"layers.{i}."): value for key, value in w.items()}
        block = normed(x, own["input_layernorm.weight"])
        rows, heads = {"q": block, "k": torch.cat([context, block])}, {}
        for name in "qkv":
            y = rows.get(name, rows["k"]) @ own[f"self_attn.{name}_proj.weight"].T
            heads[name] = y.view(len(y), -1, 8)
            if name != "v":
                y = normed(heads[name], own[f"self_attn.{name}_norm.weight"])
                heads[name] = rotated(y, at[-len(y) :])
        is_window = kind == "sliding_attention"
        is_causal = is_window if config.is_causal is None else config.is_causal
        attended = torch.zeros(size, 4, 8)
        for j, h in ((j, h) for j in range(size) for h in range(4)):
            end = old + j + 1 if is_causal else len(at)
            seen = slice(max(0, old + j + 1 - WINDOW) if is_window else 0, end)
            scores = heads["k"][seen, h // 2] @ heads["q"][j, h] / 8**0.5
            attended[j, h] = scores.softmax(0) @ heads["v"][seen, h // 2]
        x = x + attended.flatten(1) @ own["self_attn.o_proj.weight"].T
        y = normed(x, own["post_attention_layernorm.weight"])
        gate, up = (y @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ own["mlp.down_proj.weight"].T
    return model.get_output_embeddings()(normed(x, w["norm.weight"]))[1:]


def load(model=None, head=None, **fields):
    """An engine for the embedded target, or another one, with the embedded head or another one."""
    model = str(model or "embedded")
    fields = {"model": model, "fixed_k": True, "drafter": "dflash"} | fields
    return core.load_engine(core.Options(dflash=head and str(head), **fields))


@pytest.fixture(scope="module", params=[True, False], ids=["packed", "plain"])
def demo_engine(request):
    """The engine of the contract's tests; it finds the embedded head by itself."""
    return load(kernels=request.param)


@pytest.fixture(scope="module")
def loaded():
    return load


@pytest.fixture(scope="module")
def name():
    return "dflash"


# --------------------------------------------------------------------------- what it computes
@pytest.mark.parametrize("kernels", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_drafts_as_the_paper_says(target_folder, tmp_path, reference, kind, kernels):
    head = new_head(tmp_path, **KINDS[kind])
    check_drafts(target_folder, tmp_path, reference, head, kernels=kernels)


def test_weights_may_lie_in_several_files(target_folder, tmp_path, reference):
    head = new_head(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    files = {key: f"model-{i % 2}.safetensors" for i, key in enumerate(weights)}
    for file in set(files.values()):
        save_file({key: weights[key] for key in weights if files[key] == file}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    index = json.dumps({"weight_map": files})
    (tmp_path / "model.safetensors.index.json").write_text(index, "utf-8")
    check_drafts(target_folder, tmp_path, reference, head)


def check_drafts(target_folder, folder, reference, head, **fields):
    """Tokens and scores of drafts, over two verdicts, are those of the reference."""
    engine = load(target_folder, folder, **fields)
    drafter, seen, model = engine.panel.drafters["dflash"], [], reference(target_folder)
    choose, count = drafter._sample, head.config.block_size - 1

    def watched(logits, *rest):
        seen.append(logits)
        return choose(logits, *rest)

    drafter._sample, text = watched, list(range(7, 40))
    for given in ([], [99, 98, 97]):
        text = [*text, *given]
        expected, seen[:] = reference_logits(head, model, text), []
        (tokens,) = propose_and_close(drafter, [fresh_state(engine, drafter, text)], [9])
        assert tokens == expected.argmax(-1).tolist() and len(tokens) == count
        torch.testing.assert_close(torch.stack(seen), expected, rtol=1e-3, atol=2e-3)


@torch.inference_mode()
def test_the_reference_is_what_transformers_computes(target_folder, tmp_path, reference):
    """Of a head of its own with the weights of the public layout, by other names."""
    head, model, text = new_head(tmp_path), reference(target_folder), list(range(7, 40))
    layer = head.config.layer.to_dict()
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "layer_types", "rope_parameters",
    )  # fmt: skip
    ids = list(head.config.target_layer_ids)
    config = MuseGlimmerAssistantConfig(
        **{name: layer[name] for name in names}, block_size=SIZE, target_layer_ids=ids
    )
    theirs, renamed = MuseGlimmerAssistantModel(config).eval(), {}
    for key, weight in head.state_dict().items():
        key = key.replace("fc.", "encoder.fc.").replace("hidden_norm", "encoder.output_norm_enc")
        renamed[key] = weight
    theirs.load_state_dict(renamed)
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    cache = DFlashCache(config=config)
    cache.set_previous_accepted_tokens(len(text) - 1)
    output = theirs(
        noise_embeds=model.get_input_embeddings()(torch.tensor([[text[-1], *[MASK] * (SIZE - 1)]])),
        context_hidden_states=torch.cat([states[i + 1][:, :-1] for i in ids], -1),
        past_key_values=cache,
    )
    expected = model.get_output_embeddings()(output.last_hidden_state[0, 1:])
    actual = reference_logits(head, model, text)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_each_q_belongs_to_its_place_and_not_to_what_was_drawn_before_it(
    target_folder, tmp_path, reference
):
    head, text = new_head(tmp_path), list(range(7, 40))
    engine = load(target_folder, tmp_path)
    drafter, drawn = engine.panel.drafters["dflash"], set()
    expected = reference_logits(head, reference(target_folder), text).softmax(-1)
    sampling = core.Sampling(temperature=1.0, verification="rejection")
    for seed in range(8):
        state = fresh_state(engine, drafter, text, sampling, core.Noise(seed))
        draft = drafter.propose(state, 5)
        drafter.close(state)
        torch.testing.assert_close(draft.probs, expected, rtol=1e-2, atol=1e-4)
        drawn.add(tuple(draft.tokens))
    assert len(drawn) == 8


# ------------------------------------------------------------------------------ losslessness
@pytest.mark.parametrize("given", [{"quantize": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_a_head_computes_in_its_target_s_numbers(given, prompts):
    engine = load(**given)
    drafter = engine.panel.drafters["dflash"]
    form = "Q8" if "quantize" in given else "HALF"
    matrices = drafter._decoder.blocks[0].linears.values()
    forms = {panels.form for part in matrices for panels in part.panels}
    assert forms | {drafter._head.fc.panels.form} == {form}
    sequence = assert_lossless(engine, prompts["repetitive_colours"], 30, "dflash")
    assert sequence.statistics.num_accepted_draft_tokens > 5 and not sequence.seat.warnings


def test_a_block_may_stand_behind_the_end_of_the_context():
    engine = load(max_model_len=48)
    prompt = [7 + i % 5 for i in range(30)]
    sequence = assert_lossless(engine, prompt, 99, "dflash", num_speculative_tokens=7)
    assert not [text for text in sequence.seat.warnings if "dflash" in text]


def test_a_prompt_in_chunks_and_one_that_is_known_are_drafted_alike():
    """The first run reads it in chunks, the second finds most of it in the prefix cache."""
    engine, runs = load(prefill_chunk=100), []
    prompt = [7 + i % 50 for i in range(600)]
    whole = run(load(prefix_cache_mb=0), prompt, max_tokens=20, drafter="dflash")[1]
    for _ in range(2):
        sequence, events = run(engine, prompt, max_tokens=20, drafter="dflash")
        assert [e["proposals"] for e in events] == [e["proposals"] for e in whole]
        assert not sequence.seat.warnings
        runs.append(sequence.seat.num_cached)
    assert runs[0] == 0 < runs[1]


def test_a_head_that_fails_amid_a_draft_can_draft_again(demo_engine, prompts, monkeypatch):
    drafter, text = demo_engine.panel.drafters["dflash"], prompts["code_class"]
    state, fresh = (fresh_state(demo_engine, drafter, text) for _ in range(2))
    held = drafter._cache.lengths[state.row]
    for part in ("_sample", "_output"):
        with monkeypatch.context() as patch:
            patch.setattr(drafter, part, None)
            with pytest.raises(TypeError):
                drafter.propose(state, 3)
        assert drafter._cache.lengths[state.row] == held
    drafts = [propose_and_close(drafter, [each], [3]) for each in (state, fresh)]
    assert drafts[0] == drafts[1]


# ------------------------------------------------------------------------- options and refusals
def config_changed(**own):
    return lambda f: changed(f, dflash_config={"mask_token_id": 1, "target_layer_ids": [0]} | own)


BROKEN = COMMON | {
    "another head": (lambda f: changed(f, dflash_config=None), "no mask_token_id: is this a DF"),
    "no block": (lambda f: changed(f, block_size=None), "no block_size"),
    "a small block": (lambda f: changed(f, block_size=1), "block_size is 1: it must be from 2"),
    "a block of text": (lambda f: changed(f, block_size="16"), "block_size is '16'"),
    "another family": (lambda f: changed(f, model_type="llama"), "supported is 'qwen3'"),
    "scaled": (config_changed(output_multiplier=0.2), "output_multiplier is 0.2"),
    "ids": (config_changed(target_layer_ids=["a"]), "target_layer_ids are ['a'], not integers"),
    "no ids": (config_changed(target_layer_ids=[]), "target_layer_ids are [], not integers"),
    "layer 6": (config_changed(target_layer_ids=[1, 6]), "reads layer 6, and can read 0 to 5"),
    "mask": (config_changed(mask_token_id=4096), "mask_token_id is 4096, which is no token"),
    "layers": (lambda f: changed(f, num_target_layers=36), "a target of 36 layers"),
    "attention": (lambda f: changed(f, layer_types=["chunked_attention"] * 2), "chunked_attention"),
    "wide": (lambda f: changed(f, hidden_size=64), "states of 64 numbers"),
    "vocabulary": (lambda f: changed(f, vocab_size=5000), "a vocabulary of 5000"),
    "unknown": (
        lambda f: changed_weights(f, lambda w: w.update({"lm_head.weight": torch.ones(2)})),
        "unknown weight lm_head.weight",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_head_that_cannot_be_used_is_one_line(target_folder, tmp_path, kind):
    new_head(tmp_path)
    break_it, reason = BROKEN[kind]
    break_it(tmp_path)
    with pytest.raises(ValueError, match="cannot use the DFlash head") as error:
        load(target_folder, tmp_path, drafter=None)  # asked for by --dflash, not passed over
    assert reason in str(error.value) and "\n" not in str(error.value), error.value


def test_the_embedded_head_is_there_where_it_is_asked_for(target_folder, prompts):
    assert "dflash" not in core.load_engine(core.Options(model="embedded")).panel.drafters
    with pytest.raises(ValueError, match="give --dflash"):
        core.load_engine(core.Options(model=str(target_folder), drafter="dflash"))
    engine = load(head=HEAD, drafter="auto", fixed_k=False)
    assert {"dflash", "mtp", "ngram"} < set(engine.panel.choices["auto"])
    assert engine.controller.costs.at_once == {"dflash": 7}
    assert_lossless(engine, prompts["hard_story"], 40, "auto")
