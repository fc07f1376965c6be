"""The tools of a request: what a client may send, and how a conversation with them is written.

    tools, tool_choice, parallel_tool_calls → Tools → the prompt's messages, and a grammar

Where the chat template knows tools, it writes them. Elsewhere a system text lists them and says how
they are called (calls.py), and their results are messages of the user.
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from runtime.values import Json

from .calls import AnswerReader, Call, Form, tools_grammar, written
from .prompts import bad_field

_MOST_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHOICES = "none", "auto", "required"


@dataclass(frozen=True)
class Tools:
    """What a model may call, how it writes that, and whether it has to."""

    tools: list[Json]  # as they were sent
    form: Form
    named: str | None = None  # the tool that is to be called
    is_forced: bool = False  # whether the answer has to be a call
    is_parallel: bool = True  # whether it may be several

    @property
    def functions(self) -> list[Json]:
        """The functions that may be called: {name, description, parameters}."""
        functions = [tool["function"] for tool in self.tools]
        return [one for one in functions if self.named in (None, one["name"])]

    def grammar(self, answer: Json | None = None) -> str:
        """What the answer has to be, in Lark; `answer` is the schema of one without calls."""
        is_parallel = self.is_parallel and not self.named
        return tools_grammar(self.functions, self.form, self.is_forced, is_parallel, answer)

    def reader(self, is_reasoning: bool = False) -> AnswerReader:
        """What reads the calls in an answer, which may begin amid reasoning."""
        return AnswerReader(self.form, {one["name"] for one in self.functions}, is_reasoning)

    @property
    def text(self) -> str:
        """The system text for a model whose chat template does not know tools."""
        listed = [json.dumps(tool, ensure_ascii=False) for tool in self.tools]
        call = written([Call("NAME", "{ARGUMENTS}")], self.form)
        when = "To call a tool, answer with JSON in this form, and with nothing else:"
        if self.is_forced:
            when = f"Now call {self.named or 'a tool'}. Answer with JSON in this form:"
        return "\n".join(["You can call these tools:", *listed, "", when, call])


def read_tools(fields: Json, form: Form) -> Tools | None:
    """Take the tools out of a request's fields; None where there are none, or none may be called.

    Raises RequestError.
    """
    names = "tools", "tool_choice", "parallel_tool_calls"
    tools, choice, is_parallel = (fields.pop(name, None) for name in names)
    if not isinstance(is_parallel, bool | None):
        raise bad_field("parallel_tool_calls must be true or false")
    if not isinstance(tools, list | None):
        raise bad_field("tools must be a list")
    listed = _names_of(tools or [])
    named = _chosen(choice, listed)
    if choice == "none" or not listed:
        return None
    is_forced = choice == "required" or named is not None
    return Tools(tools, form, named, is_forced, is_parallel is not False)


def _names_of(tools: list[Any]) -> set[str]:
    """The tools' names; all else of them is checked, too. Raises RequestError."""
    if len(tools) > _MOST_TOOLS:
        raise bad_field(f"tools has {len(tools)} entries; at most {_MOST_TOOLS} are read")
    names = set[str]()
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise bad_field(f"{where} must be an object with type: function")
        function = tool.get("function")
        where += ".function"
        if not isinstance(function, dict):
            raise bad_field(f"{where} must be an object")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise bad_field(f"{where}.name must be 1 to 64 letters, digits, _ or -")
        if name in names:
            raise bad_field(f"{where}.name: there are two tools with the name {name}")
        names.add(name)
        for key, kind, what in (
            ("description", str, "a text"), ("strict", bool, "true or false"),
            ("parameters", dict, "a JSON schema of an object"),
        ):  # fmt: skip
            if not isinstance(function.get(key), kind | None):
                raise bad_field(f"{where}.{key} must be {what}")
        if (function.get("parameters") or {}).get("type", "object") != "object":
            raise bad_field(f"{where}.parameters must be a JSON schema of an object")
    return names


def _chosen(choice: Any, names: set[str]) -> str | None:
    """The tool that a tool_choice names."""
    if choice in (None, "none") or (choice == "auto" and not names):
        return None
    named = None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        named = function.get("name") if isinstance(function, dict) else None
    if not isinstance(named, str) and choice not in _CHOICES:
        form = '{"type": "function", "function": {"name": "…"}}'
        raise bad_field(f"tool_choice must be {', '.join(_CHOICES)} or {form}")
    if not names:
        raise bad_field("tool_choice goes with tools")
    if named is not None and named not in names:
        raise bad_field("tool_choice names a tool that is not among tools")
    return named


def read_calls(calls: Any, where: str) -> list[Json]:
    """The calls in an assistant's message, checked. Raises RequestError."""
    if not isinstance(calls, list):
        raise bad_field(f"{where} must be a list")
    return [_read_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _read_call(call: Any, where: str) -> Json:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise bad_field(f"{where} must be an object with type: function")
    function = call.get("function") if isinstance(call.get("function"), dict) else {}
    texts = {"id": call.get("id")} | {key: function.get(key) for key in ("name", "arguments")}
    texts["arguments"] = "{}" if texts["arguments"] == "" else texts["arguments"]
    for key, text in texts.items():
        if not isinstance(text, str):
            raise bad_field(f"{where}: {key} must be a text")
    return {"id": texts.pop("id"), "type": "function", "function": texts}


def check_results(turns: list[Json]) -> None:
    """Raises RequestError for a tool's result without a call before it."""
    called = set[str]()
    for i, turn in enumerate(turns):
        called |= {call["id"] for call in turn.get("tool_calls", ())}
        if turn["role"] == "tool" and turn["tool_call_id"] not in called:
            raise bad_field(f"messages[{i}] is the result of a call that no message before it has")


def turns_for_template(turns: list[Json], form: Form, tools: Tools | None) -> list[Json]:
    """The messages as a chat template reads them: a call's arguments are an object, if they can be.

    For a template that does not know tools, calls and results become texts, and the first system
    message lists the tools.
    """
    if form.in_template:
        return [_with_objects(turn) for turn in turns]
    texts = _as_texts(turns, form)
    if tools is None:
        return texts
    first, *others = texts
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": tools.text}, *texts]
    return [first | {"content": f"{first['content']}\n\n{tools.text}"}, *others]


def _with_objects(turn: Json) -> Json:
    if "tool_calls" not in turn:
        return turn
    calls = []
    for call in turn["tool_calls"]:
        arguments = call["function"]["arguments"]
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return turn | {"tool_calls": calls}


def _as_texts(turns: list[Json], form: Form) -> list[Json]:
    """Messages in which results are the user's. Results in a row are one: roles take turns."""
    texts, names, before = list[Json](), dict[str, str](), ""
    for turn in turns:
        role, content = turn["role"], turn["content"]
        calls = turn.get("tool_calls", [])
        names |= {call["id"]: call["function"]["name"] for call in calls}
        if calls:
            called = written([Call(**call["function"]) for call in calls], form)
            content = f"{content}\n{called}" if content else called
        if role == "tool":
            content = f"{names[turn['tool_call_id']]} returned:\n{content}"
        if role == before == "tool":
            texts[-1]["content"] += f"\n{content}"
        else:
            texts.append({"role": "user" if role == "tool" else role, "content": content})
        before = role
    return texts
