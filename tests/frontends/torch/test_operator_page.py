"""docs/reference/torch-operators.md names every operator that has a converter."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from gpuir.frontends.torch.flex import FLEX
from gpuir.frontends.torch.higher import HIGHER
from gpuir.frontends.torch.table import CONVERTERS
from gpuir.frontends.torch.walk import INLINED

PAGE = Path(__file__).parents[3] / "docs/reference/torch-operators.md"


def test_every_operator_is_on_the_page():
    page = PAGE.read_text()
    assert not [name for name in (*CONVERTERS, *HIGHER, *FLEX, *INLINED) if f"`{name}`" not in page]
