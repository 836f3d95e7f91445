"""What converters read of a call, beside the schemas that torch has: by reading their code, so that
no sample of an overload is needed."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import FunctionType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from gpuir.frontends.torch.table import CONVERTERS  # noqa: E402

NODE = object()  # what a variable holds that is the call itself
Values = frozenset[Any] | None  # what an expression may be; None where the code does not tell


@dataclass
class Reads:
    """Names of arguments: those a converter cannot do without, those it asks for, and those of
    which it takes the one that is there."""

    needed: set[str] = field(default_factory=set[str])
    asked: set[str] = field(default_factory=set[str])
    one_of: list[set[str]] = field(default_factory=list[set[str]])
    unclear: list[str] = field(default_factory=list[str])


@cache
def functions_of(path: str) -> Mapping[int, ast.FunctionDef | ast.Lambda]:
    """The functions of a file by the line they begin in."""
    with open(path) as file:
        tree = ast.parse(file.read())
    kinds = (ast.FunctionDef, ast.Lambda)
    return {node.lineno: node for node in ast.walk(tree) if isinstance(node, kinds)}


class Reader(ast.NodeVisitor):
    """Collects what one function reads; calls that the node is handed to are followed."""

    def __init__(self, fn: FunctionType, given: Mapping[str, Any], reads: Reads, added: set[str]):
        self.reads, self.added = reads, added
        self.where = f"{fn.__module__}.{fn.__qualname__}"
        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        self.outside = {**fn.__globals__, **{name: cell.cell_contents for name, cell in cells}}
        self.inside: dict[str, Any] = dict(given)
        code = functions_of(fn.__code__.co_filename)[fn.__code__.co_firstlineno]
        for part in code.body if isinstance(code, ast.FunctionDef) else [code.body]:
            self.visit(part)

    def bind(self, target: ast.expr, code: ast.expr) -> None:
        """A loop's variable, or several that go along rows written out."""
        if isinstance(target, ast.Name):
            self.inside[target.id] = self.items(code)
        elif isinstance(target, ast.Tuple) and isinstance(code, ast.Tuple):
            rows = [row.elts for row in code.elts if isinstance(row, ast.Tuple)]
            for part, column in zip(target.elts, zip(*rows, strict=True), strict=False):
                self.bind(part, ast.Tuple(list(column)))

    def items(self, code: ast.expr) -> Values:
        """What a loop over it goes through."""
        if isinstance(code, ast.Tuple | ast.List):
            found = [self.values(element) for element in code.elts]
            return None if None in found else frozenset().union(*(f for f in found if f))
        if isinstance(code, ast.Subscript):  # part of a text or tuple
            return self.items(code.value)
        values = self.values(code)
        return None if values is None else frozenset(item for value in values for item in value)

    def values(self, code: ast.expr) -> Values:
        match code:
            case ast.Constant(value):
                return frozenset([value])
            case ast.Name(name) if name in self.inside:
                held = self.inside[name]
                return None if held is NODE else held
            case ast.Name(name) if isinstance(self.outside.get(name), str | tuple):
                return frozenset([self.outside[name]])
            case ast.IfExp(_, a, b):
                both = (self.values(a), self.values(b))
                return None if None in both else frozenset().union(*(v for v in both if v))
            case ast.JoinedStr(pieces):
                made: list[str] = [""]
                for piece in pieces:
                    inner = piece.value if isinstance(piece, ast.FormattedValue) else piece
                    texts = self.values(inner)
                    if texts is None:
                        return None
                    made = [f"{text}{more}" for text in made for more in texts]
                return frozenset(made)
            case _:
                return None

    def is_node(self, code: ast.expr) -> bool:
        return isinstance(code, ast.Name) and self.inside.get(code.id) is NODE

    def is_args(self, code: ast.expr) -> bool:
        known = isinstance(code, ast.Attribute) and code.attr in ("args", "fakes")
        return known and self.is_node(code.value)

    def read(self, names: set[str], code: ast.expr) -> None:
        found = self.values(code)
        if found is None:
            self.reads.unclear.append(f"{self.where}: {ast.unparse(code)}")
        names.update((found or frozenset()) - self.added)

    def visit_For(self, node: ast.For) -> None:
        self.bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension_of(self, node: Any) -> None:
        """Its variables are its own."""
        before = dict(self.inside)
        for part in node.generators:
            self.bind(part.target, part.iter)
        self.generic_visit(node)
        self.inside = before

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_comprehension_of

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if self.is_node(node.value) or self.is_args(node.value):
            self.read(self.reads.needed, node.slice)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if isinstance(node.ops[0], ast.In | ast.NotIn) and self.is_args(node.comparators[0]):
            self.read(self.reads.asked, node.left)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Attribute(of, "get") if self.is_node(of) or self.is_args(of):
                self.read(self.reads.asked, node.args[0])
            case ast.Attribute(of, "axis" | "axes" as how) if self.is_node(of):
                name = node.args[1] if len(node.args) > 1 else ast.Constant("dim")
                self.read(self.reads.needed if how == "axis" else self.reads.asked, name)
            case ast.Attribute(of, "promoted") if self.is_node(of):
                for name in node.args:
                    self.read(self.reads.needed, name)
            case ast.Attribute(of, "one_of") if self.is_node(of):
                groups = [self.values(name) or frozenset() for name in node.args]
                names = {*frozenset().union(*groups)}
                if not names & self.added:
                    self.reads.one_of.append(names)
            case ast.Name(name) if isinstance(self.outside.get(name), FunctionType):
                self.follow(self.outside[name], node)
            case _:
                pass
        self.generic_visit(node)

    def follow(self, fn: FunctionType, node: ast.Call) -> None:
        """The function that the node is handed to, or one made from it by `replace`."""
        given: dict[str, Any] = {}
        added = set(self.added)
        names = list(inspect.signature(fn).parameters)
        pairs = [*zip(names, node.args), *((k.arg or "", k.value) for k in node.keywords)]
        for name, code in pairs:
            if isinstance(code, ast.Call) and ast.unparse(code.func) == "replace":
                changed = next(k.value for k in code.keywords if k.arg == "args")
                assert isinstance(changed, ast.Dict)
                added |= {key.value for key in changed.keys if isinstance(key, ast.Constant)}
                code = code.args[0]
            given[name] = NODE if self.is_node(code) else self.values(code)
        if NODE in given.values():
            Reader(fn, given, self.reads, added)


