"""`vocagnolm check`: everything that can be known about a run before it begins.

Findings are collected, not raised one by one: a user mends a recipe once. What `train` would refuse
is refused here. torch and transformers, which take seconds to import, are asked where nothing else
can answer, and what they say of a tokenizer and of a configuration is remembered.
"""

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vocagnolm.alignment import TextTokenizer
from vocagnolm.chat import ChatTokenizer, survey
from vocagnolm.data.blocks import MANIFEST, cut_parts, read_manifest
from vocagnolm.data.corpus import Corpus, document_hash
from vocagnolm.data.guidance import common_alternatives
from vocagnolm.data.identity import (
    block_settings,
    blocks_storage,
    differing_inputs,
    opened_count,
    recipe_corpus,
    separator_ids,
    student_chat,
    student_tokenizer,
    teacher_chat,
    teacher_tokenizer,
)
from vocagnolm.data.teachers import best_shares
from vocagnolm.errors import TrainingError, VocagnolmError, first_line
from vocagnolm.files import address_of, model_damage
from vocagnolm.recipe import Recipe
from vocagnolm.storage import storage_of
from vocagnolm.storage.copies import remembered
from vocagnolm.store import LossStore
from vocagnolm.store.analysis import best_store, teacher_warning
from vocagnolm.store.format import SHARD_FOLDER
from vocagnolm.store.reader import listing_problems, mend_hint
from vocagnolm.train.folder import found_micro_batch, read_run, refuse_other_run
from vocagnolm.train.settings import (
    Schedule,
    check_arguments,
    check_batch,
    objective_config,
    plan_schedule,
    slow_arithmetic,
    what_a_step_depends_on,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# ---- what is reported ----


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
        return {"ready": self.ready, **asdict(self)}

    def problem(self, line: str) -> None:
        if line not in self.problems:
            self.problems.append(line)

    def warn(self, line: str | None) -> None:
        self.warnings += [] if line is None else [line]

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """What goes wrong inside is a problem of the report."""
        try:
            yield
        except VocagnolmError as error:
            self.problem(str(error))


@dataclass
class Found:
    """What the recipe's names stand for on this machine; None where something is wrong with it, or
    where there is nothing to find."""

    tokenizer: TextTokenizer | None = None
    parameters: int | None = None
    corpus: Corpus | None = None
    store: LossStore | None = None
    """The best of several."""
    manifest: dict[str, Any] | None = None
    schedule: Schedule | None = None
    blocks: int | None = None


# ---- what a recipe reads ----


# Beyond this a corpus is not read through by a mere check.
LARGEST_CORPUS_READ_BYTES = 2 * 10**9
MANY_EPOCHS = 100
MANY_CHECKPOINTS = 1000
# Conversations that are rendered to see what the templates do to them.
SURVEYED = 200


def check_corpus(recipe: Recipe, report: CheckReport) -> Corpus | None:
    if not recipe.corpus.files:
        return None
    local = [Path(name) for name in recipe.corpus.files if Path(name).exists()]
    size = sum(
        p.stat().st_size for path in local for p in ([path] if path.is_file() else path.rglob("*"))
    )
    facts = report.plan["corpus"] = {"files": recipe.corpus.files, "bytes_on_disk": size}
    if any(address_of(name) for name in recipe.corpus.files):
        facts["read"] = "at an address: not copied for a check"
        return None
    if size > LARGEST_CORPUS_READ_BYTES:
        facts["read"] = "too large to read through in a check"
        return None
    corpus = recipe_corpus(recipe)
    facts["documents"] = len(corpus)
    return corpus


def check_stores(recipe: Recipe, report: CheckReport, corpus: Corpus | None) -> LossStore | None:
    if not recipe.stores:
        return None
    stores = [LossStore.open(path) for path in recipe.stores]
    facts: list[dict[str, Any]] = [
        {
            "path": str(store.path),
            "teacher": store.teacher_name,
            "documents": store.manifest["totals"]["documents"],
            "tokens": store.manifest["totals"]["tokens"],
            "bits_per_byte": store.bits_per_byte,
            "verified": "names and sizes; the losses by `vocagnolm store verify`",
            **({"alternatives": str(kept)} if (kept := store.kept_alternatives) else {}),
        }
        for store in stores
    ]
    for store in stores:
        listed = listing_problems(store.manifest, storage_of(store.path).files(SHARD_FOLDER))
        for line in listed:
            report.problem(f"{store.path}: {line}. {mend_hint(store.path)}")
    if recipe.needs_targets and not recipe.teacher.online:
        common_alternatives(stores, recipe.objective.alternatives)
    if len(stores) == 1:
        report.plan["store"] = facts[0]
    else:
        report.plan["stores"] = facts
        for about, share in zip(facts, best_shares(stores) or [], strict=False):
            about["best_share"] = share
    wanted = recipe.teacher.model
    names = {Path(store.teacher_name).name for store in stores}
    if wanted is not None and Path(wanted).name not in names:
        report.warn(
            f"the store is of teacher {', '.join(sorted(names))}, the recipe names {wanted}."
        )
    made_from = {store.corpus_fingerprint for store in stores}
    if corpus is not None and not made_from & {None, corpus.fingerprint}:
        absent = _absent(stores, corpus)
        if absent is not None and recipe.data.missing == "error":
            report.problem(
                f"the store was made from another corpus: it lacks {absent}. Score the recipe's "
                "corpus, or set data.missing to drop or keep."
            )
        else:
            report.warn(
                "the store was made from another corpus than the recipe's; documents are looked up "
                f"by content, and those not in it follow data.missing = {recipe.data.missing}."
            )
    return best_store(stores)


def _absent(stores: list[LossStore], corpus: Corpus) -> str | None:
    """The place of a document that no store holds, among the corpus's first hundred."""
    for document in corpus.read(0, 100):
        if document.text is None:
            continue
        digest = document_hash(document.text)
        if all(store.find(digest) is None for store in stores):
            return str(document.place)
    return None


def check_teacher(recipe: Recipe, report: CheckReport, tokenizer: TextTokenizer | None) -> None:
    same_vocabulary = recipe.method.one_vocabulary
    if recipe.teacher_tokenizer is None:
        if same_vocabulary:
            report.warn(
                f"objective.method {recipe.objective.method} presupposes one vocabulary; set "
                "teacher.model or teacher.tokenizer so that it can be checked."
            )
        return
    if not (same_vocabulary or recipe.needs_online_teacher):
        return
    teacher = teacher_tokenizer(recipe)
    report.plan["teacher_tokenizer"] = {
        "name": teacher.name,
        "vocabulary": teacher.vocabulary_size,
    }
    if same_vocabulary and tokenizer is not None:
        from vocagnolm.train.teacher import refuse_other_vocabulary

        refuse_other_vocabulary(tokenizer.vocabulary, teacher.vocabulary)


def check_conversations(recipe: Recipe, report: CheckReport, found: Found) -> None:
    """What the two templates make of the corpus."""
    if found.corpus is None or not isinstance(found.tokenizer, ChatTokenizer):
        return
    texts = [d.text for d in found.corpus.read(0, SURVEYED) if d.text is not None]
    sides = {"student": found.tokenizer}
    if recipe.teacher_tokenizer is not None:
        # with a store the teacher itself need not be here
        with contextlib.suppress(*(() if recipe.needs_online_teacher else (VocagnolmError,))):
            sides["teacher"] = teacher_chat(recipe, teacher_tokenizer(recipe))
    for side, tokenizer in sides.items():
        seen = survey(tokenizer, texts)
        facts = seen.to_dict()
        report.plan[f"{side}_template"] = {
            "template": facts["template"],
            "conversations": seen.conversations,
            "refused": sum(seen.refused.values()),
        }
        report.warnings += [f"{side} {line}" for line in seen.warnings()]
        if texts and sum(seen.refused.values()) == len(texts):
            report.problem(
                f"{side}: the template of {tokenizer.name} refuses every conversation "
                f"({next(iter(seen.refused))})."
            )


def check_blocks(recipe: Recipe, report: CheckReport, found: Found) -> dict[str, Any] | None:
    """The manifest of prepared blocks."""
    if recipe.data.blocks is None or found.tokenizer is None:
        return None
    folder = blocks_storage(recipe)
    if not folder.has(MANIFEST):
        report.plan["blocks"] = {"prepared": False, "next": "vocagnolm prepare RECIPE"}
        return None
    manifest = read_manifest(folder)
    if manifest["settings"].get("conversations") and found.corpus is None:
        found.tokenizer = student_chat(recipe, found.tokenizer)
    wanted = block_settings(recipe, found.tokenizer, found.corpus)
    for line in differing_inputs(manifest, recipe, wanted, found.corpus):
        report.problem(f"{folder} does not belong to this recipe: {line}")
    summary, guided = manifest["summary"], manifest["settings"]["guidance"]
    found.blocks, bins = opened_count(recipe, manifest)
    report.plan["blocks"] = {
        "prepared": True,
        "blocks": found.blocks,
        "tokens": manifest["tokens"],
        "mapped_share": summary["mapped_share"] if guided else None,
        "one_to_one_share": summary["one_to_one_share"] if guided else None,
        "target_shares": summary.get("target_shares"),
        "conversations": None if bins is None else bins.words(recipe.data.block_size + 1),
        "verified": "names and sizes; `vocagnolm train` reads the parts through",
    }
    for line in cut_parts(manifest, folder.files()):
        report.problem(f"{folder}: {line}. Run `vocagnolm prepare` again to rebuild it.")
    return manifest


# ---- what contradicts itself ----


def static_problems(recipe: Recipe, processes: int = 1) -> list[str]:
    """What contradicts itself in the recipe, whatever is on the disk."""
    problems = []
    student, objective = recipe.student, recipe.objective
    if (student.model is None) == (student.config is None):
        problems.append("student: give either `model` or `config`.")
    if recipe.student_tokenizer is None:
        problems.append("student.tokenizer is needed when the student is made from a config.")
    for name, value in (
        ("corpus.files", recipe.corpus.files),
        ("data.blocks", recipe.data.blocks),
        ("run.folder", recipe.run.folder),
    ):
        if not value:
            problems.append(f"{name} is not set.")
    if recipe.needs_online_teacher and recipe.teacher.model is None:
        problems.append(f"objective.method {objective.method} needs teacher.model, online.")
    if recipe.needs_guidance and not recipe.teacher.online and not recipe.stores:
        problems.append(
            f"objective.method {objective.method} needs store.path (see `vocagnolm score`) or "
            "teacher.online: true."
        )
    problems += recipe.store_problems()
    if objective.entropy_keep is not None and not recipe.teacher.online:
        problems.append(
            "objective.entropy_keep needs teacher.online: true; a loss store holds no entropy."
        )
    if recipe.optimizer.min_learning_rate > recipe.optimizer.learning_rate:
        problems.append("optimizer.min_learning_rate is above optimizer.learning_rate.")
    for package, extra, wanted in (
        ("peft", "peft", recipe.lora.rank > 0),
        ("liger_kernel", "liger", recipe.train.liger),
    ):
        if wanted and find_spec(package) is None:
            problems.append(f"the package {package} is missing: pip install 'vocagnolm[{extra}]'")
    if recipe.run.report_to:
        from vocagnolm.train.metrics import tracker_problems

        problems += tracker_problems(recipe.run.report_to)
    for work in (lambda: check_batch(recipe, processes), lambda: objective_config(recipe)):
        try:
            work()
        except VocagnolmError as error:
            problems.append(str(error))
    return problems


# ---- the check ----


def check(
    recipe: Recipe,
    *,
    processes: int = 1,
    measure: bool = True,
    on_weights: Callable[[], None] | None = None,
) -> CheckReport:
    """Validate a recipe against what is on this machine. `measure`: also load the student, if it
    has weights, and compare it with the teacher on a few documents; `on_weights` is called right
    before that."""
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
        report.warn(teacher_warning(found.store.bits_per_byte, recipe.student.bits_per_byte))
    if measure and report.ready:
        with report.collecting():
            _weights(recipe, report, found, on_weights or (lambda: None))
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
    section = recipe.student
    if section.model is None and section.config is None:
        return None
    file = Path(section.model or "", "config.json")
    if section.model is None:
        about = remembered("student", [section.config], lambda: _about(recipe))
    elif file.is_file():
        about = remembered("student", [file.read_bytes()], lambda: _about(recipe))
    else:  # on the hub, or in a GGUF file
        about = _about(recipe)
    report.plan["student"] = {
        "model": recipe.student.model or "from config",
        "architecture": about["architecture"],
        "parameters": about["parameters"],
    }
    limit, rows = about["positions"], about["rows"]
    if isinstance(limit, int) and recipe.data.block_size > limit:
        report.problem(
            f"data.block_size is {recipe.data.block_size:,}, the student reads at most {limit:,}."
        )
    if tokenizer is not None and max(tokenizer.vocabulary.values()) >= rows:
        report.problem(
            f"the student has {rows:,} embedding rows, its tokenizer has ids up "
            f"to {max(tokenizer.vocabulary.values()):,}."
        )
    return int(about["parameters"])


def _about(recipe: Recipe) -> dict[str, Any]:
    """What transformers says of the student's configuration."""
    import torch
    from transformers import AutoModelForCausalLM

    config = _config(recipe)
    with torch.device("meta"):  # shapes only, no weights
        parameters = int(AutoModelForCausalLM.from_config(config).num_parameters())
    text_config = config.get_text_config()
    return {
        "architecture": config.model_type,
        "parameters": parameters,
        "positions": getattr(text_config, "max_position_embeddings", None),
        "rows": text_config.vocab_size,
    }


def _config(recipe: Recipe) -> Any:
    from transformers import AutoConfig

    from vocagnolm.train.student import model_config

    source = recipe.student.model
    if source is None:
        return model_config(recipe.student.config or {})
    if Path(source).suffix.lower() == ".gguf":
        from vocagnolm.model.load import gguf_config

        return gguf_config(Path(source))
    revision = recipe.student.revision or "main"
    try:
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except Exception as error:  # network, cache, format: many types, one meaning here
        reason = first_line(error)[:160]
        raise TrainingError(f"student.model {source} has no configuration: {reason}") from None


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
        "a_step_depends": what_a_step_depends_on(recipe),
        "warmup_steps": recipe.optimizer.warmup_steps,
        "checkpoints": schedule.steps // recipe.run.save_every if recipe.run.save_every else 0,
    }
    if unknown and objective_config(recipe).depends_on_micro_batch:
        report.warn(
            "train.micro_batch: auto with objective.scope: batch: which tokens compete depends on "
            "what is found on the machine that trains. A number, or scope: sequence or global, "
            "makes runs of different machines alike."
        )
    if recipe.optimizer.warmup_steps >= schedule.steps:
        report.warn(
            f"optimizer.warmup_steps = {recipe.optimizer.warmup_steps} is the whole run "
            f"({schedule.steps} steps)."
        )
    if manifest is not None and schedule.epochs > MANY_EPOCHS:
        report.warn(
            f"the run reads its blocks {schedule.epochs:,.0f} times: is train.tokens or "
            "train.epochs meant so?"
        )
    if (saved := report.plan["schedule"]["checkpoints"]) > MANY_CHECKPOINTS:
        report.warn(
            f"run.save_every = {recipe.run.save_every} writes {saved:,} checkpoints, of which "
            f"{recipe.run.keep_checkpoints} are kept at a time."
        )
    report.warn(slow_arithmetic(recipe))
    if recipe.run.folder:
        check_arguments(recipe, schedule)
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
    # more epochs make no more blocks; a token takes about a byte of a compressed file, or more
    planned = min(planned, report.plan.get("corpus", {}).get("bytes_on_disk") or planned)
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
        from vocagnolm.train.checkpoint import newest_complete

        if about["finished"]:
            report.warn(model_damage(folder / "model", read=False))
        newest = newest_complete(folder / "checkpoints", read=False)
        report.plan["run"] = {
            "folder": str(folder),
            "finished": about["finished"],
            "resumes_after_step": newest.step,
            "verified": "sizes; `vocagnolm train` compares checksums",
        }


