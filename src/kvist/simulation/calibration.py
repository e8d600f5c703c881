"""Measured steps, and how far below its peaks a device must run for a clock to tell them.

A file of points is CSV with a head, or JSON lines, one step a row::

    prefill_tokens,prefill_start,prefills,decodes,decode_tokens,seconds
    2048,0,1,0,0,0.0412
    0,0,0,64,65536,0.0101

Each point takes ``max(compute / e, bandwidth / g) + link + constant`` seconds, where compute, bandwidth and link are
the clock's at the peaks. The factors e and g, at most 1, and the constant, at least 0, are those that make the sum of
squared relative errors least. Which points compute longer than they read depends on ``e / g`` alone: it is tried for
every division of the points, ordered by ``compute / bandwidth``, and each is a linear problem with a closed solution.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.errors import BadFile, InputError
from kvist.simulation.clock import Ceilings, Clock, Factors, Piece
from kvist.spec.files import not_regular
from kvist.units import MAX_TOKENS

# Three numbers are fitted, and one point more says how well.
LEAST_POINTS = 4
_MOST_POINTS = 10_000
_MOST_BYTES = 2**24
_COUNTS = ("prefill_tokens", "prefill_start", "prefills", "decodes", "decode_tokens")
_COLUMNS = (*_COUNTS, "seconds", "note")
# Part of the constant's column that the other two leave unexplained, below which noise alone would decide on it.
_LEAST_INDEPENDENT = 1e-4

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A step that was measured.

    Attributes:
        seconds: that it took.
        prefill_tokens: of each prompt, computed in the step.
        prefill_start: tokens of each prompt that the cache held before.
        prefills: prompts.
        decodes: sequences that one more token was computed of.
        decode_tokens: their lengths added up, the token that is computed included.
    """

    seconds: float
    prefill_tokens: int = 0
    prefill_start: int = 0
    prefills: int = 0
    decodes: int = 0
    decode_tokens: int = 0

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Its prompts."""
        return (Piece(self.prefill_start, self.prefill_tokens),) * self.prefills


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Relative errors ``|told - measured| / measured`` of the points."""

    median: float
    p90: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was fitted, and how well.

    Attributes:
        source: the file.
        points: how many were measured.
        factors: for :meth:`Clock.with_factors`.
        before: errors of the clock as it was.
        after: errors with the factors.
        notes: what a reader should know, a sentence each.
    """

    source: str
    points: int
    factors: Factors
    before: Spread
    after: Spread
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As in the JSON of ``kvist simulate``."""
        return {**asdict(self), "notes": list(self.notes)}


def calibrate(clock: Clock, path: str | Path) -> Calibration:
    """Fit the factors of a clock to a file of measured points.

    Raises:
        BadFile: the file is not there or a row says no step; names the line and what would be right.
        InputError: the points are too few or too much alike to fit; says which are lacking.
    """
    return fit(clock, read_points(path), source=str(path))


def fit(clock: Clock, points: Sequence[Point], *, source: str) -> Calibration:
    """Fit the factors of a clock to measured points; see the module.

    Raises:
        InputError: the points are too few or too much alike to fit; says which are lacking.
    """
    if len(points) < LEAST_POINTS:
        raise _unfit(source, f"{len(points)} points for three factors; measure at least {LEAST_POINTS}")
    peaks = np.array([_ceilings(clock, point) for point in points], np.float64)
    measured = np.array([point.seconds for point in points], np.float64)
    compute, bandwidth, link = peaks.T
    _require_both(source, int(np.sum(compute >= bandwidth)), len(points))
    factors = _least_squares(compute, bandwidth, link, measured)
    if factors is None:
        raise _unfit(
            source,
            "its points differ too little to tell the constant of a step from its speed; measure prompts of several "
            "sizes, and decodes of several numbers and lengths",
        )
    return Calibration(
        source=source,
        points=len(points),
        factors=factors,
        before=_spread(clock, points, measured),
        after=_spread(clock.with_factors(factors), points, measured),
        notes=_notes(factors),
    )


