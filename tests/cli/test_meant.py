"""Options that gpuir calls otherwise, values in the wrong form: the message says what to type."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuir.cli.main import main

ENCODER = str(Path(__file__).parents[1] / "encoder.onnx")
COMMAND = ("analyze", ENCODER, "--target", "a100")


def run(*args: str, status: int) -> str:
    done = CliRunner().invoke(main, args)
    assert done.exit_code == status, done.output
    return done.output


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--batch 8", "--dims batch=8"),
        ("--batch=16", "--dims batch=16"),
        ("--batch-size 4", "--dims batch=4"),
        ("--batch_size 4", "--dims batch=4"),
        ("--bs 2", "--dims batch=2"),
        ("-b 2", "--dims batch=2"),
        ("--seq 64", "--dims seq=64"),
        ("--seq-len 64", "--dims seq=64"),
        ("--sequence-length 64", "--dims seq=64"),
        ("--max-len 64", "--dims seq=64"),
        ("--gpu l4", "--target l4"),
        ("--device h100-sxm", "--target h100-sxm"),
        ("--device 0", "--target a100"),
        ("--precision fp16", "--autocast f16"),
        ("--precision bf16", "--autocast bf16"),
        ("--half", "--autocast f16"),
        ("--framework compiled", "--profile compiled"),
        ("--shape 1x3", "--input x=1x3x224x224"),
        ("--shape x=1x3", "--input x=1x3"),
        ("--json", "--format json"),
    ],
)
def test_an_option_that_has_another_name_here(wrong: str, right: str):
    args = ["--dims", "batch=1,seq=16", *COMMAND[2:]]
    said = run("analyze", ENCODER, *args, *wrong.split(), status=2)
    assert f"No such option '{wrong.partition('=')[0].split()[0]}'" in said
    (fix,) = re.findall(r"Did you mean '(.*)'\?", said)
    assert fix == right
    if "--input" not in fix:  # the name of that is the model's own
        run("analyze", ENCODER, *args, *shlex.split(fix), status=0)


def test_a_config_has_a_data_type():
    assert "'--dtype f16'" in run("analyze", "hf:config.json", "--precision", "fp16", status=2)
    assert "'--autocast bf16'" in run("analyze", "m.onnx", "--precision", "fp32", status=2)


def test_an_option_of_another_command_says_of_which():
    said = run(*COMMAND, "--tp", "2", status=2)
    assert "gpuir simulate" in said and "gpuir plan" in said
    assert "did you mean" in run(*COMMAND, "--profil", "eager", status=2).lower()
    assert "Did you mean '--tp 4'" in run("simulate", "x", "--tensor-parallel-size", "4", status=2)
    assert "Did you mean '--dims batch=4'" in run("largest", "x", "--bs", "4", status=2)


@pytest.mark.parametrize(
    ("args", "fix"),
    [
        ((ENCODER, "--target", "a100", "--dims", "batch=8", "seq=16"), "--dims batch=8,seq=16"),
        (("--dims", "batch=8", "seq=16", "--target", "a100", ENCODER), "--dims batch=8,seq=16"),
        ((ENCODER, "--dims=batch=8", "seq=16", "--target", "a100"), "--dims batch=8,seq=16"),
        ((ENCODER, "--target", "a100", "l4"), "--target a100,l4"),
        ((ENCODER, "--input", "x=1x3", "y=4"), "--input x=1x3 --input y=4"),
    ],
)
def test_values_behind_one_another(args: tuple[str, ...], fix: str):
    said = run("analyze", *args, status=2)
    assert f"Did you mean '{fix}'?" in said
    if "batch" in fix:
        run(*COMMAND, *shlex.split(fix), status=0)


def test_an_argument_too_many_is_not_guessed_at():
    said = run(*COMMAND, "l4.txt", "--dims", "batch=8", status=2)
    assert "--dims" not in said.partition("Error")[2]
    assert "Did you mean" not in run("analyze", ENCODER, "more", status=2)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("batch=1e3", "write 1000"),
        ("batch=8.0", "write 8"),
        ("batch=2.5", "it has to be a whole number"),
        ("batch=eight", "it has to be a whole number"),
        ("batch=", "it has to be a whole number"),
        ("batch=inf", "it has to be a whole number"),
        ("batch=-1", "it is below 0"),
        ("batch=1e30", "it has to be a whole number"),
        ("batch", "is not like NAME=8,NAME=128"),
        ("batch=8,", "nothing stands behind a comma"),
        ("batch=8,batch=9", "batch has two values: 8 and 9"),
        ("batch=8,size=9,seq=1", "the model has no such dimension"),
        ("batch=0,seq=16", "batch=0 leaves nothing to compute"),
        ("batch=8,seq=0", "seq=0 leaves nothing to compute"),
    ],
)
def test_sizes_that_are_none(value: str, message: str):
    assert message in run(*COMMAND, "--dims", value, status=2)


def test_one_size_twice_is_one():
    run(*COMMAND, "--dims", "batch=8,batch=8,seq=16", status=0)
