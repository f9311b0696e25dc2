"""Pages from finished runs, or from a pair and a text: one self-contained HTML file.

`page_data` holds what a page shows, as plain data, and writes it into one file. `passage`,
`selection`, `runs` and `view` make that data.
"""

from vocagnolm.report.page_data import (
    Measure,
    Page,
    Passage,
    Preflight,
    ResultGroup,
    Results,
    Run,
    Selection,
    Statistics,
    TeacherRow,
    TokenRow,
    render_page,
    write_page,
)
from vocagnolm.report.runs import read_run, report_page
from vocagnolm.report.view import Side, view_page

__all__ = [
    "Measure",
    "Page",
    "Passage",
    "Preflight",
    "ResultGroup",
    "Results",
    "Run",
    "Selection",
    "Side",
    "Statistics",
    "TeacherRow",
    "TokenRow",
    "read_run",
    "render_page",
    "report_page",
    "view_page",
    "write_page",
]
