"""`gpuir` and `python -m gpuir`: one command in a process of its own."""

import atexit
import gc


def run() -> None:
    """The command line. The process is short and its data has no cycles, so that Python's search
    for them, a quarter of the time otherwise, is made rare, and left out at the end."""
    gc.set_threshold(200_000, 50, 100)
    atexit.register(gc.freeze)
    from gpuir.cli.main import main

    main()


if __name__ == "__main__":
    run()
