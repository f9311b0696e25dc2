"""Columns of a dataset, their collator and their loss: the same numbers as blocks and our loop."""

import json
from functools import partial

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from training_kit import LLAMA, documents, recipe_dict
from transformers import AutoConfig, AutoModelForCausalLM, set_seed
from transformers.modeling_outputs import CausalLMOutput
from typer.testing import CliRunner

from vocagnolm import (
    GuidedCollator,
    LossStore,
    export_columns,
    guide,
    guided_loss,
)
from vocagnolm.cli import app
from vocagnolm.data.blocks import Blocks
from vocagnolm.errors import (
    CorpusError,
    ObjectiveError,
    TrainingError,
    UsageError,
    VocagnolmWarning,
)
from vocagnolm.integrations.columns import _Columns
from vocagnolm.objective import Head, ObjectiveConfig, Targets, count_items, objective_loss
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.score import score_corpus
from vocagnolm.train.run import train


@pytest.fixture(scope="module")
def rows(lab):
    texts = [json.loads(line) for line in (lab / "corpus.jsonl").read_text().splitlines()]
    return datasets.Dataset.from_list(texts)


@pytest.fixture(scope="module")
def guided(lab, rows):
    return guide(rows, lab / "store", lab / "student")


def student(dtype=torch.float32):
    set_seed(0)
    settings = {name: value for name, value in LLAMA.items() if name != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings), dtype=dtype)


def test_columns_are_those_of_blocks(lab, guided):
    blocks = Blocks(lab / "blocks", 32, targets=True)
    names = {"ids": "input_ids", "guidance": "guidance", "target_ids": "target_ids"}
    names |= {"target_p": "target_p"}
    for column, name in names.items():
        stream = blocks.read(column, 0, blocks.tokens)
        laid = np.concatenate([np.array(values) for values in guided[name]])
        np.testing.assert_array_equal(laid.astype(np.float32), stream.astype(np.float32))
    assert guided["labels"] == guided["input_ids"] and "text" in guided.column_names


def test_a_stream_and_processes_give_the_same(lab, rows, guided):
    streamed = guide(rows.to_iterable_dataset(), lab / "store", lab / "student")
    for ours, theirs in zip(guided, streamed, strict=True):
        np.testing.assert_array_equal(ours["guidance"], theirs["guidance"])
    batch = next(iter(DataLoader(streamed, 3, collate_fn=GuidedCollator())))
    expected = GuidedCollator()([guided[n] for n in range(3)])
    torch.testing.assert_close(batch, expected, equal_nan=True, check_dtype=False)
    store = LossStore.open(lab / "store")
    options = {"num_proc": 2, "batch_size": 8}
    several = guide(rows, store, lab / "student", **options)
    assert several["input_ids"][:] == guided["input_ids"][:]
    mean = guide(rows, store, lab / "student", aggregation="mean")
    assert mean._fingerprint != guided._fingerprint != several._fingerprint
    again = guide(rows, str(lab / "store"), lab / "student")
    assert again._fingerprint == guided._fingerprint


def test_splits_and_lists_are_taken_too(lab, rows, guided):
    splits = datasets.DatasetDict(train=rows.select(range(20)), test=rows.select(range(20, 24)))
    found = guide(splits, lab / "store", lab / "student")
    assert isinstance(found, datasets.DatasetDict) and found["test"].num_rows == 4
    assert found["train"]["input_ids"][:] == guided["input_ids"][:20]
    listed = guide([*rows.select(range(3))], lab / "store", lab / "student")
    assert listed["input_ids"][:] == guided["input_ids"][:3]
    named = guide({"a": [{"text": rows[0]["text"]}]}, lab / "other", lab / "student")
    assert len(named["a"]) == 1 and np.isfinite(np.array(named["a"][0]["guidance"])).any()


def test_ids_and_labels_of_rows_are_kept(lab, rows, guided):
    """As they are, cut or with other tokens around them; with the text beside them or without."""
    some = [
        {**rows[n], "input_ids": guided[n]["input_ids"], "labels": [-100] * 9 + [1] * 9}
        for n in range(3)
    ]
    kept = guide(some, lab / "store", lab / "student")
    assert kept["labels"][:] == [[-100] * 9 + [1] * 9] * 3
    for name in ("input_ids", "guidance", "target_ids", "target_p"):
        for ours, theirs in zip(kept[name], guided[name], strict=False):
            np.testing.assert_array_equal(ours, theirs)
    bare = [{"input_ids": guided[n]["input_ids"]} for n in range(3)]
    alone = guide(bare, lab / "store", lab / "student")
    assert alone["labels"][:] == alone["input_ids"][:]
    np.testing.assert_array_equal(alone[2]["guidance"], kept[2]["guidance"])
    cut = [{"text": rows[0]["text"], "input_ids": guided[0]["input_ids"][:7]}]
    short = guide(cut, lab / "store", lab / "student")[0]
    np.testing.assert_array_equal(short["guidance"], guided[0]["guidance"][:7])
    wrong = [{"text": "something else", "input_ids": guided[0]["input_ids"]}]
    with pytest.raises(CorpusError, match="input_ids do not spell its text"):
        guide(wrong, lab / "store", lab / "student")


