"""Clients ask for one format by many names, and get the same text on each route.

What cannot be used is a 400 that names the field, however a schema explodes. A text that max_tokens
cuts is said to be cut. Behind reasoning the format begins where that ends.
"""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import FAMILIES, TARGET, TEMPLATE, application, asked, closed, load, module_client
from started import LIMIT_S, ROUTES, is_error, text_of, until
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from runtime.grammars import POSSIBLE, REGEX, probe, source_of, vocabulary_of
from runtime.grammars.measure import USUAL
from runtime.models.chat import chat_prompt
from runtime.values import Draft, RequestError
from server.formats import grammar_of, reasoning_of
from server.options import Options

client = module_client(drafter="ngram", max_tokens=40)
GENERATE, COMPLETIONS, CHAT = ROUTES
SCHEMA = closed(unit={"enum": ["C", "F"]}, days={"type": "integer", "minimum": 1, "maximum": 9})
REGULAR, CHOICES = "(red|green), [0-9]{2}", ["red", "green", "blue"]
LARK = 'start: ("red" | "green") ", " /[0-9]{2}/'
GBNF = r'root ::= ("red" | "\u0067\U00000072een") "\u002c " [0-9] [\u0030-\u0039]'


def wrapped(schema):
    """OpenAI's."""
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


NAMES = {  # the fields that ask for the same
    "schema": [
        {"response_format": wrapped(SCHEMA)},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"json_schema": json.dumps(SCHEMA)},
    ],
    "regex": [{"regex": REGULAR}, {"grammar": LARK}, {"grammar": GBNF}],
    "choice": [{"choice": CHOICES}],
    "object": [{"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}],
}  # fmt: skip
PATTERNS = {
    "schema": r'\{"unit":"[CF]","days":[1-9]\}', "regex": REGULAR, "choice": "red|green|blue",
    "object": r"\{.*",
}  # fmt: skip


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", NAMES)
def test_a_format_has_many_names_and_one_text(client, kind, route):
    """On each route."""
    way = {"temperature": 1.0, "seed": 3}
    bodies = [asked(client, route, **way, **fields) for fields in NAMES[kind]]
    assert {status for status, _ in bodies} == {200}
    (text,) = {text_of(body) for _, body in bodies}
    assert re.fullmatch(PATTERNS[kind], text, re.DOTALL), text
    assert all(body["warnings"] == bodies[0][1]["warnings"] for _, body in bodies)
    assert kind == "object" or bodies[0][1]["warnings"] == []


def test_a_choice_may_be_one_of_many_texts(client):
    """Some of which others begin with, or which look like rules."""
    many = [f"{word} {i}" for i in range(1500) for word in ("red", "rose")]
    odd = ["a", "aa", "a|b", "(", "[x]", "é\n", "x.*", "\\", "a b", "^$", "#-&~"]
    nested = ["a" * i for i in range(1, 200)]  # each begins with all those before it
    for texts in (many, odd, nested, *([one] for one in odd)):
        for seed in (1, 2):
            fields = {"choice": texts, "temperature": 1.5, "seed": seed}
            status, body = asked(client, GENERATE, **fields)
            assert status == 200 and body["text"] in texts and body["finish_reason"] == "stop"
            assert asked(client, GENERATE, **fields, speculative=False)[1]["text"] == body["text"]


def test_an_answer_says_that_it_was_cut(client):
    """By max_tokens, or by a stop string; what ends by itself is whole."""
    fields = {"json_schema": SCHEMA, "temperature": 0}
    status, whole = asked(client, GENERATE, **fields)
    assert status == 200 and whole["finish_reason"] == "stop" and whole["warnings"] == []
    _, short = asked(client, GENERATE, **fields, max_tokens=3)
    assert short["finish_reason"] == "length" and len(short["token_ids"]) == 3
    what = "cut the text, so it is not a whole one of its grammar"
    assert short["warnings"] == [f"max_tokens {what}"]
    _, stopped = asked(client, GENERATE, **fields, stop="days")
    assert stopped["finish_reason"] == "stop" and stopped["warnings"] == [f"a stop string {what}"]
    third = whole["token_ids"][2]
    _, stopped = asked(client, GENERATE, **fields, stop_token_ids=[third])
    assert stopped["finish_reason"] == "stop" and stopped["warnings"] == [f"a stop token {what}"]
    _, exact = asked(client, GENERATE, **fields, max_tokens=len(whole["token_ids"]))
    assert exact["text"] == whole["text"] and exact["warnings"] == []


def words_of(engine):
    target = engine.target
    return target.tokenizer, target.vocab_size, frozenset(target.eos_ids)


DEEP = {"type": "integer"}
for _ in range(60):
    DEEP = {"type": "array", "items": DEEP}


def test_what_only_looks_like_what_is_not_supported_is_a_format(client):
    """Text, comments and regular expressions of rules, values and descriptions of a schema."""
    said = {"const": "a", "description": "never <|endoftext|>", "default": "<|endoftext|>"}
    assert asked(client, GENERATE, json_schema=closed(a=said))[1]["text"] == '{"a":"a"}'
    value = {"minProperties": 5}
    rules = 'start: "a[stop=1]" /b[\\/"]/ // c[max_tokens=2]: "x"'
    texts = [rules, 'root ::= "a[stop=1]b" ["]', 'start: %json {"const": "a[stop=1]"}']
    for fields in ({"json_schema": {"enum": [value]}}, {"json_schema": {"const": value}}):
        assert json.loads(asked(client, GENERATE, **fields)[1]["text"]) == value
    assert asked(client, GENERATE, json_schema=True, max_tokens=4)[1]["token_ids"]
    for text in texts:
        status, body = asked(client, GENERATE, grammar=text)
        assert status == 200 and re.fullmatch(r'"?a\[stop=1\](b?[/"])?', body["text"]), body


def choices_of(count, **more):
    """A schema of so many alternatives, each of which may hold any of them again."""
    return {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "maxItems": i}
                      for i in range(count)]} | more  # fmt: skip


