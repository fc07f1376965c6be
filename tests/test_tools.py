"""Tools: a call that the model has to make parses against its schema, and clients see it as such.

The texts here are written by the test, so that nothing hangs on what a tiny model says; one speaks
in test_openai.py.
"""

import json
import shutil
import threading
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import llguidance
import llguidance.hf
import openai
import pytest
from conftest import TARGET
from hypothesis import given, settings
from hypothesis import strategies as st
from started import LIMIT_S, Client
from tokenizers import AddedToken
from transformers import AutoTokenizer
from werkzeug.serving import make_server

from runtime.grammars import OPEN, POSSIBLE, source_of
from runtime.grammars.measure import LARK, schemas_of
from runtime.models.calls import AnswerReader, Call, Form, Thought, form_of, tools_grammar
from runtime.models.chat import call_form, chat_prompt, read_turns
from runtime.models.loading import load_pretrained
from runtime.models.tools import Tools
from runtime.values import Request, RequestError
from server import core
from server.options import Options
from server.service import Service
from server.worker import Job

CITY = {
    "type": "object", "required": ["city"], "$defs": {"days": {"type": "integer"}},
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
}  # fmt: skip
WEATHER = {"name": "weather", "description": "Tells the weather.", "parameters": CITY}
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, {"name": "time"})]
ASK = [{"role": "user", "content": "Rome?"}]
# In Hermes' form, as a template would show it.
HERMES = (
    "{% if tools %}{{ tools | tojson }} Answer with <tool_call>\n"
    '{"name": <name>, "arguments": <object>}\n</tool_call>;{% endif %}'
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>"
    "{% endfor %};{% endfor %}"
)
ROME, TIME = '{"city": "Rome", "days": 3}', "{}"
TAGGED, GENERAL = Form(has_tags=True, in_template=True), Form()
USAGE = {
    "prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 0},
}  # fmt: skip
TAGS = "<tool_call>", "</tool_call>", "<think>", "</think>"


def call_text(name, arguments, form):
    """A call as the forms' descriptions have it."""
    text = f'{{"name": "{name}", "arguments": {arguments}}}'
    return f"<tool_call>\n{text}\n</tool_call>" if form.has_tags else text


class Canned(Service):
    """A service whose model says `text`, which comes in pieces of `size` characters."""

    text, size, reason = "", 1000, "stop"
    logprobs = None  # of the text's tokens, each of which is an event then

    def begin(self, fields, prompts=None):
        self.fields = fields
        job = Job(Request([1], n=fields.get("n") or 1).choices, LIMIT_S)
        for run in job.runs:
            self.write(job, run)
            job.end_run()
        return job, fields.get("stream", False), []

    def write(self, job, run):
        for i in range(0, len(self.text), self.size) if self.logprobs is None else ():
            pieces = [(self.text[i : i + self.size], "bonus")]
            job.push_event(run, {"pieces": pieces, "tokens": []})
        begin = 0
        for entry in self.logprobs or ():
            end = begin + len(entry["token"])
            event = {"pieces": [(self.text[begin:end], "bonus")], "logprobs": [entry]}
            job.push_event(run, event | {"tokens": []})
            begin = end

    def answer(self, runs, notes):
        body = {"text": self.text, "finish_reason": self.reason, "usage": USAGE}
        body |= {} if self.logprobs is None else {"logprobs": self.logprobs}
        return body | {"choices": [body] * len(runs)}


@pytest.fixture(scope="module")
def service(chat_folder):
    options = Options(model=str(chat_folder("llama")), drafter="ngram")
    return Canned(core.load_engine(options), options)


@pytest.fixture(scope="module")
def create(service):
    """The openai client's chat.completions.create, which the canned service answers on a socket."""
    app = core.create_app(service)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever).start()
    with Client(server.server_port).openai() as client:
        usual = {"model": service.name, "messages": ASK, "tools": TOOLS}
        yield lambda **fields: client.chat.completions.create(**usual | fields)
    server.shutdown()
    server.server_close()
    app.extensions["worker"].drain(LIMIT_S)


@pytest.fixture
def says(service, monkeypatch):
    def set_text(text, form=TAGGED, **more):
        monkeypatch.setattr("server.dialects.chat.call_form", lambda tokenizer: form)
        for name, value in {"text": text, **more}.items():
            monkeypatch.setattr(service, name, value)

    return set_text


