"""specfw inside `generate` of transformers: the same arguments and results, decoded speculatively.

`generate` prepares everything (lengths, masks, logits processors, stopping criteria) and hands it to a
callable in place of its own loop. What it does not hand on, the callable carries: streamer and tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specfw.config import EngineConfig
from specfw.contracts import LoadedTarget, TargetLoader
from specfw.errors import CapacityError, ConfigError, ContractError
from specfw.integrations.hf_settings import Row, row_settings
from specfw.pipeline import Pipeline
from specfw.types import Output, SamplingParams, SpeculationParams

__all__ = ["CustomGenerate", "custom_generate", "generate"]

_DRAFT_ROOM = 64
"""KV slots kept for the drafts of one row."""
_LEAST_KV_TOKENS = 2048
"""So that a few short calls with growing lengths share one pipeline."""


class CustomGenerate:
    """Decodes for `model.generate(..., custom_generate=this)`.

    The pipeline for a model is built at its first call and kept here, with the model, until this
    object goes; it is built anew if the model's weights changed or a call needs more KV memory.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        seed: int | None = None,
        tokenizer: Any = None,
        streamer: Any = None,
        speculation: SpeculationParams | None = None,
        plugins: Iterable[object] = (),
    ) -> None:
        """See `custom_generate`."""
        if "target" in config:
            raise ConfigError(
                "custom_generate: expected no target, for it is the model that generates, got "
                f"{config['target']!r}; leave it out"
            )
        self._config = dict(config)
        self._seed, self._tokenizer, self._streamer = seed, tokenizer, streamer
        self._speculation = speculation or SpeculationParams()
        self._plugins = tuple(plugins)
        self._most_rows = EngineConfig(**config.get("engine", {})).max_batch
        self._pipelines: dict[Any, _Attached] = {}
        self.outputs: list[Output] = []
        """What specfw says of each row of the last call: text ids, why it ended, speculation."""

    def carrying(
        self,
        tokenizer: Any = None,
        streamer: Any = None,
        speculation: SpeculationParams | None = None,
    ) -> CustomGenerate:
        """The same, with the same pipelines, and with what `generate` does not hand on."""
        other = copy(self)
        other._tokenizer = tokenizer if tokenizer is not None else self._tokenizer
        other._streamer = streamer if streamer is not None else self._streamer
        other._speculation = speculation or self._speculation
        return other

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Decode; `generate` calls this.

        Returns:
            What `generate` returns: ids int64 [B, T], or a `GenerateDecoderOnlyOutput`.

        Raises:
            ConfigError: a setting cannot be honoured exactly; the sentence says which and why.
            CapacityError: the text does not fit into the context.
        """
        _refuse(model, generation_config, model_kwargs)
        rows = _rows(input_ids, model_kwargs)
        if self._streamer is not None and len(rows) > 1:
            raise ConfigError(
                f"generate: expected one row to stream, got {len(rows)}; leave the streamer out"
            )
        params = [
            row_settings(
                row, logits_processor, stopping_criteria, bool(generation_config.do_sample), seed
            ).model_copy(update={"speculation": self._speculation})
            for row, seed in zip(rows, self._seeds(len(rows)), strict=True)
        ]
        pipeline = self._pipeline(model, rows, params)
        self.outputs = self._decode(pipeline, input_ids, [row.prompt for row in rows], params)
        for output in self.outputs:
            if output.error is not None:
                raise ContractError(output.error)
        sequences = _padded(input_ids, self.outputs, generation_config._pad_token_tensor)
        if not generation_config.return_dict_in_generate:
            return sequences
        scores, logits = _step_rows(
            model, input_ids, sequences, logits_processor, generation_config, model_kwargs
        )
        return GenerateDecoderOnlyOutput(sequences=sequences, scores=scores, logits=logits)

    def close(self) -> None:
        """Close the pipelines and forget the models."""
        for attached in self._pipelines.values():
            attached.pipeline.close()
        self._pipelines.clear()

    def _seeds(self, rows: int) -> list[int]:
        """A seed for each row; without one given, from torch's own generator, as `generate` does."""
        if self._seed is None:
            return [int(seed) for seed in torch.randint(2**62, (rows,)).tolist()]
        return [self._seed + row for row in range(rows)]

    def _decode(
        self,
        pipeline: Pipeline,
        input_ids: Tensor,
        prompts: list[list[int]],
        params: list[SamplingParams],
    ) -> list[Output]:
        if self._streamer is None:
            return pipeline.generate(prompts, params, progress=False)
        self._streamer.put(input_ids.cpu())
        outputs = []
        for piece in pipeline.stream(prompts, params):
            if piece.token_ids:
                self._streamer.put(torch.tensor(piece.token_ids))
            if piece.output is not None:
                outputs.append(piece.output)
        self._streamer.end()
        return outputs

    def _pipeline(
        self, model: Any, rows: Sequence[Row], params: Sequence[SamplingParams]
    ) -> Pipeline:
        longest = max(
            len(row.prompt) + one.max_new_tokens for row, one in zip(rows, params, strict=True)
        )
        needed = min(len(rows), self._most_rows) * (longest + _DRAFT_ROOM)
        weights = _fingerprint(model)
        attached = self._pipelines.get(model)
        if attached is None or attached.weights != weights or attached.kv_tokens < needed:
            if attached is not None:
                attached.pipeline.close()
            attached = self._attach(model, needed, weights)
            self._pipelines[model] = attached
        room = attached.pipeline.engine.max_length
        if longest > room:
            raise CapacityError(
                f"generate: expected at most {room} tokens, prompt and output together, got {longest}; "
                "lower max_new_tokens, or raise engine.kv_tokens if the model's context is longer"
            )
        return attached.pipeline

    def _attach(self, model: Any, needed: int, weights: object) -> _Attached:
        engine = dict(self._config.get("engine", {}))
        tokens = max(_LEAST_KV_TOKENS, 1 << (needed - 1).bit_length())
        fixed = engine.setdefault("kv_tokens", tokens)
        own = {"target": _InMemory(model, self._tokenizer), "engine": engine}
        pipeline = Pipeline.from_config({**self._config, **own}, self._plugins)
        capacity = tokens if fixed == tokens else 1 << 62  # the user's own choice is never outgrown
        return _Attached(pipeline, capacity, weights)