def test_ids_of_a_tokenizer_that_puts_a_space_before_the_text(lab, rows):
    made = guide(rows.select(range(3)), lab / "store", lab / "teacher")
    bare = [{"input_ids": made[n]["input_ids"]} for n in range(3)]
    alone = guide(bare, lab / "store", lab / "teacher")
    np.testing.assert_array_equal(alone[1]["guidance"], made[1]["guidance"])


def test_map_caches(lab, guided, tmp_path, monkeypatch):
    rows = datasets.Dataset.from_json(str(lab / "corpus.jsonl"), cache_dir=str(tmp_path))
    made = guide(rows, lab / "store", lab / "student")
    monkeypatch.setattr(_Columns, "__call__", None)  # nothing is computed again
    again = guide(rows, lab / "store", lab / "student")
    assert again["input_ids"][:] == made["input_ids"][:] == guided["input_ids"][:]


def test_rows_without_guidance(lab, rows):
    other = datasets.Dataset.from_list(
        [*rows.select([0]), {"text": "never scored"}, {"text": None}]
    )
    make = partial(guide, other, lab / "store", lab / "student")
    with pytest.raises(CorpusError, match="does not hold 'never scored"):
        make()
    assert len(make(missing="drop")) == 1
    kept = make(missing="keep")
    assert len(kept) == 2 and np.isnan(kept[1]["guidance"]).all() and len(kept[1]["input_ids"]) > 2
    with pytest.raises(CorpusError, match="has the columns other"):
        guide(datasets.Dataset.from_list([{"other": 1}]), lab / "store", lab / "student")
    with pytest.raises(UsageError, match="num_proc needs a store"):
        guide(rows, lab / "other", lab / "student", num_proc=2)


def test_a_teacher_may_read_now(lab, rows):
    found = guide(rows.select(range(3)), lab / "other", lab / "student")
    known = np.concatenate([np.array(row) for row in found["guidance"]])
    assert np.isfinite(known).mean() > 0.9 and "target_ids" not in found.column_names
    more = guide(rows.select(range(3)), lab / "other", lab / "student", alternatives=2)
    assert more["guidance"][0] == pytest.approx(found["guidance"][0], nan_ok=True)
    assert np.array(more[0]["target_p"]).shape == (len(more[0]["input_ids"]), 2)
    assert np.array(more[0]["target_p"]).sum() > 0


