"""Inputs that mean harm, or were damaged on the way: what tools/fuzz.py runs gpuir on.

A generator is a function from a source of chance to a `Case`: files, and the arguments of a
command that reads them. The same source gives the same case.
"""

from __future__ import annotations

import io
import json
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 60_000  # bytes of a file to damage; a larger one costs time and tells nothing more

INTS = [
    *(0, 1, -1, 2, 3, 5, 7, 8, -2, 127, 128, 255, 256, 1000, 65535, 65536, 10**6, 10**9),
    *(2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**53 + 1, 2**62, 2**63 - 1, -(2**63)),
]
HUGE = [2**64, 10**26, -(10**30), 10**400]
FLOATS = [0.0, -0.0, 0.5, -1.5, 1.0, 3.7, 1e-45, 1e20, 3e38, float("inf"), float("-inf")]
FLOATS += [float("nan"), 1e308, -1e308]
TEXTS = [
    "",
    " ",
    "a",
    "x",
    "y",
    "=1+1",
    "@SUM(A1)",
    "-2+3",
    "+x",
    "\t=1",
    "\r\n",
    "\x1b[31mred\x1b[0m",
]
TEXTS += [
    "\x00",
    "a" * 300,
    "b" * 5000,
    "../../etc/passwd",
    "\U0001f4a5",
    "e\u0301",
    "\u202e",
    '"',
    "'",
]
TEXTS += ["\\", "<script>alert(1)</script>", "9" * 400, "bij,bjk->bik", "...i->i", "->"]
TEXTS += [
    "%s%n",
    "nan",
    "inf",
    "1e400",
    "-1",
    "None",
    "f32",
    "true",
    "linear",
    "NOTSET",
    "SAME_UPPER",
    "batch",
]


@dataclass(frozen=True)
class Case:
    """Files by name, links by name, and a command line that names them."""

    args: list[str]
    files: dict[str, bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)


Generator = Callable[[Random], Case]


def chance(r: Random, share: float) -> bool:
    return r.random() < share


def number(r: Random) -> int:
    return r.choice(INTS) if chance(r, 0.7) else r.randint(-4, 40)


# ------------------------------------------------------------------ bytes, tokens, JSON


LONG = ("n" * 300_000, "a/" * 3000, "a/" * 100_000, "l.0." * 50_000, "a, " * 50_000, "-" * 100_000)
SIZES = (  # of saved programs: what sympy takes long for, or what is none
    "FloorDiv(Pow(Add(s0, s1, s2, s3, s4, 1), 60), Add(s0, 1))",
    "PythonMod(Pow(Add(s0, s1, s2, 1), 128), Pow(Add(s0, s1, 1), 120))",
    f"Max({', '.join(f's{i}*s{i + 1}-{i}' for i in range(150))})",
    *("Mod(s0, 0)", "Pow(s0, -1)", "Max()", "Where(1, 2, 3)", "Not(s0)", "s0 / 0", "1e400"),
)


def damaged(r: Random, data: bytes) -> bytes:
    """A few bits flipped, stretches cut, doubled, zeroed or drawn."""
    found = bytearray(data)
    for _ in range(r.choice((1, 1, 2, 4, 16))):
        if not found:
            return bytes(r.randbytes(8))
        at, length = r.randrange(len(found)), r.choice((1, 1, 2, 4, 9, 64))
        match r.randrange(6):
            case 0 | 1:
                found[at] ^= 1 << r.randrange(8)
            case 2:
                del found[at : at + length]
            case 3:
                found[at:at] = found[at : at + length]
            case 4:
                found[at : at + length] = r.randbytes(length)
            case _:
                found[at : at + length] = r.choice(
                    (b"\xff" * 9, b"\0" * 8, struct.pack("<q", 2**62))
                )
    return bytes(found[: r.randrange(len(found))] if chance(r, 0.05) else found)


TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|[%@]?[\w.]+|\s+|.', re.DOTALL)


def retold(r: Random, text: str, others: str = "") -> str:
    """Tokens of a text changed: numbers to hostile ones, words swapped, lines doubled or lost."""
    tokens = TOKEN.findall(text)
    for _ in range(r.choice((1, 1, 1, 2, 3, 8))):
        words = [i for i, t in enumerate(tokens) if not t.isspace()]
        if not words:
            return r.choice(TEXTS)
        i = r.choice(words)
        numbers = [j for j in words if re.fullmatch(r"[0-9.]+(e-?[0-9]+)?", tokens[j])]
        match r.randrange(9):
            case 0 | 1 | 2 if numbers:
                pool = (*([str(r.randint(0, 70))] * 4), *([str(abs(r.choice(INTS)))] * 3))
                pool += (str(r.choice(INTS)), str(r.choice(HUGE)), repr(r.choice(FLOATS)))
                tokens[r.choice(numbers)] = r.choice(pool)
            case 3:
                tokens[i] = tokens[r.choice(words)]
            case 4:
                del tokens[i]
            case 5 if others:
                tokens[i] = r.choice(TOKEN.findall(others))
            case 6:
                tokens[i] = json.dumps(r.choice(TEXTS)) if chance(r, 0.8) else r.choice(TEXTS)
            case 7:
                tokens.insert(i, tokens[r.choice(words)])
            case _:
                lines = "".join(tokens).split("\n")
                at, to = r.randrange(len(lines)), r.randrange(len(lines))
                if chance(r, 0.5):
                    lines[at], lines[to] = lines[to], lines[at]
                else:
                    lines.insert(to, lines[at]) if chance(r, 0.5) else lines.pop(at)
                tokens = TOKEN.findall("\n".join(lines))
    found = "".join(tokens)
    return damaged(r, found.encode()).decode("utf-8", "replace") if chance(r, 0.05) else found


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with one of its keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inside in list(pairs):
        yield value, key
        if isinstance(inside, dict | list):
            yield from places(inside)


def hostile(r: Random) -> Any:
    pool = (INTS, INTS, HUGE, FLOATS, TEXTS, [None, True, False, [], {}, [[]], {"a": {}}, [1, "a"]])
    return r.choice(r.choice(pool))


