"""Accelerators: the list, its sources, and what a name means."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvist.cli import main
from kvist.errors import InputError
from kvist.hardware import accelerators, accelerators_with, gpus_named, sources

DATA = Path(__file__).parents[2] / "shared" / "data" / "accelerators.json"
# What the shared list calls a number, what ours does, and how many of our units are one of its.
COLUMNS = {
    "memory_nominal_gb": ("nominal_memory_bytes", 10**9),
    "bandwidth_gb_s": ("bandwidth_bytes_per_second", 10**9),
    "dense_bf16_tflops": ("bf16_operations_per_second", 10**12),
    "dense_fp8_tflops": ("fp8_operations_per_second", 10**12),
    "dense_int8_tops": ("int8_operations_per_second", 10**12),
    "dense_fp4_tflops": ("fp4_operations_per_second", 10**12),
    "interconnect_gb_s_per_direction": ("link_bytes_per_second", 10**9),
    "tdp_w": ("watts", 1),
}


def test_every_number_names_a_source_that_is_explained() -> None:
    rows = [each.to_dict() for each in accelerators()]
    assert len(rows) == len({row["name"] for row in rows}) == 104
    for row in rows:
        for key, value in row.items():
            if key.endswith(("_bytes", "_per_second", "watts")) and key != "memory_bytes":
                assert (value is None) == (key not in row["sources"]), (row["name"], key)
        assert {source.partition(":")[0] for source in row["sources"].values()} <= set(sources())
        assert row["sources"]


@pytest.mark.skipif(not DATA.is_file(), reason=f"{DATA} is not there")
def test_numbers_are_those_of_the_shared_list_and_unknown_where_it_is_silent() -> None:
    ours = {each.name: each.to_dict() for each in accelerators()}
    for theirs in json.loads(DATA.read_text())["accelerators"]:
        row = ours[theirs["name"]]
        assert (row["vendor"], row["class"]) == (theirs["vendor"], theirs["class"])
        for column, (key, unit) in COLUMNS.items():
            expected = theirs[column] and round(theirs[column]["value"] * unit)
            assert row[key] == expected, (theirs["name"], column)
        usable = theirs["memory_usable_gib"]
        # Whole MiB as nvidia-smi prints them; the shared list rounds to a thousandth of a GiB.
        assert (usable is None) == (row["usable_memory_bytes"] is None)
        if usable is not None:
            assert row["usable_memory_bytes"] / 2**30 == pytest.approx(usable["value"], abs=1e-3)


def test_nominal_gigabytes_read_as_decimal_never_promise_more_than_the_driver_reports() -> None:
    both = [each for each in accelerators() if each.usable and each.nominal]
    assert len(both) >= 15
    assert all(each.nominal.value <= each.usable.value for each in both if each.nominal and each.usable)


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("H100", "H100 SXM5 80GB", None),
        ("nvidia h100", "H100 SXM5 80GB", None),
        ("H100x8", "H100 SXM5 80GB", 8),
        ("8 x h100", "H100 SXM5 80GB", 8),
        ("H100 pcie", "H100 PCIe 80GB", None),
        ("h100-nvl", "H100 NVL 94GB", None),
        ("A100-40GB", "A100 SXM4 40GB", None),
        ("MI300X", "Instinct MI300X", None),
        ("amd mi300xx8", "Instinct MI300X", 8),
        ("4090", "GeForce RTX 4090", None),
        ("RTX 3090x2", "GeForce RTX 3090", 2),
        ("l4", "L4", None),
        ("L40", "L40", None),
        ("TPU7x", "TPU7x (Ironwood)", None),
        ("tpu7xx4", "TPU7x (Ironwood)", 4),
        ("m3 max", "Apple M3 Max", None),
    ],
)
def test_names_go_without_case_vendor_and_brand(text: str, name: str, count: int | None) -> None:
    found = gpus_named(text)
    assert (found.accelerator.name, found.count) == (name, count)


def test_every_name_in_full_means_itself() -> None:
    for each in accelerators():
        assert gpus_named(each.name).accelerator is each
        assert gpus_named(f"{each.vendor} {each.name}".upper()).accelerator is each
        assert gpus_named(f"{each.name} x 4").count == 4
        for short in each.also:
            assert gpus_named(short).accelerator is each


def test_a_short_name_says_what_else_it_could_mean() -> None:
    assert gpus_named("A100").shortened == ("A100 SXM4 40GB", "A100 PCIe 80GB")
    assert gpus_named("H100 SXM5 80GB").shortened == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("H1000", r"gpu: no device 'H1000'; nearest are H100 SXM5 80GB"),
        ("GH200", r"gpu: 'GH200' may be GH200 96GB, GH200 141GB: write one in full"),
        ("rtx", r"gpu: 'rtx' may be .* and 17 more: write one in full"),
        ("", r"gpu: '' names no device; such as H100 or H100x8"),
        (None, r"gpu: None names no device"),
        ("H100x0", r"gpu: '0' devices; from 1 to 65536"),
        ("H100x99999999999", r"gpu: '99999999999' devices; from 1 to"),
        ("rtx 9999", r"gpu: no device 'rtx 9999'; nearest are GeForce RTX"),
        ("x" * 500, r"gpu: no device 'x+…"),
    ],
)
def test_names_of_none_or_several_list_the_nearest(text: Any, says: str) -> None:
    with pytest.raises(InputError, match=says) as raised:
        gpus_named(text)
    assert "\n" not in str(raised.value)


def test_memory_is_what_the_driver_reports_or_the_nominal_number_read_low() -> None:
    # nvidia-smi prints 81,559 MiB for an H100 of "80 GB"; of an L20 nothing is known but "48 GB".
    assert gpus_named("H100").accelerator.memory().value == 81_559 * 2**20
    assert gpus_named("L20").accelerator.memory().value == 48 * 10**9
    with pytest.raises(InputError, match=r"the memory of Apple M3 Max is shared with its CPU.*say it with `memory`"):
        gpus_named("Apple M3 Max").accelerator.memory()


def test_the_command_lists_filters_and_prints_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus", "nvidia", "consumer", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows
    assert all(row["vendor"] == "NVIDIA" and row["class"] == "consumer" for row in rows)
    assert len(rows) == len(accelerators_with(["nvidia", "CONSUMER"]))
    for words in (["gpus"], ["gpus", "h100", "--sources"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert "H100 SXM5 80GB" in out
        assert max(map(len, out.splitlines())) <= 80
