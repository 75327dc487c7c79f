"""Every kind of file that is read: whatever is in it, reading ends soon, in a short error that names it or in what can
be used; nothing is executed, nothing is written elsewhere, and the model stays as it was."""

import copy
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Mlp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from state_helpers import content, learned
from torch import nn

from glue_finetune.checkpoints import SETTINGS_FILE, check_files, mark_complete, read_settings
from glue_finetune.errors import UserError
from rmm_linear import RMMConfig, read_sketch_state, save_sketch_state
from rmm_linear._support.json_files import MOST_BYTES
from rmm_linear._support.patterns import check_pattern
from rmm_linear.conversion.exact import converted_modules
from rmm_linear.integrations.pretrained import PLAN_FILE, convert_as_saved, save_conversion
from rmm_linear.planning import BlockPlan, PlannedBlock, StoreError, load_plan, open_store, plan_graph
from rmm_linear.variance.survey.batches import read_batches

SECONDS = 5.0  # of the CPU; the slowest file that can be read takes a third of it
LONGEST = 3000  # characters of an error, the path included


def few_or_many(few: int, many: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.thorough)])


def network() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)))


def blocks(**fields: Any) -> BlockPlan:
    return BlockPlan(
        [PlannedBlock("0", "recompute"), PlannedBlock("1", "keep"), PlannedBlock("2", "offload")], **fields
    )


def restore(folder: Path) -> None:
    model = Mlp()
    try:
        convert_as_saved(model, folder)
    except (ValueError, FileNotFoundError):
        assert not converted_modules(model)
        raise


def restore_state(folder: Path) -> None:
    model = learned()
    before = content(model)
    try:
        read_sketch_state(model, folder / "state.json")
    except ValueError:
        assert content(model) == before
        raise


def apply_plan(folder: Path) -> None:
    model = network()
    plan = load_plan(folder / PLAN_FILE, folder=folder / "offload")
    try:
        plan.apply(model)
    except ValueError as error:  # of another model: the plan is no file any more
        raise ValueError(f"{folder}: {error}") from error
    assert getattr(plan, "folder", None) in (None, str(folder / "offload"))


def checkpoint(folder: Path) -> None:
    (folder / "weights").write_bytes(b"numbers")
    mark_complete(folder, {"seed": 1})


def restore_store(folder: Path) -> list[torch.Tensor]:
    store: Any = open_store(folder / "store")
    try:
        shutil.copy(folder / "state.safetensors", store.path("sweep-1"))
        return store.get("sweep-1")
    finally:
        store.close()


def store(folder: Path) -> None:
    one: Any = open_store(folder / "store")
    one.put("sweep-1", [torch.ones(3, 4), torch.tensor(7)])
    shutil.copy(one.path("sweep-1"), folder / "state.safetensors")
    one.close()


@dataclass(frozen=True)
class Kind:
    """A kind of file: what writes one, its name, what reads it, and the error of what is wrong."""

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    name: str
    error: type[Exception] = ValueError


KINDS = {
    "settings": Kind(
        lambda folder: RMMConfig(overrides={"first": {"bits": 4}}, exclude_modules="head.*").save(folder / "c.json"),
        lambda folder: RMMConfig.load(folder / "c.json"),
        "c.json",
    ),
    "conversion": Kind(lambda folder: save_conversion(learned(), folder), restore, "rmm_config.json"),
    "tensors": Kind(lambda folder: save_conversion(learned(), folder), restore, "rmm_config.json.*.safetensors"),
    "state": Kind(lambda folder: save_sketch_state(learned(), folder / "state.json"), restore_state, "state.json"),
    "plan": Kind(lambda folder: blocks(folder="/elsewhere").save(folder / PLAN_FILE), apply_plan, PLAN_FILE),
    "graph plan": Kind(
        lambda folder: plan_graph(network(), torch.ones(4, 8), memory="least", method="chen").save(folder / PLAN_FILE),
        lambda folder: load_plan(folder / PLAN_FILE),
        PLAN_FILE,
    ),
    "store": Kind(store, restore_store, "state.safetensors", StoreError),
    "batches": Kind(
        lambda folder: torch.save({"x": torch.ones(2)}, folder / "batch.pt"),
        lambda folder: read_batches(folder / "batch.pt"),
        "batch.pt",
    ),
    "checkpoint": Kind(
        checkpoint, lambda folder: (read_settings(folder), check_files(folder)), SETTINGS_FILE, UserError
    ),
}

