"""Accelerators as data: memory, bandwidth and rates of 104 devices, each number with its source.

The numbers lie in ``accelerators.json``. A number on which sources disagree or are silent is not there; a plan that
needs it stops with an error that names it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvist.errors import InputError

_DATA = Path(__file__).with_name("accelerators.json")
_MAX_COUNT = 65_536
_NEAREST = 5
# How many of a device, before or behind its name.
_COUNTED = (
    (re.compile(r"(.+?)(?:[xX×]|\s+[xX×]\s*)([0-9]+)", re.DOTALL), 1, 2),
    (re.compile(r"([0-9]+)\s*[xX×]\s*(\S.*)", re.DOTALL), 2, 1),
)

# Brands and vendors that people leave out; none of them tells two devices apart.
_BRANDS = frozenset(
    {"nvidia", "amd", "intel", "google", "aws", "amazon", "huawei", "apple", "cloud"}
    | {"geforce", "tesla", "quadro", "instinct", "radeon", "gpu", "per"}
)
# What a number of the file is multiplied by to become bytes or bytes a second.
_SCALES = {"memory_gb": 10**9, "usable_mib": 2**20, "gb_per_s": 10**9, "link_gb_per_s": 10**9}
_RATES = {
    "f32": "f32_tflops",
    "bf16": "bf16_tflops",
    "fp8": "fp8_tflops",
    "int8": "int8_tops",
    "fp4": "fp4_tflops",
}


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A number and who says so; ``source`` is a key of :func:`sources`, before its colon."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device.

    Attributes:
        name: as in the list.
        vendor: who makes it.
        kind: ``datacenter``, ``workstation``, ``consumer``, ``unified`` (memory shared with a CPU), ``tpu``, ``npu``.
        also: shorter names that mean it.
        nominal: marketing number of its memory, in bytes when its GB are read as decimal ones.
        usable: bytes of memory that its driver reports in total.
        bandwidth: peak bytes a second between it and its memory.
        rates: peak operations a second, dense, by type: ``f32``, ``bf16``, ``fp8``, ``int8``, ``fp4``.
        link: bytes a second in one direction to its peers.
        link_name: such as ``NVLink 4``.
        watts: its power limit.
        memory_kind: such as ``HBM3``.
        note: what must be known beside the numbers.
    """

    name: str
    vendor: str
    kind: str
    also: tuple[str, ...]
    nominal: Fact | None
    usable: Fact | None
    bandwidth: Fact | None
    rates: Mapping[str, Fact]
    link: Fact | None
    link_name: str | None
    watts: Fact | None
    memory_kind: str | None
    note: str | None

    @property
    def plannable(self) -> bool:
        """Whether its memory is known and its own."""
        return self.kind != "unified" and (self.usable or self.nominal) is not None

    def memory(self) -> Fact:
        """Bytes of its memory: what the driver reports, else its nominal GB read as decimal ones.

        A nominal "80 GB" may be GiB or not, and error correction may take its part; read as decimal, it was at or
        below what the driver reports for every device of the list of which both are known.

        Raises:
            InputError: it is unknown, or shared with a CPU.
        """
        if self.kind == "unified":
            raise InputError(
                f"gpu: the memory of {self.name} is shared with its CPU, and how much of it a model may have is not "
                f"known: say it with `memory`",
                key="gpu",
            )
        fact = self.usable or self.nominal
        if fact is None:
            raise self.unknown("memory")
        return fact

    def unknown(self, what: str) -> InputError:
        """Return the error for a number that is not in the list."""
        return InputError(
            f"gpu: the {what} of {self.name} is not known (public sources are silent or disagree); "
            f"choose another device of `kvist gpus`, or plan with `memory` alone",
            key="gpu",
        )

    def to_dict(self) -> dict[str, Any]:
        """A row of ``kvist gpus --json``; unknown numbers are null."""
        facts = {
            "nominal_memory_bytes": self.nominal,
            "usable_memory_bytes": self.usable,
            "bandwidth_bytes_per_second": self.bandwidth,
            **{f"{name}_operations_per_second": self.rates.get(name) for name in _RATES},
            "link_bytes_per_second": self.link,
            "watts": self.watts,
        }
        return {
            "name": self.name,
            "vendor": self.vendor,
            "class": self.kind,
            "also": list(self.also),
            "memory_bytes": int(self.memory().value) if self.plannable else None,
            **{key: None if fact is None else int(fact.value) for key, fact in facts.items()},
            "link": self.link_name,
            "memory_kind": self.memory_kind,
            "note": self.note,
            "sources": {key: fact.source for key, fact in facts.items() if fact is not None},
        }


