"""`vocagnolm check`: everything that can be known about a run before it begins.

Findings are collected, not raised one by one: a user mends a recipe once. What `train` would refuse
is refused here.
"""

import math
import shutil
from pathlib import Path
from typing import Any

from vocagnolm.alignment import TextTokenizer
from vocagnolm.chat import ChatTokenizer
from vocagnolm.data.corpus import Corpus
from vocagnolm.data.identity import student_chat, student_tokenizer
from vocagnolm.data.separators import separator_ids
from vocagnolm.errors import TrainingError
from vocagnolm.recipe import Recipe
from vocagnolm.store.strength import teacher_warning
from vocagnolm.train.advice import slow_arithmetic
from vocagnolm.train.arguments import training_arguments
from vocagnolm.train.check_data import (
    check_blocks,
    check_conversations,
    check_corpus,
    check_stores,
    check_teacher,
)
from vocagnolm.train.check_report import CheckReport, Found
from vocagnolm.train.checkpoint import newest_complete
from vocagnolm.train.folder import found_micro_batch, read_run, refuse_other_run
from vocagnolm.train.schedule import Schedule, plan_schedule
from vocagnolm.train.static import static_problems


def check(recipe: Recipe, *, processes: int = 1, measure: bool = True) -> CheckReport:
    """Validate a recipe against what is on this machine. `measure`: also load the student, if it
    has weights, and compare it with the teacher on a few documents."""
    report = CheckReport(problems=static_problems(recipe, processes))
    found = Found()
    with report.collecting():
        found.corpus = check_corpus(recipe, report)
    with report.collecting():
        found.tokenizer = _tokenizer(recipe, report, found.corpus)
    with report.collecting():
        found.parameters = _student(recipe, report, found.tokenizer)
    with report.collecting():
        found.store = check_stores(recipe, report, found.corpus)
    with report.collecting():
        check_teacher(recipe, report, found.tokenizer)
    with report.collecting():
        check_conversations(recipe, report, found)
    with report.collecting():
        found.manifest = check_blocks(recipe, report, found)
    with report.collecting():
        found.schedule = _schedule(recipe, report, processes, found)
    _disk(recipe, report, found)
    with report.collecting():
        _run(recipe, report, found.manifest)
    if recipe.needs_guidance and found.store is not None:
        _warn_of_teacher(report, found.store.bits_per_byte, recipe.student.bits_per_byte)
    if measure and report.ready:
        with report.collecting():
            _weights(recipe, report, found)
    return report


def _tokenizer(recipe: Recipe, report: CheckReport, corpus: Corpus | None) -> TextTokenizer:
    tokenizer = student_tokenizer(recipe)
    if corpus is not None and corpus.conversations:
        tokenizer = student_chat(recipe, tokenizer)
    prefix, eos = separator_ids(tokenizer, recipe.data.bos, recipe.data.eos)
    report.plan["student_tokenizer"] = {
        "name": tokenizer.name,
        "vocabulary": tokenizer.vocabulary_size,
        "bos": " ".join(map(tokenizer.token, prefix)) or None,
        "eos": None if eos is None else tokenizer.token(eos),
    }
    return tokenizer


def _student(recipe: Recipe, report: CheckReport, tokenizer: TextTokenizer | None) -> int | None:
    """The number of parameters, from the configuration alone."""
    import torch
    from transformers import AutoModelForCausalLM

    config = _config(recipe)
    if config is None:
        return None
    with torch.device("meta"):  # shapes only, no weights
        parameters = int(AutoModelForCausalLM.from_config(config).num_parameters())
    report.plan["student"] = {
        "model": recipe.student.model or "from config",
        "architecture": config.model_type,
        "parameters": parameters,
    }
    text_config = config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None)
    if isinstance(limit, int) and recipe.data.block_size > limit:
        report.problem(
            f"data.block_size is {recipe.data.block_size:,}, the student reads at most {limit:,}."
        )
    if tokenizer is not None and max(tokenizer.vocabulary.values()) >= text_config.vocab_size:
        report.problem(
            f"the student has {text_config.vocab_size:,} embedding rows, its tokenizer has ids up "
            f"to {max(tokenizer.vocabulary.values()):,}."
        )
    return parameters


def _config(recipe: Recipe) -> Any:
    from transformers import AutoConfig

    from vocagnolm.train.student import model_config

    source = recipe.student.model
    if source is None:
        return None if recipe.student.config is None else model_config(recipe.student.config)
    path = Path(source)
    place: dict[str, Any] = {"pretrained_model_name_or_path": source}
    if path.suffix.lower() == ".gguf":
        place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        return AutoConfig.from_pretrained(
            **place, revision=recipe.student.revision or "main", trust_remote_code=False
        )
    except Exception as error:  # network, cache, format: many types, one meaning here
        reason = str(error).strip().splitlines()[0][:160]
        raise TrainingError(
            f"student.model {source} has no configuration to read: {reason}"
        ) from None


