"""`culet chat`: talk to a model in the terminal."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import click

from culet.cli.options import config_of, config_options, sampling_of, sampling_options
from culet.errors import BadRequest, ContextTooLong
from culet.log import setup_logging

if TYPE_CHECKING:
    from culet.engine.llm import LLM
    from culet.types import SamplingParams

_COMMANDS = "/clear starts over, /system TEXT sets the system message, /exit quits; Ctrl-C stops an answer"


@click.command()
@click.option("--system", default=None, help="System message.")
@click.option("--enable-thinking", is_flag=True, help="Let the model think before it answers.")
@click.option("--quiet", "-q", is_flag=True, help="Log only warnings and errors.")
@sampling_options
@config_options
def chat(system: str | None, enable_thinking: bool, quiet: bool, **options: Any) -> None:
    """Chat with a model. Piped input is read line by line.

    \b
    Examples:
      culet chat
      culet chat --model google/gemma-4-E2B-it
      culet chat -m ./my-gemma --system "Answer in one sentence." --temperature 0.7
      echo "Why is the sky blue?" | culet chat -m google/gemma-4-E2B-it --quiet

    /clear starts over, /system TEXT sets the system message, /exit or Ctrl-D quits. Ctrl-C stops an answer.
    """
    params = sampling_of(options)
    config = config_of(options)
    if params.n != 1:
        raise BadRequest(f"n: got {params.n}, but a chat has only one answer per message", hint="omit --n")
    if quiet:
        setup_logging("warning")

    from culet.engine.llm import LLM

    with LLM.from_config(config) as llm:
        Conversation(llm, params, system=system, enable_thinking=enable_thinking).run()


class Conversation:
    """A loop that reads messages and answers them, with its history."""

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None, enable_thinking: bool) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._enable_thinking = enable_thinking
        self._turns: list[dict[str, Any]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, with the system message first."""
        head = [{"role": "system", "content": self._system}] if self._system else []
        return [*head, *self._turns]

    def run(self) -> None:
        """Read lines until end of input or /exit."""
        if sys.stdin.isatty():
            click.echo(_COMMANDS, err=True)
            with suppress(ImportError):  # gives input() line editing and history, if the platform has them
                import readline  # noqa: F401
        while (line := self._read()) is not None:
            if not line.strip():
                continue
            if line.startswith("/"):
                if not self._command(line):
                    return
            else:
                self._answer(line)

    def _read(self) -> str | None:
        """Return the next line, or None at the end of input. Ctrl-C at the prompt discards the line."""
        while True:
            try:
                if not sys.stdin.isatty():
                    line = sys.stdin.readline()
                    return line.rstrip("\n") if line else None
                if sys.stdout.isatty():
                    return input("> ")
                # input() would write its prompt to stdout, between the answers.
                click.echo("> ", nl=False, err=True)
                return input()
            except EOFError:
                click.echo(err=True)
                return None
            except KeyboardInterrupt:
                click.echo(err=True)
            except UnicodeDecodeError as error:
                raise BadRequest(f"the line on stdin is not valid UTF-8: {error}", hint="pipe UTF-8 text") from error

    def _command(self, line: str) -> bool:
        """Run a command that starts with a slash. Return False to quit."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/clear":
            self._turns.clear()
        elif name == "/system":
            self._system = rest.strip() or None
        else:
            click.echo(f"unknown command {name}; {_COMMANDS}", err=True)
        return True

    def _answer(self, line: str) -> None:
        """Stream the answer to a line and keep both. After Ctrl-C, keep the partial answer."""
        self._turns.append({"role": "user", "content": line})
        pieces: list[str] = []
        is_thinking = False
        try:
            stream = self._llm.stream(self.messages, self._params, enable_thinking=self._enable_thinking)
            with closing(stream):
                for delta in stream:
                    if delta.reasoning:  # goes to stderr, because only the answer goes to stdout
                        click.echo(click.style(delta.reasoning, dim=True), nl=False, err=True)
                        is_thinking = True
                    if delta.text and is_thinking:
                        click.echo(err=True)
                        is_thinking = False
                    pieces.append(delta.text)
                    click.echo(delta.text, nl=False)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            click.echo(" [stopped]", err=True)
        except ContextTooLong as error:
            self._turns.pop()
            if not sys.stdin.isatty():
                raise
            click.echo(f"error: {error.message}\nhint: /clear starts a new conversation", err=True)
            return
        click.echo()
        self._turns.append({"role": "assistant", "content": "".join(pieces)})
