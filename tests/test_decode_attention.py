"""The benchmark of decode attention: its tables of near blocks, whatever the context, and what it refuses."""

import sys

import numpy as np
import pytest
import torch
from test_arena_held import script

from kvist.kernels.cpu import attention_kernels
from kvist.kernels.paged import PagedAttention
from kvist.kernels.sharing import shared_runs

BENCHMARK = script("decode_attention")


@pytest.mark.skipif(attention_kernels(torch.bfloat16) is None, reason="no C++ kernels here")
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("context", [1, 16, 17, 33, 8192])
def test_near_tables_take_the_same_arithmetic(monkeypatch, context, sequences):
    planned = []
    plan = PagedAttention.plan

    def note(self, spans, **further):
        planned.append(np.stack([span.table for span in spans]))
        return plan(self, spans, **further)

    monkeypatch.setattr(PagedAttention, "plan", note)
    work = BENCHMARK.ours((3, 3, 64), sequences, context, ("int8", "int4"), 2)
    work.run()
    work.near.run()
    far, near = planned[-2:]
    assert near.shape == far.shape == (sequences, -(-context // 16))
    assert not shared_runs(list(near), [(context - 1) // 16] * sequences)
    # Of SmolLM2's heads 52 blocks of a layer take 256 KiB in int8/int4.
    assert len(np.unique(near[:, 1:-1])) <= 52
    # What a sequence appends, no other reads.
    assert not np.isin(near[:, :-1], near[:, -1]).any()


@pytest.mark.parametrize("option", ["context", "rounds", "sequences"])
@pytest.mark.parametrize("value", ["0", "-3"])
def test_less_than_one_is_refused(monkeypatch, capsys, option, value):
    monkeypatch.setattr(sys, "argv", ["decode_attention.py", f"--{option}", value])
    with pytest.raises(SystemExit):
        BENCHMARK.main()
    assert f"--{option}: {value} is less than 1" in capsys.readouterr().err
