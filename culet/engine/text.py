"""Text in and out: what stands between a user's words and token ids."""

from __future__ import annotations

from culet.engine.stops import StopMatcher
from culet.engine.template import ChatTemplate
from culet.engine.tokenizer import IncrementalDecoder, NumberTokenizer, Tokenizer, check_token_ids

__all__ = ["ChatTemplate", "IncrementalDecoder", "NumberTokenizer", "StopMatcher", "Tokenizer", "check_token_ids"]
