"""The model file: opened without reading its weights, and its tensors, types and attributes.

Protobuf would copy every weight into memory. So the bytes are skimmed first: tensors over
`SMALL` bytes lose their numbers and gain a note of where in the file they stand, and only what is
left is parsed. The numbers are read when somebody asks for them.
"""

from __future__ import annotations

import ast
import mmap
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuir.files import note_input
from gpuir.frontends.emit import NumbersMissing, nested_too_deep
from gpuir.frontends.onnx.messages import messages
from gpuir.interp import to_numpy_dtype
from gpuir.ir import types as ir
from gpuir.ir.errors import ModelError
from gpuir.ir.types import DType, TensorType

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, TypeProto

SMALL = 4096  # bytes: a shorter message is parsed as it is
DEEPEST = 100  # messages inside one another; protobuf's own limit
# the external_data key of a skimmed tensor, "start:length" in the file; no file can forge it
STANDS_AT = f"gpuir {os.urandom(8).hex()}"

DTYPES: dict[int, DType] = {  # TensorProto.DataType
    1: ir.f32,
    2: ir.u8,
    3: ir.i8,
    4: ir.u16,
    5: ir.i16,
    6: ir.i32,
    7: ir.i64,
    9: ir.bool_,
    10: ir.f16,
    11: ir.f64,
    12: ir.u32,
    13: ir.u64,
    14: ir.c64,
    15: ir.c128,
    16: ir.bf16,
    17: ir.f8e4m3,
    18: ir.f8e4m3fnuz,
    19: ir.f8e5m2,
    20: ir.f8e5m2fnuz,
    21: ir.u4,
    22: ir.i4,
    23: ir.f4e2m1,
    24: ir.f8e8m0,
    25: ir.u2,
    26: ir.i2,
}
NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


@dataclass(frozen=True)
class OpenedModel:
    """An opened model: its parsed skeleton, and where its numbers are."""

    name: str  # the file's name, as locations give it
    model: ModelProto
    data: memoryview | None  # the whole file, for tensors that were skimmed
    folder: Path | None  # where external data lies

    def refused(
        self, what: str, expected: object = "", found: object = "", fix: str = ""
    ) -> ModelError:
        """The error for a model that cannot be read, under its name."""
        said = {"expected": str(expected), "found": str(found), "fix": fix}
        return ModelError(what, where=self.name, **said)


# ---------------------------------------------------------------------------- opening


def open_model(source: str | Path | bytes | ModelProto) -> OpenedModel:
    """Reads a model's structure. `ModelError` says what the file is when it is not ONNX."""
    if isinstance(source, str | Path):
        path = Path(source)
        found = _parse(_map(path), path.name, path.parent)
        for tensor in found.model.graph.initializer:
            if tensor.data_location == 1:
                entries = (e.value for e in tensor.external_data if e.key == "location")
                note_input(path.parent / next(entries, ""))
        return found
    if isinstance(source, bytes | bytearray | memoryview):
        return _parse(memoryview(source), "model", None)
    if type(source).__name__ == "ModelProto":
        _expect_model(source, "model")
        return OpenedModel("model", source, None, None)
    raise ModelError(
        "not a model",
        expected="a path, the bytes of a file, or an onnx.ModelProto",
        found=type(source).__name__,
    )


def _map(path: Path) -> memoryview:
    where = path.name or str(path)
    try:
        if not path.exists():
            raise ModelError("no such file", where=where, found=str(path.absolute().parent))
        if not path.is_file():
            found = "a directory" if path.is_dir() else "not a regular file"
            raise ModelError("cannot be read", where=where, expected="an .onnx file", found=found)
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise ModelError("the file is empty", where=where, expected="an ONNX model")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise ModelError("cannot be read", where=where[:200], found=str(error)) from None


