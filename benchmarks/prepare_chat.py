"""`prepare` on conversations beside plain text of the same size, in one run.

    python benchmarks/prepare_chat.py --student S --teacher T --corpus F.jsonl
        [--student-template F.jinja] [--teacher-template F.jinja] [--megabytes 4] [--json [FILE]]

S and T are tokenizers (folder or tokenizer.json). Every document of the corpus is cut into messages
of a few hundred bytes, of which four make a conversation of two turns; the plain text is the same
pieces, four to a document. The loss stores are made up: real teacher tokens with random losses.
Both are prepared with the tokenizer's threads (one process); the rate is bytes of contents a second
of processor time, which a busy machine changes less than the time on the wall. What a run takes
before its first document is measured apart and left out: it does not grow with the corpus.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from made_up import Stored, made_up, made_up_store
from record import STDOUT, add_json, keep

from vocagnolm.alignment import TokenSpans, load_tokenizer
from vocagnolm.chat import ChatTokenizer, Message, shared_text, template_of
from vocagnolm.data.corpus import open_corpus
from vocagnolm.data.prepare import in_batches, prepare
from vocagnolm.model.nll import TokenScores
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.score.teacher import TokenizedDocument

TURNS = ("user", "assistant", "user", "assistant")
SIZES = {"user": 250, "assistant": 900}
"""Characters of a message, about those of instruction data."""


def conversations(corpus: str, field: str, n_bytes: int) -> list[list[Message]]:
    found: list[list[Message]] = []
    size = 0
    for document in open_corpus(corpus, text_field=field, format="text"):
        words = (document.text or "").split(" ")
        talk: list[Message] = []
        while words:
            role, content = TURNS[len(talk)], ""
            while words and len(content) < SIZES[role]:
                content += f" {words.pop(0)}" if content else words.pop(0)
            talk.append(Message(role, content.strip() or "."))
            if len(talk) == len(TURNS):
                found.append(talk)
                size += sum(len(message.content.encode()) for message in talk)
                talk = []
        if size >= n_bytes:
            break
    return found


def stored(tokens: Sequence[TokenSpans]) -> list[Stored]:
    """A conversation's store has no losses for what no token of the template holds."""
    read = [TokenizedDocument(one.ids, one.token_bytes, one) for one in tokens]
    stored = [one.stored(TokenScores(made_up(one.token_bytes)[1])) for one in read]
    return [(lengths, scores.nll) for lengths, scores in stored]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--student", required=True)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--student-template")
    parser.add_argument("--teacher-template")
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--text-field", default="text")
    parser.add_argument("--megabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    add_json(parser)
    given = parser.parse_args()

    talks = conversations(given.corpus, given.text_field, int(given.megabytes * 1e6))
    plain = ["\n".join(message.content for message in talk) for talk in talks]
    shared = [shared_text(talk) for talk in talks]
    content_bytes = sum(len(m.content.encode()) for talk in talks for m in talk)
    teacher = load_tokenizer(given.teacher, check=False)
    chat = ChatTokenizer(teacher, template_of(teacher, given.teacher_template))

    with tempfile.TemporaryDirectory() as temporary:
        lab = Path(temporary)
        made_up_store(lab / "text-store", plain, stored(in_batches(teacher.spans_batch, plain)))
        made_up_store(lab / "talk-store", shared, stored(in_batches(chat.spans_batch, shared)))
        records: dict[str, list[dict[str, Any]]] = {
            "text": [{"text": text} for text in plain],
            "talk": [
                {"messages": [{"role": m.role, "content": m.content} for m in talk]}
                for talk in talks
            ],
        }
        for name, rows in records.items():
            content = "".join(json.dumps(row) + "\n" for row in rows)
            (lab / f"{name}.jsonl").write_text(content, "utf-8")
        runs = iter(range(10**6))

        def prepared(name: str, documents: int | None = None) -> dict[str, Any]:
            data = {"blocks": str(lab / f"blocks-{next(runs)}"), "bos": None, "eos": None}
            student = {"tokenizer": given.student, "chat_template": given.student_template}
            tree = {
                "student": student,
                "corpus": {"files": [str(lab / f"{name}.jsonl")], "limit_documents": documents},
                "store": {"path": str(lab / f"{name}-store")},
                "data": data,
            }
            return prepare(recipe_from_dict(tree))

        summaries = {name: prepared(name)["summary"] for name in records}
        seconds: dict[str, list[float]] = {name: [] for name in records}
        for _ in range(given.rounds):  # taking turns: a busy machine hits both alike
            for name in records:
                begun = time.process_time()
                prepared(name, documents=1)
                started = time.process_time()
                prepared(name)
                seconds[name].append(time.process_time() - started - (started - begun))
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
    if given.json == STDOUT:
        print(json.dumps(result, indent=1))
        return
    keep(given.json, "prepare on conversations beside plain text", [result])
    for name, value in result.items():
        shown = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
        print(f"{name.replace('_', ' '):40} {shown}")


if __name__ == "__main__":
    main()
