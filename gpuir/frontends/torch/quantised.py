"""The `quantization_config` of Hugging Face configs: which layers are quantised, and how.

What each method stores is taken from its own code as transformers 5 calls it
(transformers/quantizers, transformers/integrations), compressed-tensors' from its config's schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from gpuir.frontends.torch.packed import CODES, PackedMatrix, QuantisedLinear, Scheme, WeightFormat
from gpuir.ir.errors import ModelError, nearest

F8 = torch.float8_e4m3fn
F8_CACHE = "f8e4m3"
U4 = CODES[4]
SIGNED = {8: torch.int8}
ORDERED = (
    "gptq: input columns are reordered to the order of the weights "
    "(desc_act) inside the product, as the ExLlama kernels do"
)
BLOCKWISE = "fp8 in blocks: counted with one scale a row, not with one scale a block"
ROWS_ALONE = (
    "8-bit experts: rows are cast without scales, which the kernels compute and apply themselves"
)
OUTLIERS = "LLM.int8(): no column has outliers, so the 16-bit product for outliers is left out"
CODE_BOOK = "the 4-bit codes of bitsandbytes are counted as e2m1 floats, which have as many bits"
ENGINE = (
    "packed weights are multiplied without unpacking, as the kernels "
    "of inference engines do; PyTorch unpacks them"
)
E2M1 = WeightFormat(U4, columns=32, scale=torch.float8_e8m0fnu, floats=True)  # MXFP4


@dataclass(frozen=True)
class Quantisation:
    """Which scheme a layer has, by its name and module, or None; whether mixtures' stacked matrices
    are quantised too; and what is assumed."""

    method: str
    of: Callable[[str, nn.Module], Scheme | None]
    experts: bool = False
    linears: bool = True
    assumed: tuple[str, ...] = ()
    cache: str | None = None  # the numbers in which keys and values are kept


REMOVE = 'remove "quantization_config" from the config to analyse the model in its own data type'


@dataclass(frozen=True)
class Keys:
    """A part of the config, read with the types that its keys must have."""

    data: Mapping[str, Any]
    where: str

    def get(self, name: str, kind: Any, default: Any = None) -> Any:
        value = self.data.get(name)
        if value is None:
            return default
        wrong = isinstance(value, bool) and kind is not bool
        if wrong or not isinstance(value, kind):
            wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise ModelError(
                f"quantization_config: {name!r} has the wrong type",
                where=self.where,
                expected=wanted,
                found=repr(value)[:80],
                fix=REMOVE,
            )
        return value

    def size(self, name: str, default: int) -> int:
        """A number of columns; 0 or -1 is all of them."""
        value = self.get(name, int, default)
        if value < -1:
            raise self.refused(name, str(value), "a number of columns, or -1")
        return max(value, 0)

    def names(self, name: str) -> list[str] | None:
        values = self.get(name, list)
        if values is not None and not all(isinstance(v, str) for v in values):
            raise self.refused(name, repr(values)[:80], "names of modules")
        return values

    def part(self, name: str) -> Keys | None:
        """Another part within; None where it is left out."""
        value = self.get(name, dict)
        return None if value is None else Keys(value, self.where)

    def check_unset(self, *names: str) -> None:
        """ModelError for a key that changes what runs, in a way that is not modelled."""
        for name in names:
            if self.data.get(name):
                raise self.refused(name, repr(self.data[name])[:80], "nothing, or false")

    def refused(self, name: str, found: str, expected: str = "") -> ModelError:
        return ModelError(
            f"quantization_config: gpuir does not model {name}",
            where=self.where,
            expected=expected,
            found=found,
            fix=REMOVE,
        )


def section(config: Any, where: str) -> Keys | None:
    """The part of a config that says how its weights are quantised."""
    for half in (config, getattr(config, "text_config", None)):
        for name in ("quantization_config", "compression_config"):
            found = getattr(half, name, None)
            if found is not None:
                return Keys({"_": found}, where).part("_")
    return None


def quantisation(config: Any, model: nn.Module, where: str) -> Quantisation | None:
    """How the model's layers are quantised, None where they are not. ModelError for a method that
    is not modelled, by its name."""
    keys = section(config, where)
    if keys is None:
        return None
    method = keys.get("quant_method", str)
    if (method is None and keys.get("load_in_4bit", bool)) or keys.get("load_in_8bit", bool):
        method = "bitsandbytes"
    if method is None and keys.get("config_groups", dict):
        method = "compressed-tensors"
    if method is None:
        raise keys.refused("a config without quant_method", ", ".join(keys.data)[:80])
    if method not in METHODS:
        expected = ", ".join(METHODS)
        raise replace_fix(keys.refused(f"quant_method {method!r}", method, expected), method)
    keys.check_unset(*UNMODELLED)
    return METHODS[method](keys, model)


UNMODELLED = (  # of any method: layers that are turned, embeddings, weights unpacked when loaded
    *("transform_config", "include_input_output_embeddings", "dequantize", "do_fuse"),
    *("llm_int8_has_fp16_weight", "llm_int8_enable_fp32_cpu_offload"),
)


def replace_fix(error: ModelError, method: str) -> ModelError:
    """With the method that may be meant, unless it is one of transformers' own."""
    from transformers.utils.quantization_config import QuantizationMethod

    close = nearest(method, METHODS)
    if method not in [known.value for known in QuantizationMethod] and close.startswith("did you"):
        error.fix = close
    return error


