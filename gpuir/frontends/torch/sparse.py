"""Tensors of torch's sparse layouts, as the dense ones that store them.

torch.export traces a sparse tensor as one of its full shape of which nothing is stored. Here it is
the tensors that lie in memory: indices and values (torch 2.13, docs, torch.sparse: COO; compressed
rows and columns, CSR and CSC; blocks of them, BSR and BSC). What an operator does with them is not
known here, so its call is an opaque one, which reads all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gpuir.frontends.torch.dims import Dims
from gpuir.frontends.torch.node import TorchNode
from gpuir.frontends.torch.program import TorchProgram
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType

COMPRESSED = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
PARTS: Mapping[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: (*COMPRESSED[0], "values"),
    torch.sparse_csc: (*COMPRESSED[1], "values"),
    torch.sparse_bsr: (*COMPRESSED[0], "values"),
    torch.sparse_bsc: (*COMPRESSED[1], "values"),
}
MAKERS = ("sparse_coo_tensor", "sparse_compressed_tensor") + tuple(
    f"sparse_{layout}_tensor" for layout in ("csr", "csc", "bsr", "bsc")
)
SAME = ("alias", "detach", "lift_fresh", "lift_fresh_copy", "view_as", "_coalesced")
PRODUCTS = ("mm", "matmul", "_sparse_mm", "_sparse_sparse_matmul", "bmm")
UNARY = ("relu", "neg", "abs", "sqrt", "sin", "tanh", "clone", "coalesce", "_sparse_softmax", "t")


@dataclass(frozen=True)
class Sparse:
    """A sparse tensor: its type as if it were dense, and what stores it, as `PARTS` has it."""

    layout: torch.layout
    type: TensorType
    parts: tuple[Value, ...]

    @property
    def stored(self) -> int:
        """Numbers that are stored."""
        return self.parts[-1].type.size


def is_sparse(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout in PARTS


def parts_of(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What stores a sparse tensor."""
    if x.layout == torch.sparse_coo:
        return x._indices(), x._values()
    return tuple(getattr(x, name)() for name in PARTS[x.layout])


def placed(x: torch.Tensor, dims: Dims, place: Callable[[str, TensorType, Any], Value]) -> Sparse:
    """A sparse tensor of the program, `place` of each part by name, type and tensor."""
    pairs = zip(PARTS[x.layout], parts_of(x), strict=True)
    made = tuple(place(name, dims.type(part), part) for name, part in pairs)
    return Sparse(x.layout, dims.type(x), made)


def examples(program: torch.export.ExportedProgram, source: Any = None) -> dict[str, torch.Tensor]:
    """The sparse tensors that a program was exported with, by the names of its inputs: how many
    numbers they store is nowhere else. `source` is what was exported, if its arguments were others,
    fakes of its own."""
    given: Any = program.example_inputs
    if isinstance(source, TorchProgram):
        given = (source.args, dict(source.kwargs))
    names = list(program.graph_signature.user_inputs)
    leaves = tree_leaves(given) if given is not None else []
    if len(leaves) != len(names):
        return {}
    return {str(n): x for n, x in zip(names, leaves, strict=True) if is_sparse(x)}


def unknown(name: str) -> ModelError:
    return ModelError(
        f"how many numbers the sparse input {name!r} stores is not known",
        expected="the arguments that it was exported with",
        fix="give the module with its arguments; or take indices and values as inputs, and make "
        "the sparse tensor of them in the model",
    )


def check_trained(tensors: Mapping[str, Any]) -> None:
    """ModelError for sparse tensors of which torch (2.13) cannot trace a backward pass: compressed
    ones, and those that a gradient is asked of."""
    for name, x in tensors.items():
        if is_sparse(x) and (x.requires_grad or x.layout != torch.sparse_coo):
            raise ModelError(
                f"torch cannot trace the backward pass of the sparse tensor {name!r}",
                expected="sparse tensors in COO layout that need no gradient",
                found=f"{x.layout}" + (", which needs one" if x.requires_grad else ""),
                fix="hold it as a buffer without a gradient: x.detach().to_sparse_coo()",
            )


