"""Trained caches in an engine's arena: loaded once, shared by all requests that name them.

A cartridge lies in the arena like any prefix, in the cache's own format, under a key of its own (its digest) and under
placeholders instead of tokens (:mod:`kvist.cache.pinning`). Requests that name it begin behind it, at the position
after its last; requests that do not never find it, and run beside them in the same batches.

Where cartridges have a format of their own they lie in groups of their own and stand before sequences instead, of which
the tree knows their own tokens alone (:mod:`kvist.cache.leads`).

A request may name several. The first lies where it was trained; the keys of those that follow are turned on to the
positions behind it, which rotary positions allow exactly (arXiv:2104.09864, equation 14), and stored once more, behind
the first's blocks, for as long as a request names this list.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvist.cache.groups import Group
from kvist.cache.leads import Lead
from kvist.cache.manager import CacheManager
from kvist.cache.pinning import placeholders
from kvist.cache.prefix import PrefixKey
from kvist.cache.sequence import Sequence
from kvist.engine.runner import Runner
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import BadFile, InputError, UnsupportedModel
from kvist.kernels.hadamard import hadamard
from kvist.model.fingerprints import model_digest, rotary_positions
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention, Latent
from kvist.spec.model import ModelSpec
from kvist.spec.pruning import Pruning
from kvist.store.cartridge_file import Cartridge, load
from kvist.store.states import StateStore

# Longer ones would fill lines of logs and pages.
_LONGEST_NAME = 128


@dataclass(kw_only=True)
class Pinned:
    """What requests live on.

    Attributes:
        pin: holds its blocks.
        users: requests that live on it.
    """

    pin: Sequence | Lead
    users: int = 0

    @property
    def tokens(self) -> int:
        """Positions that it takes."""
        return self.pin.pinned if isinstance(self.pin, Sequence) else self.pin.tokens


@dataclass(kw_only=True)
class Loaded(Pinned):
    """A cartridge in the arena.

    Attributes:
        name: by which requests ask for it.
        cartridge: what was read.
        leaving: it was unloaded, and goes with its last user.
    """

    name: str
    cartridge: Cartridge
    leaving: bool = False

    @property
    def digest(self) -> str:
        """By which it is known again."""
        return self.cartridge.digest


@dataclass(kw_only=True)
class Joined(Pinned):
    """Several cartridges, one behind the other, that live requests name.

    Attributes:
        parts: in the order of their positions.
        stored: whether those behind the first are in the arena yet.
    """

    parts: tuple[Loaded, ...]
    stored: bool = False

    @property
    def digest(self) -> str:
        """By which they, and their order, are known again."""
        return " + ".join(part.digest for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What sequences begin with that stand behind cartridges.

    Attributes:
        tokens: int32: placeholders of what the tree has pinned; none behind a lead.
        key: under which they share prefixes.
        lead: what stands before them, where cartridges have a format of their own.
    """

    tokens: npt.NDArray[np.int32]
    key: PrefixKey
    lead: Lead | None