def edited(r: Random, value: Any) -> str:
    """A JSON text with some of its values replaced, dropped, exchanged or buried."""
    value = deepcopy(value)
    for _ in range(r.choice((1, 1, 1, 2, 4))):
        spots = list(places(value))
        if not spots:
            break
        holder, key = r.choice(spots)
        match r.randrange(7):
            case 0:
                del holder[key]
            case 1:
                other, name = r.choice(spots)
                try:
                    holder[key] = deepcopy(other[name])
                except (KeyError, IndexError):
                    holder[key] = None
            case 2 if isinstance(holder, dict):
                holder[r.choice(TEXTS)] = holder.pop(key)
            case 3 if isinstance(holder[key], list):
                holder[key] = holder[key] * r.choice((2, 50))
            case 4 if chance(r, 0.2):
                for _ in range(r.choice((20, 300, 2000))):
                    holder[key] = [holder[key]] if chance(r, 0.5) else {"a": holder[key]}
                break
            case _:
                holder[key] = hostile(r)
    try:
        return json.dumps(value)
    except RecursionError:
        return "[" * 3000 + "]" * 3000


# -------------------------------------------------------------------------------- ONNX

FORMATS = ("text", "json", "csv", "markdown", "html", "trace", "ir", "schedule", "roofline")


def asked(r: Random, model: str) -> list[str]:
    """A command that loads a model, mostly the report."""
    where = ["--target", r.choice(("a100", "a100", "h100-sxm", "t4", "mi250x", "x86-64-v3"))]
    if chance(r, 0.3):
        where += [
            "--profile",
            r.choice(("eager", "compiled", "cudagraph", "ort", "tensorrt", "ideal")),
        ]
    sizes = ["--dims", "batch=2"] if chance(r, 0.05) else []
    match r.randrange(12):
        case 0:
            passes = "canonicalize,recognize,fuse,legalize"
            return ["opt", model, "--pipeline", passes, *sizes]
        case 1:
            return ["analyze", model, *where, *sizes, "--train", "--optimizer", "adamw"]
        case 2:
            return ["explain", model, r.choice(("y", "0", "y0", "output", "x")), *where, *sizes]
        case 3:
            return ["analyze", model, *where, *sizes, "--format", r.choice(FORMATS)]
        case _:
            return ["analyze", model, *where, *sizes, "--memory"]


@cache
def onnx_models() -> tuple[bytes, ...]:
    """Small models of the onnx package's own tests: each operator, and nets exported by PyTorch."""
    import onnx.backend.test
    from onnx.backend.test.loader import load_node_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = [case.model.SerializeToString() for case in load_node_model_tests()]
    folder = Path(onnx.backend.test.__file__).parent / "data"
    saved = [path.read_bytes() for path in sorted(folder.rglob("model.onnx"))]
    return tuple(data for data in (*made, *saved) if len(data) < LARGEST)


def onnx_bytes(r: Random) -> Case:
    """The bytes of a model damaged."""
    return Case(asked(r, "m.onnx"), {"m.onnx": damaged(r, r.choice(onnx_models()))})


def leaves(message: Any) -> Iterator[tuple[Any, Any]]:
    """Every field that is set, with the message it is in."""
    for of, value in message.ListFields():
        yield message, of
        if of.message_type is not None:
            for inside in value if hasattr(value, "add") else (value,):
                yield from leaves(inside)


def scalar(r: Random, of: Any, old: Any) -> Any:
    match old:
        case bool():
            return not old
        case int():
            near = (old + 1, old - 1, -old, old * 2)
            return r.choice(near) if chance(r, 0.3) else number(r)
        case float():
            return r.choice(FLOATS)
        case bytes():
            return damaged(r, old) if chance(r, 0.6) else r.choice(TEXTS).encode()
        case _:
            return r.choice(TEXTS)


def onnx_fields(r: Random) -> Case:
    """Fields of a model edited: attributes, types, shapes, names, versions, weights."""
    import onnx

    model = onnx.ModelProto.FromString(r.choice(onnx_models()))
    for _ in range(r.choice((1, 1, 1, 2, 3))):
        spots = [s for s in leaves(model) if s[1].name not in ("doc_string", "producer_name")]
        if not spots:
            break
        holder, of = r.choice(spots)
        value = getattr(holder, of.name)
        try:
            if hasattr(value, "append"):
                few, i = list(value), r.randrange(len(value))
                match r.randrange(4):
                    case 0:
                        del value[i]
                    case 1:
                        value.append(few[i])
                    case 2 if of.message_type is None:
                        value[i] = scalar(r, of, few[i])
                    case _:
                        other = r.randrange(len(few))
                        few[i], few[other] = few[other], few[i]
                        del value[:]
                        value.extend(few)
            elif of.message_type is not None or chance(r, 0.1):
                holder.ClearField(of.name)
            else:
                setattr(holder, of.name, scalar(r, of, value))
        except (ValueError, TypeError):  # protobuf itself knows better
            continue
    if chance(r, 0.15) and model.graph.node:
        donor = onnx.ModelProto.FromString(r.choice(onnx_models()))
        node = r.choice(model.graph.node)
        if donor.graph.node:
            other = r.choice(donor.graph.node)
            node.op_type, node.domain = other.op_type, other.domain
    return Case(asked(r, "m.onnx"), {"m.onnx": model.SerializeToString()})


@cache
def schemas() -> tuple[Any, ...]:
    import onnx.defs

    return tuple(sorted(onnx.defs.get_all_schemas(), key=lambda s: (s.domain, s.name)))


EXTENTS = (0, 1, 1, 2, 2, 3, 4, 5, 8, 16, 17, 1024, 2**16, 2**31, 2**40, 2**62)


