"""Answers that are a few words: found, and compared by their words."""

import re

from vocagnolm.evaluate.graders.clauses import clauses, cut_continuation, delatex
from vocagnolm.evaluate.graders.numbers import plain


def extract_text(output: str) -> str | None:
    """A short phrase given as the answer: "The answer is Luna." -> `Luna`."""
    text = cut_continuation(output)
    for clause in reversed(clauses(text)):
        phrase = delatex(clause.text).partition("I hope")[0].strip(" .\"'")
        if phrase:
            return phrase if len(phrase.split()) <= 40 else None
    # the output is the bare phrase
    bare = re.fullmatch(r"[\w :'.,/%-]+", text) and len(text.split()) <= 5
    return text.strip(" .") if bare else None


_ARTICLE = re.compile(r"^(?:the|a|an)\s+", re.IGNORECASE)


def canonical_text(text: str) -> str:
    """`The 60th caller.` -> `60th caller`; `2:35 P.M.` -> `2:35pm`; `3 : 4` -> `3:4`."""
    text = plain(text).strip().strip("\"'*_.,;! ").casefold()
    text = re.sub(r"\b([ap])\.?\s?m\b\.?", r"\1m", text)
    text = re.sub(r"(?<=\d)\s*:\s*(?=\d)", ":", text)
    text = re.sub(r"(?<=\d)\s+(?=[ap]m\b)", "", text)
    text = _ARTICLE.sub("", text)
    return re.sub(r"[^\w:/%.+-]+", " ", text).strip(" .")


def same_text(found: str, gold: str) -> bool:
    """Equal as short text; what follows a comma or a "because" is explanation."""
    wanted = canonical_text(gold)
    short = re.split(r",|;|\(|\b(?:because|since|as|with)\b", found, maxsplit=1)[0]
    if wanted in {canonical_text(found), canonical_text(short)}:
        return True
    ratio = re.fullmatch(r"(\d+)\s*(?::|to|/)\s*(\d+)", canonical_text(found))
    return ratio is not None and f"{ratio[1]}:{ratio[2]}" == wanted
