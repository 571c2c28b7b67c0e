"""Turn sampling parameters into a complete Request. Needs no torch, because the server does this outside the engine process."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from culet.errors import BadRequest, ContextTooLong
from culet.media.items import MediaItem
from culet.text.tokenizer import Tokenizer, check_token_ids, no_tokenizer
from culet.types import MediaSpan, ModelDefaults, OutputRules, Request, Sampling, SamplingParams

TURN_TOKEN, RESULT_TOKEN = "<|turn>", "<tool_response|>"


@dataclass(frozen=True)
class ChatMarks:
    """Tokens of a rendered chat that say where its turns begin."""

    turn_id: int | None = None  # the token that opens a turn; None if the vocabulary has none
    result_id: int | None = None  # the token that closes a tool result
    system_ids: tuple[int, ...] = ()  # what follows the turn token in the system's turn

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatMarks:
        turn_id = tokenizer.token_id(TURN_TOKEN)
        system_ids = () if turn_id is None else tuple(tokenizer.encode("system\n"))
        return cls(turn_id, tokenizer.token_id(RESULT_TOKEN), system_ids)

    def resume_lengths(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths at which another prompt may diverge from this one.

        Other chats diverge at the end of the system's turn, which holds the tools too. The same chat's next prompt diverges
        before the model's turn, or after tool results within it. What follows is the beginning of a thought, or the model's
        thoughts, and templates drop both from past turns.
        """
        turn, result = _last(prompt, self.turn_id), _last(prompt, self.result_id)
        if turn is None or self.turn_id is None:
            return ()
        lengths = {turn} if result is None or result < turn else {turn, result + 1}
        first = prompt.index(self.turn_id)
        if first < turn and prompt[first + 1 : first + 1 + len(self.system_ids)] == self.system_ids:
            lengths.add(prompt.index(self.turn_id, first + 1))
        return tuple(sorted(length for length in lengths if 0 < length < len(prompt)))


@dataclass(frozen=True)
class RequestRules:
    """The model's defaults, which complete a request, and the engine's limits, which it is checked against."""

    vocab_size: int
    defaults: ModelDefaults
    max_position: int  # the model's limit
    max_model_len: int  # this engine's limit
    max_num_seqs: int
    marks: ChatMarks = ChatMarks()
    has_text: bool = True  # whether a tokenizer was loaded

    def make_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        media: Sequence[MediaSpan] = (),
        items: Sequence[MediaItem] = (),
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str = "",
        tenant: str = "",
    ) -> Request:
        """Fill in every default. Raise if the request cannot be served. `items` are the content of the spans `media`."""
        prompt = check_token_ids(prompt_token_ids, self.vocab_size)
        if not self.has_text:
            if params.stop:
                raise no_tokenizer("stop: it applies to text")
            if params.structured_outputs is not None:
                raise no_tokenizer(f"{params.structured_outputs.spec().field}: it applies to text")
            if params.thinking_token_budget is not None:
                raise no_tokenizer("thinking_token_budget: thoughts are found by the names of the tokens around them")
        stop_token_ids = params.stop_token_ids or ()
        for name, ids in (("stop_token_ids", stop_token_ids), ("logit_bias", tuple(params.logit_bias or ()))):
            if any(token_id >= self.vocab_size for token_id in ids):
                raise BadRequest(f"{name}: got {max(ids)}, expected token ids below {self.vocab_size}")
        if params.n > self.max_num_seqs:
            raise BadRequest(
                f"n: got {params.n}, but at most {self.max_num_seqs} sequences can run at once",
                hint="lower n or raise --max-num-seqs",
            )
        eos = () if params.ignore_eos else self.defaults.eos_token_ids
        stop_ids = frozenset(eos) | frozenset(stop_token_ids)
        max_tokens = self._max_tokens(len(prompt), params.max_tokens)
        if params.min_tokens > max_tokens:
            raise BadRequest(f"min_tokens: got {params.min_tokens}, but the context has room for only {max_tokens} more tokens")
        rules = None
        if params.min_tokens or params.thinking_token_budget is not None:
            rules = OutputRules(params.min_tokens, tuple(sorted(stop_ids)), params.thinking_token_budget)
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=resolve_sampling(params, self.defaults, self.vocab_size),
            n=params.n,
            max_tokens=max_tokens,
            stop_token_ids=stop_ids,
            priority=priority,
            deadline=deadline,
            grammar=None if params.structured_outputs is None else params.structured_outputs.spec(),
            rules=rules,
            resume_lengths=self.marks.resume_lengths(prompt),
            media=tuple(media),
            items=tuple({item.key: item for item in items}.values()),  # equal ones travel once
            cache_salt=cache_salt,
            tenant=tenant,
        )

    def _max_tokens(self, prompt_len: int, requested: int | None) -> int:
        """Return the requested number of output tokens, or all that fit. Raise if the context has no room for them."""
        limit = self.max_model_len
        if prompt_len >= limit:
            raise ContextTooLong(
                f"the prompt has {prompt_len} tokens, but the context holds only {limit}, and the output needs at least one",
                hint=f"send at most {limit - 1} prompt tokens, or raise --max-model-len (the model allows {self.max_position})",
            )
        max_tokens = requested or limit - prompt_len
        if prompt_len + max_tokens > limit:
            raise ContextTooLong(
                f"{prompt_len} prompt tokens + {max_tokens} output tokens = {prompt_len + max_tokens}, "
                f"but the context holds only {limit}",
                hint=f"ask for at most {limit - prompt_len} output tokens, shorten the prompt, or raise --max-model-len",
            )
        return max_tokens


def _last(token_ids: tuple[int, ...], wanted: int | None) -> int | None:
    """Return the position of the last `wanted` token, or None."""
    return len(token_ids) - 1 - token_ids[::-1].index(wanted) if wanted in token_ids else None


def resolve_sampling(params: SamplingParams, defaults: ModelDefaults, vocab_size: int) -> Sampling:
    """Complete `params` with the model's defaults, and with a random seed if it has none."""
    bias = dict(params.logit_bias or {}) | dict.fromkeys(defaults.suppress_token_ids, float("-inf"))
    top_k = defaults.top_k if params.top_k is None else params.top_k
    top_p = defaults.top_p if params.top_p is None else params.top_p
    temperature = defaults.temperature if params.temperature is None else params.temperature
    penalty = params.repetition_penalty
    return Sampling(
        temperature=temperature if top_p else 0.0,  # only the most likely token is left, so there is nothing to draw
        top_k=max(0, top_k),
        top_p=top_p or 1.0,
        min_p=defaults.min_p if params.min_p is None else params.min_p,
        repetition_penalty=defaults.repetition_penalty if penalty is None else penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(sorted(bias.items())),
        seed=secrets.randbits(64) if params.seed is None else params.seed,
        sample=0,
        logprobs=None if params.logprobs is None else min(params.logprobs, vocab_size),
        prompt_logprobs=None if params.prompt_logprobs is None else min(params.prompt_logprobs, vocab_size),
    )
