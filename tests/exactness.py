"""Does the same token get the same bits, however it is computed? A JSON line for each model.

    python -m tests.exactness --model embedded --dtype float32 --threads 2

test_exactness.py runs it, under the settings of other machines in processes of their own. It asks
the same questions as the check at load, of other texts, by other code: at lengths of text from 10
to 1 100, every other one close to a border of keys, one text is decoded token by token, verified,
verified in batches, and read as a prompt in pieces. Then requests of all drafters are run alone and
at once.
"""

import argparse
import importlib
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
core = importlib.import_module("08_speculative_decoding")

import torch  # noqa: E402
import transformers  # noqa: E402

import demo  # noqa: E402
from kernels import states  # noqa: E402
from models.catalogue import EMBEDDED  # noqa: E402
from serving import faults  # noqa: E402

LONGEST = 1100
BORDERS = [block + step for block in (0, 512, 1024) for step in range(64, 513, 64)]
ODD = {
    "llama": {
        "hidden_size": 160, "intermediate_size": 1376, "num_hidden_layers": 3, "vocab_size": 49157,
        "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 32,
    },
    "gemma2": {
        "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2, "vocab_size": 4096,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "sliding_window": 300,
    },
    "gpt2": {"vocab_size": 4096, "n_embd": 100, "n_layer": 2, "n_head": 5},
    "qwen3_5_text": {  # recurrent layers beside attention
        "hidden_size": 100, "intermediate_size": 200, "num_hidden_layers": 4, "vocab_size": 4096,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
        "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 20,
        "linear_value_head_dim": 36,
    },
}  # fmt: skip


def make_model(family: str, folder: str) -> str:
    """A random model with widths that no vector divides, and the demo's tokenizer."""
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    length = {"n_positions" if family == "gpt2" else "max_position_embeddings": LONGEST + 20}
    config = transformers.AutoConfig.for_model(
        family, initializer_range=0.2, **ODD[family], **ends, **length
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(EMBEDDED["embedded"]).save_pretrained(folder)
    return folder


@torch.inference_mode()
def compare_forwards(target: Any, rounds: int, chance: random.Random) -> tuple[int, list[str]]:
    """Decoded, verified, in batches, in pieces: how many rows were compared, and what differed."""
    compared, differing, cache = 0, [], target.cache
    longest = min(LONGEST, target.max_length - 20)

    def hold(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        nonlocal compared
        compared += len(actual)
        pairs = zip(actual, expected, strict=True)
        differing.extend(what for a, b in pairs if not torch.equal(a, b))

    def feed(rows: list[int], tokens: list[list[int]], num_logits: int) -> torch.Tensor:
        """The first row's logits; all rows hold afterwards what they held before."""
        held = [cache.lengths[row] for row in rows]
        logits = target.forward(rows, tokens, [min(num_logits, len(fed)) for fed in tokens]).logits
        for row, length in zip(rows, held, strict=True):
            cache.truncate(row, length)
        return logits[0]

    text = [chance.randrange(10, target.vocab_size) for _ in range(longest + 8)]
    rows = [cache.open_row() for _ in range(cache.num_rows)]
    one = rows[0]
    target.forward([one], [text[:longest]], [1])
    for buffer in cache._buffers():
        buffer[1:, :, :longest] = buffer[:1, :, :longest]
    states.NUM_MARKS += 7  # below, a text goes back several calls
    for i in range(rounds):
        near = chance.choice([b for b in BORDERS if b < longest]) - chance.randrange(7)
        length = near if i % 2 else chance.randrange(10, longest)
        lengths = [length, *(chance.randrange(10, longest) for _ in rows[1:])]
        for row, held in zip(rows, lengths, strict=True):
            cache.lengths[row] = held
            for layer in cache.recurrent:
                newest = layer._marks[one][-1]  # what it holds, as if that were `held` tokens
                layer._marks[row] = [states.Mark(held, newest.tail, newest.state)]
        k = chance.randrange(1, 9)
        drafts = [text[held : held + k] for held in lengths]
        verified = feed([one], [drafts[0]], k)
        for j, token in enumerate(drafts[0]):
            alone = target.forward([one], [[token]], [1]).logits[0]
            hold(alone, verified[j : j + 1], f"decoded at {length + j}")
        cache.truncate(one, length)
        for num_others in (len(rows) - 1, chance.randrange(1, len(rows))):
            others = [draft[: chance.randrange(1, k + 1)] for draft in drafts[1 : 1 + num_others]]
            batch = rows[: 1 + len(others)]
            in_batch = feed(batch, [drafts[0], *others], k)
            hold(in_batch, verified, f"{k} in a batch of {len(batch)} at {length}")
    for row in rows:
        cache.close_row(row)
    for _ in range(max(rounds // 8, 2)):
        prompt = text[: chance.randrange(2, min(longest, 700))]
        row = cache.open_row()
        whole = feed([row], [prompt], 6)
        while len(prompt) - cache.lengths[row] > 6:
            rest = prompt[cache.lengths[row] : -6]
            target.forward([row], [rest[: chance.randrange(1, 300)]], [1])
        last = feed([row], [prompt[cache.lengths[row] :]], 6)
        hold(last, whole[-len(last) :], f"a prompt of {len(prompt)} in pieces")
        cache.close_row(row)
    states.NUM_MARKS -= 7
    return compared, differing


def compare_texts(engine: Any, chance: random.Random) -> list[bool]:
    """Whether a request of each drafter has the same text alone and beside the others."""
    prompts = [engine.target.tokenizer(text)["input_ids"] for text in demo.read_prompts().values()]
    requests = []
    for i, drafter in enumerate([None, *engine.panel.drafters]):
        sampling = core.Sampling(temperature=0.9, top_p=0.95) if i % 2 else core.Sampling()
        prompt = chance.choice(prompts) * chance.choice([1, 1, 12])
        wanted = {"sampling": sampling, "seed": i, "logprobs": 0}
        requests.append(core.Request(prompt[:600], 24, drafter, 5, **wanted))
    together = [engine.open(request) for request in requests]
    while running := [s for s in together if s.finish_reason is None]:
        faults.step(engine, running)
    for sequence in together:
        engine.close(sequence)
    alone = [list(engine.generate(request))[-1][0] for request in requests]
    pairs = zip(alone, together, strict=True)
    return [a.output == b.output and a.logprobs == b.logprobs for a, b in pairs]


def examine(model: str, dtype: str, rounds: int) -> dict[str, Any]:
    """What the check says of a model, by the threads of this process, and what is found here."""
    chance = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        name = make_model(model, folder) if model in ODD else model
        options = core.Options(model=name, dtype=dtype, max_running=8, fixed_k=True)
        engine = core.load_engine(options)
    compared, differing = compare_forwards(engine.target, rounds, chance)
    return {
        "model": model, "dtype": dtype, "threads": torch.get_num_threads(),
        "is_exact": engine.target.report.is_exact, "report": engine.target.report.as_dict(),
        "rows_compared": compared, "rows_differing": len(differing), "examples": differing[:5],
        "texts_equal": compare_texts(engine, chance),
    }  # fmt: skip


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", nargs="+", default=["embedded"], help=f"{', '.join(ODD)}, a name"
    )
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for model in given.model:
        for dtype in given.dtype:
            print(json.dumps(examine(model, dtype, rounds=8)), flush=True)


if __name__ == "__main__":
    main()
