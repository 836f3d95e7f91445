"""The program in a saved file, read so that nothing in it runs.

torch writes names of a graph into Python source that it compiles, evaluates sizes as Python, looks
operators up under any path of its modules, and imports what the specs of inputs name. So what is
handed to torch is made here: names are names, sizes are parsed, operators are of its libraries.
"""

from __future__ import annotations

import ast
import json
import operator
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import IntEnum
from functools import cache, lru_cache
from math import prod
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import sympy
import torch
from torch._export.serde import schema
from torch._export.serde.serialize import _SYM_OPS
from torch._export.serde.union import _Union
from torch.utils._sympy import functions

from gpuir.ir.errors import ModelError

LONGEST = 4096  # characters of a size
LARGEST = 2**128  # a number in a size
EFFORT = 100_000  # for all sizes of a program: see `effort`; those of networks need a tenth
SYMBOL = re.compile(r"[A-Za-z_]+\d{1,6}")  # torch counts up to its number
NEEDS_PICKLE = ("as_custom_obj", "custom_obj")
DROPPED = ("guards_code", "treespec_namedtuple_fields")  # Python source; and what `_trees` reads
ARITHMETIC = {f"{f.__module__}.{f.__name__}" for f in (*_SYM_OPS, operator.getitem)}
HIGHER = (  # operators on graphs; others call compiled code, objects or kernels
    *("cond", "while_loop", "scan", "associative_scan", "map_impl", "flex_attention"),
    *("wrap", "wrap_with_set_grad_enabled", "wrap_with_autocast", "invoke_subgraph"),
    *("wrap_activation_checkpoint", "tag_activation_checkpoint", "out_dtype", "strict_mode"),
)
MODES = (  # a program may be traced under them again; they set torch's own state alone
    "torch._functorch.predispatch._add_batch_dim",
    "torch._functorch.predispatch._remove_batch_dim",
    "torch._functorch.predispatch._vmap_increment_nesting",
    "torch._functorch.predispatch._vmap_decrement_nesting",
    "torch._functorch.predispatch.lazy_load_decompositions",
    "torch._C._set_grad_enabled",
    "torch.amp.autocast_mode._enter_autocast",
    "torch.amp.autocast_mode._exit_autocast",
)
READ_FILES = ("aten::from_file", "debugprims::load_tensor")  # of the machine that runs them


def read_program(data: bytes) -> schema.ExportedProgram:
    """The program that JSON states, as torch's own records; ModelError, without the file's name,
    for what is no program, or is none that can be read without running what it brings."""
    raw = document(data)
    program = read(schema.ExportedProgram, raw, "")
    _trees(program.graph_module.module_call_graph, raw)
    for name in program.range_constraints:
        size(name)
    return program


def document(data: bytes) -> Any:
    """What a part of the archive says in JSON; ModelError where it is none, or where its sizes
    together are more work than a program's are."""
    texts: set[str] = set()

    def noted(held: dict[str, Any]) -> dict[str, Any]:
        if isinstance(text := held.get("expr_str"), str):
            texts.add(text)
        return held

    try:
        raw = json.loads(data, object_hook=noted)
    except (ValueError, RecursionError) as error:
        raise ModelError("not JSON", found=f"{error}"[:300]) from error
    if (work := sum(map(effort, texts))) > EFFORT:
        raise ModelError(
            "the symbolic sizes of the program are too complex",
            expected=f"a total of at most {EFFORT:,} (the cube of the number of terms "
            "inside functions)",
            found=f"{work:,} in {len(texts)} sizes, such as {max(texts, key=effort)[:100]}",
            fix="export with fewer symbolic dimensions",
        )
    return raw


@lru_cache(maxsize=4096)
def effort(text: str) -> int:
    """About how long sympy takes for a size: for what is given to each of its functions, the cube
    of how many terms that has once it is multiplied out. *Measured*: some 10,000 are a second, of
    `Max` and `PythonMod`."""
    try:
        return _terms(ast.parse(text[: LONGEST + 1], mode="eval").body)[1]
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return 0  # `size` will say so


