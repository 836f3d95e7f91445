"""Recommendation models as they were trained on one GPU, as programs that gpuir reads (Lin and
others, HiPC 2022 and TPDS 2024; code at github.com/owensgroup/ml_perf_model).

What the measured program does, and where that is known from:

- sizes: dlrm_benchmark.sh there. Indices are drawn evenly (`--data-generation=random`), but for
  DLRM_MLPerf, which reads Criteo's. No table of that model that fits the GPU is stated: its rows
  are assumed, and say only how much a cache may keep.
- tables: `--batched-emb`: one kernel looks all tables up, one changes the rows that were looked up
  where they are, and no table has a gradient (LookupFunction, LookupFunctionBackward in traces).
- an iteration copies its batch from pinned memory, runs forward, copies the loss back and so waits
  for it, sets each gradient to zero, runs backward, and adds each gradient to its param by a kernel
  of its own (dlrm_s_pytorch.py of github.com/facebookresearch/dlrm; torch.optim before PyTorch 1.12
  does not batch tensors; the traces have `aten::to`, `AccumulateGrad` with an addition, and an
  optimizer's step that is one op).
- clocks: init_vars.sh there locks them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import gpuir
from gpuir.ir.build import begin, prune
from gpuir.ir.graph import Graph, Node, Value
from gpuir.ir.phases import in_phase, phase_of
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t


@dataclass(frozen=True)
class Recommender:
    """Widths of the bottom and the top perceptron, tables of embeddings, numbers in a row, rows
    that a lookup adds up, rows of a table."""

    bottom: tuple[int, ...]
    top: tuple[int, ...]
    tables: int
    width: int
    lookups: int
    rows: int


MODELS = {
    "DLRM_default": Recommender((512, 512, 64), (1024, 1024, 1024, 1), 8, 64, 100, 1_000_000),
    "DLRM_MLPerf": Recommender((13, 512, 256, 128), (1024, 1024, 512, 256, 1), 26, 128, 1, 10_000),
    "DLRM_DDP": Recommender((128, 128, 128, 128), (512, 512, 512, 256, 1), 8, 128, 10, 80_000),
}
ASSUMED = {"DLRM_MLPerf": "10,000 rows a table: what is measured states none that fits the GPU"}


def program(model: Recommender, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """The model with its loss, and arguments of that batch. All tables are looked up by one op."""
    import torch
    from torch import nn

    def perceptron(widths: tuple[int, ...], last: nn.Module) -> nn.Module:
        layers: list[nn.Module] = []
        for a, b in pairwise(widths):
            layers += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*layers[:-1], last)

    class Dlrm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pairs = model.tables * (model.tables + 1) // 2
            self.bottom = perceptron(model.bottom, nn.ReLU())
            self.top = perceptron((model.width + pairs, *model.top), nn.Sigmoid())
            cells = model.tables * model.rows, model.width
            self.tables = nn.EmbeddingBag(*cells, mode="sum", device="meta")
            both = model.tables + 1
            self.pairs: torch.Tensor
            self.register_buffer("pairs", torch.tril_indices(both, both, -1))
            self.loss = nn.BCELoss()

        def forward(self, dense: Any, chosen: Any, target: Any) -> Any:
            x = self.bottom(dense)
            found = self.tables(chosen).view(-1, model.tables, model.width)
            both = torch.cat([x.unsqueeze(1), found], dim=1)
            dots = torch.bmm(both, both.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
            return self.loss(self.top(torch.cat([x, dots], dim=1)), target)

    chosen = torch.zeros(batch * model.tables, model.lookups, dtype=torch.long)
    return Dlrm(), (torch.randn(batch, model.bottom[0]), chosen, torch.rand(batch, 1))


def step(model: Recommender, batch: int) -> Graph:
    """A training step as a graph."""
    module, args = program(model, batch)
    g = in_place(gpuir.load(module, args=args, train=True, warn=lambda _: None))
    g = cleared(gpuir.pipeline("accumulate").run(g))
    return gpuir.pipeline('optimizer{kind="sgd",foreach=false}').run(g)


def in_place(g: Graph) -> Graph:
    """The gradient of the tables replaced by one kernel that changes the rows that were looked up:
    as far as its bytes go, a difference of those rows and their bags' gradients."""
    sums = (n.op for n in g.nodes if isinstance(n.op, t.Routine) and n.op.fn == "part_sums")
    dy = next(sums).args[0]
    (chosen,) = (v for v in g.inputs if not v.type.dtype.is_float)
    bags, width = dy.type.shape
    b = begin(g, g.level)
    rows = b.param("rows", TensorType((bags, chosen.type.shape[1], width), dy.type.dtype))
    for node in g.nodes:
        b.put(node)
    b.locs = in_phase((f"{g.name}:tables/update",), "backward")
    new = b(t.Map("sub", (rows, b(t.Reshape(dy, (bags, 1, width))))))
    outputs = {v: None for v in g.outputs if v.name != "tables.weight.grad"} | {new: rows}
    return prune(b.finish(outputs, outputs.values()))


def cleared(g: Graph) -> Graph:
    """With a kernel for each gradient that sets it to zero, before backward (and reads it, which a
    fill does not: the gradients of perceptrons are small)."""
    b = begin(g, g.level)
    zeros: list[Value] = []
    for i, node in enumerate(g.nodes):
        if phase_of(node) and not any(phase_of(n) for n in g.nodes[:i]):
            b.locs = (f"{g.name}:zero_grad",)
            for w in (v for v in g.over if v is not None and v.name.endswith(".grad")):
                zeros.append(b(t.Map("mul", (w,), (0.0,)), f"{w.name}.zero"))
                b.roles[zeros[-1].name] = "gradient"
        b.put(node)
    over = (*g.over, *(None,) * (len(g.outputs) - len(g.over) + len(zeros)))
    return b.finish((*g.outputs, *zeros), over)


def spans(g: Graph) -> Iterator[Graph]:
    """The parts of an iteration that begin on an idle device: up to the loss, which the host waits
    for, and what follows."""
    is_first = [phase_of(n) is None and not is_clearing(n) for n in g.nodes]
    for wanted in (True, False):
        nodes = (n for n, first in zip(g.nodes, is_first, strict=True) if first == wanted)
        yield replace(g, nodes=tuple(nodes))


def is_clearing(node: Node) -> bool:
    return any(loc.endswith(":zero_grad") for loc in node.locs)
