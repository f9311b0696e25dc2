"""The one rule for documents that cannot be used: they are left out, counted and named.

A broken line, a record without the text's field, an empty text, bytes that are not UTF-8: the work
goes on without them, and says how many there were and why.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vocagnolm.errors import CorpusError
from vocagnolm.store.format import count_reasons

if TYPE_CHECKING:
    from vocagnolm.data.corpus import Corpus


MOST_PLACES = 20
_PLACES_SHOWN = 3


@dataclass(frozen=True)
class LeftOut:
    """How many documents were left out, for which reasons, and where the first of them stand."""

    documents: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """Kind of reason (`not JSON`, `empty`) -> documents."""
    first: Sequence[dict[str, Any]] = ()
    """`place` and full `reason` of the first few."""

    def as_json(self) -> dict[str, Any]:
        return {"documents": self.documents, "reasons": self.reasons, "first": list(self.first)}

    def lines(self) -> list[str]:
        """For people; none where nothing was left out."""
        if not self.documents:
            return []
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.reasons.items())
        places = [f"  {one['place']}: {one['reason']}" for one in self.first[:_PLACES_SHOWN]]
        return [f"left out {self.documents:,} documents: {reasons}", *places]


def left_out_of(problems: Sequence[dict[str, str]]) -> LeftOut:
    """From the `place` and `reason` of every document that was left out."""
    reasons = count_reasons(one["reason"] for one in problems)
    return LeftOut(len(problems), reasons, problems[:MOST_PLACES])


def read_texts(
    paths: "str | Path | Sequence[str | Path] | Corpus", **options: Any
) -> tuple[list[str], LeftOut]:
    """All usable texts of a corpus, and what was left out; options as in `open_corpus`."""
    from vocagnolm.data.corpus import Corpus, open_corpus

    texts: list[str] = []
    problems: list[dict[str, str]] = []
    for document in paths if isinstance(paths, Corpus) else open_corpus(paths, **options):
        if document.text is not None:
            texts.append(document.text)
        else:
            problems.append({"place": document.place, "reason": document.problem or "unknown"})
    if not texts:
        raise CorpusError(
            f"None of the {len(problems):,} documents can be read as text; the first: "
            f"{problems[0]['place']}: {problems[0]['reason']}."
        )
    return texts, left_out_of(problems)
