"""A bounded cache."""

from __future__ import annotations

import threading
from collections import OrderedDict

MAX_ENTRIES = 1024  # more than a model has different calls of attention


class Cache(OrderedDict):
    """Keeps the MAX_ENTRIES entries that were added last. Thread-safe.

    A dict would look for its oldest entry among the places of all that were evicted before it.
    """

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
                evicted = self.popitem(last=False)
        del evicted
        return value
