"""The stages of a study as tasks: start, score, blocks, tuning, runs. Each goes through the
ordinary code (`train`, `score_corpus`, `prepare`) with an ordinary recipe, and leaves a file when
it is done.

```
FOLDER/start/               the plain phase, a run folder
FOLDER/teachers/TEACHER/    teachers that the study trains, likewise
FOLDER/stores/TEACHER/      loss stores
FOLDER/blocks/NAME/         packed blocks, shared by all runs that can
FOLDER/tuning/GROUP-RATE/   short runs with one seed
FOLDER/runs/ROW-sSEED/      run folder + evaluation.json, answers.jsonl.gz, selection.json
FOLDER/granularity-TEACHER.json   IoU and IoS of chunks, where a study asks for them
```
"""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vocagnolm.errors import StudyError
from vocagnolm.recipe import Recipe
from vocagnolm.study.design import (
    GranularityPlan,
    RowPlan,
    RunPlan,
    Study,
    expand_rows,
    plan_runs,
    recipe_with,
)
from vocagnolm.study.task import Task, existing_path, release_memory, write_json

EVALUATION = "evaluation.json"
SELECTION = "selection.json"
_SELECTION_MICRO_BATCHES = 8
# Methods that choose tokens: worth knowing which sources they keep.
_CHOOSING = ("guided", "no_teacher", "rho1", "chunk")


