"""Text in and out: what stands between a user's words and token ids."""

from __future__ import annotations

from culet.text.stops import StopMatcher
from culet.text.template import ChatTemplate
from culet.text.tokenizer import IncrementalDecoder, NumberTokenizer, Tokenizer, check_token_ids

__all__ = ["ChatTemplate", "IncrementalDecoder", "NumberTokenizer", "StopMatcher", "Tokenizer", "check_token_ids"]
