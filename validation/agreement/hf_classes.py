"""Classes of transformers beside gpuir: parameters, arithmetic of products, bytes of the cache.

    python -m validation.agreement.hf_classes [--all] [--filter SUBSTR] [--after TYPE]
                                              [--config FOLDER ...] [--seconds N]

Each model type is built from its config class with few layers. What is compared is computed
without gpuir: parameters are counted in the module, arithmetic by torch's formulas of operators
(FlopCounterMode) while transformers runs the module on the meta device, and keys and values from
the config's numbers. What no output needs is arithmetic that torch.export leaves out, and so does
gpuir: it is counted apart, after a `+`. A
model that gpuir refuses has to say so by the name of its class. Exit code 1 where a number differs,
or where gpuir finds fault with the user for what transformers runs.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES as MATCHED,
)

import gpuir
from gpuir.frontends.torch import hf, masks
from gpuir.ir.errors import GpuirError
from gpuir.ops import tensor as t

LAYERS = 2
NAMES = (  # what configs call their layers
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "depth"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "encoder_num_hidden_layers"),
)
COUNTS = dict.fromkeys(NAMES, LAYERS)
SIZES = {"batch": 2, "seq": 48, "target": 16, "samples": 16000, "frames": 1024}
PAST = 40
IMAGE = 224  # where a config says nothing
PLAIN = (t.Matmul, t.Conv, t.ConvTranspose)
USUAL = (  # of many kinds: decoders, mixtures, encoders, both, images, sound, images and text
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2"),
    *("gemma3_text", "phi", "phi3", "phimoe", "gpt2", "gpt_neox", "gptj", "gpt_bigcode", "opt"),
    *("bloom", "falcon", "mpt", "cohere", "cohere2", "olmo2", "olmoe", "deepseek_v2"),
    *("deepseek_v3", "gpt_oss", "starcoder2", "stablelm", "glm4", "granite", "granitemoe"),
    *("smollm3", "exaone4", "nemotron", "mamba", "mamba2", "llama4_text", "minicpm3"),
    *("bert", "roberta", "albert", "deberta-v2", "electra", "distilbert", "modernbert", "xlnet"),
    *("t5", "bart", "marian", "pegasus", "whisper", "moonshine", "speech_to_text", "longt5"),
    *("vit", "deit", "beit", "swin", "convnext", "resnet", "dinov2", "siglip", "segformer", "clip"),
    *("wav2vec2", "hubert", "audio-spectrogram-transformer", "llava", "paligemma", "qwen2_vl"),
)


@dataclass
class Row:
    """One class: its numbers, ours and those computed without us; or why there are none."""

    name: str
    cls: str = ""
    parameters: tuple[int, int] | None = None
    flops: tuple[float, float] | None = None
    cache: tuple[int, int] | None = None
    unread: float = 0  # arithmetic of transformers' that no output needs
    theirs: str = ""  # what transformers says where it does not run
    said: dict[str, str] = field(default_factory=dict[str, str])  # what we say, by phase

    @property
    def faults(self) -> list[str]:
        found = [
            kind
            for kind in ("parameters", "flops", "cache")
            if (pair := getattr(self, kind)) and pair[0] != pair[1]
        ]
        if not self.theirs:
            found += [f"{phase}: blames" for phase, text in self.said.items() if not is_plain(text)]
        return found


def is_plain(text: str) -> bool:
    """Whether a refusal says that it is gpuir which does not do it."""
    words = ("gpuir does not", "gpuir cannot", "not supported", "OutOfTime")
    return any(word in text for word in words)


class OutOfTime(BaseException):
    """Nobody takes it for an error of the model's."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise OutOfTime(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def small(cls: Any) -> Any:
    """The config of a class, of few layers where it can have few."""
    config = cls()
    own = config.to_dict()
    few: dict[str, Any] = {k: n for k, n in COUNTS.items() if isinstance(own.get(k), int)}
    for part in getattr(cls, "sub_configs", {}):
        of_part = getattr(config, part, None)
        if hasattr(of_part, "to_dict"):
            data = of_part.to_dict()
            few[part] = data | {k: n for k, n in COUNTS.items() if isinstance(data.get(k), int)}
            few[part].pop("layer_types", None)
    for given in (few, {k: n for k, n in few.items() if not isinstance(n, dict)}, {}):
        try:
            return cls(**given)
        except Exception:  # its numbers then do not fit together
            continue
    return config


