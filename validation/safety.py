"""What is lost by measuring few configurations, when predictions are good, wrong or useless.

    python -m validation.safety sweeps_gemm.parquet [--gpu RTX3090] [--top 8] [--of 288]

The table has a configuration a row: `kernel`, `gpu`, `status`, `time_ms`. Of `--of` of them, drawn
at random, `gpuir.tune.keep` keeps `--top`; printed is the time of the fastest kept over that of the
fastest of all, the mean of 200 draws and their 90th percentile, beside that of the `--top` fastest
predicted. Predictions are the measured times with an error of e^(sigma x), random, or upside down.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gpuir.fit.columns import TableFile
from gpuir.tune.keep import keep
from gpuir.tune.space import Floats

DRAWS = 200


def losses(
    time_s: Floats, predicted: Callable[[Floats], Floats], top: int, of: int, rng: Any
) -> dict[str, Floats]:
    """Of each draw, times the fastest: of what `keep` keeps, and of the fastest predicted alone."""
    found: dict[str, list[float]] = {"keep": [], "fastest": []}
    for _ in range(DRAWS):
        true = time_s[rng.choice(len(time_s), min(of, len(time_s)), replace=False)]
        guess = predicted(true)
        found["keep"].append(true[keep(guess, top)].min() / true.min())
        found["fastest"].append(true[np.argsort(guess)[:top]].min() / true.min())
    return {rule: np.array(times) for rule, times in found.items()}


def models(rng: Any) -> dict[str, Callable[[Floats], Floats]]:
    """Ways to predict, from what was measured."""
    return {
        "exact": lambda t: t.copy(),
        "sigma 0.3": lambda t: t * np.exp(rng.normal(0, 0.3, len(t))),
        "sigma 0.6": lambda t: t * np.exp(rng.normal(0, 0.6, len(t))),
        "random": lambda t: rng.random(len(t)),
        "upside down": lambda t: 1 / t,
    }


def main() -> int:
    assert __doc__
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("table", type=Path)
    parser.add_argument("--gpu")
    parser.add_argument("--kernel")
    parser.add_argument("--top", type=int, default=8)
    parser.add_argument("--of", type=int, default=288)
    given = parser.parse_args()
    columns = TableFile(given.table).read(("kernel", "gpu", "status", "time_ms"))
    ok = columns.words("status").where("ok")
    for name in ("gpu", "kernel"):
        if wanted := getattr(given, name):
            ok &= columns.words(name).where(wanted)
    time_s = columns.numbers("time_ms")[ok] / 1e3
    print(f"{ok.sum()} configurations, {given.top} of {given.of} kept")
    print(f"{'predictions':14}{'keep':>8}{'(p90)':>8}{'fastest':>10}{'(p90)':>8}")
    rng = np.random.default_rng(0)
    for name, predicted in models(rng).items():
        found = losses(time_s, predicted, given.top, given.of, rng)
        cells = [f"{x:8.2f}" for t in found.values() for x in (t.mean(), np.quantile(t, 0.9))]
        print(f"{name:14}" + "".join(cells[:2]) + "  " + "".join(cells[2:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
