"""Hugging Face configs as programs: the model built on the meta device, without weights.

The classes are transformers' own, so what is analysed is what `from_pretrained` would run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils._pytree import tree_leaves

from gpuir.files import read_json
from gpuir.frontends.torch import masks, scans
from gpuir.frontends.torch.attention import attention, seen
from gpuir.frontends.torch.later import later
from gpuir.frontends.torch.program import DTYPES, TorchProgram, unheard, unsupported
from gpuir.ir.errors import GpuirError, ModelError, UsageError, nearest, reason

TASKS = {  # what it is called here → transformers' table of the classes that do it
    "causal-lm": "MODEL_FOR_CAUSAL_LM",
    "image-text-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "masked-lm": "MODEL_FOR_MASKED_LM",  # BART's class is of both
    "speech-seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "seq-cls": "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "token-cls": "MODEL_FOR_TOKEN_CLASSIFICATION",
    "question-answering": "MODEL_FOR_QUESTION_ANSWERING",
    "multiple-choice": "MODEL_FOR_MULTIPLE_CHOICE",
    "next-sentence": "MODEL_FOR_NEXT_SENTENCE_PREDICTION",
    "image-cls": "MODEL_FOR_IMAGE_CLASSIFICATION",
    "zero-shot-image-cls": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION",
    "segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION",
    "depth": "MODEL_FOR_DEPTH_ESTIMATION",
    "audio-cls": "MODEL_FOR_AUDIO_CLASSIFICATION",
    "ctc": "MODEL_FOR_CTC",
    "feature": "MODEL",
    "pretraining": "MODEL_FOR_PRETRAINING",  # last: a class of it often does something else too
}
Labels = Mapping[str, tuple[str, ...]]  # the sizes of each
WORDS: Labels = {"labels": ("batch", "seq")}
WRITTEN: Labels = {"labels": ("batch", "target")}
CLASSES: Labels = {"labels": ("batch",)}
LABELS: Mapping[str, Labels] = {  # what a loss is computed from
    **dict.fromkeys(("causal-lm", "image-text-to-text", "masked-lm"), WORDS),
    **dict.fromkeys(("pretraining", "token-cls"), WORDS),
    **dict.fromkeys(("seq2seq", "speech-seq2seq"), WRITTEN),
    **dict.fromkeys(("seq-cls", "image-cls", "audio-cls"), CLASSES),
    **dict.fromkeys(("multiple-choice", "next-sentence"), CLASSES),
    "question-answering": {"start_positions": ("batch",), "end_positions": ("batch",)},
    "segmentation": {"labels": ("batch", "height", "width")},
    "zero-shot-image-cls": {},  # each image belongs to the text of its row
}
MASKED = ("switch_transformers", "longt5")  # models that fail without a mask
STEPWISE = ("mamba", "falcon_mamba", "jamba")  # models whose scan is a Python loop over tokens
MOST_STEPS = 4000  # of all layers; torch.export writes down some fifteen operators for each
PHASES = ("prefill", "decode")
GENERATING = {  # tasks that go on token by token → the size that says how many are new
    "causal-lm": "seq",
    "image-text-to-text": "seq",
    "seq2seq": "target",
    "speech-seq2seq": "target",
}
ATTENTION = ("sdpa", "eager")
CACHE_DTYPES = DTYPES | {"f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}
UNSCALED = (
    "attention kernels read them in this type, as inference engines "
    "do, and their scales are not counted"
)
COUNTS = re.compile(r"(num|n|encoder|decoder)_\w*(layers?|experts?|blocks)$")
MOST = {  # layers and blocks are in the graph; experts are rows of a table in some models
    "layer": 512,
    "block": 512,
    "expert": 1 << 20,  # "Mixture of A Million Experts", arXiv 2407.04153
}
MOST_MODULES = 1 << 19  # assumed: Switch-C, with 2,048 experts in each layer, has 307,000
LEFT_OUT = (  # they name code that is not transformers' own: a repository's, kernels of the hub
    *("auto_map", "attn_implementation", "_attn_implementation"),
    *("experts_implementation", "_experts_implementation"),
)
WEIGHTS = "checkpoint_path"  # a file of weights that timm would load, which may be a pickle
INSTALL = "pip install 'gpuir[hf]'"
RARE = {  # what transformers imports for the losses of detectors, and to write checkpoints
    "scipy.optimize": ("linear_sum_assignment",),
    "torchao.prototype.safetensors.safetensors_support": ("flatten_tensor_state_dict",),
}


def program(
    path: str,
    *,
    task: str | None = None,
    dims: Mapping[str, int] | None = None,
    dtype: str | None = None,
    attention: str = "sdpa",
    phase: str | None = None,
    past: int | None = None,
    cache_dtype: str | None = None,
    mask: bool = False,
    train: bool = False,
    device: str = "meta",
) -> TorchProgram:
    """The model of a config file, or of a folder with one, for a task and sizes.

    The task is by default that of the class that the config's `architectures` names, the dtype the
    config's own. `phase` is a step of generation by a causal LM: `prefill` reads a prompt of `seq`
    tokens, `decode` adds one; either starts behind `past` tokens, whose keys and values are inputs
    and come out with the new ones written in. A decoder behind an encoder has `decode` alone, and
    the keys and values of what the encoder has read are inputs too. All are kept in `cache_dtype`:
    without it in what the config's quantization says, else in the model's dtype. With `mask` the
    attention mask is an input, as of a batch that a tokenizer padded. With `train` there are labels
    too, and the first output is the loss. On another `device` than meta there are weights, random
    ones. ModelError or UsageError where the config or a choice cannot be used.
    """
    for name, choice, known in (
        ("task", task, TASKS),
        ("dtype", dtype, DTYPES),
        ("attention", attention, ATTENTION),
        ("phase", phase, PHASES),
        ("cache dtype", cache_dtype, CACHE_DTYPES),
    ):
        if choice is not None and choice not in known:
            raise UsageError(f"no {name} called {choice!r}", fix=nearest(choice, known))
    folder = path.removeprefix("hf:")
    with quiet(), usable(folder), ExitStack() as blame:
        from gpuir.frontends.torch import mixtures, quantised

        config = read_config(Path(folder))
        task, cls = find_class(config, task, folder)
        config = half_of(config, cls)
        kind = DTYPES[dtype] if dtype else None
        model = build(cls, config, dtype=kind, attention=attention, device=device, where=folder)
        made_for = f"{cls.__name__} in the phase {phase}" if phase else cls.__name__
        blame.enter_context(supported(made_for, folder))
        model.train(train)
        mixtures.adopt(model)
        sizes = InputExtents(config, dict(dims or {}), folder, device)
        quantisation = quantised.quantisation(config, model, folder)
        if quantisation is not None:
            if train:
                found, fix = quantisation.method, 'remove "quantization_config" from the config'
                raise UsageError(
                    "a model with quantised weights cannot be trained",
                    where=folder,
                    found=found,
                    fix=fix,
                )
            sizes.assumed += quantised.apply(model, quantisation, folder)
        name = called(Path(folder))
        if phase is None:
            if past is not None:
                raise UsageError("--past needs --phase decode", fix="add --phase decode")
            if cache_dtype is not None:
                raise UsageError("--cache-dtype needs --phase decode", fix="add --phase decode")
            made = whole(model, sizes, task, name, train=train, mask=mask)
        elif train or task not in GENERATING:
            found = "a training step" if train else f"the task {task or cls.__name__}"
            expected = "one of the tasks " + ", ".join(GENERATING)
            raise UsageError(
                "--phase needs a model that generates tokens", expected=expected, found=found
            )
        elif phase == "prefill" and GENERATING[task] == "target":
            raise UsageError(
                "prefill is not supported for models with an encoder and a decoder",
                where=folder,
                expected="--phase decode",
                found=f"--phase {phase}, the task {task}",
                fix="without --phase, gpuir analyses a pass of the encoder and the "
                "decoder, without caches",
            )
        elif mask:
            raise UsageError(
                "--mask has no effect on a step with a cache: such a step has no mask as an input",
                fix="remove --mask",
            )
        else:
            kept = cache_dtype or (quantisation and quantisation.cache)
            if kept:
                whose = "the option says" if cache_dtype else "the config's quantization says"
                sizes.assumed.append(
                    f"keys and values are stored in {kept}, as {whose}: {UNSCALED}"
                )
            kept_in = CACHE_DTYPES[kept] if kept else None
            made = step(model, sizes, task, name, phase=phase, past=past, kept_in=kept_in)
    sizes.check()
    return replace(made, assumed=(*made.assumed, *unread(cls, made)), made_for=made_for)


def unread(cls: Any, made: TorchProgram) -> tuple[str, ...]:
    """What to say of images and sounds that the model would take, and is not given."""
    takes, given = signature(cls.forward).parameters, made.kwargs or {}
    return tuple(
        f"the inputs {name} are not given: the parts that read them are "
        "left out, but their weights are counted"
        for name in OTHER_SENSES
        if name in takes and name not in given
    )


@contextmanager
def usable(where: str) -> Generator[None]:
    """What a config's odd values make transformers' classes stumble over is the config's fault."""
    try:
        yield
    except GpuirError:
        raise
    except Exception as error:
        raise ModelError(
            "transformers cannot build a model from the config", where=where, found=reason(error)
        ) from error


