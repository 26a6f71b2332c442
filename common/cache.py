"""A bounded cache."""

from __future__ import annotations

import threading

MAX_ENTRIES = 4096  # more than a model has different calls of attention


class Cache(dict):
    """Keeps the MAX_ENTRIES entries that were added last. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def add(self, key, value):
        """Adds an entry and returns its value; if threads add the same key, the first one's.

        Evicts the oldest entry where there are too many.
        """
        evicted = None  # destroyed after the lock is released: that may run any code
        with self._lock:
            value = self.setdefault(key, value)
            if len(self) > MAX_ENTRIES:
                evicted = self.pop(next(iter(self)))
        del evicted
        return value
