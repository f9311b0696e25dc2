"""A long document is packed in slices: with the same result as at once, in little memory."""

import random
import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import made
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_kit import documents, recipe_dict, save_tokenizer, write_corpus, write_store

from vocagnolm.alignment import load_tokenizer, spans
from vocagnolm.data import packing
from vocagnolm.data import prepare as module
from vocagnolm.data.corpus import Document
from vocagnolm.data.guidance import GuidancePlan
from vocagnolm.data.identity import block_settings, recipe_corpus, student_tokenizer
from vocagnolm.data.packing import Part, _Column, pack_documents
from vocagnolm.data.prepare import PartMaker, PartPlan, _Kept, _plan
from vocagnolm.errors import WriteError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.report.comparison import SAMPLE

UGLY = (
    *(line for text in SAMPLE for line in text.splitlines(keepends=True)),
    "e\u0301 ½ \u2581x <tool> \n\n\tif x<=10:\r\n  12345",
    "東京タワー 👩\u200d👩\u200d👧\n",
    "naïve café, İstanbul ﬁ\n",
    "\x07 \u00a0\u3000  \n",
    "unbroken" * 40,
    r"\begin{align} \frac{1}{2} + 3,141.59 \\ \end{align}" + "\n",
    "A line of\r\n\r\ntext ",
)


@pytest.fixture(autouse=True, scope="module")
def small():
    """What counts as long is shorter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "LONG_TEXT", 1500)
        patch.setattr(spans, "PIECE", 150)
        patch.setattr(spans, "BATCH", 1400)
        patch.setattr(module, "SLICE", 400)
        patch.setattr(_Column, "MOST_BYTES", 1000)
        yield


def ugly_text(seed: int, lines: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(UGLY) + rng.choice(["", "\n", " "]) for _ in range(lines))


def assert_same(one: Part, other: Part) -> None:
    assert one.summary == other.summary
    assert one.columns.keys() == other.columns.keys()
    for name, values in one.columns.items():
        assert values.dtype == other.columns[name].dtype, name
        np.testing.assert_array_equal(values, other.columns[name], err_msg=name)
        if values.dtype.kind == "f":
            np.testing.assert_array_equal(np.signbit(values), np.signbit(other.columns[name]))


# ---- real stores ----


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Long and short texts; two stores, of which the second lacks some."""
    folder = tmp_path_factory.mktemp("lab")
    texts = [*documents(8, words=30), ugly_text(0, 60), "short", ugly_text(1, 80), "x" * 3000]
    save_tokenizer(folder / "student", kind="bytes")
    save_tokenizer(folder / "teacher", kind="pieces")
    save_tokenizer(folder / "third", kind="bytes", size=400)
    made.save("sentencepiece prepend", folder / "marks")
    write_corpus(folder / "corpus.jsonl", texts)
    write_store(folder / "store", texts, folder / "teacher", alternatives=3)
    write_store(folder / "second", texts[1:11], folder / "third", seed=1, alternatives=3)
    return folder


def plan_of(folder, *, columns: dict[str, Any], **sections: Any) -> PartPlan:
    """As `prepare` makes it, with more columns than one method asks for."""
    recipe = recipe_from_dict(recipe_dict(folder, **sections))
    tokenizer = student_tokenizer(recipe)
    known = block_settings(recipe, tokenizer, recipe_corpus(recipe))
    if known["guidance"]:
        known["guidance"] = {**known["guidance"], **columns}
    return _plan(recipe, tokenizer, {**known, "text": True})


@pytest.mark.parametrize("student", ["student", "marks"])
@pytest.mark.parametrize(
    ("columns", "sections"),
    [
        ({"stretch": True, "teacher_losses": True}, {}),
        ({"stretch": True}, {"objective": {"aggregation": "mean"}}),
        ({}, {"objective": {"method": "distill"}}),
        ({}, {"objective": {"method": "distill"}, "store": {"path": ["store", "second"]}}),
        ({"stretch": True}, {"store": {"path": ["store", "second"], "combine": "best_document"}}),
        ({}, {"objective": {"method": "cpt"}, "store": {"path": None}}),
    ],
)
def test_slices_give_the_same_part(lab, tmp_path, monkeypatch, student, columns, sections):
    store = dict(sections.get("store", {}))
    if isinstance(store.get("path"), list):
        store["path"] = [str(lab / name) for name in store["path"]]
    sections = {**sections, **({"store": store} if store else {})}
    if student == "marks":
        sections["data"] = {"bos": None, "eos": None}
    plan = plan_of(lab, columns=columns, student={"tokenizer": str(lab / student)}, **sections)
    maker = PartMaker(plan, tmp_path)
    texts = list(recipe_corpus(plan.recipe).read())
    slices = []
    original = PartMaker._batch
    monkeypatch.setattr(
        PartMaker, "_batch", lambda *a, **k: slices.append(k.get("within")) or original(*a, **k)
    )
    sliced = maker._pack(texts)
    assert sum(within is not None for within in slices) > 10
    monkeypatch.setattr(spans, "BATCH", 10**6)  # everything at once
    whole = maker._pack(texts)
    assert slices[-1] is None and sliced.summary.documents == len(texts)
    assert_same(sliced, whole)


# ---- teachers with tokens of any kind ----


