"""The stages of a study as tasks: start, score, blocks, tuning, runs.

Each goes through the ordinary code (`train`, `score_corpus`, `prepare`) with an ordinary recipe,
and leaves a file in the study's folder when it is done.
"""

import gc
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vocagnolm.base.files import write_json
from vocagnolm.recipe import Recipe
from vocagnolm_studies.design import Exchange, GranularityPlan, RunPlan, recipe_with
from vocagnolm_studies.folder import (
    EVALUATION,
    SELECTION,
    StudyFolder,
    existing_path,
    read_result,
)

_SELECTION_MICRO_BATCHES = 8


@dataclass(frozen=True)
class Task:
    """Something to do once: `done` exists afterwards."""

    name: str
    kind: str
    done: Path
    needs: tuple[Path, ...]
    """Files that must be there before."""
    action: Callable[[], object]

    @property
    def is_done(self) -> bool:
        return self.done.exists()

    @property
    def is_ready(self) -> bool:
        return all(path.exists() for path in self.needs)


class StudyTasks(StudyFolder):
    """A study in its folder, with all that there is to do."""

    def tasks(self) -> list[Task]:
        """In the order of importance: what others wait for first, then the runs by priority."""
        tasks: dict[str, Task] = {}

        def add(task: Task) -> None:
            tasks.setdefault(task.name, task)

        if self.study.start is not None:
            add(self._start_task())
            start = str(self.folder / "start" / "model")
            add(self._evaluation_task("start", start, self.folder / "runs" / "start-s0"))
        measured = self.measured_teachers()
        used = {name for run in self.runs for name in run.teachers} | set(measured)
        stored = {name for run in self.runs if self.stored(run) for name in run.teachers}
        for name, teacher in self.study.teachers.items():
            if name in used and teacher.train is not None:
                recipe = self.teacher_recipe(name)
                add(self._blocks_task(recipe))
                add(self._teacher_task(name, recipe))
            if name in measured:
                model = self.teacher_model(name)
                add(self._evaluation_task(f"teacher-{name}", model, measured[name]))
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
        return Task(
            "start",
            "start",
            self.folder / "start" / "model",
            self.student_files(),
            partial(run_start, self, self.start_recipe()),
        )

    def _evaluation_task(self, name: str, model: str, folder: Path) -> Task:
        """The evaluation of a model that is no row's run: the start, or a teacher."""
        questions = self.study.evaluate.requests
        return Task(
            f"evaluate-{name}",
            "evaluate",
            folder / EVALUATION,
            existing_path(model),
            partial(evaluate, self, model, folder, {"row": name}, requests=questions),
        )

    def _teacher_task(self, name: str, recipe: Recipe) -> Task:
        return Task(
            f"teacher-{name}",
            "teacher",
            Path(self.teacher_model(name)),
            self._run_needs(recipe),
            partial(train_model, recipe),
        )

    def _score_task(self, teacher: str) -> Task:
        out = self.store(teacher)
        return Task(
            f"score-{teacher}",
            f"score-{teacher}",
            out / "manifest.json",
            existing_path(self.teacher_model(teacher)),
            partial(score_teacher, self, teacher),
        )

    def _blocks_task(self, recipe: Recipe) -> Task:
        assert recipe.data.blocks is not None
        folder = Path(recipe.data.blocks)
        needs = [*existing_path(recipe.student_tokenizer)]
        chosen = recipe.corpus.keep_documents
        stores = [*recipe.stores, *([chosen.against] if chosen and chosen.against else [])]
        needs += [Path(path) / "manifest.json" for path in stores]
        return Task(
            f"blocks-{folder.name}",
            "blocks",
            folder / "manifest.json",
            tuple(needs),
            partial(prepare_blocks, self, recipe),
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
                    partial(run_tuning, self, recipe, folder, group, rate),
                )
            )
        return tasks

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
            also=tuple(row.also),
            against=row.against,
        )

    def _run_task(self, run: RunPlan) -> Task:
        needs = [*self._run_needs(self.recipe(run, learning_rate=None))]
        if run.tuned is not None:
            assert self.study.tune is not None
            for rate in self.study.tune.learning_rates:
                needs.append(self.folder / "tuning" / f"{run.tuned}-{rate:g}" / EVALUATION)
        if run.matched_to is not None:
            needs.append(self.first_run(run.matched_to) / SELECTION)
        folder = self.run_folder(run)
        return Task(
            run.name,
            f"run-{run.row}",
            folder / EVALUATION,
            tuple(needs),
            partial(run_seed, self, run),
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
        needs = (*existing_path(recipe.student_tokenizer), *existing_path(teacher))
        action = partial(measure_granularity, self, recipe, teacher, plan)
        return Task(path.stem, "granularity", path, needs, action)


# ---- what the tasks do ----


def score_teacher(home: StudyFolder, teacher: str) -> None:
    from vocagnolm.score import ScoreSettings, score_corpus

    files = home.scored_files()
    base = home.study.base.get("corpus", {})
    started = time.perf_counter()
    summary = score_corpus(
        home.teacher_model(teacher),
        files,
        home.store(teacher),
        settings=ScoreSettings(**home.study.score | home.study.teachers[teacher].score),
        text_field=base.get("text_field", "text"),
        split=base.get("split", "none"),
    )
    about = {
        "teacher": teacher,
        "tokens": summary.tokens,
        "seconds": summary.seconds,
        "seconds_with_loading": time.perf_counter() - started,
        "bits_per_byte": summary.store["bits_per_byte"],
    }
    write_json(home.folder / "stores" / f"{teacher}.json", about)
    release_memory()


def prepare_blocks(home: StudyFolder, recipe: Recipe) -> None:
    from vocagnolm.data.prepare import prepare

    prepare(recipe, workers=home.study.prepare_workers)


def train_model(recipe: Recipe) -> float:
    from vocagnolm.train.run import train

    started = time.perf_counter()
    train(recipe, quiet=True)
    release_memory()
    return time.perf_counter() - started


def run_start(home: StudyFolder, recipe: Recipe) -> None:
    # the blocks of the start are its own: made in the same task
    prepare_blocks(home, recipe)
    train_model(recipe)


def run_tuning(home: StudyFolder, recipe: Recipe, folder: Path, group: str, rate: float) -> None:
    tune = home.study.tune
    assert tune is not None
    requests = home.study.evaluate.validation_requests if tune.by == "accuracy" else None
    seconds = train_model(recipe)
    about = {"group": group, "learning_rate": rate, "train_seconds": seconds}
    evaluate(home, folder / "model", folder, about, requests=requests, choosing=True)
    discard(home, folder / "model")


def run_seed(home: StudyFolder, run: RunPlan) -> None:
    rate = home.learning_rate(run.tuned) if run.tuned is not None else None
    recipe = home.recipe(run, learning_rate=rate)
    folder = home.run_folder(run)
    if run.matched_to is not None:
        _match(home, run, recipe)
    if run.targets is not None:
        _exchange(home, run, run.targets, recipe)
    seconds = train_model(recipe)
    _measure_selection(home, run, recipe, folder)
    about = {
        "row": run.row,
        "seed": run.seed,
        "learning_rate": recipe.optimizer.learning_rate,
        "train_seconds": seconds,
    }
    evaluate(home, folder / "model", folder, about, requests=home.study.evaluate.requests)
    discard(home, folder / "model")


def _match(home: StudyFolder, run: RunPlan, recipe: Recipe) -> None:
    from vocagnolm_studies.controls import document_sources, mean_shares, write_matched_blocks

    assert run.matched_to is not None and recipe.data.blocks is not None
    path = home.first_run(run.matched_to) / SELECTION
    measured = read_result(path)
    target = home.folder / "blocks" / f"matched-{run.name}"
    write_matched_blocks(
        Path(recipe.data.blocks),
        target,
        document_sources(recipe.corpus.files, home.study.source_field, recipe.corpus.text_field),
        mean_shares(*measured.values()),
        run.seed,
    )
    recipe.data.blocks = str(target)


def _exchange(home: StudyFolder, run: RunPlan, exchange: Exchange, recipe: Recipe) -> None:
    from vocagnolm.alignment import load_tokenizer
    from vocagnolm_studies.controls import write_exchanged_blocks

    assert recipe.data.blocks is not None and recipe.student_tokenizer is not None
    target = home.folder / "blocks" / f"exchanged-{run.name}"
    vocabulary = len(load_tokenizer(recipe.student_tokenizer).vocabulary)
    write_exchanged_blocks(Path(recipe.data.blocks), target, exchange, vocabulary, run.seed)
    recipe.data.blocks = str(target)


def _measure_selection(home: StudyFolder, run: RunPlan, recipe: Recipe, folder: Path) -> None:
    """Kept share per source of the row's first run, with the student before and after."""
    first = home.rows[run.row].seeds[0] == run.seed
    every_token = recipe.objective.keep == 1.0 and recipe.objective.weighting == "top_k"
    by_chance = recipe.method.ranking == "chance"
    chooses = recipe.method.selects and not every_token and not by_chance
    if not first or not chooses or recipe.needs_online_teacher:
        return
    from vocagnolm_studies.controls import document_sources, kept_by_source

    asked = recipe.corpus
    sources = document_sources(asked.files, home.study.source_field, asked.text_field)
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


def evaluate(
    home: StudyFolder,
    model: str | Path,
    folder: Path,
    about: dict[str, Any],
    *,
    requests: str | None,
    choosing: bool = False,
) -> None:
    """`choosing`: answers are graded at once, as a learning rate waits for them. Other answers are
    graded when the table is made, perhaps on another machine."""
    from vocagnolm_studies.evaluation import (
        ANSWERS_FILE,
        average_accuracy,
        evaluate_model,
        grade_answers,
        questions_of,
    )

    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    result = evaluate_model(model, home.study.evaluate, folder, requests=requests)
    if choosing and requests is not None:
        grades = grade_answers(folder / ANSWERS_FILE, questions_of(requests))
        result["validation_accuracy"] = average_accuracy(grades)
    seconds = time.perf_counter() - started
    write_json(folder / EVALUATION, {**about, **result, "evaluate_seconds": seconds})
    release_memory()


def discard(home: StudyFolder, model: Path) -> None:
    if not home.study.keep_models:
        shutil.rmtree(model)


def measure_granularity(
    home: StudyFolder, recipe: Recipe, teacher: str, plan: GranularityPlan
) -> None:
    from vocagnolm_studies.granularity import corpus_granularity

    overlaps = corpus_granularity(recipe, teacher, plan)
    write_json(home.granularity_file(plan), overlaps.as_json())


def release_memory() -> None:
    """Give back what the last model held."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