@contextmanager
def supported(made_for: str, where: str) -> Generator[None]:
    """What goes wrong with a model that transformers has built is our fault: we made its inputs."""
    try:
        yield
    except GpuirError:
        raise
    except Exception as error:
        raise unsupported(made_for, where, error) from error


def called(path: Path) -> str:
    """`models/llama/config.json` → `llama`."""
    path = path.absolute()
    return path.parent.name if path.name == "config.json" else path.name.removesuffix(".json")


@contextmanager
def quiet() -> Generator[None]:
    """transformers, and what it imports, says nothing of its own and downloads nothing; its absence
    is said in our words."""
    with unheard():
        try:
            import_module("transformers")
            hub: Any = import_module("huggingface_hub.constants")
            with later(RARE):
                import_module("transformers.modeling_utils")
        except ImportError as error:
            raise UsageError(
                "Hugging Face configs need transformers", found=reason(error), fix=INSTALL
            ) from error
        before, hub.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE, True
        try:
            yield
        finally:
            hub.HF_HUB_OFFLINE = before


# ---------------------------------------------------------------------------- config and class


def read_config(path: Path) -> Any:
    """transformers' config of a `config.json`, or of the folder that has one."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    file = path / "config.json" if os.path.isdir(path) else path
    where = str(file)
    fix = "gpuir does not download models: save the config.json of the model, and give its path"
    read = read_json(file, "the config", ModelError, fix)
    data: dict[str, Any] = read if isinstance(read, dict) else {}
    kind = data.get("model_type")
    if not isinstance(kind, str):
        found = "a diffusers config" if "_diffusers_version" in data else "no model_type"
        raise ModelError(
            "this is not a Hugging Face config",
            where=where,
            expected='a "model_type", for example "llama"',
            found=found,
            fix="write a function that builds the model: gpuir analyze my.module:build",
        )
    if kind not in CONFIG_MAPPING_NAMES:
        own = (
            " The config names its own Python code (auto_map), which gpuir does not run."
            if "auto_map" in data
            else ""
        )
        raise ModelError(
            f"transformers has no model_type {kind!r}.{own}",
            where=where,
            fix=nearest(kind, CONFIG_MAPPING_NAMES),
        )
    check_counts(data, where)
    try:
        return CONFIG_MAPPING[kind].from_dict(as_data(data, where))
    except GpuirError:
        raise
    except Exception as error:  # each config class checks in its own way
        raise ModelError(
            "transformers does not accept the config", where=where, found=reason(error)
        ) from (error)


def as_data(value: Any, where: str) -> Any:
    """A config's values without those, at any depth, by which transformers would run code that is
    not its own; ModelError for one that names a file of weights."""
    if isinstance(value, list):
        return [as_data(each, where) for each in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    held = cast("dict[str, Any]", value)
    if held.get(WEIGHTS):
        raise ModelError(
            "the config names a file of weights, which could run code when it is read",
            where=where,
            found=f"{WEIGHTS}: {held[WEIGHTS]}"[:200],
            fix=f"remove {WEIGHTS} from the config: gpuir needs no weights",
        )
    return {key: as_data(each, where) for key, each in held.items() if key not in LEFT_OUT}


def check_counts(data: Mapping[str, Any], where: str) -> None:
    """ModelError for more layers or experts than can be built, as a layer is a module, or a trip of
    a loop in transformers' code. What is built of experts, if anything, is up to the class
    (`of_modules`)."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            check_counts(value, where)
        most = next((n for word, n in MOST.items() if COUNTS.match(key) and word in key), None)
        if most is None or not isinstance(value, int | float) or value <= most:
            continue
        raise ModelError(
            f"{key} is larger than gpuir builds",
            where=where,
            expected=f"at most {most}",
            found=str(value)[:40],
            fix="analyse a smaller model: the time is nearly proportional",
        )


