"""What is saved over an earlier conversion or sketch state: whatever happens, one of the two is there, whole."""

import errno
import os
import re
import signal
from functools import partial

import pytest
import torch
from fault_helpers import at_write, full_disk, in_a_child, kill, no_room
from helpers import Mlp
from state_helpers import WTA, content, learned
from torch import nn

from rmm_linear import RMMConfig, convert, read_sketch_state, save_sketch_state, sketch_state, sketch_tensors
from rmm_linear.conversion.state import load_saved_state
from rmm_linear.integrations.pretrained import convert_as_saved, save_conversion

MODELS = {
    "first": learned,
    "more steps": partial(learned, 8),
    "other layers": partial(learned, target_modules=["first"]),
    "other kind": partial(learned, kind="countsketch", memory=None, ratio=0.5, norm_estimator="none"),
}


def conversion(folder):
    """What a folder holds; None if nothing was ever saved there."""
    model = Mlp()
    try:
        convert_as_saved(model, folder)
    except FileNotFoundError:
        return None
    return content(model)


def state(like, folder):
    model = like()
    try:
        read_sketch_state(model, folder / "state.json")
    except FileNotFoundError:
        return None
    return content(model)


CASES = [
    *((None, "first", "conversion"), ("other kind", "first", "conversion")),
    *(("first", new, "conversion") for new in ("more steps", "other layers", "other kind")),
    *((None, "more steps", "state"), ("first", "more steps", "state")),
]


@pytest.mark.diagonal
@pytest.mark.parametrize("fault", [kill, no_room])
@pytest.mark.parametrize(("old", "new", "what"), CASES, ids=lambda case: str(case))
def test_a_fault_at_any_moment_leaves_the_old_save_or_the_new_one(tmp_path, monkeypatch, old, new, what, fault):
    """Before the first thing that is done to a file, before the second, and so on until the save gets through."""

    def put(model, folder):
        if what == "conversion":
            save_conversion(model, folder)
        else:
            save_sketch_state(model, folder / "state.json")

    model, earlier, found, number = MODELS[new](), old and MODELS[old](), [], 0
    expected = [earlier and content(earlier), content(model)]
    load = conversion if what == "conversion" else partial(state, MODELS["first"])
    status = 1
    while status:
        folder = tmp_path / str(number)
        folder.mkdir()
        if earlier:
            put(earlier, folder)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}

        def save(folder=folder, number=number):
            at_write(monkeypatch, number, fault)
            try:
                put(model, folder)
            except OSError as error:
                return error.errno
            return 0

        status = in_a_child(save)
        assert status in (0, -signal.SIGKILL if fault is kill else errno.ENOSPC)
        after = load(folder)
        assert after in expected
        found.append(expected.index(after))
        if fault is no_room and status:
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        put(model, folder)  # with room again
        assert load(folder) == expected[1]
        assert len(list(folder.iterdir())) - len(hidden(folder)) == (2 if sketch_tensors(model) else 1)
        number += 1
    assert found == sorted(found)  # there is one moment at which the new save takes the place of the old one
    assert found[0] == 0
    assert found[-1] == 1
    assert number > 2


def hidden(folder):
    """Parts of files that a killed process could not remove."""
    return [path for path in folder.iterdir() if re.fullmatch(r"\..*\.\d+\.\w+", path.name)]


