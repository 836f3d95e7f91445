"""What a tuner loses that measures the predicted first k configurations, beside other orders.

usage: python benchmarks/regret.py TABLE... [--problems N]
       (pip install -e '.[eval]', and nvidia-matmul-heuristics for its column)

TABLE is a sweep or a table of winners that `gpuir eval tuning` reads. Of a sweep: the regret after
k configurations in the predicted order, in a random one (its expectation), and of what is best on
the other GPUs that swept the same space. Of winners of dense products: in how many problems the
tuned tile (rows and columns of a block) is among the first eight different tiles of each order.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from matmul_heuristics import GPUS, PEER
from rich.console import Console
from rich.table import Table

from validation.tuned import Problem, read
from validation.tuning import predicted, swept

FIRST = (1, 5, 10)
TILES = 8


def random_regret(time_s: Any, k: int) -> float:
    """The expected regret of the best of k drawn without replacement, in percent."""
    times = np.sort(time_s)
    n = len(times)
    # that the i-th fastest is the best drawn: all k come from i on, less those from i + 1 on
    i = np.arange(n)
    with np.errstate(divide="ignore"):
        from_i = np.exp(sum(np.log(np.maximum(n - i - j, 0) / (n - j)) for j in range(k)))
    share = from_i - np.append(from_i[1:], 0.0)
    return 100 * float((share * times).sum() / times[0] - 1)


def sweeps(problems: Sequence[Problem], console: Console) -> None:
    table = Table("sweep", "n", *(f"@{k}" for k in FIRST), *(f"random @{k}" for k in FIRST),
                  "best elsewhere", "@1 / random")  # fmt: skip
    ratios: list[float] = []
    for p in problems:
        s = swept(p, problems)
        ours = (s.regret_1, s.regret_5, s.regret_10)
        drawn = [random_regret(p.time_s, k) for k in FIRST]
        ratios.append((100 + ours[0]) / (100 + drawn[0]))
        other = "-" if s.elsewhere is None else f"{s.elsewhere:.0f}"
        cells = [*(f"{x:.1f}" for x in ours), *(f"{x:.0f}" for x in drawn), other]
        table.add_row(p.name, f"{p.count:,}", *cells, f"{ratios[-1]:.2f}")
    console.print(table)
    console.print(
        "regret in percent of the best configuration's time; the last column is the time of our "
        f"first over that of one drawn at random: mean {np.mean(ratios):.2f}"
    )


def first_tiles(pairs: Any, count: int = TILES) -> list[tuple[int, int]]:
    """The first different tiles of an order."""
    return list(dict.fromkeys((int(m), int(n)) for m, n in pairs))[:count]


def peer_tiles(p: Problem, m: int, n: int, k: int) -> list[tuple[int, int]]:
    peer: Any = import_module(PEER)
    interface = peer.NvMatmulHeuristicsInterfaceEx(
        backend=peer.NvMatmulHeuristicsTarget.GENERIC,
        flags=peer.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
        gpu=peer.NvMatmulHeuristicsNvidiaGpu[GPUS[p.target.device]],
    )
    layout = peer.NvMatmulHeuristicsMatmulLayout.NT_ROW_MAJOR
    problem = interface.makeNvMatmulHeuristicsProblem(m, n, k, layout, 1)
    found = [x["kernel"] for x in interface.get(problem, 4 * TILES, "QQT")]
    return first_tiles((x.cta_tile_m, x.cta_tile_n) for x in found)


def winners(problems: Sequence[Problem], most: int, console: Console) -> None:
    has_peer = find_spec(PEER) is not None
    table = Table("products", "problems", "gpuir", "usual elsewhere", PEER)
    for p in problems:
        if len(p.works) != 1 or "block" not in p.sort:
            continue
        rows = np.random.default_rng(0).permutation(len(p.winners))[:most]
        m_tile, n_tile = (np.ravel(p.tiles.dims[d]) for d in "mn")
        wins = np.zeros(p.count)
        for q in problems:
            if (q.kernel, q.count) == (p.kernel, p.count) and q.gpu != p.gpu:
                wins += np.bincount(q.winners, minlength=p.count)
        order = np.argsort(-wins, kind="stable")
        usual = first_tiles(zip(m_tile[order], n_tile[order], strict=True))
        hits = np.zeros(3)
        asked = 0
        for i in rows:
            time_s, legal = predicted(p, slice(i, i + 1))
            order = np.argsort(np.where(legal, time_s, np.inf)[0], kind="stable")
            best = (int(m_tile[p.winners[i]]), int(n_tile[p.winners[i]]))
            hits[0] += best in first_tiles(zip(m_tile[order], n_tile[order], strict=True))
            hits[1] += best in usual
            if has_peer and p.target.device in GPUS:
                sizes = [
                    int(np.ravel(p.works[0].extents[d])[min(i, np.size(p.works[0].extents[d]) - 1)])
                    for d in "mnk"
                ]
                hits[2] += best in peer_tiles(p, *sizes)
                asked += 1
        share = [f"{100 * h / len(rows):.0f} %" for h in hits]
        share[2] = f"{100 * hits[2] / asked:.0f} %" if asked else "-"
        table.add_row(f"{p.name} {p.sort}", f"{len(rows)}", *share)
    console.print(table)
    console.print(f"problems whose tuned tile is among the first {TILES} different tiles")


def main() -> None:
    parser = argparse.ArgumentParser(description="orders of configurations, side by side")
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--problems", type=int, default=100)
    args = parser.parse_args()
    problems, _ = read(args.tables)
    console = Console(width=120)
    if measured := [p for p in problems if p.time_s is not None]:
        sweeps(measured, console)
    if rest := [p for p in problems if p.time_s is None and not p.sort.endswith(" of ck")]:
        winners(rest, args.problems, console)


if __name__ == "__main__":
    main()
