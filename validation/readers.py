"""The readers of others' measurements, and what else their folders hold."""

from __future__ import annotations

from pathlib import Path

from gpuir.fit import tables
from gpuir.fit.readers import Other
from gpuir.fit.tables import Readers, Table
from validation import eager, experts, linear, profiled, serving, traced

OTHERS = (
    Other(
        ("library", "world_size", "bytes", "latency_us"),
        "collectives, for a command to come",
    ),
    Other(("library", "tokens_per_rank", "latency_us"), "all-to-all, for a command to come"),
    Other(("model", "ttft_ms", "tpot_ms"), "deployments of language models: `gpuir eval models`"),
    Other(("model", "option", "e2e_ms"), "latencies of whole models: `gpuir eval models`"),
    Other(("gpu", "measured_iter_ms"), "training iterations of whole models: `gpuir eval dlrm`"),
    Other(("placement", "global_batch", "step_time_s"), "steps of recommenders: `gpuir eval dlrm`"),
    Other(("kind", "mean_us", "machine"), "host overheads, which profiles are made from"),
    Other(
        ("gpu", "framework", "experts_hit", "chunk", "n_decode", "kv", "latency_us"),
        "layers in mixed steps of serving engines, for a command to come",
    ),
    Other(("dataset", "indices", "unique_rows"), "statistics of embedding indices, no measurement"),
    Other(("table", "reference_version", "compared_version"), "notes on versions, no measurement"),
    Other(("system", "sm_version"), "a list of systems, no measurement"),
    Other(("device", "num_sm"), "a list of devices, no measurement"),
    Other(("sku", "sm_count"), "a list of GPUs, no measurement"),
    Other(("gpu", "profile", "value", "unit"), "shared GPUs, for `eval mig` to come"),
    Other(("gpu", "profile_id"), "a list of MIG profiles, no measurement"),
    Other(("gpu", "geometry"), "a list of MIG geometries, no measurement"),
    Other(("technology", "busbw_gbs"), "a list of interconnects, no measurement"),
    Other(("source", "url"), "a list of sources, no measurement"),
    Other(("sku", "listed", "recomputed"), "a list of checks, no measurement"),
)
READERS: Readers = (
    *tables.READERS,
    *serving.READERS,
    *linear.READERS,
    *experts.READERS,
    *profiled.READERS,
    *eager.READERS,
    *traced.READERS,
    *OTHERS,
)


def read_table(path: str | Path) -> Table:
    """The kernels of a table of ours or of others; see `gpuir.fit.tables.read_table`."""
    return tables.read_table(path, READERS)
