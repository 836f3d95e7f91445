"""`gpuir` and `python -m gpuir`: one command in a process of its own."""

import atexit
import gc
import os
import sys


def run() -> None:
    """The command line, set up for a process that is short.

    Its data has no cycles, so that Python's search for them, a quarter of the time otherwise, is
    made rare, and left out at the end. Nor does it multiply large matrices: numpy needs no threads.
    """
    gc.set_threshold(1_000_000, 50, 100)
    atexit.register(_leave_out_the_last_search)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from gpuir.cli.main import main
    except KeyboardInterrupt:  # as the command itself ends on one
        raise SystemExit(130) from None
    main()


def _leave_out_the_last_search() -> None:
    """But where Triton is loaded, whose bindings then report their own objects as leaked."""
    if "triton" not in sys.modules:
        gc.freeze()


if __name__ == "__main__":
    run()
