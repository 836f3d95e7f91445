"""Writes the gallery: real models, with predicted and published times.

usage: python tools/gallery.py DATA [--store FOLDER]

DATA holds the folders `models`, `neusight` and `kernels` (docs/validation/data.md). Runs
`gpuir eval models` on the published throughputs of timm, on NeuSight's labels and on deployments of
language models, and writes docs/gallery.md and its picture. Takes ten minutes on two cores; scores
in `--store` are used again. Needs gpuir[hf,plot] and timm.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gallery.md"
PICTURE = "gallery.png"
IMAGES = {  # tables of the published throughputs: a column each
    "RTX 3090 eager amp nchw torch 2.4.0": "RTX 3090, eager",
    "RTX 4090 eager amp nchw torch 2.9.1": "RTX 4090, eager",
    "RTX 4090 compile amp nchw torch 2.9.1": "RTX 4090, compiled",
    "RTX 3090 train amp nchw torch 1.12": "RTX 3090, training",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--store", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store, data = given.store or Path(folder), given.data
        store.mkdir(exist_ok=True)
        timm = scores(store / "timm.json", data / "models/timm.csv")
        configs = ("--configs", str(data / "neusight/model_configs.json"))
        labels = scores(store / "labels.json", data / "neusight/model_labels.csv", *configs)
        serving = scores(store / "serving.json", data / "kernels/e2e_serving.parquet")
    PAGE.write_text("\n".join(page(timm["cases"], labels["cases"], serving["rows"])) + "\n")
    draw(timm["cases"])


def scores(path: Path, table: Path, *options: str) -> Any:
    if not path.exists():
        command = [str(Path(sys.executable).parent / "gpuir"), "eval", "models", str(table)]
        done = subprocess.run([*command, *options, "--json", str(path)], check=False)
        if done.returncode:
            sys.exit(done.returncode)
    return json.loads(path.read_text())


def page(timm: Sequence[Any], labels: Sequence[Any], serving: Sequence[Any]) -> Iterable[str]:
    yield "# Gallery\n"
    yield (
        "Real models on real GPUs: what gpuir predicts, and what others measured and published. "
        "`python tools/gallery.py DATA` writes this page.\n"
        "[Data](validation/data.md) says where each table comes from, and "
        "[accuracy](validation/accuracy.md) has all errors. No factor was fitted to whole models, "
        "but half of the image models were looked at while the formulas were written.\n"
    )
    yield "## Image models in half precision\n"
    yield (
        "Images a second, predicted / measured, and the error of the time. The measurements are "
        "timm's published benchmarks, with autocast to f16.\n"
    )
    yield f"![predicted against measured time of a batch]({PICTURE})\n"
    yield from table(("model", *IMAGES.values()), images(timm))
    yield "\n## Transformers in single precision\n"
    yield (
        "Milliseconds a step, predicted / measured (NeuSight's labels, PyTorch in f32). The last "
        "column is the error of the method that NeuSight's authors published.\n"
    )
    head = ("model", "GPU", "mode", "batch", "stack", "predicted / measured", "error", "NeuSight")
    yield from table(head, transformers(labels))
    yield "\n## Deployments of language models\n"
    yield (
        "Time per output token on H100, H200 and B200 nodes: the mean absolute error of gpuir, its "
        "bias, and the error of a roofline of the same kernels.\n"
    )
    head = ("model", "GPU", "engine", "weights", "runs", "error", "bias", "roofline")
    yield from table(head, deployments(serving))


def draw(cases: Sequence[Any]) -> None:
    """Predicted against measured seconds of all runs, a colour a table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.figure(figsize=(6, 5))
    for title, label in IMAGES.items():
        some = [c for c in cases if c["table"] == title and c["time_s"]]
        x, y = ([c[key] for c in some] for key in ("measured_s", "time_s"))
        plt.scatter(x, y, s=14, alpha=0.7, label=label)
    ends = plt.xlim()
    plt.plot(ends, ends, color="black", linewidth=0.8)
    plt.xscale("log"), plt.yscale("log"), plt.legend()
    plt.xlabel("measured, seconds a batch"), plt.ylabel("predicted")
    plt.tight_layout(), plt.savefig(PAGE.parent / PICTURE, dpi=110)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def images(cases: Sequence[Any]) -> Iterable[Sequence[str]]:
    models: dict[str, dict[str, Any]] = {}
    for case in cases:
        models.setdefault(case["model"], {})[case["table"]] = case
    for model, by in sorted(models.items()):
        cells = [compared(by[t]) if t in by and by[t]["time_s"] else "" for t in IMAGES]
        yield (model, *cells)


def compared(case: Any) -> str:
    rates = [case["batch"] / case[key] for key in ("time_s", "measured_s")]
    error = case["time_s"] / case["measured_s"] - 1
    return f"{rates[0]:,.0f} / {rates[1]:,.0f}, {100 * error:+.0f} %"


def transformers(cases: Sequence[Any]) -> Iterable[Sequence[str]]:
    for c in sorted(cases, key=lambda c: (c["model"], c["target"], c["mode"], c["batch"])):
        predicted, measured = (1e3 * c[key]["total_s"] for key in ("predicted", "measured"))
        published = c["published"].get("neusight", {}).get("total_s")
        other = f"{100 * (1e3 * published / measured - 1):+.0f} %" if published else ""
        stack = c["profile"] + ("" if not c["suspect"] else ", suspect")
        size = f"{c['batch']} x {c['seqlen']}"
        error = f"{100 * (predicted / measured - 1):+.0f} %"
        times = f"{predicted:,.0f} / {measured:,.0f}"
        yield (c["model"], c["target"], c["mode"], size, stack, times, error, other)


def deployments(rows: Sequence[Any]) -> Iterable[Sequence[str]]:
    some = [r for r in rows if r["op"] == "tpot" and not r["suspect"] and r["model"] != "all"]
    for r in sorted(some, key=lambda r: (r["model"], r["target"], r["framework"], r["dtype"])):
        errors = (f"{r['mape']:.0f} %", f"{r['bias']:+.0f} %", f"{r['roofline_mape']:.0f} %")
        yield (r["model"], r["target"], r["framework"], r["dtype"], str(r["n"]), *errors)


if __name__ == "__main__":
    main()
