"""Accelerators as tables."""

from collections.abc import Sequence

from kvist.hardware import Accelerator, Fact, sources
from kvist.report.tables import Column, print_entries, print_facts, print_table
from kvist.units import format_size


def print_gpus(devices: Sequence[Accelerator], *, with_sources: bool) -> int:
    """Print devices, with ``with_sources`` who says each number; return exit code 0."""
    print_table(
        (
            Column(title="device"),
            Column(title="memory", number=True),
            Column(title="GB/s", number=True),
            Column(title="bf16", number=True),
            Column(title="fp8", number=True),
            Column(title="fp4", number=True),
            Column(title="link", number=True),
            Column(title="W", number=True),
        ),
        [
            (
                each.name,
                _memory(each),
                _scaled(each.bandwidth, 10**9),
                *(_scaled(each.rates.get(name), 10**12) for name in ("bf16", "fp8", "fp4")),
                _scaled(each.link, 10**9),
                _scaled(each.watts, 1),
            )
            for each in devices
        ],
    )
    print_facts(
        [
            ("memory", "as the driver reports it; with ~ the nominal GB, read as decimal; with * shared with a CPU"),
            ("rates", "dense, in 10^12 operations a second; link in GB/s, one direction; empty where sources disagree"),
        ]
    )
    if with_sources:
        _print_sources(devices)
    return 0


def _memory(device: Accelerator) -> str:
    if device.usable is not None:
        return format_size(int(device.usable.value))
    if device.nominal is None:
        return ""
    return f"{'*' if device.kind == 'unified' else '~'}{format_size(int(device.nominal.value))}"


def _scaled(fact: Fact | None, unit: int) -> str:
    return (
        "" if fact is None else f"{fact.value / unit:,.4g}" if fact.value / unit < 1000 else f"{fact.value / unit:,.0f}"
    )


def _print_sources(devices: Sequence[Accelerator]) -> None:
    print_entries(
        [
            (
                each.name,
                each.vendor,
                [
                    ", ".join(
                        f"{key.removesuffix('_bytes')} {source}" for key, source in each.to_dict()["sources"].items()
                    ),
                    *([each.note] if each.note else []),
                ],
            )
            for each in devices
        ],
        title="Who says so",
    )
    print_facts(sources().items())
