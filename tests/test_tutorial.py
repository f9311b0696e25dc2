"""The tutorial works as it stands on its page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from faults_kit import LONG

from vocagnolm.recipe import recipe_from_dict

PAGE = (Path(__file__).parents[1] / "docs/tutorial.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)


def test_its_recipes_are_recipes():
    recipes = re.findall(r"cat > (\w+)\.yaml <<'END'\n(.*?)END\n", PAGE, re.DOTALL)
    methods = {
        name: recipe_from_dict(yaml.safe_load(text)).objective.method for name, text in recipes
    }
    assert methods == {"teacher": "cpt", "recipe": "distill"}


@pytest.mark.skipif(not LONG, reason="eight minutes: make faults")
@pytest.mark.timeout(3600)
def test_its_commands_do_what_it_says(tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    said = [
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for block in COMMANDS
    ]
    ranked = re.findall(r"^([\w-]+) +\d\.\d{4}", said[6], re.MULTILINE)
    assert ranked[0] == "teacher" and set(ranked[1:]) == {"every-token", "distilled", "guided"}
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")[:2000]
