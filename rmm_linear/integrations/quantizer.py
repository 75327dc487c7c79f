"""Convert a model while transformers loads it: ``from_pretrained(..., quantization_config=RMMConfig())``.

transformers knows one registry of what changes a model when it is loaded, that of its quantizers. This module enters
the method "rmm" there, when it is imported or when transformers is given an RMMConfig. No weight is quantized: the
files, and a checkpoint saved later, have the original ones, and the settings travel in ``config.json``. Import this
module before such a folder is loaded: otherwise transformers warns that it does not know the method, and loads the
model as it is.

transformers takes an RMMConfig, such as ``RMMConfig.preset("careful")``, or ``{"quant_method": "rmm", "quality":
"careful"}``, with fields of an RMMConfig beside them. A text is an AttributeError of its own: it takes none.

The model is converted once its weights are loaded, which suits training all of them. Adapters come later: call
:func:`rmm_linear.convert` after ``get_peft_model`` instead, or use
:class:`RMMCallback <rmm_linear.integrations.transformers.RMMCallback>`. What sketches have learned, and plans, are in
the files of :func:`rmm_linear.integrations.pretrained.save_conversion`, for all models.

Example:
    >>> import tempfile
    >>> from transformers import AutoModel, BertConfig, BertModel
    >>> from rmm_linear import RMMConfig
    >>> folder = tempfile.mkdtemp()
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> BertModel(BertConfig(vocab_size=8, **sizes)).save_pretrained(folder)
    >>> AutoModel.from_pretrained(folder, quantization_config=RMMConfig(bits=4)).pooler.dense
    RMMLinear(in_features=8, out_features=8, bias=True, kind=countsketch, bits=4, min_rows=64)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rmm_linear._support.installing import not_usable
from rmm_linear.config import QUANT_METHOD, RMMConfig
from rmm_linear.conversion.convert import convert

try:
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as missing:
    raise not_usable(__name__, "transformers", missing) from missing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KEY, _QUALITY = "quant_method", "quality"


@register_quantization_config(QUANT_METHOD)
class SettingsReader(QuantizationConfigMixin):
    """Reads the settings of a ``config.json``; the registry takes a class of transformers alone."""

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Return an RMMConfig, of a quality if a key "quality" has one; an unknown key is an error."""
        fields = {name: value for name, value in config_dict.items() if name not in (_KEY, _QUALITY)}
        if (quality := config_dict.get(_QUALITY)) is not None:
            fields = {**RMMConfig.preset(quality).to_dict(), **fields}
        config = RMMConfig.from_dict(fields)
        return (config, kwargs) if return_unused_kwargs else config


@register_quantizer(QUANT_METHOD)
class RMMQuantizer(HfQuantizer):
    """Converts a model that transformers has loaded, and takes off the marks of a quantized one: no weight is."""

    is_trainable = True  # pyright: ignore[reportAssignmentType]

    def is_serializable(self) -> bool:
        return True

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        config: Any = self.quantization_config
        convert(model, config)
        self.remove_quantization_config(model)  # with it, .half(), a Trainer and torch.compile refuse the model
        model.config.quantization_config = {_KEY: QUANT_METHOD, **config.to_saved()}  # for save_pretrained
        for module in model.modules():
            vars(getattr(module, "config", model.config)).pop("_is_quantized", None)
        return model
