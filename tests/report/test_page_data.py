"""The page's data, its statistics and the file it is written into: no browser needed."""

import base64
import hashlib
import json
import re
from html import unescape

import numpy as np
import pytest
from report.pages import (
    STUDENT_TOKENS,
    hostile_page,
    known_page,
    known_passage,
    select_passages,
    spans_of,
)

from vocagnolm.alignment import Alignment
from vocagnolm.report.page_data import (
    Page,
    Passage,
    inert_json,
    render_page,
    to_json,
    write_page,
)
from vocagnolm.report.passage import TOKEN_TEXT_LIMIT, teacher_row, token_row
from vocagnolm.report.selection import KINDS, statistics, token_kinds


def data_of(html: str) -> dict:
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert block is not None
    return json.loads(block.group(1))


def test_a_passage_joins_the_rows_by_their_alignment() -> None:
    passage = known_passage()
    certain = STUDENT_TOKENS.index("certain")
    [teacher] = passage.teachers
    assert (teacher.first[certain], teacher.last[certain]) == (2, 3)
    assert passage.guidance[certain] == 2.5  # the larger of 2.5 and 1.25
    assert passage.excess[certain] == 1.5
    assert passage.excess[0] is None  # the first token has no loss
    assert passage.student.length == [len(token) for token in STUDENT_TOKENS]
    assert passage.student.gap is None  # the row tiles


def test_selection_keeps_the_largest_excess_and_no_token_without_a_loss() -> None:
    [passage], rule = select_passages([known_passage()], keep=0.4)
    # excess of the eight scored tokens: 1.75 0.25 0.25 0.5 1.5 -1 0 1
    assert [STUDENT_TOKENS[i] for i, one in enumerate(passage.weights) if one] == [
        "b",
        "certain",
        "\n",
    ]
    assert rule.threshold == 1.0


def passage_of(nll: list[float], teacher_nll: list[float], covered: list[int]) -> Passage:
    """Letters; a covered letter lies over one teacher token of its own."""
    text = "abcdefgh"[: len(nll)]
    spans = spans_of(list(text))
    teacher = token_row("t", text.encode(), spans, nll=teacher_nll)
    alignment = Alignment(np.array(covered), np.array(covered))
    student = token_row("s", text.encode(), spans, nll=nll)
    return Passage(title=text, student=student, teachers=[teacher_row(teacher, alignment)])


@pytest.mark.parametrize(
    ("strategy", "kept"), [("include", [0, 1, 1, 0]), ("exclude", [0, 1, 0, 0])]
)
def test_unmapped_tokens_follow_the_strategy(strategy: str, kept: list[int]) -> None:
    passage = passage_of([np.nan, 3.0, 9.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0, 1, -1, 3])
    [selected], _ = select_passages([passage], keep=0.5, unmapped=strategy)
    assert selected.weights == kept


def test_unmapped_tokens_compete_with_the_mean_guidance() -> None:
    passage = passage_of([2.0, 5.0, 2.5], [1.0, 1.0, 2.0], [0, -1, 2])
    [selected], _ = select_passages([passage], keep=0.34, unmapped="mean")
    assert selected.weights == [0, 1, 0]


def test_tokens_that_split_a_character_or_are_huge_survive() -> None:
    smile = "🙂".encode()
    row = token_row("s", smile + b"y" * 9_000, np.array([[0, 2], [2, 4], [4, 9004]]))
    assert [one.encode("utf-8", "surrogateescape") for one in row.text[:2]] == [
        smile[:2],
        smile[2:],
    ]
    assert len(row.text[2]) <= TOKEN_TEXT_LIMIT + 1
    assert row.length[2] == 9_000
    page = Page(title="t", passages=[Passage(title="p", student=row)])
    assert json.loads(to_json(page))["passages"][0]["student"]["text"] == row.text


def test_gaps_of_a_lossy_row_are_kept() -> None:
    row = token_row("s", b"a  b", np.array([[0, 1], [3, 4]]))
    assert row.gap == [0, 2]


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="3 nll for 2 tokens"):
        token_row("s", b"ab", spans_of(["a", "b"]), nll=[1, 2, 3])
    with pytest.raises(ValueError, match="byte 2 of a text of 1"):
        token_row("s", b"a", np.array([[0, 2]]))


def test_kinds_read_the_row_as_one_text() -> None:
    tokens = [
        "The",
        " answer",
        " is",
        " ",
        "12",
        ".",
        "5",
        " \\",
        "frac",
        "{",
        "1",
        "}",
        " =",
        "\n",
    ]
    tokens += ["<", "div", ">", " ∑", " élan", ",", "**", "日本"]
    kinds = [KINDS[kind] for kind in token_kinds(tokens)]
    assert kinds == [
        *["words"] * 3,
        "white space",
        *["numbers"] * 3,
        *["LaTeX commands"] * 2,
        "markup",
        "numbers",
        "markup",
        "operators",
        "white space",
        *["markup"] * 3,
        "operators",
        "words",
        "punctuation",
        "markup",
        "words",
    ]


def test_statistics_count_targets_only() -> None:
    passages, _ = select_passages([known_passage()], keep=0.4)
    counted = statistics(passages)
    assert counted is not None
    assert (counted.tokens, counted.kept, counted.unmapped) == (8, 3, 0)
    assert sum(kind.tokens for kind in counted.kinds) == 8
    assert sum(counted.excess.kept) == 3
    assert sum(counted.excess.dropped) == 5
    assert statistics([known_passage()]) is None


def test_the_data_come_back_out_of_the_page() -> None:
    page = known_page()
    assert data_of(render_page(page)) == json.loads(to_json(page))


def test_the_policy_names_exactly_the_script_and_the_style() -> None:
    html = render_page(known_page())
    policy = unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', html).group(1))
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.S).group(1)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert not re.search(r"\b(src|href)=\"(?!#)", html)  # nothing is fetched
    assert "innerHTML" not in html and "eval(" not in html


def test_hostile_text_cannot_leave_the_data_block() -> None:
    html = render_page(hostile_page())
    assert html.count("</script>") == 2  # the data's and the script's own
    assert "window.broken=1</script>" not in html
    assert "<title>&lt;/title&gt;" in html
    assert len(html) < 200_000  # a token of 10 MB is shown in part
    assert data_of(html)["passages"][0]["student"]["length"][9] == 10_000_000


def test_inert_json_is_still_the_same_json() -> None:
    text = json.dumps({"a": "</script>&\u2028\u2029<"}, ensure_ascii=False)
    inert = inert_json(text)
    assert not set(inert) & set("<>&\u2028\u2029")
    assert json.loads(inert) == json.loads(text)


def test_pages_are_reproducible_and_whole(tmp_path) -> None:
    first = write_page(known_page(), tmp_path / "deep" / "a.html")
    second = write_page(known_page(), tmp_path / "b.html")
    assert first.read_bytes() == second.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.html", "deep"]


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_is_readable_on_every_colour_in_both_themes() -> None:
    html = render_page(Page(title="t"))
    pairs = re.findall(r"--([a-z0-9]+): light-dark\((#\w{6}), (#\w{6})\)", html)
    colours = {name: (light, dark) for name, light, dark in pairs}
    grounds = ["paper", "card", "z0", *(f"{side}{step}" for side in "du" for step in range(1, 5))]
    for theme in (0, 1):
        ink = luminance(colours["ink"][theme])
        for ground in grounds:
            bright, dark = sorted((ink, luminance(colours[ground][theme])), reverse=True)
            assert (bright + 0.05) / (dark + 0.05) >= 4.5, (ground, theme)  # WCAG AA
