"""Chat templates: a model's own, one that is given, or plain `role: content`."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from vocagnolm.alignment import TextTokenizer
from vocagnolm.chat.messages import Message
from vocagnolm.errors import TokenizerError

PLAIN = (
    "{{ bos_token if bos_token is defined else '' }}"
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' and eos_token is defined else '' }}{{ '\\n' }}"
    "{% endfor %}{{ 'assistant:' if add_generation_prompt }}"
)
# Templates may print the day; scores and blocks must not depend on it. The option `date_string`,
# where a template has one, or `date`, says another.
DATE = "26 Jul 2024"

Origin = Literal["own", "given", "plain"]


class TemplateRaised(ValueError):
    """A template that refuses a conversation; its text is what the template says."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template with all that it is rendered with, but the messages."""

    source: str
    special_tokens: tuple[tuple[str, str], ...] = ()
    """`bos_token`, `eos_token`, ... by name."""
    options: tuple[tuple[str, Any], ...] = ()
    """Further variables of the template, for example `enable_thinking`."""
    origin: Origin = "own"

    @cached_property
    def fingerprint(self) -> str:
        decides = [self.source, dict(self.special_tokens), dict(self.options)]
        return hashlib.sha256(json.dumps(decides, default=str).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.fingerprint)  # options may be lists and mappings

    def describe(self) -> dict[str, Any]:
        """For manifests and cards."""
        return {
            "origin": self.origin,
            "options": dict(self.options),
            "fingerprint": self.fingerprint,
        }

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        # transformers' own sandbox: a template may come from anywhere. Not through its
        # `render_jinja_template`, in which the day cannot be fixed.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            text = _compile_jinja_template(self.source).render(
                messages=[{"role": m.role, "content": m.content} for m in messages],
                add_generation_prompt=add_generation_prompt,
                **{"tools": None, "documents": None, "strftime_now": _fixed_date},
                **dict(self.special_tokens),
                **dict(self.options),
            )
        except Exception as error:  # a template may raise anything; it is told in its words
            reason = str(error).strip().splitlines()
            raise TemplateRaised(reason[0] if reason else type(error).__name__) from None
        return str(text)


def _fixed_date(form: str) -> str:
    from datetime import datetime

    return datetime.strptime(DATE, "%d %b %Y").strftime(form)


def template_of(
    tokenizer: TextTokenizer,
    given: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """The template of a model: `given` (a Jinja file, a folder with one, or `plain`), its own, or
    plain where there is none."""
    source, origin = tokenizer.frame.template, "own"
    if given == "plain":
        source = None
    elif given is not None:
        source, origin = _read_given(given), "given"
    if source is None:
        source, origin = PLAIN, "plain"
    chosen: Any = origin
    return ChatTemplate(
        source,
        tokenizer.frame.special_tokens,
        tuple(sorted((options or {}).items())),
        chosen,
    )


def _read_given(given: str) -> str:
    from vocagnolm.alignment.tokenizer import read_template

    path = Path(given)
    if path.is_dir():
        source = read_template(path)
        if source is None:
            raise TokenizerError(
                f"{path} has no chat template (chat_template.jinja, or a key of "
                "tokenizer_config.json)"
            )
        return source
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(
            f"the chat template {given} cannot be read: {error}. Expected a Jinja file, a folder "
            "that has one, or plain"
        ) from None