class Held:
    """What a store holds of one document."""

    def __init__(self, token_bytes: Any, nll: Any):
        self._columns = {"token_bytes": token_bytes, "nll": nll}

    def columns(self, index: int, tokens: slice = slice(None)) -> dict[str, Any]:
        return {name: column[tokens] for name, column in self._columns.items()}


def any_teacher(rng: np.random.Generator, n_bytes: int, mean_bytes: float) -> Held:
    """Tokens that end anywhere, also inside characters; some without text, some without a loss."""
    boundaries = np.flatnonzero(rng.random(n_bytes + 1) < 1 / mean_bytes)
    again = boundaries[rng.random(len(boundaries)) < 0.05]
    ends = np.sort(np.concatenate([boundaries, again, [n_bytes]]))
    nll = rng.gamma(2.0, 1.0, len(ends)).astype(np.float16)
    nll[rng.random(len(ends)) < 0.05] = np.nan
    return Held(np.diff(ends, prepend=0).astype(np.uint16), nll)


NAMES = [
    "byte-level",
    "byte-level large",
    "byte-level NFC",
    "byte-level added",
    "byte-level no accents",
    "sentencepiece prepend",
    "sentencepiece added",
    "sentencepiece first",
    "sentencepiece replace",
]


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    pieces=st.lists(st.sampled_from(UGLY) | st.text(max_size=40), min_size=10, max_size=60),
    seed=st.integers(0, 99),
    mean_bytes=st.lists(st.sampled_from([1.0, 1.5, 4.0, 300.0]), min_size=1, max_size=2),
    plan=st.sampled_from(
        [GuidancePlan(stretch=True, aggregation="mean"), GuidancePlan(teacher_losses=True)]
    ),
    prefix=st.sampled_from([(), (1,), (1, 3)]),
)
def test_slices_of_any_text(cpt_maker, name, pieces, seed, mean_bytes, plan, prefix):
    text = "".join(pieces).encode(errors="ignore").decode()
    text += "\nA line of text" * 200
    maker = cpt_maker
    maker.plan = replace(maker.plan, tokenizer=load_tokenizer(made.tokenizer(name)))
    rng = np.random.default_rng(seed)
    maker.stores = [any_teacher(rng, len(text.encode()), mean) for mean in mean_bytes]
    options = {"id_dtype": np.uint32, "prefix": prefix, "eos": 2, "guidance": plan}
    kept = [_Kept(7, "short", [None] * len(mean_bytes)), _Kept(8, text, [0] * len(mean_bytes))]
    whole = pack_documents(maker._batches(kept, Counter(), cut=False), **options)
    try:
        sliced = pack_documents(maker._batches(kept, Counter()), folder=maker.folder, **options)
    except module._UncutError:  # `prepare` does it at once then
        return
    assert_same(sliced, whole)
    assert isinstance(sliced.columns["ids"], np.memmap) == (whole.columns["ids"].nbytes >= 1000)
    assert not list(maker.folder.iterdir())


@pytest.fixture(scope="module")
def cpt_maker(lab, tmp_path_factory):
    plan = plan_of(lab, columns={}, objective={"method": "cpt"}, store={"path": None})
    return PartMaker(plan, tmp_path_factory.mktemp("parts"))


def test_a_document_that_cannot_be_cut_is_packed_at_once(lab, tmp_path, monkeypatch):
    plan = plan_of(lab, columns={})
    maker = PartMaker(plan, tmp_path)
    texts = list(recipe_corpus(plan.recipe).read())
    expected = maker._pack(texts)
    seen = []
    between = type(plan.tokenizer).between

    def fails_late(self, text, edges):
        seen.append(edges)
        return between(self, text, edges) if len(seen) < 4 else None

    monkeypatch.setattr(type(plan.tokenizer), "between", fails_late)
    assert_same(maker._pack(texts), expected)
    assert len(seen) == 4


def test_a_full_disk(lab, tmp_path, monkeypatch):
    plan = plan_of(lab, columns={})
    texts = list(recipe_corpus(plan.recipe).read())

    def refuse(**options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing, "TemporaryFile", refuse)
    with pytest.raises(WriteError, match=r"No space left on device.*run the same command again"):
        PartMaker(plan, tmp_path)._pack(texts)


# ---- memory ----


def test_a_long_document_takes_little_memory(lab, tmp_path, monkeypatch):
    """In bytes a byte of text, and beside the text: at once it takes 54."""
    text = "".join(documents(500))
    save_tokenizer(tmp_path / "large", kind="bytes", size=1000)
    write_corpus(tmp_path / "corpus.jsonl", [text])
    write_store(tmp_path / "store", [text], lab / "teacher")
    plan = plan_of(tmp_path, columns={}, student={"tokenizer": str(tmp_path / "large")})
    plan = replace(plan, settings={**plan.settings, "text": False})
    maker = PartMaker(plan, tmp_path)

    def peak() -> float:
        tracemalloc.start()
        maker._pack([Document(0, "corpus.jsonl:1", text)])
        found = tracemalloc.get_traced_memory()[1] / len(text.encode())
        tracemalloc.stop()
        return found

    assert peak() < 4
    monkeypatch.setattr(type(plan.tokenizer), "cuts", lambda self, text: None)
    assert peak() > 40
