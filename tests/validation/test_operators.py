"""Kinds of operators: what a trace says of each, and which a kernel is of."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuir.ir.errors import UsageError
from gpuir.targets.load import load_target
from validation import operators
from validation.cases import Case, Predicted, Program, Result, Times

HEAD = "device,model,mode,seqlen,batch,in_layer,kind,target,module,fw_us,bw_us,acc_us\n"
ROWS = """\
Tesla_V100-PCIE-32GB,bert,train,16,4,True,call_module,bert.q,Linear,110,200,30
Tesla_V100-PCIE-32GB,bert,train,16,4,True,call_method,view,BertSelfAttention,10,0,0
Tesla_V100-PCIE-32GB,bert,train,16,4,True,call_function,matmul,BertSelfAttention,60,90,0
Tesla_V100-PCIE-32GB,bert,train,16,4,True,call_function,gelu,GELU,30,40,0
Tesla_V100-PCIE-32GB,bert,train,16,4,False,call_module,cls,Linear,510,900,50
NVIDIA_A100-PCIE-40GB,bert_large,inf,16,4,True,call_module,d,Dropout,20,0,0
NVIDIA_A100-PCIE-40GB,bert_large,inf,16,4,True,call_module,n,LayerNorm,50,0,0
"""


def traces(folder: Path) -> dict[operators.CaseKey, operators.Trace]:
    (folder / "ops.csv").write_text(HEAD + ROWS)
    return operators.read_traces(str(folder / "ops.csv"))


def test_a_trace_adds_up_by_kind_less_what_a_view_takes(tmp_path: Path):
    found = traces(tmp_path)["Tesla_V100-PCIE-32GB", "bert", "train", 16, 4]
    whole = found.whole(3)
    assert whole["linear", "forward"] == pytest.approx((3 * 100 + 500) * 1e-6)
    assert whole["linear", "backward"] == pytest.approx((3 * 200 + 900) * 1e-6)
    assert whole["accumulate", "backward"] == pytest.approx((3 * 30 + 50) * 1e-6)
    assert whole["matmul", "forward"] == pytest.approx(3 * 50e-6)
    assert whole["pointwise", "backward"] == pytest.approx(3 * 40e-6)
    assert not found.suspect


def test_dropout_launches_nothing_where_nothing_is_trained(tmp_path: Path):
    found = traces(tmp_path)["NVIDIA_A100-PCIE-40GB", "bert_large", "inf", 16, 4]
    assert found.whole(1) == {("norm", "forward"): pytest.approx(30e-6)}
    assert found.suspect


def test_another_table_is_refused(tmp_path: Path):
    (tmp_path / "t.csv").write_text("device,model\n")
    with pytest.raises(UsageError, match="not a table of operators"):
        operators.read_traces(str(tmp_path / "t.csv"))


def test_kinds_are_compared_over_the_cases_that_were_traced(tmp_path: Path):
    v100 = load_target("v100-pcie-32gb")
    kinds = {("linear", "forward"): 880e-6, ("matmul", "forward"): 75e-6}
    one = Times(1.0, 1.0)
    cases = [
        Case(
            Program("bert", "train", 16, batch), "Tesla_V100-PCIE-32GB", "none", v100, one, layers=3
        )
        for batch in (4, 8)  # of the second there is no trace
    ]
    found = operators.compared(
        [Result(c, Predicted(one, kinds=kinds)) for c in cases], traces(tmp_path)
    )
    assert [(x.part, x.kind) for x in found[:3]] == [
        *(("forward", "linear"), ("forward", "matmul"), ("forward", "pointwise"))
    ]
    assert [x.error for x in found[:3]] == [pytest.approx(e) for e in (10.0, -50.0, -100.0)]
    assert {x.cases for x in found} == {1}