def write(config: Any, folder: Path) -> str:
    """The config as a file; the class is the first of its tasks."""
    names = [hf._class_names(task, config.model_type) for task in hf.TASKS]
    known = [name for found in names for name in found if hasattr(transformers, name)]
    cls = known[0] if known else ""
    data = config.to_dict() | {"architectures": [cls], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(data, default=str))
    return cls


# ---------------------------------------------------------------------------- without gpuir


def run_by_transformers(path: Path, row: Row) -> Any:
    """The model of the config, run on the meta device on inputs of `SIZES`: its parameters and
    arithmetic in `row`."""
    data = json.loads((path / "config.json").read_text())
    config = CONFIG_MAPPING[data["model_type"]].from_dict(data)
    cls = getattr(transformers, data["architectures"][0])
    with torch.device("meta"):
        model = cls._from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
        for module in model.modules():
            if hasattr(module, "config") and hasattr(module.config, "_experts_implementation"):
                module.config._experts_implementation = "batched_mm"
        inputs = inputs_of(model)
        unread = masks.replaced(masks.changes())  # masks whose numbers transformers would read
        with torch.no_grad(), unread, Recorded() as run:
            fixed = {"use_cache": False} if hasattr(config, "use_cache") else {}
            out = model(**inputs, **fixed)
    needed = run.needed(out)
    row.unread = run.total - needed
    return model, needed


class Recorded(TorchDispatchMode):
    """The operators of a run: memory that each reads and writes, and its arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[set[int], set[int], float]] = []
        self.alive: list[Any] = []  # a place in memory has one meaning as long as it is held

    @property
    def total(self) -> float:
        return sum(flops for _, _, flops in self.steps)

    def places(self, tree: Any) -> set[int]:
        found = [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
        self.alive += found
        return {x._cdata for x in found}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if packet not in flop_registry and func is not torch.ops.prim.device.default:
            with self:  # into its parts, as FlopCounterMode does
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        formula = flop_registry.get(packet)
        flops = float(formula(*args, **kwargs, out_val=out)) if formula else 0.0
        given = zip(func._schema.arguments, args, strict=False)
        written = [x for spec, x in given if spec.alias_info and spec.alias_info.is_write]
        named = {spec.name: spec.alias_info for spec in func._schema.arguments}
        written += [x for k, x in kwargs.items() if named.get(k) and named[k].is_write]
        self.steps.append((self.places((args, kwargs)), self.places((out, written)), flops))
        return out

    def needed(self, out: Any) -> float:
        """The arithmetic of what these outputs are computed from."""
        live, total = self.places(out), 0.0
        for reads, writes, flops in reversed(self.steps):
            if live & writes:
                live |= reads
                total += flops
        return total


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """What the model is called with, by its main input."""
    import inspect

    takes = inspect.signature(model.forward).parameters
    config, main = model.config, model.main_input_name
    text = "ForConditionalGeneration" in type(model).__name__ and "input_ids" in takes
    main = "input_ids" if text and main in ("pixel_values",) else main
    batch, found = SIZES["batch"], dict[str, torch.Tensor]()

    def key(*names: str) -> Any:
        parts = (
            config,
            *(getattr(config, f"{p}_config", None) for p in ("vision", "audio", "text")),
        )
        found = (getattr(part, name, None) for name in names for part in parts if part is not None)
        return next((x for x in found if x is not None), None)

    if main == "input_ids" or (main == "pixel_values" and hasattr(config, "text_config")):
        found["input_ids"] = torch.zeros((batch, SIZES["seq"]), dtype=torch.int64)
    matched = type(model).__name__ in MATCHED.values()
    if main == "pixel_values" or (matched and "pixel_values" in takes):
        size = key("image_size") or IMAGE
        size = (size, size) if isinstance(size, int) else tuple(size)
        shape = (batch, key("num_channels") or 3, *size)
        found["pixel_values"] = torch.zeros(shape, dtype=torch.bfloat16)
    if main == "input_features":
        width = key("input_feat_per_channel", "feature_projection_input_dim")
        frames = SIZES["frames"] if width else 2 * key("max_source_positions")
        shape = (batch, frames, width) if width else (batch, key("num_mel_bins") or 80, frames)
        found["input_features"] = torch.zeros(shape, dtype=torch.bfloat16)
    if main == "input_values":
        bins = key("frequency_stride") and key("num_mel_bins")
        shape = (batch, SIZES["frames"], bins) if bins else (batch, SIZES["samples"])
        found[main] = torch.zeros(shape, dtype=torch.bfloat16)
    if "decoder_input_ids" in takes:
        found["decoder_input_ids"] = torch.zeros((batch, SIZES["target"]), dtype=torch.int64)
    if not found:
        raise ValueError(f"no inputs are known for {main}")
    return found


def cache_bytes(config: Any) -> int | None:
    """Keys and values of all tokens, a layer: heads, their width, two bytes; no more tokens than a
    layer's window. None where the config is of a kind that this does not know."""
    config = getattr(config, "text_config", None) or config

    def get(*names: str) -> Any:
        values = (getattr(config, name, None) for name in names)
        return next((x for x in values if x is not None), None)

    layers = get("num_hidden_layers", "n_layer", "n_layers")
    if not isinstance(layers, int):
        return None
    kinds = get("layer_types") or ["full_attention"] * layers
    if not {*kinds} <= {"full_attention", "sliding_attention"}:
        return None
    each = [config] * layers
    if getattr(config, "is_heterogeneous", False):
        each = list(config.per_layer_config)
    rows = [row_of(own, kind) for own, kind in zip(each, kinds, strict=True)]
    return None if None in rows else sum(rows) * SIZES["batch"] * 2


