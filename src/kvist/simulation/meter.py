"""What is measured while a simulation runs: integrals over time, in stretches that grow with it."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvist.simulation.results import BOUNDS, Timeline

_STRETCHES = 1000
_Floats = npt.NDArray[np.float64]

# Columns that are integrated.
RUNNING, WAITING, HELD, CACHED, UNUSED, TAILS = range(6)
_COLUMNS = 6


class Meter:
    """Integrates a replica's state over its clock.

    Stretches are equal and begin at one second; whenever there would be more than a thousand, neighbours are
    merged, so that neither memory nor time grow with what is simulated.
    """

    def __init__(self) -> None:
        self.width = 1.0
        self._sums = np.zeros((2 * _STRETCHES, _COLUMNS))
        self._bounds = np.zeros((2 * _STRETCHES, len(BOUNDS)))
        self._open = [0.0] * _COLUMNS
        self._open_bounds = [0.0] * len(BOUNDS)
        self._index = 0
        self._end = 1.0
        self.now = 0.0
        self._closed = [0.0] * _COLUMNS
        self._idle = [0.0] * _COLUMNS
        self.busy = 0.0
        self.bounds = [0.0] * len(BOUNDS)
        self.peak_running = 0
        self.peak_held = 0

    def add(self, until: float, bound: int, values: Sequence[int]) -> None:
        """The state was ``values``, by column, from the last call until now.

        Args:
            until: the time now, seconds.
            bound: index into ``BOUNDS``.
            values: ``[RUNNING, WAITING, HELD, CACHED, UNUSED, TAILS]``.
        """
        span = until - self.now
        if span <= 0.0:
            return
        if bound:
            self.busy += span
            if values[RUNNING] > self.peak_running:
                self.peak_running = values[RUNNING]
            if values[HELD] > self.peak_held:
                self.peak_held = values[HELD]
        else:
            for column in range(_COLUMNS):
                self._idle[column] += span * values[column]
        self.bounds[bound] += span
        while until > self._end:
            self._put(self._end - self.now, bound, values)
            self.now = self._end
            self._close()
        self._put(until - self.now, bound, values)
        self.now = until

    def _put(self, span: float, bound: int, values: Sequence[int]) -> None:
        sums = self._open
        running, waiting, held, cached, unused, tails = values
        # Written out: this is done for every step.
        sums[RUNNING] += span * running
        sums[WAITING] += span * waiting
        sums[HELD] += span * held
        sums[CACHED] += span * cached
        sums[UNUSED] += span * unused
        sums[TAILS] += span * tails
        self._open_bounds[bound] += span

    def _close(self) -> None:
        """The stretch is over."""
        for column in range(_COLUMNS):
            self._closed[column] += self._open[column]
        self._sums[self._index] = self._open
        self._bounds[self._index] = self._open_bounds
        self._index += 1
        if self._index == 2 * _STRETCHES:
            for table in (self._sums, self._bounds):
                table[:_STRETCHES] = table[0::2] + table[1::2]
                table[_STRETCHES:] = 0.0
            self._index = _STRETCHES
            self.width *= 2
        self._open = [0.0] * _COLUMNS
        self._open_bounds = [0.0] * len(BOUNDS)
        self._end = (self._index + 1) * self.width

    def total(self, column: int) -> float:
        """Integral over the time in which there was work."""
        return self._closed[column] + self._open[column] - self._idle[column]

    def mean(self, column: int) -> float:
        """Over the time in which there was work."""
        return self.total(column) / self.busy if self.busy else 0.0


def timeline_of(meters: Sequence[Meter], total_bytes: int) -> Timeline:
    """The sum of some replicas' measurements.

    Args:
        meters: one a replica.
        total_bytes: memory of all their caches.
    """
    end = max(meter.now for meter in meters)
    width = max(meter.width for meter in meters)
    count = max(1, int(np.ceil(end / width)))
    sums = np.zeros((count, _COLUMNS))
    bounds = np.zeros((count, len(BOUNDS)))
    for meter in meters:
        every = int(width / meter.width)
        for table, total, last in (
            (meter._sums, sums, meter._open),
            (meter._bounds, bounds, meter._open_bounds),
        ):
            filled = np.vstack((table[: meter._index], [last]))
            rows = np.add.reduceat(filled, np.arange(0, len(filled), every))[:count]
            total[: len(rows)] += rows
    # The last stretch is as long as it is.
    lengths = np.full(count, width)
    lengths[-1] = max(end - (count - 1) * width, 1e-12)
    return _merged(sums, bounds, lengths, total_bytes, -(-count // _STRETCHES))


def _merged(sums: _Floats, bounds: _Floats, lengths: _Floats, total_bytes: int, every: int) -> Timeline:
    starts = np.arange(0, len(lengths), every)
    begins = np.concatenate(([0.0], np.cumsum(lengths)))[:-1][starts]
    lengths = np.add.reduceat(lengths, starts)
    means = np.add.reduceat(sums, starts) / lengths[:, None]
    waste = means[:, UNUSED] + means[:, TAILS]
    running = means[:, HELD] - means[:, UNUSED]
    cached = means[:, CACHED]
    return Timeline(
        seconds=begins + lengths / 2,
        running=means[:, RUNNING],
        waiting=means[:, WAITING],
        running_bytes=running,
        cached_bytes=cached,
        waste_bytes=waste,
        free_bytes=total_bytes - running - cached - waste,
        bound=np.argmax(np.add.reduceat(bounds, starts), axis=1).astype(np.int8),
    )


def shares(bounds: Sequence[float]) -> Mapping[str, float]:
    """Shares of the time by what bound; without those that never did."""
    total = sum(bounds)
    return {name: span / total for name, span in zip(BOUNDS, bounds, strict=True) if span} if total else {}
