"""How ranks share a recurrent state: by channels and heads, and of Mamba-2 by whole groups.

Source: ``MambaStateShapeCalculator`` in ``vllm/model_executor/layers/mamba/mamba_utils.py`` of 0.32, and
``Mamba2StateShape`` in ``sglang/srt/configs/mamba_utils.py`` of 0.5.23, which agree.
"""

from collections.abc import Mapping
from typing import Any

from kvist.errors import InputError
from kvist.spec.layers import State
from kvist.spec.model import ModelSpec

_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
_WIDTHS = ("ssm_state_size", "mamba_d_state", "state_size")


def shard_state(spec: ModelSpec, state: State, ranks: int, *, setting: str) -> tuple[int, int]:
    """Elements of the convolution's columns and of the state on one rank.

    Mamba-2 gives every rank whole groups, and as many more as it takes (``extra_groups_for_head_shards``).

    Args:
        spec: the model.
        state: one of its layers.
        ranks: that share it.
        setting: the engine's name for ``ranks``, for errors.

    Raises:
        InputError: the ranks do not divide the state, or the configuration does not say how its groups are shared.
    """
    if ranks == 1:
        return state.conv_elements, state.state_elements
    channels = state.conv_elements // max(state.conv_columns, 1)
    if state.name == "mamba2":
        nested = spec.config.get("text_config")
        config = nested if isinstance(nested, Mapping) else spec.config
        groups, width = _first_of(config, _GROUPS), _first_of(config, _WIDTHS)
        if groups is None or width is None:
            raise InputError(
                f"set: {setting}={ranks}: how the groups of the Mamba-2 layers of {spec.name} are shared depends on "
                f"{' or '.join(_GROUPS)}, which {spec.source} does not have",
                key="set",
            )
        channels += 2 * width * (0 if groups % ranks == 0 else ranks - groups)
    if channels % ranks or state.state_elements % ranks:
        raise InputError(f"set: {setting}={ranks} does not divide the states of {spec.name}", key="set")
    return channels // ranks * state.conv_columns, state.state_elements // ranks


def _first_of(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((config[key] for key in keys if isinstance(config.get(key), int)), None)
