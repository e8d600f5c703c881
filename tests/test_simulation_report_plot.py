"""Pictures of simulations as files: their kinds, their sizes, and what is refused."""

import importlib.util
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from sample_simulations import sample, with_stretches, without_timelines

from kvist.errors import BadFile, InputError
from kvist.report.simulation_plot import DPI, _drawn, check_plot, plot
from kvist.report.simulation_tables import format_share
from kvist.simulation.results import SimulationResult, Timeline

THREE = sample(requests=400)
ONE = sample(["paged"], requests=200)
CACHE_ONLY = sample(requests=200, clock=False)


def size_of_png(path: Path) -> tuple[int, int]:
    """Width and height, pixels, from the header."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def texts_of_svg(path: Path) -> str:
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return "\n".join("".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text"))


@pytest.mark.parametrize(
    ("result", "inches"),
    [
        (THREE, (14.44, 7.17)),
        (ONE, (9.14, 7.17)),
        (CACHE_ONLY, (8.2, 2.96)),
        (without_timelines(THREE), (8.2, 2.96)),
        (with_stretches(THREE, 0), (8.2, 2.96)),
        (with_stretches(ONE, 1), (9.14, 7.17)),
        (replace(ONE, policies={}), (8.2, 2.12)),
    ],
)
def test_a_png_has_the_size_that_its_policies_need(
    result: SimulationResult, inches: tuple[float, float], tmp_path: Path
) -> None:
    path = tmp_path / "picture.PNG"
    plot(result, str(path))
    assert size_of_png(path) == pytest.approx([inch * DPI for inch in inches], abs=1)


def test_more_policies_than_have_room_go_on_below(tmp_path: Path) -> None:
    policies = {f"prefix {index}": THREE.policies["prefix"] for index in range(4)}
    path = tmp_path / "picture.png"
    plot(replace(THREE, policies=policies), str(path))
    width, height = size_of_png(path)
    assert width == pytest.approx(14.44 * DPI, abs=1)
    assert height > 11 * DPI


def test_an_svg_has_its_words_as_words_and_is_the_same_each_time(tmp_path: Path) -> None:
    first, second = tmp_path / "one.svg", tmp_path / "two.svg"
    plot(THREE, str(first))
    plot(THREE, str(second))
    assert first.read_bytes() == second.read_bytes()
    texts = texts_of_svg(first)
    for word in ("traces/conversation.jsonl.gz: 400 requests", "memory, GiB", "minutes since the first arrival"):
        assert word in texts
    for name, each in THREE.policies.items():
        assert name in texts.splitlines()
        assert f"waste {format_share(each.waste_ratio)}" in texts


def test_bars_say_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "bars.svg"
    plot(CACHE_ONLY, str(path))
    texts = texts_of_svg(path).splitlines()
    assert format_share(CACHE_ONLY.policies["prefix"].hit_ratio) in texts
    assert "% of prompt tokens found in the cache" in texts
    assert "host" in texts


@pytest.mark.parametrize("name", ["$\\frac$.jsonl", "$x$ <b>&", "\x00\x1b[31m", "对话", "caf\udce9", "long/" * 60])
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_name_is_only_ever_written(name: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"picture.{suffix}"
    plot(replace(CACHE_ONLY, trace=name, model=name, policies={name: CACHE_ONLY.policies["prefix"]}), str(path))
    if suffix == "svg":
        texts_of_svg(path)


@pytest.mark.parametrize("count", [1, 399, 400, 401, 1000, 1001])
def test_stretches_are_merged_without_losing_any(count: int) -> None:
    rng = np.random.default_rng(count)
    values = {name: rng.random(count) for name in Timeline.__dataclass_fields__}
    values["seconds"] = (np.arange(count) + 0.5) * 3
    # The last stretch is a second long, as a simulation ends when it ends.
    values["seconds"][-1] = 3 * (count - 1) + 0.5
    line = Timeline(**values | {"bound": rng.integers(0, 5, count).astype(np.int8)})
    drawn = _drawn(line)
    lengths = np.diff(drawn.edges)
    assert len(lengths) == drawn.line.bound.size <= 400
    assert (drawn.edges[0], drawn.edges[-1]) == (0, pytest.approx(3 * count - 2))
    for name in ("running", "waste_bytes"):
        assert (getattr(drawn.line, name) * lengths).sum() == pytest.approx((values[name] * np.diff(line.edges)).sum())


def test_short_and_long_traces_have_their_units(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    plot(with_stretches(THREE, 20), str(path))
    assert "seconds since the first arrival" in texts_of_svg(path)
    line = THREE.policies["slab"].timeline
    assert line is not None
    slow = replace(THREE.policies["slab"], timeline=replace(line, seconds=line.seconds * 100))
    plot(replace(THREE, policies={"slab": slow}), str(path))
    assert "hours since the first arrival" in texts_of_svg(path)


@pytest.mark.parametrize("name", ["picture.pdf", "picture", "picture.png.txt", ".png", ""])
def test_other_kinds_of_pictures_are_refused(name: str) -> None:
    with pytest.raises(
        InputError, match=r"^plot: '.*' names no kind of picture; write a name that ends in .png or .svg$"
    ) as caught:
        plot(THREE, name)
    assert caught.value.key == "plot"
    with pytest.raises(InputError, match="names no kind of picture"):
        check_plot(name)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "kvist.report.simulation_plot.find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    with pytest.raises(InputError, match=r"matplotlib is not installed to draw it: pip install 'kvist\[plot\]'$"):
        plot(THREE, "picture.png")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"picture\.png: cannot be written: No such file") as caught:
        plot(CACHE_ONLY, str(tmp_path / "nowhere/picture.png"))
    assert caught.value.key == "plot"


def test_nothing_is_left_of_matplotlibs_settings_and_pyplot_is_not_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from kvist.report.simulation_plot import plot; assert 'matplotlib' not in sys.modules\n"
        "from sample_simulations import sample; import matplotlib\n"
        "held = lambda: [matplotlib.rcParams[name] for name in ('font.size', 'svg.fonttype', 'text.color')]\n"
        "before = held()\n"
        f"plot(sample(['paged'], requests=20), {str(tmp_path / 'picture.png')!r})\n"
        "assert held() == before; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
