"""vLLM's `speculative_config` means what it says, or is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from specfw import PipelineConfig
from specfw.errors import ConfigError
from specfw.plugins import PluginManager

KNOWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ngram": (
        {
            "method": "ngram",
            "num_speculative_tokens": 9,
            "prompt_lookup_max": 5,
            "prompt_lookup_min": 2,
        },
        {
            "name": "ngram",
            "max_nodes": 9,
            "max_depth": 9,
            "max_ngram": 5,
            "min_ngram": 2,
            "continuations": 1,
        },
    ),
    "one length": (
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 3},
        {"name": "ngram", "max_ngram": 3, "min_ngram": 3},
    ),
    "by name": ({"model": "[ngram]", "num_speculative_tokens": 2}, {"name": "ngram"}),
    "draft model": (
        {"model": "some/model", "num_speculative_tokens": 5},
        {"name": "small-model", "max_nodes": 5, "max_depth": 5, "width": 1},
    ),
    "suffix": (
        {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_spec_factor": 1.5},
        {"name": "suffix", "max_nodes": 4, "factor": 1.5},
    ),
}


@pytest.mark.parametrize("case", KNOWN)
def test_a_known_method_becomes_a_drafter(case: str) -> None:
    """A dictionary that is accepted and then drafts something else, or less."""
    given, drafter = KNOWN[case]
    manager = PluginManager()
    if drafter["name"] not in manager.names("drafter"):
        pytest.skip(f"the plugin {drafter['name']} is not installed")
    resolved = PipelineConfig(target="demo", speculative_config=given).resolved(manager)
    assert {key: resolved["drafter"][key] for key in drafter} == drafter
    [scheduler] = resolved["scheduler"]
    count = given["num_speculative_tokens"]
    assert (scheduler["max_nodes"], scheduler["max_depth"], scheduler["max_width"]) == (
        count,
        count,
        1,
    )
    if case == "draft model":
        assert resolved["drafter"]["model"]["model"] == "some/model"


def test_a_given_scheduler_stays() -> None:
    config = PipelineConfig(
        target="demo",
        scheduler="fixed(max_nodes=2)",
        speculative_config={"method": "ngram", "num_speculative_tokens": 9},
    )
    assert config.scheduler[0].options == {"max_nodes": 2}
    assert PipelineConfig(target="demo", speculative_config=None).drafter.name == "none"


def test_it_is_the_default_beside_named_drafters() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 9}
    config = PipelineConfig(
        target="demo", drafters={"off": "none", "other": "ngram"}, speculative_config=given
    )
    assert (config.drafter.name, config.drafter.options["max_nodes"]) == ("ngram", 9)
    assert set(config.drafters) == {"off", "other"}


REFUSED: dict[str, tuple[Any, str]] = {
    "no mapping": (5, r"expected a mapping .*got 5"),
    "method": (
        {"method": "eagle", "num_speculative_tokens": 3},
        r"methods ngram, draft_model, suffix, got 'eagle'; name a drafter",
    ),
    "key": (
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_maxi": 3},
        r"unknown key 'prompt_lookup_maxi' for method 'ngram'; did you mean 'prompt_lookup_max'",
    ),
    "a key of another method": (
        {"model": "m", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
        r"unknown key 'prompt_lookup_max' for method 'draft_model'",
    ),
    "no count": ({"method": "ngram"}, r"num_speculative_tokens to be an integer from 1, got None"),
    "no model": (
        {"method": "draft_model", "num_speculative_tokens": 3},
        r"'model' to be a local folder or a hub id, got None",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_anything_else_is_refused(case: str) -> None:
    """A key that is dropped silently, so that somebody measures something else than they think."""
    given, sentence = REFUSED[case]
    with pytest.raises(ConfigError, match=sentence):
        PipelineConfig(target="demo", speculative_config=given)


def test_two_drafters_contradict_each_other() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match="is given too; leave one of them out"):
        PipelineConfig(target="demo", drafter="none", speculative_config=given)
