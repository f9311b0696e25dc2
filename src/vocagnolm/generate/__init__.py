"""Writing tokens: the one way in which a model answers prompts, for evaluation and for `write`."""

from typing import TYPE_CHECKING

from vocagnolm.errors import lazy_names

_PUBLIC = {
    "decoder": ("AnswerTokens", "Decoder", "PromptTokens"),
    "draw": ("Sampling",),
    "generator": ("Generator", "ServerGenerator"),
    "reading": ("Answer",),
}
"""Module -> the names that it defines; those with torch are loaded on first use."""

if TYPE_CHECKING:
    from vocagnolm.generate.decoder import AnswerTokens, Decoder, PromptTokens
    from vocagnolm.generate.draw import Sampling
    from vocagnolm.generate.generator import Generator, ServerGenerator
    from vocagnolm.generate.reading import Answer

__all__ = [
    "Answer",
    "AnswerTokens",
    "Decoder",
    "Generator",
    "PromptTokens",
    "Sampling",
    "ServerGenerator",
]

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
