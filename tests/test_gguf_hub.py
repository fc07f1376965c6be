"""GGUF files by their names on the hub, from a hub of our own on localhost."""

import json
import threading
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

import huggingface_hub.constants
import pytest
import speculative_decoding as core
from test_gguf import Q4_0, Q8_0, needs_compiler, write_gguf

from models import catalogue, gguf_hub, loading
from models.gguf_file import BadFile

FILES = ["README.md", "a-fp16.gguf", "a-q4_k_m.gguf", "a-q8_0-00001-of-00002.gguf",
         "a-q8_0-00002-of-00002.gguf", "mmproj-a-q4_k_m.gguf"]  # fmt: skip
OTHERS = ["b/x.Q8_0.gguf", "a.F16.gguf"]


@pytest.mark.parametrize(
    ("files", "wanted", "expected"),
    [
        (FILES, None, ["a-q4_k_m.gguf"]),
        (FILES, "Q4_K_M", ["a-q4_k_m.gguf"]),
        (FILES, "q8_0", FILES[3:5]),
        (FILES, "fp16", ["a-fp16.gguf"]),
        (FILES, "q2_k", []),
        (OTHERS, None, ["a.F16.gguf"]),
        (OTHERS, "q8_0", ["b/x.Q8_0.gguf"]),
        (["README.md"], None, []),
    ],
)
def test_the_file_is_the_one_whose_name_ends_so_with_all_its_parts(files, wanted, expected):
    """Without the usual kind the first file is meant."""
    assert gguf_hub.choose(files, wanted) == expected


def test_what_means_a_file_of_the_hub():
    name = "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF"
    assert all(map(gguf_hub.is_named, (name, f"{name}:q4_k_m", "someone/else:Q8_0")))
    others = "someone/else", "./folder/x-gguf", "model.gguf", "a/b/c:q4_0"
    assert not any(map(gguf_hub.is_named, others))


@contextmanager
def hub(files):
    """A hub that has these files, {"owner/name": {file name: path}}, and what it was asked for."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        """As much of the hub's interface as its client needs."""

        def log_message(self, *_):
            """Nothing."""

        def answer(self, status, body=b"", **headers):
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self):
            """List a repository, or give a file of it."""
            path = unquote(urlparse(self.path).path).strip("/")
            asked.append(path)
            for repository, own in files.items():
                if path.startswith(f"api/models/{repository}"):
                    siblings = {"id": repository, "siblings": [{"rfilename": n} for n in own]}
                    return self.answer(200, json.dumps(siblings).encode())
                name = path.removeprefix(f"{repository}/resolve/").partition("/")[2]
                if path.startswith(repository) and name in own:
                    body = own[name].read_bytes()
                    etag = f'"{sha256(body).hexdigest()}"'
                    return self.answer(200, body, ETag=etag, X_Repo_Commit="0" * 40)
            return self.answer(404, X_Error_Code="RepoNotFound")

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def at(monkeypatch, tmp_path):
    """Let the hub's client ask there, with a cache of its own."""
    constants = huggingface_hub.constants

    def use(address):
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    return use


@needs_compiler
def test_a_pair_of_the_catalogue_is_fetched_once_and_then_found_without_a_network(
    tiny_folder, tmp_path, monkeypatch, at
):
    """Target and draft, each by its own name on the hub, are loaded as they are."""
    target = write_gguf(tiny_folder("llama"), tmp_path / "t-q4_0.gguf", Q4_0)
    draft = write_gguf(tiny_folder("llama"), tmp_path / "d-q8_0.gguf", Q8_0)
    pair = "someone/target-GGUF:q4_0", "someone/draft-gguf:Q8_0"
    monkeypatch.setitem(catalogue.PAIRS, "pair", pair)
    files = {
        "someone/target-GGUF": {"README.md": target, target.name: target},
        "someone/draft-gguf": {draft.name: draft},
    }
    with hub(files) as (address, asked):
        at(address)
        engine = core.load_engine(core.Options(model="pair", fixed_k=True))
        assert engine.target.fast.is_compiled and "draft_model" in engine.panel.drafters
        assert any(target.name in path for path in asked)
        with pytest.raises(BadFile, match=r"has no q2_k file \(it has q4_0\)"):
            gguf_hub.fetch("someone/target-GGUF:q2_k")
        with pytest.raises(BadFile, match="the hub has no nobody/there-GGUF"):
            gguf_hub.fetch("nobody/there-GGUF")
    assert gguf_hub.fetch(pair[0]).endswith("t-q4_0.gguf")  # nobody answers there now
    with pytest.raises(loading.StartError, match="cannot ask the hub for someone/new-GGUF"):
        core.load_engine(core.Options(model="someone/new-GGUF"))


def test_a_named_draft_comes_before_that_of_the_pair():
    assert core.Options(model="qwen2.5-coder").draft_folder.endswith("0.5B-Instruct-GGUF:q4_k_m")
    assert core.Options(model="qwen2.5-coder", draft_model="other").draft_folder == "other"
    assert core.Options(model="x").draft_folder is None
