"""A name on the Hugging Face hub means one GGUF file, which is fetched once and found offline then.

    someone/target-GGUF:q4_0 → the files of that repository → the one that ends so, with its parts

The hub is one of our own on localhost, with files in a folder.
"""

import json
import os
import threading
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest
from conftest import needs_compiler
from gguf_files import Q4_0, Q8_0, TINY, write

from runtime.models import catalogue, gguf_hub, loading
from runtime.models.gguf_file import BadFile
from server import core
from server.options import Options

FILES = ["README.md", "a-fp16.gguf", "a-q4_k_m.gguf", "a-q8_0-00001-of-00002.gguf",
         "a-q8_0-00002-of-00002.gguf", "mmproj-a-q4_k_m.gguf"]  # fmt: skip
OTHERS = ["b/x.Q8_0.gguf", "a.F16.gguf"]


@pytest.mark.parametrize(("files", "wanted", "expected"), [
    (FILES, None, ["a-q4_k_m.gguf"]),
    (FILES, "q8_0", FILES[3:5]),
    (FILES, "F16", ["a-fp16.gguf"]),
    (FILES, "q2_k", []),
    (["m-BF16.gguf", "m-F16.gguf", "m-UD-Q4_K_XL.gguf"], "f16", ["m-F16.gguf"]),
    (["m-IQ4_NL.gguf", "m-UD-Q4_K_XL.gguf"], "q4_nl", []),
    (["m-Q4_K_XL.gguf", "m-UD-Q4_K_XL.gguf"], "UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
    (OTHERS, None, ["a.F16.gguf"]),
    (OTHERS, "q8_0", ["b/x.Q8_0.gguf"]),
    (["README.md"], None, []),
    (["m_Q4_0.gguf"], "0", []),
    (["Q4_K_M.gguf"], None, ["Q4_K_M.gguf"]),
])  # fmt: skip
def test_the_file_is_the_one_whose_name_ends_so_with_all_its_parts(files, wanted, expected):
    """Without the usual kind the first file is meant."""
    assert gguf_hub.choose(files, wanted) == expected


def test_what_means_a_file_of_the_hub():
    name = "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF"
    assert all(map(gguf_hub.is_named, (name, f"{name}:q4_k_m", "someone/else:Q8_0")))
    others = "someone/else", "./folder/x-gguf", "model.gguf", "a/b/c:q4_0"
    assert not any(map(gguf_hub.is_named, others))


class Hub(SimpleHTTPRequestHandler):
    """As much of the hub's interface as its client needs: files in a folder."""

    def log_message(self, *_):
        """Nothing."""

    def end_headers(self):
        self.send_header("ETag", f'"{sha256(self.path.encode()).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("X-Error-Code", "RepoNotFound")  # read where a file is missing
        super().end_headers()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder that a hub serves until it is told to end. The hub's client asks there."""
    folder, constants = tmp_path / "served", huggingface_hub.constants
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, directory=folder))
    address = f"http://127.0.0.1:{server.server_port}"
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def end():
        server.shutdown()
        server.server_close()
        thread.join()

    yield folder, end
    end()


def put(folder, repository, name, kind, **options):
    """Have a hub's folder hold a GGUF file in a repository."""
    file = folder / repository / "resolve" / "main" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, TINY, kind, **options)
    files = [{"rfilename": each} for each in ("README.md", *os.listdir(file.parent))]
    listed = folder / "api" / "models" / repository
    listed.parent.mkdir(parents=True, exist_ok=True)
    listed.write_text(json.dumps({"id": repository, "siblings": files}))


@needs_compiler
def test_a_pair_of_the_catalogue_is_fetched_once_and_then_found_without_a_network(monkeypatch, hub):
    """A target in three parts and its draft, by their names on the hub, are loaded as they are."""
    folder, end = hub
    put(folder, "someone/target-GGUF", "t-q4_0.gguf", Q4_0, split_max_tensors=9)
    put(folder, "someone/draft-gguf", "d-q8_0.gguf", Q8_0)
    pair = "someone/target-GGUF:q4_0", "someone/draft-gguf:Q8_0"
    monkeypatch.setitem(catalogue.PAIRS, "pair", pair)
    engine = core.load_engine(Options(model="pair", fixed_k=True))
    assert engine.target.compiled.is_compiled and "draft_model" in engine.pool.drafters
    with pytest.raises(loading.StartError, match="must be from 2 to .* for pair$"):
        core.load_engine(Options(model="pair", max_model_len=1))
    put(folder, "someone/target-GGUF", "t_q4_k_m.gguf", Q4_0)
    with pytest.raises(BadFile, match=r"has no q2_k file \(it has q4_0, q4_k_m\)"):
        gguf_hub.fetch("someone/target-GGUF:q2_k")
    assert gguf_hub.fetch("someone/target-GGUF").endswith("t_q4_k_m.gguf")  # not what it has
    put(folder, "someone/sees-GGUF", "mmproj.gguf", Q8_0)
    with pytest.raises(BadFile, match=r"has no q4_k_m file \(it has mmproj\)"):
        gguf_hub.fetch("someone/sees-GGUF")
    with pytest.raises(BadFile, match="the hub has no nobody/there-GGUF"):
        gguf_hub.fetch("nobody/there-GGUF")
    end()
    assert gguf_hub.fetch(pair[0]).endswith("t-q4_0-00001-of-00003.gguf")
    assert gguf_hub.fetch("someone/draft-gguf").endswith("d-q8_0.gguf")  # the hub is not there
    with pytest.raises(loading.StartError, match="cannot ask the hub for someone/new-GGUF"):
        core.load_engine(Options(model="someone/new-GGUF"))


def test_a_named_draft_comes_before_that_of_the_pair():
    def draft(**options):
        return Options(**options).model_of("draft_model")

    assert draft(model="qwen2.5-coder").endswith("0.5B-Instruct-GGUF:q4_k_m")
    assert draft(model="qwen2.5-coder", draft_model="other") == "other"
    assert draft(model="x") is None
