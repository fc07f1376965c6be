"""What do fewer bits of each weight cost in quality?

The same model in float32, bfloat16 and int8 reads the same text: pages of the documentation that
Python brings along, up to 512 tokens each. `perplexity` is exp of the mean -ln p of its tokens.
`agree` is how often the most probable token is float32's, `overlap` the mean of Σ min(p, q) with
float32's distribution: what a draft of the same model would have accepted. `bytes_per_weight` are
those of embeddings, linear layers and norms as they lie in memory.

    python -m benchmarks.quality [--model smollm2] [--tokens 8192] [--json]
"""

from math import exp
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

import benchmarks as bench

KINDS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantize": "int8"},
}
PIECE = 512  # tokens


def texts(tokenizer: Any, count: int) -> list[list[int]]:
    """Pieces of Python's documentation, `count` tokens in all."""
    pieces = []
    for name in sorted(topics):
        ids = tokenizer(topics[name])["input_ids"][: min(PIECE, count)]
        if len(ids) > 1:
            pieces.append(ids)
            count -= len(ids)
    return pieces


@torch.inference_mode()
def read(model: Any, text: list[int]) -> Tensor:
    """Log-probabilities [n - 1, V] of all tokens but the first one."""
    row = model.cache.open_row()
    logits = model.forward([row], [text[:-1]], [len(text) - 1]).logits[0]
    model.cache.close_row(row)
    return logits.log_softmax(-1)


def compare(models: dict[str, Any], pieces: list[list[int]]) -> list[dict[str, Any]]:
    """One row per kind of weights; the first kind is what the others are compared with."""
    sums = {name: [0.0, 0.0, 0.0] for name in models}
    for text in bench.tqdm(pieces, desc="texts"):
        following, expected = torch.tensor(text[1:])[:, None], None
        for name, model in models.items():
            log_p = read(model, text)
            expected = log_p if expected is None else expected
            sums[name][0] -= float(log_p.gather(1, following).sum())
            sums[name][1] += int((log_p.argmax(-1) == expected.argmax(-1)).sum())
            sums[name][2] += float(torch.minimum(log_p, expected).exp().sum())
    count = sum(len(text) - 1 for text in pieces)
    rows = []
    for name, (loss, agreed, overlap) in sums.items():
        model, fast = models[name], models[name].compiled
        size = num_bytes(model.model, fast.decoder if fast.is_compiled else fast)
        rows.append({
            "weights": name,
            "bytes_per_weight": round(size / model.num_weights, 2),
            "perplexity": round(exp(loss / count), 3),
            "agree": round(agreed / count, 4), "overlap": round(overlap / count, 4),
        })  # fmt: skip
    return rows


def num_bytes(model: Any, matrices: Any) -> int:
    """The bytes of matrices in panels, and of what is left in the model's modules."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return matrices.num_bytes + sum(t.numel() * t.element_size() for t in tensors.values())


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__, runs=None)
    options.add_argument("--model", default="smollm2")
    bench.add_count(options, "--tokens", 64, 1_000_000, 8192, "of text")
    flags = options.parse_args(arguments)
    models = {
        name: bench.load_engine(model=flags.model, drafter="none", max_running=1, **kind).target
        for name, kind in KINDS.items()
    }
    pieces = texts(next(iter(models.values())).tokenizer, flags.tokens)
    bench.report(__spec__.name, arguments, flags, {"quality": compare(models, pieces)})


if __name__ == "__main__":
    main()
