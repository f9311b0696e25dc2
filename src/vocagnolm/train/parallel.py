"""How several processes share the student: DDP, FSDP2, HSDP."""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainingArguments

from vocagnolm.errors import TrainingError
from vocagnolm.model.runtime import find_layers

if TYPE_CHECKING:
    from vocagnolm.train.loop import GuidedStudent


@contextlib.contextmanager
def sharding_group(*, accelerator: bool) -> Iterator[None]:
    """Give a process that was not started by torchrun a group of its own: FSDP needs one, and one
    process can then continue with the shards of several. `accelerator`: the run is not on a CPU."""
    if "LOCAL_RANK" in os.environ:
        yield
        return
    dist.init_process_group(
        None if accelerator else "gloo", store=HashStore(), rank=0, world_size=1
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def share(
    student: "GuidedStudent", parallel: str, arguments: TrainingArguments, *, half: bool
) -> nn.Module:
    """The student as the processes hold it together: in shards, which go to the device when they
    are made, or whole in each process. `half`: the arithmetic is in bfloat16."""
    device = arguments.device
    if parallel != "ddp":
        _shard(student, _mesh(device, within_machines=parallel == "hsdp"), half=half)
        return student
    options = {
        "bucket_cap_mb": arguments.ddp_bucket_cap_mb,
        "broadcast_buffers": arguments.ddp_broadcast_buffers,
        "static_graph": arguments.ddp_static_graph,
    }
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    ids = None if device.type == "cpu" else [device.index]
    return DistributedDataParallel(student, device_ids=ids, **given)


def _mesh(device: torch.device, *, within_machines: bool) -> Any:
    """The processes as one axis, or as two, machines x the processes of each, where shards stay
    within a machine and there are several machines."""
    processes = dist.get_world_size()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes)) if within_machines else processes
    machines, rest = divmod(processes, here)
    if rest or (here == 1 and machines > 1):
        raise TrainingError(
            f"train.parallel: hsdp shards within a machine, over the same number of processes on "
            f"each, and at least two. Here are {here} of {processes} processes. Start as many on "
            "every machine (torchrun --nproc-per-node), or use fsdp2, which shards over all."
        )
    if machines == 1:
        return init_device_mesh(device.type, (processes,))
    return init_device_mesh(device.type, (machines, here), mesh_dim_names=("replicate", "shard"))


def _shard(student: "GuidedStudent", mesh: Any, *, half: bool) -> None:
    """Shard each decoder layer by itself, then the embeddings, then the final norm with the head,
    which is read after it without a forward of its own. The rest is gathered for the whole pass."""
    model = student.causal_lm
    policy = MixedPrecisionPolicy()
    if half:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for parameter in student.parameters():  # the weights that the optimizer steps
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    for layer in find_layers(model) or []:
        fully_shard(layer, **options)
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    tied = embedding.weight is head.weight
    if not tied:
        fully_shard(embedding, **options)
    norms = [m for m in model.base_model.children() if "Norm" in type(m).__name__]
    if norms:
        tail = [norms[-1], embedding, head] if tied else [norms[-1], head]
        fully_shard(tail, **options, reshard_after_forward=False)
    fully_shard(student, **options)


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The whole weights, gathered from the shards to the CPU of rank 0."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)
