"""Sparse tensors are what stores them, and an opaque operator reads all that it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import gpuir  # noqa: E402
from gpuir.cost.reading import work_of  # noqa: E402
from gpuir.ops import kernel as k  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own: sparse layouts are in beta

SIZE = 64
ROWS = torch.randn(SIZE, 8)
DENSE = torch.where(torch.rand(SIZE, SIZE, generator=torch.Generator().manual_seed(2)) < 0.1, 1, 0)
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((8, 8)),
    "bsc": lambda x: x.to_sparse_bsc((4, 16)),
}


def parts(x: Any) -> Iterator[Any]:
    """What stores a tensor, by torch's own accessors."""
    if x.layout == torch.strided:
        yield x
        return
    names = {
        torch.sparse_coo: ("_indices", "_values"),
        torch.sparse_csr: ("crow_indices", "col_indices", "values"),
        torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
        torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
        torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    }
    yield from (getattr(x, name)() for name in names[x.layout])


def nbytes(*tensors: Any) -> int:
    return sum(p.numel() * p.element_size() for x in tensors for p in parts(x))


class Call(torch.nn.Module):
    """A function of what is held, and of what is given."""

    def __init__(self, fn: Callable[..., Any], held: Any = None, how: str = "") -> None:
        super().__init__()
        self.fn, self.how = fn, how
        if how == "buffer":
            self.register_buffer("w", held)
        elif how == "param":
            self.w = torch.nn.Parameter(held, requires_grad=False)

    def forward(self, *args: Any) -> Any:
        return self.fn(self.w, *args) if self.how else self.fn(*args)


def analyzed(fn: Callable[..., Any], *args: Any, held: Any = None, how: str = "") -> gpuir.Graph:
    return gpuir.analyze(Call(fn, held, how).eval(), args, target="a100").graph


def moved(graph: gpuir.Graph) -> list[float]:
    """Bytes of each opaque kernel, read and written."""
    ops = [n.op for n in graph.nodes if isinstance(n.op, k.Opaque)]
    return [sum(float(o.nbytes) for o in work_of(op).operands) for op in ops]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", ["", "buffer", "param"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_reads_what_stores_its_operands(layout: str, how: str, dtype: Any):
    s, x = LAYOUTS[layout](DENSE.to(dtype)), ROWS.to(dtype)
    args = (x,) if how else (s, x)
    graph = analyzed(lambda s, x: s @ x, *args, held=s, how=how)
    assert moved(graph) == [nbytes(s, x) + nbytes(s.to_dense() @ x)]
    held = sum(v.type.nbytes for v in (graph.params if how else graph.inputs[:-1]))
    assert held == nbytes(s)


def test_non_zeros_cost_bytes_and_time():
    """A product of 2e6 numbers reads their 40 MB, whatever the shape of the matrix is."""

    def product(i: Any, v: Any, x: Any) -> Any:
        return torch.sparse.mm(torch.sparse_coo_tensor(i, v, (50000, 50000)), x)

    found: list[tuple[float, float]] = []
    for many in (1000, 2_000_000):
        args = torch.zeros(2, many, dtype=torch.long), torch.zeros(many), torch.zeros(50000, 16)
        graph = analyzed(product, *args)
        (node,) = (n for n in graph.nodes if isinstance(n.op, k.Opaque))
        assert node.cost is not None
        found.append((moved(graph)[0], node.cost.time_s))
    assert found[0][0] == 1000 * 20 + 6.4e6
    assert found[1][0] == 2e6 * 20 + 6.4e6
    assert found[1][1] > 46.4e6 / 1.555e12 > 4 * found[0][1]


