"""How a model writes calls of tools: the grammar that it must keep to, and how its answer is read.

    tools → Lark text (for llguidance) → a text that the model writes → content and calls

A family of models has a form. In Hermes' and Qwen's, calls stand between tags, behind any text:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Rome"}}
    </tool_call>

In the general form the answer is one JSON object like that, or a text. Llama says "parameters" in
place of "arguments". A chat template shows which form its model was trained on. Where it shows
none, the general form is explained in a system text.

Lark's dialect is that of llguidance: docs/syntax.md in guidance-ai/llguidance.
"""

import json
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from runtime.values import Json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THOUGHT = "<think>", "</think>"  # around reasoning
TAGS = OPEN, CLOSE, _THINK, _THOUGHT
_OBJECT = '{"name":"'  # what a call begins with, but for spaces
_BEGINNING = 1000  # characters of an answer in which a call's first words stand
_MOST_CALLS = 16  # in one answer: a small model may never come to an end
_NESTED = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties", "additionalProperties"}
# The spacing that models were trained on. Where it is not free, most of a call is forced.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_decoder = json.JSONDecoder()


class Call(NamedTuple):
    """A call: a tool's name, and its arguments as the model wrote them."""

    name: str
    arguments: str  # JSON, unless max_tokens cut it


class Thought(NamedTuple):
    """A piece of an answer's reasoning, without the tags around it."""

    text: str


Part = str | Thought | Call  # a piece of the content, or of the reasoning, or a whole call


class Form(NamedTuple):
    """How a family writes calls."""

    has_tags: bool = False  # whether calls stand between tags
    key: str = "arguments"  # under which a call has them
    in_template: bool = False  # whether the chat template explains it
    tokens: frozenset[str] = frozenset()  # the tags that are tokens of the vocabulary
    thinks: bool = False  # whether <think> … </think> may stand before all else


def form_of(template: str, added: Collection[str] = ()) -> Form:
    """The form that a chat template shows; `added` are the texts of the added tokens.

    Example: a template that names no tools -> Form(), the general form.
    """
    source = template.replace("\\n", "\n").replace('\\"', '"')
    tokens = frozenset({OPEN, CLOSE} & {*added})
    form = Form(tokens=tokens, thinks=_THINK in source and _THOUGHT in source)
    if not re.search(r"\btools\b", source):
        return form
    # Qwen2.5-Coder's template shows two braces, and its models leave the tags out: they make calls
    # in the general form alone.
    if re.search(OPEN + r'\s*\{"name": .{1,40}"arguments": ', source):
        return form._replace(has_tags=True, in_template=True)
    if re.search(r'\{"name": .{1,40}"parameters": ', source) and OPEN not in source:
        return form._replace(key="parameters", in_template=True)
    return form


# ------------------------------------------------------------------------------- the grammar
def tools_grammar(
    functions: list[Json], form: Form, is_forced: bool, is_parallel: bool, answer: Json | None
) -> str:
    """The Lark text of an answer with calls of these functions ({name, parameters}).

    `is_forced` asks for at least one call, and for nothing else. Otherwise a text is free up to
    where a call begins, or it is JSON of the schema `answer`. `is_parallel` allows several calls
    where they have tags: without, a small model calls and calls. Reasoning, which may stand before
    all that, is no part of it.
    """
    names = [f"call{i}" for i in range(len(functions))]
    call, opening = f"({' | '.join(names)})", ""
    if form.has_tags:
        call, opening = f'"\\n" {call} "\\n" {_tag(CLOSE, form)}', _tag(OPEN, form)
    rules = [f"one: {call}"]
    for name, function in zip(names, functions, strict=True):
        # In the pieces that JSON schemas are read in, too: so a call may stand beside an answer.
        begin = "{", '"name"', ": ", f'"{function["name"]}"', ", ", f'"{form.key}"', ": "
        rules.append(f'{name}: {" ".join(map(json.dumps, begin))} {name}_arguments "}}"')
        rules.append(f"{name}_arguments: {_json(_closed(function.get('parameters')))}")
    calls = "one"
    if is_parallel and form.has_tags:
        calls += f' ("\\n" {opening} one){{0,{_MOST_CALLS - 1}}}'
    if is_forced:
        start = f"{opening} {calls}"
    elif answer is not None:
        start = f"{opening} {calls} | text"
        rules.append(f"text: {_json(answer)}")
    else:
        start = f"{'begin' if form.has_tags else ''} {calls} | text"
        rules += _free_text(form)
    return "\n".join([f"start: {start}", *rules]) + "\n"


