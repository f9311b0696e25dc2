"""What contradicts itself in a recipe, or wants a package that is not here: nothing of the corpus,
the store or the models is opened."""

from importlib.util import find_spec

from vocagnolm.errors import VocagnolmError
from vocagnolm.recipe import Recipe
from vocagnolm.train.arguments import objective_config
from vocagnolm.train.schedule import check_batch
from vocagnolm.train.trackers import tracker_problems


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
    problems += tracker_problems(recipe.run.report_to)
    try:
        check_batch(recipe, processes)
    except VocagnolmError as error:
        problems.append(str(error))
    try:
        objective_config(recipe)
    except VocagnolmError as error:
        problems.append(str(error))
    return problems