def held_in(values: Any) -> Iterator[Sparse]:
    """The sparse tensors among arguments, in order."""
    if isinstance(values, Sparse):
        yield values
    elif isinstance(values, Mapping):
        yield from held_in(tuple(values.values()))
    elif isinstance(values, tuple | list):
        for value in values:
            yield from held_in(value)


# ---------------------------------------------------------------------------- operators


def answered(packet: str, call: TorchNode, value: Any, dims: Dims) -> Any:
    """The result of an operator that takes no time: that makes a sparse tensor of what stores it,
    hands it on, or reads a part of it. None for any other."""
    args = call.args
    given = [x for x in args.values() if isinstance(x, Value)]
    name = packet.removeprefix("_").removesuffix("_unsafe").replace("_with_dims_and_tensors", "")
    if is_sparse(value) and name in MAKERS and len(given) == len(PARTS[value.layout]):
        return Sparse(value.layout, dims.type(value), tuple(given))
    (x,) = (*held_in(args), None)[:1]
    if x is None:
        return None
    if packet in SAME:
        return x
    if is_sparse(value) and packet in ("t", "transpose") and x.layout != torch.sparse_coo:
        return Sparse(value.layout, dims.type(value), x.parts)
    part = packet.removeprefix("_")
    if part not in PARTS[x.layout]:
        return None
    found = x.parts[PARTS[x.layout].index(part)]
    traced = dims.type(value)
    if traced.shape != found.type.shape:
        raise ModelError(
            f"{call.op}: torch.export traces a sparse tensor as one that stores nothing",
            expected=f"{part}: {found.type}",
            found=str(traced),
            fix="compute with the values themselves: take them as an input, and make the sparse "
            "tensor of them after that, with torch.sparse_coo_tensor",
        )
    return found


def result(
    packet: str, call: TorchNode, fake: torch.Tensor, dims: Dims
) -> tuple[tuple[TensorType, ...], str]:
    """The types of what stores a sparse result, and what is assumed of it: as many numbers as its
    sparse operands store, at most all; of a product of two, as many as places taken at random give;
    of dense operands alone, all."""
    among = tuple(held_in(call.args))
    whole = dims.type(fake)
    stored, note = sum(x.stored for x in among), ""
    if not among:
        stored, note = whole.size, "all"
    elif packet in PRODUCTS and len(among) > 1:
        a, b = among[:2]
        inner = max(a.type.shape[-1], 1)
        batch = max(prod(whole.shape[:-2]), 1)
        stored, note = ceil(a.stored * b.stored / (inner * batch)), "places taken at random"
    elif packet not in UNARY:
        note = "as many as its operands store"
    stored = min(stored, whole.size)
    return stored_as(fake, stored, dims), note and f"{stored} numbers are stored: {note}"


def stored_as(fake: torch.Tensor, stored: int, dims: Dims) -> tuple[TensorType, ...]:
    """The types of the parts of a sparse tensor that stores so many numbers."""
    *indices, values = map(dims.type, parts_of(fake))
    compressed = fake.layout != torch.sparse_coo
    batch = indices[-1].rank - 1 if compressed else 0
    shape = values.shape
    each = max(prod(shape[:batch]) * prod(shape[batch + 1 :]), 1)
    count = ceil(stored / each)
    last = indices[-1].with_shape((*indices[-1].shape[:-1], count))
    whole = (*shape[:batch], count, *shape[batch + 1 :])
    return (*indices[:-1], last, values.with_shape(whole))


def sized(parts: Sequence[Value], fake: torch.Tensor, dims: Dims) -> Sparse:
    return Sparse(fake.layout, dims.type(fake), tuple(parts))
