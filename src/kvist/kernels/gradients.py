"""Whether what is being built must let gradients through: then it is PyTorch's own operators alone.

The compiled kernels, and oneDNN's products on weights in its own layout, know no way back. What is built inside
:func:`differentiable` uses neither, nor weights that stay packed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_WANTED: ContextVar[bool] = ContextVar("gradients", default=False)


def gradients_wanted() -> bool:
    """Whether this is asked inside :func:`differentiable`."""
    return _WANTED.get()


@contextmanager
def differentiable() -> Iterator[None]:
    """Build networks that autograd can follow; frozen weights all the same."""
    token = _WANTED.set(True)
    try:
        yield
    finally:
        _WANTED.reset(token)