def read_points(path: str | Path) -> tuple[Point, ...]:
    """Read measured points, CSV with a head or JSON lines.

    Raises:
        BadFile: it is not there, or a row says no step; names the line and what would be right.
    """
    source = str(path)
    try:
        file = Path(source).expanduser()
        if not file.is_file():
            if file.exists():
                raise not_regular(source, file.stat().st_mode, key="calibrate")
            raise BadFile(f"calibrate: {source}: no such file", key="calibrate")
        if file.stat().st_size > _MOST_BYTES:
            raise _bad(source, f"more than {_MOST_BYTES >> 20} MiB; {_MOST_POINTS:,} points do")
        text = file.read_text(encoding="utf-8-sig")
    except RuntimeError as error:
        raise BadFile(f"calibrate: {source}: no such home directory", key="calibrate") from error
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        raise BadFile(f"calibrate: {source}: {why}", key="calibrate") from error
    rows = _json_rows(text, source) if text.lstrip().startswith("{") else _csv_rows(text, source)
    points = tuple(_point(row, source, number) for number, row in rows)
    if not points:
        raise _bad(source, f"holds no points; write CSV with the head {','.join((*_COUNTS, 'seconds'))}")
    if len(points) > _MOST_POINTS:
        raise _bad(source, f"{len(points):,} points; at most {_MOST_POINTS:,}")
    return points


