"""The recurrences of Mamba: many tokens of one sequence in chunks, and one token of many sequences.

All compute ``h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t]`` and ``y[t] = C[t] h[t]``, in float32. Nothing is divided
by a decay, so that no state overflows however fast it forgets. States are changed where they lie: one of Mamba-2 is
many times as large as all that a token brings.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvist.kernels.decays import decayed, decays_of

CHUNK = 64
"""Tokens of Mamba-2 that are multiplied with each other at once."""
# Elements of Mamba-1's states that are kept while they are walked through: they stay in a core's cache.
_WALKED = 2**17


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
    wide = state.view(groups, -1, size)
    logs = dt * rates
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for begin in range(0, tokens, CHUNK):
        part = slice(begin, min(begin + CHUNK, tokens))
        count = part.stop - begin
        between, past = decays_of(logs[part].t())
        given = x[part] * dt[part].unsqueeze(-1)
        left = given * between[:, -1].t().unsqueeze(-1)
        own_b, own_c = b[part].transpose(0, 1), c[part].transpose(0, 1)
        between.view(groups, -1, count, count).mul_(torch.bmm(own_c, own_b.transpose(1, 2)).unsqueeze(1))
        seen = torch.bmm(own_c, wide.transpose(1, 2)).view(groups, count, -1, dim).transpose(1, 2)
        seen = seen.reshape(heads, count, dim).mul_(past.unsqueeze(-1))
        out[part].transpose(0, 1).copy_(seen.baddbmm_(between, given.transpose(0, 1)))
        state.mul_(past[:, -1].view(heads, 1, 1))
        wide.baddbmm_(left.reshape(count, groups, -1).permute(1, 2, 0), own_b)
    return out


def heads_step(x: Tensor, dt: Tensor, rates: Tensor, b: Tensor, c: Tensor, states: Sequence[Tensor]) -> Tensor:
    """Mamba-2, one token of each sequence.

    Args:
        x: ``[sequences, heads, dim]``.
        dt: ``[sequences, heads]``.
        rates: ``A``, negative, ``[heads]``.
        b: ``[sequences, groups, size]``.
        c: likewise.
        states: of each ``[heads, dim, size]``; changed in place.

    Returns:
        ``[sequences, heads, dim]``.
    """
    count, heads, dim = x.shape
    groups, size = b.shape[1:]
    kept = decayed(dt * rates).view(count, heads, 1, 1)
    given = (x * dt.unsqueeze(-1)).view(count, groups, -1, 1)
    out = torch.empty_like(given)
    for state, *ours in zip(states, kept, given, b.unsqueeze(2), c.unsqueeze(-1), out, strict=True):
        factor, column, row, reader, into = ours
        wide = state.mul_(factor).view(groups, -1, size).addcmul_(column, row)
        torch.bmm(wide, reader, out=into)
    return out.view(count, heads, dim)


def channels_scan(x: Tensor, dt: Tensor, rates: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """Mamba-1: every channel has decays of its own (arXiv:2312.00752, section 3).

    What does not depend on the state is computed for some tokens at once; between two tokens there is one operator.

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
    given = dt * x
    out = torch.empty_like(given)
    stretch = max(4, _WALKED // rates.numel())
    last = state
    for begin in range(0, len(x), stretch):
        part = slice(begin, begin + stretch)
        kept = decayed(dt[part].unsqueeze(-1) * rates)
        walked = given[part].unsqueeze(-1) * b[part].unsqueeze(1)
        for factor, becomes in zip(kept.unbind(), walked.unbind(), strict=True):
            last = becomes.addcmul_(factor, last)
        torch.bmm(walked, c[part].unsqueeze(-1), out=out[part].unsqueeze(-1))
    state.copy_(last)
    return out


def channels_step(x: Tensor, dt: Tensor, rates: Tensor, b: Tensor, c: Tensor, states: Sequence[Tensor]) -> Tensor:
    """Mamba-1, one token of each sequence.

    Args:
        x: ``[sequences, channels]``.
        dt: likewise.
        rates: ``A``, negative, ``[channels, size]``.
        b: ``[sequences, size]``.
        c: likewise.
        states: of each ``[channels, size]``; changed in place.

    Returns:
        ``[sequences, channels]``.
    """
    kept = decayed(dt.unsqueeze(-1) * rates)
    given = (dt * x).unsqueeze(-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for state, factor, column, row, reader, into in zip(states, kept, given, b.unsqueeze(1), c, out, strict=True):
        torch.mv(state.mul_(factor).addcmul_(column, row), reader, out=into)
    return out
