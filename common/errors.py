"""Errors that the user can fix, each reported in one line."""

from __future__ import annotations

import errno


class UsageError(ValueError):
    """An error the user can fix. The message is one line: what was given, what is allowed."""


class NotEnoughMemoryError(UsageError):
    """The problem does not fit into the device's memory."""


_REMEDIES = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some space within the quota",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EACCES: "change its permissions, or work in a copy of your own",
    errno.EPERM: "change its permissions, or work in a copy of your own",
    errno.EROFS: "work in a copy on a disk that can be written",
    errno.EEXIST: "it is a file where a folder must be: move it away",
    errno.ENOTDIR: "there is a file where a folder must be: move it away",
    errno.EISDIR: "it is a folder where a file must be: move it away",
}


def explain(error: OSError, default: object = "") -> str | None:
    """What the file system refused and what to do; None where the user cannot fix it.

    default is the path to name where the error has none, as when a disk is full.
    """
    if error.errno not in _REMEDIES:
        return None
    path = error.filename or default
    return f"{f'{path}: ' if path else ''}{error.strerror}: {_REMEDIES[error.errno]}"
