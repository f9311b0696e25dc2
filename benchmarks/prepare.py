"""`vocagnolm prepare`: its rate beside tokenising alone, on conversations, and its memory.

    python benchmarks/prepare.py --student S [S ...] --teacher T [T ...] --corpus F.jsonl
        [--megabytes 8] [--rounds 3] [--workers N] [--alternatives 4] [--json [FILE]]
    python benchmarks/prepare.py chat --student S --teacher T --corpus F.jsonl
        [--student-template F.jinja] [--teacher-template F.jinja] [--megabytes 4]
    python benchmarks/prepare.py memory --student S [S ...] --teacher T [T ...] --corpus F.jsonl
        [--megabytes 16] [--alternatives 4]

S and T are tokenizers (folder or tokenizer.json). Loss stores are made up: real teacher tokens with
random losses, because their content does not change the work. What a run takes before its first
document is measured apart and left out: it does not grow with the corpus.

`rate`, the first, is of all pairs of a student and a teacher. Tokenising alone is `encode_batch` of
the student's tokenizer over the same documents with all cores; `prepare` reads the corpus and the
store, checks every document's hash, tokenises, finds spans, aligns, carries, packs and writes.
Measured with the tokenizer's threads (one process) and with one process a core, by the clock on the
wall and by processor time, children included, which a busy machine changes less. With
--alternatives K the store also has K made-up alternatives a token, and `prepare` for distillation,
which turns them into targets, takes its turn beside the others.

`chat` cuts every document into messages of a few hundred bytes, of which four make a conversation
of two turns; the plain text beside it is the same pieces, four to a document. Both are prepared
with the tokenizer's threads; the rate is bytes of contents a second of processor time.

`memory` joins the documents into one text, which `prepare` splits into documents of a megabyte, and
gives bytes per byte of that text, with one teacher for each student: two processes, one with the
whole text and one with its first 2,000 characters, and the difference of the peaks of their
resident memory. `guided` and `distill` are what the process holds; `mapped` is from files (the
store, and long columns that wait for the end of the part), which the system takes back when it
needs memory. Linux only.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from made_up import Stored, made_up, made_up_alternatives, made_up_store
from record import STDOUT, add_json, keep
from tokenizers import Tokenizer

from vocagnolm.alignment import TextTokenizer, TokenSpans, load_tokenizer
from vocagnolm.chat import ChatTokenizer, Message, shared_text, template_of
from vocagnolm.data.corpus import open_corpus, split_text
from vocagnolm.data.prepare import in_batches, prepare, tokenise
from vocagnolm.model.nll import TokenScores
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.score.teacher import TokenizedDocument

BATCH_DOCUMENTS = 64


def read_texts(given: Any) -> list[str]:
    """Documents of the corpus up to --megabytes."""
    texts, size = [], 0
    for document in open_corpus(given.corpus, text_field=given.text_field, format="text"):
        if document.text:
            texts.append(document.text)
            size += len(document.text.encode())
        if size >= given.megabytes * 1e6:
            break
    return texts


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def prepared(lab: Path, student: Any, corpus: str, store: str, **more: Any) -> dict[str, Any]:
    """Prepare a corpus of the lab into blocks of a new folder, and give the summary."""
    data = {"blocks": tempfile.mkdtemp(dir=lab), "bos": None, "eos": None, "block_size": 32}
    tree = {
        "objective": {"method": more.get("method", "guided")},
        "student": student if isinstance(student, dict) else {"tokenizer": student},
        "corpus": {"files": [str(lab / corpus)], "limit_documents": more.get("documents")},
        "store": {"path": str(lab / store)},
        "data": data | more.get("data", {}),
    }
    return prepare(recipe_from_dict(tree), workers=more.get("workers", 1))


def name_of(tokenizer: str) -> str:
    path = Path(tokenizer)
    return path.parent.name if path.name == "tokenizer.json" else path.name


# ---- the rate beside tokenising alone ----


class Spent(NamedTuple):
    """Seconds on the wall, and of processor time with all processes that have ended."""

    wall: float
    cpu: float


def spent(call: Callable[[], Any]) -> Spent:
    before, started = os.times(), time.perf_counter()
    call()
    after = os.times()
    return Spent(time.perf_counter() - started, sum(after[:4]) - sum(before[:4]))


def times_of(
    lab: Path, student: str, teacher: str, texts: list[str], given: Any
) -> tuple[int, dict[str, list[Spent]]]:
    """Student tokens, and what every way of preparing and its start took in each round."""
    raw = Tokenizer.from_str(load_tokenizer(student)._tokenizer.to_str())
    batches = [texts[i : i + BATCH_DOCUMENTS] for i in range(0, len(texts), BATCH_DOCUMENTS)]
    write_records(lab / "corpus.jsonl", [{"text": text} for text in texts])
    read = tokenise(load_tokenizer(teacher), texts)
    losses = [made_up(spans.token_bytes) for spans in read]
    made_up_store(lab / "guided", texts, losses)
    if given.alternatives:
        others = made_up_alternatives(read, given.alternatives)
        made_up_store(lab / "distill", texts, losses, load_tokenizer(teacher), others)

    def prepare_with(workers: int, documents: int | None = None, method: str = "guided") -> Any:
        # a part for every worker also in the run that measures its start
        data = {"part_documents": 1 if documents else given.part_documents}
        more = {"workers": workers, "documents": documents, "method": method, "data": data}
        return prepared(lab, student, "corpus.jsonl", method, **more)

    def tokenise_alone() -> None:
        raw.model._clear_cache()  # as `prepare`, which begins with a tokenizer of its own
        for batch in batches:
            raw.encode_batch(batch, add_special_tokens=False)

    calls: dict[str, Callable[[], Any]] = {
        "tokenise": tokenise_alone,
        "threads": lambda: prepare_with(1),
        "threads start": lambda: prepare_with(1, documents=1),
    }
    if given.alternatives:
        calls["distill"] = lambda: prepare_with(1, method="distill")
        calls["distill start"] = lambda: prepare_with(1, documents=1, method="distill")
    if given.workers > 1:
        calls["processes"] = lambda: prepare_with(given.workers)
        calls["processes start"] = lambda: prepare_with(given.workers, given.workers)
    tokens = prepare_with(1)["tokens"]
    times: dict[str, list[Spent]] = {name: [] for name in calls}
    for _ in range(given.rounds):  # taking turns: a busy machine hits all alike
        for name, call in calls.items():
            times[name].append(spent(call))
    return tokens, times


def rate_of_pair(student: str, teacher: str, texts: list[str], given: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        tokens, times = times_of(Path(temporary), student, teacher, texts, given)
    result: dict[str, Any] = {
        "student": name_of(student),
        "teacher": name_of(teacher),
        "documents": len(texts),
        "tokens": tokens,
        "workers": given.workers,
    }
    ways = [name for name in times if f"{name} start" in times]
    for clock in Spent._fields:
        median = {
            n: statistics.median(getattr(each, clock) for each in t) for n, t in times.items()
        }
        result[f"tokenise_{clock}_seconds"] = median["tokenise"]
        for way in ways:
            alone = max(median[way] - median[f"{way} start"], 1e-9)
            result[f"{way}_{clock}_seconds"] = alone
            result[f"{way}_{clock}_ratio"] = median["tokenise"] / alone
            result[f"{way}_{clock}_start_seconds"] = median[f"{way} start"]
        if given.alternatives:
            without = result[f"threads_{clock}_seconds"]
            result[f"distill_of_threads_{clock}"] = without / result[f"distill_{clock}_seconds"]
    return result


def rate(given: Any) -> None:
    texts = read_texts(given)
    ways = ("threads", "processes") if given.workers > 1 else ("threads",)
    shown = [f"{way}_{clock}_ratio" for clock in Spent._fields for way in ways]
    if given.alternatives:
        shown += [f"distill_of_threads_{clock}" for clock in Spent._fields]
    stream = sys.stderr if given.json == STDOUT else sys.stdout
    heads = ", ".join(name.replace("_", " ") for name in shown)
    print(f"student x teacher, tokens, {heads}", file=stream)
    rows = []
    for student in given.student:
        for teacher in given.teacher:
            if student == teacher:
                continue
            row = rate_of_pair(student, teacher, texts, given)
            rows.append(row)
            ratios = "  ".join(f"{row[name]:.2f}" for name in shown)
            pair = f"{row['student']} x {row['teacher']}"
            print(f"{pair:32} {row['tokens']:>10,}  {ratios}", file=stream, flush=True)
    keep(given.json, "prepare beside tokenising alone", rows)


# ---- conversations ----

TURNS = ("user", "assistant", "user", "assistant")
SIZES = {"user": 250, "assistant": 900}
"""Characters of a message, about those of instruction data."""


def conversations(texts: Sequence[str]) -> list[list[Message]]:
    """The words of every text as conversations; what is too short for one is left out."""
    made: list[list[Message]] = []
    for text in texts:
        words = text.split(" ")[::-1]
        talk: list[Message] = []
        while words:
            role, content = TURNS[len(talk)], ""
            while words and len(content) < SIZES[role]:
                content += f" {words.pop()}" if content else words.pop()
            talk.append(Message(role, content.strip() or "."))
            if len(talk) == len(TURNS):
                made.append(talk)
                talk = []
    return made


def stored(tokens: Sequence[TokenSpans]) -> list[Stored]:
    """Made-up losses as a conversation's store holds them: none where a token of the template has
    no text."""
    read = [TokenizedDocument(spans.ids, spans.token_bytes, spans) for spans in tokens]
    kept = [document.stored(TokenScores(made_up(document.token_bytes)[1])) for document in read]
    return [(lengths, scores.nll) for lengths, scores in kept]


def chat(given: Any) -> None:
    (student,), (teacher_file,) = given.student, given.teacher
    talks = conversations(read_texts(given))
    plain = ["\n".join(message.content for message in talk) for talk in talks]
    shared = [shared_text(talk) for talk in talks]
    content_bytes = sum(len(m.content.encode()) for talk in talks for m in talk)
    teacher = load_tokenizer(teacher_file, check=False)
    template = ChatTokenizer(teacher, template_of(teacher, given.teacher_template))
    settings = {"tokenizer": student, "chat_template": given.student_template}
    with tempfile.TemporaryDirectory() as temporary:
        lab = Path(temporary)
        made_up_store(lab / "text-store", plain, stored(in_batches(teacher.spans_batch, plain)))
        made_up_store(lab / "talk-store", shared, stored(in_batches(template.spans_batch, shared)))
        write_records(lab / "text.jsonl", [{"text": text} for text in plain])
        messages = [[{"role": m.role, "content": m.content} for m in talk] for talk in talks]
        write_records(lab / "talk.jsonl", [{"messages": talk} for talk in messages])

        def run(name: str, documents: int | None = None) -> dict[str, Any]:
            corpus, store = f"{name}.jsonl", f"{name}-store"
            return prepared(lab, settings, corpus, store, documents=documents)

        summaries = {name: run(name)["summary"] for name in ("text", "talk")}
        seconds: dict[str, list[float]] = {name: [] for name in summaries}
        for _ in range(given.rounds):  # taking turns: a busy machine hits both alike
            for name, values in seconds.items():
                begun = time.process_time()
                run(name, documents=1)
                started = time.process_time()
                run(name)
                values.append(time.process_time() - started - (started - begun))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    result = {
        "conversations": len(talks),
        "content_bytes": content_bytes,
        "text_tokens": summaries["text"]["tokens"],
        "conversation_tokens": summaries["talk"]["tokens"],
        "trained_tokens": summaries["talk"]["trained"],
        "refused": sum(summaries["talk"]["refused"].values()),
        "text_megabytes_per_second": content_bytes / median["text"] / 1e6,
        "conversation_megabytes_per_second": content_bytes / median["talk"] / 1e6,
        "ratio": median["text"] / median["talk"],
    }
    keep(given.json, "prepare on conversations beside plain text", [result])
    for name, value in result.items() if given.json != STDOUT else ():
        shown = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
        print(f"{name.replace('_', ' '):40} {shown}")


# ---- memory for one long text ----

SHORT = 2000


def resident() -> dict[str, int]:
    """Bytes by kind: anonymous memory, mapped files."""
    lines = [
        line.split() for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    ]
    return {line[0][3:-1].lower(): 1024 * int(line[1]) for line in lines if line[0][:3] == "Rss"}


def watch_prepare(lab: Path, student: str, method: str, name: str, answers: Any) -> None:
    """Prepare a text in this process, and answer with the peak of its memory."""
    peak, over = resident(), threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            for kind, value in resident().items():
                peak[kind] = max(peak[kind], value)

    watching = threading.Thread(target=watch)
    watching.start()
    prepared(lab, student, f"{name}.jsonl", f"{name}-{method}", method=method)
    over.set()
    watching.join()
    answers.put(peak)


def peak_of(*arguments: Any) -> dict[str, int]:
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    child = context.Process(target=watch_prepare, args=(*arguments, answers))
    child.start()
    peak: dict[str, int] = answers.get()
    child.join()
    return peak


def write_lab(lab: Path, long: str, teacher: TextTokenizer, alternatives: int) -> None:
    for name, text in (("long", long), ("short", long[:SHORT])):
        write_records(lab / f"{name}.jsonl", [{"text": text}])
        pieces = split_text(text)
        read = tokenise(teacher, pieces)
        losses = [made_up(tokens.token_bytes) for tokens in read]
        made_up_store(lab / f"{name}-guided", pieces, losses)
        others = made_up_alternatives(read, alternatives)
        made_up_store(lab / f"{name}-distill", pieces, losses, teacher, others)


def memory(given: Any) -> None:
    size = int(given.megabytes * 1e6)
    long = "\n\n".join(read_texts(given)).encode()[:size].decode(errors="ignore")
    rows = []
    for student, teacher in zip(given.student, given.teacher, strict=True):
        row: dict[str, Any] = {"student x teacher": f"{name_of(student)} x {name_of(teacher)}"}
        with tempfile.TemporaryDirectory() as lab:
            write_lab(Path(lab), long, load_tokenizer(teacher), given.alternatives or 4)
            for method in ("guided", "distill"):
                # the first one asks transformers about the tokenizer and makes the targets' table
                names = ("short", "short", "long")
                _, start, whole = (peak_of(Path(lab), student, method, name) for name in names)
                above = {kind: (whole[kind] - start[kind]) / len(long.encode()) for kind in whole}
                row |= {method: above["anon"], f"{method}, mapped": above["file"]}
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    keep(given.json, "memory of prepare for one long text", rows)


PARTS = {"rate": (rate, 8.0), "chat": (chat, 4.0), "memory": (memory, 16.0)}
"""Name -> what it does, and its megabytes."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=PARTS, default="rate")
    parser.add_argument("--student", required=True, nargs="+")
    parser.add_argument("--teacher", required=True, nargs="+")
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--text-field", default="text")
    parser.add_argument("--megabytes", type=float, help="default: 8, 4 or 16")
    parser.add_argument("--rounds", type=int, default=3)
    cores = os.cpu_count() or 1
    parser.add_argument("--workers", type=int, default=cores, help="rate: 1: threads alone")
    parser.add_argument("--part-documents", type=int, default=256, help="rate: in a part")
    parser.add_argument("--alternatives", type=int, default=0, help="memory: 4 by default")
    parser.add_argument("--student-template", help="chat")
    parser.add_argument("--teacher-template", help="chat")
    add_json(parser)
    given = parser.parse_args()
    part, megabytes = PARTS[given.part]
    given.megabytes = given.megabytes or megabytes
    part(given)


if __name__ == "__main__":
    main()
