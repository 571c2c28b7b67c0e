"""`culet chat`: talk to a model in the terminal."""

from __future__ import annotations

import json
import shlex
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from culet.cli.chat_screen import Screen, loading
from culet.cli.options import config_of, config_options, log_if, sampling_of, sampling_options, verbose_option
from culet.config import BUILT_IN
from culet.errors import BadRequest, ContextTooLong
from culet.limits import MEDIA_KINDS
from culet.media.items import MediaKind
from culet.media.sources import MediaSource

if TYPE_CHECKING:
    from culet.engine.llm import LLM
    from culet.types import SamplingParams

_HELP = '''\
/help          shows this list
/clear         starts a new conversation, without the files that wait for the next message
/system TEXT   sets the system message; without TEXT, removes it
/image FILE    shows an image with the next message; also /video FILE and /audio FILE
/save FILE     writes the conversation to a new file: as JSON if its name ends with .json, else as Markdown
/exit          quits, as Ctrl-D does

"""            begins and ends a message of several lines
\\              at the end of a line continues the message on the next one
Ctrl-C         stops an answer'''


@click.command()
@click.option("--system", default=None, help="System message.")
@click.option("--enable-thinking", is_flag=True, help="Let the model think before it answers.")
@click.option("--markdown/--no-markdown", default=True, help="Render answers as Markdown at a terminal. [default: on]")
@verbose_option
@sampling_options
@config_options
def chat(system: str | None, enable_thinking: bool, markdown: bool, verbose: bool | None, **options: Any) -> None:
    """Chat with a model. Piped input is read line by line.

    \b
    Examples:
      culet chat
      culet chat --model google/gemma-4-E2B-it
      culet chat -m ./my-gemma --system "Answer in one sentence." --temperature 0.7
      echo "Why is the sky blue?" | culet chat -m google/gemma-4-E2B-it

    /help lists the commands within a chat. Only answers go to stdout.
    """
    params = sampling_of(options)
    config = config_of(options)
    if params.n != 1:
        raise BadRequest(f"n: got {params.n}, but a chat has only one answer per message", hint="omit --n")
    log_if(verbose)
    screen = Screen(markdown=markdown)

    with loading(config.model.model):
        from culet.engine.llm import LLM

        llm = LLM.from_config(config)
    with llm:
        Conversation(llm, params, screen, system=system, enable_thinking=enable_thinking).run(config.model.model)


