"""The chunked recurrences of Mamba against the plain ones, token by token, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.kernels.state_scans import channels_scan, channels_step, heads_scan, heads_step

HEADS, DIM, GROUPS, SIZE = 6, 8, 2, 16


def inputs(tokens: int, seed: int, fastest: float) -> dict[str, torch.Tensor]:
    """Random inputs in float64; some steps so long that the state is forgotten at once, some of almost nothing."""
    torch.manual_seed(seed)
    dt = torch.rand(tokens, HEADS).pow(4) * fastest
    return {
        "x": torch.randn(tokens, HEADS, DIM), "dt": dt, "rates": -torch.rand(HEADS) * 16,
        "b": torch.randn(tokens, GROUPS, SIZE), "c": torch.randn(tokens, GROUPS, SIZE),
        "state": torch.randn(HEADS, DIM, SIZE),
    }  # fmt: skip


def by_channels(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same for Mamba-1: a channel a head and element."""
    dt = given["dt"].repeat_interleave(DIM, 1)
    rates = (given["rates"].repeat_interleave(DIM)[:, None] * torch.linspace(0.1, 1, SIZE)).contiguous()
    return {
        "x": given["x"].flatten(1), "dt": dt, "rates": rates, "b": given["b"][:, 0], "c": given["c"][:, 0],
        "state": given["state"].flatten(0, 1),
    }  # fmt: skip


def plainly(step: object, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """One token after the other, in float64."""
    wide = {name: tensor.double() for name, tensor in given.items()}
    state = wide.pop("state").clone()
    rates = wide.pop("rates")
    rows = [
        step(**{name: tensor[t : t + 1] for name, tensor in wide.items()}, rates=rates, states=[state])  # type: ignore[operator]
        for t in range(len(wide["x"]))
    ]
    return torch.cat(rows), state


def chunked(scan: object, given: dict[str, torch.Tensor], cut: int) -> tuple[torch.Tensor, torch.Tensor]:
    """In two pieces, cut anywhere."""
    narrow = {name: tensor.float() for name, tensor in given.items()}
    state = narrow.pop("state").clone()
    rates = narrow.pop("rates")
    pieces = []
    for part in (slice(0, cut), slice(cut, None)):
        taken = {name: tensor[part] for name, tensor in narrow.items()}
        if len(taken["x"]):
            pieces.append(scan(**taken, rates=rates, state=state))  # type: ignore[operator]
    return torch.cat(pieces), state


@pytest.mark.parametrize("kind", ["heads", "channels"])
@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 200), seed=st.integers(0, 2**16), fastest=st.sampled_from([0.01, 1.0, 50.0]), data=st.data()
)
def test_any_piece_of_any_length(kind: str, tokens: int, seed: int, fastest: float, data: st.DataObject) -> None:
    given = inputs(tokens, seed, fastest)
    scan, step = heads_scan, heads_step
    if kind == "channels":
        given, scan, step = by_channels(given), channels_scan, channels_step
    expected, last = plainly(step, given)
    found, state = chunked(scan, given, data.draw(st.integers(0, tokens)))
    scale = float(expected.abs().max()) + 1
    assert float((found - expected).abs().max()) < 2e-5 * scale
    assert float((state - last).abs().max()) < 2e-5 * (float(last.abs().max()) + 1)
