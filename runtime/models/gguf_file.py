"""A GGUF file (llama.cpp's format): its metadata, and where its tensors lie.

    GGUF, version | number of tensors, of keys | keys and values | tensor table | data

All numbers are little-endian. A text is its length (8 bytes) and its UTF-8. A key is a text, a type
and a value. An entry of the table is a name, a shape (the fastest dimension first), a type and an
offset into the data, which begins at the next multiple of general.alignment (32).

A vocabulary has 150,000 texts. They stay bytes until somebody asks, and only their borders are
looked for. Whatever the file claims is compared with its true size before memory is taken for it.
The file is read and never mapped: where a mapped file shrinks, the system ends the process.

A model in several files, -00001-of-00003.gguf and so on, is one GgufFile.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Not read: version 1, which has
lengths of 4 bytes, and big-endian files.
"""

import hashlib
import os
import re
import stat
import struct
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from runtime.kernels import lay_out_file

from . import StartError

FORMS = {  # the kernels' names for GGUF's types
    "F32": "FLOAT", "F16": "FLOAT16", "BF16": "HALF", "Q8_0": "Q8", "Q4_0": "Q4", "Q4_1": "Q4M",
    "Q5_0": "Q5", "Q5_1": "Q5M", "Q4_K": "Q4K", "Q5_K": "Q5K", "Q6_K": "Q6K",
}  # fmt: skip

Panels = dict[str, np.ndarray]  # uint8, by tensor's name

_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
_WHOLE = ("None", "0", "1")  # what split.count says of a file without other parts
_HEAD = 32 << 20  # bytes that are read of a file; no header is longer
_SAMPLE, _NUM_SAMPLES = 1 << 16, 10  # bytes of data that a fingerprint covers, and how often
_MOST_KEYS, _MOST_TENSORS, _MOST_DIMENSIONS = 1 << 16, 1 << 17, 4
_TEXT, _ARRAY = 8, 9  # types of values; all others are numbers
_NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_length = struct.Struct("<Q").unpack_from


