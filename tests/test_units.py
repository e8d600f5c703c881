"""Sizes and token counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import InputError
from kvist.units import counted, format_size, parse_size, parse_tokens


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512MiB", 512 * 2**20),
        ("40GiB", 40 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("0.1GB", 10**8),
        (" 2 kib ", 2048),
        ("7B", 7),
        ("2PiB", 2**51),
        ("1.50000000000000000000GiB", 3 * 2**29),
        (123, 123),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "1XB", "-1", "1e9", "0.1B", "1.GiB", "GiB", "١", True, -5])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(InputError, match="memory: "):
        parse_size(text, key="memory")


@pytest.mark.parametrize(("text", "count"), [("8k", 8192), ("1M", 2**20), ("0.5k", 512), ("17", 17), (9, 9)])
def test_token_counts(text: str | int, count: int) -> None:
    assert parse_tokens(text) == count


@pytest.mark.parametrize("text", ["", "8kb", "0.3k", "-2", "8 tokens", -1])
def test_what_is_no_token_count_is_named(text: str) -> None:
    with pytest.raises(InputError, match="context: "):
        parse_tokens(text, key="context")


@given(st.integers(0, 2**60))
def test_a_plain_number_is_itself(count: int) -> None:
    assert parse_size(str(count)) == count
    assert parse_tokens(str(count % 2**40)) == count % 2**40


@pytest.mark.parametrize("text", ["1025PiB", str(2**60 + 1), 2**60 + 1, 10**50, "9" * 80])
def test_sizes_beyond_any_machine_are_too_large(text: str | int) -> None:
    with pytest.raises(InputError, match=r"^memory: .{1,50} is too large; a size is at most 1024 PiB$"):
        parse_size(text, key="memory")


@pytest.mark.parametrize("text", [str(2**40 + 1), 2**40 + 1, "2000000M"])
def test_token_counts_beyond_any_model_are_too_large(text: str | int) -> None:
    with pytest.raises(InputError, match=r"is too large; a token count is at most 1,099,511,627,776"):
        parse_tokens(text)


@pytest.mark.parametrize("text", ["-1", "-1GiB", -5, -(10**50)])
def test_negative_sizes_are_called_negative(text: str | int) -> None:
    with pytest.raises(InputError, match=r"is negative; a size is 0 or more bytes"):
        parse_size(text)


@given(st.integers(0, 2**10), st.sampled_from(["KiB", "MiB", "GiB", "TiB", "PiB", "KB", "MB", "GB", "TB", "PB"]))
def test_units_scale_exactly(count: int, unit: str) -> None:
    base = 1024 if "i" in unit else 1000
    assert parse_size(f"{count}{unit}") == count * base ** ("KMGTP".index(unit[0]) + 1)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (23040, "22.5 KiB"), (2**30, "1 GiB"), (5 * 2**41, "10 TiB"), (2**60, "1024 PiB")],
)
def test_printed_sizes(count: int, text: str) -> None:
    assert format_size(count) == text


def test_numbers_that_python_will_not_print_are_refused_too() -> None:
    for huge in (10**5000, "9" * 5000, "9" * 5000 + "GiB"):
        with pytest.raises(InputError, match="is too large"):
            parse_size(huge)
    with pytest.raises(InputError, match="is negative"):
        parse_tokens(-(10**5000))
    with pytest.raises(InputError, match="is not a whole number"):
        parse_size("0." + "1" * 5000)


def test_counted_things() -> None:
    assert [counted(count, "user") for count in (0, 1, 2, 2000)] == ["0 users", "1 user", "2 users", "2,000 users"]