def test_what_people_write_is_within_the_limits(demo_engine):
    """Many fields that may be null, many choices of words, rules of a small language."""
    null, either = {"type": "null"}, {"type": "string"}
    fields = {f"p{i}": {"anyOf": [{"type": "string"}, null]} for i in range(900)}
    words = [f"word {i}" for i in range(5000)]
    rules = 'start: (cell ",")*\ncell: /[^,|]*/ | "a|b"' + " | NUMBER" * 90 + "\nNUMBER: /[0-9]+/"
    for body in (
        {"json_schema": closed(**fields)}, {"choice": words}, {"json_schema": {"enum": words}},
        {"json_schema": {"type": "number", "multipleOf": 0.01}}, {"grammar": rules},
        {"regex": r"\p{L}+( \p{L}+)*"}, {"json_schema": choices_of(30)},
        {"json_schema": {"properties": {f"p{i}": {"type": "string"} for i in range(400)}}},
        {"json_schema": {"type": "integer", "multipleOf": 86_400}},
        {"json_schema": closed(**{f"p{i}": {"anyOf": [either, {"type": "integer"}, null]}
                                  for i in range(520)})},
        {"grammar": r'root ::= "\"" [^"\\\x7F\x00-\x1F]* "\""'},  # of llama.cpp's json.gbnf
    ):  # fmt: skip
        grammar_of(body, demo_engine, [])


TABLE = Path(__file__).with_name("explosive_grammars.txt").read_text("utf-8").splitlines()[1:]
BOMBS = {name: eval(fields) for name, fields in (row.split(" | ", 1) for row in TABLE)}
REASONS = "bytes must follow|cannot go on|cannot be used: "


@pytest.mark.parametrize("name", BOMBS)
def test_what_explodes_is_served_or_refused_and_others_go_on(client, name):
    """llguidance bounds items and states, and the child that tries a grammar may crash."""
    (field,) = BOMBS[name]
    status, body = asked(client, GENERATE, **BOMBS[name], temperature=1.0, seed=1, max_tokens=64)
    assert status in (200, 400)
    if status == 400:
        message = body["error"]["message"]
        assert is_error(body, None if "cannot go on" in message else field), message
        assert re.search(REASONS, message)
    assert asked(client, GENERATE, json_schema=SCHEMA | {"title": name})[0] == 200


