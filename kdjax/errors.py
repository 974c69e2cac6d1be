"""The one exception type that carries a message meant for the user."""


class KdjaxError(ValueError):
    """Bad input. The message is one line: it names the offending value and the remedy."""
