"""Rows that were measured, in a file, so that a comparison that was broken off goes on where it stood.

A line of JSON each: what was asked, as a digest, then the row. Lines of other questions, and those that were torn, are
passed over.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import Any

from kvist.comparison.measure import Row
from kvist.comparison.questions import Piece
from kvist.comparison.settings import Setting
from kvist.errors import BadFile

_MEASURED = tuple(each.name for each in fields(Row) if each.name not in ("setting", "dtype", "divergences"))
# NaN where no facts are asked for.
_OF_FACTS = ("needle", "needle_known", "choice", "choice_known")
_BEGIN = '{"question": '


def digest(model: str, dtype: str, pieces: Sequence[Piece], cartridges: Sequence[str] = ()) -> str:
    """Of everything that rows depend on, but for their settings; models and cartridges come with digests of theirs."""
    asked = [(piece.context, piece.following, piece.hidden, piece.weighed) for piece in pieces]
    content: list[object] = [model, dtype, *asked, *cartridges]
    content += [(question.choices, question.right) for piece in pieces for question in piece.asked]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class Journal:
    """The rows of one question.

    Args:
        path: of the file; None keeps nothing.
        question: its digest.

    Raises:
        BadFile: the file is there and cannot be read, or is no journal.
    """

    def __init__(self, path: Path | None, question: str) -> None:
        self.path = path
        self.question = question
        self.rows: dict[str, Mapping[str, Any]] = {}
        # Devices have no end.
        if path is None or not path.is_file():
            return
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise BadFile(f"{path}: cannot be read: {error.strerror or error}", key="journal") from error
        lines = [line for line in text.split("\n") if line.startswith(_BEGIN)]
        if text.strip() and not lines and not _BEGIN.startswith(text):
            raise BadFile(f"{path}: is no journal of comparisons; name another file", key="journal")
        for line in lines:
            try:
                entry = json.loads(line)
                if entry["question"] == question and _is_row(entry):
                    self.rows[entry["label"]] = {name: entry[name] for name in (*_MEASURED, "divergences")}
            except (ValueError, RecursionError):
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
            # What was torn before ends here; one write, so that two who share a journal do not mix their lines.
            with self.path.open("ab", buffering=0) as file:
                file.write(f"{self._torn()}{line}\n".encode())
        except OSError as error:
            raise BadFile(f"{self.path}: cannot be written: {error.strerror or error}", key="journal") from error

    def _torn(self) -> str:
        """What ends a last line that was torn."""
        assert self.path is not None
        if not self.path.is_file() or not self.path.stat().st_size:
            return ""
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return "" if file.read() == b"\n" else "\n"


def _is_row(entry: Mapping[str, Any]) -> bool:
    """Whether an entry holds all that was measured, as numbers."""
    divergences = entry.get("divergences")
    if not (isinstance(entry.get("label"), str) and isinstance(divergences, list) and divergences):
        return False
    # Without answers to choose from there is no share of right ones.
    measured = [name for name in _MEASURED if name != "answered" or entry.get(name, 0.0) is not None]
    numbers = [*divergences, *(entry.get(name) for name in measured)]
    if not all(type(number) in (int, float) for number in numbers):
        return False
    finite = [*divergences, *(entry[name] for name in measured if name not in _OF_FACTS)]
    return all(map(isfinite, finite)) and entry["bytes_per_token"] > 0