def apply(model: nn.Module, made: Quantisation, where: str) -> tuple[str, ...]:
    """Puts quantised layers in the place of the model's; what is to be said of them."""
    layers, changed, rows = 0, 0, False
    found: dict[str, None] = {}
    for name, module in list(model.named_modules()):
        if is_linear(module) and made.linears:
            layers += 1
            if (scheme := made.of(name, module)) is not None:
                changed += 1
                found[described(scheme)] = None
                model.set_submodule(name, as_quantised(name, module, scheme, where))
        elif made.experts and hasattr(module, "is_concatenated"):
            layers += 1
            scheme = made.of(name, module)
            if scheme is not None:
                changed += 1
                found[described(scheme)] = None
                rows |= scheme.inputs is not None
                stack(name, module, scheme, where)
    if not changed:
        raise ModelError(
            f"quantization_config: {made.method} quantises no layer of the model",
            where=where,
            expected="linear layers" if made.linears else "a mixture of experts",
            found=f"{layers} layers, all excluded by the config" if layers else "none",
        )
    note = f"{made.method}: {changed} of {layers} layers are quantised, {', '.join(found)}"
    return (note, *made.assumed, *([ROWS_ALONE] if rows else []))


def is_linear(module: nn.Module) -> bool:
    """nn.Linear alone, whose subclasses compute something else, and GPT-2's own."""
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def as_quantised(name: str, module: Any, scheme: Scheme, where: str) -> QuantisedLinear:
    out, into = module.weight.shape
    if type(module) is not nn.Linear:
        out, into = into, out
    made = QuantisedLinear(
        out=out, into=into, bias=module.bias is not None, scheme=scheme, dtype=module.weight.dtype
    )
    return made.eval()


def stack(name: str, module: Any, scheme: Scheme, where: str) -> None:
    """The matrices of a mixture, each of its experts in blocks of its own; results are rows."""
    if getattr(module, "how", None) is None:
        raise ModelError(
            "quantization_config: gpuir does not model quantised weights of "
            "this mixture of experts",
            where=where,
            found=f"{name}: {type(module).__name__}",
        )
    up = "gate_up_proj" if module.has_gate else "up_proj"
    for matrix in (up, "down_proj"):
        weight = getattr(module, matrix)
        experts, out, into = weight.shape
        if module.is_transposed:
            out, into = into, out
        delattr(module, matrix)
        setattr(module, matrix, PackedMatrix((experts, out, into), scheme.weights, weight.dtype))
    module.is_transposed = False
    module.inputs = scheme.inputs


def described(scheme: Scheme) -> str:
    """`4 bits in blocks of 128`."""
    stored = scheme.weights
    bits = "e2m1 floats" if stored.floats else str(stored.dtype).removeprefix("torch.")
    rows = f"{stored.rows}x" if stored.rows > 1 and stored.columns else ""
    blocks = f" in blocks of {rows}{stored.columns}" if stored.columns else ""
    inputs = str(scheme.inputs).removeprefix("torch.")
    return bits + blocks + (f" times {inputs}" if scheme.inputs else "")


# ---------------------------------------------------------------------------- which layers


