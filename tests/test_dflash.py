"""DFlash heads draft a block of tokens in one pass, by the formulas of their paper.

Each token is drawn from the q of its place alone; and the numbers of a head are its target's. What
every head promises is in test_heads.py.
"""

from functools import partial

import head_contract as contract
import pytest
import torch
from conftest import assert_lossless, fresh_state
from safetensors.torch import save_file
from test_eagle3 import NUM_LAYERS, target_folder
from transformers import AutoConfig

from drafters.dflash import BlockConfig, DFlashHead
from server import core
from tools.training.heads import save_dflash

__all__ = ["target_folder"]  # a fixture
load = partial(contract.load, "dflash")
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
    "a block size of dflash_config's": {"block_size": None, "dflash_config": {
        "mask_token_id": MASK, "target_layer_ids": [0, 3, 5], "block_size": 3}},
}  # fmt: skip


def new_head(folder, **fields):
    """Write a head of random weights; `fields` are put into its config. Returns it."""
    torch.manual_seed(0)
    layer = AutoConfig.for_model("qwen3", num_hidden_layers=2, **contract.LAYER)
    save_dflash(DFlashHead(BlockConfig(layer, SIZE, MASK, (0, 3, 5), NUM_LAYERS)), folder)
    contract.changed(folder, **fields)
    head = DFlashHead(BlockConfig.of(contract.content_of(folder)))
    contract.randomise(head)
    save_file(head.state_dict(), folder / "model.safetensors")
    return head


@torch.inference_mode()
def reference_draft(head, model, text):
    """Greedy tokens and logits [block_size - 1, V] behind a text, by the formulas of the paper."""
    w = {name: weight.float() for name, weight in head.state_dict().items()}
    config, old = head.config, len(text) - 1
    size, at = config.block_size, torch.arange(old + config.block_size)
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    read = torch.cat([states[i + 1][0, :old] for i in config.target_layer_ids], -1)
    context = contract.normed(read @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = model.get_input_embeddings().weight[[text[-1]] + [MASK] * (size - 1)]
    for i, kind in enumerate(config.layer.layer_types):
        own = {key.removeprefix(f"layers.{i}."): value for key, value in w.items()}
        block = contract.normed(x, own["input_layernorm.weight"])
        rows = {"q": block} | dict.fromkeys("kv", torch.cat([context, block]))
        is_window = kind == "sliding_attention"
        is_causal = is_window if config.is_causal is None else config.is_causal

        def seen(j, is_window=is_window, is_causal=is_causal):
            end = old + j + 1
            return slice(max(0, end - WINDOW) if is_window else 0, end if is_causal else len(at))

        heads = contract.projected(own, rows, at)
        x = contract.with_mlp(own, x + contract.attended(own, heads, seen))
    logits = model.get_output_embeddings()(contract.normed(x, w["norm.weight"]))[1:]
    return logits.argmax(-1).tolist(), logits


@pytest.mark.parametrize("kernels", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("kind", [*KINDS, "several files"])
def test_a_head_drafts_as_the_paper_says(target_folder, tmp_path, reference, kind, kernels):
    head, model = new_head(tmp_path, **KINDS.get(kind, {})), reference(target_folder)
    if kind == "several files":
        contract.in_several_files(tmp_path)
    engine = load(target_folder, tmp_path, kernels=kernels)
    contract.check_drafts(engine, "dflash", partial(reference_draft, head, model), 9)


def test_each_q_belongs_to_its_place(target_folder, tmp_path, reference):
    """And not to what was drawn before it."""
    head, text = new_head(tmp_path), list(range(7, 40))
    engine = load(target_folder, tmp_path)
    drafter, drawn = engine.pool.drafters["dflash"], set()
    _, logits = reference_draft(head, reference(target_folder), text)
    sampling = core.Sampling(temperature=1.0, verification="rejection")
    for seed in range(8):
        state = fresh_state(engine, drafter, text, sampling, core.Noise(seed))
        draft = drafter.propose(state, 5)
        drafter.close(state)
        torch.testing.assert_close(draft.probs, logits.softmax(-1), rtol=1e-2, atol=1e-4)
        drawn.add(tuple(draft.tokens))
    assert len(drawn) == 8


@pytest.mark.parametrize("given", [{"quantize": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_a_head_computes_in_its_target_s_numbers(given, prompts):
    engine = load(**given)
    drafter = engine.pool.drafters["dflash"]
    form = "Q8" if "quantize" in given else "HALF"
    matrices = drafter._decoder.decoder.blocks[0].matrices.values()
    forms = {panels.form for part in matrices for panels in part}
    assert forms | {drafter._head.fc.panels.form} == {form}
    sequence = assert_lossless(engine, prompts["repetitive_colours"], 30, "dflash")
    assert sequence.statistics.num_accepted_draft_tokens > 5 and not sequence.warnings


def test_a_block_may_stand_behind_the_end_of_the_context():
    engine = load(max_model_len=48)
    prompt = [7 + i % 5 for i in range(30)]
    sequence = assert_lossless(engine, prompt, 99, "dflash", num_speculative_tokens=7)
    assert not [text for text in sequence.warnings if "dflash" in text]


block_saying = partial(contract.saying_in, "dflash_config")
BROKEN = contract.BROKEN | {
    "no mask_token_id: is this a DF": contract.saying(dflash_config=None),
    "no block_size": contract.saying(block_size=None),
    "block_size is 1: it must be from 2": contract.saying(block_size=1),
    "supported is 'qwen3'": contract.saying(model_type="llama"),
    "output_multiplier is 0.2": block_saying(output_multiplier=0.2),
    "target_layer_ids are ['a'], not integers": block_saying(target_layer_ids=["a"]),
    "reads layer 6, and can read 0 to 5": block_saying(target_layer_ids=[1, 6]),
    "mask_token_id is 4096, which is no token": block_saying(mask_token_id=4096),
    "a target of 36 layers": contract.saying(num_target_layers=36),
    "num_hidden_layers is 900000": contract.saying(num_hidden_layers=900_000, layer_types=None),
    "sliding_window is -5": contract.saying(**WINDOWS | {"sliding_window": -5}),
    "chunked_attention": contract.saying(layer_types=["chunked_attention"] * 2),
    "states of 64 numbers": contract.saying(hidden_size=64),
    "a vocabulary of 5000": contract.saying(vocab_size=5000),
    "unknown weight lm_head.weight": contract.holding("lm_head.weight", lambda _: torch.ones(2)),
}
