"""A teacher behind a server that reads answers."""

import shutil

import numpy as np
import pytest
import torch
from chat_kit import loaded
from rounds.rounds_kit import ASKED, drawn
from rounds.test_rounds import recipe
from served_kit import Live

from vocagnolm.errors import VocagnolmError
from vocagnolm.model import open_model
from vocagnolm.model.served import Server
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.rounds import train_rounds
from vocagnolm.rounds.folder import read_round
from vocagnolm.rounds.targets import rollout_targets
from vocagnolm.rounds.teacher import AnswerTeacher


class LiveReader(Live):
    """A server that also gives the likeliest tokens of a prompt, as vLLM does."""

    @torch.inference_mode()
    def completed(self, content):
        if "prompt_logprobs" not in content:
            return super().completed(content)
        choices = []
        for index, ids in enumerate(content["prompt"]):
            log_p = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            rows = [None]
            for token, row in zip(ids[1:], log_p, strict=True):
                order = row.argsort(descending=True).tolist()
                listed = {*order[: content["prompt_logprobs"]], token}
                rows.append(
                    {str(n): {"logprob": float(row[n]), "rank": order.index(n) + 1} for n in listed}
                )
            choices.append(
                self.change(
                    {
                        "index": index,
                        "prompt_token_ids": ids,
                        "prompt_logprobs": rows,
                        "token_ids": [0],
                    }
                )
            )
        return {"choices": choices}


@pytest.fixture
def server(lab):
    live = LiveReader(lab / "teacher")
    live.start()
    yield live
    live.stop()


def test_it_gives_what_the_model_here_gives(lab, server):
    student = loaded(lab / "start")
    rollouts = drawn(student, lab / "start", ASKED)
    files = open_model(lab / "teacher", device="cpu")
    here = rollout_targets(rollouts, student, AnswerTeacher(files, alternatives=8))
    asked = Server(url=server.url, patience_seconds=20.0)
    there = rollout_targets(rollouts, student, AnswerTeacher(files, alternatives=8, server=asked))
    kept = [(a, b) for a, b in zip(here, there, strict=True) if a is not None]
    assert len(kept) > 3
    for a, b in kept:
        assert np.array_equal(a["labels"], b["labels"])
        np.testing.assert_allclose(a["guidance"], b["guidance"], atol=2e-3)
        np.testing.assert_allclose(a["target_p"].sum(1), b["target_p"].sum(1), atol=0.02)


def test_another_model_behind_the_address_is_refused(lab, server, tmp_path):
    run = tmp_path / "run"
    given = recipe(lab, run, teacher={"server": server.url}, rounds={"rounds": 2})
    assert train_rounds(recipe_from_dict(given), quiet=True)["finished"]
    about = read_round(run / "rounds" / "000002").identity
    assert about["server"] and about["reading"]["device"] == "a server"
    with torch.no_grad():  # started again with other weights
        for parameter in server.model.parameters():
            parameter.mul_(1.5)
    for name in ("model", "checkpoints", "rounds/000002"):
        shutil.rmtree(run / name)
    for name in ("metrics.jsonl", "run.json"):
        (run / name).unlink()
    with pytest.raises(VocagnolmError, match=r"server|made with other settings"):
        train_rounds(recipe_from_dict(given), quiet=True)
