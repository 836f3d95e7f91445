"""Runs a series of commands, keeps every number that they print, and compares two trees.

    python tools/replay.py run FILE [--quick] [--only WORD] [--jobs N]
    python tools/replay.py compare OLD NEW
    python tools/replay.py against REVISION [--quick] [--only WORD] [--jobs N]

The series has some 40 models under every stack on six targets, training steps, many GPUs, MIG,
sweeps and searches. `run` writes what each command prints as JSON, every kernel's cost included:
FILE is a zip with an entry for each command. `compare` lists the numbers that differ by more than
1e-12 of themselves, and the words that differ. `against` runs the series on a revision of the
repository and on the checkout, and compares. The exit status is 1 if anything differs; that of
`against` is 0 if the message of a commit since has a line `Replay: what changes, and why`.

The whole series takes about five minutes of CPU, `--quick` half a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))
MODELS = "replay_models.py"
LIMIT = 1e-12  # relative
SHOWN = 40
STACKS = (
    "eager,eager@2.11,compiled,compiled@2.1,cudagraph,ideal,ort,ort@1.12,tensorrt,tensorrt@8.5,"
    "vllm,sglang,trtllm"
)
ALL = f"--target v100,a100,h100-sxm,b200,mi300x,cpu --profile {STACKS}"
FEW = "--target a100,mi300x,cpu --profile eager,compiled,ort"
# Lists that reports repeat: the numbers of a target and of a profile, as files of specs/ have them.
REPEATED = ("numbers",)

TEXT, IMAGES = "--dims batch=2,seq=128", "--dims batch=4,height=224,width=224"
ANALYZED = {
    "encoder": "tests/encoder.onnx --dims batch=2,seq=64",
    **{n: f"{n}.onnx --dims N=16" for n in ("quantised", "odd")},
    "loop": "loop.onnx --dims N=64 --value m=6 --value c=1",
    **{n: f"hf:{n}/config.json {TEXT} --dtype bf16" for n in ("llama", "gemma2", "qwen3")},
    **{n: f"hf:{n}/config.json {TEXT} --dtype bf16" for n in ("mixtral", "qwen2-moe", "mamba2")},
    **{n: f"hf:{n}/config.json {TEXT}" for n in ("gpt2", "bert", "deberta")},
    **{n: f"hf:{n}/config.json --dims batch=4" for n in ("vit", "swin")},
    **{n: f"hf:{n}/config.json {IMAGES}" for n in ("convnext", "resnet", "segformer")},
    "yolos": "hf:yolos/config.json --dims batch=1",
    "t5": f"hf:t5/config.json {TEXT},target=32",
    "whisper": "hf:whisper/config.json --dims batch=1,target=32",
    "wav2vec2": "hf:wav2vec2/config.json --dims batch=1,samples=16000",
    "resnet f16": f"hf:resnet/config.json {IMAGES} --dtype f16 --channels-last",
    "bert eager attention": f"hf:bert/config.json {TEXT} --dtype f16 --attention eager --mask",
    "gpt2 autocast": f"hf:gpt2/config.json {TEXT} --autocast bf16",
    "decode": "hf:llama/config.json --dims batch=8 --phase decode --past 512 --dtype bf16",
    "decode f8": "hf:qwen3/config.json --dims batch=8 --phase decode --past 512 --dtype bf16"
    " --cache-dtype f8e4m3",
    "decode experts": "hf:mixtral/config.json --dims batch=8 --phase decode --past 256 --dtype bf16"
    " --expert-skew 0.8",
    "prefill": "hf:gemma2/config.json --dims batch=1,seq=512 --phase prefill --dtype bf16",
    **{
        n: f"{MODELS}:{n}"
        for n in (
            *("mobilenet", "efficientnet", "coatnet", "regnet", "lstm", "fourier", "documents"),
            *("sparse", "routines", "images", "recommender"),
        )
    },
    "train llama": f"hf:llama/config.json {TEXT} --autocast bf16 --train --optimizer adamw --fused",
    "train tied": f"hf:tied/config.json {TEXT} --train --optimizer adam --clip 1.0 --accumulate",
    "train bert": f"hf:bert/config.json {TEXT} --train --optimizer sgd --autodiff gpuir",
    "train resnet": f"hf:resnet/config.json {IMAGES} --train --optimizer sgd --channels-last",
    "train recomputed": f"hf:gpt2/config.json {TEXT} --train --checkpoint *.h.*",
    "train recommender": f"{MODELS}:recommender --train --optimizer adam --indices zipf:1.05",
    "train encoder": "tests/encoder.onnx --dims batch=2,seq=64 --train --optimizer adamw",
}
STEP = "hf:llama/config.json --train --optimizer adamw --autocast bf16 --dims batch=16,seq=256"
ANSWERS = {
    "no tf32": f"analyze hf:bert/config.json {TEXT} --target a100,h100-sxm --no-tf32",
    "tf32": f"analyze hf:bert/config.json {TEXT} --target a100,h100-sxm --tf32",
    "roofline": f"analyze hf:bert/config.json {TEXT} --target a100 --predictor roofline",
    "other host": f"analyze hf:bert/config.json {TEXT} --target a100 --host dgx-1",
    "changed": f"analyze hf:bert/config.json {TEXT} --target a100 --set sms=160",
    "habits": f"analyze hf:mixtral/config.json {TEXT} --dtype bf16 --train --optimizer adamw"
    " --target a100,h100-sxm,b200,mi300x --profile llm-foundry,megatron-2024 --products fp8",
    "habits many": "sweep tests/encoder.onnx --target a100,h100-sxm,v100 --batch 1,4 --dims seq=64"
    " --profile llm-foundry",
    "crossover": "analyze tests/encoder.onnx --target a100,l4 --dims seq=64 --crossover batch",
    "advise": "advise tests/encoder.onnx --target a100 --dims batch=8,seq=128",
    "largest": f"largest {STEP.replace('batch=16,', '')} --target a100,l4 --dim batch --max 4096",
    "sweep": "sweep tests/encoder.onnx --target a100,l4,mi300x --batch 1,4,16 --dims seq=64",
    "sweep two": "sweep tests/encoder.onnx --target a100 --batch 1,4 --dim seq=64,128"
    " --profile ort,tensorrt",
    "tune": "tune tests/small_encoder.onnx --target a100 --dims batch=2,seq=64 --kernels 3",
    "tune beam": "tune tests/small_encoder.onnx --target mi300x --dims batch=2,seq=64 --kernels 2"
    " --search beam --tries 40",
    **{
        f"simulate {plan}": f"simulate {STEP} --cluster {cluster} {plan}"
        for cluster, plan in (
            ("dgx-h100", "--dp 8"),
            ("dgx-h100", "--tp 8 --sequence"),
            ("dgx-h100", "--tp 2 --pp 4 --microbatches 8"),
            ("dgx-a100", "--pp 2 --dp 4 --microbatches 4 --schedule gpipe"),
            ("dgx-a100", "--pp 2 --tp 2 --dp 2 --microbatches 4 --schedule interleaved --chunks 2"),
            ("dgx-a100", "--pp 4 --dp 2 --microbatches 8 --schedule zero-bubble"),
            ("2xdgx-h100", "--dp 16 --zero 3"),
            ("dgx-h100", "--cp 4 --dp 2 --exchange ring"),
            ("dgx-h100", "--dp 8 --slow 3=1.3"),
        )
    },
    "simulate habits": f"simulate {STEP} --cluster dgx-h100 --tp 2 --pp 2 --dp 2 --microbatches 4"
    " --profile llm-foundry --products fp8",
    "simulate experts": "simulate hf:mixtral/config.json --dims batch=16,seq=256 --dtype bf16"
    " --cluster dgx-h100 --ep 4 --tp 2",
    "plan": f"plan {STEP} --cluster dgx-a100 --best 3 --tp 1,8 --pp 1,2 --zero 1",
    "shard": "shard tables.csv --cluster dgx-a100 --seconds 0",
    "mig layouts": "mig layouts a100",
    "mig plan": "mig plan --gpu a30 --model tests/small_encoder.onnx:batch=8:seq=128:count=3",
    "mig timetable": "mig timetable --gpu a30 --day day.csv"
    " --model tests/small_encoder.onnx:name=live:batch=1:seq=128:deadline=20ms"
    " --model tests/small_encoder.onnx:name=offline:batch=8:seq=128",
}
QUICK = ("encoder", "llama", "resnet", "decode", "images", "routines", "train tied", "mixtral")
QUICK_ANSWERS = (
    *("advise", "sweep two", "tune", "simulate --dp 8", "mig plan", "largest"),
    *("habits many", "simulate habits"),
)


def series(quick: bool, only: str) -> dict[str, list[str]]:
    """The words of each command, by name."""
    stacks = FEW if quick else ALL
    found = {f"analyze {n}": f"analyze {words} {stacks}" for n, words in ANALYZED.items()}
    found |= ANSWERS
    if quick:
        kept = {f"analyze {n}" for n in QUICK} | set(QUICK_ANSWERS)
        found = {n: words for n, words in found.items() if n in kept}
    return {n: [*w.split(), *_as_json(w)] for n, w in found.items() if only in n}


def _as_json(words: str) -> tuple[str, ...]:
    return ("--json",) if words.startswith(("advise", "tune")) else ("--format", "json")


# ---------------------------------------------------------------------------- a run


def run(tree: Path, to: Path, quick: bool, only: str, jobs: int) -> None:
    """Writes what the commands of a tree print."""
    commands = series(quick, only)
    with (
        tempfile.TemporaryDirectory() as name,
        zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as kept,
    ):
        folder = Path(name)
        words = [sys.executable, str(HERE), "serve", str(tree), str(folder), str(jobs)]
        done = subprocess.run(words, input=json.dumps(commands), text=True, check=False, cwd=folder)
        if done.returncode:
            sys.exit(done.returncode)
        for key in commands:
            kept.write(folder / f"{_plain(key)}.json", f"{_plain(key)}.json")


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-=" else "_" for c in name)


def serve(tree: Path, folder: Path, jobs: int) -> None:
    """The commands on standard input, in processes that import the tree's gpuir."""
    import replay_models

    replay_models.write(folder)
    (folder / MODELS).write_text((HERE.parent / MODELS).read_text(encoding="utf-8"))
    (folder / "tests").symlink_to(tree / "tests")
    commands = json.loads(sys.stdin.read())
    with ProcessPoolExecutor(jobs, get_context("spawn"), _begin, (str(tree), str(folder))) as pool:
        for name, seconds in zip(
            commands, pool.map(answer, *zip(*commands.items(), strict=True)), strict=True
        ):
            print(f"{seconds:7.1f} s  {name}", file=sys.stderr, flush=True)


