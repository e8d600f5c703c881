"""Rotary position embeddings (arXiv:2104.09864), in the half-split arrangement of Hugging Face's checkpoints."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvist.errors import UnsupportedModel
from kvist.kernels.cpu import Cpu
from kvist.model.network import Rope
from kvist.model.norms import RMSNorm
from kvist.model.weights import Checkpoint

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Rotary:
    """Angles of one base and scaling.

    Args:
        dim: leading elements of a head that are turned.
        theta: base of the frequencies.
        scaling: ``rope_scaling`` of the configuration, or None.
        factors: divisors of the frequencies, float32 ``[dim / 2]``, where a file stores them as a tensor.
        width: of a head; ``dim`` where all of it is turned.
        trained: ``max_position_embeddings`` of the configuration.
        longest: tokens of the longest sequence that will be computed.

    Raises:
        UnsupportedModel: the scaling is of another kind, or lacks what it is computed from; names it.
    """

    def __init__(
        self,
        dim: int,
        theta: float,
        scaling: Mapping[str, Any] | None = None,
        factors: Tensor | None = None,
        *,
        width: int | None = None,
        trained: int | None = None,
        longest: int | None = None,
    ) -> None:
        self.dim = dim
        self.partial = width is not None and width != dim
        wavelengths = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
        scaling = scaling or {"rope_type": "default"}
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind == "longrope":
            self.frequencies, self.length = _longrope(wavelengths, scaling, trained=trained, longest=longest)
        elif kind == "yarn":
            self.frequencies, self.length = _yarn(wavelengths, scaling, theta=theta, trained=trained)
        else:
            self.frequencies, self.length = _scaled(1.0 / wavelengths, scaling, factors), 1.0

    @classmethod
    def of(cls, rope: Rope, checkpoint: Checkpoint) -> "Rotary":
        """The angles that a network describes; factors are read from its file."""

        def read(name: str) -> Tensor:
            factors = torch.empty(rope.dim // 2)
            checkpoint.read(name, (rope.dim // 2,), factors)
            return factors

        scaling, factors = rope.scaling, None
        match scaling:
            case {"rope_type": "frequency_factors", "tensor": name}:
                factors = read(name)
            case {"rope_type": "longrope", "long_tensor": long, "short_tensor": short}:
                scaling = {**(scaling or {}), "long_factor": read(long).tolist(), "short_factor": read(short).tolist()}
        return cls(rope.dim, rope.theta, scaling, factors, width=rope.width, trained=rope.trained, longest=rope.longest)

    def tables(self, positions: Tensor, dtype: torch.dtype, kernels: Cpu | None) -> "Rotation | FusedRotation":
        """Make the factors of a step.

        Args:
            positions: int64 ``[tokens]``.
            dtype: of the queries and keys that will be turned.
            kernels: that turn them, or None.
        """
        angles = positions.float()[:, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.length != 1.0:
            cos, sin = cos * self.length, sin * self.length
        if kernels is not None and not self.partial:
            return FusedRotation(cos=cos, sin=sin, kernels=kernels)
        return Rotation(
            cos=torch.cat((cos, cos), dim=-1).to(dtype)[:, None],
            sin=torch.cat((-sin, sin), dim=-1).to(dtype)[:, None],
        )

    def onward(self, by: int) -> "Rotation":
        """What turns vectors that were turned to their positions to those ``by`` further on; their lengths stay."""
        angles = by * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        return Rotation(cos=torch.cat((cos, cos))[None, None], sin=torch.cat((-sin, sin))[None, None])


class Rotation:
    """Cosines and signed sines of a step's positions, each ``[tokens, 1, dim]``."""

    def __init__(self, *, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin
        self.half = cos.shape[-1] // 2

    def turn(self, heads: Tensor, norm: RMSNorm | None) -> None:
        """Norm each head, where there is a norm, and turn it: ``[tokens, heads, dim]``, in place."""
        if norm is not None:
            heads.copy_(norm(heads))
        turned = heads[..., : 2 * self.half]
        swapped = torch.roll(turned, self.half, -1)
        turned.mul_(self.cos).addcmul_(swapped, self.sin)


class FusedRotation:
    """The same on the kernels of the CPU: cosines and sines in float32, each ``[tokens, dim / 2]``."""

    def __init__(self, *, cos: Tensor, sin: Tensor, kernels: Cpu) -> None:
        self.cos = cos
        self.sin = sin
        self.kernels = kernels

    def turn(self, heads: Tensor, norm: RMSNorm | None) -> None:
        """As :meth:`Rotation.turn`."""
        multiplier, eps = (None, 0.0) if norm is None else (norm.multiplier, norm.eps)
        self.kernels.rotate(heads, self.cos, self.sin, multiplier, eps)


def _scaled(frequencies: Tensor, scaling: Mapping[str, Any], factors: Tensor | None) -> Tensor:
    kind = scaling.get("rope_type", scaling.get("type"))
    needed = {"linear": ("factor",), "llama3": _LLAMA3}.get(str(kind), ())
    for key in needed:
        if scaling.get(key) is None:
            raise UnsupportedModel(f"rope_scaling: {kind} needs {key}; add it", key=f"rope_scaling.{key}")
    match kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / float(scaling["factor"])
        case "frequency_factors" if factors is not None:
            return frequencies / factors
        case "llama3":
            return _llama3(frequencies, scaling)
    raise UnsupportedModel(
        f"rope_scaling: {kind!r} is not computed; supported are none, linear, llama3, longrope, "
        f"yarn and a tensor of factors",
        key="rope_scaling",
    )


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: slow long wavelengths down, keep short ones, blend between (``_compute_llama3_parameters``)."""
    factor, low, high, original = (float(scaling[key]) for key in _LLAMA3)
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) / factor * frequencies + smooth * frequencies
    slowed = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, slowed)


def _longrope(
    wavelengths: Tensor, scaling: Mapping[str, Any], *, trained: int | None, longest: int | None
) -> tuple[Tensor, float]:
    """Phi-3's long contexts (arXiv:2402.13753): a divisor a frequency, and a factor of turned vectors' lengths.

    There are two sets of divisors, for sequences within the context that the model was first trained on and for longer
    ones. transformers takes the set by each sequence's length, and computes a sequence anew that outgrows the first;
    keys that are kept, and shared, have been turned by one set. So the longest sequence decides, as in vLLM and
    llama.cpp: with a shorter limit the model computes as transformers does for short sequences.

    Raises:
        UnsupportedModel: a key is missing, or there are not as many divisors as frequencies.
    """
    original = scaling.get("original_max_position_embeddings")
    if original is None or original <= 1 or trained is None or longest is None:
        raise UnsupportedModel(
            f"rope_scaling: longrope needs original_max_position_embeddings above 1, not {original}; add it",
            key="rope_scaling",
        )
    kind = "long_factor" if longest > original else "short_factor"
    divisors = torch.tensor(scaling.get(kind) or [])
    if divisors.shape != wavelengths.shape:
        raise UnsupportedModel(
            f"rope_scaling.{kind}: {len(divisors)} divisors for {len(wavelengths)} frequencies; give one for each",
            key=f"rope_scaling.{kind}",
        )
    factor = scaling.get("factor") or trained / original
    length = scaling.get("attention_factor")
    if length is None:
        length = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (divisors * wavelengths), float(length)


def yarn_length(factor: float, share: float = 1.0) -> float:
    """How much longer YaRN makes turned vectors whose context grew by ``factor`` (arXiv:2309.00071, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def _yarn(
    wavelengths: Tensor, scaling: Mapping[str, Any], *, theta: float, trained: int | None
) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071, section 3.2): slow long wavelengths down, keep short ones, a ramp between.

    The ramp lies over the indices of the frequencies, between those that turn ``beta_fast`` and ``beta_slow`` times
    within the original context; it ends at whole indices unless ``truncate`` is false (gpt-oss). Turned vectors become
    longer by ``attention_factor``, or by what the factor gives; DeepSeek divides that by its ``mscale_all_dim``, which
    scales the whole score instead.

    Raises:
        UnsupportedModel: neither a factor nor the original context is there.
    """
    original, factor = scaling.get("original_max_position_embeddings") or trained, scaling.get("factor")
    if original is None or (factor is None and trained is None):
        raise UnsupportedModel(
            "rope_scaling: yarn needs factor and original_max_position_embeddings; add them", key="rope_scaling"
        )
    factor = float(factor if factor is not None else (trained or 0) / original)
    dim = 2 * len(wavelengths)

    def index(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(scaling.get("beta_fast") or 32), index(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2) - low) / (high - low if high != low else 0.001)
    slowed = ramp.clamp(0, 1)
    share, divisor = scaling.get("mscale"), scaling.get("mscale_all_dim")
    length = scaling.get("attention_factor")
    if length is None and share and divisor:
        length = yarn_length(factor, share) / yarn_length(factor, divisor)
    elif length is None:
        length = yarn_length(factor)
    return slowed / (factor * wavelengths) + (1 - slowed) / wavelengths, float(length)
