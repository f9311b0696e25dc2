"""One worker of a cluster: a process with a teacher of its own."""

import socket

from vocagnolm.errors import ScoreError
from vocagnolm.files import differences
from vocagnolm.score.plan import Plan, describe, load_plan, store_identity
from vocagnolm.score.teacher import Teacher
from vocagnolm.score.work import Scored, Worker
from vocagnolm.store.measured import told, with_values_of


class ScoringActor:
    """What the driver asks of a worker. It is made from two short strings and reads its plan from
    the growing store, so that it can be made again on any machine at any time; what can fail
    happens in `load`.

    A teacher that needs several GPUs would be a group of processes behind the same three calls.
    """

    def __init__(self, out: str, digest: str):
        self._out = out
        self._digest = digest
        self._worker: Worker | None = None

    def hello(self) -> str:
        """The machine, as soon as the process is there."""
        return socket.gethostname()

    def load(self) -> None:
        """Make the teacher ready. It must be, on this machine too, the one of the plan."""
        if self._worker is not None:
            return
        plan = load_plan(self._out, self._digest).on_this_machine()
        assert plan.teacher_source is not None
        teacher = plan.teacher_source.open(plan.settings, patient=True)
        _require_planned(plan, teacher)
        teacher.load()
        self._worker = Worker(plan, teacher, plan.writer(teacher.device_name))

    def work(self, number: int, ahead: int | None) -> Scored:
        """Shard `number`; `ahead` is read meanwhile, for the next call."""
        assert self._worker is not None
        return self._worker.work(number, ahead)


def _require_planned(plan: Plan, teacher: Teacher) -> None:
    here = store_identity(describe(teacher, plan.settings), plan.corpus)
    here = with_values_of(plan.identity, here)
    for name, planned, found in differences(plan.identity, here):
        told_apart = told(name, planned, found)
        raise ScoreError(
            f"{name} is {told_apart or repr(found)[:80]} on this machine, the plan has "
            f"{planned!r:.80}. Give all machines the same teacher, corpus and packages."
        )
