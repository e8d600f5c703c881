"""The delta rule in chunks against the recurrence itself, in float64; and gated delta nets in bf16."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvist.kernels.delta_rule import CHUNK, Chunks, chunked, step

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 6
# Around the borders of chunks, and anything else.
lengths = st.sampled_from([2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 1]) | st.integers(1, 4 * CHUNK)
# Decays near 1, ordinary ones, and such that forget everything at once.
decays = st.sampled_from([1e-9, 1e-3, 0.5, 5.0, 40.0])


class Inputs:
    """What a layer computes of some tokens, one sequence after the other."""

    def __init__(self, counts: list[int], strength: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def unit(*shape: int) -> Tensor:
            # Neighbouring keys resemble each other, as those of real text do: the system is then far from diagonal.
            rows = random(*shape) + 2 * random(1, *shape[1:])
            return rows / rows.norm(dim=-1, keepdim=True)

        tokens = sum(counts)
        self.counts = counts
        self.q, self.k = unit(tokens, KEY_HEADS, KEY_DIM), unit(tokens, KEY_HEADS, KEY_DIM)
        self.v = random(tokens, HEADS, VALUE_DIM)
        self.g = -strength * random(tokens, HEADS).exp()
        self.beta = random(tokens, HEADS).sigmoid()
        self.state = random(len(counts), HEADS, KEY_DIM, VALUE_DIM)

    def recurrence(self) -> tuple[Tensor, Tensor]:
        """Token by token: ``[tokens, heads, value_dim]`` and the states."""
        states, out = self.state.clone(), torch.empty_like(self.v)
        rows = iter(range(len(self.v)))
        repeats = HEADS // KEY_HEADS
        for number, count in enumerate(self.counts):
            matrix = states[number]
            for row in (next(rows) for _ in range(count)):
                q, k = (part[row].repeat_interleave(repeats, 0) for part in (self.q, self.k))
                matrix *= self.g[row].exp()[:, None, None]
                error = self.v[row] - torch.einsum("hk,hkv->hv", k, matrix)
                matrix += torch.einsum("h,hk,hv->hkv", self.beta[row], k, error)
                out[row] = torch.einsum("hk,hkv->hv", q, matrix)
        return out, states

    def by_chunks(self, begin: int = 0, end: int | None = None, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same in chunks; of tokens ``begin`` to ``end`` where there is one sequence."""
        counts = np.array(self.counts if end is None else [end - begin])
        begins = begin + np.cumsum(counts) - counts
        order = np.argsort(-((counts - 1) // CHUNK), kind="stable")
        chunks = Chunks(counts[order].tolist(), HEADS)
        rows = chunks.rows(begins[order], len(self.v))

        def cut(tensor: Tensor) -> Tensor:
            taken = tensor[begin:end] if rows is None else tensor.index_select(0, rows)
            return taken.view(chunks.size, CHUNK, *tensor.shape[1:])

        g, beta = (cut(part).transpose(1, 2) * chunks.valid for part in (self.g, self.beta))
        states = (self.state if state is None else state)[order].clone()
        out = chunked(cut(self.q), cut(self.k), cut(self.v), g, beta, states, chunks)
        out = out.transpose(1, 2).reshape(-1, HEADS, VALUE_DIM)
        places = chunks.places(begins[order] - begin, int(counts.sum()))
        return out if places is None else out.index_select(0, places), states[np.argsort(order)]

    def by_steps(self, begin: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """The last tokens of one sequence, from ``begin`` on, one by one."""
        state, out = state.clone(), []
        for row in range(begin, len(self.v)):
            qk = torch.stack((self.q[row], self.k[row]))[None]
            out.append(step(qk, self.v[row, None], self.g[row, None], self.beta[row, None], [state[0]]))
        return torch.cat(out), state


def close(ours: Tensor, expected: Tensor) -> bool:
    return bool((ours - expected).abs().max() <= 1e-9 * (1 + expected.abs().max()))


@settings(deadline=None, max_examples=30)
@given(counts=st.lists(lengths, min_size=1, max_size=4), strength=decays, seed=st.integers(0, 99))
def test_chunks_are_the_recurrence(counts: list[int], strength: float, seed: int) -> None:
    inputs = Inputs(counts, strength, seed)
    for ours, expected in zip(inputs.by_chunks(), inputs.recurrence(), strict=True):
        assert close(ours, expected)


@settings(deadline=None, max_examples=30)
@given(count=st.integers(2, 3 * CHUNK), strength=decays, data=st.data(), seed=st.integers(0, 99))
def test_a_prompt_may_be_split_anywhere(count: int, strength: float, data: st.DataObject, seed: int) -> None:
    inputs = Inputs([count], strength, seed)
    whole, state = inputs.by_chunks()
    first = data.draw(st.integers(1, count - 1))
    out, halfway = inputs.by_chunks(0, first)
    assert close(out, whole[:first])
    # What follows is another chunk of the prompt, or token by token.
    for rest, reached in (inputs.by_chunks(first, count, halfway), inputs.by_steps(first, halfway)):
        assert close(rest, whole[first:])
        assert close(reached, state)


def test_steps_are_the_recurrence() -> None:
    """One token of each of several sequences."""
    inputs = Inputs([1] * 5, 0.5, 0)
    state = inputs.state.clone()
    out = step(torch.stack((inputs.q, inputs.k), 1), inputs.v, inputs.g, inputs.beta, state.unbind())
    for ours, expected in zip((out, state), inputs.recurrence(), strict=True):
        assert close(ours, expected)


def test_a_whole_chunk_before_one_that_decodes(tmp_path: Path) -> None:
    """A prompt's tokens are all whole chunks, and lie before the token of a request that came later."""
    pytest.importorskip("transformers")
    from served import Session, build, oracle_logits, prompts_of
    from served_delta import CASES

    from kvist.batch import Batch, Chunk, Request

    served = build(CASES["qwen3.5"], tmp_path)
    manager = Session(served).manager
    first, second = (
        Request(str(number), manager.begin(np.array(prompt, np.int32)), 1)
        for number, prompt in enumerate(prompts_of(CHUNK + 1, 9))
    )
    for parts in ([(second, 8)], [(first, CHUNK), (second, 1)]):
        chunks = []
        for request, count in parts:
            start = request.sequence.length
            assert manager.reserve(request.sequence, count).limit == start + count
            chunks.append(Chunk(request, start, count, samples=True))
        logits = served.runner.run(Batch(chunks, []))
        for chunk in chunks:
            manager.commit(chunk.request.sequence, chunk.start + chunk.count)
    for request, found in zip((first, second), logits, strict=True):
        expected = oracle_logits(served.oracle, request.sequence.known()[: request.sequence.length])[-1]
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_in_bf16(tmp_path: Path) -> None:
    """Logits stay near those of float32, and every token of a longer answer is found by both or nearly so."""
    pytest.importorskip("transformers")
    from served import Session, build, open_saved, oracle_logits, prompts_of
    from served_delta import CASES

    served = build(CASES["qwen3.5"], tmp_path)
    session = Session(open_saved(tmp_path, served.oracle, dtype="bf16"))
    for request in session.run(prompts_of(90, 7, 130), steps=4):
        tokens = request.sequence.known()
        expected = oracle_logits(served.oracle, tokens[:-1])[request.prompt_tokens - 1 :]
        ours = torch.stack(session.logits[request.id])
        assert float((ours - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()) < 0.2
