"""How many tokens an engine has generated of late."""

import time
from collections import deque

_SECONDS = 10


class Throughput:
    """Counts the tokens of the last steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=256)

    def add(self, tokens: int) -> None:
        """A step has generated so many tokens."""
        self._steps.append((time.perf_counter(), tokens))

    def tokens_per_second(self) -> float:
        """Generated tokens over the last ten seconds."""
        now = time.perf_counter()
        recent = [(then, count) for then, count in self._steps if now - then < _SECONDS]
        return sum(count for _, count in recent) / max(now - recent[0][0], 1e-3) if len(recent) > 1 else 0.0
