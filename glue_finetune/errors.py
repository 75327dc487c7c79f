"""What can end a run early: a mistake in the input, or a signal."""

from __future__ import annotations


class UserError(Exception):
    """Bad input. The message is one line: the rule, what was received, the remedy."""


class Interrupted(BaseException):
    """A signal came while there was nothing to save yet.

    Not an Exception, for the same reason as KeyboardInterrupt: no ``except Exception`` on the way may swallow it.

    Attributes:
        signum: Number of the signal; the process exits with 128 + signum.
    """

    def __init__(self, signum: int) -> None:
        """Remember which signal it was.

        Args:
            signum: Number of the signal.
        """
        super().__init__(signum)
        self.signum = signum


def one_line(error: BaseException) -> str:
    """Squeeze an exception's message into one line.

    Args:
        error: Any exception.

    Returns:
        The first paragraph of its message, without line breaks.
    """
    text = str(error).strip() or type(error).__name__
    return " ".join(text.split("\n\n")[0].split())