def test_a_mistyped_store_is_no_missing_model(lab, rows, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in (str(lab / "stoer"), "out/stoer", lab / "stoer"):
        with pytest.raises(UsageError, match="does not exist, neither as a loss store nor"):
            guide(rows, name, lab / "student")


def test_conversations_are_trained_on_where_they_answer(lab, tmp_path):
    turns = [
        {
            "messages": [
                {"role": "user", "content": "the sum"},
                {"role": "assistant", "content": "is a number"},
            ]
        }
    ]
    found = guide(datasets.Dataset.from_list(turns), lab / "other", lab / "student")[0]
    trained = np.array(found["labels"]) != -100
    assert 0 < trained.sum() < len(trained)
    assert np.isnan(np.array(found["guidance"])[~trained]).all()
    assert np.isfinite(np.array(found["guidance"])[trained]).all()


def test_ids_of_conversations_must_be_the_templates(lab):
    turns = [
        {"role": "user", "content": "the sum"},
        {"role": "assistant", "content": "is a number"},
    ]
    made = guide([{"messages": turns}], lab / "other", lab / "student")[0]
    row = {"messages": turns, "input_ids": made["input_ids"], "labels": made["input_ids"]}
    kept = guide([row], lab / "other", lab / "student")[0]
    np.testing.assert_array_equal(kept["guidance"], made["guidance"])
    assert kept["labels"] == made["input_ids"] != made["labels"]
    with pytest.raises(CorpusError, match="not those of the chat template"):
        guide([{**row, "input_ids": [1, 2, 3]}], lab / "other", lab / "student")


def test_exported_conversations_are_those_that_were_scored(lab, tmp_path):
    """With all that a message holds; what the store has not is counted."""

    def talk(**more):
        asked = {"role": "user", "content": "the sum"}
        return {"messages": [asked, {"role": "assistant", "content": "is a number", **more}]}

    talks = [talk(), talk(reasoning_content="a number it is"), talk(weight=0)]
    for name, rows in (("scored", talks[:2]), ("all", talks)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    score_corpus(lab / "other", tmp_path / "scored.jsonl", tmp_path / "store")
    with pytest.warns(VocagnolmWarning, match="1 of 3 documents were skipped"):
        found = export_columns(
            tmp_path / "store", lab / "student", tmp_path / "columns", [tmp_path / "all.jsonl"]
        )
    made = [
        guide(datasets.Dataset.from_list([row]), tmp_path / "store", lab / "student")[0]
        for row in talks[:2]
    ]
    assert [row["input_ids"] for row in found] == [row["input_ids"] for row in made]
    for ours, theirs in zip(found, made, strict=True):
        np.testing.assert_array_equal(ours["guidance"], theirs["guidance"])


def test_the_collator_keeps_columns_together(guided):
    some = [guided[n] for n in range(3)]
    lengths = [min(len(row["input_ids"]), 20) for row in some]
    padded = GuidedCollator(max_length=20, pad_to_multiple_of=8)(some)
    assert {tuple(value.shape[:2]) for value in padded.values()} == {(3, 24)}
    assert padded["attention_mask"].sum(1).tolist() == lengths
    assert padded["target_ids"].shape[2] == 3
    packed = GuidedCollator(max_length=20, packing=True)(some)
    assert "attention_mask" not in packed
    assert packed["position_ids"][0].tolist() == [n for size in lengths for n in range(size)]
    assert (packed["labels"][0] == -100).sum() == 3
    kept = padded["attention_mask"].bool()
    for name in ("input_ids", "labels", "guidance", "target_p"):
        torch.testing.assert_close(padded[name][kept], packed[name][0], equal_nan=True)
    # packed before, or by a sampler that gives lists of rows
    joined = {name: [x for row in some for x in row[name]] for name in ("input_ids", "guidance")}
    before = GuidedCollator(max_length=20)(
        [{**joined, "seq_lengths": [len(r["input_ids"]) for r in some]}]
    )
    listed = GuidedCollator(max_length=20)([some])
    for batch in (before, listed):
        assert torch.equal(batch["input_ids"], packed["input_ids"])
        assert torch.equal(batch["position_ids"], packed["position_ids"])


@pytest.mark.parametrize("method", ["guided", "distill", "cpt", "no_teacher"])
def test_logits_and_hidden_states_give_the_objective(guided, method):
    batch = GuidedCollator()([guided[n] for n in range(3)])
    model, config = student(), ObjectiveConfig(method=method)
    hidden = model.model(batch["input_ids"]).last_hidden_state
    head = Head(weight=model.lm_head.weight)
    targets = Targets(
        labels_BT=batch["labels"][:, 1:],
        guidance_BT=batch["guidance"][:, 1:],
        soft_ids_BTK=batch["target_ids"][:, 1:],
        soft_p_BTK=batch["target_p"][:, 1:],
    )
    expected = objective_loss(hidden[:, :-1], head, targets, config).loss
    from_hidden = guided_loss(hidden, batch["labels"], batch, config, head=head)
    from_logits = guided_loss(model(batch["input_ids"]).logits, batch["labels"], batch, config)
    torch.testing.assert_close(from_hidden, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(from_logits, expected, rtol=1e-5, atol=1e-6)
    ours = torch.autograd.grad(expected, model.lm_head.weight, retain_graph=True)[0]
    theirs = torch.autograd.grad(from_logits, model.lm_head.weight)[0]
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-7)


def test_packed_documents_are_as_apart_as_padded_ones(guided):
    model, some = student(), [guided[n] for n in range(4)]

    def loss(packing):
        batch = GuidedCollator(packing=packing)(some)
        read = {name: batch[name] for name in ("attention_mask", "position_ids") if name in batch}
        logits = model(batch["input_ids"], use_cache=False, **read).logits
        return guided_loss(logits, batch["labels"], batch)

    torch.testing.assert_close(loss(True), loss(False), rtol=1e-5, atol=1e-6)


def test_a_dataset_without_a_teacher_beside_one_with(lab, guided):
    """Its columns are made too, and it is trained plainly; without them nothing is dropped
    unnoticed."""
    notes = datasets.Dataset.from_list([{"text": text} for text in documents(3, seed=8)])
    kept = guide(notes, lab / "store", lab / "student", missing="keep")
    mixed = datasets.concatenate_datasets([guided.select(range(2)), kept])
    batch = GuidedCollator()([mixed[n] for n in range(5)])
    assert batch["guidance"][2:].isnan().all() and not batch["guidance"][:2].isnan().all()
    plain = GuidedCollator()([kept[n] for n in range(3)])
    logits = torch.randn(*plain["labels"].shape, 320)
    losses = [
        guided_loss(logits, plain["labels"], plain, ObjectiveConfig(method=method))
        for method in ("distill", "guided", "cpt")
    ]
    assert losses[0] == losses[1] == losses[2]
    bare = kept.select_columns(["input_ids", "labels"])
    for order in ([guided, bare], [bare, guided]):
        some = [row for part in order for row in part.select(range(2))]
        with pytest.raises(UsageError, match=r'has no guidance, and others have.*missing="keep"'):
            GuidedCollator()(some)


def test_what_a_micro_batch_cannot_decide_is_refused(guided):
    one, two = (GuidedCollator()([guided[n] for n in range(at, at + 2)]) for at in (0, 2))
    logits = torch.randn(*one["labels"].shape, 320, requires_grad=True)
    call = partial(guided_loss, logits, one["labels"])
    whole, step = count_items([one]), count_items([one, two])
    for settings in ({"scope": "global"}, {"normalise": "selected"}):
        config = ObjectiveConfig(**settings)
        alone = call(one, config, num_items_in_batch=whole)
        torch.testing.assert_close(alone, call(one, config))
        with pytest.raises(ObjectiveError, match="decided over a whole step"):
            call(one, config, num_items_in_batch=step)
    torch.testing.assert_close(call(one, num_items_in_batch=step) * step, call(one) * whole)
    with pytest.raises(ObjectiveError, match="remove_unused_columns"):
        call({})
    with pytest.raises(ObjectiveError, match="Use GuidedTrainer"):  # as a compute_loss_func
        guided_loss(CausalLMOutput(logits=logits), one["labels"], one, num_items_in_batch=step)
    model = student()
    model.loss_function = guided_loss
    with pytest.raises(ObjectiveError, match="Use GuidedTrainer"):
        model(**one)
    with pytest.raises(ObjectiveError, match="uses random numbers"):
        call(one, ObjectiveConfig(method="random"))
    assert call(one, ObjectiveConfig(method="random"), step=3) > 0
    with pytest.raises(ObjectiveError, match="mix_end"):
        call(one, ObjectiveConfig(method="distill", mix_end=0.0))
    with torch.no_grad():
        mean = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), one["labels"][:, 1:].flatten()
        )
        torch.testing.assert_close(call({}), mean)