def _begin(tree: str, folder: str) -> None:
    os.environ.update(COLUMNS="80", OPENBLAS_NUM_THREADS="1", GPUIR_NO_CACHE="1")
    os.chdir(folder)
    sys.path.insert(0, tree)


def answer(name: str, words: Sequence[str]) -> float:
    """Runs a command and keeps what it prints, an error's text too; seconds of CPU time."""
    from time import process_time

    from gpuir.cli.main import main

    before = process_time()
    out, said, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            main(list(words))
        except SystemExit as end:
            status = int(end.code or 0)
    try:
        printed = json.loads(out.getvalue())
    except ValueError:
        printed = out.getvalue()
    kept = {"status": status, "said": said.getvalue() if status else "", "answer": printed}
    Path(f"{_plain(name)}.json").write_text(json.dumps(kept), encoding="utf-8")
    return process_time() - before


# ---------------------------------------------------------------------------- a comparison


def compare(old: Path, new: Path) -> int:
    """Prints what differs, the worst first of each command; how many numbers and words do."""
    total = 0
    with zipfile.ZipFile(old) as a, zipfile.ZipFile(new) as b:
        names, others = a.namelist(), set(b.namelist())
        for name in sorted({*names, *others}):
            if name not in others or name not in names:
                print(f"{name}: only in {new if name in others else old}")
                total += 1
                continue
            found = list(differences(json.loads(a.read(name)), json.loads(b.read(name))))
            total += len(found)
            if found:
                print(f"{name}: {len(found):,} differ")
                _print(found)
    print(f"{len(names)} commands, {total:,} differences")
    return total


