"""Texts that say how to install missing packages."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

INSTALL_EXTRA = "pip install 'rmm_linear[glue]', or pip install -e '.[glue]' in a clone"
INSTALL_PLANNING = "pip install 'rmm_linear[planning]', or pip install -e '.[planning]' in a clone"
# The oldest version that is supported, or the one that was run, as these have no stable names.
_NEEDED = {"transformers": "5.0 or newer", "peft": "0.20 or newer"}
_RUN = {"axolotl": "0.19.0", "torchao": "0.18.0", "torchtitan": "0.3.0"}


def not_usable(module: str, host: str, error: ImportError) -> ImportError:
    """Return the error of a module that cannot import its host: it is not installed, or its import fails."""
    command = INSTALL_EXTRA if host == "transformers" else f"pip install {host}"
    if find_spec(host) is None:
        return ImportError(f"{module} needs {host}, which is not installed. Run {command}.")
    try:
        got = version(host)
    except PackageNotFoundError:
        got = "one of unknown version"
    needs = f"{host} {_NEEDED[host]}" if host in _NEEDED else f"{host} as in version {_RUN[host]}, which was run"
    return ImportError(
        f"{module} needs {needs}, got {got}, whose import fails: {str(error).rstrip('.')}. "
        "Install such a version, or what the error names."
    )
