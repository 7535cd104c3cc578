"""The model card of a trained drafter: what it is for, how it was made, and what it brings."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specfw.bench.evaluation import evaluate
from specfw.components import Bound
from specfw.contracts import Trained, Trainer
from specfw.fingerprint import fingerprint
from specfw.pipeline import Pipeline
from specfw.training.files import whole_file
from specfw.training.run import Plan
from specfw.training.texts import Texts

__all__ = ["reference_of", "write_card"]

_FOLDERS = re.compile(r"(?<=[ ='\"])/[^ '\"(),]*/")
"""Where files lie on this machine, in a command."""
_PROMPTS = 1
_TOKENS = 64


def write_card(
    target: object,
    trainer: Bound[Trainer],
    plan: Plan,
    trained: Trained,
    settings: Mapping[str, Any],
    measure: bool = True,
    tell: Callable[[str], None] = lambda text: None,
    command: str = "",
) -> None:
    """Write README.md into the folder of the result.

    Args:
        target: as in a config.
        trainer: what was trained.
        plan: how.
        trained: what came out.
        settings: further keys of the pipeline's config.
        measure: whether to decode the project's own prompts, one of each category, and report acceptance.
        tell: takes a line on how it goes.
        command: how it was called, if at the command line.
    """
    texts = Texts(plan.texts or plan.out / "texts")
    with Pipeline.from_config({"target": target, "drafter": trained.drafter, **settings}) as built:
        found = (
            evaluate(built, per_category=_PROMPTS, max_new_tokens=_TOKENS, progress=tell).mapping()
            if measure
            else None
        )
        name, print_of = built.target.name, fingerprint(built.engine.info)
    about = {
        "target": f"{name} (fingerprint {print_of})",
        "date": datetime.date.today().isoformat(),
        **({"command": f"`{_FOLDERS.sub('', command)}`"} if command else {}),
        "trainer": f"{trainer.name} {_shown(trainer.options.model_dump(mode='json'))}",
        "texts": f"{texts.written} tokens that the target wrote itself, "
        + _shown({key: value for key, value in texts.about().items() if key in _TOLD}),
        **trained.facts,
    }
    lines = [
        f"# A drafter for {name}",
        "",
        "Made by `specfw train`, from the target's own texts only.",
        "",
    ]
    lines += ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in about.items()), ""]
    lines += [f"Use it as the drafter `{reference_of(trained.drafter, plan.out)}`.", ""]
    if found is not None:
        lines += [
            f"{found['acceptance_length']:.2f} tokens a target pass, greedy, on the project's own prompts "
            f"({found['prompts']} prompts, {_TOKENS} tokens each):",
            "",
            "| position | tested | kept |",
            "|---|---|---|",
            *(
                f"| {depth} | {one['tested']} | {one['rate']:.1%} |"
                for depth, one in enumerate(found["by_position"], start=1)
            ),
            "",
        ]
    with whole_file(plan.out / "README.md") as aside:
        aside.write_text("\n".join(lines), encoding="utf-8")


def reference_of(drafter: Mapping[str, Any], out: Path) -> str:
    """The reference to a trained drafter as text, without the folder that it happens to be in."""
    return _shown(
        {
            key: value.replace(str(out), "...") if isinstance(value, str) else value
            for key, value in drafter.items()
        }
    )


_TOLD = ("seed", "turn_temperature", "temperatures", "min_p", "turn_tokens", "answer_tokens")


def _shown(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())
