"""llama.cpp at work, in a process of its own: its idle threads would disturb torch's, and back.

benchmarks.llama_peer starts it; it needs llama-cpp-python and nothing else of this repository. A
line of JSON asks, [ids, keep]: forget all but the first `keep` tokens and feed the ids. A line
answers, [milliseconds, argmax behind each id].
"""

import json
import sys
import time

import llama_cpp

TYPES = {"float32": 0, "bfloat16": 30}  # ggml's numbers: GGML_TYPE_F32, GGML_TYPE_BF16


def main(path: str, dtype: str, num_threads: str, context: str) -> None:
    """Answer until stdin ends."""
    threads = {"n_threads": int(num_threads), "n_threads_batch": int(num_threads)}
    # Flash attention, the default, makes verifying slower and rounds to float16.
    keys = {"type_k": TYPES[dtype], "type_v": TYPES[dtype], "flash_attn": False}
    size = {"n_ctx": int(context), "n_batch": 512, "logits_all": True, "verbose": False}
    model = llama_cpp.Llama(path, **threads, **keys, **size)
    for line in sys.stdin:
        tokens, model.n_tokens = json.loads(line)
        keep, began = model.n_tokens, time.perf_counter()
        model.eval(tokens)
        ms = (time.perf_counter() - began) * 1e3
        print(json.dumps([ms, model.scores[keep : model.n_tokens].argmax(-1).tolist()]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
