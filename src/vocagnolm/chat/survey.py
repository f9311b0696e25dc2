"""What a template makes of a corpus, said before anything is computed."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vocagnolm.alignment import TokenSpans
from vocagnolm.chat.messages import Refused, is_mark, part_of
from vocagnolm.chat.tokens import ChatTokenizer, TrainOn, trained_ranges, trained_tokens

_ORIGINS = {
    "own": "its own template",
    "given": "the template that is given",
    "plain": "no template of its own: plain `role: content`",
}


@dataclass
class Survey:
    """Statistics of some conversations in one model's template."""

    name: str
    template: str
    """Description of the template."""
    conversations: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Reason -> number of conversations."""
    changes: Counter[str] = field(default_factory=Counter)
    """What the template does to contents -> number of conversations."""
    disputed: Counter[str] = field(default_factory=Counter)
    """Tokens that `{% generation %}` and the rule for templates without it see differently ->
    conversations."""
    unwritten: Counter[str] = field(default_factory=Counter)
    """Ends of generation prompts that the template does not write before answers ->
    conversations."""

    def to_dict(self) -> dict[str, Any]:
        return {name: dict(v) if isinstance(v, Counter) else v for name, v in vars(self).items()}

    def warnings(self) -> list[str]:
        sentences = {
            "refuses {count} ({what}); they are left out": self.refused.most_common(),
            "{what} in {count}; what is left out is not aligned": self.changes.most_common(),
            "marks generation, and {what} in {count}: the template is followed": (
                self.disputed.most_common(8)
            ),
            "ends a generation prompt with {what!r}, which it does not write before answers in "
            "{count}: behind such a prompt the student is not trained. template_options may change "
            "it, as enable_thinking: false": self.unwritten.most_common(4),
        }
        total = f"of {self.conversations:,} conversations"
        return [
            f"{self.name}: its template {words.format(what=what, count=f'{count:,} {total}')}"
            for words, counted in sentences.items()
            for what, count in counted
        ]


def template_words(origin: str) -> str:
    return _ORIGINS[origin]


def readable_by(tokenizers: Iterable[ChatTokenizer], texts: Iterable[str]) -> list[str]:
    """The conversations that no template refuses."""
    readable = list(texts)
    for tokenizer in tokenizers:
        outcomes = tokenizer.outcomes(readable)
        readable = [
            t for t, outcome in zip(readable, outcomes, strict=True) if not isinstance(outcome, str)
        ]
    return readable


def survey(tokenizer: ChatTokenizer, texts: Iterable[str]) -> Survey:
    """Statistics of conversations in a tokenizer's template; `texts` are shared texts."""
    result = Survey(tokenizer.name, template_words(tokenizer.template.origin))
    for text in texts:
        result.conversations += 1
        try:
            rendering = tokenizer.rendering(text)
        except Refused as error:
            result.refused[str(error)] += 1
            continue
        result.changes.update(rendering.changes)
        result.unwritten.update({turn.unwritten for turn in rendering.turns if turn.unwritten})
        if tokenizer.template.marks_generation:
            result.disputed.update(_disputed(tokenizer, text))
    return result


def _disputed(tokenizer: ChatTokenizer, text: str) -> set[str]:
    ours, marked = (tokenizer.outcomes([text], by_rule=rule)[0] for rule in (True, False))
    assert not isinstance(ours, str) and not isinstance(marked, str)
    ranges = trained_ranges(text, "assistant")
    pairs = zip(trained_tokens(ours, ranges), trained_tokens(marked, ranges), strict=True)
    return {
        f"{'leaves out' if by_rule else 'adds'} {tokenizer.token(index)!r}"
        for index, (by_rule, by_mark) in zip(ours.ids.tolist(), pairs, strict=True)
        if by_rule != by_mark
    }


def why_trained(text: str, tokens: TokenSpans, train_on: TrainOn = "assistant") -> list[str | None]:
    """Per token of a conversation why it is trained on; None where it is not."""
    encoded = text.encode()
    trained = trained_tokens(tokens, trained_ranges(text, train_on))
    reasons: list[str | None] = []
    for (start, end), is_trained in zip(tokens.spans.tolist(), trained.tolist(), strict=True):
        why = "written by the template behind the prompt"
        if end - start == 1 and is_mark(encoded[start]):
            why = "end of turn"
        elif start < end:
            why = part_of(encoded, start)
        reasons.append(why if is_trained else None)
    return reasons
