"""Columns that grow row by row, and the rows that cannot be taken."""

import math
import re
from array import array
from datetime import date
from typing import Any

from kvist.traces.ids import BlockIds, NoIds
from kvist.traces.names import Places
from kvist.traces.source import Source
from kvist.traces.trace import SkippedRow
from kvist.units import MAX_TOKENS

# Of the rows that are left out, so many are told one by one.
_TOLD = 100
# Beyond any unit of time since any origin; keeps integers within what floats hold.
_FAR = 10**22
_SECONDS = 10**12
_MOMENT = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9})\d*)?(?:Z|([+-])(\d\d):?(\d\d))?", re.ASCII
)
_NANO = 10**9


class RowError(ValueError):
    """What is wrong with a row, as the end of "line 5 …"."""


class Columns:
    """Requests as they are read.

    Attributes:
        prompts: tokens; what was said before included.
        outputs: tokens; -1 where only whole lengths are known, which are then the prompts.
        arrivals: seconds since the first row's; empty where rows name no times.
        counts: named blocks of each request.
        streams: which uninterrupted conversation a request goes on with, of those whose rows name one.
        block_tokens: tokens of a block, where the file says it.
        format: whose format the file has.
        failed: requests without a prompt or without an answer, left out.
        skipped: rows that were left out, the first hundred of them.
        skipped_rows: all of them.
    """

    def __init__(self, source: Source, *, trace: bool, skip_bad: bool, limit: int | None, most: int | None) -> None:
        """Begin with no rows.

        Args:
            source: named in errors.
            trace: whether each request must tell prompt and answer apart; times and conversations count only then.
            skip_bad: whether to leave bad rows out instead of raising.
            limit: requests to take; None for all.
            most: requests above which the file is refused; None for any number.
        """
        self.prompts, self.outputs, self.counts = array("q"), array("q"), array("q")
        self.arrivals = array("d")
        self._ids = BlockIds()
        self.streams = array("q")
        self.block_tokens: int | None = None
        self.format = "columns by name"
        self.failed = 0
        self.skipped: list[SkippedRow] = []
        self.skipped_rows = 0
        self.source = source
        self._trace = trace
        self._skip_bad = skip_bad
        self._limit = 2**62 if limit is None else limit
        self._most = 2**62 if most is None else most
        self._timed: bool | None = None
        self._dated = False
        self._origin: int | float | None = None
        self._days: dict[str, int] = {}
        # Of each conversation: its stream, and the tokens at its end.
        self._ends: dict[object, tuple[int, int]] = {}
        self._stream_count = 0

    @property
    def full(self) -> bool:
        """Whether as many requests were taken as are wanted."""
        return len(self.prompts) >= self._limit

    @property
    def blocks(self) -> "array[int]":
        """Ids of the blocks of all requests."""
        return self._ids.column()

    def bad(self, number: int, reason: str, *, of: str = "line") -> None:
        """Leave a row out, or raise.

        Raises:
            BadFile: bad rows are not to be left out.
        """
        if not self._skip_bad:
            raise self.source.error(f"{of} {number} {reason}")
        self.skipped_rows += 1
        if len(self.skipped) < _TOLD:
            self.skipped.append(SkippedRow(number=number, reason=reason))

    def add(self, values: Any, places: Places) -> None:
        """Take a row.

        Args:
            values: of its columns: what JSON or text says; of blocks a list, or what stands between its brackets.
            places: which is which.

        Raises:
            RowError: it is not a request; nothing of it is kept.
        """
        prompt = values[places.prompt]
        if type(prompt) is not int or not 0 <= prompt <= MAX_TOKENS:
            prompt = length_of(prompt)
        if places.output is None:
            if self._trace:
                raise RowError("tells one length; a trace needs prompt_tokens and output_tokens of each request")
            output = -1
        else:
            output = values[places.output]
            if type(output) is not int or not 0 <= output <= MAX_TOKENS:
                output = length_of(output)
        if places.history is not None and values[places.history] is not None:
            prompt += length_of(values[places.history])
        if self._trace and (places.time is not None or self._timed):
            arrival = self._seconds(values, places)
        if self._trace and places.conversation is not None and places.history is not None:
            stream = self._stream(values[places.conversation], values[places.history], prompt, output)
        else:
            stream = -1
        # Lengths count what was said even where nothing was answered.
        if (not prompt or not output) and (self._trace or (not prompt and output <= 0)):
            self.failed += 1
            return
        if len(self.prompts) >= self._most:
            raise self.source.error(f"more than {self._most:,} requests; plan with a sample")
        count = 0
        if places.blocks is not None and values[places.blocks] is not None:
            try:
                count = self._ids.add(values[places.blocks])
            except NoIds as error:
                raise RowError("has hash_ids that are no list of whole numbers; write [0, 1, 2]") from error
        self.prompts.append(prompt)
        self.outputs.append(output)
        self.counts.append(count)
        if stream >= 0:
            self.streams.append(stream)
        if self._trace and places.time is not None:
            self._timed = True
            self.arrivals.append(arrival)
        elif self._timed is None:
            self._timed = False

    def _stream(self, conversation: Any, history: Any, prompt: int, output: int) -> int:
        """Which stream of tokens a turn goes on with: a new one where its history is not all that was said before."""
        if isinstance(conversation, (list, dict)):
            raise RowError("has a conversation that is no number and no text")
        stream, end = self._ends.get(conversation, (-1, 0))
        if stream < 0 or not history or end != length_of(history):
            stream = self._stream_count
            self._stream_count += 1
        self._ends[conversation] = (stream, prompt + output)
        return stream

    def _seconds(self, values: Any, places: Places) -> float:
        """Seconds since the first row's time."""
        if places.time is None:
            raise RowError("names no time of arrival, which the rows before it do")
        if self._timed is False:
            raise RowError("names a time of arrival, which the rows before it do not")
        value = values[places.time]
        dated = False
        per_second = places.per_second
        if type(value) is not int and type(value) is not float:
            value = _plain_number(value)
            if value is None:
                value = self._moment(values[places.time])
                dated, per_second = True, _NANO
        if not -_FAR < value < _FAR:
            raise RowError(f"has a time of {_shown(values[places.time])}; write seconds, or a date and a time")
        if self._origin is None:
            self._origin, self._dated = value, dated
        elif dated is not self._dated:
            raise RowError(f"has a time of {_shown(values[places.time])}; the rows before it are of another kind")
        seconds: float = (value - self._origin) / per_second
        if not -_SECONDS < seconds < _SECONDS:
            raise RowError(f"has a time of {_shown(values[places.time])}, 30,000 years from the first; correct it")
        return seconds

    def _moment(self, text: Any) -> int:
        """Nanoseconds since the year 1 of a date and time; digits beyond nine are cut."""
        match = _MOMENT.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise RowError(f"has a time of {_shown(text)}; write seconds, or 2023-11-16 18:17:03.9799600")
        day, hours, minutes, seconds, fraction, sign, ahead_hours, ahead_minutes = match.groups()
        if day not in self._days:
            try:
                self._days[day] = date.fromisoformat(day).toordinal()
            except ValueError as error:
                raise RowError(f"has a time of {_shown(text)}; there is no such day") from error
        if int(hours) > 23 or int(minutes) > 59 or int(seconds) > 60:
            raise RowError(f"has a time of {_shown(text)}; there is no such hour")
        total = self._days[day] * 86400 + int(hours) * 3600 + int(minutes) * 60 + int(seconds)
        if sign:
            ahead = int(ahead_hours) * 3600 + int(ahead_minutes) * 60
            total += ahead if sign == "-" else -ahead
        return total * _NANO + int((fraction or "").ljust(9, "0"))


def length_of(value: object) -> int:
    """A whole number of tokens; ``12.0`` is one.

    Raises:
        RowError: it is not.
    """
    if type(value) is str and value.isascii() and value.isdecimal() and len(value) < 13:
        return int(value)
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else -1.0
    except (ValueError, OverflowError):
        number = -1.0
    if not 0 <= number <= MAX_TOKENS or number != int(number):
        shown = str(value) if not isinstance(value, int) or -(10**40) < value < 10**40 else "a very long number"
        raise RowError(f"has a length of {shown[:40]!r}; write a whole number, at most {MAX_TOKENS:,}")
    return int(number)


def _plain_number(value: object) -> int | float | None:
    """What a text says that is a number; None for another."""
    if not isinstance(value, str):
        return None
    text = value.strip()
    if text.isascii() and text.isdecimal() and len(text) < 23:
        return int(text)
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _shown(value: object) -> str:
    if isinstance(value, int) and not -(10**40) < value < 10**40:
        return "a number of more than 40 digits"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:36]}…"