def operators() -> dict[str, tuple[Callable[..., Any], list[str]]]:
    return {
        "sum": (lambda s: torch.sparse.sum(s, 0).to_dense(), ["coo"]),
        "softmax": (lambda s: torch.sparse.softmax(s, 1).to_dense(), ["coo"]),
        "to dense": (lambda s: s.to_dense(), [*LAYOUTS]),
        "addmm": (lambda s: torch.sparse.addmm(ROWS, s, ROWS), ["coo"]),
        "mv": (lambda s: torch.mv(s, ROWS[:, 0]), ["coo", "csr"]),
        "relu": (lambda s: torch.relu(s).to_dense(), ["coo", "csr"]),
        "times": (lambda s: (s * 2.0).to_dense(), ["coo"]),
        "turned": (lambda s: s.t() @ ROWS, ["coo", "csr"]),
        "of two": (lambda s: torch.sparse.mm(s, s).to_dense(), ["coo"]),
        "joined": (lambda s: torch.cat([s, s]).to_dense(), ["coo"]),
        "linear": (lambda s: torch.nn.functional.linear(ROWS.t(), s), ["csr"]),
    }


@pytest.mark.parametrize("name", operators())
def test_every_operator_reads_what_stores_its_operand(name: str):
    fn, layouts = operators()[name]
    for layout in layouts:
        s = LAYOUTS[layout](DENSE.float())
        graph = analyzed(fn, s)
        bytes_ = moved(graph)
        assert bytes_ and bytes_[0] >= nbytes(s), layout
        assert not [n.op.name for n in graph.nodes if n.op.name == "k.gemm"], layout


@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_batches(kind: str):
    two = torch.stack([DENSE, torch.roll(DENSE, 1, 0)]).float()
    s = LAYOUTS[kind](two)
    graph = analyzed(lambda s: s.to_dense(), s)
    assert moved(graph) == [nbytes(s) + nbytes(two)]


def test_hybrid_and_parts():
    s = torch.rand(8, 4, 4).to_sparse(1)  # rows of dense numbers
    assert moved(analyzed(lambda s: s.to_dense(), s)) == [nbytes(s) + 8 * 16 * 4]
    # what stores a tensor is at hand: no launch makes it, and none takes it apart
    s = DENSE.float().to_sparse()
    graph = analyzed(
        lambda i, v: torch.sparse_coo_tensor(i, v, (SIZE, SIZE))._values() * 2,
        *(s._indices(), s._values()),
    )
    assert [n.op.name for n in graph.nodes] == ["k.map"]
    assert len(analyzed(lambda s: torch.sparse.softmax(s, 1), s).outputs) == 2


def test_values_that_torch_traces_as_none_are_refused():
    s = DENSE.float().to_sparse()
    with pytest.raises(gpuir.GpuirError, match="traces a sparse tensor as one that stores nothing"):
        analyzed(lambda s: s.coalesce().values().sum(), s)


def test_dense_made_sparse_stores_all_that_it_may():
    graph = analyzed(lambda x, y: x.to_sparse() @ y, DENSE.float(), ROWS)
    made, product = moved(graph)
    assert made == SIZE * SIZE * 4 + SIZE * SIZE * 20  # reads all, writes two places and a number
    assert product == SIZE * SIZE * 20 + 2 * nbytes(ROWS)
    assert any("4096 numbers are stored: all" in note for note in graph.assumed)


@pytest.mark.slow
def test_training_beside_a_sparse_buffer():
    class Net(torch.nn.Module):
        def __init__(self, held: Any) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)
            self.register_buffer("w", held)

        def forward(self, x: Any) -> Any:
            return (self.w @ self.layer(x)).sum()

    s = DENSE.float().to_sparse()
    graph = gpuir.analyze(Net(s), (ROWS,), target="a100", train=True).graph
    bytes_ = moved(graph)
    assert len(bytes_) >= 2 and bytes_[0] >= nbytes(s, ROWS)
    held = [v for v in graph.params if v.name.startswith(("w.", "layer."))]
    assert sum(v.type.nbytes for v in held) == nbytes(s) + (64 + 8) * 4
    for layout in ("csr", "bsr"):
        with pytest.raises(gpuir.GpuirError, match="backward pass of the sparse tensor 'w'") as e:
            gpuir.analyze(
                Net(LAYOUTS[layout](DENSE.float())), (ROWS,), target="a100", train=True
            ).graph
        assert "x.detach().to_sparse_coo()" in str(e.value)
    again = LAYOUTS["csr"](DENSE.float()).detach().to_sparse_coo()
    assert moved(gpuir.analyze(Net(again), (ROWS,), target="a100", train=True).graph) == bytes_


