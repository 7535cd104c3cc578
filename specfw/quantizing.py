"""What loaders of quantised targets share: they take any target's model and replace its linear layers.

A loader derives from `QuantizingLoader` and says how one linear layer becomes a quantised module. The
embedding stays as it is, and so does the head unless `head` asks otherwise.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from specfw.components import NestedTarget, Options
from specfw.contracts import LoadedTarget, Quantization, TargetLoader
from specfw.errors import ConfigError
from specfw.targets.packed_state import keep_packed
from specfw.targets.transformers import as_device, missing_packages, quiet_transformers
from specfw.weights import describe_weights

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "QuantizingLoader",
    "QuantizingOptions",
]


class QuantizingOptions(Options):
    """Which model to quantise; a loader adds how."""

    target: NestedTarget
    """The model: any target component, such as `demo`, a local folder or a hub id."""
    head: bool = False
    """Whether the head (the layer that makes logits) is quantised too; the embedding never is."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """What activations, and all weights that stay dense, become; `auto` keeps the model's."""
    device: str = "auto"
    """Where the model goes before it is quantised; `auto` leaves it where it was loaded."""


class QuantizingLoader(TargetLoader):
    """Loads a dense model through another loader, and replaces its linear layers one by one."""

    name: ClassVar[str]
    """The component's name, for messages; also what `quant_method` says of the models."""
    packages: ClassVar[Mapping[str, str]] = {}
    """What must be installed: what is imported -> what pip installs."""

    def __init__(self, options: QuantizingOptions) -> None:
        self.options = options

    @abstractmethod
    def quantization(self) -> Quantization:
        """What this loader's options do."""

    @abstractmethod
    def quantize(self, linear: nn.Linear) -> nn.Module:
        """A quantised module in place of `linear`, on the same device.

        Raises:
            ConfigError: a layer of this shape cannot be quantised; `refusal` words it.
        """

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Refuse, before anything is quantised, what cannot work on this device with this dtype.

        Raises:
            ConfigError: with what works instead.
        """

    def load(self) -> LoadedTarget:
        """Load the model and quantise it; one that came quantised by this method is left as it is.

        Raises:
            ConfigError: a package is missing, a setting cannot work, or the model came quantised
                by another method.
        """
        if missing := missing_packages(list(self.packages)):
            wanted = " ".join(self.packages[name] for name in missing)
            raise self.refusal(
                f"{wanted} to be installed", "no such package", f"run: pip install {wanted}"
            )
        loaded = self.options.target.build().load()
        if loaded.quantization is not None and loaded.quantization.packed:
            return self._ready(loaded)
        with quiet_transformers():
            self._place(loaded.model)
            self.check(loaded.model.device, loaded.model.dtype)
            self._replace(loaded.model)
            keep_packed(loaded.model)
        loaded.name = f"{self.name}({loaded.name})"
        loaded.quantization = self.quantization()
        loaded.notes = (*loaded.notes, describe_weights(loaded.model, loaded.quantization))
        return loaded

    def refusal(self, expected: str, got: str, advice: str) -> ConfigError:
        """An error in the usual form."""
        return ConfigError(f"target {self.name!r}: expected {expected}, got {got}; {advice}")

    def _ready(self, loaded: LoadedTarget) -> LoadedTarget:
        """A model that came quantised, if this method did it and no option asks for something else."""
        found = loaded.quantization
        assert found is not None
        asked = sorted(self.options.model_fields_set - {"target"})
        if found.method != self.name:
            raise self.refusal(
                f"a model that is not quantised yet, or by {self.name}",
                f"{loaded.name!r}, which is quantised by {found}",
                "name it as the target itself to run it as it is",
            )
        if asked:
            raise self.refusal(
                f"no other options for {loaded.name!r}, which came quantised ({found})",
                " and ".join(asked),
                "leave them out",
            )
        return loaded

    def _place(self, model: Any) -> None:
        import torch

        if self.options.dtype != "auto":
            model.to(getattr(torch, self.options.dtype))
        if self.options.device != "auto":
            model.to(as_device(self.options.device, f"target {self.name!r}"))

    def _replace(self, model: Any) -> None:
        head = model.get_output_embeddings()
        done = 0
        for name, linear in list(_linears(model)):
            if linear is head and not self.options.head:
                continue
            model.set_submodule(
                name, self.quantize(_as_linear(linear)).eval().requires_grad_(False)
            )
            done += 1
        if not done:
            raise self.refusal(
                "a model with linear layers",
                f"a {type(model).__name__} that has none",
                "choose another model",
            )
        model.config.quantization_config = {"quant_method": self.name}


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The dense linear layers by name, GPT-2's transposed ones among them."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    for name, module in model.named_modules():
        if type(module) is nn.Linear or isinstance(module, Conv1D):
            yield name, module


def _as_linear(module: Any) -> nn.Linear:
    from torch import nn

    if isinstance(module, nn.Linear):
        return module
    inputs, outputs = module.weight.shape
    linear = nn.Linear(inputs, outputs, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().t().contiguous(), requires_grad=False)
    linear.bias = module.bias
    return linear
