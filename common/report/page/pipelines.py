"""The pipelines' player: the recorded timelines of a block, one or two on a common time axis."""

from __future__ import annotations

from ..pipeline import ORDER, START, Pipeline, Row, derive
from ..record_set import RecordSet
from .section import Section, read_markup


def section(record_set: RecordSet) -> Section:
    timelines = record_set.timelines
    data = [
        {
            "step": name,
            "label": timelines.label(name),
            "device": record["device"],
            **_compact(derive(record)),
        }
        for name, record in timelines.records.items()
    ]
    return Section("pipelines", "pipelines", "Pipelines", read_markup("pipelines"), data)


def _compact(pipeline: Pipeline) -> dict:
    """Clocks since the window's start; names, of which there are few, by their numbers.

    Boxes are [kind, tile, clocks since the row's box before, clocks, clocks queued], needs [kind
    that waits, why, row, kind, tiles back, whether its start is enough].
    """
    first, last = pipeline.window
    kinds = list(dict.fromkeys((box.what, box.color) for row in pipeline.rows for box in row.boxes))
    whats = [what for what, _ in kinds]
    whys = list(
        dict.fromkeys(
            need.why for row in pipeline.rows for needs in row.needs.values() for need in needs
        )
    )

    def boxes(row: Row) -> list[list[int | None]]:
        """In the order of time."""
        flat, before = [], first
        for box in sorted(row.boxes, key=lambda box: box.start):
            kind = kinds.index((box.what, box.color))
            queued = [box.queued] if box.queued else []
            flat.append([kind, box.tile, box.start - before, box.end - box.start, *queued])
            before = box.start
        return flat

    def needs(row: Row) -> list[list[int]]:
        return [
            [
                *(whats.index(what), whys.index(need.why), need.row),
                *(whats.index(need.what), need.back, int(need.event == START)),
            ]
            for what, needs in row.needs.items()
            for need in needs
        ]

    return {
        "shown": last - first,
        "period": round(pipeline.period),
        "tiles": pipeline.tiles,
        "firstTile": pipeline.first_tile,
        "kinds": [{"what": what, "color": color} for what, color in kinds],
        "whys": whys,
        "order": ORDER,
        "rows": [
            {
                "who": row.who,
                "title": row.title,
                "inOrder": row.in_order,
                "boxes": boxes(row),
                "needs": needs(row),
            }
            for row in pipeline.rows
        ],
    }