def _parse(data: memoryview, name: str, folder: Path | None) -> OpenedModel:
    from google.protobuf.message import DecodeError

    if not len(data):
        raise ModelError("the model is empty (0 bytes)", where=name, expected="an ONNX model")
    _refuse_other_formats(bytes(data[:64]), name)
    try:
        skeleton = b"".join(_skim(data, 0, len(data), "model", 0))
        model: ModelProto = messages().ModelProto.FromString(skeleton)
    except RecursionError:
        raise nested_too_deep(name) from None
    except _Damaged as damage:
        raise _not_onnx(name, str(damage)) from None
    except DecodeError as error:
        if "MaxDepth" in str(error):
            raise nested_too_deep(name) from None
        raise _not_onnx(name, "protobuf cannot parse the file") from None
    _expect_model(model, name)
    return OpenedModel(name, model, data, folder)


def _expect_model(model: ModelProto, name: str) -> None:
    if not model.HasField("graph") or not model.ir_version:
        missing = "a graph" if model.ir_version else "an IR version"
        raise _not_onnx(name, f"a protobuf message without {missing}")


def _not_onnx(name: str, found: str) -> ModelError:
    return ModelError(
        "this is not an ONNX model, or the file is damaged",
        where=name,
        expected="a binary ONNX file (onnx.ModelProto)",
        found=found,
        fix="compare the size of the file with that of the original, then download "
        "or export it again",
    )


def _refuse_other_formats(head: bytes, name: str) -> None:
    text = head.lstrip().lower()
    kinds = (
        (head.startswith(b"version https://git-lfs"), "a Git LFS pointer", "run `git lfs pull`"),
        (text.startswith((b"<!doctype", b"<html", b"<?xml")), "a web page", "download it again"),
        (head.startswith(b"PK\x03\x04"), "a zip archive", "unpack it, or export it to ONNX"),
        (head.startswith(b"\x1f\x8b"), "a gzip archive", "unpack it"),
        (head.startswith(b"\x89HDF"), "an HDF5 file (Keras?)", "convert it with tf2onnx"),
        (head[4:8] == b"TFL3", "a TensorFlow Lite model", "convert it with tf2onnx"),
        (head[4:8] == b"ORTM", "an ORT-format model", "use the .onnx file from which it was made"),
        (head.startswith(b"GGUF"), "a GGUF file", "export the model to ONNX"),
        (text.startswith(b"{"), "JSON text", "use the binary .onnx file"),
    )
    for matches, found, fix in kinds:
        if matches:
            raise ModelError("not an ONNX model", where=name, found=found, fix=fix)


# ---------------------------------------------------------------------------- skimming

# message -> field -> the message inside it, for those that may hold tensors (onnx.proto)
_INSIDE: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
_NUMBERS = {4, 5, 6, 7, 9, 10, 11}  # TensorProto's fields of data
_LISTS = {7, 8, 9}  # AttributeProto's lists, an element a field; what has one has no tensor


class _Damaged(Exception):
    """The bytes are no protobuf message."""


def _skim(data: memoryview, start: int, end: int, kind: str, depth: int) -> Iterator[Any]:
    """The message's bytes in pieces, without the numbers of large tensors."""
    if depth > DEEPEST:
        raise RecursionError
    inside, is_tensor = _INSIDE[kind], kind == "tensor"
    kept = at = start
    while at < end:
        field = at
        key, at = _varint(data, at, end)
        wire = key & 7
        if kind == "attribute" and key >> 3 in _LISTS:
            at = end  # protobuf looks at millions of elements quicker
        elif wire == 2:
            size, at = _varint(data, at, end)
            stop = at + size
            if stop > end:
                missing = (
                    f"field at byte {field} has {size} bytes, but the file has only {end - at} more"
                )
                raise _Damaged(f"a truncated file: {missing}")
            if size > SMALL:
                if is_tensor and key >> 3 in _NUMBERS:
                    yield data[kept:field]
                    kept = stop
                elif (child := inside.get(key >> 3)) is not None:
                    pieces = list(_skim(data, at, stop, child, depth + 1))
                    yield data[kept:field]
                    yield _as_varint(key) + _as_varint(sum(map(len, pieces)))
                    yield from pieces
                    kept = stop
            at = stop
        elif wire == 0:
            _, at = _varint(data, at, end)
        elif wire == 1:
            at += 8
        elif wire == 5:
            at += 4
        else:
            raise _Damaged(f"byte {field} is not the start of a protobuf field")
    if at > end:
        raise _Damaged("a truncated file")
    yield data[kept:end]
    if is_tensor and kept != start:
        yield _external_entry(STANDS_AT, f"{start}:{end - start}")


