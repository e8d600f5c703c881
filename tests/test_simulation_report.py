"""What a simulation found, in the terminal and on its page."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_simulations import sample, with_stretches, without_timelines

from kvist.errors import BadFile
from kvist.report.simulation_page import page, write_page
from kvist.report.simulation_tables import comparison, format_seconds, format_share, print_simulation
from kvist.simulation.results import BOUNDS, SimulationResult
from kvist.units import format_size

THREE = sample()
ONE = sample(["paged"], requests=200)
CACHE_ONLY = sample(clock=False)


def printed(result: SimulationResult, capsys: pytest.CaptureFixture[str]) -> str:
    print_simulation(result)
    return capsys.readouterr().out


def cells(text: str) -> dict[str, list[str]]:
    """Rows of the printed table by their names."""
    return {parts[0]: parts[1:] for line in text.splitlines() if len(parts := re.split(r" {2,}", line.strip())) > 1}


@pytest.mark.parametrize("result", [THREE, ONE, CACHE_ONLY, without_timelines(THREE)])
def test_tables_fit_a_terminal_of_80_columns(result: SimulationResult, capsys: pytest.CaptureFixture[str]) -> None:
    assert max(map(len, printed(result, capsys).splitlines())) <= 80


def test_policies_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    rows = cells(printed(THREE, capsys))
    assert rows["policy"] == ["slab", "paged", "prefix"]
    slab, prefix = THREE.policies["slab"], THREE.policies["prefix"]
    assert slab.ttft is not None
    assert rows["hit ratio"] == ["0 %", "0 %", format_share(prefix.hit_ratio)]
    assert rows["finished"] == ["3,000"] * 3
    assert rows["waste of reserved memory"][0] == format_share(slab.waste_ratio)
    assert rows["reserved, peak"][0] == format_size(slab.reserved_bytes_peak)
    assert rows["TTFT, p50"][0] == format_seconds(slab.ttft.p50)
    assert rows["TTFT, p99"][0] == format_seconds(slab.ttft.p99)
    assert rows["bound by memory"][0] == format_share(slab.bound["memory"])
    # That none was refused is worth a row; that slots never bound is not.
    assert rows["refused"] == ["0", "0", "0"]
    assert "bound by slots" not in rows


def test_without_a_clock_there_are_no_times(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(CACHE_ONLY, capsys)
    assert "hit ratio" in text
    assert "from host" in text
    for absent in ("TTFT", "TPOT", "tokens/s", "makespan", "bound", "running", "preempted", "machine", "waste"):
        assert absent not in text


def test_many_policies_are_printed_in_several_tables(capsys: pytest.CaptureFixture[str]) -> None:
    policies = {f"prefix, {order}, {size} GiB": THREE.policies["prefix"] for order in "abc" for size in (10, 20, 40)}
    text = printed(replace(THREE, policies=policies), capsys)
    assert max(map(len, text.splitlines())) <= 80
    for name in policies:
        assert text.count(name) == 1


def test_a_policy_that_finished_nothing_has_no_percentiles(capsys: pytest.CaptureFixture[str]) -> None:
    none = replace(ONE.policies["paged"], finished=0, refused=200)
    text = printed(replace(ONE, policies={"paged": none}), capsys)
    assert "TTFT" not in text
    assert cells(text)["refused"] == ["200"]


def test_no_policies_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    empty = replace(ONE, policies={})
    assert "llama-3-8b" in printed(empty, capsys)
    assert data_of(page(empty))["policies"] == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (0.000_41, "0.41 ms"), (0.0123, "12.3 ms"), (0.312, "312 ms"), (0.9996, "1.00 s"),
        (4.519, "4.52 s"), (9.996, "10.0 s"), (99.96, "100 s"), (119.94, "2.00 min"), (3546, "59.1 min"),
        (100_000, "27.8 h"), (7.2e6, "2,000 h"),
    ],
)  # fmt: skip
def test_times_have_three_digits_and_the_unit_that_suits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(1e-3, 1e7))
def test_a_printed_time_is_within_half_a_percent(seconds: float) -> None:
    number, unit = format_seconds(seconds).split()
    size = {"ms": 1e-3, "s": 1, "min": 60, "h": 3600}[unit]
    assert float(number.replace(",", "")) * size == pytest.approx(seconds, rel=0.006)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (0.00001, "< 0.01 %"), (0.0004, "0.04 %"), (0.0096, "1.0 %"), (0.3736, "37.4 %"), (1, "100.0 %")],
)
def test_a_little_is_not_nothing(share: float, text: str) -> None:
    assert format_share(share) == text


class _Tags(HTMLParser):
    """Counts tags, and holds that those which must be closed are, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags_of(text: str) -> _Tags:
    tags = _Tags()
    tags.feed(text)
    tags.close()
    return tags


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r"const DATA = (.*);\n", text)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.mark.parametrize("result", [THREE, ONE, CACHE_ONLY, with_stretches(THREE, 0), with_stretches(THREE, 1)])
def test_the_page_is_html_that_stands_alone(result: SimulationResult) -> None:
    text = page(result)
    tags = tags_of(text)
    assert tags.open == []
    assert tags.seen.count("script") == 1
    # Names of XML namespaces are no addresses.
    assert not re.search(
        r"https?://|@import|url\(|fetch\(|src=|<link (?!rel=\"icon\" href=\"data:)",
        text.replace("http://www.w3.org/2000/svg", ""),
    )


