"""Published runs of training on many GPUs: lines of a table, and the facts of their models.

What a page is silent about is empty in the table, and assumed by whoever predicts the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path
from typing import Any, cast

from gpuir.files import read_json
from gpuir.fit.columns import TableFile, count_of
from gpuir.fit.readers import Unmodelled
from gpuir.fit.tables import target_of
from gpuir.ir.errors import UsageError
from validation.eager import DEVICES
from validation.precisions import precision_of
from validation.programs import Sizes

MODELS_FILE = "models.json"
# Software, as tables call it.
LLM_FOUNDRY = "llm-foundry / Composer / PyTorch FSDP"
MEGATRON_LM = "Megatron-LM"
MEGATRON_ON_FOUR = "accelerate / Megatron-LM core 0.5.0"
EXAMPLES = "DeepLearningExamples / PyTorch"
WORDS = ("id", "model", "task", "gpu", "interconnect", "sharding", "dtype", "framework", "version")
MORE_WORDS = ("activation_checkpointing", "doubt", "notes")
COUNTS = ("seq", "gpus", "gpus_per_node", "dp", "tp", "pp", "vp", "cp", "ep", "global_batch")
MORE_COUNTS = ("micro_batch", "grad_accum")
NO_TIME = "no measurement"
NO_COUNT = "{} is no count"
COLUMNS = (*WORDS, *MORE_WORDS, *COUNTS, *MORE_COUNTS, "step_time_s")


def sizes_of(found: Mapping[str, Any]) -> Sizes | str:
    """The sizes of a model of models.json, or why they are none that a graph is made from.
    `pattern` and the like of hybrids are not read, nor sinks of attention: a number a head."""
    kind = str(found.get("kind", "no kind"))
    if kind not in ("dense decoder", "MoE decoder"):
        return f"a {kind} is not modelled"
    if lacking := _lacking(found):
        return f"the facts of a model have no {', '.join(lacking)}"
    layers, hidden, heads, kv_heads, head, ffn, vocab = (int(found[n]) for n in SIZES)
    more = dict(zip(EXPERTS, (int(found[n]) for n in OF_EXPERTS))) if "experts" in found else {}
    if "experts" in found:
        shared = int(found.get("shared_experts", 0)) * int(found.get("shared_ffn", 0))
        more |= {"shared": shared, "clamped": int(found["activation"] == "clamped swiglu")}
    if found.get("attention") == "MLA":
        more |= dict(zip(LATENTS, (int(found[n]) for n in OF_LATENTS)))
    return Sizes(
        *(layers, hidden, heads, kv_heads, head, ffn, vocab),
        gated=int(bool(found["gated"])),
        squared=int(found["activation"] == "squared relu"),
        rms=int(found["norm"] == "rmsnorm"),
        rope=int(found["position"] == "rope"),
        tied=int(bool(found["tied_embedding"])),
        bias=int(bool(found["bias"])),
        window=int(found.get("sliding_window", 0)) if found.get("sliding_layers") else 0,
        normed=int(bool(found.get("qk_norm"))),
        further=int(found.get("mtp_layers", 0)),
        **more,
    )


SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
WORDS_OF = ("gated", "activation", "norm", "position", "tied_embedding", "bias")
OF_EXPERTS = ("experts", "top_k", "moe_ffn", "dense_layers")
EXPERTS, LATENTS = (
    ("experts", "top_k", "moe_ffn", "dense"),
    ("q_rank", "kv_rank", "plain", "placed", "value"),
)
OF_LATENTS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _lacking(found: Mapping[str, Any]) -> list[str]:
    """What a graph of a decoder needs that its facts do not give: sizes that are counts, and words
    about its layers."""
    sizes = [*SIZES, *(OF_EXPERTS if "experts" in found else ())]
    sizes += OF_LATENTS if found.get("attention") == "MLA" else ()
    optional = ("shared_experts", "shared_ffn", "sliding_window", "mtp_layers")
    sizes += [n for n in optional if n in found]
    none = [n for n in sizes if not isinstance(found.get(n), int | float) or found[n] < 0]
    none += [n for n in SIZES if n not in none and found[n] < 1 and n != "ffn"]
    return [*none, *(n for n in WORDS_OF if n not in found)]


@dataclass(frozen=True)
class Run:
    """A run: what ran, how it was laid out, and the seconds of an optimizer step, measured.

    `micro` is sequences a rank and pass, 0 where that is not printed; `vp` the model chunks of a
    pipeline's rank, 0 where they are not. Of `dp` ranks, which have tokens of their own, each `ep`
    share the experts.
    """

    id: str
    model: str
    sizes: Sizes
    task: str
    seq: int
    gpu: str
    target: str
    gpus: int
    node: int
    network: str
    dp: int
    tp: int
    pp: int
    vp: int
    cp: int
    sharding: str
    micro: int
    batch: int
    dtype: str
    recomputed: str
    framework: str
    version: str
    is_pure: bool  # gradients are reduced in 16 bits: FSDP's mixed precision PURE
    measured_s: float
    ep: int = 1

    @property
    def key(self) -> tuple[Any, ...]:
        """What is the same in each release of one configuration."""
        return (
            *(self.model, self.task, self.seq, self.gpu, self.gpus, self.dp, self.tp, self.pp),
            *(self.vp, self.cp, self.ep, self.sharding, self.micro, self.batch, self.dtype),
            *(self.recomputed, self.framework, self.is_pure),
        )

    @property
    def family(self) -> str:
        return self.model.partition("-")[0]

    @property
    def is_fsdp(self) -> bool:
        return self.sharding.startswith(("FSDP", "Megatron FSDP"))

    @property
    def layout(self) -> str:
        """The kinds of parallelism: `fsdp`, `tp+pp`; `ep` alone where no rank has the same experts
        as another."""
        degrees = (("tp", self.tp), ("pp", self.pp), ("cp", self.cp), ("ep", self.ep))
        found = [n for n, v in degrees if v > 1]
        if self.dp > self.ep:
            found.insert(0, "fsdp" if self.is_fsdp else "dp")
        return "+".join(found) or "one GPU"


def are_in(path: str | Path) -> bool:
    names = TableFile(Path(path)).names
    return all(name in names for name in COLUMNS)


def read_facts(path: str | Path) -> dict[str, dict[str, Any]]:
    """The models of a file, by name. UsageError where it has none."""
    content = read_json(path, "the models")
    models = cast("dict[str, dict[str, Any]]", content) if isinstance(content, dict) else {}
    if not models or not all(isinstance(m, dict) and "kind" in m for m in models.values()):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            "no models of training runs",
            where=str(path),
            expected='{"llama3-8b": {"kind": "dense decoder", "layers": 32, ...}}',
        )
    return models


def read(
    path: str | Path, models: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Run], dict[str, int]]:
    """The runs of a table, and why lines are none. UsageError where columns are missing."""
    file = TableFile(Path(path))
    missing = [name for name in COLUMNS if name not in file.names]
    if missing:
        raise UsageError(
            "not a table of training runs",
            where=str(path),
            expected=f"the columns {', '.join(COLUMNS)}",
            found=f"no {', '.join(missing)}",
        )
    lines = file.read(COLUMNS).lines((*WORDS, *MORE_WORDS), (*COUNTS, *MORE_COUNTS, "step_time_s"))
    return _read(lines, lambda line: _run(line, models))


def _read(
    lines: Iterable[Mapping[str, Any]], run_of: Callable[[Mapping[str, Any]], Run | str]
) -> tuple[list[Run], dict[str, int]]:
    """The runs of lines, and how many lines are none for each reason."""
    runs: list[Run] = []
    skipped: dict[str, int] = {}
    for line in lines:
        run = run_of(line)
        if isinstance(run, str):
            skipped[run] = skipped.get(run, 0) + 1
        else:
            runs.append(run)
    return runs, skipped


def _run(line: Mapping[str, Any], models: Mapping[str, Mapping[str, Any]]) -> Run | str:
    """The run of a line, or why it is none that is predicted."""
    if line["doubt"]:
        return "the page contradicts itself (doubt)"
    if line["model"] not in models:
        return f"no facts of {line['model']}"
    sizes = sizes_of(models[line["model"]])
    if isinstance(sizes, str):
        return sizes
    target = target_of(line["gpu"])
    if target is None:
        return f"no target is called {line['gpu']}"
    if line["task"] == "lora":
        return "LoRA is not modelled"
    if line["dtype"] not in ("bf16", "fp16", "fp8", "mxfp8"):
        return f"training in {line['dtype'] or 'a dtype that is not stated'} is not modelled"
    if not 0 < line["step_time_s"] < inf:
        return NO_TIME
    counts = {n: count_of(line[n]) for n in (*COUNTS, "micro_batch")}
    for name in ("seq", "gpus", "dp", "tp", "pp", "cp", "global_batch"):
        if not counts[name]:
            return NO_COUNT.format(name)
    if counts["global_batch"] % counts["dp"]:
        return "the batch does not divide over data ranks"
    ep = counts["ep"] or 1
    if counts["dp"] % ep or (ep > 1 and not sizes.experts):
        return "its ranks do not share experts as the page says"
    return Run(
        *(line["id"], line["model"], sizes, line["task"], counts["seq"], line["gpu"], target.name),
        *(counts["gpus"], counts["gpus_per_node"] or 8, line["interconnect"]),
        *(counts["dp"], counts["tp"], counts["pp"], counts["vp"], counts["cp"]),
        *(line["sharding"], counts["micro_batch"], counts["global_batch"], line["dtype"]),
        *(line["activation_checkpointing"], line["framework"], line["version"]),
        "PURE" in line["notes"],
        line["step_time_s"],
        ep,
    )


# BERT-large (arXiv 1810.04805), its vocabulary padded to 8; words are predicted where they are
# masked, 20 of 128 tokens and 80 of 512, or spans of an answer alone (DeepLearningExamples,
# PyTorch/LanguageModeling/BERT: max_predictions_per_seq, dense_sequence_output).
BERT = Sizes(24, 1024, 16, 16, 64, 4096, 30528, tied=1, bias=1, encoder=1)
BERTS = {"bert-large": 20 / 128, "bert-large-squad": 1 / 384}
# Of sequences that are this long a step of V100 in f32 would run at 19 Tflop/s, above its peak of
# 15.7: 2,048 of them take 107.8 s on the page. So they must be shorter; how short is not printed.
SHORTER = 512
OTHERS = ("model", "gpu", "gpus", "dtype", "batch_per_gpu", "grad_accum", "seq", "step_time_s")


def are_others(path: str | Path) -> bool:
    """Whether a table is of data-parallel training of models that are no decoders."""
    names = TableFile(Path(path)).names
    return all(name in names for name in (*OTHERS, "items_per_s"))


def read_others(path: str | Path) -> tuple[list[Run], dict[str, int]]:
    """The runs of BERT, and why others are not read."""
    counts = ("gpus", "batch_per_gpu", "grad_accum", "seq")
    columns = TableFile(Path(path)).read((*OTHERS, "id", "version"))
    words = ("id", "model", "gpu", "dtype", "version")
    return _read(columns.lines(words, (*counts, "step_time_s")), _other)


def _other(line: Mapping[str, Any]) -> Run | str:
    """The run of a line, or why it is not read."""
    model, target = line["model"], target_of(line["gpu"])
    if target is None:
        return f"no target is called {line['gpu'] or 'nothing'}"
    if model not in BERTS:
        return f"{model or 'a model without a name'} is not built here"
    if line["seq"] == SHORTER:
        return f"{SHORTER} tokens are printed, and sequences must be shorter"
    try:
        precision = precision_of(line["dtype"])
    except Unmodelled as why:
        return str(why)
    if precision.dtype != "f32":
        return f"training in {line['dtype']} alone is not modelled of {EXAMPLES}"
    if not 0 < line["step_time_s"] < inf:
        return NO_TIME
    counts = {n: count_of(line[n]) for n in ("gpus", "batch_per_gpu", "grad_accum", "seq")}
    for name, count in counts.items():
        if not count:
            return NO_COUNT.format(name)
    ranks, batch, passes, seq = counts.values()
    return Run(
        *(line["id"], model, replace(BERT, predicted=ceil(seq * BERTS[model])), "pretrain", seq),
        line["gpu"],
        *(target.name, ranks, 8, "", ranks, 1, 1, 1, 1, "DDP", batch, batch * passes * ranks),
        *(line["dtype"].lower(), "none", EXAMPLES, line["version"], False, line["step_time_s"]),
    )


LABELS = ("device", "model", "mode", "seqlen", "batch", "option", "e2e_ms")


def are_labels(path: str | Path) -> bool:
    """Whether a table is of whole models, some of them on several GPUs (NeuSight's labels)."""
    names = TableFile(Path(path)).names
    return all(name in names for name in LABELS)


def read_labels(
    path: str | Path, configs: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Run], dict[str, int]]:
    """The lines of several GPUs, `dp4`, `tp4` and `pp4_1` (one microbatch), and why others are not
    read. They are Megatron-LM's GPT in f32, a whole step (README of the labels)."""
    columns = TableFile(Path(path)).read(LABELS)
    lines = columns.lines(("device", "model", "mode", "option"), ("seqlen", "batch", "e2e_ms"))
    return _read(lines, lambda line: _label(line, configs))


