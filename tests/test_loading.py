"""A stranger's model is served with transformers' own logits, or refused in one sentence.

Loading compares both on random texts, so no test here has to know a family. What the comparison
cannot see is tested by itself: where weights lie in memory, and windows and rotations that would
depend on the texts beside one.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from ctypes import CDLL, Structure, c_size_t
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest.mock import Mock

import families
import pytest
import torch
from conftest import (
    ROOT,
    TARGET,
    application,
    assemble,
    before,
    load,
    logits_of,
    needs_compiler,
    open_rows,
)
from gguf_files import Q8_0, TINY, write
from head_contract import changed, holding, saying, weights_changed
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from drafters.eagle3 import HeadConfig
from runtime.kernels import reading
from runtime.models import catalogue, gguf_tokenizer, loading, reference, tokenizer_bounds
from runtime.models.fim import tokenize_plain
from runtime.models.loading import StartError
from runtime.models.prompts import tokenize
from runtime.models.structure import UnsupportedModel, examine, window_of
from runtime.models.weights import read_folder
from server import core
from server.options import Options


@pytest.fixture
def folder(tmp_path):
    """Writes a small model of a family, with changes to its config, to a folder."""

    def make(name, **changes):
        families.save_small(name, tmp_path / name, **changes)
        return tmp_path / name

    return make


def tokens(count):
    return torch.randint(10, 4000, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def plain_logits(folder, text, **changes):
    """transformers' own logits [T, V], by its modules or by those of a changed config."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", **changes).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([text]), use_cache=False).logits[0]


def is_near(actual, expected):
    return bool(torch.allclose(actual, expected, rtol=1e-3, atol=1e-3))


@pytest.mark.parametrize(("name", "options"), [
    ("gemma2", {"dtype": "bfloat16"}),
    ("mixtral", {"dtype": "bfloat16"}),
    ("llama", {"max_model_len": 2, "max_running": 1}),
    ("llama", {"max_model_len": 3, "max_running": 2}),
    ("llama", {"max_model_len": 9, "max_running": 1}),
])  # fmt: skip
def test_roundings_of_bfloat16_and_short_contexts_are_no_fault(folder, name, options):
    assert load(folder(name), **options)


# ----------------------------------------------------------------------------------- refused
def steps_of(**parts):
    """Give tokenizer.json these parts, and a token that is read by them."""

    def edit(folder):
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text("utf-8")) | parts
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
        token = {"id": 4096, "content": "aaaa", "normalized": True} | plain
        content["added_tokens"].append(token)
        file.write_text(json.dumps(content), "utf-8")

    return edit


def in_turn(steps, name):
    return {"type": "Sequence", name: steps}


def replaces(old, new, kind="String"):
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def splits(pattern):
    part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return in_turn([part], "pretokenizers")


def with_a_pipe(folder):
    index = {"metadata": {}, "weight_map": {"x": "pipe.safetensors"}}
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")


def with_template(folder):
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text("utf-8")) | {"chat_template": 5}
    file.write_text(json.dumps(content), "utf-8")


