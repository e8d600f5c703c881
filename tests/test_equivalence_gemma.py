"""The tests of test_equivalence.py, on a model with sliding windows: Gemma-3-270M."""

from pathlib import Path

import pytest
from test_equivalence import (
    Subject,
    subject_of,
    test_a_batch_of_mixed_lengths_is_what_transformers_says,
    test_after_preemption,
    test_alone,
    test_past_every_window,
    test_prefill_cut_in_chunks,
    test_warm_equals_cold,
    weights_loaded_once,
)

__all__ = [
    "test_a_batch_of_mixed_lengths_is_what_transformers_says",
    "test_after_preemption",
    "test_alone",
    "test_past_every_window",
    "test_prefill_cut_in_chunks",
    "test_warm_equals_cold",
    "weights_loaded_once",
]


@pytest.fixture(scope="module")
def subject(gemma_path: Path) -> Subject:
    return subject_of(gemma_path)
