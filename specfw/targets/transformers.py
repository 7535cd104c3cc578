"""The `transformers` target: a causal language model from a local folder or the Hugging Face Hub."""

from __future__ import annotations

import logging as stdlib_logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import field_validator

from specfw.components import Options
from specfw.contracts import LoadedTarget, Quantization, TargetLoader
from specfw.errors import ConfigError
from specfw.targets.packed_state import keep_packed
from specfw.weights import describe_weights, quantized_linears

if TYPE_CHECKING:
    import torch

__all__ = [
    "GGUF_PACKAGES",
    "TransformersLoader",
    "TransformersOptions",
    "as_device",
    "load_causal_lm",
    "missing_packages",
    "quiet_transformers",
]

GGUF_PACKAGES = ("gguf", "accelerate")
"""What transformers needs to read a GGUF file."""

_TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)

_QUANTISERS = {
    "aqlm": ("aqlm",),
    "auto-round": ("auto_round",),
    "awq": ("gptqmodel", "accelerate"),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "compressed-tensors": ("compressed_tensors",),
    "eetq": ("kernels", "accelerate"),
    "fp8": ("accelerate",),
    "gptq": ("optimum.gptq", "gptqmodel"),
    "hqq": ("hqq",),
    "mxfp4": ("kernels", "accelerate"),
    "quanto": ("optimum.quanto", "accelerate"),
    "torchao": ("torchao",),
    "vptq": ("vptq", "accelerate"),
}
"""What transformers needs to load checkpoints that came quantised, by method: packages as they are imported."""
_PIP_NAMES = {
    "auto_round": "auto-round",
    "compressed_tensors": "compressed-tensors",
    "optimum.gptq": "optimum",
    "optimum.quanto": "optimum-quanto",
}

_quiet_lock = threading.RLock()


class TransformersOptions(Options):
    """Which checkpoint to load and how."""

    model: str
    """A local folder, or an id on the Hugging Face Hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """What the weights become; `auto` keeps what the checkpoint states."""
    device: str = "auto"
    """Where the weights go; `auto` is cuda if there is one, else cpu."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    trust_remote_code: bool = False
    """Whether code that comes with the checkpoint may run here."""
    gguf_file: str | None = None
    """The name of a GGUF file in `model`; its weights are dequantised at load."""

    @field_validator("model", mode="before")
    @classmethod
    def _path_is_text(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value


class TransformersLoader(TargetLoader):
    """Loads what `AutoModelForCausalLM` and `AutoTokenizer` can."""

    def __init__(self, options: TransformersOptions) -> None:
        self.options = options

    def load(self) -> LoadedTarget:
        """Load the model, in eval mode and without gradients, and its tokenizer, None if it has none.

        Raises:
            ConfigError: the model cannot be found or read, or is no causal language model.
        """
        return load_causal_lm(self.options)


def load_causal_lm(options: TransformersOptions, layers: int | None = None) -> LoadedTarget:
    """Load a causal language model, or only its first `layers` layers, and its tokenizer.

    Raises:
        ConfigError: the model cannot be found or read, is no causal language model, or has fewer layers.
    """
    device = as_device(options.device, f"target {options.model!r}")
    _check_gguf(options)
    source = _source(options)
    notes = []
    with quiet_transformers():
        config = _read_config(options, source)
        _check_causal(options, config)
        method = _quantiser(options, config)
        if layers is not None:
            notes.append(_keep_first_layers(options, config, layers))
        tokenizer, why_none = _read_tokenizer(source)
        if tokenizer is None:
            notes.append(f"no tokenizer, so prompts must be token ids ({why_none})")
        model = _read_model(options, source, config, device, method)
        model.eval().requires_grad_(False)
        keep_packed(model)
        quantization = _quantization(model, method, options.gguf_file)
        if quantization is not None:
            notes.append(describe_weights(model, quantization))
    return LoadedTarget(_name(options), model.to(device), tokenizer, tuple(notes), quantization)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bars and warnings inside the block; bars of downloads still show.

    One thread at a time is inside, so that each restores the settings that it found.
    """
    from transformers.utils import logging

    gguf_reader: Any = import_module("transformers.modeling_gguf_pytorch_utils")

    def hidden(factory: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        return factory(*args, **{**settings, "disable": True})

    with _quiet_lock:
        verbosity, hook = logging.get_verbosity(), logging.set_tqdm_hook(hidden)
        # The GGUF reader makes its bar past the hook.
        gguf_bar, gguf_reader.tqdm = gguf_reader.tqdm, partial(gguf_reader.tqdm, disable=True)
        logging.set_verbosity(stdlib_logging.ERROR)
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            logging.set_tqdm_hook(hook)
            gguf_reader.tqdm = gguf_bar


def missing_packages(names: Sequence[str]) -> list[str]:
    """Those of the packages that are not installed; nothing but what holds a nested one is imported."""
    return [name for name in names if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package that would hold it
        return False


def as_device(name: str, owner: str) -> torch.device:
    """The device of that name; `auto` is cuda if there is one, else cpu. `owner` begins the messages.

    Raises:
        ConfigError: there is no such device.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"{owner}: expected a device such as 'cpu', 'cuda' or 'auto', got {name!r}."
        ) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"{owner}: device {name!r} was asked for, but torch sees "
            f"{torch.cuda.device_count()} CUDA devices here; use device 'auto' or 'cpu'."
        )
    return device


