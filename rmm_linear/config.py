"""RMMConfig selects the layers to sketch and how each is sketched."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rmm_linear._support.patterns import check_pattern, check_patterns, expressions_in
from rmm_linear._support.provided import provided
from rmm_linear._support.saved_settings import SavedSettings
from rmm_linear._support.validation import check_fraction, check_integer, did_you_mean, read_names
from rmm_linear._version import __version__
from rmm_linear.norm_estimators.registry import NONE, check_norm_estimator
from rmm_linear.packing import CODES, RELATIVE_VARIANCE, WIDTHS, encoded_bytes
from rmm_linear.packing.attention import check_attention_bits
from rmm_linear.sketches import KINDS, SAMPLERS, UNIFORM_MIX, check_block, check_kind
from rmm_linear.spec import ROW_SAMPLE_BYTES, SaveSpec

OPERATIONS = ("linear", "activation", "norm", "attention", "dropout", "logits", "experts", "convolution", "pooling")
STATE_KEY = "sketch_state"
QUANTIZER, QUANT_METHOD = "quantizer", "rmm"
_DEFAULT_MEMORY, _DEFAULT_BITS = 0.1, 3
_MOST_OVERRIDES = 1000  # each is compared with each name
# What differs from the default; docs/noise.md has the noise and the bytes of each.
QUALITIES: dict[str, dict[str, Any]] = {
    "careful": {"bits": 4, "norm_bits": 4, "directions": 16},
    "default": {},
    "smallest": {"bits": 1.6, "norm_bits": 2, "directions": 16},
}


def suggested(got: object) -> str:
    """Write the configuration that a user may mean by something else: that of a quality, or the default."""
    return f"RMMConfig.preset({got!r})" if isinstance(got, str) and got in QUALITIES else "RMMConfig()"


_SELECTION = ("operations", "target_modules", "exclude_modules", "overrides")


class RegisteredMethod:
    """The name of the library in transformers' registry of quantizers, which is entered there when it is asked for."""

    def __get__(self, config: object, owner: type) -> str:
        """Return the name; where transformers is there to ask, register it, see ``integrations.quantizer``."""
        if config is not None and sys.modules.get("transformers") is not None:
            try:
                provided(QUANTIZER)
            except ImportError as error:
                raise AttributeError(str(error)) from error  # which hasattr and copies of objects expect
        return QUANT_METHOD


