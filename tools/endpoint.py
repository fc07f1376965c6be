"""An OpenAI endpoint's completions, read with suspicion: whatever it does, there is a sentence.

The key is read from OPENAI_API_KEY. It goes to the endpoint alone, and stands in no message.
"""

import json
import os
import time
import urllib.request
from http.client import HTTPException
from typing import Any, NamedTuple

LARGEST = 1 << 24  # bytes of an answer
TOP = 10  # log-probabilities that are asked for

Asked = tuple[str, dict[str, Any]]  # a prompt and the request's other fields


class NoAnswer(RuntimeError):
    """There is no answer, or none that the protocol knows; the message is a sentence.

    `is_busy`: it is too busy, or does not answer at all, which says nothing of the request.
    """

    def __init__(self, sentence: str, verdict: str = "no answer", is_busy: bool = False) -> None:
        super().__init__(sentence)
        self.verdict, self.is_busy = verdict, is_busy


class Answer(NamedTuple):
    """A text, its tokens, and what is likely at each of them, if the endpoint tells."""

    text: str
    tokens: list[str]
    chosen: list[float]  # log-probabilities of the tokens
    likely: list[dict[str, float]]  # log-probabilities by token, of the likeliest at each place
    length: int | None
    drafted: int | None
    accepted: int | None


def answer_of(body: Any) -> Answer:
    """Read an answer. Raises NoAnswer."""
    try:
        text, told = body["choices"][0]["text"], body["choices"][0].get("logprobs") or {}
        if content := told.get("content"):  # llama.cpp's form, which is that of chats
            chosen, tops = [x["logprob"] for x in content], [x["top_logprobs"] for x in content]
            name = "id" if "id" in content[0] else "token"  # several tokens may have one text
            tokens = [x[name] for x in content]
            likely = [{str(x[name]): x["logprob"] for x in top} for top in tops]
        else:
            tokens, chosen = told.get("tokens") or [], told.get("token_logprobs") or []
            likely = [each or {} for each in told.get("top_logprobs") or ()]
        likely = [{token: float(p) for token, p in each.items()} for each in likely]
        tokens, chosen = list(map(str, tokens)), list(map(float, chosen))
        if not isinstance(text, str) or not len(tokens) == len(chosen) >= len(likely):
            raise ValueError
        length = (body.get("usage") or {}).get("completion_tokens")
        figures = body.get("timings") or {}  # llama.cpp's, and ours
        counts = [length, figures.get("draft_n"), figures.get("draft_n_accepted")]
        counts = [n if type(n) is int else None for n in counts]
        return Answer(text, tokens, chosen, likely, *counts)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        said = f"its answer is none of the protocol's: {str(body)[:120]!r}"
        raise NoAnswer(said) from error


# It follows no redirects: the key goes to the endpoint alone.
_OPENER = urllib.request.OpenerDirector()
for _name in ("HTTPHandler", "HTTPSHandler"):
    _OPENER.add_handler(getattr(urllib.request, _name)())


class Endpoint:
    """An endpoint, and the fields that each request to it has."""

    def __init__(
        self, url: str, fields: dict[str, Any], model: str | None, timeout_s: float
    ) -> None:
        """Without a model's name the first one of /v1/models is asked. Raises NoAnswer."""
        self.url, self.fields = url.rstrip("/").removesuffix("/v1"), fields
        self.key, self.timeout_s = os.environ.get("OPENAI_API_KEY"), timeout_s
        self.model = model or ""
        if not url.startswith(("http://", "https://")):
            raise NoAnswer(f"{url} begins with neither http:// nor https://")
        if not self.model:
            try:
                self.model = str(self._send("/v1/models")["data"][0]["id"])
            except (LookupError, TypeError) as error:
                raise NoAnswer(f"{url}/v1/models names no model: give --model") from error

    def ask(self, prompt: str, fields: dict[str, Any]) -> dict[str, Any]:
        """The answer to a prompt, as it came. Raises NoAnswer."""
        asked = {"model": self.model, "prompt": prompt, "logprobs": TOP} | fields | self.fields
        body = self._send("/v1/completions", {k: x for k, x in asked.items() if x is not None})
        answer_of(body)
        if body.get("model", self.model) != self.model:
            other = str(body["model"])[:80]
            raise NoAnswer(f"{self.url} was asked for {self.model}, and answers as {other}")
        return body

    def _send(self, path: str, fields: dict[str, Any] | None = None) -> Any:
        """The JSON that comes back. Raises NoAnswer."""
        data = None if fields is None else json.dumps(fields).encode()
        headers, status, text = {"Content-Type": "application/json"}, None, ""
        is_busy = False
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            status, text = self._fetch(request)
            if status == 200:
                return json.loads(text)
            reason, is_busy = f"status {status}: {text}", status in (429, 503)
        except (OSError, HTTPException) as error:
            why, is_busy = getattr(error, "reason", error), True
            reason = f"it does not answer: {why!r}"
            if isinstance(why, TimeoutError):
                reason = f"it did not answer in {self.timeout_s} s"
        except (ValueError, RecursionError):
            reason = f"its answer is no JSON: {text[:80]!r}"
            if status is None:
                reason = "the URL or OPENAI_API_KEY has letters that cannot be sent"
        reason = self._without_key(reason)[:300]
        raise NoAnswer(f"{self.url}{path}: {' '.join(reason.split())}", is_busy=is_busy)

    def _without_key(self, text: str) -> str:
        return text.replace(self.key, "…") if self.key else text

    def _fetch(self, request: urllib.request.Request) -> tuple[int, str]:
        """Status and text of an answer, without the key. TimeoutError: it does not end in time."""
        whole, until = bytearray(), time.monotonic() + self.timeout_s
        with _OPENER.open(request, timeout=self.timeout_s) as response:
            while (piece := response.read1(1 << 16)) and len(whole) < LARGEST:
                whole += piece
                if time.monotonic() > until:
                    raise TimeoutError
        return response.status, self._without_key(whole.decode(errors="replace"))
