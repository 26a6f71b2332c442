class UsageError(ValueError):
    """Something the user can mend. The message is one line: what was given, what is allowed."""
