"""The attention maps, and what each head's outputs err over the positions."""

from __future__ import annotations

from ...text import label
from ..record_set import RecordSet
from .section import Section, read_markup


def section(record_set: RecordSet) -> Section:
    pictures = record_set.pictures
    data = pictures and {
        "device": pictures.record["device"],
        "steps": [label(name, stale=pictures.stale) for name in pictures.record["sources"]],
        "dtype": pictures.record["dtype"],
        "cells": pictures.record["cells"],
        "heads": pictures.record["heads"],
    }
    return Section("pictures", "pictures", "What the heads look at", read_markup("pictures"), data)
