"""Trained heads draft by the formulas of their papers, in each layout that they are published in.

An EAGLE-3 head drafts token by token; a DFlash head a block in one pass, each token by the q of its
place alone. A head is used where somebody asks for it, and one that is broken, or does not fit its
target, is refused in one line. What holds for every drafter is in test_drafters.py.
"""

import json
import shutil
from functools import partial

import head_contract as contract
import pytest
import torch
from conftest import FAMILIES, TARGET, assert_lossless, fresh_state
from head_contract import DFLASH, load, random_eagle3
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import drafters
from drafters.dflash import BlockConfig, DFlashHead
from drafters.eagle3 import Eagle3Drafter, Eagle3Head, HeadConfig
from server import core
from server.options import Options
from tools.training.heads import save_dflash, save_eagle3

NUM_LAYERS, DRAFT_VOCAB = 6, 500
SWITCHES = {
    "as published": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True, "layer_ids": (1, 5)},
    "fc_norm, norm_output": {"fc_norm": True, "norm_output": True},
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


# ------------------------------------------------------------------------------------- EAGLE-3
def new_eagle3(folder, verifier=None, family="llama", **switches):
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


def eagle3_layer(w, config, embeds, hidden):
    """All pairs so far, from scratch: embeds and hidden [T, D] -> [T, D]."""
    own = {key.removeprefix("layers.0."): value for key, value in w.items()}
    state = contract.normed(hidden, own["hidden_norm.weight"])
    read = torch.cat([contract.normed(embeds, own["input_layernorm.weight"]), state], -1)
    heads = contract.projected(own, dict.fromkeys("qkv", read), torch.arange(len(embeds)))
    x = contract.attended(own, heads, torch.ones(len(embeds), len(embeds)).tril() > 0)
    return contract.with_mlp(own, x + (state if config.norm_before_residual else hidden))


@torch.inference_mode()
def eagle3_draft(head, model, embed, text, count=4):
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
        out = eagle3_layer(w, config, embed[torch.tensor(tokens[1:])], hidden)[-1:]
        last = contract.normed(out, w["norm.weight"])
        logits = (last @ w["lm_head.weight"].T)[0]
        best = int(logits.argmax())
        tokens.append(best + int(w["d2t"][best]))
        scores.append(logits)
        hidden = torch.cat([hidden, last if config.norm_output else out])
    return tokens[len(text) :], torch.stack(scores)


