"""Texts that say how to install missing packages."""

INSTALL_EXTRA = "pip install 'rmm_linear[glue]', or pip install -e '.[glue]' in a clone"
INSTALL_PLANNING = "pip install 'rmm_linear[planning]', or pip install -e '.[planning]' in a clone"


def not_installed(module: str, host: str, command: str = INSTALL_EXTRA) -> ImportError:
    """Return the error of a module whose host is not installed."""
    return ImportError(f"{module} needs {host}, which is not installed. Run {command}.")
