"""llama.cpp at work, in a process of its own: its idle threads would disturb torch's, and back.

benchmarks.llama_peer starts it; it needs llama-cpp-python and nothing else of this repository. A
line of JSON asks, and a line answers:

    [ids, keep]              forget all but the first `keep` tokens, and feed the ids
                             -> [milliseconds, argmax behind each id]
    [ids, count, K, ends]    write `count` greedy tokens behind the ids, or up to one of `ends`,
                             with a prompt lookup of K tokens (0: without)
                             -> [milliseconds, tokens]
"""

import json
import sys
import time

import llama_cpp

# ggml's numbers: GGML_TYPE_F32 and _BF16. Quantised models have keys and values in F16, as is its
# default.
TYPES = {"float32": 0, "bfloat16": 30}
F16 = 1


def main(path: str, dtype: str, num_threads: str, context: str) -> None:
    """Answer until stdin ends."""
    threads = {"n_threads": int(num_threads), "n_threads_batch": int(num_threads)}
    # Flash attention, the default, makes verifying slower and rounds to float16.
    kind = TYPES.get(dtype, F16)
    keys = {"type_k": kind, "type_v": kind, "flash_attn": False}
    size = {"n_ctx": int(context), "n_batch": 512, "logits_all": True, "verbose": False}
    model = llama_cpp.Llama(path, **threads, **keys, **size)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = feed(model, *asked) if len(asked) == 2 else write(model, *asked)
        print(json.dumps(answer), flush=True)


def feed(model: llama_cpp.Llama, tokens: list[int], keep: int) -> tuple[float, list[int]]:
    """One forward."""
    model.n_tokens, began = keep, time.perf_counter()
    model.eval(tokens)
    ms = (time.perf_counter() - began) * 1e3
    return ms, model.scores[keep : model.n_tokens].argmax(-1).tolist()


def write(
    model: llama_cpp.Llama, prompt: list[int], count: int, num_drafted: int, ends: list[int]
) -> tuple[float, list[int]]:
    """A greedy text, by the package's own loop."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    lookup = LlamaPromptLookupDecoding(num_pred_tokens=num_drafted) if num_drafted else None
    model.draft_model, model.n_tokens = lookup, 0  # nothing is left of a prompt read before
    tokens, began = [], time.perf_counter()
    for token in model.generate(prompt, temp=0.0):
        tokens.append(token)
        if len(tokens) == count or token in ends:
            break
    return (time.perf_counter() - began) * 1e3, tokens


if __name__ == "__main__":
    main(*sys.argv[1:])
