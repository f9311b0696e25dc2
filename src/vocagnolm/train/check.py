"""`vocagnolm check`: everything that can be known about a run before it begins.

Problems are collected instead of raised one by one, so that a user mends a recipe once. What
`train` would refuse is refused here. torch and transformers take seconds to import: they are asked
where nothing else can answer, and what they say of a tokenizer or a configuration is cached."""

import contextlib
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vocagnolm.alignment import TextTokenizer
from vocagnolm.alignment.targets import TARGETS_RULE
from vocagnolm.alignment.tokenizer import missing_beginning
from vocagnolm.base.files import address_of, model_damage, model_folder_name
from vocagnolm.base.progress import byte_text
from vocagnolm.base.strangers import read_config
from vocagnolm.chat import ChatTokenizer, survey
from vocagnolm.data.blocks import MANIFEST, cut_parts, read_manifest
from vocagnolm.data.corpus import Corpus, document_hash
from vocagnolm.data.differences import differing_inputs
from vocagnolm.data.fingerprints import block_settings
from vocagnolm.data.guidance import common_alternatives
from vocagnolm.data.materials import (
    Materials,
    opened_count,
    separator_ids,
    student_chat,
    student_tokenizer,
    teacher_chat,
    teacher_tokenizer,
)
from vocagnolm.data.mixture import mixed_fingerprint
from vocagnolm.data.prompts import count_prompts, open_prompts
from vocagnolm.data.teachers import best_shares
from vocagnolm.errors import TrainingError, VocagnolmError, first_line
from vocagnolm.recipe import Recipe
from vocagnolm.storage import storage_of
from vocagnolm.storage.copies import remembered
from vocagnolm.store import LossStore
from vocagnolm.store.format import STORE_FOLDERS
from vocagnolm.store.reader import listing_problems, mend_hint
from vocagnolm.train.folder import found_micro_batch, read_run, refuse_other_run
from vocagnolm.train.settings import (
    Schedule,
    check_arguments,
    check_batch,
    corpora_read,
    objective_config,
    plan_schedule,
    slow_arithmetic,
    what_a_step_depends_on,
)
from vocagnolm.train.strength import best_store, measure_strength, teacher_warning

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Beyond this a corpus is not read through by a mere check.
LARGEST_CORPUS_READ_BYTES = 2 * 10**9
MANY_EPOCHS = 100
MANY_CHECKPOINTS = 1000
# Conversations that are rendered to see what the templates do to them.
SURVEYED = 200


@dataclass
class CheckReport:
    """The result of a check. `ready` is the verdict; `plan` holds facts by name."""

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
    if recipe.in_rounds:
        return check_rounds(recipe)
    checked = (_CheckCorpora if recipe.corpora else _Check)(Materials(recipe), processes)
    looks = [
        *(checked.find_corpus, checked.find_tokenizer, checked.find_student, checked.find_stores),
        *(checked.look_at_teacher, checked.look_at_conversations, checked.find_blocks),
        *(checked.plan_steps, checked.look_at_disk, checked.look_at_run),
    ]
    if measure:
        looks.append(lambda: checked.look_at_weights(on_weights))
    for look in looks:
        try:
            look()
        except VocagnolmError as error:
            checked.report.problem(str(error))
    return checked.report


