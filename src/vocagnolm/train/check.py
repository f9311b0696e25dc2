"""`vocagnolm check`: everything that can be known about a run before any weight is loaded.

Findings are collected, not raised one by one: a user mends a recipe once.
"""

import math
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vocagnolm.align import TextTokenizer
from vocagnolm.errors import VocagnolmError
from vocagnolm.recipe import Recipe
from vocagnolm.store.strength import teacher_warning
from vocagnolm.train.schedule import Schedule, plan_schedule
from vocagnolm.train.static import static_problems

# Beyond this a corpus is not read through by a mere check.
LARGEST_CORPUS_READ_BYTES = 2 * 10**9


@dataclass
class CheckReport:
    """What was found. `ready` is the verdict; `plan` holds facts by name."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {
            "ready": self.ready,
            "problems": self.problems,
            "warnings": self.warnings,
            "plan": self.plan,
        }


def check(recipe: Recipe, *, processes: int = 1) -> CheckReport:
    """Validate a recipe against what is on this machine."""
    report = CheckReport(problems=static_problems(recipe, processes))
    tokenizer = _student(recipe, report)
    corpus = _corpus(recipe, report)
    _store(recipe, report, corpus)
    _teacher(recipe, report, tokenizer)
    blocks = _blocks(recipe, report, tokenizer, corpus)
    schedule = _schedule(recipe, report, processes, blocks)
    _disk(recipe, report, schedule)
    _run(recipe, report, processes)
    return report


def _student(recipe: Recipe, report: CheckReport) -> TextTokenizer | None:
    from vocagnolm.data.prepare import student_tokenizer
    from vocagnolm.data.separators import separator_ids

    tokenizer = None
    try:
        tokenizer = student_tokenizer(recipe)
        assert recipe.student_tokenizer is not None
        bos, eos = separator_ids(
            tokenizer, recipe.student_tokenizer, recipe.data.bos, recipe.data.eos
        )
        report.plan["student_tokenizer"] = {
            "name": tokenizer.name,
            "vocabulary": tokenizer.vocabulary_size,
            "bos": None if bos is None else tokenizer.token(bos),
            "eos": None if eos is None else tokenizer.token(eos),
        }
    except VocagnolmError as error:
        report.problems.append(str(error))
    config = _config(recipe, report)
    if config is None:
        return tokenizer
    text_config = config.get_text_config()
    parameters = _parameters(config)
    report.plan["student"] = {
        "model": recipe.student.model or "from config",
        "architecture": config.model_type,
        "parameters": parameters,
    }
    limit = getattr(text_config, "max_position_embeddings", None)
    if isinstance(limit, int) and recipe.data.block_size > limit:
        report.problems.append(
            f"data.block_size is {recipe.data.block_size:,}, the student reads at most {limit:,}."
        )
    if tokenizer is not None and max(tokenizer.vocabulary.values()) >= text_config.vocab_size:
        report.problems.append(
            f"the student has {text_config.vocab_size:,} embedding rows, its tokenizer has ids up "
            f"to {max(tokenizer.vocabulary.values()):,}."
        )
    return tokenizer


def _config(recipe: Recipe, report: CheckReport) -> Any:
    from transformers import AutoConfig

    from vocagnolm.train.student import model_config

    source = recipe.student.model
    try:
        if source is None:
            return None if recipe.student.config is None else model_config(recipe.student.config)
        path = Path(source)
        if path.suffix.lower() == ".gguf":
            return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
        return AutoConfig.from_pretrained(source, revision=recipe.student.revision)
    except VocagnolmError as error:
        report.problems.append(str(error))
    except Exception as error:  # network, cache, format: many types, one meaning here
        reason = str(error).strip().splitlines()[0][:160]
        report.problems.append(f"student.model {source} has no configuration to read: {reason}")
    return None


def _parameters(config: Any) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # shapes only, no weights
        model = AutoModelForCausalLM.from_config(config)
    return int(model.num_parameters())


def _corpus(recipe: Recipe, report: CheckReport) -> Any:
    from vocagnolm.data.prepare import recipe_corpus

    if not recipe.corpus.files:
        return None
    local = [Path(name) for name in recipe.corpus.files if Path(name).exists()]
    size = sum(
        p.stat().st_size for path in local for p in ([path] if path.is_file() else path.rglob("*"))
    )
    report.plan["corpus"] = {"files": recipe.corpus.files, "bytes_on_disk": size}
    if size > LARGEST_CORPUS_READ_BYTES:
        report.plan["corpus"]["read"] = "too large to read through in a check"
        return None
    try:
        corpus = recipe_corpus(recipe)
    except VocagnolmError as error:
        report.problems.append(str(error))
        return None
    report.plan["corpus"]["documents"] = len(corpus)
    return corpus


def _store(recipe: Recipe, report: CheckReport, corpus: Any) -> None:
    from vocagnolm.store import LossStore

    if recipe.store.path is None:
        return
    try:
        store = LossStore.open(recipe.store.path)
        manifest = store.manifest
    except VocagnolmError as error:
        report.problems.append(str(error))
        return
    identity, totals = manifest["identity"], manifest["totals"]
    teacher = identity.get("teacher", {})
    name = teacher.get("name") if isinstance(teacher, dict) else str(teacher)
    bits = None
    if totals["scored_bytes"]:
        bits = totals["nll_sum"] / math.log(2) / totals["scored_bytes"]
    report.plan["store"] = {
        "path": recipe.store.path,
        "teacher": name,
        "documents": totals["documents"],
        "tokens": totals["tokens"],
        "bits_per_byte": bits,
    }
    wanted = recipe.teacher.model
    if wanted is not None and name is not None and Path(wanted).name != Path(str(name)).name:
        report.warnings.append(f"the store is of teacher {name}, the recipe names {wanted}.")
    known = identity.get("corpus")
    known_corpus = known.get("fingerprint") if isinstance(known, dict) else None
    if corpus is not None and known_corpus not in (None, corpus.fingerprint):
        absent = _absent(store, corpus)
        if absent is not None and recipe.data.missing == "error":
            report.problems.append(
                f"the store was made from another corpus: it lacks {absent}. Score the recipe's "
                "corpus, or set data.missing to drop or keep."
            )
        else:
            report.warnings.append(
                "the store was made from another corpus than the recipe's; documents are looked up "
                f"by content, and those not in it follow data.missing = {recipe.data.missing}."
            )
    warning = teacher_warning(bits, recipe.student.bits_per_byte)
    if warning is not None:
        report.warnings.append(warning)


def _absent(store: Any, corpus: Any) -> str | None:
    """The place of a document that the store lacks, among the corpus's first hundred."""
    from vocagnolm.data.corpus import document_hash

    for document in corpus.read(0, 100):
        if document.text is not None and store.find(document_hash(document.text)) is None:
            return str(document.place)
    return None


