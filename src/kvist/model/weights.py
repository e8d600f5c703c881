"""Parameters out of GGUF files and safetensors directories, asked for under Hugging Face's names.

A checkpoint is opened without reading its tensors; each is read straight into the place where the network keeps it,
so that never more than one layer exists twice.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kvist.errors import BadFile, InputError, UnsupportedModel
from kvist.kernels.gradients import gradients_wanted
from kvist.model.gguf_tensors import GGUFTensors
from kvist.model.network import Network
from kvist.model.packed import Codes
from kvist.spec.model import ModelSpec

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def dtype_named(name: str) -> torch.dtype:
    """Return the compute type of this name.

    Raises:
        InputError: the engine does not compute in it.
    """
    if name not in DTYPES:
        raise InputError(f"dtype: {name!r} is not computed in; choose one of {', '.join(DTYPES)}", key="dtype")
    return DTYPES[name]


class Tensors(Protocol):
    """Named tensors of one source, under the network's own names."""

    name: str

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, outermost dimension first; None where there is none."""

    def read(self, name: str, into: Tensor) -> None:
        """Copy a tensor into ``into``, of the same shape and any floating type."""

    def codes(self, name: str) -> Codes | None:
        """A matrix as its codes, where it is stored as such."""

    def source(self, name: str) -> str:
        """The name of the stored tensor of which this one is all or a part."""

    def names(self) -> Iterable[str]:
        """All stored tensors of the decoder; other parts of a model, such as a vision tower, are left out."""


class Checkpoint:
    """The parameters of a model, each read once.

    Args:
        spec: names the file or directory and, through its configuration, the family.
        dtype: of the tensors handed out.
        network: whose tensors they are.

    Raises:
        UnsupportedModel: there are no weights, or they are stored in a type that is not read.
        BadFile: torn or of another kind.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, network: Network) -> None:
        self.dtype = dtype
        if spec.path is None:
            raise UnsupportedModel(
                f"{spec.name}: {spec.source} describes the model but holds no weights; "
                f"name a .gguf file or a directory with safetensors"
            )
        self.tensors: Tensors
        if spec.path.is_dir():
            self.tensors = SafetensorsTensors(spec.path, network)
            # GGUF files hold the multiplier itself.
            self.norm_offset = network.norm_offset
        else:
            self.tensors = GGUFTensors(spec.path, spec.config)
            self.norm_offset = 0.0
        self.taken: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the source holds this tensor."""
        return self.tensors.shape(name) is not None

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """Read one tensor.

        Raises:
            BadFile: it is missing or of another shape.
        """
        return self.rows([name], [shape])

    def rows(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        """Read several tensors as one, stacked along their first dimension.

        Raises:
            BadFile: one is missing or of another shape.
        """
        heights = [shape[0] for shape in shapes]
        stacked = torch.empty([sum(heights), *shapes[0][1:]], dtype=self.dtype)
        for name, shape, part in zip(names, shapes, torch.split(stacked, heights), strict=True):
            self.read(name, shape, part)
        return stacked

    def codes(self, names: Sequence[str], move: Callable[[Tensor], Tensor] | None = None) -> Codes | None:
        """Several matrices stacked along their rows, as :meth:`rows` reads them, but as their codes.

        Args:
            names: of matrices that were read, and found to have the right shapes.
            move: reorders rows, or columns by whole groups; see :meth:`Codes.moved`.

        Returns:
            None where one of them is stored otherwise, where the compute type is not bf16, or gradients are wanted.
        """
        if self.dtype != torch.bfloat16 or gradients_wanted():
            return None
        parts: list[Codes] = []
        for name in names:
            part = self.tensors.codes(name)
            if part is None:
                return None
            parts.append(part)
        codes = Codes.stack(parts)
        return codes if move is None else codes.moved(move)

    def norm(self, name: str, width: int) -> Tensor:
        """Read the multiplier of a norm, float32 ``[width]``."""
        return self.vector(name, width).add_(self.norm_offset)

    def vector(self, name: str, *shape: int) -> Tensor:
        """Read a small tensor in float32, whatever the compute type: a bias of a norm, decays of a state."""
        read = torch.empty(shape)
        self.read(name, shape, read)
        return read

    def read(self, name: str, shape: Sequence[int], into: Tensor) -> None:
        """Read one tensor into ``into``.

        Raises:
            BadFile: it is missing or of another shape.
        """
        found = self.tensors.shape(name)
        if found is None:
            raise BadFile(f"{self.tensors.name}: tensor {name!r} is missing", key=name)
        if found != tuple(shape):
            raise BadFile(
                f"{self.tensors.name}: tensor {name!r} has shape {list(found)}; "
                f"the configuration asks for {list(shape)}",
                key=name,
            )
        self.tensors.read(name, into)
        self.taken.add(self.tensors.source(name))

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Hold what was read against what is there.

        Raises:
            UnsupportedModel: a tensor of the decoder was not used, so that the network would not be the published one.
        """
        unused = {self.tensors.source(name) for name in ignored}
        left = sorted(set(self.tensors.names()) - self.taken - unused)
        if left:
            raise UnsupportedModel(
                f"{self.tensors.name}: tensor {left[0]!r} is not part of the network that the configuration describes"
                + (f", nor are {len(left) - 1} others" if len(left) > 1 else ""),
                key=left[0],
            )


