"""From a conversation to a prompt's token ids, or an error that names the field.

A chat template is code that comes with the model, and runs in a process with limits (template.py).
"""

import json
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer as Backend

from runtime.values import TOO_SLOW, Json, RequestError

from .calls import TAGS, Form, form_of
from .prompts import (
    Conversation,
    Tokenizer,
    bad_field,
    check_characters,
    is_text,
    long_texts,
    tokenize,
)
from .template import renderer
from .tools import Tools, check_results, read_calls, turns_for_template

_MAX_MESSAGES = 2000  # each takes a chat template 10 µs, and some templates are quadratic
_MESSAGE_COST = 50  # characters that take as long as a message
_TEMPLATE_LIMIT_S = 5.0  # of a processor: a thousand times what templates take
_FOR_TEMPLATE = "chat_template_kwargs"  # what a client hands to the template
TEMPLATE_FIELDS = (
    "add_generation_prompt", "continue_final_message", "add_special_tokens", _FOR_TEMPLATE,
)  # fmt: skip
_MOST_OF_TEMPLATE = 10_000
_TEMPLATES_OWN = {  # names that the renderer itself gives, or takes for its own
    "messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "return_assistant_tokens_mask", "self",
}  # fmt: skip
_REASONING = "reasoning_content"
_ROLES = "system", "developer", "user", "assistant", "tool"


def prepare(tokenizer: Tokenizer, explained: AbstractContextManager[None]) -> None:
    """Get ready for chats with a tokenizer. Within `explained` its chat template is read."""
    _show_tags(tokenizer)
    if getattr(tokenizer, "chat_template", None):
        with explained:
            call_form(tokenizer)
        renderer.start()  # by its first prompt it will be ready


def _show_tags(tokenizer: Tokenizer) -> None:
    """Let tags of calls and of reasoning be text: some tokenizers leave them out as special."""
    known = getattr(tokenizer, "added_tokens_decoder", {}).values()
    if not any(token.special and token.content in TAGS for token in known):
        return
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] &= token["content"] not in TAGS
    tokenizer._tokenizer = Backend.from_str(json.dumps(content))


def joined(content: Any) -> str | None:
    """The text of a content, which may be a list of parts of type text; None of anything else."""
    if isinstance(content, list):
        of_text = (isinstance(part, dict) and part.get("type") == "text" for part in content)
        texts = [part.get("text") for part in content] if all(of_text) else [None]
        return "".join(texts) if all(isinstance(text, str) for text in texts) else None
    return content if isinstance(content, str) else None


def chat_ids(value: Any, tokenizer: Tokenizer, max_length: int) -> list[int]:
    """The ids of a conversation by the tokenizer's chat template.

    `value` is a text, which is a user's first message, or a list of messages.
    """
    if not tokenizer.chat_template:
        raise bad_field("chat: this model has no chat template")
    is_list = isinstance(value, list) and all(isinstance(turn, dict) for turn in value)
    if not value or not (is_list or isinstance(value, str)):
        what = "a non-empty string or messages where chat is true, not token ids"
        raise bad_field(f"prompt must be {what}")
    turns = value if is_list else [{"role": "user", "content": value}]
    try:
        return chat_prompt(turns, tokenizer, max_length)
    except RequestError as error:
        if not is_list:
            error.message = error.message.replace("messages[0]", "prompt")
        error.param = "prompt"
        raise


def template_options(fields: Json) -> Json:
    """Take what a chat says of its template out of the request's fields (see TEMPLATE_FIELDS).

    Returns what chat_prompt's `how` is. Raises RequestError.
    """
    sent = {
        name: value for name in TEMPLATE_FIELDS if (value := fields.pop(name, None)) is not None
    }
    for name, value in sent.items():
        if name != _FOR_TEMPLATE and not isinstance(value, bool):
            raise bad_field(f"{name} must be true or false")
    if not isinstance(more := sent.get(_FOR_TEMPLATE, {}), dict):
        raise bad_field(f"{_FOR_TEMPLATE} must be an object")
    try:
        is_short = len(json.dumps(more)) <= _MOST_OF_TEMPLATE
    except RecursionError:
        is_short = False
    if not is_short:
        raise bad_field(f"{_FOR_TEMPLATE} has more than {_MOST_OF_TEMPLATE} characters")
    if wrong := sorted(more.keys() & _TEMPLATES_OWN):
        raise bad_field(f"{_FOR_TEMPLATE} cannot set {wrong[0]}")
    if sent.get("continue_final_message") and sent.get("add_generation_prompt"):
        raise bad_field("add_generation_prompt must be false with continue_final_message")
    return sent


def chat_prompt(
    messages: Any, tokenizer: Tokenizer, max_length: int, tools: Tools | None = None,
    how: Json | None = None,
) -> Conversation:  # fmt: skip
    """The ids of a conversation with these tools, by the tokenizer's chat template.

    `how` has the TEMPLATE_FIELDS that were sent. Raises RequestError for messages that are none,
    and where there is no template.
    """
    turns, how = read_turns(messages), how or {}
    if how.get("continue_final_message") and turns[-1]["role"] != "assistant":
        raise bad_field("continue_final_message goes with a last message of the assistant")
    if not tokenizer.chat_template:
        why = "this model's tokenizer has no chat template: use /v1/completions"
        raise RequestError(why, param="messages")
    count = sum(map(_num_characters, turns)) + len(tools.text if tools else "")
    check_characters(count, tokenizer, max_length)
    with long_texts.take(count + _MESSAGE_COST * len(turns)):
        text = _render(turns, tokenizer, tools, how)
    # The template has written the special tokens already, mostly.
    has_more = how.get("add_special_tokens", False)
    ids = tokenize(text, tokenizer, max_length, add_special_tokens=has_more)
    conversation = Conversation(ids)
    conversation.goes_on = bool(how.get("continue_final_message"))
    return conversation


