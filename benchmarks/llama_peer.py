"""llama.cpp beside ours: the same weights, forwards of few rows, and whole texts.

What benchmarks.peers and benchmarks.chat add where llama-cpp-python and gguf are installed. The
model, which must have Qwen3's or Llama's structure, is written to a GGUF file without a tokenizer.
llama.cpp reads it in a process of its own (llama_worker.py). Both take turns, with a pause between,
so that neither's idle threads still spin while the other is measured. Keys and values have the
weights' type, flash attention is off. Of the quantised types, which are what llama.cpp is mostly
used with, q8_0 and q4_1 can be written as well: other models than the one in the file, like our own
int8.
"""

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

import benchmarks as bench

PAUSE_S = 0.3
TURN_S = 0.5  # of forwards, one after another
ROWS = 1, 2, 4, 6, 8
TYPES = "float32", "bfloat16", "q8_0", "q4_1"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def missing() -> str | None:
    """Why there is no comparison, if so."""
    wanted = {"llama_cpp": "llama-cpp-python", "gguf": "gguf"}
    lacking = [name for module, name in wanted.items() if not importlib.util.find_spec(module)]
    return f"llama.cpp is left out: pip install {' '.join(lacking)}" if lacking else None


def name_of(name: str) -> str:
    """Example: model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    if ".layers." not in name:
        parts = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
        return f"{parts[name.split('.')[-2]]}.weight"
    _, _, rest = name.partition(".layers.")
    layer, _, part = rest.partition(".")
    return f"blk.{layer}.{NAMES[part.removesuffix('.weight')]}.weight"


def write_gguf(model: Any, path: str, kind: str) -> None:
    """A model of transformers with Qwen3's or Llama's structure, as llama.cpp reads it.

    `kind` is one of TYPES. Raises KeyError for weights of other structures.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama" if config.model_type == "llama" else "qwen3")
    write_sizes(writer, config)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base((rope.get("full_attention") or rope)["rope_theta"])
    writer.add_tokenizer_model("none")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.named_parameters():  # a tied output layer comes once
        weight, stored = weight.detach(), None
        if config.model_type == "llama" and (count := heads.get(name.split(".")[-2])):
            # It rotates neighbours of a llama's heads, where transformers rotates halves.
            halves = weight.unflatten(0, (count, 2, -1))
            weight = halves.transpose(1, 2).flatten(0, 2).contiguous()
        if weight.dim() == 1:
            weight = weight.float()
        elif kind.startswith("q"):
            stored = gguf.GGMLQuantizationType[kind.upper()]
            weight = torch.from_numpy(gguf.quants.quantize(weight.float().numpy(), stored))
        elif kind == "bfloat16":
            weight, stored = weight.bfloat16().view(torch.uint8), gguf.GGMLQuantizationType.BF16
        else:
            weight = weight.float()
        writer.add_tensor(name_of(name), weight.numpy(), raw_dtype=stored)
    finish(writer)


def write_sizes(writer: Any, config: Any) -> None:
    """What a GGUF file says of the sizes of any model of Llama's structure."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def finish(writer: Any) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Worker:
    """llama.cpp with one text, in another process."""

    def __init__(self, path: str, dtype: str, context: int) -> None:
        script = Path(__file__).with_name("llama_worker.py")
        # -P: its folder's names (cache, sampling, …) are not those of anybody's libraries.
        command = [sys.executable, "-P", script, path, dtype, torch.get_num_threads(), context]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(list(map(str, command)), **pipes)

    def feed(self, tokens: list[int], keep: int) -> tuple[float, list[int]]:
        """Feed `tokens` behind the first `keep` ones: milliseconds, and the argmax behind each."""
        return self._ask(tokens, keep)

    def write(
        self, prompt: list[int], count: int, num_drafted: int, ends: list[int]
    ) -> tuple[float, list[int]]:
        """Up to `count` greedy tokens, looking up drafts if `num_drafted`: milliseconds, tokens."""
        time.sleep(PAUSE_S)  # until our idle threads sleep
        answer = self._ask(prompt, count, num_drafted, ends)
        time.sleep(PAUSE_S)  # and its own
        return answer

    def _ask(self, *question: Any) -> tuple[float, list[int]]:
        print(json.dumps(question), file=self._process.stdin, flush=True)
        ms, tokens = json.loads(self._process.stdout.readline())
        return ms, tokens

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def start(model: Any, kind: str, folder: str, context: int) -> Worker:
    """A worker with a model of transformers in a type of weights; the file goes to `folder`."""
    path = f"{folder}/{kind}.gguf"
    write_gguf(model, path, kind)
    return Worker(path, kind, context)


def measure(
    model: Any, target: Any, kind: str, prompt: list[int], runs: int
) -> list[dict[str, Any]]:
    """A row for each number of tokens behind `prompt`; below 1 the ratio says ours is faster.

    `model` is transformers', untouched; `target` the same in a cached model of ours. `kind` is
    llama.cpp's type of weights: float32, bfloat16, q8_0 or q4_1.
    """
    (row,), rows, floor = bench.hold(target, prompt), [], floor_ms(target)
    with TemporaryDirectory() as folder:
        worker = start(model, kind, folder, len(prompt) + 64)
        try:
            worker.feed(prompt, 0)
            for n in ROWS:
                verify = bench.verifying(target, [row], prompt[:n])

                def ours(verify: Any = verify) -> tuple[float, list[int]]:
                    began = time.perf_counter()
                    (choices,) = verify()
                    return (time.perf_counter() - began) * 1e3, choices

                def theirs(tokens: list[int] = prompt[:n]) -> tuple[float, list[int]]:
                    return worker.feed(tokens, len(prompt))

                turns = {"ours": lambda f=ours: turn(f), "theirs": lambda f=theirs: turn(f)}
                timed = bench.interleave(turns, runs, f"llama.cpp, {n} rows")
                ms, its = (median(call.result for call in calls) for calls in timed.values())
                rows.append(
                    {
                        "type": kind,
                        "rows": n,
                        "ours_ms": round(ms, 3),
                        "llama_cpp_ms": round(its, 3),
                        "ratio": round(ms / its, 2),
                        "floor": round(floor / ms, 2),
                        "equal_argmax": ours()[1] == theirs()[1],
                        "version": version("llama-cpp-python"),
                    }
                )
            return rows
        finally:
            worker.close()
            target.cache.close_row(row)


def floor_ms(target: Any) -> float:
    """What reading the weights of all linear layers once takes at least, in milliseconds."""
    memory, times = torch.ones(1 << 27), []  # 512 MiB: no cache holds it
    for _ in range(7):
        began = time.perf_counter()
        memory.sum()
        times.append(time.perf_counter() - began)
    size = target.fast.decoder.num_bytes
    return size * min(times) / (memory.numel() * memory.itemsize) * 1e3


def turn(call: Callable[[], tuple[float, list[int]]]) -> float:
    """Median ms of calls for a while, after a pause; the first one is not counted."""
    time.sleep(PAUSE_S)
    call()
    found, end = [], time.perf_counter() + TURN_S
    while time.perf_counter() < end or len(found) < 3:
        found.append(call()[0])
    return median(found)
