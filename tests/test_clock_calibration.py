"""Calibration: known factors come back from noisy points, and points that tell nothing are refused."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.errors import BadFile, InputError
from kvist.planning.attending import Attending, Line
from kvist.planning.roofline import StageCosts
from kvist.planning.weights import Reading
from kvist.simulation.calibration import Point, calibrate, fit, read_points
from kvist.simulation.clock import Clock, Factors

LINE = Line(until=None, operations=5e5, bytes=131072.0, chunk_bytes=131072.0)
# Of the size of Llama-3-8B in bf16 on an H100.
CLOCK = Clock(
    [
        StageCosts(
            multiplied=1.4e10,
            head=1e9,
            attending=Attending(lines=(LINE,), operations=0.0, bytes=0.0, appended=131072.0),
            reading=Reading(always=1.5e10, experts={}),
            sent=0.0,
            rate=989e12,
            bandwidth=3.35e12,
            link=None,
            stages=1,
        )
    ]
)
HEAD = "prefill_tokens,prefill_start,prefills,decodes,decode_tokens,seconds\n"
STEPS = [
    *({"prefill_tokens": tokens, "prefills": 1} for tokens in (512, 1024, 2048, 4096, 8192, 16384)),
    {"prefill_tokens": 2048, "prefills": 2, "prefill_start": 4096},
    *(
        {"decodes": count, "decode_tokens": count * length}
        for count in (1, 4, 16, 64, 256)
        for length in (256, 1024, 4096)
    ),
    {"prefill_tokens": 2048, "prefills": 1, "decodes": 64, "decode_tokens": 65536},
]


def measured(
    factors: Factors, steps: list[dict[str, int]] = STEPS, *, noise: float = 0.0, seed: int = 0
) -> list[Point]:
    clock, random = CLOCK.with_factors(factors), np.random.default_rng(seed)
    points = []
    for step in steps:
        point = Point(seconds=1.0, **step)
        seconds = clock.step(point.pieces, point.decodes, point.decode_tokens).seconds
        points.append(Point(seconds=float(seconds * np.exp(noise * random.standard_normal())), **step))
    return points


@settings(max_examples=40)
@given(st.floats(0.2, 1.0), st.floats(0.3, 1.0), st.floats(0, 0.01))
def test_factors_come_back_exactly_from_exact_points(compute: float, bandwidth: float, seconds: float) -> None:
    found = fit(CLOCK, measured(Factors(compute=compute, bandwidth=bandwidth, seconds=seconds)), source="points")
    assert found.factors.compute == pytest.approx(compute, rel=1e-6)
    assert found.factors.bandwidth == pytest.approx(bandwidth, rel=1e-6)
    assert found.factors.seconds == pytest.approx(seconds, abs=1e-8)
    assert found.after.p90 < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_factors_come_back_from_noisy_points(seed: int) -> None:
    true = Factors(compute=0.55, bandwidth=0.7, seconds=0.004)
    found = fit(CLOCK, measured(true, STEPS * 3, noise=0.05, seed=seed), source="points")
    assert found.factors.compute == pytest.approx(true.compute, rel=0.1)
    assert found.factors.bandwidth == pytest.approx(true.bandwidth, rel=0.1)
    assert found.factors.seconds == pytest.approx(true.seconds, abs=0.001)
    assert found.after.median < 0.05 < found.before.median
    assert found.after.p90 < 0.12 < found.before.p90
    assert found.points == 3 * len(STEPS)
    assert found.notes == ()


def test_a_constant_is_never_negative() -> None:
    points = [
        Point(**{**vars(point), "seconds": max(point.seconds - 0.001, point.seconds / 2)})
        for point in measured(Factors(compute=0.5, bandwidth=0.5))
    ]
    assert fit(CLOCK, points, source="points").factors.seconds == 0


def test_a_device_faster_than_its_peaks_is_told() -> None:
    found = fit(CLOCK, measured(Factors(compute=0.5, bandwidth=1.5)), source="points")
    assert found.factors.bandwidth == 1
    assert found.factors.compute == pytest.approx(0.5, rel=0.05)
    (note,) = found.notes
    assert note.startswith("the points would have the device at its peak bandwidth, or faster: ")


PROMPTS = [step for step in STEPS if "decodes" not in step]
DECODES = [step for step in STEPS if "prefills" not in step and step["decodes"] < 100]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (STEPS[:3], "points: 3 points for three factors; measure at least 4"),
        (PROMPTS, "every point is bound by compute, and the bandwidth factor shows in none"),
        (DECODES, "every point is bound by bandwidth, and the compute factor shows in none"),
        ([PROMPTS[2], DECODES[2]] * 10, "its points differ too little to tell the constant of a step from its speed"),
    ],
)
def test_points_that_do_not_tell_the_factors_are_refused(steps: list[dict[str, int]], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        fit(CLOCK, measured(Factors(compute=0.5, bandwidth=0.6, seconds=0.001), steps), source="points")
    assert caught.value.key == "calibrate"


def test_csv_and_json_lines_say_the_same(tmp_path: Path) -> None:
    points = measured(Factors(compute=0.5, bandwidth=0.6, seconds=0.001))
    rows = [vars(point) for point in points]
    as_json, as_csv = tmp_path / "points.jsonl", tmp_path / "points.csv"
    as_json.write_text("\n\n".join(json.dumps(row) for row in rows))
    names = HEAD.strip().split(",")
    as_csv.write_text(HEAD + "\n".join(",".join(repr(row[name]) for name in names) for row in rows))
    assert read_points(as_json) == read_points(as_csv) == tuple(points)
    found = calibrate(CLOCK, as_csv)
    assert found.source == str(as_csv)
    assert found.to_dict()["factors"]["compute"] == pytest.approx(0.5)


def test_columns_may_be_left_out_and_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "points.csv"
    file.write_text("\ufeffSeconds, note, prefill_tokens, decodes, decode_tokens\n0.5,first,100,,\n\n0.25,,0,2,64\n")
    assert read_points(file) == (
        Point(seconds=0.5, prefill_tokens=100, prefills=1),
        Point(seconds=0.25, decodes=2, decode_tokens=64),
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no points; write CSV with the head prefill_tokens,"),
        (HEAD, "holds no points"),
        ("decodes,decode_tokens\n1,2\n", "line 1: no column seconds"),
        ("seconds,decode\n1,2\n", "line 2: no column is called 'decode'; they are prefill_tokens,"),
        (HEAD + "1,0,1,0,0\n", "line 2: 5 cells under 6 names"),
        (HEAD + "1,0,1,0,0,nan\n", "line 2: seconds: 'nan'; what the step took, above 0"),
        (HEAD + "1,0,1,0,0,-1\n", "line 2: seconds: '-1'"),
        (HEAD + "1,0,1,0,0,\n", "line 2: seconds: None"),
        (HEAD + "1.5,0,1,0,0,1\n", "line 2: prefill_tokens: '1.5'; a whole number from 0 to"),
        (HEAD + "-1,0,1,0,0,1\n", "line 2: prefill_tokens: '-1'"),
        (HEAD + "99999999999999999999999,0,1,0,0,1\n", "line 2: prefill_tokens"),
        (HEAD + "10,0,0,0,0,1\n", "line 2: 0 prefills of 10 prefill_tokens; both or neither are 0"),
        (HEAD + "0,10,0,1,10,1\n", "line 2: prefill_start 10 of no prompt"),
        (HEAD + "0,0,0,8,4,1\n", "line 2: 8 decodes of 4 decode_tokens"),
        (HEAD + "0,0,0,0,4,1\n", "line 2: 0 decodes of 4 decode_tokens"),
        (HEAD + "0,0,0,0,0,1\n", "line 2: it computes nothing"),
        ('{"decodes": 1\n', "line 1: not JSON; one object a line"),
        ('{"decodes": 1, "decode_tokens": 3, "seconds": 1}\n[]\n', r"line 2: \[\]; an object"),
        ('{"decodes": true, "decode_tokens": 3, "seconds": 1}\n', "line 1: decodes: True"),
        ('{"decodes": 1, "decode_tokens": 3, "seconds": true}\n', "line 1: seconds: True"),
        ('{"decodes": 1, "decode_tokens": 3, "seconds": 1e999}\n', "line 1: seconds: inf"),
    ],
)
def test_bad_files_name_the_line_and_what_would_be_right(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "points"
    file.write_text(content)
    with pytest.raises(BadFile, match=f"calibrate: .*points: {message}") as caught:
        read_points(file)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"calibrate: .*nowhere: no such file"):
        read_points(tmp_path / "nowhere")
    with pytest.raises(BadFile, match="calibrate"):
        read_points(tmp_path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadFile, match="not UTF-8 text"):
        read_points(binary)


@settings(max_examples=100)
@given(st.text(max_size=200) | st.binary(max_size=200))
def test_nothing_but_a_named_error_comes_of_any_file(tmp_path_factory: Any, content: str | bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any"
    file.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    with suppress(BadFile):
        read_points(file)
