"""A selection sample from a run folder: its own model, corpus, store and rule."""

import json

import made
import numpy as np
import pytest

from vocagnolm.alignment import align, carry, load_tokenizer
from vocagnolm.recipe import load_recipe, recipe_from_dict
from vocagnolm.report.comparison import SAMPLE
from vocagnolm.report.runs import (
    PASSAGE_TOKENS,
    SampleError,
    compute_sample,
    report_page,
    write_report,
    write_sample,
)
from vocagnolm.score import ScoreSettings, score_corpus
from vocagnolm.store import LossStore


def tiny_model(name: str, folder):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    made.save(name, folder)
    config = LlamaConfig(
        vocab_size=made.tokenizer(name).get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder as `train` leaves it."""
    root = tmp_path_factory.mktemp("lab")
    teacher = tiny_model("byte-level", root / "byte teacher")
    corpus = root / "corpus.jsonl"
    documents = [text[:400] + f" {at}" for at, text in enumerate(SAMPLE)] + ["Short."] * 2
    rows = ({"text": text, "kind": "short" if len(text) < 9 else "long"} for text in documents)
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ScoreSettings(device="cpu", alternatives=4)
    score_corpus(teacher, corpus, root / "store", settings=settings)
    folder = root / "run"
    folder.mkdir()
    recipe = recipe_from_dict(
        {
            "student": {"model": "gone"},
            "teacher": {"tokenizer": str(teacher)},
            "corpus": {"files": [str(corpus)]},
            "store": {"path": str(root / "store")},
            "objective": {"keep": 0.3, "aggregation": "mean"},
        }
    )
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    tiny_model("sentencepiece prepend", folder / "model")
    return folder


def test_a_sample_has_the_stores_losses_and_the_runs_rule(run) -> None:
    sample = compute_sample(run, documents=3)
    store = LossStore.open(run.parent / "store")
    student = load_tokenizer(run / "model")
    shown = 0
    for passage in sample.passages:
        text = "".join(passage.student.text).encode("utf-8", "surrogateescape").decode()
        [teacher] = passage.teachers
        assert "".join(teacher.text).encode("utf-8", "surrogateescape").decode() == text
        own = student.spans(text)
        ends = np.cumsum(teacher.length)
        spans = np.stack([ends - teacher.length, ends], axis=1)
        losses = np.array([np.nan if nll is None else nll for nll in teacher.nll])
        if "more" not in passage.title:  # one document: exactly what the store holds
            at = int(passage.title.rsplit(":", 1)[1]) - 1
            assert losses == pytest.approx(store[at][1], abs=1e-3, nan_ok=True)
            expected = carry(align(own.spans, spans), losses, "mean")
            guidance = [np.nan if one is None else one for one in passage.guidance]
            assert guidance == pytest.approx(expected, abs=1e-3, nan_ok=True)
        shown += len(passage.student.text)
    assert sample.selection.keep == 0.3
    assert sample.selection.aggregation == "mean"
    [pair] = sample.preflight
    assert pair.ios == 1.0
    assert pair.student_tokens == shown
    assert pair.overlap_raw is not None


def with_objective(run, folder, **objective):
    """The same run under another rule."""
    folder.mkdir(parents=True)
    recipe = load_recipe(run / "recipe.yaml").to_dict()
    recipe["objective"] |= objective
    (folder / "recipe.yaml").write_text(recipe_from_dict(recipe).to_yaml())
    (folder / "model").symlink_to(run / "model")
    return folder


def test_the_selection_is_the_methods_own(run, tmp_path) -> None:
    masks = {}
    for method in ("guided", "random", "no_teacher", "chunk", "cpt"):
        sample = compute_sample(with_objective(run, tmp_path / method, method=method), documents=2)
        masks[method] = [weight for passage in sample.passages for weight in passage.weights]
        assert sample.selection.method == method
    assert len({str(mask) for mask in masks.values()}) == 5
    targets = [nll is not None for passage in sample.passages for nll in passage.student.nll]
    assert masks["cpt"] == targets
    # the largest student losses, whatever the teacher's are
    losses = [nll for passage in sample.passages for nll in passage.student.nll]
    guided = [guidance for passage in sample.passages for guidance in passage.guidance]
    mapped = [
        (n, w) for n, g, w in zip(losses, guided, masks["no_teacher"], strict=True) if n and g
    ]
    kept = [nll for nll, weight in mapped if weight]
    assert min(kept) >= max(nll for nll, weight in mapped if not weight)


def test_a_distilled_run_shows_the_alternatives_that_it_had(run, tmp_path) -> None:
    folder = with_objective(run, tmp_path / "run", method="distill", alternatives=3)
    sample = compute_sample(folder, documents=1)
    assert (sample.selection.mix, sample.selection.alternatives) == (0.5, "3")
    [teacher] = sample.passages[0].teachers
    assert {len(given) for given in teacher.alternatives[1:]} == {3}
    assert any(target for told in teacher.targets for target in told)


def test_rows_carry_the_models_names(run) -> None:
    sample = compute_sample(run, documents=1)
    assert sample.passages[0].student.name == "gone"
    assert [teacher.name for teacher in sample.passages[0].teachers] == ["byte teacher"]
    assert (sample.preflight[0].student, sample.preflight[0].teacher) == ("gone", "byte teacher")


def test_a_run_without_a_teacher_shows_its_student(run, tmp_path) -> None:
    folder = with_objective(run, tmp_path / "cpt", method="cpt")
    recipe = load_recipe(folder / "recipe.yaml").to_dict() | {"store": {}, "teacher": {}}
    (folder / "recipe.yaml").write_text(recipe_from_dict(recipe).to_yaml())
    sample = compute_sample(folder, documents=2)
    assert sample.passages[0].teachers == [] and not sample.preflight
    assert sum(sample.passages[0].weights) > 0


def test_several_stores_have_a_row_each(run, tmp_path) -> None:
    second = tiny_model("sentencepiece never", tmp_path / "second teacher")
    recipe = load_recipe(run / "recipe.yaml").to_dict()
    score_corpus(
        second,
        recipe["corpus"]["files"][0],
        tmp_path / "store",
        settings=ScoreSettings(device="cpu"),
    )
    folder = with_objective(run, tmp_path / "run", method="guided")
    recipe["store"]["path"] = [recipe["store"]["path"], str(tmp_path / "store")]
    (folder / "recipe.yaml").write_text(recipe_from_dict(recipe).to_yaml())
    sample = compute_sample(folder, documents=2)
    names = ["byte teacher", "second teacher"]
    assert [teacher.name for teacher in sample.passages[0].teachers] == names
    assert [pair.teacher for pair in sample.preflight] == names
    assert sample.selection.combine == "min"


def test_a_sample_of_before_is_made_again(run, tmp_path) -> None:
    folder = with_objective(run, tmp_path / "run", method="random")
    (folder / "tokens.json").write_text('{"format": 1, "passages": []}')
    write_report([folder], tmp_path / "r.html", sample_documents=1)
    assert report_page([folder]).selection.method == "random"


def test_short_documents_share_a_passage(run) -> None:
    sample = compute_sample(run, documents=100)
    sizes = [len(passage.student.text) for passage in sample.passages]
    assert all(size >= PASSAGE_TOKENS for size in sizes[:-1])
    assert len(sizes) < len(LossStore.open(run.parent / "store"))


def test_the_report_makes_the_sample_once(run, tmp_path) -> None:
    write_report([run], tmp_path / "r.html", sample_documents=2)
    first = (run / "tokens.json").read_bytes()
    write_report([run], tmp_path / "r.html", sample_documents=9)
    assert (run / "tokens.json").read_bytes() == first
    assert report_page([run]).statistics is not None


def test_the_report_shows_what_is_kept_of_each_source(run, tmp_path) -> None:
    html = tmp_path / "r.html"
    write_report([run], html, sample_documents=2)  # one that does not know them
    write_report([run], html, sample_documents=100, source_field="kind")
    found = report_page([run]).statistics
    assert {share.name for share in found.sources} == {"short", "long"}
    assert sum(share.tokens for share in found.sources) == found.tokens
    assert sum(share.kept for share in found.sources) == pytest.approx(found.kept)
    low, high = next(share.interval for share in found.sources if share.name == "long")
    assert 0 <= low < high <= 1
    with pytest.raises(SampleError, match=r"--source-field topic: .* has no field 'topic'"):
        compute_sample(run, source_field="topic")


def test_what_is_missing_is_named(run, tmp_path) -> None:
    (tmp_path / "recipe.yaml").write_text((run / "recipe.yaml").read_text())
    with pytest.raises(SampleError, match="needs the trained model"):
        write_sample(tmp_path)
    (tmp_path / "recipe.yaml").write_text("corpus: {files: [a.jsonl]}\n")
    with pytest.raises(SampleError, match="no loss store"):
        write_sample(tmp_path)