def reads_of(convert: Any) -> Reads:
    reads, given = Reads(), dict[str, Any]()
    if isinstance(convert, partial):
        given = {k: frozenset([v]) for k, v in convert.keywords.items() if isinstance(v, Hashable)}
        convert = convert.func
    node = next(iter(inspect.signature(convert).parameters))
    Reader(convert, {**given, node: NODE}, reads, set())
    return reads


def overloads(name: str) -> Iterator[Any]:
    """The schemas that a converter under this name serves: functional ones of tensors."""
    packet, _, one = name.partition(".")
    space, _, plain = packet.rpartition("::")
    found = getattr(getattr(torch.ops, space or "aten"), plain, None)
    found = found or getattr(torch.ops.prims, plain, None)
    assert found is not None, f"torch has no operator {name}"
    for overload in [one] if one else found.overloads():
        schema = getattr(found, overload)._schema
        given, gives = (
            " ".join(str(a.type) for a in some) for some in (schema.arguments, schema.returns)
        )
        own = not one and f"{name}.{overload}" in CONVERTERS
        in_place = plain.endswith("_") and not plain.endswith("__")  # __lshift__ is none
        odd = (schema.is_mutable and not in_place) or any(
            kind in given for kind in ("Dimname", "Dict")
        )
        if not (own or odd) and ("Tensor" in gives or name in NUMBERS):
            yield schema


@cache
def rows() -> list[tuple[str, Reads, list[Any]]]:
    return [(name, reads_of(convert), [*overloads(name)]) for name, convert in CONVERTERS.items()]


def found(names_of: Any) -> list[str]:
    """The names that are wrong, by overload."""
    return [
        f"{schema.name}.{schema.overload_name}: {name}"
        for key, reads, schemas in rows()
        for schema in schemas
        for name in sorted(names_of(key, reads, {a.name for a in schema.arguments}))
    ]


def test_every_converter_is_of_an_operator_that_torch_has():
    assert not [name for name, _, schemas in rows() if not schemas]