THINKING = TAGGED._replace(thinks=True)
FORMS = {"tags": TAGGED, "general": GENERAL, "thinking": THINKING}
FORMS["general, thinking"] = GENERAL._replace(thinks=True)
# What a model says in a form, and what ended it; what a client reads, and what is said to end it.
ANSWERS = json.loads(Path(__file__).with_name("answers_with_calls.json").read_text("utf-8"))


@pytest.mark.parametrize("size", [7, 1000])
@pytest.mark.parametrize("name", ANSWERS)
def test_content_reasoning_and_calls_stand_side_by_side_whole_or_streamed(create, says, name, size):
    answer = ANSWERS[name]
    content, thought, end = answer["content"], answer["reasoning"], answer["end"]
    calls = [tuple(call) for call in answer["calls"]]
    says(answer["text"], FORMS[answer["form"]], reason=answer["reason"], size=size)
    for tools in (TOOLS,) if calls else (TOOLS, []):
        (choice,) = create(tools=tools).choices
        message, made = choice.message, choice.message.tool_calls
        assert message.content == content and choice.finish_reason == end
        assert message.model_extra.get("reasoning_content") == thought
        assert [(c.function.name, c.function.arguments) for c in made or ()] == calls
        assert (made is None) == (not calls) and len({call.id for call in made or ()}) == len(calls)
        assert all(call.type == "function" and call.id.startswith("call_") for call in made or ())
        *chunks, last = [chunk.choices[0] for chunk in create(tools=tools, stream=True)]
        deltas = [chunk.delta for chunk in chunks]
        assert "".join(delta.content or "" for delta in deltas) == (content or "")
        thoughts = [delta.model_extra.get("reasoning_content", "") for delta in deltas]
        assert "".join(thoughts) == (thought or "") and deltas[0].role == "assistant"
        streamed = [call for delta in deltas for call in delta.tool_calls or ()]
        assert [(c.function.name, c.function.arguments) for c in streamed] == calls
        assert [(c.index, c.type) for c in streamed] == [(i, "function") for i in range(len(calls))]
        assert last.finish_reason == end and not last.delta.model_dump(exclude_none=True)


@pytest.mark.parametrize(("text", "form", "expected"), [
    ("a <tool_cat b", TAGGED, ["a", " <tool_cat b"]),  # at the first end of nine a tag may begin
    ('{"named": 1}', GENERAL, ['{"named":', " 1}"]),
])  # fmt: skip
def test_a_stream_holds_back_no_more_than_may_become_a_call(create, says, text, form, expected):
    says(text, form, size=9)
    parts = [c.choices[0].delta.content for c in create(stream=True)]
    assert [part for part in parts if part] == expected


def test_each_choice_has_calls_of_its_own(create, says):
    """What is held back of one is no part of another."""
    says("I ask.\n" + call_text("time", TIME, TAGGED), size=5)
    choices = create(n=2).choices
    assert [choice.index for choice in choices] == [0, 1]
    ids = [call.id for choice in choices for call in choice.message.tool_calls]
    assert len({*ids}) == 2 and {choice.message.content for choice in choices} == {"I ask."}
    chunks = [chunk.choices[0] for chunk in create(n=2, stream=True)]
    for index in (0, 1):
        *deltas, last = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.delta.content or "" for chunk in deltas) == "I ask."
        (call,) = [call for chunk in deltas for call in chunk.delta.tool_calls or ()]
        assert (call.index, call.function.name) == (0, "time")
        assert last.finish_reason == "tool_calls"


calls = [call_text("time", TIME, form) for form in (TAGGED, GENERAL)]
texts = st.lists(st.sampled_from([*calls, *TAGS, *' \n{}"a<', ROME]), max_size=9).map("".join)


@settings(max_examples=100, deadline=None, database=None)
@given(text=texts, cuts=st.lists(st.integers(0, 200)), form=st.sampled_from([*FORMS.values()]))
def test_an_answer_is_read_alike_however_it_is_cut(text, cuts, form):
    def read(*pieces):
        reader = AnswerReader(form, {"time"})
        parts = list[object]()
        for piece in (*pieces, None):
            for part in reader.finish() if piece is None else reader.feed(piece):
                parts.append(part)
                end = reader.position
                assert not isinstance(part, str) or text[end - len(part) : end] == part
        content = "".join(part for part in parts if isinstance(part, str))
        thought = "".join(part.text for part in parts if isinstance(part, Thought))
        return content, thought, [part for part in parts if isinstance(part, Call)]

    ends = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]
    assert read(*pieces) == read(text)
    if "name" not in text and not form.thinks:
        assert read(text) == (text, "", [])


