"""Render chat messages to prompt text with the checkpoint's Jinja template or the built-in one for Gemma 4.

A template comes with a checkpoint, so it is untrusted code. It is rendered in Jinja's sandbox, in a separate process with
limits on time and memory. Weaker measures cannot stop every template. The sandbox limits `range`, but not nested loops or
`"a" * 10**10`. A thread cannot be interrupted inside C code such as `9 ** (9 ** 9)`, which blocks the whole interpreter.
Processes start on demand (about 0.1 s each) and keep running, so each template is compiled once per process.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from culet.errors import BadRequest, CheckpointError
from culet.line_process import START_LIMIT_S, LineProcess, Stopper
from culet.text.messages import check_messages, check_tools

BUILT_IN = Path(__file__).with_name("gemma4.jinja")
_WORKER = "culet.text.template_worker"
_SPECIAL_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
_TURN_END, _MODEL_TURN, _EMPTY_THOUGHT = "<turn|>\n", "<|turn>model\n", "<|channel>thought\n<channel|>"
_TOOL_TURN = "<|turn>tool"
_ATTEMPTS = 2
_COMPILE_FACTOR = 6  # on the time limit: compiling happens once, and no conversation waits for it
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True)
class RenderLimits:
    """Limits on rendering."""

    num_processes: int = 1  # that render at the same time
    time_limit_s: float = 5.0  # of processor time, for one conversation
    max_chars: int = 16 << 20  # of rendered text, more than the longest context holds
    max_bytes: int = 2 << 30  # of a process's address space


@dataclass(frozen=True)
class Chat:
    """A conversation and how to render it. `options` are extra variables for the template.

    The arguments of tool calls are mappings or JSON. `continued` is the text of the last message if the answer continues it.
    There is no generation prompt then.
    """

    messages: object
    tools: object = None
    add_generation_prompt: bool = True
    enable_thinking: bool = False
    options: Mapping[str, Any] | None = None
    continued: str | None = None


@dataclass(frozen=True)
class RenderedChat:
    """The text of a prompt, with special tokens spelled out.

    The text between two `cuts` is tokenized by itself, so that control tokens in a client's text stay plain text.
    """

    text: str
    cuts: Sequence[int] = ()

    def up_to(self, message: str) -> RenderedChat:
        """Return the prompt without the end of its last turn, so that the answer continues `message`, the last one.

        The prompt ends with the message exactly as given. Templates trim white space at its end, and this puts it back.
        """
        text = self.text.rstrip().removesuffix(_TURN_END.rstrip()).rstrip()
        if not message.strip() or not text.endswith(message.strip()):
            raise BadRequest("continue_final_message: the prompt does not end with the text of the last message")
        cuts = [cut for cut in self.cuts if cut < len(text)]
        return RenderedChat(text + message[len(message.rstrip()) :], cuts)


class ChatTemplate:
    """Renders conversations for one checkpoint. Thread-safe.

    `templates` maps names to Jinja sources. The names are `default` and optionally `tool_use`, for conversations with tools.
    `empty_thought` tells the built-in template to begin an answer with an empty thought if thinking is off. The models without
    per-layer embeddings (12B, 26B-A4B, 31B) were trained that way. E2B and E4B were not. `control_tokens` are those that
    messages and tools cannot contain: if a client spells one out, it stays plain text.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        *,
        origin: str,
        empty_thought: bool,
        special_tokens: Mapping[str, str] | None = None,
        control_tokens: Sequence[str] = (),
        limits: RenderLimits | None = None,
    ) -> None:
        self._limits = limits or RenderLimits()
        self.origin = origin  # the source of the template, for error messages
        self.num_replaced = 0  # processes that died, hung or were killed
        self._templates = dict(templates)
        self.source = self._templates["default"]
        self.special_tokens = {**_SPECIAL_TOKENS, **(special_tokens or {})}  # by names such as `bos_token`
        self._constants = {**self.special_tokens, "empty_thought": empty_thought}
        self._setup = json.dumps(
            {
                "templates": self._templates,
                "control_tokens": list(control_tokens),
                "time_limit_s": self._limits.time_limit_s,
                "max_chars": self._limits.max_chars,
                "max_bytes": self._limits.max_bytes,
            }
        )
        self._free = threading.Semaphore(self._limits.num_processes)
        self._lock = threading.Lock()
        self._idle: list[LineProcess] = []
        self._has_compiled = False

    @classmethod
    def of_checkpoint(
        cls,
        folder: str | Path,
        chosen: str | None = None,
        *,
        empty_thought: bool,
        control_tokens: Sequence[str] = (),
        limits: RenderLimits | None = None,
    ) -> ChatTemplate:
        """Load the checkpoint's template, or the built-in one if it has none. `chosen` is a file or `built-in` instead."""
        folder = Path(folder)
        config = _read_json(folder / "tokenizer_config.json")
        special = {name: _token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
        templates, origin = _find_templates(folder, config) if chosen is None else _read_chosen(chosen)
        return cls(
            templates,
            origin=origin,
            empty_thought=empty_thought,
            special_tokens=special,
            control_tokens=control_tokens,
            limits=limits,
        )

    def render(self, messages: object, **options: Any) -> str:
        """Return the prompt text of a conversation. `options` are the other fields of `Chat`."""
        return self.render_chat(Chat(messages, **options)).text

    def render_chat(self, chat: Chat, stopper: Stopper | None = None) -> RenderedChat:
        """Return the prompt of a conversation. `stopper` ends the work from another thread."""
        tools = check_tools(chat.tools)
        messages = check_messages(chat.messages)
        if chat.continued is not None:  # Templates trim each part of a message, but nothing inside a text.
            messages[-1]["content"] = chat.continued
        opens_turn = chat.add_generation_prompt and chat.continued is None
        client = {"messages": messages, "tools": tools}
        own = {**self._constants, "add_generation_prompt": opens_turn, "enable_thinking": chat.enable_thinking}
        for name in chat.options or {}:
            if name in client or name in own:
                raise BadRequest(f"chat template option {name}: this name is reserved")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        try:
            line = _encoder.encode({"name": name, "client": {**client, **(chat.options or {})}, "own": own})
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(
                f"messages: cannot convert them to JSON: {error}",
                hint="use only JSON types: strings, numbers, lists and objects",
            ) from error
        with self._free:
            reply = self._ask(line, stopper or Stopper())
        if reply.get("kind") == "input":
            raise BadRequest(reply["error"])
        if "error" in reply:
            raise BadRequest(f"chat template ({self.origin}): {reply['error']}")
        text = reply["text"]
        if opens_turn and text.endswith(_TURN_END):  # some templates forget it after the result of a tool
            no_thought = self._constants["empty_thought"] and not chat.enable_thinking
            text += _MODEL_TURN + (_EMPTY_THOUGHT if no_thought else "")
        rendered = RenderedChat(text, reply["cuts"])
        return rendered if chat.continued is None else rendered.up_to(chat.continued)

    def find_problem(self) -> str:
        """Return what is wrong with the template, or an empty string."""
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}]
        messages = [
            {"role": "user", "content": "1"},
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ]
        try:
            text = self.render(messages)
        except BadRequest:
            return "cannot show the results of tools to the model"
        if _TOOL_TURN in text:
            return "writes the results of tools as turns of their own, which the model was not trained on"
        return ""

    def compile(self) -> None:
        """Start a process now. Raise if the template cannot be compiled."""
        self._give_back(self._take())

    def warm_up(self) -> None:
        """Start all processes now, so that the first conversations do not wait for them."""
        for _ in range(self._limits.num_processes - len(self._idle)):
            self._give_back(self._start())

    def close(self) -> None:
        """End the idle processes. The next render starts a new one."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _ask(self, line: bytes, stopper: Stopper) -> dict[str, Any]:
        """Ask a process. If it dies or is stopped from outside, ask another one, once.

        A process that is lost is replaced here and now, so that no other conversation waits for a process to start.
        """
        if stopper.is_stopped:
            raise BadRequest("the conversation was cancelled before it was rendered")
        time_limit_s = self._limits.time_limit_s
        process = self._take()
        for _ in range(_ATTEMPTS):
            try:
                with stopper.watch(process):
                    reply = process.ask(line, time_limit_s)
            except OSError as error:
                process = self._replace(process)
                if isinstance(error, TimeoutError):
                    self._give_back(process)
                    raise BadRequest(
                        f"chat template ({self.origin}): rendering was stopped after {time_limit_s:g} s",
                        hint="check whether the checkpoint's chat_template loops forever",
                    ) from error
                if stopper.is_stopped:
                    break
            else:
                self._give_back(process)
                return reply
        self._give_back(process)
        raise BadRequest(f"chat template ({self.origin}): the rendering process died, perhaps because it ran out of memory")

    def _take(self) -> LineProcess:
        """Return an idle process, or a new one if there is none yet."""
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None:
            return self._start()
        return process if process.is_alive else self._replace(process)

    def _replace(self, process: LineProcess) -> LineProcess:
        process.end()
        with self._lock:
            self.num_replaced += 1
        return self._start()

    def _give_back(self, process: LineProcess) -> None:
        with self._lock:
            self._idle.append(process)

    def _start(self) -> LineProcess:
        process = LineProcess(_WORKER, "renders chat templates")
        # A template that has compiled once does so again. How long that takes depends on what else the machine does.
        time_limit_s = START_LIMIT_S if self._has_compiled else _COMPILE_FACTOR * self._limits.time_limit_s
        try:
            reply = process.ask(self._setup, time_limit_s)
        except OSError as error:
            process.end()
            is_late = isinstance(error, TimeoutError)
            problem = f"compiling was stopped after {time_limit_s:g} s" if is_late else "the process that compiled it died"
            raise BadRequest(
                f"chat template ({self.origin}): {problem}",
                hint="check whether the checkpoint's chat_template contains an expression that never ends",
            ) from error
        if "error" in reply:
            process.end()
            raise CheckpointError(
                f"chat template ({self.origin}): {reply['error']}",
                hint="fix the template, or use --chat-template built-in, which is Culet's own",
            )
        self._has_compiled = True
        return process


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Return an empty dict if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{path}: cannot read the file: {error}", hint="download the file again from the model's page"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: got {type(content).__name__}, expected an object")
    return content


def _token_text(token: object) -> str:
    """Return the text of a special token. In tokenizer_config.json it is a string or an object that holds the string."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _find_templates(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Return (templates by name, origin).

    Look for chat_template.jinja first, then for a key in a JSON file. Otherwise use the built-in template.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": _read_text(path)}, path.name
    for name, content in (("chat_template.json", _read_json(folder / "chat_template.json")), ("tokenizer_config.json", config)):
        template = content.get("chat_template")
        if isinstance(template, str):
            return {"default": template}, name
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template if isinstance(entry, dict)}
            if "default" not in named or not all(isinstance(text, str) for text in named.values()):
                raise CheckpointError(f"{folder / name}: got chat templates {sorted(named)}, expected one named default")
            return named, name
    return {"default": _read_text(BUILT_IN)}, "built-in"


def _read_chosen(chosen: str) -> tuple[dict[str, str], str]:
    """Return (templates by name, origin) for a file, or for `built-in`."""
    path = BUILT_IN if chosen == "built-in" else Path(chosen).expanduser()
    return {"default": _read_text(path)}, "built-in" if path == BUILT_IN else path.name


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: cannot read the file: {error}") from error
