"""A GGUF file's tokenizer makes of each text the tokens that llama.cpp's rules say, or is refused.

The vocabularies are tiny and made here. Their tokens are worked out by hand, from the rules in
llama.cpp's src/llama-vocab.cpp, and named by their texts. One test, marked `network`, fetches
llama.cpp's own examples: 602 texts of 13 vocabularies.
"""

import subprocess
import sys
import tarfile

import gguf
import pytest
from gguf_files import add_keys, finish
from transformers.convert_slow_tokenizer import bytes_to_unicode

from runtime.models import gguf_tokenizer
from runtime.models.chat import chat_ids
from runtime.models.fim import tokenize_plain
from runtime.models.gguf_file import BadFile, GgufFile
from runtime.models.gguf_tokenizer import tokenizer_of
from runtime.models.prompts import Conversation, prompt_ids
from runtime.models.token_bytes import bytes_of
from runtime.sequence import Sequence
from runtime.text import TextStream
from runtime.values import Judgement, Request
from server.trace import word_of

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ALPHABET = list(bytes_to_unicode().values())
MERGES = ["s a", "t a", "l a", "Ġ a", "a b", "3 3", "33 3", "Ġ 3", "Ġ Â", "ĠÂ ½", "Ġ Ġ"]
NAMED = {"bos_token_id": 1, "eos_token_id": 2}
TEMPLATE = "{{ bos_token }}{{ messages[0].content }}"


@pytest.fixture(autouse=True)
def none_made_before(monkeypatch):
    monkeypatch.setattr(gguf_tokenizer, "_last", [])


def written(path, words, facts, architecture="llama"):
    """A file with nothing but a tokenizer: special tokens, `words`, and keys of these values."""
    special = ["<unk>", "<s>", "</s>", "<｜User｜>", "<tool>", "    ", "   "]
    tokens = [*special, *words]
    kinds = [2, 3, 3, 3, 4, 4, 4] + [6 if word in BYTES else 1 for word in words]
    if "scores" in facts:
        facts = facts | {"scores": [-float(i) for i in range(len(tokens))]}
    writer = gguf.GGUFWriter(path, architecture)
    add_keys(writer, "tokenizer", {"chat_template": facts.pop("chat_template", None)})
    add_keys(writer, "tokenizer.ggml", {"tokens": tokens, "token_type": kinds} | facts)
    finish(writer, (), ())
    return GgufFile(path)


def pieces(folder, words=(), architecture="llama", **facts):
    """A file of characters that merge: the earlier word first."""
    words = [*"▁Helo123abé\n", "▁H", "el", "lo", "▁▁", "▁Hel", *words]
    facts = {"model": "llama", "scores": True} | NAMED | facts
    return written(folder / "a.gguf", [*BYTES, *words], facts, architecture)


def byte_level(folder, pre, **facts):
    """A file of bytes that merge. No merge makes the token abc."""
    words = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "abc"]
    facts = {"model": "gpt2", "pre": pre, "merges": MERGES} | NAMED | facts
    return written(folder / "a.gguf", words, facts)


def tokens_of(file, text):
    """The tokens of a text, and whether they are streamed as the text that they decode to."""
    tokenizer = tokenizer_of(file)
    ids = prompt_ids(text, tokenizer, 100)
    stream = TextStream(tokenizer)
    for token in ids:
        stream.push(token, "bonus")
        stream.text  # noqa: B018 (decodes what is there so far)
    stream.finish()
    assert stream.text == tokenizer.decode(ids, skip_special_tokens=True)
    return [file.metadata["tokenizer.ggml.tokens"][i] for i in ids]


def test_a_text_goes_on_behind_its_prompt_and_has_no_end_of_text(tmp_path):
    """Alone, its first word would lose the space before it. An answer in a chat begins anew."""
    tokenizer = tokenizer_of(pieces(tmp_path))
    prompt, (*_, first, second, end) = (tokenizer(t)["input_ids"] for t in ("Hello", "Hello1"))
    new = first, second  # and an end of text that has letters
    judged = [Judgement(token, "bonus") for token in (*new, end)]
    for given, expected in ((prompt, " Hello"), (Conversation(prompt), "Hello")):
        sequence = Sequence(Request(given, 9), 0, tokenizer)
        assert sequence.append(judged, {end}) == 3
        assert (sequence.text.text, sequence.finish_reason) == (expected, "stop")
    assert [word_of(token, tokenizer) for token in (*new, end)] == [" Hel", "lo", "1"]
    assert [bytes_of(token, tokenizer) for token in new] == [b" Hel", b"lo"]