def custom_generate(
    drafter: Any = "none",
    verifier: Any = "coupled",
    scheduler: Any = "fixed",
    *,
    seed: int | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    speculation: SpeculationParams | None = None,
    plugins: Iterable[object] = (),
    **config: Any,
) -> CustomGenerate:
    """What to pass as `model.generate(..., custom_generate=...)`; keep it, so that it is built once.

    Args:
        drafter, verifier, scheduler: as in `PipelineConfig`.
        seed: names all chance, row i of a batch gets seed + i; None takes seeds from torch's
            generator, so that `torch.manual_seed` makes runs repeatable.
        tokenizer: the model's, for drafters that need one.
        streamer: gets the prompt and then every step's tokens; `generate` does not hand its own on.
        speculation: the rows' own wishes, such as one of the config's `drafters` by name;
            `carrying(speculation=...)` changes them for a call, with the same pipeline.
        plugins: plugin modules or objects besides the installed ones.
        **config: other keys of `PipelineConfig`, such as `engine`.
    """
    settings = {"drafter": drafter, "verifier": verifier, "scheduler": scheduler, **config}
    return CustomGenerate(
        settings,
        seed=seed,
        tokenizer=tokenizer,
        streamer=streamer,
        speculation=speculation,
        plugins=plugins,
    )


