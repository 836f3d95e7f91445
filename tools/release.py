"""Builds the wheel and the sdist, and tries each as a user would who has no checkout.

usage: python tools/release.py [--out FOLDER]

Each is installed into a fresh virtual environment, without extras, and runs there in an empty
folder. The wheel is made of the sdist: of that the quick start runs, of the wheel commands, too.
Prints sizes, start-up times beside Python's own, and the licence of everything that is installed; a
licence that is not permissive ends it, as does any command that fails. Needs `build` and the
network, for dependencies.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "encoder.onnx"
QUICK_START = ROOT / "examples" / "quickstart.py"
PERMISSIVE = (
    *("MIT", "MIT License", "Apache-2.0", "Apache Software License", "BSD License"),
    *("BSD-3-Clause", "BSD-2-Clause", "3-Clause BSD License", "PSF-2.0"),
    "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0",  # numpy, with what its wheel holds
)
LARGEST_WHEEL = 4e6  # bytes
RUNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="where the wheel and the sdist are left")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        built = build(Path(folder) / "dist")
        for path in built:
            print(f"{path.name}: {path.stat().st_size / 1e3:,.0f} kB")
            if path.suffix == ".whl" and path.stat().st_size > LARGEST_WHEEL:
                sys.exit(f"{path.name} is larger than {LARGEST_WHEEL / 1e6:.0f} MB")
            tried(path, Path(folder) / path.suffix.strip("."))
        if out:
            out.mkdir(parents=True, exist_ok=True)
            for path in built:
                shutil.copy(path, out)


def build(folder: Path) -> list[Path]:
    """The sdist, and the wheel made of it."""
    run([sys.executable, "-m", "build", "-q", "--outdir", str(folder), str(ROOT)])
    return sorted(folder.iterdir(), key=lambda path: path.suffix, reverse=True)


def tried(artifact: Path, folder: Path) -> None:
    venv, empty = folder / "venv", folder / "empty"
    run([sys.executable, "-m", "venv", str(venv)])
    empty.mkdir()
    python, gpuir = str(venv / "bin" / "python"), str(venv / "bin" / "gpuir")
    run([python, "-m", "pip", "install", "-q", str(artifact)])
    run([python, "-m", "pip", "check"])
    shutil.copy(MODEL, empty / "model.onnx")
    shutil.copy(MODEL, empty / MODEL.name)
    shutil.copy(QUICK_START, empty)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if run([gpuir, "--version"], empty) != f"gpuir {version}\n":
        sys.exit(f"{artifact.name} has another version than {version}")
    run([python, "quickstart.py"], empty)
    typed = (
        "import gpuir, pathlib; print((pathlib.Path(gpuir.__file__).parent/'py.typed').exists())"
    )
    if run([python, "-c", typed], empty) != "True\n":
        sys.exit(f"{artifact.name} has no py.typed")
    if artifact.suffix == ".whl":
        tried_wholly(venv, empty)


def tried_wholly(venv: Path, empty: Path) -> None:
    python, gpuir = str(venv / "bin" / "python"), str(venv / "bin" / "gpuir")
    dims = ("--dims", "batch=8,seq=128")
    for command in (
        ["targets", "a100"],
        ["profiles", "eager"],
        ["analyze", "model.onnx", "--target", "a100,l4", *dims],
        ["analyze", "model.onnx", "--target", "a100", *dims, "--format", "json", "-o", "a.json"],
        ["diff", "a.json", "a.json"],
        ["advise", "model.onnx", "--target", "a100", *dims],
    ):
        run([gpuir, *command], empty)
    site = next((venv / "lib").glob("python*/site-packages"))
    installed = sum(p.stat().st_size for p in site.rglob("*") if p.is_file() and not _is_pip(p))
    print(f"  installed, with dependencies: {installed / 1e6:,.0f} MB")
    bare = seconds([python, "-c", "pass"], empty)
    for label, command in (
        ("import gpuir", [python, "-c", "import gpuir"]),
        ("gpuir --version", [gpuir, "--version"]),
        (
            "gpuir analyze of a BERT-base",
            [gpuir, "analyze", "model.onnx", "--target", "a100", *dims],
        ),
    ):
        took = seconds(command, empty)
        print(f"  {label}: {took * 1e3:.0f} ms ({took / bare:.1f} times an empty Python)")
    print(licences(python))


def _is_pip(path: Path) -> bool:
    return any(part.startswith(("pip", "setuptools")) for part in path.parts)


def licences(python: str) -> str:
    """A line a package; ends the run at one that is not permissive."""
    tool = [sys.executable, "-m", "piplicenses", "--python", python, "--order", "name"]
    run([*tool, "--allow-only", ";".join(PERMISSIVE)])
    return run(tool)


def seconds(command: Sequence[str], folder: Path) -> float:
    """The median of some runs, after one that fills the caches."""
    run(command, folder)
    taken: list[float] = []
    for _ in range(RUNS):
        begun = perf_counter()
        run(command, folder)
        taken.append(perf_counter() - begun)
    return statistics.median(taken)


def run(command: Sequence[str], folder: Path | None = None) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
