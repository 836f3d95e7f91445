"""Saved programs: nothing in a file runs, what only pickle reads is refused, sizes are bounded."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin
from uuid import uuid4

import pytest

torch = pytest.importorskip("torch")

import gpuir  # noqa: E402
from gpuir.frontends.torch import archive, serialized  # noqa: E402
from gpuir.ir.errors import ModelError, UsageError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own

Parts = dict[str, bytes]
Attack = Callable[[Parts, Path], None]


class Small(torch.nn.Module):
    """A weight, a constant, a branch, and a size that depends on another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x) + torch.tensor([1.0, 2.0]).sum()
        z = torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (y,))
        return {"hidden": z, "flat": y.reshape(-1)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An honest file."""
    path = tmp_path_factory.mktemp("saved") / "model.pt2"
    batch = torch.export.Dim("batch", max=64)
    x = torch.randn(4, 16)
    torch.export.save(torch.export.export(Small(), (x,), dynamic_shapes=({0: batch},)), path)
    return path


def parts_of(path: Path) -> Parts:
    with zipfile.ZipFile(path) as file:
        return {name.partition("/")[2]: file.read(name) for name in file.namelist()}


def written(parts: Parts, path: Path, root: str = "model/") -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, data in parts.items():
            file.writestr(root + name, data)
    return path


class Payload:
    """Runs when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


def pickled(marker: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(Payload(marker), buffer)
    return buffer.getvalue()


def code(marker: Path) -> str:
    """The payload as an expression, without a comma or a quote that JSON or a name would mind."""
    return f"__import__('pathlib').Path('{marker}').touch()"


def edit(parts: Parts, part: str, change: Callable[[Any], None]) -> None:
    data = json.loads(parts[part])
    change(data)
    parts[part] = json.dumps(data).encode()


def program(change: Callable[[Any], None]) -> Callable[[Parts], None]:
    return lambda parts: edit(parts, "models/model.json", change)


def replaced(old: str, new: str) -> Callable[[Parts], None]:
    """The graph with a text in place of another, in all of its JSON strings."""

    def change(parts: Parts) -> None:
        text = parts["models/model.json"].decode()
        assert old in text
        parts["models/model.json"] = text.replace(old, json.dumps(new)[1:-1]).encode()

    return change


def named(old: str, new: str) -> Callable[[Parts], None]:
    """The graph with a name in place of another, wherever it is the whole of a JSON string."""

    def change(parts: Parts) -> None:
        text = parts["models/model.json"].decode()
        assert f'"{old}"' in text
        parts["models/model.json"] = text.replace(f'"{old}"', json.dumps(new)).encode()

    return change


def of_config(folder: str, change: Callable[[Any], None]) -> Callable[[Parts], None]:
    def first(data: Any) -> None:
        change(next(iter(data["config"].values())))

    return lambda parts: edit(parts, f"data/{folder}/model_{folder}_config.json", first)


def weights_use_pickle(parts: Parts, marker: Path) -> None:
    of_config("weights", lambda c: c.update(use_pickle=True))(parts)
    parts["data/weights/weight_0"] = pickled(marker)


def constants_use_pickle(parts: Parts, marker: Path) -> None:
    of_config("constants", lambda c: c.update(use_pickle=True))(parts)
    parts["data/constants/tensor_0"] = pickled(marker)


def an_opaque_object(parts: Parts, marker: Path) -> None:
    of_config("constants", lambda c: c.update(path_name="opaque_obj_0", use_pickle=True))(parts)
    parts["data/constants/opaque_obj_0"] = pickle.dumps(Payload(marker))


def sample_inputs(parts: Parts, marker: Path) -> None:
    parts["data/sample_inputs/model.pt"] = pickled(marker)


def legacy_weights(parts: Parts, marker: Path) -> None:
    parts["data/weights/model.pt"] = pickled(marker)


def legacy_constants(parts: Parts, marker: Path) -> None:
    parts["data/constants/model.pt"] = pickled(marker)


def a_size(parts: Parts, marker: Path) -> None:
    replaced("Mul(Integer(8), Symbol('s77', positive=True, integer=True))", code(marker))(parts)


def a_size_within_a_function(parts: Parts, marker: Path) -> None:
    old = "Mul(Integer(8), Symbol('s77', positive=True, integer=True))"
    replaced(old, f"Mul({code(marker)}, Symbol('s77', positive=True, integer=True))")(parts)


def an_inputs_name(parts: Parts, marker: Path) -> None:
    named("x", f"x={code(marker)}")(parts)


def a_nodes_name(parts: Parts, marker: Path) -> None:
    named("reshape", f"y = {code(marker)}; z")(parts)


def a_branchs_name(parts: Parts, marker: Path) -> None:
    without_a_dot = f"exec(bytes({[*code(marker).encode()]}))"
    named("true_graph_0", f"y = {without_a_dot}; z")(parts)


def a_weights_path(parts: Parts, marker: Path) -> None:
    path = f'linear.weight"); {code(marker)}; ("'
    replaced("linear.weight", path)(parts)
    text = parts["data/weights/model_weights_config.json"].decode()
    text = text.replace("linear.weight", json.dumps(path)[1:-1])
    parts["data/weights/model_weights_config.json"] = text.encode()


def guards(parts: Parts, marker: Path) -> None:
    program(lambda p: p.update(guards_code=[code(marker)]))(parts)


def an_operator_that_calls(parts: Parts, marker: Path) -> None:
    def change(p: Any) -> None:
        node = next(n for n in p["graph_module"]["graph"]["nodes"] if "reshape" in n["target"])
        node["target"] = "_operator.call"
        node["inputs"] = [
            {"name": "", "kind": 1, "arg": {"as_operator": "torch.os.system"}},
            {"name": "", "kind": 1, "arg": {"as_string": f"touch {marker}"}},
        ]

    program(change)(parts)


def an_operator_that_reads_files(parts: Parts, marker: Path) -> None:
    def change(p: Any) -> None:
        node = next(n for n in p["graph_module"]["graph"]["nodes"] if "reshape" in n["target"])
        node["target"] = "torch.ops.aten.from_file.default"
        node["inputs"] = [
            {"name": "filename", "kind": 1, "arg": {"as_string": str(marker)}},
            {"name": "shared", "kind": 1, "arg": {"as_bool": True}},
            {"name": "size", "kind": 1, "arg": {"as_int": 16}},
        ]

    program(change)(parts)


def of_tree(field: str, tree: Any) -> Callable[[Parts], None]:
    def change(p: Any) -> None:
        entry = p["graph_module"]["module_call_graph"][0]["signature"]
        version, old = json.loads(entry[field])
        entry[field] = json.dumps([version, {**old, **tree}])

    return program(change)


def a_module(marker: Path) -> str:
    """The name of one that lies in a folder where Python looks, as the current one."""
    name = f"brought_{uuid4().hex}"  # Python imports each name once
    (marker.parent / f"{name}.py").write_text(code(marker))
    return name


def a_default_dictionary(parts: Parts, marker: Path) -> None:
    context = {
        "default_factory_module": a_module(marker),
        "default_factory_name": "x",
        "dict_context": ["hidden", "flat"],
    }
    tree = {"type": "collections.defaultdict", "context": context}
    of_tree("out_spec", tree)(parts)


def an_enumeration(parts: Parts, marker: Path) -> None:
    name = {"__enum__": True, "fqn": f"{a_module(marker)}:x", "name": "x"}
    of_tree("out_spec", {"context": json.dumps([name, "flat"])})(parts)


def compiled_code(parts: Parts, marker: Path) -> None:
    parts["data/aotinductor/model/model.so"] = b"\x7fELF"
    parts["extra/x.py"] = code(marker).encode()


REFUSED: dict[Attack, str] = {  # what is said of each
    weights_use_pickle: "only pickle reads",
    constants_use_pickle: "only pickle reads",
    an_opaque_object: "only pickle reads",
    legacy_weights: "only pickle reads",
    legacy_constants: "only pickle reads",
    a_size: "is not an arithmetic expression of symbols",
    a_size_within_a_function: "is not an arithmetic expression of symbols",
    an_inputs_name: "an identifier",
    a_nodes_name: "an identifier",
    a_branchs_name: "an identifier",
    a_weights_path: "a path of names",
    an_operator_that_calls: "for example torch.ops.aten.add.Tensor",
    an_operator_that_reads_files: "acts on the machine",
}
IGNORED: tuple[Attack, ...] = (
    sample_inputs,
    guards,
    a_default_dictionary,
    an_enumeration,
    compiled_code,
)
RUN_BY_TORCH = (  # by torch.export.load itself: of others by what follows, or torch has no use
    *(weights_use_pickle, constants_use_pickle, an_opaque_object, sample_inputs),
    *(legacy_weights, legacy_constants, a_size, a_size_within_a_function, an_inputs_name),
    *(a_default_dictionary, an_enumeration),
)


@pytest.mark.slow
@pytest.mark.parametrize("attack", [*REFUSED, *IGNORED], ids=lambda f: f.__name__)
def test_nothing_in_a_file_runs(
    attack: Attack, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    marker, parts = tmp_path / "marker", parts_of(saved)
    monkeypatch.syspath_prepend(tmp_path)
    attack(parts, marker)
    path = written(parts, tmp_path / "attack.pt2")
    for train in (False, True):
        if attack in REFUSED:
            with pytest.raises(ModelError) as caught:
                gpuir.load(path, dims={"s77": 8}, train=train)
            assert REFUSED[attack] in str(caught.value)
            assert str(path) in caught.value.where
        else:
            graph = gpuir.load(path, dims={"s77": 8}, train=train)
            assert graph.inputs[0].type.shape == (8, 16)
    assert not marker.exists()
    if attack in RUN_BY_TORCH:  # or the file would be no attack
        with contextlib.suppress(Exception):
            torch.export.load(path)
        assert marker.exists()


def test_a_saved_program_is_the_live_one(saved: Path, tmp_path: Path):
    batch = torch.export.Dim("batch", max=64)
    shapes = ({0: batch},)
    live = torch.export.export(Small(), (torch.randn(4, 16),), dynamic_shapes=shapes)
    (ours, theirs) = (gpuir.load(source, dims={"s77": 8}) for source in (saved, live))
    assert [str(n) for n in ours.nodes] == [str(n) for n in theirs.nodes]
    weights = [*archive.open_program(saved).state_dict.values()]
    assert {type(w) for w in weights} == {torch._subclasses.FakeTensor}


def test_a_file_is_called_after_the_class_that_was_exported(saved: Path, tmp_path: Path):
    graph = gpuir.load(saved, dims={"s77": 8})
    assert graph.name == "Small"
    assert "Small:linear/linear" in {loc for n in graph.nodes for loc in n.locs}


@pytest.mark.parametrize("found", ["", "=1+1", "_torch"])
def test_a_file_without_a_class_is_called_after_itself(found: str, saved: Path, tmp_path: Path):
    parts = parts_of(saved)
    replaced("test_archive.Small", f"test_archive.{found}")(parts)
    path = written(parts, tmp_path / "my net.pt2")
    assert gpuir.load(path, dims={"s77": 8}).name == "my net"


def test_a_program_has_its_arguments_already():
    x = torch.randn(4, 16)
    program = torch.export.export(Small(), (x,))
    with pytest.raises(UsageError, match="which has its own arguments"):
        gpuir.analyze(program, x, "a100").graph


def test_an_operator_that_writes_in_place(tmp_path: Path):
    class Adds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x).add_(1.0)

    torch.export.save(torch.export.export(Adds(), (torch.randn(2, 4),)), tmp_path / "adds.pt2")
    graph = gpuir.load(tmp_path / "adds.pt2")
    assert [v.name for v in graph.over if v] != []
    assert graph.outputs[-1].type.shape == (2, 4)


def test_tied_weights_are_one(tmp_path: Path):
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50, bias=False)
            self.head.weight = self.rows.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rows(x))

    torch.export.save(torch.export.export(Tied(), (torch.ones(3).long(),)), tmp_path / "tied.pt2")
    assert len(gpuir.load(tmp_path / "tied.pt2").params) == 1