def check_rounds(recipe: Recipe) -> CheckReport:
    """Validate a recipe with rounds: its settings, the prompts and the two tokenizers."""
    report = CheckReport()
    rounds = recipe.rounds
    for problem in recipe.rounds_problems():
        report.problem(problem)
    if not recipe.run.folder:
        report.problem("run.folder is not set.")

    def prompts() -> None:
        if not rounds.prompts:
            return
        opened = open_prompts(rounds.prompts, answer_field=rounds.answer_field)
        count = count_prompts(opened.read())
        report.plan["prompts"] = {
            "prompts": count.asked,
            "with_an_expected_answer": count.expected,
            "answers": rounds.rounds * rounds.prompts_per_round * rounds.samples,
            "passes": rounds.rounds * rounds.prompts_per_round / count.asked,
        }
        report.plan["steps"] = {"steps": rounds.rounds * rounds.updates_per_round}
        if rounds.grade is not None and not count.expected:
            report.problem(f"rounds.answer_field: no prompt has a field {rounds.answer_field}.")

    def tokenizers() -> None:
        if recipe.student.model is not None:
            report.plan["student"] = _template_of(student_chat(recipe, student_tokenizer(recipe)))
        if recipe.teacher.model is not None:
            report.plan["teacher"] = _template_of(teacher_chat(recipe, teacher_tokenizer(recipe)))

    def run() -> None:
        if recipe.run.folder:
            refuse_other_run(Path(recipe.run.folder), recipe, read_run(Path(recipe.run.folder)))

    for look in (lambda: objective_config(recipe), prompts, tokenizers, run):
        try:
            look()
        except VocagnolmError as error:
            report.problem(str(error))
    return report


def _template_of(chat: ChatTokenizer) -> dict[str, Any]:
    return {"tokenizer": chat.name, "kind": chat.kind, "chat_template": chat.template.origin}


def static_problems(recipe: Recipe, processes: int = 1) -> list[str]:
    """Contradictions within the recipe, which no file on the disk can solve."""
    problems = []
    student, objective = recipe.student, recipe.objective
    if (student.model is None) == (student.config is None):
        problems.append("student: give either `model` or `config`.")
    if recipe.student_tokenizer is None:
        problems.append("student.tokenizer is needed when the student is made from a config.")
    for name in ("data.blocks", "run.folder"):
        if not attrgetter(name)(recipe):
            problems.append(f"{name} is not set.")
    for name, part in recipe.by_corpus().items():
        if not part.corpus.files:
            problems.append(f"{f'corpora.{name}' if name else 'corpus'}.files is not set.")
    if recipe.needs_online_teacher and recipe.teacher.model is None:
        problems.append(f"objective.method {objective.method} needs teacher.model, online.")
    if recipe.needs_guidance and not (recipe.teacher.online or recipe.stores or recipe.corpora):
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
        from vocagnolm.train.trackers import tracker_problems

        problems += tracker_problems(recipe.run.report_to)
    for work in (lambda: check_batch(recipe, processes), lambda: objective_config(recipe)):
        try:
            work()
        except VocagnolmError as error:
            problems.append(str(error))
    return problems


def own_teacher(recipe: Recipe) -> str | None:
    """A warning where student and teacher are one model."""
    student, teacher = recipe.student.model, recipe.teacher.model
    if student is None or teacher is None or not (recipe.needs_guidance or recipe.needs_targets):
        return None
    if student != teacher and Path(student).resolve() != Path(teacher).resolve():
        return None
    return (
        f"student.model and teacher.model are one model, {student}: a student learns nothing from "
        "itself. Name a better teacher."
    )


# ---- what a recipe reads, and what it would write ----


