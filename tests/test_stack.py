"""A graph keeps the software stack that it runs under: through passes, and through text."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import gpuir
from gpuir.cli.main import main
from gpuir.run.loading import load_text

ENCODER = str(Path(__file__).parent.parent / "tests" / "encoder.onnx")
DIMS = {"batch": 2, "seq": 32}
ORT = gpuir.load_profile("ort").passes.partition(",legalize")[0]
STEPS = {  # the passes of the default profile of an ONNX file, up to each level
    "graph": "canonicalize{layouts=false}",
    "fused": ORT,
    "kernel": gpuir.load_profile("ort").passes,
    "tiled": gpuir.load_profile("ort").passes + ",tile{target=a100}",
    "costed": gpuir.load_profile("ort").passes + ",tile{target=a100},annotate",
}


def label(g: gpuir.Graph) -> tuple[str, str | None, float]:
    s = gpuir.analyze(g)
    return s.profile, s.tf32, s.latency_s


@pytest.mark.parametrize("level", STEPS)
def test_passes_by_hand_keep_the_stack(level: str):
    g = gpuir.load(ENCODER, dims=DIMS)
    whole = label(gpuir.analyze(g, "a100").graph)
    assert whole[:2] == ("ort", "products")
    made = gpuir.pipeline(STEPS[level]).run(g)
    assert label(gpuir.analyze(made, "a100").graph) == whole


@pytest.mark.slow
@pytest.mark.parametrize("level", STEPS)
def test_text_keeps_the_stack(level: str, tmp_path: Path):
    file = tmp_path / "x.gir"
    args = ("opt", ENCODER, "--dims", "batch=2,seq=32", "--pipeline", STEPS[level])
    done = CliRunner().invoke(main, (*args, "-o", str(file)))
    assert done.exit_code == 0, done.output
    whole = label(gpuir.analyze(gpuir.load(ENCODER, dims=DIMS), "a100").graph)
    assert label(gpuir.analyze(str(file), "a100").graph) == whole


def test_passes_in_place_of_the_profiles_leave_its_host():
    """docs/extend/custom-passes.md's own command: other kernels, the same stack."""
    g = gpuir.load(ENCODER, dims=DIMS)
    text = "canonicalize,recognize,fuse,legalize"
    name, tf32, latency_s = label(gpuir.analyze(gpuir.pipeline(text).run(g), "a100").graph)
    assert (name, tf32) == ("ort", "products")
    ideal = label(gpuir.analyze(g, "a100", profile="ideal").graph)
    ort = label(gpuir.analyze(g, "a100").graph)
    assert ideal[2] < latency_s < ort[2]


def test_another_stack_may_be_named(tmp_path: Path):
    file = tmp_path / "x.gir"
    args = ("opt", ENCODER, "--dims", "batch=2,seq=32", "--profile", "tensorrt")
    done = CliRunner().invoke(main, (*args, "--pipeline", "canonicalize", "-o", str(file)))
    assert done.exit_code == 0 and " under tensorrt {" in file.read_text()
    assert gpuir.analyze(str(file), "a100").profile == "tensorrt"
    eager = gpuir.analyze(str(file), "a100", profile="eager").graph
    assert gpuir.analyze(eager).profile == "eager", "a graph of level graph is for any"


def test_a_graph_written_by_hand_has_no_stack():
    text = "kernel @g { in %x: f32[4] %y: f32[4] = k.map([%x], {in %x: f32[4] %y: f32[4] = "
    text += 't.map("relu", [%x]) at "m:R" out %y}) at "m:R" out %y }'
    assert gpuir.analyze(load_text(text), "a100").profile == "ideal"
