"""Trained caches in an engine's arena: loaded once, shared by all requests that name them.

A cartridge lies in the arena like any prefix, in the cache's own format, under a key of its own (its digest) and under
placeholders instead of tokens (:mod:`kvist.cache.pinning`). Requests that name it begin behind it, at the position
after its last; requests that do not never find it, and run beside them in the same batches.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvist.cache.manager import CacheManager
from kvist.cache.prefix import PrefixKey
from kvist.cache.sequence import Sequence
from kvist.engine.runner import Runner
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import InputError
from kvist.kernels.hadamard import hadamard
from kvist.model.fingerprints import model_digest, rotary_positions
from kvist.spec.layers import Attention
from kvist.spec.model import ModelSpec
from kvist.store.cartridge_file import Cartridge, load
from kvist.store.states import StateStore

# Longer ones would fill lines of logs and pages.
_LONGEST_NAME = 128


@dataclass(kw_only=True)
class Loaded:
    """A cartridge in the arena.

    Attributes:
        name: by which requests ask for it.
        cartridge: what was read.
        pin: holds its blocks.
        users: requests that live on it.
        leaving: it was unloaded, and goes with its last user.
    """

    name: str
    cartridge: Cartridge
    pin: Sequence
    users: int = 0
    leaving: bool = False

    @property
    def tokens(self) -> int:
        """Positions that it takes."""
        return self.cartridge.tokens


class Shelf:
    """The cartridges of one engine; called between steps, with its lock held.

    Args:
        spec: of the model, with the longest context that is served.
        tokenizer: of the model.
        runner: whose arena it is.
        cache: that owns its blocks.
    """

    def __init__(self, spec: ModelSpec, tokenizer: Tokenizer, runner: Runner, cache: CacheManager) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._runner = runner
        self._cache = cache
        self._digest: str | None = None
        self.loaded: dict[str, Loaded] = {}

    def load(self, name: str, file: Path | Cartridge, key: PrefixKey) -> Loaded:
        """Read a cartridge, store it in the arena's format and pin it; of one that is there already, no second copy.

        Args:
            name: by which requests ask for it.
            file: or what was read of one.
            key: of what is stored; the cartridge's digest is put in.

        Raises:
            InputError: the name is taken or empty, or it was made for another model.
            BadFile: the file is torn, or its tensors have another shape.
            DoesNotFit: there is no room for it now.
        """
        if not name or len(name) > _LONGEST_NAME:
            raise InputError(f"cartridge: {name[:40]!r} is no name; 1 to {_LONGEST_NAME} letters", key="cartridge")
        if name in self.loaded:
            raise InputError(f"cartridge: {name!r} is loaded already; choose another name", key="cartridge")
        cartridge = file if isinstance(file, Cartridge) else load(file)
        self._digest = self._digest or model_digest(self._spec)
        cartridge.check(
            model=self._spec.name,
            model_digest=self._digest,
            tokenizer_digest=self._tokenizer.digest,
            rope=rotary_positions(self._spec),
        )
        cartridge.check_shapes(self._cache.groups)
        pin = self._cache.pin(cartridge.tokens, key_of(key, cartridge))
        try:
            self._store(cartridge, pin)
        except BaseException:
            self._cache.release(pin, keep=False)
            raise
        self._cache.filled(pin)
        self.loaded[name] = found = Loaded(name=name, cartridge=cartridge, pin=pin)
        return found

    def _store(self, cartridge: Cartridge, pin: Sequence) -> None:
        positions = np.arange(cartridge.tokens)
        dtype = self._runner.decoder.dtype
        with torch.inference_mode():
            for number, (group, store) in enumerate(zip(self._cache.groups, self._runner.stores, strict=True)):
                assert not isinstance(store, StateStore)
                size = group.block_tokens
                where = store.vectors(pin.tables[number][positions // size], positions % size)
                for slot, layer in enumerate(group.layers):
                    stored = cartridge.layers[layer].to(dtype, copy=True)
                    if isinstance(group.layer, Attention):
                        heads, fmt = group.layer.kv_heads, group.format
                        # As the layers spread them (kvist.model.mixers.attention).
                        spread = slice(0 if fmt.rotates_keys else heads, 2 * heads if fmt.rotates_values else heads)
                        if spread.start < spread.stop:
                            stored[:, spread] = stored[:, spread] @ hadamard(stored.shape[2], dtype)
                    store.append(slot, stored, where)

    def named(self, name: str) -> Loaded:
        """The cartridge of this name.

        Raises:
            InputError: there is none.
        """
        found = self.loaded.get(name)
        if found is None:
            there = ", ".join(sorted(self.loaded)) or "none"
            raise InputError(f"cartridge: {name[:40]!r} is not loaded; loaded: {there}", key="cartridge")
        return found

    def hold(self, name: str) -> Loaded:
        """Count one more request on a cartridge.

        Raises:
            InputError: there is none of this name.
        """
        found = self.named(name)
        found.users += 1
        return found

    def let_go(self, loaded: Loaded) -> None:
        """Count one request fewer."""
        loaded.users -= 1
        self._end(loaded)

    def unload(self, name: str) -> None:
        """Forget a cartridge; its blocks go back once no request lives on it.

        Raises:
            InputError: there is none of this name.
        """
        loaded = self.hold(name)
        del self.loaded[name]
        loaded.leaving = True
        self.let_go(loaded)

    def _end(self, loaded: Loaded) -> None:
        if loaded.leaving and not loaded.users:
            self._cache.unpin(loaded.pin)

    def snapshot(self) -> list[dict[str, Any]]:
        """Of each its name, document, tokens, bytes in the arena and users."""
        return [
            {
                "name": name,
                "document": loaded.cartridge.manifest.document,
                "document_tokens": loaded.cartridge.manifest.document_tokens,
                "tokens": loaded.tokens,
                "bytes": self._cache.held_bytes(loaded.pin),
                "users": loaded.users,
            }
            for name, loaded in self.loaded.items()
        ]


def key_of(key: PrefixKey, cartridge: Cartridge) -> PrefixKey:
    """The key of what is stored behind a cartridge."""
    return replace(key, cartridge=cartridge.digest)
