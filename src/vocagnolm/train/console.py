"""Progress of a run on stderr: a line every so many steps, or now and then where steps are slow."""

import sys
import time
from typing import Any

from vocagnolm.pace import Pace, clock_time
from vocagnolm.train.schedule import Schedule


class Console:
    def __init__(self, schedule: Schedule, *, quiet: bool, log_every: int):
        self.schedule = schedule
        self.quiet = quiet
        self.log_every = max(1, log_every)
        self._began = (0, time.monotonic())
        self._pace = Pace()

    def start(self, step: int) -> None:
        self._began = (step, time.monotonic())
        s = self.schedule
        self.say(
            f"{'going on after step ' + str(step) if step else 'training'}: {s.steps:,} steps of "
            f"{s.tokens_per_step:,} tokens ({s.accumulation} x {s.micro_batch} blocks on "
            f"{s.world_size} process{'es' if s.world_size > 1 else ''})"
        )

    def step(self, record: dict[str, Any]) -> None:
        step = record["step"]
        if step % self.log_every and step != self.schedule.steps and not self._pace.due():
            return
        self._pace.said()
        first, began = self._began
        left = (time.monotonic() - began) / max(step - first, 1) * (self.schedule.steps - step)
        self.say(
            f"step {step:>6,}/{self.schedule.steps:,}  loss {record['loss']:.4f}  "
            f"nll kept {record['nll_kept']:.4f} all {record['nll_all']:.4f}  "
            f"kept {record['kept_share']:.1%}  "
            f"lr {record['learning_rate']:.2e}  {record['tokens_per_second']:,.0f} tokens/s  "
            f"ETA {clock_time(left)}"
        )

    def say(self, line: str) -> None:
        if not self.quiet:
            print(line, file=sys.stderr, flush=True)
