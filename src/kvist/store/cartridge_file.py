"""A cartridge and its file: safetensors, with a manifest in the metadata.

::

    layers.0.keys     [tokens, kv_heads, dim]         as the cache stores them: normed, turned to positions 0 … tokens-1
    layers.0.values   [tokens, kv_heads, dim]
    layers.0.latents  [tokens, 1, rank + rope]        of models with latents, in the place of both

All tensors are float32; serving stores them in the format of its cache.
"""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvist._version import __version__
from kvist.cache.groups import Group
from kvist.errors import BadFile, InputError
from kvist.spec.layers import Attention, Latent

KIND = "kvist.cartridge"
VERSION = 1
_KEY = "kvist"
_LAYER = re.compile(r"0|[1-9][0-9]{0,5}")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a cartridge was made of, and for.

    Attributes:
        model: name of the model.
        model_digest: of its configuration and weights (:func:`kvist.model.fingerprints.model_digest`).
        tokenizer_digest: of its vocabulary.
        rope: its rotary positions.
        tokens: positions that it takes.
        position: of its first.
        frozen: leading tokens that were not trained.
        codec: in which the file stores it.
        document: name of the document.
        document_digest: SHA-256 of its text.
        document_tokens: its length.
        seed: of items and batches.
        steps: of training.
        losses: divergence from the model that reads the document, on held-out items: ``before`` and ``after`` training.
        kvist: version that wrote it.
    """

    model: str
    model_digest: str
    tokenizer_digest: str
    rope: list[dict[str, Any]] = field(default_factory=list)
    tokens: int
    position: int = 0
    frozen: int
    codec: str = "f32"
    document: str
    document_digest: str
    document_tokens: int
    seed: int
    steps: int
    losses: Mapping[str, float] = field(default_factory=dict)
    kvist: str = __version__

    def to_dict(self) -> dict[str, Any]:
        """As ``kvist cartridge info --json`` prints it."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Cartridge:
    """A trained cache.

    Attributes:
        manifest: of what it was made.
        layers: by layer, float32 ``[tokens, 2 x kv_heads, dim]``: keys, then values; or ``[tokens, 1, rank + rope]``.
        digest: SHA-256 of manifest and tensors: its name in the prefix tree.
    """

    manifest: Manifest
    layers: Mapping[int, Tensor]
    digest: str

    @classmethod
    def of(cls, manifest: Manifest, layers: Mapping[int, Tensor]) -> "Cartridge":
        """With the digest of both."""
        digest = sha256(json.dumps(manifest.to_dict(), sort_keys=True).encode())
        for layer in sorted(layers):
            digest.update(layers[layer].contiguous().numpy().tobytes())
        return cls(manifest=manifest, layers=layers, digest=digest.hexdigest())

    @property
    def tokens(self) -> int:
        """Positions that it takes."""
        return self.manifest.tokens

    @property
    def bytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.nbytes for tensor in self.layers.values())

    def save(self, path: Path, groups: tuple[Group, ...]) -> None:
        """Write the file, whole or not at all.

        Raises:
            InputError: it cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        for group in groups:
            for layer in group.layers:
                stored = self.layers[layer]
                if isinstance(group.layer, Latent):
                    tensors[f"layers.{layer}.latents"] = stored.contiguous()
                else:
                    heads = stored.shape[1] // 2
                    tensors[f"layers.{layer}.keys"] = stored[:, :heads].contiguous()
                    tensors[f"layers.{layer}.values"] = stored[:, heads:].contiguous()
        told = json.dumps({"kind": KIND, "version": VERSION, **self.manifest.to_dict()})
        write_tensors(path, tensors, {_KEY: told})

    def check(self, *, model: str, model_digest: str, tokenizer_digest: str, rope: list[dict[str, Any]]) -> None:
        """Refuse a model that it was not made for.

        Raises:
            InputError: names what differs.
        """
        manifest = self.manifest
        named = f"cartridge: of {manifest.document}, made for {manifest.model}"
        if manifest.model_digest != model_digest:
            same = " (of the same name, with other weights)" if manifest.model == model else ""
            raise InputError(
                f"{named}{same}, not for {model}: its keys mean nothing to another model; train one for {model}",
                key="cartridge",
            )
        if manifest.tokenizer_digest != tokenizer_digest:
            raise InputError(f"{named} with another tokenizer; use the tokenizer of its training", key="cartridge")
        if manifest.rope != rope:
            raise InputError(
                f"{named} with other rotary positions; serve it with the context that it was trained with",
                key="cartridge",
            )

    def check_shapes(self, groups: tuple[Group, ...]) -> None:
        """Hold its tensors against what a cache stores.

        Raises:
            BadFile: a layer is missing, there is one too many, or its shape is another; names it.
        """
        expected = {layer: stored_shape(group, self.tokens) for group in groups for layer in group.layers}
        for layer, shape in expected.items():
            if layer not in self.layers:
                raise BadFile(f"cartridge: of {self.manifest.document}, lacks layer {layer}; train it again")
            if tuple(self.layers[layer].shape) != shape:
                raise BadFile(
                    f"cartridge: of {self.manifest.document}, layer {layer} is {list(self.layers[layer].shape)}, and "
                    f"the cache stores {list(shape)}"
                )
        if extra := sorted(self.layers.keys() - expected.keys()):
            raise BadFile(f"cartridge: of {self.manifest.document}, has layer {extra[0]}, which the model has not")


def stored_shape(group: Group, tokens: int) -> tuple[int, int, int]:
    """Shape of what a layer of this group stores of so many tokens.

    Raises:
        InputError: the layers of the group keep something that is no token's.
    """
    match group.layer:
        case Latent(rank=rank, rope_dim=rope_dim):
            return tokens, 1, rank + rope_dim
        case Attention(kv_heads=heads, key_dim=dim, value_dim=value) if dim == value:
            return tokens, 2 * heads, dim
    raise InputError(
        f"cartridge: {group.name}: what these layers remember is not one vector a token, so that no trained cache can "
        f"stand for it; choose a model with attention alone",
        key="cartridge",
    )


def load(path: Path) -> Cartridge:
    """Read a file.

    Raises:
        BadFile: it is torn, no cartridge, of a later version, or its tensors are not what its manifest says.
        InputError: it cannot be opened.
    """
    tensors, metadata = read_tensors(path, what="cartridge")
    manifest = _manifest(path, metadata.get(_KEY))
    layers: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise BadFile(f"{path}: {name} is {tensor.dtype}, not float32")
        match name.split("."):
            case ["layers", number, "latents"] if _LAYER.fullmatch(number) and f"layers.{number}.keys" not in tensors:
                layers[int(number)] = tensor
            case ["layers", number, "keys"] if _LAYER.fullmatch(number) and f"layers.{number}.values" in tensors:
                values = tensors[f"layers.{number}.values"]
                if tensor.dim() != 3 or tensor.shape != values.shape:
                    raise BadFile(f"{path}: {name} is {list(tensor.shape)}, its values {list(values.shape)}")
                layers[int(number)] = torch.cat((tensor, values.float()), dim=1)
            case ["layers", number, "values"] if f"layers.{number}.keys" in tensors:
                pass
            case _:
                raise BadFile(f"{path}: {name}: no tensor of a cartridge")
    for layer, tensor in layers.items():
        if tensor.dim() != 3 or len(tensor) != manifest.tokens:
            raise BadFile(
                f"{path}: layer {layer} is {tensor.dtype} {list(tensor.shape)}, not float32 of {manifest.tokens} tokens"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise BadFile(f"{path}: layer {layer} holds what is no number; train it again")
    return Cartridge.of(manifest, dict(sorted(layers.items())))


def read_manifest(path: Path) -> Manifest:
    """Read what a file says of itself; the tensors stay on disk.

    Raises:
        BadFile, InputError: as :func:`load`.
    """
    return _manifest(path, _opened(path, "cartridge").get(_KEY))


def _manifest(path: Path, text: str | None) -> Manifest:
    try:
        told = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path}: its manifest is no JSON: {error}") from error
    if not isinstance(told, dict) or told.pop("kind", None) != KIND:
        raise BadFile(f"{path}: no cartridge: there is no manifest in it; `kvist cartridge train` writes one")
    version = told.pop("version", None)
    if version != VERSION:
        raise BadFile(f"{path}: a cartridge of version {version!r}; this kvist reads version {VERSION}")
    known = {item.name for item in fields(Manifest)}
    if unknown := sorted(told.keys() - known):
        raise BadFile(f"{path}: the manifest says {unknown[0]}, which this kvist does not know")
    try:
        manifest = Manifest(**told)
    except TypeError as error:
        raise BadFile(f"{path}: the manifest is not whole: {error}") from error
    for key in ("tokens", "frozen", "position", "document_tokens", "steps"):
        value = getattr(manifest, key)
        if type(value) is not int or value < (1 if key == "tokens" else 0):
            raise BadFile(f"{path}: the manifest's {key} is {value!r}, no number of tokens")
    for item in fields(Manifest):
        value = getattr(manifest, item.name)
        # Names are shown on terminals and pages.
        if item.type is str and not (isinstance(value, str) and value.isprintable()):
            raise BadFile(f"{path}: the manifest's {item.name} is {value!r:.60}, no line of text")
    if type(manifest.seed) is not int:
        raise BadFile(f"{path}: the manifest's seed is {manifest.seed!r:.60}, no whole number")
    if not (isinstance(manifest.rope, list) and all(isinstance(rope, dict) for rope in manifest.rope)):
        raise BadFile(f"{path}: the manifest's rope is {manifest.rope!r:.60}, no list of rotary positions")
    losses = manifest.losses
    if not (
        isinstance(losses, dict) and all(type(loss) in (int, float) and isfinite(loss) for loss in losses.values())
    ):
        raise BadFile(f"{path}: the manifest's losses are {losses!r:.60}, no numbers by name")
    if manifest.position != 0:
        raise BadFile(f"{path}: begins at position {manifest.position}; a cartridge begins at 0")
    return manifest


def _opened(path: Path, what: str) -> dict[str, str]:
    try:
        if not path.is_file():
            raise InputError(f"{path}: no such file; name a {what}", key="cartridge")
    except OSError as error:
        raise InputError(f"{str(path)[:60]}: cannot be read: {error.strerror}", key="cartridge") from error
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, ValueError, OSError) as error:
        raise BadFile(f"{path}: torn, or no {what}: {error}") from error


def read_tensors(path: Path, *, what: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a safetensors file, and its metadata.

    Raises:
        BadFile: it is torn or of another kind.
        InputError: there is no such file.
    """
    metadata = _opened(path, what)
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118 (no mapping)
    except (SafetensorError, ValueError, OSError) as error:
        raise BadFile(f"{path}: torn, or no {what}: {error}") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, whole or not at all.

    Raises:
        InputError: it cannot be written.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        save_file(dict(tensors), beside, dict(metadata))
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be written: {error}", key="out") from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
