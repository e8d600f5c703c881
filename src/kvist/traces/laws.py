"""How lengths and arrivals are distributed, and how that is fitted to a trace.

Everything is drawn from the bits of PCG64 with arithmetic of our own, since NumPy promises the same bits for a seed on
every machine and in every version, and the same lengths and gaps only within one version.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvist.errors import InputError
from kvist.traces.trace import Trace

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
MOST_CV = 100.0
_MOST_TOKENS = 2**24


class Draws:
    """Random numbers for one purpose: those of another do not move when more of these are drawn."""

    def __init__(self, seed: int, purpose: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence([seed, purpose]))

    def uniform(self, count: int) -> _Floats:
        """From 0 to below 1, float64 ``[count]``: the upper 53 bits of each number."""
        bits = np.asarray(self._bits.random_raw(count), np.uint64) >> np.uint64(11)
        return bits.astype(np.float64) * 2.0**-53

    def normal(self, count: int) -> _Floats:
        """Of mean 0 and deviation 1, float64 ``[count]``, after Box and Muller (1958)."""
        one, other = self.uniform(count), self.uniform(count)
        numbers: _Floats = np.sqrt(-2 * np.log1p(-one)) * np.cos(2 * np.pi * other)
        return numbers

    def exponential(self, count: int) -> _Floats:
        """Of mean 1, float64 ``[count]``."""
        numbers: _Floats = -np.log1p(-self.uniform(count))
        return numbers

    def gamma(self, count: int, shape: float) -> _Floats:
        """Of a shape and scale 1, float64 ``[count]``, after Marsaglia and Tsang (2000)."""
        boosted = shape if shape >= 1 else shape + 1
        d = boosted - 1 / 3
        c = 1 / math.sqrt(9 * d)
        found = np.empty(count)
        open_: _Ints = np.arange(count)
        while open_.size:
            x, u = self.normal(open_.size), self.uniform(open_.size)
            v = np.maximum(0.0, 1 + c * x) ** 3
            positive = np.where(v > 0, v, 1.0)
            taken = (v > 0) & (np.log1p(-u) < 0.5 * x * x + d - d * v + d * np.log(positive))
            found[open_[taken]] = d * v[taken]
            open_ = open_[~taken]
        if shape < 1:
            found *= (1 - self.uniform(count)) ** (1 / shape)
        return found


@dataclass(frozen=True, kw_only=True)
class Lognormal:
    """Lengths whose logarithms are normal.

    Attributes:
        mean: tokens.
        cv: standard deviation by mean; 0 makes all equal.
    """

    mean: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= _MOST_TOKENS:
            raise InputError(f"mean: a mean length of {self.mean:g} tokens; 1 to {_MOST_TOKENS:,}", key="mean")
        require_cv(self.cv, key="length_cv")

    @classmethod
    def fitted(cls, tokens: _Ints) -> "Lognormal":
        """With the mean and the deviation of the logarithms of given lengths."""
        logs = np.log(tokens)
        variance = float(logs.var())
        return cls(
            mean=max(1.0, math.exp(float(logs.mean()) + variance / 2)), cv=min(MOST_CV, math.sqrt(math.expm1(variance)))
        )

    def draw(self, draws: Draws, count: int) -> _Ints:
        """Lengths of at least 1, int64 ``[count]``."""
        variance = math.log1p(self.cv**2)
        if not variance:
            return np.full(count, round(self.mean), np.int64)
        logs = math.log(self.mean) - variance / 2 + math.sqrt(variance) * draws.normal(count)
        return np.clip(np.rint(np.exp(logs)), 1, _MOST_TOKENS).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Empirical:
    """Lengths as a trace has them, each as likely as it is there.

    Attributes:
        tokens: int64 ``[lengths]``, at least 1 each.
    """

    tokens: _Ints

    def draw(self, draws: Draws, count: int) -> _Ints:
        """Some of the lengths, int64 ``[count]``."""
        return self.tokens[(draws.uniform(count) * self.tokens.size).astype(np.int64)]


Law = Lognormal | Empirical


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Independent gaps between arrivals, gamma distributed.

    Attributes:
        rate: a second.
        cv: coefficient of variation of the gaps: 1 is a Poisson process, 0 a clock, more comes in bursts.
    """

    rate: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        if not 1e-4 <= self.rate <= 1e6:
            raise InputError(f"rate: {self.rate:g} requests a second; 0.0001 to 1,000,000", key="rate")
        require_cv(self.cv, key="cv")

    @classmethod
    def fitted(cls, trace: Trace) -> "Arrivals":
        """With a trace's rate, and the coefficient of variation of its gaps.

        Raises:
            InputError: the trace names no times, or all at one moment.
        """
        span = float(trace.arrivals[-1]) if trace.timed and len(trace) > 1 else 0.0
        if not span:
            raise InputError(f"like: {trace.source} names no times of arrival; give `rate`", key="like")
        gaps = np.diff(trace.arrivals)
        return cls(rate=gaps.size / span, cv=min(MOST_CV, float(gaps.std() / gaps.mean())))

    def draw(self, draws: Draws, count: int, *, slower: float = 1.0) -> _Ints:
        """Moments in microseconds, the first 0, ascending, int64 ``[count]``, at a rate so many times lower.

        Whole microseconds add up without an error that depends on the machine.
        """
        if self.cv == 0:
            gaps = np.ones(count)
        elif self.cv == 1:
            gaps = draws.exponential(count)
        else:
            gaps = draws.gamma(count, self.cv**-2) * self.cv**2
        moments: _Ints = np.cumsum(np.rint(gaps * (1e6 * slower / self.rate)).astype(np.int64))
        moments -= moments[0].copy()
        return moments


def require_cv(cv: float, *, key: str) -> None:
    """Refuse a coefficient of variation that is none.

    Raises:
        InputError: it is below 0 or above 100.
    """
    if not 0 <= cv <= MOST_CV:
        raise InputError(f"{key}: a coefficient of variation of {cv:g}; 0 to {MOST_CV:g}", key=key)
