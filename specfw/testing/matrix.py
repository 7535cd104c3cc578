"""The certificate for every combination: all installed drafters, verifiers and schedulers together.

Broken components and a broken framework, which must be caught, show that the certificate can fail.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from specfw.builtins import NoDrafter
from specfw.components import Bound, Kind
from specfw.contracts import Drafter
from specfw.errors import ConfigError, PluginError, UnsupportedModelError
from specfw.plugins import PluginManager
from specfw.testing.certification import Certificate, certify
from specfw.testing.combinations import Combination, make_combinations
from specfw.testing.configured import on_tables
from specfw.testing.controls import CONTROLS, Verdict

__all__ = ["Matrix", "Row", "certify_all", "check"]

_TOLERANCE = 1e-9
_LONGER = 3
"""By how many tokens texts may get longer for something to be drafted."""


@dataclass(slots=True)
class Row:
    """What came out of one combination."""

    combination: Combination
    certificate: Certificate | None = None
    """None if it could not be computed."""
    refused: str | None = None
    """The sentence with which a component refuses the combination."""
    failed: str | None = None
    """What went wrong otherwise."""
    seconds: float = 0.0

    @property
    def lossy(self) -> bool:
        return self.certificate is not None and self.certificate.guarantee == "lossy"

    @property
    def ok(self) -> bool:
        """Whether it keeps what it promises, or is refused."""
        return self.failed is None and (self.certificate is None or self.certificate.ok)

    def mapping(self) -> dict[str, Any]:
        """The row in JSON's types."""
        row = self.combination.names() | {"seconds": round(self.seconds, 3)}
        if self.certificate is None:
            return row | {"reason": self.refused or self.failed}
        return row | {
            "guarantee": self.certificate.guarantee,
            "ok": self.certificate.ok,
            "max_tv": self.certificate.max_tv,
            "prefixes": self.certificate.prefixes,
            "leaves": self.certificate.leaves,
            "drafted": self.certificate.drafted,
            "accepted": self.certificate.accepted,
            "faults": self.certificate.faults.total(),
            "counterexample": (
                f"{self.combination.paste()}# {self.certificate.counterexample}"
                if self.certificate.counterexample and not self.lossy
                else None
            ),
        }


@dataclass(slots=True)
class Matrix:
    """The rows of all combinations, the negative controls, and the verdict."""

    rows: list[Row] = field(default_factory=list)
    controls: list[Verdict] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Every combination that runs keeps its promise, there is one, and every control is caught."""
        kept = all(row.ok for row in self.rows) and any(row.certificate for row in self.rows)
        return kept and all(control.caught for control in self.controls)

    @property
    def drafted(self) -> int:
        """Combinations in which something was drafted, so that something was checked."""
        return sum(row.certificate.drafted > 0 for row in self.rows if row.certificate)

    @property
    def max_tv(self) -> float:
        """The largest total variation of those that promise something."""
        return max((row.certificate.max_tv for row in self._lossless()), default=0.0)

    def mapping(self) -> dict[str, Any]:
        """The stable keys of `specfw certify --all --json`."""
        return {
            "ok": self.ok,
            "combinations": sum(row.certificate is not None for row in self.rows),
            "drafted": self.drafted,
            "max_tv": self.max_tv,
            "lossy": [row.mapping() for row in self.rows if row.lossy],
            "refused": [row.mapping() for row in self.rows if row.refused],
            "failed": [row.mapping() for row in self.rows if not row.ok],
            "lossless": [row.mapping() for row in self._lossless() if row.ok],
            "controls": [control.mapping() for control in self.controls],
        }

    def summary(self) -> str:
        """The verdict in a sentence."""
        lossy = [row.certificate.max_tv for row in self.rows if row.lossy and row.certificate]
        parts = [
            f"{sum(row.certificate is not None for row in self.rows)} combinations, "
            f"{self.drafted} of them with drafts",
            f"largest total variation {self.max_tv:.2g} where a law is promised",
            f"{len(lossy)} lossy, up to {max(lossy, default=0.0):.2g}",
            f"{sum(row.refused is not None for row in self.rows)} refused",
            f"{sum(not row.ok for row in self.rows)} failed",
            f"{sum(control.caught for control in self.controls)} of {len(self.controls)} controls caught",
        ]
        return (
            f"{'every promise is kept' if self.ok else 'a promise is broken'}: {'; '.join(parts)}"
        )

    def markdown(self) -> str:
        """The verdict and a table with a line for each combination."""
        parts = [
            "# Certificate",
            self.summary(),
            "\n".join([_HEADER, *(_line(row) for row in self.rows if row.certificate)]),
        ]
        if self.controls:
            parts += ["## Controls", "\n".join([_CONTROLS_HEADER, *map(_control, self.controls)])]
        refused = Counter(row.refused for row in self.rows if row.refused)
        if refused:
            lines = [f"- {reason} ({count} combinations)" for reason, count in refused.items()]
            parts += ["## Refused", "\n".join(lines)]
        if not all(row.ok for row in self.rows):
            failed = [
                f"```text\n{row.combination.paste()}# {row.failed or row.certificate}\n```"
                for row in self.rows
                if not row.ok
            ]
            parts += ["## Failed", "\n\n".join(failed)]
        return "\n\n".join(parts) + "\n"

    def write(self, folder: Path) -> None:
        """Write `certificate.json` and `certificate.md` into a folder, which is made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.mapping(), indent=2, ensure_ascii=False)
        (folder / "certificate.json").write_text(text + "\n", encoding="utf-8")
        (folder / "certificate.md").write_text(self.markdown(), encoding="utf-8")

    def _lossless(self) -> Iterator[Any]:
        return (row for row in self.rows if row.certificate is not None and not row.lossy)


