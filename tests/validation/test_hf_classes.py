"""Classes of transformers: parameters, arithmetic and caches as computed without gpuir."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import CONFIG_MAPPING

from gpuir.frontends.torch import hf
from validation.agreement import hf_classes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "mixtral", "deepseek_v3", "t5", "vit", "clip"])
def test_numbers_agree(name: str, tmp_path: Path):
    with hf.quiet():
        hf_classes.write(hf_classes.small(CONFIG_MAPPING[name]), tmp_path)
        row = hf_classes.compare(tmp_path, name, 60)
    assert row.parameters and row.flops and not row.faults
    assert (row.cache is None) == (name in ("t5", "vit", "clip"))


def test_a_number_that_differs_and_a_user_who_is_blamed_are_faults():
    row = hf_classes.Row("x", flops=(1.0, 2.0), said={"decode": "run the module in PyTorch first"})
    assert row.faults == ["flops", "decode: blames"]
    row = hf_classes.Row("x", flops=(2.0, 2.0), said={"decode": "gpuir does not support X"})
    assert not row.faults
