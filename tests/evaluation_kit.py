"""Small benchmark files in every format, and a two-layer model, all made here."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

ROWS = {
    "gsm8k/test.jsonl": [
        {"question": f"Tom has {n} apples and buys 2. How many has he?",
         "answer": f"{n} + 2 = <<{n}+2={n + 2}>>{n + 2}\n#### {n + 2}"}
        for n in range(5)
    ],
    "math_oai/test.jsonl": [
        {"problem": "Find $1+1$.", "answer": "2", "subject": "Algebra", "level": 1,
         "unique_id": "test/algebra/1.json", "solution": "It is $\\boxed{2}$."},
        {"problem": "Solve $2x=1$.", "answer": "\\frac{1}{2}",
         "solution": "So $x=\\boxed{0.5}$ or $\\boxed{\\frac{1}{2}}$."},
    ],
    "math/test.jsonl": [
        {"problem": "Find $1+1$.", "level": "Level 1", "type": "Algebra",
         "solution": "It is $\\boxed{2}$."},
        {"problem": "Solve $2x=1$.", "solution": "So $x=\\boxed{\\frac{1}{2}}$."},
        {"problem": "Where is $\\sqrt{x-2}$ defined?", "solution": "$\\boxed{[2,\\infty)}$"},
    ],
    "svamp/test.jsonl": [
        {"Body": "There are 290 bananas in 2 groups", "Question": "How big is a group?",
         "Answer": 145.0, "ID": "chal-1"},
        {"Body": "Ann has 3 pens.", "Question": "How many pens?", "Answer": 3.0},
    ],
    "asdiv/test.jsonl": [
        {"body": "Seven red and two green apples.", "question": "How many apples?",
         "answer": "9 (apples)", "formula": "7+2=9"},
        {"body": "A race.", "question": "Is Ann faster?", "answer": "Yes"},
        {"body": "Two answers.", "question": "Which?", "answer": "3; 4"},
    ],
    "mawps/test.jsonl": [{"input": "Joan had 70 and gave 27. How many left?", "target": 43.0}],
    "tabmwp/problems_test1k.json": {
        "16": {"question": "What is the mean?", "choices": None, "answer": "84", "unit": None,
               "table_title": "Coins", "table": "Name | Coins\nAnn | 84", "ans_type": "integer"},
        "54": {"question": "Shortage or surplus?", "choices": ["shortage", "surplus"],
               "answer": "shortage", "table_title": None, "table": "a | b\n1 | 2"},
    },
    "mathqa/test.jsonl": [
        {"problem": "the value of x is :", "options": "a ) 12 , b ) 16 , c ) 18 , d ) 24 , e ) 26",
         "correct": "a", "rationale": ""},
        {"problem": "the area ?",
         "options": "['a ) 4 cm ²', 'b ) 5 cm ²', 'c ) 6', 'd ) 7', 'e ) none']",
         "correct": "e"},
        {"problem": "twice ?",
         "options": "a ) a ) 1 , b ) b ) 2 , c ) c ) 3 , d ) d ) 4 , e ) e ) 5",
         "correct": "c"},
    ],
    "mmlu_stem/test.jsonl": [
        {"question": "A mutation is", "type": "college_biology",
         "choices": ["one", "two", "three", "four"], "answer": 2},
        {"question": "What is 2+2?", "choices": [3, 4, 5, 6], "answer": 1},
    ],
    "sat_math/test.jsonl": [
        {"id": "0", "question": "Which is true?", "options": "A) $f(-6)=0$ B) $f(6)$ C) 3 D) 4",
         "Answer": "A"},
        {"id": "1", "question": "How many?", "options": "A. 1,190 B. 1,900 C. 2,900 D. 19,000",
         "Answer": "C"},
    ],
    "gsm_hard/test.jsonl": [{"input": "How many in all?", "code": "", "target": -9867630.0}],
}  # fmt: skip


# a random model never stops by itself
QUICK = {"batch_size": 2, "device": "cpu", "max_new_tokens": 8}


def write_rows(folder: Path, name: str, rows) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".json"):
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def small_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [json.dumps(rows, ensure_ascii=False) for rows in ROWS.values()]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def make_model(folder: Path, seed: int = 0, context: int = 4096, **options) -> Path:
    torch.manual_seed(seed)
    tokenizer = small_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = LlamaConfig(
        **{"hidden_size": 48, "intermediate_size": 64, "initializer_range": 0.4} | options,
        vocab_size=tokenizer.get_vocab_size(),
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
