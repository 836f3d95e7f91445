"""`gpuir completion`: the script that completes gpuir's commands, options and names in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from gpuir.cli.output import emit

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands and GPUs with Tab.

    \b
    gpuir completion bash >> ~/.bashrc
    gpuir completion zsh >> ~/.zshrc
    gpuir completion fish > ~/.config/fish/completions/gpuir.fish
    """
    made = get_completion_class(shell)
    assert made is not None  # of SHELLS
    emit(made(ctx.find_root().command, {}, "gpuir", "_GPUIR_COMPLETE").source())