def attribute(r: Random, kind: str) -> Any:
    """A value for an attribute of this type, mostly small; None where there is none to draw."""
    from onnx import helper

    small = chance(r, 0.7)
    ints = [r.randint(-2, 4) if small else number(r) for _ in range(r.randint(0, 5))]
    match kind.rpartition(".")[2]:
        case "INT":
            return r.randint(-2, 4) if small else number(r)
        case "FLOAT":
            return r.choice(FLOATS)
        case "STRING":
            return r.choice(TEXTS)
        case "INTS":
            return ints
        case "FLOATS":
            return [r.choice(FLOATS) for _ in ints]
        case "STRINGS":
            return [r.choice(TEXTS) for _ in ints]
        case "TENSOR":
            return helper.make_tensor("t", 7, [len(ints)], ints)
        case "GRAPH":
            out = helper.make_tensor_value_info("z", 1, [2])
            return helper.make_graph([helper.make_node("Relu", ["x0"], ["z"])], "b", [], [out])
        case _:
            return None


def onnx_drawn(r: Random) -> Case:
    """A model of one operator, drawn from its definition: operands, shapes, weights, attributes."""
    from onnx import helper

    schema = r.choice(schemas())
    inputs, weights, names = [], [], []
    count = r.randint(schema.min_input, min(schema.max_input, schema.min_input + 3))
    shape = [r.choice(EXTENTS) for _ in range(r.randint(0, 5))]
    for i in range(count):
        name = f"x{i}" if chance(r, 0.95) else ""
        names.append(name)
        if chance(r, 0.3):
            shape = [r.choice(EXTENTS) for _ in range(r.randint(0, 5))]
        dtype = r.choice((1, 1, 1, 1, 10, 7, 7, 6, 9, 2, 3, 8, 11, 14, 16, 17))
        if chance(r, 0.4) and name:
            values = [
                number(r) if chance(r, 0.4) else r.randint(0, 4) for _ in range(r.randint(0, 6))
            ]
            kind = r.choice((6, 7, 7, 1, 11))
            try:
                dims = [len(values)] if chance(r, 0.8) or len(values) != 1 else []
                drawn = [r.choice(FLOATS) for _ in values] if kind in (1, 11) else values
                weights.append(helper.make_tensor(name, kind, dims, drawn))
                continue
            except Exception:  # a number beyond the type
                pass
        if name:
            dims = [f"d{j}" if chance(r, 0.05) else n for j, n in enumerate(shape)]
            inputs.append(helper.make_tensor_value_info(name, dtype, dims))
    given = {}
    for name, a in schema.attributes.items():
        if (a.required or chance(r, 0.4)) and not chance(r, 0.05):
            value = attribute(r, str(a.type))
            if value is not None and not (isinstance(value, list) and not value):
                given[name] = value
    outputs = [
        f"y{i}" for i in range(max(1, r.randint(schema.min_output, min(schema.max_output, 4))))
    ]
    node = helper.make_node(schema.name, names, outputs, domain=schema.domain, **given)
    ends = [helper.make_empty_tensor_value_info(o) for o in outputs]
    graph = helper.make_graph([node], "g", inputs, ends, weights)
    version = schema.since_version if chance(r, 0.5) else r.randint(1, 26)
    opset = [helper.make_opsetid(schema.domain, version)]
    if schema.domain:
        opset.append(helper.make_opsetid("", 21))
    model = helper.make_model(graph, opset_imports=opset)
    return Case(asked(r, "m.onnx"), {"m.onnx": model.SerializeToString()})


def nested(r: Random, kind: str, depth: int) -> Any:
    """A node with a node of its kind inside, so many times."""
    from onnx import helper

    def inside(level: int) -> Any:
        name = f"n{level}"
        if level == depth:
            return helper.make_node("Relu", ["x"], [name])
        if kind == "If":
            ends = [helper.make_empty_tensor_value_info(f"n{level + 1}")]
            then = helper.make_graph([inside(level + 1)], "t", [], ends)
            other = helper.make_node("Neg", ["x"], [f"n{level + 1}"])
            other = then if level > depth - 3 else helper.make_graph([other], "e", [], ends)
            return helper.make_node("If", ["c"], [name], then_branch=then, else_branch=other)
        state = [helper.make_tensor_value_info(f"s{level}", 1, [2, 2])]
        if kind == "Scan":
            pair = [
                inside(level + 1),
                helper.make_node("Add", [f"n{level + 1}", f"s{level}"], ["r"]),
            ]
            body = helper.make_graph(
                pair, "b", state, [helper.make_tensor_value_info("r", 1, [2, 2])]
            )
            return helper.make_node("Scan", ["xs"], [name], body=body, num_scan_inputs=1)
        head = [helper.make_tensor_value_info(f"i{level}", 7, [])]
        head += [helper.make_tensor_value_info(f"c{level}", 9, [])]
        pair = [inside(level + 1), helper.make_node("Add", [f"n{level + 1}", f"s{level}"], ["r"])]
        pair += [helper.make_node("Identity", [f"c{level}"], ["k"])]
        ends = [
            helper.make_tensor_value_info("k", 9, []),
            helper.make_tensor_value_info("r", 1, [2, 2]),
        ]
        body = helper.make_graph(pair, "b", [*head, *state], ends)
        return helper.make_node("Loop", ["trips", "", "x"], [name], body=body)

    return inside(0)