def _check_gguf(options: TransformersOptions) -> None:
    if options.gguf_file is None:
        return
    if missing := missing_packages(GGUF_PACKAGES):
        raise ConfigError(
            f"target {options.model!r}: reading {options.gguf_file!r} needs {' and '.join(missing)}; "
            f"run: pip install {' '.join(missing)}"
        )


def _local_folder(options: TransformersOptions) -> Path | None:
    folder = Path(options.model).expanduser()
    return folder if folder.is_dir() else None


def _name(options: TransformersOptions) -> str:
    folder = _local_folder(options)
    return options.model if folder is None else folder.resolve().name


def _source(options: TransformersOptions) -> dict[str, Any]:
    """The arguments of `from_pretrained` that say where to read.

    A folder is checked here, so that a misspelt path is never looked up on the Hub.
    """
    folder = _local_folder(options)
    if folder is None and Path(options.model).expanduser().is_file():
        raise ConfigError(
            f"target {options.model!r}: expected a folder, got a file; pass the folder as model"
            " (and the file's name as gguf_file if it is a GGUF file)."
        )
    if folder is None and _looks_like_path(options.model):
        raise ConfigError(
            f"target {options.model!r}: no such folder; pass a folder that holds config.json and"
            " the weights, or a Hugging Face Hub id."
        )
    expected = options.gguf_file or "config.json"
    if folder is not None and not (folder / expected).is_file():
        raise ConfigError(
            f"target {options.model!r}: the folder holds no {expected}; pass the folder that does."
        )
    if folder is not None and options.revision is not None:
        raise ConfigError(
            f"target {options.model!r}: a local folder has no revisions, got"
            f" {options.revision!r}; leave revision out."
        )
    return {
        "pretrained_model_name_or_path": str(folder or options.model),
        "revision": options.revision or "main",
        "trust_remote_code": options.trust_remote_code,
        **({"gguf_file": options.gguf_file} if options.gguf_file else {}),
    }


def _looks_like_path(model: str) -> bool:
    """Whether this cannot be a Hub id, which is a name or owner/name."""
    return model.startswith((".", "~", os.sep)) or model.count("/") > 1 or "\\" in model


def _read_config(options: TransformersOptions, source: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    with _explained(options, "config"):
        return AutoConfig.from_pretrained(**source)


def _check_causal(options: TransformersOptions, config: Any) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.is_encoder_decoder:
        raise ConfigError(
            f"target {options.model!r}: expected a causal (decoder-only) language model, got the "
            f"encoder-decoder {config.model_type!r}; choose a decoder-only model."
        )
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not own_code:
        raise ConfigError(
            f"target {options.model!r}: expected a causal language model, got model type "
            f"{config.model_type!r}, for which transformers has none; choose another model."
        )


def _quantiser(options: TransformersOptions, config: Any) -> str | None:
    """The method by which the checkpoint came quantised, whose packages must be there."""
    stated = _stated(config)
    if not stated:
        return None
    method = str(stated.get("quant_method") or ("bitsandbytes" if _in_bits(stated) else "unknown"))
    if missing := missing_packages(_QUANTISERS.get(method, ())):
        wanted = " ".join(_PIP_NAMES.get(name, name) for name in missing)
        raise ConfigError(
            f"target {options.model!r}: its weights were quantised by {method}, which needs {wanted}; "
            f"run: pip install {wanted}"
        )
    return method


def _stated(config: Any) -> dict[str, Any]:
    """What the config says of its quantisation, nothing if it says nothing."""
    own = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(decoder=True), "quantization_config", None
    )
    return {} if own is None else dict(own if isinstance(own, dict) else own.to_dict())


