"""Hold what a configuration says against the tensors beside it: a wrong count on one side must not be planned."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvist.errors import BadFile
from kvist.spec.safetensors import SafetensorsWeights

# As transformers names the text decoders of all supported families, alone or inside a multimodal model.
_LAYER = re.compile(r"(?:(?:model|language_model|text_model)\.)*layers\.(0|[1-9][0-9]{0,5})\.(.+)")
_PROJECTION = re.compile(r"self_attn\.([qkv])_proj\.")
# Other types are packed codes, whose shapes are not those of the matrix.
_WHOLE_TYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a configuration says about the projections of every layer.

    Attributes:
        file: the file that says so, for messages.
        layers_key: under which it gives the number of layers.
        layers: that number.
        query_width: query heads x head width.
        stored_width: KV heads x head width.
        hidden: width of a token between layers; None where it is not said.
    """

    file: str
    layers_key: str
    layers: int
    query_width: int
    stored_width: int
    hidden: int | None

    def hold_layers(self, what: str, found: Iterable[int]) -> None:
        """Raise :class:`BadFile` unless ``what`` is there for layers 0 to ``layers - 1`` and no other."""
        present = set(found)
        if len(present) == self.layers and max(present, default=-1) == self.layers - 1:
            return
        gap = next((index for index in range(len(present)) if index not in present), None)
        said = f"the tensors hold {what} of {len(present)} {'layer' if len(present) == 1 else 'layers'}"
        if gap is not None:
            said += f", the last {max(present)}, without {gap}"
        raise BadFile(
            f"{self.file}: {self.layers_key} is {self.layers}, but {said}; one of the two is wrong: fetch it again",
            key=self.layers_key,
        )

    def hold_shape(self, name: str, side: str, shape: tuple[int, ...]) -> None:
        """Raise :class:`BadFile` unless the projection ``side`` (q, k or v) called ``name`` has the right shape."""
        rows = self.query_width if side == "q" else self.stored_width
        heads = "query" if side == "q" else "KV"
        if not shape or shape[0] != rows:
            raise BadFile(
                f"{self.file}: {name} gives {shape[0] if shape else 0} values a token, the metadata {rows} "
                f"({heads} heads x head width)",
                key=name,
            )
        if self.hidden is not None and len(shape) == 2 and shape[1] != self.hidden:
            raise BadFile(f"{self.file}: {name} takes {shape[1]} values, the hidden size is {self.hidden}", key=name)


def hold_safetensors(config: Mapping[str, Any], weights: SafetensorsWeights, *, file: str) -> None:
    """Hold a completed configuration against the tensors of its directory, where their names follow the family.

    Raises:
        BadFile: other layers, or other widths of keys and values, than the configuration says.
    """
    claim = Claim(
        file=file,
        layers_key="num_hidden_layers",
        layers=config["num_hidden_layers"],
        query_width=config["num_attention_heads"] * config["head_dim"],
        stored_width=config["num_key_value_heads"] * config["head_dim"],
        hidden=config.get("hidden_size"),
    )
    layers: set[int] = set()
    sides: dict[str, set[int]] = {"k": set(), "v": set()}
    for name, tensor in weights.tensors.items():
        match = _LAYER.fullmatch(name)
        if not match:
            continue
        layers.add(int(match[1]))
        projection = _PROJECTION.match(match[2])
        if not projection:
            continue
        side = projection[1]
        sides.setdefault(side, set()).add(int(match[1]))
        if match[2].endswith("_proj.weight") and tensor.dtype in _WHOLE_TYPES:
            claim.hold_shape(name, side, tensor.shape)
    if not sides["k"]:
        return
    claim.hold_layers("weights", layers)
    for side, what in (("k", "keys"), ("v", "values")):
        claim.hold_layers(what, sides[side])