class BadFile(StartError):
    """A GGUF file cannot be read; one line that says why."""


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies and how it is stored."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]  # as in torch: the fastest dimension last
    part: int  # which of the model's files
    offset: int  # bytes from that file's beginning
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, which has shape[-1] weights. Rows are whole blocks."""
        block, num_bytes = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * num_bytes


class Texts:
    """An array of texts. Each is decoded when asked for."""

    def __init__(self, packed: bytearray, starts: "array[int]") -> None:
        self._packed, self._starts = packed, starts  # text i is at starts[i] + 8 : starts[i + 1]

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> str:
        return self._packed[self._starts[index] + 8 : self._starts[index + 1]].decode()

    def tobytes(self) -> bytes:
        """All of them, each behind its length."""
        return bytes(self._packed)

    def __iter__(self) -> Iterator[str]:
        for begin, end in pairwise(self._starts):
            yield self._packed[begin + 8 : end].decode()


class GgufFile(AbstractContextManager):
    """A GGUF model, open for reading. Raises BadFile in one line, now or in `read`.

    Example: with GgufFile("model.gguf") as file: file.metadata["general.architecture"]
    """

    def __init__(self, path: str | Path) -> None:
        self.paths = _parts(str(path))
        self.name = self.paths[0]
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        self.ahead: dict[str, Future[Panels]] = {}  # what ahead.py makes, by tensor's name
        self._files: list[int] = []
        self._digest = hashlib.sha256()  # of headers, samples, and what the system tells of files
        try:
            for part in range(len(self.paths)):
                self._add(part)
            num_tensors = len(self.tensors)
            # As a text, for it may be anything.
            if str(self.metadata.get("split.tensors.count", num_tensors)) != str(num_tensors):
                raise BadFile(
                    f"{path} has not all its tensors, only {num_tensors} in its parts: give all "
                    "parts their names back, which end in -00001-of-00003.gguf and so on"
                )
        except BaseException:
            self.close()
            raise
        self.fingerprint = self._digest.hexdigest()  # another one where the files are written anew

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Metadata and table stay; nothing can be read any more."""
        self.stop()
        while self._files:
            os.close(self._files.pop())

    def read(self, tensor: Tensor, start: int = 0, num_bytes: int | None = None) -> np.ndarray:
        """Bytes of a tensor, from its byte `start` on, all if num_bytes is None. uint8 [num_bytes].

        Raises BadFile if the disk fails, or the file has become shorter. Threads may read at once.
        """
        num_bytes = tensor.num_bytes - start if num_bytes is None else num_bytes
        assert 0 <= start <= start + num_bytes <= tensor.num_bytes
        data = np.empty(num_bytes, np.uint8)
        _fill(self._files[tensor.part], data, tensor.offset + start, self.paths[tensor.part])
        return data

    def lay_out(self, tensors: Sequence[Tensor]) -> Panels:
        """Matrices of one part in panels: the same numbers in another order. uint8 [bytes] each.

        Raises what `read` raises.
        """
        part = tensors[0].part
        matrices = [(t.offset, FORMS[t.type.name], t.shape) for t in tensors]
        names = (tensor.name for tensor in tensors)
        with _explained(self.paths[part]):
            return dict(zip(names, lay_out_file(self._files[part], matrices), strict=True))

    def panels(self, tensor: Tensor) -> np.ndarray:
        """A matrix in panels: those that ahead.py has made, if any. Raises what `read` raises."""
        made = self.ahead.pop(tensor.name, None)
        is_made = made is not None and not made.cancel()
        return (made.result() if is_made else self.lay_out([tensor]))[tensor.name]

    def stop(self) -> None:
        """Give back what ahead.py has made and nobody has taken."""
        wait([made for made in self.ahead.values() if not made.cancel()])
        self.ahead.clear()

    def _add(self, part: int) -> None:
        """Read the header of a part. The first one's metadata are the model's."""
        path = self.paths[part]
        try:
            # Without O_NONBLOCK a pipe would be waited for.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self._files.append(file)
            state = os.fstat(file)
        except OSError as error:
            raise BadFile(f"cannot read {path}: {error.strerror}") from error
        if not stat.S_ISREG(state.st_mode):
            raise BadFile(f"{path} is not a file")
        first = bytearray(min(state.st_size, _HEAD))
        _fill(file, first, 0, path)
        head = _Head(first, state.st_size, path)
        metadata, tensors = head.read(part)
        # As texts, for they may be anything.
        count, number = (str(metadata.get(key)) for key in ("split.count", "split.no"))
        if count not in _WHOLE and (count, number) != (str(len(self.paths)), str(part)):
            raise BadFile(
                f"{path} is part {number!r:.20} (from 0) of {count!r:.20} of a model: give all "
                "parts their names back, which end in -00001-of-00003.gguf and so on"
            )
        if twice := self.tensors.keys() & tensors.keys():
            raise BadFile(f"{path} has the tensor {min(twice)!r:.80}, as another part has")
        self.tensors |= tensors
        self.metadata = self.metadata or metadata
        self._digest.update(first[: head.at])
        sample = bytearray(min(_SAMPLE, state.st_size))
        for i in range(_NUM_SAMPLES):  # the last one is the file's end
            _fill(file, sample, (state.st_size - len(sample)) * (i + 1) // _NUM_SAMPLES, path)
            self._digest.update(sample)
        self._digest.update(f"{state.st_size} {state.st_mtime_ns}".encode())


def _parts(path: str) -> list[str]:
    """The files of a model, of which `path` is one. Raises BadFile if one is missing."""
    split = PART.fullmatch(path)
    paths = [path]
    if split and 1 <= int(split[2]) <= int(split[3]):
        paths = [f"{split[1]}-{i + 1:05}-of-{split[3]}.gguf" for i in range(int(split[3]))]
    for each in paths:
        if not os.path.exists(each):
            where = f", one of {len(paths)} parts: fetch it, too" if len(paths) > 1 else ""
            raise BadFile(f"model file {each} not found{where}")
    return paths


def _fill(file: int, buffer: np.ndarray | bytearray, offset: int, path: str) -> None:
    """Read bytes from `offset` on until `buffer` is full."""
    view = memoryview(buffer)
    with _explained(path):
        while view:
            if not (count := os.preadv(file, [view[: 1 << 30]], offset)):
                raise EOFError
            view, offset = view[count:], offset + count


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """Turn what reading a file fails with into a BadFile."""
    try:
        yield
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}") from error
    except EOFError as error:
        reason = "it became shorter while it was read"
        raise BadFile(f"{path} is damaged or cut off: {reason}") from error