def test_a_float16_model_is_refused_at_every_entrance(lab, guided, tmp_path):
    model, batch = student(torch.float16), GuidedCollator()([guided[0]])

    def loss():
        return guided_loss(model(batch["input_ids"]).logits, batch["labels"], batch)

    with pytest.raises(ObjectiveError, match=r"dtype=torch\.float32"):
        loss()
    with torch.no_grad():
        assert torch.isfinite(loss())  # an evaluation may be
    tree = recipe_dict(lab, run={"folder": str(tmp_path / "run")})
    tree["student"]["dtype"] = "float16"
    with pytest.raises(TrainingError, match="float16"):
        train(recipe_from_dict(tree), quiet=True)


def test_columns_are_exported_as_a_folder(lab, guided, tmp_path):
    out = tmp_path / "columns"
    given = ["export-columns", str(lab / "store"), "--student", str(lab / "student")]
    given += ["--out", str(out), "--json"]
    refused = CliRunner().invoke(app, given)  # made-up: it names no corpus
    assert isinstance(refused.exception, UsageError) and "--corpus" in str(refused.exception)
    done = CliRunner().invoke(app, [*given, "--corpus", str(lab / "corpus.jsonl")])
    assert done.exit_code == 0, done.exception
    found = datasets.load_from_disk(str(out))
    assert json.loads(done.stdout)["rows"] == len(found) == len(guided)
    for name in found.column_names:
        np.testing.assert_array_equal(found[3][name], guided[3][name])
    assert "text" not in found.column_names and [*tmp_path.iterdir()] == [out]
    again = CliRunner().invoke(app, [*given, "--corpus", str(lab / "corpus.jsonl")])
    assert isinstance(again.exception, UsageError) and "exists already" in str(again.exception)
