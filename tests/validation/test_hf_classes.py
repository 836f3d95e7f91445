"""Classes of transformers: parameters, arithmetic and caches as computed without gpuir."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import CONFIG_MAPPING  # noqa: E402

import gpuir  # noqa: E402
from gpuir.frontends.torch import hf  # noqa: E402
from gpuir.ops import tensor as t  # noqa: E402
from validation.agreement import hf_classes  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mistral", "mixtral", "deepseek_v3", "t5", "vit", "clip", "flava"]
)
def test_numbers_agree(name: str, tmp_path: Path):
    with hf.quiet():
        hf_classes.write(hf_classes.small(CONFIG_MAPPING[name]), tmp_path)
        row = hf_classes.compare(tmp_path, name, 60)
    assert row.parameters and row.flops and not row.faults
    assert (row.cache is None) == (name in ("t5", "vit", "clip", "flava"))


def test_a_number_that_differs_and_a_user_who_is_blamed_are_faults():
    row = hf_classes.Row("x", flops=(1.0, 2.0), said={"decode": "run the module in PyTorch first"})
    assert row.faults == ["flops", "decode: blames"]
    row = hf_classes.Row("x", flops=(2.0, 2.0), said={"decode": "gpuir does not support X"})
    assert not row.faults


def test_arithmetic_that_no_output_needs_is_counted_apart():
    class Half(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            x @ w @ w  # nobody reads it
            out = x.new_zeros(8, 16)
            out.copy_(x @ w)  # by way of memory
            return out

    x, w = torch.ones(8, 16, device="meta"), torch.ones(16, 16, device="meta")
    with hf_classes.Recorded() as run:
        out = Half()(x, w)
    product = 2 * 8 * 16 * 16
    assert (run.needed(out), run.total) == (product, 3 * product)
    kept = [node for node in gpuir.load(Half(), args=(x, w)).nodes if isinstance(node.op, t.Matmul)]
    assert len(kept) == 1


def test_what_layers_keep_is_counted_layer_by_layer():
    """Of Gemma 4 every layer has a width of its own; MiMo's values are narrower than its keys, and
    its sliding layers have twice the heads."""
    tokens, bytes_of_batch = hf_classes.PAST + 1, 2 * hf_classes.SIZES["batch"]
    gemma = hf_classes.small(CONFIG_MAPPING["gemma4_text"])
    wide = sum(2 * own.num_key_value_heads * own.head_dim for own in gemma.per_layer_config)
    assert hf_classes.cache_bytes(gemma) == tokens * wide * bytes_of_batch
    mimo = hf_classes.small(CONFIG_MAPPING["mimo_v2_flash"])
    assert hf_classes.cache_bytes(mimo) == tokens * (4 + 8) * (192 + 128) * bytes_of_batch
