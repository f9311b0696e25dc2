"""Pages with known numbers for the tests."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vocagnolm.alignment import Aggregation, align
from vocagnolm.report.kept import statistics
from vocagnolm.report.page_data import (
    Measure,
    Page,
    Passage,
    Preflight,
    ResultGroup,
    Results,
    Run,
    Selection,
)
from vocagnolm.report.passage import teacher_row, token_row
from vocagnolm.report.weights import add_guidance, weigh_passages

TEXT = "Probability, Uncertainty.\n"
STUDENT_TOKENS = ["Pro", "b", "ability", ",", " Un", "certain", "ty", ".", "\n"]
TEACHER_TOKENS = ["Probability", ",", " Unc", "ertainty", ".\n"]
STUDENT_NLL = [np.nan, 2.0, 0.5, 1.0, 3.0, 4.0, 0.25, 0.5, 1.5]
TEACHER_NLL = [0.25, 0.75, 2.5, 1.25, 0.5]


def spans_of(tokens: list[str]) -> np.ndarray:
    lengths = np.array([len(token.encode("utf-8", "surrogateescape")) for token in tokens])
    ends = np.cumsum(lengths)
    return np.stack([ends - lengths, ends], axis=1)


def known_passage() -> Passage:
    """ "certain" lies over " Unc" (2.5) and "ertainty" (1.25): guidance 2.5, excess 1.5."""
    ours, theirs = spans_of(STUDENT_TOKENS), spans_of(TEACHER_TOKENS)
    teacher = token_row("teacher", TEXT.encode(), theirs, range(5), TEACHER_NLL)
    return add_guidance(
        Passage(
            title="a known text",
            student=token_row("student", TEXT.encode(), ours, range(10, 19), STUDENT_NLL),
            teachers=[teacher_row(teacher, align(ours, theirs))],
        )
    )


def select_passages(
    passages: Sequence[Passage], aggregation: Aggregation = "max", **config: Any
) -> tuple[list[Passage], Selection]:
    from vocagnolm.objective import ObjectiveConfig

    return weigh_passages(passages, ObjectiveConfig(**config), aggregation=aggregation)


def known_page() -> Page:
    """Every part of a page, small."""
    passages, rule = select_passages([known_passage()], keep=0.4)
    steps = [(float(step), 4.0 / step) for step in range(1, 30)]
    return Page(
        title="A known page",
        subtitle="made for a test",
        passages=passages,
        selection=rule,
        statistics=statistics(passages),
        preflight=[Preflight(student="student", teacher="teacher", overlap_raw=0.0632, ios=1.0)],
        results=Results(
            measures=[Measure(name="bits per byte", better="lower"), Measure(name="answers")],
            groups=[
                ResultGroup(name="cpt", values=[[1.2, 1.3], [0.5, 0.4]]),
                ResultGroup(name="guided", values=[[1.1, 1.0], [0.6, 0.7]]),
            ],
            verdict="Guidance helped in this run.",
        ),
        runs=[
            Run(name="cpt-0", method="cpt", curves={"loss": steps}, recipe="objective:\n"),
            Run(name="guided-0", method="guided", curves={"loss": steps, "nll_all": steps}),
        ],
        environment={"python": "3"},
    )


def hostile_page() -> Page:
    """Text that would break out, run, reorder its neighbours or choke a careless page."""
    tokens = [
        "</script><script>window.broken=1</script>",
        "<img src=x onerror='window.broken=2'>",
        "<!--<script>",
        "\u202eevil\u2066",
        "\u2028\u2029",
        "\x00\x1b[31m\x07",
        "\udcf0\udc9f",  # bytes of half a character
        "&lt;b&gt;&amp;",
        "javascript:alert(1)",
        "x" * 10_000_000,
        "🙂",
        "\ud83d\ude42".encode("utf-16", "surrogatepass").decode("utf-16"),
    ]
    text = "".join(tokens).encode("utf-8", "surrogateescape")
    row = token_row("</title><script>window.broken=3</script>", text, spans_of(tokens))
    teacher = teacher_row(row, align(spans_of(tokens), spans_of(tokens)))
    passage = Passage(title="<b>title</b>", student=row, teachers=[teacher])
    return Page(
        title="</title><script>window.broken=4</script>",
        subtitle="<svg onload='window.broken=5'>",
        passages=[passage],
        runs=[
            Run(name="<i>run</i>", curves={"loss": [(1.0, 2.0), (2.0, 1.0)]}, recipe="</pre><b>x")
        ],
        environment={"<u>": "</script>"},
        notes=["@@data@@ and ${title}"],
    )
