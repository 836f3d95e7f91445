"""gpuir's launches under `compiled` against the kernels that torch.compile makes for a GPU.

    python -m validation.agreement.inductor [MODEL ... | fresh] [--launches] [--profile compiled] \\
        [--autocast f16]

No GPU is needed: Inductor lowers and schedules the program for a CUDA device that is not there,
described by the numbers of an A100, and is stopped before it writes code. Prints a row of the table
of docs/validation/fusion.md for each model: kernels of both, pointwise, reductions and library
calls; `ratio`, gpuir's over Inductor's; precision, recall and F1 of the pairs of model ops that
share a kernel; `same`, the share of Inductor's kernels that have the same model ops as one of
gpuir's. Compared are ops that compute something in both: no views, copies or casts, nothing
folded. `--launches` lists them. With `--autocast` both run under torch.autocast("cuda"). MODEL is
one listed here, or of timm.
Needs gpuir[hf], and timm or diffusers for models that are theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from gpuir.frontends.torch.load import functional, load
from gpuir.ir.graph import Graph, Op
from gpuir.ir.phases import operator_of
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.stacks.table import pipeline
from gpuir.targets.profile import load_profile
from validation.throughput.programs import import_timm

CUDA = torch.device("cuda:0")
CPU = torch.device("cpu")
AUTOCAST = {"f16": torch.float16, "bf16": torch.bfloat16}
# What Inductor asks of a device (runtime/hints.py, DeviceProperties): NVIDIA A100 whitepaper.
A100 = SimpleNamespace(
    name="NVIDIA A100",
    major=8,
    minor=0,
    multi_processor_count=108,
    total_memory=40 << 30,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=166912,
    L2_cache_size=40 << 20,
    gcnArchName="",
    is_integrated=0,
)


@dataclass(frozen=True)
class Kernel:
    """A launch: `kind` is pointwise, reduction or extern; `ops` the model nodes it computes."""

    kind: str
    ops: frozenset[str]


@dataclass(frozen=True)
class Agreement:
    """Inductor's kernels and gpuir's, of one model."""

    name: str
    theirs: tuple[Kernel, ...]
    ours: tuple[Kernel, ...]

    @property
    def ratio(self) -> float:
        return len(self.ours) / len(self.theirs)

    def shared(self) -> tuple[float, float, float]:
        """Precision, recall and F1 of the pairs of model ops that share a kernel."""
        a, b = pairs(self.theirs), pairs(self.ours)
        both = len(a & b)
        precision = both / len(b) if b else 1.0
        recall = both / len(a) if a else 1.0
        return precision, recall, 2 * both / (len(a) + len(b)) if a or b else 1.0

    def same(self) -> float:
        """The share of Inductor's kernels with exactly the same model ops as one of gpuir's."""
        ours, theirs = (Counter(x.ops for x in side) for side in (self.ours, self.theirs))
        return (ours & theirs).total() / len(self.theirs)


def pairs(kernels: Sequence[Kernel]) -> set[tuple[str, str]]:
    return {pair for x in kernels for pair in combinations(sorted(x.ops), 2)}


# ---------------------------------------------------------------------------- Inductor


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """torch as if it saw an A100, for as long as no tensor is computed."""
    from torch._inductor.runtime.hints import DeviceProperties

    interface = "torch._dynamo.device_interface.CudaInterface"
    cudnn = torch._C._ConvBackend.Cudnn
    DeviceProperties.create.cache_clear()
    with contextlib.ExitStack() as stack:
        for name, value in {
            "torch.cuda.is_available": lambda: True,
            "torch.cuda.current_device": lambda: 0,
            "torch.cuda.device_count": lambda: 1,
            "torch.cuda.get_device_properties": lambda device=None: A100,
            "torch.cuda.get_device_capability": lambda device=None: (8, 0),
            f"{interface}.get_device_properties": staticmethod(lambda device=None: A100),
            f"{interface}.get_compute_capability": staticmethod(lambda device=None: 80),
            "torch._inductor.scheduler.has_triton": lambda: True,
            "torch._C._select_conv_backend": lambda *args, **kwargs: cudnn,
            "torch._C._conv_determine_backend_memory_format": convolved_format,
        }.items():
            stack.enter_context(mock.patch(name, value))
        yield
    DeviceProperties.create.cache_clear()


def convolved_format(x: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
    """How cuDNN's convolution lays its result out: channels last, if either operand is.
    (aten/src/ATen/native/ConvUtils.h, cudnn_conv_suggest_memory_format.)"""
    plain = torch.contiguous_format
    if x.dtype == torch.float64 or weight.dim() not in (4, 5):
        return plain
    formats = map(torch._prims_common.suggest_memory_format, (x, weight))
    return next((found for found in formats if found != plain), plain)


def inductor_kernels(
    program: torch.export.ExportedProgram,
    *,
    train: bool = False,
    autocast: torch.dtype | None = None,
) -> list[list[Kernel]]:
    """What torch.compile would launch: a list for each graph it compiles, forward then backward;
    under torch.autocast("cuda") in a dtype, if one is given."""
    from torch._functorch import config as functorch
    from torch._inductor import compile_fx as fx
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import decompositions
    from torch._inductor.fx_passes import fuse_attention

    found: list[list[Kernel]] = []

    def stop(
        gm: torch.fx.GraphModule, inputs: Sequence[Any], **settings: Any
    ) -> Callable[..., Any]:
        found.append(scheduled(gm, inputs, {**settings, "program": id(graph.graph)}))
        return lambda args: args

    graph = program.graph_module
    inputs = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    if autocast is not None:
        graph = copy.deepcopy(graph)
        for node in graph.graph.nodes:  # the export's word on dtypes, which autocast changes
            if packet(node) == "_assert_tensor_metadata":
                graph.graph.erase_node(node)
        move(graph, CUDA)
        inputs = on(CUDA, inputs)
    check = fuse_attention._sfdp_params_check

    def in_16_bits(match: Any) -> bool:  # in f32 the kernels use TF32, which is off
        return match.kwargs["query"].meta["val"].dtype != torch.float32 and check(match)

    passes = fx._recursive_joint_graph_passes

    def passes_on_cpu(
        gm: torch.fx.GraphModule, skip_invoke_subgraph: bool = False, *_: Any, **__: Any
    ) -> Any:
        move(gm, CPU)  # they trace patterns and fold constants with tensors that have numbers
        return passes(gm, skip_invoke_subgraph, CPU)

    sdpa = torch.ops.aten.scaled_dot_product_attention.default
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    before = sdpa.py_kernels.get(key)
    sdpa.py_kernels[key] = attention
    sdpa._dispatch_cache.clear()
    try:
        with (
            torch.set_grad_enabled(train),
            warnings.catch_warnings(),
            config.patch(force_disable_caches=True),
            mock.patch.object(fx, "_recursive_joint_graph_passes", passes_on_cpu),
            mock.patch.object(fuse_attention, "_sfdp_params_check", in_16_bits),
            mock.patch.dict(decompositions, STEPS),
            functorch.patch(force_non_lazy_backward_lowering=True),
        ):
            warnings.simplefilter("ignore")
            with autocasting(autocast):
                compile_fx(graph, inputs, inner_compile=stop)
    finally:
        del sdpa.py_kernels[key]
        if before is not None:
            sdpa.py_kernels[key] = before
        sdpa._dispatch_cache.clear()
    return found


def move(gm: torch.fx.GraphModule, device: torch.device) -> None:
    """Has a graph compute on a device, with tensors that hold no numbers."""
    for part in (m for m in gm.modules() if isinstance(m, torch.fx.GraphModule)):
        nodes = [node for node in part.graph.nodes if "val" in node.meta]
        for node, value in zip(nodes, on(device, [n.meta["val"] for n in nodes]), strict=True):
            node.meta["val"] = value
        for node in part.graph.nodes:
            node.args, node.kwargs = tree_map(
                lambda x: device if isinstance(x, torch.device) else x, (node.args, node.kwargs)
            )
        part.recompile()


def on(device: torch.device, values: Sequence[Any]) -> list[Any]:
    """Values with their tensors on a device, which hold no numbers there."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def like(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    with pretended_gpu(), mode:
        return tree_map(like, list(values))