# -------------------------------------------------------------------------------- the grammar
@pytest.fixture(scope="module")
def accepts():
    """Whether a grammar allows a text and its end, with tags as texts or as tokens."""
    plain, tagged = (AutoTokenizer.from_pretrained(TARGET) for _ in range(2))
    tagged.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    both = [(each, llguidance.hf.from_tokenizer(each)) for each in (plain, tagged)]

    def check(grammar, text, has_tokens):
        tokenizer, known = both[has_tokens]
        matcher = llguidance.LLMatcher(known, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return check


ANSWER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ways = [way for way in product([False, True], repeat=6) if not way[2] or way[0] or way[1]]


@pytest.mark.parametrize(("tags", "thinks", "tokens", "forced", "parallel", "has_answer"), ways)
def test_a_grammar_allows_what_parses(accepts, tags, thinks, tokens, forced, parallel, has_answer):
    form = Form(has_tags=tags, thinks=thinks, tokens=frozenset(TAGS if tokens else ()))
    tools = Tools(TOOLS, form, is_forced=forced, is_parallel=parallel)
    grammar = tools.grammar(ANSWER if has_answer else None)
    is_free = not forced and not has_answer
    rome, time = call_text("weather", ROME, form), call_text("time", TIME, form)
    expected = {
        rome: True,
        f"{rome}\n{time}": parallel and tags,
        rome.replace("3", '"3"'): False,
        rome.replace("city", "town"): False,
        rome[:-1]: False,
        time.replace("{}", '{"a": 1}'): False,
        time.replace("time", "times"): False,
        f"{time}x": False,
        "Hi": is_free,
        "": is_free,
        "\n{": is_free and tags,
        '{"a": 3}': not forced and (has_answer or tags),
        '{"a": "3"}': is_free and tags,
    }
    if tags:
        expected[f"I ask. {rome}"] = is_free
        expected["I ask. <tool_call> it"] = False
    if not tokens:  # reasoning stands before the grammar begins
        expected["<think> a"] = is_free and not thinks
    for text, allowed in expected.items():
        assert accepts(grammar, text, tokens) == bool(allowed), (text, grammar)


@pytest.mark.parametrize("has_tokens", [False, True], ids=["texts", "tokens"])
def test_a_grammar_begins_behind_reasoning_whatever_its_tags_are(accepts, has_tokens):
    call = call_text("time", TIME, TAGGED)
    form = Form(has_tags=True, thinks=True, tokens=frozenset(TAGS if has_tokens else ()))
    for forced in (False, True):
        grammar = Tools(TOOLS, form, is_forced=forced).grammar()
        possible = {call: True, f"<think>a b</think>\n\n{call}": True, f"a</think>{call}": False}
        opened = {call: False, f"a b</think>\n{call}": True}
        for reasoning, texts in (POSSIBLE, possible), (OPEN, opened):
            source = source_of(LARK, grammar, reasoning, has_tokens)
            for text, allowed in texts.items():
                is_text = not forced and reasoning == POSSIBLE and text[0] == "a" and not has_tokens
                assert accepts(source, text, has_tokens) == (allowed or is_text), (text, source)


def test_a_named_tool_is_called_once_and_no_other_is(accepts):
    grammar = Tools(TOOLS, TAGGED, named="time", is_forced=True).grammar()
    rome, time = call_text("weather", ROME, TAGGED), call_text("time", TIME, TAGGED)
    for text, allowed in ((time, True), (rome, False), (f"{time}\n{time}", False)):
        assert accepts(grammar, text, False) == allowed


@pytest.mark.parametrize(("schema", "given", "allowed"), [
    ({"properties": {"a": {}}}, '{"b": 1}', False),
    ({"properties": {"a": {}}, "additionalProperties": True}, '{"b": 1}', True),
    ({"additionalProperties": {"type": "integer"}}, '{"b": 1}', True),
    ({"type": "object"}, '{"b": 1}', True),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"b": {}}}}}, '{"b": 1}', True),
    ({}, "{}", True),
    ({}, "[]", False),
])  # fmt: skip
def test_arguments_have_no_property_that_is_not_in_the_schema(accepts, schema, given, allowed):
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    grammar = Tools([tool], GENERAL, is_forced=True).grammar()
    assert accepts(grammar, call_text("f", given, GENERAL), False) == allowed