def _teacher(recipe: Recipe, report: CheckReport, tokenizer: TextTokenizer | None) -> None:
    same_vocabulary = recipe.objective.method in ("kld", "rho1")
    if recipe.teacher_tokenizer is None or not (same_vocabulary or recipe.needs_online_teacher):
        if same_vocabulary and recipe.teacher_tokenizer is None:
            report.warnings.append(
                f"objective.method {recipe.objective.method} presupposes one vocabulary; set "
                "teacher.model or teacher.tokenizer so that it can be checked."
            )
        return
    from vocagnolm.data.separators import open_tokenizer
    from vocagnolm.train.vocabulary import refuse_other_vocabulary

    try:
        teacher = open_tokenizer(recipe.teacher_tokenizer)
        report.plan["teacher_tokenizer"] = {
            "name": teacher.name,
            "vocabulary": teacher.vocabulary_size,
        }
        if same_vocabulary and tokenizer is not None:
            refuse_other_vocabulary(tokenizer.vocabulary, teacher.vocabulary)
    except VocagnolmError as error:
        report.problems.append(str(error))


def _blocks(
    recipe: Recipe, report: CheckReport, tokenizer: TextTokenizer | None, corpus: Any
) -> int | None:
    """Number of blocks, where they are prepared."""
    from vocagnolm.data.blocks import MANIFEST, read_manifest
    from vocagnolm.data.prepare import block_settings, train_settings, unmet_needs

    if recipe.data.blocks is None or tokenizer is None:
        return None
    folder = Path(recipe.data.blocks)
    if not (folder / MANIFEST).is_file():
        report.plan["blocks"] = {"prepared": False, "next": "vocagnolm prepare RECIPE"}
        return None
    try:
        manifest = read_manifest(folder)
        if corpus is None or (recipe.store.path and not Path(recipe.store.path).exists()):
            wanted = train_settings(recipe, tokenizer)
        else:
            wanted = block_settings(recipe, tokenizer, corpus)
        unmet = unmet_needs(manifest["settings"], recipe, wanted)
    except VocagnolmError as error:
        report.problems.append(str(error))
        return None
    report.problems += [f"{folder} does not belong to this recipe: {line}" for line in unmet]
    count = manifest["tokens"] // recipe.data.block_size
    summary = manifest["summary"]
    report.plan["blocks"] = {
        "prepared": True,
        "blocks": count,
        "tokens": manifest["tokens"],
        "mapped_share": summary["mapped_share"] if manifest["settings"]["guidance"] else None,
        "one_to_one_share": summary["one_to_one_share"]
        if manifest["settings"]["guidance"]
        else None,
    }
    return count


