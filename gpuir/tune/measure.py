"""Measuring by a command of the user's: a kernel and a tile as JSON on stdin, seconds on stdout."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from math import isfinite
from tempfile import TemporaryFile
from typing import Any

from gpuir.cost import local
from gpuir.cost.nest import PARTS
from gpuir.ir.errors import UsageError
from gpuir.tune.kernels import Kernel
from gpuir.tune.space import Ranked

SCHEMA = "gpuir.measure/1"
MOST_PRINTED = 1 << 20  # bytes
SHOWN = 200  # characters of what a command says, in a message


def command_of(text: str) -> tuple[str, ...]:
    """The words of a command; UsageError where there is no such program."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(
            "--measure: the command cannot be read",
            found=f"{text}\n{error}",
            fix="close the quotes",
        ) from error
    if not words or shutil.which(words[0]) is None:
        raise UsageError(
            f"--measure: there is no program {words[0] if words else ''!r}",
            expected="a program in the PATH, or the path of an executable file",
            fix="chmod +x FILE for a script, or 'python3 FILE'",
        )
    return tuple(words)


def request(kernel: Kernel, predicted: Ranked, names: Sequence[str] = ()) -> str:
    """One line of JSON: what to measure. `names` are the model nodes that the kernel stands for."""
    work, tile = kernel.work, predicted.tile
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "target": kernel.target.name if kernel.target else None,
        "kernel": {
            "name": kernel.name,
            "nodes": list(names),
            "kind": local.label(work),
            "dtype": work.dtype.name,
            "dims": {d: int(n) for d, n in work.dims},
            "reduced": list(work.reduced),
            "operands": [
                {"dims": list(o.dims), "bytes": int(o.nbytes), "staging": o.staging}
                for o in work.operands
            ],
            "flops": int(work.flops),
        },
        "tile": {
            "dims": dict(tile.dims),
            "stages": tile.stages,
            "warps": tile.warps,
            "split": tile.split,
            "group": tile.group,
            "unroll": tile.unroll,
            **{part: dict(getattr(tile, part)) for part in PARTS},
        },
        "predicted_s": predicted.time_s,
        "interval_s": list(predicted.interval_s),
    }
    return json.dumps(found) + "\n"


def measured(command: Sequence[str], asked: str, timeout_s: float) -> float | str:
    """The seconds that a command prints for a request, or why there are none.

    Its last line on stdout counts. One that takes longer than `timeout_s` is ended, with all
    processes that it started, and so is one that prints without end.
    """
    with TemporaryFile() as question, TemporaryFile() as errors:
        question.write(asked.encode())
        question.seek(0)
        try:
            process = subprocess.Popen(
                command,
                stdin=question,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            return f"the command cannot run: {error.strerror}"
        late = threading.Event()

        def end() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(timeout_s, end)
        timer.start()
        try:
            assert process.stdout
            out = process.stdout.read(MOST_PRINTED)
            if len(out) < MOST_PRINTED:
                process.wait()
        finally:
            timer.cancel()
            _kill(process)
            process.wait()
            if process.stdout:
                process.stdout.close()
        if late.is_set():
            return f"the command did not answer within {timeout_s:g} s"
        if len(out) == MOST_PRINTED:
            return f"the command printed more than {MOST_PRINTED:,} bytes"
        if process.returncode:
            errors.seek(max(errors.seek(0, os.SEEK_END) - MOST_PRINTED, 0))
            last = _last_line(errors.read()) or "it printed nothing on stderr"
            return f"the command ended with status {process.returncode}: {last}"
    return _seconds(_last_line(out))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a command with all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines() or [""]
    return lines[-1].strip()[:SHOWN]


def _seconds(last: str) -> float | str:
    try:
        seconds = float(last)
    except ValueError:
        return f"the last line that the command printed has no seconds: {last!r}"
    if not (isfinite(seconds) and seconds > 0):
        return f"the command printed {last!r}, which is not a valid time"
    return seconds
