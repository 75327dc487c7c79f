"""A LoRA variant that saves a sketch of the adapter's input, beside PEFT's VeLoRA, and its configuration.

    get_peft_model(model, SketchedLoraConfig(r=32, target_modules=["q_proj"], sketch_config=RMMConfig(bits=4)))

LoRA keeps the input X of every adapted layer for dA = (Y B)ᵀ X alone. The variant saves a sketch or a code of it;
unlike VeLoRA's projection it leaves the gradient unbiased. Outputs, the other gradients, merging and files are those of
LoRA: PEFT loads a saved adapter without this library, with a warning that it ignores ``sketch_config``.

Adapters alone save less, and so it fits PEFT's own scripts. :func:`rmm_linear.convert` after ``get_peft_model`` reaches
norms, activations and attention too, and leaves padding out.

The variant follows PEFT's class ``LoraVariant``. PEFT has no registry of variants, so the configuration registers the
layer by ``LoraConfig._register_custom_module``, which its guide to custom models names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from rmm_linear._support.installing import not_usable
from rmm_linear.config import RMMConfig
from rmm_linear.conversion.linears import is_quantized
from rmm_linear.layers.function import sketched_linear

try:
    from peft import LoraConfig
    from peft.tuners.lora.layer import Linear, LoraVariant
except ImportError as missing:
    raise not_usable(__name__, "peft", missing) from missing


class SketchedLinearVariant(LoraVariant):
    """LoRA whose A projection saves a sketch of its input."""

    @staticmethod
    def init(module: Any, adapter_name: str, config: SketchedLoraConfig, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if "lora_sketch_config" not in module.other_param_names:
            module.other_param_names = (*module.other_param_names, "lora_sketch_config")
            module.lora_sketch_config = {}
        module.lora_sketch_config[adapter_name] = config.sketch_config

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        """Return the base layer's weight with the adapter in it."""
        return orig_weight + module.get_delta_weight(active_adapter).to(orig_weight.dtype)

    @staticmethod
    def merge_unsafe(module: Any, active_adapter: str, orig_weight: Tensor) -> None:
        orig_weight.data += module.get_delta_weight(active_adapter)

    @staticmethod
    def unmerge(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight - module.get_delta_weight(active_adapter).to(orig_weight.dtype)

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        a, b = module.lora_A[active_adapter], module.lora_B[active_adapter]
        x = module.lora_dropout[active_adapter](x)
        if module.training:  # without gradients too: reentrant checkpointing draws the same numbers again
            config = module.lora_sketch_config[active_adapter]
            hidden = sketched_linear(x, a.weight, a.bias, config=config)
        else:
            hidden = a(x)
        return result + b(hidden) * module.scaling[active_adapter]


class SketchedLoraLinear(Linear):
    """PEFT's LoRA layer, which knows the variant too."""

    def __init__(self, base_layer: nn.Module, adapter_name: str, **kwargs: Any) -> None:
        """Refuse quantized layers, which PEFT adapts by classes of their own."""
        if is_quantized(base_layer):
            raise ValueError(
                f"sketch_config is for nn.Linear, got {type(base_layer).__name__}, which is quantized. Use LoraConfig, "
                "and rmm_linear.convert(model) after get_peft_model."
            )
        super().__init__(base_layer, adapter_name, **kwargs)

    @property
    def lora_variants(self) -> dict[tuple[str, ...], type[LoraVariant] | None]:
        """The variants by the fields that select them."""
        return {**super().lora_variants, ("sketch_config",): SketchedLinearVariant}


@dataclass
class SketchedLoraConfig(LoraConfig):
    """A ``LoraConfig`` of the variant.

    Attributes:
        sketch_config: How the input of every A is saved; fields that select modules and operations have no effect. None
            is plain LoRA. A mapping of its fields, as in ``adapter_config.json``, is read.

    Example:
        >>> SketchedLoraConfig(r=4, sketch_config={"bits": 4}).sketch_config.bits
        4
    """

    sketch_config: RMMConfig | Mapping[str, Any] | None = field(
        default_factory=RMMConfig,
        metadata={"help": "How the input of the LoRA A projection is saved.", "is_lora_variant": True},
    )

    def __post_init__(self) -> None:
        """Check the settings, and register the layer."""
        super().__post_init__()
        if isinstance(self.sketch_config, Mapping):
            self.sketch_config = RMMConfig.from_dict(self.sketch_config)
        if not isinstance(self.sketch_config, RMMConfig | None):
            raise TypeError(f"sketch_config must be an RMMConfig or its fields, got {self.sketch_config!r}.")
        self._register_custom_module({nn.Linear: SketchedLoraLinear})

    @classmethod
    def from_peft_type(cls, **kwargs: Any) -> Any:
        """Make the configuration from ``adapter_config.json``, of this class, not of the one that PEFT knows."""
        kwargs.pop("peft_type", None)
        return super().from_peft_type(**kwargs)
