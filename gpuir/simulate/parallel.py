"""How a model is spread over ranks: the degrees of each way of parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

from gpuir.ir.door import FLAG, WHOLE, holds, one_of, whole

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
ContextExchange = Literal["", "heads", "keys", "ring"]


@holds(
    **dict.fromkeys(("dp", "tp", "pp", "cp", "ep", "microbatches", "chunks"), WHOLE),
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
