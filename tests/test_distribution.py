"""What is uploaded: a source distribution that builds a wheel with the library, the C code and the command."""

import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.stack


@pytest.mark.skipif(shutil.which("git") is None, reason="the tracked files are asked of git")
def test_the_source_distribution_builds_a_wheel_that_an_index_takes(tmp_path):
    source, built = tmp_path / "source", tmp_path / "dist"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(lambda name: (ROOT / name).is_file(), tracked.splitlines()):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    python = [sys.executable, "-m"]
    # Without one of the two, build makes the wheel from the source distribution.
    subprocess.run([*python, "build", "--no-isolation", "--outdir", built, source], check=True, capture_output=True)
    files = sorted(built.iterdir())
    assert [path.suffix for path in files] == [".whl", ".gz"]
    subprocess.run([*python, "twine", "check", "--strict", *files], check=True, capture_output=True)
    with zipfile.ZipFile(files[0]) as wheel:
        names = wheel.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        headers = message_from_string(wheel.read(metadata).decode())
        (entries,) = [name for name in names if name.endswith(".dist-info/entry_points.txt")]
        assert "rmm-linear = rmm_linear.command.main:main" in wheel.read(entries).decode()
    tree = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rmm_linear").rglob("*.py")}
    assert tree <= set(names)
    assert any(name.startswith("rmm_linear/kernels/") for name in names)
    assert "rmm_linear/py.typed" in names
    assert headers["Author"] == "The rmm_linear developers"
    assert "Typing :: Typed" in headers.get_all("Classifier")
    assert headers.get_all("Requires-Dist")[0].startswith("torch>=")
