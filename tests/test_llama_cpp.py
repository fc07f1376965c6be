"""llama.cpp's own routes, the tokenize family, and filling in the middle.

Texts are those of /generate, in the shapes that llama.cpp's and vLLM's clients read.
"""

import json
import shutil
from functools import partial

import gguf
import pytest
from conftest import TARGET
from gguf_files import add_keys, finish
from server import COLOURS, at_once, events_of, module_server, serving
from transformers import AutoTokenizer

from models.fim import File, Gap, fim_of, infill_prompt
from models.gguf_file import GgufFile
from models.gguf_tokenizer import tokenizer_of
from models.prompts import tokenize_plain
from serving.dialects.shapes import bytes_of

server = module_server("--fixed-k")
WORDS = [f"<|{w}|>" for w in "fim_prefix fim_suffix fim_middle repo_name file_sep fim_pad".split()]
PREFIX, SUFFIX = "def area(r):\n    return ", "\n\nprint(area(2))\n"


def told(server, path, **fields):
    status, body = server.post(path, **fields)
    assert status == 200, body
    return body


def chunks(server, path, **fields):
    """What a stream of llama.cpp says, which has no [DONE]."""
    status, _, data = server.call("POST", path, fields | {"stream": True})
    assert status == 200, data
    lines = [line for line in data.decode().split("\n\n") if line and line != ": ping"]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.fixture(scope="module")