def test_the_page_holds_the_numbers() -> None:
    data = data_of(page(THREE))
    assert [policy["name"] for policy in data["policies"]] == ["slab", "paged", "prefix"]
    assert data["rows"] == [
        [name, list(row)] for group in comparison(list(THREE.policies.values())) for name, row in group
    ]
    for policy in data["policies"]:
        whole = THREE.policies[policy["name"]]
        assert whole.timeline is not None
        assert whole.ttft is not None
        assert policy["hit_ratio"] == whole.hit_ratio
        assert policy["ttft"]["p99"] == whole.ttft.p99
        line = policy["timeline"]
        owners = zip(*(line[f"{owner}_bytes"] for owner in ("running", "cached", "waste", "free")), strict=True)
        # Each is rounded to a byte.
        assert all(sum(stretch) == pytest.approx(whole.cache_bytes, abs=2) for stretch in owners)
        assert [BOUNDS[code] for code in line["bound"]] == whole.timeline.to_dict()["bound"]


def test_timelines_without_a_stretch_are_not_drawn() -> None:
    assert all(policy["timeline"] is None for policy in data_of(page(with_stretches(THREE, 0)))["policies"])
    assert all(policy["timeline"] is None for policy in data_of(page(CACHE_ONLY))["policies"])


@pytest.mark.parametrize(
    "name", ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<!--<script>", '"&\\u2028']
)
def test_no_name_becomes_part_of_the_page(name: str) -> None:
    policies = {name: replace(ONE.policies["paged"], policy=name, tier_hit_tokens={name: 1}, waste={name: 0.5})}
    hostile = replace(ONE, trace=name, model=name, format=name, machine=name, notes=(name,), policies=policies)
    text, plain = page(hostile), page(ONE)
    assert tags_of(text).seen == tags_of(plain).seen
    assert text.count("<") == plain.count("<")
    data = data_of(text)
    assert data["trace"] == data["model"] == data["policies"][0]["name"] == data["notes"][0] == name


def test_the_page_puts_texts_in_as_texts_only() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", page(ONE))


def test_the_page_is_written(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    # As Python hands on a file's name with a byte that is no letter.
    write_page(replace(ONE, trace="caf\udce9.jsonl"), str(path))
    assert data_of(path.read_text(encoding="utf-8"))["trace"] == "caf\udce9.jsonl"
    with pytest.raises(BadFile, match="cannot be written: No such file"):
        write_page(ONE, str(tmp_path / "nowhere/page.html"))
