"""`python -m gpuir`: the command line."""

from gpuir.cli.main import main

main()
