"""Real files: a target and a draft of one family, as people have them.

Marked `network`, as they have to be fetched first (1.6 GB, and SmolLM2), as `--model qwen2.5-coder`
does it. Or

    PAIR=FOLDER python -m pytest -n0 -m network tests/test_pair.py

where FOLDER holds target.gguf (Qwen2.5-Coder-1.5B-Instruct) and draft.gguf (0.5B), in Q4_K_M.
"""

import os
from argparse import Namespace
from pathlib import Path

import pytest
import speculative_decoding as core
import torch
from conftest import assert_lossless

from benchmarks.pair import own_memory
from benchmarks.servers import FORGETFUL, OURS, started
from models import gguf_hub
from models.catalogue import PAIRS
from models.prompts import chat_ids
from serving.options import Options

pytestmark = pytest.mark.network
CODE = (
    "Write a Python class for a bank account with deposit and withdraw.",
    "Write a Python function that checks whether the brackets in a string are balanced.",
    "Write a Python class for a binary search tree with insert, delete and in-order traversal.",
)
ONLY = " Answer with code only."
TALK = "Why do leaves fall in autumn?"


@pytest.fixture(scope="module")
def pair():
    """Both files."""
    if "PAIR" in os.environ:
        return [str(Path(os.environ["PAIR"]) / f"{name}.gguf") for name in ("target", "draft")]
    return [gguf_hub.fetch(name) for name in PAIRS["qwen2.5-coder"]]


@pytest.fixture(scope="module")
def engine(pair):
    """The pair, served as it is, its drafts of a fixed length."""
    target, draft = pair
    return core.load_engine(Options(model=target, draft_model=draft, fixed_k=True))


def ids_of(engine, text):
    return chat_ids(text, engine.target.tokenizer, engine.target.max_length)


def test_both_models_are_whole_forwards_in_c_and_exact_by_construction(engine):
    for model in (engine.target, engine.draft_model):
        assert model.compiled.is_compiled and model.compiled.report().is_exact
    forms = {p.form for b in engine.target.compiled.decoder.blocks for own in b.matrices.values()
             for p in own}  # fmt: skip
    assert forms == {"Q4K", "Q6K"}


def test_a_server_s_memory_is_the_files_and_little_more(pair):
    """Beside them there is Python with torch; nothing was unpacked."""
    target, draft = pair
    with started([*OURS, *FORGETFUL, "--model", target, "--draft-model", draft]) as server:
        memory = own_memory(server, Namespace(target=target, draft=draft))
    assert memory["of_files"] <= 1.2 and memory["most_of_files"] <= 1.35, memory


def test_a_batched_verify_gives_what_single_steps_give(engine):
    target, text = engine.target, ids_of(engine, CODE[0])
    rows = [target.cache.open_row() for _ in range(2)]
    try:
        together = target.forward([rows[0]], [text], [6]).logits[0]
        target.forward([rows[1]], [text[:-6]], [1])
        alone = [target.forward([rows[1]], [[i]], [1]).logits[0] for i in text[-6:]]
        assert torch.equal(together, torch.cat(alone))
    finally:
        for row in rows:
            target.cache.close_row(row)


def test_a_draft_of_the_family_is_mostly_right_on_code(engine):
    """Nine tokens of ten, each behind the target's own text, over fifty passes and more."""
    drafted = accepted = num_passes = 0
    for text in CODE:
        prompt = ids_of(engine, text + ONLY)
        sequence = assert_lossless(engine, prompt, 100, "draft_model", num_speculative_tokens=1)
        drafted += sequence.statistics.num_draft_tokens
        accepted += sequence.statistics.num_accepted_draft_tokens
        num_passes += sequence.num_steps
    assert num_passes >= 50 and accepted >= 0.9 * drafted, (num_passes, accepted / drafted)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_draft_goes_with_its_target_unpacked_as_well(pair, quantize):
    """A draft in four bits, and the target in bfloat16 or in eight bits."""
    target, draft = pair
    options = Options(
        model=target, draft_model=draft, fixed_k=True, dtype="bfloat16", quantize=quantize
    )
    engine = core.load_engine(options)
    sequence = assert_lossless(engine, ids_of(engine, CODE[0]), 40, "draft_model")
    assert sequence.statistics.num_accepted_draft_tokens > 20


def test_the_default_model_s_file_goes_with_its_head():
    engine = core.load_engine(Options(model="smollm2", dtype="packed", fixed_k=True))
    assert engine.target.compiled.decoder.blocks[0].matrices["qkv"][0].form == "Q4M"
    sequence = assert_lossless(engine, ids_of(engine, TALK), 60, "eagle3")
    assert not sequence.warnings
    assert sequence.statistics.num_accepted_draft_tokens > 5
