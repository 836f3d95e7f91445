"""Holds points of a model's program against the model loaded at them, one by one.

    python tools/points.py [--only WORD] [--points N] [--targets a100,h100-sxm] [--profiles ort,..]

The models are those of `replay.py`, each at sizes around the ones there. A row says how many points
were tried, how many graphs and variants they took, and how far seconds and bytes are off where they
are not the same: seconds by more than 1e-12 of themselves. The exit status is 1 if any is.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import replay
import replay_models

import gpuir

LIMIT = 1e-12
STACKS = {
    "onnx": "ort,tensorrt,compiled,ideal",
    "": "eager,compiled,cudagraph,vllm,sglang,trtllm,tensorrt,ort",
}
STEPS = (1, 2, 3, 5, 8)  # times a size of the series
SIDES = {"height", "width"}  # that models cut in two again and again
OPTIONS = {
    "--dtype": "dtype",
    "--attention": "attention",
    "--phase": "phase",
    "--cache-dtype": "cache_dtype",
    "--autocast": "autocast",
    "--optimizer": "optimizer",
    "--autodiff": "autodiff",
    "--checkpoint": "checkpoint",
}
NUMBERS = {"--expert-skew": "expert_skew", "--clip": "clip"}
FLAGS = {
    "--mask": "mask",
    "--channels-last": "channels_last",
    "--train": "train",
    "--fused": "fused",
    "--accumulate": "accumulate",
}


@dataclass
class Model:
    """A model of the series: how it is loaded, and the sizes it has there."""

    source: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    sizes: dict[str, int] = field(default_factory=dict[str, int])


def model_of(words: list[str]) -> Model | None:
    """None where something is asked for that is no size."""
    found = Model(words[0])
    left = iter(words[1:])
    for word in left:
        if word == "--dims":
            pairs = (x.partition("=") for x in next(left).split(","))
            found.sizes |= {name: int(n) for name, _, n in pairs}
        elif word == "--past":
            found.sizes["past"] = int(next(left))
        elif word in OPTIONS:
            found.options[OPTIONS[word]] = next(left)
        elif word in NUMBERS:
            found.options[NUMBERS[word]] = float(next(left))
        elif word in FLAGS:
            found.options[FLAGS[word]] = True
        else:
            return None
    if found.options.get("phase") == "decode":
        found.options["dims"] = {"seq": 1}
    return found if found.sizes else None


def drawn(model: Model, count: int, seed: int) -> dict[str, list[int]]:
    """Points, the series' own among them."""
    rng = random.Random(seed)
    found = {name: [n] for name, n in model.sizes.items()}
    for _ in range(count - 1):
        for name, n in model.sizes.items():
            step = rng.choice(STEPS)
            number = n + 32 * step if name in SIDES else max(1, n * step // 2)
            found[name].append(number)
    return found


def held(
    model: Model, points: Mapping[str, list[int]], target: str, profile: str
) -> Iterator[tuple[str, Any]]:
    """What differs, and at last the program and how long it took."""
    since = time.process_time()
    program = gpuir.program(model.source, profile=profile, **model.options)
    times = program.times(points, target)
    took = time.process_time() - since
    reserved = times.reserved_bytes
    for i in range(len(times.latency_s)):
        point = {name: n[i] for name, n in points.items()}
        try:
            graph = program.load(point)
            found = gpuir.analyze(graph, target, profile=profile)
        except gpuir.GpuirError as error:
            if not times.why[i]:
                yield f"{point}: {times.latency_s[i]}", " ".join(str(error).split())[:100]
            continue
        if times.why[i]:
            yield f"{point}: {times.why[i]}", found.latency_s
            continue
        ends = found.interval or (float("nan"),) * 2
        pairs = [
            ("latency", times.latency_s[i], found.latency_s),
            ("low", times.low_s[i], ends[0]),
            ("high", times.high_s[i], ends[1]),
            ("peak", times.peak_bytes[i], found.peak_bytes),
            ("reserved", reserved[i], found.reserved_bytes),
        ]
        for what, a, b in pairs:
            limit = LIMIT * abs(b) if isinstance(b, float) else 0
            if abs(a - b) > limit:
                yield f"{point}: {what} {a}", b
    graphs = sum(len(x.known) for x in program.sampled.values())
    yield "", (graphs, sum(map(len, program.variants.values())), took)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="models with this word in their name")
    parser.add_argument("--points", type=int, default=6)
    parser.add_argument("--targets", default="a100,mi300x")
    parser.add_argument("--profiles", default="")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    encoder = str(Path("tests/encoder.onnx").resolve())
    wrong = points = 0
    with tempfile.TemporaryDirectory() as folder:
        replay_models.write(Path(folder))
        os.chdir(folder)
        for name, text in replay.ANALYZED.items():
            model = model_of(shlex.split(text.replace("tests/encoder.onnx", encoder)))
            if given.only not in name or model is None:
                continue
            kind = "onnx" if model.source.endswith(".onnx") else ""
            for profile in (given.profiles or STACKS[kind]).split(","):
                asked = drawn(model, given.points, seed=len(name))
                for target in given.targets.split(","):
                    *found, (_, (graphs, variants, took)) = held(model, asked, target, profile)
                    wrong, points = wrong + bool(found), points + given.points
                    row = f"{name:22} {profile:10} {target:9} {given.points} points"
                    print(f"{row}  {graphs} graphs  {variants} variants  {took:.1f} s", flush=True)
                    for what, b in found[:4]:
                        print(f"    {what}, alone {b}", flush=True)
    print(f"{points} points, {wrong} rows wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
