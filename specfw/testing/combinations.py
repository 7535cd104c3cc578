"""Which components meet in the certificate for every combination, and in which small worlds.

Every drafter meets every verifier under every scheduler, alone and in pairs; sampling settings, kinds of
laws and memory take turns so that any two values of any two of all these meet as well. And every drafter
takes every place inside every drafter that is made of drafters, greedy and sampled.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, cycle, product
from typing import Any

import yaml

from specfw.components import Bound, Kind
from specfw.errors import ConfigError, PluginError
from specfw.plugins import PluginManager
from specfw.testing.cases import MEMORY_CASES, SETTINGS, Case, forbids
from specfw.testing.table_model import LawKind
from specfw.types import SpeculationParams

__all__ = ["Combination", "make_combinations"]

_KINDS: tuple[LawKind, ...] = ("dense", "sparse", "one_hot")
_SIZES = ((3, 3), (2, 4))
_DEEP_SIZES = ((3, 4),)
_LIMITS = SpeculationParams(max_nodes=3, max_depth=2, max_width=2)
_DEEP_LIMITS = SpeculationParams(max_nodes=4, max_depth=3, max_width=2)
_INSIDE_VERIFIERS = ("coupled", "rejection")
_INSIDE_SETTINGS = ("greedy", "temperature")
_INSIDE_SIZES = ((3, 2), (2, 3))

Reference = Mapping[str, Any]
"""A component's name and options, as in a config."""
Components = tuple[str, str, tuple[str, ...]]
"""The names of a drafter, a verifier and schedulers."""
World = tuple[str, Any, Any]
"""What sampling settings are called, a memory case, and a kind of laws."""


@dataclass(frozen=True, slots=True)
class Combination:
    """Components with their options, and the small world in which they meet."""

    drafter: Reference
    verifier: Reference
    schedulers: tuple[Reference, ...]
    case: Case
    setting: str = ""
    """What the case's sampling settings are called."""

    def names(self) -> dict[str, Any]:
        """The names of everything."""
        return {
            "drafter": _called(self.drafter),
            "verifier": self.verifier["name"],
            "schedulers": [scheduler["name"] for scheduler in self.schedulers],
            "setting": self.setting,
            "laws": self.case.kind,
            "memory": self.case.memory,
            "batch": self.case.batch,
        }

    def paste(self) -> str:
        """A config file for `specfw certify -c`, with the case as a comment."""
        config = {
            "target": "table",
            "drafter": dict(self.drafter),
            "verifier": dict(self.verifier),
            "scheduler": [dict(scheduler) for scheduler in self.schedulers],
            "sampling": self.case.params.model_dump(mode="json", exclude_unset=True),
        }
        return f"# {self.case.paste()}\n{yaml.safe_dump(config, sort_keys=False)}"


def _called(reference: Reference) -> str:
    """A drafter's name, with those of the drafters in its options."""
    inner = [
        _called(one)
        for value in reference.values()
        for one in (value if isinstance(value, (tuple, list)) else [value])
        if isinstance(one, Mapping) and "name" in one
    ]
    return f"{reference['name']}({', '.join(inner)})" if inner else str(reference["name"])


def make_combinations(
    manager: PluginManager, deep: bool = False, only: Mapping[Kind, Sequence[str]] | None = None
) -> list[Combination]:
    """Every drafter with every verifier and every one or two schedulers, and inside every combinator.

    Args:
        manager: knows the components.
        deep: drafts three deep, and longer texts: of four tokens out of three beside each other.
        only: names of the components to take, by kind; all of a kind unless given. These drafters go
            into every combinator that is installed.
    """
    chosen: dict[Kind, Sequence[str]] = {
        kind: (only or {}).get(kind) or manager.names(kind)
        for kind in ("drafter", "verifier", "scheduler")
    }
    limits = _DEEP_LIMITS if deep else _LIMITS
    return [
        Combination(
            drafter,
            _example(manager, "verifier", verifier),
            tuple(_example(manager, "scheduler", name) for name in schedulers),
            _case(turn, world, sizes, limits),
            world[0],
        )
        for met, sizes in (
            (_beside_each_other(manager, chosen), _DEEP_SIZES if deep else _SIZES),
            (_inside_each_other(manager, chosen), _SIZES if deep else _INSIDE_SIZES),
        )
        for turn, (drafter, verifier, schedulers, world) in enumerate(met)
    ]


