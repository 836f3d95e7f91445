"""Models that are kept: the answer is the same, and no frontend runs for it."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner

import gpuir.run.keeping as keeping
from gpuir.cli.main import main
from gpuir.run.keeping import ModelCache

TESTS = Path(__file__).parents[1]
ENCODER = str(TESTS / "encoder.onnx")
SIZES = ("--dims", "batch=2,seq=16")
LIBRARIES = ("torch", "transformers", "onnx", "google.protobuf", "lark")
SPY = f"""
import sys
from gpuir.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(*({{*sys.modules}} & {{*{LIBRARIES!r}}}), file=sys.stderr)
"""


ONE_AFTER_ANOTHER = """
import json, sys
from gpuir.cli.main import main
for args in json.loads(sys.argv[1]):
    try:
        main(args)
    except SystemExit as end:
        assert not end.code
"""


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where models are kept."""
    monkeypatch.delenv("GPUIR_NO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    keeping.environment.cache_clear()
    return tmp_path / "cache" / "gpuir" / "models.sqlite"


def run(*args: str, status: int = 0):
    done = CliRunner().invoke(main, args)
    assert done.exit_code == status, (done.output, done.exception)
    return done


def analyze(model: str, *args: str):
    """What is written to stdout and to stderr."""
    done = run("analyze", model, "--target", "a100", *(args or SIZES))
    return done.stdout, done.stderr


def entries() -> list[dict[str, object]]:
    return json.loads(run("cache", "--format", "json").stdout)["entries"]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that a frontend reads."""
    found: list[str] = []
    load = keeping.load
    monkeypatch.setattr(
        keeping, "load", lambda model, **how: found.append(model) or load(model, **how)
    )
    return found


def spied(*args: str) -> tuple[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", SPY, *args], capture_output=True, text=True, check=True
    )
    return done.stdout, done.stderr.splitlines()[-1].split()


def in_turn(*commands: tuple[str, ...]) -> None:
    """Commands in one process without what a test run imports beside them: it is part of the key of
    what is kept."""
    subprocess.run([sys.executable, "-c", ONE_AFTER_ANOTHER, json.dumps(commands)], check=True)


def test_the_second_command_runs_no_frontend_and_says_the_same():
    asked = ("analyze", ENCODER, "--target", "h100-sxm", *SIZES)
    plain, _ = spied(*asked, "--no-cache")
    first, libraries = spied(*asked)
    assert "google.protobuf" in libraries
    second, libraries = spied(*asked)
    assert libraries == []
    assert plain == first == second
    elsewhere, libraries = spied("analyze", ENCODER, "--target", "a100", *SIZES)
    assert libraries == []
    assert elsewhere == analyze(ENCODER, *SIZES, "--no-cache")[0]


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


@pytest.mark.slow
def test_a_config_is_kept(tmp_path: Path):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    asked = ("analyze", f"hf:{path}", "--phase", "decode", "--past", "32", "--dims", "batch=2")
    asked += ("--target", "h100-sxm")
    first, libraries = spied(*asked)
    assert "torch" in libraries
    second, libraries = spied(*asked)
    assert libraries == []
    assert first == second == run(*asked, "--no-cache").stdout
    path.write_text(json.dumps({**CONFIG, "num_hidden_layers": 3}))
    assert run(*asked).stdout == run(*asked, "--no-cache").stdout != first


@pytest.mark.parametrize(
    "more",
    [
        ("--target", "a100,b200,x86-64-v3"),
        ("--profile", "ort,tensorrt,eager"),
        ("--profile", "tensorrt", "--tf32"),
        ("--train", "--optimizer", "adamw", "--profile", "eager,compiled"),
        ("--autocast", "bf16", "--format", "json"),
        ("--weights", "f16", "--indices", "zipf:1.05", "--memory", "--group-by", "module"),
        ("--strict", "--format", "ir"),
    ],
)
def test_the_answer_is_the_same(more: tuple[str, ...], loads: list[str]):
    plain = analyze(ENCODER, *SIZES, *more, "--no-cache")
    assert analyze(ENCODER, *SIZES, *more) == plain
    assert loads
    loads.clear()
    assert analyze(ENCODER, *SIZES, *more) == plain
    assert not loads


@pytest.mark.parametrize(
    "command",
    [
        "explain {m} /encoder/layer.0/attention/self/Softmax",
        "explain {m} --fusions",
        "sweep {m} --batch 2,4,8,16 --dims seq=16 --target a100,b200",
        "largest {m} --dim batch --dims seq=16",
        "diff {m} {m} --dims batch=2,seq=16 --profile ort",
        "advise {m} --dims batch=2,seq=16 --only batch,precision",
        "opt {m} --dims batch=2,seq=16 --pipeline canonicalize",
    ],
)
def test_other_commands_say_the_same(command: str, loads: list[str]):
    args = [ENCODER if x == "{m}" else x for x in command.split()]
    if "explain" in args:
        args += SIZES
    args += [] if "sweep" in args or "opt" in args else ["--target", "a100"]
    plain = run(*args, "--no-cache")
    assert run(*args).stdout == plain.stdout
    assert loads
    loads.clear()
    again = run(*args)
    assert (again.stdout, again.stderr) == (plain.stdout, plain.stderr)
    assert not loads


def test_what_decides_how_a_model_is_loaded_is_part_of_the_key(loads: list[str]):
    analyze(ENCODER)
    for more in (
        ("--dims", "batch=1,seq=16"),
        (*SIZES, "--expert-skew", "1.0"),
        (*SIZES, "--train"),
        (*SIZES, "--weights", "f16"),
        (*SIZES, "--indices", "zipf:1.05"),
    ):
        loads.clear()
        assert analyze(ENCODER, *more) == analyze(ENCODER, *more, "--no-cache")
        assert len(loads) == 1, more


def test_warnings_of_the_loader_are_kept(tmp_path: Path):
    model = onnx.load(ENCODER, load_external_data=False)
    model.graph.node[-1].op_type, model.graph.node[-1].domain = "Sparkle", "com.acme"
    model.opset_import.append(onnx.helper.make_opsetid("com.acme", 1))
    onnx.save(model, str(tmp_path / "odd.onnx"))
    for more in ((), ("--format", "json")):
        plain = analyze("odd.onnx", *SIZES, *more, "--no-cache")
        assert "Sparkle" in "".join(plain)
        assert analyze("odd.onnx", *SIZES, *more) == plain
        assert analyze("odd.onnx", *SIZES, *more) == plain


def test_another_file_under_the_same_name_is_loaded(tmp_path: Path, loads: list[str]):
    path = tmp_path / "model.onnx"
    shutil.copy(ENCODER, path)
    first = analyze("model.onnx")
    stamp = path.stat()
    model = onnx.load(ENCODER, load_external_data=False)
    old = next(n for n in model.graph.node if n.op_type == "Softmax")
    old.op_type = "Sigmoid"
    old.ClearField("attribute")
    onnx.save(model, str(path))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = analyze("model.onnx")
    assert second != first
    assert len(loads) == 2
    assert second == analyze("model.onnx", *SIZES, "--no-cache")
    shutil.copy(ENCODER, path)
    assert analyze("model.onnx") == first


def test_a_large_file_is_known_by_its_dates(
    tmp_path: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(keeping, "DIGESTED", 10)
    path = tmp_path / "model.onnx"
    shutil.copy(ENCODER, path)
    analyze("model.onnx")
    analyze("model.onnx")
    assert len(loads) == 1
    path.touch()
    analyze("model.onnx")
    assert len(loads) == 2


def test_a_file_that_the_loader_reads_counts(tmp_path: Path, loads: list[str]):
    table = tmp_path / "rows.csv"
    table.write_text("row_share,index_share\n0.5,0.9\n0.5,0.1\n")
    more = (*SIZES, "--indices", "rows.csv")
    first = analyze(ENCODER, *more)
    assert analyze(ENCODER, *more) == first
    assert len(loads) == 1
    table.write_text("row_share,index_share\n0.01,0.99\n0.99,0.01\n")
    assert analyze(ENCODER, *more) == analyze(ENCODER, *more, "--no-cache")
    assert len(loads) == 2


def test_a_profile_that_changes_makes_other_kernels(tmp_path: Path):
    text = (TESTS.parent / "specs/profiles/ort.toml").read_text()
    own = tmp_path / "own.toml"
    own.write_text(text)
    more = (*SIZES, "--profile", "own.toml")
    first = analyze(ENCODER, *more)
    assert analyze(ENCODER, *more) == first
    plain = 'passes = "canonicalize,fuse,legalize"'
    own.write_text(re.sub(r'passes = """.*?"""', plain, text, flags=re.DOTALL))
    assert analyze(ENCODER, *more) == analyze(ENCODER, *more, "--no-cache") != first


def test_a_version_that_changes_loads_anew(loads: list[str], monkeypatch: pytest.MonkeyPatch):
    analyze(ENCODER)
    keeping.environment.cache_clear()
    monkeypatch.setattr(keeping, "_packages", lambda folder: iter(["onnx-99.dist-info"]))
    analyze(ENCODER)
    assert len(loads) == 2
    keeping.environment.cache_clear()


def test_what_python_makes_is_not_kept(tmp_path: Path, kept: Path):
    (tmp_path / "mine.py").write_text("PASSES = {}\nCONVERTERS = {'a::B': print}\n")
    (tmp_path / "m.gir").write_text("graph @m {\n  in %x: f32[2]\n  out %x\n}\n")
    run("analyze", "m.gir", "--target", "a100")
    analyze(ENCODER, *SIZES, "--load", "mine.py")
    analyze(ENCODER, *SIZES, "--no-cache")
    analyze(ENCODER, *SIZES, "--verbose")
    assert not kept.exists()


def test_entries_are_listed_and_cleared(kept: Path):
    assert "no models are kept" in run("cache").stderr
    analyze(ENCODER)
    kinds = ["kernels under ort", "sizes that are known", "graph"]
    assert [x["what"] for x in entries()] == kinds
    assert ENCODER in {x["model"] for x in entries()}
    run("cache", "--clear")
    assert not kept.exists()
    assert entries() == []
    run("cache", "--clear")


def test_the_least_recently_used_goes(monkeypatch: pytest.MonkeyPatch, loads: list[str]):
    monkeypatch.setattr(keeping, "REFRESHED_S", -1)
    one, two, three = ((*SIZES, "--expert-skew", str(n)) for n in (1.0, 2.0, 3.0))
    analyze(ENCODER, *one)
    analyze(ENCODER, *two)
    size = sum(int(str(x["size_bytes"])) for x in entries())
    monkeypatch.setattr(keeping, "MOST_BYTES", int(size * 1.25))
    analyze(ENCODER, *one)
    analyze(ENCODER, *three)
    assert sum(int(str(x["size_bytes"])) for x in entries()) <= size * 1.25
    loads.clear()
    analyze(ENCODER, *one)
    analyze(ENCODER, *three)
    assert not loads
    analyze(ENCODER, *two)
    assert len(loads) == 1


@pytest.mark.parametrize("content", [b"no database", b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_damaged_file_is_made_anew(kept: Path, content: bytes, loads: list[str]):
    first, _ = analyze(ENCODER)
    kept.write_bytes(content)
    again, said = analyze(ENCODER)
    assert again == first
    assert "is made anew" in said
    assert analyze(ENCODER) == (first, "")
    assert len(loads) == 2


def test_a_file_of_another_version_is_made_anew(kept: Path):
    first, _ = analyze(ENCODER)
    with sqlite3.connect(kept) as db:
        db.execute("pragma user_version = 99")
    db.close()
    assert analyze(ENCODER)[0] == first
    assert len(entries()) == 3


@pytest.mark.parametrize("change", ["zeroblob(40)", "substr(record, 1, 40)", "'text'", "null"])
def test_a_damaged_entry_is_written_anew(kept: Path, change: str, loads: list[str]):
    first = analyze(ENCODER)
    with sqlite3.connect(kept) as db:
        db.execute(f"update models set record = {change}")
    db.close()
    assert analyze(ENCODER) == first
    assert analyze(ENCODER) == first
    assert len(loads) == 2


@pytest.mark.parametrize("where", ["/dev/null", "/proc/nothing", "relative"])
def test_without_a_folder_it_is_only_slower(where: str, monkeypatch: pytest.MonkeyPatch):
    first = analyze(ENCODER, *SIZES, "--no-cache")
    monkeypatch.setenv("XDG_CACHE_HOME", where)
    monkeypatch.setenv("HOME", "/dev/null")
    assert analyze(ENCODER) == first


def test_a_full_disk_only_costs_time(kept: Path, monkeypatch: pytest.MonkeyPatch):

    first = analyze(ENCODER, *SIZES, "--no-cache")
    change = keeping.Store.change

    def changed(store: keeping.Store, statement: str, values: tuple[object, ...] = ()) -> None:
        if "insert into models" in statement:
            raise sqlite3.OperationalError("database or disk is full")
        change(store, statement, values)

    monkeypatch.setattr(keeping.Store, "change", changed)
    assert analyze(ENCODER) == first
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept.parents[1]))
    assert entries() == []


def test_another_process_that_holds_the_file_only_costs_time(
    kept: Path, monkeypatch: pytest.MonkeyPatch
):
    first = analyze(ENCODER)
    monkeypatch.setattr(keeping, "WAIT_S", 0.05)
    db = sqlite3.connect(kept, isolation_level=None)
    db.execute("begin immediate")
    assert analyze(ENCODER, "--dims", "batch=2,seq=16") == first
    db.execute("rollback")
    db.close()


def _writes(path: str, number: int) -> None:
    with ModelCache(path) as own:
        for i in range(20):
            own.load(ENCODER, warn=print, dims={"batch": 1 + number, "seq": 1 + i % 4})


def test_two_writers_and_a_kill(kept: Path):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_writes, args=(str(kept), n)) for n in range(2)]
    for w in writers:
        w.start()
    while not kept.exists():
        time.sleep(0.01)
    time.sleep(0.3)
    writers[0].kill()
    for w in writers:
        w.join()
    assert writers[1].exitcode == 0
    with sqlite3.connect(kept) as db:
        assert db.execute("pragma integrity_check").fetchall() == [("ok",)]
    db.close()
    more = ("--dims", "batch=2,seq=3")
    assert analyze(ENCODER, *more) == analyze(ENCODER, *more, "--no-cache")


def test_python_calls_keep_nothing(kept: Path):
    import gpuir

    gpuir.analyze(ENCODER, "a100", dims={"batch": 2, "seq": 16})
    assert not kept.exists()


def test_no_file_that_was_read_is_overwritten(tmp_path: Path):
    shutil.copy(ENCODER, tmp_path / "model.onnx")
    analyze("model.onnx")
    done = run("analyze", "model.onnx", *SIZES, "--target", "a100", "-o", "model.onnx", status=2)
    assert "also an input" in done.stderr


def test_a_sweep_and_a_search_load_once(loads: list[str]):
    sweep = ("sweep", ENCODER, "--target", "a100", "--batch", "1..64", "--dims", "seq=16")
    found = run(*sweep).stdout
    first = len(loads)
    assert 0 < first < 7
    assert run(*sweep).stdout == found and len(loads) == first
    search = ("largest", ENCODER, "--target", "a100", "--dim", "batch", "--dims", "seq=16")
    found = run(*search).stdout
    first = len(loads)
    assert run(*search).stdout == found and len(loads) == first


# ---- other sizes -------------------------------------------------------------------------------


def at(**sizes: int) -> tuple[str, ...]:
    return ("--dims", ",".join(f"{name}={n}" for name, n in sizes.items()))


def assert_is_fresh(model: str, *args: str) -> None:
    """What is said of a model is what is said of it without anything that is kept."""
    assert analyze(model, *args) == analyze(model, *args, "--no-cache"), args


def test_from_the_third_size_on_no_frontend_runs():
    first = ("analyze", ENCODER, "--target", "a100")
    in_turn(*((*first, *at(batch=n, seq=16)) for n in (2, 4)))
    for n, profile in ((3, "ort"), (7, "tensorrt"), (33, "ort"), (64, "ort")):
        asked = ("analyze", ENCODER, "--target", "h100-sxm", *at(batch=n, seq=16))
        asked += ("--profile", profile, "--memory")
        found, libraries = spied(*asked)
        assert libraries == []
        assert found == run(*asked, "--no-cache").stdout


@pytest.mark.parametrize("profile", ["ort", "tensorrt", "eager", "compiled"])
def test_points_of_several_sizes_are_what_a_load_says(profile: str, loads: list[str]):
    """To the letter of each kernel."""
    more = ("--profile", profile, "--format", "ir")
    points = [(2, 8), (4, 16), (3, 13), (2, 16), (5, 8), (16, 61), (1, 16), (9, 1), (70, 12)]
    for batch, seq in points:
        assert_is_fresh(ENCODER, *at(batch=batch, seq=seq), *more)
    loads.clear()
    for batch, seq in ((2, 9), (11, 15), (33, 8)):
        assert_is_fresh(ENCODER, *at(batch=batch, seq=seq), *more)
    assert loads == []


def test_sizes_that_a_model_does_not_take_are_refused_in_its_words(loads: list[str]):
    for n in (16, 48, 20):
        assert_is_fresh(ENCODER, *at(batch=2, seq=n))
    assert len(loads) == 4  # one that is too far, and one that is less far
    args = ("analyze", ENCODER, "--target", "a100", *at(batch=2, seq=100_000))
    words = run(*args, status=2).stderr
    assert words == run(*args, "--no-cache", status=2).stderr != ""


def test_a_training_step_of_another_size(loads: list[str]):
    more = ("--train", "--optimizer", "adamw")
    for n in (4, 8):
        analyze(ENCODER, *at(batch=n, seq=16), *more)
    loads.clear()
    assert_is_fresh(ENCODER, *at(batch=5, seq=16), *more)
    assert loads == []


def test_known_sizes_of_a_file_that_changed_are_not_used(tmp_path: Path, loads: list[str]):
    path = tmp_path / "model.onnx"
    shutil.copy(ENCODER, path)
    for n in (2, 4, 3):
        analyze("model.onnx", *at(batch=n, seq=16))
    model = onnx.load(ENCODER, load_external_data=False)
    old = next(n for n in model.graph.node if n.op_type == "Softmax")
    old.op_type = "Sigmoid"
    old.ClearField("attribute")
    onnx.save(model, str(path))
    for n in (5, 6, 7):
        assert_is_fresh("model.onnx", *at(batch=n, seq=16))
    shutil.copy(ENCODER, path)
    loads.clear()
    assert_is_fresh("model.onnx", *at(batch=6, seq=16))
    assert loads[0] == "model.onnx"


@pytest.mark.parametrize("what", ["sizes that are known", "graph of sizes", "kernels under ort, "])
@pytest.mark.parametrize("change", ["zeroblob(40)", "substr(record, 1, 40)"])
def test_damaged_sizes_are_found_anew(kept: Path, what: str, change: str, loads: list[str]):
    for n in (2, 4, 3):
        analyze(ENCODER, *at(batch=n, seq=16))
    with sqlite3.connect(kept) as db:
        db.execute(f"update models set record = {change} where what like '{what}%'")
        assert db.total_changes
    db.close()
    for n in (5, 6, 8):
        assert_is_fresh(ENCODER, *at(batch=n, seq=16))
    loads.clear()
    assert_is_fresh(ENCODER, *at(batch=7, seq=16))
    assert loads == []


def test_warnings_that_name_a_size_are_said_of_that_size(monkeypatch: pytest.MonkeyPatch):
    load = keeping.load

    def warns(model: str, *, warn: Callable[[str], None], **how: Any) -> Any:
        warn(f"a batch of {how['dims']['batch']} is odd")
        return load(model, warn=warn, **how)

    monkeypatch.setattr(keeping, "load", warns)
    for n in (2, 4, 3, 5):
        assert f"a batch of {n} is odd" in "".join(analyze(ENCODER, *at(batch=n, seq=16)))


def test_what_sizes_do_not_tell_is_loaded(monkeypatch: pytest.MonkeyPatch):
    """A model that says more from a size on, and whose name has its size."""
    load, loads = keeping.load, list[int]()

    def odd(model: str, **how: Any) -> Any:
        loads.append(n := how["dims"]["batch"])
        g = load(model, **how)
        return replace(g, name=f"sized_{n}") if n < 6 else replace(g, assumed=("much",))

    monkeypatch.setattr(keeping, "load", odd)
    for n in (2, 4, 8, 3, 5):
        found, _ = analyze(ENCODER, *at(batch=n, seq=16))
        assert (f"sized_{n} " in found) == (n < 6)
    assert len(loads) < 12
    analyze(ENCODER, *at(batch=9, seq=16))
    assert loads[-1] == 9  # it is not tried again


@pytest.mark.slow
def test_other_sizes_of_a_config_and_a_program(tmp_path: Path):
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    asked = ("analyze", f"hf:{path}", "--phase", "decode", "--target", "h100-sxm")
    sizes = ((2, 32), (4, 32), (4, 64), (3, 32), (33, 32), (9, 50))
    points = [(*asked, "--past", str(n), *at(batch=b)) for b, n in sizes]

    layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    rows = torch.export.Dim("rows", min=2, max=4096)
    made = torch.export.export(layer, (torch.randn(4, 8),), dynamic_shapes=({0: rows},))
    torch.export.save(made, tmp_path / "layer.pt2")
    asked = ("analyze", str(tmp_path / "layer.pt2"), "--target", "h100-sxm")
    layers = [(*asked, "--dims", f"input.0={n}") for n in (8, 64, 100)]

    in_turn(*points[:3], *layers[:2])
    for own in (*points[3:], layers[2]):
        found, libraries = spied(*own)
        assert libraries == []
        assert found == run(*own, "--no-cache").stdout