_COLUMNS = (
    "drafter",
    "verifier",
    "schedulers",
    "setting",
    "laws",
    "memory",
    "batch",
    "guarantee",
    "max_tv",
    "prefixes",
    "leaves",
    "drafted",
    "seconds",
)
_HEADER = f"| {' | '.join(_COLUMNS)} |\n|{'---|' * len(_COLUMNS)}"


_CONTROLS_HEADER = "| broken on purpose | caught | max_tv | smallest case |\n|---|---|---|---|"


def _control(control: Verdict) -> str:
    caught = "yes" if control.caught else "**no**"
    return f"| {control.name} | {caught} | {control.max_tv:.2g} | `{control.case}` |"


def _line(row: Row) -> str:
    cells = row.mapping()
    cells |= {
        "schedulers": " + ".join(cells["schedulers"]),
        "max_tv": f"{cells['max_tv']:.2g}",
        "seconds": f"{row.seconds:.2f}",
    }
    if not row.ok:
        cells["guarantee"] = f"**{cells['guarantee']} broken**"
    return f"| {' | '.join(str(cells[column]) for column in _COLUMNS)} |"


def certify_all(
    *,
    deep: bool = False,
    processes: int = 2,
    only: Mapping[Kind, Sequence[str]] | None = None,
    controls: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Matrix:
    """Certify every combination of installed components, each with its example options, and the controls.

    Args:
        deep: three tokens, drafts three deep, texts of four tokens.
        processes: processes that share the work, of one thread each; 1 works in this one.
        only: names of the components to take, by kind; all of a kind unless given.
        controls: whether to show as well that what is broken on purpose is caught.
        progress: called with how many are done, and how many there are.
    """
    manager = PluginManager()
    todo = make_combinations(manager, deep, only or {})
    names = [control.name for control in CONTROLS] if controls else []
    matrix = Matrix()
    for result in _results([*todo, *names], manager, processes):
        if isinstance(result, Verdict):
            matrix.controls.append(result)
        else:
            matrix.rows.append(result)
        progress(len(matrix.rows) + len(matrix.controls), len(todo) + len(names))
    return matrix


def _results(
    todo: Sequence[Combination | str], manager: PluginManager, processes: int
) -> Iterator[Row | Verdict]:
    if processes == 1:
        yield from (_work(one, manager) for one in todo)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), _start) as pool:
        yield from pool.map(_work, todo, chunksize=4)


_manager: PluginManager | None = None
"""This worker process's plugins."""


def _start() -> None:
    global _manager
    torch.set_num_threads(1)
    _manager = PluginManager()


def _work(one: Combination | str, manager: PluginManager | None = None) -> Row | Verdict:
    """Certify a combination, or the control of this name."""
    if isinstance(one, str):
        return next(control for control in CONTROLS if control.name == one).verdict()
    known = manager or _manager
    assert known is not None
    return check(one, known, _LONGER)


def check(combination: Combination, manager: PluginManager, longer: int = 0) -> Row:
    """Certify one combination; what a component refuses and what goes wrong is in the row.

    Texts get up to `longer` tokens longer until something is drafted, for else nothing would be checked.
    """
    began = time.perf_counter()
    row = Row(combination)
    try:
        drafter = manager.bind("drafter", dict(combination.drafter))
        drafter = on_tables(drafter, manager, combination.case.vocab_size)
        never = isinstance(drafter.build(), NoDrafter)
        for more in range(1 if never else longer + 1):
            case = replace(combination.case, horizon=combination.case.horizon + more)
            row.combination = replace(combination, case=case)
            row.certificate = _certify(row.combination, drafter, manager)
            if row.certificate.drafted:
                break
    except (ConfigError, PluginError, UnsupportedModelError) as error:
        row.refused = " ".join(str(error).split())
    except Exception as error:  # a component of anybody's may do anything
        row.failed = f"{type(error).__name__}: {' '.join(str(error).split())}"
    row.seconds = time.perf_counter() - began
    return row


def _certify(
    combination: Combination, drafter: Bound[Drafter], manager: PluginManager
) -> Certificate:
    return certify(
        drafter.build,
        manager.bind("verifier", dict(combination.verifier)).build,
        [manager.bind("scheduler", dict(one)).build for one in combination.schedulers],
        cases=[combination.case],
        tolerance=_TOLERANCE,
    )