class Laboratory:
    """A study in its folder."""

    def __init__(self, study: Study, folder: str | Path):
        self.study = study
        self.folder = Path(folder)
        self.rows: dict[str, RowPlan] = expand_rows(study.rows)
        self.runs: list[RunPlan] = plan_runs(study)

    # ---- what there is to do ----

    def tasks(self) -> list[Task]:
        """In the order of importance: what others wait for first, then the runs by priority."""
        tasks: dict[str, Task] = {}

        def add(task: Task) -> None:
            tasks.setdefault(task.name, task)

        if self.study.start is not None:
            add(self._start_task())
            add(self._start_evaluation())
        used = {run.teacher for run in self.runs}
        stored = {run.teacher for run in self.runs if self._stored(run)}
        for name, teacher in self.study.teachers.items():
            if name in used and teacher.train is not None:
                recipe = self._teacher_recipe(name)
                add(self._blocks_task(recipe))
                add(self._teacher_task(name, recipe))
            if name in stored:
                add(self._score_task(name))
        for run in self.runs:
            add(self._blocks_task(self.recipe(run, learning_rate=None)))
        groups = {run.tuned for run in self.runs if run.tuned is not None}
        for group in sorted(groups):
            for task in self._tuning_tasks(group):
                add(task)
        for run in self.runs:
            add(self._run_task(run))
        if self.study.granularity is not None:
            add(self._granularity_task(self.study.granularity))
        return list(tasks.values())

    def _start_task(self) -> Task:
        recipe = self.start_recipe()
        # the blocks of the start are its own: made in the same task
        return Task(
            "start",
            "start",
            self.folder / "start" / "model",
            self._student_files(),
            self._start(recipe),
        )

    def _start(self, recipe: Recipe) -> Callable[[], None]:
        def action() -> None:
            self._prepare(recipe)
            self._train(recipe)

        return action

    def _start_evaluation(self) -> Task:
        folder = self.folder / "runs" / "start-s0"
        return Task(
            "evaluate-start",
            "evaluate",
            folder / EVALUATION,
            (self.folder / "start" / "model",),
            lambda: self._evaluate(self.folder / "start" / "model", folder, {"row": "start"}),
        )

    def _teacher_task(self, name: str, recipe: Recipe) -> Task:
        return Task(
            f"teacher-{name}",
            "teacher",
            Path(self.teacher_model(name)),
            self._run_needs(recipe),
            lambda: self._train(recipe),
        )

    def _score_task(self, teacher: str) -> Task:
        out = self.store(teacher)
        return Task(
            f"score-{teacher}",
            f"score-{teacher}",
            out / "manifest.json",
            existing_path(self.teacher_model(teacher)),
            lambda: self._score(teacher),
        )

    def _blocks_task(self, recipe: Recipe) -> Task:
        assert recipe.data.blocks is not None
        folder = Path(recipe.data.blocks)
        needs = [*existing_path(recipe.student_tokenizer)]
        if recipe.store.path is not None:
            needs.append(Path(recipe.store.path) / "manifest.json")
        return Task(
            f"blocks-{folder.name}",
            "blocks",
            folder / "manifest.json",
            tuple(needs),
            lambda: self._prepare(recipe),
        )

    def _tuning_tasks(self, group: str) -> list[Task]:
        tune = self.study.tune
        assert tune is not None
        tasks = []
        for rate in tune.learning_rates:
            run = self._tuning_run(group)
            folder = self.folder / "tuning" / f"{group}-{rate:g}"
            recipe = self.recipe(run, learning_rate=rate, folder=folder)
            tasks.append(
                Task(
                    f"tune-{group}-{rate:g}",
                    "tune",
                    folder / EVALUATION,
                    self._run_needs(recipe),
                    self._tuning_action(recipe, folder, group, rate),
                )
            )
        return tasks

    def _tuning_action(
        self, recipe: Recipe, folder: Path, group: str, rate: float
    ) -> Callable[[], None]:
        def action() -> None:
            seconds = self._train(recipe)
            about = {"group": group, "learning_rate": rate, "train_seconds": seconds}
            self._evaluate(folder / "model", folder, about, with_answers=False)
            self._discard(folder / "model")

        return action

    def _tuning_run(self, group: str) -> RunPlan:
        tune = self.study.tune
        assert tune is not None
        name = tune.rows[group]
        row = self.rows[name]
        return RunPlan(
            name=f"tune-{group}",
            row=name,
            seed=tune.seed,
            overrides={**row.set, **tune.set},
            teacher=row.teacher,
            tuned=None,
            matched_to=None,
            order=(0, 0, 0),
        )

    def _run_task(self, run: RunPlan) -> Task:
        needs = [*self._run_needs(self.recipe(run, learning_rate=None))]
        if run.tuned is not None:
            assert self.study.tune is not None
            for rate in self.study.tune.learning_rates:
                needs.append(self.folder / "tuning" / f"{run.tuned}-{rate:g}" / EVALUATION)
        if run.matched_to is not None:
            needs.append(self._first_run(run.matched_to) / SELECTION)
        folder = self.run_folder(run)
        return Task(
            run.name, f"run-{run.row}", folder / EVALUATION, tuple(needs), lambda: self._run(run)
        )

    def _run_needs(self, recipe: Recipe) -> tuple[Path, ...]:
        assert recipe.data.blocks is not None
        needs = [Path(recipe.data.blocks) / "manifest.json"]
        if self.study.start is not None:
            needs.append(self.folder / "start" / "model")
        if recipe.needs_online_teacher:
            needs += existing_path(recipe.teacher.model)
        return tuple(needs)

    def _granularity_task(self, plan: GranularityPlan) -> Task:
        recipe = recipe_with(self.study.base, {}, "granularity")
        teacher = self.study.teachers[plan.teacher].tokenizer or self.teacher_model(plan.teacher)
        path = self.granularity_file(plan)

        def action() -> None:
            from vocagnolm.study.granularity import corpus_granularity

            write_json(path, corpus_granularity(recipe, teacher, plan).as_json())

        needs = (*existing_path(recipe.student_tokenizer), *existing_path(teacher))
        return Task(path.stem, "granularity", path, needs, action)

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
            if self._stored(run):
                overrides["store.path"] = str(self.store(run.teacher))
        return self._with_blocks(recipe_with(self.study.base, overrides, f"row {run.row}"))

    def _stored(self, run: RunPlan) -> bool:
        """Whether the run reads its teacher from a store."""
        method = run.overrides.get("objective.method", "guided")
        online = run.overrides.get("teacher.online", False)
        return run.teacher is not None and method not in ("kld", "uld") and not online

    def _with_blocks(self, recipe: Recipe) -> Recipe:
        """Blocks are named by what decides them, so that runs share them."""
        about = {
            "corpus": recipe.to_dict()["corpus"],
            "tokenizer": recipe.student_tokenizer,
            "separators": [recipe.data.bos, recipe.data.eos],
            "store": recipe.store.path,
            "guidance": [recipe.objective.aggregation, recipe.data.missing]
            if recipe.store.path
            else None,
            "extra": recipe.data.extra_columns,
            "text": recipe.needs_block_text,
            "teacher_losses": recipe.needs_teacher_losses,
        }
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:10]
        kind = Path(recipe.store.path).name if recipe.store.path else "plain"
        recipe.data.blocks = str(self.folder / "blocks" / f"{kind}-{digest}")
        return recipe

    def teacher_model(self, teacher: str) -> str:
        given = self.study.teachers[teacher].model
        return given or str(self.folder / "teachers" / teacher / "model")

    def _teacher_recipe(self, teacher: str) -> Recipe:
        overrides = {"objective.method": "cpt", **(self.study.teachers[teacher].train or {})}
        run = RunPlan(
            name=f"teacher-{teacher}",
            row=f"teachers.{teacher}",
            seed=overrides.pop("run.seed", 0),
            overrides=overrides,
            teacher=None,
            tuned=None,
            matched_to=None,
            order=(0, 0, 0),
        )
        folder = self.folder / "teachers" / teacher
        return self.recipe(run, learning_rate=None, folder=folder)

    def store(self, teacher: str) -> Path:
        return self.folder / "stores" / teacher

    def run_folder(self, run: RunPlan) -> Path:
        return self.folder / "runs" / run.name

    def granularity_file(self, plan: GranularityPlan) -> Path:
        return self.folder / f"granularity-{plan.teacher}.json"

    def _first_run(self, row: str) -> Path:
        return self.folder / "runs" / f"{row}-s{self.rows[row].seeds[0]}"

    def _student_files(self) -> tuple[Path, ...]:
        return existing_path(self.study.base.get("student", {}).get("model"))

    def learning_rate(self, group: str) -> float:
        """The rate with the lowest mean bits per byte on the validation texts."""
        assert self.study.tune is not None
        found = {}
        for rate in self.study.tune.learning_rates:
            path = self.folder / "tuning" / f"{group}-{rate:g}" / EVALUATION
            bits = json.loads(path.read_text(encoding="utf-8"))["validation"]
            if not bits:
                raise StudyError("Tuning needs evaluate.validation: texts to choose by.")
            mean = sum(bits.values()) / len(bits)
            found[rate] = mean if math.isfinite(mean) else math.inf
        return min(found, key=lambda rate: (found[rate], rate))

    # ---- actions ----

    def _score(self, teacher: str) -> None:
        from vocagnolm.score import ScoreSettings, score_corpus

        files = self._all_corpus_files()
        base = self.study.base.get("corpus", {})
        started = time.perf_counter()
        summary = score_corpus(
            self.teacher_model(teacher),
            files,
            self.store(teacher),
            settings=ScoreSettings(**self.study.score),
            text_field=base.get("text_field", "text"),
        )
        about = {
            "teacher": teacher,
            "tokens": summary.tokens,
            "seconds": summary.seconds,
            "seconds_with_loading": time.perf_counter() - started,
            "bits_per_byte": summary.store["bits_per_byte"],
        }
        write_json(self.folder / "stores" / f"{teacher}.json", about)
        release_memory()

    def _all_corpus_files(self) -> list[str]:
        """What a teacher reads: `score_files`, or the corpora of all runs with a store."""
        if self.study.score_files:
            return list(self.study.score_files)
        files: list[str] = []
        for run in self.runs:
            if self._stored(run):
                for name in self.recipe(run, learning_rate=None).corpus.files:
                    if name not in files:
                        files.append(name)
        return files

    def _prepare(self, recipe: Recipe) -> None:
        from vocagnolm.data.prepare import prepare

        prepare(recipe, workers=self.study.prepare_workers)

    def _train(self, recipe: Recipe) -> float:
        from vocagnolm.train.run import train

        started = time.perf_counter()
        train(recipe, quiet=True)
        release_memory()
        return time.perf_counter() - started

    def _run(self, run: RunPlan) -> None:
        rate = self.learning_rate(run.tuned) if run.tuned is not None else None
        recipe = self.recipe(run, learning_rate=rate)
        folder = self.run_folder(run)
        if run.matched_to is not None:
            self._match(run, recipe)
        seconds = self._train(recipe)
        self._measure_selection(run, recipe, folder)
        about = {
            "row": run.row,
            "seed": run.seed,
            "learning_rate": recipe.optimizer.learning_rate,
            "train_seconds": seconds,
        }
        self._evaluate(folder / "model", folder, about)
        self._discard(folder / "model")

    def _match(self, run: RunPlan, recipe: Recipe) -> None:
        from vocagnolm.study.selection import (
            document_sources,
            mean_shares,
            write_matched_blocks,
        )

        assert run.matched_to is not None and recipe.data.blocks is not None
        path = self._first_run(run.matched_to) / SELECTION
        measured = json.loads(path.read_text(encoding="utf-8"))
        target = self.folder / "blocks" / f"matched-{run.name}"
        write_matched_blocks(
            Path(recipe.data.blocks),
            target,
            document_sources(recipe.corpus.files, self.study.source_field),
            mean_shares(*measured.values()),
            run.seed,
        )
        recipe.data.blocks = str(target)

    def _measure_selection(self, run: RunPlan, recipe: Recipe, folder: Path) -> None:
        """Kept share per source of the row's first run, with the student before and after."""
        first = self.rows[run.row].seeds[0] == run.seed
        if not first or recipe.objective.method not in _CHOOSING or recipe.needs_online_teacher:
            return
        from vocagnolm.study.selection import document_sources, kept_by_source

        sources = document_sources(recipe.corpus.files, self.study.source_field)
        measured = {}
        students = {"after": str(folder / "model")}
        if recipe.student.model is not None:
            students["before"] = recipe.student.model
        for when, model in students.items():
            measured[when] = kept_by_source(
                recipe, model, sources, micro_batches=_SELECTION_MICRO_BATCHES
            )
        write_json(folder / SELECTION, measured)
        release_memory()

    def _evaluate(
        self, model: Path, folder: Path, about: dict[str, Any], *, with_answers: bool = True
    ) -> None:
        from vocagnolm.study.evaluation import evaluate_model

        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        result = evaluate_model(model, self.study.evaluate, folder, with_answers=with_answers)
        seconds = time.perf_counter() - started
        write_json(folder / EVALUATION, {**about, **result, "evaluate_seconds": seconds})
        release_memory()

    def _discard(self, model: Path) -> None:
        if not self.study.keep_models:
            shutil.rmtree(model)