class _Check:
    """Looks at everything that the recipe names, in turn. Each look keeps its result for those that
    follow; it is None where something is wrong, or where there is nothing to find."""

    corpus: Corpus | None = None
    corpus_bytes: int = 0
    """The size of the corpus's files that are on this machine."""
    tokenizer: TextTokenizer | None = None
    parameters: int | None = None
    store: LossStore | None = None
    """The store with the best teacher, if there are several."""
    blocks: int | None = None
    block_tokens: int = 0
    """Tokens of the blocks."""
    fingerprint: str | None = None
    """The fingerprint of prepared blocks."""
    schedule: Schedule | None = None

    def __init__(self, materials: Materials, processes: int):
        self.materials, self.processes = materials, processes
        self.recipe = recipe = materials.recipe
        self.report = CheckReport(problems=static_problems(recipe, processes))
        self.plan, self.warn = self.report.plan, self.report.warn
        self.folder = Path(recipe.run.folder) if recipe.run.folder else None
        self.warn(own_teacher(recipe))

    @property
    def conversations(self) -> bool:
        """Whether some of what is trained on are conversations."""
        return isinstance(self.tokenizer, ChatTokenizer)

    def find_corpus(self) -> None:
        names = self.recipe.corpus.files
        if not names:
            return
        local = [Path(name) for name in names if Path(name).exists()]
        paths = [p for path in local for p in ([path] if path.is_file() else path.rglob("*"))]
        size = sum(path.stat().st_size for path in paths)
        facts = self.plan["corpus"] = {"files": names, "bytes_on_disk": size}
        self.corpus_bytes = size
        if any(address_of(name) for name in names):
            facts["read"] = "at an address: not copied for a check"
        elif size > LARGEST_CORPUS_READ_BYTES:
            facts["read"] = "too large to read through in a check"
        else:
            self.corpus = self.materials.corpus
            facts["documents"] = len(self.corpus)
            if self.corpus.split_texts:
                facts["split_texts"] = self.corpus.split_texts

    def find_tokenizer(self) -> None:
        talks = self.corpus is not None and self.corpus.conversations
        tokenizer = self.materials.reader(talks)
        prefix, eos = separator_ids(tokenizer, self.recipe.data.bos, self.recipe.data.eos)
        self.plan["student_tokenizer"] = {
            "name": tokenizer.name,
            "vocabulary": tokenizer.vocabulary_size,
            "bos": " ".join(map(tokenizer.token, prefix)) or None,
            "eos": None if eos is None else tokenizer.token(eos),
        }
        self.tokenizer = tokenizer
        if self.recipe.data.bos == "auto":
            self.warn(missing_beginning(tokenizer))

    def find_student(self) -> None:
        """Read the student's configuration; no weights are loaded."""
        section, block_size = self.recipe.student, self.recipe.data.block_size
        if section.model is None and section.config is None:
            return
        known: object = section.config
        if section.model is not None:  # None: on the hub, or in a GGUF file
            file = Path(section.model, "config.json")
            known = file.read_bytes() if file.is_file() else None
        ask = partial(about_student, self.recipe)
        about = ask() if known is None else remembered("student", [known], ask)
        self.parameters = int(about["parameters"])
        self.plan["student"] = {
            "model": section.model or "from config",
            "architecture": about["architecture"],
            "parameters": about["parameters"],
        }
        limit, rows = about["positions"], about["rows"]
        if isinstance(limit, int) and block_size > limit:
            self.report.problem(
                f"data.block_size is {block_size:,}, the student reads at most {limit:,}."
            )
        largest = max(self.tokenizer.vocabulary.values()) if self.tokenizer is not None else 0
        if largest >= rows:
            self.report.problem(
                f"the student has {rows:,} embedding rows, its tokenizer has ids up to {largest:,}."
            )

    def find_stores(self) -> None:
        recipe = self.recipe
        if not recipe.stores:
            return
        stores = self.materials.stores
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
            listed = storage_of(store.path).files(*STORE_FOLDERS)
            for line in listing_problems(store.manifest, listed):
                self.report.problem(f"{store.path}: {line}. {mend_hint(store.path)}")
        if recipe.needs_targets and not recipe.teacher.online:
            common_alternatives(stores, recipe.objective.alternatives)
        if len(stores) == 1:
            self.plan["store"] = facts[0]
        else:
            self.plan["stores"] = facts
            for about, share in zip(facts, best_shares(stores) or [], strict=False):
                about["best_share"] = share
        self._compare_with(stores)
        self.store = best_store(stores)
        if recipe.needs_guidance:
            self.warn(teacher_warning(self.store.bits_per_byte, recipe.student.bits_per_byte))

    def _compare_with(self, stores: list[LossStore]) -> None:
        """Check that the stores belong to the recipe's teacher and corpus."""
        wanted, missing = self.recipe.teacher.model, self.recipe.data.missing
        names = {Path(store.teacher_name).name for store in stores}
        called = () if wanted is None else (Path(wanted).name, model_folder_name(Path(wanted)))
        if wanted is not None and names.isdisjoint(called):
            self.warn(
                f"the store is of teacher {', '.join(sorted(names))}, the recipe names {wanted}."
            )
        made_from = {store.corpus_fingerprint for store in stores}
        if self.corpus is None or made_from & {None, self.corpus.fingerprint}:
            return
        absent = (
            str(document.place)
            for document in self.corpus.read(0, 100)
            if document.text is not None
            and all(store.find(document_hash(document.text)) is None for store in stores)
        )
        if missing == "error" and (place := next(absent, None)) is not None:
            self.report.problem(
                f"the store was made from another corpus: it lacks {place}. Score the recipe's "
                "corpus, or set data.missing to drop or keep."
            )
        else:
            self.warn(
                "the store was made from another corpus than the recipe's; documents are looked up "
                f"by content, and those not in it follow data.missing = {missing}."
            )

    def look_at_teacher(self) -> None:
        recipe, one_vocabulary = self.recipe, self.recipe.method.one_vocabulary
        if recipe.teacher_tokenizer is None:
            if one_vocabulary:
                self.warn(
                    f"objective.method {recipe.objective.method} presupposes one vocabulary; set "
                    "teacher.model or teacher.tokenizer so that it can be checked."
                )
            return
        if not (one_vocabulary or recipe.needs_online_teacher):
            return
        teacher = teacher_tokenizer(recipe)
        self.plan["teacher_tokenizer"] = {
            "name": teacher.name,
            "vocabulary": teacher.vocabulary_size,
        }
        if not isinstance(self.tokenizer, ChatTokenizer):
            self.warn(missing_beginning(teacher))
        if one_vocabulary and self.tokenizer is not None:
            from vocagnolm.train.teacher import refuse_other_vocabulary

            refuse_other_vocabulary(self.tokenizer.vocabulary, teacher.vocabulary)

    def look_at_conversations(self) -> None:
        """Render a sample of the corpus with the chat templates of student and teacher."""
        recipe = self.recipe
        if self.corpus is None or not isinstance(self.tokenizer, ChatTokenizer):
            return
        texts = [d.text for d in self.corpus.read(0, SURVEYED) if d.text is not None]
        sides = {"student": self.tokenizer}
        if recipe.teacher_tokenizer is not None:
            # with a store the teacher itself need not be here
            with contextlib.suppress(*(() if recipe.needs_online_teacher else (VocagnolmError,))):
                sides["teacher"] = teacher_chat(recipe, teacher_tokenizer(recipe))
        for side, tokenizer in sides.items():
            seen = survey(tokenizer, texts)
            refused = sum(seen.refused.values())
            self.plan[f"{side}_template"] = {
                "template": seen.to_dict()["template"],
                "conversations": seen.conversations,
                "refused": refused,
            }
            self.report.warnings += [f"{side} {line}" for line in seen.warnings()]
            if texts and refused == len(texts):
                self.report.problem(
                    f"{side}: the template of {tokenizer.name} refuses every conversation "
                    f"({next(iter(seen.refused))})."
                )

    def find_blocks(self) -> None:
        recipe = self.recipe
        if recipe.data.blocks is None or self.tokenizer is None:
            return
        folder = self.materials.storage
        if not folder.has(MANIFEST):
            self.plan["blocks"] = {"prepared": False, "next": "vocagnolm prepare RECIPE"}
            return
        manifest = read_manifest(folder)
        if manifest["settings"].get("conversations") and self.corpus is None:
            self.tokenizer = self.materials.chat
        wanted = block_settings(self.materials, self.tokenizer, self.corpus)
        for line in differing_inputs(manifest, self.materials, wanted, self.corpus):
            self.report.problem(f"{folder} does not belong to this recipe: {line}")
        summary, guided = manifest["summary"], manifest["settings"]["guidance"]
        self.blocks, bins = opened_count(recipe, manifest)
        self.plan["blocks"] = {
            "prepared": True,
            "blocks": self.blocks,
            "tokens": manifest["tokens"],
            "mapped_share": summary["mapped_share"] if guided else None,
            "one_to_one_share": summary["one_to_one_share"] if guided else None,
            "target_shares": summary.get("target_shares"),
            "conversations": None if bins is None else bins.words(recipe.data.block_size + 1),
            "verified": "names and sizes; `vocagnolm train` reads the parts through",
        }
        made_by = ((guided or {}).get("targets") or {}).get("rule", 1)
        if recipe.needs_targets and not recipe.teacher.online and made_by < TARGETS_RULE:
            self.warn(
                f"{folder}: its targets were made by an older rule ({made_by}; this program has "
                f"{TARGETS_RULE}), by which the run will train. Prepare into another folder for "
                "the new one."
            )
        for line in cut_parts(manifest, folder.files()):
            self.report.problem(f"{folder}: {line}. Run `vocagnolm prepare` again to rebuild it.")
        self.block_tokens, self.fingerprint = manifest["tokens"], manifest["fingerprint"]

    def plan_steps(self) -> None:
        recipe, blocks, prepared = self.recipe, self.blocks, self.fingerprint is not None
        train, run, warmup = recipe.train, recipe.run, recipe.optimizer.warmup_steps
        if not prepared or blocks is None:
            if train.tokens is None:
                return
            blocks = max(1, math.ceil(train.tokens / recipe.data.block_size))
        known = found_micro_batch(self.folder) if self.folder else None
        schedule = plan_schedule(recipe, blocks, self.processes, known)
        unknown = train.micro_batch == "auto" and known is None
        saved = schedule.steps // run.save_every if run.save_every else 0
        self.plan["schedule"] = {
            "steps": schedule.steps,
            "tokens": schedule.tokens,
            "tokens_per_step": schedule.tokens_per_step,
            "epochs": schedule.epochs if prepared else None,
            "processes": self.processes,
            "accumulation": None if unknown else schedule.accumulation,
            "micro_batch": "auto" if unknown else schedule.micro_batch,
            "a_step_depends": what_a_step_depends_on(recipe),
            "warmup_steps": warmup,
            "checkpoints": saved,
        }
        if unknown and objective_config(recipe).depends_on_micro_batch:
            self.warn(
                "train.micro_batch: auto with objective.scope: batch: which tokens compete depends "
                "on what is found on the machine that trains. A number, or scope: sequence or "
                "global, makes runs of different machines alike."
            )
        if warmup >= schedule.steps:
            self.warn(
                f"optimizer.warmup_steps = {warmup} is the whole run ({schedule.steps} steps)."
            )
        if prepared and schedule.epochs > MANY_EPOCHS:
            self.warn(
                f"the run reads its blocks {schedule.epochs:,.0f} times: is train.tokens or "
                "train.epochs meant so?"
            )
        if saved > MANY_CHECKPOINTS:
            self.warn(
                f"run.save_every = {run.save_every} writes {saved:,} checkpoints, of which "
                f"{run.keep_checkpoints} are kept at a time."
            )
        self.warn(slow_arithmetic(recipe))
        if self.folder:
            check_arguments(recipe, schedule)
        self.schedule = schedule

    def look_at_disk(self) -> None:
        """Compare the free disk space with what the run needs. A checkpoint holds the weights and
        AdamW's two moments, and a further one is there while it is written."""
        recipe = self.recipe
        if self.parameters is None or self.folder is None:
            return
        width = 4 if recipe.student.dtype == "float32" else 2
        saves = recipe.run.save_every or recipe.run.save_minutes
        kept = recipe.run.keep_checkpoints + 1 if saves else 0
        run_bytes = self.parameters * width * (3 * kept + 1)
        # ids and guidance; ids take four bytes beyond 65,536 tokens, a target an id and two bytes
        vocabulary = 0 if self.tokenizer is None else self.tokenizer.vocabulary_size
        id_bytes = 4 if vocabulary > 65536 else 2
        token_bytes = id_bytes + 2 * len(recipe.stores[:1])
        if recipe.needs_targets and self.store is not None:
            spec = self.store.kept_alternatives
            count = recipe.objective.alternatives or (spec.count if spec else 0)
            token_bytes += len(recipe.stores) * count * (id_bytes + 2)
        planned = 0 if self.schedule is None else self.schedule.tokens
        # more epochs make no more blocks; a token takes about a byte of a compressed file, or more
        planned = min(planned, self.corpus_bytes or planned)
        tokens = planned if self.fingerprint is None else self.block_tokens
        folder = self.folder.absolute()
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        self.plan["disk"] = {
            "run_bytes": run_bytes,
            "blocks_bytes": tokens * token_bytes,
            "free_bytes": free,
        }
        if run_bytes > free:
            self.report.problem(
                f"the run needs about {byte_text(run_bytes)} for checkpoints and model, "
                f"{existing} has {byte_text(free)} free. Lower run.keep_checkpoints or change disk."
            )

    def look_at_run(self) -> None:
        if self.folder is None:
            return
        about = read_run(self.folder)
        refuse_other_run(self.folder, self.recipe, about, self.fingerprint)
        if not about:
            return
        from vocagnolm.train.checkpoint import newest_complete

        if about["finished"]:
            self.warn(model_damage(self.folder / "model", read=False))
        self.plan["run"] = {
            "folder": str(self.folder),
            "finished": about["finished"],
            "resumes_after_step": newest_complete(self.folder / "checkpoints", read=False).step,
            "verified": "sizes; `vocagnolm train` compares checksums",
        }

    def look_at_weights(self, on_weights: Callable[[], None] | None) -> None:
        """Load the student's weights, if everything else is well, and test what only they can
        tell."""
        recipe = self.recipe
        has_weights = recipe.student.model is not None
        apart = recipe.data.document_mask or self.conversations
        if not self.report.ready or not (has_weights or apart):
            return  # random weights of a known kind need no look
        from vocagnolm.train.student import build_student, require_separation, understood_head

        if has_weights and on_weights is not None:
            on_weights()
        student = build_student(recipe)
        understood_head(student)
        if apart:
            require_separation(student, "The student")
        if has_weights:
            self.measure_strength(student)

    def measure_strength(self, student: "PreTrainedModel") -> None:
        """Compare the student with the teacher on a few documents."""
        recipe, tokenizer = self.recipe, self.tokenizer
        if not recipe.needs_guidance or recipe.student.bits_per_byte is not None:
            return
        if tokenizer is None or self.store is None or self.corpus is None:
            return
        strength = measure_strength(student, tokenizer, self.store, self.corpus)
        if strength is not None:
            self.plan["strength"] = {
                "teacher_bits_per_byte": strength.teacher,
                "student_bits_per_byte": strength.student,
                "documents": strength.documents,
            }
            self.warn(teacher_warning(strength.teacher, strength.student))


