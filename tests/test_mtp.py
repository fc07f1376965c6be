"""MTP heads of the families, from checkpoints with the names that published ones have.

A small model with one layer more is taken apart: its last layer becomes the head's block.
"""

import json

import pytest
import speculative_decoding as core
import torch
from conftest import ROOT, run
from families import randomise, small_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import drafters
from messages import Verdict

DEPTH, GREEDY = 4, core.Sampling()
TEXT = torch.randint(10, 4096, (40,), generator=torch.Generator().manual_seed(3)).tolist()
NUMBERED = {
    "enorm": f"model.layers.{DEPTH}.enorm", "hnorm": f"model.layers.{DEPTH}.hnorm",
    "fc": f"model.layers.{DEPTH}.eh_proj", "norm": f"model.layers.{DEPTH}.shared_head.norm",
    "block": f"model.layers.{DEPTH}.",
}  # fmt: skip
OWN = {
    "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "fc": "mtp.fc",
    "norm": "mtp.norm", "block": "mtp.layers.0.",
}  # fmt: skip
LAYOUTS = {  # names, what the config calls the number of MTP layers, and the text model's prefix
    "qwen3_5": (OWN, "mtp_num_hidden_layers", "model.language_model."),
    "qwen3_next": (OWN, "mtp_num_hidden_layers", "model."),
    "deepseek_v3": (NUMBERED, "num_nextn_predict_layers", "model."),
    "glm4_moe": (NUMBERED, "num_nextn_predict_layers", "model."),
    "glm4_moe_lite": (NUMBERED, "num_nextn_predict_layers", "model."),
}


def larger_config(family):
    """A small config with one layer more, as the published layers of MTP are: full and sparse."""
    config = small_config(family)
    for name, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if getattr(config, name, None):
            setattr(config, name, [*getattr(config, name)[:DEPTH], kind])
    config.num_hidden_layers = DEPTH + 1
    return config


@torch.no_grad()
def checkpoint(family, folder):
    """Write one in two files; returns the whole model, and the head's own norms and layer."""
    names, count, prefix = LAYOUTS[family]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(larger_config(family)).eval()
    randomise(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "demo_models" / "target").save_pretrained(folder)
    (path,) = folder.glob("*.safetensors")
    weights, block = load_file(path), f"model.layers.{DEPTH}."
    path.unlink()
    own = {n: weights.pop(n) for n in list(weights) if n.startswith(block)}
    weights = {n.replace("model.", prefix, 1): w for n, w in weights.items()}
    head = {names["block"] + n.removeprefix(block): w for n, w in own.items()}
    width = model.config.hidden_size
    extra = {n: torch.rand(width) + 0.2 for n in ("enorm", "hnorm", "norm")}
    extra["fc"] = torch.randn(width, 2 * width) / width**0.5
    head |= {f"{names[n]}.weight": w for n, w in extra.items()}
    if names is NUMBERED:
        head[f"{block}embed_tokens.weight"] = model.get_input_embeddings().weight.clone()
        head[f"{block}shared_head.head.weight"] = model.lm_head.weight.clone()
    index = {}
    for number, part in enumerate((weights, head), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    total = {"total_size": sum(w.nbytes for w in (*weights.values(), *head.values()))}
    text = json.dumps({"metadata": total, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text, "utf-8")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= {count: 1, "num_hidden_layers": DEPTH}
    for name in ("layer_types", "mlp_layer_types"):
        if name in config:
            config[name] = config[name][:DEPTH]
    if prefix != "model.":
        config = {"model_type": family, "text_config": config}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return model, extra


@torch.inference_mode()
def expected_drafts(model, extra, text):
    """What the head predicts behind each pair: the equations, with the modules of transformers."""
    decoder, ids = model.get_decoder(), torch.tensor([text])
    block, decoder.layers = decoder.layers[DEPTH], decoder.layers[:DEPTH]
    model.config.num_hidden_layers = DEPTH
    hidden = decoder(ids).last_hidden_state  # behind the final norm

    def normed(x, weight):
        norm = type(decoder.norm)(len(weight), model.config.rms_norm_eps)
        norm.weight = torch.nn.Parameter(weight)
        return norm(x)

    embeds = decoder.embed_tokens(ids[:, 1:])
    pair = [normed(embeds, extra["enorm"]), normed(hidden[:, :-1], extra["hnorm"])]
    x, positions = torch.cat(pair, -1) @ extra["fc"].T, torch.arange(1, len(text))[None]
    mask = torch.full((len(text) - 1,) * 2, float("-inf")).triu(1)[None, None]
    x = block(
        x, position_embeddings=decoder.rotary_emb(x, positions), attention_mask=mask,
        position_ids=positions, past_key_values=None,
    )  # fmt: skip
    return model.lm_head(normed(x, extra["norm"]))[0].argmax(-1).tolist()


@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe_lite"])
def test_a_head_that_does_not_load_leaves_the_target_as_it_was(family, tmp_path, monkeypatch):
    checkpoint(family, tmp_path)
    target = core.load_model(str(tmp_path), core.Options())

    def told():
        ignored = target.model._keys_to_ignore_on_load_unexpected
        return target.model.config.to_dict(), ignored

    known, during = told(), []

    def fail(model):
        during.append(told())
        raise OSError("a disk that cannot be read")

    monkeypatch.setattr("drafters.mtp_head.MtpModel.from_pretrained", fail)
    with pytest.raises(ValueError, match="MTP head .* a disk that cannot be read"):
        drafters.load_all("mtp", core.Context(target, core.sample), True)
    assert during != [known] and told() == known


@pytest.mark.parametrize("fastpath", [True, False], ids=["fast", "modules"])
@pytest.mark.parametrize("family", LAYOUTS)
def test_a_head_of_a_published_layout_drafts_by_its_equations(family, fastpath, tmp_path):
    """And speculation with it writes the target's text; mixtures round, so there no bits count."""
    model, extra = checkpoint(family, tmp_path)
    options = {"drafter": "mtp", "fixed_k": True, "fastpath": fastpath, "bitwise": False}
    engine = core.load_engine(core.Options(model=str(tmp_path), **options))
    engine.eos_ids, target, drafter = set(), engine.target, engine.panel.drafters["mtp"]
    expected = expected_drafts(model, extra, TEXT)
    for length in (len(TEXT), 17):
        row, state = target.cache.open_row(), drafter.open(TEXT[: length - 1], GREEDY, None)
        hidden = target.forward([row], [TEXT[: length - 1]], [1], (-1,)).hidden[-1][0]
        target.cache.close_row(row)
        drafter.observe(state, Verdict(0, 0, TEXT[length - 1 : length], hidden))
        assert drafter.propose(state, 1).tokens == expected[length - 2 : length - 1]
        drafter.close(state)
    expected, _ = run(engine, TEXT, max_tokens=12)
    sequence, _ = run(engine, TEXT, max_tokens=12, drafter="mtp")
    assert sequence.output == expected.output and not sequence.seat.warnings
    assert sequence.statistics.num_draft_tokens > 5
