"""Which of transformers' causal language models the packed forward runs exactly, found out by running them.

`survey` builds a tiny random model of every registered type and attaches to it, guards, probe and all.
`python -m specfw.engine.survey` writes what it finds to the table that ships beside this file, which
`surveyed_models` reads without importing torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any, Literal

__all__ = ["Survey", "SurveyRow", "supported_models", "survey", "surveyed_models"]

Verdict = Literal["supported", "refused", "not built"]


@dataclass(frozen=True, slots=True)
class SurveyRow:
    """What became of one model type."""

    model_type: str
    verdict: Verdict
    reason: str = ""
    """Why it was refused, or what failed when a tiny one was built or run; empty if supported."""
    error: float | None = None
    """What the probe returned: the worst row's difference, in standard deviations of the logits."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The shipped table."""

    transformers: str
    """The version whose models were surveyed."""
    rows: tuple[SurveyRow, ...]


def surveyed_models() -> Survey:
    """The shipped table: every registered type, supported or not."""
    table = json.loads(resources.files(__package__).joinpath("models.json").read_text("utf-8"))
    return Survey(table["transformers"], tuple(SurveyRow(**row) for row in table["models"]))


def supported_models() -> list[SurveyRow]:
    """The rows of the shipped table that are supported."""
    return [row for row in surveyed_models().rows if row.verdict == "supported"]


def survey(
    progress: Callable[[SurveyRow], None] | None = None, model_types: Iterable[str] | None = None
) -> list[SurveyRow]:
    """Try one tiny random float32 model of each type.

    Args:
        progress: called with each row as it is found.
        model_types: which ones; all registered causal language models unless given.
    """
    from transformers import logging
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    verbosity = logging.get_verbosity()
    logging.set_verbosity(_CRITICAL)  # what fails is in the rows
    rows = []
    try:
        for model_type in model_types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            rows.append(_try_type(model_type))
            if progress is not None:
                progress(rows[-1])
    finally:
        logging.set_verbosity(verbosity)
    return rows


def _try_type(model_type: str) -> SurveyRow:
    from specfw.engine.model_runner import ModelRunner
    from specfw.errors import UnsupportedModelError

    try:
        model = _tiny_model(model_type)
    except Exception as error:  # any failure of a foreign class is an answer here
        return SurveyRow(model_type, "not built", _root_cause(error))
    try:
        return SurveyRow(
            model_type, "supported", error=float(f"{ModelRunner(model).probe_error:.1e}")
        )
    except UnsupportedModelError as error:
        return SurveyRow(model_type, "refused", str(error))


def _root_cause(error: Exception) -> str:
    """What went wrong, without the lines of advice; the last cause says it best."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text[:200]}"


_CRITICAL = 50  # of the standard library's logging

_MOST_PARAMETERS = 3_000_000

_SMALL: dict[str, Any] = {
    # widths
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner"), 64
    ),
    **dict.fromkeys(("inner_dim", "ffn_hidden_size", "block_ff_dim"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8
    ),
    **dict.fromkeys(
        ("kv_lora_rank", "q_lora_rank", "hidden_size_per_layer_input", "query_pre_attn_scalar"), 8
    ),
    "qk_head_dim": 16,
    "laurel_rank": 4,
    # depths
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    "num_kv_shared_layers": 0,
    "first_k_dense_replace": 1,
    # experts
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    "moe_shared_expert_intermediate_size": 16,
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    # vocabulary and positions
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    "eos_token_id": 2,
    "num_codebooks": 1,
    # attention
    "sliding_window": 6,
    "attention_chunk_size": 8,  # shorter than the probe, so that a missing chunk mask shows
    "index_topk": 4,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "is_decoder": True,
    # numbers that make a difference show
    "initializer_range": 0.2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}


_CHECKPOINT_LAYERS = {
    "lfm2": ["conv", "full_attention"],
    "lfm2_moe": ["conv", "full_attention"],
    "minimax_m3_vl_text": ["full_attention", "minimax_m3_sparse"],
}
"""Kinds of layers that published checkpoints have but the type's default config lacks."""


def _tiny_model(model_type: str) -> Any:
    """A tiny model whose own forward runs.

    Raises:
        Exception: whatever the first try raised, if no try worked.
    """
    failures: list[Exception] = []
    for with_unset, with_kinds in ((False, True), (False, False), (True, True), (True, False)):
        try:
            return _build(_tiny_config(model_type, with_unset, with_kinds))
        except Exception as error:  # foreign code may raise anything
            failures.append(error)
    raise failures[0]


def _build(config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in make(config).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(
            f"still {size:,} parameters after every size known to the survey was made small"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1 and parameter.is_floating_point():
                    parameter.add_(0.05 * torch.randn_like(parameter))
    with torch.inference_mode():
        model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
    return model


def _tiny_config(model_type: str, with_unset: bool, with_kinds: bool) -> Any:
    """The type's own text config with every size that it has made small.

    Args:
        model_type: the type.
        with_unset: give also the sizes that the config leaves open.
        with_kinds: give the kinds of layers; some configs derive them and take none.
    """
    from transformers import CONFIG_MAPPING

    full = CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
    kind: Any = type(full)
    kinds = _layer_kinds(full, model_type) if with_kinds else {}
    sizes = {
        key: value
        for key, value in _SMALL.items()
        if _has(full, key, with_unset) and not isinstance(getattr(kind, key, None), property)
    }
    if "kv_lora_rank" in sizes and "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = sizes.get(
            "num_attention_heads", 4
        )  # latent attention has no groups
    if hasattr(full, "is_decoder"):
        sizes["is_decoder"] = True
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if key in sizes and kinds:
            sizes[key] = max(len(listed) for listed in kinds.values())
    return kind(**sizes, **kinds)


def _layer_kinds(full: Any, model_type: str) -> dict[str, list[str]]:
    """One layer of each kind that the type has, two at least."""
    listed = {
        key: kinds
        for key in ("layer_types", "mlp_layer_types")
        if (kinds := getattr(full, key, None))
    }
    if model_type in _CHECKPOINT_LAYERS:
        listed["layer_types"] = _CHECKPOINT_LAYERS[model_type]
    distinct = {key: list(dict.fromkeys(kinds)) for key, kinds in listed.items()}
    depth = max(2, *(len(kinds) for kinds in distinct.values()), 2)
    return {
        key: [kinds[layer % len(kinds)] for layer in range(depth)]
        for key, kinds in distinct.items()
    }


def _has(config: Any, key: str, with_unset: bool) -> bool:
    try:
        return hasattr(config, key) if with_unset else getattr(config, key, None) is not None
    except Exception:  # some refuse to name one value where layers differ
        return True


def _write_table() -> None:
    """Survey everything and replace the shipped table."""
    import warnings
    from pathlib import Path

    import torch
    import transformers

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = survey(
        lambda row: print(row.model_type, row.verdict, row.error or row.reason, flush=True)
    )
    rows.sort(key=lambda row: row.model_type)
    table = {"transformers": transformers.__version__, "models": [asdict(row) for row in rows]}
    Path(__file__).with_name("models.json").write_text(json.dumps(table, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    _write_table()