LONG = {  # rules that are read in time that grows with the square of their length, if read badly
    "brackets": 'start: "x"\n' + "a[" * 32_000,
    "quotes": 'start: "x"\na["' + 'a[\\"' * 16_000,
    "empty lines": "\n" * 65_000 + 'root ::= "a"',
    "a chain": "\n".join(
        ["root::=r0", *(f'r{i}::="x"|r{i + 1}"y"' for i in range(3000)), "r3000::=."]),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_long_rules_are_read_in_the_time_of_their_length(demo_engine, name):
    """In the server's process it is 0.1 s of a processor, and not 3 s or more."""
    begin = time.thread_time()
    with suppress(RequestError):
        grammar_of({"grammar": LONG[name]}, demo_engine, [])
    assert time.thread_time() - begin < 1


def test_longer_rules_are_refused_before_they_are_read(demo_engine, monkeypatch):
    monkeypatch.setattr("runtime.grammars.measure.schemas_of", None)
    with pytest.raises(RequestError, match="characters of rules"):
        grammar_of({"grammar": 'start: "a"\n' + '%json {"' * 10_000}, demo_engine, [])


def test_a_grammar_that_nobody_foresaw_is_given_up_and_remembered(client, monkeypatch, caplog):
    """That is our fault: no client's, and to try it again is of no use."""
    engine = client.application.extensions["worker"]._engine
    check = Mock(side_effect=TimeoutError)
    monkeypatch.setattr(vocabulary_of(*words_of(engine))._probe, "check", check)
    for _ in range(2):
        answer = client.post(GENERATE, json={"prompt": "a", "regex": "a regex that takes long"})
        error = answer.json["error"]
        assert answer.status_code == 503 and "Retry-After" not in answer.headers
        assert error["code"] == "machine_too_slow" and "on this machine" in error["message"]
    assert check.call_count == 1 and "a regex that takes long" in caplog.text


def test_no_client_can_spoil_anothers_grammar(demo_engine):
    """The text of a source is no GBNF, and that says nothing of the source."""
    schema = closed(spoiled={"type": "null"})
    text = source_of("json", schema)
    for _ in range(2):
        with pytest.raises(RequestError, match="is no GBNF") as it:
            grammar_of({"grammar": text}, demo_engine, [])
        assert it.value.status == 400
        assert grammar_of({"json_schema": schema}, demo_engine, []).source == text


def test_the_child_gives_up_when_its_time_is_over_and_goes_on(demo_engine):
    """A fork of it builds: the vocabulary need not be read again."""
    tokenizer, size, ends = words_of(demo_engine)
    words = tokenizer.backend_tokenizer.to_str(), size, sorted(ends)
    child = probe.Probe(probe.__file__, 0.3, *words)
    hard = source_of("json", {"type": "integer", "multipleOf": 99_999_989})  # hours
    for _ in range(2):
        with pytest.raises(TimeoutError):
            child.check(hard, *USUAL)
        child.check(source_of(REGEX, "a+"), *USUAL)
    child._end()


def test_a_grammar_is_compiled_once_and_few_new_ones_wait(demo_engine, monkeypatch):
    """Requests that ask for it at the same time wait for the first, which is no new one then."""
    going, begun, new = threading.Event(), threading.Event(), source_of(REGEX, "a new one")
    vocabulary = vocabulary_of(*words_of(demo_engine))

    def wait(*_):
        begun.set()
        assert going.wait(LIMIT_S)

    check = Mock(side_effect=wait)
    monkeypatch.setattr(vocabulary._probe, "check", check)
    with ThreadPoolExecutor(40) as pool:
        first, *others = [pool.submit(vocabulary.compiled, new) for _ in range(40)]
        assert begun.wait(LIMIT_S)
        until(lambda: sum(each.done() for each in others) == 8)
        going.set()
        (grammar,) = {each.result() for each in [first, *others] if not each.exception()}
    refusals = [each.exception() for each in others if each.exception()]
    assert check.call_count == 1 and {error.status for error in refusals} == {429}
    assert vocabulary.compiled(grammar.source) is grammar


# ------------------------------------------------------------------- behind reasoning

THOUGHT = "so it is </think>\n"
TEMPLATES = {  # what a template writes last, and what the model then writes by itself
    "the prompt opens it": (TEMPLATE + "<think>\n", THOUGHT),
    "the model opens it": (TEMPLATE + "{# </think> #}", "<think>" + THOUGHT),
}
LIKELY = '{"unit":"F","days":7}'


def lead(target, prompt, text, monkeypatch):
    """From now on the model begins with this text behind a prompt of so many tokens."""
    forward, script = target.forward, target.tokenizer(text)["input_ids"]

    @torch.inference_mode()
    def led(rows, tokens, num_logits, layers=(), parents=None):
        pairs = zip(rows, tokens, strict=True)
        ends = [target.cache.lengths[row] + len(fed) for row, fed in pairs]
        output = forward(rows, tokens, num_logits, layers, parents)
        for b, (end, count) in enumerate(zip(ends, num_logits, strict=True)):
            draft = Draft([0] * (count - 1), None, parents and parents[b])
            for i in range(count):
                place = end - (count - 1) + draft.depth(i - 1) - prompt
                if 0 <= place < len(script):
                    output.logits[b][i, script[place]] += 60
        return output

    monkeypatch.setattr(target, "forward", led)


@pytest.fixture(scope="module", params=["text", "tokens", "special tokens"])
def thinking(request, tmp_path_factory):
    """A tiny model whose tags of reasoning are text, or tokens."""
    folder, tokenizer = tmp_path_factory.mktemp("thinking"), AutoTokenizer.from_pretrained(TARGET)
    if request.param != "text":
        is_special = request.param == "special tokens"
        tokenizer.add_tokens(["<think>", "</think>"], special_tokens=is_special)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = AutoConfig.for_model("llama", **FAMILIES["llama"] | {"vocab_size": 4100})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load(folder, drafter="auto", suffix_cache=0)


def said_in(engine, events):
    """The text of events, in which special tokens stand, too."""
    ids = [token["id"] for event in events for token in event["tokens"]]
    return engine.target.tokenizer.decode(ids)


@pytest.mark.parametrize("way", [{"temperature": 0}, {"temperature": 1.0, "seed": 4}], ids=str)
@pytest.mark.parametrize("name", TEMPLATES)
def test_behind_reasoning_a_format_begins_where_that_ends(thinking, name, way, monkeypatch):
    """Drafts cross that border, and each of their tokens is judged by the rule of its side."""
    (template, begin), engine = TEMPLATES[name], thinking
    engine.target.tokenizer.chat_template = template
    said = f"{begin}{LIKELY} " * 2
    fields = {"response_format": wrapped(SCHEMA), "max_tokens": 64, "trace": True} | way
    with application(engine, Options(model=engine.target.name)) as client:
        _, free = asked(client, CHAT, said, max_tokens=1)
        lead(engine.target, free["usage"]["prompt_tokens"], begin + LIKELY[:8], monkeypatch)
        _, plain = asked(client, CHAT, said, **fields, drafter="none")
        thought, tag, answer = said_in(engine, plain["trace"]).rpartition("</think>")
        assert thought + tag == begin.strip() and plain["choices"][0]["finish_reason"] == "stop"
        assert re.fullmatch(PATTERNS["schema"], answer.strip(" \n")), answer
        if name == "the prompt opens it":  # the other template does not show what opens it
            message = plain["choices"][0]["message"]
            told = message["reasoning_content"].strip(), message["content"]
            assert told == ("so it is", answer.strip())
        ids = [token["id"] for event in plain["trace"] for token in event["tokens"]]
        texts = [engine.target.tokenizer.decode(ids[: n + 1]) for n in range(len(ids))]
        count = ["</think>" in text for text in texts].index(True) + 1
        assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
        crossed = 0
        for drafter in {*engine.pool.choices} - {"prediction"}:
            more = {"drafter": drafter, "num_speculative_tokens": 8}
            status, body = asked(client, CHAT, said, **fields, **more)
            assert status == 200 and text_of(body) == text_of(plain) and not body["warnings"]
            crossed += any(re.search(">\\s*{", said_in(engine, [e])) for e in body["trace"])
        assert crossed > 0


@pytest.mark.parametrize("said", ["", " What does <think> mean?", " And </think>?"])
def test_what_a_user_says_opens_and_closes_no_reasoning(client, tiny_folder, said):
    """Nor does a prompt that is continued as it stands, or a template that has closed it."""
    for route in (GENERATE, CHAT):
        body = asked(client, route, f"x = 1{said}", json_schema=SCHEMA)[1]
        assert re.fullmatch(PATTERNS["schema"], text_of(body))
    engine = load(tiny_folder("llama:7"))
    for template, can_think in ((TEMPLATES["the model opens it"][0], True), ("</think>\n", False)):
        engine.target.tokenizer.chat_template = template if can_think else TEMPLATE + template
        turns = [{"role": "user", "content": said or "x"}]
        prompt = chat_prompt(turns, engine.target.tokenizer, 256)
        assert reasoning_of(engine.target.tokenizer, prompt) == (POSSIBLE if can_think else "")
