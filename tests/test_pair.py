"""A pair of real files, a target and a draft of one family, writes what plain decoding writes.

Nine drafted tokens of ten are accepted on code, and the files are not unpacked in memory. The tests
are marked `network`: `--model qwen2.5-coder` fetches the files first (1.6 GB, and SmolLM2). Or

    PAIR=FOLDER python -m pytest -n0 -m network tests/test_pair.py

where FOLDER holds target.gguf (Qwen2.5-Coder-1.5B-Instruct) and draft.gguf (0.5B), in Q4_K_M.
"""

import json
import os
import re
from argparse import Namespace
from pathlib import Path

import pytest
from conftest import ROOT, assert_lossless, load

from runtime.models import gguf_hub
from runtime.models.catalogue import PAIRS
from runtime.models.chat import chat_ids
from runtime.models.prompts import prompt_ids
from runtime.statistics import Statistics
from server.page.export import CHAT
from tools.pair import own_memory
from tools.servers import our_command, started

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
    if "PAIR" in os.environ:
        return [str(Path(os.environ["PAIR"]) / f"{name}.gguf") for name in ("target", "draft")]
    return [gguf_hub.fetch(name) for name in PAIRS["qwen2.5-coder"]]


def ids_of(engine, text):
    return chat_ids(text, engine.target.tokenizer, engine.target.max_length)


def test_a_draft_of_the_family_is_mostly_right_on_code(pair):
    """Nine tokens of ten, each behind the target's own text, over fifty passes and more."""
    target, draft = pair
    engine, total = load(target, drafter="draft_model", draft_model=draft), Statistics()
    for text in CODE:
        prompt = ids_of(engine, text + ONLY)
        s = assert_lossless(engine, prompt, 100, "draft_model", num_speculative_tokens=1)
        total += s.statistics
    assert total.target_passes >= 50 and total.draft_acceptance_rate >= 0.9, total


def test_a_server_s_memory_is_the_files_and_little_more(pair):
    """Beside them there is Python with torch; nothing was unpacked."""
    target, draft = pair
    with started(our_command(model=target, draft_model=draft)) as server:
        memory = own_memory(server, Namespace(target=target, draft=draft))
    assert memory["of_files"] <= 1.2 and memory["most_of_files"] <= 1.35, memory


def test_the_default_model_has_twice_the_tokens_a_pass_where_its_text_repeats():
    """What is looked up is a copying task's text, and README's, against a story."""
    engine = load("smollm2", drafter="ngram")
    (body,) = re.findall(r"/generate .* -d '(.*tick.*)'", (ROOT / "README.md").read_text("utf-8"))
    prompts = {role: ids_of(engine, text) for role, text in CHAT.items()}
    known = engine.target.tokenizer, engine.target.max_length
    prompts["README"] = prompt_ids(json.loads(body)["prompt"], *known)
    per_pass = {
        role: assert_lossless(engine, prompt, 48, "ngram").statistics.tokens_per_pass
        for role, prompt in prompts.items()
    }
    assert min(per_pass["copy"], per_pass["README"]) >= 2 * per_pass["new"], per_pass


def test_the_default_model_s_file_goes_with_its_head():
    engine = load("smollm2", drafter="eagle3", dtype="packed")
    assert engine.target.compiled.decoder.blocks[0].matrices["qkv"][0].form == "Q4M"
    sequence = assert_lossless(engine, ids_of(engine, TALK), 60, "eagle3")
    assert not sequence.warnings
    assert sequence.statistics.num_accepted_draft_tokens > 5