class _CheckCorpora(_Check):
    """Looks at everything that a recipe with several corpora names. Each corpus is looked at as in
    a run on it alone; what is wrong with it is said with its name."""

    def __init__(self, materials: Materials, processes: int):
        super().__init__(materials, processes)
        self.parts: dict[str, _Check] = {}
        for name, part in materials.by_corpus().items():
            self.parts[name] = _Check(part, processes)
            self.parts[name].report.problems.clear()  # they are this recipe's

    def find_corpus(self) -> None:
        self._each(lambda part: part.find_corpus())
        self.corpus_bytes = sum(part.corpus_bytes for part in self.parts.values())

    def find_stores(self) -> None:
        self._each(lambda part: part.find_tokenizer())
        self._each(lambda part: part.find_stores())

    def look_at_conversations(self) -> None:
        self._each(lambda part: part.look_at_conversations())

    def find_blocks(self) -> None:
        self._each(lambda part: part.find_blocks())
        parts = self.parts.values()
        if all(part.fingerprint is not None for part in parts):
            self.blocks = sum(part.blocks or 0 for part in parts)
            self.block_tokens = sum(part.block_tokens for part in parts)
            fingerprints = {name: str(part.fingerprint) for name, part in self.parts.items()}
            self.fingerprint = mixed_fingerprint(fingerprints)
        self.plan["corpora"] = [self._facts(name) for name in self.parts]

    def plan_steps(self) -> None:
        super().plan_steps()
        if self.schedule is None:
            return
        read = corpora_read(self.recipe, self.schedule)
        for facts, part in zip(self.plan["corpora"], self.parts.values(), strict=True):
            count = read[facts["name"]]
            facts["tokens_read"] = count * self.schedule.block_size
            facts["epochs"] = epochs = count / part.blocks if part.blocks else None
            if epochs is not None and epochs > MANY_EPOCHS:
                self.warn(
                    f"the run reads corpora.{facts['name']} {epochs:,.0f} times: is its share "
                    "meant so?"
                )

    def measure_strength(self, student: "PreTrainedModel") -> None:
        self._each(lambda part: part.measure_strength(student))
        for facts, part in zip(self.plan["corpora"], self.parts.values(), strict=True):
            facts |= part.plan.get("strength", {})

    @property
    def conversations(self) -> bool:
        return any(part.conversations for part in self.parts.values())

    def _facts(self, name: str) -> dict[str, Any]:
        """What is known of a corpus."""
        part = self.parts[name]
        corpus = part.plan.get("corpus", {})
        stores = part.plan.get("stores") or [part.plan[n] for n in ("store",) if n in part.plan]
        return {
            "name": name,
            "share": float(self.recipe.shares[name]),
            "files": corpus.get("files"),
            "documents": corpus.get("documents"),
            "teacher": ", ".join(store["teacher"] for store in stores) or "none, trained plainly",
            "prepared": part.fingerprint is not None,
            "blocks": part.blocks,
            "tokens": part.block_tokens or None,
        }

    def _each(self, look: Callable[[_Check], None]) -> None:
        """Look at every corpus, and take over what is wrong with it."""
        for name, part in self.parts.items():
            part.report.problems.clear()
            part.report.warnings.clear()
            try:
                look(part)
            except VocagnolmError as error:
                part.report.problem(str(error))
            for line in part.report.problems:
                self.report.problem(f"corpora.{name}: {line}")
            for line in part.report.warnings:
                if line not in self.report.warnings:  # of the tokenizer, which all of them share
                    self.warn(f"corpora.{name}: {line}")


def about_student(recipe: Recipe) -> dict[str, Any]:
    """Facts of the student's configuration, as transformers reads it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from vocagnolm.model.load import gguf_config
    from vocagnolm.train.student import model_config

    source = recipe.student.model
    if source is None:
        config = model_config(recipe.student.config or {})
    elif Path(source).suffix.lower() == ".gguf":
        config = gguf_config(Path(source))
    else:
        revision = recipe.student.revision or "main"
        if Path(source, "config.json").is_file():
            read_config(Path(source), TrainingError)
        try:
            config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
        except Exception as error:  # network, cache, format: many types, one meaning here
            reason = first_line(error)[:160]
            raise TrainingError(f"student.model {source} has no configuration: {reason}") from None
    with torch.device("meta"):  # shapes only, no weights
        parameters = int(AutoModelForCausalLM.from_config(config).num_parameters())
    text_config = config.get_text_config()
    return {
        "architecture": config.model_type,
        "parameters": parameters,
        "positions": getattr(text_config, "max_position_embeddings", None),
        "rows": text_config.vocab_size,
    }