def _terms(tree: ast.expr) -> tuple[int, int]:
    """How many terms an expression has, where a function's value is one, and the effort for all
    that is within."""
    match tree:
        case ast.Call(ast.Name(name), args, _):
            pass
        case ast.BinOp(left, op, right):
            name, args = type(op).__name__, [left, right]
        case ast.UnaryOp(_, value):
            name, args = "Add", [value]
        case ast.Compare(left, _, others):
            name, args = "Eq", [left, *others]
        case _:
            return 1, 0
    inside = [_terms(each) for each in args]
    counts, effort = [n for n, _ in inside], sum(n for _, n in inside)
    match name, args:
        case "Symbol" | "Integer" | "Float" | "Rational", _:
            return 1, effort
        case "Add" | "Sub", _:
            return sum(counts), effort
        case "Mul" | "Mult", _:
            return min(prod(counts), EFFORT), effort
        case "Pow", [_, ast.Constant(int(times))]:
            return min(counts[0] ** min(max(times, 1), 128), EFFORT), effort
        case _:
            return 1, effort + sum(counts) ** 3


def read(hint: Any, data: Any, field: str) -> Any:
    """What JSON says, as a record of this type; ModelError for what is of another. `field` is what
    a text is called, and with it what it may be."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return None if data is None else read(args[0], data, field)
    if origin is list:
        given = checked(isinstance(data, list), field, data, "a list")
        return [read(args[0], each, field) for each in given]
    if origin is dict:
        given = checked(isinstance(data, dict), field, data, "an object")
        return {key: read(args[1], each, field) for key, each in given.items()}
    if issubclass(hint, _Union):
        checked(isinstance(data, dict) and len(data) == 1, field, data, "an object with one member")
        ((kind, value),) = data.items()
        if kind in NEEDS_PICKLE:
            raise needs_pickle("the program takes an object of a custom class")
        checked(kind in hints(hint), field, kind, f"one of {', '.join(hints(hint))}")
        return hint.create(**{kind: read(hints(hint)[kind], value, kind)})  # pyright: ignore
    if hint is schema.Device:
        return schema.Device("cpu")  # where a fake tensor lies makes no difference
    if isinstance(hint, type) and is_dataclass(hint):
        checked(isinstance(data, dict), field, data, "an object")
        named = {f.name: data[f.name] for f in fields(hint) if f.name in data}
        made = {
            name: modules(value) if name == "metadata" else read(hints(hint)[name], value, name)
            for name, value in named.items()
            if name not in DROPPED
        }
        missing = [name for name in needed(hint) if name not in made]
        checked(not missing, field or "the program", sorted(data), ", ".join(missing))
        return hint(**made)
    if issubclass(hint, IntEnum):
        checked(data in [*hint], field, data, f"a number of {hint.__name__}")
        return hint(data)
    if hint is float:
        words = ("Infinity", "-Infinity", "NaN")
        known = type(data) in (int, float) or data in words
        return float(checked(known, field, data, "a number"))
    checked(type(data) is hint, field, data, hint.__name__)
    return TEXTS[field](field, data) if hint is str else data


@cache
def hints(record: type) -> dict[str, Any]:
    return get_type_hints(record, {**vars(schema)})


@cache
def needed(record: Any) -> list[str]:
    """The fields of a record that have no default."""
    return [f.name for f in fields(record) if f.default is MISSING and f.default_factory is MISSING]


def checked(holds: Any, field: str, found: Any, expected: str) -> Any:
    """What was found; ModelError where it is not as expected."""
    if not holds:
        raise ModelError(
            f"{field or 'the program'}: torch.export.save does not write this",
            expected=expected,
            found=reprlib.repr(found),
            fix="export the module and save it again",
        )
    return found


def needs_pickle(what: str) -> ModelError:
    return ModelError(
        f"{what}, which only pickle reads: reading it would run code from the file",
        expected="tensors as raw bytes, and a graph of operators on tensors and numbers",
        fix="export a module whose weights and inputs are plain tensors "
        "(torchao: unwrap_tensor_subclass), or give a function that you trust: my.module:build",
    )


def modules(data: Any) -> dict[str, str]:
    """Of all that is noted of a node, the modules that it is in."""
    checked(isinstance(data, dict), "metadata", data, "an object")
    stack = data.get("nn_module_stack")
    return {"nn_module_stack": stack} if isinstance(stack, str) else {}


def _name(field: str, text: str) -> str:
    """A name that torch may write into source: an identifier, or nothing."""
    return checked(text.isidentifier() or not text, field, text, "an identifier")


def _path(field: str, text: str) -> str:
    """The path of a weight, which torch may quote in source: `layers.0.weight`."""
    plain = text.isprintable() and not set(text) & set("\"'\\{}")
    return checked(plain, field, text, "a path of names")


def _text(field: str, text: str) -> str:
    """Any text: torch quotes it wherever it writes it."""
    return text


def _operator(field: str, text: str) -> str:
    """An operator of a library that torch knows, arithmetic on sizes, or control flow; torch looks
    it up under the same path."""
    head, _, path = text.partition("torch.ops.")
    if head or text in ARITHMETIC:
        checked(
            text in ARITHMETIC or text in MODES,
            field,
            text,
            "an operator, for example torch.ops.aten.add.Tensor",
        )
        return text
    space, _, name = path.partition(".")
    checked(all(part.isidentifier() for part in path.split(".")), field, text, "an operator")
    if space == "higher_order":
        if name not in HIGHER:
            raise ModelError(
                f"{name} is not supported", found=text, fix="export the program without it"
            )
        return text
    packet, _, overload = name.partition(".")
    found: Any = getattr(torch.ops, space)
    if isinstance(found, torch._ops._OpNamespace):
        found = getattr(getattr(found, packet, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise ModelError(
            f"torch has no operator {space}::{packet}",
            found=text,
            fix="load the module that registers it: --load my.module, or import "
            "it before gpuir.load",
        )
    library = torch._C._dispatch_has_kernel(found._name)
    if not library or found._schema.name in READ_FILES:
        raise ModelError(
            f"{space}::{packet} acts on the machine that runs it, so gpuir "
            "does not accept it from a file",
            found=text,
            fix="export the program without it",
        )
    return text


TEXTS: Mapping[str, Callable[[str, str], Any]] = {
    **dict.fromkeys(("name", "as_name", "user_input_name", "forward_arg_names"), _name),
    **dict.fromkeys(("verifiers", "class_fqn"), _path),
    **dict.fromkeys(("parameter_name", "buffer_name", "tensor_constant_name", "fqn"), _path),
    **dict.fromkeys(("custom_obj_name", "path_name"), _path),
    **dict.fromkeys(("target", "as_operator"), _operator),
    **dict.fromkeys(("as_string", "as_strings", "torch_version", "in_spec", "out_spec"), _text),
    "expr_str": lambda field, text: size(text),
}


@lru_cache(maxsize=4096)
def size(text: str) -> Any:
    """A size that the file writes as `Mul(Integer(2), Symbol('s0', integer=True))`, or `2*s0`:
    parsed, never evaluated. torch takes it as it is."""
    try:
        if len(text) > LONGEST:
            raise ValueError(f"{len(text)} characters, of at most {LONGEST}")
        return _term(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, ArithmeticError, MemoryError, RecursionError) as e:
        raise ModelError(
            "a size is not an arithmetic expression of symbols",
            expected="for example Mul(Integer(2), Symbol('s0', integer=True))",
            found=f"{text[:200]!r}: {e}",
            fix="export the module and save it again",
        ) from e


def _term(tree: ast.expr) -> Any:
    match tree:
        case ast.Constant(bool() as value):
            found = sympy.true if value else sympy.false
        case ast.Constant(int() as value):
            found = sympy.Integer(value)
        case ast.Constant(float() as value):
            found = sympy.Float(value)
        case ast.Name("true" | "false" as word):
            found = sympy.true if word == "true" else sympy.false
        case ast.Name(name) if SYMBOL.fullmatch(name):
            found = sympy.Symbol(name, integer=True)
        case ast.Call(ast.Name("Symbol"), [ast.Constant(str() as name)], assumptions):
            known = {each.arg or "": each.value for each in assumptions}
            if not SYMBOL.fullmatch(name) or not known.keys() <= ASSUMED:
                raise ValueError(f"no symbol {name}")
            assumed = {key: bool(_term(value)) for key, value in known.items()}
            found = sympy.Symbol(name, **assumed)
        case ast.Call(ast.Name("Float"), [ast.Constant(str() as digits)], _) if len(digits) < 64:
            found = sympy.Float(float(digits))
        case ast.Call(ast.Name("Integer"), [value], []):
            found = _term(value)
        case ast.Call(ast.Name(name), args, []) if name in FUNCTIONS:
            found = _called(FUNCTIONS[name], [_term(each) for each in args])
        case ast.UnaryOp(ast.USub(), value):
            found = -_term(value)
        case ast.BinOp(left, op, right) if type(op) in BINARY:
            found = _called(BINARY[type(op)], [_term(left), _term(right)])
        case ast.Compare(left, [op], [right]) if type(op) in COMPARED:
            found = _called(COMPARED[type(op)], [_term(left), _term(right)])
        case _:
            raise ValueError(f"{ast.unparse(tree)[:80]} is none")
    if getattr(found, "is_number", False) and not -LARGEST < found < LARGEST:
        raise ValueError("too large a number")
    return found


def _called(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What a function gives; ValueError for a power or a shift that no size has."""
    if function in POWERS and any(abs(a) > 128 for a in args[1:] if a.is_number):
        raise ValueError("too large a power")
    return function(*args)


