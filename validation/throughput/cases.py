"""Rows of tables of published throughputs: what was run, and how long a call of it took.

What the tables do not state of a run is here, as their README says it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, isnan, nan
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

from gpuir.fit.columns import TableFile, count_of
from gpuir.fit.readers import Unmodelled
from gpuir.fit.tables import target_of
from validation.precisions import precision_of

Kind = Literal["image", "unet", "decoder"]
Row = Mapping[str, Any]  # words as text, numbers as floats

IMAGES = ("model", "target", "mode", "precision", "layout", "batch", "img_size", "samples_per_s")
DECODERS = ("model", "target", "dtype", "batch", "isl", "osl", "tokens_per_s", "first_token_ms")
UNET = ("target", "mode", "batch", "it_per_s")

TEXTS = (
    *("source", "model", "family", "gpu", "target", "mode", "precision", "dtype", "layout"),
    "software",
)
NUMBERS = (
    *("batch", "img_size", "isl", "osl", "samples_per_s", "tokens_per_s", "first_token_ms"),
    "it_per_s",
)
NUMBERLESS = "a size or the measurement is no number"
LAYOUTS = {
    **dict.fromkeys(("nchw", "channelsfirst", "contiguous"), False),
    **dict.fromkeys(("nhwc", "channelslast"), True),
}
EAGER = "eager@2.11"  # the tables are of PyTorch before 2.12
PROFILES = {"eager": EAGER, "train": EAGER, "compile": "compiled", "cudagraph": "cudagraph"}
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
    decoder `tokens` are those of a prompt and those that it generates. `autocast` is the dtype of
    mixed precision, empty where there is none. `merged`: batch norms and parallel branches are
    parts of convolutions; `fast_norms`: norms stay in the 16 bits of autocast; `sdpa`: attention is
    one operator.
    """

    kind: Kind
    model: str
    batch: int
    side: int = 0
    tokens: tuple[int, int] = (0, 0)
    train: bool = False
    autocast: str = ""
    nhwc: bool = False
    merged: bool = False
    fast_norms: bool = False
    sdpa: bool = True
    dtype: str = "f32"

    def __str__(self) -> str:
        flags = ("train", "nhwc", "merged", "fast_norms")
        words = [self.model, *(f for f in flags if getattr(self, f)), f"batch {self.batch}"]
        words += [f"autocast {self.autocast}"] if self.autocast else []
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
    columns = file.read((*TEXTS, *NUMBERS))
    unsaid = {} if "precision" in file.names else {"precision": "f16"}  # Stable Diffusion's
    cases: list[Case] = []
    skipped: Counter[str] = Counter()
    for i, cells in enumerate(columns.lines(TEXTS, NUMBERS)):
        case = _case(cells | unsaid, read_row, {"file": Path(path).name, "row": i})
        if isinstance(case, str):
            skipped[case] += 1
        else:
            cases.append(case)
    return Table(Path(path).name, columns.count, tuple(cases), dict(skipped))


def _case(cells: Row, read_row: Callable[..., Case], given: Mapping[str, Any]) -> Case | str:
    """The case of a row, or why it is none that is predicted."""
    target = target_of(cells["target"])
    if target is None:
        return f"no target is called {cells['target'] or 'nothing'}"
    try:
        case = read_row(cells, **given, target=target.name)
    except Unmodelled as why:
        return str(why)
    if not (case.program.batch and 0 < case.measured_s < inf):
        return NUMBERLESS
    return case


def _profile(cells: Row) -> str:
    if cells["mode"] not in PROFILES:
        raise Unmodelled(f"nothing runs like mode {cells['mode'] or 'not stated'}")
    return PROFILES[cells["mode"]]


def _is_nhwc(layout: str) -> bool:
    plain = re.sub(r"[\s_-]", "", layout.lower())
    if plain not in LAYOUTS:
        raise Unmodelled(f"layout {layout or 'not stated'} is not modelled")
    return LAYOUTS[plain]


def _size(cells: Row, name: str) -> int:
    if number := count_of(cells[name]):
        return number
    raise Unmodelled(NUMBERLESS)


def _seconds(amount: float, rate: float) -> float:
    return amount / rate if rate > 0 else nan


def _image(cells: Row, **given: Any) -> Case:
    software, precision = cells["software"], precision_of(cells["precision"])
    train, timm = cells["mode"] == "train", cells["source"].startswith("results/")
    old = cells["family"] in TORCH_NORMS and software.startswith(TORCH_NORMS_UNTIL)
    batch = _size(cells, "batch")
    program = Program(
        "image",
        cells["model"],
        batch,
        side=_size(cells, "img_size"),
        train=train,
        autocast=precision.autocast,
        nhwc=_is_nhwc(cells["layout"]),
        merged=software.startswith(MERGED),
        fast_norms=timm and not train and not old,
        sdpa=not train,
        dtype=precision.dtype,
    )
    return Case(
        gpu=cells["gpu"],
        mode=cells["mode"],
        precision=cells["precision"],
        software=" ".join(software.split()[:2]),
        program=program,
        profile=_profile(cells),
        tf32=precision.tf32,
        measured_s=_seconds(batch, cells["samples_per_s"]),
        **given,
    )


def _unet(cells: Row, **given: Any) -> Case:
    precision = precision_of(cells["precision"])
    if cells["mode"] == "train":
        raise Unmodelled("training of a UNet is not modelled")
    # an iteration is one call on two samples an image, with the prompt and without
    program = Program(
        "unet",
        "sd-1",
        2 * _size(cells, "batch"),
        side=LATENT,
        autocast=precision.autocast,
        nhwc=True,
        dtype=precision.dtype,
    )
    return Case(
        gpu=cells["gpu"],
        mode=cells["mode"],
        precision=cells["precision"],
        software=cells["software"],
        program=program,
        profile=_profile(cells),
        tf32=precision.tf32,
        measured_s=_seconds(1, cells["it_per_s"]),
        **given,
    )


def _decoder(cells: Row, **given: Any) -> Case:
    precision = precision_of(cells["dtype"])
    if precision.autocast:
        raise Unmodelled("TensorRT-LLM has no autocast")
    batch, prompt, output = (_size(cells, n) for n in ("batch", "isl", "osl"))
    first = isnan(cells["tokens_per_s"])
    return Case(
        gpu=cells["gpu"],
        mode="first token" if first else "all tokens",
        precision=cells["dtype"],
        software="TensorRT-LLM",
        program=Program(
            "decoder", cells["model"], batch, tokens=(prompt, output), dtype=precision.dtype
        ),
        profile="trtllm",
        tf32=precision.tf32,
        measured_s=cells["first_token_ms"] / 1e3
        if first
        else _seconds(batch * output, cells["tokens_per_s"]),
        **given,
    )


READERS = {IMAGES: _image, DECODERS: _decoder, UNET: _unet}
