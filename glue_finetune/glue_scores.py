"""The official GLUE metrics as a module for `evaluate`: ``evaluate.load(path_of_this_file, "cola")``.

It answers as the hub's `glue` module does, for the same configuration names, and needs no network. `evaluate` copies
this file into its cache and imports it from there, so the file imports nothing from its own package.
"""

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

_ACCURACY = ("sst2", "mnli", "mnli_matched", "mnli_mismatched", "qnli", "rte", "wnli", "hans")
_ACCURACY_AND_F1 = ("mrpc", "qqp")
CONFIGS = ("cola", "stsb", *_ACCURACY_AND_F1, *_ACCURACY)


class GlueScores(evaluate.Metric):
    """The official metric of one GLUE task; the configuration name is the task."""

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in CONFIGS:
            raise KeyError(f"The configuration must be one of {', '.join(CONFIGS)}, got {self.config_name!r}.")
        value = datasets.Value("float32" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description="The official metrics of the GLUE benchmark.",
            citation="Wang et al. 2019, GLUE, https://openreview.net/forum?id=rJ4km2R5t7",
            inputs_description="predictions and references: as many class numbers each; scores for stsb.",
            features=datasets.Features({"predictions": value, "references": value}),
            format="numpy",
        )

    def _compute(self, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
        if self.config_name == "cola":
            return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}
        if self.config_name == "stsb":
            return {
                "pearson": float(np.asarray(pearsonr(predictions, references))[0]),
                "spearmanr": float(np.asarray(spearmanr(predictions, references))[0]),
            }
        scores = {"accuracy": float(accuracy_score(references, predictions))}
        if self.config_name in _ACCURACY_AND_F1:
            scores["f1"] = float(f1_score(references, predictions))
        return scores