class Shelf:
    """The cartridges of one engine; called with its lock held, and what stores tensors between steps.

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
        # Those that were unloaded too, while requests live on them.
        self._pinned: list[Loaded] = []
        # By who lies in them: a name may come to mean another cartridge while requests live on the first.
        self._joined: dict[tuple[int, ...], Joined] = {}
        # By digest, placeholders of its own for where a cartridge follows another: none is used for two.
        self._numbers: dict[str, int] = {}
        self._numbered = 0

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
        # Names are shown in errors and on pages.
        if not name or len(name) > _LONGEST_NAME or not name.isprintable():
            raise InputError(
                f"cartridge: {name[:40]!r} is no name; 1 to {_LONGEST_NAME} letters on one line", key="cartridge"
            )
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
        largest = torch.finfo(self._runner.decoder.dtype).max
        for layer, part in cartridge.layers.items():
            if part.abs().max() > largest:
                raise BadFile(
                    f"cartridge: of {cartridge.manifest.document}, layer {layer} holds numbers above {largest:.3g}, "
                    f"which the type of computation does not have; train it again"
                )
        self.store_joined()
        behind = replace(key, cartridge=cartridge.digest)
        # The tree finds what it holds already; what stands before sequences is no part of it.
        twins = (held.pin for held in self._pinned if held.digest == cartridge.digest and isinstance(held.pin, Lead))
        twin = next(twins, None)
        pin = self._cache.pins.pin(cartridge.tokens if twin is None else 0, behind, behind=twin)
        try:
            if twin is None:
                self._store(cartridge, pin, 0)
        except BaseException:
            self._cache.pins.unpin(pin)
            raise
        self._cache.pins.filled(pin)
        self.loaded[name] = found = Loaded(name=name, cartridge=cartridge, pin=pin)
        self._pinned.append(found)
        return found

    def beginning(self, held: Loaded | Joined, key: PrefixKey) -> Beginning:
        """What a sequence begins with behind cartridges.

        Args:
            held: of :meth:`hold`.
            key: of sequences without one. Its salt keeps tenants apart behind a lead; what is pinned in the tree has
                none, and nothing is stored behind it that is one tenant's.
        """
        if isinstance(held.pin, Sequence):
            return Beginning(tokens=held.pin.tokens, key=held.pin.key, lead=None)
        (stored,) = {str(group.format) for group in self._cache.groups if group.lifetime == "lead"}
        behind = replace(key, cartridge=f"{held.digest} in {stored}")
        return Beginning(tokens=np.empty(0, np.int32), key=behind, lead=held.pin)

    def _store(self, cartridge: Cartridge, pin: Sequence | Lead, start: int) -> None:
        """Put a cartridge into pinned blocks from ``start`` on, its keys turned to these positions."""
        # Where it goes there may lie what is still to go to a tier.
        self._runner.copy(self._cache.take_moves())
        positions = np.arange(start, start + cartridge.tokens)
        dtype = self._runner.decoder.dtype
        with torch.inference_mode():
            for number, (group, store) in enumerate(zip(self._cache.groups, self._runner.stores, strict=True)):
                assert not isinstance(store, StateStore)
                if (group.lifetime == "lead") != isinstance(pin, Lead):
                    continue
                size = group.block_tokens
                tables = pin.tables[number][positions // size]
                # What windows never read has no block.
                there = torch.from_numpy(tables >= 0)
                where = store.vectors(tables[tables >= 0], positions[tables >= 0] % size)
                for slot, layer in enumerate(group.layers):
                    vectors = self._turned(group, layer, cartridge, start)[there]
                    stored = vectors.to(dtype, copy=True)
                    if isinstance(group.layer, Attention):
                        heads, fmt = group.layer.kv_heads, self._own_format(layer)
                        # As the layers spread them (kvist.model.mixers.attention), whatever they are stored in.
                        spread = slice(0 if fmt.rotates_keys else heads, 2 * heads if fmt.rotates_values else heads)
                        if spread.start < spread.stop:
                            stored[:, spread] = stored[:, spread] @ hadamard(stored.shape[2], dtype)
                    store.append(slot, stored, where)

    def _own_format(self, layer: int) -> CacheFormat:
        """In what a layer stores the keys and values of sequences."""
        return next(group.format for group in self._cache.groups if layer in group.layers)

    def _turned(self, group: Group, layer: int, cartridge: Cartridge, start: int) -> Tensor:
        """What a cartridge keeps of a layer, where its first token is to have position ``start``."""
        stored = cartridge.layers[layer]
        by = start - cartridge.manifest.position
        decoder = self._runner.decoder
        block = decoder.network.blocks[layer]
        if isinstance(group.layer, Latent):
            (rope,) = {block.mixer.rope}
            keys = (slice(None), slice(None), slice(group.layer.rank, None))
        else:
            (rope,) = {net.rope for net in block.attention}
            keys = (slice(None), slice(stored.shape[1] // 2), slice(None))
        if not by or rope is None:
            return stored
        stored = stored.clone()
        turned = stored[keys].contiguous()
        decoder.rotaries[rope].onward(by).turn(turned, None)
        stored[keys] = turned
        return stored

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

    def tokens(self, names: Seq[str]) -> int:
        """Positions that cartridges take together.

        Raises:
            InputError: there is none of one of these names.
        """
        return sum(self.named(name).tokens for name in names)

    def hold(self, names: Seq[str]) -> Loaded | Joined:
        """Count one more request on a cartridge, or on several, one behind the other.

        Raises:
            InputError: there is none of one of these names, or there are too many.
            UnsupportedModel: keys of this model cannot be turned to follow others.
            DoesNotFit: there is no room for those behind the first now.
        """
        parts = tuple(self.named(name) for name in names)
        if not parts:
            raise InputError("cartridge: an empty list; name one at least, or leave it out", key="cartridge")
        found = parts[0] if len(parts) == 1 else self._joined.get(tuple(map(id, parts))) or self._join(parts)
        found.users += 1
        if isinstance(found, Joined):
            for part in parts:
                part.users += 1
        return found

    def _join(self, parts: tuple[Loaded, ...]) -> Joined:
        network = self._runner.decoder.network
        if network.positions is not None:
            raise UnsupportedModel(
                f"cartridge: {self._spec.name} adds learned positions to its embeddings, so that the keys of "
                f"{parts[1].name!r} cannot be turned to the positions behind {parts[0].name!r}; name one cartridge",
                key="cartridge",
            )
        for part in parts[1:]:
            if part.cartridge.digest not in self._numbers:
                self._numbers[part.cartridge.digest] = self._numbered
                self._numbered += part.tokens
        behind = [placeholders(part.tokens, self._numbers[part.cartridge.digest]) for part in parts[1:]]
        first = parts[0].pin
        key = first.key if isinstance(first, Sequence) else PrefixKey()
        pin = self._cache.pins.pin(sum(part.size for part in behind), key, behind=first, tokens=np.concatenate(behind))
        self._cache.pins.filled(pin)
        found = self._joined[tuple(map(id, parts))] = Joined(parts=parts, pin=pin)
        return found

    def store_joined(self) -> None:
        """Store what follows others and is not in the arena yet; called between steps, before the next."""
        for joined in self._joined.values():
            if not joined.stored:
                start = joined.parts[0].tokens
                for part in joined.parts[1:]:
                    self._store(part.cartridge, joined.pin, start)
                    start += part.tokens
                joined.stored = True

    def let_go(self, held: Loaded | Joined) -> None:
        """Count one request fewer."""
        held.users -= 1
        if isinstance(held, Loaded):
            self._end(held)
            return
        if not held.users:
            del self._joined[tuple(map(id, held.parts))]
            # Nobody finds what was never stored there but lists like this one, which store it again.
            self._cache.pins.unpin(held.pin)
        for part in held.parts:
            part.users -= 1
            self._end(part)

    def unload(self, name: str) -> None:
        """Forget a cartridge; its blocks go back once no request lives on it.

        Raises:
            InputError: there is none of this name.
        """
        loaded = self.named(name)
        del self.loaded[name]
        loaded.leaving = True
        self._end(loaded)

    def _end(self, loaded: Loaded) -> None:
        if loaded.leaving and not loaded.users:
            self._pinned = [held for held in self._pinned if held is not loaded]
            self._cache.pins.unpin(loaded.pin)

    def joined(self) -> list[dict[str, Any]]:
        """Of each list that requests live on its names, tokens, users, and the bytes of what follows the first."""
        return [
            {
                "names": [part.name for part in joined.parts],
                "tokens": joined.tokens,
                "bytes": self._cache.held_bytes(joined.pin) - self._cache.held_bytes(joined.parts[0].pin),
                "users": joined.users,
            }
            for joined in self._joined.values()
        ]

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


def names_of(cartridge: str | Seq[str]) -> tuple[str, ...]:
    """Names of one cartridge or of several, as requests give them."""
    return (cartridge,) if isinstance(cartridge, str) else tuple(cartridge)


def stays_whole(pruning: Pruning) -> UnsupportedModel:
    """What is said where a request behind a cartridge in a format of its own is to be pruned."""
    return UnsupportedModel(
        f"evict: {pruning} drops tokens of cartridge and prompt together, and cartridges in a format of their own stay "
        f"whole; leave evict out, or `cartridge_format`",
        key="evict",
    )
