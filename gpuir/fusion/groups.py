"""Which group each item is in, who waits for whom, and that no launch waits for itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

SLACK = 1 << 20  # ranks between those of two items, so that raising one rarely raises the next


class LaunchGroup(Protocol):
    """Items that will share a launch: nodes of a graph, or loops."""

    @property
    def items(self) -> Sequence[int]:
        """In the model's order."""
        ...

    @property
    def waits(self) -> Collection[int]:
        """The items that have to be made before these; items of the group may be among them."""
        ...


G = TypeVar("G", bound=LaunchGroup)


@dataclass
class Groups(Generic[G]):
    """The groups on their way to be launches: `of` has the one that each item is in now, and
    `readers` the items that wait for one.

    Each group has a rank above those of all that it waits for. Only what is between the ranks of
    two groups can lie on a way between them, so looking for a cycle is short. (Pearce and Kelly, A
    dynamic topological sort algorithm for directed acyclic graphs, ACM JEA 11, 2007, keep an order
    in the same way.)
    """

    readers: Mapping[int, Collection[int]]
    of: dict[int, G] = field(default_factory=dict[int, G], init=False)
    ranks: dict[G, int] = field(default_factory=dict[G, int], init=False)

    def put(self, group: G, items: Sequence[int]) -> None:
        """From now on the group has these items too, which may have been in others."""
        before = self.ranks.get(group)
        former = {group, *self.made(items)} & self.ranks.keys()
        rank = max((self.ranks[other] for other in former), default=items[-1] * SLACK)
        self.of.update(dict.fromkeys(items, group))
        ahead = (self.ranks[other] + 1 for other in self.made(group.waits) if other is not group)
        self.ranks[group] = max((rank, *ahead))
        self.lift(group, items if self.ranks[group] == before else group.items)

    def lift(self, group: G, items: Iterable[int]) -> None:
        """Ranks whatever waits for these items of a group above it, and what waits for that."""
        stack = [(group, items)]
        while stack:
            group, items = stack.pop()
            for reader in self.made(r for i in items for r in self.readers.get(i, ())):
                if reader is not group and self.ranks[reader] <= self.ranks[group]:
                    self.ranks[reader] = self.ranks[group] + 1
                    stack.append((reader, reader.items))

    def made(self, items: Iterable[int]) -> Iterator[G]:
        """The groups of items, of those that are in one."""
        return (self.of[i] for i in items if i in self.of)

    def feeders(self, group: G) -> list[G]:
        """The groups that one waits for, in the order of their last items."""
        found = {other for other in self.made(group.waits) if other is not group}
        return sorted(found, key=lambda other: other.items[-1])

    def leads(self, group: G, items: Iterable[int]) -> bool:
        """Whether some of these items, of other groups, wait for the group: a launch that has the
        group and reads them would wait for itself."""
        stack = [other for other in self.made(items) if other is not group]
        seen: set[G] = set()
        while stack:
            other = stack.pop()
            if other in seen or self.ranks[other] <= self.ranks[group]:
                continue
            seen.add(other)
            for feeder in self.made(other.waits):
                if feeder is group:
                    return True
                stack.append(feeder)
        return False

    def ordered(self) -> list[G]:
        """The groups so that each comes after those it waits for, in the model's order of their
        last items: one that waits for many (a gradient summed over layers) does not pull all that
        it waits for ahead of what else they feed, which would hold their results."""
        order: dict[G, None] = {}
        for start in sorted(dict.fromkeys(self.of.values()), key=lambda x: x.items[-1]):
            stack = [(start, iter(self.feeders(start)))]
            while stack:
                group, rest = stack[-1]
                ahead = next((other for other in rest if other not in order), None)
                if group in order or ahead is None:
                    order[group] = None
                    stack.pop()
                else:
                    stack.append((ahead, iter(self.feeders(ahead))))
        return list(order)
