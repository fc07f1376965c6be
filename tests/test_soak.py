"""The server stays right and whole while everything happens at once.

The real server, and clients in threads, more than may run and wait, each doing one thing after
another by chance: requests of every kind, whole or as a stream; clients that leave. A queue that is
full says 429, and they come again. Afterwards a sample of the answers is asked for again, alone:
each must be the same. What the idle server has in use must be what it had before. (What is refused
is sent by test_bad_inputs.py.)

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
CLIENTS, SAMPLE, MOST_TOKENS = 40, 40, 120
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


def answered(server, fields):
    """The answer to a request, once the queue has room."""
    while (told := server.call("POST", GENERATE, fields))[0] == 429:
        assert is_error(told[2]) and told[1]["Retry-After"]
        time.sleep(0.2)
    status, _, data = told
    assert status == 200, (fields, data)
    (*events, body) = events_of(data) if fields["stream"] else [json.loads(data)]
    said = [event for event in events if "plain" not in event]
    if fields["stream"]:
        assert "".join(event["text"] for event in said) == body["text"]
        ids = [token["id"] for event in said for token in event["tokens"]]
        assert ids == body["token_ids"]
    is_lossy = body.get("compare", {}).get("identical") is False
    assert body["warnings"] == [] and not is_lossy, body
    return body


def leave(server, fields, rng):
    """Before, while or after the request runs."""
    with server.connect(GENERATE, fields) as client:
        client.settimeout(rng.uniform(0.01, 1))
        with suppress(TimeoutError):
            client.recv(rng.choice((1, 1000, 1 << 16)))


def answers_until(end, server, number, drafters):
    """What a client is answered up to the time `end`: (fields, body)."""
    rng, answers = random.Random(number), []
    while time.monotonic() < end:
        fields = asked(rng, drafters)
        if rng.random() < 0.25:
            leave(server, fields, rng)
        else:
            answers.append((fields, answered(server, fields)))
    return answers


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
        (threads, *before), end = in_use(server), time.monotonic() + SOAK_S
        given = ((answers_until, end, server, number, drafters) for number in range(CLIENTS))
        answers = sum(at_once(*given), [])
        server.wait_until_idle()
        assert len(answers) > 20
        for fields, first in random.Random(0).sample(answers, min(SAMPLE, len(answers))):
            alone = answered(server, fields | {"stream": False})
            for name in ("text", "token_ids", "finish_reason", "logprobs"):
                assert alone.get(name) == first.get(name), fields
        until(lambda: in_use(server)[1:] <= (*before,))
        assert in_use(server)[0] <= max(ALLOWED_THREADS, threads)
        server.end_well()