@contextlib.contextmanager
def autocasting(dtype: torch.dtype | None) -> Iterator[None]:
    """torch.autocast("cuda"), which turns itself off where there is no GPU; nothing without a
    dtype."""
    if dtype is None:
        yield
        return
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def attention(
    q: Any, k: Any, v: Any, mask: Any = None, p: float = 0.0, causal: bool = False, **rest: Any
) -> Any:
    """The call that CUDA's attention in f32 ends in (aten/src/ATen/native/transformers/cuda)."""
    if rest.pop("enable_gqa", False):
        k, v = (x.repeat_interleave(q.size(-3) // x.size(-3), -3) for x in (k, v))
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(q.dtype)
    if mask is not None:
        mask = mask.expand(*q.shape[:-1], k.shape[-2])
    grad = torch.is_grad_enabled() and q.requires_grad
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, grad, p, causal, scale=rest.get("scale")
    )[0]


def group_norm(
    x: Any, weight: Any, bias: Any, n: int, channels: int, cells: int, groups: int, eps: float
) -> tuple[Any, Any, Any]:
    """The steps of a group norm on CUDA; on the CPU PyTorch scales weights by the deviations first
    (torch/_refs, native_group_norm)."""
    grouped = x.reshape(n, groups, channels // groups, cells)
    variance, mean = torch.var_mean(grouped, dim=[2, 3], unbiased=False, keepdim=True)
    deviation = torch.rsqrt(variance + eps)
    y = ((grouped - mean) * deviation).view(x.shape)
    ends = [1] * (x.dim() - 2)
    y = y if weight is None else y * weight.view(channels, *ends)
    y = y if bias is None else y + bias.view(channels, *ends)
    return y, mean.reshape(n, groups), deviation.reshape(n, groups)


def index_select(x: Any, axis: int, index: Any) -> Any:
    """A selection as the indexing that it is; torch's own asks the GPU's driver."""
    return torch.ops.aten.index.Tensor(x, [*[None] * (axis % x.dim()), index])


STEPS = {
    torch.ops.aten.native_group_norm.default: group_norm,
    torch.ops.aten.index_select.default: index_select,
}


def scheduled(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], settings: dict[str, Any]
) -> list[Kernel]:
    """The kernels of one graph after AOTAutograd, as Inductor's scheduler leaves them.

    What _InProcessFxCompile.codegen_and_compile does (torch/_inductor/compile_fx.py), up to code.
    """
    from torch._inductor import compile_fx as fx
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    inference = bool(settings.get("is_inference"))
    with pretended_gpu(), torch.no_grad():
        move(gm, CUDA)
        inputs = on(CUDA, inputs)
        fx.view_to_reshape(gm)
        fake = fx.fake_tensor_prop(gm, inputs, force_allow_non_fake_inputs=True)
        fx._recursive_record_original_output_strides(gm)
        with V.set_fake_mode(fake):
            fx._recursive_post_grad_passes(gm, is_inference=inference)
            graph = GraphLowering(
                gm,
                example_inputs=inputs,
                is_inference=inference,
                is_backward=bool(settings.get("is_backward")),
            )
            with (
                V.set_graph_handler(graph),
                V.set_extern_kernel_nodes([]),
                V.set_debug_handler(mock.MagicMock()),
            ):
                lowered: dict[torch.fx.Node, Any] = {}
                step = graph.run_node

                def run_node(node: torch.fx.Node) -> Any:
                    lowered[node] = step(node)
                    return lowered[node]

                graph.run_node = run_node
                graph.run(*inputs)
                graph.init_wrapper_code()
                graph._update_scheduler()
                memory = Memory.of(graph, lowered, settings["program"])
                return [x for n in graph.scheduler.nodes if (x := kernel_of(n, memory))]


@dataclass(frozen=True)
class Memory:
    """Which buffers hold a node's value, which nodes no kernel computes again (calls and
    reductions), and which buffers hold sums that a reduction's value is computed from."""

    held: dict[torch.fx.Node, set[str]]
    fixed: set[torch.fx.Node]
    sums: dict[torch.fx.Node, set[str]]
    program: int  # the identity of the exported program's graph, as nodes name their origin by

    @staticmethod
    def of(graph: Any, lowered: dict[torch.fx.Node, Any], program: int) -> Memory:
        from torch._inductor import ir

        held: dict[torch.fx.Node, set[str]] = {}
        fixed: set[torch.fx.Node] = set()
        sums: dict[torch.fx.Node, set[str]] = {}
        for node, x in lowered.items():
            if name := buffer_of(x):
                held.setdefault(node, set()).add(name)
        for op in graph.operations:
            if node := reduced_last(op):
                fixed.add(node)
                own = held.get(node, set[str]())
                sums.setdefault(node, set()).update({op.get_name()} - own)
            node = op.get_origin_node() or called_last(op)
            if node is None:
                continue
            held.setdefault(node, set()).add(op.get_operation_name())
            held[node] |= {buffer.get_name() for buffer in op.get_outputs()}
            if not (isinstance(op, ir.ComputedBuffer) and isinstance(op.data, ir.Pointwise)):
                fixed.add(node)
        return Memory(held, fixed, sums, program)


def called_last(op: Any) -> torch.fx.Node | None:
    """The library's call that an operation stands for, where that is not its node's whole value:
    a convolution without its bias."""
    from torch._inductor import ir

    if not isinstance(op, ir.ExternKernel):
        return None
    origins = [o for o in op.get_origins() if not is_view(o)]
    calls = [o for o in origins if is_called(o)] or origins  # none: a fallback to ATen
    order = {n: i for i, n in enumerate(calls[0].graph.nodes)} if calls else {}
    return max(calls, key=order.__getitem__, default=None)


def reduced_last(op: Any) -> torch.fx.Node | None:
    """The node that a reduction is of, or a part: the last of those that went into it."""
    from torch._inductor import ir

    if not isinstance(op, ir.ComputedBuffer) or not isinstance(op.data, ir.Reduction):
        return None
    reductions = [o for o in op.get_origins() if is_reduction(o)]
    order = {n: i for i, n in enumerate(reductions[0].graph.nodes)} if reductions else {}
    return max(reductions, key=order.__getitem__, default=None)


def is_reduction(node: torch.fx.Node) -> bool:
    return torch.Tag.reduction in getattr(node.target, "tags", ())


def buffer_of(x: Any) -> str | None:
    """The name of the buffer that a lowered value lies in; None where it is computed in place."""
    from torch._inductor import ir

    while isinstance(x, ir.MutableBox | ir.BaseView):
        x = x.data
    return x.name if isinstance(x, ir.Buffer) else None


def kernel_of(node: Any, memory: Memory) -> Kernel | None:
    """A scheduled node as what it launches; None for what launches nothing."""
    from torch._inductor import ir

    parts = [n for n in node.get_nodes() if n.node is not None]
    if all(isinstance(n.node, ir.NopKernel | ir.MultiOutput) for n in parts):
        return None
    if node.is_extern():
        call = parts[0].node
        origin = call.get_origin_node() or called_last(call)
        return Kernel("extern", names({origin} - {None}, memory.program))
    there = {name for n in parts for name in n.read_writes.buffer_names()}
    origins = {o for n in parts for o in n.node.get_origins()}
    called = {o for o in origins if is_called(o)}
    sums = {o for o in origins if memory.sums.get(o, set()) & there}
    made = {o: sources(o, there, memory) for o in origins - called if o not in memory.sums}
    ops = {o for o, found in made.items() if found} | sums
    ops |= {o for o in called if is_biased(o, there, memory)}
    constant = {o for o, found in made.items() if found == set()}
    if not ops:
        ops = constant
    while more := {o for o in constant - ops if reaches(o, ops)}:
        ops |= more
    return Kernel("reduction" if node.is_reduction() else "pointwise", names(ops, memory.program))


def reaches(node: torch.fx.Node, ops: set[torch.fx.Node]) -> bool:
    """Whether one of some nodes reads a node, through views or not."""
    return any(u in ops or (is_view(u) and reaches(u, ops)) for u in node.users)


def is_biased(node: torch.fx.Node, there: set[str], memory: Memory) -> bool:
    """Whether a kernel adds the bias of a convolution, which Inductor takes out of the call."""
    if packet(node) != "convolution" or node.args[2] is None:
        return False
    bias = node.args[2]
    while packet(bias) == "convert_element_type":
        bias = bias.args[0]
    return all(memory.held.get(n, set()) & there for n in (node, bias))


def sources(node: torch.fx.Node, there: set[str], memory: Memory) -> set[torch.fx.Node] | None:
    """What a kernel that touches the buffers `there` alone computes a node from; None where it
    cannot. Inductor lists more origins: all that went into a call that an operand is copied for."""
    stack, seen, found = list(node.all_input_nodes), set[torch.fx.Node](), set[torch.fx.Node]()
    while stack:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        if memory.held.get(n, set()) & there:
            found.add(n)
        elif n.op == "placeholder" or is_called(n) or n in memory.fixed:
            return None
        else:
            stack += n.all_input_nodes
    return found


def names(nodes: set[torch.fx.Node], program: int) -> frozenset[str]:
    moving = {n for n in nodes if not (is_view(n) or packet(n) == "convert_element_type")}
    return frozenset(name for n in moving if (name := model_node(n, program)))


LIBRARY = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_scaled_dot")
VIEWS = (
    *("view", "reshape", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "alias"),
    *("as_strided", "transpose", "t", "unbind", "split", "split_with_sizes", "getitem", "detach"),
    *(
        "clone",
        "contiguous",
        "lift_fresh_copy",
        "chunk",
        "flatten",
        "unflatten",
        "view_as",
        "numpy_T",
    ),
)


def is_called(node: torch.fx.Node) -> bool:
    """Whether a node is a library's call."""
    name = packet(node)
    return name in LIBRARY or name.startswith("_scaled_dot")


def is_view(node: torch.fx.Node) -> bool:
    return packet(node) in VIEWS


def packet(node: torch.fx.Node) -> str:
    target = node.target
    name = getattr(target, "overloadpacket", target)
    return getattr(name, "__name__", str(name))


def model_node(node: torch.fx.Node, program: int) -> str:
    """The node of the exported program that a node of Inductor's graph comes from, if it says."""
    sources = list(node.meta.get("from_node") or ())
    while sources:
        source = sources.pop()
        if source.graph_id == program:
            return source.name
        sources += source.from_node
    return ""


# ---------------------------------------------------------------------------- gpuir


def is_still(op: Op) -> bool:
    """Whether an op computes nothing, or is a cast: of those one side has more than the other."""
    if isinstance(op, t.Map):
        return op.fn in ("identity", "copy")
    return isinstance(op, t.Layout | t.Ordered | t.Cast | t.Constant | t.Iota)


def gpuir_kernels(graph: Graph, passes: str) -> list[Kernel]:
    """The launches of a graph under the passes of a profile."""
    made = pipeline(passes).run(graph)
    kernels: list[Kernel] = []
    for node in made.nodes:
        if isinstance(node.op, k.View):
            continue
        kind = "reduction" if isinstance(node.op, k.Reduce) else "pointwise"
        if node.op.contraction or isinstance(node.op, k.Opaque):
            kind = "extern"
        parts = node.op.body.nodes if isinstance(node.op, k.BodyKernel) else (node,)
        locs = [loc for n in parts if not is_still(n.op) for loc in n.locs]
        kernels.append(Kernel(kind, frozenset(map(operator_of, locs))))
    return kernels


# ---------------------------------------------------------------------------- models


def compare(name: str, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Agreement:
    """Both sides of a module, for inference."""
    return compared(name, "compiled", module, args, kwargs)


def compared(
    name: str,
    profile: str,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    autocast: str = "",
) -> Agreement:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(module.eval(), args, kwargs, strict=False)
        program = functional(program)
        passes = load_profile(profile).passes
        if autocast:
            passes = f"autocast{{dtype={autocast}}},{passes}"
        ours = gpuir_kernels(load(program).graph, passes)
        found = inductor_kernels(program, autocast=AUTOCAST.get(autocast))
        theirs = [x for part in found for x in part]
    views = {n.name for n in program.graph.nodes if n.op == "call_function" and is_view(n)}
    # what one of the two sides folds, or does by views, is in no kernel of it
    known = frozenset.intersection(*(computed(side) for side in (ours, theirs))) - views
    return Agreement(
        name,
        tuple(Kernel(x.kind, x.ops & known) for x in theirs),
        tuple(Kernel(x.kind, x.ops & known) for x in ours),
    )


def computed(kernels: Sequence[Kernel]) -> frozenset[str]:
    """The model ops that some kernel computes."""
    return frozenset[str]().union(*(x.ops for x in kernels))


Case = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]


def language(kind: str, head: str, attention: str = "sdpa", **settings: Any) -> Callable[[], Case]:
    """A language model of Hugging Face with two layers, on two sequences of 64 tokens."""

    def build() -> Case:
        import transformers

        config = getattr(transformers, f"{kind}Config")(
            vocab_size=1000, attn_implementation=attention, **settings
        )
        tokens = torch.ones(2, 64, dtype=torch.long)
        model = getattr(transformers, f"{kind}{head}")(config)
        given = {"input_ids": tokens}
        if config.is_encoder_decoder:
            given["decoder_input_ids"] = tokens
        return model, (), given if head == "Model" else {**given, "use_cache": False}

    return build


def vision(name: str) -> Callable[[], Case]:
    """A model of timm, on two images."""

    def build() -> Case:
        return import_timm().create_model(name), (torch.zeros(2, 3, 224, 224),), {}

    return build


def vit() -> Case:
    import transformers

    config = transformers.ViTConfig(
        num_hidden_layers=2, hidden_size=192, num_attention_heads=3, intermediate_size=768
    )
    return transformers.ViTModel(config), (torch.zeros(2, 3, 224, 224),), {}


def whisper() -> Case:
    import transformers

    sizes = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 128, "vocab_size": 1000}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    widths = {"encoder_ffn_dim": 512, "decoder_ffn_dim": 512}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **heads, **widths, **tokens)
    given = {
        "input_features": torch.zeros(1, 80, 3000),
        "decoder_input_ids": torch.ones(1, 16, dtype=torch.long),
    }
    return transformers.WhisperModel(config), (), {**given, "use_cache": False}


