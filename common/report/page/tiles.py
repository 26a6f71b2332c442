"""The tile walk: which SM computes which tile of S, and when, forward and backward."""

from __future__ import annotations

from ..diagrams.blocks import MAX_BLOCKS, MIN_SAVED_TILES
from .section import Section, read_markup


def section() -> Section:
    data = {"maxBlocks": MAX_BLOCKS, "minSavedTiles": MIN_SAVED_TILES}
    return Section("tiles", "tiles", "The walk over the tiles", read_markup("tiles"), data)
