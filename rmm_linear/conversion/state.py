"""Save and load the state of a conversion, which a checkpoint needs in addition to the parameters.

Parameters and state_dict are those of the original model, so checkpoints stay interchangeable. A small JSON file next
to them names the layers and those that share a sketch, and has what modules have learned in their first steps
(:mod:`rmm_linear.context.learned`). The state of norm estimators consists of tensors; they go into a
safetensors file next to it, see
:mod:`rmm_linear.conversion.state_files`. Layers have the names of the unwrapped model.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rmm_linear._support.files import write_text
from rmm_linear._support.json_files import naming_file, read_json
from rmm_linear._version import __version__
from rmm_linear.context.code_noise import CodeNoise
from rmm_linear.context.directions import Directions
from rmm_linear.context.learned import Learned, read_all
from rmm_linear.context.model_context import ModelContext
from rmm_linear.conversion.exact import converted_modules
from rmm_linear.conversion.names import own_name, unwrapped
from rmm_linear.conversion.state_files import read_tensors, tensors_beside
from rmm_linear.layers.converted import ConvertedModule
from rmm_linear.layers.linear import SketchedLayer
from rmm_linear.norm_estimators import NormEstimator, make_norm_estimator

_DIRECTIONS = "directions"


def sketch_state(model: nn.Module) -> dict[str, Any]:
    """Return what a model's sketched layers have learned, as plain JSON types.

    Args:
        model: A converted model.

    Returns:
        The library's version, the names of the sketched layers, the groups of layers that share a sketch, what modules
        have learned in their first steps, the modules that are exact because a code frees nothing, those that take
        more bits for the noise of their codes, and the name of every layer's norm estimator.
    """
    layers, named = sketched_layers(model), _names(model).items()
    learned = _learned(model)
    read_all(learned.values())
    groups = []
    for context, numbers in _contexts(layers).items():
        names = {number: name for name, number in numbers.items()}
        groups += [[names[n] for n in group] for group in context.sketch_cache.groups if set(group) <= set(names)]
    return {
        "rmm_linear_version": __version__,
        "layers": list(layers),
        "groups": sorted(groups),
        "learned": {name: one.to_dict() for name, one in learned.items() if one.steps},
        "kept_anyway": sorted({names[i] for context, names in named for i in context.kept_anyway}),
        "kept_sites": sorted({(names[i], site) for context, names in named for i, site in context.kept_sites}),
        "code_noise": _code_noise(model),
        "directions": {name: one.calls for name, one in _directions(layers).items() if one.calls},
        "norm_estimators": {n: layer.rmm_config.norm_estimator for n, layer in layers.items() if layer.rmm_estimator},
    }


def sketch_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of the norm estimators of a model, and its fixed directions.

    Args:
        model: A converted model.

    Returns:
        The tensors of :meth:`rmm_linear.estimators.NormEstimator.tensors`, as "LAYER:TENSOR", and the bases of fixed
        directions as "LAYER:directions"; not copied.
    """
    layers = sketched_layers(model)
    found = {
        f"{name}:{key}": tensor
        for name, layer in layers.items()
        if layer.rmm_estimator is not None
        for key, tensor in layer.rmm_estimator.tensors().items()
    }
    for name, one in _directions(layers).items():
        one.settle()
        if one.basis is not None:
            found[f"{name}:{_DIRECTIONS}"] = one.basis
    return found