def find_class(config: Any, task: str | None, where: str) -> tuple[str | None, Any]:
    """The model's class: of the task or, without one, the class that the config names."""
    import transformers

    classes = {name: found for name in TASKS if (found := _class_names(name, config.model_type))}
    if task is None:
        names = getattr(config, "architectures", None)
        named = names[0] if isinstance(names, list) and names else names
        if not isinstance(named, str | None):
            raise ModelError(
                "architectures must be names of classes",
                where=where,
                expected='"architectures": ["..."] in the config, or a task',
                found=repr(names)[:80],
                fix="--task " + ", or ".join(classes),
            )
        cls = getattr(transformers, named, None) if named else None
        if cls is None:
            raise ModelError(
                f"transformers has no class {named}" if named else "the config names no class",
                where=where,
                expected='"architectures": ["..."] in the config, or a task',
                fix="--task " + ", or ".join(classes),
            )
        return next((t for t, found in classes.items() if named in found), None), cls
    if task not in classes:
        raise UsageError(
            f"{config.model_type} has no model for the task {task}",
            where=where,
            expected=", ".join(classes),
            found=task,
        )
    return task, getattr(transformers, classes[task][0])


def half_of(config: Any, cls: Any) -> Any:
    """The config, or its language half where the class is one of text alone, as AutoModel has it
    (transformers 5.23, auto_factory.py `from_config`)."""
    text = type(config).sub_configs.get("text_config")
    if text is None or getattr(cls, "config_class", None) is not text:
        return config
    half = config.get_text_config()
    for key in ("dtype", "quantization_config"):
        if getattr(half, key, None) is None and getattr(config, key, None) is not None:
            setattr(half, key, getattr(config, key))
    return half