def _schedule(
    recipe: Recipe, report: CheckReport, processes: int, blocks: int | None
) -> Schedule | None:
    per_step = recipe.train.batch_blocks * recipe.data.block_size
    if blocks is None:
        if recipe.train.tokens is None:
            return None
        blocks = max(1, math.ceil(recipe.train.tokens / recipe.data.block_size))
    try:
        schedule = plan_schedule(recipe, blocks, processes)
    except VocagnolmError as error:
        if str(error) not in report.problems:
            report.problems.append(str(error))
        return None
    report.plan["schedule"] = {
        "steps": schedule.steps,
        "tokens": schedule.tokens,
        "tokens_per_step": per_step,
        "epochs": schedule.epochs if report.plan.get("blocks", {}).get("prepared") else None,
        "processes": processes,
        "accumulation": schedule.accumulation,
        "micro_batch": schedule.micro_batch,
        "warmup_steps": recipe.optimizer.warmup_steps,
        "checkpoints": schedule.steps // recipe.run.save_every if recipe.run.save_every else 0,
    }
    if recipe.optimizer.warmup_steps >= schedule.steps:
        report.warnings.append(
            f"optimizer.warmup_steps = {recipe.optimizer.warmup_steps} is the whole run "
            f"({schedule.steps} steps)."
        )
    return schedule


def _disk(recipe: Recipe, report: CheckReport, schedule: Schedule | None) -> None:
    """Weights and the two moments of AdamW per checkpoint; one more while a new one is written."""
    parameters = report.plan.get("student", {}).get("parameters")
    if parameters is None or not recipe.run.folder:
        return
    width = 4 if recipe.student.dtype == "float32" else 2
    kept = recipe.run.keep_checkpoints + 1 if recipe.run.save_every else 0
    run_bytes = parameters * width * (3 * kept + 1)
    # ids and guidance; ids take four bytes beyond 65,536 tokens
    vocabulary = report.plan.get("student_tokenizer", {}).get("vocabulary", 0)
    token_bytes = (4 if vocabulary > 65536 else 2) + (2 if recipe.store.path else 0)
    tokens = report.plan.get("blocks", {}).get("tokens") or (schedule.tokens if schedule else 0)
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
        report.problems.append(
            f"the run needs about {run_bytes / 1e9:.1f} GB for checkpoints and model, "
            f"{existing} has {free / 1e9:.1f} GB free. Lower run.keep_checkpoints or change disk."
        )


def _run(recipe: Recipe, report: CheckReport, processes: int) -> None:
    from vocagnolm.train.folder import read_run, refuse_other_run

    if not recipe.run.folder:
        return
    folder = Path(recipe.run.folder)
    about = read_run(folder)
    try:
        refuse_other_run(folder, recipe, processes, about)
    except VocagnolmError as error:
        report.problems.append(str(error))
    if about:
        from vocagnolm.train.checkpoint import newest_complete

        newest = newest_complete(folder / "checkpoints")
        report.plan["run"] = {
            "folder": str(folder),
            "finished": about.get("finished", False),
            "resumes_after_step": newest[1] if newest else 0,
        }


def processes_of_environment() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