def onnx_bombs(r: Random) -> Case:
    """Small files that ask for much: deep nests, functions that double, long chains, wide fans."""
    from onnx import helper

    make, info = helper.make_node, helper.make_tensor_value_info
    opsets, functions = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)], []
    inputs = [info("x", 1, [2, 2]), info("c", 9, []), info("xs", 1, [3, 2, 2])]
    trips = r.choice((0, 1, 2, 10, 1000, 2**31, 2**62, -1))
    weights = [helper.make_tensor("trips", 7, [], [trips])]
    depth = r.choice((2, 5, 12, 25, 40, 100, 200, 400))
    match r.randrange(4):
        case 0 | 1:
            kind = r.choice(("If", "Loop", "Scan"))
            nodes = [nested(r, kind, min(depth, 30))]  # protobuf takes no deeper ones
        case 2:
            width = r.choice((1, 2, 2, 3))
            for i in range(depth):
                calls = [
                    make(f"f{i + 1}", ["a" if j == 0 else f"b{j}"], [f"b{j + 1}"], domain="f")
                    for j in range(width)
                ]
                if i == depth - 1:
                    calls = [make("Relu", ["a"], [f"b{width}"])]
                functions.append(
                    helper.make_function("f", f"f{i}", ["a"], [f"b{width}"], calls, opsets)
                )
            nodes = [make("f0", ["x"], ["n0"], domain="f")]
        case _:
            length = r.choice((10, 300, 2000))
            kinds = r.choices(
                ("Relu", "Add", "MatMul", "Transpose", "Softmax", "Concat", "Tile"), k=length
            )
            nodes, last = [], "x"
            for i, kind in enumerate(kinds):
                operands = [last] if kind in ("Relu", "Transpose", "Softmax") else [last, last]
                extra = {"axis": 0} if kind == "Concat" else {}
                if kind == "Tile":
                    operands = [last, "times"]
                nodes.append(make(kind, operands, [last := f"v{i}"], **extra))
            nodes.append(make("Relu", [last], ["n0"]))
            weights.append(helper.make_tensor("times", 7, [2], [number(r), r.choice((1, 2))]))
    ends = [helper.make_empty_tensor_value_info("n0")]
    graph = helper.make_graph(nodes, "g", inputs, ends, weights)
    model = helper.make_model(graph, opset_imports=opsets, functions=functions)
    return Case(asked(r, "m.onnx"), {"m.onnx": model.SerializeToString()})


# --------------------------------------------------------------- IR text and what goes with it


@cache
def texts() -> tuple[str, ...]:
    """Graphs of the golden files: what a pass is given, and what it makes."""
    found: list[str] = []
    for path in sorted((ROOT / "tests/golden").rglob("*.gir")):
        parts = re.split(r"^# (?:run|gives|fails):.*\n", path.read_text(), flags=re.MULTILINE)
        found += [part for part in parts if "{" in part and len(part) < LARGEST]
    return tuple(found)


@cache
def graphs() -> tuple[Any, ...]:
    """Those of the texts that are of level `graph`, as graphs."""
    from gpuir.ir.errors import GpuirError
    from gpuir.text.parser import parse

    found: list[Any] = []
    for text in texts():
        with suppress(GpuirError):
            if text.startswith("graph"):
                found.append(parse(text))
    return tuple(found)


def changed(r: Random, op: Any, known: Sequence[Any]) -> Any:
    """The op with one of its fields another of its kind: an operand of the same type, a number, a
    flag, a dtype, a function of the same arity."""
    from gpuir.ir.graph import Value
    from gpuir.ir.types import DTYPES, DType
    from gpuir.ops.scalar import SCALARS

    of = r.choice(fields(op))
    old = getattr(op, of.name)
    new: Any = old
    match old:
        case Value():
            new = r.choice([v for v in known if v.type == old.type] or [old])
        case (Value(), *_):
            parts = list(old)
            i = r.randrange(len(parts))
            parts[i] = r.choice([v for v in known if v.type == parts[i].type])
            new = tuple(parts)
        case bool():
            new = not old
        case int():
            new = old + r.choice((-1, 1)) if chance(r, 0.5) else number(r)
        case float():
            new = r.choice(FLOATS)
        case DType():
            new = r.choice(list(DTYPES.values()))
        case str() if old in SCALARS:
            new = r.choice([n for n, row in SCALARS.items() if row.arity == SCALARS[old].arity])
        case (int() | float(), *_):
            i = r.randrange(len(old))
            pool = FLOATS if isinstance(old[i], float) else (old[i] + 1, old[i] - 1, number(r))
            new = (*old[:i], r.choice(pool), *old[i + 1 :])
        case _:
            pass
    return replace(op, **{of.name: new})


