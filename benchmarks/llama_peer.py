"""llama.cpp beside ours: the same weights in the same type, forwards of one row and of six.

What benchmarks.peers adds where llama-cpp-python and gguf are installed. The model, which must have
Qwen3's structure, is written to a GGUF file without a tokenizer. llama.cpp reads it in a process of
its own (llama_worker.py). Both take turns, with a pause between, so that neither's idle threads
still spin while the other is measured. Keys and values have the weights' type, flash attention is
off. Quantised weights, which are what llama.cpp is mostly used with, are another trade and are not
compared.
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


def write_gguf(model: Any, path: str) -> None:
    """A model of transformers with Qwen3's structure, as llama.cpp reads it.

    Raises KeyError for weights that Qwen3 does not have.
    """
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, "qwen3")
    write_sizes(writer, config)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base((rope.get("full_attention") or rope)["rope_theta"])
    writer.add_tokenizer_model("none")
    for name, weight in model.named_parameters():  # a tied output layer comes once
        weight, kind = weight.detach(), None
        if weight.dim() == 1:
            weight = weight.float()
        elif weight.dtype == torch.bfloat16:
            weight, kind = weight.view(torch.uint8), gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name_of(name), weight.numpy(), raw_dtype=kind)
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
        print(json.dumps([tokens, keep]), file=self._process.stdin, flush=True)
        ms, argmax = json.loads(self._process.stdout.readline())
        return ms, argmax

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def measure(
    model: Any, target: Any, dtype: str, prompt: list[int], runs: int
) -> list[dict[str, Any]]:
    """A row for one token and one for six behind `prompt`; below 1 the ratio says ours is faster.

    `model` is transformers', untouched; `target` the same in a cached model of ours.
    """
    (row,), rows = bench.hold(target, prompt), []
    with TemporaryDirectory() as folder:
        write_gguf(model, f"{folder}/model.gguf")
        worker = Worker(f"{folder}/model.gguf", dtype, len(prompt) + 64)
        try:
            worker.feed(prompt, 0)
            for n in 1, 6:
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
                        "rows": n,
                        "ours_ms": round(ms, 3),
                        "llama_cpp_ms": round(its, 3),
                        "ratio": round(ms / its, 2),
                        "equal_argmax": ours()[1] == theirs()[1],
                        "version": version("llama-cpp-python"),
                    }
                )
            return rows
        finally:
            worker.close()
            target.cache.close_row(row)


def turn(call: Callable[[], tuple[float, list[int]]]) -> float:
    """Median ms of calls for a while, after a pause; the first one is not counted."""
    time.sleep(PAUSE_S)
    call()
    found, end = [], time.perf_counter() + TURN_S
    while time.perf_counter() < end or len(found) < 3:
        found.append(call()[0])
    return median(found)