def _class_names(task: str, model_type: str) -> tuple[str, ...]:
    from transformers.models.auto import modeling_auto

    found = getattr(modeling_auto, f"{TASKS[task]}_MAPPING_NAMES").get(model_type, ())
    return (found,) if isinstance(found, str) else tuple(found)


def build(
    cls: Any, config: Any, *, dtype: torch.dtype | None, attention: str, device: str, where: str
) -> torch.nn.Module:
    """The model. On the meta device it has shapes and dtypes, no numbers.

    A class without sdpa computes attention by products and a softmax, as it would run.
    """
    try:
        with torch.device(device), of_modules(where):
            model = cls._from_config(
                config,
                dtype=dtype or getattr(config, "dtype", None) or torch.float32,
                attn_implementation="sdpa"
                if attention == "sdpa" and cls._supports_sdpa
                else "eager",
            )
        keep_wide(model)
        return model.to(device)  # what torch.Tensor(..) makes is on the CPU all the same
    except GpuirError:
        raise
    except Exception as error:  # a config whose numbers do not fit together, found in any layer
        raise ModelError(
            f"{cls.__name__} cannot be built from the config", where=where, found=reason(error)
        ) from error


@contextmanager
def of_modules(where: str) -> Generator[None]:
    """ModelError for a model of more modules than `MOST_MODULES`."""
    left = MOST_MODULES

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise ModelError(
                "the model is larger than gpuir builds",
                where=where,
                expected=f"at most {MOST_MODULES:,} modules",
                found="more",
                fix="analyse fewer layers or experts: the time is nearly proportional",
            )

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def keep_wide(model: Any) -> None:
    """Weights that the class wants in f32, whatever the model's dtype, in f32, as `from_pretrained`
    loads them (transformers 5.23, modeling_utils.py `_get_dtype_plan`, core_model_loading.py
    `convert_and_load_state_dict_in_model`): T5's `wo` beside f16, the weights of many routers. A
    part of a weight's name says which."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(model.dtype)
    if not plan:
        return
    wide, *_ = build_glob_alternation(list(plan))
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point() and wide.search(name):
            value.data = value.data.float()


# ---------------------------------------------------------------------------- inputs


@dataclass
class InputExtents:
    """The extents of the inputs: those given, then the config's. What is given must be read."""

    config: Any
    given: Mapping[str, int]
    where: str
    device: str = "meta"
    read: set[str] = field(default_factory=set[str])
    assumed: list[str] = field(default_factory=list[str])
    missing: dict[str, int] = field(default_factory=dict[str, int])  # an example of each

    def __call__(self, name: str, default: int | None = None) -> int:
        """A size; with an example for one that nothing says (`require`)."""
        self.read.add(name)
        value = self.given.get(name, 1 if name == "batch" else default)
        if value is None:
            most = self.of_config("max_position_embeddings") if name in ("seq", "target") else None
            most = most if isinstance(most, int) and most > 0 else EXAMPLES[name]
            return self.missing.setdefault(name, min(EXAMPLES[name], most))
        if value < 1:
            raise UsageError(
                f"{name}={value} leaves nothing to compute",
                where=self.where,
                expected="at least 1",
                fix=f"--dims {name}=1",
            )
        return value

    def require(self) -> None:
        """UsageError for sizes that nothing says, all at once."""
        if self.missing:
            names = ", ".join(map(repr, self.missing))
            several = len(self.missing) > 1
            sizes = {name: n for name, n in self.given.items() if name in self.read} | self.missing
            raise UsageError(
                f"the sizes {names} are missing" if several else f"the size {names} is missing",
                where=self.where,
                found=", ".join(f"{given}={n}" for given, n in self.given.items()),
                fix=f"--dims {','.join(f'{x}={n}' for x, n in sizes.items())}   (for example)",
            )

    def of_config(self, *names: str) -> Any:
        """The first of these keys that the config, or the one of its vision or audio half, has."""
        halves = (self.config, *(getattr(self.config, f"{x}_config", None) for x in HALVES))
        values = (getattr(half, name, None) for name in names for half in halves if half)
        return next((v for v in values if v is not None), None)

    def check(self) -> None:
        for name in self.given:
            if name not in self.read:
                raise UsageError(
                    f"the model has no dimension {name!r}",
                    where=self.where,
                    expected=", ".join(sorted(self.read)),
                    fix=nearest(name, self.read),
                )

    def tokens(self, name: str, default: int | None = None, past: int = 0) -> int:
        """A number of tokens; assumed, where it is beyond what the config says, to work."""
        n = self(name, default)
        most = self.of_config("max_position_embeddings")
        if isinstance(most, int) and past + n > most > 0:
            text = f"{past + n} positions, where the config has max_position_embeddings={most}"
            self.assumed.append(text)
        return n

    def check_positions(self, model: torch.nn.Module, name: str, n: int, past: int = 0) -> None:
        """ModelError where a table of learned positions ends before the tokens do: an index beyond
        it is an error when the model runs. Rotary angles go on."""
        behind = bool(getattr(self.config, "is_encoder_decoder", False))
        for path, table in model.named_modules():
            own = path.rpartition(".")[2]
            if not isinstance(table, torch.nn.Embedding) or own not in POSITIONS:
                continue
            kind = f"{path} {type(table).__name__}"
            if any(other in kind for other in ("vision", "audio", "Sinusoidal")):
                continue
            if behind and ("decoder" in path) != (name == "target"):
                continue
            padding = -1 if table.padding_idx is None else table.padding_idx
            first = getattr(table, "offset", padding + 1)  # RoBERTa's stand behind the padding's
            room, wanted = table.num_embeddings - first, past + n
            if wanted > room and not self.missing:
                raise ModelError(
                    "there are more tokens than position embeddings in the model",
                    where=self.where,
                    expected=f"at most {room}, the number of rows of {path}",
                    found=f"{past} + {wanted - past}" if past else str(wanted),
                    fix=f"--dims {name}={room}" if not past else f"--past {max(room - 1, 1)}",
                )

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def image(self) -> tuple[int, int]:
        """Height and width."""
        size = self.of_config("image_size")
        if isinstance(size, Mapping):
            size = (size.get("height"), size.get("width"))
        height, width = size if isinstance(size, list | tuple) else (size, size)
        height = self("height", height)
        return height, self("width", width or height)


