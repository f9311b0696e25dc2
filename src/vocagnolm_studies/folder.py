"""A study in its folder: where everything lies, and the recipes of its runs.

```
FOLDER/start/               the plain phase, a run folder
FOLDER/teachers/TEACHER/    teachers that the study trains, likewise
FOLDER/stores/TEACHER/      loss stores
FOLDER/blocks/NAME/         packed blocks, shared by all runs that can
FOLDER/tuning/GROUP-RATE/   short runs with one seed
FOLDER/runs/ROW-sSEED/      run folder + evaluation.json, answers.jsonl.gz, selection.json
FOLDER/runs/teacher-NAME/   evaluation.json and answers.jsonl.gz of a teacher that is measured
FOLDER/granularity-TEACHER.json   IoU and IoS of chunks, where a study asks for them
```
"""

import math
from pathlib import Path
from typing import Any

from vocagnolm.base.files import json_digest, local_path, read_json
from vocagnolm.errors import StudyError
from vocagnolm.recipe import Recipe
from vocagnolm.recipe.methods import METHODS
from vocagnolm_studies.design import (
    START,
    GranularityPlan,
    RowPlan,
    RunPlan,
    Study,
    expand_rows,
    plan_runs,
    recipe_with,
)

EVALUATION = "evaluation.json"
SELECTION = "selection.json"


def read_result(path: Path) -> dict[str, Any]:
    """A file that a task of the study left; its being there is what makes the task done."""
    return read_json(path, StudyError, "Remove it and run the study again to rebuild it.")


def existing_path(source: str | None) -> tuple[Path, ...]:
    """A file or folder to wait for; a hub id is nothing to wait for."""
    if source is None:
        return ()
    local = source.startswith((".", "/", "~")) or source.count("/") != 1 or Path(source).exists()
    return (Path(source),) if local else ()