def _varint(data: memoryview, at: int, end: int) -> tuple[int, int]:
    """The number at `at`, and where the next field starts."""
    result = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, at
        shift += 7
    raise _Damaged("a truncated file" if at >= end else f"no number at byte {at}")


def _as_varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _external_entry(key: str, value: str) -> bytes:
    """TensorProto.external_data (13): StringStringEntryProto(key=1, value=2)."""
    entry = b"".join(
        bytes((tag,)) + _as_varint(len(text)) + text
        for tag, text in ((10, key.encode()), (18, value.encode()))
    )
    return bytes((106,)) + _as_varint(len(entry)) + entry


# ---------------------------------------------------------------------------- tensors


def tensor_type(tensor: TensorProto) -> TensorType:
    """The type of a stored tensor; its numbers are not looked at."""
    name = f"the tensor {tensor.name!r}" if tensor.name else "a tensor"
    if tensor.data_type not in DTYPES:
        found = "strings" if tensor.data_type == 8 else f"data type {tensor.data_type}"
        raise ModelError(f"gpuir cannot use {name}", expected="numbers", found=found)
    try:
        return TensorType(tuple(tensor.dims), DTYPES[tensor.data_type])
    except ModelError as error:
        error.what = f"{name} has {error.what}"
        raise


def tensor_array(tensor: TensorProto, source: OpenedModel) -> np.ndarray:
    """The numbers of a stored tensor, read from wherever they are.

    `NumbersMissing` when the file that holds them is absent.
    """
    type = tensor_type(tensor)
    name = tensor.name or "a tensor"
    external = {entry.key: entry.value for entry in tensor.external_data}
    if STANDS_AT in external and source.data is not None:
        start, length = map(int, external[STANDS_AT].split(":"))
        raw = _raw_data(source.data, start, start + length)
        if raw is not None:
            return _from_bytes(np.frombuffer(raw, np.uint8), type, name)
        tensor = tensor.FromString(bytes(source.data[start : start + length]))
    elif tensor.data_location == 1:
        return _from_bytes(_external(name, type, external, source), type, name)
    if tensor.HasField("raw_data"):
        return _from_bytes(np.frombuffer(tensor.raw_data, np.uint8), type, name)
    return _from_fields(tensor, type, name)


def _raw_data(data: memoryview, start: int, end: int) -> memoryview | None:
    """TensorProto.raw_data (9) of the message that stands there, not copied."""
    at, found = start, None
    while at < end:
        key, at = _varint(data, at, end)
        wire = key & 7
        if wire == 2:
            size, at = _varint(data, at, end)
            if key >> 3 == 9:
                found = data[at : at + size]
            at += size
        elif wire == 0:
            _, at = _varint(data, at, end)
        else:
            at += 8 if wire == 1 else 4
    return found


