"""Rows that were measured, in a file, so that a comparison that was broken off goes on where it stood.

A line of JSON each: what was asked, as a digest, then the row. Lines of other questions, and a last one that was torn,
are passed over.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvist.comparison.measure import Row
from kvist.comparison.questions import Piece
from kvist.comparison.settings import Setting
from kvist.errors import BadFile

_MEASURED = tuple(each.name for each in fields(Row) if each.name not in ("setting", "dtype", "divergences"))


def digest(model: str, dtype: str, pieces: Sequence[Piece], cartridges: Sequence[str] = ()) -> str:
    """Of everything that rows depend on, but for their settings; ``cartridges`` are names and digests."""
    content = [model, dtype, *((piece.context, piece.following, piece.hidden) for piece in pieces), *cartridges]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class Journal:
    """The rows of one question.

    Args:
        path: of the file; None keeps nothing.
        question: its digest.

    Raises:
        BadFile: the file is there and cannot be read.
    """

    def __init__(self, path: Path | None, question: str) -> None:
        self.path = path
        self.question = question
        self.rows: dict[str, Mapping[str, Any]] = {}
        if path is None or not path.exists():
            return
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            raise BadFile(f"{path}: cannot be read: {error.strerror or error}", key="journal") from error
        for line in lines:
            try:
                entry = json.loads(line)
                if entry["question"] == question:
                    self.rows[str(entry["label"])] = {name: entry[name] for name in (*_MEASURED, "divergences")}
            except (ValueError, KeyError, TypeError):
                continue

    def find(self, setting: Setting, dtype: str) -> Row | None:
        """The row of a setting, if it was measured."""
        found = self.rows.get(setting.label(dtype))
        if found is None:
            return None
        return Row(setting=setting, dtype=dtype, **{**found, "divergences": tuple(found["divergences"])})

    def add(self, row: Row) -> None:
        """Keep a row.

        Raises:
            BadFile: the file cannot be written.
        """
        if self.path is None:
            return
        entry = {"question": self.question, "label": row.label} | {name: getattr(row, name) for name in _MEASURED}
        line = json.dumps({**entry, "divergences": row.divergences})
        try:
            # What was torn before ends here.
            torn = self.path.exists() and self.path.read_bytes()[-1:] not in (b"\n", b"")
            with self.path.open("a", encoding="utf-8") as file:
                file.write(("\n" if torn else "") + line + "\n")
        except OSError as error:
            raise BadFile(f"{self.path}: cannot be written: {error.strerror or error}", key="journal") from error
