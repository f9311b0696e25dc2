"""Documents are found in a store by their number where the corpus is the same, else by content."""

import numpy as np
import pytest
from score.teacher_kit import SETTINGS, ArithmeticTeacher
from training_kit import documents, recipe_dict, save_tokenizer, write_corpus

from vocagnolm.data.corpus import document_hash, open_corpus
from vocagnolm.data.prepare import prepare
from vocagnolm.data.teachers import Lookup, compare_stores
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.score import score_corpus
from vocagnolm.store import LossStore

SKIPPED = (0, 7, 13, 14, 22)


class Choosy(ArithmeticTeacher):
    """Some documents it cannot read."""

    def tokenize(self, texts):
        return [
            "no tokens" if "unreadable" in text else read
            for text, read in zip(texts, super().tokenize(texts), strict=True)
        ]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Shards of five documents; some are skipped, at the ends of shards too, and two are equal."""
    folder = tmp_path_factory.mktemp("lookup")
    texts = documents(23)
    for number in SKIPPED:
        texts[number] = f"unreadable {number}"
    texts[18] = texts[3]
    save_tokenizer(folder / "student", kind="bytes")
    write_corpus(folder / "corpus.jsonl", texts)
    for name in ("store", "second"):
        score_corpus(Choosy(), folder / "corpus.jsonl", folder / name, settings=SETTINGS)
    return folder, texts


@pytest.fixture
def no_index(monkeypatch):
    """The index of a whole store cannot be made."""

    def refuse(self):
        raise AssertionError("the index of the whole store was made")

    monkeypatch.setattr(LossStore, "_hash_index", property(refuse))


def test_by_number_as_by_content(lab, no_index):
    folder, texts = lab
    store = LossStore.open(folder / "store")
    lookup = Lookup(store, open_corpus(folder / "corpus.jsonl").fingerprint)
    for number, text in enumerate(texts):
        place = lookup.row(number, document_hash(text))
        assert (place is None) == (number in SKIPPED)
        if place is not None:
            assert store.document_index(place) == number
            assert store.document_hash(place) == document_hash(text)
    for number in (-1, 23, 10**6):
        assert store.place_of(number) is None
    assert [entry["document"] for entry in store.skipped()] == list(SKIPPED)


def test_another_corpus_or_another_text_is_found_by_content(lab):
    folder, texts = lab
    store = LossStore.open(folder / "store")
    for fingerprint in ("another", None):
        lookup = Lookup(store, fingerprint)
        assert store.document_index(lookup.row(0, document_hash(texts[5]))) == 5
        assert lookup.row(5, document_hash("something else")) is None
    same = Lookup(store, store.corpus_fingerprint)  # and yet the text at this number is not its
    assert store.document_index(same.row(2, document_hash(texts[5]))) == 5
    assert same.row(2, document_hash("something else")) is None


def test_prepare_makes_no_index_of_the_store_it_was_scored_for(lab, tmp_path, request):
    folder, texts = lab
    # the same documents from the back, and one that is not in the store: found by content
    turned = write_corpus(tmp_path / "turned.jsonl", [*texts[::-1], "unreadable 99"])
    tree = recipe_dict(
        folder,
        corpus={"files": [str(turned)]},
        data={"blocks": str(tmp_path / "turned"), "missing": "drop"},
    )
    by_content = prepare(recipe_from_dict(tree))["summary"]
    request.getfixturevalue("no_index")
    tree = recipe_dict(folder, data={"blocks": str(tmp_path / "same")})
    by_number = prepare(recipe_from_dict(tree))["summary"]
    assert by_number["documents"] == by_content["documents"] == len(texts) - len(SKIPPED)
    assert by_number["missing_documents"] == len(SKIPPED)
    assert by_content["missing_documents"] == len(SKIPPED) + 1
    for name in ("tokens", "mapped", "guidance_histogram"):
        assert by_number[name] == by_content[name]
    tree = recipe_dict(
        folder, corpus={"files": [str(turned)]}, data={"blocks": str(tmp_path / "more")}
    )
    with pytest.raises(AssertionError, match="index"):
        prepare(recipe_from_dict(tree))


def test_stores_of_one_corpus_are_compared_without_an_index(lab, no_index):
    folder, texts = lab
    found = compare_stores([folder / "store", folder / "second"])
    assert found["documents"] == len(texts) - len(SKIPPED)
    assert np.allclose(*np.array(found["document_bits_per_byte"]).T)
