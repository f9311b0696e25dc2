import shutil
from pathlib import Path

import pytest
from training_kit import LLAMA, make_lab, recipe_dict

from vocagnolm.data.prepare import prepare
from vocagnolm.recipe import recipe_from_dict


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Path:
    """Tokenizers, corpus, store, blocks that serve every method, and two teachers."""
    folder = tmp_path_factory.mktemp("training")
    make_lab(folder, 32, alternatives=3)
    extra = ["text", "teacher_losses", "stretch", "targets"]
    tree = recipe_dict(folder, data={"extra_columns": extra})
    prepare(recipe_from_dict(tree))
    save_model(folder / "twin", folder / "student", vocab_size=322, seed=1)
    save_model(folder / "other", folder / "teacher", vocab_size=520, seed=2)
    return folder


def save_model(folder: Path, tokenizer: Path, *, vocab_size: int, seed: int) -> None:
    """A tiny random model with a tokenizer; `vocab_size` may exceed the tokenizer's."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    set_seed(seed)
    settings = {k: v for k, v in LLAMA.items() if k != "model_type"} | {"vocab_size": vocab_size}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings))
    model.save_pretrained(folder)
    for file in tokenizer.iterdir():
        shutil.copyfile(file, folder / file.name)
