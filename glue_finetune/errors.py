"""What can end a run early: a mistake in the input, or a signal."""

from __future__ import annotations


class UserError(Exception):
    """Bad input. The message is one line: the rule, what was received, the remedy."""


class Interrupted(BaseException):
    """A signal, the only argument, came while there was nothing to save yet.

    Not an Exception, for the same reason as KeyboardInterrupt: no ``except Exception`` on the way may swallow it.
    """


def one_line(error: BaseException) -> str:
    """Return the first paragraph of an exception's message, without line breaks."""
    text = str(error).strip() or type(error).__name__
    return " ".join(text.split("\n\n")[0].split())
