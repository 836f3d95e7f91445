"""What all ranks of a cluster take to exchange sums, for the choice of sharding."""

from __future__ import annotations

from gpuir.cost.collective import collective_time
from gpuir.ir.types import f32
from gpuir.plan.sharding import Collective, Kind
from gpuir.targets.cluster import Cluster


def collective_of(cluster: Cluster) -> Collective:
    """Seconds of a collective among all GPUs of a cluster, by the model of `cost.collective`."""

    def seconds(kind: Kind, count: float) -> float:
        sizes = (cluster.gpus,)
        return collective_time(kind, count, f32, sizes=sizes, strides=(1,), cluster=cluster).time_s

    return seconds
