"""Saved programs (`.pt2`), opened without running anything in them, or reading their weights."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from torch._export.serde import schema
from torch._export.serde.serialize import (
    ExportedProgramDeserializer,
    GraphModuleDeserializer,
    deserialize_scalar_type,
)
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram

from gpuir.files import LARGEST_TEXT
from gpuir.frontends.torch.masks import replaced
from gpuir.frontends.torch.program import unheard
from gpuir.frontends.torch.serialized import document, needs_pickle, read, read_program
from gpuir.ir.errors import GpuirError, ModelError, reason

UNPACKED = 100  # times its own size that an archive may unpack to; torch's are not compressed
READ = LARGEST_TEXT  # bytes of a part that is read whole: the graph
CONSTANT = 2**20  # and those of a constant whose numbers are read
AGAIN = "export and save it again: torch.export.save(torch.export.export(...), path)"
PICKLED = {  # names of whole files that are pickles
    "data/weights/{}.pt": "its weights are in the format of torch 2.7 and before",
    "data/constants/{}.pt": "its constants are in the format of torch 2.7 and before",
}


def open_program(path: str | Path) -> ExportedProgram:
    """The exported program that torch.export.save wrote. Its weights are fake tensors, and their
    bytes stay on disk. ModelError when the file is no such archive, or holds what only running code
    could read.

    torch.export.load unpickles; here only JSON and the raw bytes of small constants are read, and
    torch gets what `read_program` has checked.
    """
    path = Path(path)
    if not path.is_file():
        found = "not a regular file" if path.exists() else "no such file"
        raise ModelError("cannot read the file", where=str(path), found=found)
    try:
        with ZipFile(path) as file, unheard():
            return Archive(file, path).program()
    except GpuirError as error:
        error.where = error.where or str(path)
        raise
    except Exception as error:  # whatever torch meets in records that are well formed
        raise ModelError(
            "the file is not a program of torch.export.save, or it is one of another torch version",
            where=str(path),
            expected=f"a .pt2 archive that torch {torch.__version__} can load",
            found="not a zip archive" if isinstance(error, BadZipFile) else reason(error),
            fix=AGAIN,
        ) from error


class Archive:
    """The parts of a `.pt2` file by name."""

    def __init__(self, file: ZipFile, path: Path):
        self.file, self.path = file, path
        names = file.namelist()
        self.root = names[0].partition("/")[0] if names else ""
        self.sizes = {info.filename: info.file_size for info in file.infolist()}
        if twice := next((name for name, n in Counter(names).items() if n > 1), None):
            raise ModelError(
                "a part of the archive is stored twice, and programs differ in "
                "which of the two they read",
                where=self.at(twice),
                fix=AGAIN,
            )
        packed, unpacked = path.stat().st_size, sum(self.sizes.values())
        if unpacked > UNPACKED * packed:
            raise ModelError(
                "the archive unpacks to far more bytes than it has",
                expected=f"at most {UNPACKED} times its {packed} bytes",
                found=f"{unpacked} bytes",
                fix="save it again: torch.export.save does not compress",
            )
        if "serialized_exported_program.json" in self.sizes:
            raise needs_pickle("the file is in the format of torch 2.6 and before")
        if not self.has("archive_format") or self.read("archive_format", 64) != b"pt2":
            raise ModelError(
                "not a program that torch.export.save wrote",
                expected="a .pt2 archive",
                found=", ".join(names[:5]) or "nothing: the zip archive is empty",
                fix="for a file of torch.save or torch.jit.save, export the module "
                "itself. " + AGAIN,
            )

    def has(self, part: str) -> bool:
        return f"{self.root}/{part}" in self.sizes

    def size(self, part: str) -> int:
        """The bytes of a part; ModelError where there is none."""
        if not self.has(part):
            raise ModelError("a part of the archive is missing", where=self.at(part), fix=AGAIN)
        return self.sizes[f"{self.root}/{part}"]

    def read(self, part: str, most: int) -> bytes:
        """What a part holds; ModelError where it is larger than `most` bytes."""
        if (size := self.size(part)) > most:
            raise ModelError(
                "a part of the archive is too large",
                where=self.at(part),
                expected=f"at most {most} bytes",
                found=f"{size} bytes",
            )
        return self.file.read(f"{self.root}/{part}")

    def at(self, part: str) -> str:
        return f"{self.path}:{part}"

    def program(self) -> ExportedProgram:
        name = self.name()
        for form, what in PICKLED.items():
            if self.has(part := form.format(name)):
                error = needs_pickle(what)
                error.where = self.at(part)
                raise error
        part = f"models/{name}.json"
        try:
            program = read_program(self.read(part, READ))
        except GpuirError as error:
            error.where = error.where or self.at(part)
            raise
        weights = self.tensors("data/weights", f"{name}_weights_config.json", numbers=False)
        constants = self.tensors("data/constants", f"{name}_constants_config.json", numbers=True)
        with replaced([(GraphModuleDeserializer, "deserialize_tensor_meta", _traced)]):
            made = ExportedProgramDeserializer().deserialize(program, weights, constants)
        _fake(made)
        return made

    def name(self) -> str:
        """The program's name in the archive: `model`, unless it is the only one."""
        models = [
            PurePosixPath(name).stem
            for name in self.sizes
            if name.startswith(f"{self.root}/models/") and name.endswith(".json")
        ]
        if models and ("model" in models or len(models) == 1):
            return "model" if "model" in models else models[0]
        compiled = any(name.startswith(f"{self.root}/data/aotinductor") for name in self.sizes)
        raise ModelError(
            "no program in the archive",
            expected="the graph, in models/model.json",
            found="compiled code" if compiled else ", ".join(models) or "no models",
            fix="save the result of torch.export.export, not the compiled code of AOTInductor",
        )

    def tensors(self, folder: str, config: str, *, numbers: bool) -> dict[str, torch.Tensor]:
        """The tensors that a config lists, by name; small ones with their `numbers`. What lies in
        the same place is one tensor."""
        part = f"{folder}/{config}"
        try:
            listed = read(schema.PayloadConfig, document(self.read(part, READ)), "config").config
        except GpuirError as error:
            error.where = error.where or self.at(part)
            raise
        found: dict[str, torch.Tensor] = {}
        same: dict[str, torch.Tensor] = {}
        for name, payload in listed.items():
            at = f"{folder}/{payload.path_name}"
            plain = payload.path_name.startswith(("weight_", "tensor_"))
            if payload.use_pickle or payload.tensor_meta is None or not plain:
                error = needs_pickle(f"{name} is of a custom class")
                error.where = self.at(at)
                raise error
            key = f"{payload}"
            if key not in same:
                tensor = self.tensor(at, payload.tensor_meta, numbers=numbers)
                learned = payload.tensor_meta.requires_grad
                same[key] = (
                    torch.nn.Parameter(tensor, requires_grad=learned)
                    if payload.is_param
                    else tensor
                )
            found[name] = same[key]
        return found

    def tensor(self, part: str, meta: schema.TensorMeta, *, numbers: bool) -> torch.Tensor:
        """A tensor of that shape on the meta device, or with the numbers of a small part."""
        dtype = deserialize_scalar_type(meta.dtype)
        shape, strides = (self.counts(part, each) for each in (meta.sizes, meta.strides))
        (offset,) = self.counts(part, [meta.storage_offset])
        last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        needed = (offset + last + 1) * dtype.itemsize if 0 not in shape else 0
        held = self.size(part)
        if held < needed and held:  # a program exported on fake tensors has no bytes
            raise ModelError(
                "a tensor is larger than its stored bytes",
                where=self.at(part),
                expected=f"{needed} bytes for {dtype} {shape} with strides {strides}, from "
                f"byte {offset} on",
                found=f"{held} bytes",
                fix=AGAIN,
            )
        if numbers and needed and needed <= held <= CONSTANT:
            data = bytearray(self.read(part, CONSTANT))
            whole = torch.frombuffer(data, dtype=dtype, count=held // dtype.itemsize)
            return whole.as_strided(shape, strides, offset)
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    def counts(self, part: str, sizes: list[schema.SymInt]) -> tuple[int, ...]:
        """The sizes of a tensor that is held: numbers, none negative."""
        found = tuple(size.value for size in sizes)
        if not all(isinstance(n, int) and 0 <= n < 2**62 for n in found):
            raise ModelError(
                "the size of a tensor is not a number",
                where=self.at(part),
                found=f"{found}"[:200],
                fix=AGAIN,
            )
        return found


_STRIDED = GraphModuleDeserializer.deserialize_tensor_meta


def _traced(made_by: GraphModuleDeserializer, meta: schema.TensorMeta) -> torch.Tensor:
    """A tensor as the program was traced on it: torch itself (2.13) forgets that one is sparse. Of
    those layouts it saves COO alone."""
    x = _STRIDED(made_by, meta)
    if meta.layout != schema.Layout.SparseCoo:
        return x
    with made_by.fake_tensor_mode:
        sized: Any = torch.sparse_coo_tensor  # which takes no numbers, too
        return sized(size=x.shape, dtype=x.dtype, device=x.device)


def _fake(program: ExportedProgram) -> None:
    """Weights become fake tensors among those that the program was traced on."""
    values = (node.meta.get("val") for node in program.graph.find_nodes(op="placeholder"))
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
    known: dict[int, torch.Tensor] = {}
    for name, x in [*program.state_dict.items()] if mode else ():
        if id(x) not in known:
            with mode or nullcontext():
                made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
                learned = isinstance(x, torch.nn.Parameter)
                known[id(x)] = torch.nn.Parameter(made, x.requires_grad) if learned else made
        program.state_dict[name] = known[id(x)]
