"""Rows of tables of published throughputs: what was run, and how long a call of it took.

What the tables do not state of a run is here, as their README says it.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

from gpuir.fit.columns import TableFile
from gpuir.fit.tables import target_of

Kind = Literal["image", "unet", "decoder"]
Row = Mapping[str, str]

IMAGES = ("model", "target", "mode", "precision", "layout", "batch", "img_size", "samples_per_s")
DECODERS = ("model", "target", "dtype", "batch", "isl", "osl", "tokens_per_s", "first_token_ms")
UNET = ("target", "mode", "batch", "it_per_s")

# What weights and images are in, by how tables call it; amp is autocast to f16 of weights in f32.
DTYPES = {
    **dict.fromkeys(("amp", "f32", "fp32", "float32", "tf32"), "f32"),
    **dict.fromkeys(("f16", "fp16", "float16", "half"), "f16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
}
PROFILES = {"eager": "eager", "train": "eager", "compile": "compiled", "cudagraph": "cudagraph"}
# The tables of torch 2.9 are of models whose branches and batch norms had been merged into
# convolutions (timm.utils.reparameterize_model).
MERGED = "torch 2.9"
# Families whose norms were torch's own LayerNorm until 2024, which timm's fast norms leave in f32.
TORCH_NORMS = ("vision_transformer", "deit")
TORCH_NORMS_UNTIL = "torch 2.4"
LATENT = 64  # cells of a side of what Stable Diffusion's UNet works on: 512 pixels


@dataclass(frozen=True, order=True)
class Program:
    """What is exported once, for all GPUs. `side` is that of an image or of latents, in cells; of a
    decoder `tokens` are those of a prompt and those that it generates. `merged`: batch norms and
    parallel branches are parts of convolutions; `fast_norms`: norms stay in the 16 bits of
    autocast; `sdpa`: attention is one operator.
    """

    kind: Kind
    model: str
    batch: int
    side: int = 0
    tokens: tuple[int, int] = (0, 0)
    train: bool = False
    amp: bool = False
    nhwc: bool = False
    merged: bool = False
    fast_norms: bool = False
    sdpa: bool = True
    dtype: str = "f32"

    def __str__(self) -> str:
        flags = ("train", "amp", "nhwc", "merged", "fast_norms")
        words = [self.model, *(f for f in flags if getattr(self, f)), f"batch {self.batch}"]
        words += [self.dtype] if self.dtype != "f32" else []
        if self.tokens[0]:
            words.append(f"{self.tokens[0]}+{self.tokens[1]} tokens")
        return " ".join(words)


@dataclass(frozen=True)
class Case:
    """A row. `measured_s` is the time of one call of the program, of a decoder of all of them."""

    file: str
    row: int
    gpu: str
    mode: str
    precision: str
    software: str
    program: Program
    target: str
    profile: str
    tf32: bool | None
    measured_s: float

    @property
    def layout(self) -> str:
        return "nhwc" if self.program.nhwc else "nchw"

    @property
    def table(self) -> str:
        """The rows that it is scored with. Small batches tell of the host, and stand apart where a
        table has one model at many."""
        p = self.program
        if p.kind == "decoder":
            return f"{self.gpu} {p.kind} {self.mode} {self.precision}"
        words = [self.gpu, self.mode, self.precision, self.layout, self.software]
        if self.software.startswith("NGC"):
            words.append(
                "batch " + (">= 64" if p.batch >= 64 else "16-32" if p.batch > 8 else "<= 8")
            )
        return " ".join([*words, *([p.kind] if p.kind == "unet" else [])])

    @property
    def half(self) -> str:
        """`a` or `b`, by the model's name alone: one can be looked at, and the other scored."""
        return "ab"[crc32(self.program.model.encode()) % 2]

    @property
    def sample_s(self) -> float:
        return self.measured_s / self.program.batch


@dataclass(frozen=True)
class Table:
    """The cases of a file, and how many rows were left out, by reason."""

    file: str
    count: int
    cases: tuple[Case, ...]
    skipped: Mapping[str, int]


def is_one(path: str | Path) -> bool:
    """Whether a file is a table of published throughputs."""
    names = TableFile(Path(path)).names
    return any(set(needs).issubset(names) for needs in (IMAGES, DECODERS, UNET))