HUNDREDS = [replaces("a", "a" * 100)] * 8
LENGTHENED = [
    steps_of(normalizer=replaces("a", "b" * 100_000)),
    steps_of(normalizer=in_turn(HUNDREDS, "normalizers")),
    steps_of(normalizer=in_turn([replaces("(?<=a)", "a", "Regex")] * 30, "normalizers")),
    steps_of(normalizer=in_turn([{"type": "NFKC"}, replaces("ل", "ﷺ")] * 4, "normalizers")),
    steps_of(normalizer=in_turn([{"type": "Prepend", "prepend": "a" * 40}], "normalizers")),
    steps_of(pre_tokenizer=in_turn(
        [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]
        * 30, "pretokenizers")),
    steps_of(post_processor={
        "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000,
        "pair": [], "special_tokens": {}}),
]  # fmt: skip
UP, EXPERT = "model.layers.1.mlp.up", "model.layers.1.block_sparse_moe.experts.3.w1.weight"
REFUSED = [  # a family, an edit of its folder or none, and what is said
    ("llama", weights_changed(lambda w: w.update({f"{UP}.weight": w.pop(f"{UP}_proj.weight")})),
     f"llama lacks 1 of the weights that its config.json asks for, first {UP}_proj.weight "
     f".not used: 1 in the file, first {UP}.weight.$"),
    # transformers stacks the experts, and says what it could not stack in its log only.
    ("mixtral", holding(EXPERT, lambda w: w[EXPERT][:-1]),
     r"layers\.1\.mlp\.experts\.gate_up_proj: .*\[96, 64\].* \[95, 64\]"),
    ("llama", holding("model.norm.weight", lambda w: w["model.norm.weight"] * torch.nan),
     "gives no numbers: are its weights damaged"),
    ("llama", saying(is_causal=False), "does not read a text from left to right"),
    ("bert", saying(is_decoder=False), "has no KV cache in transformers"),
    ("jamba", saying(), r"\(jamba\) has recurrent layers of a kind that .* .JambaMambaMixer."),
    ("inkling_text", saying(), r"\(inkling_text\) keeps several states in one layer"),
    *(("llama", edit, r"can make a text .* times as long \(by its norm") for edit in LENGTHENED),
    ("llama", steps_of(decoder=in_turn(HUNDREDS, "decoders")), "1e.16 times as long .by its decod"),
    ("llama", steps_of(pre_tokenizer=splits("(x+x+)+y|[^x]")),
     r"its tokenizer: '\(x\+x\+\)\+y\|\[\^x\]' has a repetition inside a repetition$"),
    ("llama", with_template, "llama: its chat_template: 'int' object has no"),
    ("llama", with_a_pipe, "index.json names pipe.safetensors, which is no file$"),
    *(("llama", saying(num_hidden_layers=n), f"too few tensors: its num_hidden_layers is {n}$")
      for n in (10**5, 10**12)),
    *(("llama", saying(**{name: n}), "llama has far fewer weights than its config.json asks for$")
      for name, n in (("intermediate_size", 10**7), ("vocab_size", 10**8), ("head_dim", 10**12))),
    ("mixtral", saying(num_local_experts=10**9), "far fewer weights"),
    *(("llama", holding(f"{UP}_proj.weight", lambda w, k=kind: w[f"{UP}_proj.weight"].to(k)),
       f"llama has {said} numbers in {UP}_proj.weight, which must be floats$")
      for kind, said in ((torch.int32, "I32"), (torch.bool, "BOOL"))),
]  # fmt: skip