@lru_cache(1)
def call_form(tokenizer: Tokenizer) -> Form:
    """How the tokenizer's model writes calls of tools; of several templates, the one with tools."""
    if not tokenizer.chat_template:
        return Form()
    return form_of(tokenizer.get_chat_template(tools=[]), tokenizer.get_added_vocab())


def _num_characters(turn: Json) -> int:
    calls = [call["function"] for call in turn.get("tool_calls", ())]
    said = turn["role"], turn["content"], turn.get(_REASONING, "")
    return sum(map(len, [*said, *(text for call in calls for text in call.values())]))


def read_turns(messages: Any) -> list[Json]:
    """The messages of a conversation, checked, each as {role, content}. Raises RequestError.

    One that calls tools has `tool_calls`, in OpenAI's shape, and a tool's result `tool_call_id`.
    """
    if not isinstance(messages, list) or not messages:
        raise bad_field("messages must be a non-empty list")
    if len(messages) > _MAX_MESSAGES:
        raise bad_field(f"messages has {len(messages)} entries; at most {_MAX_MESSAGES} are read")
    turns = [_turn(message, i) for i, message in enumerate(messages)]
    check_results(turns)
    return turns


def _render(
    turns: list[Json], tokenizer: Tokenizer, tools: Tools | None = None, how: Json | None = None
) -> str:
    """The conversation as the chat template writes it.

    Raises RequestError: 400 where the template refuses or takes too much memory, 503 where it takes
    too long.
    """
    how = how or {}
    has_tools = tools or any(turn.keys() & {"tool_calls", "tool_call_id"} for turn in turns)
    is_continued = how.get("continue_final_message", False)
    has_prompt = how.get("add_generation_prompt", True) and not is_continued
    asked = {"add_generation_prompt": has_prompt, "continue_final_message": is_continued}
    asked |= how.get(_FOR_TEMPLATE, {})
    form = (tools.form if tools else call_form(tokenizer)) if has_tools else Form()
    try:
        # One of its own for tools may write calls in a form that is not known here.
        source = tokenizer.get_chat_template(tools=[] if form.in_template else None)
        turns = _in_roles(turns, source)
        if has_tools:
            turns = turns_for_template(turns, form, tools)
            asked["tools"] = tools.tools if tools and form.in_template else None
        asked |= {"chat_template": source, "conversations": [turns]}
        named = tokenizer.special_tokens_map
        asked |= {name: token for name, token in named.items() if name not in _TEMPLATES_OWN}
        text = renderer.render(_TEMPLATE_LIMIT_S, asked)
        if text and not is_text(text):
            raise ValueError("wrote a lone surrogate, which is not text")
    except TimeoutError:  # no mistake of the client's
        why = f"the model's chat template took longer than {_TEMPLATE_LIMIT_S:g} s on this machine"
        raise RequestError(why, status=503, code=TOO_SLOW) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the chat template {error}", param="messages") from error
    return text


def _in_roles(turns: list[Json], source: str) -> list[Json]:
    """The messages, those of developers as the system's if the template does not name developers.

    Many templates drop messages in roles that they do not name. So RequestError is raised for a
    role that is not OpenAI's, unless the template's source has its name in quotes.
    """

    def is_known(role: str) -> bool:
        return f"'{role}'" in source or f'"{role}"' in source

    for i, turn in enumerate(turns):
        role = turn["role"]
        # Templates have "" and "function", a tool's type, and neither is a role.
        if role not in _ROLES and (role in ("", "function") or not is_known(role)):
            raise bad_field(f"messages[{i}].role must be {', '.join(_ROLES[:-1])} or {_ROLES[-1]}")
    others = {} if is_known("developer") else {"developer": "system"}
    return [turn | {"role": others.get(turn["role"], turn["role"])} for turn in turns]


def _turn(message: Any, i: int) -> Json:
    where = f"messages[{i}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_field(f"{where} must be an object with a role")
    if message.get("function_call"):
        raise bad_field(f"{where} has a function_call, which is not supported: tool_calls are")
    turn = {"role": message["role"], "content": ""} | _about_tools(message, where)
    if turn["role"] == "assistant" and isinstance(thought := message.get(_REASONING), str):
        turn[_REASONING] = thought  # some templates write that of an answer under way
    if (content := message.get("content")) or "tool_calls" not in turn:
        text = None if content == [] else joined(content)
        if text is None and content and isinstance(content, list):
            raise bad_field(f"{where}: only parts of type text are supported")
        if text is None:
            raise bad_field(f"{where} must have a content of text")
        turn["content"] = text
    if not is_text(json.dumps(turn, ensure_ascii=False)):
        raise bad_field(f"{where} holds a lone surrogate")
    return turn


def _about_tools(message: Json, where: str) -> Json:
    """The calls that a message has, or the id of the call whose result it is."""
    if calls := message.get("tool_calls"):
        if message["role"] != "assistant":
            raise bad_field(f"{where} has tool_calls, and its role is not assistant")
        return {"tool_calls": read_calls(calls, f"{where}.tool_calls")}
    if message["role"] != "tool":
        return {}
    if not isinstance(number := message.get("tool_call_id"), str):
        raise bad_field(f"{where} has the role tool, and must have a tool_call_id")
    return {"tool_call_id": number}
