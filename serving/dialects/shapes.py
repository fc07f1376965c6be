"""What shapes of dialects have in common: OpenAI's body and chunks, and an answer's parts."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from flask import g

from messages import Json
from models.calls import AnswerReader, Part
from serving.answers import Shape, sse

# What stands beside the choices, as in /generate's answer.
_FIGURES = ("usage", "metrics", "timings", "warnings", "seed", "trace", "compare")
Logprobs = list[Json] | None


def figures(body: Json) -> Json:
    """The figures of an answer of /generate."""
    return {name: body[name] for name in _FIGURES if name in body}


def bodies(body: Json) -> list[Json]:
    """The answers of /generate to each choice."""
    return body.get("choices", [body])


class OpenAIShape(Shape):
    """OpenAI's shape of an answer: a body with choices, or chunks of them and then the figures."""

    prefix, kind, kind_of_chunk = "", "", ""

    def __init__(self, model: str, fields: Json) -> None:
        """`fields` are the request's; `model` is the name by which clients know the model."""
        super().__init__(fields)
        self._head = {"id": f"{self.prefix}-{g.id}"}  # the X-Request-Id
        self._head |= {"object": self.kind, "created": int(time.time()), "model": model}

    def choice(self, index: int, body: Json) -> Json:
        """A choice of a whole answer, from /generate's answer to it."""
        raise NotImplementedError

    def end(self, index: int, reason: str) -> Json:
        """The choice in the chunk that ends it."""
        raise NotImplementedError

    def whole(self, body: Json) -> Json:
        """The body of a request that is answered at once, from /generate's answer."""
        choices = [self.choice(i, each) for i, each in enumerate(bodies(body))]
        return self._head | {"choices": choices} | figures(body)

    def chunk(self, *choices: Json, **more: Any) -> str:
        """A chunk of a stream."""
        kind = {"object": self.kind_of_chunk}
        return sse(self._head | kind | {"choices": list(choices)} | more)

    def last(self, body: Json) -> Iterator[str]:
        """Why each choice ended, at last with figures; the usage in its own chunk, if asked for."""
        counted = figures(body)
        usage = counted.pop("usage")
        ends = [self.end(i, each["finish_reason"]) for i, each in enumerate(bodies(body))]
        yield from map(self.chunk, ends[:-1])
        yield self.chunk(ends[-1], **counted)
        if (self._fields.get("stream_options") or {}).get("include_usage"):
            yield self.chunk(**counted, usage=usage)


class InParts(Shape):
    """A shape that is written of an answer's parts: content, reasoning and calls.

    A stream has each call whole in one part, and no text that may still become a call.
    """

    new_reader: Callable[[], AnswerReader]

    def __init__(self, *arguments: Any, new_reader: Callable[[], AnswerReader]) -> None:
        """`new_reader` makes what reads a choice's text."""
        super().__init__(*arguments)
        self.readers = defaultdict[int, AnswerReader](new_reader)  # by choice

    def part(self, index: int, part: Part, logprobs: Logprobs = None) -> str:
        """What a stream shows of a part of a choice."""
        raise NotImplementedError

    def parts(self, index: int, text: str) -> list[Part]:
        """The parts of a choice's whole text."""
        reader = self.readers[index]
        return [*reader.feed(text), *reader.finish()]

    def shown(self, event: Json, number: int) -> str:
        """What a stream shows of an event; its first part has its log-probabilities."""
        if number >= self.num_choices:  # a comparison's other runs
            return ""
        parts = self.readers[number].feed("".join(text for text, _ in event["pieces"]))
        logprobs = event.get("logprobs")
        if logprobs is not None and not parts:
            parts = [""]
        return "".join(
            self.part(number, part, None if i else logprobs) for i, part in enumerate(parts)
        )

    def last(self, body: Json) -> Iterator[str]:
        """What was held back, then what the shape ends with."""
        for index in range(self.num_choices):
            for part in self.readers[index].finish():
                yield self.part(index, part)
        yield from super().last(body)
