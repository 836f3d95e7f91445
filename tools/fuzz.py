"""Hostile inputs through the command line: what ends in a traceback, hangs, or takes all memory.

    python tools/fuzz.py [--seconds N] [--inputs N] [--jobs N] [--seed S] [--only NAME] [--keep DIR]
    python tools/fuzz.py --seed S --again INDEX [--keep DIR]

Inputs are drawn by the generators of tools/hostile.py, each from the seed and its number, and run
through the real command in processes that may use 4 GB and 20 seconds of CPU time. It counts by
generator how they ended, lists what must not happen, and exits with 1 if anything did:

    crash       exit status 70, any other than the documented ones, or a process that died
    hang        more than 20 s
    memory      more than 4 GB was asked for
    misread     "not well-formed, or gpuir reads it wrongly": an error that nobody foresaw
    unmade      no input: a fault of the generator's own
    control     control characters in what was printed or written, that could move a cursor
    formula     a cell of a CSV table that a spreadsheet would run

`--keep` writes each of them as a folder with its files and its command. Linux alone.
"""

from __future__ import annotations

import argparse
import csv
import faulthandler
import gc
import io
import json
import multiprocessing
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hostile

SECONDS, MEMORY = 20, 4 << 30
PATIENCE = 8  # times as long as SECONDS, where the process waits for others or for nothing
SPAN = 400  # inputs before a process makes room for a fresh one
FINE = (0, 1, 2, 130, 141)  # docs/reference/cli.md
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
MISREAD = "or gpuir reads it wrongly"
csv.field_size_limit(1 << 30)  # names are drawn that are longer than its usual limit


@dataclass(frozen=True)
class Outcome:
    """How one input ended: its exit status, and what of it must not happen, each as a kind and
    what tells it from others."""

    code: int | None
    found: tuple[tuple[str, str], ...] = ()


# ------------------------------------------------------------------------------ one input


def signature(error: BaseException) -> str:
    """The kind of error, its innermost line of gpuir, and its innermost line of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/gpuir/" in f.filename] or frames
    last = [f"{_short(f.filename)}:{f.lineno} {f.name}" for f in (ours[-1:] + frames[-1:])]
    return f"{type(error).__name__} at {' < '.join(dict.fromkeys(last))}"


def _short(path: str) -> str:
    return re.sub(r".*/(?=gpuir/|site-packages/|lib/python)", "", path)


def made_and_run(seed: int, index: int, only: tuple[str, ...]) -> Outcome:
    """One input of a campaign, by its number."""
    try:
        _, case = hostile.case(seed, index, only)
    except Exception as error:
        return Outcome(None, (("unmade", signature(error)),))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.RLIM_INFINITY))
    return attempt(case)


def attempt(case: hostile.Case) -> Outcome:
    """The command run in this process, in the current folder, which is empty."""
    from gpuir.cli import main as entry

    for name, data in case.files.items():
        Path(name).write_bytes(data)
    for name, to in case.links.items():
        os.symlink(to, name)
    blamed: list[BaseException] = []
    complain = entry._complain  # pyright: ignore[reportPrivateUsage]

    def noted(error: Exception) -> int:
        blamed.append(error)
        return complain(error)

    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", "surrogateescape") for _ in range(3)]
    kept = sys.stdin, sys.stdout, sys.stderr
    entry._complain = noted  # pyright: ignore[reportPrivateUsage]
    sys.stdin, sys.stdout, sys.stderr = streams
    code: int | None = 0
    try:
        entry.main(args=case.args, prog_name="gpuir")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException as error:
        code = None
        blamed.append(error)
    finally:
        entry._complain = complain  # pyright: ignore[reportPrivateUsage]
        sys.stdin, sys.stdout, sys.stderr = kept
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    said = [s.buffer.getvalue().decode("utf-8", "replace") for s in streams[1:]]
    return Outcome(code, tuple(problems(case, code, blamed, *said)))


def problems(
    case: hostile.Case, code: int | None, blamed: list[BaseException], out: str, err: str
) -> Iterator[tuple[str, str]]:
    causes = [c for b in blamed for c in (b, b.__cause__, b.__context__) if c is not None]
    inner = next((c for c in causes[1:] if c is not causes[0]), causes[0] if causes else None)
    if any(isinstance(c, MemoryError) for c in causes) or "not enough memory" in err:
        yield (
            "memory",
            signature(next((c for c in causes if isinstance(c, MemoryError)), causes[0])),
        )
    elif code not in FINE:
        yield "crash", signature(blamed[-1]) if blamed else f"exit status {code}"
    if MISREAD in err and inner is not None:
        yield "misread", signature(inner)
    written = {"stdout": out, "stderr": err}
    for path in Path().iterdir():
        if path.name not in case.files and path.is_file() and path.stat().st_size < 1 << 22:
            written[path.name] = path.read_bytes().decode("utf-8", "replace")
    shape = " ".join(a for a in case.args if not a.startswith("/"))[:60]
    for name, text in written.items():
        if name.endswith(".png"):
            continue
        if found := CONTROL.search(text.replace("\r\n", "\n")):
            yield "control", f"{found[0]!r} in {name} of {command_of(case)}"
        if "csv" in shape and name != "stderr":
            for row in csv.reader(io.StringIO(text)):
                if cell := next((c for c in row if is_formula(c)), None):
                    yield "formula", f"{cell[:20]!r} in {name} of {command_of(case)}"
                    break


def command_of(case: hostile.Case) -> str:
    form = [a for b, a in zip(case.args, case.args[1:]) if b == "--format"]
    return " ".join([case.args[0], *form]) if case.args else ""


def is_formula(cell: str) -> bool:
    with suppress(ValueError):
        float(cell)
        return False
    return cell[:1] in ("=", "+", "-", "@", "\t", "\r")


# ------------------------------------------------------------------------- the processes


def work(seed: int, only: tuple[str, ...], line: Connection, log: str, folder: str) -> None:
    """Inputs by their numbers, as they are asked for, until nothing more comes."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.pop("COLUMNS", None)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stream = open(log, "w")  # noqa: SIM115
    faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR1, stream, all_threads=False)
    while (index := line.recv()) is not None:
        home = Path(tempfile.mkdtemp(dir=folder))
        os.chdir(home)
        line.send(hostile.generator(hostile.source(seed, index), only))
        outcome = made_and_run(seed, index, only)
        os.chdir(folder)
        shutil.rmtree(home, ignore_errors=True)
        line.send(outcome)
    os._exit(0)