PIECES = [  # what a file says, a text, and its tokens with "|" between them
    ({}, "Hello", "<s>|▁Hel|lo"),  # a space is put before every text
    ({}, " Hello", "<s>|▁|▁Hel|lo"),
    ({}, "  Hello", "<s>|▁▁|▁Hel|lo"),
    ({}, "é日\0", "<s>|▁|é|<0xE6>|<0x97>|<0xA5>|<0x00>"),
    ({}, "a<s>Hello", "<s>|▁|a|<s>|▁Hel|lo"),  # and behind what is never cut
    ({}, "<s> Hello</s>\n", "<s>|<s>|▁|▁Hel|lo|</s>|▁|\n"),
    ({}, "<｜User｜><tool>a", "<s>|<｜User｜>|<tool>|▁|a"),
    ({"add_space_prefix": False}, "a<｜User｜> Hello", "<s>|a|<｜User｜>|▁Hel|lo"),
    ({"architecture": "gemma3"}, "a<｜User｜> Hello", "<s>|a|<｜User｜>|▁Hel|lo"),
    ({"add_bos_token": False}, "a<｜User｜> Hello", "▁|a|<｜User｜>|▁|▁Hel|lo"),
    ({"add_eos_token": True}, "a<｜User｜> Hello", "<s>|▁|a|<｜User｜>|▁|▁Hel|lo|</s>"),
    # It takes the space behind a special token.
    ({"architecture": "phi3"}, "a<｜User｜> Hello", "<s>|▁|a|<｜User｜>|▁Hel|lo"),
]
WORDS = [  # a rule that a file names, a text, and its tokens
    ("llama-bpe", "abc", "<s>|abc"),  # a word that is a token stays whole; BOS by default
    ("qwen2", "abc", "ab|c"),
    ("gpt-2", "  a  ", "Ġ|Ġa|ĠĠ"),
    ("gpt-2", "3333 3", "33|33|Ġ3"),
    ("gpt-2", "'sab'tab'llab", "'|s|ab|'|t|ab|'|l|l|ab"),
    ("smollm", "3333 3", "3|3|3|3|Ġ|3"),
    ("falcon", "3333 3", "333|3|Ġ3"),
    ("falcon", "a`=a", "a|`|=|a"),
    ("gpt-2", "a ½", "a|ĠÂ½"),
    ("deepseek-llm", "a ½33", "a|Ġ|Â|½|33"),
    ("deepseek-coder", "a ½33", "a|Ġ|Â|½|3|3"),
    ("qwen2", "a<｜User｜><tool> a", "a|<｜User｜>|<tool>|Ġa"),
    ("mpt", "a    b", "a|    |b"),  # runs of spaces that are user-defined
    ("gpt-2", "        a", "    |    |a"),
]


@pytest.mark.parametrize(
    ("make", "facts", "text", "tokens"),
    [(pieces, *each) for each in PIECES]
    + [(byte_level, {"pre": pre}, text, tokens) for pre, text, tokens in WORDS],
)
def test_a_text_has_the_tokens_that_a_file_s_rules_say(tmp_path, make, facts, text, tokens):
    assert tokens_of(make(tmp_path, **facts), text) == tokens.split("|")


def test_a_chat_template_s_bos_is_the_only_one(tmp_path):
    file = byte_level(tmp_path, "llama-bpe", chat_template=TEMPLATE, eot_token_id=3)
    tokenizer = tokenizer_of(file)
    assert chat_ids("a", tokenizer, 100) == prompt_ids("a", tokenizer, 100)
    assert chat_ids("a", tokenizer, 100)[:2].count(tokenizer.bos_token_id) == 1
    assert tokenizer.turn_ends == {2, 3}  # </s>, by its name


def test_an_answer_ends_at_each_token_that_ends_a_turn(tmp_path):
    """Files name one or two of them. A padding token that is not there matters to nobody."""
    more = {"eos_token_ids": [2, 5], "padding_token_id": 9999, "add_bos_token": True}
    tokenizer = tokenizer_of(pieces(tmp_path, words=["<|end|>", "<", "|", "n", "d", ">"], **more))
    assert tokenizer.turn_ends == {2, 5, tokenizer.convert_tokens_to_ids("<|end|>")}
    assert tokenizer.pad_token is None


@pytest.mark.parametrize("name", ["bos", "eos", "unknown", "padding"])
def test_an_ordinary_token_that_a_key_names_stays_one(tmp_path, name):
    """Converters copy ids of a config that mean nothing. An end still ends an answer."""
    (file := byte_level(tmp_path, "qwen2")).metadata[f"tokenizer.ggml.{name}_token_id"] = 39
    word, tokenizer = file.metadata["tokenizer.ggml.tokens"][39], tokenizer_of(file)
    assert word in ALPHABET and tokens_of(file, f"{word}a") == [word, "a"]
    ids = prompt_ids(f"{word}a{word}", tokenizer, 100)
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"{word}a{word}"
    assert (39 in tokenizer.turn_ends) == (name == "eos")


