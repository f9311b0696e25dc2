"""Evaluate a model: render the prompts, generate the answers, grade them."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from vocagnolm.base.files import local_path
from vocagnolm.chat.messages import is_conversation, readable
from vocagnolm.data.sources import Split
from vocagnolm.errors import ModelError, UsageError
from vocagnolm.evaluate.render import Request
from vocagnolm.evaluate.results import (
    BITS,
    Evaluation,
    QuestionRecord,
    RunFolder,
    bits_stderr,
    score_records,
)
from vocagnolm.evaluate.settings import Engine, Questions, grouped, task_conditions, text_conditions
from vocagnolm.generate.reading import Answer
from vocagnolm.questions.graders import Grade, grade
from vocagnolm.recipe import CorpusSection

if TYPE_CHECKING:  # they come with torch
    from vocagnolm.evaluate.bits import BitsPerByte
    from vocagnolm.model import ModelFiles
    from vocagnolm.model.served import ServedModel, Server

# part of a run's identity: answers made by another version of the loop may differ
_FORMAT = 2


@dataclass(frozen=True)
class EvaluationProgress:
    """How far a task is, and all of them together. `text` counts documents, by itself."""

    task: str
    done: int
    total: int
    all_done: int
    all_total: int
    fresh: int
    """The part of `all_done` that this run itself has done."""


OnProgress = Callable[[EvaluationProgress], None]


def evaluate(
    model: str | Path | None = None,
    questions: Questions | None = None,
    engine: Engine | None = None,
    *,
    server: "str | Sequence[str] | Server | None" = None,
    text: Sequence[str | Path] = (),
    text_field: str = CorpusSection.text_field,
    split: Split = CorpusSection.split,
    on_text: "Callable[[BitsPerByte], None] | None" = None,
    out: str | Path | None = None,
    on_progress: OnProgress | None = None,
    on_note: Callable[[str], None] | None = None,
    **keywords: Any,
) -> Evaluation:
    """Evaluate a model on tasks, and measure its bits per byte on `text`.

    The fields of `Questions` and `Engine` can be given as keywords: `evaluate("model",
    tasks="gsm8k", limit=100, device="cpu")`. With `text` but neither `suite` nor `tasks`, only bits
    per byte are computed; with none of the three, the whole math suite is run. With `out`, all
    answers are kept there and an interrupted run can be resumed. `on_text` is called with the bits
    of every document of `text`, and `on_note` with notes for the reader of the scores, such as
    truncated prompts.

    server: the address of a vLLM or SGLang server that runs the model, several of them, or a
    `Server`. Then `model` only provides tokenizer and template; by default they are looked up
    under the server's name for its model.
    """
    questions, engine = grouped(questions, engine, keywords)
    if out is not None:
        local_path(out)
    # the questions first: a missing file shows before a model is loaded
    requests: dict[str, list[Request]] = {}
    if questions.tasks is not None or questions.suite is not None or not text:
        requests = questions.render()

    from vocagnolm.alignment.tokenizer import warn_of_missing_beginning
    from vocagnolm.chat import ChatTokenizer, template_of
    from vocagnolm.evaluate.bits import bits_per_byte
    from vocagnolm.generate import Generator, ServerGenerator
    from vocagnolm.model.served import ServedModel

    served = None if server is None else _served(server, engine)
    files = _model_files(model, engine, served)
    settings: dict[str, Any] = {
        "format": _FORMAT,
        "model": files.describe()["fingerprint"],
        "tokenizer": files.tokenizer.fingerprint,
        "device": files.device.type,
        "dtype": files.dtype_name,
        "batch_size": engine.batch_size,
    }
    if served is not None:
        served.take_probe(files.tokenizer, files.prefix_ids, given=files.name)
        settings |= {"device": "a server", "dtype": "as started", "server": served.describe()}
    if requests:  # text knows no protocol
        settings["protocol"] = questions.protocol
    chat = None
    if requests and questions.chat:
        template = template_of(files.tokenizer, engine.chat_template, engine.template_options)
        chat = ChatTokenizer(files.tokenizer, template)
        settings["template"] = template.fingerprint
        if chat.writes_around:
            settings["answers"] = "contents"  # earlier versions kept all that was written
    elif requests:
        warn_of_missing_beginning(files.tokenizer)
    with TemporaryDirectory() as nowhere, RunFolder(nowhere if out is None else out).lock() as run:
        run.claim(settings, {name: checksum(listed) for name, listed in requests.items()})
        missing = {name: r for name, r in requests.items() if not run.records(name)}
        loaded = served or (files.load() if missing or text else None)
        if missing:
            assert loaded is not None
            generator = (
                ServerGenerator(loaded, files, engine.batch_size, chat)
                if isinstance(loaded, ServedModel)
                else Generator(loaded, files, engine.batch_size, chat)
            )
            try:
                count = _Count(sum(map(len, missing.values())), on_progress)
                for name, listed in missing.items():
                    answer_task(run, generator, listed, count)
                    grade_task(run, name, listed)
            finally:
                generator.close()
            if on_note is not None:
                for note in generator.notes():
                    on_note(note)
        bits = error = None
        if text:
            assert loaded is not None

            def on_documents(done: int, total: int) -> None:
                if on_progress is not None:
                    on_progress(EvaluationProgress("text", done, total, done, total, done))

            measured = bits_per_byte(
                loaded,
                files,
                text,
                text_field=text_field,
                split=split,
                chat_template=engine.chat_template,
                template_options=engine.template_options,
                on_documents=on_documents,
            )
            bits, error = measured.value, bits_stderr(measured.by_document)
            run.write_text_sums(measured.by_document)
            if on_text is not None:
                on_text(measured)
        scores = {name: score_records(run.records(name) or []) for name in requests}
        conditions = {name: task_conditions(listed) for name, listed in requests.items()}
        if text:
            conditions[BITS] = text_conditions(text, text_field)
        protocol = questions.protocol if requests else None
        return run.write_results(Evaluation(scores, bits, protocol, conditions, error))


def _served(server: "str | Sequence[str] | Server", engine: Engine) -> "ServedModel":
    from vocagnolm.model.served import ServedModel, Server

    if engine.dtype != "auto" or engine.device == "cuda":
        raise UsageError(
            "--dtype and --device cuda do not apply with --server: remove them, and configure "
            "the server instead."
        )
    return ServedModel(Server.of(server))


def _model_files(
    model: str | Path | None, engine: Engine, served: "ServedModel | None"
) -> "ModelFiles":
    """The files of the model, with its weights or, where a server has these, without."""
    from vocagnolm.model import open_model

    source = model if model is not None or served is None else served.engine.source
    if source is None:
        raise UsageError(
            "evaluate needs a MODEL: a model folder, a hub id (owner/name), a GGUF file, or "
            "--server URL."
        )
    try:
        return open_model(
            source,
            device=engine.device if served is None else "cpu",
            dtype=engine.dtype,
            revision=engine.revision,
            trust_remote_code=engine.trust_remote_code,
            weights=served is None,
        )
    except ModelError as error:
        if model is not None or served is None:
            raise
        raise ModelError(
            f"{served.url} has the model {source}, whose tokenizer is needed here: "
            f"{error} Give its folder or hub id: vocagnolm evaluate MODEL --server {served.url}"
        ) from None


@dataclass
class _Count:
    """Adds up the questions of all tasks, and those that were answered before."""

    total: int
    on_progress: OnProgress | None
    before: int = 0
    """Questions of the tasks that are done."""
    fresh: int = 0

    def note(self, task: str, done: int, total: int, fresh: int = 0) -> None:
        """Report that `done` questions of the task are answered, `fresh` more of them in this
        run."""
        self.fresh += fresh
        if self.on_progress is not None:
            all_done = self.before + done
            self.on_progress(
                EvaluationProgress(task, done, total, all_done, self.total, self.fresh)
            )


def checksum(requests: Sequence[Request]) -> str:
    """A digest of every field of the requests but the protocol, which the settings name."""
    fields = ({k: v for k, v in asdict(request).items() if k != "protocol"} for request in requests)
    return hashlib.sha256("".join(map(json.dumps, fields)).encode()).hexdigest()


def answer_task(
    run: RunFolder, generator: Any, requests: list[Request], count: _Count | None = None
) -> None:
    """Answer what an interrupted run has left open, batch by batch.

    A batch of which any answer is missing is done again as a whole: alone in another batch, a
    question could get another answer. A server makes its own batches, and is asked for what is
    missing alone.
    """
    task = requests[0].task
    count = count or _Count(len(requests), None)
    there = run.answers(task)
    done = 0

    def is_done(batch: Sequence[int]) -> bool:
        nonlocal done
        complete = all(requests[i].index in there for i in batch)
        done += len(batch) if complete else 0
        return complete

    prompts = [request.prompt for request in requests]
    if requests[0].options:
        options = [request.options for request in requests]

        def best(number: int, likelihoods: list[float]) -> Answer:
            letter = requests[number].letters[likelihoods.index(max(likelihoods))]
            return Answer(letter, complete=True)

        batches = (
            [(i, best(i, likelihoods)) for i, likelihoods in batch]
            for batch in generator.compare(prompts, options, is_done)
        )
    else:
        batches = generator.generate(
            prompts,
            stop=requests[0].stop,
            max_new_tokens=requests[0].max_new_tokens,
            is_done=is_done,
        )
    count.note(task, 0, len(requests))
    with contextlib.closing(batches):  # an error here ends what is asked of a server, too
        for batch in batches:
            run.add_answers(task, [(requests[i].index, answer) for i, answer in batch])
            done += len(batch)
            count.note(task, done, len(requests), fresh=len(batch))
    count.before += len(requests)


def grade_task(run: RunFolder, task: str, requests: list[Request]) -> None:
    """Grade all answers of a task and write its final file."""
    answers = run.answers(task)
    records = []
    for request in requests:
        answer, gold, prompt = answers[request.index], request.gold, request.prompt
        output, complete = answer.output, answer.complete
        if is_conversation(prompt):
            prompt = readable(prompt)
        graded = Grade(output == gold, output)  # of options, the output is the letter itself
        if not request.options:
            protocol = request.protocol
            graded = grade(
                task, output, gold, complete=complete, protocol=protocol, question=prompt
            )
        graded_fields = graded.extracted, gold, graded.correct, complete, answer.reasoning
        records.append(QuestionRecord(request.index, prompt, output, *graded_fields))
    run.finish_task(task, records)