def read(path: str | Path) -> Table:
    """The cases of a file, in its order."""
    file = TableFile(Path(path))
    read_row = next(f for needs, f in READERS.items() if set(needs).issubset(file.names))
    cases: list[Case] = []
    skipped: Counter[str] = Counter()
    with Path(path).open(encoding="utf-8-sig", newline="") as stream:
        rows = list(csv.DictReader(stream))
    for i, row in enumerate(rows):
        target = target_of(row["target"])
        profile = PROFILES.get(row.get("mode", "eager"))
        if target is None:
            skipped[f"no target is called {row['target']}"] += 1
        elif profile is None:
            skipped[f"nothing runs like mode {row['mode']}"] += 1
        else:
            given = {"file": Path(path).name, "row": i, "target": target.name, "profile": profile}
            case = _case(row, read_row, given)
            if isinstance(case, str):
                skipped[case] += 1
            else:
                cases.append(case)
    return Table(Path(path).name, len(rows), tuple(cases), dict(skipped))


def _case(cells: Row, read_row: Callable[..., Case], given: Mapping[str, Any]) -> Case | str:
    """The case of a row, or why it is none that is predicted."""
    said = cells.get("precision", cells.get("dtype", "f16"))
    if said.lower() not in DTYPES:
        return f"precision {said or 'not stated'} is not modelled"
    try:
        case = read_row(cells, **given)
    except (ValueError, ZeroDivisionError):
        return "a size or the measurement is no number"
    if not (case.program.batch > 0 and 0 < case.measured_s < inf):
        return "a size or the measurement is no number"
    return case


def _image(cells: Row, **given: Any) -> Case:
    software, precision = cells["software"], cells["precision"].lower()
    amp = precision == "amp"
    train, timm = cells["mode"] == "train", cells.get("source", "").startswith("results/")
    old = cells.get("family") in TORCH_NORMS and software.startswith(TORCH_NORMS_UNTIL)
    batch = int(cells["batch"])
    program = Program(
        "image",
        cells["model"],
        batch,
        side=int(cells["img_size"]),
        train=train,
        amp=amp,
        nhwc=cells["layout"] == "nhwc",
        merged=software.startswith(MERGED),
        fast_norms=timm and not train and not old,
        sdpa=not train,
        dtype=DTYPES[precision],
    )
    return Case(
        gpu=cells["gpu"],
        mode=cells["mode"],
        precision=cells["precision"],
        software=" ".join(software.split()[:2]),
        program=program,
        # autocast leaves no products in f32; until torch 1.12 those ran in TF32 where they could
        tf32=precision == "tf32" if DTYPES[precision] == "f32" and not amp else None,
        measured_s=batch / float(cells["samples_per_s"]),
        **given,
    )


def _unet(cells: Row, **given: Any) -> Case:
    # an iteration is one call on two samples an image, with the prompt and without
    dtype = DTYPES[cells.get("precision", "f16").lower()]
    batch = 2 * int(cells["batch"])
    program = Program("unet", "sd-1", batch, side=LATENT, nhwc=True, dtype=dtype)
    return Case(
        gpu=cells["gpu"],
        mode=cells["mode"],
        precision=dtype,
        software=cells["software"],
        program=program,
        tf32=None,
        measured_s=1 / float(cells["it_per_s"]),
        **given,
    )


def _decoder(cells: Row, **given: Any) -> Case:
    batch, prompt, output = int(cells["batch"]), int(cells["isl"]), int(cells["osl"])
    first = not cells["tokens_per_s"]
    rate_s = 0.0 if first else batch * output / float(cells["tokens_per_s"])
    given["profile"] = "trtllm"
    return Case(
        gpu=cells["gpu"],
        mode="first token" if first else "all tokens",
        precision=cells["dtype"],
        software="TensorRT-LLM",
        program=Program(
            "decoder",
            cells["model"],
            batch,
            tokens=(prompt, output),
            dtype=DTYPES[cells["dtype"].lower()],
        ),
        tf32=None,
        measured_s=float(cells["first_token_ms"]) / 1e3 if first else rate_s,
        **given,
    )


READERS = {IMAGES: _image, DECODERS: _decoder, UNET: _unet}