def apart_from(
    scheme: Scheme, model: Any, given: list[str] | None, defaults: bool = False, wide: bool = True
) -> Callable[[str, nn.Module], Scheme | None]:
    """The scheme for all layers but those named: without names, or with `defaults` beside them, the
    output layer and tied ones; with `wide` also those that the class wants in f32 (T5's `wo`), as
    transformers leaves them (quantizers/base.py: get_modules_to_not_convert; its quantizers for
    GPTQ and HQQ convert the latter)."""
    from transformers.quantizers.base import get_keys_to_not_convert

    left = [*(given or ())]
    if given is None or defaults:
        left += get_keys_to_not_convert(model)
    if wide:
        left += getattr(model, "_keep_in_fp32_modules", None) or ()  # transformers' models
    return lambda name, module: None if is_left(name, left) else scheme


def is_left(name: str, patterns: list[str]) -> bool:
    """transformers' rule: the beginning of a name, up to a dot, or its end
    (quantizers_utils.py: should_convert_module)."""
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return any(_matches(f"(?:{p}){boundary}", name) or name.endswith(p) for p in patterns)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error:
        return False


# ---------------------------------------------------------------------------- methods


def codes(keys: Keys, name: str = "bits", default: int = 4) -> torch.dtype:
    """Unsigned numbers of so many bits."""
    bits = keys.get(name, int, default)
    if bits not in CODES:
        raise keys.refused(f"{name}={bits}", f"{bits} bits", "2, 4 or 8 bits")
    return CODES[bits]


def awq(keys: Keys, model: nn.Module) -> Quantisation:
    stored = codes(keys) if "bits" in keys.data else codes(keys, "w_bit")
    size = keys.size("group_size" if "group_size" in keys.data else "q_group_size", 128)
    zero = stored if keys.get("zero_point", bool, True) else None
    scheme = Scheme(WeightFormat(stored, columns=size, scale=model_dtype(model), zero=zero))
    left = keys.names("modules_to_not_convert")
    return Quantisation("awq", apart_from(scheme, model, left, defaults=True), experts=True)


def gptq(keys: Keys, model: nn.Module) -> Quantisation:
    """`dynamic` changes some layers: a pattern of names with `-:` before leaves them out, with
    `+:` or nothing before it has other keys for them (gptqmodel, QuantizeConfig)."""
    head = keys.get("lm_head", bool, False)
    dynamic = keys.get("dynamic", dict, {})
    left = apart_from(gptq_scheme(keys, model), model, [] if head else None, wide=False)

    def of(name: str, module: nn.Module) -> Scheme | None:
        for pattern, change in dynamic.items():
            sign = pattern[:2] if pattern[:2] in ("+:", "-:") else ""
            if _matches(pattern.removeprefix(sign), name):
                if sign == "-:":
                    return None
                more = change if isinstance(change, Mapping) else {}
                return gptq_scheme(Keys({**keys.data, **more}, keys.where), model)
        return left(name, module)

    ordered = keys.get("desc_act", bool, False)
    return Quantisation("gptq", of, experts=True, assumed=(ORDERED,) if ordered else ())


def gptq_scheme(keys: Keys, model: nn.Module) -> Scheme:
    stored, size = codes(keys), keys.size("group_size", 128)
    zero = None if keys.get("sym", bool, True) else stored
    weights = WeightFormat(stored, columns=size, scale=model_dtype(model), zero=zero)
    return Scheme(weights, ordered=keys.get("desc_act", bool, False))


def auto_round(keys: Keys, model: nn.Module) -> Quantisation:
    if (kind := keys.get("data_type", str, "int")) != "int":
        raise keys.refused(f"auto-round's data_type {kind!r}", kind, "int")
    if keys.get("extra_config", dict):
        raise keys.refused("auto-round's extra_config", "layers with different numbers of bits")
    return replace(gptq(keys, model), method="auto-round")


def fp8(keys: Keys, model: nn.Module) -> Quantisation:
    given = keys.get("weight_block_size", list)
    if given is not None and not (len(given) == 2 and all(type(n) is int and n > 0 for n in given)):
        raise keys.refused("weight_block_size", repr(given)[:80], "two numbers, like [128, 128]")
    rows, columns = given or (0, 0)
    static = activations(keys) == "static"
    scale = torch.float8_e8m0fnu if keys.get("scale_fmt", str) == "ue8m0" else torch.float32
    scheme = Scheme(WeightFormat(F8, rows, columns, scale), F8, static)
    of = apart_from(scheme, model, keys.names("modules_to_not_convert"))
    return Quantisation("fp8", of, experts=True, assumed=(BLOCKWISE,) if given else ())