def _weights(
    recipe: Recipe, report: CheckReport, found: Found, on_weights: Callable[[], None]
) -> None:
    """What only the student's weights can tell."""
    has_weights = recipe.student.model is not None
    apart = recipe.data.document_mask or isinstance(found.tokenizer, ChatTokenizer)
    if not has_weights and not apart:
        return  # random weights of a known kind
    from vocagnolm.train.student import build_student, require_separation, understood_head

    if has_weights:
        on_weights()
    student = build_student(recipe)
    understood_head(student)
    if apart:
        require_separation(student, "The student")
    if not has_weights or not recipe.needs_guidance or recipe.student.bits_per_byte is not None:
        return
    if found.tokenizer is not None and found.store is not None and found.corpus is not None:
        strength = measure_strength(student, found.tokenizer, found.store, found.corpus)
        if strength is not None:
            report.plan["strength"] = {
                "teacher_bits_per_byte": strength.teacher,
                "student_bits_per_byte": strength.student,
                "documents": strength.documents,
            }
            report.warn(teacher_warning(strength.teacher, strength.student))


# ---- is the teacher better than the student? ----


# Arithmetic that may be spent on it, and the tokens that are read at least and at most.
_CPU_OPERATIONS = 1e12
_GPU_OPERATIONS = 1e14
_TOKENS = (256, 20_000)
_CANDIDATES = 64