class _Head:
    """The first bytes of a file of `size` bytes, and how far they have been read."""

    def __init__(self, first: bytearray, size: int, path: str) -> None:
        self._bytes, self._size, self._path, self.at = first, size, path, 0

    def bad(self, what: str) -> BadFile:
        return BadFile(f"{self._path} is damaged or cut off: {what} (delete it and fetch it again)")

    def read(self, part: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Metadata and tensor table of a file that is a model's part of this number."""
        try:
            return self._read(part)
        except (EOFError, struct.error, OverflowError) as error:
            is_whole = len(self._bytes) == self._size
            longer = "goes on behind its end" if is_whole else f"is longer than {_HEAD >> 20} MiB"
            raise self.bad(f"its header {longer}") from error
        except UnicodeDecodeError as error:
            raise self.bad("a name in its header is not text") from error

    def _read(self, part: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if self._bytes[:4] != _MAGIC:
            raise BadFile(f"{self._path} is no GGUF file: those begin with GGUF (fetch it again)")
        self.at = 4
        (version,) = self._unpack("<I")
        if version not in _VERSIONS:
            order = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise BadFile(f"{self._path} is a GGUF file of a kind that is not read: {order}")
        num_tensors, num_keys = self._unpack("<QQ")
        if num_tensors > _MOST_TENSORS or num_keys > _MOST_KEYS:
            raise self.bad(f"it claims {num_tensors} tensors and {num_keys} keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text().decode()
            if key in metadata:
                raise self.bad(f"it has the key {key!r:.80} twice")
            metadata[key] = self._value(*self._unpack("<I"))
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.bad(f"general.alignment is {alignment!r:.80}, which is no power of two")
        entries = sorted((self._entry(part) for _ in range(num_tensors)), key=lambda t: t.offset)
        begin = -(-self.at // alignment) * alignment  # of the data
        tensors: dict[str, Tensor] = {}
        end, before = 0, ""  # of the tensor before, from there on
        for tensor in entries:
            name = tensor.name
            if tensor.offset % alignment:
                raise self.bad(f"the tensor {name!r:.80} is not aligned")
            if tensor.offset < end:
                raise self.bad(f"the tensors {before!r:.80} and {name!r:.80} overlap")
            end, before = tensor.offset + tensor.num_bytes, name
            if begin + end > self._size:
                raise self.bad(f"the tensor {name!r:.80} ends behind its end")
            if name in tensors:
                raise self.bad(f"it has the tensor {name!r:.80} twice")
            tensors[name] = replace(tensor, offset=begin + tensor.offset)
        return metadata, tensors

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack_from(form, self._bytes, self._take(struct.calcsize(form)))

    def _take(self, count: int) -> int:
        """Go on by `count` bytes; where they begin. Raises EOFError if they are not there."""
        begin, self.at = self.at, self.at + count
        if self.at > len(self._bytes):
            raise EOFError
        return begin

    def _text(self) -> bytearray:
        begin = self._take(*self._unpack("<Q"))
        return self._bytes[begin : self.at]

    def _value(self, kind: int) -> Any:
        """A number, a text, an array of numbers, or Texts."""
        if kind == _TEXT:
            return self._text().decode("utf-8", "replace")
        if kind != _ARRAY:
            return self._numbers(kind, 1)[0].item()
        kind, count = self._unpack("<IQ")
        if kind != _TEXT:
            return self._numbers(kind, count)
        if 8 * count > len(self._bytes) - self.at:  # each text has a length
            raise EOFError
        starts, head, begin = array("q", bytes(8 * (count + 1))), self._bytes, self.at
        at = begin
        for i in range(count):  # 0.1 µs each
            at += 8 + _length(head, at)[0]
            starts[i + 1] = at - begin
        self._take(at - begin)
        return Texts(head[begin:at], starts)

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        if kind not in _NUMBERS:
            what = "an array inside an array" if kind == _ARRAY else f"values of type {kind}"
            raise self.bad(f"its header has {what}")
        form = np.dtype(_NUMBERS[kind])
        begin = self._take(count * form.itemsize)
        return np.frombuffer(self._bytes, form, count, begin).copy()

    def _entry(self, part: int) -> Tensor:
        """An entry of the table; its offset is still that into the data."""
        name = self._text().decode()
        (dimensions,) = self._unpack("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self.bad(f"the tensor {name!r:.80} has {dimensions} dimensions")
        *sizes, kind, offset = self._unpack(f"<{dimensions}QIQ")
        try:
            kind = GGMLQuantizationType(kind)
        except ValueError as error:
            why = f"weights of an unknown type: {kind} in {name!r:.80} (give another file)"
            raise BadFile(f"{self._path} has {why}") from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not all(sizes) or sizes[0] % block:
            raise self.bad(f"the tensor {name!r:.80} in {kind.name} has the shape {sizes[::-1]}")
        num_bytes = prod(sizes) // block * block_bytes
        return Tensor(name, kind, tuple(reversed(sizes)), part, offset, num_bytes)