def test_a_text_in_which_special_tokens_are_text_has_the_user_defined_ones(tmp_path):
    """As llama.cpp reads it, which takes the tokens of infill for special ones in any case."""
    tokenizer = tokenizer_of(byte_level(tmp_path, "mpt"))
    ids = tokenize_plain("a    b</s><tool>", tokenizer, 100)
    words = tokenizer.convert_ids_to_tokens(ids)
    assert words[:3] == ["a", "    ", "b"] and words[-1] == "<tool>" and "</s>" not in words
    named = {f"fim_{part}_token_id": i for part, i in (("pre", 4), ("suf", 2), ("mid", 3))}
    tokenizer = tokenizer_of(byte_level(tmp_path, "mpt", **named))
    ids = tokenize_plain("a    b<tool>", tokenizer, 100)
    words = tokenizer.convert_ids_to_tokens(ids)
    assert words[1] == "    " and "<tool>" not in words


NOT_PIECES = [
    ({"words": ["日a"]}, "has words with '日'"),
    ({"words": ["el"]}, "has a token twice"),
    ({"model": "t5"}, "of the kind 't5'"),
    ({"add_bos_token": 1}, "'add_bos_token' has a wrong type"),
    ({"bos_token_id": 9999}, "bos_token_id is 9999, which is no token's id"),
    ({"remove_extra_whitespaces": True}, "'remove_extra_whitespaces', which is not supported"),
    ({"precompiled_charsmap": [1]}, "'precompiled_charsmap', which is not supported"),
    ({"escape_whitespaces": True}, "'escape_whitespaces', which is not supported"),
    ({"token_type": [1]}, "not as many scores and types as tokens"),
]
NOT_BYTES = [
    ({"pre": "martian\n"}, r"is 'martian\\n', which is unknown"),
    ({"pre": "kimi-k2"}, "is 'kimi-k2', which is unknown"),
    ({"pre": "default"}, "is 'default', which is unknown"),
    ({"pre": None}, "is None, which is unknown"),
    ({"merges": None}, "has no merges"),
    ({"add_bos_token": True, "bos_token_id": None}, "adds BOS, and has no bos_token_id"),
    ({"add_space_prefix": True}, "add_space_prefix is not supported"),
    ({"add_bos_token": True, "bos_token_id": 39}, "adds an ordinary token as BOS"),
]


@pytest.mark.parametrize(
    ("make", "facts", "reason"),
    [(pieces, *each) for each in NOT_PIECES] + [(byte_level, *each) for each in NOT_BYTES],
)
def test_a_tokenizer_that_is_not_surely_right_is_refused(tmp_path, make, facts, reason):
    file = make(tmp_path, **({"pre": "gpt-2"} if make is byte_level else {}) | facts)
    with pytest.raises(BadFile, match=reason) as error:
        tokenizer_of(file)
    assert "\n" not in str(error.value)


def test_a_tokenizer_without_an_unknown_token_works_or_is_refused(tmp_path, monkeypatch):
    """What has no token is bytes. Without these, any text could fail once the server is ready."""
    tokens = tokens_of(pieces(tmp_path, unknown_token_id=None), "日")
    assert tokens[-3:] == ["<0xE6>", "<0x97>", "<0xA5>"]
    monkeypatch.setitem(globals(), "BYTES", BYTES[:-1])
    with pytest.raises(BadFile, match="lacks 1 of the bytes, first <0xFF>"):
        tokenizer_of(pieces(tmp_path, unknown_token_id=None))


def test_a_tokenizer_is_tried_before_it_is_served(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ALPHABET", [each for each in ALPHABET if each != "ð"])
    with pytest.raises(BadFile, match="its tokenizer makes .* of '👩"):
        tokenizer_of(byte_level(tmp_path, "gpt-2"))


@pytest.mark.network
def test_llama_cpp_s_own_examples_are_equal(tmp_path):
    version = "llama-cpp-python==0.3.36"
    fetch = "pip", "download", "--no-deps", "--no-binary", ":all:", "-d", str(tmp_path), version
    subprocess.run([sys.executable, "-m", *fetch], check=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as source:
        source.extractall(tmp_path, filter="data")
    num_equal = 0
    for texts in tmp_path.glob("*/vendor/llama.cpp/models/*.gguf.inp"):
        vocabulary, content = texts.with_suffix(""), texts.read_bytes().decode()
        try:
            tokenizer = tokenizer_of(GgufFile(vocabulary))
        except BadFile:  # bert's and gemma-4's kinds
            continue
        lines = vocabulary.with_suffix(".gguf.out").read_text().splitlines()
        for text, ids in zip(content.split("\n__ggml_vocab_test__\n"), lines, strict=False):
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokens == list(map(int, ids.split())), (vocabulary.name, text)
            assert tokenize_plain(text, tokenizer, 9999) == tokens, (vocabulary.name, text)
            num_equal += 1
    assert num_equal == 602
