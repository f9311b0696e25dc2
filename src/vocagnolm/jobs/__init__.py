"""Jobs: folders that are made shard by shard, by one process or by many."""

from vocagnolm.jobs.job import (
    Amount,
    Begun,
    Done,
    Job,
    Outcome,
    Pipeline,
    Progress,
    ShardTask,
    ShardWorker,
    Share,
    run_job,
)

__all__ = [
    "Amount",
    "Begun",
    "Done",
    "Job",
    "Outcome",
    "Pipeline",
    "Progress",
    "ShardTask",
    "ShardWorker",
    "Share",
    "run_job",
]