def _json_rows(text: str, source: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _bad(source, f"line {number}: not JSON; one object a line") from error
        if not isinstance(row, dict):
            raise _bad(source, f"line {number}: {_short(row)}; an object with {', '.join(_COLUMNS)}")
        yield number, row


def _csv_rows(text: str, source: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.reader(text.splitlines())
    try:
        head = [name.strip().casefold() for name in next(reader, [])]
        if head and "seconds" not in head:
            raise _bad(
                source, f"line 1: no column seconds in {_short(','.join(head))}; columns are {', '.join(_COLUMNS)}"
            )
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            if len(row) != len(head):
                raise _bad(source, f"line {reader.line_num}: {len(row)} cells under {len(head)} names")
            yield reader.line_num, {name: cell.strip() for name, cell in zip(head, row, strict=True) if cell.strip()}
    except csv.Error as error:
        raise _bad(source, f"line {reader.line_num}: {error}") from error


def _point(row: Mapping[str, Any], source: str, number: int) -> Point:
    where = f"line {number}"
    for name in row:
        if name not in _COLUMNS:
            raise _bad(source, f"{where}: no column is called {_short(name)}; they are {', '.join(_COLUMNS)}")
    counts = {name: _count(row[name], source, f"{where}: {name}") for name in _COUNTS if row.get(name) is not None}
    seconds = _seconds(row.get("seconds"), source, where)
    if counts.get("prefill_tokens"):
        counts.setdefault("prefills", 1)
    point = Point(seconds=seconds, **counts)
    if bool(point.prefills) != bool(point.prefill_tokens):
        raise _bad(
            source,
            f"{where}: {point.prefills} prefills of {point.prefill_tokens} prefill_tokens; both or neither are 0",
        )
    if point.prefill_start and not point.prefills:
        raise _bad(source, f"{where}: prefill_start {point.prefill_start} of no prompt; say prefill_tokens too")
    if point.decode_tokens < point.decodes or (point.decode_tokens and not point.decodes):
        raise _bad(
            source,
            f"{where}: {point.decodes} decodes of {point.decode_tokens} decode_tokens; these are the lengths of all "
            f"sequences together, at least 1 each",
        )
    if not point.prefills and not point.decodes:
        raise _bad(source, f"{where}: it computes nothing; say prefill_tokens, or decodes and decode_tokens")
    return point


def _count(value: object, source: str, where: str) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
        raise _bad(source, f"{where}: {_short(value)}; a whole number from 0 to {MAX_TOKENS}")
    return value


def _seconds(value: object, source: str, where: str) -> float:
    try:
        seconds = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise _bad(source, f"{where}: seconds: {_short(value)}; what the step took, above 0")
    return seconds


def _ceilings(clock: Clock, point: Point) -> Ceilings:
    return clock.ceilings(point.pieces, point.decodes, point.decode_tokens)


def _require_both(source: str, computing: int, points: int) -> None:
    """Each factor shows only in steps that its ceiling binds."""
    if computing == 0:
        raise _unfit(
            source, "every point is bound by bandwidth, and the compute factor shows in none; add prompts of 1,000s"
        )
    if computing == points:
        raise _unfit(
            source, "every point is bound by compute, and the bandwidth factor shows in none; add steps that decode"
        )


def _least_squares(compute: _Floats, bandwidth: _Floats, link: _Floats, measured: _Floats) -> Factors | None:
    """The factors, all ``[points]`` in seconds; None where no division of the points tells them apart."""
    intensity = compute / bandwidth
    order = np.argsort(-intensity, kind="stable")
    intensity = intensity[order]
    compute, bandwidth, link, measured = (each[order] for each in (compute, bandwidth, link, measured))
    # Relative to the measured seconds: (a x compute | b x bandwidth) + c = 1 - link.
    by_compute, by_bandwidth, constant, wanted = (
        each / measured for each in (compute, bandwidth, np.ones_like(measured), measured - link)
    )
    before = slice(None, -1)

    def first(values: _Floats) -> _Floats:
        """Sums over the first 1, 2, … points but not all, ``[divisions]``."""
        return np.cumsum(values)[before]

    def last(values: _Floats) -> _Floats:
        return np.cumsum(values[::-1])[::-1][1:]

    aa, ac, ay = first(by_compute**2), first(by_compute * constant), first(by_compute * wanted)
    bb, bc, by = last(by_bandwidth**2), last(by_bandwidth * constant), last(by_bandwidth * wanted)
    cc, cy = float(constant @ constant), float(constant @ wanted)
    # Points of one intensity are all on one side; what the other two leave of the constant's column tells it from them.
    told = (intensity[:-1] > intensity[1:] * (1 + 1e-9)) & (cc - ac**2 / aa - bc**2 / bb > _LEAST_INDEPENDENT * cc)
    best, least = None, np.inf
    for a_free, b_free in ((True, True), (True, False), (False, True), (False, False)):
        # A device that is at its peak leaves the constant all but what that takes.
        alone = cc - a_free * ac**2 / aa - b_free * bc**2 / bb
        left = cy - (ac * ay / aa if a_free else ac) - (bc * by / bb if b_free else bc)
        seconds = np.maximum(0.0, left / np.where(told, alone, 1.0))
        a, b = np.maximum(1.0, (ay - ac * seconds) / aa), np.maximum(1.0, (by - bc * seconds) / bb)
        for index in np.flatnonzero(told):
            misses = np.maximum(a[index] * by_compute, b[index] * by_bandwidth) + seconds[index] * constant - wanted
            loss = float(misses @ misses)
            if loss < least * (1 - 1e-12):
                least = loss
                best = Factors(
                    compute=1 / float(a[index]), bandwidth=1 / float(b[index]), seconds=float(seconds[index])
                )
    return best


def _spread(clock: Clock, points: Sequence[Point], measured: _Floats) -> Spread:
    told = [clock.step(point.pieces, point.decodes, point.decode_tokens).seconds for point in points]
    median, p90 = np.percentile(np.abs(np.array(told) - measured) / measured, [50, 90])
    return Spread(median=float(median), p90=float(p90))


def _notes(factors: Factors) -> tuple[str, ...]:
    return tuple(
        f"the points would have the device at its peak {what}, or faster: they do not tell it from the constant of a "
        f"step, or another device, model or format was measured; {more} would"
        for what, value, more in (
            ("rate", factors.compute, "prompts of several sizes"),
            ("bandwidth", factors.bandwidth, "decodes of several numbers of sequences"),
        )
        if value >= 1
    )


def _unfit(source: str, why: str) -> InputError:
    return InputError(f"calibrate: {source}: {why}", key="calibrate")


def _bad(source: str, why: str) -> BadFile:
    return BadFile(f"calibrate: {source}: {why}", key="calibrate")


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:56]}…"
