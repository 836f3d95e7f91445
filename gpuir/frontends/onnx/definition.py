"""What ONNX's own definition says of an operator: asked where we have none, or where one fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from gpuir.frontends.onnx.messages import messages
from gpuir.frontends.onnx.proto import NUMBERS, declared_type, kind_of
from gpuir.frontends.onnx.steps import NodeStep, key_of
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Loc, Value
from gpuir.ir.types import DType, TensorType

if TYPE_CHECKING:
    from onnx import AttributeProto

Operands = Sequence["Value | None"]
Converter = Callable[..., Any]

# Ranks of operands, where the definitions give them in words alone: `2|3` is either, `1+` at least
# one, `*` any. Those of com.microsoft are of onnxruntime 1.32 (docs/ContribOperators.md), and what
# its CPU kernels take beyond the words.
RANKS = {
    "AffineGrid": "3 1",
    "CausalConvWithState": "3 3 1 3",
    "Concat": "1+",
    "GRU": "3 3 3 2 1 3",
    "GridSample": "3+ 3+",
    "LSTM": "3 3 3 2 1 3 3 2",
    "LinearAttention": "3 3 3 4 2+ 2+",
    "MaxRoiPool": "4 2",
    "NonMaxSuppression": "3 3",
    "OneHot": "* * 1",
    "RNN": "3 3 3 2 1 3",
    "RoiAlign": "4 2 1",
    "STFT": "2|3 * 1",
    "Split": "1+",
    "SplitToSequence": "1+",
    "TensorScatter": "2+ 2+ 1",
    "TopK": "1+",
    "ai.onnx.ml::LinearClassifier": "1|2",
    "ai.onnx.ml::LinearRegressor": "1|2",
    "ai.onnx.ml::SVMClassifier": "1|2",
    "ai.onnx.ml::SVMRegressor": "1|2",
    "ai.onnx.ml::TreeEnsemble": "2",
    "ai.onnx.ml::TreeEnsembleClassifier": "2",
    "ai.onnx.ml::TreeEnsembleRegressor": "2",
    "ai.onnx.preview::FlexAttention": "4 4 4",
    "com.microsoft::CausalConvWithState": "3+ 3+ 1 3+",
    "com.microsoft::ComplexMul": "1+ 1+",
    "com.microsoft::ComplexMulConj": "1+ 1+",
    "com.microsoft::CropAndResize": "4 2 1",
    "com.microsoft::DecoderMaskedMultiHeadAttention": "3|5 3|4|5 3|4 * 4 4 4",
    "com.microsoft::EmbedLayerNormalization": "2 2 2 2 2 1 1",
    "com.microsoft::FusedMatMul": "1+ 1+",
    "com.microsoft::FusedMatMulActivation": "1+ 1+",
    "com.microsoft::GatherBlockQuantized": "1+ * 1+",
    "com.microsoft::GemmaRotaryEmbedding": "3 4 4 4 4",
    "com.microsoft::GridSample": "4 4",
    "com.microsoft::GroupNorm": "2+ 1 1",
    "com.microsoft::GroupQueryAttention": "3 3 3 4 4",
    "com.microsoft::Inverse": "2+",
    "com.microsoft::LinearAttention": "3 3 3 4|5 2+ 2+",
    "com.microsoft::MRotaryEmbedding": "3|4 3 2 2",
    "com.microsoft::MultiHeadAttention": "3|5 3|4|5 3|4 1 * 4 4 4",
    "com.microsoft::PackedAttention": "2 2 1",
    "com.microsoft::PackedMultiHeadAttention": "2|4 2 2",
    "com.microsoft::PagedAttention": "2 2 2 4 4",
    "com.microsoft::QEmbedLayerNormalization": "2 2 2 2 2 1 1",
    "com.microsoft::RemovePadding": "3 1",
    "com.microsoft::RestorePadding": "2 2",
    "com.microsoft::RotaryEmbedding": "3|4 0|1|2 2 2",
    "com.microsoft::SkipGroupNorm": "2+ 1 1",
    "com.microsoft::SparseAttention": "3 3 3 4 4",
    "com.microsoft::TransposeMatMul": "1+ 1+",
    "com.microsoft::UnfoldTensor": "1+",
}
# Attributes that have to be there, and to be 1 or more if they are integers.
NEEDED = {
    "LinearAttention": "q_num_heads kv_num_heads",
    "MaxRoiPool": "pooled_shape",
    "com.microsoft::DecoderMaskedMultiHeadAttention": "num_heads",
    "com.microsoft::GroupNorm": "groups",
    "com.microsoft::GroupQueryAttention": "num_heads kv_num_heads",
    "com.microsoft::LinearAttention": "q_num_heads kv_num_heads",
    "com.microsoft::MRotaryEmbedding": "mrope_section",
    "com.microsoft::MatMulBnb4": "N K block_size",
    "com.microsoft::MatMulNBits": "N K block_size",
    "com.microsoft::MultiHeadAttention": "num_heads",
    "com.microsoft::PagedAttention": "num_heads kv_num_heads",
    "com.microsoft::ReduceSumInteger": "axes",
    "com.microsoft::SkipGroupNorm": "groups",
    "com.microsoft::SparseAttention": "num_heads kv_num_heads",
    "com.microsoft::UnfoldTensor": "size",
}


def ranked(rules: str) -> Callable[[Converter], Converter]:
    """States the ranks of a converter's operands, as `RANKS` does, where it is defined: for those
    that somebody adds."""

    def mark(converter: Converter) -> Converter:
        cast(Any, converter).ranks = rules
        return converter

    return mark


def check_stated(
    key: str, op: str, inputs: Operands, attributes: Mapping[str, Any], ranks: str = ""
) -> None:
    """ModelError where a node breaks what `RANKS` (or its converter, by `ranked`) and `NEEDED` say
    of its operator."""
    stated = RANKS.get(key, ranks).split()
    for i, (rule, value) in enumerate(zip(stated, inputs, strict=False)):
        if value is None or any(_fits(value.type.rank, one) for one in rule.split("|")):
            continue
        raise ModelError(
            f"{op}: input {i} has the wrong number of axes",
            expected=rule.replace("|", " or ").replace("+", " or more"),
            found=f"{value.type.rank}: {value.type}",
        )
    for name in NEEDED.get(key, "").split():
        value = attributes.get(name)
        if value is None or (isinstance(value, int) and value < 1):
            found = "none" if value is None else str(value)
            raise ModelError(f"{op}: the attribute {name!r}", expected="1 or more", found=found)


def _fits(rank: int, rule: str) -> bool:
    least = rule.removesuffix("+")
    return rule == "*" or (rank >= int(least) if rule != least else rank == int(rule))


def diagnosis(
    step: NodeStep, inputs: Operands, opsets: Mapping[str, int], loc: Loc, error: Exception
) -> ModelError:
    """The error for a node that a converter failed on: how it breaks its operator's definition,
    what ONNX's own inference has against it, else that it may be our fault."""
    schema = _schema(step, opsets)
    shown = ", ".join(str(v.type) if v else "none" for v in inputs)
    attributes = ", ".join(map(_show, step.attributes.values()))
    found = f"{step.op}({shown}{'; ' * bool(attributes)}{attributes})"
    if schema is not None:
        breach = _breach(schema, step, inputs)
        if breach is not None:
            what, expected = breach
            return ModelError(f"{step.op}: {what}", where=loc, expected=expected, found=found)
        try:
            _inferred(schema, step, inputs, opsets)
        except Exception as refusal:  # it raises many kinds
            reason = str(refusal).rpartition("] ")[2].strip() or type(refusal).__name__
            return ModelError(
                f"{step.op}: the node does not follow ONNX's definition",
                where=loc,
                expected=f"a node that ONNX shape inference accepts. It says: {reason}"[:300],
                found=found,
            )
        if schema.since_version > opsets.get(step.domain, 1):
            return ModelError(
                f"{step.op}: opset {opsets.get(step.domain, 1)} of "
                f"{step.domain or 'ai.onnx'} has no such operator",
                where=loc,
                found=found,
                fix=f"opset {schema.since_version} or later",
            )
    return ModelError(
        f"{step.op}: the node is not valid ONNX, or gpuir reads it wrongly",
        where=loc,
        expected=f"a node that follows the definition of {key_of(step.op, step.domain)}",
        found=f"{found[:300]}\n{type(error).__name__}: {error}"[:500],
        fix="check the model with onnx.checker; if it finds no error, please report this as a bug",
    )