def test_a_file_that_does_not_fit_leaves_the_old_conversion(tmp_path):
    """The kernel itself refuses to write, in the middle of the tensors or of the JSON file."""
    save_conversion(learned(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    sizes = sorted(len(content) for content in before.values())
    for room in (10, sizes[0] - 1, sizes[1] - 1):
        with full_disk(room), pytest.raises(Exception, match=os.strerror(errno.EFBIG)):
            save_conversion(learned(8), tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_same_tensors_saved_again_on_a_full_disk_stay(tmp_path, monkeypatch):
    """Their file has the name of the new one; only the configuration is another."""
    model = learned()
    save_conversion(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    scope = model.first.rmm_context
    scope.config = scope.config.replace(exclude_modules=["none"])
    for number in range(5):
        with monkeypatch.context() as patch:
            at_write(patch, number, no_room)
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                save_conversion(model, tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_configuration_by_itself_converts_and_one_whose_tensors_are_gone_is_refused(tmp_path):
    model = learned()
    RMMConfig(**WTA).save(tmp_path / "rmm_config.json")
    assert conversion(tmp_path)[2] == {}
    save_conversion(model, tmp_path)
    (tensors,) = tmp_path.glob("*.safetensors")
    tensors.unlink()
    with pytest.raises(ValueError, match=rf"rmm_config\.json: {re.escape(tensors.name)} must lie next to it"):
        convert_as_saved(Mlp(), tmp_path)


def test_the_configuration_is_read_out_of_a_saved_conversion(tmp_path):
    save_conversion(learned(), tmp_path)
    assert RMMConfig.load(tmp_path / "rmm_config.json") == RMMConfig(**WTA)


def test_files_of_others_are_left_alone(tmp_path):
    """Also those whose names begin alike."""
    others = ["model.safetensors", "rmm_config.json.backup.safetensors", "rmm_config.json.0123456789abcdef.pt"]
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    save_conversion(learned(), tmp_path)
    save_conversion(learned(8), tmp_path)
    assert all((tmp_path / name).read_bytes() == b"mine" for name in others)
    assert len(list(tmp_path.iterdir())) == len(others) + 2


@pytest.mark.parametrize("name", ["../secret", "0" * 63, ["0" * 64]])
def test_a_digest_that_is_none_is_refused(tmp_path, name):
    """It becomes part of a file's name."""
    model = learned()
    with pytest.raises(ValueError, match=r"state\.json: tensors_sha256 must be a SHA-256 digest"):
        load_saved_state(model, tmp_path / "state.json", sketch_state(model) | {"tensors_sha256": name})


# Wrapped models


def in_the_middle(model):
    """A part of the model is compiled, the rest is not."""
    model.second = torch.compile(model.second, backend="eager")
    return model


WRAPPERS = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "parallel": torch.nn.DataParallel,
    "both": lambda model: torch.compile(torch.nn.DataParallel(model), backend="eager"),
    "both the other way": lambda model: torch.nn.DataParallel(torch.compile(model, backend="eager")),
    "in the middle": in_the_middle,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_saves_of_a_wrapped_model_and_of_the_model_itself_fit_each_other(tmp_path, wrap):
    model = learned()
    expected = content(model)
    wrapped = wrap(model)
    save_conversion(wrapped, tmp_path)
    assert conversion(tmp_path) == expected
    save_sketch_state(wrapped, tmp_path / "state.json")
    assert state(MODELS["more steps"], tmp_path) == expected
    other = wrap(learned(8))
    read_sketch_state(other, tmp_path / "state.json")
    assert content(other) == expected
    twin = Mlp()
    if wrap is not in_the_middle:
        assert list(convert_as_saved(wrap(twin), tmp_path).converted) == ["first", "second"]
        assert content(twin) == expected


@pytest.mark.parametrize("wrap", [one for name, one in WRAPPERS.items() if name != "in the middle"])
def test_what_was_converted_in_a_wrapper_is_found_in_the_model_itself(tmp_path, wrap):
    """Also what modules have learned, and names of those that a filter leaves out or that have fields of their own."""

    def made():
        parts = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 8)
        return nn.Sequential(*parts, nn.Linear(8, 8)).train()

    model = wrap(made())
    prefix = next(name for name, _ in model.named_modules() if name.endswith("0")).removesuffix("0")
    settings = {"quality": "careful", "overrides": {f"{prefix}0": {"bits": 8}}}
    report = convert(model, filter=lambda module, name: name != f"{prefix}6", **settings)
    for _ in range(4):
        model(torch.randn(4, 50, 32))[:, 0].square().sum().backward()
    save_conversion(model, tmp_path)
    again = made()
    assert list(convert_as_saved(again, tmp_path).converted) == ["0", "2", "5"]
    assert (again[0].rmm_config.bits, again[2].rmm_config.bits) == (8, report.context.config.bits)
    saved = sketch_state(again)
    assert saved["learned"].keys() >= {"0", "5"} or wrap is not torch.nn.DataParallel  # compiled code does not learn
    assert saved == sketch_state(model)


def test_layers_that_an_example_has_left_of_a_wrapped_model_are_found_again(tmp_path):
    model = torch.nn.DataParallel(Mlp())
    report = convert(model, example=(torch.randn(40, 12),), ratio=0.25, min_rows=1, target_modules=r".*first")
    assert list(report.converted) == ["module.first"]
    save_conversion(model, tmp_path)
    assert list(convert_as_saved(Mlp(), tmp_path).converted) == ["first"]
