"""Conversations: each model reads them in its own template, and their contents are aligned.

The *shared text* of a conversation is the contents of its messages, each followed by one byte for
the end of the turn. Stores and blocks identify a conversation by this text. A `ChatTokenizer` reads
it like any other text and returns which of its tokens cover which bytes of it.
"""

from vocagnolm.chat.messages import Message, Refused, conversation_of, messages_of, shared_text
from vocagnolm.chat.survey import Survey, survey
from vocagnolm.chat.template import ChatTemplate, Rendering, render, template_of
from vocagnolm.chat.tokens import ChatTokenizer, TrainOn, trained_ranges, trained_tokens

__all__ = [
    "ChatTemplate",
    "ChatTokenizer",
    "Message",
    "Refused",
    "Rendering",
    "Survey",
    "TrainOn",
    "conversation_of",
    "messages_of",
    "render",
    "shared_text",
    "survey",
    "template_of",
    "trained_ranges",
    "trained_tokens",
]
