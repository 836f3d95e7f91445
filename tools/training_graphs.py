"""A training step derived twice, by AOTAutograd and by gpuir's autodiff, side by side.

    python tools/training_graphs.py [MODEL ...] [--target h100-sxm]

Prints the table of docs/validation/training.md: launches by kind, flops, bytes, predicted time and
peak memory of both graphs. Models are Hugging Face configs by their size names; weights are never
made.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

import gpuir
from gpuir.ops import kernel as k

MODELS = {
    "bert-base": ("BertConfig", {"architectures": ["BertForMaskedLM"]}, {"batch": 8, "seq": 128}),
    "gpt2": ("GPT2Config", {"architectures": ["GPT2LMHeadModel"]}, {"batch": 4, "seq": 512}),
}


def config(folder: Path, name: str) -> str:
    import transformers

    kind, settings, _ = MODELS[name]
    path = folder / name
    path.mkdir()
    made = getattr(transformers, kind)(**settings).to_dict()
    (path / "config.json").write_text(json.dumps(made))
    return f"hf:{path}"


def row(path: str, dims: dict[str, int], target: str, autodiff: str) -> list[str]:
    graph = gpuir.load(path, dims=dims, train=True, autodiff=autodiff, warn=print)
    summary = gpuir.analyze(graph, target)
    kinds = Counter[str]()
    for x in summary.kernels:
        if not isinstance(x.node.op, k.View):
            kinds[x.kind] += x.launches
    others = sum(kinds.values()) - kinds["gemm"] - kinds["reduce"]
    attention = kinds["attention"] + kinds["attention_gradient"]
    products = sum(x.flops for x in summary.kernels if x.kind == "gemm")
    return [
        f"{sum(kinds.values()):,}",
        f"{kinds['gemm']}",
        f"{attention}",
        f"{kinds['reduce']}",
        f"{others - attention}",
        f"{products / 1e9:,.1f}",
        f"{summary.flops / 1e9:,.1f}",
        f"{summary.bytes / 1e9:,.2f}",
        f"{summary.latency_s * 1e3:,.2f}",
        f"{summary.memory.peak_bytes / 1e9:,.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--target", default="h100-sxm")
    given = parser.parse_args()
    titles = ["model", "derived by", "launches", "gemm", "attention", "reduce", "others"]
    titles += ["gemm Gflop", "Gflop", "GB moved", "ms", "GB at the peak"]
    print("| " + " | ".join(titles) + " |")
    print("|---" * len(titles) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for name in given.models:
            path = config(Path(folder), name)
            for autodiff in ("torch", "gpuir"):
                cells = row(path, MODELS[name][2], given.target, autodiff)
                print(f"| {name} | {autodiff} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
