"""Models that the packed forward cannot run exactly are refused at start, and no model is left changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from specfw.engine import guards
from specfw.engine.attention import ATTENTION
from specfw.engine.memory import KVMemory
from specfw.engine.model_runner import ModelRunner
from specfw.engine.survey import SurveyRow, supported_models, survey, surveyed_models
from specfw.errors import ContractError, UnsupportedModelError
from tests.tiny_models import ARCHITECTURES, CONTEXT, build, tiny

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def model_of(config: str, **changes: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(getattr(transformers, config)(**SIZES, **changes))
    return model.eval()


def message_of(model: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        ModelRunner(model)
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message  # what to do comes last
    return message


# What the config says


@pytest.mark.parametrize(
    ("config", "changes", "layers"),
    [
        (
            "Qwen3NextConfig",
            {**EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
            "linear_attention",
        ),
        ("MambaConfig", {}, "linear_attention"),
        ("RwkvConfig", {"attention_hidden_size": 32}, "recurrent layers of rwkv"),
        ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, "conv"),
        ("FalconH1Config", {"mamba_d_ssm": 64, "mamba_n_heads": 8}, "hybrid"),
    ],
)
def test_B08_layers_that_cannot_be_rolled_back_are_refused(
    config: str, changes: dict[str, Any], layers: str
) -> None:
    """B08: after a partly rejected draft, a recurrent state holds the rejected tokens and the text is garbage."""
    message = message_of(model_of(config, **changes))
    assert layers in message
    assert "cannot be rolled back" in message


def test_chunked_attention_is_refused() -> None:
    """Chunk borders missing from the mask, which short prompts do not show."""
    llama4 = {
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 128,
        "head_dim": 8,
    }
    message = message_of(
        model_of("Llama4TextConfig", num_local_experts=2, intermediate_size_mlp=64, **llama4)
    )
    assert "chunked_attention" in message
    assert "rolled back" not in message


def test_encoder_decoders_are_refused() -> None:
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    assert "encoder-decoder" in message_of(T5ForConditionalGeneration(config))


@pytest.mark.parametrize("config", ["BloomConfig", "MptConfig"])
def test_models_that_compute_attention_themselves_are_refused(config: str) -> None:
    """Setting the attention function of such a model only logs a warning, and nothing is switched."""
    message = message_of(model_of(config))
    assert "computes attention itself" in message


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, CONTEXT),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, CONTEXT),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
            },
            64,
        ),
    ],
)
def test_frequencies_that_depend_on_batch_mates_cap_the_length(
    rope: dict[str, Any], longest: int
) -> None:
    """A long request changing the frequencies, and so the logits, of a short one in the same pass."""
    runner = ModelRunner(build("llama", rope_parameters=rope))
    assert runner.max_length == longest


def test_frequencies_by_layer_type_are_seen_too() -> None:
    model = build("gemma3")
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 32}
    model.config.rope_parameters = {
        "full_attention": longrope,
        "sliding_attention": {"rope_type": "default"},
    }
    assert guards.longest_sequence(model) == 32


def test_within_the_cap_a_long_request_leaves_a_short_one_alone() -> None:
    """The cap lying one token too high."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    runner = ModelRunner(build("llama", rope_parameters=rope, max_position_embeddings=32))
    memory = KVMemory(20, 4)
    texts = [np.arange(3, 3 + length) % 64 for length in (5, runner.max_length)]
    sequences = [memory.open(text.tolist()) for text in texts]
    expected = runner.stock_logits(texts[0])
    with memory.transaction() as transaction:
        for sequence, text in zip(sequences, texts, strict=True):
            transaction.reserve(sequence, len(text))
        segments = [guards._chain(*pair) for pair in zip(sequences, texts, strict=True)]
        logits = runner.run(runner.new_store(memory.num_slots), segments).logits
    torch.testing.assert_close(logits[:5], expected, rtol=0, atol=4e-5)


# How the layers call the attention function


def test_a_second_attention_call_in_a_layer_is_refused() -> None:
    """The second call's K and V overwriting the first's (differential attention, looped layers)."""
    message = message_of(model_of("DiffLlamaConfig", head_dim=8))
    assert "DiffLlama" in message
    assert "second one in layer 0" in message


def test_a_mask_of_the_models_own_is_refused() -> None:
    """Dropping a mask that the model adds to every score."""
    message = message_of(model_of("DogeConfig", keep_window_size=128))
    assert "mask" in message


def test_a_position_bias_is_refused() -> None:
    class Biased(LlamaForCausalLM):
        def forward(self, *arguments: Any, **options: Any) -> Any:
            return super().forward(*arguments, position_bias=torch.zeros(1), **options)

    model = Biased(tiny("llama").config).eval()
    model.set_attn_implementation("eager")
    assert "position bias" in message_of(model)


# Numbers


class IgnoresPositions(LlamaForCausalLM):
    def forward(self, *arguments: Any, position_ids: Any = None, **options: Any) -> Any:
        return super().forward(*arguments, **options)


class MixesTokens(LlamaForCausalLM):
    """Adds the embedding of the token before, as convolutions do."""

    def forward(self, input_ids: Any, **options: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=embedded + embedded.roll(1, 1), **options)


class FailsOnPackedTokens(LlamaForCausalLM):
    def forward(self, *arguments: Any, specfw_step: Any = None, **options: Any) -> Any:
        if specfw_step is not None:
            raise TypeError("unexpected keyword")
        return super().forward(*arguments, **options)


