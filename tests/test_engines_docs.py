"""What ``docs/engines.md`` says is so."""

import doctest
import re
from pathlib import Path

from kvist.planning.engines import transformers, vllm
from kvist.planning.engines.llama_cells import ROW_TYPES
from kvist.planning.engines.sglang_memory import chunked_prefill_default, decode_graph_default
from kvist.planning.engines.vllm_page import content_bytes
from kvist.planning.engines.vllm_settings import CACHE_DTYPES, resolve
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention
from kvist.spec.model import ModelSpec

PAGE = Path(__file__).parents[1] / "docs/engines.md"
GIB = 2**30
PLAIN = ModelSpec(
    name="m", source="a test", layers=(Attention(kv_heads=1, key_dim=8, value_dim=8),), max_context=8192, config={}
)


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a line that begins so."""
    table = PAGE.read_text().split(f"\n{heading}", 1)[1].split("\n\n", 1)[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:] if "---" not in line
    ]


def test_the_examples_are_computed_again() -> None:
    failed, attempted = doctest.testfile(str(PAGE), module_relative=False)
    assert attempted > 25
    assert failed == 0


def test_the_bytes_of_vllms_types() -> None:
    settings = resolve(PLAIN, CacheFormat(), {}, context=8192, device_bytes=None)
    width = 128
    said: dict[str, str] = {}
    for row in rows("| `kv_cache_dtype` |"):
        for name in re.findall(r"`([a-z0-9_]+)`", row[0]):
            said.setdefault(name, row[1])
    formulas = {
        "2 d + 2 d": 4 * width, "d + d": 2 * width, "d + d + 8": 2 * width + 8, "d/2 + d/2 + 8": width + 8,
        "2 (d/2 + d/16)": 2 * (width // 2 + width // 16), "d + d/2 + 4, made even": width + width // 2 + 4,
    }  # fmt: skip
    checked = [dtype for dtype in CACHE_DTYPES if said.get(dtype) in formulas]
    assert len(checked) == 11
    for dtype in checked:
        assert content_bytes(width, width, dtype, settings) == formulas[said[dtype]], dtype


def test_the_bytes_of_llama_cpps_types() -> None:
    said = {name: int(row[1]) for row in rows("| type | bytes") for name in re.findall(r"`([a-z0-9_]+)`", row[0])}
    assert said == {name: row.row_bytes(32) for name, row in ROW_TYPES.items()}


def test_the_defaults_of_sglang() -> None:
    table = rows("| GPU below |")
    for row, gib in zip(table, (19, 34, 59, 159, 200), strict=True):
        few, many = (int(number) for number in row[2].split(","))
        assert int(row[1].replace(",", "")) == chunked_prefill_default(gib * 1024)
        assert (few, many) == (decode_graph_default(gib * 1024, 1), decode_graph_default(gib * 1024, 4))


def test_the_defaults_of_vllm() -> None:
    batch = {row[0]: row[1:] for row in rows("| default |")}
    for usage, name in (
        ("server", "`max_num_batched_tokens`, server"),
        ("offline", "`max_num_batched_tokens`, `LLM` class"),
    ):
        numbers = [int(number.replace(",", "")) for number in re.findall(r"\b([0-9]+,[0-9]{3})\b", batch[name][0])]
        sizes = (40, 80, 192)[: len(numbers)]
        made = [
            resolve(PLAIN, CacheFormat(), {"usage": usage}, context=8192, device_bytes=size * GIB) for size in sizes
        ]
        assert [one.max_num_batched_tokens for one in made] == numbers
        cpu = resolve(PLAIN, CacheFormat(), {"usage": usage, "device": "cpu"}, context=8192, device_bytes=None)
        assert batch[name][1].startswith(f"{cpu.max_num_batched_tokens:,} x")
        assert (cpu.block_size, cpu.kernel_tokens, cpu.async_scheduling) == (128, 32, False)


def test_the_versions_are_those_of_the_accounts() -> None:
    text = PAGE.read_text()
    for engine, version in (("vLLM", vllm.VERSION), ("transformers", transformers.VERSION)):
        assert f"| {engine} | {version} |" in text
