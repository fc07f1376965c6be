"""EAGLE-3 heads draft by the formulas of their paper, in each layout that heads are published in.

A head was trained for one target, and is refused for another one. What every head promises is in
test_heads.py.
"""

import json
import shutil
from functools import partial

import head_contract as contract
import pytest
import torch
from conftest import FAMILIES, TARGET
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from drafters.eagle3 import Eagle3Drafter, Eagle3Head, HeadConfig
from tools.training.heads import save_eagle3

NUM_LAYERS, DRAFT_VOCAB = 6, 500
load = partial(contract.load, "eagle3")
SWITCHES = {
    "as published": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm, norm_output": {"fc_norm": True, "norm_output": True},
    "other layers": {"layer_ids": (1, 5)},
    "norms of queries and keys": {"family": "qwen3"},
    "all": {
        "norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """A Llama of six layers with random weights, whose texts depend on what came before."""
    torch.manual_seed(3)
    config = LlamaConfig(**FAMILIES["llama"] | {"num_hidden_layers": NUM_LAYERS})
    folder = tmp_path_factory.mktemp("six_layers")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(folder)
    return folder


def new_head(folder, verifier=None, family="llama", **switches):
    """Write a head of random weights in the speculators layout; returns it."""
    torch.manual_seed(0)
    layer = AutoConfig.for_model(family, num_hidden_layers=1, **contract.LAYER)
    layers = switches.pop("layer_ids", None)
    read = layers or (2, NUM_LAYERS // 2, NUM_LAYERS - 3)
    head = Eagle3Head(HeadConfig(layer, DRAFT_VOCAB, contract.WIDTH, read, verifier, **switches))
    contract.randomise(head)
    ids = torch.randperm(4096)[:DRAFT_VOCAB].sort().values
    head.d2t.copy_(ids - torch.arange(DRAFT_VOCAB))
    save_eagle3(head, folder, {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]}, 4)
    contract.changed(folder, eagle_aux_hidden_state_layer_ids=layers)
    return head


def as_published_first(folder):
    """Rewrite a head's folder in the original layout of SafeAILab/EAGLE."""
    content = contract.content_of(folder)
    kept = {"draft_vocab_size", "eagle_aux_hidden_state_layer_ids", *SWITCHES["all"]}
    flat = {key: value for key, value in content.items() if key in kept}
    flat |= content["transformer_layer_config"]
    (folder / "config.json").write_text(json.dumps(flat), "utf-8")
    weights = load_file(folder / "model.safetensors")
    renamed = {key.replace("layers.0.", "midlayer."): weight for key, weight in weights.items()}
    save_file(renamed, folder / "model.safetensors")


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


EMBEDDINGS = torch.randn(4096, contract.WIDTH, generator=torch.Generator().manual_seed(5))
LAYOUTS = {
    "speculators": lambda _: None,
    "original": as_published_first,
    "pickled": pickled,
    "own embeddings": contract.holding("embed_tokens.weight", lambda _: EMBEDDINGS),
}


def reference_layer(w, config, embeds, hidden):
    """All pairs so far, from scratch: embeds and hidden [T, D] -> [T, D]."""
    own = {key.removeprefix("layers.0."): value for key, value in w.items()}
    state = contract.normed(hidden, own["hidden_norm.weight"])
    read = torch.cat([contract.normed(embeds, own["input_layernorm.weight"]), state], -1)
    heads = contract.projected(own, dict.fromkeys("qkv", read), torch.arange(len(embeds)))
    x = contract.attended(own, heads, lambda i: slice(i + 1))
    return contract.with_mlp(own, x + (state if config.norm_before_residual else hidden))


@torch.inference_mode()
def reference_draft(head, model, embed, text, count=4):
    """`count` greedy tokens after `text`, and the logits of each, by the formulas of the paper."""
    w = {name: weight.float() for name, weight in head.state_dict().items()}
    config = head.config
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    read = [states[i][0, : len(text) - 1] for i in config.layer_ids]
    joined = torch.cat(read, -1)
    if config.norm_before_fc:
        joined = contract.normed(joined, w["input_norm.weight"])
    if config.fc_norm:
        parts = enumerate(joined.split(contract.WIDTH, -1))
        joined = torch.cat([contract.normed(x, w[f"fc_norm.{i}.weight"]) for i, x in parts], -1)
    hidden, tokens, scores = joined @ w["fc.weight"].T, list(text), []
    for _ in range(count):
        out = reference_layer(w, config, embed[torch.tensor(tokens[1:])], hidden)[-1:]
        last = contract.normed(out, w["norm.weight"])
        logits = (last @ w["lm_head.weight"].T)[0]
        best = int(logits.argmax())
        tokens.append(best + int(w["d2t"][best]))
        scores.append(logits)
        hidden = torch.cat([hidden, last if config.norm_output else out])
    return tokens[len(text) :], torch.stack(scores)


@pytest.mark.parametrize("kernels", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize(("switches", "layout"), [
    *((name, "speculators") for name in SWITCHES), ("other layers", "original"),
    ("all", "original"), ("as published", "pickled"), ("as published", "own embeddings"),
])  # fmt: skip
def test_a_head_drafts_as_its_layout_says(
    target_folder, tmp_path, reference, switches, layout, kernels, monkeypatch
):
    """In floats: among the jumps of integers what is wrong would hide."""
    monkeypatch.setattr(Eagle3Drafter, "weight_format", None)
    head, model = new_head(tmp_path, **SWITCHES[switches]), reference(target_folder)
    LAYOUTS[layout](tmp_path)
    embed = EMBEDDINGS if layout == "own embeddings" else model.get_input_embeddings().weight
    engine = load(target_folder, tmp_path, kernels=kernels, allow_pickle=layout == "pickled")
    assert bool(engine.pool.drafters["eagle3"]._kernels) == bool(engine.target.compiled)
    contract.check_drafts(engine, "eagle3", partial(reference_draft, head, model, embed), 4)


layer_saying = partial(contract.saying_in, "transformer_layer_config")
BROKEN = contract.BROKEN | {
    "speculators_model_type is 'dflash'": contract.saying(speculators_model_type="dflash"),
    "model_type is 'mamba'": layer_saying(model_type="mamba"),
    "num_hidden_layers is 2": layer_saying(num_hidden_layers=2),
    "fc_norm must be true or false": contract.saying(fc_norm="false"),
    "parallel_drafting is True": contract.saying(parallel_drafting=True),
    "use_aux_hidden_state is False": contract.saying(eagle_config={"use_aux_hidden_state": False}),
    "reads layer 'a', and can read 1 to 5": contract.saying(eagle_aux_hidden_state_layer_ids=["a"]),
    "no hidden_size": lambda f: (f / "config.json").write_text("{}"),
    "states of 64 numbers": contract.saying(target_hidden_size=64),
    "a vocabulary of 5000": layer_saying(vocab_size=5000),
    "layer 6": contract.saying(eagle_aux_hidden_state_layer_ids=[1, 2, 6]),
    "unknown weight fc2.weight": contract.holding("fc2.weight", lambda w: w["fc.weight"]),
    "d2t does not lead": contract.holding("d2t", lambda w: w["d2t"] + 4000),
    "embeddings are [9, 32]": contract.holding("embed_tokens.weight", lambda _: EMBEDDINGS[:9]),
}


def test_a_head_of_another_target_is_refused(target_folder, tmp_path):
    new_head(tmp_path, verifier="someone/Other-8B")
    with pytest.raises(ValueError, match="trained for someone/Other-8B, and the target is"):
        load(target_folder, tmp_path)
    hub = tmp_path / "models--someone--Other-8B" / "snapshots"
    hub.mkdir(parents=True)
    shutil.copytree(target_folder, hub / "0e9e")
    assert load(hub / "0e9e", tmp_path).default_drafter == "eagle3"
    new_head(tmp_path, verifier=f"someone/{target_folder.name}")
    assert load(target_folder, tmp_path).default_drafter == "eagle3"


def test_rotations_stay_in_float32(target_folder, tmp_path):
    new_head(tmp_path)
    engine = load(target_folder, tmp_path, dtype="bfloat16")
    head = engine.pool.drafters["eagle3"]._head
    assert head.norm.weight.dtype == torch.bfloat16
    assert head.rotary_emb.inv_freq.dtype == torch.float32