EXAMPLES = {
    "seq": 128,
    "target": 32,
    "height": 224,
    "width": 224,
    "choices": 4,
    "frames": 3000,  # of sound: 30 s at 100 a second
    "samples": 16000,  # 1 s at 16 kHz
}
POSITIONS = ("wpe", "embed_positions", "position_embeddings", "position_embedding")
HALVES = ("vision", "audio", "text")


def ids(sizes: InputExtents, dtype: torch.dtype, name: str = "seq") -> torch.Tensor:
    return sizes.empty((sizes("batch"), sizes.tokens(name)), torch.int64)


def target_ids(sizes: InputExtents, dtype: torch.dtype) -> torch.Tensor:
    return ids(sizes, dtype, "target")


def pixels(sizes: InputExtents, dtype: torch.dtype) -> torch.Tensor:
    return sizes.empty(
        (sizes("batch"), sizes.of_config("num_channels") or 3, *sizes.image()), dtype
    )


def spectrum(sizes: InputExtents, dtype: torch.dtype) -> torch.Tensor:
    """Of Whisper's layout, whose encoder halves the frames to its number of positions; or frames
    first, where the config has the width of one (Speech2Text, Wav2Vec2-BERT)."""
    channels = sizes.of_config("input_channels") or 1
    width = sizes.of_config("input_feat_per_channel", "feature_projection_input_dim")
    if width:
        return sizes.empty((sizes("batch"), sizes("frames"), width * channels), dtype)
    positions = sizes.of_config("max_source_positions")
    frames = sizes("frames", 2 * positions if positions else None)
    return sizes.empty((sizes("batch"), sizes.of_config("num_mel_bins") or 80, frames), dtype)