def test_saved_programs_keep_the_layout(tmp_path: Any):
    """Which torch's own reader forgets: what made a sparse tensor was lost, an input was dense."""
    s, path = DENSE.float().to_sparse(), tmp_path / "m.pt2"

    def product(i: Any, v: Any, x: Any) -> Any:
        return torch.sparse.mm(torch.sparse_coo_tensor(i, v, (SIZE, SIZE)), x)

    args = (s._indices(), s._values(), ROWS)
    torch.export.save(torch.export.export(Call(product).eval(), args), path)
    assert moved(gpuir.analyze(path, target="a100").graph) == [nbytes(s) + 2 * nbytes(ROWS)]
    torch.export.save(torch.export.export(Call(lambda s, x: s @ x).eval(), (s, ROWS)), path)
    with pytest.raises(gpuir.GpuirError, match="how many numbers the sparse input"):
        gpuir.load(path)


def test_strict_refuses_it():
    s = DENSE.float().to_sparse()
    with pytest.raises(gpuir.GpuirError, match=r"no converter for .*, of sparse tensors"):
        gpuir.load(Call(lambda s, x: s @ x).eval(), args=(s, ROWS), strict=True)


# ---------------------------------------------------------------------------- custom operators

LIBRARY = torch.library.Library("gpuir_opaque", "DEF")


def defined(schema: str, fake: Callable[..., Any]) -> Any:
    name = LIBRARY.define(schema)
    LIBRARY.impl(name, fake, "CPU")
    torch.library.register_fake(f"gpuir_opaque::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.gpuir_opaque, name)


OPERATORS = {
    "list": defined("listed(Tensor[] xs) -> Tensor", lambda xs: torch.empty(7)),
    "options": defined("options(Tensor?[] xs) -> Tensor", lambda xs: torch.empty(7)),
    "dict": defined("named(Dict(str, Tensor) xs) -> Tensor", lambda xs: torch.empty(7)),
    "keyword": defined(
        "kw(Tensor x, Tensor? y, *, Tensor[] xs, int n=3) -> (Tensor, Tensor[])",
        lambda x, y, *, xs, n=3: (torch.empty(7), [torch.empty(5), torch.empty(3)]),
    ),
    "writing": defined("writing(Tensor(a!) x, Tensor[] xs) -> ()", lambda x, xs: None),
}
DTYPES = (torch.float32, torch.float16, torch.int64, torch.int8, torch.bool)


@st.composite
def operands(draw: st.DrawFn) -> list[Any]:
    """Tensors of some shapes and dtypes, some of them sparse."""
    made: list[Any] = []
    for _ in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.integers(1, 40), max_size=3))
        x = torch.ones(shape, dtype=draw(st.sampled_from(DTYPES)))
        if draw(st.integers(0, 4)) == 0:
            layout = draw(st.sampled_from(("coo", "csr", "csc")))
            x = LAYOUTS[layout](torch.ones(8, draw(st.integers(1, 30))))
        made.append(x)
    return made