def activations(keys: Keys) -> str:
    how = keys.get("activation_scheme", str, "dynamic")
    if how not in ("dynamic", "static"):
        raise keys.refused(f"activation_scheme {how!r}", how, "dynamic or static")
    return how


def fbgemm(keys: Keys, model: nn.Module) -> Quantisation:
    of = apart_from(Scheme(WeightFormat(F8), F8), model, keys.names("modules_to_not_convert"))
    return Quantisation("fbgemm_fp8", of)


def bitsandbytes(keys: Keys, model: nn.Module) -> Quantisation:
    """Four bits: one row is multiplied by packed weights, several after these are unpacked in
    memory (bitsandbytes/autograd/_functions.py: matmul_4bit). Eight: LLM.int8()."""
    left = keys.names("llm_int8_skip_modules")
    if keys.get("load_in_8bit", bool, False):
        scheme = Scheme(WeightFormat(torch.int8), torch.int8, unpacks=1)
        return Quantisation("bitsandbytes", apart_from(scheme, model, left), assumed=(OUTLIERS,))
    kind = keys.get("bnb_4bit_quant_type", str, "fp4")
    if kind not in ("nf4", "fp4"):
        raise keys.refused(f"bnb_4bit_quant_type {kind!r}", kind, "nf4 or fp4")
    nested = 256 if keys.get("bnb_4bit_use_double_quant", bool, False) else 0
    stored = WeightFormat(U4, columns=64, floats=True, nested=nested)
    of = apart_from(Scheme(stored, unpacks=2), model, left)
    return Quantisation("bitsandbytes", of, assumed=(CODE_BOOK,))


def mxfp4(keys: Keys, model: nn.Module) -> Quantisation:
    """The experts of GPT-OSS; rows stay in 16 bits."""
    left = keys.names("modules_to_not_convert")
    of = apart_from(Scheme(E2M1), model, left)
    return Quantisation("mxfp4", of, experts=True, linears=False)


def eetq(keys: Keys, model: nn.Module) -> Quantisation:
    return weight_only("eetq", keys, model, {"int8": WeightFormat(torch.int8)})


def quanto(keys: Keys, model: nn.Module) -> Quantisation:
    """optimum-quanto unpacks what its own kernels do not take; int8 and float8 they do."""
    if (inputs := keys.get("activations", str)) is not None:
        raise keys.refused("quanto's activations", inputs, "weights alone")
    narrow = WeightFormat(U4, columns=128, scale=model_dtype(model), zero=model_dtype(model))
    kinds = {"int8": WeightFormat(torch.int8), "float8": WeightFormat(F8), "int4": narrow}
    return weight_only("quanto", keys, model, kinds)


def weight_only(
    name: str, keys: Keys, model: nn.Module, kinds: Mapping[str, WeightFormat]
) -> Quantisation:
    kind = keys.get("weights", str, "int8")
    if kind not in kinds:
        raise keys.refused(f"{name}'s weights {kind!r}", kind, ", ".join(kinds))
    scale = replace(kinds[kind], scale=model_dtype(model))
    return Quantisation(
        name, apart_from(Scheme(scale), model, keys.names("modules_to_not_convert"))
    )


def hqq(keys: Keys, model: nn.Module) -> Quantisation:
    """Weights are unpacked in memory, then multiplied (hqq/core/quantize.py: HQQLinear.forward)."""
    outer = keys.part("quant_config") or keys
    inner = outer.part("weight_quant_params") or outer
    dtype = model_dtype(model)
    stored = WeightFormat(codes(inner, "nbits"), columns=inner.size("group_size", 64), scale=dtype)
    scheme = Scheme(replace(stored, zero=dtype), unpacks=1)
    left = keys.names("skip_modules") or ["lm_head"]
    return Quantisation("hqq", apart_from(scheme, model, left, wide=False))


TORCHAO: dict[str, Callable[[Keys, nn.Module], Scheme]] = {
    "Int4WeightOnlyConfig": lambda keys, model: int4(keys, model),
    "Int8WeightOnlyConfig": lambda keys, model: int8(keys, model, None),
    "Int8DynamicActivationInt8WeightConfig": lambda keys, model: int8(keys, model, torch.int8),
    "Float8WeightOnlyConfig": lambda keys, model: Scheme(WeightFormat(F8)),
    "Float8DynamicActivationFloat8WeightConfig": lambda keys, model: Scheme(WeightFormat(F8), F8),
}
# names of functions, all that transformers 4's TorchAoConfig took up to torchao 0.9; 5 takes none
OLD_TORCHAO = {
    "int4_weight_only": "Int4WeightOnlyConfig",
    "int8_weight_only": "Int8WeightOnlyConfig",
    "int8_dynamic_activation_int8_weight": "Int8DynamicActivationInt8WeightConfig",
}


