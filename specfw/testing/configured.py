"""Certifying what a config names: its own drafter, verifier and schedulers, on table models."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from specfw.components import Bound
from specfw.config import PipelineConfig
from specfw.plugins import PluginManager
from specfw.testing.cases import SETTINGS, Case, fits, make_cases
from specfw.testing.certification import Certificate, certify
from specfw.types import SamplingParams

__all__ = ["certify_config", "on_tables"]

_SIZES = ((3, 2), (2, 3))
_DEEP_SIZES = ((3, 2), (2, 3), (3, 3), (3, 4))
_DRAFT_SEED = 4


def certify_config(
    config: PipelineConfig,
    manager: PluginManager,
    deep: bool = False,
    progress: Callable[[int, int, Case], None] | None = None,
) -> Certificate:
    """Certify each of a config's drafters with its verifier and schedulers together.

    The target is a table model in each case, and so is every draft model. The config's own sampling
    settings are walked through beside the usual ones, as far as the table has the tokens they name.

    Args:
        config: the config; its target is not loaded.
        manager: knows the components.
        deep: walk longer texts over more tokens, and every batch size with every setting.
        progress: called before each case with its number, how many there are, and the case.

    Raises:
        ConfigError: a component refuses its options or the table target.
    """
    drafters = [manager.bind("drafter", d) for d in (config.drafter, *config.drafters.values())]
    verifier = manager.bind("verifier", config.verifier)
    schedulers = [manager.bind("scheduler", one).build for one in config.scheduler]
    sizes = _DEEP_SIZES if deep else _SIZES
    own = {} if config.sampling == SamplingParams() else {"config": config.sampling}
    settings = {**own, **SETTINGS}
    cases = list(make_cases(settings, sizes=sizes))
    if deep:
        cases += make_cases(settings, sizes=sizes, batch_sizes=(3, 1), seed=1000)
    cases = [case for case in cases if fits(case.params, case.vocab_size)]
    certificate: Certificate | None = None
    done = 0
    total = len(cases) * len(drafters)
    sizes_used = sorted({case.vocab_size for case in cases})
    for drafter, vocab_size in product(drafters, sizes_used):
        same_size = [case for case in cases if case.vocab_size == vocab_size]
        on_table = on_tables(drafter, manager, vocab_size)
        report = None if progress is None else _shifted(progress, done, total)
        part = certify(on_table.build, verifier.build, schedulers, cases=same_size, progress=report)
        certificate = part if certificate is None else certificate.merged(part)
        done += len(same_size)
    assert certificate is not None
    return certificate


def on_tables(bound: Bound[Any], manager: PluginManager, vocab_size: int) -> Bound[Any]:
    """The component with every model in its options, however deep, replaced by a table model."""
    if bound.kind == "target":
        return manager.bind(
            "target", {"name": "table", "vocab_size": vocab_size, "seed": _DRAFT_SEED}
        )
    return bound.with_inner(lambda inner: on_tables(inner, manager, vocab_size))


def _shifted(
    progress: Callable[[int, int, Case], None], start: int, total: int
) -> Callable[[int, int, Case], None]:
    return lambda number, _, case: progress(start + number, total, case)