def generate(
    model: Any,
    inputs: Tensor | None = None,
    generation_config: Any = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
    synced_gpus: bool | None = None,
    assistant_model: Any = None,
    streamer: Any = None,
    *,
    using: CustomGenerate | None = None,
    drafter: Any = None,
    tokenizer: Any = None,
    seed: int | None = None,
    stop_strings: str | list[str] | None = None,
    **kwargs: Any,
) -> Any:
    """`model.generate` with specfw's decoding, streamers and stop strings included.

    Args:
        using: a `custom_generate(...)` to decode with, which keeps its pipeline between calls.
        drafter, seed: for a pipeline of this one call, instead of `using`.
        tokenizer, stop_strings, streamer: as in `model.generate`.
        model, inputs, generation_config, logits_processor, stopping_criteria,
        prefix_allowed_tokens_fn, synced_gpus, assistant_model, **kwargs: as in `model.generate`.

    Raises:
        ConfigError: a setting cannot be honoured exactly.
    """
    if assistant_model is not None:
        raise ConfigError(
            "generate: expected no assistant_model, for specfw's drafters take its place; pass "
            "drafter={'name': 'small-model', 'model': ...}"
        )
    if using is not None and (drafter is not None or seed is not None):
        raise ConfigError(
            "generate: expected either `using` or `drafter` and `seed`, got both; leave one out"
        )
    if using is None:
        using = custom_generate("none" if drafter is None else drafter, seed=seed)
    if stop_strings is None:
        generation_config, stop_strings = _taken_stop_strings(model, generation_config)
    if stop_strings:
        criteria = StoppingCriteriaList(stopping_criteria or [])
        criteria.append(_stop_strings(stop_strings, tokenizer))
        stopping_criteria = criteria
    return model.generate(
        inputs,
        generation_config=generation_config,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        synced_gpus=synced_gpus,
        custom_generate=using.carrying(tokenizer, streamer),
        **kwargs,
    )


class _InMemory(TargetLoader):
    """Hands out a model that is there already."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer

    def load(self) -> LoadedTarget:
        return LoadedTarget(type(self._model).__name__, self._model, self._tokenizer)


class _Attached:
    """A model's pipeline, and what it was built for."""

    def __init__(self, pipeline: Pipeline, kv_tokens: int, weights: object) -> None:
        self.pipeline, self.kv_tokens, self.weights = pipeline, kv_tokens, weights


def _fingerprint(model: Any) -> tuple[tuple[int, int], ...]:
    """Changes when weights are replaced or changed in place, which makes kept KV and copies stale."""
    return tuple(
        (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        for weight in model.parameters()
    )


_REFUSED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "num_beams": (lambda value: value > 1, "beam search keeps several texts at once"),
    "penalty_alpha": (lambda value: value > 0, "contrastive search looks ahead by itself"),
    "dola_layers": (bool, "DoLa contrasts layers, which no draft can be tested against"),
    "constraints": (bool, "constrained beam search keeps several texts at once"),
    "force_words_ids": (bool, "constrained beam search keeps several texts at once"),
    "guidance_scale": (lambda value: value != 1, "guidance runs the model on a text of its own"),
    "prompt_lookup_num_tokens": (bool, "specfw's drafter `ngram` takes its place"),
    "assistant_early_exit": (bool, "specfw's drafters take its place"),
    "use_mtp": (bool, "specfw's drafters take its place"),
    "token_healing": (bool, "it changes the prompt behind specfw's back"),
    "use_cache": (lambda value: value is False, "specfw always keeps keys and values"),
}
"""Field of a generation config -> which values are refused, and why."""

_KNOWN = {"attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep", "model"}


