"""Whatever a command finds in the files it reads, it ends in one message: through the real command
line, over every file a run leaves behind."""

import json

import pytest
from evaluation_kit import ROWS, write_rows
from faults_kit import copy_of, some, tiny_tree, write_recipe
from training_kit import fresh_process
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.errors import VocagnolmError

BROKEN = [
    *(b"", b"[]", b"{}", b"null", b"3", b"{", b"\xff\xfe", b"[" * 5000, b'{"a": 1}', b"[{}]"),
    *(b"\0" * 50, b'"text"', b'{"a": ' * 5000),
]


def one_message(*arguments):
    """The command ends with success or with a message of ours, never with another exception."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    error = result.exception
    if error is not None and not isinstance(error, SystemExit | VocagnolmError):
        raise AssertionError(f"{arguments}: {type(error).__name__}: {error}") from error
    return str(error) if isinstance(error, VocagnolmError) else result.output


def failure(*arguments):
    """What is wrong with how the command ends; None where nothing is."""
    try:
        one_message(*arguments)
    except AssertionError as error:
        return f"{arguments[0]}: {str(error).rpartition(': ')[0][-40:]} {error.__cause__!r:.200}"
    return None


@pytest.fixture(scope="module")
def finished(lab, tmp_path_factory):
    """A run with its evaluation."""
    from vocagnolm.evaluate import evaluate
    from vocagnolm.recipe import recipe_from_dict
    from vocagnolm.train.run import train

    folder = tmp_path_factory.mktemp("finished")
    fresh_process()
    train(recipe_from_dict(tiny_tree(lab, folder / "run")), quiet=True)
    for name, rows in ROWS.items():
        write_rows(folder / "benchmarks", name, rows)
    evaluate(
        folder / "run" / "model", tasks="svamp", benchmarks=folder / "benchmarks", device="cpu",
        max_new_tokens=2, out=folder / "run",
    )  # fmt: skip
    return folder


def described(folder):
    """Files that a person or a program can write: not weights, not checkpoints."""
    kinds = (".json", ".jsonl", ".yaml", ".md", ".txt")
    found = [p.relative_to(folder) for p in sorted(folder.rglob("*")) if p.suffix in kinds]
    return [path for path in found if "checkpoints" not in path.parts]


def test_every_file_of_a_run(finished, lab, tmp_path):
    cases = [(p, c) for p in described(finished / "run") for c in BROKEN]
    failures = []
    for number, (path, content) in enumerate(some(cases, 4)):
        run = copy_of(finished / "run", tmp_path / f"{number}")
        (run / path).write_bytes(content)
        recipe = write_recipe(tmp_path / f"{number}.yaml", tiny_tree(lab, run))
        commands = [
            ("report", run, "--html", tmp_path / f"{number}.html", "--sample", "0"),
            ("train", recipe, "--quiet"),
        ]
        if path.parts[0] == "evaluation" or path.name in ("config.json", "tokenizer.json"):
            commands = [
                ("report", run),
                ("evaluate", run / "model", "--tasks", "svamp", "--out", run, "--device", "cpu",
                 "--benchmarks", finished / "benchmarks", "--max-new-tokens", "2"),
            ]  # fmt: skip
        failures += [f"{path} {content[:9]!r}: {e}" for c in commands if (e := failure(*c))]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("content", some(BROKEN, 6))
def test_partial_answers(content, finished, tmp_path):
    run = copy_of(finished / "run" / "evaluation", tmp_path / "evaluation")
    (run / "outputs" / "svamp.jsonl").unlink()
    (run / "outputs" / "svamp.partial.jsonl").write_bytes(content + b"\n")
    said = one_message(
        *("evaluate", finished / "run" / "model", "--tasks", "svamp", "--out", tmp_path),
        *("--device", "cpu", "--benchmarks", finished / "benchmarks", "--max-new-tokens", "2"),
    )
    assert "svamp.partial.jsonl, line 1 is not an answer" in said or not content.strip(), said


def test_every_file_of_a_tokenizer(lab, tmp_path):
    files = [p.name for p in sorted((lab / "student").iterdir())]
    failures = []
    for number, (name, content) in enumerate(some([(n, c) for n in files for c in BROKEN], 10)):
        folder = copy_of(lab / "student", tmp_path / f"{number}")
        (folder / name).write_bytes(content)
        tree = tiny_tree(lab, tmp_path / "run") | {"student": {"tokenizer": str(folder)}}
        recipe = write_recipe(tmp_path / "r.yaml", tree)
        pair = ("--student", folder, "--teacher", lab / "teacher")
        commands = [
            ("align", *pair, "--text", "two words"),
            ("compare", *pair),
            ("view", *pair, "--text", "two words", "--html", tmp_path / f"{number}.html"),
            ("check", recipe, "--no-measure"),
        ]
        failures += [f"{name} {content[:9]!r}: {e}" for c in commands if (e := failure(*c))]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("content", BROKEN)
def test_recipes_and_studies(content, tmp_path):
    # 700 brackets are too deep for YAML already; it takes the square of their number in time
    (tmp_path / "r.yaml").write_bytes(content.replace(b"[" * 4300, b""))
    for command in (["check"], ["prepare"], ["train"]):
        assert one_message(*command, tmp_path / "r.yaml").strip()
    assert one_message("study", "run", tmp_path / "r.yaml", "--folder", tmp_path / "s").strip()


@pytest.mark.parametrize("content", some(BROKEN, 6))
def test_benchmarks_and_corpora(content, finished, lab, tmp_path):
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_bytes(content)
    said = one_message(
        *("evaluate", finished / "run" / "model", "--tasks", "gsm8k", "--benchmarks", tmp_path),
        *("--device", "cpu", "--max-new-tokens", "1"),
    )
    assert "gsm8k" in said
    pair = ("--student", lab / "student", "--teacher", lab / "teacher")
    for ending in ("jsonl", "jsonl.gz", "parquet"):
        (tmp_path / f"c.{ending}").write_bytes(content)
        assert one_message("compare", *pair, "--corpus", tmp_path / f"c.{ending}").strip()


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("run.seed=-1", "at least 0"),
        ("optimizer.learning_rate=nan", "above 0"),
        ("optimizer.beta1=2", "below 1"),
        ("data.block_size=0", "at least 2"),
        ("data.block_size=1", "at least 2"),
        ("train.epochs=inf", "a number above 0"),
        ("data.part_documents=0", "at least 1"),
        ("corpus.limit_documents=0", "at least 1"),
        ("train.loader_workers=-1", "at least 0"),
        ("student.attention=nope", "sdpa"),
        ("run.seed.deeper=1", "run.seed"),
        ("run.folder.deeper.still=1", "no keys below"),
        ("corpus.files.deeper=1", "no keys below"),
        ("corpus.split=page", "blank_line"),
        ("run=3", "expected a mapping"),
        ("run.seed", "--set expects key=value"),
        ('run.folder="a\\0b"', "without zero bytes"),
    ],
)
def test_settings_out_of_range_are_named(override, named, lab, tmp_path):
    recipe = write_recipe(tmp_path / "r.yaml", tiny_tree(lab, tmp_path / "run"))
    for command in ("check", "prepare", "train"):
        said = one_message(command, recipe, "--set", override)
        assert named in said and override.split("=")[0].split(".")[0] in said, said


def test_a_recipe_may_be_json(lab, tmp_path):
    """The kit writes recipes as JSON: that they are read is what makes the tests above tests."""
    recipe = write_recipe(tmp_path / "r.yaml", tiny_tree(lab, tmp_path / "run"))
    assert json.loads(one_message("check", recipe, "--json", "--no-measure"))["ready"]


def test_more_threads_than_any_machine_has(lab, tmp_path):
    said = one_message(
        *("score", "--teacher", lab / "teacher", "--corpus", lab / "corpus.jsonl"),
        *("--out", tmp_path / "s", "--threads", "99999999"),
    )
    assert "1024" in said, said


def test_what_is_no_folder_is_not_called_missing(lab, tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    corpus = ("--corpus", lab / "corpus.jsonl")
    out = ("--out", tmp_path / "s")
    said = one_message("score", "--teacher", lab / "teacher", "--corpus", tmp_path / "pipe", *out)
    assert "neither a file nor a folder" in said, said
    said = one_message("score", "--teacher", tmp_path / "pipe", *corpus, *out)
    assert "is no folder" in said, said


def test_a_document_beyond_the_limit_is_named_by_prepare(lab, tmp_path):
    """A conversation: texts are split."""
    said = [{"role": "user", "content": "a " * 9_000_000}, {"role": "assistant", "content": "b"}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    tree = tiny_tree(lab, tmp_path / "run", data={"blocks": str(tmp_path / "b")})
    tree["student"]["chat_template"] = "plain"
    tree |= {"corpus": {"files": [str(tmp_path / "c.jsonl")]}, "objective": {"method": "cpt"}}
    del tree["store"]
    said = one_message("prepare", write_recipe(tmp_path / "r.yaml", tree))
    assert "gave no tokens" in said and "the limit is" in said, said


def test_the_name_of_a_run_is_text_and_a_finished_one_goes_on_elsewhere(lab, tmp_path):
    from vocagnolm.recipe import recipe_from_dict
    from vocagnolm.train.run import train

    fresh_process()
    folder = tmp_path / "<b>run"
    train(recipe_from_dict(tiny_tree(lab, folder)), quiet=True)
    assert "# &lt;b&gt;run" in (folder / "model" / "README.md").read_text()
    longer = tiny_tree(lab, folder, train={"tokens": 6 * 4 * 32})
    said = one_message("train", write_recipe(tmp_path / "r.yaml", longer))
    assert f"student.model={folder / 'model'}" in said, said
