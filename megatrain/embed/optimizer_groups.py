"""Creation and release of an optimizer's parameter groups, which initially have zero state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import nn

from megatrain.embed import ordinary_groups
from megatrain.embed.block_homes import free_home_bytes, home_order, shared_state
from megatrain.embed.groups import DeferredUpdates, GradientSource, OffloadedGroup, StateGroup
from megatrain.embed.ordinary_groups import DeviceCopies, OrdinaryGradients, OrdinaryGroup
from megatrain.embed.state_blocks import StateBlocks
from megatrain.embed.weights import WeightBlock, block_of
from megatrain.optim.base import StateKind
from tiered import TieredStore
from tiered.errors import CapacityError

#: Function that returns the kinds of state, given whether masters are split, and the parameters by name in the layout.
MakeKinds = Callable[[bool, Mapping[str, nn.Parameter]], Sequence[StateKind]]
#: Bytes per parameter for the state and gradients of two groups: one is being updated, the other is being fetched.
_BYTES_AT_ONCE = 2 * (12 + 4)


class OptimizerGroups:
    """Groups of one optimizer's parameters that have state in a store.

    Args:
        name: Key prefix for blocks of ordinary parameters.
        homes: Allowed home tiers of the state, preferred first, or "auto".
        extra_kinds: Kinds of state for all parameters, in addition to the kinds that their update rule needs.

    Attributes:
        groups: Groups of parameters that share state blocks.
        deferred: Updates of offloaded groups that wait for the next use of their weights.
        ids_with_state: ``id()`` of each parameter in a group.
    """

    def __init__(
        self, name: str, homes: Sequence[str] | str, extra_kinds: Sequence[StateKind], *, offload_gradients: bool
    ) -> None:
        self.groups: list[StateGroup] = []
        self.deferred = DeferredUpdates()
        self.offload_gradients, self._extra_kinds = offload_gradients, extra_kinds
        self._name, self._homes = name, homes
        self.ids_with_state: set[int] = set()
        self._copies = DeviceCopies()
        self._scratch_bytes = 0  # bytes of RAM that are reserved for updates

    def add(
        self,
        store: TieredStore,
        parameters: Sequence[nn.Parameter],
        blocks: Iterable[WeightBlock],
        kinds: MakeKinds,
        scratch_bytes: int,
        names: Mapping[int, str],
    ) -> None:
        """Create groups with zero state. After an error, no group is created.

        Args:
            parameters: Trained parameters without state.
            blocks: Weight blocks of the offloaded parameters.
            scratch_bytes: Bytes of RAM that updating these parameters one at a time needs in addition to blocks.
            names: Segment names by ``id()`` of the parameter.
        """
        homes, scratch = home_order(store, self._homes), max(0, scratch_bytes - self._scratch_bytes)
        store.reserve("ram", scratch)
        try:
            with shared_state(store).rollback_on_error():
                offloaded_groups: list[OffloadedGroup] = []
                for block in blocks:
                    all_kinds = [*kinds(block.dtype.itemsize == 2, block.parameters), *self._extra_kinds]
                    state_kinds = [kind for kind in all_kinds if kind.name != "weight"]
                    segment_names = {name: names.get(id(p), name) for name, p in block.parameters.items()}
                    shard = block.access.shard(block.layout, state_kinds)
                    state = StateBlocks(store, block.part.root, block.layout, state_kinds, homes, segment_names, shard)
                    offloaded_groups.append(OffloadedGroup(block, state, deferred=self.deferred))
                ordinary_parameters = [p for p in parameters if block_of(p) is None]
                new_groups = [*offloaded_groups, *self._make_ordinary(store, ordinary_parameters, kinds, names)]
                _check_update_memory(store, [*self.groups, *new_groups])
        except BaseException:
            store.reserve("ram", -scratch)
            raise
        self._scratch_bytes += scratch
        self.groups += new_groups
        self.ids_with_state.update(id(parameter) for group in new_groups for parameter in group.parameters.values())
        for group in offloaded_groups:
            group.attach()

    def _make_ordinary(
        self, store: TieredStore, parameters: Sequence[nn.Parameter], kinds: MakeKinds, names: Mapping[int, str]
    ) -> Iterator[OrdinaryGroup]:
        """Yield new groups of ordinary parameters. ``parameters`` follows the order of the optimizer's groups."""
        first_index = sum(not group.is_offloaded for group in self.groups)
        if parameters and not first_index and any(s.key.startswith(f"{self._name}/") for s in store.blocks()):
            raise ValueError(f'this store already has blocks named "{self._name}". Pass name="..." to the optimizer')
        shared = shared_state(store)
        parts = list(ordinary_groups.group_parameters(parameters))
        largest = max((num_elements for num_elements, _ in parts), default=0)
        bytes_at_once = _BYTES_AT_ONCE + sum(2 * kind.dtype.itemsize for kind in self._extra_kinds)
        shared.working_bytes = max(shared.working_bytes, bytes_at_once * largest)
        homes = home_order(store, self._homes)
        for group_index, (_, members) in enumerate(parts, first_index):
            named = {f"{group_index}.{index}": parameter for index, parameter in enumerate(members)}
            own_kinds = [*kinds(members[0].dtype.itemsize == 2, named), *self._extra_kinds]
            if not members[0].is_cuda:  # no weight block: the parameters are the masters or their high halves
                own_kinds = [kind for kind in own_kinds if kind.name != "weight"]
            layout = ordinary_groups.local_layout(f"{self._name}/{group_index:05d}", named)
            segment_names = {name: names[id(p)] for name, p in named.items()}
            state = StateBlocks(store, layout.name, layout, own_kinds, homes, segment_names)
            gradients: GradientSource = OrdinaryGradients(named, self._copies)
            if self.offload_gradients:
                gradients = ordinary_groups.make_gradient_block(store, layout, named, homes)
            yield OrdinaryGroup(named, state, gradients, self._copies)

    def release(self, store: TieredStore) -> None:
        """Unregister all state blocks and release the reserved memory."""
        for group in self.groups:
            group.close()
        self.groups.clear()
        store.reserve("ram", -self._scratch_bytes)
        self._scratch_bytes = 0


def _check_update_memory(store: TieredStore, groups: Iterable[StateGroup]) -> None:
    """Raise an error if RAM cannot hold the blocks of an update in addition to the blocks whose home is RAM."""
    ram, room = store.tier("ram"), free_home_bytes(store, "ram")
    specs_by_key = {spec.key: spec for spec in store.blocks()}
    for group in groups:
        specs = [specs_by_key[key] for key in group.leased_keys()]
        need_bytes = sum(ram.slot_bytes(spec.nbytes) for spec in specs if spec.home != "ram")
        if need_bytes > room:
            detail = f"to update {group.layout.name} with its state and gradient. Increase the size of ram"
            raise CapacityError("ram", need_bytes, max(0, room), detail=detail)
