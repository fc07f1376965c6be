"""What this server in front of another engine costs: the same requests directly and through it.

    python -m benchmarks.engines --direct http://127.0.0.1:8000 --through http://127.0.0.1:5000

Both must serve one model; --key is the engine's. Rounds are interleaved, and medians are shown:
time to the first token and tokens per second, with 1 client, with 32 that begin one after the other
and ask four times each, and with 32 that all ask in the same moment. All processes share the
machine, so on few cores the client and both servers take time from the model.
"""

import argparse
import asyncio
import json
import time
from statistics import median
from urllib.parse import urlsplit

LOADS = {  # clients, requests of each, seconds within which they begin
    "1 client": (1, 4, 0.0),
    "32 clients": (32, 4, 1.5),
    "32 at once": (32, 1, 0.0),
}
PROMPTS = ("red, green, blue, red, green,", "1, 2, 3, 4, 5,", "def read(path):", "x = [1, 2, 3")


async def one(url: str, key: str | None, prompt: str, max_tokens: int) -> tuple[float, int]:
    """Seconds to the first token of a streamed completion, and how many tokens came."""
    parts = urlsplit(url)
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(data)}",
        *([f"Authorization: Bearer {key}"] if key else []),
    ]
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    began = time.perf_counter()
    writer.write("\r\n".join([*lines, "", ""]).encode() + data)
    first, last = 0.0, b""
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            first, last = first or time.perf_counter() - began, line
    writer.close()
    return first, json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"]


async def load(
    url: str, key: str | None, clients: int, each: int, spread_s: float, length: int
) -> dict[str, float]:
    """`clients` that begin within `spread_s`, each with `each` requests in turn."""

    async def client(i: int) -> list[tuple[float, int]]:
        await asyncio.sleep(spread_s * i / clients)
        return [await one(url, key, PROMPTS[(i + j) % 4], length) for j in range(each)]

    began = time.perf_counter()
    told = [pair for pairs in await asyncio.gather(*map(client, range(clients))) for pair in pairs]
    took = time.perf_counter() - began
    first_ms = median(first for first, _ in told) * 1e3
    return {"first_ms": first_ms, "tokens_per_s": sum(count for _, count in told) / took}


def main() -> None:
    """Measure, and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--direct", required=True)
    parser.add_argument("--through", required=True)
    parser.add_argument("--key", help="of the engine, where it has one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()
    ways = {"direct": (given.direct, given.key), "through": (given.through, None)}
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for what, load_of in LOADS.items():
        for i in range(given.rounds + 1):
            for name, way in ways.items():
                told = asyncio.run(load(*way, *load_of, given.max_tokens))
                if i:  # the first round warms up
                    found.setdefault(what, {}).setdefault(name, []).append(told)
    for what, sides in found.items():
        for name, runs in sides.items():
            shown = []
            for figure in ("first_ms", "tokens_per_s"):
                values = [run[figure] for run in runs]
                spread = f"{min(values):.1f} to {max(values):.1f}"
                shown.append(f"{figure} {median(values):.1f} ({spread})")
            print(f"{what}, {name:8}", *shown, sep="  ")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
