"""What recurrent layers keep of a sequence, whatever its length: shapes by mechanism.

Each function returns the :class:`~kvist.spec.layers.State` of one layer. Convolutions keep ``kernel - 1`` columns in
bf16; the recurrent part is f32, unless the configuration names another type: :func:`state_codec`. Engines differ in
these two (transformers keeps ``kernel`` columns; the recurrent part follows the model's type in some); the shapes are
the same everywhere.

Sources: ``mamba_utils.py`` of vLLM and of SGLang, the modeling files of transformers, and for mechanisms that none of
these has the reference code named at the function.
"""

from kvist.spec.config_keys import ConfigKeys
from kvist.spec.layers import State

_CODECS = {
    "float32": "f32", "float": "f32", "fp32": "f32",
    "bfloat16": "bf16", "bf16": "bf16", "float16": "f16", "half": "f16", "fp16": "f16",
}  # fmt: skip
_NAMES = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")


def state_codec(keys: ConfigKeys, names: tuple[str, ...] = _NAMES, *, default: str = "f32") -> str:
    """Return the codec of a state: ``default`` unless one of these keys says otherwise.

    Raises:
        UnsupportedModel: a type whose bytes are not known, or two keys that disagree.
    """
    found: dict[str, str] = {}
    for name in names:
        value = keys.get(name)
        if value is None or value == "auto":
            continue
        codec = _CODECS.get(value.removeprefix("torch.")) if isinstance(value, str) else None
        if codec is None:
            raise keys.unread(name, f"a state is stored in float32, bfloat16 or float16: --assume {name}=float32")
        found[name] = codec
    if len(set(found.values())) > 1:
        raise keys.unread(names[1], f"{names[0]} names another type for the same state; --assume one of them is null")
    return next(iter(found.values()), default)


def mamba(*, width: int, state: int, kernel: int, codec: str = "f32") -> State:
    """Mamba-1: ``width`` channels with a convolution over each and ``state`` values for each."""
    return _state("mamba", channels=width, kernel=kernel, recurrent=width * state, codec=codec)


def mamba2(*, width: int, groups: int, state: int, kernel: int, codec: str = "f32") -> State:
    """Mamba-2: as Mamba-1, and the convolution also runs over ``B`` and ``C``, ``groups x state`` values each.

    How the ``width`` is cut into heads changes no byte.
    """
    channels = width + 2 * groups * state
    return _state("mamba2", channels=channels, kernel=kernel, recurrent=width * state, codec=codec)


def gated_delta(
    *, key_heads: int, key_dim: int, value_heads: int, value_dim: int, kernel: int, codec: str = "f32"
) -> State:
    """Gated delta net: a ``key_dim x value_dim`` matrix a value head, a convolution over queries, keys and values."""
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    recurrent = value_heads * key_dim * value_dim
    return _state("gated-delta", channels=channels, kernel=kernel, recurrent=recurrent, codec=codec)


def kda(*, heads: int, dim: int, kernel: int, codec: str = "f32") -> State:
    """Kimi delta attention: a ``dim x dim`` matrix a head, a convolution over queries, keys and values."""
    return _state("kda", channels=3 * heads * dim, kernel=kernel, recurrent=heads * dim * dim, codec=codec)


def lightning(*, heads: int, dim: int, codec: str = "f32") -> State:
    """Lightning attention: a ``dim x dim`` matrix a query head, no convolution."""
    return State(name="lightning", state_elements=heads * dim * dim, state_codec=codec)


def rg_lru(*, width: int, kernel: int) -> State:
    """Griffin's gated linear recurrent unit: one value a channel, after a convolution."""
    return _state("rg-lru", channels=width, kernel=kernel, recurrent=width, codec="f32")


def short_conv(*, channels: int, kernel: int) -> State:
    """A gated short convolution alone, such as LFM2's."""
    return _state("short-conv", channels=channels, kernel=kernel, recurrent=0, codec="f32")


def rwkv(*, hidden: int, recurrent: int) -> State:
    """RWKV: a recurrent part, and the last token's input to time mixing and to channel mixing (token shift).

    ``recurrent`` is 3 values a channel in RWKV-4 (numerator, denominator, exponent) and a ``size x size`` matrix a head
    in RWKV-5 to 7. Sources: RWKV in transformers; chat models of RWKV-LM; ``Rwkv7StateShape`` of SGLang.
    """
    return State(name="rwkv", conv_elements=2 * hidden, conv_columns=1, state_elements=recurrent)


def mlstm(*, heads: int, key_dim: int, value_dim: int, codec: str) -> State:
    """xLSTM's matrix memory: a matrix, a normaliser and a maximum a head."""
    return State(name="mlstm", state_elements=heads * (key_dim * value_dim + key_dim + 1), state_codec=codec)


def _state(name: str, *, channels: int, kernel: int, recurrent: int, codec: str) -> State:
    columns = kernel - 1
    return State(
        name=name,
        conv_elements=channels * columns,
        conv_columns=columns,
        state_elements=recurrent,
        state_codec=codec,
    )