def accelerators_with(words: Sequence[str]) -> tuple[Accelerator, ...]:
    """Devices whose name, vendor or class has every one of these words, whatever their case.

    Raises:
        InputError: none has.
    """
    wanted = [word.casefold() for word in words]
    found = tuple(
        each
        for each in accelerators()
        if all(word in " ".join((each.vendor, each.name, *each.also, each.kind)).casefold() for word in wanted)
    )
    if not found:
        raise InputError(
            f"gpus: no device has {' '.join(map(_short, words))}; `kvist gpus` alone lists all", key="words"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """What ``H100x8`` names: a device and how many; ``count`` is None where none is said.

    ``shortened`` lists the other devices that the name could have meant.
    """

    accelerator: Accelerator
    count: int | None = None
    shortened: tuple[str, ...] = ()


@cache
def accelerators() -> tuple[Accelerator, ...]:
    """All devices, in the order of the list."""
    return tuple(_accelerator(row) for row in _content()["accelerators"])


def sources() -> dict[str, str]:
    """What the keys of sources stand for."""
    return dict(_content()["sources"])


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_DATA.read_text(encoding="utf-8"))
    return content


def _accelerator(row: Mapping[str, Any]) -> Accelerator:
    def fact(key: str, scale: float) -> Fact | None:
        entry = row.get(key)
        return None if entry is None else Fact(value=round(entry[0] * scale), source=entry[1])

    sized = {key: fact(key, scale) for key, scale in _SCALES.items()}
    rates = {name: fact(key, 10**12) for name, key in _RATES.items()}
    link = row.get("link")
    return Accelerator(
        name=row["name"],
        vendor=row["vendor"],
        kind=row["class"],
        also=tuple(row.get("also", ())),
        nominal=sized["memory_gb"],
        usable=sized["usable_mib"],
        bandwidth=sized["gb_per_s"],
        rates={name: rate for name, rate in rates.items() if rate is not None},
        link=sized["link_gb_per_s"],
        link_name=None if link is None else link[0],
        watts=fact("watts", 1),
        memory_kind=row.get("memory_kind"),
        note=row.get("note"),
    )


def gpus_named(text: object, *, key: str = "gpu") -> Gpus:
    """Read ``H100``, ``nvidia a100 40gb`` or ``H100x8``: case, vendor and brand are optional.

    Raises:
        InputError: no device has this name, or several do; lists the nearest.
    """
    if not isinstance(text, str) or not text.strip():
        raise InputError(
            f"{key}: {_short(text)} names no device; such as H100 or H100x8 (`kvist gpus` lists them)", key=key
        )
    name, count = _without_count(text.strip(), key)
    found = _matches(name)
    exact = [device for device in found if _plain(name) in map(_plain, (device.name, *device.also))]
    if len(exact) == 1:
        others = tuple(device.name for device in _of_words(_words(name)) if device is not exact[0])
        in_full = _plain(name) == _plain(exact[0].name)
        return Gpus(accelerator=exact[0], count=count, shortened=() if in_full else others)
    if len(found) == 1:
        return Gpus(accelerator=found[0], count=count)
    if found:
        listed = ", ".join(device.name for device in found[:_NEAREST])
        more = f" and {len(found) - _NEAREST} more" if len(found) > _NEAREST else ""
        raise InputError(f"{key}: {_short(name)} may be {listed}{more}: write one in full", key=key)
    listed = ", ".join(_nearest(name))
    raise InputError(f"{key}: no device {_short(name)}; nearest are {listed} (`kvist gpus` lists all)", key=key)


def _without_count(text: str, key: str) -> tuple[str, int | None]:
    """Take ``H100x8``, ``H100 x 8`` and ``8xH100`` apart, unless all of it is a name, as ``RTX 3090`` is."""
    if _matches(text):
        return text, None
    for pattern, name_at, count_at in _COUNTED:
        match = pattern.fullmatch(text)
        if match is None:
            continue
        digits = match[count_at]
        count = int(digits) if len(digits) <= 9 else _MAX_COUNT + 1
        if not 1 <= count <= _MAX_COUNT:
            raise InputError(f"{key}: {_short(digits)} devices; from 1 to {_MAX_COUNT}", key=key)
        return match[name_at].strip(), count
    return text, None


def _matches(name: str) -> Sequence[Accelerator]:
    """Devices of exactly this name, else those that have all its words."""
    wanted = _plain(name)
    exact = [device for device in accelerators() if wanted in map(_plain, (device.name, *device.also))]
    return exact or _of_words(_words(name))


def _of_words(words: Sequence[str]) -> Sequence[Accelerator]:
    if not words:
        return ()
    return [
        device
        for device in accelerators()
        if all(any(_same(word, own) for own in _words(device.name)) for word in words)
    ]


def _same(word: str, own: str) -> bool:
    """Whether a word names a part of a device: ``sxm`` is sxm5, ``80`` is 80gb."""
    return word == own or own == f"{word}gb" or (word == "sxm" and own.startswith("sxm"))


def _words(name: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9+.]+", name.casefold()) if word not in _BRANDS]


def _plain(name: str) -> str:
    return "".join(_words(name))


def _nearest(name: str) -> list[str]:
    from difflib import get_close_matches

    plain: dict[str, str] = {}
    for device in accelerators():
        for called in (device.name, *device.also):
            plain.setdefault(_plain(called), device.name)
    found = get_close_matches(_plain(name)[:60], plain, n=_NEAREST, cutoff=0.4)
    return list(dict.fromkeys(plain[close] for close in found)) or ["H100 SXM5 80GB", "A100 SXM4 80GB", "L4"]


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:36]}…"
