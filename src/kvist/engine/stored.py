"""In which type an engine computes, and in which groups it stores what its model remembers."""

from kvist.cache.grouping import DEFAULT_BLOCK_TOKENS, groups_of
from kvist.cache.groups import Group
from kvist.cache.lead_groups import lead_groups
from kvist.engine.loading import DTYPES, best_dtype
from kvist.errors import InputError
from kvist.spec.formats import CacheFormat, require_format
from kvist.spec.model import ModelSpec
from kvist.store.layouts import check_format


def compute_type(dtype: str | None, spec: ModelSpec) -> str:
    """The type that is asked for; left out, the one in which this machine computes the model fastest.

    Raises:
        InputError: there is none of this name, or the model's activations overflow it.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype: {dtype!r} is not a compute type; choose one of {', '.join(DTYPES)}", key="dtype")
    if dtype == "f16" and str(spec.config["model_type"]).startswith("gemma"):
        raise InputError("dtype: Gemma's activations overflow f16; choose bf16 or f32", key="dtype")
    return dtype or best_dtype(spec)


def stored_format(fmt: CacheFormat | None, dtype: str) -> CacheFormat:
    """The format of a cache beside computation in this type; None: that type itself."""
    return (fmt or CacheFormat(key=dtype, value=dtype)).computed_in(dtype)


def stored_groups(
    spec: ModelSpec,
    fmt: CacheFormat,
    dtype: str,
    *,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    cartridge_format: CacheFormat | None = None,
) -> tuple[Group, ...]:
    """The groups of a model whose cache has this format, and those of cartridges where they have one of their own.

    Args:
        spec: the model.
        fmt: of :func:`stored_format`.
        dtype: in which it is computed.
        block_tokens: tokens of a block.
        cartridge_format: of cartridges; None: as all else.

    Raises:
        InputError: the model or the engine does not store it so.
    """
    groups = groups_of(spec.computed_in(dtype), fmt, block_tokens)
    if cartridge_format is not None:
        groups += lead_groups(spec, require_format(cartridge_format, key="cartridge_format"), block_tokens)
    for group in groups:
        check_format(group)
    return groups
