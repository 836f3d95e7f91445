"""Who runs the tasks of a sweep: this process, several on this machine, or Ray on many machines.

An engine runs one function on many arguments. It decides nothing else: results are the same by
whichever, and come as they are done.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager
from itertools import islice
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from gpuir.ir.errors import UsageError, nearest

T = TypeVar("T")
ENGINES = ("local", "ray")
AHEAD = 2  # tasks for each worker that are under way: one runs, one waits


class Engine(AbstractContextManager["Engine"], Protocol):
    """Runs tasks, until its `with` block ends."""

    workers: int

    def share(self, value: Any) -> Any:
        """Something large that many tasks take: as an argument of theirs."""
        ...

    def each(
        self, function: Callable[..., T], tasks: Iterable[tuple[Any, tuple[Any, ...]]]
    ) -> Iterator[tuple[Any, T]]:
        """The function of each task's arguments, with the task's name, as they are done. Tasks are
        asked for as there is room."""
        ...


def find_engine(name: str, workers: int | None) -> Engine:
    """The engine of that name, with so many workers: as many as there are cores by default."""
    if name == "ray":
        return Ray(workers)
    if name != "local":
        raise UsageError(f"no engine has the name {name!r}", fix=nearest(name, ENGINES))
    count = workers or os.cpu_count() or 1
    return Here() if count == 1 else Local(count)


class Here:
    """This process."""

    workers = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def share(self, value: Any) -> Any:
        return value

    def each(
        self, function: Callable[..., T], tasks: Iterable[tuple[Any, tuple[Any, ...]]]
    ) -> Iterator[tuple[Any, T]]:
        for name, given in tasks:
            yield name, function(*given)


class Local:
    """Processes on this machine. They end with the one that started them, however that ends."""

    def __init__(self, workers: int):
        self.workers = workers

    def __enter__(self) -> Self:
        from multiprocessing import get_context

        self.pool = ProcessPoolExecutor(self.workers, get_context("spawn"), _end_with_parent)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.pool.shutdown(wait=kind is None, cancel_futures=True)

    def share(self, value: Any) -> Any:
        return value

    def each(
        self, function: Callable[..., T], tasks: Iterable[tuple[Any, tuple[Any, ...]]]
    ) -> Iterator[tuple[Any, T]]:
        coming = iter(tasks)
        names: dict[Future[T], Any] = {}
        while True:
            for name, given in islice(coming, AHEAD * self.workers - len(names)):
                names[self.pool.submit(function, *given)] = name
            if not names:
                return
            done, _ = wait(names, return_when=FIRST_COMPLETED)
            for future in done:
                yield names.pop(future), future.result()


def _end_with_parent() -> None:
    """Ends this process when the one that started it does: a killed one cannot say goodbye."""
    from multiprocessing import connection, parent_process

    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Ray:
    """Ray: workers of the cluster that `RAY_ADDRESS` names, or of one that is started here."""

    def __init__(self, workers: int | None):
        try:
            import ray
        except ImportError as error:
            raise UsageError(
                "Ray is not installed",
                where="--engine ray",
                fix="pip install 'gpuir[ray]', or --engine local",
            ) from error
        self.ray, self.given = ray, workers

    def __enter__(self) -> Self:
        self.started = not self.ray.is_initialized()
        if self.started:
            there = bool(os.environ.get("RAY_ADDRESS"))
            self.ray.init(
                num_cpus=None if there else self.given,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
            )
        self.workers = self.given or int(self.ray.cluster_resources().get("CPU", 1))
        return self

    def __exit__(self, *error: object) -> None:
        if self.started:
            self.ray.shutdown()

    def share(self, value: Any) -> Any:
        return self.ray.put(value)

    def each(
        self, function: Callable[..., T], tasks: Iterable[tuple[Any, tuple[Any, ...]]]
    ) -> Iterator[tuple[Any, T]]:
        remote = self.ray.remote(num_cpus=1)(function)
        coming = iter(tasks)
        names: dict[Any, Any] = {}
        while True:
            for name, given in islice(coming, AHEAD * self.workers - len(names)):
                names[remote.remote(*given)] = name
            if not names:
                return
            done, _ = self.ray.wait(list(names), num_returns=1)
            for ref in done:
                yield names.pop(ref), self.ray.get(ref)
