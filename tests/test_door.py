"""Public functions refuse what they cannot use: whatever is given, a GpuirError with what was
expected or how to mend it, and never another exception."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from tuned_kernels import EXTENTS

import gpuir
from gpuir.ir.door import named, real, takes, whole
from gpuir.ir.errors import UsageError
from gpuir.tune.choices import choices, choices_of
from gpuir.tune.kernel_tuner import allows, best, parameters, strategy
from gpuir.tune.kernels import KINDS, costed, nest, parameters_of
from gpuir.tune.optuna import sampler
from gpuir.tune.published import TEMPLATES
from gpuir.tune.triton import prune, pruner, to_configs

NAN, INF = float("nan"), float("inf")
STRANGE: list[Any] = [
    *(None, -4, 0, 1, 1.5, NAN, INF, 10**30, 10**400, True, 3 + 2j, np.float32(8), np.int64(8)),
    *("8", "", b"x", "no such", [], [1, 2], [[1], [2, 3]], {"a": 1}, {}, {0: 1}, {"m": "x"}),
    *((), (0,), (3, 4, 5, 6), ("3",), (("m", "x"),), (("m", -1),), (("m", NAN),), ("m", 16)),
    *(object(), np.array([1, 2.5]), np.array([True]), np.zeros((2, 2)), np.array(["a"])),
]
TEXT = """graph @mlp {
  in %x: f16[8, 64]
  param %w: f16[64, 128]
  %y: f16[8, 128] = t.matmul(%x, %w) at "m:a"
  out %y
}
"""
G = gpuir.load_text(TEXT)
COSTED = gpuir.analyze(G, "a100").graph
TILES = gpuir.extract(COSTED)
KERNEL = gpuir.kernel("gemm", m=64, n=64, k=64, target="a100")
TILE = gpuir.Tile((("m", 16), ("n", 64), ("k", 32)))
FOUND = choices(KERNEL, "a100")
LAUNCH = {"y": 64, "x": 64, "i": 3, "j": 3}
# How each function is called where nothing is strange.
GOOD: dict[Callable[..., Any], dict[str, Any]] = {
    gpuir.analyze: {"model": G, "target": "a100"},
    gpuir.lower: {"graph": G},
    gpuir.explain: {"graph": COSTED, "name": "y"},
    gpuir.simulate_ranks: {"graph": G, "cluster": "dgx-a100", "parallel": gpuir.Parallel(dp=2)},
    gpuir.load: {"model": "none.gir"},
    gpuir.program: {"model": "none.gir"},
    gpuir.load_text: {"text": TEXT},
    gpuir.pipeline: {"text": "canonicalize"},
    gpuir.apply: {"g": gpuir.strip(COSTED), "schedule": TILES},
    gpuir.extract: {"g": COSTED},
    gpuir.strip: {"g": COSTED},
    gpuir.memory: {"graph": COSTED},
    gpuir.timeline: {"graph": COSTED, "profile": gpuir.load_profile("eager")},
    gpuir.load_cluster: {"name": "dgx-a100"},
    gpuir.collective: {"kind": "all_reduce", "nbytes": 1024, "cluster": "dgx-a100"},
    gpuir.load_host: {"name": "reference"},
    gpuir.load_profile: {"name": "eager"},
    gpuir.load_target: {"name": "a100"},
    gpuir.parse: {"text": TEXT},
    gpuir.parse_schedule: {"text": gpuir.show(TILES)},
    gpuir.show: {"thing": G},
    gpuir.kernel: {"name": "gemm", "m": 8, "n": 8, "k": 8},
    gpuir.search: {"kernel": KERNEL},
    gpuir.candidates: {"kernel": KERNEL},
    gpuir.heuristics: {"kernel": KERNEL},
    gpuir.predict: {"kernel": KERNEL},
    costed: {"k": KERNEL, "target": "a100"},
    nest: {
        "name": "f", "dims": {"y": 64, "x": 64, "i": 3}, "reads": [("y+i", "x")],
        "writes": [("y", "x")], "reduced": ["i"],
    },
    choices: {"kernel": KERNEL, "target": "a100"},
    choices_of: {
        "template": TEMPLATES["kernel_tuner.convolution"], "launch": LAUNCH, "target": "a100",
    },
    pruner: {"template": "matmul", "target": "a100"},
    prune: {"configs": [], "args": {}, "template": "matmul", "target": "a100"},
    to_configs: {"kernel": KERNEL},
    sampler: {"found": FOUND},
    parameters: {"found": FOUND},
    allows: {"found": FOUND},
    strategy: {"found": FOUND},
    best: {"results": [FOUND.values(0) | {"time": 1.0}], "found": FOUND},
}  # fmt: skip


def refused(call: Callable[..., Any], *args: Any, **given: Any) -> None:
    """The call works, or is refused with more than what is wrong."""
    try:
        call(*args, **given)
    except gpuir.GpuirError as error:
        assert error.expected or error.fix or error.found, str(error)
        assert not isinstance(error, gpuir.ir.errors.VerifyError), str(error)  # that is our bug


def of(function: Callable[..., Any]) -> list[str]:
    kinds = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    known = inspect.signature(function).parameters.values()
    more = gpuir.LoadOptions.__annotations__ if function in (gpuir.load, gpuir.analyze) else ()
    return [*(p.name for p in known if p.kind not in kinds), *more]


def test_every_public_function_is_tried():
    functions = {getattr(gpuir, n) for n in gpuir.__all__ if inspect.isfunction(getattr(gpuir, n))}
    left = {f.__name__ for f in functions - set(GOOD) if inspect.signature(f).parameters}
    assert not left


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", GOOD, ids=lambda f: f.__name__)
def test_strange_values_are_refused(function: Callable[..., Any]):
    for name in of(function):
        for value in STRANGE:
            refused(function, **GOOD[function] | {name: value})


@pytest.mark.parametrize("target", ["a100", "mi300x"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_of_strange_extents(kind: str, target: str):
    for group in parameters_of(KINDS[kind]):
        for name in (*group, "dtype"):
            for value in STRANGE:
                given = {"target": target} | EXTENTS[kind] | {name: value}
                try:
                    found = gpuir.kernel(kind, **given)
                except UsageError as error:
                    assert error.fix
                else:
                    assert found.cost is None or 0 < found.time_s < INF


@pytest.mark.parametrize("kind", KINDS)
def test_an_extent_of_0_is_an_empty_launch(kind: str):
    usual = gpuir.kernel(kind, target="a100", **EXTENTS[kind])
    for name in EXTENTS[kind]:
        empty = gpuir.kernel(kind, target="a100", **EXTENTS[kind] | {name: 0})
        assert empty.time_s < max(1.3 * usual.time_s, 6e-6)
        assert empty.work.flops == 0 == empty.work.products
        sizes = np.array([0.0, 4.0]) if name not in ("heads", "channels", "filters") else None
        if sizes is None or name in ("window", "topk", "experts", "columns"):
            continue
        many = gpuir.kernel(kind, target="a100", **EXTENTS[kind] | {name: sizes})
        times = gpuir.predict(many).time_s
        assert times[0] < max(1.3 * times[1], 6e-6) and np.isfinite(times).all()


@pytest.mark.parametrize("value", [-4, NAN, "8", INF, 1.5, None, True, [[1], [2, 3]]])
def test_what_is_no_extent_says_so(value: Any):
    with pytest.raises(UsageError, match=r"gpuir.kernel\('gemm'\): m is not a whole number") as e:
        gpuir.kernel("gemm", m=value, n=8, k=8)
    assert "m=128" in e.value.fix and repr(value)[:20] in e.value.found


def test_lists_are_many_kernels():
    one = gpuir.kernel("gemm", m=[64, 128], n=64, k=64, target="a100")
    assert gpuir.predict(one).time_s.shape == (2,)
    with pytest.raises(UsageError, match="different shapes"):
        gpuir.kernel("gemm", m=[64, 128], n=[64, 128, 256], k=64)


@pytest.mark.parametrize("tries", [-1, 0, "8", NAN, 1.5])
def test_tries_of_a_search(tries: Any):
    with pytest.raises(UsageError, match="search: tries is not a whole number of 1 or more"):
        gpuir.search(KERNEL, tries=tries)
    assert gpuir.search(KERNEL, tries=3).tried == 3


@pytest.mark.parametrize("record", [gpuir.Tile, gpuir.Tiles, gpuir.Schedule, gpuir.Parallel])
def test_records_of_strange_fields(record: type[Any]):
    usual: dict[type[Any], dict[str, Any]] = {
        gpuir.Tile: {"dims": TILE.dims},
        gpuir.Tiles: {"dims": {"m": 16.0, "n": 64.0, "k": 32.0}},
        gpuir.Schedule: {"name": "mlp", "target": "a100", "tiles": TILES.tiles},
        gpuir.Parallel: {},
    }
    uses: dict[type[Any], list[Callable[[Any], Any]]] = {
        gpuir.Tile: [
            lambda x: gpuir.kernel("gemm", m=64, n=64, k=64, target="a100", tile=x),
            lambda x: gpuir.Observed(gpuir.load_target("a100")).observe(KERNEL, x, 1e-5),
            lambda x: gpuir.analyze(G, "a100", schedule=replace(TILES, tiles=((("y",), x),))).graph,
        ],
        gpuir.Tiles: [lambda x: gpuir.predict(KERNEL, x).reasons],
        gpuir.Schedule: [
            lambda x: gpuir.analyze(G, "a100", schedule=x).graph,
            lambda x: gpuir.apply(gpuir.strip(COSTED), x),
            gpuir.show,
        ],
        gpuir.Parallel: [lambda x: gpuir.simulate_ranks(G, "dgx-a100", x).step],
    }
    for field in fields(record):
        for value in STRANGE:
            for use in uses[record]:
                given = usual[record] | {field.name: value}
                refused(lambda given=given, use=use: use(record(**given)))


@pytest.mark.parametrize("value", STRANGE, ids=range(len(STRANGE)))
def test_methods_of_strange_values(value: Any):
    model = gpuir.Observed(gpuir.load_target("a100"))
    refused(lambda: gpuir.Observed(value).observe(KERNEL, TILE, 1e-5))
    refused(model.observe, value, TILE, 1e-5)
    refused(model.observe, KERNEL, value, 1e-5)
    refused(model.observe, KERNEL, TILE, value)
    refused(model.predict, value)
    refused(model.predict, KERNEL, value)
    refused(lambda: model.learn(value))
    refused(lambda: gpuir.Pipeline(value).run(G))
    refused(gpuir.pipeline("canonicalize").run, value)
    refused(gpuir.load_cluster("dgx-a100").part, 0, value)
    refused(gpuir.load_cluster("dgx-a100").with_nodes, value)


def test_a_graph_that_is_not_as_far_says_what_to_do():
    with pytest.raises(UsageError, match="needs a graph of level costed") as error:
        gpuir.timeline(G, gpuir.load_profile("ort"))
    assert "gpuir.analyze(" in error.value.fix
    assert gpuir.analyze(G, "a100").latency_s > 0  # as the fix says


def test_a_schedule_in_memory_is_used():
    tiles = ((("y",), gpuir.Tile((("m", 16), ("n", 64), ("k", 32)), 2, 4)),)
    found = gpuir.analyze(G, "a100", schedule=replace(TILES, tiles=tiles)).graph
    assert gpuir.extract(found).tiles[0][1] == tiles[0][1]
    with pytest.raises(UsageError, match="for another target"):
        gpuir.analyze(G, "a100", schedule=replace(TILES, target="t4")).graph
    with pytest.raises(UsageError, match="has no kernel %q"):
        gpuir.analyze(G, "a100", schedule=replace(TILES, tiles=((("q",), TILE),))).graph


@pytest.mark.parametrize("math", ["tf32", gpuir.ir.types.tf32])
def test_tf32_can_be_asked_for(math: Any):
    both = [
        gpuir.kernel("gemm", m=4096, n=4096, k=4096, target="h100-sxm", **given)
        for given in ({"dtype": math}, {"dtype": "f32", "math": math})
    ]
    plain = gpuir.kernel("gemm", m=4096, n=4096, k=4096, dtype="f32", target="h100-sxm")
    assert both[0].time_s == both[1].time_s < plain.time_s / 4
    for kind, given in (("gemm", {"dtype": "f16", "math": math}), ("rows", {"dtype": math})):
        with pytest.raises(UsageError) as error:
            gpuir.kernel(kind, **EXTENTS[kind] | given)
        assert "f32" in str(error.value)


def test_a_door_of_one_s_own():
    @takes(n=whole(1, 9), x=real(), by=named(whole()))
    def f(n: int, x: float = 1.0, by: dict[str, int] | None = None, **more: int) -> float:
        return n * x

    assert f(3, 2.0) == 6.0 == f(np.int64(3), np.float64(2)) and f(1, by=None) == 1.0
    for given in ({"n": 0}, {"n": 10}, {"n": "3"}, {"n": 1, "x": -1.0}, {"n": 1, "by": {"a": -1}}):
        with pytest.raises(UsageError, match="f: ") as error:
            f(**given)
        assert error.value.fix
    with pytest.raises(TypeError):
        f()
