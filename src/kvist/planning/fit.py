"""How many users a machine holds: the stages of a deployment, counted one by one, and the tightest of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvist.errors import DoesNotFit
from kvist.planning.capacity import Capacity
from kvist.planning.demand import NO_LIMIT, Demand, StageUsers, Users, logical_bytes
from kvist.planning.deployment import MAX_SAMPLED, Cutting, Deployment, Machine, deploy, stages_of
from kvist.planning.plan import Budget, UsersMean
from kvist.planning.weights import Weights
from kvist.spec.model import ModelSpec
from kvist.units import counted, format_size


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a machine holds of a demand.

    Attributes:
        deployment: where each device's memory goes.
        stages: what each stage's cache holds.
        demand: what was asked of it.
        cutting: how caches are cut.
    """

    deployment: Deployment
    stages: tuple[StageUsers, ...]
    demand: Demand
    cutting: Cutting

    @property
    def tightest(self) -> StageUsers:
        """The stage that holds the fewest."""
        counted = [stage for stage in self.stages if stage.capacity is not None]
        return min(counted or self.stages, key=lambda stage: (stage.prefix or stage.paged).safe)

    @property
    def capacity(self) -> Capacity | None:
        """How the tightest stage's cache is cut; None for a model that remembers nothing."""
        return self.tightest.capacity

    @property
    def paged(self) -> Users:
        """Users on all replicas."""
        return self._over_stages([stage.paged for stage in self.stages])

    @property
    def prefix(self) -> Users | None:
        """The same with shared prefixes stored once."""
        if all(stage.prefix is None or stage.capacity is None for stage in self.stages):
            return None
        return self._over_stages([stage.prefix or stage.paged for stage in self.stages])

    @property
    def slab(self) -> int:
        """Users on all replicas that reserve the longest context."""
        return self.deployment.machine.replicas * min(self._most, *(stage.slab for stage in self.stages))

    @property
    def best(self) -> Users:
        """With whatever can be shared."""
        return self.prefix or self.paged

    @property
    def _most(self) -> int:
        """Users of a replica beyond which sampling would take the memory of caches."""
        sampled = self.deployment.sampled
        bounded = any(stage.sampled for stage in self.deployment.stages)
        return sampled if bounded and sampled < MAX_SAMPLED else NO_LIMIT

    def _over_stages(self, users: Sequence[Users]) -> Users:
        replicas = self.deployment.machine.replicas
        safe = min(self._most, *(each.safe for each in users))
        return Users(mean=replicas * max(safe, min(each.mean for each in users)), safe=replicas * safe)

    def require(self, users: int) -> None:
        """Raise :class:`DoesNotFit`, with the sum, unless ``users`` fit."""
        best, machine, capacity = self.best, self.deployment.machine, self.capacity
        if users <= best.safe:
            return
        if capacity is not None and machine.devices == 1 and best == self.paged and best.safe == best.mean:
            capacity.require(users)
        held = f"{best.safe:,}"
        if best.safe != best.mean:
            held += f" 99 % of the time, {best.mean:,} on average"
        cache = "its cache" if capacity is None else f"a cache of {format_size(capacity.cache_bytes)}"
        where = "" if machine.devices == 1 else f" on every device of {machine.label}"
        raise DoesNotFit(
            f"{counted(users, 'user')} x {counted(self.demand.context, 'token')} need "
            f"{format_size(self.tightest.sequence)} of blocks each{where}; {cache} holds {held}"
        )

    def budget(self) -> Budget:
        """The numbers of the plan."""
        deployment, machine = self.deployment, self.deployment.machine
        capacity, tightest = self.capacity, self.tightest
        copies = machine.replicas * machine.tp
        paged, prefix, slab = self.paged, self.prefix, self.slab
        waste_paged = 0
        waste_slab = 0
        for stage, held in zip(self.stages, deployment.stages, strict=True):
            needed = logical_bytes(self.cutting, held, self.demand.context)
            waste_slab += copies * (slab // machine.replicas) * max(0, stage.reserved - needed)
            waste_paged += copies * (paged.safe // machine.replicas) * max(0, stage.sequence - needed)
        return Budget(
            memory=deployment.memory,
            weights=deployment.weights if machine.cache is None else 0,
            overhead=deployment.overhead,
            cache=deployment.cache,
            cache_tokens=0 if capacity is None else machine.replicas * self._cache_tokens(),
            context=self.demand.context,
            block_tokens=self.cutting.block_tokens,
            users_slab=slab,
            users_paged=paged.safe,
            users_prefix=None if prefix is None else prefix.safe,
            users_mean=None
            if self.demand.mix is None
            else UsersMean(slab=slab, paged=paged.mean, prefix=None if prefix is None else prefix.mean),
            waste_slab=waste_slab,
            waste_paged=waste_paged,
            slab_idle=max(0.0, 1 - tightest.sequence / tightest.reserved) if slab and tightest.reserved else 0.0,
            sequence_allocated=tightest.sequence,
            prefill_chunk=0 if capacity is None else capacity.prefill_chunk,
            cartridge=self.cutting.cartridge,
            cartridge_format=self.cutting.cartridge_format,
            cartridge_bytes=copies
            * sum(0 if stage.capacity is None else stage.capacity.pinned_bytes for stage in self.stages),
            deployment=deployment,
            mix=self.demand.mix,
        )

    def _cache_tokens(self) -> int:
        return min(stage.capacity.cache_tokens for stage in self.stages if stage.capacity is not None)


def fit(spec: ModelSpec, weights: Weights | None, machine: Machine, cutting: Cutting, demand: Demand) -> Fit:
    """Deploy a model on a machine and count the users.

    Args:
        spec: the model.
        weights: what its weights weigh; None where only the cache is planned.
        machine: the devices.
        cutting: how caches are cut.
        demand: what users ask.

    Raises:
        DoesNotFit: weights and overhead leave no cache, or the cache is smaller than one slab for each group.
        InputError: layers or heads cannot be dealt out so.
    """
    stages = stages_of(spec, weights, machine, cutting=cutting)
    notes: tuple[str, ...] = ()
    if weights is not None and weights.inventory is None and machine.overhead is None:
        notes = (f"activations are not counted: {weights.reason}; say with `overhead` what they take",)
    deployment = deploy(stages, machine, demand.holds, notes=notes)
    try:
        counted = tuple(demand.count(stage, stage.cache(machine, deployment.sampled)) for stage in stages)
    except DoesNotFit as error:
        # The arena calls what it is given its memory; here that is the word for weights and cache together.
        raise DoesNotFit(f"the cache: {str(error).removeprefix('memory: ')}") from error
    return Fit(deployment=deployment, stages=counted, demand=demand, cutting=cutting)