def _external(
    name: str, type: TensorType, entries: Mapping[str, str], source: OpenedModel
) -> np.ndarray:
    """The bytes of a tensor kept in a file of its own, mapped into memory."""
    location = entries.get("location", "")
    try:
        offset = int(entries.get("offset") or 0)
        if source.folder is None:
            raise NumbersMissing(
                f"gpuir needs the numbers of {name!r}, but they are in another file",
                expected=f"the path of the model, with the file {location!r} beside it",
                found="a model given as bytes or as a ModelProto",
            )
        if Path(location).is_absolute() or ".." in Path(location).parts:
            raise NumbersMissing(
                f"the file with the external data of {name!r} is outside the model's folder",
                where=source.name,
                found=location,
            )
        path = source.folder / location
        note_input(path)
        homes = source.folder.resolve(), (source.folder / source.name).resolve().parent
        if not any(path.resolve().is_relative_to(home) for home in homes):
            raise NumbersMissing(
                f"the file with the external data of {name!r} is outside the model's folder",
                where=source.name,
                expected="a file in the folder of the model, or in the folder that the model's "
                "symbolic link points to",
                found=f"{location}, a link to {path.resolve()}",
            )
        size = path.stat().st_size
        if offset < 0 or offset + type.nbytes > size:
            raise NumbersMissing(
                f"the file with the external data of {name!r} is too short",
                where=source.name,
                expected=f"{type.nbytes} bytes from byte {offset} of {location}",
                found=f"{size} bytes in all",
            )
        if int(entries.get("length") or type.nbytes) != type.nbytes:
            raise source.refused(
                f"the stored length of tensor {name!r} does not match its type",
                f"{type}: {type.nbytes} bytes",
                f"length {entries['length'][:40]} of {location}",
            )
        if not type.nbytes:
            return np.zeros(0, np.uint8)
        return np.memmap(path, np.uint8, "r", offset, (type.nbytes,))
    except (OSError, ValueError) as error:
        raise NumbersMissing(
            f"gpuir needs the numbers of {name!r}, but cannot read their file",
            where=source.name,
            expected=f"the file {location!r} beside the model",
            found=str(error),
            fix="put the file in the folder of the model",
        ) from None