def row_of(config: Any, kind: str) -> int | None:
    """The numbers that a layer of this kind keeps of a sequence."""

    def get(*names: str) -> Any:
        values = (getattr(config, name, None) for name in names)
        return next((x for x in values if x is not None), None)

    heads = get("num_attention_heads", "n_head", "n_heads")
    width = get("hidden_size", "n_embd", "d_model")
    if not (isinstance(heads, int) and isinstance(width, int)):
        return None
    sliding = kind == "sliding_attention"
    tokens = min(PAST + 1, config.sliding_window) if sliding else PAST + 1
    if get("kv_lora_rank"):
        return tokens * (config.kv_lora_rank + config.qk_rope_head_dim)
    kept = get("num_key_value_heads") or heads
    if getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    ):
        kept = 1  # Falcon, GPT-BigCode
    if sliding and config.model_type == "mimo_v2_flash":
        kept *= 2  # its modeling file says so, not its config
    keys = get("head_dim") or width // heads
    return tokens * kept * (keys + (get("v_head_dim") or keys))


# ---------------------------------------------------------------------------- gpuir


def arithmetic(graph: Any) -> float:
    """Of products, convolutions and attention, loops and branches too."""
    total = 0.0
    for node in graph.nodes:
        op = node.op
        if isinstance(op, t.Experts):  # its products alone; weights are [experts, in, out]
            stacks = [w for w in (op.up, op.down, op.gate) if w is not None]
            total += sum(2 * op.which.type.size * prod(w.type.shape[1:]) for w in stacks)
        elif isinstance(op, t.Attention):  # its products alone, not the softmax
            keys, width = op.k.type.shape[-2], op.q.type.shape[-1] + op.v.type.shape[-1]
            total += 2 * prod(op.q.type.shape[:-1]) * keys * width
        elif isinstance(op, PLAIN):
            total += op.flops()
        elif isinstance(op, t.Loop):
            total += (op.trips or 1) * arithmetic(op.body)
    return total