def retyped(r: Random, g: Any) -> Any:
    """The graph made anew with another size throughout, another dtype throughout, or fields of its
    ops changed; GpuirError where that cannot be."""
    from gpuir.ir.build import Builder
    from gpuir.ir.types import DTYPES, TensorType

    ends = (*g.inputs, *g.params)
    sizes = sorted({n for v in ends for n in v.type.shape})
    dtypes = sorted({v.type.dtype for v in ends}, key=str)
    size, other = r.choice(sizes or [0]), r.choice((*EXTENTS, 7, 64, 129, 4096))
    dtype, new_dtype = r.choice(dtypes or [None]), r.choice(list(DTYPES.values()))
    resized, recast = chance(r, 0.5), chance(r, 0.25)

    def sized(shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(other if resized and n == size else n for n in shape)

    b = Builder(g.level, g.name, g.target)
    b.inherit(g)
    values: dict[Any, Any] = {}
    for make, some in ((b.input, g.inputs), (b.param, g.params)):
        for v in some:
            kind = new_dtype if recast and v.type.dtype == dtype else v.type.dtype
            values[v] = make(v.name, TensorType(sized(v.type.shape), kind))
    targets = r.sample(range(len(g.nodes)), min(len(g.nodes), r.choice((0, 1, 1, 2))))
    for i, node in enumerate(g.nodes):
        op = node.op.substitute(values)
        if resized:
            shapes = {
                f.name: sized(x)
                for f in fields(op)
                if isinstance(x := getattr(op, f.name), tuple) and x and type(x[0]) is int
            }
            op = replace(op, **shapes)
        if i in targets:
            op = changed(r, op, tuple(values.values()))
        results = b.add(op, [v.name for v in node.results], node.locs)
        values.update(zip(node.results, results, strict=True))
    return b.finish([values[v] for v in g.outputs])


def ir_typed(r: Random) -> Case:
    """A graph that is well-formed still after what was changed, in its text."""
    from gpuir.text.printer import show

    text = MODEL
    for _ in range(8):
        with suppress(Exception):  # most changes do not fit, and the type rules say so
            text = show(retyped(r, r.choice(graphs())))
            break
    return Case(asked(r, "m.gir"), {"m.gir": text.encode("utf-8", "replace")})


def ir_text(r: Random) -> Case:
    """Graphs in gpuir's own text, retold; now and then deep or long."""
    text = retold(r, r.choice(texts()), r.choice(texts()))
    if chance(r, 0.02):
        deep, long = r.choice((10, 60, 300)), r.choice((10**4, 10**6))
        text = r.choice(
            (
                text.replace("{", "{" * deep),
                text.replace('"', '"' + "z" * long, 1),
                text.replace("%x", "%" + "x" * long),
                text + "\n" + "{" * deep,
            )
        )
    return Case(asked(r, "m.gir"), {"m.gir": text.encode("utf-8", "replace")})


MODEL = """graph @m {
  in %x: f16[8, 64]
  param %w: f16[64, 64]
  %h: f16[8, 64] = t.matmul(%x, %w) at "m:MatMul"
  %s: f16[8, 64] = t.map("relu", [%h]) at "m:Relu"
  out %s
}
"""
SCHEDULE = """schedule @m for a100 {
  %s: tile(m=16, n=64, k=32; stages=3, warps=4)
}
"""
SMALL = {"m.gir": MODEL.encode(), "ok.sched": SCHEDULE.encode()}


def schedules(r: Random) -> Case:
    """A schedule retold, applied or checked."""
    files = SMALL | {"s.sched": retold(r, SCHEDULE).encode("utf-8", "replace")}
    if chance(r, 0.5):
        return Case(["schedule", "check", "s.sched", "m.gir"], files)
    return Case(["analyze", "m.gir", "--target", "a100", "--schedule", "s.sched"], files)


@cache
def passes() -> tuple[tuple[str, tuple[str, ...]], ...]:
    from gpuir.stacks.table import PASSES

    return tuple((name, tuple(f.name for f in fields(p))) for name, p in PASSES.items())


def pipelines(r: Random) -> Case:
    """Passes in any order with any options, on a graph of any level."""
    made: list[str] = []
    for _ in range(r.randint(1, 5)):
        name, options = r.choice(passes())
        pool = (*map(str, INTS), *map(repr, FLOATS), "true", "false", "a100", "bf16", *TEXTS)
        given = [
            f"{o}={value}" if re.fullmatch(r"[-\w.]+", value) else f"{o}={json.dumps(value)}"
            for o in options
            if chance(r, 0.4)
            for value in (r.choice(pool),)
        ]
        made.append(name + ("{" + ",".join(given) + "}" if given else ""))
    text = ",".join(made)
    if chance(r, 0.2):
        text = retold(r, text)
    graph = MODEL if chance(r, 0.3) else r.choice(texts())
    command = ["analyze", "m.gir", "--target", "a100"] if chance(r, 0.3) else ["opt", "m.gir"]
    return Case([*command, "--pipeline", text], {"m.gir": graph.encode()})


# ------------------------------------------------------- spec files, reports, tables of numbers

TOML = ("", "0", "-1", "1e999", "nan", "inf", '""', '"a"', "[]", "[[]]", "{}", "true", "1979-05-27")
TOML += ('"a\\u0000b"', "9" * 400, "1e-320", '"../a100.toml"', '"x.toml"', '{ f16 = "a" }')


def respecified(r: Random, text: str) -> str:
    """Lines of a TOML file with other values or keys, doubled or left out."""
    lines = text.split("\n")
    for _ in range(r.choice((1, 1, 1, 2, 4))):
        keyed = [i for i, line in enumerate(lines) if "=" in line] or [0]
        i = r.choice(keyed)
        key, _, value = lines[i].partition("=")
        match r.randrange(7):
            case 0 | 1:
                lines[i] = f"{key}= {r.choice(TOML)}"
            case 2 | 3:
                lines[i] = f"{key}={retold(r, value)}"
            case 4:
                del lines[i]
            case 5:
                lines.insert(r.randrange(len(lines)), lines[i])
            case _:
                lines[i] = f"{retold(r, key)}={value}"
    return "\n".join(lines)


@cache
def specs(kind: str) -> tuple[str, ...]:
    return tuple(path.read_text() for path in sorted((ROOT / "specs").glob(kind)))


def targets(r: Random) -> Case:
    """A target's file with other numbers."""
    text = respecified(r, r.choice(specs("gpus/*.toml") + specs("cpus/*.toml")))
    files = SMALL | {"x.toml": text.encode("utf-8", "replace")}
    if chance(r, 0.4):
        extra = r.choice(([], ["--check"], ["--format", "toml"], ["--format", "json"]))
        return Case(["targets", "x.toml", *extra], files)
    return Case(["analyze", "m.gir", "--target", "x.toml"], files)


def profiles(r: Random) -> Case:
    """A profile's file with other numbers or passes."""
    text = respecified(r, r.choice(specs("profiles/*.toml")))
    files = SMALL | {"x.toml": text.encode("utf-8", "replace")}
    if chance(r, 0.3):
        return Case(["profiles", "x.toml"], files)
    return Case(["analyze", "m.gir", "--target", "a100", "--profile", "x.toml"], files)


@cache
def report() -> Any:
    """A report of the small model, as `--format json` gives it."""
    import gpuir
    from gpuir.backends.table import BACKENDS
    from gpuir.backends.terminal import Terminal

    g = gpuir.analyze(gpuir.parse(MODEL), "a100").graph
    return json.loads(BACKENDS["json"]([gpuir.analyze(g)], Terminal()))


def reports(r: Random) -> Case:
    """A saved report edited, compared with itself unharmed."""
    text = edited(r, report())
    if chance(r, 0.1):
        text = damaged(r, text.encode()).decode("utf-8", "replace")
    files = {"old.json": json.dumps(report()).encode(), "new.json": text.encode("utf-8", "replace")}
    args = ["diff", *r.choice((["old.json", "new.json"], ["new.json", "old.json"]))]
    if chance(r, 0.5):
        args += ["--format", r.choice(("table", "markdown", "json", "junit"))]
    if chance(r, 0.4):
        name, sign = r.choice(("latency", "memory", "launches", "opaque")), r.choice("+-=<")
        args += ["--budget", f"{name}={sign}{number(r)}{r.choice(('%', 'MB', 'ms', '', 'q'))}"]
    return Case(args, files)


@cache
def measured() -> tuple[str, ...]:
    """The first rows of a table of measurements."""
    path = sorted((ROOT / "specs/measurements").glob("*.csv"))[0]
    return tuple(path.read_text().splitlines()[:12])


def tables(r: Random) -> Case:
    """A table of measurements with cells changed."""
    rows = [line.split(",") for line in measured()]
    for _ in range(r.choice((1, 2, 5, 40))):
        row = r.choice(rows)
        i = r.randrange(len(row)) if row else 0
        pool = (*map(str, INTS), *map(str, HUGE), *map(repr, FLOATS), *TEXTS)
        match r.randrange(5):
            case 0 if row:
                del row[i]
            case 1:
                row.insert(i, r.choice(pool))
            case _ if row:
                row[i] = r.choice(pool)
    text = "\n".join(",".join(row) for row in rows)
    if chance(r, 0.1):
        text = damaged(r, text.encode()).decode("utf-8", "replace")
    files = {"t.csv": text.encode("utf-8", "replace")}
    if chance(r, 0.1):
        return Case(["collect", "--target", "a100", "-o", "t.csv", "--dry-run"], files)
    return Case(["eval", "kernels", "t.csv"], files)


# -------------------------------------------------------------- PyTorch programs and configs


@cache
def programs() -> tuple[bytes, ...]:
    """Small programs as `torch.export.save` writes them; none without torch."""
    try:
        import torch
    except ImportError:
        return ()
    from torch import nn

    torch.set_num_threads(1)
    batch = torch.export.Dim("batch", max=64)
    attend = nn.MultiheadAttention(16, 2, batch_first=True)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = attend

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x, x, x)[0].sort(-1).values.cumsum(1)

    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    made: list[bytes] = []
    for module, x, dynamic in (
        (mlp, torch.zeros(2, 8), {0: batch}),
        (conv, torch.zeros(2, 3, 8, 8), None),
        (Attention(), torch.zeros(2, 4, 16), None),
        (nn.LSTM(4, 4, batch_first=True), torch.zeros(2, 3, 4), None),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shapes = None if dynamic is None else (dynamic,)
            program = torch.export.export(module.eval(), (x,), dynamic_shapes=shapes)
            stream = io.BytesIO()
            torch.export.save(program, stream)
        made.append(stream.getvalue())
    return tuple(made)


@cache
def calls_of() -> tuple[Any, ...]:
    """The nodes of the saved programs: what each calls, with what."""
    found: list[Any] = []
    for data in programs():
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            (name,) = [n for n in archive.namelist() if n.endswith("models/model.json")]
            found += json.loads(archive.read(name))["graph_module"]["graph"]["nodes"]
    return tuple(found)


def revalued(r: Random, members: dict[str, Any]) -> None:
    """Values of saved programs' documents changed for others of their kind: a size throughout, a
    number, a flag, a dtype, an operand, an operator of as many arguments."""
    documents = list(members.values())
    spots = [(holder, key) for d in documents for holder, key in places(d)]
    ints = [(h, k) for h, k in spots if k == "as_int" and type(h[k]) is int]
    for _ in range(r.choice((1, 1, 2, 3))):
        match r.randrange(7):
            case 0 if ints:
                size, other = r.choice(ints)[0]["as_int"], r.choice((*EXTENTS, 7, 64, 129))
                for holder, key in ints:
                    holder[key] = other if holder[key] == size else holder[key]
            case 1:
                of = ("as_int", "as_float", "as_bool", "as_string", "expr_str")
                holder, key = r.choice([s for s in spots if s[1] in of])
                old = holder[key]
                holder[key] = r.choice(SIZES) if key == "expr_str" else scalar(r, None, old)
            case 2:
                holder, key = r.choice([s for s in spots if s[1] == "dtype"])
                holder[key] = r.randint(1, 15)
            case 3:
                names = [h[k] for h, k in spots if k == "name" and len(h) == 1]
                tensors = [(h, k) for h, k in spots if k == "as_tensor" and isinstance(h[k], dict)]
                holder, key = r.choice(tensors)
                holder[key]["name"] = r.choice(names)
            case 4:
                nodes = [h for h, k in spots if k == "target"]
                node = r.choice(nodes)
                count = len(node["inputs"])
                others = [n for n in calls_of() if len(n["inputs"]) == count] or nodes
                node["target"] = r.choice(others)["target"]
            case 5:
                lists = [(h, k) for h, k in spots if k in ("as_ints", "sizes") and h[k]]
                holder, key = r.choice(lists)
                i = r.randrange(len(holder[key]))
                old = holder[key][i]
                holder[key][i] = scalar(r, None, old) if type(old) is int else old
            case _:
                nodes = [h for h, k in spots if k == "target" and h.get("inputs")]
                given = r.choice(nodes)["inputs"]
                if chance(r, 0.5):
                    del given[r.randrange(len(given))]
                else:
                    given.append(deepcopy(r.choice(r.choice(nodes)["inputs"])))


def programs_typed(r: Random) -> Case:
    """A saved program that reads as one still: the values in it are others of their kind."""
    if not programs():
        return pipelines(r)
    with zipfile.ZipFile(io.BytesIO(r.choice(programs()))) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    documents = {
        name: json.loads(data)
        for name, data in members.items()
        if name.endswith(("models/model.json", "weights_config.json"))
    }
    revalued(r, documents)
    members |= {name: json.dumps(d).encode() for name, d in documents.items()}
    return Case(asked(r, "m.pt2"), {"m.pt2": zipped(members)})


def zipped(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w") as archive:
        warnings.simplefilter("ignore")
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def archives(r: Random) -> Case:
    """A saved program whose members, or the JSON in them, were changed."""
    if not programs():
        return pipelines(r)
    data = r.choice(programs())
    if chance(r, 0.15):
        return Case(asked(r, "m.pt2"), {"m.pt2": damaged(r, data)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    names = list(members)
    documents = [n for n in names if n.endswith(".json")]
    for _ in range(r.choice((1, 1, 2))):
        name = r.choice(names)
        match r.randrange(10):
            case 0:
                members.pop(name, None)
            case 1:
                members[r.choice(("../../x", "a" * 300, name + "x", "data/weights/model.pt"))] = (
                    members.get(name, b"")
                )
            case 2:
                members[name] = damaged(r, members.get(name, b""))
            case _ if documents:
                name = r.choice(documents)
                try:
                    members[name] = edited(r, json.loads(members[name])).encode("utf-8", "replace")
                except (KeyError, ValueError, TypeError, RecursionError):  # damaged before
                    continue
    return Case(asked(r, "m.pt2"), {"m.pt2": zipped(members)})


SIZED = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZED |= {"intermediate_size": 32, "max_position_embeddings": 64}
CONFIGS: tuple[dict[str, Any], ...] = (
    {"model_type": "bert", "architectures": ["BertForMaskedLM"], **SIZED},
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 1,
        **SIZED,
    },
    {
        "model_type": "gpt2",
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 64,
        "n_positions": 64,
    },
    {"model_type": "vit", "image_size": 32, "patch_size": 8, **SIZED},
)


def configs(r: Random) -> Case:
    """A config of a small transformer, edited."""
    text = edited(r, r.choice(CONFIGS))
    args = ["analyze", "hf:config.json", "--target", "a100", "--dims", "batch=1,seq=8"]
    return Case(args, {"config.json": text.encode("utf-8", "replace")})


# ------------------------------------------------------------------------------ command lines

PATHS = (
    "o.txt",
    "o.csv",
    "",
    ".",
    "-",
    "a" * 300,
    "d/" * 2500 + "x",
    "none/x",
    "loop",
    "a\tb",
    "/dev/null",
)
PATHS += (
    "/dev/full",
    "o\nx",
    "m.gir",
    "ok.sched",
    "\udce9",
    "~",
    "/proc/self/mem",
    "hf:",
    "hf:x",
    ":",
    "a:b",
)
WORDS: dict[str, tuple[str, ...]] = {
    "target": (
        "a100",
        "a100,l4",
        "all",
        "a100+sms=0",
        "a100+sms=1e9",
        "mi250x",
        "x.toml",
        ",",
        "+",
        "a100+",
    ),
    "profile": ("eager", "compiled", "eager,ort", "ideal", "x.toml", ","),
    "format": (*FORMATS, "markdown", "junit", "toml"),
    "pipeline": (
        "canonicalize,fuse",
        "fuse{max_ops=0}",
        "legalize",
        "annotate",
        "{",
        "fuse{",
        'fuse{rules="a\tb"}',
    ),
    "predictor": ("tile", "roofline", "tile@2", "tile@99", "@"),
    "dims": ("batch=2", "batch=0", "batch=1,seq=-1", f"batch={10**26}", "=", "batch", "x==2"),
    "batch_sizes": ("1", "1,2,4..64", "1..10", f"1..{10**26}", "0", "5..1", "..", f"1..{10**400}"),
    "other_sizes": ("seq=1..8", "past=1,2", f"seq=1..{10**26}", "=1", "seq="),
    "settings": (
        "sms=120",
        "sms=0",
        "dram.bytes_per_s=1e400",
        "launch_s=-1",
        "nothing=1",
        "name=x",
        "=",
    ),
    "input": ("x=8x64", "x=scalar", "x=", f"x={2**62}x{2**62}", "x=0x0", "x=axb"),
    "value": ("x=1,2", "x=nan", f"x={10**400}", "x=1e400"),
    "price": ("a100=2.5", "a100=nan", "a100=inf", "a100=-1", "x=1"),
    "budgets": ("latency=+3%", "latency=inf", "memory=+1e400MB", "x=1", "launches=+0"),
    "loss": ("y", "s", "nothing"),
    "node": ("s", "Relu", "y", "%s", "MatMul"),
    "dim": ("batch", "seq", "x"),
    "crossover": ("batch", "seq"),
    "checkpoint": ("every=2", "every=0", "*", "["),
    "schedule": ("ok.sched", "loop", "none", "a" * 300),
    "modules": ("none", "none.py", "a.b", "", "..", "a" * 300, "json"),
}
TOPICS = (
    "analyze",
    "explain",
    "largest",
    "sweep",
    "diff",
    "advise",
    "opt",
    "schedule check",
    "targets",
)
TOPICS += ("profiles", "passes", "eval kernels", "eval models", "analyze", "analyze", "sweep")


@cache
def commands() -> dict[str, click.Command]:
    from gpuir.cli.main import main

    found: dict[str, click.Command] = {}
    for name in TOPICS:
        command: click.Command | None = main
        for word in name.split():
            assert isinstance(command, click.Group)
            command = command.get_command(click.Context(command), word)
        assert command is not None
        found[name] = command
    return found


def word(r: Random, param: click.Parameter) -> str:
    """A value for an option, a fair one or not."""
    known = WORDS.get(str(param.name), ())
    if known and chance(r, 0.8):
        return r.choice(known)
    if isinstance(param.type, click.Choice) and chance(r, 0.9):
        return r.choice([str(c) for c in param.type.choices])
    if isinstance(param.type, click.IntRange | click.types.IntParamType | click.FloatRange):
        return r.choice((*map(str, INTS), *map(str, HUGE), *map(repr, FLOATS), "", "x"))
    if isinstance(param.type, click.Path):
        return r.choice(PATHS)
    return r.choice((*TEXTS, *PATHS, *map(str, INTS), str(10**400)))


def lines(r: Random) -> Case:
    """Options in any combination, with any value, mostly of a small model."""
    name = r.choice(TOPICS)
    args = name.split()
    for param in commands()[name].params:
        if isinstance(param, click.Argument):
            model = ("m.gir", "m.onnx", "m.onnx") if param.name in ("model", "old", "new") else ()
            fair = {"file": ("ok.sched",), "files": ("t.csv",), "labels": ("t.csv",)}
            pool = (
                model
                or fair.get(str(param.name), ())
                or WORDS.get(str(param.name), ("a100", "eager"))
            )
            args.append(r.choice(pool) if chance(r, 0.9) else r.choice((*PATHS, *TEXTS[:20])))
            continue
        if not isinstance(param, click.Option) or not chance(
            r, 0.7 if param.name == "target" else 0.12
        ):
            continue
        flag = r.choice((*param.opts, *param.secondary_opts))
        if param.is_flag:
            args.append(flag)
        else:
            value = "a100" if param.name == "target" and chance(r, 0.7) else word(r, param)
            args += (
                [flag, value]
                if chance(r, 0.7) or not flag.startswith("--")
                else [f"{flag}={value}"]
            )
    args = [a.replace("\0", "") for a in args]  # no process is started with one
    files = SMALL | {
        "m.onnx": symbolic(),
        "t.csv": "\n".join(measured()).encode(),
        "x.toml": b"sms = 1",
    }
    return Case(args, files, {"loop": "loop"})


@cache
def symbolic() -> bytes:
    """A small ONNX model with symbolic sizes."""
    from onnx import helper

    nodes = [
        helper.make_node("Relu", ["x"], ["h"]),
        helper.make_node("Softmax", ["h"], ["y"], name="=n"),
    ]
    x = helper.make_tensor_value_info("x", 1, ["batch", "seq", 64])
    graph = helper.make_graph(nodes, "g", [x], [helper.make_empty_tensor_value_info("y")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]).SerializeToString()


def named(r: Random) -> Case:
    """A sound model whose names are hostile, in every format that people read."""
    from onnx import helper

    def name() -> str:
        if chance(r, 0.05):
            return r.choice(LONG)
        text = "".join(r.choice(TEXTS[3:22]) for _ in range(r.randint(1, 2))) or "n"
        return text.encode("utf-8", "replace").decode()[:400]

    a, b, c = (f"{name()}{i}" for i in range(3))
    nodes = [
        helper.make_node("MatMul", [a, "w"], [b], name=name()),
        helper.make_node("Softmax", [b], [c], name=name(), domain=""),
    ]
    if chance(r, 0.3):
        nodes.append(helper.make_node(name(), [c], ["z"], domain=name(), name=name()))
        c = "z"
    x = helper.make_tensor_value_info(a, 1, ["batch", 64])
    weights = [helper.make_tensor("w", 1, [64, 64], [0.0] * 4096)]
    ends = [helper.make_tensor_value_info(c, 1, ["batch", 64])]
    graph = helper.make_graph(nodes, name(), [x], ends, weights)
    opsets = [helper.make_opsetid("", 21)]
    model = helper.make_model(graph, opset_imports=opsets).SerializeToString()
    one = ["m.onnx", "--target", "a100", "--dims", "batch=2"]
    args = r.choice(
        (
            *(["analyze", *one, "--format", f] for f in FORMATS if f not in ("roofline",)),
            ["analyze", *one, "--group-by", "module", "--memory"],
            ["analyze", *one, "--format", "roofline", "-o", "o.svg"],
            [
                "sweep",
                "m.onnx",
                "--target",
                "a100",
                "--batch",
                "1,2",
                "--format",
                r.choice(("table", "csv", "json")),
            ],
            ["explain", *one, "--fusions"],
            ["opt", "m.onnx", "--dims", "batch=2", "--pipeline", "fuse,legalize"],
            [
                "diff",
                "m.onnx",
                "m.onnx",
                *one[1:],
                "--format",
                r.choice(("table", "markdown", "junit")),
            ],
            ["largest", "m.onnx", "--target", "a100", "--dim", "batch", "--max", "8"],
        )
    )
    return Case(args, {"m.onnx": model})


GENERATORS: dict[str, tuple[Generator, int]] = {  # and how often of the whole
    "onnx bytes": (onnx_bytes, 6),
    "onnx fields": (onnx_fields, 26),
    "onnx drawn": (onnx_drawn, 16),
    "onnx bombs": (onnx_bombs, 1),
    "ir text": (ir_text, 8),
    "ir typed": (ir_typed, 14),
    "schedules": (schedules, 4),
    "pipelines": (pipelines, 8),
    "targets": (targets, 4),
    "profiles": (profiles, 4),
    "reports": (reports, 5),
    "tables": (tables, 2),
    "archives": (archives, 2),
    "programs": (programs_typed, 4),
    "configs": (configs, 1),
    "command lines": (lines, 8),
    "names": (named, 3),
}


def case(seed: int, index: int, only: tuple[str, ...] = ()) -> tuple[str, Case]:
    """Input `index` of a campaign, and the generator that made it."""
    r = source(seed, index)
    name = generator(r, only)
    return name, GENERATORS[name][0](r)


def source(seed: int, index: int) -> Random:
    return Random(f"{seed} {index}")


def generator(r: Random, only: tuple[str, ...] = ()) -> str:
    """The first thing drawn."""
    names = [n for n in GENERATORS if not only or n in only]
    (name,) = r.choices(names, [GENERATORS[n][1] for n in names])
    return name


def prepare() -> None:
    """What all inputs rest on, read once before processes are forked."""
    warnings.simplefilter("ignore")
    with suppress(ImportError):
        import_module("matplotlib.font_manager")  # which looks at all fonts once: no hang of ours
    for make in (
        onnx_models,
        schemas,
        texts,
        graphs,
        passes,
        report,
        measured,
        programs,
        calls_of,
        commands,
        symbolic,
    ):
        make()
    for kind in ("gpus/*.toml", "cpus/*.toml", "profiles/*.toml"):
        specs(kind)
