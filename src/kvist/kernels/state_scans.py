"""The recurrences of Mamba: many tokens of one sequence in chunks, and one token of many sequences.

Both compute ``h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t]`` and ``y[t] = C[t] h[t]``, in float32. Nothing is divided
by a decay, so that no state overflows however fast it forgets.
"""

import torch
from torch import Tensor

CHUNK = 64
"""Tokens of Mamba-2 that are multiplied with each other at once."""
_STRIDE = 32


def heads_scan(x: Tensor, dt: Tensor, rates: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """Mamba-2, in chunks (arXiv:2405.21060, section 6).

    Args:
        x: ``[tokens, heads, dim]``.
        dt: ``[tokens, heads]``.
        rates: ``A``, negative, ``[heads]``.
        b: ``[tokens, groups, size]``; ``heads / groups`` neighbours share one.
        c: likewise.
        state: ``[heads, dim, size]``; becomes the state after the last token.

    Returns:
        ``[tokens, heads, dim]``.
    """
    tokens, heads, dim = x.shape
    groups, size = b.shape[1:]
    shared = heads // groups
    lacking = -tokens % CHUNK
    if lacking:
        # A token with a step of zero changes no state.
        x, dt, b, c = (torch.cat((part, part.new_zeros(lacking, *part.shape[1:]))) for part in (x, dt, b, c))
    chunks = len(x) // CHUNK
    # What lies between two tokens is the difference of two sums, each of which may be thousands of times as large.
    decay = (dt * rates).view(chunks, CHUNK, heads).transpose(1, 2).double().cumsum(-1)
    given = (x * dt.unsqueeze(-1)).view(chunks, CHUNK, heads, dim).transpose(1, 2)
    b = b.view(chunks, CHUNK, groups, size).transpose(1, 2)
    c = c.view(chunks, CHUNK, groups, size).transpose(1, 2)
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).to(x.dtype).masked_fill_(above, float("-inf")).exp_()
    seen = (c @ b.transpose(-1, -2)).unsqueeze(2) * between.view(chunks, groups, shared, CHUNK, CHUNK)
    out = seen.view(chunks, heads, CHUNK, CHUNK) @ given
    left = given * (decay[..., -1:] - decay).to(x.dtype).exp().unsqueeze(-1)
    decay = decay.to(x.dtype)
    left = left.reshape(chunks, groups, shared, CHUNK, dim).permute(0, 1, 2, 4, 3).reshape(chunks, groups, -1, CHUNK)
    added = (left @ b).view(chunks, heads, dim, size)
    kept = decay[..., -1].exp().view(chunks, heads, 1, 1)
    before = torch.empty_like(added)
    for index in range(chunks):
        before[index] = state
        state.mul_(kept[index]).add_(added[index])
    carried = before.view(chunks, groups, shared * dim, size) @ c.transpose(-1, -2)
    carried = carried.view(chunks, heads, dim, CHUNK).transpose(-1, -2)
    out += carried * decay.exp().unsqueeze(-1)
    return out.transpose(1, 2).reshape(-1, heads, dim)[:tokens]


def heads_step(x: Tensor, dt: Tensor, rates: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """Mamba-2, one token of each sequence.

    Args:
        x: ``[sequences, heads, dim]``.
        dt: ``[sequences, heads]``.
        rates: ``A``, negative, ``[heads]``.
        b: ``[sequences, groups, size]``.
        c: likewise.
        state: ``[sequences, heads, dim, size]``; becomes the next one.

    Returns:
        ``[sequences, heads, dim]``.
    """
    count, heads, dim = x.shape
    groups, size = b.shape[1:]
    state.mul_((dt * rates).exp_().view(count, heads, 1, 1))
    wide = state.view(count, groups, -1, size)
    given = (x * dt.unsqueeze(-1)).view(count, groups, -1, 1)
    wide.addcmul_(given, b.unsqueeze(2))
    return (wide @ c.unsqueeze(-1)).view(count, heads, dim)


def channels_scan(x: Tensor, dt: Tensor, rates: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """Mamba-1: every channel has decays of its own (arXiv:2312.00752, section 3).

    Tokens are cut in stretches that are walked at the same time, each from a state of zero; what a stretch inherits is
    added afterwards.

    Args:
        x: ``[tokens, channels]``.
        dt: likewise.
        rates: ``A``, negative, ``[channels, size]``.
        b: ``[tokens, size]``.
        c: likewise.
        state: ``[channels, size]``; becomes the state after the last token.

    Returns:
        ``[tokens, channels]``.
    """
    tokens = len(x)
    lacking = -tokens % _STRIDE
    if lacking:
        x, dt, b, c = (torch.cat((part, part.new_zeros(lacking, part.shape[1]))) for part in (x, dt, b, c))
    count = len(x) // _STRIDE
    x, dt, b, c = (part.view(count, _STRIDE, -1) for part in (x, dt, b, c))
    given = dt * x
    inner = x.new_zeros(count, *rates.shape)
    out = torch.empty_like(x)
    for place in range(_STRIDE):
        inner.mul_((dt[:, place, :, None] * rates).exp_()).addcmul_(given[:, place, :, None], b[:, place, None])
        out[:, place] = (inner @ c[:, place, :, None])[..., 0]
    passed = dt.cumsum(1)
    for index in range(count):
        if bool(state.any()):
            carried = (passed[index, :, :, None] * rates).exp_().mul_(state)
            out[index] += (carried @ c[index, :, :, None])[..., 0]
        state.mul_((passed[index, -1, :, None] * rates).exp_()).add_(inner[index])
    return out.view(-1, x.shape[-1])[:tokens]


def channels_step(x: Tensor, dt: Tensor, rates: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """Mamba-1, one token of each sequence.

    Args:
        x: ``[sequences, channels]``.
        dt: likewise.
        rates: ``A``, negative, ``[channels, size]``.
        b: ``[sequences, size]``.
        c: likewise.
        state: ``[sequences, channels, size]``; becomes the next one.

    Returns:
        ``[sequences, channels]``.
    """
    state.mul_((dt.unsqueeze(-1) * rates).exp_()).addcmul_((dt * x).unsqueeze(-1), b.unsqueeze(1))
    return (state @ c.unsqueeze(-1)).squeeze(-1)
