"""The gated delta rule (arXiv:2412.06464): a matrix a head that forgets, and is corrected by every token.

One head and token, with ``S`` of ``[key_dim, value_dim]``, a decay ``exp(g)`` and a rate ``beta``::

    S  = exp(g) S
    S += k (beta (v - S^T k))^T
    o  = S^T q

:func:`step` does this for one token of each sequence. :func:`chunked` takes :data:`CHUNK` tokens at a time in products
of matrices. With ``c`` the sums of ``g`` from the chunk's beginning, ``D[i, j] = exp(c[i] - c[j])`` for ``j <= i``, and
``S`` from before the chunk, the corrections ``U`` (rows ``u[i] = beta[i] (v[i] - …)``) solve a triangular system::

    (1 + tril(beta D K K^T, -1)) U = beta (V - exp(c) K S)
    O = exp(c) Q S + (D Q K^T) U
    S = exp(c[-1]) S + (D[-1] K)^T U

The system's inverse depends on the chunk alone, and so does all but the three products with ``S``: only those go from
chunk to chunk, for all sequences of a step together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvist.kernels.decays import decayed, decays_of
from kvist.store.layouts import Index

CHUNK = 64
# Chunks x heads prepared at a time: while their matrices stay in the caches of the cores, reading them is cheap.
_TOGETHER = 64


@dataclass(frozen=True, kw_only=True)
class Run:
    """Chunks that are prepared together.

    Attributes:
        begin: the first chunk.
        end: behind the last.
        waves: where each wave ends, counted from ``begin``.
    """

    begin: int
    end: int
    waves: tuple[int, ...]


class Chunks:
    """How the tokens of some sequences are cut in chunks.

    Chunks lie in waves, the first of every sequence, then the second of those that have one, …: a wave is a slice, and
    so are the states that it changes.

    Args:
        counts: tokens of each sequence, those with more chunks first.
        heads: of values.

    Attributes:
        size: number of chunks.
        padded: whether the end of a chunk holds no token.
    """

    def __init__(self, counts: Sequence[int], heads: int) -> None:
        self.counts = np.asarray(counts, np.int64)
        chunks = (self.counts + CHUNK - 1) // CHUNK
        assert (np.diff(chunks) <= 0).all(), "sequences with more chunks come first"
        widths = [int((chunks > wave).sum()) for wave in range(chunks[0])]
        self.size = sum(widths)
        self.sequence = np.concatenate([np.arange(width) for width in widths])
        self.first = CHUNK * np.repeat(np.arange(len(widths)), widths)
        place = self.first[:, None] + np.arange(CHUNK)
        self._valid = place < self.counts[self.sequence][:, None]
        self._place = np.minimum(place, self.counts[self.sequence][:, None] - 1)
        self.padded = not self._valid.all()
        self.valid = torch.from_numpy(self._valid)[:, None]
        self.runs: list[Run] = []
        begin, waves = 0, list[int]()
        for wave, width in enumerate(widths):
            waves.append((waves[-1] if waves else 0) + width)
            if waves[-1] * heads >= _TOGETHER or wave + 1 == len(widths):
                self.runs.append(Run(begin=begin, end=begin + waves[-1], waves=tuple(waves)))
                begin, waves = begin + waves[-1], []

    def rows(self, begins: Index, count: int) -> Tensor | None:
        """Which row each place of the chunks takes, int64 ``[size x CHUNK]``, of rows in which sequences lie so.

        Args:
            begins: each sequence's first row; its others follow.
            count: rows that there are, those of others among them.

        Returns:
            None where they are all, as they lie. Places without a token take the row of the sequence's last.
        """
        rows = (begins[self.sequence][:, None] + self._place).ravel()
        if not self.padded and np.array_equal(rows, np.arange(count)):
            return None
        return torch.from_numpy(rows)

    def places(self, begins: Index, rows: int) -> Tensor | None:
        """The way back: which place each of ``rows`` rows has, int64 ``[rows]``; all must have one."""
        taken = (begins[self.sequence][:, None] + self._place)[self._valid]
        places = np.empty(rows, np.int64)
        places[taken] = np.flatnonzero(self._valid)
        if not self.padded and np.array_equal(places, np.arange(rows)):
            return None
        return torch.from_numpy(places)


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunks: Chunks) -> Tensor:
    """Take whole chunks into the states.

    Args:
        q: ``[chunks, CHUNK, key_heads, key_dim]``, scaled; each serves ``heads / key_heads`` neighbouring value heads.
        k: likewise.
        v: ``[chunks, CHUNK, heads, value_dim]``.
        g: logarithms of decays, ``[chunks, heads, CHUNK]``; 0 where there is no token.
        beta: rates, likewise.
        state: ``[sequences, heads, key_dim, value_dim]``; changed in place.
        chunks: whose they are.

    Returns:
        ``[chunks, heads, CHUNK, value_dim]``.
    """
    key_heads, key_dim = k.shape[2:]
    heads, value_dim = v.shape[2:]
    repeats = heads // key_heads
    out = v.new_empty(chunks.size, heads, CHUNK, value_dim)
    eye = torch.eye(CHUNK, dtype=v.dtype)
    for run in chunks.runs:
        part = slice(run.begin, run.end)
        count = run.end - run.begin
        # [chunk, key head, query or key, place, dim]
        qk = torch.stack((q[part], k[part]), 1).permute(0, 3, 1, 2, 4).contiguous().view(-1, 2 * CHUNK, key_dim)
        products = torch.bmm(qk, qk[:, CHUNK:].transpose(1, 2)).view(count, key_heads, 1, 2, CHUNK, CHUNK)
        decays, past_decays = decays_of(g[part])
        scores = products * decays.view(count, key_heads, repeats, 1, CHUNK, CHUNK)
        scores = scores.view(count * heads, 2, CHUNK, CHUNK)
        rates = beta[part].reshape(count * heads, CHUNK, 1)
        inverse = torch.linalg.solve_triangular(
            scores[:, 1].mul_(rates), eye.expand(count * heads, -1, -1), upper=False, unitriangular=True
        )
        inverse = inverse.contiguous()
        weighted = v.new_empty(count * heads, CHUNK, value_dim)
        torch.mul(v[part].transpose(1, 2), beta[part].unsqueeze(-1), out=weighted.view(count, heads, CHUNK, value_dim))
        of_heads = qk.view(count, key_heads, 1, 2, CHUNK, key_dim)
        read = past_decays.view(count, key_heads, repeats, 1, CHUNK, 1) * of_heads
        read = read.view(count * heads, 2, CHUNK, key_dim)
        read[:, 1].mul_(rates)
        write = decays[:, :, -1].view(count, key_heads, repeats, CHUNK, 1) * of_heads[:, :, :, 1]
        write = write.view(count * heads, CHUNK, key_dim).transpose(1, 2)
        last = past_decays[..., -1:, None]
        begin = 0
        for end in run.waves:
            wave = slice(begin * heads, end * heads)
            past = state[: end - begin]
            flat = past.view(-1, key_dim, value_dim)
            seen = torch.bmm(read[wave].view(-1, 2 * CHUNK, key_dim), flat)
            change = torch.bmm(inverse[wave], weighted[wave].sub_(seen[:, CHUNK:]))
            torch.baddbmm(
                seen[:, :CHUNK],
                scores[wave, 0],
                change,
                out=out[run.begin + begin : run.begin + end].view(-1, CHUNK, value_dim),
            )
            past.mul_(last[begin:end])
            flat.baddbmm_(write[wave], change)
            begin = end
    return out


def step(qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Sequence[Tensor]) -> Tensor:
    """Take one token of each sequence into its state.

    Args:
        qk: queries, scaled, and keys, ``[sequences, 2, key_heads, key_dim]``.
        v: ``[sequences, heads, value_dim]``.
        g: logarithms of decays, ``[sequences, heads]``.
        beta: rates, likewise.
        states: of each sequence ``[heads, key_dim, value_dim]``; changed in place, wherever they lie.

    Returns:
        ``[sequences, heads, value_dim]``.
    """
    sequences, heads, value_dim = v.shape
    key_heads, key_dim = qk.shape[2:]
    decay = decayed(g).unsqueeze(-1)
    pairs = qk.transpose(1, 2).unsqueeze(2).expand(-1, -1, heads // key_heads, -1, -1)
    pairs = pairs.reshape(sequences, heads, 2, key_dim)
    read = v.new_empty(sequences, heads, 2, value_dim)
    # A state is many times as large as all else: it is read twice and written once, never copied.
    for state, pair, into in zip(states, pairs, read, strict=True):
        torch.bmm(pair, state, out=into)
    read *= decay.unsqueeze(-1)
    change = (v - read[:, :, 1]).mul_(beta.unsqueeze(-1))
    keys = pairs[:, :, 1].unsqueeze(-1)
    for state, factor, key, row in zip(states, decay.unsqueeze(-1), keys, change.unsqueeze(2), strict=True):
        state.mul_(factor).addcmul_(key, row)
    own = (pairs[:, :, 0] * pairs[:, :, 1]).sum(-1, keepdim=True)
    return torch.addcmul(read[:, :, 0], own, change)
