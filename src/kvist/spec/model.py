"""One description of a model's memory, which the planner, the simulator and the engine share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvist.spec.formats import CacheFormat, require_format
from kvist.spec.layers import Attention
from kvist.units import require_tokens

Layer = Attention


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """A key that the published files leave out, the value taken for it, and where that value comes from."""

    key: str
    value: Any
    source: str


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What a model must remember, and what its weights weigh.

    Attributes:
        name: how the model is called in answers and by the server.
        source: the file or list that it was read from.
        layers: one entry a decoder layer, first to last.
        max_context: longest sequence, in tokens, that the model was made for.
        parameters: number of weights, where the source tells.
        weights_bytes: bytes of the weights as stored in the source.
        weights_by_type: the same by stored type, such as ``{"Q4_1": 84934656, "F32": 140544}``.
        config: the published configuration under Hugging Face's names, whatever the source's own names are;
            what the engine builds the network from.
        assumed: what the source leaves out.
        path: the file or directory on disk, where there is one.
        exact: false only where the user overrode what is published.
    """

    name: str
    source: str
    layers: tuple[Layer, ...]
    max_context: int
    parameters: int | None = None
    weights_bytes: int | None = None
    weights_by_type: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    assumed: tuple[Assumption, ...] = ()
    path: Path | None = None
    exact: bool = True

    def sequence_bytes(self, tokens: int, fmt: CacheFormat) -> int:
        """Logical bytes of one sequence of ``tokens``: windows hold ``min(tokens, window)``, no block rounding.

        Raises:
            InputError: ``tokens`` is no whole number of 0 or more, or ``fmt`` no :class:`CacheFormat`.
        """
        require_tokens(tokens)
        require_format(fmt)
        return sum(layer.bytes(tokens, fmt) for layer in self.layers)

    def append_bytes_per_token(self, fmt: CacheFormat) -> int:
        """Bytes that one more token adds while every layer still grows."""
        require_format(fmt)
        return sum(layer.token_bytes(fmt) for layer in self.layers)

    def retained_bytes_per_token(self, fmt: CacheFormat) -> int:
        """Bytes that one more token adds once every window is full."""
        require_format(fmt)
        return sum(layer.token_bytes(fmt) for layer in self.layers if layer.window is None)

    @classmethod
    def read(cls, model: str | Path, *, assume: Mapping[str, Any] | None = None) -> "ModelSpec":
        """Read a model from a ``config.json``, a model directory, a ``.gguf`` file or a known name.

        ``assume`` replaces or completes published keys, by Hugging Face's names; the answer is then not exact.

        Raises:
            UnknownModel: nothing of that name.
            UnsupportedModel: it cannot be read exactly; names the key that stopped it.
            BadFile: the file is torn or of another kind.
        """
        from kvist.spec.read import read_model

        return read_model(model, assume=assume)