def filling_folder(chat_folder, tmp_path_factory):
    """A model whose tokenizer has the tokens of Qwen2.5-Coder, in place of its last words."""
    folder = tmp_path_factory.mktemp("filling") / "qwen3"
    shutil.copytree(chat_folder("qwen3"), folder)
    path = folder / "tokenizer.json"
    whole = json.loads(path.read_text("utf-8"))
    vocabulary = whole["model"]["vocab"]
    lost = dict(zip(sorted(vocabulary, key=vocabulary.get)[-len(WORDS) :], WORDS, strict=True))
    whole["model"]["vocab"] = {lost.get(word, word): i for word, i in vocabulary.items()}
    pairs = [m.split(" ", 1) if isinstance(m, str) else m for m in whole["model"]["merges"]]
    whole["model"]["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & {*lost}]
    for word in WORDS:
        entry = {"id": whole["model"]["vocab"][word], "content": word, "special": True}
        entry |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        whole["added_tokens"].append(entry)
    path.write_text(json.dumps(whole), "utf-8")
    return folder


@pytest.fixture(scope="module")
def filling(filling_folder):
    with serving("--model", str(filling_folder), "--drafter", "ngram") as server:
        yield server
        server.end_well()


# -------------------------------------------------------------------------------- completions


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_a_completion_is_what_generate_writes(server, path):
    _, expected = server.generate(prompt=COLOURS, max_tokens=12, seed=3)
    body = told(server, path, prompt=COLOURS, n_predict=12, return_tokens=True, seed=3)
    assert (body["content"], body["tokens"]) == (expected["text"], expected["token_ids"])
    assert body["stop"] is True and body["stop_type"] == "limit" and body["stopped_limit"]
    assert body["prompt"] == COLOURS and body["has_new_line"] is False
    assert (body["tokens_predicted"], body["truncated"], body["stopping_word"]) == (12, False, "")
    settings = body["generation_settings"]
    assert settings["n_predict"] == 12 and settings["seed"] == 3 and settings["logit_bias"] == []
    assert told(server, path, prompt=COLOURS, n_predict=2)["tokens"] == []


def test_a_stream_says_tokens_and_ends_in_the_whole_body(server):
    fields = {"prompt": COLOURS, "n_predict": 12}
    whole = told(server, "/completion", **fields, return_tokens=True)
    *parts, last = chunks(server, "/completion", **fields)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert {part["stop"] for part in parts} == {False} and last["stop"] is True
    assert parts[-1]["tokens_predicted"] == 12 and last["content"] == ""
    assert last.keys() == whole.keys()
    by_token = chunks(server, "/completion", **fields, n_probs=3)[:-1]
    (listed,) = {len(part["completion_probabilities"]) for part in by_token}
    assert listed == 1 and len(by_token) == 12
    entry = by_token[0]["completion_probabilities"][0]
    assert bytes(entry["bytes"]).decode() == entry["token"] and len(entry["top_logprobs"]) == 3


def test_what_ended_a_text_is_told(server):
    word = told(server, "/completion", prompt="1, 2, 3,", n_predict=20, stop=["zzz", "5"])
    assert (word["stop_type"], word["stopping_word"]) == ("word", "5") and word["stopped_word"]
    kept = told(server, "/completion", prompt="1, 2, 3,", n_predict=20, stop="5", no_stop_trim=True)
    assert (kept["stop_type"], kept["stopping_word"]) == ("word", "5")
    assert kept["content"] == f"{word['content']}5"
    whole = told(server, "/completion", prompt="x = 1", choice=["ab"])  # a grammar's end
    assert whole["stop_type"] == "eos" and whole["stopping_word"] == ""
    full = told(server, "/completion", prompt=[7] * 2040, n_predict=-1, ignore_eos=True)
    assert full["truncated"] and full["tokens_predicted"] == 8
    biases = full["generation_settings"]["logit_bias"]
    assert biases and {entry["bias"] for entry in biases} == {None}


def test_prompts_and_biases_of_llama_cpp_s_kinds(server):
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    ids = tokenizer(COLOURS)["input_ids"]
    ways, fields = (COLOURS, ids, [COLOURS], [ids], {"prompt_string": COLOURS}), {"n_predict": 8}
    asked = (told(server, "/completion", prompt=way, seed=-1, **fields) for way in ways)
    assert len({body["content"] for body in asked}) == 1
    prompts = [ids, {"prompt_string": "x = 1"}, [5, COLOURS]]
    listed = told(server, "/completion", prompt=prompts, n_predict=8)
    alone = [told(server, "/completion", prompt=prompt, n_predict=8) for prompt in prompts]
    for i, (each, one) in enumerate(zip(listed, alone, strict=True)):
        assert each["index"] == i and each["prompt"] == one["prompt"]
        assert each["content"] == one["content"]
        assert each["tokens_evaluated"] == one["tokens_evaluated"]
    mixed = told(server, "/completion", prompt=[5, COLOURS, 6], n_predict=2)
    assert mixed["prompt"] == tokenizer.decode([5, *ids, 6])
    fields = {"prompt": COLOURS, "n_predict": 1, "return_tokens": True}
    first = told(server, "/completion", **fields)["tokens"]
    for bias in ([[first[0], False]], [[tokenizer.decode(first), -100]], {str(first[0]): -100}):
        other = told(server, "/completion", **fields, logit_bias=bias)
        assert other["tokens"] != first
    (seven,) = tokenizer("7")["input_ids"]  # a text in a pair, and an id as a key
    for bias, token in (([["7", -1]], seven), ({"7": -1}, 7)):
        settings = told(server, "/completion", prompt="a", n_predict=1, logit_bias=bias)
        (entry,) = settings["generation_settings"]["logit_bias"]
        assert entry["token"] == token != seven + 7 - token


def test_only_the_fields_that_are_wanted_are_told(server):
    wanted = ["content", "generation_settings/n_predict", "nothing"]
    body = told(server, "/completion", prompt="a", n_predict=3, response_fields=wanted)
    assert list(body) == wanted[:2] and body["generation_settings/n_predict"] == 3


def test_samplers_that_are_left_out_are_off(server):
    sampled = {"prompt": COLOURS, "n_predict": 8, "temperature": 5, "top_k": 1, "seed": 4}
    greedy = told(server, "/completion", prompt=COLOURS, n_predict=8)["content"]
    assert told(server, "/completion", **sampled)["content"] == greedy
    assert told(server, "/completion", **sampled, samplers=["infill"])["content"] == greedy
    free = told(server, "/completion", **sampled, samplers=["temperature"])
    assert free["content"] != greedy and free["generation_settings"]["top_k"] == 0


BAD = [  # path, fields, what the message says
    ("/completion", {"prompt": "a", "n_predict": -2}, "n_predict must be"),
    ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "multimodal"),
    ("/completion", {"prompt": 5}, "prompt must be"),
    ("/completion", {"prompt": [5, "\ud800"]}, "prompt must be a text"),
    ("/completion", {"prompt": [5, "a"] * 2000}, "prompt has 4000 parts"),
    ("/completion", {"prompt": "a", "logit_bias": [["\ud800", 1]]}, "logit_bias must be a text"),
    ("/completion", {"prompt": "a", "logit_bias": [["a", 1]] * 301}, "logit_bias must be"),
    ("/completion", {"prompt": "a", "samplers": ["top_q"]}, "samplers must be"),
    ("/completion", {"prompt": "a", "return_tokens": 1}, "return_tokens must be"),
    ("/completion", {"prompt": "a", "n_indent": 2, "stream": True}, "n_indent"),
    ("/completion", {"prompt": "a", "logit_bias": [[1]]}, "logit_bias"),
    ("/completion", {"prompt": "a", "post_sampling_probs": True}, "post_sampling_probs"),
    ("/completion", {"prompt": "a", "stop": [4]}, "stop must be"),
    ("/infill", {"input_prefix": 4}, "input_prefix must be a text"),
    ("/infill", {"input_extra": 5}, "input_extra must be"),
    ("/infill", {"input_extra": [{"filename": "a"}]}, "input_extra[0]"),
    ("/infill", {"input_extra": [{"filename": 1, "text": "a"}]}, "input_extra[0].filename"),
    ("/tokenize", {"content": 5}, "content must be a text"),
    ("/tokenize", {"prompt": "\ud800"}, "prompt must be a text"),
    ("/tokenize", {"content": "a", "with_pieces": 1}, "with_pieces must be"),
    ("/detokenize", {"tokens": [1, 4096] * 5000}, "tokens[1] must be a token id from 0 to 4095"),
    ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ("/detokenize", {}, "tokens must be"),
    ("/apply-template", {"messages": "a"}, "messages"),
]


