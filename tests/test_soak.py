"""The server stays right and whole while everything happens at once.

The real server, and clients in threads, each doing one thing after another, chosen by chance:
requests of every kind, whole or as a stream; clients that leave; bad input; bursts that overfill
the queue (429: they come again). Afterwards a sample of the answers is asked for again, alone: each
must be the same. What the idle server has in use must be what it had before.

    SOAK_S=1200 python -m pytest -n0 -m slow tests/test_soak.py      for 20 minutes in place of 20 s
"""

import json
import os
import random
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from started import AT_WORK, GENERATE, at_once, events_of, is_error, serving, until

from runtime.models.prompts import read_prompts
from runtime.values import Sampling
from tools.lossless import SAMPLINGS

SOAK_S = float(os.environ.get("SOAK_S", "20"))
CLIENTS, BURST, SAMPLE, MOST_TOKENS = 12, 16, 40, 120
ALLOWED_THREADS = 100  # they are started when they are needed, up to a fixed number, and stay
TEXTS, STOPS = list(read_prompts().values()), ("\n", " the", ",", "return", "}", ". ", "green", "é")


def asked(rng, drafters):
    """Any request that must be answered, with a seed, so that it has one right answer."""
    letters = rng.choices("   abcdefghijklmnopqrstuvwxyzé🙂", k=rng.randint(2, 400))
    ids = [rng.randrange(1, 1000) for _ in range(rng.choice((3, 40, 900)))]
    prompts = rng.choice(TEXTS), rng.choice(TEXTS) * rng.randint(2, 6), ids, "".join(letters) + "."
    fields = {"prompt": rng.choice(prompts), "max_tokens": rng.randint(1, MOST_TOKENS)}
    fields |= {"seed": rng.randrange(1 << 32), "drafter": rng.choice(drafters)}
    fields["num_speculative_tokens"] = rng.choice((0, 1, 2, 3, 5, 8, 16))  # 0: plain decoding
    if rng.random() < 0.5:
        sampling = vars(rng.choice(list(SAMPLINGS.values())))
        fields |= {name: v for name, v in sampling.items() if v != getattr(Sampling, name)}
    for name, values in (("stop", STOPS), ("logprobs", (0, 1, 5)), ("compare", (True,))):
        if rng.random() < 0.2:
            fields[name] = rng.choice(values)
    return fields | {"stream": rng.random() < 0.5}


class Client:
    """Does one thing after another, and keeps the answers that it got."""

    def __init__(self, server, number, drafters):
        self.server, self.rng, self.drafters = server, random.Random(number), drafters
        self.answers, self.num_refused, self.num_left = [], 0, 0

    def run(self, end):
        """Until the time `end`."""
        ways = [self.ask] * 15 + [self.leave] * 5 + [self.send_nonsense] * 4 + [self.burst]
        while time.monotonic() < end:
            self.rng.choice(ways)()

    def call(self, *request):
        """What the server says, once the queue has room."""
        while True:
            status, head, data = self.server.call(*request)
            if status != 429:
                return status, data
            assert is_error(data) and head["Retry-After"]
            time.sleep(self.rng.uniform(0.1, 0.5))

    def ask(self, fields=None):
        fields = fields or asked(self.rng, self.drafters)
        status, data = self.call("POST", GENERATE, fields)
        assert status == 200, (fields, data)
        (*events, body) = events_of(data) if fields["stream"] else [json.loads(data)]
        said = [event for event in events if "plain" not in event]
        if fields["stream"]:
            assert "".join(event["text"] for event in said) == body["text"]
            ids = [token["id"] for event in said for token in event["tokens"]]
            assert ids == body["token_ids"]
        is_lossy = body.get("compare", {}).get("identical") is False
        assert body["warnings"] == [] and not is_lossy, body
        self.answers.append((fields, body))
        return body

    def burst(self):
        """More at once than run and wait."""
        short = [asked(self.rng, self.drafters) | {"max_tokens": 9} for _ in range(BURST)]
        at_once(*((self.ask, fields) for fields in short))

    def leave(self):
        """Before, while or after the request runs."""
        with self.server.connect(GENERATE, asked(self.rng, self.drafters)) as client:
            client.settimeout(self.rng.uniform(0.01, 1))
            with suppress(TimeoutError):
                client.recv(self.rng.choice((1, 1000, 1 << 16)))
        self.num_left += 1

    def send_nonsense(self):
        wrong = [({"prompt": "x" * (1 << 20)}, 413), ({"prompt": [7] * 150_000}, 400)]
        wrong += [({"prompt": 5}, 400), ({"prompt": "a", "top_p": 7}, 400)]
        fields, expected = self.rng.choice(wrong)
        status, data = self.call("POST", GENERATE, fields)
        assert status == expected and "error" in json.loads(data)
        assert self.call("GET", "/metrics")[0] == 200
        self.num_refused += 1


def in_use(server):
    """What an idle server has: threads, open files, and what /health says."""
    place, health = Path(f"/proc/{server.pid}"), server.health()
    threads = int(place.joinpath("status").read_text().split("Threads:")[1].split()[0])
    files = len(list(place.joinpath("fd").iterdir()))
    return threads, files, *(health[name] for name in AT_WORK)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_is_lost_wrong_or_left_over_while_everything_happens_at_once():
    with serving("--model", "embedded", "--max-queued", "16") as server:
        if not server.health()["bitwise_lossless"]:
            pytest.skip("texts may differ by rounding here, so none is wrong")
        drafters = [name for name in server.health()["drafters"] if name != "prediction"]
        clients = [Client(server, number, drafters) for number in range(CLIENTS)]
        (threads, *before), end = in_use(server), time.monotonic() + SOAK_S
        at_once(*((client.run, end) for client in clients))
        server.wait_until_idle()
        answers = [answer for client in clients for answer in client.answers]
        assert len(answers) > 20
        assert all(sum(getattr(c, n) for c in clients) for n in ("num_refused", "num_left"))
        again = Client(server, 99, drafters)
        for fields, first in random.Random(0).sample(answers, min(SAMPLE, len(answers))):
            alone = again.ask(fields | {"stream": False})
            for name in ("text", "token_ids", "finish_reason", "logprobs"):
                assert alone.get(name) == first.get(name), fields
        until(lambda: in_use(server)[1:] <= (*before,))
        assert in_use(server)[0] <= max(ALLOWED_THREADS, threads)
        server.end_well()
