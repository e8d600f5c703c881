"""The bytes of one group of layers: allocated as its blocks become more, copied, and pickled."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.cache.sequence import BlockCopy
from kvist.errors import DoesNotFit
from kvist.hf.blocks import layout_of
from kvist.store.layouts import PagedKV, Scratch
from kvist.units import format_size

Bytes = npt.NDArray[np.uint8]


class GroupMemory:
    """The memory of one group, which grows, and the store that is laid over it.

    Attributes:
        group: whose blocks lie here.
        array: the bytes where they are the machine's own memory, which the system can grow in place.
        tensor: the bytes, uint8; None before the first tokens.
        store: keys and values in them.

    Raises:
        InputError: the group's format is not stored.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.array: Bytes | None = None
        self.tensor: Tensor | None = None
        # What cannot be stored is refused before the first tokens come.
        self._lay_nowhere()

    def fit(self, layout: ArenaLayout, device: torch.device) -> None:
        """Make it as large as ``layout``; views that were taken of it before may not be used again."""
        size = layout.total_bytes
        if size == (0 if self.tensor is None else self.tensor.numel()):
            return
        with torch.inference_mode(False):
            if device.type != "cpu":
                grown = torch.zeros(size, dtype=torch.uint8, device=device)
                if self.tensor is not None:
                    grown[: self.tensor.numel()] = self.tensor
            else:
                try:
                    if self.array is None:
                        self.array = np.zeros(size, np.uint8)
                    else:
                        # The system moves its pages, where it can, and copies nothing; nobody may look at them then.
                        self.tensor = None
                        self._lay_nowhere()
                        self.array.resize(size, refcheck=False)
                except MemoryError as error:
                    raise DoesNotFit(f"memory: {format_size(size)} cannot be allocated") from error
                grown = torch.from_numpy(self.array)
            self.tensor = grown
        self._lay(grown, layout)

    def copied(self, layout: ArenaLayout) -> "GroupMemory":
        """Another with the same content."""
        twin = GroupMemory(self.group)
        if self.tensor is not None:
            twin.fit(layout, self.tensor.device)
            assert twin.tensor is not None
            twin.tensor.copy_(self.tensor)
        return twin

    def __reduce__(self) -> tuple[Callable[..., "GroupMemory"], tuple[Group, Bytes | None, str]]:
        # Views of the bytes, and functions, are made again.
        bytes_, device = (None, "cpu") if self.tensor is None else (self.tensor.cpu().numpy(), str(self.tensor.device))
        return GroupMemory.restored, (self.group, bytes_, device)

    @classmethod
    def restored(cls, group: Group, bytes_: Bytes | None, device: str) -> "GroupMemory":
        """One that holds these bytes, uint8 ``[whole blocks]``, or none, on a device."""
        made = cls(group)
        if bytes_ is not None:
            made.fit(layout_of(group, bytes_.size // group.block_bytes), torch.device(device))
            assert made.tensor is not None
            made.tensor.copy_(torch.from_numpy(bytes_.copy()))
        return made

    def copy(self, each: BlockCopy) -> None:
        """Copy a whole block."""
        assert self.tensor is not None
        size = self.group.block_bytes
        source, target = each.source * size, each.target * size
        self.tensor[target : target + size] = self.tensor[source : source + size]

    def _lay_nowhere(self) -> None:
        layout = layout_of(self.group, 1)
        self._lay(torch.empty(layout.total_bytes, dtype=torch.uint8, device="meta"), layout)

    def _lay(self, tensor: Tensor, layout: ArenaLayout) -> None:
        with torch.inference_mode(False):
            self.store = PagedKV(tensor, self.group, layout, 0, Scratch())
