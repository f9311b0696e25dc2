"""The model card of a trained student: what it is, and how to make it again."""

from pathlib import Path
from typing import Any

from vocagnolm import __version__
from vocagnolm.chat import ChatTemplate
from vocagnolm.chat.survey import template_words
from vocagnolm.recipe import Recipe
from vocagnolm.train.schedule import Schedule


def model_card(
    recipe: Recipe,
    schedule: Schedule,
    store_teacher: str | None,
    final: dict[str, Any],
    template: ChatTemplate | None = None,
) -> str:
    """README.md of the model folder. `template`: the one in which conversations were read."""
    method = recipe.objective.method
    base = recipe.student.model or "random weights"
    rows = {
        "method": f"`{method}`: {recipe.method.label}",
        "student": f"`{base}`" + (" with LoRA, merged" if recipe.lora.rank else ""),
        "teacher": _teacher(recipe, store_teacher),
        "corpus": ", ".join(f"`{name}`" for name in recipe.corpus.files) or "not stated",
        "tokens": f"{schedule.tokens:,} in {schedule.steps:,} steps of "
        f"{schedule.tokens_per_step:,} (blocks of {schedule.block_size:,})",
        "epochs": f"{schedule.epochs:.3g}",
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
    name = Path(recipe.run.folder or "student").name
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


def _teacher(recipe: Recipe, store_teacher: str | None) -> str:
    if recipe.needs_online_teacher:
        return f"`{recipe.teacher.model}`, online"
    if not recipe.needs_guidance:
        return "none"
    name = store_teacher or recipe.teacher.model
    paths = ", ".join(f"`{path}`" for path in recipe.stores)
    return f"`{name}`, through the loss store{'s' * (len(recipe.stores) > 1)} {paths}"
