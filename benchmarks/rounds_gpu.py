"""Seconds of a round on policy and where they go, beside `generate` and GOLD's loss.

    PYTHONPATH=src python benchmarks/rounds_gpu.py --student S --teacher T --prompts P [--smoke]
        [--answers 256] [--new-tokens 256] [--rounds 5] [--third-party DIR] [--json [FILE]]

Ours is `vocagnolm train` itself: the student writes, the teacher reads, one optimizer step with the
reverse divergence over 16 alternatives; the first round (which compiles nothing, but captures
graphs and spells the vocabulary) is left out of the medians. The other writes as many answers with
`generate`, in one batch, reads their text with both tokenizers, and makes one step with GOLD's loss
as its source has it (`gold_trainer.py` in --third-party), or, without that, with the sum of both
forward passes and a plain backward, which is less work than GOLD's.

--smoke: the models of the demo on a CPU.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import arguments, clean, report, synchronise
from train_step_gpu import gold_loss
from transformers import AutoModelForCausalLM

from vocagnolm.alignment import load_tokenizer
from vocagnolm.chat import ChatTokenizer, Message, template_of
from vocagnolm.chat.messages import shared_text
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.rounds import train_rounds
from vocagnolm.train.folder import read_metrics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Row = dict[str, Any]


def ours(given: Any, folder: Path) -> Row:
    """Medians over the rounds of a run but its first."""
    tree = {
        "student": {"model": given.student, "chat_template": given.student_template},
        "teacher": {"model": given.teacher, "chat_template": given.teacher_template},
        "rounds": {
            "prompts": [given.prompts],
            "rounds": given.rounds + 1,
            "prompts_per_round": given.answers,
            "max_new_tokens": given.new_tokens,
        },
        "data": {"block_size": given.block_size},
        "objective": {"method": "on_policy", "divergence": "reverse", "alternatives": 16},
        "optimizer": {"learning_rate": 1e-6, "min_learning_rate": 1e-6},
        "train": {
            "device": "auto" if DEVICE == "cuda" else "cpu",
            "dtype": "bfloat16" if DEVICE == "cuda" else "float32",
            "micro_batch": given.micro_batch,
        },
        "run": {"folder": str(folder / "run"), "save_every": 0},
    }
    train_rounds(recipe_from_dict(tree), quiet=True)
    previous, rows = 0, []
    for record in read_metrics(folder / "run" / "metrics.jsonl"):
        seconds = (record["tokens"] - previous) / record["tokens_per_second"]
        previous = record["tokens"]
        writing, reading = record["seconds_writing"], record["seconds_reading"]
        rest = seconds - writing - reading
        rows.append((seconds, writing, reading, rest, record["answer_tokens"]))
    total, writing, reading, rest, tokens = map(statistics.median, zip(*rows[1:], strict=True))
    return {
        "round": "vocagnolm",
        "seconds": total,
        "writing": writing,
        "reading": reading,
        "step and the rest": rest,
        "tokens of an answer": tokens,
        "answers/s": given.answers / total,
    }


class Peer:
    """`generate`, two tokenizers, and GOLD's loss."""

    def __init__(self, given: Any):
        self.given, self.gold = given, gold_loss(given.third_party)
        dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
        load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
        student: Any = load(given.student, dtype=dtype)
        teacher: Any = load(given.teacher, dtype=dtype)
        self.student, self.teacher = student.to(DEVICE), teacher.to(DEVICE).eval()
        self.chats = [
            ChatTokenizer(tokenizer, template_of(tokenizer, template))
            for name, template in (
                (given.student, given.student_template),
                (given.teacher, given.teacher_template),
            )
            for tokenizer in [load_tokenizer(name)]
        ]
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=1e-6)
        lines = Path(given.prompts).read_text(encoding="utf-8").splitlines()
        self.questions = [json.loads(line)["prompt"] for line in lines]

    def round(self, number: int) -> Row:
        count, known = self.given.answers, len(self.questions)
        asked = [self.questions[n % known] for n in range(number * count, (number + 1) * count)]
        seconds, texts = timed(lambda: self.written(asked))
        step, _ = timed(lambda: self.step(texts))
        total = seconds + step
        return {
            "round": "generate and GOLD's loss" if self.gold else "generate and forward passes",
            "seconds": total,
            "writing": seconds,
            "step and the rest": step,
            "answers/s": self.given.answers / total,
        }

    @torch.no_grad()
    def written(self, asked: list[str]) -> list[str]:
        """The conversations with their answers, as shared texts."""
        chat = self.chats[0]
        rows = [chat.prompt_ids([Message("user", question)]) for question in asked]
        width = max(map(len, rows))
        end = chat.end_of_turn or 0
        ids = torch.tensor([[end] * (width - len(row)) + row for row in rows], device=DEVICE)
        mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=DEVICE)
        out = self.student.eval().generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=self.given.new_tokens,
            eos_token_id=end,
            pad_token_id=end,
        )
        texts = []
        for question, row in zip(asked, out[:, width:].tolist(), strict=True):
            own = row[: row.index(end)] if end in row else row
            answer = b"".join(chat.base.bytes_of(token) or b"" for token in own)
            content = answer.decode(errors="ignore").strip() or "-"
            texts.append(shared_text([Message("user", question), Message("assistant", content)]))
        return texts

    def step(self, texts: list[str]) -> None:
        """One optimizer step, an answer at a time where the loss is GOLD's, which goes through
        answers one by one too."""
        self.student.train()
        for text in texts:
            (ours_read,), (theirs_read,) = (chat.outcomes([text]) for chat in self.chats)
            if isinstance(ours_read, str) or isinstance(theirs_read, str):
                continue
            ids, other = (
                torch.from_numpy(tokens.ids.astype("int64"))[None].to(DEVICE)
                for tokens in (ours_read, theirs_read)
            )
            logits = self.student(input_ids=ids, use_cache=False).logits
            with torch.no_grad():
                known = self.teacher(input_ids=other, use_cache=False).logits
            if self.gold is None:
                loss = logits.float().logsumexp(-1).mean() + 0 * known.float().mean()
            else:
                both = (ours_read, ids), (theirs_read, other)
                spans = [torch.from_numpy(tokens.spans)[None].to(DEVICE) for tokens, _ in both]
                labels = [
                    torch.where(torch.from_numpy(tokens.turns >= 0).to(DEVICE), row, -100)
                    for tokens, row in both
                ]
                loss = self.gold(logits, known, *labels, ids, other, *spans)
            (loss / len(texts)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    synchronise()
    began = time.perf_counter()
    result = work()
    synchronise()
    return time.perf_counter() - began, result


def peer_rows(given: Any) -> Row:
    peer = Peer(given)
    rows = [peer.round(number) for number in range(given.rounds + 1)][1:]
    return {
        name: value if isinstance(value, str) else statistics.median(row[name] for row in rows)
        for name, value in rows[0].items()
    }


def smoke(given: Any, folder: Path) -> None:
    """The demo's models and questions."""
    from vocagnolm.demo import corpus, students

    template = folder / "questions.jinja"
    template.write_text(students.TEMPLATE, encoding="utf-8")
    problems = corpus.held_out_problems(32, [])
    lines = [json.dumps({"prompt": problem.question}) + "\n" for problem in problems]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    given.student, given.teacher = str(students.START), str(students.TEACHER)
    given.student_template = given.teacher_template = str(template)
    given.prompts = str(folder / "prompts.jsonl")
    given.answers, given.new_tokens, given.rounds, given.block_size = 6, 40, 2, 128
    given.micro_batch = 1


def main() -> None:
    given = arguments(
        __doc__,
        student={"help": "model folder or hub id"},
        teacher={"help": "model folder or hub id"},
        prompts={"help": "jsonl with a field `prompt`"},
        student_template={"help": "chat template, as in a recipe"},
        teacher_template={"help": "chat template, as in a recipe"},
        answers={"type": int, "default": 256},
        new_tokens={"type": int, "default": 256},
        rounds={"type": int, "default": 5},
        block_size={"type": int, "default": 2048},
        micro_batch={"type": int, "default": 4},
        no_peer={"action": "store_true"},
    )
    with tempfile.TemporaryDirectory() as folder:
        if given.smoke:
            smoke(given, Path(folder))
        elif not (given.student and given.teacher and given.prompts):
            sys.exit("--student, --teacher and --prompts are needed, or --smoke")
        rows = [ours(given, Path(folder))]
        clean()
        if not given.no_peer:
            rows.append(peer_rows(given))
    if len(rows) > 1:
        rows[0]["x the other"] = rows[0]["answers/s"] / rows[1]["answers/s"]
    report(f"A round of {given.answers} answers", rows, given.json)


if __name__ == "__main__":
    main()
