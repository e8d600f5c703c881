"""Stop strings in a text that arrives in pieces."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvist.errors import InputError


class Passed(NamedTuple):
    """What may be shown of a text, and whether a stop string ended it."""

    emit: str
    stopped: bool


@dataclass(slots=True)
class _Progress:
    """How much of one stop string the end of the text matches, by Knuth, Morris and Pratt (1977).

    Attributes:
        stop: the string.
        borders: for each prefix of it, the length of the longest proper prefix that is also its suffix.
        matched: characters of it that the text ends with.
    """

    stop: str
    borders: list[int]
    matched: int = 0

    def step(self, char: str) -> bool:
        """Advance by one character of the text; True where it completes the stop string."""
        while self.matched and self.stop[self.matched] != char:
            self.matched = self.borders[self.matched - 1]
        if self.stop[self.matched] == char:
            self.matched += 1
        return self.matched == len(self.stop)


class StopMatcher:
    """Cuts a text before the stop string that is complete first, wherever the pieces of the text end.

    Only text that may still become a stop string is held back. Of two that are complete at the same character
    the longer one counts. The cost of a piece is its length times the number of stop strings.

    Raises:
        InputError: a stop string is empty.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [_Progress(stop, _borders(stop)) for stop in stops]
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> Passed:
        """Add ``text``; returns what is now certain to come before any stop string.

        Once stopped, nothing more is emitted.
        """
        if self._stopped:
            return Passed("", True)
        if not self._stops:
            return Passed(text, False)
        whole = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            complete = [len(stop.stop) for stop in self._stops if stop.step(char)]
            if complete:
                self._stopped, self._held = True, ""
                return Passed(whole[: end - max(complete)], True)
        shown = len(whole) - max(stop.matched for stop in self._stops)
        self._held = whole[shown:]
        return Passed(whole[:shown], False)

    def flush(self) -> str:
        """Return what was held back when the text ends without a stop string."""
        held, self._held = self._held, ""
        for stop in self._stops:
            stop.matched = 0
        return held


def _borders(stop: str) -> list[int]:
    if not stop:
        raise InputError("stop: '' is an empty string; leave it out", key="stop")
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        if stop[index] == stop[length]:
            length += 1
        borders[index] = length
    return borders
