"""Turn the tokens of one sample into output: `TokenDelta` -> `OutputDelta`.

`LLM` and the server both use this module, with and without streaming, so stop strings, tool calls, finish reasons and token
counts are the same everywhere. `plain_output` and `chat_output` create the `SampleOutput` for a sample. Pass each of the
sample's TokenDeltas to `push`:

    output = chat_output(tokenizer, request, params, tools=tools)
    delta = output.push(token_delta)  # delta.text, delta.reasoning, delta.tool_calls, delta.finish_reason
    if delta.finish_reason is not None and token_delta.finish_reason is None:
        ...  # a stop string or a tool call ended the sample, so cancel it in the engine
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from culet.text.output_pieces import Output, OutputPiece, ReasoningPiece, TextPiece, ToolCall
from culet.text.output_reader import ChatReader
from culet.text.plain_reader import PlainReader
from culet.text.tokenizer import Tokenizer
from culet.text.tool_schema import tool_schemas
from culet.types import FinishReason, GrammarSpec, Logprobs, Request, SamplingParams, TokenDelta

TOOL_CALLS = "tool_calls"  # the finish reason of a turn that ends with tool calls
EMPTY_ANSWER = "empty_after_thinking"  # the stop reason of an answer that ends after thoughts, without text or a tool call
_ANSWERED = frozenset({FinishReason.STOP, FinishReason.LENGTH})
_ENGINE_ENDED = frozenset({FinishReason.CANCEL, FinishReason.TIMEOUT, FinishReason.ERROR})


class OutputDelta(Struct, frozen=True, gc=False):
    """The output that one TokenDelta added to a sample. `pieces` are in the order the model wrote them."""

    sample: int
    pieces: Sequence[OutputPiece]
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()  # one per token id
    visible_logprobs: Sequence[tuple[int, Logprobs]] = ()  # (token, log-probabilities), excluding thoughts and markup
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish_reason: str | None = None  # a FinishReason, or tool_calls
    error: str = ""  # the cause, if finish_reason is error
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache, only set in the first delta
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    warning: str = ""  # see SampleOutput.warning

    @property
    def stop_reason(self) -> str | None:
        """See SampleOutput.stop_reason."""
        return stop_reason_of(self.warning)

    @property
    def text(self) -> str:
        """The answer text in this delta."""
        return "".join([piece.text for piece in self.pieces if isinstance(piece, TextPiece)])

    @property
    def reasoning(self) -> str:
        """The reasoning text in this delta. Always empty for plain completions."""
        return "".join([piece.text for piece in self.pieces if isinstance(piece, ReasoningPiece)])

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls that this delta completed. Always empty for plain completions."""
        return tuple([piece for piece in self.pieces if isinstance(piece, ToolCall)])


class Reader(Protocol):
    """Turns the tokens of one sample into pieces."""

    @property
    def has_ended(self) -> bool: ...
    @property
    def in_reasoning(self) -> bool: ...
    def push(self, token_ids: Iterable[int]) -> list[OutputPiece]: ...
    def finish(self) -> list[OutputPiece]: ...
    def output(self) -> Output: ...


