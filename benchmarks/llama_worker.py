"""llama.cpp at work, in a process of its own: its idle threads would disturb torch's, and back.

benchmarks.llama_peer starts it with a model's file, the type of its keys and values, the number of
threads and the context; it needs llama-cpp-python and nothing else of this repository. A line of
JSON asks, a line answers: {"feed": ids, "keep": count} forgets all but the first `count` tokens,
feeds the ids with logits for each, and gives {"ms": …, "argmax": [ids]}.
"""

import json
import sys
import time

import llama_cpp

TYPES = {"float32": 0, "bfloat16": 30}  # ggml's numbers: GGML_TYPE_F32, GGML_TYPE_BF16


def main() -> None:
    """Answer until stdin ends."""
    path, dtype, threads, context = sys.argv[1:]
    # Flash attention, the default, makes verifying slower and rounds to float16.
    cache = {"type_k": TYPES[dtype], "type_v": TYPES[dtype], "flash_attn": False}
    size = {"n_ctx": int(context), "n_batch": 512}
    size |= {"n_threads": int(threads), "n_threads_batch": int(threads)}
    model = llama_cpp.Llama(path, **cache, **size, logits_all=True, verbose=False)
    print(json.dumps({"ready": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        model.n_tokens = asked["keep"]
        began = time.perf_counter()
        model.eval(asked["feed"])
        ms = (time.perf_counter() - began) * 1e3
        argmax = model.scores[asked["keep"] : model.n_tokens].argmax(-1).tolist()
        print(json.dumps({"ms": ms, "argmax": argmax}), flush=True)


if __name__ == "__main__":
    main()