class NeverAttends(LlamaForCausalLM):
    def forward(self, input_ids: Any, **options: Any) -> Any:
        logits = self.lm_head(self.model.embed_tokens(input_ids))
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (IgnoresPositions, "standard deviations"),
        (MixesTokens, "standard deviations"),
        (FailsOnPackedTokens, "unexpected keyword"),
        (NeverAttends, "none that did"),
    ],
)
def test_the_probe_catches(kind: type[LlamaForCausalLM], complaint: str) -> None:
    """A model that is wrong in a way that no config tells: garbage text and no complaint."""
    model = kind(tiny("llama").config).eval()
    model.load_state_dict(tiny("llama").state_dict())
    message = message_of(model)
    assert kind.__name__ in message
    assert complaint in message


def test_the_probe_refuses_numbers_that_are_not() -> None:
    """NaN comparing as within the tolerance."""
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[:] = torch.nan
    assert "standard deviations" in message_of(model)


@pytest.mark.parametrize("size", [3e-3, 3e-2])
def test_the_probe_is_tight_in_float32(size: float) -> None:
    """A tolerance that lets a real difference pass; rounding is below 1e-5."""
    model = build("llama")
    kernel = model.model.layers[1].self_attn.o_proj

    def disturb(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + size) if model.config._attn_implementation == ATTENTION else output

    kernel.register_forward_hook(disturb)
    assert "standard deviations" in message_of(model)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_good_models_pass_with_room_to_spare(architecture: str) -> None:
    assert ModelRunner(tiny(architecture)).probe_error < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_pass(dtype: torch.dtype) -> None:
    assert ModelRunner(build("llama").to(dtype)).probe_error < {torch.float64: 1e-12}.get(
        dtype, 0.05
    )


# The model between passes


def generated(model: Any) -> list[int]:
    ids = torch.tensor([[5, 6, 7, 8]])
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )
    return list(tokens[0].tolist())


def one_pass(runner: ModelRunner) -> None:
    memory = KVMemory(4, 4)
    sequence = memory.open([3, 4, 5])
    with memory.transaction() as transaction:
        transaction.reserve(sequence, 3)
        runner.run(
            runner.new_store(memory.num_slots), [guards._chain(sequence, np.array([3, 4, 5]))]
        )


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_model_generates_before_between_and_after_passes(implementation: str) -> None:
    """The switched attention function staying behind, so that everybody else's calls fail or lose the mask."""
    model = build("llama")
    model.set_attn_implementation(implementation)
    expected = generated(model)
    runner = ModelRunner(model)
    assert generated(model) == expected
    for _ in range(2):
        one_pass(runner)
        assert model.config._attn_implementation == implementation
        assert generated(model) == expected


@pytest.mark.parametrize("fault", [RuntimeError("in the forward"), KeyboardInterrupt()])
def test_the_model_is_restored_when_a_pass_fails(fault: BaseException) -> None:
    model = build("llama")
    expected = generated(model)
    runner = ModelRunner(model)

    def fail(*_: Any) -> None:
        raise fault

    hook = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(type(fault)):
        one_pass(runner)
    hook.remove()
    assert generated(model) == expected
    one_pass(runner)


@pytest.mark.parametrize(
    "make", [lambda: IgnoresPositions(tiny("llama").config), lambda: model_of("BloomConfig")]
)
def test_a_refused_model_is_left_as_it_was(make: Callable[[], Any]) -> None:
    model = make().eval()
    before = model.config._attn_implementation
    expected = generated(model)
    message_of(model)
    assert model.config._attn_implementation == before
    assert generated(model) == expected


def test_parts_keep_their_own_attention_functions() -> None:
    """Restoring one name for all parts of a model whose parts had different ones."""
    config = transformers.Gemma3Config(
        text_config=tiny("gemma3").config.to_dict(),
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=63,
    )  # fmt: skip
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    guards.check_config(model)
    assert model.config.text_config._attn_implementation == "sdpa"
    assert model.config.vision_config._attn_implementation == "eager"


def test_a_call_outside_a_pass_is_refused() -> None:
    """Attention without any mask, silently, in a model left on specfw's attention function."""
    model = build("llama")
    guards.check_config(model)
    model.set_attn_implementation(ATTENTION)
    with pytest.raises(ContractError, match="outside"):
        model(input_ids=torch.tensor([[3, 4]]), use_cache=False)


# The shipped table


def test_the_table_lists_what_it_should() -> None:
    table = surveyed_models()
    verdicts = {row.model_type: row.verdict for row in table.rows}
    assert len(verdicts) == len(table.rows) > 150
    for model_type in ("llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_neox"):
        assert verdicts[model_type] == "supported"
    for model_type in ("qwen3_next", "mamba", "lfm2", "llama4_text", "bloom", "diffllama", "doge"):
        assert verdicts[model_type] == "refused"
    assert {row.model_type for row in supported_models()} == {
        t for t, v in verdicts.items() if v == "supported"
    }
    assert all(
        (row.error is not None) == (row.verdict == "supported") == (not row.reason)
        for row in table.rows
    )


@pytest.mark.skipif(
    surveyed_models().transformers != transformers.__version__,
    reason="the table is of another version",
)
def test_the_table_is_what_a_survey_finds() -> None:
    """A table that was edited, or that the guards have outgrown."""
    seen: list[SurveyRow] = []
    types = ["llama", "gemma2", "qwen3_next", "lfm2", "bloom", "diffllama"]
    rows = survey(seen.append, types)
    shipped = {row.model_type: row for row in surveyed_models().rows}
    assert seen == rows
    assert [row.model_type for row in rows] == types
    for row in rows:
        assert (row.verdict, row.reason) == (
            shipped[row.model_type].verdict,
            shipped[row.model_type].reason,
        )
