"""This checkout's package under its name, so that the examples run without an install."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[1] / "common")]

from attention_worklog.functional import attention as attention