@dataclass
class Worker:
    """A process, the number of its input, and since when."""

    process: Any
    line: Connection
    log: Path
    left: int = SPAN
    index: int | None = None
    name: str = ""
    since: float = 0.0
    cpu: float = 0.0

    def cpu_s(self) -> float:
        try:
            words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def take(self, index: int) -> None:
        self.index, self.since, self.cpu = index, time.monotonic(), self.cpu_s()
        self.left -= 1
        self.line.send(index)

    def is_stuck(self) -> bool:
        took = time.monotonic() - self.since
        return took > SECONDS and (self.cpu_s() - self.cpu > SECONDS or took > PATIENCE * SECONDS)

    def where(self) -> str:
        """The innermost line of gpuir that it is in."""
        with suppress(OSError):
            os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return last_line(self.log)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.line.close()


def last_line(log: Path) -> str:
    frames = re.findall(r'File "(.*?)", line (\d+) in (\S+)', log.read_text())
    ours = [f for f in frames if "/gpuir/" in f[0]] or frames
    return f"{_short(ours[0][0])}:{ours[0][1]} {ours[0][2]}" if ours else "an unknown place"


@dataclass
class Campaign:
    """What was run, and what was found."""

    seed: int
    only: tuple[str, ...]
    keep: Path | None
    folder: str
    ends: dict[str, Counter[str]] = field(default_factory=dict)
    groups: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    made: int = 0

    def start(self) -> Worker:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        self.made += 1
        log = Path(self.folder, f"log{self.made}")
        log.touch()
        args = (self.seed, self.only, theirs, str(log), self.folder)
        process = context.Process(target=work, args=args, daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours, log)

    def add(self, name: str, index: int, outcome: Outcome) -> None:
        ends = self.ends.setdefault(name or "?", Counter())
        ends["inputs"] += 1
        ends[str(outcome.code)] += 1
        for kind, text in outcome.found:
            ends[kind] += 1
            group = self.groups.setdefault((kind, text), [])
            group.append(index)
            if self.keep and len(group) <= 3 and kind != "unmade":
                save(self.keep, hostile.case(self.seed, index, self.only)[1], kind, index, text)

    def run(self, indices: Iterator[int], until: float, jobs: int) -> None:
        workers: list[Worker] = []
        while True:
            more = time.monotonic() < until
            while more and len(workers) < jobs:
                index = next(indices, None)
                if index is None:
                    more = False
                    break
                worker = self.start()
                worker.take(index)
                workers.append(worker)
            if not workers:
                return
            ready = wait([w.line for w in workers], timeout=1)
            for worker in list(workers):
                if worker.line in ready:
                    self.hear(worker)
                elif worker.index is not None and worker.is_stuck():
                    self.add(worker.name, worker.index, Outcome(None, (("hang", worker.where()),)))
                    worker.index, worker.left = None, 0
                if worker.index is None:
                    index = (
                        next(indices, None)
                        if worker.left > 0 and time.monotonic() < until
                        else None
                    )
                    if index is None:
                        worker.end()
                        workers.remove(worker)
                    else:
                        worker.take(index)

    def hear(self, worker: Worker) -> None:
        assert worker.index is not None
        try:
            said = worker.line.recv()
        except (EOFError, OSError):
            worker.process.join()
            end = f"died with {worker.process.exitcode} at {last_line(worker.log)}"
            self.add(worker.name, worker.index, Outcome(None, (("crash", end),)))
            worker.index, worker.left = None, 0
            return
        if isinstance(said, str):
            worker.name = said
            return
        self.add(worker.name, worker.index, said)
        worker.index = None

    def table(self) -> str:
        kinds = [k for k in KINDS if any(c[k] for c in self.ends.values())]
        columns = ["inputs", "0", "1", "2", "70", "other", *(kinds or KINDS[:4])]
        rows = [["generator", *columns]]
        total = Counter[str]()
        for name in [n for n in (*hostile.GENERATORS, "?") if n in self.ends]:
            counts = self.ends[name]
            known = sum(counts[c] for c in ("0", "1", "2", "70"))
            counts["other"] = counts["inputs"] - known
            total.update(counts)
            rows.append([name, *(f"{counts[c]:,}" for c in columns)])
        rows.append(["all", *(f"{total[c]:,}" for c in columns)])
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join(
            "  ".join(
                c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))
            )
            for row in rows
        )


