"""Families whose readers complete all that the engine needs: Llama, Mistral, Qwen 2 and 3, Gemma 3.

Their completed configurations have the same keys whatever their source, so that a network can be built from them
without asking again.
"""

from kvist.errors import UnsupportedModel
from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families.reading import (
    FULL,
    SLIDING,
    Reading,
    Shape,
    Size,
    class_default,
    complete_network,
    heads_and_widths,
    layer_types,
    only_full,
    reading_of,
    refuse_encoder,
)
from kvist.spec.families.windows import full_every, kinds_of, says_window, switched


def _llama(keys: ConfigKeys) -> Reading:
    """Llama and all that publish under its name: every layer attends to everything.

    Source: LlamaConfig and LlamaAttention of transformers.
    """
    shape = heads_and_widths(keys, head_dim=None, kv_heads=None, size=Size(layers=32, heads=32, hidden=4096))
    if keys.get("sliding_window") is not None:
        keys.note("sliding_window", None, "printed, but attention of the llama family has no window")
    only_full(keys, shape.layers)
    complete_network(keys, context=2048, theta=10000.0, bias=False)
    keys.flag("mlp_bias", default=False)
    keys.set("sliding_window", None)
    return reading_of(keys, shape, [FULL] * shape.layers, None)


def _mistral(keys: ConfigKeys) -> Reading:
    """Mistral: one window for all layers, or none.

    Every published file prints ``sliding_window``, a number or null. Copies that drop their nulls mean none where
    MistralConfig of transformers would take 4,096, so a file without the key cannot be read exactly. A part of a
    larger file prints what differs from the class, and so means 4,096.
    """
    shape = heads_and_widths(keys, head_dim=None, kv_heads=8, size=Size(layers=32, heads=32, hidden=4096))
    window = None
    if says_window(keys, 4096):
        window = keys.count("sliding_window", default=4096, source=class_default(keys))
    kinds = [SLIDING if window else FULL] * shape.layers
    if keys.get("layer_types") is not None and layer_types(keys, shape.layers) != kinds:
        raise UnsupportedModel(
            f"{keys.name}: layer_types mixes layers; model_type mistral has one kind", key="layer_types"
        )
    complete_network(keys, context=131072, theta=10000.0, bias=False)
    return reading_of(keys, shape, kinds, window)


_QWEN = Size(layers=32, heads=32, hidden=4096)


def _qwen2(keys: ConfigKeys) -> Reading:
    """Qwen 1.5 to 2.5.

    Source: Qwen2Config of transformers.
    """
    shape = heads_and_widths(keys, head_dim=None, kv_heads=32, size=_QWEN)
    keys.set("attention_bias", True)
    return _qwen(keys, shape)


def _qwen3(keys: ConfigKeys) -> Reading:
    """Qwen 3, dense; its head width does not follow from the hidden size.

    Source: Qwen3Config of transformers.
    """
    shape = heads_and_widths(keys, head_dim=128, kv_heads=32, size=_QWEN)
    keys.flag("attention_bias", default=False)
    return _qwen(keys, shape)


def _qwen(keys: ConfigKeys, shape: Shape) -> Reading:
    """A window, when switched on, is on the layers from ``max_window_layers`` on: the first ones stay full."""
    window = None
    keys.get("sliding_window")
    if keys.flag("use_sliding_window", default=False):
        window = keys.count("sliding_window", default=4096, source=class_default(keys))
    kinds = kinds_of(keys, shape.layers, switched)
    complete_network(keys, context=32768, theta=10000.0, bias=None)
    return reading_of(keys, shape, kinds, window)


def _gemma3(keys: ConfigKeys) -> Reading:
    """Gemma 3, text or with its vision tower, whose images become text tokens and so cost what tokens cost.

    Source: Gemma3Config of transformers; the text model lies under ``text_config``.
    """
    inner = keys.nested("text_config", model_type="gemma3_text")
    return _gemma3_text(inner)


def _gemma3_text(keys: ConfigKeys) -> Reading:
    """Gemma 3's decoder: five layers with a window, then one without.

    Source: Gemma3TextConfig of transformers.
    """
    refuse_encoder(keys, causal=(None, False))
    default = class_default(keys)
    shape = heads_and_widths(keys, head_dim=256, kv_heads=4, heads=8, size=Size(layers=26, hidden=2304))
    window = keys.count("sliding_window", default=4096, source=default)
    kinds = kinds_of(keys, shape.layers, full_every(6, key="sliding_window_pattern"))
    keys.fill("query_pre_attn_scalar", 256)
    keys.fill("hidden_activation", "gelu_pytorch_tanh")
    keys.optional_text("hidden_activation")
    keys.set("hidden_act", keys.get("hidden_activation"))
    for scale in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
        keys.set(scale, keys.optional_number(scale))
    complete_network(keys, context=131072, theta=1_000_000.0, bias=False, tied=True, local_theta=10000.0)
    return reading_of(keys, shape, kinds, window)


DECODERS = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3_text": _gemma3_text,
    "gemma3": _gemma3,
}
