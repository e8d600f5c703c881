"""Session fixtures with the real models that PyPI wheels carry; tests skip where they cannot be fetched.

Every test may ask for them: ``conftest.py`` imports them.
"""

from pathlib import Path

import pytest

from kvist import model_files
from kvist.errors import KvistError


def _located(name: str) -> Path:
    try:
        return model_files.locate(name)
    except KvistError as error:
        pytest.skip(f"{name} cannot be fetched: {error}")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct in Q4_1: GQA 9/3 x 64, 30 layers, byte-level BPE of 49,152 tokens."""
    return _located("smollm2-135m")


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma-3-270M in Q4_K_M: MQA 4/1 x 256, 18 layers, windows of 512 on 15 of them, 262,144 tokens."""
    return _located("gemma-3-270m")
