"""An OpenAI endpoint in a thread that answers as a test wants it to: fairly, or not."""

import json
import math
import random
from functools import partial
from itertools import repeat

from engine import Replay, replaying

MODELS = {"data": [{"id": "fake"}]}


def fair(asked):
    """An answer: each token is " a" or " b", with a probability of one half; " a" if greedy."""
    chance, half = random.Random(str([*asked.items()][1:])), math.log(0.5)
    tokens = [chance.choice([" a", " b"]) for _ in range(asked["max_tokens"])]
    if not asked["temperature"]:
        tokens = [" a"] * asked["max_tokens"]
    if "response_format" in asked:
        tokens = [chance.choice(["[3, 9]", "[7, 9]"])]
    each = dict.fromkeys([" a", " b"] if len(tokens) > 1 else ["[3, 9]", "[7, 9]"], half)
    count = len(tokens)
    told = {"token_logprobs": [half] * count, "top_logprobs": [each] * count, "tokens": tokens}
    return {
        "choices": [{"text": "".join(tokens), "logprobs": told}],
        "usage": {"completion_tokens": count},
        "timings": {}
        if "speculative" in asked
        else {"draft_n": 2, "draft_n_accepted": min(2, count)},
    }


class Fake(Replay):
    """Answers what `reply` returns for a request's fields, and notes these.

    That is a body, (status, text), or bytes as they are. None waits, and ... does not end.
    """

    def __init__(self, reply, models=MODELS):
        super().__init__()
        self.socket.listen(64)  # by default those in company have to ask twice
        self.reply, self.models, self.asked = reply, models, []

    def answer(self, handler, fields):
        said = self.models
        if fields:
            self.asked.append(fields)
            said = self.reply(fields | {"key": handler.headers["Authorization"]})
        if said is None:
            self.go_on.wait()
        elif isinstance(said, bytes):
            handler.close_connection = True
            handler.wfile.write(said)
        else:
            status, text = (200, json.dumps(said)) if isinstance(said, dict) else said
            handler.say(status, repeat(" " * 4096) if text is ... else [text])


# An endpoint for a while: .asked are the requests, .url is where.
fake = partial(replaying, Fake)
