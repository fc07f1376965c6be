"""From a text, ids or a conversation to a prompt's token ids, or an error that names the field.

Long texts are read one at a time and with pauses, so that reading never holds up decoding. A chat
template is code that comes with the model, and runs in a process with limits (template.py).
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerBase as Tokenizer

from runtime.values import TOO_SLOW, Json, RequestError, check_prompt

from .calls import Form, form_of
from .catalogue import ROOT
from .template import renderer
from .tokenizer_bounds import panics_caught
from .tools import Tools, bad_field, check_results, read_calls, turns_for_template

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


class FairLock:
    """Lets requests do long work one at a time and with pauses, so that decoding keeps its pace.

    The engine's thread needs the interpreter's lock for every operation, and each thread that wants
    it as well makes it wait for milliseconds. Work of a size up to `short` needs no turn. Other
    work begins when the work before has ended, and `pause` seconds times its size have passed. Who
    waits or works has one of the `places`, as each holds a thread of the server.
    """

    def __init__(self, what: str, short: int, pause: float, places: threading.Semaphore) -> None:
        self._what, self._short, self._pause, self._places = what, short, pause, places
        self._turn, self._next = threading.Lock(), 0.0

    @contextmanager
    def take(self, size: int) -> Iterator[None]:
        """Wait for the turn. Raises RequestError 429 where no place is free."""
        if size <= self._short:
            yield
            return
        if not self._places.acquire(blocking=False):
            raise RequestError(f"too many {self._what} at once", status=429, code="queue_full")
        try:
            with self._turn:
                time.sleep(max(0.0, self._next - time.monotonic()))
                try:
                    yield
                finally:
                    self._next = time.monotonic() + size * self._pause
        finally:
            self._places.release()


_LONG_TEXT = 20_000  # characters
_places = threading.BoundedSemaphore(8)
large_bodies = FairLock("large bodies", 32 << 10, 5e-8, _places)  # bytes; pauses of 50 ms for 1 MiB
long_texts = FairLock("long prompts", _LONG_TEXT, 1e-6, _places)  # of 1 s for 1 MB


def is_text(value: Any) -> bool:
    """A string, not empty, without lone surrogates (which JSON can write, and UTF-8 cannot)."""
    try:
        return isinstance(value, str) and value.encode("utf-8") != b""
    except UnicodeEncodeError:
        return False


def _joined(content: Any) -> str | None:
    """The text of a content, which may be a list of parts of type text; None of anything else."""
    if isinstance(content, list):
        of_text = (isinstance(part, dict) and part.get("type") == "text" for part in content)
        texts = [part.get("text") for part in content] if all(of_text) else [None]
        return "".join(texts) if all(isinstance(text, str) for text in texts) else None
    return content if isinstance(content, str) else None


@lru_cache(1)
def _longest_token(tokenizer: Tokenizer) -> int:
    return max(map(len, tokenizer.get_vocab()))  # which takes 0.1 s where there are many


def check_characters(
    count: int, tokenizer: Tokenizer, max_length: int, name: str = "prompt"
) -> None:
    """Raises RequestError if a text of so many characters cannot fit `max_length` tokens."""
    # Twice, as a normaliser may shorten the text.
    if count > _LONG_TEXT and count > 2 * _longest_token(tokenizer) * max_length:
        raise RequestError(
            f"the {name}'s {count} characters are more than a context of {max_length} tokens holds",
            param=name,
            code="context_length_exceeded",
        )


def tokenize(
    text: str, tokenizer: Tokenizer, max_length: int, name: str = "prompt", **options: Any
) -> list[int]:
    """The ids of a text, the request's field `name`, which has to fit `max_length` tokens.

    Reading a text of 1 MB can take seconds. So what cannot fit is refused unread (400), and long
    ones are read one at a time: the requests of the others need the processor, too.
    """
    check_characters(len(text), tokenizer, max_length, name)
    with long_texts.take(len(text)):
        return tokenizer(text, verbose=False, **options)["input_ids"]


@lru_cache(4)
def _backend_of_text(tokenizer: Tokenizer) -> Backend | None:
    """A tokenizer's parts without its special and added tokens; None of one in Python.

    Runs of spaces that were added as tokens stay tokens, and so do those that a GGUF file calls
    user-defined. Other added ones may steer the model, as those of infill do. Ids behind the
    vocabulary cannot be kept.
    """
    if (whole := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return None
    backend = Backend(whole.model)  # which both share
    for part in ("normalizer", "pre_tokenizer"):
        if value := getattr(whole, part):
            setattr(backend, part, value)
    added, defined = whole.get_added_tokens_decoder(), getattr(tokenizer, "user_defined", ())
    kept = [(i, each) for i, each in added.items() if each.content.isspace() or i in defined]
    backend.add_tokens([each for i, each in kept if backend.token_to_id(each.content) == i])
    return backend


def tokenize_plain(
    text: str, tokenizer: Tokenizer, max_length: int, name: str = "prompt"
) -> list[int]:
    """The ids of a text in which the texts of special tokens are text; otherwise as `tokenize`."""
    if (backend := _backend_of_text(tokenizer)) is None:
        return tokenize(text, tokenizer, max_length, name, add_special_tokens=False)
    check_characters(len(text), tokenizer, max_length, name)
    with long_texts.take(len(text)), panics_caught():
        return backend.encode(text, add_special_tokens=False).ids


class Conversation(list[int]):
    """The ids of a prompt that a chat template wrote."""


def prompt_ids(value: Any, tokenizer: Tokenizer, max_length: int) -> list[int]:
    """The ids of a prompt that is continued as it stands: a text, or ids already.

    Raises RequestError for anything else, and for a text that cannot fit `max_length` tokens.
    """
    if isinstance(value, str) and value:
        if not is_text(value):
            raise bad_field("prompt holds a lone surrogate, which is not text")
        if ids := tokenize(value, tokenizer, max_length):
            return ids
    elif (
        isinstance(value, list)
        and value
        # More ids than the context holds are refused for their number, whatever they are.
        and all(isinstance(i, int) and not isinstance(i, bool) for i in value[:max_length])
    ):
        return value
    raise bad_field("prompt must be a non-empty string or a non-empty list of token ids")


@contextmanager
def at_place(i: int) -> Iterator[None]:
    """Let an error about the prompt name its place in the list."""
    try:
        yield
    except RequestError as error:
        if error.param == "prompt":
            error.param = f"prompt[{i}]"
            is_first = error.message.startswith("prompt ")
            what = error.message.removeprefix("prompt ")
            error.message = f"{error.param}{' ' if is_first else ': '}{what}"
        raise


def list_ids(
    values: list[Any], tokenizer: Tokenizer, max_length: int, vocab_size: int
) -> list[list[int]]:
    """The ids of each prompt in a list, which the context can hold. Raises RequestError."""
    sizes = [len(value) for value in values if isinstance(value, str)]
    are_short = max(sizes, default=0) <= _LONG_TEXT  # else one of them takes the turn
    every = list[list[int]]()
    with long_texts.take(sum(sizes) if are_short else 0):
        for i, value in enumerate(values):
            with at_place(i) if len(values) > 1 else nullcontext():
                every.append(prompt_ids(value, tokenizer, max_length))
                try:
                    check_prompt(every[-1], max_length, vocab_size, max_tokens=0)
                except ValueError as error:
                    raise RequestError(str(error), param="prompt") from error
    return every


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
    return Conversation(tokenize(text, tokenizer, max_length, add_special_tokens=has_more))


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
    try:
        source = tokenizer.get_chat_template(tools=[] if has_tools else None)
        turns = _in_roles(turns, source)
        if has_tools:
            form = tools.form if tools else call_form(tokenizer)
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
    except ValueError as error:
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
        text = None if content == [] else _joined(content)
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


def prediction_ids(value: Any, tokenizer: Tokenizer, max_length: int) -> tuple[int, ...]:
    """The ids of the text that a client expects, as they would stand in the answer.

    `value` is a text, or OpenAI's {"type": "content", "content": a text, or parts of type text}.
    Raises RequestError for anything else, and for more tokens than `max_length`.
    """
    is_content = isinstance(value, dict) and value.get("type") == "content"
    text = _joined(value.get("content")) if is_content else value
    if not isinstance(text, str):
        what = 'a text, or {"type": "content", "content": a text or a list of parts of type text}'
        raise bad_field(f"prediction must be {what}")
    if not text:
        return ()
    if not is_text(text):
        raise bad_field("prediction holds a lone surrogate")
    ids = tokenize(text, tokenizer, max_length, name="prediction", add_special_tokens=False)
    if len(ids) > max_length:
        what = f"the prediction's {len(ids)} tokens are more than a context of {max_length} holds"
        raise RequestError(what, param="prediction")
    return tuple(ids)


def kind_of(name: str) -> str:
    """The kind of a demo prompt. Example: easy_facts -> easy."""
    return name.partition("_")[0]


def read_prompts(is_chat: bool = False) -> dict[str, str]:
    """The demo prompts by name; a file's last line break is not part of its prompt.

    Those of the kind chat come first, and only where they are put into a chat template.
    """
    files = {path.stem: path for path in (ROOT / "demo_prompts").glob("*.txt")}
    names = [name for name in files if is_chat or kind_of(name) != "chat"]
    names.sort(key=lambda name: (kind_of(name), name))
    return {name: files[name].read_text("utf-8").removesuffix("\n") for name in names}
