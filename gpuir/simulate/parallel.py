"""How a model is spread over ranks: the degrees of each way of parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

from gpuir.ir.door import FLAG, WHOLE, holds, one_of, whole
from gpuir.ir.errors import UsageError

COUNTS = ("dp", "tp", "pp", "cp", "ep", "microbatches", "chunks")
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
ContextExchange = Literal["", "heads", "keys", "ring"]


@holds(
    **dict.fromkeys(COUNTS, WHOLE),
    **dict.fromkeys(("sequence", "overlap"), FLAG),
    zero=whole(0, 3),
    schedule=one_of(*get_args(PipelineSchedule)),
    exchange=one_of(*get_args(ContextExchange)),
)
@dataclass(frozen=True)
class Parallel:
    """Degrees of parallelism, of which the product is the number of ranks.

    `tp` cuts weights (with `sequence`, norms and residuals too), `cp` sequences, `ep` experts, `pp`
    layers, `dp` the batch; `zero` is the stage of ZeRO within `dp` (3 is FSDP). With `overlap`
    products and the collectives of `tp` beside them run in pieces, at the same time. Ranks that are
    neighbours differ in `tp` first, then in `cp`, `ep`, `dp`, `pp`. A step runs each rank's part of
    the batch in `microbatches`, in the order of `schedule`, where `pp` is above 1; `chunks` is how
    many groups of layers each rank has (`interleaved`). `exchange` is what ranks of `cp` send each
    other in attention, where it is not what takes the fewest bytes.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    sequence: bool = False
    microbatches: int = 1
    schedule: PipelineSchedule = "1f1b"
    chunks: int = 1
    exchange: ContextExchange = ""
    overlap: bool = False

    @property
    def ranks(self) -> int:
        return prod((self.dp, self.tp, self.pp, self.cp, self.ep))

    def check(self) -> None:
        """UsageError where a degree is below 1, or an option lacks the degree that it is for."""
        for name in COUNTS:
            if (n := getattr(self, name)) < 1:
                fix = f"{name}=1, or more"
                raise UsageError(f"{name} counts from 1", found=f"{name}={n}", fix=fix)
        orders = f"schedule={self.schedule}, chunks={self.chunks}"
        is_ordered = self.chunks > 1 or self.schedule != "1f1b"
        needs = (  # a degree, what of it is asked, as the user said it
            ("tp", "sequence needs tensor parallelism", self.sequence, "sequence"),
            ("pp", "schedule and chunks need a pipeline", is_ordered, orders),
            ("dp", "zero needs data parallelism", self.zero, f"zero={self.zero}"),
            (
                "cp",
                "exchange needs context parallelism",
                self.exchange,
                f"exchange={self.exchange}",
            ),
        )
        for degree, text, is_asked, found in needs:
            if is_asked and getattr(self, degree) == 1:
                what = text.partition(" need")[0]
                raise UsageError(
                    f"{text} ({degree} of 2 or more)",
                    found=f"{degree}=1, {found}",
                    fix=f"for example {degree}=2, or remove {what}",
                )
        if self.overlap and not self.sequence:
            raise UsageError(
                "overlap hides the communication of sequence, so it needs sequence",
                found="overlap without sequence",
                fix="add sequence, or remove overlap",
            )

    def __str__(self) -> str:
        degrees = [
            f"{n}={v}" for n in ("tp", "cp", "ep", "dp", "pp") if (v := getattr(self, n)) > 1
        ]
        if self.zero:
            degrees.append(f"zero={self.zero}")
        if self.overlap:
            degrees.append("overlap")
        if self.exchange:
            degrees.append(f"exchange={self.exchange}")
        return ", ".join(degrees) or "one rank"
