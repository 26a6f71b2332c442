class UsageError(ValueError):
    """Something the user can mend. The message is one line: what was given, what is allowed."""


class NotEnoughMemoryError(UsageError):
    """The problem does not fit into the device's memory."""
