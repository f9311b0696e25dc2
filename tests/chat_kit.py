"""Conversations, and small tokenizers that read them in the templates of real models."""

import json
import random
from functools import cache
from pathlib import Path

import made
from tokenizers import Tokenizer

from vocagnolm.alignment import TextTokenizer, load_tokenizer
from vocagnolm.alignment.tokenizer import Frame
from vocagnolm.chat import ChatTokenizer, Message, template_of

TEMPLATES = Path(__file__).parent / "templates"
# control tokens, beginning and end, and the kind of tokenizer of each model
SHAPES: dict[str, tuple[str, str | None, str, tuple[str, ...]]] = {
    "smollm2": ("byte-level", None, "<|im_end|>", ("<|im_start|>", "<|im_end|>")),
    "qwen2.5": ("byte-level NFC", None, "<|im_end|>", ("<|im_start|>", "<|im_end|>")),
    "qwen3": ("byte-level large", None, "<|im_end|>", ("<|im_start|>", "<|im_end|>")),
    "llama3": (
        "byte-level large",
        "<|begin_of_text|>",
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "mistral": ("sentencepiece first", "<s>", "</s>", ("[INST]", "[/INST]")),
    "llama2": ("sentencepiece prepend", "<s>", "</s>", ()),
    "gemma": ("sentencepiece never", "<s>", "<end_of_turn>", ("<start_of_turn>", "<end_of_turn>")),
    "deepseek": (
        "byte-level",
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    ),
    "phi3": (
        "sentencepiece always",
        "<s>",
        "<|endoftext|>",
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    ),
    "zephyr": ("unigram byte fallback", "<s>", "</s>", ()),
}


@cache
def base(name: str) -> TextTokenizer:
    kind, bos, eos, control = SHAPES[name]
    tokenizer = Tokenizer.from_str(made.tokenizer(kind).to_str())
    tokenizer.add_special_tokens([token for token in (*control, bos, eos) if token])
    special = {"bos_token": bos, "eos_token": eos}
    frame = Frame(
        template=(TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n"),
        special_tokens=tuple((n, t) for n, t in special.items() if t),
    )
    return TextTokenizer(tokenizer, name=name, frame=frame)


@cache
def chat(name: str) -> ChatTokenizer:
    return ChatTokenizer(base(name), template_of(base(name)))


def save_chat_tokenizer(folder: Path, tokenizer: Path, template: str, control: list[str]) -> Path:
    """A tokenizer folder with control tokens and a template of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    made_one = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    made_one.add_special_tokens(control)
    made_one.save(str(folder / "tokenizer.json"))
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def conversations(
    count: int, seed: int = 0, words: int = 24, turns: int = 2
) -> list[list[Message]]:
    from training_kit import documents

    rng = random.Random(seed)
    texts = iter(documents(count * (2 * turns + 1), seed=seed, words=words))
    made_ones = []
    for _ in range(count):
        start = [Message("system", next(texts).strip())] if rng.random() < 0.3 else []
        for _ in range(rng.randint(1, turns)):
            start += [
                Message("user", next(texts).strip()),
                Message("assistant", next(texts).strip()),
            ]
        made_ones.append(start)
    return made_ones


def write_conversations(path: Path, found: list[list[Message]]) -> Path:
    lines = [
        json.dumps({"messages": [{"role": m.role, "content": m.content} for m in one]})
        for one in found
    ]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def loaded(folder: Path) -> ChatTokenizer:
    tokenizer = load_tokenizer(str(folder), check=False)
    return ChatTokenizer(tokenizer, template_of(tokenizer))


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_LIKE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|header|>' + message['role'] + '<|body|>\n\n'"
    " + message['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|body|>\n\n' }}{% endif %}"
)


def make_chat_lab(folder: Path, count: int = 40) -> list[list[Message]]:
    """A student that reads ChatML, a teacher that reads Llama's shape, a twin of the student that
    teaches in its vocabulary, and a corpus of conversations."""
    from training_kit import LLAMA, save_tokenizer

    save_tokenizer(folder / "bytes", kind="bytes")
    save_tokenizer(folder / "pieces", kind="pieces")
    marks = ["<|im_start|>", "<|im_end|>"]
    save_chat_tokenizer(folder / "student", folder / "bytes", CHATML, marks)
    save_chat_tokenizer(
        folder / "pieces-chat", folder / "pieces", LLAMA_LIKE, ["<|header|>", "<|body|>", "<|eot|>"]
    )
    config = json.loads((folder / "pieces-chat" / "tokenizer_config.json").read_text())
    config["bos_token"] = "<s>"
    (folder / "pieces-chat" / "tokenizer_config.json").write_text(json.dumps(config))
    room = {**LLAMA, "max_position_embeddings": 512}
    save_random_model(folder / "start", folder / "student", room | {"vocab_size": 328}, seed=3)
    save_random_model(folder / "twin", folder / "student", room | {"vocab_size": 328}, seed=1)
    save_random_model(
        folder / "teacher", folder / "pieces-chat", room | {"vocab_size": 528}, seed=2
    )
    found = conversations(count)
    write_conversations(folder / "corpus.jsonl", found)
    return found


def save_random_model(folder: Path, tokenizer: Path, settings: dict, *, seed: int) -> None:
    import shutil

    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    set_seed(seed)
    kept = {name: value for name, value in settings.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **kept))
    model.save_pretrained(folder)
    for file in tokenizer.iterdir():
        shutil.copyfile(file, folder / file.name)


def learned_by_heart(size: int, rows: list[list[int]], masks: list):
    """A small student that was trained until every trained token is the likeliest."""
    import torch
    from torch.nn import functional as F
    from transformers import LlamaConfig, LlamaForCausalLM

    room = max(map(len, rows))
    ids = torch.tensor([row + [0] * (room - len(row)) for row in rows])
    trained = torch.tensor([[*mask, *[False] * (room - len(mask))] for mask in masks])[:, 1:]
    wanted = ids[:, 1:][trained]
    for seed in range(3):  # from some starts two rows are never told apart
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                **{"vocab_size": size, "hidden_size": 48, "intermediate_size": 96},
                **{"num_hidden_layers": 1, "num_attention_heads": 2, "tie_word_embeddings": True},
                initializer_range=0.1,
            )
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, betas=(0.9, 0.95))
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=10)
        for _ in range(600):
            logits = model.lm_head(model.model(ids).last_hidden_state[:, :-1][trained])
            loss = F.cross_entropy(logits, wanted)
            if loss < 1e-2 and (logits.argmax(-1) == wanted).all():
                return model
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warmup.step()
    raise AssertionError(f"the student did not learn: its loss is {loss:.3f}")
