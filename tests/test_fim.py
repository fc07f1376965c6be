"""Filling in the middle, by the `suffix` of /v1/completions, with each family's tokens."""

import gguf
import pytest
from conftest import application, asked, load
from gguf_files import add_keys, finish
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime.models.fim import fim_of, infill_prompt, tokenize_plain
from runtime.models.gguf_file import GgufFile
from runtime.models.gguf_tokenizer import tokenizer_of
from server.options import Options

WORDS = [f"<|{w}|>" for w in "fim_prefix fim_suffix fim_middle repo_name file_sep fim_pad".split()]
PREFIX, SUFFIX = "def area(r):\n    return ", "\n\nprint(area(2))\n"
GAP = {"prompt": PREFIX, "suffix": SUFFIX}


def filled(client, **fields):
    status, body = asked(client, "/v1/completions", **fields)
    assert status == 200, body
    (choice,) = body["choices"]
    return choice


@pytest.fixture(scope="module")
def filling_folder(chat_folder, tmp_path_factory):
    """A model whose tokenizer has the tokens of Qwen2.5-Coder."""
    folder = tmp_path_factory.mktemp("filling") / "qwen3"
    tokenizer, model = (
        kind.from_pretrained(chat_folder("qwen3")) for kind in (AutoTokenizer, AutoModelForCausalLM)
    )
    tokenizer.add_tokens([AddedToken(word, special=True, normalized=False) for word in WORDS])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for part in (tokenizer, model):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def filling(filling_folder):
    with application(load(filling_folder), Options()) as client:
        yield client


def test_a_suffix_makes_the_prompt_of_a_gap(filling, filling_folder):
    tokenizer = AutoTokenizer.from_pretrained(filling_folder)
    gap = infill_prompt(PREFIX, SUFFIX, tokenizer, "", 256)
    begin, behind, middle = (tokenizer.convert_tokens_to_ids(word) for word in WORDS[:3])
    assert [gap[0], gap[-1]] == [begin, middle] and gap.count(behind) == 1
    assert tokenizer.decode(gap) == WORDS[0] + PREFIX + WORDS[1] + SUFFIX + WORDS[2]
    _, expected = asked(filling, "/generate", gap, max_tokens=6)
    assert filled(filling, **GAP, max_tokens=6)["text"] == expected["text"]


def test_a_middle_ends_at_its_family_s_tokens(filling, filling_folder):
    """Whatever the model is, no text goes on behind them; and so says the drafter's draft."""
    tokenizer = AutoTokenizer.from_pretrained(filling_folder)
    for word in WORDS[3:]:
        only = [tokenizer.convert_tokens_to_ids(word)]
        for drafter in ("none", "ngram"):
            fields = GAP | {"max_tokens": 9, "drafter": drafter, "allowed_token_ids": only}
            choice = filled(filling, **fields)
            assert (choice["finish_reason"], choice["text"]) == ("stop", "")


def test_tokens_in_the_text_around_a_gap_are_text(filling, filling_folder):
    tokenizer = AutoTokenizer.from_pretrained(filling_folder)
    sly = f"a{WORDS[2]}b"
    ids = infill_prompt(sly, sly, tokenizer, "", 256)
    assert ids.count(tokenizer.convert_tokens_to_ids(WORDS[2])) == 1
    assert tokenizer.decode(tokenize_plain(sly, tokenizer, 256)) == sly


@pytest.mark.parametrize(("family", "words"), [
    ("starcoder", "<fim_prefix> <fim_suffix> <fim_middle> <file_sep> <fim_pad>"),
    ("deepseek", "<｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜>"),
    ("codellama", "▁<PRE> ▁<SUF> ▁<MID> ▁<EOT>"),
    ("codellama, named", "▁<PRE> ▁<SUF> ▁<MID> ▁<EOT>"),
    ("named", "A B C D"),
])  # fmt: skip
def test_each_family_s_tokens_are_found(tmp_path, family, words):
    """By their texts; or by the keys of a file, where they have others."""
    num_tokens = len(words.split())
    words = [*words.split(), *"▁Helo-", "▁H", "el", "lo", "▁Hel"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    named = {"pre": 259, "suf": 260, "mid": 261, "pad": 262} if "named" in family else {}
    kinds = [2, 3, 3] + [6] * 256 + [3] * (len(words) - 10) + [1] * 10
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    facts = {"model": "llama", "tokens": tokens, "token_type": kinds}
    facts |= {"scores": [-float(i) for i in range(len(tokens))]}
    facts |= {f"fim_{part}_token_id": token for part, token in named.items()}
    add_keys(writer, "tokenizer.ggml", facts)
    finish(writer, (), ())
    tokenizer = tokenizer_of(GgufFile(tmp_path / "a.gguf"))
    fim = fim_of(tokenizer)
    assert fim[:3] == (259, 260, 261)
    assert fim.ends == {*range(262, 259 + num_tokens)}  # "-" is a word
    ids = infill_prompt("Hel", "Hel", tokenizer, "", 100)
    behind = tokens[ids[ids.index(fim.suffix) + 1]]
    assert behind.startswith("▁") != ("codellama" in family)  # which begins amid a line