ASSUMED = {
    *("integer", "positive", "nonnegative", "negative", "nonpositive", "nonzero", "zero"),
    *("real", "finite", "even", "odd", "prime", "rational", "commutative", "complex"),
    *("extended_real", "hermitian", "infinite", "extended_positive", "extended_nonnegative"),
}
SIZES = (  # torch's functions of sizes, those of its deserializer
    *("FloorDiv", "ModularIndexing", "Where", "PythonMod", "Mod", "CleanDiv", "CeilToInt"),
    *("FloorToInt", "CeilDiv", "LShift", "RShift", "PowByNatural", "FloatPow", "FloatTrueDiv"),
    *("IntTrueDiv", "IsNonOverlappingAndDenseIndicator", "TruncToFloat", "TruncToInt"),
    *("RoundToInt", "RoundDecimal", "ToFloat", "Identity"),
)
PLAIN = (  # and sympy's
    *("Add", "Mul", "Pow", "Max", "Min", "floor", "ceiling", "Abs", "Rational"),
    *("Equality", "Unequality", "LessThan", "StrictLessThan", "GreaterThan", "StrictGreaterThan"),
    *("Eq", "Ne", "Le", "Lt", "Ge", "Gt", "And", "Or", "Not"),
)
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(sympy, name) for name in PLAIN},
    **{name: getattr(functions, name) for name in SIZES},
}
BINARY: Mapping[type[ast.operator], Callable[..., Any]] = {
    ast.Add: sympy.Add,
    ast.Sub: operator.sub,
    ast.Mult: sympy.Mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: functions.FloorDiv,
    ast.Mod: functions.Mod,
    ast.Pow: sympy.Pow,
}
COMPARED: Mapping[type[ast.cmpop], Callable[..., Any]] = {
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
}
POWERS = (sympy.Pow, *(FUNCTIONS[name] for name in ("LShift", "PowByNatural", "FloatPow")))