def _beside_each_other(
    manager: PluginManager, chosen: Mapping[Kind, Sequence[str]]
) -> Iterator[tuple[Reference, str, tuple[str, ...], World]]:
    """The full product of components, each of it in one world at least."""
    schedulers = [
        *((name,) for name in chosen["scheduler"]),
        *combinations(chosen["scheduler"], 2),
    ]
    components = list(product(chosen["drafter"], chosen["verifier"], schedulers))
    for (drafter, verifier, several), world in _cover(components):
        yield _example(manager, "drafter", drafter), verifier, several, world


def _inside_each_other(
    manager: PluginManager, chosen: Mapping[Kind, Sequence[str]]
) -> Iterator[tuple[Reference, str, tuple[str, ...], World]]:
    """Each drafter at each place of each combinator, with schedulers and memory by chance."""
    chance = random.Random(0)
    verifiers = [name for name in chosen["verifier"] if name in _INSIDE_VERIFIERS]
    made_of_others = (
        combinator
        for name in manager.names("drafter")
        for inner in chosen["drafter"]
        for combinator in _filled(manager, name, _example(manager, "drafter", inner))
    )
    for setting, verifier, drafter in product(
        _INSIDE_SETTINGS, verifiers or chosen["verifier"], made_of_others
    ):
        world = (setting, chance.choice(MEMORY_CASES), "dense")
        yield drafter, verifier, (chance.choice(chosen["scheduler"]),), world


def _case(
    turn: int, world: World, sizes: Sequence[tuple[int, int]], limits: SpeculationParams
) -> Case:
    setting, memory, kind = world
    vocab_size, horizon = sizes[turn % len(sizes)]
    params = SETTINGS[setting].model_copy(update={"speculation": limits})
    if forbids(params):  # of two tokens nothing might be left
        vocab_size = max(vocab_size, 3)
    batch = 3 if memory == "preemption" or turn // 2 % 2 else 1
    return Case(params, kind, vocab_size, horizon, batch, memory, seed=turn % 7)


def _example(manager: PluginManager, kind: Kind, name: str) -> Reference:
    """The reference to a component with its example options."""
    try:
        return {"name": name, **manager.component(kind, name).example}
    except (ConfigError, PluginError):
        return {"name": name}  # refused again, and then listed, where it is bound


def _filled(manager: PluginManager, name: str, inner: Reference) -> Iterator[Reference]:
    """A combinator's example with another drafter at each of its places; nothing for other drafters."""
    example = _example(manager, "drafter", name)
    try:
        options = manager.bind("drafter", dict(example)).options
    except (ConfigError, PluginError):
        return
    for option, value in options:
        if _is_drafter(value):
            yield {**example, option: inner}
        elif isinstance(value, (tuple, list)):
            for i in (i for i, one in enumerate(value) if _is_drafter(one)):
                yield {**example, option: [*example[option][:i], inner, *example[option][i + 1 :]]}


def _is_drafter(value: object) -> bool:
    return isinstance(value, Bound) and value.kind == "drafter"


def _cover(components: Sequence[Components]) -> Iterator[tuple[Components, World]]:
    """Each of `components` in one world at least, and every pair of values of two factors together.

    Greedy: each gets the world that brings most pairs that were not there yet.
    """
    worlds = [world for world in product(SETTINGS, MEMORY_CASES, _KINDS) if _makes_sense(world)]
    open_pairs = set(
        chain.from_iterable(_pairs((*one, *world)) for one in components for world in worlds)
    )
    for turn, one in enumerate(cycle(components)):
        if turn >= len(components) and not open_pairs:
            return
        shift = 7 * turn % len(worlds)  # so that equals do not always give the first
        best = max(
            (*worlds[shift:], *worlds[:shift]),
            key=lambda world: (len(open_pairs & _pairs((*one, *world))), world[2] == "dense"),
        )
        closed = open_pairs & _pairs((*one, *best))
        if closed or turn < len(components):
            open_pairs -= closed
            yield one, best


def _makes_sense(world: World) -> bool:
    setting, _, kind = world
    return kind == "dense" or not forbids(SETTINGS[setting])  # else no law may be left


def _pairs(values: Iterable[Any]) -> set[tuple[Any, ...]]:
    return set(combinations(enumerate(values), 2))