def load(path: Path, **options: Any) -> Any:
    """gpuir's graph; sizes that the model does not have are left out, Whisper's frames too."""
    dims = {"batch": SIZES["batch"]} if "phase" in options else dict(SIZES)
    text = (path / "config.json").read_text()
    first = ("input_feat_per_channel", "feature_projection_input_dim")  # frames come first
    if "max_source_positions" in text and not any(name in text for name in first):
        dims.pop("frames", None)
    while True:
        try:
            return gpuir.load(f"hf:{path}", dims=dims, warn=lambda _: None, **options)
        except GpuirError as error:
            if "'height'" in error.what and "missing" in error.what:
                dims |= {"height": IMAGE, "width": IMAGE}
                continue
            name = error.what.rpartition("no dimension ")[2].strip("'")
            if "no dimension" not in error.what or name not in dims:
                raise
            del dims[name]


def compare(path: Path, name: str, seconds: int) -> Row:
    row = Row(name, json.loads((path / "config.json").read_text())["architectures"][0])
    model, flops = None, None
    try:
        with within(seconds):
            model, flops = run_by_transformers(path, row)
    except (Exception, OutOfTime) as error:
        row.theirs = f"{type(error).__name__}: {error}"[:150]
    try:
        with within(seconds):
            graph = load(path, attention="eager")
    except (Exception, OutOfTime) as error:
        row.said["whole"] = f"{type(error).__name__}: {error}"
        return row
    if model is not None:
        params = {name: p.numel() for name, p in model.named_parameters()}
        ours = sum(v.type.size for v in graph.params if v.name in params)
        row.parameters = ours, sum(p.numel() for p in model.parameters())
        row.flops = arithmetic(graph), flops
        if any(task in row.cls for task in ("ForCausalLM", "LMHead")):
            try:
                with within(seconds):
                    step = load(path, phase="decode", past=PAST)
                roles = dict(step.roles)
                ours = sum(v.type.nbytes for v in step.inputs if roles.get(v.name) == "cache")
                row.cache = (ours, known) if (known := cache_bytes(model.config)) else None
            except (Exception, OutOfTime) as error:
                row.said["decode"] = f"{type(error).__name__}: {error}"
    return row


def line(row: Row) -> str:
    def pair(found: tuple[float, float] | None) -> str:
        if found is None:
            return "-"
        same = f"{found[0]:,.0f}"
        return same if found[0] == found[1] else f"{same} not {found[1]:,.0f}"

    texts = [row.name, row.cls, *(pair(x) for x in (row.parameters, row.flops, row.cache))]
    texts[3] += f" + {row.unread:,.0f}" if row.unread else ""
    notes = [f"{k}: {x.splitlines()[0].partition(': ')[2] or x}"[:160] for k, x in row.said.items()]
    if row.theirs:
        notes.append(f"transformers: {row.theirs.splitlines()[0]}")
    return (
        " | ".join(texts)
        + "".join(f"\n    {x}" for x in notes)
        + "".join(f"\n    FAULT {x}" for x in row.faults)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--filter", default="", help="of the model types that contain this")
    parser.add_argument("--all", action="store_true", help="all that transformers has")
    parser.add_argument("--after", default="", help="of the model types that sort after this")
    parser.add_argument("--config", nargs="*", default=[], help="folders with configs, besides")
    parser.add_argument("--seconds", type=int, default=60)
    args = parser.parse_args()
    known = CONFIG_MAPPING if args.all else USUAL
    names = sorted(n for n in known if args.filter in n and n > args.after)
    faults = 0
    with hf.quiet(), tempfile.TemporaryDirectory() as folder:
        for place in args.config:
            row = compare(Path(place), Path(place).name, args.seconds)
            faults += bool(row.faults)
            sys.__stdout__.write(line(row) + "\n")
        for name in names if args.filter or args.after or not args.config else ():
            path = Path(folder) / name
            path.mkdir()
            try:
                cls = write(small(CONFIG_MAPPING[name]), path)
            except Exception as error:
                sys.__stdout__.write(
                    f"{name} | no config: {type(error).__name__}: {error}"[:150] + "\n"
                )
                continue
            if not cls:
                continue
            row = compare(path, name, args.seconds)
            faults += bool(row.faults)
            sys.__stdout__.write(line(row) + "\n")
            sys.__stdout__.flush()
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
