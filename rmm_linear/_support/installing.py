"""How to install what is missing: the text of every error that says so."""

INSTALL_EXTRA = "pip install 'rmm_linear[glue]', or pip install -e '.[glue]' in a clone"
INSTALL_PLANNING = "pip install 'rmm_linear[planning]', or pip install -e '.[planning]' in a clone"
