"""The pipelines' player: the recorded timelines of a block, one or two on a common time axis."""

from __future__ import annotations

from ..pipeline import Pipeline, derive
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
    """Clocks since the window's start; a box as [kind, tile, start, clocks, row and box before]."""
    first, last = pipeline.window
    kinds = list(dict.fromkeys((box.what, box.color) for row in pipeline.rows for box in row.boxes))
    # The page wants each row in the order of time.
    order = [
        sorted(range(len(row.boxes)), key=lambda b, row=row: row.boxes[b].start)
        for row in pipeline.rows
    ]
    places = [{b: place for place, b in enumerate(each)} for each in order]

    def flat(r: int, b: int) -> list[int | None]:
        box = pipeline.rows[r].boxes[b]
        after = (box.after[0], places[box.after[0]][box.after[1]]) if box.after else ()
        kind = kinds.index((box.what, box.color))
        return [kind, box.tile, box.start - first, box.end - box.start, *after]

    return {
        "shown": last - first,
        "period": round(pipeline.period),
        "kinds": [{"what": what, "color": color} for what, color in kinds],
        "rows": [
            {
                "who": row.who,
                "title": row.title,
                "boxes": [flat(r, b) for b in order[r]],
            }
            for r, row in enumerate(pipeline.rows)
        ],
    }
