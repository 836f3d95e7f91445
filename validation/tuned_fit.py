"""The fit of `cost/weights/generated1.json`: factors and the network of generated kernels.

usage: python -m validation.tuned_fit FILES... -o generated1.json   (torch)

Sweeps say how long each configuration took: the lanes' factors are fitted to their logarithms, the
fast ones weighing most, and to the regret of what comes out first. Winners say only that nothing in
their space was faster: the factors of products are fitted to how few configurations are predicted
faster, and to the library's kernels, which the fastest of a space should come `SLOWER` close to.
Then the network is, to the same ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpuir.cost import generated
from gpuir.cost.generated import FACTORS, Fitted, lanes, matrix, shipped, stands_for
from gpuir.cost.learned import Net
from gpuir.cost.sheet import Factor, Sheet
from gpuir.cost.tile import predict
from gpuir.cost.work import Work
from gpuir.fit.columns import Floats
from gpuir.fit.learn import arithmetic, load_torch
from gpuir.targets.load import load_target
from gpuir.targets.target import Target
from gpuir.tune.kernels import kernel
from gpuir.tune.published import TEMPLATES
from validation.tuned import NAMES, Problem, read

SLOWER = 1.15  # assumed: the time of the best generated product over that of the library's
ROWS = 1500  # configurations of a sweep, besides the 250 fastest
PROBLEMS, CONFIGS = 6, 128  # of a table's kernel and GPU, drawn by seed
UNITS = 12

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Line:
    """Factors as unbounded numbers: the logit of where their logarithm is between its bounds."""

    torch: Any
    factors: Sequence[Factor]

    def _ends(self) -> tuple[Any, Any]:
        def tensor(values: list[float]) -> Any:
            return self.torch.tensor(np.log(values), dtype=self.torch.float64)

        return (
            tensor([max(f.low, 1e-3) for f in self.factors]),
            tensor([f.high for f in self.factors]),
        )

    def start(self, values: Numbers) -> Any:
        low, high = self._ends()
        inside = [
            np.clip(values.get(f.name, f.value), max(f.low, 1e-3) * 1.02, f.high / 1.02)
            for f in self.factors
        ]
        share = (self.torch.tensor(np.log(inside), dtype=self.torch.float64) - low) / (high - low)
        return self.torch.logit(share)

    def values(self, at: Any) -> dict[str, Any]:
        low, high = self._ends()
        found = self.torch.exp(low + (high - low) * self.torch.sigmoid(at))
        return {f.name: found[i] for i, f in enumerate(self.factors)}


def minimised(
    torch: Any, line: Line, loss: Callable[[dict[str, Any]], Any], steps: int, rate: float
) -> dict[str, float]:
    """The factors of least loss, by Adam from where they start, towards which a prior pulls."""
    begin = line.start({})
    at = begin.clone().requires_grad_(True)
    descent = torch.optim.Adam([at], lr=rate)
    best: tuple[float, dict[str, float]] = (np.inf, {})
    for _ in range(steps):
        values = line.values(at)
        total = loss(values) + 0.002 * ((at - begin) ** 2).sum()
        if float(total.detach()) < best[0]:
            best = (float(total.detach()), {k: float(v.detach()) for k, v in values.items()})
        descent.zero_grad()
        total.backward()
        descent.step()
    return best[1]


def _tensors(torch: Any, counted: Any) -> Any:
    def tensor(n: Any) -> Any:
        return torch.as_tensor(np.asarray(n, float))

    return counted.each(tensor)


def _time(torch: Any, terms: Any) -> Any:
    return torch.maximum(terms.compute, terms.memory) + terms.latency


# ---- sweeps -----------------------------------------------------------------------------------


def fit_lanes(problems: Sequence[Problem], steps: int = 220) -> dict[str, float]:
    """The factors of nests on the lanes, from sweeps."""
    torch = load_torch()
    xp = arithmetic(torch)
    data: list[tuple[Any, Target, Any, Any, Any]] = []
    for p in problems:
        assert p.time_s is not None
        drawn = np.random.default_rng(0).permutation(p.count)[:ROWS]
        rows = np.unique(np.r_[drawn, np.argsort(p.time_s)[:250]])
        counted = lanes.count(p.works[0], p.tiles, p.target)

        def drawn_of(n: Any, rows: Any = rows) -> Any:
            return n[rows] if np.ndim(n) else n

        some = counted.each(drawn_of)
        over = p.time_s[rows] / p.time_s.min()
        weight = over**-1.5 + 0.02
        time_s = torch.as_tensor(p.time_s[rows])
        data.append(
            (
                _tensors(torch, some),
                p.target,
                time_s,
                torch.as_tensor(weight / weight.sum()),
                torch.as_tensor(np.minimum(np.log(over), 2.0)),
            )
        )

    def loss(values: dict[str, Any]) -> Any:
        total: Any = 0.0
        for counted, target, time_s, weight, regret in data:
            found = _time(torch, lanes.seconds(Sheet(xp), counted, target, values))
            error = torch.log(found / time_s)
            mean = (weight * error).sum()
            total = total + (weight * torch.sqrt((error - mean) ** 2 + 0.01)).sum()
            total = total + 0.1 * torch.sqrt(mean**2 + 0.01)
            first = torch.softmax(-torch.log(found) / 0.05, 0)
            total = total + (first * regret).sum()
        return total

    return minimised(torch, Line(torch, FACTORS["lanes"]), loss, steps, 0.03)


# ---- winners ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranked:
    """Some problems of a table: for each product the counts of drawn configurations, the winner's
    first, and which of them are legal."""

    parts: list[tuple[Any, Work]]
    target: Target
    legal: Any
    used: Any


def drawn(p: Problem, problems: int, configs: int, seed: int = 0) -> Ranked:
    """Problems and configurations of a table, drawn by seed."""
    random = np.random.default_rng(seed)
    rows = random.permutation(len(p.winners))[:problems]
    columns = np.stack(
        [np.r_[p.winners[i], random.permutation(p.count)[: configs - 1]] for i in rows]
    )
    tiles = p.tiles.each(
        lambda n: np.broadcast_to(np.asarray(n), (1, p.count))[0][columns] if np.ndim(n) else n
    )
    parts: list[tuple[Any, Work]] = []
    legal: Any = np.ones(columns.shape, bool)
    for work in p.works:
        some = work.each(lambda n: n[rows] if np.ndim(n) else n)
        for need in generated.needs(some, tiles, p.target):
            legal = legal & (np.asarray(need.wants) <= need.has)
        parts.append((matrix.count(some, tiles, p.target), some))
    return Ranked(parts, p.target, legal, legal[:, 0])


def _ahead(torch: Any, log_time: Any, legal: Any, used: Any) -> Any:
    """The logarithm of the share of configurations that are predicted faster than the winner."""
    faster = torch.sigmoid((log_time[:, :1] - log_time[:, 1:]) / 0.06)
    share = (faster * legal[:, 1:]).sum(1) / torch.clamp(legal[:, 1:].sum(1), min=1)
    return (torch.log(share + 0.02) * used).sum()


ANCHORS = (
    *((g, "bf16") for g in ("a100", "h100-sxm", "h200", "b200", "l40s", "rtx4090", "mi300x")),
    ("h100-sxm", "f8e4m3"),
)


def _anchors(without: str) -> list[tuple[Any, Work, Target, Any, Floats]]:
    """Products of many sizes with what the library takes, on GPUs but one."""
    shapes = list(
        itertools.product(
            (1, 16, 64, 256, 1024, 4096, 8192), ((4096, 4096), (14336, 4096), (4096, 14336))
        )
    )
    m = np.array([m for m, _ in shapes], float)
    n, k = np.array([nk for _, nk in shapes], float).T
    space = TEMPLATES["vllm.fused_moe"]
    grid = np.array(list(itertools.product(*(space.parameters[name] for name in NAMES))), float)
    found: list[tuple[Any, Work, Target, Any, Floats]] = []
    for name, dtype in ANCHORS:
        target = load_target(name)
        if target.name == without:
            continue
        library = predict(kernel("gemm", m=m, n=n, k=k, dtype=dtype).work, target).time_s
        random = np.random.default_rng(1)
        columns = np.stack([random.permutation(len(grid))[:300] for _ in shapes])
        tiles = space.tile({p: grid[columns, i] for i, p in enumerate(NAMES)})
        sizes: dict[str, Any] = {"m": m[:, None], "n": n[:, None], "k": k[:, None]}
        work = kernel("gemm", dtype=dtype, **sizes).work
        counted = matrix.count(work, tiles, target)
        fits = counted.smem_bytes <= target.sm.smem_bytes_per_block
        found.append((counted, work, target, fits, library - target.launch_s))
    return found


def fit_matrix(
    problems: Sequence[Problem], steps: int = 80, without: str = ""
) -> tuple[dict[str, float], Net]:
    """The factors of products on matrix units and the network, from tables of winners."""
    torch = load_torch()
    xp = arithmetic(torch)
    some = [drawn(p, PROBLEMS, CONFIGS) for p in problems]
    data = [
        (
            [(_tensors(torch, c), w) for c, w in r.parts],
            r.target,
            torch.as_tensor(r.legal),
            torch.as_tensor(r.used),
        )
        for r in some
        if r.used.any()
    ]
    anchors = [
        (_tensors(torch, c), w, t, torch.as_tensor(fits), torch.as_tensor(library))
        for c, w, t, fits, library in _anchors(without)
    ]
    never = torch.tensor(9.0, dtype=torch.float64)

    def loss(values: dict[str, Any]) -> Any:
        total: Any = 0.0
        count = 0
        for parts, target, legal, used in data:
            time_s: Any = 0.0
            for counted, work in parts:
                terms = matrix.seconds(Sheet(xp), counted, work, target, values)
                time_s = time_s + _time(torch, terms)
            log_time = torch.where(legal, torch.log(time_s), never)
            total = total + _ahead(torch, log_time, legal, used)
            count += int(used.sum())
        off: Any = 0.0
        for counted, work, target, fits, library in anchors:
            terms = matrix.seconds(Sheet(xp), counted, work, target, values)
            best = torch.where(fits, torch.log(_time(torch, terms)), never).min(1).values
            error = best - torch.log(library * SLOWER)
            off = off + torch.sqrt(error**2 + 0.01).mean() / len(anchors)
        return total / count + off

    found = minimised(torch, Line(torch, FACTORS["matrix"]), loss, steps, 0.05)
    return found, _fit_net(torch, problems, found)


def _fit_net(torch: Any, problems: Sequence[Problem], factors: Numbers, steps: int = 300) -> Net:
    """The network that ranks winners best, on formulas with these factors."""
    inputs: list[tuple[list[Any], list[Any], Any, Any]] = []
    for p in problems:
        r = drawn(p, 4 * PROBLEMS, CONFIGS, seed=1)
        if not r.used.any():
            continue
        times: list[Any] = []
        seen: list[Any] = []
        for counted, work in r.parts:
            terms = matrix.seconds(Sheet(), counted, work, r.target, factors)
            times.append(np.maximum(terms.compute, terms.memory) + terms.latency)
            there = stands_for(r.target)
            features = matrix.features(counted, work, there, factors).values()
            seen.append(np.stack(np.broadcast_arrays(*features), axis=-1))
        inputs.append((times, seen, r.legal, r.used))
    rows = np.concatenate([x.reshape(-1, x.shape[-1]) for _, seen, _, _ in inputs for x in seen])
    shift, scale = rows.mean(axis=0), np.maximum(rows.std(axis=0), 1e-6)
    draw = torch.Generator().manual_seed(0)
    wide = rows.shape[1]
    hidden = 0.3 * torch.randn(UNITS, wide, generator=draw, dtype=torch.float64)
    bias = torch.zeros(UNITS, dtype=torch.float64)
    out = 0.1 * torch.randn(UNITS, generator=draw, dtype=torch.float64)
    moving = [t.requires_grad_(True) for t in (hidden, bias, out)]
    data = [
        (
            [torch.as_tensor(t) for t in times],
            [torch.as_tensor((x - shift) / scale) for x in seen],
            torch.as_tensor(legal),
            torch.as_tensor(used),
        )
        for times, seen, legal, used in inputs
    ]
    never = torch.tensor(9.0, dtype=torch.float64)
    count = sum(int(used.sum()) for *_, used in data)
    descent = torch.optim.Adam(moving, lr=0.02)
    for _ in range(steps):
        total: Any = 0.01 * ((hidden**2).sum() + (out**2).sum()) / UNITS
        for times, seen, legal, used in data:
            time_s: Any = 0.0
            for t, x in zip(times, seen, strict=True):
                units = torch.tanh(x @ hidden.T + bias)
                time_s = time_s + t * torch.exp(matrix.BOUND * torch.tanh(units @ out))
            log_time = torch.where(legal, torch.log(time_s), never)
            total = total + _ahead(torch, log_time, legal, used) / count
        descent.zero_grad()
        total.backward()
        descent.step()
    plain = [t.detach().numpy() for t in moving]
    return Net(shift, scale, *plain, least=rows.min(axis=0), most=rows.max(axis=0))


# ---- what is left out -------------------------------------------------------------------------


def without(
    problems: Sequence[Problem], what: str, told: Callable[[str], None]
) -> Callable[[Problem], Fitted]:
    """What is fitted without the GPU, or the kernel, of each problem."""
    known: dict[tuple[str, str], Fitted] = {}

    def out(p: Problem, other: Problem) -> bool:
        if what == "gpu":
            return p.target.name == other.target.name
        return p.kernel.partition("_")[0] == other.kernel.partition("_")[0]

    def fitted(p: Problem) -> Fitted:
        kind = "lanes" if p.time_s is not None else "matrix"
        name = p.target.name if what == "gpu" else p.kernel.partition("_")[0]
        if (kind, name) not in known:
            told(f"fitting {kind} without {name}")
            rest = [q for q in problems if not out(p, q)]
            sweeps = [q for q in rest if q.time_s is not None]
            tables = [q for q in rest if q.time_s is None and not q.sort.endswith(" of ck")]
            factors, net = dict(shipped().factors), None
            if kind == "lanes":
                factors["lanes"] = fit_lanes(sweeps)
            else:
                gpu = p.target.name if what == "gpu" else ""
                factors["matrix"], net = fit_matrix(tables, without=gpu)
            known[kind, name] = Fitted(factors, net)
        return known[kind, name]

    return fitted


def written(lane: Numbers, product: Numbers, net: Net) -> str:
    """The weights file: six significant digits, more than measurements have."""

    def plain(x: Any) -> Any:
        return [plain(y) for y in x] if np.ndim(x) else float(f"{float(x):.6g}")

    kept = {k: v for k, v in vars(net).items() if k != "own"}
    found = {
        "matrix": {k: plain(v) for k, v in product.items()},
        "lanes": {k: plain(v) for k, v in lane.items()},
        "net": {k: plain(v) for k, v in kept.items()},
    }
    return json.dumps(found, indent=1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="fit the cost of generated kernels")
    parser.add_argument("files", nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    problems, _ = read(args.files)
    sweeps = [p for p in problems if p.time_s is not None]
    tables = [p for p in problems if p.time_s is None and not p.sort.endswith(" of ck")]
    product, net = fit_matrix(tables)
    lane = fit_lanes(sweeps) if sweeps else dict(shipped().factors["lanes"])
    args.output.write_text(written(lane, product, net))


if __name__ == "__main__":
    main()
