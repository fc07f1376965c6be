"""What shapes of dialects have in common: OpenAI's body and chunks, and an answer's parts."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from flask import current_app, g

from runtime.models.calls import AnswerReader, Part
from runtime.models.prompts import Tokenizer
from runtime.models.token_bytes import bytes_of
from runtime.text import TextStream
from runtime.values import Json
from server.answers import Shape, sse
from server.fields import wrong

# What stands beside the choices, as in /generate's answer.
_FIGURES = ("usage", "metrics", "timings", "warnings", "seed", "trace", "compare")
Logprobs = list[Json] | None


def figures(body: Json) -> Json:
    """The figures of an answer of /generate."""
    return {name: body[name] for name in _FIGURES if name in body}


def event(kind: str, **data: Any) -> str:
    """A server-sent event with a name, which is the `type` of its data, too."""
    return f"event: {kind}\n{sse({'type': kind} | data)}"


def bodies(body: Json) -> list[Json]:
    """The answers of /generate to each choice."""
    return body.get("choices", [body])


def by_id(scores: list[Json | None]) -> list[Json | None]:
    """`prompt_logprobs` as vLLM has them: null, or by token id."""

    def entry(one: Json, rank: int) -> Json:
        return {"logprob": one["logprob"], "rank": rank, "decoded_token": one["token"]}

    return [
        one
        and {str(one["id"]): entry(one, one["rank"])}
        | {str(top["id"]): entry(top, i) for i, top in enumerate(one["top_logprobs"], 1)}
        for one in scores
    ]


class Places:
    """Where each token of a text begins and ends in it. A character counts once it is whole."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        """The text goes on behind the tokens `before`."""
        self._text, self._end = TextStream(tokenizer, before=before), 0
        self._tokenizer = tokenizer

    def next(self, entry: Json) -> tuple[int, int]:
        """The place of the next token, which has this entry of log-probabilities."""
        begin, word = self._end, bytes_of(entry["id"], self._tokenizer).decode(errors="replace")
        self._text.push(entry["id"], "")
        new = "".join(text for text, _ in self._text.release())
        self._end += len(new)
        if new.startswith("\ufffd") and new.endswith(word):  # an invalid byte is told only now
            begin = self._end - len(word)
        return begin, self._end


class Untold:
    """Log-probabilities of an answer's tokens, until a part of its text is told."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._places, self._entries = Places(tokenizer), deque[tuple[int, int, Json]]()

    def push(self, logprobs: Iterable[Json], shown: Iterable[Json]) -> None:
        """Add those of the next tokens, each with what is shown of it."""
        for one, entry in zip(logprobs, shown, strict=True):
            self._entries.append((*self._places.next(one), entry))

    def take(self, begin: int, end: int | None = None) -> list[Json]:
        """What is shown of the tokens in this part of the text. Those before it are dropped."""
        taken = list[Json]()
        while self._entries and (end is None or self._entries[0][0] < end):
            first, last, entry = self._entries.popleft()
            if max(last, first + 1) > begin:  # a part of a character stands where that begins
                taken.append(entry)
        return taken