@dataclass(frozen=True)
class Strength:
    """Bits per byte of the same documents."""

    teacher: float
    student: float
    documents: int


def measure_strength(
    model: "PreTrainedModel", tokenizer: TextTokenizer, store: LossStore, corpus: Corpus
) -> Strength | None:
    """None where no document of the store is in the corpus."""
    import torch

    from vocagnolm.model import NllModel

    operations = _GPU_OPERATIONS if model.device.type == "cuda" else _CPU_OPERATIONS
    budget = int(np.clip(operations / (2 * model.num_parameters()), *_TOKENS))
    rows, texts = _sample(tokenizer, store, corpus, budget)
    if not texts:
        return None
    spans = tokenizer.spans_batch(texts)
    config: Any = model.config.get_text_config()
    context = min(1024, getattr(config, "max_position_embeddings", None) or 1024)
    prefix = tokenizer.prefix_ids
    training = model.training
    scorer = NllModel(
        model.eval(),
        context=context,
        stride=max(1, context // 8),
        batch_tokens=context,
        prefix_ids=prefix,
    )
    with torch.inference_mode():
        student = scorer.document_nll([one.ids for one in spans])
    if isinstance(tokenizer, ChatTokenizer):  # a template's own tokens hold no text
        for one, nll in zip(spans, student, strict=True):
            nll[one.token_bytes == 0] = np.nan
    model.train(training)
    return Strength(
        teacher=_bits([store[row] for row in rows]),
        student=_bits([(s.token_bytes, nll) for s, nll in zip(spans, student, strict=True)]),
        documents=len(texts),
    )


def _sample(
    tokenizer: TextTokenizer, store: LossStore, corpus: Corpus, budget: int
) -> tuple[list[int], list[str]]:
    """Documents evenly spread over the store, up to so many student tokens (at least one)."""
    rows: list[int] = []
    texts: list[str] = []
    step = max(1, len(store) // _CANDIDATES)
    for row in range(step // 2, len(store), step):
        index = store.document_index(row)
        for document in corpus.read(index, index + 1):
            text = document.text
            if text is None or document_hash(text) != store.document_hash(row):
                continue
            if isinstance(tokenizer, ChatTokenizer) and isinstance(
                tokenizer.outcomes([text])[0], str
            ):
                continue
            tokens = len(tokenizer.spans(text))
            if tokens <= budget or not rows:
                rows.append(row)
                texts.append(text)
                budget -= tokens
        if budget <= 0:
            break
    return rows, texts


def _bits(documents: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Bits over bytes of the tokens that have a loss."""
    nats = covered = 0.0
    for token_bytes, nll in documents:
        known = np.isfinite(nll)
        nats += float(nll[known].sum(dtype=np.float64))
        covered += float(np.asarray(token_bytes)[known].sum())
    return nats / math.log(2) / max(covered, 1.0)
