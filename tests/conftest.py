"""Settings for all tests, and the fixtures that many of them share."""

import os
import signal
from collections.abc import Iterator

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


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """What a test does to signals must not reach the next one, nor the processes that it starts."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    after = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before
