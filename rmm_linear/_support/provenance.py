"""Record where a result comes from: versions of packages, the commit, the machine."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path


def versions(*packages: str) -> dict[str, str]:
    """Return "python" and the packages that are installed, each with its version."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit(file: str | Path, *, ignored: Iterable[str] = ()) -> str | None:
    """Return the git commit of a tracked source file: 40 digits, and "-dirty" where tracked files differ from it."""
    file, program = Path(file), shutil.which("git")
    if program is None:
        return None

    def git(*command: str) -> str:
        return subprocess.run(
            (program, *command), cwd=file.parent, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)
        excluded = [f":(top,exclude){path}" for path in ignored]
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", *excluded)
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def machine() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
