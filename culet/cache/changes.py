"""What the prefix cache gains and loses, for those who follow it from outside: the web process and KV events."""

from __future__ import annotations

from msgspec import Struct


class PageStored(Struct, frozen=True, array_like=True, tag=True):
    """A run of full pages is known, which ends with this page. Before it, all pages of the run are reported.

    The run of no pages is reported too, with `num_pages` 0. Its key stands for the salt.
    """

    key: bytes
    parent: bytes  # key of the run without this page
    num_pages: int  # in the run
    token_ids: tuple[int, ...] = ()  # of this page
    extra: tuple[str, ...] = ()  # what the key covers besides token ids: the salt and media


class PageRemoved(Struct, frozen=True, array_like=True, tag=True):
    """No resume point begins with this run of pages any more. Its points and longer runs are gone already."""

    key: bytes
    num_pages: int


class PointStored(Struct, frozen=True, array_like=True, tag=True):
    """A prompt can be resumed after a run of full pages and `tail_len` more tokens."""

    key: bytes  # of the run
    num_pages: int
    tail_len: int
    tail_key: bytes  # see `tail_key` in `culet.cache.prefix`


class PointRemoved(Struct, frozen=True, array_like=True, tag=True):
    """The point is gone."""

    key: bytes
    num_pages: int
    tail_len: int
    tail_key: bytes


PrefixChange = PageStored | PageRemoved | PointStored | PointRemoved
