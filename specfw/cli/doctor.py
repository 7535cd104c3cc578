"""`specfw doctor`: what is installed here, and what a target can do on this machine."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from specfw.cli.options import Dtype, JsonOutput, Target, given, print_json
from specfw.plugins import PluginManager
from specfw.version import __version__

__all__ = ["NAME", "command", "report"]

NAME = "doctor"

_PACKAGES = ("torch", "transformers", "numpy", "pluggy", "pydantic", "accelerate", "gguf")
_QUANTISERS = (
    *("bitsandbytes", "compressed-tensors", "gptqmodel", "hqq", "kernels"),
    *("optimum", "optimum-quanto", "torchao"),
)
_ROWS = (1, 2, 4, 8)


def command(
    target: Target = None,
    dtype: Dtype = None,
    rows: Annotated[
        int, typer.Option(min=2, help="Rows of the pass that one row is compared with.")
    ] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Timed passes of each size.")] = 3,
    as_json: JsonOutput = False,
) -> None:
    """Print versions, devices and plugins; with --target, load it and measure what drafts change on it."""
    with Console(stderr=True).status("looking") as status:
        found = report()
        if target is not None:
            status.update(f"measuring {target}")
            found["target"] = _target(given(target=target, dtype=dtype), rows, repeats)
    if as_json:
        print_json(found)
    else:
        _show(found)


def report() -> dict[str, Any]:
    """The stable keys of `specfw doctor --json`, without a target."""
    import torch

    described = PluginManager().describe()
    return {
        "specfw": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "quantisers": {name: _version(name) for name in _QUANTISERS},
        "devices": [
            f"cpu: {torch.backends.cpu.get_cpu_capability()}",
            *(
                f"cuda:{index}: {torch.cuda.get_device_name(index)}"
                for index in range(torch.cuda.device_count())
            ),
        ],
        "threads": torch.get_num_threads(),
        "plugins": {one["name"]: one["version"] for one in described["plugins"]},
        "broken": {one["name"]: one["error"] for one in described["broken"]},
        "target": None,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _target(settings: dict[str, Any], rows: int, repeats: int) -> dict[str, Any]:
    from specfw.bench.profile import profile_target
    from specfw.bench.shapes import guarantee_on, shape_dependence
    from specfw.pipeline import Pipeline
    from specfw.weights import weight_bytes

    with Pipeline.from_config(settings) as pipeline:
        loaded, runner = pipeline.target, pipeline.engine.runner
        shapes = shape_dependence(runner, rows)
        profile = profile_target(runner, _ROWS, context=32, repeats=repeats)
        quantization = loaded.quantization
        return {
            "name": loaded.name,
            "notes": list(loaded.notes),
            "bytes": weight_bytes(loaded.model),
            "quantization": None if quantization is None else str(quantization),
            "kernel": None if quantization is None else quantization.kernel,
            "packed": quantization is not None and quantization.packed,
            "batch_invariant": None if quantization is None else quantization.batch_invariant,
            "compileable": quantization is None or quantization.compileable,
            "probe_error": runner.probe_error,
            "rows": shapes.rows,
            "kernel_shift": shapes.kernel,
            "model_shift": shapes.model,
            "guarantee": guarantee_on(pipeline.engine.verifier.guarantee, quantization, shapes),
            "seconds_by_rows": {str(rows): time for rows, time in profile.medians().items()},
        }


def _show(found: dict[str, Any]) -> None:
    console = Console()
    table = Table("what", "here")
    table.add_row("specfw", found["specfw"])
    table.add_row("python", f"{found['python']} on {found['platform']}")
    for name, version in {**found["packages"], **found["quantisers"]}.items():
        table.add_row(name, version or "not installed")
    table.add_row("devices", "\n".join(found["devices"]))
    table.add_row("threads", str(found["threads"]))
    table.add_row("plugins", ", ".join(found["plugins"]))
    console.print(table)
    for name, error in found["broken"].items():
        console.print(f"broken: {name}: {error}", style="red", markup=False)
    if found["target"] is not None:
        _show_target(console, found["target"])


def _show_target(console: Console, target: dict[str, Any]) -> None:
    answers = {True: "yes", False: "no", None: "not known"}
    table = Table("target", target["name"])
    for note in target["notes"]:
        table.add_row("note", note)
    table.add_row("weights", f"{target['bytes'] / 2**20:.1f} MiB")
    if target["quantization"] is not None:
        table.add_row("kernel", target["kernel"] or "not known")
        table.add_row("rows independent", answers[target["batch_invariant"]])
        table.add_row("compileable", answers[target["compileable"]])
    first = next(iter(target["seconds_by_rows"].values()))
    for rows, seconds in target["seconds_by_rows"].items():
        table.add_row(f"{rows} rows", f"{1000 * seconds:.1f} ms, {seconds / first:.2f}x")
    console.print(table)
    print(target["guarantee"])
