"""The attention worklog: attention(q, k, v) by any step of the worklog, on a GPU or without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import UsageError

if TYPE_CHECKING:
    from .functional import attention, attention_varlen

__all__ = ["UsageError", "__version__", "attention", "attention_varlen"]
__version__ = "0.1.0"


def __getattr__(name: str):
    """Imports attention, and with it torch, when it is first asked for: reports need neither."""
    if name not in ("attention", "attention_varlen"):
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from . import functional

    globals()[name] = getattr(functional, name)
    return globals()[name]