def _schema(step: NodeStep, opsets: Mapping[str, int]) -> Any:
    """The operator's definition in the model's opset, else its first; None for one that ONNX does
    not define."""
    from onnx import defs

    try:
        return defs.get_schema(step.op, opsets.get(step.domain, 1), step.domain)
    except defs.SchemaError:
        known = defs.get_all_schemas_with_history()
        alike = (s for s in known if s.name == step.op and s.domain == step.domain)
        return min(alike, key=lambda s: s.since_version, default=None)


def _show(a: AttributeProto) -> str:
    """`axis=2`: an attribute as one reads it; of what is large, only its type."""
    values: dict[str, Any] = {"INT": a.i, "FLOAT": f"{a.f:g}", "INTS": list(a.ints)}
    values |= {"STRING": a.s.decode("utf-8", "replace"), "FLOATS": list(a.floats)}
    kind = kind_of(a)
    text = str(values[kind]) if kind in values and not a.ref_attr_name else kind
    return f"{a.name}={text if len(text) < 60 else kind}"


def _breach(schema: Any, step: NodeStep, inputs: Operands) -> tuple[str, str] | None:
    """How a node breaks its operator's definition, where that is plain to see, and what it asks."""
    least, most = schema.min_input, schema.max_input
    if not least <= len(step.inputs) <= most:
        wants = str(least) if least == most else f"{least} to {most}"
        return f"{len(step.inputs)} operands", wants
    for name, attribute in schema.attributes.items():
        proto, kind = step.attributes.get(name), str(attribute.type).rpartition(".")[2]
        if proto is None and attribute.required:
            return f"the attribute {name!r} is missing", kind
        if proto is not None and kind_of(proto) != kind:
            return f"the attribute {name!r} has the wrong type", f"{kind}, not {kind_of(proto)}"
    formal = list(schema.inputs)
    for i, value in enumerate(inputs):
        if i >= len(formal):
            break
        single = str(formal[i].option).rpartition(".")[2] == "Single"
        if single and not step.inputs[i]:
            return f"input {i} ({formal[i].name}) is missing", formal[i].type_str
        known = value is not None and _tensor(value.type.dtype)
        if known and formal[i].types and known not in formal[i].types:
            return f"input {i} ({formal[i].name}) has the wrong dtype", _some(formal[i].types)
    return None