def unet() -> Case:
    import diffusers

    model = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    return model, (torch.zeros(2, 4, 16, 16), torch.tensor(5), torch.zeros(2, 7, 32)), {}


class DLRM(torch.nn.Module):
    """Naumov et al.: Deep Learning Recommendation Model, 2019: bags of embeddings, their products
    with each other, and a network before and behind."""

    def __init__(self, tables: int = 8, width: int = 64):
        super().__init__()
        bags = (torch.nn.EmbeddingBag(1000, width, mode="sum") for _ in range(tables))
        self.bags = torch.nn.ModuleList(bags)
        self.bottom = self.network(13, 512, 256, width)
        pairs = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", pairs)
        self.top = self.network(width + pairs.shape[1], 512, 256)
        self.last = torch.nn.Linear(256, 1)

    @staticmethod
    def network(*widths: int) -> torch.nn.Sequential:
        layers = pairwise(widths)
        parts = ((torch.nn.Linear(a, b), torch.nn.ReLU()) for a, b in layers)
        return torch.nn.Sequential(*(part for pair in parts for part in pair))

    def forward(self, dense: Any, indices: Any, offsets: Any) -> Any:
        x = self.bottom(dense)
        rows = [bag(i, o) for bag, i, o in zip(self.bags, indices, offsets, strict=True)]
        every = torch.stack([x, *rows], 1)
        products = torch.bmm(every, every.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return torch.sigmoid(self.last(self.top(torch.cat([x, products], 1))))


def dlrm() -> Case:
    indices = [torch.zeros(64, dtype=torch.long)] * 8
    return DLRM(), (torch.zeros(32, 13), indices, [torch.arange(0, 64, 2)] * 8), {}


BERT = {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4}
GPT2 = {"n_layer": 2, "n_embd": 256, "n_head": 4}
LLAMA = {**BERT, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 688}
T5 = {"num_layers": 2, "num_decoder_layers": 2, "d_model": 256, "d_ff": 512, "num_heads": 4}
MODELS: dict[str, Callable[[], Case]] = {
    "bert-eager": language("Bert", "Model", "eager", **BERT, intermediate_size=1024),
    "bert-sdpa": language("Bert", "Model", **BERT, intermediate_size=1024),
    "gpt2-eager": language("GPT2", "LMHeadModel", "eager", **GPT2),
    "gpt2-sdpa": language("GPT2", "LMHeadModel", **GPT2),
    "llama-eager": language("Llama", "ForCausalLM", "eager", **LLAMA),
    "llama-sdpa": language("Llama", "ForCausalLM", **LLAMA),
    "qwen2": language("Qwen2", "ForCausalLM", **LLAMA),
    "qwen3": language("Qwen3", "ForCausalLM", **LLAMA),
    "mixtral": language("Mixtral", "ForCausalLM", **LLAMA, num_local_experts=4),
    "t5": language("T5", "ForConditionalGeneration", "eager", **T5),
    "vit": vit,
    "whisper": whisper,
    "resnet50": vision("resnet50"),
    "vgg11": vision("vgg11"),
    "efficientnet_b0": vision("efficientnet_b0"),
    "mobilenetv3": vision("mobilenetv3_small_100"),
    "convnext": vision("convnext_tiny"),
    "swin": vision("swin_tiny_patch4_window7_224"),
    "unet": unet,
    "dlrm": dlrm,
}
OPT = {**BERT, "ffn_dim": 1024, "word_embed_proj_dim": 256}
SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 1024}
BART = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in SIDE.items()}
# Models that were added when the passes were there. Those of `FRESH` from `resnext` on were run
# at the end; three of them (inception, poolformer, phi) were then looked at for a rule.
FRESH: dict[str, Callable[[], Case]] = {
    "albert": language("Albert", "Model", **BERT, intermediate_size=1024),
    "bart": language("Bart", "ForConditionalGeneration", "eager", d_model=256, **BART),
    "opt": language("OPT", "ForCausalLM", **OPT),
    "gemma": language("Gemma", "ForCausalLM", **LLAMA, head_dim=32),
    "gpt-neox": language("GPTNeoX", "ForCausalLM", "eager", **BERT, intermediate_size=1024),
    "bloom": language("Bloom", "ForCausalLM", "eager", n_layer=2, hidden_size=256, n_head=4),
    "deit": vision("deit_tiny_distilled_patch16_224"),
    "mixer": vision("mixer_s32_224"),
    "regnet": vision("regnety_004"),
    "densenet": vision("densenet121"),
    "resnext": vision("resnext50_32x4d"),
    "inception": vision("inception_v3"),
    "ghostnet": vision("ghostnet_100"),
    "poolformer": vision("poolformer_s12"),
    "beit": vision("beit_base_patch16_224"),
    "distilbert": language("DistilBert", "Model", n_layers=2, dim=256, n_heads=4, hidden_dim=1024),
    "phi": language("Phi", "ForCausalLM", **BERT, intermediate_size=1024),
    "falcon": language("Falcon", "ForCausalLM", "eager", **BERT),
    "mpt": language("Mpt", "ForCausalLM", "eager", d_model=256, n_heads=4, n_layers=2),
    "stablelm": language("StableLm", "ForCausalLM", **LLAMA),
}
KINDS = ("pointwise", "reduction", "extern")


