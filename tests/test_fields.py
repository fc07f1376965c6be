"""Of every field that peers define it is said what becomes of it, and that becomes of it.

The table of serving/fields.py is tried row by row on each route. What fields mean is tested where
they are read: masks in test_masks.py, formats in test_formats.py, and those of answers below.
"""

import json
from functools import partial

import pytest
from conftest import TEMPLATE, asked, module_client
from server import CHAT, COMPLETIONS, GENERATE, ROUTES, is_error
from transformers import AutoTokenizer

from models.prompts import chat_prompt, template_options
from serving.fields import HARMLESS, OTHER_NAMES, REFUSED
from serving.parsing import KNOWN

ask = partial(asked, prompt="a b")
client = module_client(drafter="ngram", max_tokens=2)
TURNS = [{"role": "user", "content": "a b"}]
HONOURED = {  # by each route, beside prompt, messages and those in FIELDS of formats.py
    "chat": False, "max_tokens": 2, "n": 2, "num_speculative_tokens": 2, "drafter": "ngram",
    "fixed_k": True, "speculative": True, "stream": False, "trace": True, "compare": False,
    "stop": ["zzz"], "temperature": 0.5, "top_k": 4, "top_p": 0, "typical_p": 0.5, "min_p": 0.1,
    "repetition_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": 1, "seed": 3,
    "logit_bias": {"5": 1}, "verification": "rejection", "logprobs": True, "prediction": "a b",
    "prompt_logprobs": 1,
    "model": None, "stream_options": None, "ignore_eos": True, "min_tokens": 1,
    "stop_token_ids": [5], "allowed_token_ids": [5, 6], "bad_words": ["a"], "repeat_last_n": 0,
    "include_stop_str_in_output": True, "truncate_prompt_tokens": 1, "truncation_side": "right",
    "return_token_ids": True, "return_tokens_as_token_ids": True, "max_completion_tokens": 2,
    "n_predict": 2, "n_probs": 1, "n_cmpl": 2, "repeat_penalty": 1.1, "no_stop_trim": True,
}  # fmt: skip
IN_CHATS = {  # by chats alone
    "messages": TURNS, "tools": [], "tool_choice": "none", "add_generation_prompt": False,
    "continue_final_message": False, "chat_template_kwargs": {"enable_thinking": False},
    "top_logprobs": 1, "add_special_tokens": False,
}  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_honoured_is_taken_without_a_warning(client, route):
    formats = {"response_format", "structured_outputs", "json_schema", "regex", "grammar", "ebnf"}
    formats |= {"choice", "guided_json", "guided_regex", "guided_grammar", "guided_choice"}
    assert KNOWN.keys() == HONOURED.keys() | formats | {"prompt"}
    assert not (KNOWN.keys() & (HARMLESS | REFUSED.keys())) and not HARMLESS & REFUSED.keys()
    rows = HONOURED | (IN_CHATS if route == CHAT else {})
    for name, value in rows.items():
        others = {"top_logprobs": {"logprobs": True}, "prediction": {"drafter": "auto"}}
        status, body = ask(client, route, **others.get(name, {}), **{name: value})
        assert status == 200 and body["warnings"] == [], (name, body)


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_harmless_or_has_the_value_that_changes_nothing_is_taken_silently(client, route):
    sent = [dict.fromkeys(HARMLESS, {"a": [1]}), dict.fromkeys(REFUSED)]
    for i in range(3):
        sent.append({name: values[i] for name, (values, _) in REFUSED.items() if i < len(values)})
    for fields in sent:
        if route == CHAT:
            fields = {n: v for n, v in fields.items() if n not in IN_CHATS}
            fields.pop("parallel_tool_calls", None)
        status, body = ask(client, route, **fields | {"best_of": 1})
        assert status == 200 and body["warnings"] == [], body
    _, body = ask(client, route, prompt_id=1)
    assert body["warnings"] == ["unknown field 'prompt_id' was ignored"]


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_refused_is_a_400_that_names_it_and_says_why(client, route):
    for name, (values, why) in REFUSED.items():
        if name in {CHAT: IN_CHATS, COMPLETIONS: ("suffix", "echo")}.get(route, ()):
            continue
        wrong = [{"enabled": "x"}, *([1] if values and isinstance(values[0], bool) else [])]
        for value in wrong:
            status, body = ask(client, route, **{name: value})
            assert status == 400 and is_error(body, name), name
            said = body["error"]["message"]
            assert said.startswith(f"{name} is not supported") and why in said and len(said) < 200


def test_two_names_of_a_field_may_say_the_same(client):
    for other, name in OTHER_NAMES.items():
        first, second = (True, False) if "stop" in name else (2, 1)
        assert ask(client, GENERATE, **{other: first, name: first})[0] == 200
        status, body = ask(client, GENERATE, **{other: first, name: second})
        assert status == 400 and is_error(body, other)


