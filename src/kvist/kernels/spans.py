"""What a step asks of attention: each sequence's new tokens and where its blocks are."""

from dataclasses import dataclass

from kvist.store.layouts import Index


@dataclass(frozen=True, kw_only=True)
class Span:
    """One sequence's part of a step: ``count`` tokens from position ``start`` on.

    ``table`` holds its block ids from position 0; those behind a window may be -1.
    """

    table: Index
    start: int
    count: int