def test_the_format_of_old_is_refused(tmp_path: Path):
    marker = tmp_path / "marker"
    parts = {
        "version": b"8.2",
        "serialized_exported_program.json": b"{}",
        **{f"serialized_{part}.pt": pickled(marker) for part in ("state_dict", "constants")},
        "serialized_example_inputs.pt": pickled(marker),
    }
    with pytest.raises(ModelError, match=r"torch 2\.6 and before.*only pickle reads"):
        gpuir.load(written(parts, tmp_path / "old.pt2", root=""))
    assert not marker.exists()


def test_what_is_no_program(saved: Path, tmp_path: Path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "saved.pt2")
    with pytest.raises(ModelError, match="export the module itself"):
        gpuir.load(tmp_path / "saved.pt2")
    parts = parts_of(saved)
    del parts["models/model.json"]
    parts["data/aotinductor/model/model.so"] = b"\x7fELF"
    with pytest.raises(ModelError, match=r"found: +compiled code"):
        gpuir.load(written(parts, tmp_path / "compiled.pt2"))


def test_an_archive_that_unpacks_to_far_more_is_refused(saved: Path, tmp_path: Path):
    path = written(parts_of(saved), tmp_path / "bomb.pt2")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("model/data/weights/weight_9", bytes(40_000_000))
    with pytest.raises(ModelError, match="at most 100 times its") as caught:
        gpuir.load(path)
    assert caught.value.where == str(path) and "40" in caught.value.found


