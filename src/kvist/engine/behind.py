"""Requests that stand behind cartridges: what they live on is held while they do."""

from collections.abc import Sequence as Seq
from pathlib import Path

from kvist.batch import Request
from kvist.cache.prefix import PrefixKey
from kvist.engine.cartridges import Joined, Loaded, Shelf, names_of, stays_whole
from kvist.errors import DoesNotFit
from kvist.scheduler import Scheduler
from kvist.spec.pruning import Pruning
from kvist.store.cartridge_file import Cartridge


class BehindCartridges:
    """The requests of a scheduler that stand behind cartridges; called with the engine's lock held.

    Args:
        shelf: whose cartridges they are.
        scheduler: that computes the requests. What is pinned takes no memory that it has promised.
    """

    def __init__(self, shelf: Shelf, scheduler: Scheduler) -> None:
        self._shelf = shelf
        self._scheduler = scheduler
        self._held: dict[str, Loaded | Joined] = {}

    def load(self, name: str, file: str | Path | Cartridge, key: PrefixKey) -> None:
        """:meth:`Shelf.load`, between steps.

        Raises:
            InputError: the name is taken, or the cartridge was made for another model.
            BadFile: the file is torn, or not what it says.
            DoesNotFit: there is no room for it now.
        """
        self._shelf.load(name, Path(file) if isinstance(file, str) else file, key)
        if not self._scheduler.all_fit():
            self._shelf.unload(name)
            raise DoesNotFit(
                f"memory: {name} would take what requests before it have been promised; load it later, or give the "
                f"cache more"
            )

    def context(self, cartridge: str | Seq[str]) -> int:
        """Most tokens, prompt and answer together, that a request may have behind a cartridge, or several.

        Raises:
            InputError: there is none of this name.
        """
        tokens = self._shelf.tokens(names_of(cartridge))
        return min(self._scheduler.limits.max_context - tokens, self._scheduler.admission.longest() + 1)

    def add(
        self,
        cartridge: str | Seq[str],
        request_id: str,
        prompt: Seq[int],
        max_tokens: int | None,
        key: PrefixKey,
        pruning: Pruning | None,
    ) -> Request:
        """Queue a prompt: :meth:`Scheduler.add` behind a cartridge, or several.

        What a tenant says behind them is shared with nobody, itself included, where they are pinned in the tree.

        Raises:
            InputError: there is no such cartridge, or the prompt is empty or too long.
            UnsupportedModel: keys of this model cannot be turned to follow others, or what is to be pruned stays whole.
            DoesNotFit: it could never fit, or there is no room for a second cartridge now.
        """
        names = names_of(cartridge)
        if pruning is not None and self._scheduler.manager.leads:
            raise stays_whole(pruning)
        held = self._shelf.hold(names)
        try:
            if isinstance(held, Joined) and not self._scheduler.all_fit():
                raise DoesNotFit(
                    f"memory: {' + '.join(names)} would take what requests before this one have been promised; ask "
                    f"again later, or give the cache more"
                )
            begin = self._shelf.beginning(held, key)
            request = self._scheduler.add(
                request_id,
                [*begin.tokens.tolist(), *prompt],
                max_tokens,
                begin.key,
                pruning,
                pinned=begin.tokens.size,
                lead=begin.lead,
                apart=bool(key.salt) and begin.lead is None,
            )
        except BaseException:
            self._shelf.let_go(held)
            raise
        self._held[request_id] = held
        return request

    def let_go(self, request_id: str) -> None:
        """A request is over; those that stand behind nothing have nothing to let go of."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self._shelf.let_go(held)
