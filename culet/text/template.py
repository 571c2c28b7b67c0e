"""Render chat messages to prompt text with the checkpoint's Jinja template or the built-in one for Gemma 4.

A template comes with a checkpoint, so it is untrusted code. It is rendered in Jinja's sandbox, in a separate process with
limits on time and memory. Weaker measures cannot stop every template. The sandbox limits `range`, but not nested loops or
`"a" * 10**10`. A thread cannot be interrupted inside C code such as `9 ** (9 ** 9)`, which blocks the whole interpreter.
The process starts with the first message (about 0.1 s) and keeps running, so each template is compiled once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from culet.errors import BadRequest, CheckpointError
from culet.line_process import LineProcess
from culet.text.messages import check_messages, check_tools

BUILT_IN = Path(__file__).with_name("gemma4.jinja")
TIME_LIMIT_S = 5.0
MAX_CHARS = 16 << 20  # limit on rendered text, more than the longest context holds
MAX_BYTES = 2 << 30  # limit on the process's address space
_WORKER = "culet.text.template_worker"
_SPECIAL_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}


class ChatTemplate:
    """Renders conversations for one checkpoint. Thread-safe.

    `templates` maps names to Jinja sources. The names are `default` and optionally `tool_use`, for conversations with tools.
    `empty_thought` tells the built-in template to begin an answer with an empty thought if thinking is off. The models without
    per-layer embeddings (12B, 26B-A4B, 31B) were trained that way. E2B and E4B were not.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        *,
        origin: str,
        empty_thought: bool,
        special_tokens: Mapping[str, str] | None = None,
        time_limit_s: float = TIME_LIMIT_S,
        max_chars: int = MAX_CHARS,
    ) -> None:
        self.origin = origin  # the source of the template, for error messages
        self._templates = dict(templates)
        self._constants = {**_SPECIAL_TOKENS, **(special_tokens or {}), "empty_thought": empty_thought}
        self._setup = {
            "templates": self._templates,
            "time_limit_s": time_limit_s,
            "max_chars": max_chars,
            "max_bytes": MAX_BYTES,
        }
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._process: LineProcess | None = None

    @classmethod
    def of_checkpoint(cls, folder: str | Path, *, empty_thought: bool) -> ChatTemplate:
        """Load the checkpoint's template, or the built-in one if it has none."""
        folder = Path(folder)
        config = _read_json(folder / "tokenizer_config.json")
        special = {name: _token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
        templates, origin = _find_templates(folder, config)
        return cls(templates, origin=origin, empty_thought=empty_thought, special_tokens=special)

    def render(
        self,
        messages: object,
        *,
        tools: object = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text, with special tokens spelled out. `options` are extra variables for the template."""
        variables: dict[str, Any] = {
            "messages": check_messages(messages),
            "tools": check_tools(tools),
            "add_generation_prompt": add_generation_prompt,
            "enable_thinking": enable_thinking,
        }
        for name in options or {}:
            if name in variables or name in self._constants:
                raise BadRequest(f"chat template option {name}: this name is reserved")
        variables.update({**self._constants, **(options or {})})
        name = "tool_use" if variables["tools"] and "tool_use" in self._templates else "default"
        try:
            request = json.dumps({"name": name, "variables": variables})
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(
                f"messages: cannot convert them to JSON: {error}",
                hint="use only JSON types: strings, numbers, lists and objects",
            ) from error
        with self._lock:
            return self._ask(request)

    def close(self) -> None:
        """End the process. The next render starts a new one."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None

    def _ask(self, request: str) -> str:
        if self._process is not None and not self._process.is_alive:
            self._end()
        try:
            if self._process is None:
                self._process = LineProcess(_WORKER, "renders chat templates")
                reply = self._process.ask(json.dumps(self._setup), self._time_limit_s)
                if "error" in reply:
                    raise CheckpointError(
                        f"chat template ({self.origin}): {reply['error']}",
                        hint="fix the template, or remove it to use the built-in one",
                    )
            reply = self._process.ask(request, self._time_limit_s)
        except TimeoutError as error:
            self._end()
            raise BadRequest(
                f"chat template ({self.origin}): rendering was stopped after {self._time_limit_s:g} s",
                hint="check whether the checkpoint's chat_template loops forever",
            ) from error
        except OSError as error:
            self._end()
            raise BadRequest(
                f"chat template ({self.origin}): the rendering process died, perhaps because it ran out of memory"
            ) from error
        except CheckpointError:
            self._end()
            raise
        if "error" in reply:
            raise BadRequest(f"chat template ({self.origin}): {reply['error']}")
        return str(reply["text"])


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
        try:
            return {"default": path.read_text(encoding="utf-8")}, path.name
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path}: cannot read the file: {error}") from error
    for name, content in (("chat_template.json", _read_json(folder / "chat_template.json")), ("tokenizer_config.json", config)):
        template = content.get("chat_template")
        if isinstance(template, str):
            return {"default": template}, name
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template if isinstance(entry, dict)}
            if "default" not in named or not all(isinstance(text, str) for text in named.values()):
                raise CheckpointError(f"{folder / name}: got chat templates {sorted(named)}, expected one named default")
            return named, name
    return {"default": BUILT_IN.read_text(encoding="utf-8")}, "built-in"
