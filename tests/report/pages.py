"""Pages with known numbers for the tests."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from vocagnolm.alignment import (
    Aggregation,
    TargetTable,
    TextTokenizer,
    align,
    load_tokenizer,
    token_texts,
)
from vocagnolm.alternatives import Alternatives, AlternativesSpec, pack
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
from vocagnolm.report.passage import Reading, make_passage, teacher_row, token_row
from vocagnolm.report.selection import add_guidance, statistics, weigh_passages

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
    passages: Sequence[Passage],
    aggregation: Aggregation = "max",
    alternatives: AlternativesSpec | None = None,
    **config: Any,
) -> tuple[list[Passage], Selection]:
    from vocagnolm.objective import ObjectiveConfig

    return weigh_passages(
        passages, ObjectiveConfig(**config), aggregation=aggregation, alternatives=alternatives
    )


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
            Run(name="cpt-0", method="cpt", loss=steps, recipe="objective:\n"),
            Run(name="guided-0", method="guided", loss=steps),
        ],
        environment={"python": "3"},
    )


def merging_tokenizer(*merges: str) -> TextTokenizer:
    """A byte-level one with these merges, each of two parts."""
    pairs = [(left, right) for left, right in (merge.split() for merge in merges)]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in pairs)]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return load_tokenizer(tokenizer)


def distilled_page() -> Page:
    """The student reads "a| |cat", the teacher "a| cat", where it expected " dog", " car" and "."
    too."""
    student = merging_tokenizer("c a", "ca t", "d o", "do g")
    teacher = merging_tokenizer("Ġ c", "Ġc a", "Ġca t", "Ġca r", "Ġ d", "Ġd o", "Ġdo g")
    text = b"a cat"
    ours, theirs = student.spans(text.decode()), teacher.spans(text.decode())
    expected = ["Ġcat", "Ġdog", "Ġcar", "."]
    ids = [[0] * 4, [teacher.vocabulary[token] for token in expected]]
    nll = np.array([[np.nan] * 4, [0.5, 1.5, 2.5, 3.0]])
    given = Alternatives(pack(np.array(ids), nll, np.array([[False] * 4, [True] + [False] * 3])))
    passage = make_passage(
        "t",
        text,
        Reading(name="student", spans=ours.spans, ids=ours.ids, nll=np.array([np.nan, 0.25, 2.0])),
        [
            Reading(
                name="teacher",
                spans=theirs.spans,
                nll=np.array([np.nan, 0.5]),
                alternatives=given,
                table=TargetTable(student, token_texts(teacher, []), None),
            )
        ],
    )
    passages, rule = select_passages(
        [passage],
        alternatives=AlternativesSpec(4),
        method="distill",
    )
    run = Run(name="distill-0", method="distill")
    return Page(title="distilled", passages=passages, selection=rule, runs=[run])


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
            Run(name="<i>run</i>", loss=[(1.0, 2.0), (2.0, 1.0)], recipe="</pre><b>x"),
            Run(name="<i>two</i>", loss=[(1.0, 2.0), (2.0, 1.0)]),
        ],
        environment={"<u>": "</script>"},
        notes=["@@data@@ and ${title}"],
    )
