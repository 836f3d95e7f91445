"""Which attributes of a node its converter has not read, and what of it: each says nothing here,
has its default, or is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuir.frontends.onnx.proto import Attributes
from gpuir.frontends.onnx.steps import NodeStep
from gpuir.ir.errors import ModelError

STANDARD = ("", "ai.onnx.ml", "ai.onnx.preview")  # the domains that ONNX defines

# Operators, attributes, and why the result and the time are the same whatever they hold where a
# converter does not read them.
UNREAD = (
    ("*", "consumed_inputs is_test", "about memory and training in opsets before 7"),
    (
        "AveragePool Conv ConvInteger ConvTranspose DeformConv LpPool MaxPool QLinearConv",
        "pads",
        "auto_pad or output_shape says how much is padded",
    ),
    ("AveragePool LpPool MaxPool", "ceil_mode", "auto_pad says how many windows there are"),
    ("MaxPool", "storage_order", "it is about the indices, which nobody reads"),
    ("ConvTranspose", "output_padding", "output_shape is given"),
    ("MaxUnpool", "kernel_shape pads strides", "output_shape is given"),
    ("BatchNormalization", "spatial", "the shape of the scale shows it"),
    ("Cast CastLike", "round_mode saturate", "they are about 8-bit floats"),
    ("DequantizeLinear QuantizeLinear", "axis", "there is one scale in all"),
    ("Constant", "value sparse_value", "numbers are read when somebody asks for them"),
    ("Dropout", "ratio seed", "inference drops nothing; any cells may be dropped in training"),
    (
        "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike",
        "seed",
        "any numbers may be drawn",
    ),
    ("GRU LSTM RNN", "output_sequence", "the outputs that have a name show it"),
    (
        "GroupNormalization LayerNormalization RMSNormalization Range",
        "stash_type",
        "kernels compute in f32 or wider, whatever narrower type is allowed",
    ),
    ("Attention ai.onnx.preview::FlexAttention", "softmax_precision", "kernels compute it in f32"),
    ("Attention", "kv_num_heads q_num_heads", "an axis shows the heads"),
    ("RotaryEmbedding", "num_heads", "an axis shows the heads"),
    ("Attention", "qk_matmul_output_mode", "the output that it is about is not there"),
    ("LinearAttention", "chunk_size", "a hint how to compute the same"),
    (
        "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd "
        "ReduceSum ReduceSumSquare",
        "noop_with_empty_axes",
        "there are axes",
    ),
    ("Resize", "keep_aspect_ratio_policy", "scales are given, not sizes"),
    ("Split", "num_outputs", "the sizes are given"),
    ("SplitToSequence", "keepdims", "lengths are given"),
    ("TopK", "sorted", "any order is allowed, so the sorted one too"),
    ("Optional", "type", "what is put in has a type"),
    ("SequenceEmpty", "dtype", "what is put in has a type"),
    ("TfIdfVectorizer", "weights", "of the mode TF, where counts stay as they are"),
    ("ai.onnx.ml::TreeEnsemble", "nodes_hitrates", "how often a branch was taken in training"),
    (
        "ai.onnx.ml::TreeEnsembleClassifier ai.onnx.ml::TreeEnsembleRegressor",
        "nodes_hitrates nodes_hitrates_as_tensor",
        "how often a branch was taken in training",
    ),
    ("ai.onnx.ml::FeatureVectorizer", "inputdimensions", "the operands have these shapes"),
    (
        "ai.onnx.ml::Imputer",
        "imputed_value_floats imputed_value_int64s replaced_value_float replaced_value_int64",
        "those of the operand's dtype count",
    ),
    (
        "ai.onnx.ml::LabelEncoder",
        "default_float default_int64 default_string default_tensor",
        "the one of the values' dtype counts",
    ),
    ("ai.onnx.ml::LinearClassifier", "multi_class", "a hint how the model was trained"),
    ("ai.onnx.ml::OneHotEncoder", "zeros", "it allows categories that are not listed"),
    (
        "ai.onnx.ml::SVMClassifier ai.onnx.ml::SVMRegressor",
        "kernel_params kernel_type support_vectors",
        "a linear kernel has no parameters, and without support vectors the kernel is linear",
    ),
    (
        "ai.onnx.ml::ZipMap",
        "classlabels_int64s classlabels_strings",
        "the keys of dictionaries, which the host makes",
    ),
)
SAYS_NOTHING: Mapping[tuple[str, str], str] = {
    (op, name): why for ops, names, why in UNREAD for op in ops.split() for name in names.split()
}


def check_read(key: str, step: NodeStep, version: int, attributes: Attributes) -> tuple[str, ...]:
    """Raises for an attribute that the converter of a standard operator has not read, though it may
    matter. Gives those that the operator does not have."""
    if step.domain not in STANDARD:
        return ()
    unread = [
        name
        for name in attributes.unread()
        if (key, name) not in SAYS_NOTHING and ("*", name) not in SAYS_NOTHING
    ]
    if not unread:
        return ()
    known = attributes_of(step.op, version, step.domain)
    for name in unread:
        default = known.get(name)
        if name in known and (default is None or attributes[name] != default):
            raise ModelError(
                f"{step.op}: the attribute {name!r} is not supported",
                expected="none" if default is None else f"none, or its default {default!r}",
                found=f"{attributes[name]!r}"[:200],
                fix="export the model without it",
            )
    return tuple(name for name in unread if name not in known)


def attributes_of(op: str, version: int, domain: str) -> dict[str, Any]:
    """The attributes that an operator has in a version, each with its default; None without one."""
    from onnx import defs, helper

    try:
        schema = defs.get_schema(op, version, domain)
    except defs.SchemaError:
        return {}
    defaults = {name: a.default_value for name, a in schema.attributes.items()}
    return {name: default_of(helper, a) for name, a in defaults.items()}


def default_of(helper: Any, proto: Any) -> Any:
    if not proto.name:
        return None
    value = helper.get_attribute_value(proto)
    if isinstance(value, list | tuple):
        return tuple(map(_decoded, value))
    return _decoded(value)


def _decoded(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