def waveform(sizes: InputExtents, dtype: torch.dtype) -> torch.Tensor:
    """Samples of a sound; frames of a spectrum where the config says how many and how wide (Audio
    Spectrogram Transformer)."""
    frames, width = sizes.of_config("max_length"), sizes.of_config("num_mel_bins")
    if isinstance(frames, int) and isinstance(width, int) and sizes.of_config("frequency_stride"):
        return sizes.empty((sizes("batch"), sizes("frames", frames), width), dtype)
    return sizes.empty((sizes("batch"), sizes("samples")), dtype)


INPUTS: dict[str, Callable[[InputExtents, torch.dtype], torch.Tensor]] = {
    "input_ids": ids,
    "decoder_input_ids": target_ids,
    "pixel_values": pixels,
    "input_features": spectrum,
    "input_values": waveform,
}
OTHER_SENSES = ("pixel_values", "input_features", "input_values")  # than text


def inputs_of(
    model: Any, sizes: InputExtents, task: str | None, train: bool
) -> dict[str, torch.Tensor]:
    """What the model reads: its main input, what a second tower or a decoder reads, labels."""
    takes = signature(model.forward).parameters
    names = [model.main_input_name]
    if task == "zero-shot-image-cls" and "pixel_values" in takes:
        names = ["input_ids", "pixel_values"]
    if task == "image-text-to-text" and "input_ids" in takes:
        names = ["input_ids"]
    labels = LABELS.get(str(task)) if train else None
    has_labels = labels is not None and takes.keys() >= (labels.keys() or {"return_loss"})
    if train and not has_labels:
        raise UsageError(
            f"gpuir does not know a loss for {type(model).__name__}",
            where=sizes.where,
            expected=f"a task among {', '.join(LABELS)}",
            fix="give --task, or build module and arguments in Python: my.module:build",
        )
    shifts = has_labels and getattr(model.config, "decoder_start_token_id", None) is not None
    if "decoder_input_ids" in takes and not shifts:
        names.append("decoder_input_ids")
    found = made_up(model, names, sizes)
    if task == "multiple-choice":
        found = {n: x[:, None].expand(-1, sizes("choices"), -1).clone() for n, x in found.items()}
    if labels is not None:
        found |= {name: label(model, sizes, shape) for name, shape in labels.items()}
        if "next_sentence_label" in takes:  # without it BERT's pretraining has no loss
            found["next_sentence_label"] = sizes.empty((sizes("batch"),), torch.int64)
    sizes.require()
    return found


def label(model: Any, sizes: InputExtents, names: tuple[str, ...]) -> torch.Tensor:
    """A class for each, or numbers where transformers computes another loss than cross entropy: a
    regression, which is meant where there is one class, or several classes at a time."""
    shape, config = tuple(map(sizes, names)), model.config
    kinds = {"regression": True, "multi_label_classification": True, None: config.num_labels == 1}
    if names != CLASSES["labels"] or not kinds.get(getattr(config, "problem_type", None)):
        return sizes.empty(shape, torch.int64)
    shape = shape if config.num_labels == 1 else (*shape, config.num_labels)
    return sizes.empty(shape, model.dtype)


