"""The prompts that a try takes, and what the teacher answers to them."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vocagnolm.chat.messages import Refused, conversation_of, format_of, shared_text
from vocagnolm.data.corpus import document_hash, read_texts
from vocagnolm.data.prompts import Prompt, Prompts, open_prompts
from vocagnolm.errors import CorpusError, UsageError
from vocagnolm.evaluate.bits import bits_per_byte
from vocagnolm.score import WriteSettings, WriteSummary, write_answers
from vocagnolm.score.write import grader_of
from vocagnolm.tryout.answers import Question
from vocagnolm.tryout.folder import LEAST, Facts, Tryout, rounded_speed
from vocagnolm.tryout.text_sample import TRAINING_COST, as_records, write_records

MODELS_MEASURED, MODELS_TRAINED = 4, 3
"""The student before and after each short run."""
MEASURING_SHARE, TRAINING_SHARE = 0.25, 0.65
"""Shares of the minutes: for answers to held-out prompts; for writing and training. The rest is
for loading."""
PASSES, MOST_SAMPLES = 2, 4
PILOT_PROMPTS, GPU_PILOT_PROMPTS = (8, 64, 512), (512,)
"""Prompts of a pilot, more where few take less than a second. A GPU answers many at a time."""
LOOKED_AT = 512
"""Prompts of which it is seen whether they can be asked and their answers graded."""
MOST_QUESTIONS = 1_000
STUDENT_COST = 1.0
"""Tokens of a student's answer, in those of the teacher's: a guess; small students do not end."""


def asked_settings(prompts: Prompts, writing: Mapping[str, Any]) -> Facts:
    """The settings of answers that do not depend on the plan."""
    grade = writing.get("grade")
    if grade and not prompts.answer_field:
        raise UsageError(
            "--grade needs the expected answers: name their field with --answer-field."
        )
    kind = (grade or "mixed") if prompts.answer_field else None
    usual = WriteSettings()
    defaults = {"max_new_tokens": usual.max_new_tokens, "stop": usual.stop}
    return {**defaults, **writing, "grade": kind}


class PromptSample:
    """The prompts that a try takes, by a random order that the seed decides, and what the teacher
    answers to them."""

    def __init__(self, tryout: Tryout, prompts: Prompts, teacher: str, asked: Facts) -> None:
        self.tryout, self.prompts, self.teacher, self.asked = tryout, prompts, teacher, asked
        self.is_right = None if asked["grade"] is None else grader_of(asked["grade"])

    def settings(self, samples: int) -> WriteSettings:
        chosen = self.tryout.settings
        return WriteSettings(
            **self.asked if self.prompts.answer_field else {**self.asked, "grade": None},
            samples=samples,
            seed=chosen.seed,
            device=chosen.device,
            compiled=False,
        )

    def order(self) -> Iterator[Prompt]:
        """Different prompts that can be asked."""
        count, seen = len(self.prompts), set[bytes]()
        for index in random.Random(self.tryout.settings.seed).sample(range(count), count):
            for prompt in self.prompts.read(index, index + 1):
                if prompt.text is None or (key := document_hash(prompt.text)) in seen:
                    continue
                seen.add(key)
                yield prompt

    def has_answer(self, prompt: Prompt) -> bool:
        """Whether an answer to the prompt can be graded."""
        if self.is_right is None or prompt.expected is None:
            return False
        return self.is_right("", prompt.expected, "", True) is not None

    def write_sample(self, name: str, prompts: Sequence[Prompt]) -> Path:
        records = as_records([prompt.text or "" for prompt in prompts], conversations=True)
        rows = zip(records, prompts, strict=True)
        place = self.tryout.sample(name)
        write_records(
            place,
            ({**row, "answer": p.expected} if self.has_answer(p) else row for row, p in rows),
        )
        return place

    def questions(self) -> list[Question]:
        """The held-out prompts with their expected answers."""
        prompts = open_prompts(self.tryout.sample("held-out"), answer_field="answer")
        return [Question(p.text or "", p.expected or "") for p in prompts.read()]

    def plan(self) -> Facts:
        """How many prompts fit into the minutes, by the time that the teacher takes to answer a
        few, and the student to read its answers."""
        tryout, some = self.tryout, list[Prompt]()
        for prompt in self.order():
            some.append(prompt)
            if len(some) == LOOKED_AT:
                break
        self._require_enough(len(some))
        self._require_gradable(some)
        place = self.tryout.sample("pilot")
        files = tryout.files[tryout.student]
        for count in GPU_PILOT_PROMPTS if tryout.on_gpu else PILOT_PROMPTS:
            self.write_sample("pilot", some[:count])
            with TemporaryDirectory() as folder, tryout.bar("pilot", "answers") as note:
                written = self._written(place, Path(folder) / "pilot", 1, note)
                texts, _ = read_texts(Path(folder) / "pilot")
            if written.seconds > 1.0 or count >= len(some):
                break
        write_records(place, as_records(max(1, 256 // len(texts)) * texts, conversations=True))
        pilot = bits_per_byte(files.load(), files, [place], train_on="assistant")
        size = pilot.scored_bytes / pilot.documents
        place.unlink()
        sizes = list(tryout.parameters().values())
        speed = rounded_speed(pilot.scored_bytes / pilot.seconds)
        answers_per_second = rounded_speed(written.answers / written.seconds)
        answer, seconds = 1 / answers_per_second, 60 * tryout.settings.minutes
        measuring = MODELS_MEASURED * STUDENT_COST * answer * sizes[0] / sizes[1]
        if not self.prompts.answer_field:
            measuring = answer + MODELS_MEASURED * size / speed
        training = answer + MODELS_TRAINED * PASSES * TRAINING_COST * size / speed
        held_out = round(MEASURING_SHARE * seconds / measuring)
        held_out = max(LEAST, min(held_out, MOST_QUESTIONS, len(self.prompts) // 4))
        answers = max(LEAST, round(TRAINING_SHARE * seconds / training))
        count = max(LEAST, min(answers, len(self.prompts) - held_out))
        return {
            "bytes_per_second": speed,
            "seconds_per_answer": answer,
            "parameters": sizes[0],
            "held_out": held_out,
            "prompts": count,
            "samples": max(1, min(MOST_SAMPLES, answers // count)),
        }

    def _require_enough(self, count: int) -> None:
        if count < 2 * LEAST:
            raise CorpusError(
                f"There are too few prompts to split: {count:,} different ones can be asked, and a "
                f"try needs at least {2 * LEAST}, half of them held out. Give more prompts."
            )

    def _require_gradable(self, prompts: Sequence[Prompt]) -> None:
        count = sum(map(self.has_answer, prompts))
        if self.is_right is not None and count < LEAST:
            raise UsageError(
                f"--answer-field {self.prompts.answer_field}: {count:,} of {len(prompts):,} "
                f"prompts have an answer there that --grade {self.asked['grade']} can compare; a "
                f"try needs at least {LEAST}."
            )

    def split(self, plan: Facts) -> Facts:
        """Held-out prompts, whose answers can be graded where there is an answer field; prompts
        that the teacher answers for the students; and the answers that these have already."""
        held_out, training = list[Prompt](), list[Prompt]()
        gradable = self.prompts.answer_field is not None
        for prompt in self.order():
            if len(held_out) < plan["held_out"] and (not gradable or self.has_answer(prompt)):
                held_out.append(prompt)
            elif len(training) < plan["prompts"]:
                training.append(prompt)
            elif len(held_out) == plan["held_out"]:
                break
        self._require_enough(LEAST + len(training))
        self.write_sample("held-out", held_out)
        self.write_sample("prompts", training)
        given = [text for prompt in training if (text := self.given_answer(prompt)) is not None]
        if len(given) >= LEAST:
            write_records(self.tryout.sample("given"), as_records(given, conversations=True))
        self.tryout.say(
            f"held out: {len(held_out):,} of {len(self.prompts):,} prompts; to answer: "
            f"{len(training):,}, {plan['samples']} times each"
        )
        return {
            "prompts": len(training),
            "held_out": len(held_out),
            "given": len(given) if len(given) >= LEAST else 0,
            "samples": plan["samples"],
        }

    def given_answer(self, prompt: Prompt) -> str | None:
        """The prompt with the answer that its record holds, as a shared text."""
        for _, record in self.prompts.records.records(prompt.index, prompt.index + 1):
            fields = record.value if isinstance(record.value, dict) else {}
            if (kind := format_of(fields, "")) is None:
                continue
            try:
                messages = conversation_of(fields, kind)
            except Refused:
                continue
            last = messages[-1]
            if last.role == "assistant" and last.content.strip() and not last.given:
                return shared_text(messages)
        return None

    def write(self, name: str, folder: str, samples: int) -> Facts:
        """The teacher's answers to the prompts of a sample."""
        label = f"{self.tryout.names[self.teacher]} writes"
        with self.tryout.bar(label, "answers") as note:
            written = self._written(
                self.tryout.sample(name), self.tryout.out / folder, samples, note
            )
        about = written.folder["written"]
        marked = about.get("marked_answers")
        self.tryout.say(
            f"{self.tryout.names[self.teacher]} wrote {written.folder['documents']:,} answers"
            + (f", {about['right_answers'] / max(marked, 1):.0%} of them right" if marked else "")
        )
        return {
            "kept": written.folder["documents"],
            "left_out": written.folder["skipped_reasons"],
            "tokens": written.folder["tokens"],
            "file_bytes": written.folder["file_bytes"],
            "right_share": about["right_answers"] / marked if marked else None,
            # answers that an interrupted try has written were not timed
            "seconds_per_answer": written.seconds / written.answers if written.answers else None,
        }

    def _written(
        self, prompts: Path, out: Path, samples: int, note: Callable[[float, int], None]
    ) -> WriteSummary:
        settings = self.settings(samples)
        return write_answers(
            self.teacher,
            prompts,
            out,
            settings=settings,
            answer_field="answer" if settings.grade else None,
            on_progress=lambda now: note(now.documents, now.total_documents),
        )
