"""How many answers may wait; beyond that a request is turned away at once, which its client can tell from a delay."""

from kvist.server.errors import ApiError

MAX_WAITING = 1024


class Admission:
    """Counts the answers that wait for their first token. Used in the event loop only."""

    def __init__(self, limit: int = MAX_WAITING) -> None:
        self._limit = limit
        self.waiting = 0

    def enter(self, count: int) -> None:
        """Let the ``count`` answers of one request wait.

        Raises:
            ApiError: 503 with ``Retry-After``: with them too many would wait. None of them waits then.
        """
        if self.waiting + count > self._limit:
            raise ApiError(
                503, f"{self.waiting} answers wait for their first token and {count} more were asked for; at most "
                f"{self._limit} may wait; try again later", code="overloaded", headers={"retry-after": "2"},
            )  # fmt: skip
        self.waiting += count

    def leave(self, count: int) -> None:
        """``count`` answers wait no longer: their first token is there, or they are over."""
        self.waiting -= count