def test_a_graph_that_is_too_large_is_not_read(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    size = len(parts_of(saved)["models/model.json"])
    monkeypatch.setattr(archive, "READ", size - 1)
    with pytest.raises(ModelError, match=f"at most {size - 1} bytes"):
        gpuir.load(saved)


def test_a_part_that_is_there_twice_is_refused(saved: Path, tmp_path: Path):
    """Readers differ in which of two they take: torch's may run another graph than we read."""
    path = written(parts_of(saved), tmp_path / "twice.pt2")
    with pytest.warns(UserWarning), zipfile.ZipFile(path, "a") as file:
        file.writestr("model/models/model.json", "{}")
    with pytest.raises(ModelError, match="is stored twice") as caught:
        gpuir.load(path)
    assert str(caught.value.where).endswith("models/model.json")


def test_a_weight_is_no_larger_than_its_bytes(saved: Path, tmp_path: Path):
    parts = parts_of(saved)
    parts["data/weights/weight_0"] = parts["data/weights/weight_0"][:-1]
    with pytest.raises(ModelError, match=r"larger than its stored bytes[\s\S]*found: +511 bytes"):
        gpuir.load(written(parts, tmp_path / "cut.pt2"))


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("graph_module",), None),
        (("graph_module", "graph", "nodes"), {}),
        (("graph_module", "graph", "nodes", 0, "target"), "torch.ops.no_such.operator.default"),
        (("graph_module", "graph", "nodes", 0, "target"), "torch.ops.load_library.x.y"),
        (("graph_module", "graph", "nodes", 0, "inputs"), []),
        (("graph_module", "graph", "nodes", 7, "inputs"), []),
        (("graph_module", "graph", "nodes", 0, "target"), "torch.os.system"),
        (("graph_module", "graph", "nodes", 0, "target"), "torch.ops.aten.save.default"),
        (("graph_module", "graph", "nodes", 0, "target"), "torch.ops.higher_order.call_torchbind"),
        (("graph_module", "graph", "nodes", 0, "inputs", 0, "arg"), {"as_custom_obj": {}}),
        (("graph_module", "graph", "nodes", 0, "inputs", 0, "arg"), {"as_int": "3"}),
        (("graph_module", "graph", "nodes", 0, "inputs", 0, "arg"), {"as_tensor": {"name": 3}}),
        (("graph_module", "graph", "tensor_values", "x", "dtype"), 77),
        (("graph_module", "graph", "tensor_values", "x", "sizes", 0), {"as_int": -4}),
        (("graph_module", "module_call_graph"), []),
        (("graph_module", "module_call_graph", 0, "signature"), None),
        (("graph_module", "module_call_graph", 0, "signature", "in_spec"), "[1, [[[]]]]"),
        (("graph_module", "module_call_graph", 0, "signature", "in_spec"), "[" * 9000),
        (("range_constraints",), {"u9999999999": {"min_val": 0, "max_val": 1}}),
        (("range_constraints", "s77", "max_val"), "1"),
        (("verifiers",), ["no such"]),
        (("schema_version", "major"), 1),
    ],
    ids=str,
)
def test_a_graph_that_is_none_is_the_users_error(
    where: tuple[Any, ...], value: Any, saved: Path, tmp_path: Path
):
    def change(data: Any) -> None:
        for key in where[:-1]:
            data = data[key]
        data[where[-1]] = value

    parts = parts_of(saved)
    edit(parts, "models/model.json", change)
    with pytest.raises(ModelError):
        gpuir.load(written(parts, tmp_path / "broken.pt2"), dims={"s77": 8})


