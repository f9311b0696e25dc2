"""torchtitan with the guided loss, from blocks that `vocagnolm prepare` made.

    PYTHONPATH=examples/torchtitan torchrun --nproc-per-node 8 -m torchtitan.train \
        --module guided --config guided_llama3 --dataloader.dataset_path out/blocks

Written for torchtitan 0.3.0: a loss, a data loader, and a forward that hands one to the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import BaseLoss, compute_logprobs
from torchtitan.trainer import Trainer

from vocagnolm.data.blocks import Blocks, TrainingOrder
from vocagnolm.objective import ObjectiveConfig, ScoredBatch, Targets, weigh_step
from vocagnolm.train import GuidedCollator


class GuidedLoss(BaseLoss):
    """Cross entropy of the tokens whose loss most exceeds the teacher's, divided by all tokens of
    the step (`normalise: all`), as torchtitan counts them."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        keep: float = 0.4
        scope: str = "batch"
        """sequence or batch: which tokens compete."""

    def __init__(self, config: Config, *, compile_config: Any = None):
        scope: Any = config.scope
        self.objective = ObjectiveConfig(keep=config.keep, scope=scope)

    def __call__(
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: Tensor | None = None,
        *,
        guidance: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        nll = -compute_logprobs(pred, labels)
        if guidance is None:  # validation: the mean of all tokens
            loss = nll.sum()
        else:
            scored = ScoredBatch(Targets(labels_BT=labels, guidance_BT=guidance), nll.detach())
            loss = (nll * weigh_step([scored], self.objective).weights[0]).sum()
        return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}


class BlockLoader(BaseDataLoader):
    """The blocks in their training order; every rank takes its rows of each batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        seed: int = 0

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **kwargs: Any,
    ):
        assert config.dataset_path is not None, "give --dataloader.dataset_path"
        blocks = Blocks(config.dataset_path, seq_len)
        self.order = TrainingOrder(blocks, length=2**62, seed=config.seed)
        self.rows, self.ranks, self.rank = local_batch_size, dp_world_size, dp_rank
        self.batch = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        collate = GuidedCollator.for_blocks()
        while True:
            first = (self.batch * self.ranks + self.rank) * self.rows
            self.batch += 1
            rows = collate([self.order[first + row] for row in range(self.rows)])
            yield {"input": rows["input_ids"], "guidance": rows["guidance"]}, rows["labels"]

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batch = state_dict.get("batch", 0)


class GuidedTrainer(Trainer):
    """Everything beside `input` is an argument of the model's forward; guidance is the loss's."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def _forward_backward_body(
        self,
        inputs: Tensor,
        labels: Tensor,
        global_valid_tokens: Tensor,
        extra_kwargs: dict[str, Any],
    ) -> Tensor:
        guidance = extra_kwargs.pop("guidance")
        with self.train_context():
            pred = self.model_parts[0](inputs, **extra_kwargs)
            loss, _ = self.loss_fn(pred, labels, global_valid_tokens, guidance=guidance)
            del pred
            loss.backward()
        return loss


def guided_llama3() -> Any:
    """torchtitan's small Llama 3 with the guided loss; set your own model and sizes."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    base = llama3_debugmodel()
    given = {field.name: getattr(base, field.name) for field in fields(base)}
    given |= {"loss": GuidedLoss.Config(), "dataloader": BlockLoader.Config()}
    config = GuidedTrainer.Config(**given)
    config.training.disable_cuda_graphs = True  # which tokens are kept is decided as it runs
    return config