def made_up(model: Any, names: Sequence[str], sizes: InputExtents) -> dict[str, torch.Tensor]:
    """Inputs of these names; ModelError for one that is not among `INPUTS`."""
    for name in names:
        if name not in INPUTS:
            raise ModelError(
                f"gpuir cannot make the input {name} of {type(model).__name__}",
                where=sizes.where,
                expected=", ".join(INPUTS),
                fix="build module and arguments in Python: gpuir analyze my.module:build",
            )
    return {name: INPUTS[name](sizes, model.dtype) for name in names}


def mask_of(model: Any, inputs: Mapping[str, torch.Tensor], sizes: InputExtents) -> torch.Tensor:
    """Which tokens of each sequence are there: all, as far as shapes can tell."""
    if "input_ids" not in inputs or "attention_mask" not in signature(model.forward).parameters:
        raise UsageError(
            f"{type(model).__name__} has no attention mask as an input",
            where=sizes.where,
            fix="remove --mask",
        )
    return torch.ones_like(inputs["input_ids"])


# ---------------------------------------------------------------------------- programs


def whole(
    model: Any, sizes: InputExtents, task: str | None, name: str, *, train: bool, mask: bool
) -> TorchProgram:
    """A pass over the whole input, nothing cached."""
    inputs = inputs_of(model, sizes, task, train)
    for size in {"seq", "target"} & sizes.read:
        sizes.check_positions(model, size, sizes(size))
    if mask:
        inputs["attention_mask"] = mask_of(model, inputs, sizes)
    layers = getattr(model.config, "num_hidden_layers", 0)
    if train and model.config.model_type in STEPWISE and layers * sizes("seq") > MOST_STEPS:
        raise ModelError(
            "gpuir unrolls a scan in training, one step for each token, and "
            "there are too many tokens",
            where=sizes.where,
            expected=f"at most {MOST_STEPS // layers} tokens for {layers} layers",
            found=str(sizes("seq")),
            fix=f"--dims seq={MOST_STEPS // layers}: the time is nearly proportional",
        )
    run = model.forward
    takes = signature(run).parameters
    for part in model.modules():  # where a class hands its keywords on unread
        if getattr(getattr(part, "config", None), "use_cache", None):
            part.config.use_cache = False
    fixed = {"use_cache": False} if "use_cache" in takes else {}
    fixed |= {"return_loss": True} if train and "return_loss" in takes else {}
    masked = model.config.model_type in MASKED and not mask

    def forward(**given: Any) -> tuple[torch.Tensor, ...]:
        mask = {"attention_mask": torch.ones_like(given["input_ids"])} if masked else {}
        return tensors_of(run(**given, **mask, **fixed))

    model.forward = as_run(forward, inputs, not train and has_windows(model))
    assumed, repeats = tuple(sizes.assumed), sizes.device == "meta"
    return TorchProgram(model, kwargs=inputs, name=name, assumed=assumed, repeats=repeats)


def step(
    model: Any,
    sizes: InputExtents,
    task: str,
    name: str,
    *,
    phase: str,
    past: int | None,
    kept_in: torch.dtype | None,
) -> TorchProgram:
    """A step of generation: what is kept of each layer goes in and comes out, in the model's
    numbers or in others. What a decoder keeps of its encoder's output goes in alone: it is read,
    never written."""
    from transformers.modeling_outputs import BaseModelOutput

    from gpuir.frontends.torch import cache

    if past is None and phase == "decode":
        raise UsageError("decoding needs a number of past tokens", where=name, fix="--past 4096")
    size = GENERATING[task]
    words = "decoder_input_ids" if size == "target" else "input_ids"
    past, batch = past or 0, sizes("batch")
    new = sizes.tokens(size, 1 if phase == "decode" else None, past)
    if size != "target":
        sizes.require()
    sizes.check_positions(model, size, new, past)
    run = model.forward
    takes = signature(run).parameters
    first = {words: sizes.empty((batch, 1), torch.int64)}
    if size == "target":
        first = made_up(model, [model.main_input_name], sizes) | first
        sizes.require()
        if "seq" in sizes.read:
            sizes.check_positions(model, "seq", sizes("seq"))
    fill = as_run(run, (*first, "use_cache"), windows=True)  # BART's own mask asks for numbers
    filled = cache.filled(fill, first, name)
    keys, values, windows = cache.memory(filled.layers, past, new, name, kept_in)
    tokens = sizes.empty((batch, new), torch.int64)
    inputs: dict[str, Any] = {words: tokens, "keys": keys, "values": values}
    if size == "target":
        cross = {"cross_keys": filled.cross_keys, "cross_values": filled.cross_values}
        inputs |= {side: [x.to(kept_in or x.dtype) for x in xs] for side, xs in cross.items()}
    fixed = {"logits_to_keep": 1} if phase == "prefill" and "logits_to_keep" in takes else {}

    def forward(keys: Any, values: Any, **given: Any) -> tuple[torch.Tensor, ...]:
        masked = model.config._attn_implementation == "eager"
        own: Any = cache.past(
            keys, values, windows[: len(keys)], length=past, new=new, masked=masked
        )
        kept, more = own, dict[str, Any](fixed)
        if size == "target":
            kept = cache.crossed(own, given["cross_keys"], given["cross_values"], model.dtype)
            hidden = keys[0].new_empty(filled.hidden, dtype=model.dtype)  # its shape alone is read
            read: Any = BaseModelOutput(last_hidden_state=hidden)
            read.attention_mask = None  # that of Moonshine's
            more["encoder_outputs"] = read
        out = run(**{words: given[words]}, past_key_values=kept, use_cache=True, **more)
        return out.logits, *(x.keys for x in own.layers), *(x.values for x in own.layers)

    model.forward = as_run(forward, inputs, has_windows(model))
    written, read = (
        [f"{x}_{i}" for x in sides if x in inputs for i in range(len(inputs[x]))]
        for sides in (("keys", "values"), ("cross_keys", "cross_values"))
    )
    return TorchProgram(
        model,
        kwargs=inputs,
        name=f"{name}-{phase}",
        roles=dict.fromkeys((*written, *read), "cache"),
        over=(None, *written),
        assumed=tuple(sizes.assumed),
        repeats=sizes.device == "meta",
    )