def _in_bits(stated: dict[str, Any]) -> str:
    """The setting in words, from what transformers' configs of several methods call their bits."""
    if stated.get("load_in_8bit"):
        return "int8 weights and activations"
    if stated.get("load_in_4bit"):
        double = ", double quantisation" if stated.get("bnb_4bit_use_double_quant") else ""
        return f"{stated.get('bnb_4bit_quant_type', 'fp4')}{double}"
    for key in ("bits", "wbits", "w_bit", "nbits"):
        if stated.get(key):
            return f"{stated[key]}-bit weights"
    for key in ("weights", "quant_type", "format"):
        if isinstance(said := _type_name(stated.get(key)), str):
            return f"{said} weights"
    return ""


def _type_name(said: Any) -> Any:
    """torchao's configs are mappings that name a class; it may be one for all layers, as `default`."""
    while isinstance(said, dict):
        said = said.get("_type") or said.get("default")
    return said


def _quantization(model: Any, method: str | None, gguf_file: str | None) -> Quantization | None:
    if gguf_file is not None:
        return Quantization("gguf", gguf_file, packed=False, batch_invariant=None, compileable=True)
    if method is None:
        return None
    stated = _stated(model.config)
    quantizer = getattr(model, "hf_quantizer", None)
    return Quantization(
        method,
        _in_bits(stated),
        packed=bool(quantized_linears(model)),
        compileable=bool(getattr(quantizer, "is_compileable", False)),
        kernel=f"as transformers does for {method}",
    )


def _keep_first_layers(options: TransformersOptions, config: Any, layers: int) -> str:
    text = config.get_text_config()
    total = text.num_hidden_layers
    if not 1 <= layers <= total:
        raise ConfigError(
            f"target {options.model!r}: layers must be from 1 to {total}, what the model has, "
            f"got {layers}."
        )
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return f"only the first {layers} of {total} layers: a draft model, not the model itself"


def _read_tokenizer(source: dict[str, Any]) -> tuple[Any, str]:
    """The tokenizer, or None and why.

    Some classes load without any file and then know no words, so one file at least must be there.
    """
    from transformers import AutoTokenizer

    if "gguf_file" not in source and not _has_any_file(source, _TOKENIZER_FILES):
        return None, "the checkpoint holds no tokenizer file"
    try:
        return AutoTokenizer.from_pretrained(**source), ""
    except (OSError, ValueError, ImportError, KeyError) as error:
        return None, _first_line(error)


def _has_any_file(source: dict[str, Any], names: Sequence[str]) -> bool:
    from transformers.utils.hub import cached_file

    return any(
        cached_file(
            source["pretrained_model_name_or_path"],
            name,
            revision=source["revision"],
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        for name in names
    )


def _read_model(
    options: TransformersOptions,
    source: dict[str, Any],
    config: Any,
    device: torch.device,
    method: str | None,
) -> Any:
    from transformers import AutoModelForCausalLM

    settings: dict[str, Any] = {"config": config, "dtype": options.dtype}
    if options.gguf_file is not None:
        from transformers import GgufConfig

        settings["quantization_config"] = GgufConfig(gguf_file=options.gguf_file, dequantize=True)
    elif method is not None:  # packed for the device where it is read
        settings["device_map"] = {"": device}
    with _explained(options, "weights", method):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **source, **settings, output_loading_info=True
        )
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        # transformers fills these with random numbers and only warns.
        raise ConfigError(
            f"target {options.model!r}: {len(missing)} weights that the model needs are not in the "
            f"checkpoint (the first is {missing[0]!r}); pass a checkpoint of a causal language model."
        )
    return model


@contextmanager
def _explained(
    options: TransformersOptions, part: str, method: str | None = None
) -> Iterator[None]:
    """Turn what transformers raises while it reads `part` into one sentence for the user."""
    from huggingface_hub.errors import LocalEntryNotFoundError
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, SafetensorError) as error:
        cause = error.__cause__ or error.__context__
        if isinstance(cause, LocalEntryNotFoundError):
            raise ConfigError(
                f"target {options.model!r}: there is no such folder, the Hugging Face Hub cannot be"
                f" reached (offline), and its cache here holds no {part} under that id; pass a"
                " local folder, or go online once."
            ) from error
        advice = (
            f"the checkpoint was quantised by {method}; choose another that runs on this device"
            if method is not None
            else "pass trust_remote_code=true if you trust the code that comes with it"
            if "trust_remote_code" in str(error)
            else "check the folder or the Hugging Face Hub id, and the revision"
        )
        raise ConfigError(
            f"target {options.model!r}: its {part} cannot be read: {_first_line(error)} ({advice})."
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__
