"""The benchmark of targets counts what a student would write, alternative by alternative."""

import json
import lzma

import made
import numpy as np
import pytest
import target_tokens
from target_tokens import KEPT, KINDS, Measured, Pair
from tokenizers import Tokenizer, models, pre_tokenizers

from vocagnolm.alignment import load_tokenizer, token_texts
from vocagnolm.alternatives import NOTHING, pack


def words(*merges):
    """A byte-level tokenizer with these merges, which reads words as GPT-2 does."""
    pairs = [tuple(merge.split("+")) for merge in merges]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in pairs)]
    inner = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, pairs))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return load_tokenizer(inner)


@pytest.fixture
def pair():
    student = words("Ċ+Ċ", "b+c", "d+e", "e+f")
    teacher = words("Ċ+Ċ", "Ġ+a")
    return Pair(student, teacher, token_texts(teacher, []))


def record(pair, text, drawn, follows):
    """A place behind the text: alternatives, how often each was drawn, and what follows it."""
    n = pair.teacher.vocabulary
    ids = [n[alternative] for alternative, _, _ in drawn]
    packed = np.full(target_tokens.COUNT, NOTHING, np.uint32)
    packed[: len(ids)] = pack(np.array(ids), np.full(len(ids), 2.0), np.zeros(len(ids), bool))
    continued = [
        [column, times, pair.teacher.spans(more).ids.tolist()]
        for column, (_, times, more) in enumerate(drawn)
    ]
    place = len(pair.teacher.spans(text))
    return {"source": "s", "text": text + follows, "places": [[place, packed.tolist(), continued]]}


def test_kinds_under_both_rules(pair):
    drawn = [
        ("ĊĊ", 4, "a"),  # written as two line ends before a letter
        ("b", 3, "cx"),  # `bc`
        ("f", 2, "g"),  # `ef` with the `e` before it: no boundary
        ("x", 1, "y"),
    ]
    records = [record(pair, "a e", drawn, "z")] * 2
    found = Measured(pair, records)
    alone, written = found.mass.sum((0, 2))
    by_kind = dict(zip(KINDS, alone, strict=True))
    expected = {"right": 2, "no boundary": 4, "longer": 6, "shorter": 8, "other": 0}
    assert by_kind == pytest.approx(expected)
    expected |= {"right": 10, "shorter": 0}
    assert dict(zip(KINDS, written, strict=True)) == pytest.approx(expected)
    assert found.drawn.sum() == 20 and found.targets.sum(0).tolist() == [20, 20]
    *rows, change = found.rows("student")
    assert [(row["wrong, %"], row["±"]) for row in rows] == [(90.0, 0.0), (50.0, 0.0)]
    assert [row["right, %"] for row in rows] == [10.0, 50.0]
    assert (change["wrong, %"], change["±"], change["right, %"]) == (-40.0, 0.0, 40.0)


def test_the_kept_set_is_whole():
    with lzma.open(KEPT, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    drawn = [one for record in records for *_, these in record["places"] for one in these]
    assert sum(times for _, times, _ in drawn) >= 4000
    assert all(0 <= column < target_tokens.COUNT for column, *_ in drawn)
    assert {"written", "nlab"} < {record["source"] for record in records}
    assert all(len(row) == target_tokens.COUNT for r in records for _, row, _ in r["places"])
    assert KEPT.stat().st_size < 1.5e6


def test_the_measure_needs_tokenizers_alone(capsys, monkeypatch, tmp_path):
    """From the command's end to end, with a set of one document."""
    for name in ("byte-level", "byte-level large"):
        made.save(name, tmp_path / name)
    teacher = load_tokenizer(tmp_path / "byte-level large")
    pair = Pair(load_tokenizer(tmp_path / "byte-level"), teacher, token_texts(teacher, []))
    token = teacher.token(int(teacher.spans("so the answer").ids[-1]))
    row = record(pair, "so", [(token, 1, " is")], " it")
    with lzma.open(tmp_path / "set.xz", "wt") as file:
        file.write(json.dumps(row) + "\n")
    call = ["--teacher", str(tmp_path / "byte-level large"), "--kept", str(tmp_path / "set.xz")]
    call += ["--student", str(tmp_path / "byte-level"), "--by-source"]
    monkeypatch.setattr("sys.argv", ["target_tokens.py", *call])
    target_tokens.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 3 + 3 and lines[2].startswith("| byte-level | alone | ")