watched: dict[str, Any] = {"inside": None, "seen": []}
EXECUTES = ("exec", "os.exec", "os.system", "subprocess.Popen", "os.posix_spawn", "pickle.find_class", "socket.connect")
CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate")


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """Of what Python itself reports, note what executes, and what writes outside of a folder."""
    inside = watched["inside"]
    if inside is None:
        return
    if event in EXECUTES and not (event == "pickle.find_class" and args[0].split(".")[0] in ("torch", "collections")):
        watched["seen"].append((event, str(args)[:200]))
    is_write = event == "open" and isinstance(args[0], str | bytes) and (set(str(args[1])) & set("wax+") or args[2] & 3)
    if is_write or event in CHANGES:
        path = os.path.abspath(os.fsdecode(args[0]))
        path = path if event in CHANGES else os.path.realpath(path)  # a link itself is removed, not what it leads to
        if not os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)).startswith(inside):
            watched["seen"].append((event, str(args)[:200]))


sys.addaudithook(_audit)


@contextmanager
def watching(folder: Path):
    watched.update(inside=os.path.realpath(folder), seen=[])
    try:
        yield
    finally:
        watched["inside"] = None
    assert watched["seen"] == []


@functools.cache
def whole(name: str) -> dict[str, bytes]:
    """A kind's files as they are written; they can be read, which imports all that reading needs."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        KINDS[name].write(Path(folder))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
        KINDS[name].read(Path(folder))
    return files


def check(name: str, folder: Path, change: Callable[[Path], Any]) -> bool:
    """Change a kind's file and read it; say whether it could still be read."""
    kind = KINDS[name]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file, own in whole(name).items():
        (folder / file).write_bytes(own)
    (path,) = folder.glob(kind.name)
    change(path)
    began, said = time.process_time(), None
    try:
        with watching(folder):
            kind.read(folder)
    except kind.error as error:
        said = str(error)
    assert time.process_time() - began < SECONDS
    assert said is None or (str(folder) in said and len(said) < LONGEST)
    return said is None


PATHS = ["/etc/passwd", "../../x", "/dev/zero", "a\0b", "~/x", "__class__", "0.weight", ""]
PATTERNS = ["(a+)+$", "(", "(?P<a>.)(?P=a)", "a" * 3000, "[[a]]", ".*.*.*.*.*.*b"]
NUMBERS = [0, -1, 1, 2**31, 2**63, 10**30, -(2**70), 1.5, float("nan"), float("inf"), 1e308, True, False, None]
ATOMS = st.sampled_from([*PATHS, *PATTERNS, *NUMBERS, "first", "keep", "auto", "x" * 20_000])
NEW = st.recursive(ATOMS, lambda one: st.lists(one, max_size=3) | st.dictionaries(ATOMS.map(str), one, max_size=3))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in a JSON value."""
    found = [path]
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += places(one, (*path, key))
    return found


@st.composite
def changed_json(draw: st.DrawFn, value: Any) -> str:
    """A JSON text with some values replaced, removed or added."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(value)))
        if not path:
            value = draw(NEW) if draw(st.integers(0, 9)) == 0 else value
            continue
        parent = functools.reduce(lambda one, key: one[key], path[:-1], value)
        match draw(st.sampled_from(["replace", "replace", "remove", "add"])):
            case "remove":
                del parent[path[-1]]
            case "add" if isinstance(parent, dict):
                parent[str(draw(ATOMS))] = draw(NEW)
            case "add":
                parent.append(draw(NEW))
            case _:
                parent[path[-1]] = draw(NEW)
    return json.dumps(value)