def load_sketch_state(model: nn.Module, state: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> None:
    """Load the state of a model that was converted in the same way.

    Args:
        model: A converted model.
        state: The result of :func:`sketch_state`.
        tensors: The result of :func:`sketch_tensors`; None starts the norm estimators without observations, and layers
            without fixed directions.

    Raises:
        ValueError: If the layers or their norm estimators differ, or the state is malformed; then nothing changes.
    """
    layers = sketched_layers(model)
    try:
        saved = set(map(str, state["layers"]))  # versions before 1.0 mapped them to bits that they had chosen
        groups = [tuple(map(str, group)) for group in state.get("groups", [])]
        learned = {str(name): dict(values) for name, values in state.get("learned", {}).items()}
        calls = {str(name): int(count) for name, count in state.get("directions", {}).items()}
        exact = set(map(str, state.get("kept_anyway", ())))
        sites = {(str(name), int(site)) for name, site in state.get("kept_sites", ())}
        noise = state.get("code_noise", {})
        rounds = int(noise.get("rounds", 0))
        widened = {str(name): (int(bits), float(ratio)) for name, (bits, ratio) in noise.get("widened", {}).items()}
        names = dict(state.get("norm_estimators", {}))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(
            f"The sketch state must be the result of sketch_state, got something else ({error!r})."
        ) from None
    different = sorted(set(layers) ^ saved)
    if different or not {name for group in groups for name in group} <= set(layers):
        raise ValueError(
            "The sketch state must be of a model with the same sketched layers, "
            f"got other ones: {', '.join(different[:3]) or 'other groups'}. "
            "Convert the model with the configuration that the state was saved under."
        )
    known = _learned(model)
    for name, values in learned.items():
        if name not in known:
            raise ValueError(
                f"The sketch state must be of a model with the same converted modules, got {name!r} in addition. "
                "Convert the model with the configuration that the state was saved under."
            )
        replace(known[name]).load(values)  # an error leaves what is known unchanged
    contexts, converted = _names(model), converted_modules(model)
    of_sites = {name for name, _ in sites}
    if unknown := sorted({*exact, *widened, *of_sites}.difference(*contexts.values())):
        raise ValueError(
            f"The sketch state must be of a model with the same converted modules, got {unknown[0]!r} in addition. "
            "Convert the model with the configuration that the state was saved under."
        )
    bases, others = dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in (tensors or {}).items():
        name, _, part = key.rpartition(":")
        (bases if part == _DIRECTIONS else others)[name if part == _DIRECTIONS else key] = tensor
    directions = _directions(layers)
    if unknown := sorted(set(bases) - set(directions)):
        raise ValueError(
            f"The tensors must be of layers with fixed directions, got those of {unknown[0]}. Convert the model with "
            "the configuration it was saved under."
        )
    estimators = _read_estimators(layers, names, others)
    for name, values in learned.items():
        known[name].load(values)
    checked: dict[str, tuple[Tensor, int, int]] = {}
    for name, basis in bases.items():
        replace(directions[name]).load(basis, calls.get(name, 0), _features(layers[name]))
        weight: Any = layers[name].weight
        checked[name] = basis.to(weight.device), calls.get(name, 0), basis.shape[0]
    for name, one in directions.items():
        one.basis, one.calls, one.pending = None, 0, None
        if name in checked:
            one.load(*checked[name])
    for context, own in contexts.items():
        names_of = [*enumerate(own)]
        context.kept_anyway = {index for index, name in names_of if name in exact}
        context.kept_sites = {(index, site) for index, name in names_of for one, site in sites if one == name}
        known_bits = {index: widened[name] for index, name in names_of if name in widened}
        context.noise = CodeNoise(known_bits, rounds)
    for module in converted:
        if module.rmm_context is not None and (found := module.rmm_context.noise.widened.get(module.rmm_index)):
            module._take_bits(found[0])
    for name, layer in layers.items():
        layer._set_estimator(estimators.get(name))
    for context, numbers in _contexts(layers).items():
        context.sketch_cache.groups |= {
            tuple(numbers[n] for n in group) for group in groups if set(group) <= set(numbers)
        }


def _features(layer: SketchedLayer) -> int:
    return layer.in_features if isinstance(layer, nn.Linear) else layer.weight.shape[0]  # pyright: ignore


def _directions(layers: dict[str, SketchedLayer]) -> dict[str, Directions]:
    found: dict[str, Directions] = {}
    for context, numbers in _contexts(layers).items():
        found |= {name: context.directions[n] for name, n in numbers.items() if n in context.directions}
    return found


def _learned(model: nn.Module) -> dict[str, Learned]:
    named = _names(model).items()
    return {names[index]: one for context, names in named for index, one in sorted(context.learned.items())}


def _names(model: nn.Module) -> dict[ModelContext, list[str]]:
    """Return the names that the modules of each context have in the unwrapped model."""
    found = {context: [own_name(name) for name in context.names] for context in _all_contexts(model)}
    for name, module in unwrapped(model).named_modules():
        if isinstance(module, ConvertedModule) and module.rmm_context is not None:
            found[module.rmm_context][module.rmm_index] = own_name(name)
    return found


def _code_noise(model: nn.Module) -> dict[str, Any]:
    """Return the modules that take more bits for their codes' noise, and the rounds of looking that are over."""
    contexts = _names(model)
    widened = {own[i]: list(one) for c, own in contexts.items() for i, one in sorted(c.noise.widened.items())}
    return {"rounds": min((c.noise.rounds for c in contexts), default=0), "widened": widened}


def _all_contexts(model: nn.Module) -> list[ModelContext]:
    converted = (module for module in model.modules() if isinstance(module, ConvertedModule))
    return list(dict.fromkeys(one.rmm_context for one in converted if one.rmm_context is not None))


def _read_estimators(
    layers: dict[str, SketchedLayer], names: dict[str, str], tensors: dict[str, Tensor]
) -> dict[str, NormEstimator]:
    """Make new estimators from the saved state, so that an error leaves the current ones unchanged."""
    wanted = {name: layer.rmm_config.norm_estimator for name, layer in layers.items() if layer.rmm_estimator}
    if different := sorted(name for name in {**wanted, **names} if wanted.get(name) != names.get(name)):
        first = different[0]
        raise ValueError(
            f"The sketch state must be of the same norm estimators, got {names.get(first, 'none')!r} for {first}, "
            f"which has {wanted.get(first, 'none')!r}. Convert the model with the configuration it was saved under."
        )
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in wanted}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition(":")
        if name not in parts:
            raise ValueError(
                f"The tensors must be of the model's norm estimators, got {key!r}. Use the file saved with this model."
            )
        parts[name][part] = tensor
    estimators: dict[str, NormEstimator] = {}
    for name, kind in wanted.items():
        estimator = make_norm_estimator(kind)
        if estimator is None:
            continue
        try:
            estimator.load_tensors(parts[name])
        except ValueError as error:
            raise ValueError(f"The tensors of {name} do not fit its norm estimator {kind!r}: {error}") from error
        estimators[name] = estimator
    return estimators


