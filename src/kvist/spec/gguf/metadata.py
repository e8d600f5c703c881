"""The metadata of a GGUF header under one architecture's name: checked look-ups, and an account of what was asked."""

from collections.abc import Mapping
from typing import Any

from kvist.errors import BadFile, UnsupportedModel
from kvist.spec.gguf.header import GGUFArray, GGUFHeader, GGUFTensor
from kvist.spec.json_file import shown
from kvist.spec.model import Assumption

_MOST = 2**40
_MOST_LAYERS = 10_000


class Metadata:
    """A header being translated.

    Keys are given without the architecture's name. ``asked`` remembers them, ``names`` which of them became which key
    of Hugging Face's, ``assumed`` what had to be filled in.
    """

    def __init__(self, header: GGUFHeader, architecture: str) -> None:
        self.header = header
        self.architecture = architecture
        self.asked: set[str] = set()
        self.names: dict[str, str] = {}
        self.assumed: list[Assumption] = []

    def get(self, key: str) -> Any:
        """Return the value; None where it is left out."""
        self.asked.add(key)
        return self.header.metadata.get(f"{self.architecture}.{key}")

    def full(self, key: str) -> str:
        """Return the key as the file has it."""
        return f"{self.architecture}.{key}"

    @property
    def keys(self) -> list[str]:
        """All keys under the architecture's name."""
        prefix = f"{self.architecture}."
        return [key.removeprefix(prefix) for key in self.header.metadata if key.startswith(prefix)]

    @property
    def tensors(self) -> Mapping[str, GGUFTensor]:
        """The tensors by name."""
        return self.header.tensor_by_name

    @property
    def blocks(self) -> int:
        """Blocks of the file: the layers, and those behind them that draft tokens."""
        return self._single("block_count", least=1, most=_MOST_LAYERS)

    @property
    def drafting(self) -> int:
        """Blocks that draft tokens ahead, the last of all."""
        drafting = self._single("nextn_predict_layers", default=0, least=0, most=_MOST_LAYERS)
        # Files of DeepSeek-V4 give the number and may leave the blocks out; llama.cpp looks at the tensors too.
        probe = f"blk.{self.blocks - drafting}.nextn.eh_proj.weight"
        if self.architecture == "deepseek4" and self.tensors and probe not in self.tensors:
            return 0
        if drafting >= self.blocks:
            raise self.wrong("nextn_predict_layers", f"less than block_count ({self.blocks})")
        return drafting

    @property
    def layers(self) -> int:
        """Layers that a token goes through."""
        return self.blocks - self.drafting

    def _single(self, key: str, *, least: int, most: int, default: int | None = None) -> int:
        """Return a number on which the number of layers, and so the length of arrays, depends."""
        value = self.get(key)
        if value is None and default is None:
            raise self.missing(key)
        return self._whole(key, default if value is None else value, least, most)

    def count(self, key: str, *, default: int | None = None, least: int = 1, most: int = _MOST) -> int:
        """Return one whole number.

        Raises:
            BadFile: it is missing without a default, of another kind or out of range.
            UnsupportedModel: the file has one for each layer, and they differ.
        """
        value = self.get(key)
        if isinstance(value, GGUFArray):
            several = set(self.each(key, least=least))
            if len(several) != 1:
                raise self.unread(key, f"has values for each layer ({len(several)} different ones); one number is read")
            return several.pop()
        if value is None:
            if default is None:
                raise self.missing(key)
            return default
        return self._whole(key, value, least, most)

    def each(self, key: str, *, default: int | None = None, least: int = 0) -> list[int]:
        """Return a whole number for each layer: of an array, or the one that all share.

        An array may go on behind the layers, for the blocks that draft.
        """
        value = self.get(key)
        if not isinstance(value, GGUFArray):
            return [self.count(key, default=default, least=least)] * self.layers
        return [self._whole(f"{key}[{index}]", entry, least, _MOST) for index, entry in enumerate(self.array(key))]

    def array(self, key: str, count: int | None = None) -> list[Any]:
        """Return the entries of an array for each layer, or for the first ``count`` blocks.

        Raises:
            BadFile: it is no array, or shorter than the layers.
        """
        found = self.get(key)
        if not isinstance(found, GGUFArray):
            raise self.missing(key) if found is None else self.wrong(key, "an array with an entry for each layer")
        needed = self.layers if count is None else count
        # llama.cpp fills arrays of 512 layers from those of the file, which may go on behind the last block.
        if not needed <= found.count <= _MOST_LAYERS:
            raise self.wrong(key, f"an array of at least {needed} entries", given=f"{found.count} entries")
        return self.header.array(self.full(key))[:needed]

    def flags(self, key: str, count: int | None = None) -> list[bool]:
        """Return an array of truth values, as booleans or as numbers."""
        entries = self.array(key, count)
        if not all(isinstance(entry, (bool, int)) for entry in entries):
            raise self.wrong(key, "an array of booleans")
        return [bool(entry) for entry in entries]

    def real(self, key: str, *, default: float | None = None) -> float:
        """Return one number."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise self.missing(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.wrong(key, "a number")
        return float(value)

    def named(self, standard: str, key: str) -> str:
        """Remember that ``key`` is what Hugging Face calls ``standard``, for messages; return it."""
        self.names[standard] = self.full(key)
        return key

    def assume(self, standard: str, value: Any, source: str) -> None:
        """List that ``value`` is taken for Hugging Face's key ``standard``, which the file leaves out."""
        self.assumed.append(Assumption(key=standard, value=value, source=source))

    def _whole(self, key: str, value: Any, least: int, most: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least} to {most}", given=shown(value))
        return value

    def missing(self, key: str) -> BadFile:
        """Return the error for a key that must be there."""
        full = self.full(key)
        return BadFile(f"{self.header.name}: {full} is missing; a {self.architecture} file names it", key=full)

    def wrong(self, key: str, expected: str, *, given: str | None = None) -> BadFile:
        """Return the error for a value that cannot be."""
        full = self.full(key)
        value = given if given is not None else shown(self.header.metadata.get(full))
        return BadFile(f"{self.header.name}: {full} is {value}; it must be {expected}", key=full)

    def unread(self, key: str, why: str) -> UnsupportedModel:
        """Return the error for a mechanism that is not read."""
        full = self.full(key)
        return UnsupportedModel(f"{self.header.name}: {full} {why}", key=full)
