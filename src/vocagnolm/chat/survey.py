"""What a template makes of a corpus, said before anything is computed."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vocagnolm.chat.messages import Refused
from vocagnolm.chat.tokens import ChatTokenizer

_ORIGINS = {
    "own": "its own template",
    "given": "the template that is given",
    "plain": "no template of its own: plain `role: content`",
}


@dataclass
class Survey:
    """Of some conversations, in one model's template."""

    name: str
    template: str
    """In words."""
    conversations: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Reason -> conversations."""
    changes: Counter[str] = field(default_factory=Counter)
    """What the template does to contents -> conversations."""

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "refused": dict(self.refused), "changes": dict(self.changes)}

    def warnings(self) -> list[str]:
        total = f"of {self.conversations:,} conversations"
        return [
            *(
                f"{self.name}: its template refuses {count:,} {total} ({reason}); they are left out"
                for reason, count in self.refused.most_common()
            ),
            *(
                f"{self.name}: its template {change} in {count:,} {total}; what is left out is not "
                "aligned"
                for change, count in self.changes.most_common()
            ),
        ]


def template_words(origin: str) -> str:
    return _ORIGINS[origin]


def readable_by(tokenizers: Iterable[ChatTokenizer], texts: Iterable[str]) -> list[str]:
    """The conversations that no template refuses."""
    found = list(texts)
    for tokenizer in tokenizers:
        outcomes = tokenizer.outcomes(found)
        found = [t for t, one in zip(found, outcomes, strict=True) if not isinstance(one, str)]
    return found


def survey(tokenizer: ChatTokenizer, texts: Iterable[str]) -> Survey:
    """`texts` are shared texts."""
    found = Survey(tokenizer.name, template_words(tokenizer.template.origin))
    for text in texts:
        found.conversations += 1
        try:
            found.changes.update(tokenizer.rendering(text).changes)
        except Refused as error:
            found.refused[str(error)] += 1
    return found
