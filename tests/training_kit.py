"""Throw-away tokenizers, models, corpora and stores for the data and training tests."""

import hashlib
import json
import multiprocessing
import os
import random
import socket
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from vocagnolm.alignment import load_tokenizer, token_texts
from vocagnolm.alternatives import pack
from vocagnolm.data.corpus import document_hash
from vocagnolm.store import StoreWriter
from vocagnolm.store.format import Shard, encode_vocabulary, narrowest_unsigned, to_float16

TEXT = (
    "the sum of two numbers is a number and prime integers divide theorem proof let x be real "
    "then y = x + 1 hence \\frac{a}{b} naïve café ½ 東京 42 3.14 1000 equation solution answer"
)
WORDS = TEXT.split()
# Relative, of losses after a few steps of Adam in float32 whose sums have another order: 1e-6 on
# one kind of CPU, 1.3e-5 on another.
ROUNDING = 1e-4


def documents(count: int, seed: int = 0, words: int = 60) -> list[str]:
    rng = random.Random(seed)
    return [
        " ".join(rng.choice(WORDS) for _ in range(rng.randint(words // 3, words))) + ".\n"
        for _ in range(count)
    ]


def write_corpus(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return path


def save_tokenizer(folder: Path, *, kind: str, size: int = 320) -> Path:
    """`bytes`: byte-level BPE with an end token. `pieces`: SentencePiece-like BPE, other merges,
    a beginning token in its template."""
    texts = documents(200, seed=99)
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=["<end>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        eos = "<end>"
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=size + 200,
            special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))],
            max_token_length=6,
            show_progress=False,
        )
        eos = "</s>"
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_store(
    folder: Path,
    texts: list[str],
    tokenizer: Path,
    seed: int = 0,
    alternatives: int = 0,
    sampled: bool = False,
) -> Path:
    """A loss store with made-up losses, a function of seed and document alone; and with made-up
    alternatives."""
    teacher = load_tokenizer(str(tokenizer))
    spans = teacher.spans_batch(texts)
    rng = np.random.default_rng(seed)
    identity: dict[str, Any] = {"teacher": {"name": "made-up"}, "seed": seed}
    packed = vocabulary = None
    if alternatives:
        packed = some_alternatives(np.concatenate([s.ids for s in spans]), alternatives, seed)
        vocabulary = encode_vocabulary(token_texts(teacher, [teacher.eos_id]))
        identity["alternatives"] = {
            "count": alternatives,
            "sampled": sampled,
            "vocabulary_sha256": hashlib.sha256(vocabulary).hexdigest(),
            "vocabulary_bytes": len(vocabulary),
        }
    writer = StoreWriter(folder, identity, 1, vocabulary=vocabulary)
    writer.begin()
    writer.write_shard(
        Shard(
            number=0,
            first_document=0,
            document_span=len(texts),
            document_hash=np.stack(
                [np.frombuffer(document_hash(text), np.uint8) for text in texts]
            ),
            document_index=np.arange(len(texts), dtype="<u8"),
            token_count=np.array([len(s) for s in spans], "<u4"),
            token_bytes=narrowest_unsigned(np.concatenate([s.token_bytes for s in spans])),
            nll=to_float16(rng.gamma(2.0, 1.0, sum(len(s) for s in spans))),
            alternatives=packed,
        )
    )
    writer.finish()
    return folder


def some_alternatives(ids: np.ndarray, count: int, seed: int) -> np.ndarray:
    """For every token: often itself, and tokens that stand elsewhere."""
    rng = np.random.default_rng([seed, 1])
    chosen = rng.choice(ids, (len(ids), count))
    own = rng.random(len(ids)) < 0.5
    chosen[own, 0] = ids[own]
    nll = 0.7 + np.sort(rng.random((len(ids), count)), axis=1) + np.arange(count)
    return pack(chosen, nll, chosen == ids[:, None])


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def recipe_dict(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A whole recipe in `folder`; sections given here are merged over it."""
    tree: dict[str, dict[str, Any]] = {
        "student": {"config": dict(LLAMA), "tokenizer": str(folder / "student")},
        "corpus": {"files": [str(folder / "corpus.jsonl")]},
        "store": {"path": str(folder / "store")},
        "data": {"blocks": str(folder / "blocks"), "block_size": 32, "part_documents": 16},
        "objective": {"method": "guided"},
        "optimizer": {"learning_rate": 3e-3, "min_learning_rate": 3e-4},
        "train": {"device": "cpu", "batch_blocks": 8, "micro_batch": 4},
        "run": {"folder": str(folder / "run"), "save_every": 4, "log_every": 1},
    }
    for name, content in sections.items():
        tree[name] = {**tree.get(name, {}), **content}
    return tree


def make_lab(folder: Path, count: int = 60, alternatives: int = 0) -> list[str]:
    """Student and teacher tokenizers, a corpus and a store in `folder`."""
    texts = documents(count)
    save_tokenizer(folder / "student", kind="bytes")
    save_tokenizer(folder / "teacher", kind="pieces")
    write_corpus(folder / "corpus.jsonl", texts)
    write_store(folder / "store", texts, folder / "teacher", alternatives=alternatives)
    return texts


def built_setup(settings: dict[str, Any]) -> tuple[Any, ...]:
    """(setup, recipe, schedule, arguments) as `vocagnolm train` makes them: what its loop takes."""
    from vocagnolm.base.ranks import world_size
    from vocagnolm.data.materials import Materials
    from vocagnolm.recipe import recipe_from_dict
    from vocagnolm.train import run
    from vocagnolm.train.settings import plan_schedule, training_arguments

    recipe = recipe_from_dict(settings)
    materials = Materials(recipe)
    blocks = run.open_corpora(materials)
    schedule = plan_schedule(recipe, len(blocks), world_size())
    arguments = training_arguments(recipe, schedule)
    arguments.device  # noqa: B018  (starts torch.distributed)
    setup = run.build_setup(materials, blocks, schedule, arguments)
    return setup, recipe, schedule, arguments


def built_loop(settings: dict[str, Any], on_step: Any = None, **more: Any) -> Any:
    """The loop of `vocagnolm train`, not trained yet. `on_step` is called with the measures of each
    step and the norm of its gradient; `order` and `collator` replace those of the blocks."""
    from vocagnolm.train.loop import TrainingLoop
    from vocagnolm.train.metrics import Report

    class Watched(Report):
        def step(self, record: dict[str, Any], gradient_norm: Any) -> None:
            if on_step is not None:
                on_step({**record, "gradient_norm": float(gradient_norm)})

    setup, *rest = built_setup(settings)
    changes = {name: more.pop(name) for name in ("order", "collator") if name in more}
    return TrainingLoop(replace(setup, **changes), *rest, report=Watched(), **more)


def stop_after(step: int, error: BaseException) -> Any:
    """Patches the loop: it ends in this error after that step. Returns the original method."""
    from vocagnolm.train.loop import TrainingLoop

    original = TrainingLoop.end_step

    def end_step(self: Any, learning_rate: float) -> None:
        original(self, learning_rate)
        if self.step == step:
            raise error

    TrainingLoop.end_step = end_step  # type: ignore[method-assign]
    return original


def run_processes(
    target: Any, count: int, *arguments: Any, machines: int = 1, timeout: float = 120.0
) -> None:
    """`target(*arguments)` in `count` forked processes that see each other through torch's
    environment variables, as under torchrun on so many machines. A failure of one is raised
    here."""
    here = count // machines
    port = free_port()
    context = multiprocessing.get_context("fork")  # imports are inherited: no start-up time
    errors = context.Queue()
    processes = [
        context.Process(target=_as_rank, args=(rank, count, here, port, errors, target, arguments))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout)
        if process.is_alive():
            process.kill()
    if any(process.exitcode for process in processes):
        raise AssertionError(errors.get(timeout=5) if not errors.empty() else "a rank died")


def _as_rank(
    rank: int, count: int, here: int, port: int, errors: Any, target: Any, arguments: Any
) -> None:
    fresh_process()
    if count > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank % here),
            WORLD_SIZE=str(count),
            LOCAL_WORLD_SIZE=str(here),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    try:
        target(*arguments)
    except BaseException:
        errors.put(traceback.format_exc())
        errors.close()
        errors.join_thread()
        os._exit(1)
    os._exit(0)


def fresh_process() -> None:
    """Forget what accelerate has learned about the parent process, and do without its threads: a
    forked child has none of them and would wait for ever, for OpenMP's or those behind oneDNN."""
    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState

    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
