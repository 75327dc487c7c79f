"""Attribute what a model saves to operations, and say why some of it stays uncompressed after a conversion."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from rmm_linear._support.tables import grouped
from rmm_linear.activations.norm_form import norm_of
from rmm_linear.config import OPERATIONS, RMMConfig
from rmm_linear.conversion.explanation import OTHERS, Keeper, OperationMemory
from rmm_linear.conversion.linears import is_linear_like
from rmm_linear.conversion.names import output_heads
from rmm_linear.conversion.packed import choose_packed
from rmm_linear.conversion.report import ConversionReport
from rmm_linear.losses import CHUNK
from rmm_linear.memory.inputs import Saver
from rmm_linear.memory.ledger import Ledger, SavedStorage, StorageKey, storage_key

_LOSS = "the loss over classes"
_LOSSES = r"LogSoftmax|Nll.*|BinaryCrossEntropy.*|_?ChunkedCrossEntropy"
_WHY = {  # the first pattern that an operator's name matches says what it saves
    _LOSSES: _LOSS,
    r"Embedding.*": "the indices of an embedding",
    r".*Convolution.*": "the input of a convolution that is not converted, or has few positions",
    r"B?mm|Badd.*mm|Add.*mm|Mv|Dot|Linear|Mkldnn.*": "a factor of a matrix product that is in no converted layer",
    r"(Safe)?Softmax": "the probabilities of a softmax outside of an attention module",
    r"Gather|Index.*|Take.*|Scatter.*": "the tensor that is indexed, and the indices",
    r"Gelu|Silu|Relu|Mish|Hardswish|Sigmoid|Tanh|Elu|LeakyRelu": (
        "an activation that is called as a function, not as a module"
    ),
    r"NativeDropout|.*Bernoulli.*": "the mask of a dropout that is called as a function",
    r"scaled_dot_product_attention": "an attention that is not converted",
    r".*Norm": "a norm that is not over the last dimensions, or is called as a function",
    r"MaskedFill|Where|Max.*|Min.*|Clamp.*": "the mask of the elements that pass",
    r"Mul|Div": "a factor of an elementwise product, or the mask of a dropout that is called as a function",
    r"Pow|R?[Ss]qrt|Exp|Log|Sin|Cos|Var.*|Std.*|LinalgVectorNorm": "the argument or the result of a function",
}
_REGION = "RegionFunctionBackward"
RECOMPUTED_INPUTS = "inputs of recomputed blocks"
_INPUTS = "the input of a block that activation checkpointing recomputes"
_REMEDIES = {  # the first pattern that a reason matches says what to do about it; {0} is the share, {1} what it names
    r"attn_implementation is '(\w+)'": "attention is {1}: {0} stays, use model.set_attn_implementation('sdpa')",
    r"operations does not have '(\w+)'": "operations lacks {1}: {0} stays, add {1!r} to operations",
    r"the probabilities of a softmax": (
        "attention has a softmax of its own: {0} stays, use torch.nn.functional.scaled_dot_product_attention"
    ),
    r"an activation that is called as a function": (
        "activations are called as functions: {0} stays, call modules such as nn.GELU()"
    ),
}
_WORTH = 0.05  # the least share that is worth a hint


def uncompressed(names: Mapping[nn.Module, str], report: ConversionReport) -> dict[str, str]:
    """Map modules with weights whose inputs nothing compresses to what they are: their class, if there is no word."""
    known = {*report.converted, *report.packed, *report.skipped}
    found = {name: _kind_of(module) for module, name in names.items() if name not in known}
    return {name: kind for name, kind in found.items() if kind is not None}


def _kind_of(module: nn.Module) -> str | None:
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolutions"
    if isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm):
        return "norms over other dimensions"
    own = [p for p in module._parameters.values() if p is not None and not is_lazy(p) and 1 not in p.shape]
    sizes = max((p.dim() for p in own), default=0)
    if sizes == 1 and "norm" in type(module).__name__.lower() and norm_of(module) is None:
        return type(module).__name__  # of kernels that run elsewhere, which cannot be compared here
    if sizes < 2 or isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return None
    return "experts" if sizes == 3 else type(module).__name__


Saved = tuple[Ledger, Mapping[StorageKey, Sequence[Saver]]]  # of one forward pass


def book_regions(report: ConversionReport, saved: Saved) -> None:
    """Give what a region of attention saves to its module, where the last of its linear layers runs meanwhile."""
    ledger, savers = saved
    for key, entry in ledger.storages.items():
        if entry.modules[0] in report.converted and {one.name for one in savers.get(key, ())} == {_REGION}:
            entry.modules[0] = entry.modules[0].rpartition(".")[0]


def by_operation(report: ConversionReport, before: Saved, after: Saved) -> dict[str, OperationMemory]:
    """Attribute saved bytes to operations: each storage to that of the module that saves it first.

    What neither converted modules nor modules inside of them save is "other". A loss over classes is "logits" where the
    conversion has an output layer.
    """
    operations = _operations(report)
    found: dict[str, list[int]] = {name: [0, 0] for name in (*OPERATIONS, "other") if name in operations.values()}
    found["other"] = [0, 0]
    for i, (ledger, savers) in enumerate((before, after)):
        for key, entry in ledger.storages.items():
            operation = _nearest(entry.modules[0], operations) or "other"
            if operation == "other" and "logits" in found and any(map(_is_loss, savers.get(key, ()))):
                operation = "logits"
            found[operation][i] += entry.bytes
    return {operation: OperationMemory(*counts) for operation, counts in found.items()}


def _is_loss(saver: Saver) -> bool:
    return re.fullmatch(_LOSSES, saver.operator) is not None


def _operations(report: ConversionReport) -> dict[str, str]:
    return {name: "linear" for name in report.converted} | {n: entry.operation for n, entry in report.packed.items()}


def _nearest(name: str, found: Mapping[str, str]) -> str | None:
    """Return the entry of a module, or of the innermost module around it that has one."""
    while name not in found and name:
        name = name.rpartition(".")[0]
    return found.get(name)


class Reasons:
    """Explains why modules save what they save after a conversion. Make it before the model is converted."""

    def __init__(
        self, model: nn.Module, batch: Any, report: ConversionReport, names: dict[nn.Module, str], exact: dict[str, str]
    ) -> None:
        self._classes = {name: type(module).__name__ for module, name in names.items()} | {"": type(model).__name__}
        self._batch = {storage_key(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
        self._report, self._exact = report, exact
        self._recomputed: set[StorageKey] = set()
        self._left_out = _left_out(names, report.config)
        self._loss = self._loss_reason([names[head] for head in output_heads(model) if head in names])

    def _loss_reason(self, heads: Sequence[str]) -> str:
        if not heads:
            return _LOSS
        if "logits" not in self._report.config.operations:
            return f"{_LOSS}; {_named('logits')}"
        skipped = next((self._report.skipped[head] for head in heads if head in self._report.skipped), None)
        few = f"the logits are taken in chunks above {CHUNK} rows, and nothing but the loss reads them"
        return f"{_LOSS}: {skipped or few}"

    def note_recomputed(self, inputs: Set[StorageKey]) -> None:
        """Note which tensors activation checkpointing saves, in the pass that the converted model made."""
        self._recomputed.update(inputs)

    def note_attention(self, model: nn.Module) -> None:
        """Note which packed attentions were exact in the pass that the converted model made."""
        for name, module in model.named_modules():
            reason = getattr(module, "rmm_exact", None)
            if isinstance(reason, str):
                self._exact[name] = f"its attention stays exact: {reason}"

    def kind(self, name: str, reason: str) -> str:
        """Say in a word or two what saves a storage of a module, for a reason."""
        words = {self._loss: "the loss", _INPUTS: RECOMPUTED_INPUTS}
        return _nearest(name, self._report.uncompressed) or words.get(reason, OTHERS)

    def why(self, key: StorageKey, name: str, savers: Iterable[Saver]) -> tuple[tuple[str, ...], str]:
        operators = tuple(sorted({saver.operator for saver in savers if not saver.is_stand_in}))
        return operators or ("an operator",), self._reason(key, name, operators)

    def _reason(self, key: StorageKey, name: str, operators: Sequence[str]) -> str:
        if operators and key in self._batch:
            return "the batch itself, which is in memory anyway"
        if key in self._recomputed:
            return _INPUTS
        if not operators:
            return "no output of the model that needs a gradient depends on it"
        known = (text for one in operators for pattern, text in _WHY.items() if re.fullmatch(pattern, one))
        why = next(known, "nothing compresses it")
        if why == _LOSS:
            return self._loss
        if name in self._exact:
            return self._exact[name]
        if name in self._report.skipped:
            return f"not converted: {self._report.skipped[name]}"
        operation = _nearest(name, self._left_out)
        return _named(operation) if operation else why

    def class_of(self, name: str) -> str:
        """Return the class of a module before the conversion."""
        return self._classes.get(name, name)


def _named(operation: str) -> str:
    return f"operations does not have {operation!r}"


def _left_out(names: dict[nn.Module, str], config: RMMConfig) -> dict[str, str]:
    """Name to operation, for modules that would be converted if the configuration had their operation."""
    missing = [operation for operation in OPERATIONS if operation not in config.operations]
    found: dict[str, str] = {}
    if missing:
        choices = choose_packed(names, config.replace(operations=OPERATIONS))[0]
        found = {name: choice.operation for name, choice in choices.items()}
        found |= {name: "linear" for module, name in names.items() if is_linear_like(module)}
    return {name: operation if operation in missing else "" for name, operation in found.items()}


def still_saved(
    storages: Mapping[StorageKey, SavedStorage],
    savers: Mapping[StorageKey, Sequence[Saver]],
    reasons: Reasons,
    before: int,
) -> tuple[int, list[Keeper], dict[str, int], list[str]]:
    """Divide what a converted model saves into bytes of compressed activations, and the rest, the most bytes first."""
    compressed, kinds, remedies = 0, Counter[str](), Counter[str]()
    modules: dict[str, Counter[tuple[tuple[str, ...], str]]] = {}
    for key, entry in storages.items():
        found, name = savers.get(key, ()), entry.modules[0]
        if found and all(saver.is_stand_in for saver in found):
            compressed += entry.bytes
            continue
        why = reasons.why(key, name, found)
        modules.setdefault(name, Counter())[why] += entry.bytes
        kinds[reasons.kind(name, why[1])] += entry.bytes
        remedies[why[1]] += entry.bytes
    groups = grouped((name, f"{reasons.class_of(name)}: {_joined(counts)}") for name, counts in modules.items())
    result: list[Keeper] = []
    for pattern, names, (reason,) in groups:
        count = sum(modules[name].total() for name in names)
        result.append(Keeper(pattern, count, count / max(before, 1), reason))
    result.sort(key=lambda found: -found.bytes)
    return compressed, result, dict(kinds.most_common()), _hints(remedies, before)


def _hints(reasons: Counter[str], before: int) -> list[str]:
    """Say what would save the most of what remains."""
    found = Counter[tuple[str, str]]()
    for reason, count in reasons.items():
        matches = ((re.search(pattern, reason), remedy) for pattern, remedy in _REMEDIES.items())
        match, remedy = next(((match, remedy) for match, remedy in matches if match), (None, ""))
        if match:
            found[remedy, "".join(match.groups())] += count
    shares = [(remedy, named, count / max(before, 1)) for (remedy, named), count in found.most_common(2)]
    return [remedy.format(f"{share:.0%}", named) for remedy, named, share in shares if share >= _WORTH]


def _joined(counts: Counter[tuple[tuple[str, ...], str]]) -> str:
    """Return the operators and reasons, the most bytes first; operators of the same reason together."""
    operators: dict[str, list[str]] = {}
    for (names, why), _ in counts.most_common():
        operators.setdefault(why, []).extend(names)
    return "; ".join(f"{' and '.join(dict.fromkeys(names))}, {why}" for why, names in operators.items())