def tensors_of(output: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of a model's output, in order."""
    leaves = tree_leaves(output)
    return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def as_run(
    forward: Callable[..., Any], inputs: Iterable[str], windows: bool = False
) -> Callable[..., Any]:
    """`forward` with these inputs alone, masks made as when the model runs (`masks.changes`); with
    `windows` a window and a past are flags of the attention kernel too, as in FlashAttention.
    Grouped heads stay grouped also behind a mask, where transformers repeats keys and values for
    the kernels that torch would choose.
    """
    from transformers import masking_utils
    from transformers.integrations import sdpa_attention

    changes = [
        *masks.changes(),
        *scans.changes(),
        (sdpa_attention, "use_gqa_in_sdpa", lambda mask, key, value: True),
    ]
    if windows:
        changes.append((masking_utils, "_ignore_causal_mask_sdpa", _is_plain))

    def run(**given: Any) -> Any:
        kernel = attending() if windows else nullcontext()
        with masks.replaced(changes), kernel, quiet():
            return forward(**given)

    parameters = [Parameter(name, Parameter.KEYWORD_ONLY) for name in inputs]
    run.__signature__ = Signature(parameters)
    return run


@contextmanager
def attending() -> Generator[None]:
    """`attend` in place of transformers' sdpa."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def _is_plain(padding: torch.Tensor | None, *_: Any) -> bool:
    """Whether a causal mask is what queries' places and a window say, no more."""
    return padding is None


def has_windows(model: Any) -> bool:
    """Whether attention goes through transformers' table of kernels, and its causal masks are plain
    ones, within windows or not: those of Llama 4 go by chunks."""
    chunks = getattr(model.config, "attention_chunk_size", None)
    return chunks is None and bool(model._supports_attention_backend)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **how: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa; what would need a causal mask with a past or a window is our operator,
    and so is what reads a cache of narrower numbers than the model's."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from gpuir.frontends.torch.cache import kept

    mask = attention_mask  # some classes give it by this name, most by its place
    new, keys = query.shape[2], key.shape[2]
    given = how.get("is_causal")
    causal = getattr(module, "is_causal", True) if given is None else given
    window = how.get("sliding_window") or keys
    plain = kept(key) is key and (new == 1 or new == keys <= window)
    if mask is not None or not causal or plain:
        return sdpa_attention_forward(module, query, key, value, mask, **how)
    if how.get("position_bias") is not None:
        mask = seen(new, keys, window - 1, query.device)[None, None]
        return sdpa_attention_forward(module, query, key, value, mask, **how)
    scale = how.get("scaling") or query.shape[-1] ** -0.5
    key, value = kept(key), kept(value)
    return attention(query, key, value, scale, window - 1).transpose(1, 2).contiguous(), None