class SafetensorsTensors:
    """A model directory: one file, or shards that an index names."""

    def __init__(self, directory: Path, network: Network) -> None:
        from safetensors import SafetensorError, safe_open

        from kvist.spec.safetensors import read_weights

        headers = read_weights(directory)
        if headers is None:
            raise UnsupportedModel(f"{directory}: holds no .safetensors file")
        self.name = str(directory)
        self.headers = headers.tensors
        self.parts, self.ignored, self.drafts = network.parts, network.ignored, network.drafts
        stored = network.parts(network.embedding).name
        # The decoder's own prefix, such as ``model.``, and what the embedding is called below it.
        last = ".".join(stored.rsplit(".", 2)[-2:])
        self.root = stored.removesuffix(last)
        embedding = next((name for name in self.headers if name == last or name.endswith(f".{last}")), None)
        if embedding is None:
            raise BadFile(f"{directory}: no tensor is called {last}", key=last)
        # A model with a vision tower keeps its decoder under a longer prefix.
        self.prefix = embedding.removesuffix(last)
        self.stacks: set[str] = set()
        self.files: dict[str, Any] = {}
        for path in sorted(directory.glob("*.safetensors")):
            if path.name.startswith("consolidated"):
                continue
            try:
                file: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise BadFile(f"{path}: cannot be read: {error}") from error
            for stored in file.keys():  # noqa: SIM118 (not a mapping)
                self.files.setdefault(stored, file)

    def stored(self, name: str) -> str:
        """The name in the files: the decoder's prefix in place of its root, such as ``model.``."""
        if self.root and name.startswith(self.root):
            return self.prefix + name.removeprefix(self.root)
        whole = self.prefix == self.root or self.prefix.endswith(f".{self.root}")
        return self.prefix.removesuffix(self.root) + name if whole else name

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See :class:`Tensors`."""
        part = self.parts(name)
        header = self.headers.get(self.stored(part.name))
        if header is None:
            return None
        try:
            found = torch.empty(header.shape, device="meta")
            found = found if part.index is None else found[part.index]
            return tuple((found if part.take is None else part.take(found)).shape)
        except (RuntimeError, IndexError):
            # Too small for the part: what is stored is what the message should show.
            return header.shape

    def source(self, name: str) -> str:
        """See :class:`Tensors`; of a stack of several, such as all experts of a layer, one counts by itself."""
        part = self.parts(name)
        stored = self.stored(part.name)
        if part.index is None:
            return stored
        self.stacks.add(stored)
        return f"{stored}[{part.index}]"

    def read(self, name: str, into: Tensor) -> None:
        """See :class:`Tensors`."""
        part = self.parts(name)
        stored = self.stored(part.name)
        if self.headers[stored].dtype not in ("F32", "F16", "BF16", "F64"):
            raise UnsupportedModel(
                f"{self.name}: tensor {name!r} is stored as {self.headers[stored].dtype}; F32, F16 and BF16 are read",
                key=name,
            )
        file = self.files[stored]
        found = file.get_tensor(stored) if part.index is None else file.get_slice(stored)[part.index]
        into.copy_(found if part.take is None else part.take(found))

    def codes(self, name: str) -> Codes | None:
        """See :class:`Tensors`."""
        return None

    def names(self) -> Iterable[str]:
        """See :class:`Tensors`."""
        drafts = tuple(self.stored(beginning) for beginning in self.drafts)
        for stored in self.headers:
            ignored = stored.endswith(self.ignored) or stored.startswith(drafts)
            if stored.startswith(self.prefix) and not ignored:
                if stored in self.stacks:
                    yield from (f"{stored}[{index}]" for index in range(self.headers[stored].shape[0]))
                else:
                    yield stored