def save_sketch_state(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write :func:`sketch_state` as JSON, and :func:`sketch_tensors`, if there are any, into a file next to it.

    An earlier state at the same path stays valid until the new one is complete. Tensors need the package safetensors,
    which transformers depends on.

    Args:
        model: A converted model.
        path: File to write; the name of the tensors' file adds a digest and ``.safetensors``.
    """
    path = Path(path)
    with tensors_beside(path, sketch_tensors(model)) as named:
        write_text(path, json.dumps({**sketch_state(model), **named}, indent=1) + "\n")


def read_sketch_state(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a state that :func:`save_sketch_state` wrote into a model.

    Args:
        model: A converted model.
        path: File to read.

    Raises:
        ValueError: If a file is malformed, the tensors' file is missing, or the state is of another model; the message
            names the file. Then nothing changes.
    """
    path = Path(path)
    with naming_file(path):
        state = read_json(path)
    load_saved_state(model, path, state)


def load_saved_state(model: nn.Module, path: Path, state: Any) -> None:
    """Load a state that was read from a JSON file, and the tensors next to that file, into a model."""
    with naming_file(path):
        load_sketch_state(model, state, read_tensors(path, state))


def sketched_layers(model: nn.Module) -> dict[str, SketchedLayer]:
    found = unwrapped(model).named_modules()
    return {own_name(name): module for name, module in found if isinstance(module, SketchedLayer)}


def _contexts(layers: dict[str, SketchedLayer]) -> dict[ModelContext, dict[str, int]]:
    """Map each context (one per conversion) to the names and numbers of its layers."""
    found: dict[ModelContext, dict[str, int]] = {}
    for name, layer in layers.items():
        if layer.rmm_context is not None:
            found.setdefault(layer.rmm_context, {})[name] = layer.rmm_index
    return found
