"""One text under two tokenizers, as a notebook shows it and as a table."""

import re

import made

import vocagnolm
from vocagnolm.alignment import load_tokenizer


def test_a_notebook_shows_the_picture_and_pandas_the_table():
    text = "Probability <b>, Uncertainty\nété"
    sides = [load_tokenizer(made.tokenizer(name)) for name in list(made.EXACT)[:2]]
    pair = vocagnolm.align_text(*sides, text)
    shown = pair._repr_html_()
    assert "<b>" not in shown and "&lt;" in shown, "the text is escaped"
    spans = re.findall(r"<span[^>]*>(.*?)</span>", shown)
    assert len(spans) == len(pair.student_tokens) + len(pair.teacher_tokens)
    assert f"{len(pair.student_tokens)} student tokens over" in shown
    assert "picture ends" not in shown
    assert "picture ends before the last" in vocagnolm.align_text(*sides, text * 99)._repr_html_()

    table = pair.to_pandas()
    assert len(table) == len(pair.student_tokens)
    assert table["id"].tolist() == pair.student_tokens.ids.tolist()
    assert table["last"].tolist() == pair.alignment.last.tolist()
    for row in table.itertuples():
        assert row.text in row.teacher_text or "\ufffd" in row.text + row.teacher_text


def test_an_empty_text_has_a_picture_without_tokens():
    tokenizer = load_tokenizer(made.tokenizer(next(iter(made.EXACT))))
    pair = vocagnolm.align_text(tokenizer, tokenizer, "")
    assert "0 student tokens over 0" in pair._repr_html_()
    assert pair.to_pandas().empty
