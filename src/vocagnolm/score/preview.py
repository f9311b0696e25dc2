"""`vocagnolm write --dry-run`: what would be asked, and how much would be written."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from vocagnolm.chat.answers import PIECE_BYTES
from vocagnolm.data.prompts import Prompts, count_prompts
from vocagnolm.model.served import Server
from vocagnolm.score.served import ServedWriter, Spending
from vocagnolm.score.write import (
    WriterSource,
    describe_writer,
    open_prompts_of,
    require_expected,
)
from vocagnolm.score.writers import Writer, WriteSettings
from vocagnolm.score.written import ReadPrompt

MOST_COUNTED = 10_000
"""Prompts that are read to count their tokens; of more, as many are spread evenly."""
_TEXT_BYTES, _ANSWER_BYTES, _SHARD_BYTES = 4.5, 200, 4096
"""What is kept beside losses and alternatives, roughly: the text of a token; the fields of a row
and of its document in a shard; the header of a shard."""


@dataclass(frozen=True)
class WritePreview:
    """What `write_answers` would ask and write."""

    teacher: str
    prompts: int
    asked: int
    """Prompts that can be asked, before the teacher reads them."""
    left_out: dict[str, int]
    """Prompts that cannot be asked, by reason."""
    counted: int
    """Prompts that the teacher has read for this."""
    unreadable: dict[str, int]
    """Those of them that it cannot read, by reason."""
    answers: int
    shards: int
    prompt_tokens: int
    """What the teacher reads for all prompts, its template and context included; a guess where a
    chat endpoint tokenizes."""
    most_new_tokens: int
    most_bytes: int
    """Disk space if every answer reached the limit, about."""
    shown: list[str]
    """The first prompts as the teacher reads them."""
    requests: int | None = None
    """To a server."""
    most_money: float | None = None
    """What a server takes for it where every answer reaches the limit, if a price is given."""


def preview_answers(
    teacher: str | Path | Writer | None,
    prompts: str | Path | Sequence[str | Path] | Prompts,
    *,
    settings: WriteSettings | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    server: str | Sequence[str] | Server | None = None,
    spending: Spending | None = None,
    show: int = 3,
    **reading: Any,
) -> WritePreview:
    """Read the prompts as `write_answers` would, with the same arguments, without the teacher's
    weights and without writing anything. A server is asked no more than what it can do."""
    settings = settings or WriteSettings()
    opened = open_prompts_of(prompts, reading)
    count = count_prompts(opened.read())
    if settings.grade is not None:
        require_expected(opened, count, settings.grade)
    source = WriterSource.of(teacher, revision, trust_remote_code, server, spending)
    if source is not None:
        teacher = source.open(settings, opened)
    assert not isinstance(teacher, str | Path | None)
    about = describe_writer(teacher)
    step = -(-count.asked // MOST_COUNTED)
    usable = (prompt for prompt in opened.read() if prompt.text is not None)
    tokens = size = counted = 0
    shown: list[str] = []
    unreadable: Counter[str] = Counter()
    while some := list(islice(usable, 256)):
        for read in teacher.read(some[::step]):
            counted += 1
            if not isinstance(read, ReadPrompt):
                unreadable[read.partition(":")[0]] += 1
                continue
            if isinstance(teacher, ServedWriter):
                tokens += teacher.tokens_of(read)
            else:
                tokens += len(read.ids)
            size += len(read.shown.encode())
            if len(shown) < show:
                shown.append(teacher.spelled(read))
    chosen: WriteSettings = about.settings
    readable = counted - unreadable.total()
    whole = count.asked / max(counted, 1)
    assert chosen.shard_prompts is not None
    shards = -(-len(opened) // chosen.shard_prompts)
    answers = round(whole * readable) * chosen.samples
    new_tokens = answers * chosen.max_new_tokens
    numbers = 3 + 4 * chosen.alternatives
    prompt_tokens = round(whole * tokens)
    requests = money = None
    if isinstance(teacher, ServedWriter):
        requests = teacher.requests_for(round(whole * readable))
        money = (spending or Spending()).money(prompt_tokens, new_tokens)
    prompts_again = whole * size * chosen.samples  # with every answer, without losses
    most_bytes = new_tokens * (numbers + _TEXT_BYTES) + prompts_again * (1 + numbers / PIECE_BYTES)
    most_bytes += answers * _ANSWER_BYTES + shards * _SHARD_BYTES + len(about.vocabulary or b"")
    return WritePreview(
        teacher=str(about.teacher["teacher"]["name"]),
        prompts=len(opened),
        asked=count.asked,
        left_out=count.problems,
        counted=counted,
        unreadable=dict(unreadable),
        answers=answers,
        shards=shards,
        prompt_tokens=prompt_tokens,
        most_new_tokens=new_tokens,
        most_bytes=round(most_bytes),
        shown=shown,
        requests=requests,
        most_money=money,
    )