def test_tags_that_a_tokenizer_calls_special_are_text(tiny_folder, tmp_path):
    """Else nobody would see where a call begins."""
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    special = [AddedToken(tag, special=True, normalized=False) for tag in (*TAGS, "<other>")]
    tokenizer.add_tokens(special, special_tokens=True)
    ids = tokenizer("a<tool_call>b<other></think>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    tokenizer.save_pretrained(folder)
    read = load_pretrained(str(folder), Options(model=str(folder))).tokenizer
    read.chat_template = HERMES
    assert call_form(read).tokens == {"<tool_call>", "</tool_call>"}
    assert read("a<tool_call>b<other></think>")["input_ids"] == ids
    assert read.decode(ids, skip_special_tokens=True) == "a<tool_call>b</think>"


# -------------------------------------------------------------------------------- the prompt
ASSISTANT = {"role": "assistant", "content": None}
CALLS = [
    {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": given}}
    for i, (name, given) in enumerate((("weather", ROME), ("time", "{broken")))
]
CALLED = ASSISTANT | {"tool_calls": CALLS}
RESULTS = [{"role": "tool", "tool_call_id": f"c{i}", "content": "ok"} for i in (0, 1)]
HISTORY = [*ASK, CALLED, *RESULTS]


def prompt(template, messages, tools=None):
    """What is read, by a tokenizer whose ids are a text's characters."""
    letters = Mock(side_effect=lambda text, **_: {"input_ids": list(text)}, special_tokens_map={})
    letters.chat_template = letters.get_chat_template.return_value = template
    letters.get_added_vocab.return_value, letters.get_vocab.return_value = {}, {"a": 0}
    return "".join(chat_prompt(messages, letters, 10_000, tools))


def test_a_template_that_knows_tools_gets_them_with_arguments_as_objects():
    tools = Tools(TOOLS, form_of(HERMES))
    listed, *turns = prompt(HERMES, HISTORY, tools).removesuffix(";").split(";")
    assert ";".join(turns) + ";" == prompt(HERMES, HISTORY)
    listed, _ = listed.split("\n", 1)
    assert json.loads(listed.removesuffix(" Answer with <tool_call>")) == TOOLS
    assert turns == [
        "user: Rome?",
        f'assistant: <tool_call>weather {ROME}</tool_call><tool_call>time "{{broken"</tool_call>',
        "tool: ok",
        "tool: ok",
    ]


def test_a_template_for_tools_in_an_unknown_form_is_left_for_the_usual_one():
    """It would be rendered without its tools, and may refuse."""
    tokenizer = Mock(side_effect=lambda text, **_: {"input_ids": list(text)}, special_tokens_map={})
    own = "{% for tool in tools %}<tool_call>{{ tool }}{% endfor %}"
    tokenizer.get_chat_template = lambda tools: PLAIN if tools is None else own
    tokenizer.get_added_vocab.return_value, tokenizer.get_vocab.return_value = {}, {"a": 0}
    said = "".join(chat_prompt(ASK, tokenizer, 10_000, Tools(TOOLS, form_of(own))))
    assert said.startswith("[system: You can call these tools:")


def test_a_call_without_arguments_has_an_empty_object():
    call = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": ""}}
    (turn,) = read_turns([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert turn["tool_calls"][0]["function"]["arguments"] == "{}"


def test_a_grammar_of_tools_has_nothing_that_is_for_people():
    named = {"title": {"type": "string", "title": "x"}, "kind": {"enum": [{"title": "y"}]}}
    parameters = {"type": "object", "description": "z" * 999, "properties": named}
    rules = tools_grammar([{"name": "f", "parameters": parameters}], GENERAL, True, False, None)
    (schema,) = schemas_of(rules)
    assert schema["properties"] == {"title": {"type": "string"}, "kind": named["kind"]}
    assert "zz" not in rules


PLAIN = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"


def test_a_template_without_tools_gets_them_in_a_system_text_and_results_as_the_users():
    tools, listed = Tools(TOOLS, GENERAL), "\n".join(map(json.dumps, TOOLS))
    said = prompt(PLAIN, HISTORY, tools)
    system, begin, turns = said.partition("[user")
    assert said.startswith(f"[system: You can call these tools:\n{listed}\n")
    assert system.endswith('{"name": "NAME", "arguments": {ARGUMENTS}}]')
    turns = f"{begin}{turns}"
    assert turns == prompt(PLAIN, HISTORY)
    assert turns == (
        f'[user: Rome?][assistant: {{"name": "weather", "arguments": {ROME}}}\n'
        '{"name": "time", "arguments": {broken}]'
        "[user: weather returned:\nok\ntime returned:\nok]"
    )
    first = {"role": "system", "content": "Be brief."}
    assert prompt(PLAIN, [first, *ASK], tools).startswith("[system: Be brief.\n\nYou can call")
    assert prompt(PLAIN, ASK) == "[user: Rome?]"


def test_no_message_vanishes_for_its_role():
    """A template may write the roles that it knows alone."""
    known = "{% for m in messages %}{% if m.role in ['system', 'user'"
    known += "] %}[{{ m.role }}: {{ m.content }}]{% endif %}{% endfor %}"
    told = [{"role": "developer", "content": "Be brief."}, *ASK]
    assert prompt(known, told) == "[system: Be brief.][user: Rome?]"
    said = prompt(known, told, Tools(TOOLS, GENERAL))
    assert said.startswith("[system: Be brief.\n\nYou can call these tools:")
    more = known.replace("'user'", "'user', 'developer', 'function', 'bot'")
    assert prompt(more, told) == "[developer: Be brief.][user: Rome?]"
    assert prompt(more, [*ASK, {"role": "bot", "content": "a"}]) == "[user: Rome?][bot: a]"
    for template, role in ((known, "bot"), (more, "function"), ("{{ '' }}", "")):
        with pytest.raises(RequestError, match=r"messages\[1\].role must be system, developer, u"):
            prompt(template, [*ASK, {"role": role, "content": "a"}])


@pytest.mark.parametrize(("template", "form"), [
    (PLAIN, Form()),
    (HERMES, TAGGED),
    (HERMES + "<think></think>", TAGGED._replace(thinks=True)),
    (HERMES.replace("\n", "\\n").replace('"', '\\"'), TAGGED),
    (HERMES.replace('{"name"', '{{"name"').replace("<object>}", "<object>}}"), Form()),
    (PLAIN + "{{ tools }}<tool_call><function=f>", Form()),
    (
        PLAIN + '{{ tools }}{"name": name, "parameters": object}',
        Form(key="parameters", in_template=True),
    ),
])  # fmt: skip
def test_a_template_shows_its_form(template, form):
    assert form_of(template) == form
    assert form_of(template, {"<tool_call>", "<other>"}).tokens == {"<tool_call>"}


# ------------------------------------------------------------------------------- what is sent
def test_what_is_sent_goes_into_the_prompt_and_the_grammar_and_with_none_into_neither(
    create, service, says
):
    """An answer's format goes with tools."""
    form = TAGGED._replace(in_template=False)
    says("Hi", form)
    assert create(tool_choice="none").choices[0].message.content == "Hi"
    without, fields = service.fields["prompt"], service.fields
    assert "grammar" not in fields
    create(tools=openai.NOT_GIVEN)
    assert service.fields["prompt"] == without and "grammar" not in service.fields
    time = {"type": "function", "function": {"name": "time"}}
    for sent, how in (
        ({}, {}),
        ({"tool_choice": "auto"}, {}),
        ({"tool_choice": "required"}, {"is_forced": True}),
        ({"tool_choice": time}, {"is_forced": True, "named": "time"}),
        ({"parallel_tool_calls": False}, {"is_parallel": False}),
    ):
        create(**sent)
        assert len(service.fields["prompt"]) != len(without)
        assert service.fields["grammar"] == Tools(TOOLS, form, **how).grammar()
    answer = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}
    create(response_format=answer)
    assert service.fields["grammar"] == Tools(TOOLS, form).grammar(ANSWER)
    assert "response_format" not in service.fields
