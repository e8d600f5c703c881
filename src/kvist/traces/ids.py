"""Ids of blocks as rows name them, in one growing column."""

import json
from array import array
from typing import Any

import numpy as np

_DIGITS = b"0123456789"
_SPACED = b", " * 2**16
_BARE = b"," * 2**16
_PENDING_BYTES = 2**20
_LARGEST = 2**63 - 1


class NoIds(ValueError):
    """What a row names are no ids of blocks."""


class BlockIds:
    """Ids of blocks, whole numbers or texts, as 64-bit numbers that are equal where the ids are.

    Lists of plain numbers are kept as text until there is a MiB of it: read at once they take a sixth of the time.
    """

    def __init__(self) -> None:
        self._column = array("q")
        self._pending: list[bytes] = []
        self._pending_bytes = self._pending_ids = 0
        # Of texts and of numbers beyond 64 bits, once there are any: a number for each id.
        self._dense: dict[int | str, int] | None = None

    def add(self, ids: Any) -> int:
        """Take a row's ids: a list, or what stands between its brackets.

        Returns:
            How many they are.

        Raises:
            NoIds: they are none; nothing of them is kept.
        """
        if type(ids) is bytes:
            return self._add_text(ids)
        if type(ids) is not list or bool in set(map(type, ids)):
            raise NoIds
        self._flush()
        self._extend(ids)
        return len(ids)

    def column(self) -> "array[int]":
        """All ids."""
        self._flush()
        return self._column

    def _add_text(self, text: bytes) -> int:
        between = text.translate(None, _DIGITS)
        size = len(between)
        # Numbers between separators of one kind, none of them left out.
        if not size % 2 and between == _SPACED[:size]:
            count, plain = size // 2 + 1, text.count(b", ") == size // 2 and b", ," not in text
        else:
            count, plain = size + 1, between == _BARE[:size] and b",," not in text
        if not plain or text[0] not in _DIGITS or text[-1] not in _DIGITS:
            try:
                return self.add(json.loads(b"[" + text + b"]"))
            except (ValueError, RecursionError) as error:
                raise NoIds from error
        self._pending.append(text)
        self._pending_ids += count
        self._pending_bytes += len(text)
        if self._pending_bytes > _PENDING_BYTES:
            self._flush()
        return count

    def _flush(self) -> None:
        pending, expected = self._pending, self._pending_ids
        if not pending:
            return
        self._pending, self._pending_bytes, self._pending_ids = [], 0, 0
        if self._dense is None:
            found = np.fromstring(b",".join(pending).decode(), dtype=np.int64, sep=",")
            # Larger numbers come out as the largest.
            if found.size == expected and int(found.max()) < _LARGEST:
                self._column.frombytes(found.tobytes())
                return
        for text in pending:
            self._extend(list(map(int, text.split(b","))))

    def _extend(self, ids: list[Any]) -> None:
        if self._dense is None:
            before = len(self._column)
            try:
                self._column.extend(ids)
                return
            except (TypeError, OverflowError):
                del self._column[before:]
        if not all(type(each) is int or type(each) is str for each in ids):
            raise NoIds
        if self._dense is None:
            # From here on all are counted in the order in which they appear.
            self._dense = {}
            self._column = array("q", (self._dense.setdefault(each, len(self._dense)) for each in self._column))
        dense = self._dense
        self._column.extend([dense.setdefault(each, len(dense)) for each in ids])
