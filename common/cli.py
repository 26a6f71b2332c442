"""Shared by the project's programs: an error that the user can fix is reported in one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from .errors import UsageError, explain


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def guarded(main: Callable[[], int]) -> int:
    """main's exit status, or 2 after an error that the user can fix and 130 after Ctrl-C."""
    try:
        return main()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if (told := explain(error)) is None:
            raise
        print(f"error: {told}", file=sys.stderr)
        return 2
