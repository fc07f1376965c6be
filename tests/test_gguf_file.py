"""A GGUF file's header is read as gguf's own reader reads it, or refused in one line.

The line has the file's name and what is wrong, and no memory is taken for what a broken header
claims. Files are written here byte by byte, as gguf's writer makes no broken ones.
"""

import os
import struct
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
from gguf_files import is_short_line, text

from runtime.models.gguf_file import BadFile, GgufFile, Texts

U32, F32, BOOL, TEXT, ARRAY, U64 = 4, 6, 7, 8, 9, 10
HUGE = 1 << 60


def texts(words):
    return struct.pack("<IQ", TEXT, len(words)) + b"".join(map(text, words))


KEYS = [
    ("general.architecture", TEXT, text("llama")),
    ("llama.block_count", U32, struct.pack("<I", 1)),
    ("llama.rope.freq_base", F32, struct.pack("<f", 10000)),
    ("tokenizer.ggml.add_bos_token", BOOL, b"\1"),
    ("tokenizer.ggml.tokens", ARRAY, texts(["a", "", "日本", "b" * 300])),
    ("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ3f", F32, 3, 0.5, 1, -2)),
]
TENSORS = [  # name, shape with the fastest dimension first, type, offset
    ("output.weight", (32, 4), 8, 0),
    ("norm.weight", (8,), 0, 160),
]


def header(keys=KEYS, tensors=TENSORS, version=3, num_keys=None, num_tensors=None):
    counts = num_tensors or len(tensors), num_keys or len(keys)
    written = b"GGUF" + struct.pack("<IQQ", version, *counts)
    written += b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in keys)
    for name, shape, kind, offset in tensors:
        written += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return written + bytes(-len(written) % 32)


DATA = bytes(range(192))


def write(path, content=None):
    path.write_bytes(header() + DATA if content is None else content)
    return str(path)


@pytest.mark.parametrize("version", [2, 3])
def test_a_header_is_what_gguf_s_own_reader_finds(tmp_path, version):
    path = write(tmp_path / "a.gguf", header(version=version) + DATA)
    theirs = gguf.GGUFReader(path)
    with GgufFile(path) as ours:
        for key, value in ours.metadata.items():
            expected = theirs.fields[key].contents()
            if isinstance(value, Texts | np.ndarray):
                assert len(value) == len(expected) and value[1] == expected[1]
                value = list(value)
            assert value == expected
        assert len(ours.metadata) == len(KEYS)
        for tensor in theirs.tensors:
            mine = ours.tensors[tensor.name]
            assert mine.shape == tuple(map(int, reversed(tensor.shape)))
            assert mine.type == tensor.tensor_type
            assert mine.num_bytes == tensor.n_bytes and mine.offset == tensor.data_offset
            assert bytes(ours.read(mine)) == tensor.data.tobytes()
        assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
        assert bytes(ours.read(ours.tensors["output.weight"], 34, 3)) == DATA[34:37]


def test_a_fingerprint_depends_on_the_data_too(tmp_path):
    """With the same header, size and time."""
    prints = []
    for data in (DATA, DATA, DATA[:-1] + b"\0"):
        path = write(tmp_path / "a.gguf", header() + data)
        os.utime(path, (0, 0))
        prints.append(GgufFile(path).fingerprint)
    assert prints[0] == prints[1] != prints[2]


def tensors(*entries):
    return header(tensors=entries) + DATA


def key(kind, value):
    return keys(*KEYS, ("last", kind, value))


def keys(*entries):
    return header(entries) + DATA


BROKEN = {
    "nothing": (b"", "no GGUF file: those begin with GGUF (fetch it again)"),
    "another format": (b"PK\3\4" + DATA, "no GGUF file: those begin with GGUF (fetch it again)"),
    "version 1": (header(version=1) + DATA, "version 1"),
    "the other byte order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + DATA, "big-endian"),
    "cut off in the header": (header()[:20], "goes on behind its end"),
    "cut off in the data": (header() + DATA[:-1], "'norm.weight' ends behind its end"),
    "keys without end": (header(num_keys=HUGE), "it claims 2 tensors and"),
    "a long name": (tensors(("a\0\x1b[31m\n" + "b" * 65536, (8,), 0, 8)), r"a\x00\x1b[31m\nbbb"),
    "tensors without end": (header(num_tensors=HUGE), "it claims 1152921504606846976 tensors"),
    "a key twice": (keys(*KEYS, KEYS[0]), "the key 'general.architecture' twice"),
    "a key that is no text": (keys((b"\xff", U32, bytes(4))), "is not text"),
    "a text of 2^64 - 1": (key(TEXT, b"\xff" * 8), "goes on behind its end"),
    "numbers without end": (key(ARRAY, struct.pack("<IQ", U64, HUGE)), "goes on behind its end"),
    "texts without end": (key(ARRAY, struct.pack("<IQ", TEXT, HUGE)), "goes on behind its end"),
    "a text in an array": (key(ARRAY, struct.pack("<IQQ", TEXT, 1, HUGE)), "behind its end"),
    "an array in an array": (key(ARRAY, struct.pack("<IQ", ARRAY, 1)), "inside an array"),
    "a number of tensors that is none": (
        keys(("split.tensors.count", ARRAY, struct.pack("<IQ3B", 0, 3, 1, 2, 3))),
        "has not all its tensors, only 2 in its parts",
    ),
    "a type of value": (key(13, b""), "values of type 13"),
    "a type in an array": (key(ARRAY, struct.pack("<IQ", 77, 1)), "values of type 77"),
    "an alignment": (keys(("general.alignment", U32, struct.pack("<I", 48))), "no power of two"),
    "an alignment of 0": (keys(("general.alignment", U32, bytes(4))), "no power of two"),
    "a tensor twice": (tensors(TENSORS[0], ("output.weight", (8,), 0, 160)), "weight' twice"),
    "tensors that overlap": (tensors(TENSORS[0], ("b", (8,), 0, 128)), "and 'b' overlap"),
    "no dimension": (tensors(("a", (), 0, 0)), "'a' has 0 dimensions"),
    "five dimensions": (tensors(("a", (1,) * 5, 0, 0)), "'a' has 5 dimensions"),
    "an empty dimension": (tensors(("a", (0, 4), 0, 0)), "has the shape [4, 0]"),
    "half a block": (tensors(("a", (16, 4), 8, 0)), "in Q8_0 has the shape [4, 16]"),
    "a shape that overflows": (tensors(("a", (1 << 32,) * 4, 0, 0)), "ends behind its end"),
    "an offset between": (tensors(("a", (8,), 0, 8)), "is not aligned"),
    "a type of tensor": (tensors(("a\nb", (8,), 99, 0)), "type: 99 in 'a\\nb' (give another file)"),
}