def _some(types: set[str]) -> str:
    return ", ".join(sorted(x for x in types if x.startswith("tensor(")))


def _tensor(dtype: DType) -> str:
    """`tensor(float16)`: a dtype as ONNX's definitions have it."""
    from onnx import TensorProto

    return f"tensor({TensorProto.DataType.Name(NUMBERS[dtype]).lower()})"


def type_proto(type: TensorType) -> Any:
    proto = messages().TypeProto()
    proto.tensor_type.elem_type = NUMBERS[type.dtype]
    proto.tensor_type.shape.SetInParent()
    for n in type.shape:
        proto.tensor_type.shape.dim.add(dim_value=n)
    return proto


def _inferred(
    schema: Any, step: NodeStep, inputs: Operands, opsets: Mapping[str, int]
) -> Mapping[str, Any]:
    """Types by name, by ONNX's own inference for one node; raises many kinds where it fails."""
    import onnx
    from onnx import helper, shape_inference

    types = {name: type_proto(v.type) for name, v in zip(step.inputs, inputs, strict=False) if v}
    return shape_inference.infer_node_outputs(
        schema,
        step.proto,
        types,
        opset_imports=[helper.make_opsetid(d, v) for d, v in opsets.items()],
        ir_version=onnx.IR_VERSION,
    )


def infer(
    schema: Any, step: NodeStep, inputs: Operands, opsets: Mapping[str, int]
) -> dict[str, TensorType]:
    """Result types by ONNX's own inference for one node; empty where it fails."""
    try:
        found = _inferred(schema, step, inputs, opsets)
    except Exception:  # the declared types remain
        return {}
    result: dict[str, TensorType] = {}
    for name, proto in found.items():
        if proto.WhichOneof("value") != "tensor_type":
            continue
        dtype, dims = declared_type(proto, name)
        if dims is not None and all(isinstance(d, int) for d in dims):
            result[name] = TensorType(tuple(d for d in dims if isinstance(d, int)), dtype)
    return result