def _print(found: Sequence[tuple[str, Any, Any]]) -> None:
    """The largest difference of each field."""
    fields = Counter(path.rpartition("/")[2] for path, _, _ in found)
    for field, count in fields.most_common(SHOWN // 4):
        path, old, new = max(
            (x for x in found if x[0].rpartition("/")[2] == field), key=lambda x: _apart(*x[1:])
        )
        print(f"  {count:7,} {field}: {_short(old)} -> {_short(new)} at {path}")


def _apart(old: Any, new: Any) -> float:
    if isinstance(old, int | float) and isinstance(new, int | float):
        return abs(new - old) / max(abs(old), abs(new), 1e-300)
    return float("inf")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two values of JSON differ: the path, and both."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            if key not in REPEATED:
                yield from differences(old.get(key), new.get(key), f"{path}/{key}")
    elif isinstance(old, list) and isinstance(new, list):
        for i, (a, b) in enumerate(zip_longest(old, new)):
            yield from differences(a, b, f"{path}/{i}")
    elif old != new and not (_is_number(old) and _is_number(new) and _apart(old, new) <= LIMIT):
        yield path, old, new


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def against(revision: str, quick: bool, only: str, jobs: int) -> int:
    """Differences between a revision and the checkout."""
    with tempfile.TemporaryDirectory() as name:
        tree, old, new = (Path(name) / n for n in ("tree", "old.zip", "new.zip"))
        words = ["git", "worktree", "add", "--detach", "--quiet", str(tree), revision]
        subprocess.run(words, cwd=ROOT, check=True)
        try:
            run(tree, old, quick, only, jobs)
            run(ROOT, new, quick, only, jobs)
        finally:
            words = ["git", "worktree", "remove", "--force", str(tree)]
            subprocess.run(words, cwd=ROOT, check=True)
        return compare(old, new)


def said(since: str) -> str:
    """What the commits since a revision say that they change."""
    words = ["git", "log", f"{since}..HEAD", "--format=%B"]
    body = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return "\n".join(line for line in body.splitlines() if line.startswith("Replay:"))


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, args in (("run", ["file"]), ("compare", ["old", "new"]), ("against", ["revision"])):
        one = commands.add_parser(name)
        for arg in args:
            one.add_argument(arg, type=str if arg == "revision" else Path)
        if name != "compare":
            one.add_argument("--quick", action="store_true", help="eight models, half a minute")
            one.add_argument("--only", default="", help="commands whose name has this word")
            one.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    if given.command == "run":
        run(ROOT, given.file.resolve(), given.quick, given.only, given.jobs)
        return
    if given.command == "compare":
        sys.exit(bool(compare(given.old, given.new)))
    found = against(given.revision, given.quick, given.only, given.jobs)
    print(why := said(given.revision) if found else "")
    sys.exit(bool(found and not why))


if __name__ == "__main__":
    main()
