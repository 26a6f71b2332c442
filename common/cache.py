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
        """Adds an entry and returns its value: where threads add the same key, the first one's.

        The oldest entry leaves where there are too many.
        """
        evicted = None  # destroyed after the lock is released: that may run any code
        with self._lock:
            value = self.setdefault(key, value)
            if len(self) > MAX_ENTRIES:
                evicted = self.pop(next(iter(self)))
        del evicted
        return value
