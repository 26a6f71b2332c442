"""The page from this repository's records."""

from __future__ import annotations

from common.paths import ROOT
from common.records import HEADLINE_GPU, PROFILES_DIR
from common.report.diagrams import figures
from common.report.page import render_page
from common.report.record_set import RecordSet, load_record_set


def render(*others: RecordSet) -> str:
    """With the records of other GPUs, if there are to be any."""
    headline = load_record_set(PROFILES_DIR / HEADLINE_GPU, ROOT)
    worklog = (ROOT / "worklog.md").read_text(encoding="utf-8")
    return render_page((headline, *others), worklog, figures())