@pytest.mark.parametrize(("path", "fields", "said"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_refused_in_llama_cpp_s_form(server, path, fields, said):
    status, body = server.post(path, **fields)
    assert status == 400 and list(body["error"]) == ["code", "message", "type", "param"]
    assert body["error"]["code"] == 400 and said in body["error"]["message"]
    assert body["error"]["type"] in ("invalid_request_error", "exceed_context_size_error")


def test_a_prompt_that_is_too_long_says_how_long(server):
    status, body = server.post("/completion", prompt=[1] * 3000)
    assert status == 400 and body["error"]["type"] == "exceed_context_size_error"
    assert (body["error"]["n_prompt_tokens"], body["error"]["n_ctx"]) == (3000, 2048)
    status, body = server.post("/v1/completions", prompt=[1] * 3000)
    assert status == 400 and body["error"]["code"] == "context_length_exceeded"


# ----------------------------------------------------------------------- chats, and the server


def test_a_chat_without_v1_is_openai_s(filling):
    fields = {"messages": [{"role": "user", "content": "red, green,"}], "max_tokens": 4}
    chat = told(filling, "/chat/completions", **fields, verbose=True)
    (choice,) = told(filling, "/v1/chat/completions", **fields)["choices"]
    prompt = "user: red, green,\nassistant:"
    assert chat["choices"] == [choice] and chat["__verbose"] == {"prompt": prompt}
    assert told(filling, "/apply-template", **fields)["prompt"] == prompt
    count = told(filling, "/chat/completions/input_tokens", **fields)["input_tokens"]
    assert count == chat["usage"]["prompt_tokens"]
    listed = told(filling, "/tokenize", messages=fields["messages"])
    assert listed["count"] == count == len(listed["tokens"])
    fields["messages"].append({"role": "assistant", "content": "blue,"})  # which goes on
    chat = told(filling, "/chat/completions", **fields, verbose=True)
    assert chat["__verbose"] == told(filling, "/apply-template", **fields)
    assert chat["__verbose"]["prompt"].endswith("assistant: blue,")
    count = told(filling, "/chat/completions/input_tokens", **fields)["input_tokens"]
    assert count == chat["usage"]["prompt_tokens"]
    _, _, data = filling.call("POST", "/chat/completions", fields | {"stream": True})
    first = json.loads(data.decode().split("\n\n")[0].removeprefix("data: "))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}


def test_the_server_tells_of_itself(server):
    paths = "/props", "/slots", "/models"
    props, slots, models = (json.loads(server.call("GET", path)[2]) for path in paths)
    assert props["total_slots"] == len(slots)
    assert props["default_generation_settings"]["n_ctx"] == slots[0]["n_ctx"] == 2048
    assert not slots[0]["is_processing"] and models["data"][0]["meta"]["n_vocab"] == 4096
    status, _, data = server.call("GET", "/v1/health")
    assert status == 200 and json.loads(data)["status"] == "ok"
    assert server.call("GET", "/slots?fail_on_no_slot=1")[0] == 200


# ------------------------------------------------------------------------------------- tokens


def test_texts_become_tokens_and_texts_again(server):
    text, tokenizer = f"{COLOURS} é🚀<|endoftext|>", AutoTokenizer.from_pretrained(TARGET)
    ids = tokenizer(text)["input_ids"]
    assert told(server, "/tokenize", content=text) == {"tokens": ids}
    listed = told(server, "/tokenize", prompt=text, return_token_strs=True)
    assert listed["tokens"] == ids and listed["count"] == len(ids)
    assert listed["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert listed["max_model_len"] == 2048
    listed = told(server, "/tokenize", content=text, with_pieces=True)["tokens"]
    pieces = (each["piece"] for each in listed)
    assert b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in pieces) == text.encode()
    assert bytes_of(len(tokenizer), tokenizer) == b""  # a model may have more rows
    plain = told(server, "/tokenize", content=text, parse_special=False)["tokens"]
    assert tokenizer.eos_token_id in ids and tokenizer.eos_token_id not in plain
    for tokens in (ids, plain):
        back = told(server, "/detokenize", tokens=tokens)
        assert back == {"content": text, "prompt": text}
    info = json.loads(server.call("GET", "/tokenizer_info")[2])
    assert info["eos_token"] == "<|endoftext|>" and info["chat_template"] is None


def test_long_texts_are_read_in_turn_and_too_long_ones_refused(server):
    words = "red " * 50_000  # more than the context holds
    answers = at_once(*[[partial(server.post, "/tokenize", content=words)]] * 2)
    assert [status for status, _ in answers] == [200, 200] and len(answers[0][1]["tokens"]) > 40_000
    assert server.post("/tokenize", content="x" * 10_000_000)[0] == 413


# ---------------------------------------------------------------------------- fill in the middle


def test_all_routes_fill_in_the_same(filling, filling_folder):
    tokenizer = AutoTokenizer.from_pretrained(filling_folder)
    gap = infill_prompt(Gap(PREFIX, SUFFIX), tokenizer, "", 256)
    begin, behind, middle = (tokenizer.convert_tokens_to_ids(word) for word in WORDS[:3])
    assert [gap[0], gap[-1]] == [begin, middle] and gap.count(behind) == 1
    assert tokenizer.decode(gap) == WORDS[0] + PREFIX + WORDS[1] + SUFFIX + WORDS[2]
    _, expected = filling.generate(prompt=gap, max_tokens=6)
    fields = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 6}
    (choice,) = told(filling, "/v1/completions", **fields)["choices"]
    (mistral,) = told(filling, "/v1/fim/completions", **fields, random_seed=4)["choices"]
    infill = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 6}
    body = told(filling, "/infill", **infill)
    texts = choice["text"], mistral["message"]["content"], body["content"]
    assert {*texts} == {expected["text"]} and body["prompt"] == tokenizer.decode(gap)
    _, _, data = filling.call("POST", "/v1/fim/completions", fields | {"stream": True})
    *parts, last = events_of(data)
    said = "".join(part["choices"][0]["delta"]["content"] for part in parts)
    assert said == expected["text"] and last["choices"][0]["finish_reason"] == "length"
    extra = [{"filename": "a.py", "text": "x = 1\n"}]
    more = told(filling, "/infill", **infill, input_extra=extra, prompt="3")["prompt"]
    assert more.startswith("<|repo_name|>project\n<|file_sep|>a.py\nx = 1\n<|file_sep|>")
    assert more.endswith(f"{WORDS[2]}3")