class SampleOutput:
    """The output of one sample so far. Pass its TokenDeltas to `push` in order."""

    def __init__(
        self,
        reader: Reader,
        *,
        hidden_ids: frozenset[int] = frozenset(),
        single_call: bool = False,
        thinking_budget: int | None = None,
        warns: bool = True,
    ) -> None:
        self._reader = reader
        self._thinking_budget = thinking_budget
        self._warns = warns  # of empty answers. In a plain completion, thoughts are part of the text.
        self._hidden_ids = hidden_ids  # tokens without visible log-probabilities
        self._single_call = single_call
        self.token_ids: list[int] = []  # including the stop token
        self.logprobs: list[Logprobs] = []  # one per token id, if requested
        self.visible_logprobs: list[tuple[int, Logprobs]] = []
        self.finish_reason: str | None = None
        self.error = ""
        self.num_accepted_drafts = self.num_rejected_drafts = 0
        self.first_token_at = self.last_token_at = 0.0  # time.perf_counter()

    def push(self, delta: TokenDelta) -> OutputDelta:
        """Read the tokens of `delta`. Tokens after a stop string or an end token are dropped."""
        token_ids, logprobs = delta.token_ids, delta.logprobs
        if token_ids:
            self.last_token_at = time.perf_counter()
            self.first_token_at = self.first_token_at or self.last_token_at
        reader = self._reader
        visible: list[tuple[int, Logprobs]] = []
        if len(token_ids) == 1 and not logprobs and not self._single_call:  # the common case
            pieces = reader.push(token_ids)
        else:
            pieces, num_read, visible = self._read(token_ids, logprobs)
            token_ids, logprobs = token_ids[:num_read], logprobs[:num_read]
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.visible_logprobs += visible
        self.num_accepted_drafts += delta.num_accepted_drafts
        self.num_rejected_drafts += delta.num_rejected_drafts
        if delta.finish_reason is not None or reader.has_ended or (self._single_call and has_call(pieces)):
            pieces = pieces + reader.finish()
            self.finish_reason, self.error = self._reason(delta.finish_reason), delta.error
        return OutputDelta(
            delta.sample,
            pieces,
            token_ids,
            logprobs,
            visible,
            delta.prompt_logprobs,
            self.finish_reason,
            delta.error,
            delta.num_cached_tokens,
            delta.num_accepted_drafts,
            delta.num_rejected_drafts,
            "" if self.finish_reason is None else self.warning,
        )

    def output(self) -> Output:
        """Return the text, reasoning and tool calls so far."""
        return self._reader.output()

    @property
    def is_thought_out(self) -> bool:
        """Whether the thoughts have reached their budget. A budget of 0 allows none, so there is nothing to reach."""
        return bool(self._thinking_budget) and self._reader.output().num_thought_tokens >= (self._thinking_budget or 0)

    @property
    def stop_reason(self) -> str | None:
        """What the finish reason does not say: `empty_after_thinking`, or None. Clients accept few finish reasons."""
        return stop_reason_of(self.warning)

    @property
    def warning(self) -> str:
        """The stop reason as a sentence, or an empty string."""
        if not self._warns or self.finish_reason not in _ANSWERED:
            return ""
        output = self._reader.output()
        if not output.num_thought_tokens or output.text.strip() or output.tool_calls:
            return ""
        how = "max_tokens was reached" if self.finish_reason == FinishReason.LENGTH else "the model ended its turn"
        count = f"{output.num_thought_tokens} token{'' if output.num_thought_tokens == 1 else 's'}"
        return f"{EMPTY_ANSWER}: {how} after {count} of thought, without an answer"

    def _read(
        self, token_ids: tuple[int, ...], logprobs: tuple[Logprobs, ...]
    ) -> tuple[list[OutputPiece], int, list[tuple[int, Logprobs]]]:
        """Read token by token. Return (pieces, number of tokens read, visible log-probabilities)."""
        reader = self._reader
        pieces: list[OutputPiece] = []
        visible: list[tuple[int, Logprobs]] = []
        for index, token_id in enumerate(token_ids):
            was_reasoning = reader.in_reasoning
            pieces += reader.push((token_id,))
            if logprobs and not (was_reasoning or reader.in_reasoning or token_id in self._hidden_ids):
                visible.append((token_id, logprobs[index]))
            if reader.has_ended or (self._single_call and has_call(pieces)):
                return pieces, index + 1, visible
        return pieces, len(token_ids), visible

    def _reason(self, reason: FinishReason | None) -> str:
        """Return the finish reason of the sample, given the engine's finish reason."""
        if reason in _ENGINE_ENDED:
            return reason.value
        output = self._reader.output()
        has_called = self._single_call and any(call.is_complete for call in output.tool_calls)
        if reason is FinishReason.LENGTH and not (output.has_ended or has_called):
            return reason.value
        is_call = bool(output.tool_calls) and output.tool_calls[-1].is_complete  # a stop token may cut a call
        return TOOL_CALLS if is_call else FinishReason.STOP.value


# Creates the output of one sample. `plain_output` and `chat_output` are such functions, given a tokenizer.
MakeOutput = Callable[[Request, SamplingParams], SampleOutput]


def stop_reason_of(warning: str) -> str | None:
    """Return the stop reason with which a warning begins, or None if there is no warning."""
    return warning.partition(":")[0] or None


def has_call(pieces: Sequence[OutputPiece]) -> bool:
    """Return whether the pieces include a tool call."""
    return any(isinstance(piece, ToolCall) for piece in pieces)


def plain_output(tokenizer: Tokenizer, request: Request, params: SamplingParams) -> SampleOutput:
    """Create the output for a sample of a plain completion. Everything the model writes is text."""
    reader = PlainReader(
        tokenizer,
        prompt_ids=request.prompt_token_ids,
        end_ids=request.stop_token_ids,
        stop=tuple(params.stop or ()),
        min_tokens=params.min_tokens,
    )
    return SampleOutput(reader, thinking_budget=params.thinking_token_budget, warns=False)


def chat_output(
    tokenizer: Tokenizer,
    request: Request,
    params: SamplingParams,
    *,
    tools: Iterable[Mapping[str, Any]] | None = None,
    single_call: bool = False,
    calls_hold: bool = False,
    unmarked_calls: bool = False,
) -> SampleOutput:
    """Create the output for a sample of a chat, which separates thoughts, text and tool calls. Without `tools`, calls are text.

    With `single_call`, the sample ends after its first tool call. With `calls_hold`, or a grammar for calls in `params`,
    calls are held to their form. With `unmarked_calls`, calls of `tools` count without the tokens around them, unless the
    answer has a form: a document may quote a call.
    """
    form, tools = params.structured_outputs, tuple(tools or ())
    holds_calls = isinstance(form, GrammarSpec) and form.on_call
    reader = ChatReader(
        tokenizer,
        prompt_ids=request.prompt_token_ids,
        schemas=tool_schemas(tools),
        end_ids=request.stop_token_ids,
        ignore_end=params.ignore_eos,
        stop=tuple(params.stop or ()),
        min_tokens=params.min_tokens,
        calls_hold=calls_hold or holds_calls,
        unmarked_calls=unmarked_calls and (form is None or holds_calls),
        free_tools=form.free_tools if isinstance(form, GrammarSpec) else (),
        reads_calls=bool(tools),
        single_call=single_call,
    )
    return SampleOutput(
        reader,
        hidden_ids=tokenizer.special_ids,
        single_call=single_call,
        thinking_budget=params.thinking_token_budget,
    )
