"""Options are made from the fields of settings, and say what a user gave."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest
import typer
from command_kit import parse
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.cli.common import progress
from vocagnolm.cli.options import Given, option, options, with_options
from vocagnolm.errors import SettingError, UsageError
from vocagnolm.recipe.schema import Limits, OneOf, Schema, hints, key
from vocagnolm.recipe.sections import CorpusSection, QuestionsSection, ScoreSection

TABLE = {"small": 1, "large": 2}


class Oven(Schema, frozen=True):
    """Settings of a command that there is not."""

    heat: int = key("degrees", 180, ge=50, le=300)
    mode: Literal["air", "grill"] = key("grill: from above", "air")
    size: Annotated[str, OneOf(TABLE)] = key("of the tray", "small")
    minutes: float | None = key("how long", unset="until it is done", gt=0)
    door: int | Literal["auto"] = key("which door", "auto", metavar="N")
    fan: bool = key("turn the fan on", True)
    notes: Mapping[str, Any] = key("a note, name=value", {}, option="--note")
    trays: list[str] = key("what goes in", [], option="--tray")
    label: Annotated[str, Limits(min_length=1)] = key("a name", "cake", option="--label,--name")


@pytest.fixture
def oven():
    """The command, and what it was given."""
    seen: list[tuple[Given, int]] = []
    kitchen = typer.Typer()

    @kitchen.command()
    @with_options
    def bake(
        settings: Given = options(Oven),
        twice: int = option(Oven, "heat", "--again", default=70),
    ) -> None:
        """Bake."""
        seen.append((settings, twice))

    def run(*words: str) -> Any:
        return CliRunner().invoke(kitchen, words, env={"COLUMNS": "200"}), seen

    return run


def test_a_command_gets_what_was_given_and_nothing_else(oven):
    done, seen = oven()
    assert done.exit_code == 0 and seen == [({}, 70)]
    words = "--heat 180 --mode grill --size large --minutes 2.5 --door 3 --no-fan --tray a --tray b"
    done, seen = oven(*words.split(), "--note", "a=1", "--note", "b=[x, y]", "--again", "50")
    assert done.exit_code == 0, done.output
    given, again = seen[-1]
    assert given == {
        **{"heat": 180, "mode": "grill", "size": "large", "minutes": 2.5, "door": 3, "fan": False},
        **{"notes": {"a": 1, "b": ["x", "y"]}, "trays": ["a", "b"]},
    }
    assert again == 50 and Oven(**given).label == "cake"


def test_an_option_may_have_a_second_name(oven):
    assert oven("--name", "pie")[1][-1] == ({"label": "pie"}, 70)
    parse(["evaluate", "MODEL", "--task", "gsm8k"])


def test_help_shows_choices_limits_and_defaults(oven):
    shown = oven("--help")[0].output
    for part in ("Degrees.", "180", "50<=x<=300", "air|grill", "small|large", "until it is done"):
        assert part in shown
    assert "grill: from above." in shown  # begins with a choice
    assert "--fan" in shown and "--no-fan" in shown and "[default: cake]" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--minutes", "0"], "--minutes is 0.0, expected a number above 0 or null."),
        (["--door", "x"], "--door is 'x', expected an integer or auto."),
        (["--label", ""], "--label is '', expected a string that is not empty."),
        (["--note", "x"], "--note expects key=value, found 'x'."),
        (["--note", "x=["], "--note x: '[' is not a YAML value"),
    ],
)
def test_what_a_field_refuses_is_named_as_its_option(oven, words, said):
    done, seen = oven(*words)
    assert isinstance(done.exception, UsageError) and said in str(done.exception) and not seen


def test_python_calls_are_checked_by_the_same_fields():
    with pytest.raises(SettingError, match="heat is 10, expected an integer of at least 50"):
        Oven(heat=10)
    with pytest.raises(TypeError, match="Oven has no setting 'haet'"):
        Oven(haet=10)
    with pytest.raises(AttributeError, match="cannot change heat"):
        Oven().heat = 200  # type: ignore[misc]
    assert Oven(trays=["a"]) == Oven(trays=["a"]) != Oven() and "heat=180" in repr(Oven())


def test_rare_options_are_shown_by_help_all_and_always_understood():
    def shown(*words: str) -> str:
        return CliRunner().invoke(app, words, env={"COLUMNS": "200"}).output

    rare = ("--ray-workers", "--server-patience", "--max-nonfinite-share", "--stride")
    usual, everything = shown("score", "--help"), shown("score", "--help-all")
    assert "--help-all" in usual and "--alternatives" in usual
    for name in rare:
        assert name not in usual and name in everything
    assert "--alternatives" in everything
    parse(["score", "--stride", "8"])


def test_a_name_of_a_model_is_no_trap_and_a_bare_evaluate_asks_for_a_text():
    for words, said in (
        (["evaluate", "--model", "start"], "Give the model without an option (vocagnolm evaluate"),
        (["score", "--model", "start"], "--model names the model on a server"),
        (["evaluate", "start"], "needs something to measure: --text held-out.jsonl"),
    ):
        done = CliRunner().invoke(app, words)
        assert isinstance(done.exception, UsageError) and said in str(done.exception)


def test_progress_can_be_silenced_wherever_there_is_a_bar(capsys):
    for command in ("score", "write", "prepare", "evaluate", "try", "train"):
        words = ["--student", "s", "--teacher", "t"] if command == "try" else []
        words = ["--prompts", "p", "--out", "o"] if command == "write" else words
        recipe = ["r"] if command in ("prepare", "train") else []
        parse([command, *recipe, *words, "--quiet"])
    with progress("scoring", started=True, quiet=True) as meter:
        meter.note(1, 2, "1/2", 10)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("section", [ScoreSection, QuestionsSection, CorpusSection])
def test_every_setting_has_a_help_text(section):
    from dataclasses import fields

    assert [field.name for field in fields(section) if not field.metadata["help"]] == []
    assert list(hints(section)) == [field.name for field in fields(section)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--text-field", ""], "--text-field is '', expected a string that is not empty."),
        (["--template-option", "x"], "--template-option expects key=value, found 'x'."),
        (["--alternatives", "65"], "--alternatives is 65, expected a number from 0 to 64"),
        (["--server-requests", "2"], "--server-requests can only be used with --server."),
        (["--ray-patience", "2"], "--ray-patience can only be used with --ray."),
        (["--share", "1/0"], "--share 1/0: the work is split into at least one share, 1/1."),
    ],
)
def test_score_names_the_option_that_is_wrong(words, said, tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n')
    call = ["score", "--teacher", "t", "--corpus", str(tmp_path / "c.jsonl"), "--out", "o", *words]
    done = CliRunner().invoke(app, call)
    assert isinstance(done.exception, UsageError) and said in str(done.exception)