@pytest.mark.parametrize("kernels", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize(("switches", "layout"), [
    *((name, "speculators") for name in SWITCHES), ("norm_before_fc", "original"),
    ("all", "original"), ("as published", "pickled"), ("as published", "own embeddings"),
])  # fmt: skip
def test_an_eagle3_head_drafts_as_its_layout_says(
    target_folder, tmp_path, reference, switches, layout, kernels, monkeypatch
):
    """In floats: among the jumps of integers what is wrong would hide."""
    monkeypatch.setattr(Eagle3Drafter, "weight_format", None)
    head, model = new_eagle3(tmp_path, **SWITCHES[switches]), reference(target_folder)
    LAYOUTS[layout](tmp_path)
    embed = EMBEDDINGS if layout == "own embeddings" else model.get_input_embeddings().weight
    engine = load(
        "eagle3", target_folder, tmp_path, kernels=kernels, allow_pickle=layout == "pickled"
    )
    assert bool(engine.pool.drafters["eagle3"]._kernels) == bool(engine.target.compiled)
    contract.check_drafts(engine, "eagle3", partial(eagle3_draft, head, model, embed), 4)


def test_a_head_of_another_target_is_refused(target_folder, tmp_path):
    new_eagle3(tmp_path, verifier="someone/Other-8B")
    with pytest.raises(ValueError, match="trained for someone/Other-8B, and the target is"):
        load("eagle3", target_folder, tmp_path)
    hub = tmp_path / "models--someone--Other-8B" / "snapshots"
    hub.mkdir(parents=True)
    shutil.copytree(target_folder, hub / "0e9e")
    assert load("eagle3", hub / "0e9e", tmp_path).default_drafter == "eagle3"
    new_eagle3(tmp_path, verifier=f"someone/{target_folder.name}")
    assert load("eagle3", target_folder, tmp_path).default_drafter == "eagle3"


# -------------------------------------------------------------------------------------- DFlash
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


def new_dflash(folder, **fields):
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
def dflash_draft(head, model, text):
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
        behind = at[old:, None] - at  # how far each key stands behind a query
        seen = (behind < (WINDOW if is_window else len(at))) & (behind >= 0 if is_causal else True)
        heads = contract.projected(own, rows, at)
        x = contract.with_mlp(own, x + contract.attended(own, heads, seen))
    logits = model.get_output_embeddings()(contract.normed(x, w["norm.weight"]))[1:]
    return logits.argmax(-1).tolist(), logits


@pytest.mark.parametrize("kernels", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("kind", [*KINDS, "several files"])
def test_a_dflash_head_drafts_as_the_paper_says(target_folder, tmp_path, reference, kind, kernels):
    head, model = new_dflash(tmp_path, **KINDS.get(kind, {})), reference(target_folder)
    if kind == "several files":
        contract.in_several_files(tmp_path)
    engine = load("dflash", target_folder, tmp_path, kernels=kernels)
    contract.check_drafts(engine, "dflash", partial(dflash_draft, head, model), 9)


def test_each_q_belongs_to_its_place(target_folder, tmp_path, reference):
    """And not to what was drawn before it."""
    head, text = new_dflash(tmp_path), list(range(7, 40))
    engine = load("dflash", target_folder, tmp_path)
    drafter, drawn = engine.pool.drafters["dflash"], set()
    _, logits = dflash_draft(head, reference(target_folder), text)
    sampling = core.Sampling(temperature=1.0, verification="rejection")
    for seed in range(4):
        state = fresh_state(engine, drafter, text, sampling, core.Noise(seed))
        draft = drafter.propose(state, 5)
        drafter.close(state)
        torch.testing.assert_close(draft.probs, logits.softmax(-1), rtol=1e-2, atol=1e-4)
        drawn.add(tuple(draft.tokens))
    assert len(drawn) == 4


@pytest.mark.parametrize(("dtype", "form"), [("int8", "Q8"), ("bfloat16", "HALF")])
def test_a_head_computes_in_its_target_s_numbers(dtype, form, prompts):
    """But for its rotations."""
    engine = load("dflash", dtype=dtype)
    drafter = engine.pool.drafters["dflash"]
    matrices = drafter._decoder.decoder.blocks[0].matrices.values()
    forms = {panels.form for part in matrices for panels in part}
    assert forms | {drafter._head.fc.panels.form} == {form}
    assert drafter._head.rotary_emb.inv_freq.dtype == torch.float32
    sequence = assert_lossless(engine, prompts["repetitive_colours"], 30, "dflash")
    assert sequence.statistics.num_accepted_draft_tokens > 5 and not sequence.warnings


def test_a_block_may_stand_behind_the_end_of_the_context():
    engine = load("dflash", max_model_len=48)
    prompt = [7 + i % 5 for i in range(30)]
    sequence = assert_lossless(engine, prompt, 99, "dflash", num_speculative_tokens=7)
    assert not [text for text in sequence.warnings if "dflash" in text]


# ------------------------------------------------------------------------------------ refusals
layer_saying = partial(contract.saying_in, "transformer_layer_config")
BROKEN_EAGLE3 = contract.BROKEN | {
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


block_saying = partial(contract.saying_in, "dflash_config")
BROKEN_DFLASH = contract.BROKEN | {
    "no mask_token_id: is this a DF": contract.saying(dflash_config=None),
    "no block_size": contract.saying(block_size=None),
    "block_size is 1: it must be from 2": contract.saying(block_size=1),
    "supported is 'qwen3'": contract.saying(model_type="llama"),
    "output_multiplier is 0.2": block_saying(output_multiplier=0.2),
    "target_layer_ids are ['a'], not integers": block_saying(target_layer_ids=["a"]),
    "reads layer 6, and can read 0 to 5": block_saying(target_layer_ids=[1, 6]),
    "mask_token_id is 4096, which is no token": block_saying(mask_token_id=4096),
    "a target of 36 layers": contract.saying(num_target_layers=36),
    "num_hidden_layers is 90000": contract.saying(num_hidden_layers=90_000, layer_types=None),
    "sliding_window is -5": contract.saying(**WINDOWS | {"sliding_window": -5}),
    "chunked_attention": contract.saying(layer_types=["chunked_attention"] * 2),
    "states of 64 numbers": contract.saying(hidden_size=64),
    "a vocabulary of 5000": contract.saying(vocab_size=5000),
    "unknown weight lm_head.weight": contract.holding("lm_head.weight", lambda _: torch.ones(2)),
}
HEADS = {"eagle3": (new_eagle3, BROKEN_EAGLE3), "dflash": (new_dflash, BROKEN_DFLASH)}


@pytest.fixture(scope="module")
def target(target_folder):
    return core.load_model(str(target_folder), Options())


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_there_where_it_is_asked_for(name, demo_engine, target_folder, tmp_path):
    for engine in (demo_engine, core.load_engine(Options(model=str(target_folder)))):
        assert name not in engine.pool.drafters
    with pytest.raises(ValueError, match=f"give --{name}"):
        core.load_engine(Options(model=str(target_folder), drafter=name))
    head = random_eagle3(tmp_path) if name == "eagle3" else DFLASH
    engine = load(name, head=head, drafter="auto", fixed_k=False)
    others = {"mtp", "ngram", "suffix", "draft_model"} | engine.pool.special
    assert set(engine.pool.choices["auto"]) == others | {name}
    assert engine.controller.costs.at_once == ({"dflash": 7} if name == "dflash" else {})


@pytest.mark.parametrize(
    ("name", "reason"), [(name, reason) for name in HEADS for reason in HEADS[name][1]]
)
def test_a_head_that_cannot_be_used_is_one_line(name, reason, target, tmp_path):
    """It is asked for by its option, and not passed over."""
    new_head, broken = HEADS[name]
    new_head(tmp_path)
    broken[reason](tmp_path)
    kind = {"eagle3": "EAGLE-3", "dflash": "DFlash"}[name]
    context = drafters.Context(target, **{name: str(tmp_path)}, named=(name,))
    with pytest.raises(ValueError, match=f"cannot use the {kind} head") as error:
        drafters.load_all(None, context, False)
    assert reason in str(error.value) and "\n" not in str(error.value), error.value