def test_functions_of_attention_that_do_more_than_arithmetic_are_not_run(
    monkeypatch: pytest.MonkeyPatch,
):
    from gpuir.frontends.torch.flex import answer

    def traced(body: Callable[[torch.Tensor], torch.Tensor]) -> torch.fx.GraphModule:
        return torch.fx.experimental.proxy_tensor.make_fx(body, tracing_mode="fake")(torch.ones(3))

    assert answer(traced(lambda x: x + 1), (torch.ones(3),)).tolist() == [2, 2, 2]
    assert answer(traced(lambda x: x + torch.ones(3)), (torch.ones(3),)) is None
    assert answer(traced(lambda x: x.cumsum(0)), (torch.ones(3),)) is None


def test_a_program_under_vmap_is_read(tmp_path: Path):
    class Maps(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.vmap(lambda row: row * row.sum())(x)

    live = torch.export.export(Maps(), (torch.randn(3, 4),))
    torch.export.save(live, tmp_path / "maps.pt2")
    ours, theirs = (gpuir.load(source) for source in (tmp_path / "maps.pt2", live))
    assert [str(n.op) for n in ours.nodes] == [str(n.op) for n in theirs.nodes]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Symbol('s0', positive=True, integer=True)", "s0"),
        ("Mul(Integer(2), Symbol('s0', integer=True))", "2*s0"),
        ("Add(Symbol('u0', integer=True), Integer(-1))", "u0 - 1"),
        ("FloorDiv(Symbol('s0', integer=True), Integer(2))", "(s0//2)"),
        ("Max(Integer(1), Symbol('u0', integer=True))", "Max(1, u0)"),
        ("2*s0 + 1", "2*s0 + 1"),
        ("Float('1.5', precision=53)", "1.50000000000000"),
        ("StrictLessThan(Symbol('s0', integer=True), Integer(9))", "s0 < 9"),
    ],
)
def test_sizes_are_parsed(text: str, says: str):
    assert str(serialized.size(text)) == says


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "Symbol('s0').__class__",
        "Symbol('__import__(1)')",
        "Symbol('s0', integer=exit())",
        "(lambda: 1)()",
        "[s0 for s0 in (1,)]",
        "Integer('1')",
        "Float('x')",
        "S('1')",
        "f'{s0}'",
        "NaN",
        "s0.free_symbols",
        "Mul(*s0)",
        "Pow(10, Pow(10, 10))",
        "2**2**2**2**2**2",
        "LShift(1, 1000000000000)",
        "Integer(" * 300 + "1" + ")" * 300,
        "-" * 4000 + "1",
        "1 + " * 5000 + "1",
        "(",
        "",
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_size_is_not_evaluated(text: str):
    with pytest.raises(ModelError, match="is not an arithmetic expression of symbols"):
        serialized.size(text)