class OpenAIShape(Shape):
    """OpenAI's shape of an answer: a body with choices, or chunks of them and then the figures."""

    prefix, kind, kind_of_chunk = "", "", ""
    has_own_prompts = True  # whether a choice tells of its prompt, or the body does

    def __init__(self, fields: Json) -> None:
        """Raises RequestError where a stream is to have a prompt's scores."""
        super().__init__()
        self._is_scored = fields.get("prompt_logprobs") is not None
        if self._is_scored and fields.get("stream"):
            raise wrong("prompt_logprobs", "goes with stream: false")
        self._head = {"id": f"{self.prefix}-{g.id}"}  # the X-Request-Id
        self._head |= {"object": self.kind, "created": int(time.time())}
        self._head["model"] = current_app.extensions["model"]
        self._head["system_fingerprint"] = current_app.extensions["fingerprint"]
        self._has_ids, self._num_tokens = fields.get("return_token_ids") is True, Counter[int]()
        self._new_ids = defaultdict[int, list[int]](list)  # by choice: those that no chunk has had
        self._told = set[int]()  # whose prompt a chunk has had
        options = fields.get("stream_options")
        options = options.items() if isinstance(options, dict) else ()
        self._options = {name for name, value in options if value is True}

    def choice(self, index: int, body: Json) -> Json:
        """A choice of a whole answer, from /generate's answer to it."""
        raise NotImplementedError

    def end(self, index: int, reason: str) -> Json:
        """The choice in the chunk that ends it."""
        raise NotImplementedError

    def whole(self, body: Json) -> Json:
        """The body of a request that is answered at once, from /generate's answer."""
        every = bodies(body)
        self.scores = [each.get("prompt_logprobs") for each in every[:: self.job.request.n]]
        # vLLM's form: of what was not asked for there are nulls.
        of_prompts = [
            {"prompt_logprobs": by_id(one) if self._is_scored else None, "prompt_token_ids": None}
            for one in self.scores
        ]
        choices = list[Json]()
        for i, each in enumerate(every):
            own = of_prompts[i // self.job.request.n] if self.has_own_prompts else {}
            # What ended the text, in vLLM's words and in SGLang's: there a token may, too.
            s, text = self.job.runs[i].sequence, each.get("stop_reason")
            stop = {"stop_reason": text, "matched_stop": text or (s and s.stop_token)}
            choices.append(stop | {"token_ids": None} | own | self.choice(i, each))
            self._new_ids[i] = each.get("token_ids")
        of_all = {} if self.has_own_prompts else of_prompts[0]
        return self._head | of_all | self._with_ids(choices) | figures(body)

    def note(self, event: Json, number: int) -> None:
        """Count the tokens of an event, and keep their ids for the choice's next chunk."""
        is_told = self._has_ids or "continuous_usage_stats" in self._options
        if is_told and number < self.job.request.texts:
            ids = [token["id"] for token in event["tokens"]]
            self._new_ids[number] += ids
            self._num_tokens[number] += len(ids)

    def _usage(self, index: int) -> Json:
        """What a choice has taken so far."""
        prompt, new = len(self.job.runs[index].request.prompt), self._num_tokens[index]
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _with_ids(self, choices: Sequence[Json]) -> Json:
        """A part of a body: choices, and the ids that are news, where the request wants them."""
        if not self._has_ids:
            return {"choices": list(choices)}
        parts, of_all = list[Json](), Json()
        for choice in choices:
            index = choice["index"]
            parts.append(choice | {"token_ids": self._new_ids.pop(index, [])})
            if index not in self._told and (self.has_own_prompts or not self._told):
                self._told.add(index)
                place = parts[-1] if self.has_own_prompts else of_all
                place["prompt_token_ids"] = self.job.runs[index].request.prompt
        return {"choices": parts} | of_all

    def chunk(self, *choices: Json, **more: Any) -> str:
        """A chunk of a stream."""
        kind = {"object": self.kind_of_chunk}
        if choices and self._options >= {"include_usage", "continuous_usage_stats"}:
            more["usage"] = self._usage(choices[0]["index"])
        elif "include_usage" in self._options:
            more.setdefault("usage", None)
        return sse(self._head | kind | self._with_ids(choices) | more)

    def last(self, body: Json) -> Iterator[str]:
        """Why each choice ended, at last with figures; or these with the usage, if asked for."""
        counted = figures(body)
        ends = [self.end(i, each["finish_reason"]) for i, each in enumerate(bodies(body))]
        if "include_usage" in self._options:
            yield from map(self.chunk, ends)
            yield self.chunk(**counted)
        else:
            del counted["usage"]
            yield from map(self.chunk, ends[:-1])
            yield self.chunk(ends[-1], **counted)


class InParts(Shape):
    """A shape that is written of an answer's parts: content, reasoning and calls.

    A stream has each call whole in one part, and no text that may still become a call.
    """

    def __init__(self, *given: Any, new_reader: Callable[[], AnswerReader]) -> None:
        """`new_reader` makes what reads a choice's text."""
        super().__init__(*given)
        self.readers = defaultdict[int, AnswerReader](new_reader)  # by choice

    def part(self, index: int, part: Part, logprobs: Logprobs = None) -> str:
        """What a stream shows of a part of a choice."""
        raise NotImplementedError

    def rest(self, index: int, body: Json) -> list[Part]:
        """The parts that are left of a choice whose text is whole."""
        return self.readers[index].finish(is_cut=body["finish_reason"] == "length")

    def shown(self, event: Json, number: int) -> str:
        """What a stream shows of an event; its first part has its log-probabilities."""
        if number >= self.job.request.texts:  # a comparison's other runs
            return ""
        logprobs, told = event.get("logprobs"), ""
        for part in self.readers[number].feed("".join(text for text, _ in event["pieces"])):
            told, logprobs = told + self.part(number, part, logprobs), None
        return told if logprobs is None else told + self.part(number, "", logprobs)

    def last(self, body: Json) -> Iterator[str]:
        """What was held back, then what the shape ends with."""
        for index, each in enumerate(bodies(body)):
            for part in self.rest(index, each):
                yield self.part(index, part)
        yield from super().last(body)


class InItems(InParts):
    """A shape of one choice, whose stream tells in turn of the items that the whole answer has."""

    closing = ""
    answer: Json  # when all is told

    def whole(self, body: Json) -> Json:
        """What the events of a stream tell of, without them."""
        self.shown({"pieces": [(body["text"], "")], "logprobs": body.get("logprobs")}, 0)
        deque(self.last(body), maxlen=0)
        return self.answer
