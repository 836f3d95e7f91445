"""What every converter reads: a node of a model, and the table that names its converter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from gpuir.ir.errors import ModelError


class ModelNode:
    """A node of a model, which says by its operator what is wrong with it."""

    op: str

    def refused(
        self, what: str, expected: object = "", found: object = "", fix: str = ""
    ) -> ModelError:
        """The error for a node that is not supported, or not valid; whoever walks says where."""
        said = {"expected": str(expected), "found": str(found), "fix": fix}
        return ModelError(f"{self.op}: {what}", **said)


C = TypeVar("C")


def each_named(converters: Mapping[str, C]) -> dict[str, C]:
    """A table with a row for each operator, of one whose rows name several: `"view reshape"`."""
    return {name: made for names, made in converters.items() for name in names.split()}