def _from_bytes(data: np.ndarray, type: TensorType, name: str) -> np.ndarray:
    if len(data) != type.nbytes:
        raise ModelError(
            f"the number of bytes of tensor {name!r} does not match its type",
            expected=f"{type}: {type.nbytes} bytes",
            found=f"{len(data)} bytes",
        )
    dtype = to_numpy_dtype(type.dtype)
    if type.dtype.bits < 8:
        return _unpack(data, type)
    return data.view(dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(type.shape)


def _unpack(data: np.ndarray, type: TensorType) -> np.ndarray:
    """Elements of 4 or 2 bits, the first in the low bits of each byte."""
    bits = type.dtype.bits
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (data[:, None] >> shifts & ((1 << bits) - 1)).reshape(-1)[: type.size]
    return _from_codes(codes.astype(np.uint8), type.dtype).reshape(type.shape)


def _from_codes(codes: np.ndarray, dtype: DType) -> np.ndarray:
    """Bit patterns, one a byte, as numbers of a dtype narrower than a byte."""
    if dtype.kind == "int":
        half, span = 1 << dtype.bits - 1, 1 << dtype.bits
        signed = codes.astype(np.int8)
        codes = np.where(signed >= half, signed - span, signed).astype(np.int8)
        return codes.astype(to_numpy_dtype(dtype))
    if dtype.kind == "uint":
        return codes.astype(to_numpy_dtype(dtype))
    return codes.view(to_numpy_dtype(dtype))


def _from_fields(tensor: TensorProto, type: TensorType, name: str) -> np.ndarray:
    """The numbers out of the typed fields; narrow dtypes are bit patterns in `int32_data`."""
    dtype = to_numpy_dtype(type.dtype)
    if type.dtype in (ir.f32, ir.c64):
        array = np.asarray(tensor.float_data, np.float32)
    elif type.dtype in (ir.f64, ir.c128):
        array = np.asarray(tensor.double_data, np.float64)
    elif type.dtype == ir.i64:
        array = np.asarray(tensor.int64_data, np.int64)
    elif type.dtype in (ir.u32, ir.u64):
        array = np.asarray(tensor.uint64_data, np.uint64)
    else:
        array = np.asarray(tensor.int32_data, np.int32)
    bits = type.dtype.bits
    if type.dtype.kind == "complex":
        array = array[: len(array) // 2 * 2].view(dtype)
    elif bits < 8 and len(array) != type.size:  # packed, a byte an entry
        return _from_bytes(array.astype(np.uint8), type, name)
    elif bits < 8:
        array = _from_codes(array.astype(np.uint8) & ((1 << bits) - 1), type.dtype)
    elif type.dtype.is_float and bits < 32:
        array = array.astype(np.uint16 if bits == 16 else np.uint8).view(dtype)
    if len(array) != type.size:
        raise ModelError(
            f"the number of elements of tensor {name!r} does not match its type",
            expected=f"{type}: {type.size} numbers",
            found=f"{len(array)} numbers",
        )
    return array.astype(dtype, copy=False).reshape(type.shape)


# ---------------------------------------------------------------------------- attributes


class Attributes(Mapping[str, Any]):
    """A node's attributes as Python values, converted when asked for: numbers, str, tuples of
    them, arrays, graphs. `outer` are the attributes of the call a function body stands for."""

    def __init__(
        self,
        protos: Mapping[str, AttributeProto],
        source: OpenedModel,
        outer: Mapping[str, Any] | None = None,
    ):
        self._source, self._outer = source, outer or {}
        self._protos = {
            name: proto
            for name, proto in protos.items()
            if not proto.ref_attr_name or proto.ref_attr_name in self._outer
        }
        self._done: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._done:
            proto = self._protos[name]
            reference = proto.ref_attr_name
            self._done[name] = (
                self._outer[reference] if reference else attribute_value(proto, self._source)
            )
        return self._done[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._protos)

    def __len__(self) -> int:
        return len(self._protos)

    def unread(self) -> tuple[str, ...]:
        """Those that nobody has asked for."""
        return tuple(name for name in self._protos if name not in self._done)

    def proto(self, name: str) -> AttributeProto | None:
        """The stored form, with references to the enclosing call resolved."""
        proto = self._protos.get(name)
        if proto is None or not proto.ref_attr_name:
            return proto
        return (
            self._outer.proto(proto.ref_attr_name) if isinstance(self._outer, Attributes) else None
        )

    def plain(self) -> Iterator[tuple[str, Any]]:
        """Those that are numbers, texts, or lists of them; no tensor is read."""
        for name in self:
            proto = self.proto(name)
            if proto is not None and _kind(proto) in _PLAIN:
                yield name, self[name]


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


_READ: dict[int, Callable[[Any, OpenedModel], Any]] = {  # AttributeProto.AttributeType
    1: lambda a, _: a.f,
    2: lambda a, _: a.i,
    3: lambda a, _: _text(a.s),
    4: lambda a, s: tensor_array(a.t, s),
    5: lambda a, _: a.g,
    6: lambda a, _: tuple(a.floats),
    7: lambda a, _: tuple(a.ints),
    8: lambda a, _: tuple(map(_text, a.strings)),
    9: lambda a, s: tuple(tensor_array(x, s) for x in a.tensors),
    10: lambda a, _: tuple(a.graphs),
    11: lambda a, s: sparse_array(a.sparse_tensor, s),
    12: lambda a, s: tuple(sparse_array(x, s) for x in a.sparse_tensors),
    13: lambda a, _: a.tp,
    14: lambda a, _: tuple(a.type_protos),
}
_PLAIN = (1, 2, 3, 6, 7, 8)
_FIELDS = ("f", "i", "s", "t", "g", "floats", "ints", "strings", "tensors", "graphs")


def _kind(proto: AttributeProto) -> int:
    """The attribute's type. Files from before IR 3 leave it out."""
    if proto.type:
        return proto.type
    present = {field.name for field, _ in proto.ListFields()}
    return next((i for i, name in enumerate(_FIELDS, 1) if name in present), 0)


def kind_of(proto: AttributeProto) -> str:
    """The attribute's type in ONNX's words: FLOAT, INTS, GRAPH."""
    known = messages().AttributeProto.AttributeType
    kind = _kind(proto)
    return known.Name(kind) if kind in known.values() else "UNDEFINED"


def attribute_value(proto: AttributeProto, source: OpenedModel) -> Any:
    """The attribute as a Python value."""
    read = _READ.get(_kind(proto))
    if read is None:
        raise ModelError(f"the attribute {proto.name!r} has no value")
    return read(proto, source)


def sparse_type(sparse: Any) -> TensorType:
    return TensorType(tuple(sparse.dims), tensor_type(sparse.values).dtype)


def sparse_array(sparse: Any, source: OpenedModel) -> np.ndarray:
    """A sparse tensor written out in full. Indices are flat, or one row of coordinates each."""
    type = sparse_type(sparse)
    values, indices = tensor_array(sparse.values, source), tensor_array(sparse.indices, source)
    dense = np.zeros(type.shape, values.dtype)
    if indices.ndim == 2:
        dense[tuple(indices.T)] = values
    else:
        dense.reshape(-1)[indices] = values
    return dense


def subgraphs(protos: Mapping[str, AttributeProto]) -> Iterator[GraphProto]:
    for proto in protos.values():
        if proto.HasField("g"):
            yield proto.g
        yield from proto.graphs


def text(name: str | bytes) -> str:
    """A name as text. Protobuf hands out bytes where it is not UTF-8."""
    if isinstance(name, str):
        return name
    raise ModelError(
        "a name in the model is not valid UTF-8 text", expected="UTF-8", found=repr(name[:80])
    )


# ---------------------------------------------------------------------------- types and dims

Dim = int | str | None  # known, symbolic, or without even a name


def declared_type(proto: TypeProto, name: str) -> tuple[DType, tuple[Dim, ...] | None]:
    """Dtype and dims as declared; the dims are None when not even their number is."""
    kind = proto.WhichOneof("value")
    if kind != "tensor_type":
        found = (kind or "no type").removesuffix("_type").replace("_", " ")
        raise ModelError(
            f"{name!r} is not a tensor",
            expected="a tensor of numbers",
            found=found,
            fix="gpuir analyses tensors of numbers only",
        )
    tensor = proto.tensor_type
    if tensor.elem_type not in DTYPES:
        found = "strings" if tensor.elem_type == 8 else f"element type {tensor.elem_type}"
        raise ModelError(
            f"gpuir cannot use {name!r}",
            expected="a tensor of numbers",
            found=found,
            fix="gpuir analyses tensors of numbers only",
        )
    if not tensor.HasField("shape"):
        return DTYPES[tensor.elem_type], None
    return DTYPES[tensor.elem_type], tuple(map(_dim, tensor.shape.dim))


# what exporters write for a dimension without a name: not all of them are one dimension
_NO_NAMES = ("", "?", "-1", "*", "none", "unk", "unknown", "dynamic")


def _dim(dim: Any) -> Dim:
    if dim.WhichOneof("value") == "dim_value" and dim.dim_value >= 0:
        return dim.dim_value
    name = text(dim.dim_param)
    return None if name.lower() in _NO_NAMES else name


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CALLS = {"min": min, "max": max, "Min": min, "Max": max, "floor": max, "ceil": max, "ceiling": max}


def evaluate_dim(text: str, known: Mapping[str, int]) -> int | None:
    """A symbolic dim's extent: `seq`, `2*batch`, `past + seq`. None where it is not known."""
    if text in known:
        return known[text]
    if len(text) > 200:
        return None
    try:
        return _evaluate(ast.parse(text, mode="eval").body, known)
    except (SyntaxError, ValueError, ArithmeticError, KeyError, RecursionError, MemoryError):
        return None


def _evaluate(node: ast.expr, known: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(int(value)):
            return value
        case ast.Name(name):
            return known[name]
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, known), _evaluate(right, known))
        case ast.Call(ast.Name("ceil" | "ceiling"), [ast.BinOp(left, ast.Div(), right)]):
            return -(-_evaluate(left, known) // _evaluate(right, known))
        case ast.Call(ast.Name(name), args) if name in _CALLS and args:
            return _CALLS[name]([_evaluate(a, known) for a in args])
        case _:
            raise ValueError


def dim_names(text: str) -> tuple[str, ...]:
    """The identifiers in a dim that is an expression; none when it is a plain name."""
    if text.isidentifier() or len(text) > 200:
        return ()
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    found = (n.id for n in ast.walk(tree) if isinstance(n, ast.Name))
    return tuple(dict.fromkeys(name for name in found if name not in _CALLS))