@pytest.mark.parametrize(
    "text",
    [
        "FloorDiv(Pow(Add(s0, s1, s2, s3, s4, 1), 60), Add(s0, 1))",
        "PythonMod(Pow(Add(s0, s1, s2, s3, s4, 1), 128), Pow(Add(s0, s1, 1), 120))",
        f"Max({', '.join(f's{i}*s{i + 1}-{i}' for i in range(150))})",
        f"FloorDiv({'*'.join(f'(s{i}+s{i + 1})' for i in range(300))}, s1 + s2)",
    ],
    ids=lambda text: text[:20],
)
@pytest.mark.parametrize("part", ["models/model.json", "data/weights/model_weights_config.json"])
def test_sizes_that_sympy_would_not_finish_are_not_begun(
    text: str, part: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    read = serialized.size
    monkeypatch.setattr(serialized, "size", lambda given: given == text or read(given))
    parts = parts_of(saved)
    raw = json.loads(parts[part])
    raw["more"] = [{"as_expr": {"expr_str": text, "hint": None}}]
    parts[part] = json.dumps(raw).encode()
    with pytest.raises(ModelError, match="too complex"):
        gpuir.load(written(parts, tmp_path / "slow.pt2"))


def test_what_a_size_takes_is_counted():
    assert serialized.effort("Symbol('s0', integer=True)") == 0
    assert serialized.effort("Add(Mul(2, s0), 1) * 7") == 0
    assert serialized.effort("FloorDiv(Add(s0, -1), 2)") == 3**3
    assert serialized.effort("1 + Mod(FloorDiv(s0, 2), (s1 + 1)**2)") == 2**3 + (1 + 2**2) ** 3
    assert serialized.effort("s0 <") == 0


def test_every_text_of_torchs_format_has_a_rule():
    from torch._export.serde import schema

    seen: set[type] = set()
    fields: set[str] = set()

    def visit(hint: Any, field: str) -> None:
        for inner in get_args(hint)[1 if get_origin(hint) is dict else 0 :]:  # keys are looked up
            visit(inner, field)
        if hint is str:
            fields.add(field)
        if isinstance(hint, type) and hint.__module__ == schema.__name__ and hint not in seen:
            seen.add(hint)
            for name, inner in serialized.hints(hint).items() if is_dataclass(hint) else ():
                visit(inner, name)

    visit(schema.ExportedProgram, "")
    visit(schema.PayloadConfig, "")
    read_otherwise = {*serialized.DROPPED, "metadata", "type", "field_names"}
    assert fields <= {*serialized.TEXTS} | read_otherwise
