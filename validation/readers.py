"""The readers of others' measurements, and what else their folders hold."""

from __future__ import annotations

from pathlib import Path

from gpuir.fit import collectives, tables
from gpuir.fit.readers import Other
from gpuir.fit.tables import MeasuredTable, Readers
from validation import (
    decoders,
    eager,
    experts,
    field_rows,
    linear,
    profiled,
    runs,
    serving,
    traced,
    tuned,
)
from validation.throughput import cases

OTHERS = (
    Other(collectives.COLUMNS, "collectives: `gpuir eval collectives`"),
    Other(
        ("library", "tokens_per_rank", "latency_us"), "all-to-all of experts; no command reads it"
    ),
    Other(cases.IMAGES, "throughputs of image models: `gpuir eval models`"),
    Other(cases.DECODERS, "throughputs of language models: `gpuir eval models`"),
    Other(cases.UNET, "throughputs of Stable Diffusion: `gpuir eval models`"),
    Other(decoders.BATCHES, "batches of language models: `gpuir eval models`"),
    Other(runs.COLUMNS, "training on many GPUs: `gpuir eval training`"),
    Other((*runs.OTHERS, "items_per_s"), "training of other models: `gpuir eval training`"),
    Other(field_rows.COLUMNS, "published measurements and their commands: `gpuir eval field`"),
    Other(tuned.SWEEPS, "sweeps of tuned kernels: `gpuir eval tuning`"),
    Other(tuned.WINNERS, "winners of tuners: `gpuir eval tuning`"),
    Other(tuned.INSTANCES_WON, "winners of tuners: `gpuir eval tuning`"),
    Other(tuned.PAIRS, "winners of tuners, which `gpuir eval tuning` leaves out"),
    Other(decoders.DEPLOYMENTS, "deployments of language models: `gpuir eval models`"),
    Other(("model", "option", "e2e_ms"), "latencies of whole models: `gpuir eval models`"),
    Other(("gpu", "measured_iter_ms"), "training iterations of whole models: `gpuir eval dlrm`"),
    Other(("placement", "global_batch", "step_time_s"), "steps of recommenders: `gpuir eval dlrm`"),
    Other(("model", "ttft_ms", "tpot_ms"), "deployments of language models; no command reads it"),
    Other(("kind", "mean_us", "machine"), "host overheads, which profiles are made from"),
    Other(
        ("gpu", "framework", "experts_hit", "chunk", "n_decode", "kv", "latency_us"),
        "layers in mixed steps of serving engines; no command reads it",
    ),
    Other(("dataset", "indices", "unique_rows"), "statistics of embedding indices, no measurement"),
    Other(("table", "reference_version", "compared_version"), "notes on versions, no measurement"),
    Other(("system", "sm_version"), "a list of systems, no measurement"),
    Other(("device", "num_sm"), "a list of devices, no measurement"),
    Other(("sku", "sm_count"), "a list of GPUs, no measurement"),
    Other(
        ("gpu_sku", "profile", "instances_active_per_gpu", "value"), "MIG slices: `gpuir eval mig`"
    ),
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


def read_table(path: str | Path) -> MeasuredTable:
    """The kernels of a table of ours or of others; see `gpuir.fit.tables.read_table`."""
    return tables.read_table(path, READERS)
