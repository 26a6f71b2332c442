"""A cache that cannot grow without end."""

from __future__ import annotations

import threading

MAX_ENTRIES = 4096  # more than a model has calls of attention


class Cache(dict):
    """The MAX_ENTRIES entries that were added last. Threads may share one."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def add(self, key, value):
        """Adds an entry, the oldest leaves where there are too many; returns the value."""
        with self._lock:
            self[key] = value
            if len(self) > MAX_ENTRIES:
                del self[next(iter(self))]
        return value
