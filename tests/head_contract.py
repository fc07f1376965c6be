"""What the tests of trained heads share: formulas, and how a head's files are changed or broken.

The formulas are those of the papers, in plain torch and without a cache. `check_drafts` holds a
drafter against them. What every head promises is in test_heads.py.
"""

import json
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT, TARGET, fresh_state
from safetensors.torch import load_file, save_file
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import rotate_half

from drafters import base
from drafters.eagle3 import Eagle3Head, HeadConfig
from runtime.kernels import chain
from server import core
from server.options import Options
from tools.training.heads import SHARED, save_eagle3


def load(name, model="embedded", head=None, **fields):
    """An engine that drafts with a head of the kind `name`: the embedded one, or that folder's."""
    fields = {name: head and str(head), "drafter": name, "fixed_k": True} | fields
    return core.load_engine(Options(model=str(model), **fields))


WIDTH, NUM_HEADS, HEAD_WIDTH = 32, 4, 8
LAYER = {
    "vocab_size": 4096, "hidden_size": WIDTH, "intermediate_size": 48,
    "num_attention_heads": NUM_HEADS, "num_key_value_heads": 2, "head_dim": HEAD_WIDTH,
    "max_position_embeddings": 256,
}  # fmt: skip


def randomise(head):
    """All of a head's weights, norms about 1; numbers that bfloat16 has."""
    with torch.no_grad():
        for name, weight in head.named_parameters():
            weight.copy_(torch.randn(weight.shape) * 0.3 + ("norm" in name))
            weight.copy_(weight.bfloat16())


def random_eagle3(folder):
    """Write an EAGLE-3 head of random weights for the embedded target; returns the folder."""
    torch.manual_seed(0)
    target = AutoConfig.from_pretrained(TARGET)
    sizes = {name: getattr(target, name) for name in SHARED}
    layer = AutoConfig.for_model("llama", num_hidden_layers=1, **sizes)
    head = Eagle3Head(HeadConfig(layer, target.vocab_size, target.hidden_size, (2, 4, 5), None))
    randomise(head)
    save_eagle3(head, folder, {"name_or_path": None, "architectures": ["LlamaForCausalLM"]}, 4)
    return folder


DFLASH = str(ROOT / "demo_models" / "target_dflash")


@cache
def with_heads(kernels):
    """The embedded target with all drafters that run a model; the head of EAGLE-3 is random."""
    with TemporaryDirectory() as folder:
        head = str(random_eagle3(Path(folder)))
        fields = {"fixed_k": True, "suffix_cache": 0, "kernels": kernels}
        return core.load_engine(Options("embedded", eagle3=head, dflash=DFLASH, **fields))


def normed(x, weight):
    return rms_norm(x, weight.shape, weight, 1e-6)


def projected(w, rows, positions):
    """q, k and v of a layer as {name: [heads, T, d]}, each of its own rows [T, D]; theta 10 000."""
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
    cos, sin = (turn(torch.cat([angles, angles], -1))[None] for turn in (torch.cos, torch.sin))
    heads = {}
    for name, x in rows.items():
        y = (x @ w[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, HEAD_WIDTH)
        if f"self_attn.{name}_norm.weight" in w:
            y = normed(y, w[f"self_attn.{name}_norm.weight"])
        y, count = y.transpose(0, 1), len(x)
        turned = y * cos[:, -count:] + rotate_half(y) * sin[:, -count:]
        heads[name] = y if name == "v" else turned
    return heads


def attended(w, heads, seen):
    """What attention makes of q [heads, T, d], where seen [T, keys] says which keys count."""
    q, k, v = (heads[name] for name in "qkv")
    found = scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    return found.transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T


def with_mlp(w, x):
    y = normed(x, w["post_attention_layernorm.weight"])
    gate, up = (y @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (silu(gate) * up) @ w["mlp.down_proj.weight"].T


def check_drafts(engine, name, expected_of, limit):
    """Tokens and scores of drafts, over two verdicts, are those that `expected_of` gives a text."""
    drafter, text = engine.pool.drafters[name], list(range(7, 40))
    choose = Mock(wraps=base.sample)
    for given in ([], [99, 98, 97]):
        text = [*text, *given]
        tokens, scores = expected_of(text)
        for can_chain in (chain.can_chain, lambda *_: False):  # one call, which shows no scores
            state = fresh_state(engine, drafter, text)
            choose.reset_mock()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("runtime.kernels.can_chain", can_chain)
                patch.setattr(base, "sample", choose)
                draft = drafter.propose(state, limit)
            drafter.close(state)
            assert draft.tokens == tokens
        found = torch.stack([call.args[0] for call in choose.call_args_list])
        known = found > -torch.inf
        torch.testing.assert_close(found[known].view_as(scores), scores, rtol=1e-3, atol=2e-3)


def in_several_files(folder):
    weights = load_file(folder / "model.safetensors")
    files = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(weights)}
    for file in set(files.values()):
        part = {name: weights[name] for name in weights if files[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    index = json.dumps({"metadata": {}, "weight_map": files})
    (folder / "model.safetensors.index.json").write_text(index, "utf-8")


def content_of(folder):
    return json.loads((folder / "config.json").read_text("utf-8"))


def changed(folder, **values):
    """Change what config.json says; a value of None leaves the field out."""
    content = content_of(folder) | values
    kept = {key: value for key, value in content.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept), "utf-8")


def saying(**values):
    return partial(changed, **values)


def saying_in(part, **values):
    """Change what a part of config.json says."""
    return lambda folder: changed(folder, **{part: content_of(folder)[part] | values})


def weights_changed(change):
    def change_file(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return change_file


def holding(name, made):
    """A weight is put in, made of those that are there."""
    return weights_changed(lambda weights: weights.update({name: made(weights).clone()}))


BROKEN = {  # how, by what the error says
    "Expecting property name": lambda f: (f / "config.json").write_text("{"),
    "--allow-pickle": lambda f: (f / "model.safetensors").unlink(),
    "eader": lambda f: (f / "model.safetensors").write_bytes(b"abc"),
    "lacks norm.weight": weights_changed(lambda w: w.pop("norm.weight")),
    "fc.weight is [8, 96] instead of [32, 96]": holding("fc.weight", lambda w: w["fc.weight"][:8]),
    "norm.weight has numbers of another kind, torch.int32": holding(
        "norm.weight", lambda w: w["norm.weight"].int()
    ),
    "norm.weight has numbers that": holding("norm.weight", lambda w: w["norm.weight"] * torch.nan),
}