def test_other_names_mean_the_same(client):
    def text(**fields):
        few = {"max_tokens": 12, "allowed_token_ids": [*range(5, 60)]}  # so that the text repeats
        return ask(client, GENERATE, **few | fields)[1]["token_ids"]

    plain, penalised = text(), text(repetition_penalty=100)
    assert text(max_tokens=None, n_predict=12) == plain != penalised
    assert text(repeat_penalty=100) == text(repeat_penalty=100, repeat_last_n=-1) == penalised
    assert text(repeat_penalty=100, presence_penalty=2, repeat_last_n=0) == plain
    assert text(top_p=0, temperature=1) == plain
    body = ask(client, GENERATE, n_predict=-1, max_tokens=None)[1]
    whole = body["usage"]["total_tokens"] == 256 or body["finish_reason"] == "stop"
    assert whole and body["warnings"] == []
    assert len(ask(client, GENERATE, n_probs=2)[1]["logprobs"][0]["top_logprobs"]) == 2
    assert "logprobs" not in ask(client, GENERATE, n_probs=0)[1]


def test_a_long_prompt_is_cut_where_it_is_asked_for(client):
    ids = list(range(5, 400))

    def prompt(**fields):
        _, body = ask(client, GENERATE, prompt=ids, return_token_ids=True, **fields)
        return body["prompt_token_ids"]

    assert ask(client, GENERATE, prompt=ids)[0] == 400
    assert prompt(truncate_prompt_tokens=7) == ids[-7:]
    assert prompt(truncate_prompt_tokens=7, truncation_side="right") == ids[:7]
    assert prompt(truncate_prompt_tokens=-1, max_tokens=6) == ids[-250:]
    assert prompt(truncate_prompt_tokens=-1, max_tokens=None, n_predict=-1) == ids[-255:]


@pytest.mark.parametrize("route", ROUTES[1:])
def test_an_answer_and_a_stream_tell_the_same_ids_and_tokens_by_them(client, route):
    """As vLLM has it: a chat's body has the prompt's ids, and a choice of a completion its own."""
    fields = {"n": 2, "seed": 1, "temperature": 1, "max_tokens": 6, "logprobs": True}
    fields |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    _, whole = ask(client, route, **fields)
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, chunks = ask(client, route, **fields, stream=True, stream_options=options)
    holder = whole if route == CHAT else whole["choices"][0]
    prompt = holder["prompt_token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"]
    holders = chunks if route == CHAT else sum([chunk["choices"] for chunk in chunks], [])
    told = [each["prompt_token_ids"] for each in holders if "prompt_token_ids" in each]
    assert told == [prompt] * (1 if route == CHAT else 2) and "prompt_token_ids" in holders[0]
    for choice in whole["choices"]:
        parts = [p for c in chunks for p in c["choices"] if p["index"] == choice["index"]]
        ids = [token for part in parts for token in part["token_ids"]]
        assert ids == choice["token_ids"] and len(ids) == 6
        listed = choice["logprobs"]
        names = [one["token"] for one in listed["content"]] if route == CHAT else listed["tokens"]
        assert names == [f"token_id:{token}" for token in ids]
    *going, last = chunks
    assert last["usage"] == whole["usage"] and last["choices"] == []
    for chunk in going:
        usage = chunk["usage"]
        assert usage["total_tokens"] == len(prompt) + usage["completion_tokens"]
    assert going[-1]["usage"]["completion_tokens"] == 6
    plain = ask(client, route, stream=True, stream_options={"continuous_usage_stats": True})[1]
    assert all("usage" not in c and "token_ids" not in json.dumps(c) for c in plain)


def test_stream_options_are_checked(client):
    for options, said in (({"include_usage": 1}, "include_usage"), ([], "object")):
        status, body = ask(client, CHAT, stream=True, stream_options=options)
        assert status == 400 and is_error(body, "stream_options")
        assert said in body["error"]["message"]
    _, events = ask(client, COMPLETIONS, stream=True, stream_options={"x": 1})
    assert events[-1]["warnings"] == ["unknown field 'stream_options.x' was ignored"]


def test_a_chat_may_say_how_the_template_is_used(client):
    """The template begins the assistant's turn, or the last turn is continued."""
    turns = [*TURNS, {"role": "assistant", "content": "c d"}]

    def ids(**fields):
        _, body = ask(client, CHAT, return_token_ids=True, **fields)
        return body["prompt_token_ids"]

    def read(text):
        return ask(client, GENERATE, prompt=text, return_token_ids=True)[1]["prompt_token_ids"]

    assert "add_generation_prompt" in TEMPLATE
    assert ids() == read("user: a b\nassistant:")
    assert ids(add_generation_prompt=False) == read("user: a b\n")
    assert ids(messages=turns, continue_final_message=True) == read("user: a b\nassistant: c d")
    status, body = ask(client, CHAT, continue_final_message=True)
    assert status == 400 and is_error(body, "continue_final_message")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert is_error(ask(client, CHAT, messages=turns, **both)[1], "add_generation_prompt")
    assert ids(truncate_prompt_tokens=2) == ids()[-2:]


def test_a_template_reads_the_variables_that_are_sent(chat_folder):
    tokenizer = AutoTokenizer.from_pretrained(chat_folder("llama"))
    tokenizer.chat_template = "{{ messages[0].content }}{{ mood }}{{ tone['x'] }}"
    how = template_options({"chat_template_kwargs": {"mood": "!", "tone": {"x": 7}}})
    assert tokenizer.decode(chat_prompt(TURNS, tokenizer, 256, how=how)) == "a b!7"