def _schedule(recipe: Recipe, report: CheckReport, processes: int, found: Found) -> Schedule | None:
    manifest = found.manifest
    if manifest is not None and found.blocks is not None:
        blocks = found.blocks
    elif recipe.train.tokens is not None:
        blocks = max(1, math.ceil(recipe.train.tokens / recipe.data.block_size))
    else:
        return None
    known = found_micro_batch(Path(recipe.run.folder)) if recipe.run.folder else None
    schedule = plan_schedule(recipe, blocks, processes, known)
    unknown = recipe.train.micro_batch == "auto" and known is None
    report.plan["schedule"] = {
        "steps": schedule.steps,
        "tokens": schedule.tokens,
        "tokens_per_step": schedule.tokens_per_step,
        "epochs": schedule.epochs if manifest is not None else None,
        "processes": processes,
        "accumulation": None if unknown else schedule.accumulation,
        "micro_batch": "auto" if unknown else schedule.micro_batch,
        "warmup_steps": recipe.optimizer.warmup_steps,
        "checkpoints": schedule.steps // recipe.run.save_every if recipe.run.save_every else 0,
    }
    if unknown and recipe.objective.scope == "batch":
        report.warnings.append(
            "train.micro_batch: auto with objective.scope: batch: which tokens compete depends on "
            "what is found on the machine that trains. A number, or scope: sequence or global, "
            "makes runs of different machines alike."
        )
    if recipe.optimizer.warmup_steps >= schedule.steps:
        report.warnings.append(
            f"optimizer.warmup_steps = {recipe.optimizer.warmup_steps} is the whole run "
            f"({schedule.steps} steps)."
        )
    if advice := slow_arithmetic(recipe):
        report.warnings.append(advice)
    if recipe.run.folder:
        training_arguments(recipe, schedule)  # what transformers refuses of them
    return schedule


def _disk(recipe: Recipe, report: CheckReport, found: Found) -> None:
    """Weights and the two moments of AdamW per checkpoint; one more while a new one is written."""
    if found.parameters is None or not recipe.run.folder:
        return
    width = 4 if recipe.student.dtype == "float32" else 2
    kept = recipe.run.keep_checkpoints + 1 if recipe.run.save_every else 0
    run_bytes = found.parameters * width * (3 * kept + 1)
    # ids and guidance; ids take four bytes beyond 65,536 tokens, a target an id and two bytes
    vocabulary = 0 if found.tokenizer is None else found.tokenizer.vocabulary_size
    id_bytes = 4 if vocabulary > 65536 else 2
    token_bytes = id_bytes + 2 * len(recipe.stores[:1])
    if recipe.needs_targets and found.store is not None:
        spec = found.store.kept_alternatives
        count = recipe.objective.alternatives or (spec.count if spec else 0)
        token_bytes += len(recipe.stores) * count * (id_bytes + 2)
    planned = 0 if found.schedule is None else found.schedule.tokens
    tokens = planned if found.manifest is None else found.manifest["tokens"]
    existing = Path(recipe.run.folder).absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    report.plan["disk"] = {
        "run_bytes": run_bytes,
        "blocks_bytes": tokens * token_bytes,
        "free_bytes": free,
    }
    if run_bytes > free:
        report.problem(
            f"the run needs about {run_bytes / 1e9:.1f} GB for checkpoints and model, "
            f"{existing} has {free / 1e9:.1f} GB free. Lower run.keep_checkpoints or change disk."
        )


def _run(recipe: Recipe, report: CheckReport, manifest: dict[str, Any] | None) -> None:
    if not recipe.run.folder:
        return
    folder = Path(recipe.run.folder)
    about = read_run(folder)
    blocks = None if manifest is None else manifest["fingerprint"]
    refuse_other_run(folder, recipe, about, blocks)
    if about:
        newest = newest_complete(folder / "checkpoints", read=False)
        report.plan["run"] = {
            "folder": str(folder),
            "finished": about["finished"],
            "resumes_after_step": newest.step,
        }


def _weights(recipe: Recipe, report: CheckReport, found: Found) -> None:
    """What only the student's weights can tell."""
    from vocagnolm.train.forward import require_separation, understood_head
    from vocagnolm.train.strength import measure_strength
    from vocagnolm.train.student import build_student

    has_weights = recipe.student.model is not None
    apart = recipe.data.document_mask or isinstance(found.tokenizer, ChatTokenizer)
    if not has_weights and not apart:
        return  # random weights of a known kind
    student = build_student(recipe)
    understood_head(student)
    if apart:
        require_separation(student, "The student")
    if not has_weights or not recipe.needs_guidance or recipe.student.bits_per_byte is not None:
        return
    if found.tokenizer is not None and found.store is not None and found.corpus is not None:
        strength = measure_strength(student, found.tokenizer, found.store, found.corpus)
        if strength is not None:
            report.plan["strength"] = strength.to_dict()
            _warn_of_teacher(report, strength.teacher, strength.student)


def _warn_of_teacher(report: CheckReport, teacher: float | None, student: float | None) -> None:
    warning = teacher_warning(teacher, student)
    if warning is not None:
        report.warnings.append(warning)