def test_a_middle_ends_at_its_family_s_tokens(filling):
    """Whatever the model is, no text goes on behind them; and so says the drafter's draft."""
    plain = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 9, "drafter": "none"}
    for word in WORDS[3:]:
        token = told(filling, "/tokenize", content=word)["tokens"]
        for drafter in ("none", "ngram"):
            fields = plain | {"drafter": drafter, "allowed_token_ids": token}
            (choice,) = told(filling, "/v1/completions", **fields)["choices"]
            assert (choice["finish_reason"], choice["text"]) == ("stop", "")


def test_tokens_in_the_text_around_a_gap_are_text(filling, filling_folder):
    tokenizer = AutoTokenizer.from_pretrained(filling_folder)
    sly = f"a{WORDS[2]}b"
    ids = infill_prompt(Gap(sly, sly), tokenizer, "", 256)
    assert ids.count(tokenizer.convert_tokens_to_ids(WORDS[2])) == 1
    assert tokenizer.decode(tokenize_plain(sly, tokenizer, 256)) == sly
    many = [File("a.py", "x = 1\n" * 400)]  # of which the context holds a part
    assert len(infill_prompt(Gap("a", "b", "", many), tokenizer, "", 256, 16)) == 240
    status, body = filling.post("/v1/completions", prompt=[5, 6], suffix="b")
    assert status == 400 and "prompt must be a text" in body["error"]["message"]