class StudyFolder:
    """A study in its folder."""

    def __init__(self, study: Study, folder: str | Path):
        self.study = study
        self.folder = local_path(folder)
        self.rows: dict[str, RowPlan] = expand_rows(study.rows)
        self.runs: list[RunPlan] = plan_runs(study)

    # ---- paths ----

    def run_folder(self, run: RunPlan) -> Path:
        return self.folder / "runs" / run.name

    def first_run(self, row: str) -> Path:
        return self.folder / "runs" / f"{row}-s{self.rows[row].seeds[0]}"

    def store(self, teacher: str) -> Path:
        return self.folder / "stores" / teacher

    def measured_teachers(self) -> dict[str, Path]:
        """Teachers whose own answers are rows of the table, and where these lie."""
        asked = [name for name, plan in self.study.teachers.items() if plan.measured]
        return {name: self.folder / "runs" / f"teacher-{name}" for name in asked}

    def teacher_model(self, teacher: str) -> str:
        given = self.study.teachers[teacher].model
        if given == START:
            return str(self.folder / "start" / "model")
        return given or str(self.folder / "teachers" / teacher / "model")

    def granularity_file(self, plan: GranularityPlan) -> Path:
        return self.folder / f"granularity-{plan.teacher}.json"

    def student_files(self) -> tuple[Path, ...]:
        return existing_path(self.study.base.get("student", {}).get("model"))

    # ---- recipes ----

    def start_recipe(self) -> Recipe:
        assert self.study.start is not None
        overrides = {"objective.method": "cpt", **self.study.start}
        overrides["run.folder"] = str(self.folder / "start")
        recipe = recipe_with(self.study.base, overrides, "start")
        return self._with_blocks(recipe)

    def recipe(
        self, run: RunPlan, *, learning_rate: float | None, folder: Path | None = None
    ) -> Recipe:
        """The recipe of a run; without a learning rate, everything else of it."""
        overrides = dict(run.overrides)
        overrides["run.seed"] = run.seed
        overrides["run.folder"] = str(folder or self.run_folder(run))
        if self.study.start is not None:
            base = self.study.base.get("student", {})
            overrides.setdefault("student.tokenizer", base.get("tokenizer") or base.get("model"))
            overrides["student.model"] = str(self.folder / "start" / "model")
        if learning_rate is not None:
            overrides["optimizer.learning_rate"] = learning_rate
            overrides.setdefault("optimizer.min_learning_rate", learning_rate / 10)
        if run.teacher is not None:
            plan = self.study.teachers[run.teacher]
            overrides["teacher.model"] = self.teacher_model(run.teacher)
            if plan.tokenizer is not None:
                overrides["teacher.tokenizer"] = plan.tokenizer
            if self.stored(run):
                paths = [str(self.store(name)) for name in (run.teacher, *run.also)]
                overrides["store.path"] = paths if run.also else paths[0]
            if run.against is not None:
                reference = {"against": str(self.store(run.against))}
                overrides["corpus.keep_documents"] = (
                    overrides.get("corpus.keep_documents") or {}
                ) | reference
        return self._with_blocks(recipe_with(self.study.base, overrides, f"row {run.row}"))

    def teacher_recipe(self, teacher: str) -> Recipe:
        overrides = {"objective.method": "cpt", **(self.study.teachers[teacher].train or {})}
        run = RunPlan(
            name=f"teacher-{teacher}",
            row=f"teachers.{teacher}",
            seed=overrides.pop("run.seed", 0),
            overrides=overrides,
        )
        folder = self.folder / "teachers" / teacher
        return self.recipe(run, learning_rate=None, folder=folder)

    def _with_blocks(self, recipe: Recipe) -> Recipe:
        """Blocks are named by what decides them, so that runs share them."""
        chosen = recipe.corpus.keep_documents
        about: dict[str, Any] = {
            "corpus": recipe.to_dict()["corpus"],
            "tokenizer": recipe.student_tokenizer,
            "separators": [recipe.data.bos, recipe.data.eos],
            "store": recipe.to_dict()["store"],
            "guidance": [recipe.objective.aggregation, recipe.data.missing]
            if recipe.stores
            else None,
            "extra": recipe.data.extra_columns,
            "text": recipe.needs_block_text,
            "teacher_losses": recipe.needs_teacher_losses,
            "stretch": recipe.needs_stretches,
            "documents_seed": recipe.run.seed if chosen and chosen.by == "random" else None,
        }
        if recipe.needs_targets:
            about["targets"] = [recipe.objective.alternatives, recipe.objective.inside]
        digest = json_digest(about)[:10]
        kind = "-".join(Path(path).name for path in recipe.stores) or "plain"
        recipe.data.blocks = str(self.folder / "blocks" / f"{kind}-{digest}")
        return recipe

    def stored(self, run: RunPlan) -> bool:
        """Whether the run reads its teacher from a store."""
        method = METHODS[run.overrides.get("objective.method", "guided")]
        online = run.overrides.get("teacher.online", False)
        return run.teacher is not None and method.distance is None and not online

    def scored_files(self) -> list[str]:
        """What a teacher reads: `score_files`, or the corpora of all runs with a store."""
        if self.study.score_files:
            return list(self.study.score_files)
        files: list[str] = []
        for run in self.runs:
            if self.stored(run):
                for name in self.recipe(run, learning_rate=None).corpus.files:
                    if name not in files:
                        files.append(name)
        return files

    def learning_rate(self, group: str) -> float:
        """The best rate: the lowest mean bits per byte on the validation texts, or the highest
        accuracy on the validation questions. Of equals the lower."""
        assert self.study.tune is not None
        cost = {}
        for rate in self.study.tune.learning_rates:
            path = self.folder / "tuning" / f"{group}-{rate:g}" / EVALUATION
            result = read_result(path)
            if self.study.tune.by == "accuracy":
                if "validation_accuracy" not in result:
                    raise StudyError(
                        f"{path} holds no validation_accuracy: this rate was tuned by bits per "
                        "byte. Remove the folder to tune it again by accuracy."
                    )
                cost[rate] = -result["validation_accuracy"]
                continue
            bits = result["validation"]
            if not bits:
                raise StudyError("Tuning needs evaluate.validation: texts to choose by.")
            mean = sum(bits.values()) / len(bits)
            cost[rate] = mean if math.isfinite(mean) else math.inf
        return min(cost, key=lambda rate: (cost[rate], rate))
