"""By what a cartridge knows its model again: digests of weights and tokenizer, and the rotary positions."""

import json
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvist.errors import UnsupportedModel
from kvist.model.families import network_of
from kvist.spec.model import ModelSpec

# Of each file: its length, and as many pieces of this size, evenly spread. A fine-tuned copy has the same header and
# the same length; it differs nearly everywhere else.
_PIECES = 256
_PIECE = 4096


def model_digest(spec: ModelSpec) -> str:
    """Digest of a model's configuration and of samples of its weights; the same wherever its files lie.

    Raises:
        UnsupportedModel: it has no files.
    """
    if spec.path is None:
        raise UnsupportedModel(f"{spec.name}: {spec.source} describes a model but holds no weights", key="model")
    digest = sha256(json.dumps(dict(spec.config), sort_keys=True, default=str).encode())
    for path in _files(spec.path):
        size = path.stat().st_size
        digest.update(f"{path.name if path.suffix == '.safetensors' else ''} {size}".encode())
        with path.open("rb") as file:
            for number in range(_PIECES):
                file.seek(number * max(0, size - _PIECE) // (_PIECES - 1))
                digest.update(file.read(_PIECE))
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    if path.suffix == ".json":
        path = path.parent
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def rotary_positions(spec: ModelSpec) -> list[dict[str, Any]]:
    """How keys are turned; of the longest sequence only whether it takes the factors for long contexts."""
    found = []
    for rope in network_of(spec).ropes:
        told = asdict(rope)
        longest = told.pop("longest")
        original = (rope.scaling or {}).get("original_max_position_embeddings")
        if original is not None and longest is not None:
            told["long"] = longest > original
        found.append(json.loads(json.dumps(told, default=str)))
    return found