def test_what_is_read_can_be_told_from_the_code():
    assert not [text for _, reads, _ in rows() for text in reads.unclear]


def test_every_argument_that_is_needed_is_one_of_each_overload():
    """Reading what an overload has not ends the load: it has to be asked for, or to be taken under
    another name."""
    assert not found(lambda key, reads, has: reads.needed - reads.asked - has)
    assert not found(lambda key, reads, has: [" or ".join(g) for g in reads.one_of if not g & has])


def test_every_argument_that_is_asked_for_is_one_of_some_overload():
    """One that no overload has is a name misread, whose default is taken in silence."""
    served: dict[str, bool] = {}
    for _, reads, schemas in rows():
        names = {a.name for schema in schemas for a in schema.arguments}
        for name in reads.asked.union(*reads.one_of):
            served[name] = served.get(name, False) or name in names
    assert not [name for name, is_served in served.items() if not is_served]


def test_every_argument_is_read_or_known_not_to_matter():
    """`swapaxes` served by a converter that reads dim0 and dim1, with 0 and 1 where they are not,
    exchanges the wrong axes: what it was given is read by nobody."""

    def unread(key: str, reads: Reads, has: set[str]) -> set[str]:
        if CONVERTERS[key] in TOLD_BY_TYPE:
            return set()
        read = (reads.needed | reads.asked).union(*reads.one_of)
        return has - read - WITHOUT_EFFECT - OF_ONE.get(key, set())

    assert not found(unread)


NUMBERS = ("_local_scalar_dense",)  # gives no tensor
TOLD_BY_TYPE = {
    CONVERTERS[name] for name in ("reshape", "expand", "_to_copy", "zeros", "empty_strided", "ones")
}
WITHOUT_EFFECT = {
    # what the results' types say
    *("dtype", "size", "out_dtype", "half_to_float", "input_dtype", "output_size", "input_size"),
    *(
        "split_size",
        "split_sizes",
        "chunks",
        "end",
        "output_padding",
        "ceil_mode",
        "input_sizes",
        "bias_sizes",
        "num_weights",
    ),
    # where and how a tensor lies, and what draws its numbers
    *("device", "layout", "pin_memory", "memory_format", "non_blocking", "generator", "stride"),
    # how a library is to go about it
    *("cudnn_enable", "cudnn_enabled", "driver", "check_errors", "use_fast_accum", "stable"),
    *("sparse_grad", "unroll_dim", "return_debug_mask", "compute_log_sumexp"),
    # statistics and lengths that forward passes saved: computed again, or of one length here
    *("mean", "save_mean", "save_invstd", "philox_seed", "philox_offset", "bag_size"),
    *("cum_seq_q", "cum_seq_k", "max_q", "max_k", "running_mean", "grad_input_mask"),
}
BAGS = ("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")
LIKE = ("full_like", "new_full", "fill", "rand_like", "randn_like", "randint_like", "uniform")
OF_ONE = {
    # only the shape counts, and it is the result's
    **{key: {"self"} for key in (*LIKE, "normal_functional", "copy", "copy_.default")},
    "tensor_split": {"indices", "sections", "tensor_indices_or_sections"},
    "randperm": {"n"},
    "mode": {"keepdim"},
    "native_group_norm": {"N", "C", "HxW"},
    "native_group_norm_backward": {"N", "C", "HxW"},
    "lu_unpack": {"unpack_data", "unpack_pivots"},  # a result left out has no type
    # as many as there is room for are assumed to be found, and the report says so
    "nonzero_static": {"fill_value"},
    # gradients alone go by it
    "embedding": {"padding_idx", "scale_grad_by_freq", "sparse"},
    **{key: {"scale_grad_by_freq", "sparse", "include_last_offset"} for key in BAGS},
    # said of the forward pass
    **{key: {"dropout_p"} for key in CONVERTERS if "dot_product" in key},
    "native_layer_norm_backward": {"bias"},  # no gradient depends on it
    "_embedding_bag_per_sample_weights_backward": {"mode", "offset2bag"},  # sums alone have one
    **{f"max_pool{d}d_with_indices_backward": {"indices"} for d in (2, 3)},  # found again
    "topk": {"sorted"},  # sorted in any case
    "multinomial": {"replacement"},  # takes as long
    "_local_scalar_dense": {"self"},  # refused
}
