"""The tokenizer as `LLM.get_tokenizer` returns it, with the commonly used methods and defaults of transformers' tokenizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from culet.errors import BadRequest
from culet.text.messages import continued_text
from culet.text.template import Chat, ChatTemplate
from culet.text.tokenizer import Tokenizer


class Encoding(dict[str, Any]):
    """The result of calling a tokenizer. Its keys, `input_ids` and `attention_mask`, are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class ChatTokenizer:
    """A tokenizer with its chat template.

    tokenizer = llm.get_tokenizer()
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert tokenizer("Hi").input_ids == tokenizer.encode("Hi")
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template
        names = template.special_tokens
        self.bos_token, self.eos_token, self.pad_token = (names[f"{name}_token"] for name in ("bos", "eos", "pad"))
        self.bos_token_id, self.eos_token_id, self.pad_token_id = (
            tokenizer.token_id(name) for name in (self.bos_token, self.eos_token, self.pad_token)
        )
        self.chat_template = template.source

    @property
    def vocab_size(self) -> int:
        """The number of token ids, including special tokens."""
        return self._tokenizer.vocab_size

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of control tokens, which are not text."""
        return sorted(self._tokenizer.special_ids)

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True, **options: Any) -> Encoding:
        """Tokenize one text or a list of texts. Like transformers, return `input_ids` and `attention_mask`.

        Other options of transformers are accepted only if they are off.
        """
        for name, value in options.items():
            if value not in (None, False):
                raise BadRequest(f"{name}: got {value!r}, which is not supported", hint="the result has plain lists of ids")
        ids: Any
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens=add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        ids = [self.encode(entry, add_special_tokens=add_special_tokens) for entry in text]
        return Encoding(input_ids=ids, attention_mask=[[1] * len(entry) for entry in ids])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, which may spell out special tokens. By default <bos> comes first."""
        return self._tokenizer.encode(text, add_bos=add_special_tokens)

    def decode(self, token_ids: int | Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special=skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Iterable[int]], *, skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each list of token ids."""
        return [self.decode(token_ids, skip_special_tokens=skip_special_tokens) for token_ids in sequences]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token by its name, such as `<turn|>`, or those of several. None means that there is none."""
        return self._tokenizer.token_id(tokens) if isinstance(tokens, str) else [*map(self._tokenizer.token_id, tokens)]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return the text of a token, or those of several."""
        if isinstance(ids, int):
            return self._tokenizer.piece(ids).decode("utf-8", errors="replace")
        return [self.convert_ids_to_tokens(token_id) for token_id in ids]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        return_dict: bool = False,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        enable_thinking: bool = False,
        **variables: Any,
    ) -> Any:
        """Return the token ids of a conversation, or its text without `tokenize`. `variables` are the template's own."""
        continued = None
        if continue_final_message:
            continued = continued_text(conversation, add_generation_prompt=add_generation_prompt)
        chat = Chat(conversation, tools, add_generation_prompt, enable_thinking, variables or None, continued=continued)
        rendered = self._template.render_chat(chat)
        if not tokenize:
            if return_dict:
                raise BadRequest("return_dict: only allowed with tokenize")
            return rendered.text
        ids = self._tokenizer.encode_pieces(rendered.text, rendered.cuts)
        return Encoding(input_ids=ids, attention_mask=[1] * len(ids)) if return_dict else ids