def _trees(entries: Sequence[schema.ModuleCallEntry], raw: Any) -> None:
    """Inputs and outputs as dictionaries, lists and tuples: torch would look up, or import, the
    classes of the model's own, whose fields are all that is wanted of them."""
    tuples = raw["graph_module"].get("treespec_namedtuple_fields") or {}
    own = entries[0].signature if entries else None
    checked(own, "module_call_graph", own, "a signature of the program itself, the first")
    for entry in entries:
        if entry.signature is None:
            continue
        for field in ("in_spec", "out_spec"):
            try:
                version, tree = json.loads(getattr(entry.signature, field))
                made = json.dumps([version, _plain(tree, tuples)])
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                text = getattr(entry.signature, field)
                checked(False, field, text, f"a tree of inputs or outputs ({error})")
            else:
                setattr(entry.signature, field, made)


def _plain(tree: Any, tuples: Mapping[str, Any]) -> dict[str, Any]:
    """A tree spec's JSON with no class of the model's own."""
    kind, parts = tree["type"], [_plain(each, tuples) for each in tree["children_spec"]]
    if kind is None:
        return {"type": None, "context": None, "children_spec": []}
    if kind in ("builtins.list", "builtins.tuple"):
        return {"type": kind, "context": "null", "children_spec": parts}
    named = tuples.get(tree["context"]) if isinstance(tree["context"], str) else None
    context = named["field_names"] if named else tree["context"]
    keys = names_of(_unquoted(context), len(parts))
    if keys is None or len({*keys}) < len(parts):
        return {"type": "builtins.tuple", "context": "null", "children_spec": parts}
    return {"type": "builtins.dict", "context": json.dumps(keys), "children_spec": parts}


def _unquoted(context: Any) -> Any:
    """What a context says, JSON within JSON."""
    while isinstance(context, str):
        try:
            context = json.loads(context)
        except ValueError:
            return context
    return context


def names_of(context: Any, count: int) -> list[str | int] | None:
    """The keys or fields that a node of a tree of inputs or outputs names, as many as its parts;
    None where it names none."""
    if isinstance(context, type):
        context = getattr(context, "_fields", None)  # of a named tuple
    if isinstance(context, Mapping):
        context = [*context.values()]
    if not isinstance(context, list | tuple):
        return None
    if len(context) == count and all(isinstance(x, str | int) for x in context):
        return [*context]
    return next((found for x in context if (found := names_of(x, count)) is not None), None)