@pytest.mark.parametrize(("family", "edit", "message"), REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(folder, family, edit, message):
    edit(path := folder(family))
    with pytest.raises(ValueError, match=message):  # as a StartError is
        load(path)


SELF, FILE = {"drafter": "self_int8"}, "a GGUF file in Q8_0"
UNFIT = [  # a model, options that do not go with it, and what is said
    ("llama", {"dtype": "packed"}, "--dtype packed is for GGUF files"),
    (FILE, {"dtype": "packed", "kernels": False}, "cannot be served as it is: the kernels are not"),
    ("llama", {"dtype": "int8", "kernels": False}, "--dtype int8 needs the kernels in C"),
    ("llama", SELF | {"kernels": False}, "self_int8 needs the kernels in C"),
    ("lfm2", {"drafter": "tree"}, "--drafter tree needs .* a model without recurrent layers"),
    ("llama", {"draft_model": "lfm2"}, "has recurrent layers, which only a target may have"),
]  # fmt: skip
UNFIT_IN_C = [
    ("llama", SELF | {"dtype": "int8"}, "self_int8 does not go with an int8 target"),
    (FILE, SELF, "self_int8 does not go with packed weights"),
    ("gpt_oss", SELF, "does not go with a mixture of experts"),
    ("lfm2", SELF, "does not go with recurrent layers"),
]
UNFIT += (pytest.param(*case, marks=needs_compiler) for case in UNFIT_IN_C)


@pytest.mark.parametrize(("model", "options", "message"), UNFIT)
def test_what_does_not_go_together_is_refused(tiny_folder, tmp_path, model, options, message):
    if model == FILE:
        write(path := tmp_path / "a.gguf", TINY, Q8_0)
    else:
        path = tiny_folder(model)
    options = {name: tiny_folder(o) if o == "lfm2" else o for name, o in options.items()}
    with pytest.raises(ValueError, match=message):
        load(path, **options)


PATTERNS = [pattern for split in gguf_tokenizer._SPLITS.values() for pattern in split] + [
    # GPT-4's, o200k's, Kimi-K2's, SuperBPE's, Aya's and K-EXAONE's, as far as they repeat.
    r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s+(?!\S)|\s+",
    r"[\p{Lu}\p{Lt}]*[\p{Ll}\p{M}]+(?i:'s|'t|'re)?| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+",
    r"[\p{Han}]+|[\p{Lu}\p{M}&&[^\p{Han}]]*[\p{Ll}&&[^\p{Han}]]+(?i:'s|'t)?",
    r"(?=(\d{3})+(?!\d))", r"\d{1,3}(?=(?:\d{3})*\b)", r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\s+",
    "(?:ab)?", "(a{1,3}b)?", "(a+b)?", "(?:\r?\n)+", "[(a+)+]", r"\(a+\)+", "[^]a+(]*",
]  # fmt: skip
ENDLESS = [
    "(x+x+)+y", "(x*)*", "(x+){2,}", "((x+)y){5}", "(?:(?:a|b*)c)*", "(x{1,50}){1,50}",
    r"(?<n>\p{L}+)+", r"([\p{L}&&[^(]]x+)+", r"(\(x+)*",
]  # fmt: skip


def test_patterns_of_real_tokenizers_are_used_and_those_that_may_never_end_are_not():
    assert [pattern for pattern in PATTERNS if tokenizer_bounds.is_endless(pattern)] == []
    assert [pattern for pattern in ENDLESS if not tokenizer_bounds.is_endless(pattern)] == []


def test_normalizers_of_real_tokenizers_are_used():
    """Llama's, ALBERT's and BERT's."""
    albert = [
        replaces("``", '"'), replaces("''", '"'), {"type": "NFKD"}, {"type": "StripAccents"},
        {"type": "Lowercase"}, replaces(" {2,}", " ", "Regex"),
    ]  # fmt: skip
    llama = [{"type": "Prepend", "prepend": "▁"}, replaces(" ", "▁")]
    words = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    for steps in (llama, albert, [{"type": "BertNormalizer"}]):
        normalizer = in_turn(steps, "normalizers")
        tokenizer_bounds.check_steps(
            {"normalizer": normalizer, "pre_tokenizer": words, "decoder": words}
        )


def test_a_tokenizer_that_fails_costs_one_request(folder, monkeypatch):
    """The library's panic, which is no Exception, would end the thread, and nobody would answer."""
    steps_of(pre_tokenizer=splits("(x|xx)+y|[^x]"))(path := folder("llama"))
    engine, text = load(path), "x" * 60
    tokenizer, said = engine.target.tokenizer, "the tokenizer failed: .*retry-limit"
    for tokens_of in (tokenize, tokenize_plain):
        with pytest.raises(RuntimeError, match=said) as caught:
            tokens_of(text, tokenizer, 100)
    with application(engine, Options(str(path))) as client:
        answer = client.post("/generate", json={"prompt": text})
        assert answer.status_code == 500 and re.search(said, answer.json["error"]["message"])
        assert client.post("/generate", json={"prompt": "ab", "max_tokens": 2}).status_code == 200
        broken = Mock(decode=Mock(side_effect=caught.value.__cause__))
        monkeypatch.setattr(tokenizer, "_tokenizer", broken)  # also in the engine's thread
        fields = {"prompt": [5, 6], "max_tokens": 4, "stop": "a"}
        assert client.post("/generate", json=fields).status_code == 500
        monkeypatch.undo()
        assert client.post("/generate", json=fields).status_code == 200


def test_tied_weights_are_not_missing_and_those_that_nobody_reads_are_told(folder, caplog):
    path = folder("gpt2")
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    assert load(path).target.num_weights and "not used" not in caplog.text
    changed(path := folder("llama"), num_hidden_layers=3)
    load(path)
    assert "not used: 9 weights, first model.layers.3." in caplog.text


def test_a_generation_config_may_be_missing_and_must_be_readable(folder):
    """As it names the tokens that end a text."""
    path = folder("llama")
    for content in ("{", "[1]", '{"eos_token_id": "x"}', '{"eos_token_id": [1, null]}'):
        (path / "generation_config.json").write_text(content)
        with pytest.raises(StartError, match="generation_config.json"):
            load(path)
    (path / "generation_config.json").unlink()
    assert load(path).eos_ids


# ------------------------------------------------------------------------------------- files
def is_mapped(folder):
    return f"{folder}/" in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("kernels", [True, False])
def test_no_weights_lie_in_a_mapped_file(tmp_path, kernels):
    """Those of the target, and those of its MTP head; an engine that is kept keeps its files.

    Where a mapped file changes, answers do; where it shrinks, the process ends.
    """
    path = shutil.copytree(TARGET, tmp_path / "float32")
    floats = {k: w.float() for k, w in load_file(path / "model.safetensors").items()}
    save_file(floats, path / "model.safetensors")  # need no conversion, and may stay there
    engine = load(path, drafter="mtp", kernels=kernels)
    assert engine.default_drafter == "mtp" and not is_mapped(path)


@pytest.mark.parametrize(("name", "dtype", "pickled"), [
    ("gpt2", "float32", False),  # its embeddings are tied
    ("gpt2", "float32", True),
    ("apertus", "float32", False),  # has buffers among its weights
    ("llama", "bfloat16", False),
])  # fmt: skip
def test_weights_of_any_kind_are_read_into_memory(folder, name, dtype, pickled):
    path = folder(name, dtype=dtype)
    file, kind = path / "model.safetensors", getattr(torch, dtype)
    weights = {key: weight.to(kind, copy=True) for key, weight in load_file(file).items()}
    if pickled:
        file.unlink()
        torch.save(weights, path / "pytorch_model.bin")
    else:
        save_file(weights, file, metadata={"format": "pt"})
    model = loading.load_pretrained(str(path), Options(dtype=dtype, allow_pickle=pickled)).model
    assert not is_mapped(path) and model.dtype == kind
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert (embedding.weight is head.weight) == (name == "gpt2")


@pytest.mark.parametrize("pickled", [False, True])
def test_an_index_names_files_of_its_own_folder_only(folder, tmp_path, pickled):
    """A file of that name may be a link, as it is in the hub's cache."""
    path, elsewhere = folder("llama"), tmp_path / "blob"
    weights, options = load_file(path / "model.safetensors"), {"allow_pickle": pickled}
    (path / "model.safetensors").unlink()
    (path / "part").mkdir()
    torch.save(weights, elsewhere) if pickled else save_file(weights, elsewhere, {"format": "pt"})
    kind, ending = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    index = f"{kind}.{ending}.index.json"

    def name(shard, **changes):
        content = {"metadata": {}, "weight_map": dict.fromkeys(weights, str(shard))} | changes
        (path / index).write_text(json.dumps(content))

    (path / "part" / f"x.{ending}").symlink_to(elsewhere)
    name(f"part/x.{ending}")
    assert load(path, **options)
    for shard in (elsewhere, "../blob", "part/../../blob"):
        name(shard)
        with pytest.raises(StartError, match=f"llama: {index} names .*, which is outside its"):
            load(path, **options)
        if not pickled:  # heads are read another way
            with pytest.raises(ValueError, match=f"{index} names .*, which is outside"):
                read_folder(str(path), allow_pickle=False)
    for changes in ({"metadata": None}, {"weight_map": ["x"]}, {"weight_map": {"x": 1}}):
        name("x", **changes)
        with pytest.raises(StartError, match=f"llama: {index} needs a weight_map and meta"):
            load(path, **options)


# ----------------------------------------------------------------------------------- windows
# Loading compares with transformers' logits: texts of 320 tokens, alone and beside another one. Who
# has windows is seen by test_cache.py and test_families.py.
def test_chunks_are_served_up_to_the_first_one_s_end(folder):
    path = folder("llama4_text", attention_chunk_size=64)
    assert load(path).target.max_length == 64
    with pytest.raises(StartError, match="attends in chunks.* give --max-model-len 64 or"):
        load(path, max_model_len=65)


def test_layers_that_count_positions_themselves_do_so_for_no_neighbour(folder):
    """They count from the longest text on, and scale queries from floor_scale on."""
    path = folder("llama4_text", floor_scale=40, attention_chunk_size=64, no_rope_layers=[0] * 4)
    target = load(path).target
    assert target.max_length == 39
    with pytest.raises(StartError, match="must be from 2 to 39"):
        load(path, max_model_len=40)
    alone = logits_of(target, [5, 6, 7])
    with open_rows(target, [*range(30)], [5]) as (long, short):
        draft, after = [*range(8)], [6, 7]
        beside = target.forward([long, short], [draft, after], [8, 2]).logits[1]
    assert torch.equal(beside[-1], alone[-1])


def test_a_rule_that_leaves_out_what_came_before_is_no_window():
    for rule in (lambda b, h, q, k: k < q, lambda b, h, q, k: (k <= q) & (k != 3)):
        with pytest.raises(UnsupportedModel, match="from left to right"):
            window_of(rule, 200)


# --------------------------------------------------------------------------------- rotations
FAR = [2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 9.5]
LONGROPE = {
    "short_factor": [1 + i / 10 for i in range(8)], "long_factor": FAR, "factor": 6.0,
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
}  # fmt: skip


def assert_fixed(path, text, length, **fixed):
    """Beside a neighbour, too, a text has these rotations where contexts have this length."""
    target = load(path, max_model_len=length).target
    alone = logits_of(target, text)
    with open_rows(target, tokens(length - 3), text[:-5]) as rows:
        beside = target.forward(rows, [[7], text[-5:]], [1, 5]).logits[1]
    assert is_near(beside, alone[-5:])
    assert is_near(alone, plain_logits(path, text, rope_parameters=fixed))
    return target


@pytest.mark.parametrize(("name", "extra", "fixed"), [
    ("phi3", {}, {"short_factor": FAR}),
    ("phimoe", {"short_mscale": 1.2, "long_mscale": 1.5}, {"short_mscale": 1.5}),
])  # fmt: skip
def test_longrope_s_factors_do_not_depend_on_neighbours(folder, name, extra, fixed):
    """They are those for long texts where --max-model-len is as long, else those for short ones."""
    path, text, rope = folder(name), tokens(60), LONGROPE | extra
    changed(path, rope_parameters=rope, original_max_position_embeddings=64)
    target = assert_fixed(path, text, 384, **rope | fixed)
    if name == "phi3":
        usual = plain_logits(path, text)
        assert not is_near(logits_of(target, text), usual)
        long = tokens(100)  # across the border transformers has the same factors
        assert is_near(logits_of(target, long), plain_logits(path, long))
        short = load(path).target
        assert short.max_length == 64 and is_near(logits_of(short, text), usual)


def test_dynamic_ntk_is_fixed_by_the_longest_text(folder):
    path, text, longest = folder("llama"), tokens(60), tokens(192)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    changed(path, rope_parameters=rope, max_position_embeddings=96)
    with pytest.raises(StartError, match="must be from 2 to 192"):
        load(path, max_model_len=193)
    short, base = load(path).target, 1e4 * (2 * 192 / 96 - 1) ** (16 / 14)
    assert short.max_length == 96 and is_near(logits_of(short, text), plain_logits(path, text))
    target = assert_fixed(path, text, 192, rope_type="default", rope_theta=base)
    assert is_near(logits_of(target, longest), plain_logits(path, longest))


# ------------------------------------------------------------------------------------- plugs
NEEDED = [  # without which a family would be served wrongly
    ("gpt_neo", {}, "runtime/models/gpt_neo.py"),
    ("lfm2", {}, "runtime/cache/states.py"),
    ("phi3", {"rope_parameters": LONGROPE}, "runtime/models/rope.py"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
     "runtime/models/rope.py"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "file"), NEEDED)
def test_a_model_that_needs_a_deleted_file_is_refused(folder, monkeypatch, name, changes, file):
    changed(path := folder(name), **changes)
    monkeypatch.setitem(sys.modules, file.removesuffix(".py").replace("/", "."), None)
    with pytest.raises(StartError, match=rf"\({name}\) needs {file}, which is not there"):
        load(path)


# -------------------------------------------------------------------------------- comparison
@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_a_model_that_answers_otherwise_than_transformers_is_not_served(folder, name, monkeypatch):
    """A window that is one token too narrow is enough, in a mixture of experts as well."""
    path = folder(name)

    def narrow(model, length):
        seen = examine(model, length)
        windows = {kind: window and window - 1 for kind, window in seen.windows.items()}
        return replace(seen, windows=windows)

    monkeypatch.setattr(loading, "examine", narrow)
    reason = rf"\({name}\) cannot be served: its logits are .* away from transformers' own"
    with pytest.raises(StartError, match=reason):
        load(path, kernels=name == "mistral")


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_one_token_may_choose_another_expert(folder, name):
    """A rounding does that to a mixture; where there are no experts it is a fault."""
    target = core.load_model(str(folder(name)), Options())
    expected = reference.Reference.of(target)
    with torch.inference_mode():
        expected.logits[0][100] += 1
    if name == "mixtral":
        return expected.check(target)
    with pytest.raises(StartError, match="its logits are 1 away"):
        expected.check(target)


@needs_compiler
@pytest.mark.parametrize("is_file", [False, True])
def test_a_model_is_compared_once_for_its_weights_and_code(folder, tmp_path, monkeypatch, is_file):
    """A further start compares neither blocks nor logits. Code of a folder may change unseen."""

    def is_compared(**options):
        return core.load_model(str(path), Options(**options)).reference is not None

    if is_file:
        write(path := tmp_path / "a.gguf", TINY, Q8_0)
    else:
        path = folder("llama")
    agrees = []
    monkeypatch.setattr(reading, "_agrees", reading._agrees)  # it is put back behind the test
    before(reading, "_agrees", lambda *_: agrees.append(1))
    load(path)
    assert agrees and not is_compared()
    agrees.clear()
    load(path)
    assert not agrees
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    for name in ("08_speculative_decoding.py", "runtime/kernels/c/a.c", "runtime/models/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
        assert is_compared()
        load(path)
        assert not is_compared()
    assert is_compared(dtype="bfloat16")
    if not is_file:
        assert is_compared(kernels=False)
        with monkeypatch.context() as patched:
            patched.setattr(reference, "_FOREIGN", "transformers")
            assert is_compared()
        with monkeypatch.context() as patched:  # there is no home
            patched.setattr(reference, "cache_folder", Mock(side_effect=RuntimeError))
            assert is_compared()
        changed_norm = "model.norm.weight"
        holding(changed_norm, lambda w: w[changed_norm] + 1)(path)
        assert is_compared()


def test_a_forward_that_fails_is_told_in_a_sentence(folder, monkeypatch):
    path = folder("llama")
    monkeypatch.setattr("runtime.kernels.report_of", lambda *_: 1 / 0)
    for kernels, hint in ((True, r" \(--no-kernels may help\)"), (False, "")):
        reason = rf"\(llama\) cannot be run .*ZeroDivisionError: division by zero{hint}$"
        with pytest.raises(StartError, match=reason):
            load(path, kernels=kernels)


@pytest.mark.slow
def test_torch_s_compiler_is_imported_only_when_it_is_asked_for():
    code = """
import sys
import runtime.models.startup
import torch
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained("demo_models/target")(torch.tensor([[1]]))
assert not {"torch._dynamo.convert_frame", "torch.distributed.tensor"} & sys.modules.keys()
assert torch.distributed.is_available()
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
assert "torch._dynamo.convert_frame" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.skipif(not hasattr(CDLL(None), "mallinfo2"), reason="asks glibc")
def test_words_that_nobody_has_sent_before_do_not_pile_up(demo_engine):
    """Of 250 letters each; a thousand of them are kept."""

    class Info(Structure):
        _fields_ = [(name, c_size_t) for name in "arena o s h hblkhd u f uordblks free k".split()]

    random, ask, in_use = Random(0), CDLL(None).mallinfo2, []
    ask.restype = Info
    for _ in range(2):
        for _ in range(1500):
            demo_engine.target.tokenizer("".join(random.choices("abcdefgh", k=250)))
        info = ask()
        in_use.append(info.uordblks + info.hblkhd)
    assert in_use[1] - in_use[0] < 2 << 20  # 12 MiB if all are kept


def test_special_tokens_are_left_out_of_the_texts(folder):
    changed(path := folder("llama"), image_token_id=7, eos_token_id=[3])
    (text,) = reference.random_texts(core.load_model(str(path), Options()), [50_000])
    assert {1, 2, 4, 5, 6, 8} <= set(text) and not {0, 3, 7} & set(text)


def test_the_embedded_draft_model_is_compared(monkeypatch):
    """Both models are; the tests of the embedded ones would not notice if none were."""
    seen = []
    monkeypatch.setattr(reference.Reference, "check", lambda self, cached: seen.append(cached.name))
    monkeypatch.setattr("server.warming.warm_up", lambda engine: None)
    core.load_engine(Options(model="embedded"))
    assert seen == ["embedded", str(ROOT / "demo_models" / "draft")]


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3"])
def test_what_came_with_a_target_may_be_gone(drafter, tiny_folder, tmp_path, monkeypatch, caplog):
    """The server goes on without it, unless the command line names it, such as an empty folder."""
    folder, places = str(tiny_folder("llama")), {drafter: "/nowhere/at/all"}
    monkeypatch.setattr(Options, "model_of", lambda _, name: places.get(name))
    engine = assemble(Options(model=folder))
    assert "ngram" in engine.pool.drafters and drafter not in engine.pool.drafters
    (line,) = [message for message in caplog.messages if drafter in message]
    assert line.startswith(f"going on without {drafter}: ") and "\n" not in line
    monkeypatch.undo()
    with pytest.raises(ValueError, match=str(tmp_path)):
        assemble(Options(model=folder, **{drafter: str(tmp_path)}))


@pytest.mark.parametrize("part", ["mtp", "eagle3"])
def test_smollm2_s_heads_lie_in_the_repository_without_its_weights(part):
    entry, options = catalogue.CATALOGUE["smollm2"], Options(model="smollm2")
    folder = options.model_of(part)
    assert folder == getattr(entry, part) and part not in options.for_drafters["named"]
    content, weights = read_folder(folder, allow_pickle=False)
    assert content.get("transformer_layer_config", content)["hidden_size"] == 576
    assert int(weights["t2d"].sum()) == 10_240
    assert all(weight.isfinite().all() for weight in weights.values())
    assert part == "mtp" or HeadConfig.of(content, 30).verifier == entry.origin


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(CDLL(None), "mallinfo2"), reason="asks glibc")
def test_weights_that_are_packed_one_by_one_go_back_to_the_system(tmp_path):
    """Else a model lies in memory twice while it is packed: glibc's heap keeps what is freed."""
    save_file({"weight": torch.ones(1024, 1024)}, tmp_path / "weights.safetensors")
    code = """
import sys, torch
from safetensors.torch import load_file
from runtime.models.files import unmap_weights

def anonymous():
    return int(next(line for line in open("/proc/self/status") if "RssAnon" in line).split()[1])

torch.ones(1 << 22)  # once it is free, glibc has smaller blocks in its heap
layers = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(8))
for layer in layers:
    layer.weight = torch.nn.Parameter(load_file(sys.argv[1])["weight"])
unmap_weights(layers)
before = anonymous()
for layer in layers[1::2]:
    layer.weight = None
assert before - anonymous() > 12 << 10, (before, anonymous())  # KiB
"""
    file = str(tmp_path / "weights.safetensors")
    subprocess.run([sys.executable, "-c", code, file], check=True, cwd=ROOT)


def test_watching_leaves_no_trace(folder):
    model = AutoModelForCausalLM.from_pretrained(folder("gemma2"))
    makers = dict(ALL_MASK_ATTENTION_FUNCTIONS)
    examine(model, 100)
    assert dict(ALL_MASK_ATTENTION_FUNCTIONS) == makers
    assert not any(module._forward_pre_hooks for module in model.modules())
