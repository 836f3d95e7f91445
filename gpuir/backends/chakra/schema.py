"""Chakra's protobuf messages: of its schema, what is written here.

Names and numbers are those of mlcommons/chakra, `schema/protobuf/et_def.proto` (package
`ChakraProtoMsg`). A file holds one `GlobalMetadata` and then each `Node`, every message behind its
length as a varint (`src/third_party/utils/protolib.py` there).
"""

from __future__ import annotations

from functools import cache
from io import BytesIO
from types import SimpleNamespace
from typing import Any, Literal

VERSION = "0.0.4"  # of the schema, as chakra's own generator writes it
NodeType = Literal["COMP_NODE", "COMM_SEND_NODE", "COMM_RECV_NODE", "COMM_COLL_NODE"]
NODE_TYPES: dict[NodeType, int] = {
    "COMP_NODE": 4,
    "COMM_SEND_NODE": 5,
    "COMM_RECV_NODE": 6,
    "COMM_COLL_NODE": 7,
}
COMM_TYPES = {  # enum CollectiveCommType
    "all_reduce": 0,
    "all_gather": 2,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
}
ATTRIBUTES = {  # the fields of the oneof `value` in AttributeProto
    "double_val": 3,
    "int32_val": 7,
    "int64_val": 9,
    "uint64_val": 13,
    "bool_val": 27,
    "string_val": 29,
}


@cache
def messages() -> Any:
    """Classes for `GlobalMetadata`, `Node` and `AttributeProto`, in a pool of their own."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    types = {
        "double": field.TYPE_DOUBLE,
        "int32": field.TYPE_INT32,
        "int64": field.TYPE_INT64,
        "uint64": field.TYPE_UINT64,
        "bool": field.TYPE_BOOL,
        "string": field.TYPE_STRING,
    }
    file = descriptor_pb2.FileDescriptorProto(
        name="gpuir/et_def.proto", package="ChakraProtoMsg", syntax="proto3"
    )

    def put(message: Any, name: str, number: int, kind: str, repeated: bool = False) -> Any:
        own = {} if kind in types else {"type_name": f".{file.package}.{kind}"}
        return message.field.add(
            name=name,
            number=number,
            type=types.get(kind, field.TYPE_MESSAGE),
            label=field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL,
            **own,
        )

    attribute = file.message_type.add(name="AttributeProto")
    put(attribute, "name", 1, "string")
    attribute.oneof_decl.add(name="value")
    for name, number in ATTRIBUTES.items():
        put(attribute, name, number, name.removesuffix("_val")).oneof_index = 0
    metadata = file.message_type.add(name="GlobalMetadata")
    put(metadata, "version", 1, "string")
    put(metadata, "attr", 2, "AttributeProto", repeated=True)
    node = file.message_type.add(name="Node")
    put(node, "id", 1, "uint64")
    put(node, "name", 2, "string")
    put(node, "type", 3, "int32")  # an enum is an int32 on the wire
    put(node, "ctrl_deps", 4, "uint64", repeated=True)
    put(node, "data_deps", 5, "uint64", repeated=True)
    put(node, "duration_micros", 7, "uint64")
    put(node, "attr", 10, "AttributeProto", repeated=True)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return SimpleNamespace(
        **{
            m.name: message_factory.GetMessageClass(
                pool.FindMessageTypeByName(f"{file.package}.{m.name}")
            )
            for m in file.message_type
        }
    )


def attribute(name: str, value: float | str | bool, kind: str) -> Any:
    """An attribute under one of the fields of `ATTRIBUTES`."""
    return messages().AttributeProto(name=name, **{kind: value})


def delimited(message: Any) -> bytes:
    """A message behind its length."""
    from google.protobuf import proto

    stream = BytesIO()
    proto.serialize_length_prefixed(message, stream)
    return stream.getvalue()
