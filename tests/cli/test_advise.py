"""`gpuir advise` as a user meets it: every gain comes out again when the change is made by hand."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpuir.cli.advise import flags
from gpuir.cli.main import main
from gpuir.plan.changes import Setup

pytestmark = pytest.mark.slow

ENCODER = str(Path(__file__).parents[1] / "encoder.onnx")  # two layers of examples/encoder.onnx
SMALL = ("--dims", "batch=2,seq=32")
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 1,
    "n_head": 4,
    "n_embd": 256,
    "vocab_size": 5003,
    "n_positions": 256,
}


def run(*args: str, status: int = 0) -> Result:
    done = CliRunner().invoke(main, args)
    assert done.exit_code == status, (done.output, done.exception)
    return done


def advise(model: str, *args: str) -> dict[str, Any]:
    return json.loads(run("advise", model, *args, "--json").stdout)


def by_hand(model: str, args: tuple[str, ...], options: list[str]) -> dict[str, Any]:
    """The report of `analyze` with the options that the advice names."""
    wanted = [word for option in options for word in shlex.split(option)]
    kept = list(args)
    for option in options:
        if option.startswith("without "):  # an option of the user's to be left out, with its value
            i = kept.index(option.removeprefix("without "))
            del kept[i : i + 2]
            wanted = [w for w in wanted if w not in option.split()]
    text = run("analyze", model, *kept, *wanted, "--format", "json").stdout
    (report,) = json.loads(text)["reports"]
    return report


def check(model: str, args: tuple[str, ...], found: dict[str, Any]) -> None:
    """Each number of the advice is that of a run by hand."""
    now = by_hand(model, args, [])
    assert found["before"]["latency_s"] == now["latency_s"]
    for x in (*found["advice"], *found["together"]):
        again = by_hand(model, args, x["options"])
        assert x["after"]["latency_s"] == again["latency_s"], x
        assert x["after"]["reserved_bytes"] == again["memory"]["reserved_bytes"]
        each = x["before_s"] / found["before"]["items"]
        assert x["gain"] == pytest.approx(1 - again["latency_s"] / x["after"]["items"] / each)
        assert x["gain"] >= 0.02


def test_an_onnx_file():
    args = ("--target", "t4", *SMALL)
    found = advise(ENCODER, *args)
    assert found["schema"] == "gpuir.advice/1" and found["before"]["items"] == 2
    check(ENCODER, args, found)
    kinds = [x["changes"][0]["kind"] for x in found["advice"]]
    assert {"batch", "precision"} <= set(kinds)
    gains = [x["gain"] for x in found["advice"]]
    assert gains == sorted(gains, reverse=True)
    assert all(len(x["changes"]) >= 2 for x in found["together"]) and found["together"]
    assert found["faster"]["after"]["latency_s"] < found["before"]["latency_s"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "config.json").write_text(json.dumps(GPT2))
    return f"hf:{folder}"


def test_a_config_with_attention_spelt_out(config: str):
    args = ("--target", "a100", "--dims", "batch=2,seq=128", "--attention", "eager")
    args = (*args, "--only", "precision,attention,stack,padding")
    found = advise(config, *args)
    check(config, args[:-2], found)
    trials = (*found["advice"], *found["rest"])
    tried = {x["changes"][0]["what"]: x for x in trials}
    assert "the compiled profile" in tried and tried["numbers in bf16"]["gain"] >= 0.02
    assert "fused attention" in tried and "TF32" in tried
    assert "change 5,003 to 5,008 wherever a dimension has this size" in tried


def test_a_training_step(config: str):
    args = ("--target", "l4", "--dims", "batch=2,seq=64", "--train", "--optimizer", "adamw")
    args = (*args, "--checkpoint", "every=1", "--only", "optimizer,recomputing")
    found = advise(config, *args)
    check(config, args[:-2], found)
    tried = {x["changes"][0]["kind"]: x for x in (*found["advice"], *found["rest"])}
    assert "optimizer" in tried
    assert 0 < tried["recomputing"]["gain"] < 0.3


def test_a_training_step_by_torchs_derivatives(config: str):
    """What the report starts from is what `analyze` says; autocast, which needs gpuir's, is held
    against a run by those."""
    args = ("--target", "a100", "--dims", "batch=2,seq=64", "--train", "--attention", "eager")
    found = advise(config, *args, "--only", "precision,optimizer")
    check(config, args, found)
    tried = {x["changes"][0]["what"]: x for x in (*found["advice"], *found["rest"])}
    ours = by_hand(config, (*args, "--autodiff", "gpuir"), [])["latency_s"]
    assert tried["autocast in bf16"]["before_s"] == ours != found["before"]["latency_s"]
    assert tried["TF32"]["before_s"] == found["before"]["latency_s"]


def test_f16_is_proposed_where_a_gpu_has_no_units_for_bf16(config: str):
    args = ("--target", "t4", "--dims", "batch=8,seq=128", "--dtype", "bf16")
    args += ("--host", "reference")  # a T4's usual one would hold the f16 kernels up
    found = advise(config, *args, "--only", "precision")
    (x,) = found["advice"]
    assert x["changes"][0]["what"] == "numbers in f16" and x["gain"] > 0.2
    assert x["options"] == ["--dtype f16"]
    assert by_hand(config, args, x["options"])["latency_s"] == x["after"]["latency_s"]
    a100 = advise(config, *args[2:], "--target", "a100", "--only", "precision")
    assert a100["advice"] == []


def test_the_text_says_what_to_do_and_what_was_in_vain():
    sizes = ("--dims", "batch=2,seq=64")  # with fewer rows, products take whatever reads weights
    text = run("advise", ENCODER, "--target", "a2", *sizes, "--only", "precision").stdout
    assert re.search(r"^1 +\d+ % .* yes +numbers in bf16$", text, re.MULTILINE)
    assert "--pipeline 'convert{dtype=bf16}'" in text and "check accuracy" in text
    assert "TF32 (saves 0 %)" in text
    nothing = run("advise", ENCODER, "--target", "p100", *SMALL, "--only", "precision").stdout
    assert "nothing found that gains 2.0 %" in nothing


def test_prices_of_ones_own_decide_what_is_cheaper():
    args = (
        "--target",
        "a100",
        *SMALL,
        "--only",
        "gpu",
        "--price",
        "a100=100",
        "--price",
        "t4=0.01",
        "--width",
        "120",
    )
    found = advise(ENCODER, *args)
    assert found["cheaper"]["changes"][0]["what"] == "t4"
    assert found["cheaper"]["usd_per_million"] < 0.1
    text = " ".join(run("advise", ENCODER, *args).stdout.split())
    paid = r"\$\S+ per million at \$\S+ an hour \(your own\)"
    assert re.search(rf" cheaper t4, .* times as long: .*; {paid}, instead of {paid}", text)


def test_list_prices_are_compared_with_prices_of_their_kind():
    for target in ("t4+clock_hz=5e8", "h100-sxm"):
        found = advise(ENCODER, "--target", target, *SMALL, "--only", "gpu")
        x = found["cheaper"]
        assert x["price"]["kind"] == x["before_price"]["kind"] and x["price"]["date"]
        assert x["usd_per_million"] < x["before_usd_per_million"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "no target given"),
        (("--target", "a100,t4"), "advice is for one target"),
        (("--target", "a100", "--only", "stak"), "did you mean stack?"),
        (("--target", "a1000000"), "no target is called"),
        (("--target", "a100", "-o", "/nowhere/x"), "no such folder"),
    ],
)
def test_what_is_wrong_is_said(args: tuple[str, ...], says: str):
    assert says in run("advise", ENCODER, *SMALL, *args, status=2).stderr


def test_a_graph_that_is_lowered_already_has_no_advice_but_other_gpus(tmp_path: Path):
    file = tmp_path / "encoder.gir"
    args = ("opt", ENCODER, *SMALL, "--pipeline", "canonicalize,fuse,legalize", "-o", str(file))
    run(*args)
    found = advise(str(file), "--target", "t4")
    assert found["advice"] == [] and found["faster"] is not None


def test_images_kept_channels_last(tmp_path: Path):
    pytest.importorskip("transformers")
    folder = tmp_path / "resnet"
    folder.mkdir()
    small = {"model_type": "resnet", "architectures": ["ResNetForImageClassification"]}
    small |= {"embedding_size": 64, "hidden_sizes": [128, 256], "depths": [1, 1]}
    (folder / "config.json").write_text(json.dumps(small))
    args = ("--target", "a100", "--dims", "batch=2,height=64", "--profile", "cudagraph")
    found = advise(f"hf:{folder}", *args, "--only", "layout")
    (x,) = (*found["advice"], *found["rest"])
    assert x["changes"][0]["what"] == "channels last"
    again = by_hand(f"hf:{folder}", args, x["options"])
    assert x["after"]["latency_s"] == again["latency_s"] < found["before"]["latency_s"]


def test_flags_say_what_differs():
    dims = {"batch": 4, "seq": 8}
    before = Setup("t4", "eager", dims=dims, options={"optimizer": "adamw"})
    after = replace(
        before.with_dim("batch", 8).with_option("fused", True).with_option("optimizer", None),
        tf32=True,
        profile="compiled",
    ).with_pass("pack")
    assert flags(before, after) == (
        "--profile compiled",
        "--tf32",
        "--pipeline 'pack'",
        "--dims batch=8",
        "without --optimizer",
        "--fused",
    )
    assert flags(before, before) == ()