def _tag(tag: str, form: Form) -> str:
    """A tag in Lark: a token by its name, or a text."""
    return tag if tag in form.tokens else f'"{tag}"'


def _free_text(form: Form) -> list[str]:
    """Rules of a text without calls, and of one up to the tag that begins a call."""
    text = r"/(.|\n)*/" if form.has_tags else r"/\s*[^{\s](.|\n)*/"  # a JSON object is a call
    if form.thinks:  # reasoning is no text in which calls are looked for
        text += f" & ~/{_THINK}(.|\\n)*/"
    rules = ["text: TEXT?", f"TEXT: {text}"]
    if form.has_tags:
        # The rule is lazy: the text ends at its first tag. A tag that is a token ends it, too.
        rules.append(f'begun[lazy]: TEXT "{OPEN}"')
        rules.append(f"begin: begun{f' | TEXT? {OPEN}' if OPEN in form.tokens else ''}")
    return rules


def _json(schema: Json) -> str:
    from runtime.grammars.measure import without_notes  # here, as other answers need no grammars

    return f"%json {json.dumps(without_notes(schema) | {'x-guidance': _SPACING})}"


def _closed(parameters: Json | None) -> Json:
    """A function's schema, for an object with no other properties than it names, if it names any.

    A schema that says more about others stays as it is. A narrower schema is kept to as well.
    """
    schema = {"type": "object"} | (parameters or {"properties": {}})
    if "properties" not in schema or _NESTED & schema.keys():
        return schema
    return schema | {"additionalProperties": False}


# --------------------------------------------------------------------------------- the answer
def written(calls: list[Call], form: Form) -> str:
    """Calls as the model would have written them.

    Example: Form(), [Call("f", "{}")] -> '{"name": "f", "arguments": {}}'.
    """
    texts = [f'{{"name": "{name}", "{form.key}": {arguments}}}' for name, arguments in calls]
    return "\n".join(f"{OPEN}\n{text}\n{CLOSE}" if form.has_tags else text for text in texts)


