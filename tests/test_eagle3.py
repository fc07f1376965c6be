"""EAGLE-3 heads: what is computed, in which layouts, for which target; and the contract of all."""

import json
import shutil
from functools import partial

import pytest
import speculative_decoding as core
import torch
from conftest import TARGET, assert_lossless
from head_contract import BROKEN as COMMON
from head_contract import (  # noqa: F401
    changed,
    changed_weights,
    content_of,
    test_a_batch_is_drafted_like_each_alone_and_rows_are_given_back,
    test_rejection_keeps_the_distribution_of_the_first_tokens,
    test_the_head_is_accepted_and_changes_no_token,
)
from safetensors.torch import load_file, save_file

# The contract of all drafters, for the head below: a test is run where it is imported.
from test_drafters import (  # noqa: F401
    fresh_state,
    test_a_batch_of_states_proposes_like_each_alone,
    test_a_rolled_back_state_proposes_like_a_fresh_one,
    test_drafts_are_known_ids_and_no_more_than_asked_for,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import drafters
from demo_models import train
from demo_models.heads import save_eagle3
from drafters.eagle3 import Eagle3Drafter
from drafters.eagle3_head import Eagle3Head, HeadConfig

EMBEDDING = "embed_tokens.weight"
NUM_LAYERS, WIDTH, DRAFT_VOCAB = 6, 32, 500
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
    config = LlamaConfig(
        vocab_size=4096, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        bos_token_id=0, eos_token_id=0, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("six_layers")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(folder)
    return folder


def new_head(folder, verifier=None, family="llama", seed=0, **switches):
    """Write a head of random weights in the speculators layout; returns it."""
    torch.manual_seed(seed)
    layer = drafters.eagle3_head.AutoConfig.for_model(
        family, vocab_size=4096, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
    )  # fmt: skip
    switches = {"layer_ids": None} | switches
    config = HeadConfig(layer, DRAFT_VOCAB, WIDTH, verifier=verifier, **switches)
    head = Eagle3Head(config, len(config.layers_of(NUM_LAYERS)))
    with torch.no_grad():
        for name, weight in head.named_parameters():
            is_norm = "norm" in name
            weight.copy_(torch.randn(weight.shape) * 0.3 + is_norm).copy_(weight.bfloat16())
        ids = torch.randperm(4096)[:DRAFT_VOCAB].sort().values
        head.d2t.copy_(ids - torch.arange(DRAFT_VOCAB))
    save_eagle3(head, folder, {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]}, 4)
    return head


def as_published_first(folder):
    """Rewrite a head's folder in the original layout of SafeAILab/EAGLE."""
    content = json.loads((folder / "config.json").read_text("utf-8"))
    flat = content["transformer_layer_config"] | {
        key: content[key]
        for key in content
        if key in {"draft_vocab_size", "eagle_aux_hidden_state_layer_ids", *SWITCHES["all"]}
    }
    (folder / "config.json").write_text(json.dumps(flat), "utf-8")
    weights = load_file(folder / "model.safetensors")
    renamed = {key.replace("layers.0.", "midlayer."): weight for key, weight in weights.items()}
    save_file(renamed, folder / "model.safetensors")


# ------------------------------------------------------------------------ a plain reference
def normed(x, weight, epsilon=1e-6):
    return x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def rotated(x, positions):
    """x [T, heads, d] as Llama rotates it, theta 10 000."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def reference_layer(w, config, embeds, hidden):
    """All pairs so far, from scratch: embeds and hidden [T, D] -> [T, D]."""
    num, state = len(embeds), normed(hidden, w["layers.0.hidden_norm.weight"])
    read = torch.cat([normed(embeds, w["layers.0.input_layernorm.weight"]), state], -1)
    heads = {
        name: (read @ w[f"layers.0.self_attn.{name}_proj.weight"].T).view(num, -1, 8)
        for name in "qkv"
    }
    for name in "qk":
        if f"layers.0.self_attn.{name}_norm.weight" in w:
            heads[name] = normed(heads[name], w[f"layers.0.self_attn.{name}_norm.weight"])
        heads[name] = rotated(heads[name], torch.arange(num))
    attended = torch.zeros(num, 4, 8)
    for i in range(num):
        for h in range(4):
            scores = heads["k"][: i + 1, h // 2] @ heads["q"][i, h] / 8**0.5
            attended[i, h] = scores.softmax(0) @ heads["v"][: i + 1, h // 2]
    x = attended.flatten(1) @ w["layers.0.self_attn.o_proj.weight"].T
    x = x + (state if config.norm_before_residual else hidden)
    y = normed(x, w["layers.0.post_attention_layernorm.weight"])
    gate, up = (y @ w[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (torch.nn.functional.silu(gate) * up) @ w["layers.0.mlp.down_proj.weight"].T


@torch.inference_mode()
def reference_draft(head, model, text, count, embed=None):
    """`count` greedy tokens after `text`, and the logits of each, by the formulas of the paper."""
    w = {name: weight.float() for name, weight in head.state_dict().items()}
    config = head.config
    embed = model.get_input_embeddings().weight if embed is None else embed
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    ids = config.layer_ids or (2, NUM_LAYERS // 2, NUM_LAYERS - 3)
    read = [states[i][0, : len(text) - 1] for i in ids]
    joined = torch.cat(read, -1)
    if config.norm_before_fc:
        joined = normed(joined, w["input_norm.weight"])
    if config.fc_norm:
        parts = joined.split(WIDTH, -1)
        joined = torch.cat([normed(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)], -1)
    hidden, tokens, scores = joined @ w["fc.weight"].T, list(text), []
    for _ in range(count):
        out = reference_layer(w, config, embed[torch.tensor(tokens[1:])], hidden)[-1:]
        last = normed(out, w["norm.weight"])
        logits = (last @ w["lm_head.weight"].T)[0]
        best = int(logits.argmax())
        tokens.append(best + int(w["d2t"][best]))
        scores.append(logits)
        hidden = torch.cat([hidden, last if config.norm_output else out])
    return tokens[len(text) :], torch.stack(scores)


@pytest.fixture(scope="session")
def head_folder(tmp_path_factory):
    """A head for the embedded target, trained for seconds by the script."""
    work = tmp_path_factory.mktemp("eagle3")
    more = {"epochs": 10.0, "rate": 6e-3}
    train.run(train.Plan("eagle3", TARGET, work, work / "head", **train.TOY | more))
    return work / "head"


def load(target_folder, head_folder, **fields):
    fields = {"fixed_k": True, "drafter": "eagle3"} | fields
    options = core.Options(model=str(target_folder), eagle3=str(head_folder), **fields)
    return core.load_engine(options)


@pytest.fixture(scope="module", params=[True, False], ids=["fused", "plain"])
def demo_engine(head_folder, request):
    """The engine of the contract's tests."""
    return load(TARGET, head_folder, kernels=request.param)


@pytest.fixture(scope="module")
def loaded(head_folder):
    return partial(load, TARGET, head_folder)


@pytest.fixture(scope="module")
def name():
    return "eagle3"


# --------------------------------------------------------------------------- what it computes
@pytest.mark.parametrize("kernels", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize(
    ("switches", "layout"),
    [*((name, "speculators") for name in SWITCHES), ("other layers", "original"),
     ("all", "original")],
)  # fmt: skip
def test_a_head_drafts_as_its_layout_says(
    target_folder, tmp_path, reference, switches, layout, kernels, floats
):
    head = new_head(tmp_path, **SWITCHES[switches])
    if layout == "original":
        as_published_first(tmp_path)
    check_drafts(target_folder, tmp_path, reference, head, kernels=kernels)


@pytest.fixture
def floats(monkeypatch):
    """Heads as they are: among the jumps of integers what is wrong would hide."""
    monkeypatch.setattr(Eagle3Drafter, "kept_as", None)


def check_drafts(target_folder, folder, reference, head, **fields):
    """Tokens and scores of drafts, over two verdicts, are those of the reference.

    Tokens also where a draft is one call, which shows no scores.
    """
    engine = load(target_folder, folder, **fields)
    drafter, seen = engine.panel.drafters["eagle3"], []
    assert bool(drafter._kernels) == bool(engine.target.fast)
    choose = drafter._sample

    def watched(logits, *rest):
        seen.append(logits)
        return choose(logits, *rest)

    drafter._sample = watched
    model, text = reference(target_folder), list(range(7, 40))
    for given in ([], [99, 98, 97]):
        text = [*text, *given]
        tokens, scores = reference_draft(head, model, text, 4)
        for goes_on in (None, lambda _: True):
            state, seen[:] = fresh_state(engine, drafter, text), []
            state.goes_on = goes_on
            draft = drafter.propose(state, 4)
            drafter.close(state)
            assert draft.tokens == tokens
        given = torch.stack(seen)
        known = given > -torch.inf
        assert (known.sum(1) == DRAFT_VOCAB).all()
        torch.testing.assert_close(given[known].view_as(scores), scores, rtol=1e-3, atol=2e-3)


# ------------------------------------------------------------------------------ losslessness
def test_q_is_a_distribution_over_the_draft_vocabulary(demo_engine, prompts):
    drafter = demo_engine.panel.drafters["eagle3"]
    sampling = core.Sampling(temperature=1.0, verification="rejection", repetition_penalty=1.2)
    text = prompts["hard_story"]
    state = fresh_state(demo_engine, drafter, text, sampling, core.Noise(1))
    draft = drafter.propose(state, 4)
    drafter.close(state)
    unknown = torch.ones(4096, dtype=torch.bool)
    unknown[drafter._target_ids] = False
    assert draft.probs.shape == (4, 4096) and (draft.probs[:, unknown] == 0).all()
    torch.testing.assert_close(draft.probs.sum(1), torch.ones(4))


# --------------------------------------------------------------------------------- refusals
def layer_changed(folder, **values):
    changed(
        folder, transformer_layer_config=content_of(folder)["transformer_layer_config"] | values
    )


BROKEN = COMMON | {
    "another kind": (
        lambda f: changed(f, speculators_model_type="dflash"),
        "speculators_model_type is 'dflash'",
    ),
    "another family": (lambda f: layer_changed(f, model_type="mamba"), "model_type is 'mamba'"),
    "two layers": (lambda f: layer_changed(f, num_hidden_layers=2), "num_hidden_layers is 2"),
    "a switch": (lambda f: changed(f, fc_norm="false"), "fc_norm must be true or false"),
    "unserved": (lambda f: changed(f, parallel_drafting=True), "parallel_drafting is True"),
    "no auxiliary": (
        lambda f: changed(f, eagle_config={"use_aux_hidden_state": False}),
        "use_aux_hidden_state is False",
    ),
    "ids": (lambda f: changed(f, eagle_aux_hidden_state_layer_ids=["a"]), "not integers"),
    "no config": (lambda f: (f / "config.json").write_text("{}"), "no hidden_size"),
    "wide": (lambda f: changed(f, target_hidden_size=64), "states of 64 numbers"),
    "vocabulary": (lambda f: layer_changed(f, vocab_size=5000), "a vocabulary of 5000"),
    "layer 0": (lambda f: changed(f, eagle_aux_hidden_state_layer_ids=[0, 2, 3]), "layer 0"),
    "layer 6": (lambda f: changed(f, eagle_aux_hidden_state_layer_ids=[1, 2, 6]), "layer 6"),
    "unknown": (
        lambda f: changed_weights(f, lambda w: w.update({"fc2.weight": w["fc.weight"].clone()})),
        "unknown weight fc2.weight",
    ),
    "d2t": (
        lambda f: changed_weights(f, lambda w: w.update({"d2t": w["d2t"] + 4000})),
        "d2t does not lead",
    ),
    "embeddings": (
        lambda f: changed_weights(
            f, lambda w: w.update({"embed_tokens.weight": torch.ones(9, 32)})
        ),
        "its embeddings are [9, 32]",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_head_that_cannot_be_used_is_one_line(target_folder, tmp_path, kind):
    new_head(tmp_path)
    break_it, reason = BROKEN[kind]
    break_it(tmp_path)
    with pytest.raises(ValueError, match="cannot use the EAGLE-3 head") as error:
        load(target_folder, tmp_path, drafter=None)  # asked for by --eagle3, not passed over
    assert reason in str(error.value) and "\n" not in str(error.value), error.value


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


def test_pickled_weights_need_to_be_allowed(target_folder, tmp_path, reference, floats):
    head = new_head(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    check_drafts(target_folder, tmp_path, reference, head, allow_pickle=True)


def test_a_head_may_have_embeddings_of_its_own(target_folder, tmp_path, reference, floats):
    head, model = new_head(tmp_path), reference(target_folder)
    own = torch.randn(4096, WIDTH)
    changed_weights(tmp_path, lambda w: w.update({EMBEDDING: own}))
    engine, text = load(target_folder, tmp_path), list(range(7, 40))
    drafter = engine.panel.drafters["eagle3"]
    state = fresh_state(engine, drafter, text)
    assert drafter.propose(state, 4).tokens == reference_draft(head, model, text, 4, own)[0]


def test_rotations_stay_in_float32(target_folder, tmp_path):
    new_head(tmp_path)
    engine = load(target_folder, tmp_path, dtype="bfloat16")
    head = engine.panel.drafters["eagle3"]._head
    assert head.norm.weight.dtype == torch.bfloat16
    assert head.rotary_emb.inv_freq.dtype == torch.float32


def test_without_a_head_the_drafter_is_not_there(target_folder):
    engine = core.load_engine(core.Options(model=str(target_folder)))
    assert "eagle3" not in engine.panel.drafters
    with pytest.raises(ValueError, match="give --eagle3"):
        core.load_engine(core.Options(model=str(target_folder), drafter="eagle3"))


def test_auto_takes_the_head_in(head_folder, prompts):
    engine = load(TARGET, head_folder, drafter="auto", fixed_k=False)
    names = {"mtp", "eagle3", "ngram", "suffix", "draft_model"}
    assert set(engine.panel.choices["auto"]) == names
    assert_lossless(engine, prompts["hard_story"], 40, "auto")
