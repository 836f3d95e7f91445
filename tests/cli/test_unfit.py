"""A model that does not fit: said first, with a change that makes it fit, and exit status 1."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import gpuir
from gpuir.cli.main import main
from gpuir.simulate.fitting import larger_target
from gpuir.simulate.largest import largest

ENCODER = str(Path(__file__).parents[1] / "encoder.onnx")
LARGE = ("--dims", "batch=16384,seq=512")


def run(*args: str, status: int = 0) -> Result:
    done = CliRunner().invoke(main, args)
    assert done.exit_code == status, (done.output, done.exception)
    return done


def changed(args: tuple[str, ...], option: str) -> tuple[str, ...]:
    """A command with what the report says to type."""
    if option.startswith("gpuir "):
        rest = [x for x in args[1:] if x not in ("--target", args[args.index("--target") + 1])]
        return (*shlex.split(option)[1:2], *rest, *shlex.split(option)[2:])
    return (*args, *shlex.split(option))


@pytest.mark.parametrize("target", ["t4", "h100:1g.10gb", "mi300x", "x86-64-v3"])
def test_the_first_line_says_so_and_what_fits(target: str):
    args = ("analyze", ENCODER, "--target", target, *LARGE)
    done = run(*args, status=1)
    assert re.match(r"does not fit, \S+ .B short: encoder on ", done.stdout)
    assert "\nfits       no, " in done.stdout and "\nto fit     --dims batch=" in done.stdout
    assert "\nlatency " in done.stdout
    (report,) = json.loads(run(*args, "--format", "json", status=1).stdout)["reports"]
    assert report["memory"]["fits"] is False and report["to_fit"][0]["change"] == "batch"
    for x in report["to_fit"]:
        again = run(*changed(args, x["option"]), "--format", "json").stdout
        memory = json.loads(again)["reports"][0]["memory"]
        assert memory["fits"] and memory["spare_bytes"] == x["spare_bytes"]
    batch = int(report["to_fit"][0]["option"].rpartition("=")[2])
    run(*args, "--dims", f"batch={batch + 1}", status=1)


def test_what_fits_says_nothing_of_it():
    args = ("analyze", ENCODER, "--target", "a100", "--dims", "batch=1,seq=128")
    done = run(*args)
    assert "to fit" not in done.stdout and "does not fit" not in done.stdout
    (report,) = json.loads(run(*args, "--format", "json").stdout)["reports"]
    assert report["to_fit"] == []


def test_of_several_targets_each_says_so():
    done = run("analyze", ENCODER, "--target", "t4,h200", "--dims", "batch=2048,seq=512")
    assert "does not fit on t4: " in done.stdout and "; --dims batch=" in done.stdout
    assert "does not fit on h200" not in done.stdout
    run("analyze", ENCODER, "--target", "t4,l4", *LARGE, status=1)


def test_html_says_so(tmp_path: Path):
    page = tmp_path / "page.html"
    run("analyze", ENCODER, "--target", "t4", *LARGE, "--format", "html", "-o", str(page), status=1)
    assert "does not fit" in page.read_text() and "--dims batch=" in page.read_text()


def test_a_sweep_in_which_nothing_fits():
    args = ("sweep", ENCODER, "--target", "t4", "--dims", "seq=512", "--batch")
    done = run(*args, "16384,32768", status=1)
    assert done.stdout.startswith("nothing fits: the nearest is t4, batch 16,384, ")
    assert "to fit     --dims batch=" in done.stdout
    found = json.loads(run(*args, "16384", "--format", "json", status=1).stdout)
    assert found["to_fit"][0]["change"] == "batch"
    assert json.loads(run(*args, "1,16384", "--format", "json").stdout)["to_fit"] == []


def test_a_step_over_ranks():
    args = ("simulate", ENCODER, "--cluster", "l4-pcie", "--tp", "2", "--dims")
    done = run(*args, "batch=4096,seq=512")
    assert re.match(r"does not fit, \S+ .B short: encoder on 2 GPUs of ", done.stdout)
    found = json.loads(run(*args, "batch=4096,seq=512", "--format", "json").stdout)
    (change,) = found["to_fit"]
    assert not found["fits"] and change["option"].startswith("--dims batch=")
    again = json.loads(
        run(*args, "seq=512", *shlex.split(change["option"]), "--format", "json").stdout
    )
    assert again["fits"] and again["to_fit"] == []


@pytest.mark.slow
def test_of_a_config_the_data_type_or_the_ranks(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=8192, intermediate_size=28672, vocab_size=256000
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}))
    model = ("analyze", f"hf:{path}", "--dims", "batch=1,seq=16")
    for target, dtype, kind in (("t4", "f32", "dtype"), ("h100:1g.10gb", "bf16", "target")):
        args = (*model, "--target", target, "--dtype", dtype)
        (report,) = json.loads(run(*args, "--format", "json", status=1).stdout)["reports"]
        first = report["to_fit"][0]
        assert first["change"] == kind
        run(*changed(args, first["option"]))
    args = (*model, "--target", "l4", "--dtype", "f64")
    (report,) = json.loads(run(*args, "--format", "json", status=1).stdout)["reports"]
    assert report["to_fit"][0]["option"] == "--dtype bf16"
    deep = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 16}
    path.write_text(json.dumps(deep))
    args = (*model, "--target", "l4", "--dtype", "bf16")
    (report,) = json.loads(run(*args, "--format", "json", status=1).stdout)["reports"]
    first = report["to_fit"][0]
    assert first["change"] == "tp"
    run(*changed(args, first["option"]))


def test_in_python_a_summary_knows_a_larger_gpu():
    g = gpuir.analyze(ENCODER, "t4", dims={"batch": 1024, "seq": 512}).graph
    s = gpuir.analyze(g)
    assert s.memory.fits is False
    (change,) = s.to_fit
    assert change.change == "target"
    name = change.option.split()[1]
    assert gpuir.memory(g, gpuir.load_target(name)).fits
    assert gpuir.analyze(ENCODER, "h200", dims={"batch": 1, "seq": 8}).to_fit == ()


def test_a_slice_is_enlarged_before_the_gpu_is_changed():
    g = gpuir.analyze(ENCODER, "h100:1g.10gb", dims={"batch": 512, "seq": 512}).graph
    found = larger_target(g, gpuir.load_target("h100:1g.10gb"))
    assert found is not None and found.option.startswith("--target h100")
    assert gpuir.load_target(found.option.split()[1]).device == "h100-sxm-80gb"


def test_a_search_that_knows_what_does_not_fit_asks_for_few():
    g = gpuir.load(ENCODER, dims={"batch": 1, "seq": 512})
    target = gpuir.load_target("t4")
    asked: list[int] = []

    def held(n: int):
        asked.append(n)
        sized = gpuir.load(ENCODER, dims={"batch": n, "seq": 512})
        return gpuir.memory(gpuir.lower(sized), target)

    assert g.level.name == "graph"
    first = held(16384)
    found = largest(held, 1, 16383, {16384: first})
    asked.remove(16384)
    plain = largest(held, 1, 16384)
    assert found.value == plain.value
    assert len(asked) <= 2 * len(plain.tried)
