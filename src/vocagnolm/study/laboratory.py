"""The stages of a study as tasks: start, score, blocks, tuning, runs. Each goes through the
ordinary code (`train`, `score_corpus`, `prepare`) with an ordinary recipe, and leaves a file when
it is done."""

from functools import partial
from pathlib import Path

from vocagnolm.recipe import Recipe
from vocagnolm.study import actions
from vocagnolm.study.design import GranularityPlan, RunPlan, recipe_with
from vocagnolm.study.folder import EVALUATION, SELECTION, StudyFolder
from vocagnolm.study.task import Task, existing_path


class Laboratory(StudyFolder):
    """A study in its folder, with all that there is to do."""

    def tasks(self) -> list[Task]:
        """In the order of importance: what others wait for first, then the runs by priority."""
        tasks: dict[str, Task] = {}

        def add(task: Task) -> None:
            tasks.setdefault(task.name, task)

        if self.study.start is not None:
            add(self._start_task())
            add(self._start_evaluation())
        used = {name for run in self.runs for name in run.teachers}
        stored = {name for run in self.runs if self.stored(run) for name in run.teachers}
        for name, teacher in self.study.teachers.items():
            if name in used and teacher.train is not None:
                recipe = self.teacher_recipe(name)
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
        return Task(
            "start",
            "start",
            self.folder / "start" / "model",
            self.student_files(),
            partial(actions.run_start, self, self.start_recipe()),
        )

    def _start_evaluation(self) -> Task:
        model, folder = self.folder / "start" / "model", self.folder / "runs" / "start-s0"
        return Task(
            "evaluate-start",
            "evaluate",
            folder / EVALUATION,
            (model,),
            partial(
                actions.evaluate,
                self,
                model,
                folder,
                {"row": "start"},
                requests=self.study.evaluate.requests,
            ),
        )

    def _teacher_task(self, name: str, recipe: Recipe) -> Task:
        return Task(
            f"teacher-{name}",
            "teacher",
            Path(self.teacher_model(name)),
            self._run_needs(recipe),
            partial(actions.train_model, recipe),
        )

    def _score_task(self, teacher: str) -> Task:
        out = self.store(teacher)
        return Task(
            f"score-{teacher}",
            f"score-{teacher}",
            out / "manifest.json",
            existing_path(self.teacher_model(teacher)),
            partial(actions.score_teacher, self, teacher),
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
            partial(actions.prepare_blocks, self, recipe),
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
                    partial(actions.run_tuning, self, recipe, folder, group, rate),
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
            partial(actions.run_seed, self, run),
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
        action = partial(actions.measure_granularity, self, recipe, teacher, plan)
        return Task(path.stem, "granularity", path, needs, action)
