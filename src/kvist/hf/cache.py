"""A cache of transformers whose memory is kvist's paged store, in any format.

What it saves is memory. It does not save time: transformers' attention reads dense keys and values, so that each step
decodes all that a layer holds, and drops it again. The engine's kernels read blocks in place (:class:`kvist.Engine`).
"""

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvist.cache.grouping import DEFAULT_BLOCK_TOKENS, groups_of
from kvist.errors import InputError
from kvist.hf.description import describe
from kvist.hf.memory import BatchMemory
from kvist.spec.formats import CacheFormat, require_format
from kvist.spec.layers import Attention
from kvist.store.codecs import PLAIN
from kvist.units import counted, format_size, parse_size

_CODECS = {dtype: codec for codec, dtype in PLAIN.items()}


class KvistCache(Cache):
    """Keys and values of a batch in kvist's paged store, for ``model.generate`` and any forward pass.

    Every layer's :meth:`update` quantises and appends, and returns dense keys and values, decoded, to transformers' own
    attention: less memory, and more time a token. One layer's dense copy is alive at a time. Layers with a window keep
    the blocks that their next query sees and give the others back. Beams share the blocks that they have in common.
    Gradients do not pass.

    Args:
        config: of the model, ``model.config``.
        format: how keys and values are stored; bf16 unless it is given. With a tail, the tokens of one forward pass see
            each other as they were computed; ``kvist.Engine`` seals runs of a prompt on the way, as does
            ``prefill_chunk_size`` of the tail's length.
        memory: bytes at most, or ``"256MiB"``; left out, as many as the sequences take.
        block_tokens: tokens of a block.

    Attributes:
        spec: what the model keeps, from which bytes are planned: its layers, with the windows that transformers uses.
        format: as given.

    Raises:
        InputError: one of these is wrong, or the format does not suit the model.
        UnsupportedModel: a layer remembers something else than keys and values of its tokens.
    """

    def __init__(
        self,
        config: Any,
        format: CacheFormat | None = None,
        *,
        memory: int | str | None = None,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
    ) -> None:
        self.format = CacheFormat() if format is None else require_format(format)
        described = describe(config)
        self.spec = described.spec
        self.block_tokens = block_tokens
        self._limit = None if memory is None else parse_size(memory, key="memory")
        self.compute_codec = _codec_of(getattr(config, "dtype", None)) or "bf16"
        self.memory = self._made()
        super().__init__(
            layers=[
                PagedLayer(self, index, layer) if isinstance(layer, Attention) else own
                for index, (layer, own) in enumerate(zip(self.spec.layers, described.own, strict=False))
            ]
        )

    def _made(self) -> BatchMemory:
        groups = groups_of(self.spec, self.format.computed_in(self.compute_codec), self.block_tokens)
        return BatchMemory(groups, self._limit)

    # -- what it holds ---------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Sequences; 0 while it is empty."""
        return self.memory.blocks.rows if self.memory.blocks.length else 0

    @property
    def planned_bytes(self) -> int:
        """Bytes of the blocks that its sequences need, as the planner counts them: arithmetic on :attr:`spec`."""
        return self.memory.blocks.planned_bytes()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks in its tables, those that beams share counted in each: always ``planned_bytes``."""
        return self.memory.blocks.allocated_bytes()

    @property
    def nbytes(self) -> int:
        """Bytes of the memory in which its blocks lie, shared ones once, and what of it is free."""
        return self.memory.arena_bytes

    def snapshot(self) -> dict[str, Any]:
        """Where its blocks are, as JSON; sizes in bytes."""
        blocks = self.memory.blocks
        return {
            "model": self.spec.name,
            "format": self.format.to_dict(),
            "rows": self.rows,
            "tokens": blocks.length,
            "bytes": {
                "arena": self.nbytes,
                "held": blocks.distinct_bytes(),
                "planned": self.planned_bytes,
                "allocated": self.allocated_bytes,
            },
            "groups": [
                {
                    "name": group.name,
                    "layers": list(group.layers),
                    "block_tokens": group.block_tokens,
                    "block_bytes": group.block_bytes,
                    "given_back": table.first,
                    "tables": table.blocks.tolist(),
                }
                for group, table in zip(blocks.groups, blocks.tables, strict=True)
            ],
        }

    def __repr__(self) -> str:
        held = f"{self.rows} x {counted(self.memory.blocks.length, 'token')}, {format_size(self.nbytes)}"
        return f"KvistCache({self.spec.name}, {self.format}, {held})"

    # -- transformers' verbs ---------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store a layer's new keys and values, ``[rows, kv_heads, tokens, dim]`` each.

        Returns:
            Dense keys and values that the layer's queries see, in the type of what was given.

        Raises:
            InputError: the model that calls is another one than the configuration's, or the batch has another size.
            DoesNotFit: ``memory`` is too little.
        """
        if type(layer_idx) is not int or layer_idx not in self.memory.places:
            raise InputError(
                f"layer_idx: {layer_idx!r}; the cache was made for {self.spec.name}, which keeps keys and values in "
                f"{len(self.memory.places)} of {counted(len(self.spec.layers), 'layer')}: give it the configuration of "
                f"the model that runs",
                key="layer_idx",
            )
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back tokens: ``-n`` the last n; ``n``, as older versions of transformers say it, all behind the first n.

        Raises:
            InputError: there are not so many, or a window has given back what the rest needs: call
                ``activate_past_recording()`` first, as assisted generation does.
        """
        self.memory.require_idle("crop")
        if type(tokens_to_remove) is not int:
            raise InputError(f"crop: {tokens_to_remove!r}; a whole number of tokens, -2 for the last two", key="crop")
        length = self.memory.blocks.length
        count = -tokens_to_remove if tokens_to_remove <= 0 else max(0, length - tokens_to_remove)
        self.memory.blocks.crop(count)

    def reset(self) -> None:
        """Forget all sequences and give their memory back."""
        self.memory.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row ``beam_idx[i]`` was; rows that were one share their blocks until they part."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have every row ``repeats`` times, beside itself; they share their blocks until they part."""
        if type(repeats) is not int or repeats < 0:
            raise InputError(f"repeats: {repeats!r}; a whole number, how often every row is there", key="repeats")
        self.batch_select_indices(torch.arange(self.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, or a mask of them, in their order.

        Raises:
            InputError: a row is none of them, or none would be left.
        """
        self.memory.require_idle("indices")
        if not self.rows:
            return
        try:
            chosen = np.arange(self.rows)[torch.as_tensor(indices).cpu().numpy()]
        except (IndexError, TypeError, ValueError, RuntimeError):
            chosen = np.empty(0, np.int64)
        if chosen.ndim != 1 or not chosen.size:
            given = indices.tolist() if isinstance(indices, Tensor) else indices
            raise InputError(
                f"indices: {given!r}; one or more of the {counted(self.rows, 'sequence')} that the cache holds, 0 to "
                f"{self.rows - 1}, or a mask of them; reset() forgets all",
                key="indices",
            )
        self.memory.blocks.select(chosen)

    def activate_past_recording(self) -> None:
        """Give nothing back from now on until :meth:`crop` settles what is kept."""
        self.memory.blocks.recording = True

    @property
    def batch_size(self) -> int:
        """Its sequences; -1 while it is empty."""
        return self.rows or -1

    @property
    def max_batch_size(self) -> int:
        """As :attr:`batch_size`, whose older name it is."""
        return self.batch_size

    def __deepcopy__(self, memo: dict[int, Any]) -> "KvistCache":
        """An own copy of all that it holds, as for prompts that several answers go on from."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin.memory = copy.deepcopy(self.memory, memo)
        twin.layers = [layer.moved(twin) if isinstance(layer, PagedLayer) else layer for layer in self.layers]
        return twin

    def require(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Check what a layer wants to store, before anything changes.

        Raises:
            InputError: it does not have the shape of this model, this batch, or a type that is computed in.
        """
        want = self.spec.layers[layer]
        assert isinstance(want, Attention)
        for side, tensor, width in (("keys", keys, want.key_dim), ("values", values, want.value_dim)):
            if not isinstance(tensor, Tensor):
                raise InputError(f"{side}: {type(tensor).__name__} is no tensor", key=side)
            shape = tuple(tensor.shape)
            if len(shape) != 4 or shape[1::2] != (want.kv_heads, width) or not shape[0]:
                raise InputError(
                    f"{side}: layer {layer} stores {list(shape)}; {self.spec.name}, for which the cache was made, has "
                    f"[rows, {want.kv_heads}, tokens, {width}]: give it the configuration of the model that runs",
                    key=side,
                )
        if keys.shape[:3] != values.shape[:3]:
            raise InputError(
                f"values: layer {layer} stores {list(values.shape)} beside keys {list(keys.shape)}", key="values"
            )
        # The first step has rows before they hold a token.
        rows = self.rows or (self.memory.blocks.rows if self.memory.stepping else 0)
        if rows and len(keys) != rows:
            raise InputError(
                f"batch: {len(keys)} rows come, and the cache holds {counted(rows, 'sequence')}: go on with as "
                f"many, or reset() it",
                key="batch",
            )
        codec = _codec_of(keys.dtype)
        if codec is None:
            raise InputError(
                f"dtype: keys are {keys.dtype}; run the model in one of {', '.join(map(str, _CODECS))}", key="dtype"
            )
        # Under autocast keys that were normalised are wider than values.
        if _codec_of(values.dtype) is None or values.device != keys.device:
            raise InputError(
                f"values: layer {layer} stores {values.dtype} on {values.device} beside keys that are {keys.dtype} on "
                f"{keys.device}; one of {', '.join(map(str, _CODECS))}, beside the keys",
                key="values",
            )
        if codec != self.compute_codec and not self.memory.blocks.length and not self.memory.stepping:
            # Kept layers and tails are in the type that is computed in, which is known only now.
            self.compute_codec = codec
            self.memory = self._made_again()

    def _made_again(self) -> BatchMemory:
        made = self._made()
        made.blocks.recording = self.memory.blocks.recording
        return made if made.groups != self.memory.groups else self.memory


class PagedLayer(CacheLayerMixin):
    """One layer of a :class:`KvistCache`, as transformers asks for it.

    Args:
        cache: whose it is.
        index: in the model.
        layer: what it keeps.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False
    is_initialized = True

    def __init__(self, cache: KvistCache, index: int, layer: Attention) -> None:
        self.cache = cache
        self.index = index
        self.layer = layer
        self.is_sliding = layer.window is not None
        if layer.window is not None:
            self.sliding_window = layer.window

    def moved(self, cache: KvistCache) -> "PagedLayer":
        """The same layer of a copy."""
        return PagedLayer(cache, self.index, self.layer)

    def __repr__(self) -> str:
        return f"PagedLayer({self.index}, {self.layer})"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: memory is taken when tokens come."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As :meth:`KvistCache.update`."""
        self.cache.require(self.index, key_states, value_states)
        return self.cache.memory.update(self.index, key_states, value_states)

    def get_seq_length(self, *args: Any) -> int:
        """Tokens that it has seen, those that a window has given back included."""
        return self.cache.memory.length(self.index)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """How many keys :meth:`update` will return, and the position of the first."""
        # Older versions hand the positions themselves.
        count = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        length, window = self.get_seq_length(), self.layer.window
        past = length if window is None else min(length, window - 1)
        return past + count, length - past

    def get_max_length(self) -> int:
        """Tokens of its window; -1 without one."""
        return self.layer.window or -1

    def get_max_cache_shape(self) -> int:
        """As :meth:`get_max_length`, whose older name it is."""
        return self.get_max_length()

    @property
    def keys(self) -> Tensor | None:
        """The keys that it holds, decoded: ``[rows, kv_heads, tokens, dim]``; None while it is empty."""
        return self._read()[0]

    @property
    def values(self) -> Tensor | None:
        """The values that it holds, as :attr:`keys`."""
        return self._read()[1]

    @property
    def record_past(self) -> bool:
        """Whether steps can be taken back, in all layers."""
        return self.cache.memory.blocks.recording

    @record_past.setter
    def record_past(self, recording: bool) -> None:
        self.cache.memory.blocks.recording = recording

    def _read(self) -> tuple[Tensor | None, Tensor | None]:
        if not self.cache.rows:
            return None, None
        self.cache.memory.require_idle("keys")
        return self.cache.memory.read(self.index, PLAIN[self.cache.compute_codec])

    def _alone(self, *args: Any) -> None:
        raise InputError("layers: all of them move together; call this of the KvistCache", key="layers")

    reorder_cache = reset = crop = batch_repeat_interleave = batch_select_indices = _alone
    offload = prefetch = _alone


def _codec_of(dtype: object) -> str | None:
    """The codec that is a type of PyTorch's, given as it or by its name."""
    return next((codec for each, codec in _CODECS.items() if dtype in (each, str(each).removeprefix("torch."))), None)
