"""Texts that say how to install missing packages."""

INSTALL_EXTRA = "pip install 'rmm_linear[glue]', or pip install -e '.[glue]' in a clone"
INSTALL_PLANNING = "pip install 'rmm_linear[planning]', or pip install -e '.[planning]' in a clone"
