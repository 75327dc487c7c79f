"""Convert the blocks of a plan: the executor of the choice "convert", which planning asks for by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from rmm_linear.config import RMMConfig
from rmm_linear.context.learned import ScoreSpread
from rmm_linear.conversion.convert import convert
from rmm_linear.conversion.exact import unconvert
from rmm_linear.conversion.report import ConversionReport


class Conversion:
    """The conversion of a plan's blocks, by a configuration that leaves all others alone."""

    report: ConversionReport | None = None

    def __init__(self, model: nn.Module, config: RMMConfig) -> None:
        """Begin with a model that is not converted."""
        self.model, self.config = model, config

    @staticmethod
    def read(config: Mapping[str, Any]) -> RMMConfig:
        return RMMConfig.from_dict(config)

    def attach(self) -> None:
        self.report = convert(self.model, self.config)
        context = self.report.context
        for one in () if context is None else context.learned.values():
            if isinstance(one, ScoreSpread):
                one.is_watching = False  # wider codes later would exceed the budget

    def detach(self) -> None:
        unconvert(self.model)
