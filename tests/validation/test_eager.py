"""Eager products: which of the measurements are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from validation.readers import read_table

HEAD = "split,device,op,b,m,n,k,latency_us\n"


@pytest.mark.parametrize(
    ("row", "suspect", "rough"),
    [
        ("train,NVIDIA_A100-PCIE-40GB,bmm,33,66,300,40,150", "measured at the base clock", False),
        ("train,NVIDIA_A100-PCIE-40GB,bmm,33,67,300,40,150", "", False),
        ("train,NVIDIA_A100-PCIE-40GB,bmm,34,66,300,40,150", "", False),
        ("test_indist,NVIDIA_A100-PCIE-40GB,bmm,12,64,196,196,150", "", False),
        ("train,NVIDIA_A100-PCIE-40GB,linear,1,64,300,40,150", "", False),
        ("train,Tesla_P4,bmm,2,20,300,40,150", "", False),
        ("train,Tesla_P4,linear,1,64,300,40,150", "", True),
    ],
)
def test_products_measured_otherwise_are_told_apart(
    row: str, suspect: str, rough: bool, tmp_path: Path
):
    (tmp_path / "gemm.csv").write_text(f"{HEAD}{row}\n")
    (batch,) = read_table(tmp_path / "gemm.csv").batches
    assert (batch.suspect, batch.rough) == (suspect, rough)
