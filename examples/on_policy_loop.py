"""On policy in a loop of one's own: any code draws the answers, and `rollout_targets` says what a
teacher with other tokens makes of them.

python examples/on_policy_loop.py     # questions of the demo, its student and its teacher

TRL's GOLDTrainer does the same for two byte-level BPE vocabularies (`lmbda=1.0, beta=1.0`):

    GOLDTrainer(model, teacher_model=teacher, args=GOLDConfig(lmbda=1.0, beta=1.0, ...),
                train_dataset=prompts, processing_class=tokenizer).train()
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from vocagnolm import GuidedCollator, ObjectiveConfig, guided_loss
from vocagnolm.alignment import load_tokenizer
from vocagnolm.chat import ChatTokenizer, Message, template_of
from vocagnolm.chat.messages import shared_text
from vocagnolm.model import open_model
from vocagnolm.rounds import AnswerTeacher, Rollout, rollout_targets

STEPS, ROWS, NEW_TOKENS = 10, 16, 48


def train(
    model: Any, chat: ChatTokenizer, teacher: AnswerTeacher, questions: list[str]
) -> list[float]:
    config = ObjectiveConfig(method="on_policy", divergence="reverse")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    torch.manual_seed(0)
    losses = []
    for step in range(STEPS):
        asked = questions[step * ROWS : (step + 1) * ROWS]
        rollouts = [drawn(model, chat, question) for question in asked]
        rows = [row for row in rollout_targets(rollouts, chat, teacher) if row is not None]
        batch = GuidedCollator()(rows)
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = guided_loss(logits, batch["labels"], batch, config)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"{step:3}  divergence {loss.item():.3f} per token")
    return losses


@torch.no_grad()
def drawn(model: Any, chat: ChatTokenizer, question: str) -> Rollout:
    """An answer by transformers' `generate`; an inference server's would do as well."""
    messages = [Message("user", question)]
    read = chat.prompt_ids(messages)
    end = chat.end_of_turn
    written = model.generate(
        torch.tensor([read]),
        do_sample=True,
        top_k=0,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=end,
        pad_token_id=end,
    )
    ids = written[0, len(read) :].tolist()
    return Rollout(shared_text(messages), read, ids, finished=ids[-1] == end)


def demo(folder: Path) -> tuple[Any, ChatTokenizer, AnswerTeacher, list[str]]:
    import demo_data

    from vocagnolm.demo import corpus, students

    template = folder / "questions.jinja"
    template.write_text(students.TEMPLATE, encoding="utf-8")
    model, _ = demo_data.student()
    tokenizer = load_tokenizer(students.START)
    chat = ChatTokenizer(tokenizer, template_of(tokenizer, str(template)))
    files = open_model(students.TEACHER, device="cpu")
    teacher = AnswerTeacher(files, chat_template=str(template))
    problems = corpus.held_out_problems(STEPS * ROWS, [])
    return model, chat, teacher, [problem.question for problem in problems]


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        train(*demo(Path(folder)))
