"""MTP heads draft by the paper's equations, from checkpoints laid out as their families do.

For a checkpoint a small model with more layers is taken apart: the last ones become the blocks of
the head.
"""

import json
from random import Random

import head_contract as contract
import pytest
import torch
from conftest import TARGET, fresh_state
from families import randomise, small_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime.values import Verdict
from server import core
from server.options import Options

DEPTH = 4
TEXT = torch.randint(10, 4096, (40,), generator=torch.Generator().manual_seed(3)).tolist()
# What is before the names of all weights of layer {}, and of its block's; and what its parts are
# called, where not as here.
NUMBERED = "model.layers.{}.", "", {"fc": "eh_proj", "norm": "shared_head.norm"}
OWN = "mtp.", "layers.0.", {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
MIMO = "model.mtp_layers.0.", "", {
    "enorm": "token_layernorm", "hnorm": "hidden_layernorm", "fc": "input_proj",
    "norm": "final_layernorm",
}  # fmt: skip
LAYOUTS = {
    "qwen3_5": OWN, "qwen3_next": OWN, "deepseek_v3": NUMBERED, "glm4_moe": NUMBERED,
    "glm4_moe_lite": NUMBERED, "mimo": MIMO,
}  # fmt: skip
PUBLISHED = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}  # layers of MTP
# The numbers of layers; of those with several one has MLA, and one has not.
CASES = [
    *(("fast", family, 1) for family in LAYOUTS), ("fast", "deepseek_v3", 2),
    ("fast", "glm4_moe", 3), ("modules", "glm4_moe", 1), ("modules", "glm4_moe", 3),
]  # fmt: skip


def larger_config(family, num_more):
    """A small config with more layers, as the published layers of MTP are: full and sparse."""
    config = small_config(family)
    config.num_hidden_layers = DEPTH + num_more
    for name, kind in PUBLISHED.items():
        if getattr(config, name, None):
            setattr(config, name, [*getattr(config, name)[:DEPTH], *[kind] * num_more])
    return config


@torch.no_grad()
def checkpoint(family, folder, num_layers=1):
    """Write one; returns the whole model, and what each MTP layer has beside it."""
    begin, block_begin, names = LAYOUTS[family]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(larger_config(family, num_layers)).eval()
    randomise(model)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(folder)
    path, width = folder / "model.safetensors", model.config.hidden_size
    weights, head, extras = load_file(path), {}, []
    for number in range(DEPTH, DEPTH + num_layers):
        before, block = begin.format(number), f"model.layers.{number}."
        layer = {n: weights.pop(n) for n in list(weights) if n.startswith(block)}
        head |= {before + block_begin + n.removeprefix(block): w for n, w in layer.items()}
        extra = {n: torch.rand(width) + 0.2 for n in ("enorm", "hnorm", "norm")}
        extra["fc"] = torch.randn(width, 2 * width) / width**0.5
        head |= {f"{before}{names.get(n, n)}.weight": w for n, w in extra.items()}
        extras.append(extra)
        if before == block:
            head[f"{block}embed_tokens.weight"] = model.get_input_embeddings().weight.clone()
            head[f"{block}shared_head.head.weight"] = model.lm_head.weight.clone()
    if family == "qwen3_5":  # the text part of a larger model
        weights = {n.replace("model.", "model.language_model.", 1): w for n, w in weights.items()}
    save_file(weights | head, path, {"format": "pt"})
    config = contract.content_of(folder)
    config |= {name: config[name][:DEPTH] for name in PUBLISHED if name in config}
    count = "mtp_num_hidden_layers" if LAYOUTS[family] is OWN else "num_nextn_predict_layers"
    config |= {count: num_layers, "num_hidden_layers": DEPTH}
    if family == "qwen3_5":
        config = {"model_type": family, "text_config": config}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return model, extras