class AnswerReader:
    """Reads an answer while it is written: as parts, which are content, reasoning and calls.

    What may become a call is held back, and so are spaces before it. The parts say the same however
    the answer is cut into pieces. Reasoning stands between <think> and </think>, before all else;
    spaces within and behind these tags are no part of anything.
    """

    def __init__(self, form: Form, names: Collection[str] = (), is_reasoning: bool = False) -> None:
        """`names` are those of the tools: an object that names no tool is content.

        `is_reasoning` says that the prompt has opened reasoning already.
        """
        self.num_calls = 0  # that are whole
        self._names = names
        self._held, self._may_end, self._has_thought, self._num_fed = "", False, False, 0
        # begin → (reason → gap) → text → rest (what is left is content)
        self._state = "reason" if is_reasoning else "begin" if form.thinks else "text"
        # In the general form a call begins only where the answer does.
        self._tag = OPEN if form.has_tags and names else ""
        self._call = re.compile(
            rf'\s*\{{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"{form.key}"\s*:\s*(?=\{{)'
        )

    @property
    def position(self) -> int:
        """Where the part that came last ends in the answer; content stands there as it is."""
        return self._num_fed - len(self._held)

    def feed(self, text: str) -> Iterator[Part]:
        """The parts that are complete with this piece of text. The caller takes all of them."""
        self._held += text
        self._num_fed += len(text)
        self._may_end = "}" in text  # else an object that was not whole is not whole now
        while part := self._next():
            self.num_calls += isinstance(part, Call)
            yield part

    def finish(self, is_cut: bool = True) -> list[Part]:
        """The parts that are left when no more text comes.

        `is_cut` says that the text was too long: then a call may be cut in its arguments. Else a
        call that is not whole is content.
        """
        if self._state == "reason":  # which was cut, perhaps in its end tag
            text = self._held.rstrip()
            return [Thought(text)] if text else []
        text = self._held.lstrip()
        if text.startswith(self._tag) and self._state != "rest":
            call, end = self._read(text.removeprefix(self._tag))
            self.num_calls += bool(end)
            if call is not None and (end or is_cut):
                return [call]
        # Spaces behind calls are no content.
        is_content = text or (self._held and not self.num_calls)
        return [self._take(len(self._held))] if is_content else []

    def _next(self) -> Part | None:
        """Take the next part, or a first piece of it, from what is held; None if more must come."""
        if self._state == "begin":
            begin = self._held.lstrip()
            if _THINK.startswith(begin[: len(_THINK)]) and len(begin) < len(_THINK):
                return None
            self._state = "reason" if begin.startswith(_THINK) else "text"
            if self._state == "reason":
                self._held = begin.removeprefix(_THINK)
        if self._state == "reason" and (thought := self._next_thought()):
            return thought
        if self._state == "gap":
            self._held = self._held.lstrip()
            self._state = "text" if self._held else "gap"
        if self._state == "rest" or (self._state == "text" and not self._names):
            return self._take(len(self._held))
        if self._state != "text":
            return None
        return self._next_tagged() if self._tag else self._next_object()

    def _next_thought(self) -> Thought | None:
        if not self._has_thought:
            self._held = self._held.lstrip()
        end = self._held.find(_THOUGHT)
        known = self._held[: end if end >= 0 else len(self._held) - _overlap(self._held, _THOUGHT)]
        text = self._take(len(known.rstrip()))
        if end >= 0:
            self._held = self._held.lstrip().removeprefix(_THOUGHT)
            self._state = "gap"
        self._has_thought = self._has_thought or bool(text)
        return Thought(text) if text else None

    def _next_tagged(self) -> str | Call | None:
        at = self._held.find(self._tag)
        end = at if at >= 0 else len(self._held) - _overlap(self._held, self._tag)
        if content := self._held[:end].rstrip():
            return self._take(len(content))
        if at < 0 or CLOSE not in self._held:
            return None
        text = self._held[at + len(self._tag) :]
        call, end = self._read(text)
        behind = text[end:].lstrip()
        if not end or not behind.startswith(CLOSE):
            return None
        self._held = behind.removeprefix(CLOSE)
        return call

    def _next_object(self) -> str | Call | None:
        compact = "".join(self._held.lstrip()[:_BEGINNING].split())
        if not compact.startswith(_OBJECT) and not _OBJECT.startswith(compact):
            self._state = "rest"
            return self._take(len(self._held))
        if not self._may_end:
            return None
        call, end = self._read(self._held)
        self._take(end)
        return call if end else None

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken

    def _read(self, text: str) -> tuple[Call | None, int]:
        """The call that a text begins with, and where it ends; 0 while it is not whole."""
        head = self._call.match(text)
        if not head or head[1] not in self._names:
            return None, 0
        begin = head.end()
        try:
            _, end = _decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            return Call(head[1], text[begin:]), 0
        closed = re.compile(r"\s*\}").match(text, end)
        return Call(head[1], text[begin:end]), closed.end() if closed else 0


def _overlap(text: str, tag: str) -> int:
    """The length of the text's longest ending that a tag begins with.

    Example: "a <tool", "<tool_call>" -> 5.
    """
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(tag[:n])), 0)
