# %% [markdown]
# # gpuir in five minutes
#
# Run this file with `python examples/quickstart.py`, or open `quickstart.ipynb`. It needs gpuir
# alone: no GPU, no weights, no other package. Times are in seconds, sizes in bytes.

# %%
from pathlib import Path

import gpuir

HERE = Path(__file__).parent if "__file__" in globals() else Path()
MODEL = HERE / "encoder.onnx"  # BERT-base as an exporter writes it, without weights

# %% [markdown]
# ## One model on one GPU
#
# `analyze` gives an answer: how long the model takes, its memory, and each kernel with its cost.
# The interval should hold 80 % of measurements.

# %%
s = gpuir.analyze(MODEL, "a100", dims={"batch": 8, "seq": 128})
low, high = s.interval
print(f"latency {s.latency_s * 1e3:.2f} ms, from {low * 1e3:.2f} to {high * 1e3:.2f} ms")
s

# %% [markdown]
# ## Where the time goes
#
# Each kernel knows the nodes of the model that it computes, and what bounds it.

# %%
for kernel in s.slowest()[:3]:
    print(f"{kernel.time_s * 1e6:6.1f} us  {kernel.kind:7} {kernel.cost.bound:8} {kernel.name}")

# %% [markdown]
# ## Other GPUs, other software
#
# Two predictions differ surely only where their intervals do not overlap.

# %%
for target in ("l4", "a100", "h100-sxm"):
    for profile in ("ort", "tensorrt"):
        s = gpuir.analyze(MODEL, target, dims={"batch": 8, "seq": 128}, profile=profile)
        low, high = (bound * 1e3 for bound in s.interval)
        print(f"{target:9} {profile:9} {s.latency_s * 1e3:6.2f} ms  ({low:.2f} to {high:.2f})")

# %% [markdown]
# ## One kernel, and tiles for a tuner
#
# `kernel` costs the library's own kernel. `heuristics` ranks the tiles that a compiler such as
# Triton could use.

# %%
k = gpuir.kernel("gemm", m=4096, n=4096, k=4096, dtype="bf16", target="h100-sxm")
print(f"cuBLAS: {k.time_s * 1e6:.0f} us")
for choice in gpuir.heuristics(k, count=3):
    extents = ", ".join(f"{axis}={extent}" for axis, extent in choice.tile.dims)
    print(f"{choice.time_s * 1e6:.0f} us  {extents}, {choice.tile.stages} stages")

# %% [markdown]
# ## A GPU that does not exist

# %%
wider = gpuir.analyze(MODEL, "l4+sms=72+dram.bytes_per_s=600e9", dims={"batch": 8, "seq": 128})
print(f"an L4 with 72 SMs and 600 GB/s: {wider.latency_s * 1e3:.2f} ms")
