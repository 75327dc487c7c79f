"""Public names of planning, and what their functions and methods are called with, are those of version 0.1.0."""

import inspect
import json
from pathlib import Path

from rmm_linear import planning

SAVED = Path(__file__).parent / "data" / "public_names.json"


def parameters(function):
    """Names, kinds and defaults of public parameters, without types."""
    signature = inspect.signature(function)
    public = [each for name, each in signature.parameters.items() if name != "self" and not name.startswith("_")]
    shown = [each.replace(annotation=each.empty) for each in public]
    return str(signature.replace(parameters=shown, return_annotation=signature.empty))


def members(value):
    """Public methods and properties of the library's own, and how an object is made, or the base of an error."""
    found = {"": value.__base__.__name__ if issubclass(value, Exception) else parameters(value)}
    for name, member in inspect.getmembers(value):
        if not name.startswith("_") and isinstance(inspect.getattr_static(value, name), property):
            found[name] = "property"
        elif not name.startswith("_") and getattr(member, "__module__", "").startswith("rmm_linear"):
            found[name] = parameters(member)
    return found


def test_names_and_parameters_stay():
    names = {name: getattr(planning, name) for name in planning.__all__}
    found = {name: members(value) if inspect.isclass(value) else parameters(value) for name, value in names.items()}
    assert found == json.loads(SAVED.read_text(encoding="utf-8"))