def int4(keys: Keys, model: nn.Module) -> Scheme:
    dtype = model_dtype(model)
    return Scheme(
        WeightFormat(
            dtype=U4, rows=1, columns=keys.size("group_size", 128), scale=dtype, zero=dtype
        )
    )


def int8(keys: Keys, model: nn.Module, inputs: torch.dtype | None) -> Scheme:
    """torchao's Int8Tensor (0.18) has a zero point a row, symmetric or not; version 1, which was
    before it, none."""
    columns = keys.size("group_size", 0)
    if keys.get("version", int, 2) > 1:
        return Scheme(WeightFormat(torch.int8, columns=columns, zero=torch.int8), inputs)
    scale = torch.float32 if inputs else model_dtype(model)
    return Scheme(WeightFormat(torch.int8, columns=columns, scale=scale), inputs)


def torchao(keys: Keys, model: nn.Module) -> Quantisation:
    """One config for all layers, as torchao writes it: `{"default": {"_type": .., ..}}`, or its
    older name with its arguments beside it."""
    name = keys.data.get("quant_type")
    if isinstance(name, str):
        if name not in OLD_TORCHAO:
            raise keys.refused(
                f"torchao's quant_type {name[:40]!r}", name[:80], ", ".join(OLD_TORCHAO)
            )
        given = keys.get("quant_type_kwargs", dict, {})
        config = {"_type": OLD_TORCHAO[name], "_data": {"version": 1, **given}}
        keys = Keys({**keys.data, "quant_type": {"default": config}}, keys.where)
    outer = keys.part("quant_type") or Keys({}, keys.where)
    only = outer.part("default")
    kind = only.get("_type", str) if only and len(outer.data) == 1 else None
    if only is None or kind not in TORCHAO:
        raise keys.refused(
            f"torchao's quant_type {kind or keys.data.get('quant_type')!r}"[:80],
            ", ".join(outer.data)[:80],
            f'{{"default": {{"_type": ..}}}} of {", ".join(TORCHAO)}',
        )
    scheme = TORCHAO[kind](only.part("_data") or Keys({}, keys.where), model)
    of = apart_from(scheme, model, keys.names("modules_to_not_convert"))
    return Quantisation("torchao", of, assumed=() if scheme.inputs else (ENGINE,))


# ---------------------------------------------------------------------------- compressed-tensors


def compressed_tensors(keys: Keys, model: nn.Module) -> Quantisation:
    """A scheme for each group of targets: names, `re:` patterns or classes; `ignore` goes first."""
    sparse = keys.part("sparsity_config") or Keys({}, keys.where)
    for form in (sparse.get("format", str, "dense"), keys.get("format", str, "dense")):
        if "24" in form or "sparse" in form:
            raise keys.refused(f"sparse weights of the form {form!r}", form, "dense weights")
    groups = keys.part("config_groups")
    if groups is None or not groups.data:
        raise keys.refused("no config_groups", ", ".join(keys.data)[:80])
    schemes: list[tuple[list[str], Scheme]] = []
    for name in groups.data:
        group = groups.part(name)
        assert group is not None
        schemes.append((group.names("targets") or ["Linear"], group_scheme(group, model)))
    ignored = keys.names("ignore") or []

    def of(name: str, module: nn.Module) -> Scheme | None:
        if any(is_target(target, name, module) for target in ignored):
            return None
        found = (s for targets, s in schemes if any(is_target(x, name, module) for x in targets))
        return next(found, None)

    blocks = any(s.weights.rows > 1 and s.weights.columns for _, s in schemes)
    assumed = (ENGINE, *([BLOCKWISE] if blocks else []))
    kept = keys.part("kv_cache_scheme")
    if kept and (kept.get("num_bits", int, 8), kept.get("type", str, "float")) != (8, "float"):
        raise keys.refused("kv_cache_scheme", repr(kept.data)[:80], "floats of 8 bits")
    return Quantisation(
        method="compressed-tensors",
        of=of,
        experts=True,
        linears=True,
        assumed=assumed,
        cache=F8_CACHE if kept else None,
    )


