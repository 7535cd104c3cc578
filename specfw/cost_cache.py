"""What passes cost, measured once for each model, machine and version, and kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from specfw.costs import read_profile
from specfw.errors import ConfigError
from specfw.targets.demo import cache_folder
from specfw.version import __version__

if TYPE_CHECKING:
    from specfw.engine.model_runner import ModelRunner

__all__ = ["pass_seconds", "remembered"]

log = logging.getLogger("specfw")

_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
_CONTEXT = 128
_REPEATS = 3


def pass_seconds(runner: ModelRunner, name: str) -> Callable[[], Mapping[int, float]]:
    """A function for `TargetInfo.pass_seconds`, which measures when it is first called, if nobody has yet.

    Args:
        runner: runs the target.
        name: what the target is called.
    """

    @cache
    def seconds() -> Mapping[int, float]:
        return remembered(_identity(runner, name), lambda: _measure(runner))

    return seconds


def remembered(
    identity: Mapping[str, Any], measure: Callable[[], Mapping[int, float]]
) -> Mapping[int, float]:
    """Seconds by rows from the user's cache, or measured now and kept there.

    A file that cannot be read is measured anew, and one that cannot be written is done without.
    """
    text = json.dumps(identity, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    path = cache_folder() / "costs" / f"{digest}.json"
    try:
        return read_profile(path)
    except ConfigError:
        curve = measure()
    about = {**identity, "curve": [{"rows": rows, "seconds": s} for rows, s in curve.items()]}
    try:
        _write(path, json.dumps(about, indent=2))
    except OSError as error:
        log.debug("costs of passes cannot be kept in %s: %s", path, error)
    return curve


def _write(path: Path, text: str) -> None:
    """Write aside and rename, so that the file is complete whenever it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}-", delete=False
    ) as aside:
        try:
            aside.write(text)
            aside.close()
            os.replace(aside.name, path)
        except OSError:
            Path(aside.name).unlink(missing_ok=True)
            raise


def _identity(runner: ModelRunner, name: str) -> dict[str, Any]:
    """Whatever passes may take another time with."""
    import torch

    cuda = runner.device.type == "cuda"
    config = str(runner.model.config.to_json_string()).encode()
    return {
        "target": name,
        "config": hashlib.blake2b(config, digest_size=12).hexdigest(),
        "dtype": str(runner.dtype),
        "min_rows": runner.min_rows,
        "device": torch.cuda.get_device_name(runner.device) if cuda else _processor(),
        "threads": torch.get_num_threads(),
        "versions": {
            "specfw": __version__,
            **{package: metadata.version(package) for package in ("torch", "transformers")},
        },
    }


def _processor() -> str:
    return f"{platform.machine()} {platform.processor()} {os.cpu_count()}"


def _measure(runner: ModelRunner) -> dict[int, float]:
    from specfw.engine.timing import time_passes

    context = max(1, min(_CONTEXT, runner.max_length // 2))
    rows = [count for count in _ROWS if context + count <= runner.max_length]
    log.info("timing target passes, once for this model and machine")
    timed = time_passes(runner, rows, context, _REPEATS)
    return {count: median(several) for count, several in timed.items()}