@pytest.mark.slow
@given(xs=operands(), name=st.sampled_from(list(OPERATORS)), held=st.booleans(), data=st.data())
def test_an_opaque_operator_reads_all_tensors_it_is_given(
    xs: list[Any], name: str, held: bool, data: st.DataObject
):
    """The law: at least their bytes, in lists, in dictionaries, optional, by keyword, written over;
    inputs, or params."""
    if name in ("keyword", "writing", "dict") and any(x.layout != torch.strided for x in xs):
        xs = [x if x.layout == torch.strided else torch.ones(4) for x in xs]
    op = OPERATORS[name]

    def called(ys: list[Any]) -> Any:
        match name:
            case "options":
                return op([None, *ys, None])
            case "dict":
                return op({str(i): y for i, y in enumerate(ys)})
            case "keyword":
                y, more = op(ys[0], ys[-1], xs=ys)
                return y, more[1]
            case "writing":
                x = ys[0] + 0 if ys[0].dtype != torch.bool else ys[0].logical_not()
                op(x, ys[1:])
                return x
            case _:
                return op(ys)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if held:
                for i, x in enumerate(xs):
                    self.register_buffer(f"b{i}", x)

        def forward(self, *args: Any) -> Any:
            return called([getattr(self, f"b{i}") for i in range(len(xs))] if held else [*args])

    profile = data.draw(st.sampled_from(["eager", "compiled"]))
    args = (torch.ones(1),) if held else tuple(xs)
    graph = gpuir.analyze(Net().eval(), args, target="a100", profile=profile).graph
    (node,) = (n for n in graph.nodes if isinstance(n.op, k.Opaque))
    read = [o for o in work_of(node.op).operands if o.staging != "written"]
    assert math.fsum(float(o.nbytes) for o in read) >= nbytes(*xs)
    assert node.cost is not None
    assert node.cost.time_s >= nbytes(*xs) / 10e12  # more than any memory of it gives a second


@pytest.mark.parametrize("profile", ["eager", "compiled", "ideal"])
def test_a_library_writes_results_that_nobody_reads(profile: str):
    """The sort, topk and qr of PyTorch, and operators of which nothing is known, store them all."""
    x = torch.empty(64, 96)
    calls: dict[Callable[..., Any], float] = {
        lambda x: OPERATORS["keyword"](x, None, xs=[x])[0]: nbytes(x) + 4 * (7 + 5 + 3),
        lambda x: OPERATORS["keyword"](x, None, xs=[x])[1][1]: nbytes(x) + 4 * (7 + 5 + 3),
        lambda x: torch.sort(x).values: 2 * nbytes(x) + 8 * 64 * 96,
        lambda x: torch.argsort(x): 2 * nbytes(x) + 8 * 64 * 96,
        lambda x: torch.topk(x, 8).values: nbytes(x) + 64 * 8 * (4 + 8),
        lambda x: torch.linalg.qr(x)[1]: 2 * nbytes(x) + 4 * 64 * 64,
    }
    for fn, least in calls.items():
        graph = gpuir.analyze(Call(fn).eval(), (x,), target="a100", profile=profile).graph
        assert gpuir.analyze(graph).bytes == least


# ---------------------------------------------------------------------------- nonzero


def test_where_of_one_argument_is_nonzero():
    x = torch.empty(64, 16)
    forms: list[Callable[..., Any]] = [
        lambda x: torch.where(x > 0),
        lambda x: torch.nonzero(x > 0, as_tuple=True),
        lambda x: torch.where(x),
    ]
    found: list[list[Any]] = []
    for fn in forms:
        program = torch.export.export(Call(lambda x, fn=fn: x[fn(x)].sum()).eval(), (x,))
        graph = gpuir.load(program, dims={"u0": 512}, strict=True)
        (op,) = (n.op for n in graph.nodes if n.op.name == "t.routine")
        found.append([op.fn, op.result_types, op.work])
    assert found[0] == found[1] and found[2][0] == "nonzero"
    program = torch.export.export(Call(lambda x: torch.where(x)[0]).eval(), (torch.tensor(1.0),))
    graph = gpuir.load(program, dims={"u0": 1}, strict=True)
    assert graph.outputs[0].type.shape == (1,)
