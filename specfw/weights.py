"""What a loaded model's weights are: which layers are quantised, and how many bytes all of them take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from specfw.contracts import Quantization

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["describe_weights", "quantized_linears", "weight_bytes"]


def quantized_linears(model: Any) -> list[tuple[str, Any]]:
    """The layers with the shape of a linear one that are no dense `nn.Linear`, by name."""
    from torch import nn

    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "in_features", None), int)
        and isinstance(getattr(module, "out_features", None), int)
        and (type(module) is not nn.Linear or _is_wrapped(module.weight))
    ]


def weight_bytes(model: Any) -> int:
    """Bytes of what the model would save: weights, scales and codes, each storage once."""
    held: dict[int, int] = {}
    for value in model.state_dict().values():
        for tensor in _parts(value):
            held[_address(tensor)] = tensor.numel() * tensor.element_size()
    return sum(held.values())


def describe_weights(model: Any, quantization: Quantization) -> str:
    """One sentence: who quantised and how, what is packed, and the bytes of all weights."""
    total = weight_bytes(model)
    if not quantization.packed:
        return f"quantised by {quantization}; dequantised at load: {_mebibytes(total)}"
    packed = {id(module): module for _, module in quantized_linears(model)}
    weights = sum(module.in_features * module.out_features for module in packed.values())
    inside = sum(weight_bytes(module) for module in packed.values())
    each = f", {inside / weights:.2f} bytes each" if weights else ""
    return f"quantised by {quantization}; {weights} weights stay packed{each}; {_mebibytes(total)} in all"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _is_wrapped(tensor: Any) -> bool:
    """Whether this is a subclass that stands for other tensors, as torchao's and quanto's weights are."""
    return hasattr(tensor, "__tensor_flatten__")


def _parts(value: Any) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of."""
    import torch

    if _is_wrapped(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _parts(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # an opaque layout has none
        return id(tensor)
