"""What strangers write: whatever stands there, it is read or refused with a short message, without
a hang, a flood of memory or an internal error. Servers' answers have their own tests in
tests/model/test_served_answers.py."""

import copy
import gzip
import json
import os
import signal

import made
import pytest
import yaml
from changed_kit import changed
from faults_kit import LONG, examples, in_child
from hypothesis import HealthCheck, given, settings
from training_kit import LLAMA, recipe_dict

from vocagnolm.alignment import load_tokenizer
from vocagnolm.base.strangers import config_problem, read_config, require_weights
from vocagnolm.data import sources
from vocagnolm.data.corpus import open_corpus
from vocagnolm.errors import ModelError, VocagnolmError
from vocagnolm.evaluate.results import RunFolder
from vocagnolm.model import open_model
from vocagnolm.recipe import load_recipe
from vocagnolm.recipe.schema import parse_yaml
from vocagnolm.store import LossStore
from vocagnolm.train.check import check
from vocagnolm.train.folder import read_run, run_summary

SHORT = 2000
CONFIG = {
    **LLAMA,
    "architectures": ["LlamaForCausalLM"],
    "eos_token_id": [1, 2],
    "bos_token_id": 0,
    "rope_scaling": None,
    "text_config": {"hidden_size": 32, "num_hidden_layers": 2},
    "quantization_config": {"quant_method": "gptq", "bits": 4},
}
INDEX = {
    "metadata": {"total_size": 10},
    "weight_map": {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    },
}
RUN = {
    "finished": True,
    "schedule": {"steps": 3, "batch_blocks": 4, "block_size": 32, "micro_batch": 4},
    "blocks": "ab12",
    "versions": {"torch": "2.9"},
    "times": {"start": 1.0, "training": 2.0},
    "seconds_to_first_step": 0.5,
    "model_files": {"model.safetensors": {"bytes": 3, "sha256": "00"}},
}
RESULTS = {
    "protocol": "strict",
    "tasks": {"gsm8k": {"score": 50.0, "stderr": 3.5, "n": 4, "no_answer": 1}},
    "bits_per_byte": 1.5,
    "bits_per_byte_stderr": None,
    "conditions": {"gsm8k": {"shots": 4}},
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": {"content": "<|endoftext|>", "special": True},
    "bos_token": "<|endoftext|>",
    "add_bos_token": True,
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    "auto_map": {"AutoTokenizer": [None, None]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tokenizer; its other files are written by each case."""
    folder = tmp_path_factory.mktemp("model")
    made.byte_level(300).save(str(folder / "tokenizer.json"))
    return folder


def read_index(folder):
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (folder / name).touch()
    require_weights(folder, ModelError)


def read_a_run(folder):
    if read_run(folder):
        run_summary(folder)


def read_store(folder):
    LossStore.open(folder)


def read_a_recipe(folder):
    check(load_recipe(folder / "recipe.yaml"), measure=False)


def read_tokenizer(folder):
    load_tokenizer(folder)


READERS = {
    "config.json": (CONFIG, lambda folder: read_config(folder, ModelError)),
    "model.safetensors.index.json": (INDEX, read_index),
    "run.json": (RUN, read_a_run),
    "evaluation/results.json": (RESULTS, lambda folder: RunFolder(folder).results()),
    "tokenizer_config.json": (TOKENIZER_CONFIG, read_tokenizer),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_by_chance_is_read_or_refused_shortly(model, tmp_path, name):
    valid, read = READERS[name]
    folder = model if name == "tokenizer_config.json" else tmp_path
    path = folder / name
    path.parent.mkdir(exist_ok=True)

    @settings(
        max_examples=examples(1000) if LONG else 15,
        deadline=10_000 if LONG else None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(changed(valid))
    def use(content):
        path.write_text(json.dumps(content))
        try:
            read(folder)
        except VocagnolmError as error:
            assert 0 < len(str(error)) < SHORT
            str(error).encode()

    try:
        use()
    finally:
        path.unlink()


def test_a_recipe_by_chance_is_checked_or_refused_shortly(lab, tmp_path):
    path = tmp_path / "recipe.yaml"
    valid = recipe_dict(lab, run={"folder": str(tmp_path / "run")})

    @settings(max_examples=examples(1000) if LONG else 15, deadline=None)
    @given(changed(valid))
    def use(tree):
        path.write_text(json.dumps(tree))
        try:
            found = check(load_recipe(path), measure=False)
            assert all(len(line) < SHORT for line in (*found.problems, *found.warnings))
        except VocagnolmError as error:
            assert 0 < len(str(error)) < 3 * SHORT  # a line for every key that is wrong

    use()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1e"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        (
            {"hidden_size": 2**20, "num_hidden_layers": 4096, "intermediate_size": 2**23},
            "parameters",
        ),
        ({"vocab_size": float("nan")}, "vocab_size is nan"),
        ({"vocab_size": [3]}, "vocab_size is a list"),
        ({"eos_token_id": 2**31}, "eos_token_id is 2.15e"),
        ({"text_config": {"num_hidden_layers": 10**9}}, r"text_config\.num_hidden"),
        ({"model_type": ["llama"]}, "model_type is"),
        ({"architectures": "Llama"}, "architectures is"),
    ],
)
def test_a_configuration_that_no_machine_can_hold(tmp_path, change, said):
    config = {**CONFIG, **change}
    assert config_problem(CONFIG) is None
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=said):
        open_model(tmp_path, device="cpu")


@pytest.mark.parametrize("name", ["../stolen.safetensors", "/etc/stolen.safetensors", "x.bin", 3])
def test_an_index_names_weights_of_its_folder_alone(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "stolen.safetensors").touch()
    index = copy.deepcopy(INDEX)
    index["weight_map"]["a"] = name
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="not a safetensors file of this folder"):
        open_model(folder, device="cpu")


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"]
)
def test_a_pipe_is_no_file_of_a_model(model, tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    for other, content in (
        ("config.json", json.dumps(LLAMA)),
        ("model.safetensors", ""),
        ("tokenizer.json", (model / "tokenizer.json").read_text()),
    ):
        (folder / other).write_text(content)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(VocagnolmError, match=r"is no file \(a pipe|has no tokenizer|config.json"):
        open_model(folder, device="cpu")


def test_ids_that_no_table_can_hold(model, tmp_path):
    about = json.loads((model / "tokenizer.json").read_text())
    about["added_tokens"].append({**about["added_tokens"][0], "id": 2**31, "content": "<far>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(about))
    with pytest.raises(VocagnolmError, match=r"token id 2\.15e"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(
            f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 10)}]\n"
            for n in range(9)
        ),
        "a: &a [*a]",
        "[" * 1200,
        "a: " + "9" * 5000,
        "? [1, 2]\n: 3",
        "x" * (2**20 + 1),
    ],
    ids=["bomb", "itself", "brackets", "digits", "a list as key", "long"],
)
def test_yaml_that_would_unfold_is_refused(tmp_path, text):
    with pytest.raises(ValueError):
        parse_yaml(text)
    path = tmp_path / "r.yaml"
    path.write_text(f"student:\n  {text}" if text.startswith("a:") else text)
    with pytest.raises(VocagnolmError) as raised:
        load_recipe(path)
    assert len(str(raised.value)) < SHORT


@pytest.mark.parametrize(
    "setting",
    [
        "train.tokens=1180591620717411303424",
        "optimizer.learning_rate=1.0e+308",
        "train.epochs=.inf",
    ],
)
def test_numbers_beyond_every_run_are_refused(lab, tmp_path, setting):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(recipe_dict(lab)))
    with pytest.raises(VocagnolmError, match=setting.partition("=")[0]):
        load_recipe(path, [setting])


def test_extends_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "r.yaml").write_text("extends: pipe.yaml\n")
    with pytest.raises(VocagnolmError, match="is no file"):
        load_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_line_that_unfolds_is_skipped_and_counted(tmp_path, monkeypatch, kind):
    """A line of many megabytes in a file of some kilobytes, between two documents."""
    monkeypatch.setattr(sources, "MOST_LINE_BYTES", 2**16)
    lines = [b'{"text": "one"}\n', b'{"text": "' + b"x" * 2**24 + b'"}\n', b'{"text": "two"}\n']
    path = tmp_path / f"corpus.jsonl.{kind}"
    if kind == "gz":
        path.write_bytes(gzip.compress(b"".join(lines)))
    else:
        zstandard = pytest.importorskip("zstandard")
        path.write_bytes(zstandard.ZstdCompressor().compress(b"".join(lines)))
    assert path.stat().st_size < 2**17
    documents = list(open_corpus(path).read(0, 3))
    assert [document.text for document in documents] == ["one", None, "two"]
    assert documents[1].problem.startswith("huge: a line of more than") and documents[2].index == 2
    assert documents[2].place.endswith(":3")


def test_a_flipped_parquet_file_is_read_or_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"text": [f"document {n} " * 20 for n in range(40)]})
    parquet.write_table(table, tmp_path / "good.parquet", row_group_size=10)
    good = (tmp_path / "good.parquet").read_bytes()
    step = 7 if LONG else len(good) // 60

    def work():
        for place in range(0, len(good), step):
            content = bytearray(good)
            content[place] ^= 1
            path = tmp_path / f"{place}.parquet"
            path.write_bytes(content)
            try:
                list(open_corpus(path).read(0, 40))
            except VocagnolmError as error:
                assert len(str(error)) < SHORT

    _, status = os.waitpid(in_child(work), 0)  # a library in C++ may end the process
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGABRT)
