"""The command line: one module a command, loaded when it is named."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from typing import NoReturn

import click

from pyspec.errors import PyspecError, UsageError

# Each module has a click command or group called `command`.
COMMANDS = {
    "chat": "pyspec.cli.chat",
    "generate": "pyspec.cli.generate",
    "models": "pyspec.cli.models",
    "serve": "pyspec.cli.serve",
    "tune": "pyspec.cli.tune",
    "verify": "pyspec.cli.verify",
}


class _LazyGroup(click.Group):
    """Imports a command's module only when that command is used, so that --help is immediate."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name]).command
        assert isinstance(command, click.Command)
        return command


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: ARG001
    if not value or ctx.resilient_parsing:
        return
    from pyspec.cli.version import version_text

    click.echo(version_text())
    ctx.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the versions of pyspec and llama.cpp and the CPU features in use.",
)
@click.option("--debug", is_flag=True, help="Show log lines and the traceback of an error.")
def cli(debug: bool) -> None:
    """Speculative decoding of GGUF models on the CPU.

    A small draft model proposes tokens, the target model checks several in one pass, and the text is
    distributed as the target alone would write it.
    """
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if debug else logging.ERROR,
        format="%(name)s: %(message)s",
    )


def _open_closed_streams() -> None:
    """A standard stream that the caller closed is empty, or takes everything and shows nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _terminate(_signal: int, _frame: object) -> NoReturn:
    """End as after Ctrl-C, so that terminals and partial files are left in order."""
    sys.exit(128 + signal.SIGTERM)


def main() -> None:
    """Run the command line and exit: 0 for success, 2 for bad usage, 1 for any other failure.

    An interrupted run exits with 130, as shells expect of a process that SIGINT ended.
    """
    debug = "--debug" in sys.argv[1:]
    _open_closed_streams()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as exit_:
        sys.exit(exit_.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo(err=True)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has gone: nothing is left to say, and stdout must not be flushed.
        sys.stdout = None
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.strerror:
            where = f": {error.filename}" if error.filename else ""
            error = PyspecError(f"{error.strerror}{where}")
            # What could not be written would be tried again when the interpreter ends.
            sys.stdout = None
        if not isinstance(error, PyspecError):
            error = PyspecError(f"{type(error).__name__}: {error} (--debug shows where)")
        click.echo(f"pyspec: {' '.join(str(error).split())}", err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