@st.composite
def changed_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes with some replaced, cut out or put in."""
    result = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(result)))
        result[begin : begin + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
    return bytes(result)


def fuzz(name: str, folder: Path, examples: int) -> None:
    own = next(text for file, text in whole(name).items() if Path(file).match(KINDS[name].name))
    strategy = changed_bytes(own)
    if KINDS[name].name.endswith(".json"):
        strategy = changed_json(json.loads(own)).map(str.encode) | strategy

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(strategy)
    def run(text: bytes) -> None:
        check(name, folder, lambda path: path.write_bytes(text))

    run()


@few_or_many(10, 2000)
@pytest.mark.filterwarnings("ignore:Possible nested set|Ignoring|Generating overly large repr")
@pytest.mark.parametrize("name", KINDS)
def test_a_file_changed_at_random_is_read_or_named(name, examples, tmp_path):
    fuzz(name, tmp_path / "it", examples)


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def twice(path: Path) -> None:
    text = path.read_text()
    key = next(iter(json.loads(text)))
    path.write_text(f'{{"{key}": 1, {text.lstrip()[1:]}')


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a key twice": twice,
    "nested": lambda path: path.write_text('{"format":' * 90_000),
    "nested less": lambda path: path.write_text("[" * 900 + "]" * 900),
    "huge": lambda path: os.truncate(path, MOST_BYTES + 1),
    "many keys": lambda path: path.write_text(json.dumps(dict.fromkeys(map(str, range(30_000)), 0))),
    "long key": lambda path: path.write_text(json.dumps({"x" * 3_000_000: 0})),
    "many digits": lambda path: path.write_text('{"layers": ' + "9" * 100_000 + "}"),
    "empty": lambda path: path.write_bytes(b""),
    "no UTF-8": lambda path: path.write_bytes(b'{"format": "\xff"}'),
    "a pipe": piped,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name].name.endswith(".json")])
def test_what_no_program_writes_is_refused(name, damage, tmp_path):
    assert not check(name, tmp_path / "it", DAMAGES[damage])


def test_a_pickle_that_executes_is_not_read(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'done'}",)

    assert not check("batches", tmp_path / "it", lambda path: torch.save({"x": Evil()}, path))
    assert not (tmp_path / "done").exists()


def test_a_checkpoint_that_names_other_folders_is_refused(tmp_path):
    for name in ("/etc/passwd", "../../x", "/dev/zero"):
        text = json.dumps({"settings": {}, "sha256": {name: "0" * 64}})
        assert not check("checkpoint", tmp_path / "it", lambda path, text=text: path.write_text(text))


def test_links_in_a_folder_do_not_lead_what_is_written_out_of_it(tmp_path):
    (tmp_path / "victim").write_text("mine")
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in ("rmm_config.json", f".rmm_config.{os.getpid()}.json", "rmm_config.json.safetensors"):
        (folder / name).symlink_to(tmp_path / "victim")
    (folder / f".rmm_config.json.{os.getpid()}.safetensors").symlink_to(tmp_path / "victim")
    with watching(folder):
        save_conversion(learned(), folder)
    assert (tmp_path / "victim").read_text() == "mine"
    restore(folder)


def test_the_watch_sees_what_is_executed_and_written_elsewhere(tmp_path):
    for action in (lambda: (tmp_path / "x").write_text(""), lambda: os.system("true"), lambda: exec("1")):
        with pytest.raises(AssertionError), watching(tmp_path / "it"):
            action()


def forged(folder: Path, tensors: dict[str, torch.Tensor] | bytes) -> None:
    """Replace the tensors of a conversion, with the digest that they have."""
    (path,) = folder.glob("*.safetensors")
    path.unlink()
    data = tensors if isinstance(tensors, bytes) else save(tensors)
    found = hashlib.sha256(data).hexdigest()
    (folder / f"rmm_config.json.{found[:16]}.safetensors").write_bytes(data)
    settings = json.loads((folder / "rmm_config.json").read_text())
    settings["sketch_state"]["tensors_sha256"] = found
    (folder / "rmm_config.json").write_text(json.dumps(settings))


VALUES = [0.0, -1.0, float("nan"), float("inf"), 1e38]
SHAPES = st.lists(st.sampled_from([0, 1, 2, 10, 257]), max_size=3)
TENSORS = st.builds(
    lambda shape, dtype, value: torch.full(shape, value if dtype.is_floating_point else 1, dtype=dtype),
    SHAPES,
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]),
    st.sampled_from(VALUES),
)


def forge(folder: Path, examples: int) -> None:
    """Tensors of other types, sizes, names and values, and bytes that are none."""
    (own,) = [text for name, text in whole("tensors").items() if name.endswith(".safetensors")]
    names = st.sampled_from([*load(own), "first:cache", "other:unit", ":", "first:directions"])
    changed = st.dictionaries(names, TENSORS, max_size=2).map(lambda some: {**load(own), **some})

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(changed | changed_bytes(own) | st.dictionaries(names, TENSORS))
    def run(tensors: Any) -> None:
        check("tensors", folder, lambda path: forged(folder, tensors))

    run()


@few_or_many(10, 2000)
def test_tensors_of_others_with_their_digest_are_read_or_named(examples, tmp_path):
    forge(tmp_path / "it", examples)


PIECES = ["a", ".", "[ab]", "(a|aa)", "(a|b)?", "(.*)", "(?=.*a)", "(?:ab)", "^", "$"]
REPEATS = ["", "", "*", "+", "?", "*?", "{2,}", "{,3}", "{1,40}"]
ACCEPTED = [
    r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$",
    r"^(?!.*lm_head).*$",
    r"(.*\.)?layers\.\d+\.(attn|mlp)\..*",
    r".*\.layers\.\d{1,3}\..*\.(q|k|v|o)_proj.*",
    r"model\.layers\.(1?\d|2[0-3])\.self_attn\.[qkv]_proj",
]
REFUSED = [
    "(a+)+$",
    "(a|a)*b",
    "a?" * 30 + "a" * 30,
    "a*" * 5 + "b",
    "(a|aa)" * 30,
    r"(\d+\.)*q",
    r"(.*)\1",
    "(){1000000000}",
]


@pytest.mark.parametrize("pattern", ACCEPTED)
def test_a_pattern_that_users_write_is_accepted(pattern):
    assert RMMConfig(target_modules=pattern).target_modules == pattern


@pytest.mark.parametrize("pattern", REFUSED)
def test_a_pattern_that_can_take_forever_is_refused(pattern):
    message = re.escape(f"got {pattern!r}. Repeat single characters only")
    for fields in ({"target_modules": pattern}, {"exclude_modules": pattern}, {"overrides": {pattern: {"bits": 8}}}):
        with pytest.raises(ValueError, match=message):
            RMMConfig(**fields)


def test_patterns_take_a_bounded_time_together():
    slow = {f".*a.*a.*a.*b{i}": {"bits": 8} for i in range(1000)}
    for count in (1000, 4):
        fields = {"overrides": dict(list(slow.items())[:count])}
        with pytest.raises(ValueError, match=f"bounded time together, got {count + 1} patterns of which '.*a.*a"):
            RMMConfig(**fields)
    with pytest.raises(ValueError, match=r"exclude_modules must match every name in bounded time, got '\^\(a\+\)\+"):
        RMMConfig(exclude_modules=["^(a+)+"])
    with pytest.raises(ValueError, match="bounded time together, got 4 patterns"):
        RMMConfig(target_modules=".*a.*b.*c.*d", exclude_modules=[f"^.*a.*b.*c.*{i}" for i in range(3)])
    assert len(RMMConfig(overrides={f"layers.{i}": {"bits": 8} for i in range(1000)}).overrides) == 1000
    assert RMMConfig(overrides={pattern: {"bits": 8} for pattern in ACCEPTED}).overrides


@few_or_many(100, 5_000)
@pytest.mark.filterwarnings("ignore:Possible nested set")
def test_an_accepted_pattern_takes_a_bounded_time(examples):
    @settings(max_examples=examples, deadline=None, database=None)
    @given(st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from(REPEATS)).map("".join), max_size=8).map("".join))
    def run(pattern: str) -> None:
        try:
            check_pattern("target_modules", pattern)
        except ValueError:
            return
        for name in ("a" * 63 + "!", "ab" * 31 + "!!", "a" * 64):
            began = time.process_time()
            re.fullmatch(pattern, name)
            assert time.process_time() - began < 1  # twenty times what the count of ways allows

    run()
