"""`specfw profile`: it times what it says it does, and prints what follows."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specfw.bench.profile import Profile, plot_profile, profile_target
from specfw.cli.main import app
from specfw.costs import read_profile
from specfw.engine.model_runner import ModelRunner
from specfw.errors import ConfigError
from specfw.testing.table_model import TableLM
from tests.test_docs import documented_json, flat_keys


def table_runner() -> ModelRunner:
    return ModelRunner(TableLM(3), prepack=False, check=False)


def ticks() -> Callable[[], float]:
    times = count(0.0, 0.5)
    return lambda: next(times)


def test_times_every_size_equally_often() -> None:
    """The first round, in which memory is allocated, must not count."""
    profile = profile_target(table_runner(), [1, 2, 5], context=4, repeats=3, clock=ticks())
    assert profile.seconds == {1: [0.5] * 3, 2: [0.5] * 3, 5: [0.5] * 3}


def test_a_pass_runs_as_many_rows_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were merged, or a context that was run again, would be another price."""
    runner, seen = table_runner(), []
    run = runner.run

    def watched(store, segments, *rest):  # type: ignore[no-untyped-def]
        seen.append(sum(len(segment.tokens) for segment in segments))
        return run(store, segments, *rest)

    monkeypatch.setattr(runner, "run", watched)
    profile_target(runner, [1, 3], context=4, repeats=2)
    assert seen == [4, 1, 3, 1, 3, 1, 3]


def test_too_long_a_context_is_refused() -> None:
    """A model asked for positions that it does not have would fail deep inside."""
    with pytest.raises(ConfigError, match="at most 24"):
        profile_target(table_runner(), [1, 8], context=20)


def test_what_follows_from_a_curve() -> None:
    """Flat passes and drafts of 0.05: the depths of the formula; for a=.8, K=4 it gives 3.3616."""
    profile = Profile("x", "float32", 8, 0.05, {rows: [1.0] for rows in (1, 16, 64)})
    about = profile.mapping()
    assert [best["depth"] for best in about["best"]] == [3, 4, 6, 8, 13]
    assert about["expected_tokens"]["tokens"] == pytest.approx(3.3616)
    steep = Profile("x", "float32", 8, 0.05, {rows: [float(rows)] for rows in (1, 16, 64)})
    assert [best["depth"] for best in steep.mapping()["best"]] == [0] * 5


def test_the_command(tmp_path: Path) -> None:
    """Its JSON has the keys that the page names, and schedulers can read it."""
    result = CliRunner().invoke(
        app, ["profile", "--target", "table", "--rows", "1,2,4", "--context", "4", "--json"]
    )
    assert result.exit_code == 0, result.output
    path = tmp_path / "profile.json"
    path.write_text(result.stdout)
    assert list(read_profile(path)) == [1, 2, 4]
    assert flat_keys(json.loads(result.stdout)) == documented_json("specfw profile")


def test_the_command_prints_the_formula() -> None:
    """People read this one."""
    result = CliRunner().invoke(
        app, ["profile", "--target", "table", "--rows", "1,2", "--context", "4", "--repeats", "1"]
    )
    assert "3.3616" in result.stdout


@pytest.mark.parametrize("rows", ["", "0,1", "one"])
def test_wrong_rows_are_refused(rows: str) -> None:
    """A sentence, not a traceback."""
    result = CliRunner().invoke(app, ["profile", "--target", "table", "--rows", rows])
    assert isinstance(result.exception, ConfigError)


def test_plot(tmp_path: Path) -> None:
    """With matplotlib a PNG comes out; without it, a sentence says what to install."""
    profile = Profile("x", "float32", 8, 0.05, {rows: [1.0, 1.1] for rows in (1, 2)})
    path = tmp_path / "curve.png"
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ConfigError, match="matplotlib"):
            plot_profile(profile, path)
    else:
        plot_profile(profile, path)
        assert path.read_bytes().startswith(b"\x89PNG")