class Equations:
    """What a head computes, with the modules of transformers and without a cache."""

    def __init__(self, model, extras):
        self.model, self.extras, self.decoder = model, extras, model.get_decoder()
        self.blocks = self.decoder.layers[DEPTH:]
        self.decoder.layers = self.decoder.layers[:DEPTH]
        model.config.num_hidden_layers = DEPTH

    def norm(self, x, weight):
        norm = type(self.decoder.norm)(len(weight), self.model.config.rms_norm_eps)
        norm.weight = torch.nn.Parameter(weight)
        return norm(x)

    def layer(self, number, hidden, tokens):
        """[T, D] of pairs (hidden [T, D], tokens [T]), of which the first stands at number + 1."""
        embeds, extra = self.decoder.embed_tokens(torch.tensor([tokens])), self.extras[number]
        pair = [self.norm(embeds, extra["enorm"]), self.norm(hidden[None], extra["hnorm"])]
        if self.model.config.model_type == "mimo":
            pair.reverse()
        x, count = torch.cat(pair, -1) @ extra["fc"].T, len(tokens)
        positions = torch.arange(number + 1, number + 1 + count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        x = self.blocks[number](
            x, position_embeddings=self.decoder.rotary_emb(x, positions), attention_mask=mask,
            position_ids=positions, past_key_values=None,
        )  # fmt: skip
        return self.norm(x, extra["norm"])[0]

    def hidden(self, text):
        """Behind the final norm [T, D]."""
        return self.decoder(torch.tensor([text])).last_hidden_state[0]

    @torch.inference_mode()
    def check(self, text, drafted):
        """By the paper: layer i reads what layer i - 1 gave, one token on; the last one goes on."""
        hidden, last = self.hidden(text)[:-1], len(self.blocks) - 1
        for step, token in enumerate(drafted):
            number = min(step, last)
            output = self.layer(number, hidden, [*text, *drafted[:step]][number + 1 :])
            scores = self.model.lm_head(output[-1])
            assert scores[token] > scores.max() - 1e-4, (step, drafted)  # within rounding
            hidden = output if step < last else torch.cat([hidden, output[-1:]])


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def served(request, tmp_path_factory):
    """An engine of a target with MTP layers, their number, and the equations."""
    form, family, num_layers = request.param
    folder = tmp_path_factory.mktemp(family)
    equations = Equations(*checkpoint(family, folder, num_layers))
    contract.in_several_files(folder)
    return contract.load("mtp", folder, kernels=form == "fast"), num_layers, equations


@pytest.mark.parametrize("length", [2, 17])
def test_each_layer_drafts_by_the_equations_and_forgets_what_was_refused(served, length):
    """Whatever came before, verdicts and limits at random; two tokens are too few for a layer 2."""
    engine, num_layers, equations = served
    drafter, chance, text = engine.pool.drafters["mtp"], Random(length), TEXT[:length]
    assert len(drafter._caches) == num_layers
    states = [fresh_state(engine, drafter, text), fresh_state(engine, drafter, TEXT[5:30])]
    for limit in (6, *(chance.randint(1, 6) for _ in range(4))):
        draft, _ = drafter.propose_batch(states, [limit, chance.randint(1, 6)])
        equations.check(text, draft.tokens)
        assert len(draft.tokens) == limit and not states[0].hidden[0]
        accepted = chance.randint(0, limit)
        emitted = [*draft.tokens[:accepted], chance.randrange(10, 4000)]
        with torch.inference_mode():
            hidden = equations.hidden([*text, *emitted])[len(text) - 1 : -1]
        text = [*text, *emitted]
        drafter.observe(states[0], Verdict(limit, accepted, emitted, hidden))
        drafter.observe(states[1], Verdict(0, 0, [7], hidden[:1]))
    for state in states:
        drafter.close(state)
    assert all(cache.lengths == [0] * cache.num_rows for cache in drafter._caches)


def no_numbers(weights):
    name = next(name for name in weights if "mtp" in name and "q_proj" in name)
    weights[name] *= torch.nan


def repeated(weights):
    """A second layer's weights are all there but for what the names have no room for."""
    first = [name for name in weights if "mtp.layers.0." in name]
    weights |= {name.replace("layers.0", "layers.1"): weights[name].clone() for name in first}


@pytest.mark.parametrize(("change", "num_layers", "message"), [
    (no_numbers, 1, r"q_proj\.weight has numbers that are NaN"),
    (repeated, 2, r"missing.*layers\.1\.eh_proj\.weight"),
])  # fmt: skip
def test_layers_that_cannot_be_used_are_one_line(change, num_layers, message, tmp_path):
    """And no hindrance to other drafters."""
    checkpoint("qwen3_next", tmp_path)
    contract.weights_changed(change)(tmp_path)
    contract.changed(tmp_path, mtp_num_hidden_layers=num_layers)
    with pytest.raises(ValueError, match=message) as error:
        core.load_engine(Options(model=str(tmp_path), drafter="mtp"))
    assert "\n" not in str(error.value)
    assert "ngram" in core.load_engine(Options(model=str(tmp_path))).pool.drafters
