"""Every architecture ends in its own way, and packs in its own way: probed, not believed."""

import pytest
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES, LEAKING, SEPARATING, tiny

from vocagnolm.errors import ModelError, TrainingError
from vocagnolm.model.runtime import head_form, last_hidden, router_loss_of, separates_documents
from vocagnolm.objective import ObjectiveConfig, Targets
from vocagnolm.train.collate import GuidedCollator
from vocagnolm.train.loop import GuidedStudent, MicroBatch
from vocagnolm.train.student import require_separation
from vocagnolm.train.teacher import OnlineTeacher

IDS = torch.randint(3, 160, (2, 20), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_head_gives_the_models_own_logits(name):
    model = tiny(name)
    form = head_form(model)
    assert form is not None
    with torch.no_grad():
        own = model(input_ids=IDS, use_cache=False).logits
        ours = form.head(model).logits(last_hidden(model, IDS))
    torch.testing.assert_close(ours, own, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["hyperclovax", "recurrent_gemma", "xlstm", "llama4_text"])
def test_an_online_teacher_of_it_gives_its_own_losses(name):
    model = tiny(name)
    batch = GuidedCollator.for_blocks()([{"input_ids": row} for row in IDS.numpy()])
    guidance = OnlineTeacher(model, config=ObjectiveConfig(method="rho1")).guide(batch)["guidance"]
    with torch.no_grad():
        logits = model(input_ids=IDS, use_cache=False).logits[:, :-1]
    own = F.cross_entropy(logits.transpose(1, 2), IDS[:, 1:], reduction="none")
    torch.testing.assert_close(guidance, own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SEPARATING)
def test_documents_are_apart(name):
    assert separates_documents(tiny(name))


@pytest.mark.parametrize("name", LEAKING)
def test_documents_that_are_not_apart_are_refused(name):
    model = tiny(name)
    assert not separates_documents(model)
    with pytest.raises(TrainingError, match=r"lets a document see.*document_mask to false"):
        require_separation(model, "The student")


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "granitemoe"])
def test_a_mixture_of_experts_learns_to_balance_them(name):
    """Loss and gradients are those of the model's own forward with the router loss on."""
    settings = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model, own = tiny(name, **settings).train(), tiny(name, **settings).train()
    expected = own(input_ids=IDS, labels=IDS).loss
    expected.backward()
    batch = GuidedCollator.for_blocks()([{"input_ids": row} for row in IDS.numpy()])
    output = GuidedStudent(model)(
        MicroBatch(
            input_ids_BT=IDS,  # the last position is routed too, though it predicts nothing here
            targets=Targets(labels_BT=F.pad(batch["labels"], (0, 1), value=-100)),
            config=ObjectiveConfig(method="cpt"),
        )
    )
    torch.testing.assert_close(output["loss"], expected, rtol=1e-5, atol=1e-5)
    assert float(output["means"]["router_loss"]) > 0.1
    output["loss"].backward()
    for (label, ours), (_, theirs) in zip(
        model.named_parameters(), own.named_parameters(), strict=True
    ):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=label)


def test_the_router_loss_follows_the_configuration_or_the_user():
    quiet, loud = tiny("mixtral"), tiny("mixtral", output_router_logits=True)
    assert router_loss_of(quiet) is None and router_loss_of(loud) is not None
    assert router_loss_of(quiet, True) is not None and router_loss_of(loud, False) is None
    assert router_loss_of(tiny("llama"), True) is None
    odd = tiny("mixtral")
    del odd.num_experts
    with pytest.raises(ModelError, match="router_loss to false"):
        router_loss_of(odd, True)
