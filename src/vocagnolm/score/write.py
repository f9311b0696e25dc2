"""`vocagnolm write`: a teacher answers prompts, and its alternatives stay.

What it leaves is a corpus of conversations and the store over exactly these in one folder, made
shard by shard: a shard is some prompts with all of their answers, and its bytes depend on these
alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vocagnolm.data.corpus import described_documents
from vocagnolm.data.prompts import Prompt, Prompts, occurrences
from vocagnolm.questions import grade
from vocagnolm.score.writers import Writer, WriteSettings, answer_seed
from vocagnolm.score.written import Grader, ReadPrompt, ShardBuilder, by_prompt
from vocagnolm.storage import storage_of
from vocagnolm.storage.copies import version
from vocagnolm.store.export import CARD, store_card
from vocagnolm.store.format import DATA_FOLDER, Record
from vocagnolm.store.writer import StoreWriter

# the task whose grader compares answers of a kind
_GRADED_AS = {"number": "gsm8k", "mixed": "asdiv", "math": "math", "choice": "mathqa"}


@dataclass(frozen=True)
class WritePlan:
    """All that decides a written folder: no open files and no model."""

    out: str
    prompts: Prompts
    settings: WriteSettings
    identity: dict[str, Any]
    repeated: dict[int, int]
    """Prompts that stand there before: how often, by number."""

    @property
    def shard_prompts(self) -> int:
        assert self.settings.shard_prompts is not None
        return self.settings.shard_prompts

    @property
    def shard_count(self) -> int:
        return -(-len(self.prompts) // self.shard_prompts)

    def prompts_in(self, number: int) -> range:
        first = number * self.shard_prompts
        return range(first, min(first + self.shard_prompts, len(self.prompts)))


def make_plan(prompts: Prompts, writer: Writer, out: str) -> WritePlan:
    """Reads all prompts once."""
    settings = writer.settings
    repeated = occurrences(prompts.read())
    about = prompts.describe()
    identity = {
        **writer.describe(),
        "corpus": {**about, "prompts": len(prompts), "documents": len(prompts) * settings.samples},
        "shard_documents": (settings.shard_prompts or 1) * settings.samples,
        "software": {name: version(name) for name in ("tokenizers", "torch", "transformers")},
    }
    return WritePlan(out, prompts, settings, identity, repeated)


# ---- a shard ----


@dataclass(frozen=True)
class PreparedPrompts:
    """A shard's prompts as the teacher reads them: the part of the work that needs no model."""

    number: int
    prompts: list[Prompt]
    reads: list[ReadPrompt | str]
    seeds: list[list[int]]
    """Per readable prompt one number for each answer."""


def prepare_shard(plan: WritePlan, writer: Writer, number: int) -> PreparedPrompts:
    where = plan.prompts_in(number)
    prompts = list(plan.prompts.read(where.start, where.stop))
    asked = iter(writer.read([prompt for prompt in prompts if prompt.text is not None]))
    reads = [p.problem or "unknown" if p.text is None else next(asked) for p in prompts]
    seeds = [
        [
            answer_seed(
                plan.settings.seed, prompt.text or "", plan.repeated.get(prompt.index, 0), answer
            )
            for answer in range(plan.settings.samples)
        ]
        for prompt, read in zip(prompts, reads, strict=True)
        if isinstance(read, ReadPrompt)
    ]
    return PreparedPrompts(number, prompts, reads, seeds)


def write_shard(
    plan: WritePlan,
    writer: Writer,
    prepared: PreparedPrompts,
    on_tokens: Callable[[int], None] | None = None,
) -> ShardBuilder:
    """The teacher's answers to a shard's prompts, in order."""
    settings = plan.settings
    builder = ShardBuilder(
        prepared.number,
        plan.prompts_in(prepared.number).start,
        settings.samples,
        settings.alternatives,
        keep_cut=settings.cut == "keep",
        chat=writer.chat,
        continues=plan.prompts.continues,
        grader=None if settings.grade is None else grader_of(settings.grade),
    )
    readable = [read for read in prepared.reads if isinstance(read, ReadPrompt)]
    answers = writer.write(readable, prepared.seeds, on_tokens)
    done = by_prompt(readable, answers, settings.samples)
    for prompt, read in zip(prepared.prompts, prepared.reads, strict=True):
        if isinstance(read, ReadPrompt):
            builder.add(*next(done))
        else:
            builder.skip(prompt, read)
    return builder


def grader_of(kind: str) -> Grader:
    """What compares an answer of this kind with the expected one."""

    def is_right(content: str, expected: str, question: str, finished: bool) -> bool:
        marked = grade(_GRADED_AS[kind], content, expected, complete=finished, question=question)
        return marked.correct

    return is_right


# ---- the folder ----


def finish_folder(plan: WritePlan, store: StoreWriter, conversations: bool) -> None:
    """The manifest, which completes the folder, and its card."""

    def more(records: list[Record]) -> dict[str, Any]:
        sources = [
            {
                "name": name,
                "documents": about["lines"],
                "sha256": about["sha256"],
            }
            for record in records
            for name, about in record["files"].items()
            if name.startswith(f"{DATA_FOLDER}/")
        ]
        about = described_documents(sources, conversations)
        return {"written": {"prompts": len(plan.prompts), **about}}

    store.finish(more)
    storage = storage_of(plan.out)
    storage.put(CARD, store_card(storage).encode())
    store.tidy()