def _label(line: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]]) -> Run | str:
    """The run of a line, or why it is not read."""
    device, model, option = line["device"], line["model"], line["option"]
    ways = re.fullmatch(r"(dp|tp|pp)([1-9]\d*)(?:_([1-9]\d*))?", option)
    if ways is None or line["mode"] != "train":
        return "one GPU: gpuir eval models"
    target = target_of(DEVICES.get(device, device))
    if target is None:
        return f"no target is called {device}"
    config = configs.get(model, {})
    if config.get("model_type") != "gpt2":
        return f"no config of a GPT-2 is called {model}"
    if missing := [n for n in GPT2 if not count_of(float(config.get(n) or 0))]:
        return f"the config of {model} has no {', '.join(missing)}"
    if not 0 < line["e2e_ms"] < inf:
        return NO_TIME
    seq, batch = count_of(line["seqlen"]), count_of(line["batch"])
    ranks, passes = int(ways[2]), int(ways[3] or 1)
    degrees = {"dp": 1, "tp": 1, "pp": 1, ways[1]: ranks}
    if not (seq and batch):
        return NO_COUNT.format("batch" if seq else "seqlen")
    if batch % (degrees["dp"] * passes):
        return "the batch does not divide over data ranks"
    return Run(
        *(f"{device} {model} {option}", model, _gpt2(config), "pretrain", seq),
        *(device, target.name, ranks, ranks, "one node"),
        *(degrees["dp"], degrees["tp"], degrees["pp"], 1, 1, "DDP"),
        *(batch // degrees["dp"] // passes, batch, "fp32", "none"),
        *(MEGATRON_ON_FOUR, "core 0.5.0", False, line["e2e_ms"] * 1e-3),
    )


GPT2 = ("n_embd", "n_head", "n_layer", "vocab_size")


def _gpt2(config: Mapping[str, Any]) -> Sizes:
    hidden, heads = int(config["n_embd"]), int(config["n_head"])
    vocab = -(-int(config["vocab_size"]) // 128) * 128  # make_vocab_size_divisible_by
    size = int(config["n_layer"]), hidden, heads, heads, hidden // heads, 4 * hidden, vocab
    return Sizes(*size, tied=1, bias=1)
