"""Settings for all tests, and the fixtures that many of them share."""

import os

import pytest
from fixtures_models import gemma_path, smollm2_path
from hypothesis import settings

# The tests' own models come from package wheels; a hub must never be asked.
os.environ["HF_HUB_OFFLINE"] = "1"
# The GPU's kernels run in Triton's interpreter unless the caller says otherwise; read when Triton is first imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("default", deadline=None)
settings.load_profile("default")

__all__ = ["gemma_path", "smollm2_path"]


def pytest_configure(config: pytest.Config) -> None:
    """Keep transformers' progress bars out of test output."""
    os.environ.setdefault("TQDM_DISABLE", "1")