def test_a_model_without_such_tokens_is_named(server):
    for path in ("/v1/completions", "/v1/fim/completions"):
        status, body = server.post(path, prompt="a", suffix="b")
        assert status == 400 and body["error"]["param"] == "suffix"
        assert "embedded has no tokens for filling in" in body["error"]["message"]
    status, body = server.post("/infill", input_prefix="a", input_suffix="b")
    assert status == 400 and body["error"]["param"] == "input_suffix"
    (empty,) = told(server, "/v1/completions", prompt="a", suffix="", max_tokens=2)["choices"]
    assert empty["text"]  # nothing is behind: it is continued


FAMILIES = {
    "starcoder": "<fim_prefix> <fim_suffix> <fim_middle> <file_sep> <fim_pad>",
    "deepseek": "<｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜>",
    "codellama": "▁<PRE> ▁<SUF> ▁<MID> ▁<EOT>",
}


@pytest.mark.parametrize("family", [*FAMILIES, "named"])
def test_each_family_s_tokens_are_found(tmp_path, family):
    """By their texts; or by the keys of a file, where they have others."""
    words = [*FAMILIES.get(family, "A B C D").split(), *"▁Helo", "▁H", "el", "lo", "▁Hel"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    named = {"pre": 259, "suf": 260, "mid": 261, "pad": 262} if family == "named" else {}
    kinds = [2, 3, 3] + [6] * 256 + [3] * (len(words) - 9) + [1] * 9
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    facts = {"model": "llama", "tokens": tokens, "token_type": kinds}
    facts |= {"scores": [-float(i) for i in range(len(tokens))]}
    facts |= {f"fim_{part}_token_id": token for part, token in named.items()}
    add_keys(writer, "tokenizer.ggml", facts)
    finish(writer, (), ())
    tokenizer = tokenizer_of(GgufFile(tmp_path / "a.gguf"))
    fim = fim_of(tokenizer)
    assert fim[:3] == (259, 260, 261)
    assert fim.ends >= ({262} if family in ("named", "codellama") else set())
    ids = infill_prompt(Gap("Hel", "Hel"), tokenizer, "", 100)
    behind = tokens[ids[ids.index(fim.suffix) + 1]]
    assert behind.startswith("▁") == (family != "codellama")  # which begins amid a line
