"""The diagrams of worklog.md, as SVG: drawn from the index mathematics of fragments.py."""

from __future__ import annotations

from . import (
    ampere,
    backward,
    backward_budget,
    backward_order,
    backward_schedule,
    backward_turns,
    backward_warps,
    blocks,
    cluster_merge,
    even_parts,
    hopper,
    hopper_backward,
    last_block,
    own_keys,
    ragged_map,
    ring,
    softmax,
    split_keys,
)
from .svg import files


def figures() -> dict[str, str]:
    """SVG text by the file name in figures/."""
    modules = (
        softmax,
        blocks,
        ampere,
        hopper,
        backward,
        backward_warps,
        hopper_backward,
        backward_budget,
        backward_schedule,
        backward_turns,
        backward_order,
        split_keys,
        even_parts,
        last_block,
        cluster_merge,
        own_keys,
        ragged_map,
        ring,
    )
    return files({name: one for module in modules for name, one in module.figures().items()})
