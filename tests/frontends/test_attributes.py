"""Of every standard operator, each attribute is read, says nothing, or is refused by name."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import defs, helper
from onnx_models import info, loaded, model, node, one_node

from gpuir.frontends.emit import Emitter
from gpuir.frontends.onnx import walk
from gpuir.frontends.onnx.attributes import (
    SAYS_NOTHING,
    STANDARD,
    UNREAD,
    attributes_of,
    check_read,
)
from gpuir.frontends.onnx.load import load
from gpuir.frontends.onnx.node import OnnxNode
from gpuir.frontends.onnx.proto import Attributes, OpenedModel
from gpuir.frontends.onnx.steps import key_of, step_of
from gpuir.frontends.onnx.table import CONVERTERS
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ops import tensor as t

X = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4) / 7


def other(kind: str, default: Any) -> Any:
    """A value of an attribute that is not its default."""
    number = default + 1 if isinstance(default, int) else 1
    values: dict[str, Any] = {"INT": number, "FLOAT": 0.25}
    values |= {"STRING": "other", "INTS": [3, 5], "FLOATS": [0.25, 0.5], "STRINGS": ["other"]}
    return values.get(kind)


def each_attribute() -> Iterator[tuple[str, int, str, str, str, Any]]:
    """Each attribute of numbers or texts of each version of each operator that has a converter."""
    for schema in defs.get_all_schemas_with_history():
        key = key_of(schema.name, schema.domain)
        if key not in CONVERTERS or schema.domain not in STANDARD or key == "Constant":
            continue
        defaults = attributes_of(schema.name, schema.since_version, schema.domain)
        for name, attribute in schema.attributes.items():
            kind = str(attribute.type).rpartition(".")[2]
            if other(kind, defaults[name]) is not None:
                where = schema.name, schema.since_version, schema.domain
                yield (*where, name, kind, defaults[name])


EACH = list(each_attribute())


def unread(op: str, domain: str, attrs: dict[str, Any]) -> tuple[Any, Attributes]:
    """A node, and its attributes before anybody reads them."""
    step = step_of(helper.make_node(op, ["x"], ["y"], domain=domain, **attrs), 0)
    return step, Attributes(step.attributes, OpenedModel("m", onnx.ModelProto(), None, None))


def test_an_attribute_that_is_not_read_says_nothing_or_is_refused_by_name():
    assert len(EACH) > 1000
    for op, version, domain, name, kind, default in EACH:
        step, attributes = unread(op, domain, {name: other(kind, default)})
        if (key_of(op, domain), name) in SAYS_NOTHING or ("*", name) in SAYS_NOTHING:
            assert check_read(key_of(op, domain), step, version, attributes) == ()
            continue
        with pytest.raises(ModelError) as error:
            check_read(key_of(op, domain), step, version, attributes)
        assert error.value.what == f"{op}: the attribute {name!r} is not supported"
        assert error.value.fix
        assert attributes[name] is not None  # now it is read
        assert check_read(key_of(op, domain), step, version, attributes) == ()


def test_a_default_need_not_be_read():
    for op, version, domain, name, _, default in EACH:
        if default in (None, ()):
            continue
        step, attributes = unread(op, domain, {name: default})
        assert check_read(key_of(op, domain), step, version, attributes) == ()


def test_the_table_names_attributes_that_there_are():
    known = {(key_of(o, d), name) for o, _, d, name, *_ in EACH}
    known |= {
        (key_of(s.name, s.domain), name)
        for s in defs.get_all_schemas_with_history()
        for name in s.attributes
    }
    missing = [pair for pair in SAYS_NOTHING if pair[0] != "*" and pair not in known]
    assert not missing
    assert all(why and not why.endswith(".") for _, _, why in UNREAD)


def test_what_a_converter_forgets_is_refused(monkeypatch: pytest.MonkeyPatch):
    """In a model, whatever the operator: here one whose converter reads nothing."""
    proto, _ = one_node("LeakyRelu", [X], {"alpha": 0.5})
    assert loaded(proto).graph.nodes

    def forgets(n: OnnxNode, e: Emitter) -> Value:
        return e(t.Map("relu", (n[0],)))

    monkeypatch.setattr(walk, "CONVERTERS", {**CONVERTERS, "LeakyRelu": forgets})
    with pytest.raises(ModelError, match="LeakyRelu: the attribute 'alpha' is not supported"):
        load(proto)


def test_an_attribute_that_the_operator_does_not_have_is_said_once():
    nodes = [node("Relu", ["x"], ["a"], gain=2.0), node("Relu", ["a"], ["y"], gain=3.0)]
    m = loaded(model(nodes, [info("x", X.shape)], ["y"]))
    assert [w for w in m.warnings if "gain" in w] == [
        "model: Relu has no attribute 'gain' in opset 17: it is ignored"
    ]


MISFITS = [
    ("Conv", [X, (np.ones((4, 2, 2, 2), np.float32),)], {"kernel_shape": [3, 3]}, "kernel_shape"),
    (
        "ConvTranspose",
        [X, (np.ones((2, 4, 2, 2), np.float32),)],
        {"kernel_shape": [3, 3]},
        "kernel_shape",
    ),
    (
        "GRU",
        [X[0], (np.ones((1, 12, 4), np.float32),), (np.ones((1, 12, 4), np.float32),)],
        {"hidden_size": 5},
        "hidden_size",
    ),
]


@pytest.mark.parametrize("case", MISFITS, ids=lambda c: c[0])
def test_what_says_the_same_as_a_shape_must_agree_with_it(case: Any):
    op, operands, attrs, name = case
    with pytest.raises(ModelError, match=f"{op}: {name} is not"):
        load(one_node(op, operands, attrs)[0])


def test_a_constant_holds_one_thing():
    two = node("Constant", [], ["y"], value_int=1, value_float=2.0)
    with pytest.raises(ModelError, match="Constant: there is more than one value"):
        load(model([two], [], ["y"]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of onnx while it makes its cases
def test_no_attribute_of_the_node_tests_is_refused():
    """Each node test of onnx, with each attribute that it leaves out at another value: one that is
    read, says nothing, or does not fit the others."""
    cases = importlib.import_module("onnx.backend.test.case.node").collect_testcases(None)
    tried = 0
    for case in cases:
        proto = case.model
        if len(proto.graph.node) != 1:
            continue
        (n,) = proto.graph.node
        version = {o.domain: o.version for o in proto.opset_import}.get(n.domain, 1)
        if key_of(n.op_type, n.domain) not in CONVERTERS or n.op_type == "Constant":
            continue
        schema = defs.get_schema(n.op_type, version, n.domain)
        defaults = attributes_of(n.op_type, version, n.domain)
        for name, attribute in schema.attributes.items():
            value = other(str(attribute.type).rpartition(".")[2], defaults[name])
            if value is None or any(a.name == name for a in n.attribute):
                continue
            changed = onnx.ModelProto()
            changed.CopyFrom(proto)
            changed.graph.node[0].attribute.append(helper.make_attribute(name, value))
            tried += 1
            try:
                load(changed)
            except ModelError as error:
                assert not re.search("the attribute .* is not supported", error.what), case.name
    assert tried > 1000