def refused(path):
    """The line that says why. Until then no memory was taken for what the file claims."""
    tracemalloc.start()
    try:
        with pytest.raises(BadFile) as error:
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    message = str(error.value)
    assert os.path.dirname(path) in message and is_short_line(message), message
    return message


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_header_is_one_line(tmp_path, name):
    content, reason = BROKEN[name]
    assert reason in refused(write(tmp_path / "broken.gguf", content))


def test_what_is_no_file_is_one_line(tmp_path):
    assert "not found" in refused(str(tmp_path / "missing.gguf"))
    for name, make in (("folder.gguf", os.mkdir), ("pipe.gguf", os.mkfifo)):
        make(tmp_path / name)
        assert "is not a file" in refused(str(tmp_path / name))


def test_a_header_may_be_too_long(tmp_path, monkeypatch):
    path = write(tmp_path / "a.gguf")
    monkeypatch.setattr("runtime.models.gguf_file._HEAD", 128)
    assert "its header is longer than" in refused(path)
    # Nor is room made for a vocabulary as long as a file of many gigabytes (none on the disk).
    monkeypatch.setattr("runtime.models.gguf_file._HEAD", 16384)
    write(Path(path), key(ARRAY, struct.pack("<IQ", TEXT, 1 << 30)))
    os.truncate(path, 1 << 34)
    assert "its header is longer than" in refused(path)


def test_a_file_that_shrinks_and_a_disk_that_fails_are_one_line(tmp_path, monkeypatch):
    path = write(tmp_path / "a.gguf")
    with GgufFile(path) as file:
        os.truncate(path, len(header()) + 100)
        with pytest.raises(BadFile, match="a.gguf is damaged or cut off: it became shorter"):
            file.read(file.tensors["output.weight"])
        monkeypatch.setattr(os, "preadv", Mock(side_effect=OSError(5, "Input/output error")))
        with pytest.raises(BadFile, match="cannot read .*a.gguf: Input/output error"):
            file.read(file.tensors["output.weight"])


# ---------------------------------------------------------------------------- several files
def part(number, count, tensors, total=2, keys=()):
    numbers = [
        ("split.no", 2, struct.pack("<H", number)),
        ("split.count", 2, struct.pack("<H", count)),
        ("split.tensors.count", 5, struct.pack("<i", total)),
    ]
    return header([*keys, *numbers], tensors)


def write_parts(folder, **changes):
    first, second = folder / "m-00001-of-00002.gguf", folder / "m-00002-of-00002.gguf"
    write(first, part(0, 2, TENSORS[:1], keys=KEYS, **changes) + DATA)
    write(second, part(1, 2, [("norm.weight", (8,), 0, 0)], **changes) + DATA[::-1])
    return str(first), str(second)


def test_a_model_in_parts_is_one_whichever_is_named(tmp_path):
    for path in write_parts(tmp_path):
        with GgufFile(path) as file:
            assert file.metadata["general.architecture"] == "llama"
            assert bytes(file.read(file.tensors["output.weight"])) == DATA[:136]
            assert bytes(file.read(file.tensors["norm.weight"])) == DATA[::-1][:32]
            assert file.name.endswith("m-00001-of-00002.gguf")


def test_parts_that_do_not_belong_together_are_told(tmp_path):
    first, second = write_parts(tmp_path)
    os.remove(second)
    assert "m-00002-of-00002.gguf not found, one of 2 parts: fetch it, too" in refused(first)
    write(Path(second), Path(first).read_bytes())
    assert "m-00002-of-00002.gguf is part '0'" in refused(first)
    write(Path(second), part(1, 2, TENSORS[:1]) + DATA)
    assert "has the tensor 'output.weight', as another part has" in refused(first)
    first, _ = write_parts(tmp_path, total=7)
    assert "has not all its tensors, only 2 in its parts" in refused(first)
    alone = str(tmp_path / "alone.gguf")
    os.rename(first, alone)
    assert "is part '0' (from 0) of '2' of a model: give all parts their names" in refused(alone)
