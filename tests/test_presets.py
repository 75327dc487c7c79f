"""The qualities: what each saves, how it is chosen, and the errors of a wrong one."""

import pytest
from helpers import tiny_model

from rmm_linear import RMMConfig, convert
from rmm_linear.config import QUALITIES

PER_ROW = {"careful": 4 * 96 + 12 + 17, "default": 3 * 96 + 12, "smallest": 26 * 6 + 6 + 17}


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_quality_saves_every_row_in_its_code_in_every_dtype(quality, itemsize):
    config = RMMConfig.preset(quality)
    spec = config.spec(1000, 768, itemsize)
    assert spec.rows == 1000
    assert spec.bytes(1000, 768, itemsize, config.directions) == 1000 * PER_ROW[quality] + 8


def test_the_default_is_the_configuration_without_arguments():
    assert RMMConfig.preset("default") == RMMConfig()


def test_convert_takes_a_quality_and_fields_that_differ():
    model = tiny_model("roberta")
    report = convert(model, quality="careful", norm_bits=8, dry_run=True)
    assert report.config == RMMConfig.preset("careful", norm_bits=8)
    with pytest.raises(ValueError, match=r"quality must be one of careful, default, smallest, got 'carefull'.*careful"):
        convert(model, quality="carefull")
    with pytest.raises(ValueError, match=r"config and quality exclude each other.*RMMConfig.preset\('careful', ...\)"):
        convert(model, RMMConfig(), quality="careful")
