"""From what a builder was told about roles to the roles and pools of a `JobSpec`: who stands on how many nodes, who
shares slots.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridrl.errors import ConfigError
from hybridrl.master.jobs.spec import MAX_RESTART, RESTART_TIMEOUT_S, PoolSpec, Resource, RoleSpec


@dataclass
class RoleDraft:
    """What has been said about a role so far; None is what was not."""

    name: str
    entry: str = ""
    total: int | None = None
    per_node: int | None = None
    num_nodes: int | None = None
    resource: Resource | None = None
    env: dict[str, str] = field(default_factory=dict)
    strategy: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    apart_from: tuple[str, ...] = ()
    max_restart: int = MAX_RESTART
    restart: str = "role"
    restart_label: str = ""
    restart_timeout_s: float = RESTART_TIMEOUT_S


def pools_of_roles(
    drafts: Mapping[str, RoleDraft], together: Sequence[tuple[str, ...]]
) -> tuple[tuple[RoleSpec, ...], tuple[PoolSpec, ...]]:
    """Return the roles and their pools: one pool for each set of roles that share devices, and one for every other
    role.

    Raises ConfigError for counts and wishes that do not go together.
    """
    shared = {name for names in together for name in names}
    sets = [*together] + [(name,) for name in drafts if name not in shared]
    pool_of = {name: "+".join(names) for names in sets for name in names}
    pools, roles = [], {}
    for names in sets:
        own = [drafts[name] for name in names]
        on_nodes = _on_nodes(own)
        nodes = max(map(len, on_nodes.values()))
        slots = tuple(max(counts[node] for counts in on_nodes.values() if node < len(counts)) for node in range(nodes))
        pools.append(_pool(pool_of[names[0]], own, slots, pool_of))
        for draft in own:
            resource = draft.resource or Resource()
            if (
                draft.resource is not None and len(own) == 1 and resource.accelerator is None
            ):  # it said what it takes: no device
                resource = Resource(resource.cpu, resource.memory_mb, 0.0, resource.more)
            elif len(own) == 1 and resource.accelerator is None:
                resource = Resource(accelerator=1.0)
            roles[draft.name] = _role(draft, pool_of[draft.name], on_nodes[draft.name], resource)
    return tuple(roles[name] for name in drafts), tuple(pools)


def _role(draft: RoleDraft, pool: str, on_nodes: tuple[int, ...], resource: Resource) -> RoleSpec:
    losses = (draft.max_restart, draft.restart, draft.restart_label, draft.restart_timeout_s)
    return RoleSpec(draft.name, pool, on_nodes, draft.entry, resource, draft.env, *losses)


def _on_nodes(drafts: Sequence[RoleDraft]) -> dict[str, tuple[int, ...]]:
    """Processes per node, of roles on one pool.

    Who does not say how many goes evenly over the nodes of those who do.
    """
    if "strict_pack" in {draft.strategy for draft in drafts}:
        return {draft.name: (_total(draft),) for draft in drafts}
    said = {draft.name: math.ceil(_total(draft) / draft.per_node) for draft in drafts if draft.per_node is not None}
    if len(set(said.values())) > 1:
        counts = ", ".join(f"{name} on {count}" for name, count in said.items())
        raise ConfigError(
            f"collocated roles are on different numbers of nodes: {counts}; set total() and per_node() so "
            "that they agree"
        )
    nodes = next(iter(said.values()), max(map(_total, drafts)))
    return {draft.name: _divided(_total(draft), draft.per_node or math.ceil(_total(draft) / nodes)) for draft in drafts}


def _divided(total: int, per_node: int) -> tuple[int, ...]:
    rest = total % per_node
    return (per_node,) * (total // per_node) + ((rest,) if rest else ())


def _total(draft: RoleDraft) -> int:
    """How many processes a role has: what it said, or nnodes() of nproc_per_node() each, or one."""
    if draft.num_nodes is None:
        return draft.total or 1
    total = draft.num_nodes * (draft.per_node or 1)
    if draft.total is not None and draft.total != total:
        raise ConfigError(
            f"role {draft.name!r}: total({draft.total}), but nnodes({draft.num_nodes}) with "
            f"{draft.per_node or 1} each is {total}; "
            "say one of them"
        )
    return total


def _pool(name: str, drafts: Sequence[RoleDraft], slots: tuple[int, ...], pool_of: Mapping[str, str]) -> PoolSpec:
    strategies = {draft.strategy: draft.name for draft in drafts if draft.strategy is not None}
    if len(strategies) > 1:
        raise ConfigError(f"collocated roles want to lie differently: {strategies}; say it for one of them")
    labels: dict[str, str] = {}
    for draft in drafts:
        for key, value in draft.labels.items():
            if labels.setdefault(key, value) != value:
                raise ConfigError(
                    f"collocated roles want nodes with {key}={labels[key]} and {key}={value}; say the same for both"
                )
    roles = ", ".join(draft.name for draft in drafts)
    apart = []
    for draft in drafts:
        for other in draft.apart_from:
            if other not in pool_of:
                raise ConfigError(
                    f"role {draft.name!r}: anti_affinity({other!r}), but there are only {', '.join(pool_of)}"
                )
            if pool_of[other] == name:
                raise ConfigError(
                    f"role {draft.name!r}: anti_affinity({other!r}), but they share devices; leave out one of both"
                )
            apart.append(pool_of[other])
    way_out = f"Ask for less with total(), per_node() or resource() of {roles}"
    return PoolSpec(name, slots, "device", next(iter(strategies), "pack"), labels, tuple(dict.fromkeys(apart)), way_out)