def _field(default: Any, help: str) -> Any:
    """Return a field with the help text of its command line flag."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class RMMConfig(SavedSettings):
    """Configure how a model's modules save their activations. Immutable; validated on construction.

    Attributes:
        kind: Family of the sketch, one of :data:`rmm_linear.sketches.KINDS`.
        ratio: Saved rows as a fraction of the input's rows, K/N, in (0, 1]; 1 saves every row. Give ``ratio`` or
            ``memory``, not both. With neither, a CountSketch is none: every row that is no padding is saved, in
            ``bits`` per element. (Of other kinds, ``memory`` is 0.1 then.)
        memory: Saved bytes as a fraction of the input's bytes, padding included, in (0, 1]; K follows from it and from
            ``bits``.
        bits: Bits per stored element: 8, 4 or 3 (:mod:`rmm_linear.packing.pack`), 2, 1.6 or 1
            (:mod:`rmm_linear.packing.normal`), None for the dtype itself, or "auto". "auto" is 3; with ``memory``, the
            code with the least variance in these bytes, by :meth:`width`: the widest one in which every row that is no
            padding fits. With ``ratio`` it is the dtype itself.
        directions: Fixed directions of a layer's input whose coordinates are saved in 8 bits, so that its code has less
            to represent; 0 for none. In layers of a converted model where every row is encoded, with 16 columns
            for each direction; not with ``memory``, nor in compiled code. See :mod:`rmm_linear.context.directions`.
        block: Tokens per block of a block-diagonal sketch (gaussian, rademacher, hadamard); None mixes all tokens.
        uniform_mix: For kinds that sample rows by importance (norm_rows, wta): the part of the probability that is
            uniform over the tokens, in (0, 1]. It bounds what a token with a small input can add to the variance.
        norm_estimator: For the same kinds, how the norm of a token's output gradient is predicted: "none" (by the norm
            of the input alone), "position", "token" or "position_token" (running means), "sample_cache" or
            "sequence_cache" (the last epoch's, by dataset index), or a name given to
            :func:`rmm_linear.estimators.register_norm_estimator`.
        min_rows: Lower limit of K, at least 1. Layers whose input has no more rows stay exact, such as heads with one
            row per sequence, and convolutions whose input has no more positions.
        mask_padding: Whether rows without a gradient are left out: padding, in models whose forward takes
            ``attention_mask``, and in the last block of a classifier all rows but the one that it reads, see
            :mod:`rmm_linear.context.learned`.
        checkpointed: For modules that activation checkpointing recomputes, which would drop what they compress and
            compress it again: "exact" leaves them as they are, without noise; "packed" compresses, which lowers the
            peak inside of the one block that is being recomputed. In compiled code it is always "packed".
        operations: The operations to convert: "linear" (a sketch of the input), "activation" (its derivative in few
            bits; a gated MLP's two products), "norm" (LayerNorm, RMSNorm, BatchNorm, GroupNorm, InstanceNorm: one
            packed copy of the input), "attention" (query, key and value packed), "dropout" (one bit per element),
            "logits" (a language model's loss in chunks, exact but for the order of summation), "experts" (of
            transformers: tokens and products in ``bits``, the gate's derivative in ``activation_bits``), "convolution"
            (its input in ``bits``) and "pooling" (the place of each maximum in its window; of averages nothing). Each
            takes functions too that a module's own code calls: products of matrices are "linear", of elements
            "activation". ("linear",) is the published method.
        activation_bits: Bits per element of an activation's derivative: 8, 4, 2 or 1. ReLU takes 1 and is exact.
        norm_bits: Bits per element of a norm's input: 8, 4, 3 or 2.
        attention_bits: Bits per element of query, key and value: 8 or 4. With 2, the scores would be so far off that
            the gradient is biased.
        fused: Whether outputs of activations, gated products, dropout and, without autocast, norms are made in the pass
            that packs, where Triton's kernels run: a third fewer bytes move, and outputs differ in their last bits.
            Dropout saves a seed instead of bits, and its random numbers are not PyTorch's.
        target_modules: Linear layers to convert: "all-linear" (all but the output head, and, beside frozen layers,
            trained ones whose input has at most a 32nd of the widest one's features, as ``lora_B`` has), a regular
            expression that the whole name must match, or a list of names, each exact or a dotted suffix ("query",
            "attention.self.query"); an entry that begins with ^ is a regular expression.
        exclude_modules: Modules not to convert, of any operation; a regular expression or a list as above.
        overrides: Pattern to fields that differ for the layers it matches, such as ``{"query": {"ratio": 0.5}}``. A
            pattern is a name, a dotted suffix or a regular expression for the whole name; the first match is used.

    Raises:
        ValueError: If a value is outside its range.
        TypeError: If a value has the wrong type.

    Example:
        >>> RMMConfig(ratio=0.2).spec(1000, 768, itemsize=4).rows
        200
        >>> RMMConfig(ratio=1.5)
        Traceback (most recent call last):
        ...
        ValueError: ratio must be in (0, 1], got 1.5. Use ratio=1 to store every row.
    """

    kind: str = _field("countsketch", f"Family of the sketch: {', '.join(KINDS)}.")
    ratio: float | None = _field(None, "Saved rows as a fraction of the rows seen, in (0, 1].")
    memory: float | None = _field(None, "Saved bytes as a fraction of the input's bytes, in (0, 1]; instead of ratio.")
    bits: float | str | None = _field(
        "auto", "Bits per stored element: 8, 4, 3, 2, 1.6, 1, none for the dtype itself, or auto."
    )
    directions: int = _field(0, "Fixed directions of a layer's input that are saved in 8 bits; 0 for none.")
    block: int | None = _field(
        None, "Tokens per block of a block-diagonal gaussian, rademacher or hadamard sketch. Default: one block."
    )
    uniform_mix: float = _field(UNIFORM_MIX, "For norm_rows and wta: share of the uniform distribution, in (0, 1].")
    norm_estimator: str = _field(
        NONE,
        "For norm_rows and wta: what the size of a token's gradient is expected from: none, position, token, "
        "position_token, sample_cache, sequence_cache, or a registered name.",
    )
    min_rows: int = _field(64, "Rows saved at least, so that heads which see one row per sequence stay exact.")
    mask_padding: bool = _field(True, "Whether padding is left out of the sketch: true or false.")
    checkpointed: str = _field("exact", "Modules that activation checkpointing recomputes: exact or packed.")
    operations: Sequence[str] = _field(OPERATIONS, f"What is converted, of {', '.join(OPERATIONS)}.")
    activation_bits: int = _field(4, "Bits per element of an activation's derivative: 8, 4, 2 or 1.")
    norm_bits: int = _field(3, "Bits per element of a norm's input: 8, 4, 3 or 2.")
    attention_bits: int = _field(4, "Bits per element of attention's query, key and value: 8 or 4.")
    fused: bool = _field(
        False,
        "Where Triton kernels run, make outputs of activations, gated products, dropout and, without autocast, norms "
        "in the pass that packs: fewer bytes move, but outputs differ from the exact model's in the last bits, and "
        "dropout has its own random numbers. true or false.",
    )
    target_modules: str | Sequence[str] = _field(
        "all-linear",
        "Linear layers to convert: all-linear, names (exact or dotted suffixes), or one regular expression.",
    )
    exclude_modules: str | Sequence[str] | None = _field(
        None, "Modules to leave alone: names or one regular expression."
    )
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    version: ClassVar[str] = __version__
    other_keys: ClassVar[tuple[str, ...]] = (STATE_KEY,)
    quant_method = RegisteredMethod()

    def __new__(cls, *args: Any, **fields: Any) -> RMMConfig:
        """Refuse what is no field, with the field that is meant."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                near = did_you_mean(name, known)
                raise TypeError(f"RMMConfig has the fields {', '.join(known)}, got {name!r}.{near}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Validate the fields, and convert lists and mappings to private copies."""
        object.__setattr__(self, "operations", _read_operations(self.operations))
        if self.activation_bits == "auto":  # of files of versions before 1.0, whose default it was
            object.__setattr__(self, "activation_bits", 4)
        _check_width("activation_bits", self.activation_bits, (8, 4, 2, 1))
        _check_width("norm_bits", self.norm_bits, WIDTHS)
        check_attention_bits(self.attention_bits)
        check_kind(self.kind)
        if self.ratio is not None and self.memory is not None:
            got = f"ratio={self.ratio}, memory={self.memory}"
            raise ValueError(f"ratio and memory exclude each other, got {got}. Give one.")
        if self.ratio is None and self.memory is None and self.kind != "countsketch":
            object.__setattr__(self, "memory", _DEFAULT_MEMORY)
        check_fraction("ratio", self.ratio, "Use ratio=1 to store every row.")
        check_fraction("memory", self.memory, "It is a fraction of the input's bytes.")
        check_fraction(
            "uniform_mix", self.uniform_mix, "1 samples all tokens alike; 0 would never sample some.", needed=True
        )
        check_norm_estimator(self.norm_estimator)
        if self.norm_estimator != NONE and self.kind not in SAMPLERS:
            raise ValueError(
                f"norm_estimator is for {' and '.join(SAMPLERS)}, got {self.norm_estimator!r} with kind={self.kind!r}. "
                'Use norm_estimator="none".'
            )
        if self.bits not in (None, "auto", *CODES) or type(self.bits) not in (type(None), str, int, float):
            raise ValueError(
                f'bits must be 8, 4, 3, 2, 1.6, 1, None or "auto", got {self.bits!r}. None stores the dtype itself.'
                f"{did_you_mean(self.bits, ['auto'])}"
            )
        for name in ("mask_padding", "fused"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.checkpointed not in ("exact", "packed"):
            near = did_you_mean(self.checkpointed, ("exact", "packed"))
            raise ValueError(f'checkpointed must be "exact" or "packed", got {self.checkpointed!r}.{near}')
        check_integer("block", self.block, optional=True)
        check_integer("min_rows", self.min_rows)
        check_integer("directions", self.directions, least=0)
        check_block(self.kind, self.block)
        object.__setattr__(self, "target_modules", read_names("target_modules", self.target_modules))
        if self.exclude_modules is not None:
            object.__setattr__(self, "exclude_modules", read_names("exclude_modules", self.exclude_modules))
        object.__setattr__(self, "overrides", self._checked_overrides())
        selecting = expressions_in(self.target_modules) + expressions_in(self.exclude_modules or ())
        check_patterns((*selecting, *self.overrides))
        numbers = {name: getattr(self, name) for name in ("ratio", "memory")}
        texts = {name: repr(float(number)) for name, number in numbers.items() if number is not None}
        object.__setattr__(self, "_texts", texts)

    def _checked_overrides(self) -> dict[str, dict[str, Any]]:
        if not isinstance(self.overrides, Mapping):
            raise TypeError(f"overrides must map a name pattern to fields, got {type(self.overrides).__name__}.")
        if len(self.overrides) > _MOST_OVERRIDES:
            got = f"at most {_MOST_OVERRIDES} patterns, got {len(self.overrides)}"
            raise ValueError(f"overrides must have {got}. A regular expression stands for many layers.")
        checked: dict[str, dict[str, Any]] = {}
        for pattern, changes in self.overrides.items():
            check_pattern("overrides", pattern)
            if not isinstance(changes, Mapping):
                raise TypeError(f"overrides[{pattern!r}] must map field names to values, got {changes!r}.")
            allowed = [f.name for f in dataclasses.fields(self) if f.name not in _SELECTION]
            unknown = sorted(set(changes) - set(allowed))
            if unknown:
                near = did_you_mean(unknown[0], allowed)
                got = ", ".join(unknown)
                raise ValueError(f"overrides[{pattern!r}] may change {', '.join(allowed)}; got {got}.{near}")
            try:
                self.replace(overrides={}, **changes)
            except (TypeError, ValueError) as error:
                raise type(error)(f"overrides[{pattern!r}]: {error}") from None
            checked[pattern] = dict(changes)
        return checked

    @classmethod
    def preset(cls, quality: str, **changes: Any) -> RMMConfig:
        """Make the configuration of a quality.

        Args:
            quality: "careful" has half of the default's noise in the whole gradient and an eighth in linear layers, in
                15 % more bytes; "smallest" twice and three times, in 16 % fewer. Medians over batches of docs/noise.md.
            **changes: Fields to change.

        Returns:
            The configuration.

        Raises:
            ValueError: If there is no such quality.

        Example:
            >>> RMMConfig.preset("careful").bits
            4
        """
        if not isinstance(quality, str) or quality not in QUALITIES:
            near = did_you_mean(quality, QUALITIES)
            raise ValueError(f"quality must be one of {', '.join(QUALITIES)}, got {quality!r}.{near}")
        return cls(**{**QUALITIES[quality], **changes})

    def spec(self, tokens: int, features: int, itemsize: int, valid: int | None = None) -> SaveSpec | None:
        """Return how an input is saved.

        K = max(min_rows, round(ratio · N)), or with ``memory`` the most rows whose bytes fit, at most N; of a
        CountSketch at most n, and n with neither.

        Args:
            tokens: N.
            features: I.
            itemsize: Bytes per element of the input.
            valid: n, the rows that may have a gradient and are no padding; None is all.

        Returns:
            The spec, or None if the input itself is saved: N ≤ min_rows, or K ≥ N in the input's own dtype.
        """
        if tokens <= self.min_rows:
            return None
        most = tokens if valid is None or self.kind != "countsketch" or self.ratio is not None else max(valid, 1)
        width = self.width(features, itemsize, 1.0 if most is tokens else tokens / most)
        if self.ratio is not None:
            rows = round(self._constant("ratio") * tokens)
        elif self.memory is None:
            rows = most
        else:
            # A whole number of rows but for rounding is one; a compiler takes a literal for a constant.
            rows = int(self._fitting(features, itemsize, width) * tokens + 1e-9)
        rows = min(most, max(self.min_rows, rows))
        if rows == tokens and width is None:
            return None
        mix = self.uniform_mix if self.kind in SAMPLERS else 0.0
        return SaveSpec(self.kind, rows, self.block, width, mix)

    def width(self, features: int, itemsize: int, room: float = 1.0) -> float | None:
        """Return the bits per element of an input's code, None for its dtype: ``bits``, or what "auto" is.

        With ``memory``, it is the code with the least variance of those in which all rows fit that are no padding.
        Where none does, and for other kinds than countsketch, which name a sketch of fewer rows, it is the one with the
        least variance for rows of one size without correlations: for K = κn, in units of Σ‖xᵢ‖²‖yᵢ‖² and with c, the
        variance of the code by that of its input, what collides in a balanced CountSketch and c for what its rows add
        up to, or (1 + c) / κ for other kinds.

        Args:
            features: I.
            itemsize: Bytes per element of the input.
            room: N/n, rows by those that are no padding.

        Returns:
            The bits, or None.
        """
        if self.bits != "auto":
            return self.bits  # pyright: ignore[reportReturnType]
        if self.memory is None:
            return None if self.ratio is not None else _DEFAULT_BITS
        # A loop, as compilers trace no key of min(). Codes are in the order of their variance.
        codes = ((None, 0.0), *RELATIVE_VARIANCE.items())
        best, least = None, math.inf
        for width, code in codes:
            share = self._fitting(features, itemsize, width) * room
            fits = share + 1e-9 >= 1
            if fits and self.kind == "countsketch":
                return width
            variance = _relative_variance(self.kind, share, code)
            if not fits and variance < least:
                best, least = width, variance
        return best

    def _fitting(self, features: int, itemsize: int, width: float | None) -> float:
        """K/N of the rows that fit into ``memory``."""
        row_bytes = features * itemsize if width is None else encoded_bytes(1, features, width)
        fitting = self._constant("memory") * features * itemsize
        if self.kind in SAMPLERS and fitting < row_bytes:
            row_bytes += ROW_SAMPLE_BYTES
        return fitting / max(row_bytes, 1)

    def _constant(self, name: str) -> float:
        """The number, which a compiler that traces numbers as variables takes for a constant, as it does texts."""
        texts: dict[str, str] = vars(self).get("_texts", {})  # which pickled configurations may not have
        return float(texts[name] if name in texts else getattr(self, name))

    def replace(self, **changes: Any) -> RMMConfig:
        """Return a copy with other values; a new ``ratio`` replaces ``memory`` and vice versa.

        Args:
            **changes: Fields to change.

        Returns:
            The new configuration.
        """
        if changes.get("ratio") is not None:
            changes.setdefault("memory", None)
        if changes.get("memory") is not None:
            changes.setdefault("ratio", None)
        return dataclasses.replace(self, **changes)

    def for_module(self, name: str) -> RMMConfig:
        """Return the configuration of one layer: this one with the first matching override applied.

        Args:
            name: Dotted name of the layer in the model.

        Returns:
            A configuration without overrides.
        """
        pattern = self.override_pattern(name)
        return self.replace(overrides={}, **(self.overrides[pattern] if pattern is not None else {}))

    def override_pattern(self, name: str) -> str | None:
        """Return the first pattern of ``overrides`` that matches a layer.

        Args:
            name: Dotted name of the layer in the model.

        Returns:
            The pattern, or None.
        """
        for pattern in self.overrides:
            if name == pattern or name.endswith(f".{pattern}") or re.fullmatch(pattern, name):
                return pattern
        return None


def _relative_variance(kind: str, share: float, code: float) -> float:
    """The variance that :meth:`RMMConfig.width` compares, for K = share · n, share < 1."""
    if share <= 0:
        return math.inf
    if kind != "countsketch":
        return (1 + code) / share
    segments = math.floor(1 / share)
    rest = 1 - segments * share  # tokens of the last segment, which fall on rows that have all the others
    collisions = (1 - segments * share**2 - rest**2) / share
    return collisions + code * (rest * (segments + 1) ** 2 + (share - rest) * segments**2)


def _read_operations(value: object) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence | set | frozenset) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"operations must be a list of {', '.join(OPERATIONS)}, got {value!r}.")
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown or not names:
        near = did_you_mean(unknown[0], OPERATIONS) if unknown else ""
        raise ValueError(f"operations must be one or more of {', '.join(OPERATIONS)}, got {value!r}.{near}")
    return tuple(name for name in OPERATIONS if name in names)


def _check_width(name: str, value: object, widths: tuple[int, ...]) -> None:
    if type(value) is not int or value not in widths:
        *others, last = widths
        raise ValueError(f"{name} must be {', '.join(map(str, others))} or {last}, got {value!r}.")
