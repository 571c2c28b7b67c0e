"""The `culet` command. It runs a subcommand and turns every error into one line, a hint and an exit code."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Sequence

import click

from culet import env
from culet.errors import FAILED, NO_RETRY, CuletError, InternalError, UserError, exit_code
from culet.log import setup_logging
from culet.registry import load
from culet.version import __version__

COMMANDS: dict[str, str] = {
    "serve": "culet.cli.serve:serve",
    "generate": "culet.cli.generate:generate",
    "chat": "culet.cli.chat:chat",
    "plan": "culet.cli.plan:plan",
    "quantize": "culet.cli.quantize:quantize",
    "bench": "culet.cli.bench.group:bench",
    "warmup": "culet.cli.warmup:warmup",
    "doctor": "culet.cli.doctor:doctor",
}

_INTERRUPTED = 130  # the exit code that shells expect after Ctrl-C


class LazyGroup(click.Group):
    """The commands in `COMMANDS`. Each is imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load(COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if near := difflib.get_close_matches(args[0], COMMANDS, n=1) if args[0] not in COMMANDS else []:
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{near[0]}'?")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="culet %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run and serve Google's Gemma 4 models.

    \b
    Examples:
      culet generate "Why is the sky blue?" --model google/gemma-4-E2B-it
      culet chat --model ./my-gemma
      culet plan google/gemma-4-31B-it --gpu h200
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code: 0, or one of those in `culet.errors`."""
    try:
        setup_logging()
        result = cli.main(args=list(arguments), prog_name="culet", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "culet"
        report(error.format_message(), f"see `{command} --help`")
        return NO_RETRY
    except click.ClickException as error:
        report(error.format_message())
        return FAILED
    except CuletError as error:
        command = f"culet {arguments[0]}" if arguments and arguments[0] in COMMANDS else "culet"
        report(error.message, error.hint or (f"see `{command} --help`" if isinstance(error, UserError) else ""))
        return exit_code(error)
    except (KeyboardInterrupt, click.Abort):
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of our output closed the pipe (`culet ... | head`), so nothing can be written any more, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # report unexpected errors in one line too
        if env.LOG_LEVEL.get().lower() == "debug":
            traceback.print_exc()
        report(
            f"internal error: {type(error).__name__}: {error}",
            "this is a bug; set CULET_LOG_LEVEL=debug to get a traceback, and report it",
        )
        return exit_code(InternalError(str(error)))


def report(message: str, hint: str = "") -> None:
    """Print the message to stderr as one line, and the hint below it."""
    click.secho(f"error: {_one_line(message)}", err=True, fg="red", color=_color())
    if hint:
        click.secho(f"hint: {_one_line(hint)}", err=True, color=_color())


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _color() -> bool | None:
    """Return False if NO_COLOR is set, or None to let click check the terminal."""
    return False if os.environ.get(env.NO_COLOR.name) else None


def main() -> None:
    """Run the `culet` script."""
    # Set this before torch is imported. By default, torch's threads spin for a long time while they wait for each other,
    # and starve when other programs run. Limited spinning is an eighth slower on idle cores but several times faster on busy
    # ones (docs/log/cpu.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