class Conversation:
    """A loop that reads messages and answers them, with its history."""

    def __init__(self, llm: LLM, params: SamplingParams, screen: Screen, *, system: str | None, enable_thinking: bool) -> None:
        self._llm = llm
        self._params = params
        self._screen = screen
        self._system = system
        self._enable_thinking = enable_thinking
        self._turns: list[dict[str, Any]] = []
        self._attached: list[dict[str, Any]] = []  # parts of the next message

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, with the system message first."""
        head = [{"role": "system", "content": self._system}] if self._system else []
        return [*head, *self._turns]

    def run(self, model: str) -> None:
        """Read messages until end of input or /exit."""
        if self._screen.is_interactive:
            about = "the built-in model, which knows little (--model names another)" if model == BUILT_IN else model
            self._screen.note(f"{about} · /help lists the commands, Ctrl-D quits")
        while (message := self._read()) is not None:
            if not message.strip():
                continue
            if message.startswith("/"):
                if not self._command(message):
                    return
            else:
                self._answer(message)

    def _read(self) -> str | None:
        """Return the next message, or None at the end of input. Ctrl-C at the prompt discards what was typed."""
        while True:
            try:
                line = self._screen.read_line()
                if line is None:
                    return None
                if line.lstrip().startswith('"""'):
                    return self._read_block(line.lstrip()[3:])
                while line.endswith("\\"):
                    line = line[:-1] + "\n" + (self._screen.read_line("  ") or "")
                return line
            except KeyboardInterrupt:
                click.echo(err=True)
            except UnicodeDecodeError as error:
                raise BadRequest(f"the line on stdin is not valid UTF-8: {error}", hint="pipe UTF-8 text") from error

    def _read_block(self, line: str) -> str:
        """Return the text up to the closing quotes, or up to the end of input."""
        lines = []
        next_line: str | None = line
        while next_line is not None:
            text, quotes, _ = next_line.partition('"""')
            lines.append(text)
            if quotes:
                break
            next_line = self._screen.read_line("  ")
        return "\n".join(lines).strip("\n")

    def _command(self, line: str) -> bool:
        """Run a command that starts with a slash. Return False to quit."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/exit", "/quit"):
            return False
        if name == "/help":
            click.echo(_HELP, err=True)
        elif name == "/clear":
            self._turns.clear()
            self._attached.clear()
        elif name == "/system":
            self._system = rest or None
        elif name == "/save":
            self._save(rest)
        elif name[1:] in MEDIA_KINDS:
            self._attach(name[1:], rest)
        else:
            self._screen.note(f"unknown command {name}; /help lists the commands", color="red")
        return True

    def _attach(self, kind: str, name: str) -> None:
        """Put a file into the next message."""
        path = _path_of(name)
        part = {"type": kind, "path": str(path) if name else ""}
        try:
            self._check_kinds(part)
            if not path.is_file():
                problem = f"/{kind} needs the name of a file" if not name else f"{path}: no such file"
                raise BadRequest(problem, hint="check the name of the file")
        except BadRequest as error:
            if not self._screen.is_interactive:
                raise
            self._refuse(error.message, error.hint)
            return
        self._attached.append(part)
        self._screen.note(f"{path.name} goes with the next message")

    def _check_kinds(self, part: dict[str, Any]) -> None:
        """Raise if the model does not accept this kind of file, or not this many in one conversation."""
        files = (*self._earlier_files(), *self._attached, part)
        self._llm.engine.media.check([MediaSource(MediaKind(file["type"]), _where(file)) for file in files])

    def _earlier_files(self) -> list[dict[str, Any]]:
        contents = [turn["content"] for turn in self._turns if isinstance(turn["content"], list)]
        return [part for content in contents for part in content if part["type"] in MEDIA_KINDS]

    def _refuse(self, problem: str, hint: str) -> None:
        self._screen.note(f"error: {problem}" + (f"\nhint: {hint}" if hint else ""), color="red")

    def _save(self, name: str) -> None:
        """Write the conversation to a new file."""
        if not name:
            self._screen.note("/save needs the name of a file, such as chat.md or chat.json", color="red")
            return
        path = Path(name).expanduser()
        if path.suffix == ".json":
            text = json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n"
        else:
            text = "\n".join(f"**{message['role']}**\n\n{_as_text(message['content'])}\n" for message in self.messages)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            self._screen.note(f"{path} exists; choose another name", color="red")
        except OSError as error:
            self._screen.note(f"cannot write {path}: {error.strerror}", color="red")
        else:
            self._screen.note(f"saved {len(self.messages)} messages to {path}")

    def _answer(self, message: str) -> None:
        """Stream the answer to a message and keep both. After Ctrl-C, keep the partial answer."""
        attached, self._attached = self._attached, []
        content = [*attached, {"type": "text", "text": message}] if attached else message
        self._turns.append({"role": "user", "content": content})
        is_stopped, warning = False, ""
        try:
            named = [_with_names(message) for message in self.messages]
            stream = self._llm.stream(named, self._params, enable_thinking=self._enable_thinking)
        except (BadRequest, ContextTooLong) as error:
            self._turns.pop()
            if not self._screen.is_interactive:
                raise
            self._keep_attached(attached, error)
            return
        with closing(stream), self._screen.answer() as answer:
            try:
                for delta in stream:
                    answer.add(delta.text, delta.reasoning, len(delta.token_ids))
                    warning = delta.warning
            except KeyboardInterrupt:
                is_stopped = True
        if is_stopped:
            self._screen.note("[stopped]")
        if warning:
            self._screen.note(f"[{warning}]")
        if self._screen.is_interactive and not answer.is_empty:
            self._screen.note(answer.speed())
        self._turns.append({"role": "assistant", "content": answer.text})

    def _keep_attached(self, attached: list[dict[str, Any]], error: BadRequest | ContextTooLong) -> None:
        """Say why a message was refused, and keep its files for the next one, without one that is the reason."""
        dropped = [file for file in attached if _is_about(error, file)]
        is_earlier = isinstance(error, ContextTooLong) or any(_is_about(error, file) for file in self._earlier_files())
        self._refuse(error.message, "/clear starts a new conversation" if is_earlier and not dropped else error.hint)
        self._attached = [file for file in attached if file not in dropped]
        if dropped:
            self._screen.note(f"dropped: {_names_of(dropped)}")
        if self._attached:
            self._screen.note(f"kept for the next message: {_names_of(self._attached)} (/clear drops all)")


def _where(file: dict[str, Any]) -> str:
    """Return the name of a file in errors: the command that attached it."""
    return f"/{file['type']} {file['path']}".rstrip()


def _names_of(files: list[dict[str, Any]]) -> str:
    return ", ".join(Path(file["path"]).name for file in files)


def _is_about(error: BadRequest | ContextTooLong, file: dict[str, Any]) -> bool:
    """Return whether a file caused an error. Errors about media that are too large name no file."""
    return error.message.startswith((f"{_where(file)}: ", "media: "))


def _with_names(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in which each file has the name that errors show. Saved conversations leave it out."""
    if isinstance(message["content"], str):
        return message
    parts = [{**part, "where": _where(part)} if part["type"] in MEDIA_KINDS else part for part in message["content"]]
    return {**message, "content": parts}


def _path_of(name: str) -> Path:
    """Return the path of a file. Terminals quote the name of one that is dropped on them, if it has spaces."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    try:
        words = shlex.split(name)
    except ValueError:  # a quote without its end
        return path
    return Path(words[0]).expanduser() if len(words) == 1 else path


def _as_text(content: str | list[dict[str, Any]]) -> str:
    """Return a message's text, with the names of its files."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else f"[{part['type']}: {part['path']}]" for part in content)