KINDS = ("crash", "hang", "memory", "misread", "unmade", "control", "formula")


def save(keep: Path, case: hostile.Case, kind: str, index: int, text: str) -> None:
    folder = keep / f"{kind}-{index}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in case.files.items():
        (folder / name).write_bytes(data)
    command = shlex.join(["python", "-m", "gpuir", *case.args])
    links = "".join(shlex.join(["ln", "-s", to, name]) + "\n" for name, to in case.links.items())
    script = f"# {text}\n{links}{command}\n"
    (folder / "run.sh").write_bytes(script.encode("utf-8", "surrogateescape"))
    (folder / "args.json").write_text(json.dumps(case.args))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--inputs", type=int, default=None, help="stop after so many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], choices=list(hostile.GENERATORS))
    parser.add_argument("--keep", type=Path, help="write what was found here")
    parser.add_argument(
        "--allow", action="append", default=[], choices=KINDS, help="list these, and exit with 0"
    )
    parser.add_argument("--again", type=int, action="append", help="run this input alone")
    given = parser.parse_args()
    if given.seconds == float("inf") and given.inputs is None and not given.again:
        given.seconds = 60.0
    began = time.monotonic()
    hostile.prepare()
    gc.freeze()  # or each process copies all that it never writes
    ready = time.monotonic()
    print(f"prepared in {ready - began:.0f} s", flush=True)
    count = given.inputs if given.inputs is not None else 1 << 62
    indices = iter(given.again or range(count))
    with tempfile.TemporaryDirectory(prefix="gpuir-fuzz-") as folder:
        campaign = Campaign(given.seed, tuple(given.only), given.keep, folder)
        try:
            campaign.run(indices, ready + given.seconds, given.jobs)
        except KeyboardInterrupt:
            print("interrupted")
    print(campaign.table())
    print(f"{time.monotonic() - ready:.0f} s, seed {given.seed}")
    order = sorted(campaign.groups.items(), key=lambda g: (KINDS.index(g[0][0]), -len(g[1])))
    for (kind, text), found in order:
        print(f"{kind:8} x{len(found):<5} {text}   --again {found[0]}")
    return int(any(kind not in given.allow for kind, _ in campaign.groups))


if __name__ == "__main__":
    sys.exit(main())
