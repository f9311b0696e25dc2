"""How much two vocabularies have in common, by three definitions."""

from dataclasses import dataclass

from vocagnolm.alignment.tokenizer import TextTokenizer
from vocagnolm.alignment.vocabulary import SPACE_MARK


@dataclass(frozen=True)
class VocabularyOverlap:
    """Shared entries over the teacher's vocabulary, as fractions.

    raw: equal token strings, as in the paper; marks: the space marks `▁` and `Ġ` made equal first;
    bytes: equal bytes of text, whatever the spelling.
    """

    raw: float
    marks: float
    bytes: float
    shared_raw: int


def vocabulary_overlap(student: TextTokenizer, teacher: TextTokenizer) -> VocabularyOverlap:
    ours, theirs = set(student.vocabulary), set(teacher.vocabulary)
    shared = len(ours & theirs)
    return VocabularyOverlap(
        raw=shared / max(len(theirs), 1),
        marks=_share({_one_mark(t) for t in ours}, {_one_mark(t) for t in theirs}),
        bytes=_share(_texts(student), _texts(teacher)),
        shared_raw=shared,
    )


def _share(ours: set[str] | set[bytes], theirs: set[str] | set[bytes]) -> float:
    return len(ours & theirs) / max(len(theirs), 1)


def _one_mark(token: str) -> str:
    return token.replace("Ġ", SPACE_MARK)


def _texts(tokenizer: TextTokenizer) -> set[bytes]:
    entries = (tokenizer.bytes_of(index) for index in tokenizer.vocabulary.values())
    return {entry for entry in entries if entry is not None}
