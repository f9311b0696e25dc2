"""A run folder: one recipe, one set of blocks; its files, and the card of its model. No torch."""

import html
import platform
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vocagnolm import __version__
from vocagnolm.base.files import (
    LOCK_FILE,
    file_digest,
    is_leftover,
    parse_json,
    read_json,
    require_keys,
    unsealed,
    write_json,
    write_text,
)
from vocagnolm.chat import ChatTemplate
from vocagnolm.chat.survey import template_words
from vocagnolm.errors import RecipeError, TrainingError, VocagnolmWarning
from vocagnolm.recipe import Recipe, recipe_difference, recipe_from_dict
from vocagnolm.recipe.schema import read_tree
from vocagnolm.storage.copies import version

if TYPE_CHECKING:  # it comes with torch
    from vocagnolm.train.settings import Schedule

# ---- metrics.jsonl ----

# names in 0.1.0 -> names now
_NAMES = {"loss_selected": "nll_kept", "loss_all": "nll_all", "selected_share": "kept_share"}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file. A last line that was cut short is left out; so are other
    damaged lines, with a warning."""
    records: list[dict[str, Any]] = []
    damaged: list[int] = []
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            record = unsealed(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append({_NAMES.get(name) or name: value for name, value in record.items()})
        elif number < len(lines) or _is_object(line[:-1]):  # the line break itself is damaged
            damaged.append(number)
    if damaged:
        shown = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        warnings.warn(
            f"{path}: line {shown} is damaged and was skipped.", VocagnolmWarning, stacklevel=2
        )
    return records


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False


# ---- the folder ----


# Keys that do not affect training: a run may continue with other values.
RUNTIME_KEYS = frozenset(
    {
        "run.log_every",
        "run.report_to",
        "run.keep_checkpoints",
        "run.save_minutes",
        "train.loader_workers",
        "train.device",
        "student.bits_per_byte",
        "data.cache",
        "data.part_documents",
        "data.extra_columns",
    }
)
_MEND = "Choose another run.folder, or remove that file to start over."


def run_folder(recipe: Recipe) -> Path:
    if not recipe.run.folder:
        raise TrainingError("The recipe does not say where the run goes: set run.folder.")
    return _not_a_file(Path(recipe.run.folder))


def _not_a_file(folder: Path) -> Path:
    if folder.exists() and not folder.is_dir():
        raise TrainingError(f"{folder} is a file, and run.folder is a folder. Choose another one.")
    return folder


def run_recipe(folder: Path) -> Recipe:
    """The recipe that a run was started with; 0.1.0 wrote `train.bf16` instead of `train.dtype`."""
    path = folder / "recipe.yaml"
    tree = read_tree(path, RecipeError, _MEND)
    warn_of_other_recipe(folder, read_run(folder))
    train = tree.get("train")
    if isinstance(train, dict) and "bf16" in train:
        train["dtype"] = "bfloat16" if train.pop("bf16") else "float32"
    return recipe_from_dict(tree, origin=str(path))


def warn_of_other_recipe(folder: Path, about: dict[str, Any]) -> None:
    """Warn where a run's recipe.yaml is not the file that `about`, its run.json, was written for;
    older runs do not say."""
    path = folder / "recipe.yaml"
    known = about.get("recipe_sha256")
    if known is not None and path.is_file() and known != file_digest(path):
        warnings.warn(
            f"{path} is damaged or was edited: it does not match its checksum in run.json.",
            VocagnolmWarning,
            stacklevel=3,
        )


def read_run(folder: Path) -> dict[str, Any]:
    """The content of run.json; empty if there is none yet."""
    _not_a_file(folder)
    keys = {"finished": bool, "schedule": dict}
    try:
        return read_json(folder / "run.json", TrainingError, _MEND, keys)
    except FileNotFoundError:
        return {}


def refuse_other_run(
    folder: Path, recipe: Recipe, about: dict[str, Any], blocks: str | None = None
) -> None:
    """Refuse to continue a run with another recipe, or with other blocks (by their fingerprint)
    than it began with. The number of processes may change: a step is the same however it is
    split. `about`: the content of run.json."""
    if not (folder / "recipe.yaml").is_file():
        files = folder.iterdir() if folder.is_dir() else iter(())
        if any(p.name != LOCK_FILE and not is_leftover(p.name) for p in files):
            raise TrainingError(f"{folder} is not empty and not a run. Choose another run.folder.")
        return
    if not has_begun(folder):
        return
    finished = bool(about) and about["finished"]
    difference = recipe_difference(run_recipe(folder), recipe, RUNTIME_KEYS)
    others = blocks is not None and about.get("blocks") not in (None, blocks)
    if about and not finished and others:
        difference.append(f"the blocks in {recipe.data.blocks} are not those it began with")
    if difference:
        raise TrainingError(
            f"{folder} holds a run with another recipe:\n  "
            + "\n  ".join(difference)
            + "\nRestore these settings to continue it, or choose another run.folder."
            + f" To train its model further there: student.model={folder / 'model'}." * finished
        )


def has_begun(folder: Path) -> bool:
    """Whether a run has made a step. Before that its folder is free for another recipe, such as the
    corrected one after a model that did not load."""
    made = (folder / "metrics.jsonl", folder / "model", *(folder / "checkpoints").glob("*"))
    return any(path.exists() for path in made)


def begin_run(
    folder: Path,
    recipe: Recipe,
    schedule: "Schedule",
    blocks: str,
    corpora: dict[str, Any] | None = None,
) -> None:
    """Write recipe.yaml and run.json of a new run. A run that continues keeps them, with a new
    schedule if the number of processes has changed. `corpora`: what it reads of each of several."""
    begun = has_begun(folder)
    if not begun or not (folder / "recipe.yaml").exists():
        write_text(folder / "recipe.yaml", recipe.to_yaml())
    if not begun or not (folder / "run.json").exists():
        about = {
            "finished": False,
            "schedule": asdict(schedule),
            "blocks": blocks,
            **({} if corpora is None else {"corpora": corpora}),
            "recipe_sha256": file_digest(folder / "recipe.yaml"),
            "versions": {
                "vocagnolm": __version__,
                "torch": version("torch"),
                "transformers": version("transformers"),
                "python": platform.python_version(),
            },
        }
        write_json(folder / "run.json", about, sealed=True)
    elif read_run(folder)["schedule"] != asdict(schedule):
        note_in_run(folder, schedule=asdict(schedule))


def newest_checkpoint(folder: Path) -> int:
    """The step of the newest checkpoint of a run that was finished, by its marker; 0 if there is
    none."""
    markers = folder.glob("checkpoints/checkpoint-*/complete.json")
    steps = (path.parent.name.rpartition("-")[2] for path in markers)
    return max((int(step) for step in steps if step.isdecimal()), default=0)


def note_in_run(folder: Path, **facts: Any) -> None:
    """Add facts to run.json."""
    write_json(folder / "run.json", {**read_run(folder), **facts}, sealed=True)


def found_micro_batch(folder: Path) -> int | None:
    """The micro-batch of a run that has begun, whether it was given or found; else None."""
    schedule = read_run(folder).get("schedule", {})
    return schedule.get("micro_batch") if has_begun(folder) else None


def run_summary(folder: Path, *, already: bool = False) -> dict[str, Any]:
    """The facts that `vocagnolm train` prints at the end. `already`: the run was finished
    before."""
    about = read_run(folder)
    records = read_metrics(folder / "metrics.jsonl")
    schedule = about["schedule"]
    whole = dict.fromkeys(("steps", "batch_blocks", "block_size"), int)
    require_keys(schedule, folder / "run.json", TrainingError, _MEND, whole)
    tokens = schedule["steps"] * schedule["batch_blocks"] * schedule["block_size"]
    if about.get("rounds"):  # whose steps have as many tokens as were written
        tokens = records[-1]["tokens"] if records else 0
    return {
        "run": str(folder),
        "model": str(folder / "model"),
        "finished": about["finished"],
        "already_finished": already,
        "steps": schedule["steps"],
        "tokens": tokens,
        "last": records[-1] if records else None,
        "times": None if already else about.get("times"),
        "seconds_to_first_step": None if already else about.get("seconds_to_first_step"),
    }


# ---- the model card ----


def model_card(
    recipe: Recipe,
    schedule: "Schedule",
    store_teacher: str | None,
    final: dict[str, Any],
    template: ChatTemplate | None = None,
) -> str:
    """The README.md of the model folder. `template`: the chat template of the conversations."""
    from vocagnolm.train.settings import what_a_step_depends_on

    method = recipe.objective.method
    base = recipe.student.model or "random weights"
    rounds = recipe.rounds
    rows = {
        "method": f"`{method}`: {recipe.method.label}",
        "student": f"`{base}`" + (" with LoRA, merged" if recipe.lora.rank else ""),
        "teacher": _teacher(recipe, store_teacher),
    }
    if recipe.method.on_policy:
        rows |= {
            "prompts": ", ".join(f"`{name}`" for name in rounds.prompts),
            "rounds": f"{rounds.rounds:,}, each of {rounds.prompts_per_round:,} prompts with "
            f"{rounds.samples} answer{'s' * (rounds.samples > 1)} and {rounds.updates_per_round} "
            f"step{'s' * (rounds.updates_per_round > 1)}",
            "divergence": f"{recipe.objective.divergence}, temperature {rounds.temperature:g}",
        }
    else:
        rows |= {
            "corpora" if recipe.corpora else "corpus": _corpora(recipe) or "not stated",
            "tokens": f"{schedule.tokens:,} in {schedule.steps:,} steps of "
            f"{schedule.tokens_per_step:,} (blocks of {schedule.block_size:,})",
            "epochs": f"{schedule.epochs:.3g}",
        }
    rows |= {
        "learning rate": f"{recipe.optimizer.learning_rate:g} to "
        f"{recipe.optimizer.min_learning_rate:g}, cosine, "
        f"{recipe.optimizer.warmup_steps} warm-up steps",
        "seed": str(recipe.run.seed),
    }
    if template is not None:
        words = template_words(template.origin)
        options = f" with {dict(template.options)}" if template.options else ""
        rows["conversations"] = f"trained on: {recipe.data.train_on}; {words}{options}"
    if recipe.method.selects:
        o = recipe.objective
        rows["selection"] = (
            f"keep {o.keep:g}, aggregation {o.aggregation}, unmapped {o.unmapped}, "
            f"scope {o.scope}, normalised by {o.normalise}"
        )
    rows["a step depends"] = what_a_step_depends_on(recipe)
    rows["micro-batch"] = f"{schedule.micro_batch} blocks"
    if recipe.needs_targets:
        o = recipe.objective
        end = "" if o.mix_end is None else f" to {o.mix_end:g}"
        rows["distillation"] = f"mix {o.mix:g}{end}, by {o.mix_by}; alternatives " + (
            "all of the store's" if o.alternatives is None else f"{o.alternatives} a token"
        )
    if final:
        rows["last step"] = (
            f"loss {final['loss']:.4f}; nll of the kept tokens {final['nll_kept']:.4f}, of all "
            f"{final['nll_all']:.4f}; kept {final['kept_share']:.1%}"
        )
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    yaml = recipe.to_yaml()
    name = html.escape(Path(recipe.run.folder or "student").name)
    hub_base = base if base.count("/") == 1 and not base.startswith((".", "/", "~")) else None
    header = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- vocagnolm\n"
    header += f"base_model: {hub_base}\n" if hub_base else ""
    return f"""{header}---

# {name}

Trained with vocagnolm {__version__}.

| | |
| --- | --- |
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(FOLDER)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
```

## Recipe

```yaml
{yaml}```
"""


def _corpora(recipe: Recipe) -> str:
    """The files that a model was trained on, with the shares of several corpora."""
    files = {
        name: ", ".join(f"`{file}`" for file in part.corpus.files)
        for name, part in recipe.by_corpus().items()
    }
    if not recipe.corpora:
        return files[""]
    shares = recipe.shares
    return "; ".join(f"{name} {float(shares[name]):.1%} ({files[name]})" for name in files)


def _teacher(recipe: Recipe, store_teacher: str | None) -> str:
    if recipe.method.on_policy:
        return f"`{recipe.teacher.model}`, which read the answers"
    if recipe.needs_online_teacher:
        return f"`{recipe.teacher.model}`, online"
    if not recipe.needs_guidance:
        return "none"
    name = store_teacher or recipe.teacher.model
    paths = ", ".join(f"`{path}`" for path in recipe.stores)
    return f"`{name}`, through the loss store{'s' * (len(recipe.stores) > 1)} {paths}"