def counts(kernels: Sequence[Kernel]) -> str:
    kinds = Counter(x.kind for x in kernels)
    return " ".join(f"{kinds[kind]:4}" for kind in KINDS) + f" {len(kernels):5}"


def show(found: Agreement) -> None:
    """The kernels of both sides, a star before those that the other has not."""
    sides = {"inductor": (found.theirs, found.ours), "gpuir": (found.ours, found.theirs)}
    for title, (kernels, others) in sides.items():
        print(f"-- {title}")
        rest = Counter(x.ops for x in others)
        for x in kernels:
            mark = " " if rest[x.ops] > 0 else "*"
            rest[x.ops] -= 1
            print(f"{mark} {x.kind:10}", " ".join(sorted(x.ops)))


def main() -> int:
    assert __doc__
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--launches", action="store_true")
    parser.add_argument("--profile", default="compiled")
    parser.add_argument("--autocast", default="", choices=AUTOCAST)
    given = parser.parse_args()
    torch.manual_seed(0)
    side = "  pw  red  ext   sum"
    print(f"{'model':16}{side} |{side}  ratio  prec   rec    F1  same")
    models = {**MODELS, **FRESH}
    wanted = [m for name in given.models for m in (FRESH if name == "fresh" else [name])]
    for name in wanted or MODELS:
        try:
            found = compared(
                name, given.profile, *(models.get(name) or vision(name))(), autocast=given.autocast
            )
        except Exception as error:  # a library that is missing, or does not fit this torch
            print(f"{name:16} {type(error).__name__}: {' '.join(str(error).split())[:80]}")
            continue
        if given.launches:
            show(found)
        shares = " ".join(f"{x:5.2f}" for x in (*found.shared(), found.same()))
        both = f"{counts(found.theirs)} | {counts(found.ours)}"
        print(f"{name:15} {both}  {found.ratio:5.2f} {shares}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
