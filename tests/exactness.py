"""Does the same token get the same bits, however it is computed? One process, one JSON line.

    python -m tests.exactness --model demo --dtype float32 --threads 2 --rounds 40

test_exactness.py runs it in processes of their own, under the settings of other machines. It asks
the same questions as the check at load, of other texts, by other code: at lengths of text from 10
to 1 500, every other one close to a border of keys, one text is decoded token by token, verified,
verified in batches, and read as a prompt in pieces. Then requests of all drafters are run alone and
eight at once.
"""

import argparse
import importlib
import json
import os
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import demo
from serving import faults

os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
core = importlib.import_module("08_speculative_decoding")

import torch  # noqa: E402
import transformers  # noqa: E402

BORDERS = sorted({end for block in (0, 512, 1024) for end in (block + s for s in (
    64, 128, 192, 256, 320, 384, 448, 512))})  # fmt: skip
ODD = {
    "llama": {
        "hidden_size": 160, "intermediate_size": 1376, "num_hidden_layers": 3, "vocab_size": 49157,
        "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 32,
    },
    "gemma2": {
        "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2, "vocab_size": 4096,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "sliding_window": 300,
    },
    "gpt2": {"vocab_size": 4096, "n_embd": 100, "n_layer": 2, "n_head": 5, "n_positions": 1600},
}  # fmt: skip


def make_model(family: str, folder: str) -> str:
    """A random model with widths that no vector divides, and the demo's tokenizer."""
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    length = {} if family == "gpt2" else {"max_position_embeddings": 1600}
    config = transformers.AutoConfig.for_model(
        family, initializer_range=0.2, **ODD[family], **ends, **length
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    source = Path(core.Options().model)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


class Comparison:
    """Counts rows of logits, and those whose bits differ."""

    def __init__(self, target: Any) -> None:
        self.target, self.compared, self.differing = target, 0, 0
        self.examples: list[str] = []

    def hold(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Compare logits [n, V], and the log-probabilities made of them."""
        normed = expected.log_softmax(-1)
        rows = zip(actual, expected, normed, strict=True)
        same = [torch.equal(a, b) and torch.equal(a.log_softmax(-1), n) for a, b, n in rows]
        self.compared += len(same)
        self.differing += same.count(False)
        if not all(same):
            self.examples.append(what)

    def feed(self, rows: list[int], tokens: list[list[int]], num_logits: int) -> torch.Tensor:
        """The first row's logits; all rows hold afterwards what they held before."""
        held = [self.target.cache.lengths[row] for row in rows]
        wanted = [min(num_logits, len(fed)) for fed in tokens]
        logits = self.target.forward(rows, tokens, wanted).logits[0]
        for row, length in zip(rows, held, strict=True):
            self.target.cache.truncate(row, length)
        return logits


def compare_forwards(target: Any, rounds: int, chance: random.Random) -> Comparison:
    """Decoded, verified, in batches, in pieces."""
    found, cache = Comparison(target), target.cache
    longest = min(1500, target.max_length - 20)
    texts = [[chance.randrange(target.vocab_size) for _ in range(longest + 8)] for _ in range(8)]
    rows = [cache.open_row() for _ in texts]
    for row, text in zip(rows, texts, strict=True):
        target.forward([row], [text[:longest]], [1])
    one = rows[0]
    for i in range(rounds):
        near = chance.choice([b for b in BORDERS if b < longest]) - chance.randrange(7)
        length = near if i % 2 else chance.randrange(10, longest)
        lengths = [length, *(chance.randrange(10, longest) for _ in rows[1:])]
        for row, held in zip(rows, lengths, strict=True):
            cache.lengths[row] = held
        k = chance.randrange(1, 9)
        drafts = [text[held : held + k] for text, held in zip(texts, lengths, strict=True)]
        verified = found.feed([one], [drafts[0]], k)
        for j, token in enumerate(drafts[0]):
            alone = target.forward([one], [[token]], [1]).logits[0]
            found.hold(alone, verified[j : j + 1], f"decoded at {length + j}")
        cache.truncate(one, length)
        for num_others in (7, chance.randrange(1, 7)):
            others = [draft[: chance.randrange(1, k + 1)] for draft in drafts[1 : 1 + num_others]]
            batch = rows[: 1 + len(others)]
            in_batch = found.feed(batch, [drafts[0], *others], k)
            found.hold(in_batch, verified, f"{k} in a batch of {len(batch)} at {length}")
    for row in rows:
        cache.close_row(row)
    for _ in range(max(rounds // 8, 2)):
        prompt = texts[0][: chance.randrange(2, min(longest, 700))]
        row = cache.open_row(len(prompt))
        whole = found.feed([row], [prompt], 6)
        while len(prompt) - cache.lengths[row] > 6:
            rest = prompt[cache.lengths[row] : -6]
            target.forward([row], [rest[: chance.randrange(1, 300)]], [1])
        last = found.feed([row], [prompt[cache.lengths[row] :]], 6)
        found.hold(last, whole[-len(last) :], f"a prompt of {len(prompt)} in pieces")
        cache.close_row(row)
    return found


def compare_texts(engine: Any, count: int, chance: random.Random) -> tuple[int, int]:
    """(texts, those that differ): requests alone, and eight at once with other neighbours."""
    prompts = [engine.target.tokenizer(text)["input_ids"] for text in demo.read_prompts().values()]
    names = [None, *engine.panel.drafters]
    requests = []
    for i in range(count):
        sampling = core.Sampling(temperature=0.9, top_p=0.95) if i % 2 else core.Sampling()
        prompt = chance.choice(prompts) * chance.choice([1, 1, 12])
        requests.append(
            core.Request(
                prompt[:600], 24, names[i % len(names)], 5, sampling=sampling, seed=i, logprobs=0
            )
        )
    differing = 0
    for begin in range(0, count, 8):
        batch = [engine.open(request) for request in requests[begin : begin + 8]]
        while running := [s for s in batch if s.finish_reason is None]:
            faults.step(engine, running)
        for sequence in batch:
            engine.close(sequence)
        for request, together in zip(requests[begin : begin + 8], batch, strict=True):
            *_, (alone, _) = engine.generate(request)
            same = alone.output == together.output and alone.logprobs == together.logprobs
            differing += not same
    return count, differing


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help=f"demo, {', '.join(ODD)} or a folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--texts", type=int, default=16)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    chance = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(given.model, folder) if given.model in ODD else given.model
        options = core.Options(dtype=given.dtype, max_running=8, fixed_k=True)
        if model != "demo":
            options = replace(options, model=model)
        engine = core.load_engine(options)
        found = compare_forwards(engine.target, given.rounds, chance)
        texts, differing = compare_texts(engine, given.texts, chance)
    document = {
        "model": given.model, "dtype": given.dtype, "threads": given.threads,
        "is_exact": engine.is_exact, "report": engine.target.report.as_dict(),
        "rows_compared": found.compared, "rows_differing": found.differing,
        "examples": found.examples[:5], "texts": texts, "texts_differing": differing,
    }  # fmt: skip
    print(json.dumps(document))


if __name__ == "__main__":
    main()
