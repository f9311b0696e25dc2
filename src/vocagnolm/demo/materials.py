"""What `vocagnolm study run toy` needs: the demo's corpus, models and problems in one folder."""

import shutil
from pathlib import Path

from vocagnolm.demo import corpus, students
from vocagnolm.demo.students import NEW_TOKENS
from vocagnolm.evaluate.render import Request, write_requests

TASK = "gsm8k"  # how its answers are read: "The answer is 7."


def write_materials(folder: Path) -> None:
    budget = students.Budget()
    documents = corpus.corpus_documents(budget.documents)
    problems = corpus.held_out_problems(budget.problems, documents)
    corpus.write_jsonl(folder / "corpus.jsonl", documents)
    corpus.write_jsonl(folder / "right.jsonl", [d for d in documents if d[0] == corpus.CLEAN])
    corpus.write_labelled(folder / "labelled.jsonl", documents)
    for name, texts in corpus.specialists(budget.documents).items():
        corpus.write_jsonl(folder / f"{name}.jsonl", texts)
    corpus.write_held_out(folder / "held-out.jsonl", problems)
    requests = [
        Request(TASK, index, one.prompt, str(one.answer), ("\nQuestion:",), NEW_TOKENS)
        for index, one in enumerate(problems)
    ]
    write_requests(folder / "requests.jsonl", requests)
    for model in (students.START, students.TEACHER):
        shutil.copytree(model, folder / model.name, dirs_exist_ok=True)
