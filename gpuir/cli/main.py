"""The command `gpuir`: its subcommands, each imported when it is called, and how errors end it."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import click

from gpuir.cli.lazy import LazyGroup

SECTIONS = {
    "Predict one model": ("analyze", "explain", "advise", "diff"),
    "Compare sizes, GPUs and stacks": ("sweep", "largest"),
    "Use many GPUs, or a part of one": ("simulate", "plan", "shard", "mig"),
    "Work on the IR and its tiles": ("opt", "schedule", "tune"),
    "Look up what gpuir knows": ("targets", "clusters", "hosts", "profiles", "passes"),
    "Measure, validate, fit": ("check", "calibrate", "collect", "eval", "fit"),
    "Set up": ("cache", "completion"),
}
COMMANDS = tuple(name for names in SECTIONS.values() for name in names)
ARGUMENTS = "gpuir.arguments"  # of the command line, as they were given
WIDEST = 80  # columns of a help text
BUG, INTERRUPTED, BROKEN_PIPE = 70, 130, 141


class Commands(LazyGroup):
    """A subcommand is in the module of its name. Errors end as a user can read them."""

    modules: ClassVar = {name: f"gpuir.cli.{name}" for name in COMMANDS}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands by what they are for, each in a line."""
        for title, names in SECTIONS.items():
            with formatter.section(title):
                rows = [(name, self._line(ctx, name)) for name in names]
                formatter.write_dl(rows, col_max=max(map(len, COMMANDS)))

    def _line(self, ctx: click.Context, name: str) -> str:
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(WIDEST)

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except OSError as error:  # a help text for a full disk
            sys.stdout = None
            click.echo(f"gpuir: cannot write to stdout: {error.strerror}", err=True)
            sys.exit(2)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = [*args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Errors of the user's end with 2 and a message; ours with 70, and a request to tell us."""
        from gpuir.cli.output import listen
        from gpuir.files import noting_inputs

        listen()
        try:
            with noting_inputs():
                return super().invoke(ctx)
        except click.MissingParameter as error:
            raise _with_example(error) from error
        except click.NoSuchOption as error:
            from gpuir.cli import meant

            message = meant.option(error, ctx.meta[ARGUMENTS], self._having(ctx, error.option_name))
            raise click.UsageError(message, error.ctx) from error
        except click.UsageError as error:
            if type(error) is click.UsageError and "argument" in error.message:
                from gpuir.cli import meant

                message = meant.extra(error, ctx.meta[ARGUMENTS])
                raise click.UsageError(message, error.ctx) from error
            raise
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except KeyboardInterrupt:
            from gpuir.cli.output import complain

            complain("gpuir: interrupted")
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            # whoever read our output has gone; Python would complain once more at exit
            sys.stdout = None
            ctx.exit(BROKEN_PIPE)
        except Exception as error:
            if ctx.params["debug"] or _is_of_stdout(error):
                raise
            ctx.exit(_complain(error))

    def _having(self, ctx: click.Context, option: str) -> Iterator[str]:
        """The commands that have an option."""
        for name in COMMANDS:
            command = self.get_command(ctx, name)
            if command and any(option in parameter.opts for parameter in command.params):
                yield name


def _with_example(error: click.MissingParameter) -> click.UsageError:
    """The same error with the first example of the command's help."""
    ctx = error.ctx
    text = (ctx.command.help or "") if ctx else ""
    name = "gpuir " + (ctx.command_path.partition(" ")[2] if ctx else "")
    examples = [line.strip() for line in text.splitlines() if line.strip().startswith(name)]
    example = f"\n\nFor example:\n  {examples[0]}" if examples else ""
    return click.UsageError(f"{error.format_message()}{example}", ctx)


def _is_of_stdout(error: Exception) -> bool:
    """Whether a help text, which click writes, could not be written."""
    if not isinstance(error, OSError) or error.filename is not None:
        return False
    return error.errno in (errno.ENOSPC, errno.EIO, errno.EBADF)


def _complain(error: Exception) -> int:
    from gpuir.cli.output import complain
    from gpuir.ir.errors import GpuirError, VerifyError

    if isinstance(error, OSError) and error.filename:  # the system's word on a user's file
        complain(f"gpuir: {error.filename}: the file cannot be used\n  found:    {error.strerror}")
        return 2
    if isinstance(error, GpuirError):
        complain(f"gpuir: {error}")
        if not isinstance(error, VerifyError):
            return 2
    else:
        complain(f"gpuir: internal error: {type(error).__name__}: {error}")
    complain("  This is a bug, please report it. `gpuir --debug ...` shows where it comes from.")
    return BUG


def _version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        import gpuir

        click.echo(f"gpuir {gpuir.__version__}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version)
@click.option("--debug", is_flag=True, help="Show a traceback when something goes wrong.")
def main(debug: bool) -> None:
    """How long a model takes on a GPU you don't have, why, and what to change.

    \b
    gpuir analyze model.onnx --target a100
    gpuir analyze model.onnx --target a100,h100-sxm,l4 --dims batch=8,seq=512
    gpuir advise model.onnx --target a100 --dims batch=8,seq=512

    `gpuir COMMAND --help` shows a command's options and examples.

    Exit status: 0 fine, 1 a check failed, 2 the input is wrong, 70 a bug in gpuir.
    """
