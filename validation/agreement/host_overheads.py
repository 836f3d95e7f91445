"""The host's numbers of the profile `eager`, from measurements, and how they hold up.

    python -m validation.agreement.host_overheads DATA
    python -m validation.agreement.host_overheads --here

DATA holds kernels/host_overheads.csv, kernels/dlrm_e2e.csv and neusight/model_ops.parquet. Printed
are T1 to T4 as measured, what share of them current hosts take, and the [host] table of
specs/profiles/eager.toml; then the traced parts of training iterations added up, beside the
measured time. (`gpuir eval dlrm` says what the timeline makes of the same iterations.) Needs
gpuir[eval].

--here measures what of a host's time needs no GPU, on tiny tensors on this machine's CPU: what
onnxruntime's executor takes for a node, what torch.compile's guards take for a param, what the
Python that Inductor generates takes for a buffer. Needs gpuir[hf] and onnxruntime.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pandas as pd

# Which kind of kernel the ops of the measurements launch first. Left out are those that say nothing
# of an op: embeddings by a kernel of the project's own, collectives, and whole optimizer steps.
KINDS = {
    "map": (
        *("aten::relu", "aten::relu_", "aten::add", "aten::add_", "aten::mul", "aten::sub"),
        *("aten::sigmoid", "aten::dropout", "aten::ones_like", "aten::to", "ReluBackward0"),
        *("SigmoidBackward0", "MulBackward0", "SubBackward0", "NativeDropoutBackward0"),
        "torch::autograd::AccumulateGrad",
    ),
    "gemm": ("aten::linear", "aten::bmm", "AddmmBackward0", "BmmBackward0"),
    "conv": ("aten::conv2d", "aten::conv1d", "ConvolutionBackward0"),
    "reduce": (
        *("aten::batch_norm", "aten::sum", "aten::mse_loss", "aten::binary_cross_entropy"),
        *("CudnnBatchNormBackward0", "NativeBatchNormBackward0", "LogSoftmaxBackward0"),
        *("MeanBackward1", "SumBackward1"),
    ),
    "pool": (
        *("aten::max_pool2d", "aten::avg_pool2d", "aten::adaptive_avg_pool2d"),
        *("MaxPool2DWithIndicesBackward0", "AvgPool2DBackward0"),
    ),
    "gather": ("aten::index",),
    "scatter": ("IndexBackward0",),
    "copy": ("aten::cat", "aten::reshape"),
}
# Ops that an iteration runs once. The table leaves outliers out of its counts.
ONCE = ("aten::ones_like", "Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad")
# The machines of model_ops whose software and processors are the newest.
CURRENT = ("NVIDIA_A100-PCIE-40GB", "AMD_Instinct_MI100")


def parts(overheads: pd.DataFrame) -> pd.Series:
    """T1, T3, T4 and T2 by kind of kernel, in microseconds: the median over ops of each op's own
    median over models and batches, so that no op counts for being called often."""
    by_op = overheads.groupby(["kind", "op"], dropna=False).mean_us.median()
    t2 = by_op["t2"]
    known = {op for ops in KINDS.values() for op in ops}
    t3 = by_op["t3"]
    found = {
        "t1": overheads[overheads.kind == "t1"].groupby("model").mean_us.median().median(),
        "t3": t3[t3.index.str.startswith("aten::") & (t3.index != "aten::to")].median(),
        "t4": by_op["t4"]["cudaLaunchKernel"],
        "memcpy": by_op["t4"]["cudaMemcpyAsync"],
        **{kind: t2[[op for op in ops if op in t2]].median() for kind, ops in KINDS.items()},
    }
    assert known & set(t2.index), "the table names its ops otherwise"
    return pd.Series(found)


def event_times(ops: pd.DataFrame) -> pd.DataFrame:
    """By machine, what the host takes for a pointwise op and for a view, in microseconds: between
    two events around the op, less what is between them around a call that does nothing."""
    inference = ops[ops["mode"] == "inf"]
    median = inference.groupby(["device", "target"], observed=True).fw_us.median().unstack("target")
    return pd.DataFrame(
        {
            "nothing": median["to"],
            "pointwise": median["sub"] - median["to"],
            "view": median[["view", "permute", "transpose", "expand"]].median(axis=1)
            - median["to"],
        }
    )


def shares(times: pd.DataFrame, overheads: pd.DataFrame, found: pd.Series) -> pd.Series:
    """What a machine takes for a subtraction, as a share of T2 + T4 + T3 in the 2022 traces."""
    t2 = overheads[(overheads.kind == "t2") & (overheads.op == "aten::sub")].mean_us.median()
    return times.pointwise / (t2 + found["t4"] + found["t3"])


def host(found: pd.Series, share: float, view: float) -> dict[str, float]:
    """The [host] table: seconds, to two digits."""
    first = {k: found[k] for k in KINDS if k != "map"}
    values = {
        "between_s": share * found["t1"],
        "before_s": share * found["map"],
        "launch_s": share * found["t4"],
        "after_s": share * found["t3"],
        "empty_s": view,
        **{f"before.{kind}": share * us for kind, us in first.items()},
    }
    return {name: float(f"{us * 1e-6:.2g}") for name, us in values.items()}


def iterations(overheads: pd.DataFrame, measured: pd.DataFrame) -> Iterator[tuple[object, ...]]:
    """For each traced training run on a V100 that was also timed: what its ops' T1 to T4 add up to
    in an iteration, beside the time of one, in milliseconds. T3 and T4 were not counted: each op
    that launches has one of each."""
    found = parts(overheads)
    for (model, batch), rows in overheads[overheads.kind.isin(["t1", "t2"])].groupby(
        ["model", "batch"]
    ):
        once = rows[rows.op.isin(ONCE)]["count"]
        timed = measured[
            (measured.gpu == "V100")
            & (measured.model.str.lower().str.replace("-", "_") == str(model).lower())
            & (measured.batch == batch)
        ].measured_iter_ms
        if once.empty or timed.empty:
            continue
        count = rows["count"] / once.max()
        total = (count * rows.mean_us).sum()
        launched = count[rows.kind == "t2"].sum()
        total += launched * (found["t3"] + found["t4"])
        yield model, batch, round(launched), total / 1e3, timed.iloc[0]


def derived(data: Path) -> dict[str, float]:
    """The numbers of specs/profiles/eager.toml, but for convolutions, whose ops traces of newer
    machines have."""
    overheads = pd.read_csv(data / "kernels/host_overheads.csv")
    times = event_times(pd.read_parquet(data / "neusight/model_ops.parquet"))
    found = parts(overheads)
    share = shares(times, overheads, found)[list(CURRENT)].mean()
    numbers = host(found, share, times.view[list(CURRENT)].mean())
    return {name: value for name, value in numbers.items() if name != "before.conv"}


# ---------------------------------------------------------------------------- on this machine


def least_us(call: Callable[[], object], runs: int = 200) -> float:
    """Microseconds of a call: the least of 11 loops, since what else runs only adds."""
    for _ in range(50):
        call()
    found: list[float] = []
    for _ in range(11):
        start = time.perf_counter()
        for _ in range(runs):
            call()
        found.append(1e6 * (time.perf_counter() - start) / runs)
    return min(found)


def onnxruntime_us(nodes: int) -> float:
    """A run of a chain of so many tiny pointwise nodes, unoptimised, by one thread."""
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper

    names = ["x", *(f"v{i}" for i in range(nodes))]
    ops = cycle(("Sin", "Neg"))
    chain = [helper.make_node(next(ops), [a], [b]) for a, b in pairwise(names)]
    ends = (helper.make_tensor_value_info(v, TensorProto.FLOAT, [1]) for v in ("x", names[-1]))
    graph = helper.make_graph(chain, "chain", [next(ends)], [next(ends)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    given = {"x": np.ones(1, np.float32)}
    return least_us(lambda: session.run(None, given))


def guarded_us(layers: int) -> tuple[int, float]:
    """How many params a tiny Llama has, and what a compiled call of it takes whose graph does
    nothing: guards, and the Python before the graph."""
    import torch
    from transformers import LlamaConfig, LlamaModel

    def idle(module: Any, examples: Any) -> Callable[..., Any]:
        results = module(*examples)
        return lambda *_: results

    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaModel(LlamaConfig(num_hidden_layers=layers, **sizes, **heads)).eval()
    torch.compiler.reset()
    compiled = torch.compile(model, backend=idle)
    ids = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        us = least_us(lambda: compiled(ids, use_cache=False), 50)
    return sum(1 for _ in model.parameters()), us


def buffer_us() -> float:
    """A buffer allocated and freed as the Python that Inductor generates does."""
    import torch
    from torch._C._dynamo.guards import _empty_strided_cpu as empty

    return least_us(lambda: empty((8, 8), (8, 1), torch.float32), 20_000)


def here() -> None:
    import onnxruntime
    import torch

    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    few, many = onnxruntime_us(10), onnxruntime_us(410)
    node = (many - few) / 400
    print(
        f"onnxruntime {onnxruntime.__version__}: a node {node:.2f} us, a run {few - 10 * node:.1f}"
    )
    (p, a), (q, b) = guarded_us(2), guarded_us(12)
    slope = (b - a) / (q - p)
    call = a - p * slope
    print(f"torch {torch.__version__}: guards {slope:.2f} us a param, {call:.0f} us a call")
    print(f"a buffer of generated Python {buffer_us():.2f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("data", type=Path, metavar="DATA", nargs="?", help="the measurements")
    parser.add_argument("--here", action="store_true", help="measure this machine instead")
    given = parser.parse_args()
    if given.here:
        return here()
    if given.data is None:
        parser.error("give DATA, or --here")
    data: Path = given.data
    overheads = pd.read_csv(data / "kernels/host_overheads.csv")
    times = event_times(pd.read_parquet(data / "neusight/model_ops.parquet"))
    found = parts(overheads)
    print("as traced in 2022, V100, us (T2 by kind of kernel):")
    print(found.round(1).to_string(), "\n")
    print("event-timed single ops, us, and the share of T2 + T3 + T4 that they are:")
    print(times.assign(share=shares(times, overheads, found)).round(2).to_string(), "\n")
    print("specs/profiles/eager.toml, [host]:")
    for name, value in derived(data).items():
        print(f"  {name} = {1e6 * value:.3g}e-6")
    measured = pd.read_csv(data / "kernels/dlrm_e2e.csv")
    print("\ntraced parts of an iteration beside its measured time, ms:")
    show(iterations(overheads, measured), ["model", "batch", "ops", "host", "measured"])


def show(rows: Iterator[tuple[object, ...]], columns: list[str]) -> None:
    table = pd.DataFrame([*rows], columns=columns)
    print(table.round(2).to_string(index=False))


if __name__ == "__main__":
    main()