def _refuse(model: Any, config: Any, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse what cannot be exact.

    Raises:
        ConfigError: something is.
    """
    for name, (is_refused, why) in _REFUSED.items():
        value = getattr(config, name, None)
        if value is not None and is_refused(value):
            raise ConfigError(
                f"generate: {name}={value!r} cannot be used with specfw, because {why}; leave it out, "
                "or leave custom_generate out"
            )
    if config.cache_implementation == "quantized":
        raise ConfigError(
            "generate: cache_implementation='quantized' changes the target's law, and specfw keeps "
            "exact keys and values; leave it out"
        )
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise ConfigError(
            "generate: specfw returns no attentions or hidden states of single steps; leave "
            "output_attentions and output_hidden_states out"
        )
    if model.config.is_encoder_decoder:
        raise ConfigError(
            f"generate: expected a decoder-only model, got {type(model).__name__}, which has an "
            "encoder; leave custom_generate out"
        )
    if model.training:
        raise ConfigError(
            "generate: expected a model in eval mode, got one in training mode, whose law changes "
            "with every pass; call model.eval()"
        )
    cache = model_kwargs.get("cache")
    if cache is not None and cache.get_seq_length() > 0:
        raise ConfigError(
            "generate: expected an empty cache, got one with tokens in it; pass the whole text"
        )
    given = sorted(
        name for name, value in model_kwargs.items() if value is not None and name not in _KNOWN
    )
    if given:
        raise ConfigError(
            f"generate: specfw runs the model on token ids only, but got {', '.join(given)}; leave "
            "them out, or leave custom_generate out"
        )


def _rows(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[Row]:
    """The rows without their padding.

    Raises:
        ConfigError: padding is not in front, or positions are not counted from the first token.
    """
    mask = model_kwargs.get("attention_mask")
    counts = torch.zeros(len(input_ids), dtype=torch.long)
    if mask is not None:
        counts = (mask == 0).sum(1).cpu()
        in_front = torch.arange(mask.shape[1]) >= counts[:, None]
        if not torch.equal(mask.bool().cpu(), in_front) or bool((counts == mask.shape[1]).any()):
            raise ConfigError(
                "generate: expected an attention mask that hides padding in front of the tokens only; "
                "set the tokenizer's padding_side to 'left'"
            )
    rows = [
        Row(number, len(input_ids), ids[:count], ids[count:].tolist())
        for number, (ids, count) in enumerate(zip(input_ids, counts.tolist(), strict=True))
    ]
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        for row, given in zip(rows, positions.expand(len(rows), -1).tolist(), strict=True):
            if given[len(row.padding) :] != list(range(len(row.prompt))):
                raise ConfigError(
                    "generate: expected position ids that count from 0 at the first token; leave "
                    "position_ids out"
                )
    return rows


def _padded(input_ids: Tensor, outputs: Sequence[Output], pad: Tensor | None) -> Any:
    """Prompts and texts, int64 [B, T]; finished rows are filled with the padding token."""
    longest = max(len(output.token_ids) for output in outputs)
    if pad is None and any(len(output.token_ids) < longest for output in outputs):
        raise ConfigError(
            "generate: expected a pad_token_id to fill the shorter rows with, got none; set it"
        )
    texts = input_ids.new_full((len(outputs), longest), 0 if pad is None else int(pad))
    for row, output in enumerate(outputs):
        texts[row, : len(output.token_ids)] = texts.new_tensor(output.token_ids)
    return torch.cat([input_ids, texts], 1)


def _step_rows(
    model: Any,
    input_ids: Tensor,
    sequences: Tensor,
    processors: Any,
    config: Any,
    model_kwargs: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Scores and logits of every step, float [B, V] each: those that were asked for, by one more pass."""
    if not (config.output_scores or config.output_logits):
        return None, None
    prompt, new = input_ids.shape[1], sequences.shape[1] - input_ids.shape[1]
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(input_ids)
    mask = torch.cat([mask, mask.new_ones(len(mask), new - 1)], 1)
    positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
    rows = model(
        input_ids=sequences[:, :-1].to(model.device),
        attention_mask=mask.to(model.device),
        position_ids=positions.to(model.device),
        use_cache=False,
    ).logits[:, prompt - 1 :]
    steps = [rows[:, step].float().to(input_ids.device) for step in range(new)]
    scores = None
    if config.output_scores:
        scores = tuple(
            processors(sequences[:, : prompt + step], row.clone()) for step, row in enumerate(steps)
        )
    return scores, tuple(steps) if config.output_logits else None


def _taken_stop_strings(model: Any, config: Any) -> tuple[Any, Any]:
    """The generation config without its stop strings, which `generate` would want a tokenizer for."""
    source = model.generation_config if config is None else config
    found = getattr(source, "stop_strings", None)
    if not found:
        return config, None
    config = deepcopy(source)
    config.stop_strings = None
    return config, found


def _stop_strings(stop_strings: str | list[str], tokenizer: Any) -> StopStringCriteria:
    if tokenizer is None:
        raise ConfigError(
            f"generate: stop strings need a tokenizer, but only stop_strings={stop_strings!r} came; "
            "pass tokenizer too"
        )
    return StopStringCriteria(tokenizer, stop_strings)
