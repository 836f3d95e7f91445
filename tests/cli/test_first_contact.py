"""What somebody sees who types a command for the first time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gpuir.cli.main import COMMANDS, main

ENCODER = ("tests/encoder.onnx", "--dims", "batch=1,seq=16", "--target", "a100")


def commands() -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        found[name] = command
    return found


def run(*args: str):
    return CliRunner().invoke(main, args)


@pytest.mark.parametrize("args", [(), ("--help",)])
def test_commands_are_listed_by_what_they_are_for_each_in_one_line(args: tuple[str, ...]):
    text = run(*args).output
    lines = text.partition("Predict one model:")[2].splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("  ") and line.strip()]
    assert listed == list(COMMANDS)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", [n for n in COMMANDS if n != "schedule"])
def test_help_has_an_example(name: str):
    help_text = run(name, "--help").output
    assert f"\n  gpuir {name} " in help_text or f"\n  gpuir {name}\n" in help_text


def test_a_missing_argument_is_asked_for_with_an_example():
    done = run("analyze")
    assert done.exit_code == 2
    assert done.output.endswith(
        "Error: Missing argument 'MODEL'.\n\n"
        "For example:\n  gpuir analyze model.onnx --target a100 --dims batch=8\n"
    )


def test_quiet_leaves_out_notes_and_keeps_errors(tmp_path: Path):
    table = tmp_path / "measured.csv"
    table.write_text("device,op,dtype,m,n,k,latency_us\na100,linear,bf16,4096,4096,4096,610\n")
    loud, quiet = (run("eval", "kernels", str(table), *more) for more in ((), ("-q",)))
    assert loud.stderr.startswith(f"{table}: 1 rows") and quiet.stderr == ""
    assert loud.exit_code == quiet.exit_code == 0 and quiet.stdout == loud.stdout
    assert "nothing.csv" in run("eval", "kernels", "nothing.csv", "-q").stderr


def test_a_program_can_listen_to_what_gpuir_logs(caplog: pytest.LogCaptureFixture):
    import gpuir

    with caplog.at_level("DEBUG", logger="gpuir"):
        gpuir.analyze(ENCODER[0], "a100", dims={"batch": 1, "seq": 16}).graph
    said = [r.getMessage() for r in caplog.records if r.name.startswith("gpuir")]
    assert any("fuse" in line for line in said)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_those_of_the_shell(shell: str):
    assert "_GPUIR_COMPLETE" in run("completion", shell).output


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("gpuir ana", "analyze"),
        ("gpuir analyze model.onnx --target a100,h100-s", "a100,h100-sxm-80gb"),
        ("gpuir analyze model.onnx --profile cuda", "cudagraph"),
    ],
)
def test_names_are_completed(typed: str, found: str):
    words = typed.split()
    shell = {"_GPUIR_COMPLETE": "bash_complete", "COMP_WORDS": typed}
    done = CliRunner().invoke(
        main, env={**shell, "COMP_CWORD": str(len(words) - 1)}, prog_name="gpuir"
    )
    assert f"plain,{found}\n" in done.output


@pytest.mark.slow
def test_nothing_follows_the_report_of_a_torch_model(tmp_path: Path):
    """Triton's bindings, once loaded, used to end with pages of leaked objects on stderr."""
    pytest.importorskip("transformers")
    config = '{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 1}'
    (tmp_path / "config.json").write_text(config)
    target = ("--target", "a100", "--dims", "batch=1,seq=8", "--top", "1")
    command = (sys.executable, "-m", "gpuir", "analyze", "hf:config.json", *target)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