def is_target(target: str, name: str, module: nn.Module) -> bool:
    """A layer's name, a pattern of names, or a class; a mixture is of linear layers."""
    if target.startswith("re:"):
        return _matches(target[3:], name)
    kind = "Linear" if is_linear(module) or hasattr(module, "is_concatenated") else ""
    return target in (name, kind, type(module).__name__)


def group_scheme(group: Keys, model: nn.Module) -> Scheme:
    group.check_unset("output_activations")
    weights, inputs = group.part("weights"), group.part("input_activations")
    if weights is None:
        raise group.refused("a group without weights", ", ".join(group.data)[:80])
    stored = group_weights(weights, model)
    if inputs is None:
        return Scheme(stored)
    bits, kind = inputs.get("num_bits", int, 8), inputs.get("type", str, "int")
    narrow = {(8, "float"): F8, (8, "int"): torch.int8}.get((bits, kind))
    if narrow is None or stored.dtype != narrow:
        raise group.refused(
            f"{stored.dtype} weights times {kind}{bits} inputs".replace("torch.", ""),
            f"{bits} bits of {kind}",
            "both int8, or both float8",
        )
    dynamic = inputs.data.get("dynamic", False)
    return Scheme(stored, narrow, static=not dynamic)


def group_weights(keys: Keys, model: nn.Module) -> WeightFormat:
    bits, kind = keys.get("num_bits", int, 8), keys.get("type", str, "int")
    symmetric = keys.get("symmetric", bool, True)
    size = keys.size("group_size", 0)
    block = keys.get("block_structure", list)
    if keys.get("strategy", str) == "block" and block:
        if not (len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
            raise keys.refused("block_structure", repr(block)[:80], "two numbers")
        rows, columns = block
    else:
        rows, columns = (0 if keys.get("strategy", str) == "tensor" else 1), size
    scale = model_dtype(model)
    match bits, kind:
        case 8, "float":
            return WeightFormat(F8, rows, columns, scale)
        case 4, "float" if size == 32:
            return E2M1
        case 8, "int" if symmetric:
            return WeightFormat(torch.int8, rows, columns, scale)
        case 4 | 8, "int":
            return WeightFormat(
                dtype=CODES[bits],
                rows=rows,
                columns=columns,
                scale=scale,
                zero=None if symmetric else CODES[bits],
            )
        case _:
            raise keys.refused(
                f"{bits}-bit {kind} weights",
                f"num_bits={bits}, type={kind!r}, group_size={size}",
                "int of 4 or 8 bits, float of 8, or of 4 in groups of 32 (MXFP4)",
            )


def modelopt(keys: Keys, model: nn.Module) -> Quantisation:
    """NVIDIA's: one scale a matrix, known ones of inputs, and so for keys and values."""
    algo = keys.get("quant_algo", str)
    schemes = {
        "FP8": Scheme(WeightFormat(F8, 0), F8, static=True),
        "W4A16_AWQ": Scheme(WeightFormat(U4, columns=128, scale=model_dtype(model))),
        "FP8_PB_WO": Scheme(WeightFormat(F8, 128, 128), F8),
    }
    if algo not in schemes:
        raise keys.refused(f"modelopt's quant_algo {algo!r}", str(algo), ", ".join(schemes))
    left = keys.names("ignore") or keys.names("exclude_modules") or ["lm_head"]

    def of(name: str, module: nn.Module) -> Scheme | None:
        return None if any(fnmatch(name, x) for x in left) else schemes[str(algo)]

    kept = keys.get("kv_cache_quant_algo", str)
    scheme = keys.part("kv_cache_scheme")
    if kept not in (None, "FP8"):
        raise keys.refused(f"kv_cache_quant_algo {kept!r}", str(kept), "FP8")
    return Quantisation(
        method="modelopt",
        of=of,
        experts=True,
        linears=True,
        assumed=(),
        cache=F8_CACHE if kept or scheme else None,
    )


METHODS: dict[str, Callable[[Keys, nn.Module], Quantisation]] = {
    "awq": awq,
    "gptq": gptq,
    "auto-round": auto_round,
    "fp8": fp8,
    "fbgemm_fp8": fbgemm,
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "mxfp4": mxfp4,
    "torchao": torchao,
    "eetq": eetq,
    "quanto": quanto,
    "hqq": hqq,
}


def model_dtype(model: Any) -> torch.dtype:
    return model.dtype
