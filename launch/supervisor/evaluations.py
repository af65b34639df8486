"""The supervisor's part of `evaluation.every`: evaluates the checkpoints that are due, one after the other, while training goes on.

Invariants:
- Every checkpoint that is due is evaluated, also those that a killed run left behind: an evaluation that takes longer than
  `evaluation.every` steps makes later ones late, never fewer. The learner keeps the checkpoints that wait; the view says once when
  they are many.
- An evaluation that fails ends no run: it is given up after `launch.restarts`, the view and the log say why, and a resumed run
  tries it again while its checkpoint is there.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from ...configs import Config
from ...errors import ConfigError, DeadlineExceeded, RoleDied
from ...learner.checkpoint_folder import checkpoints, prune, step_of
from ...monitor.terminal import View
from .. import evaluations
from .processes import ProcessManager, RoleProcess

MANY = 3  # checkpoints that wait: fewer may be those of one slow evaluation


@dataclass(eq=False)
class CheckpointEvaluations:
    config: Config
    run_dir: Path
    processes: ProcessManager
    view: View
    _told: bool = False

    async def follow(self, learner: RoleProcess, evaluator: RoleProcess) -> None:
        """Evaluate what is due whenever `learner` has written a checkpoint; return when it has done its last step and nothing is
        due."""
        while True:
            learner.saved.clear()
            done = learner.done.is_set()
            due = self._due()
            if len(due) >= MANY and not self._told:
                self._told = True
                self.view.event(
                    f"evaluations are slower than training: {len(due)} checkpoints stay until they are evaluated; raise "
                    f"evaluation.every={self.config.evaluation.every}, or lower tasks or samples"
                )
            for step in due:
                await self._evaluate(evaluator, step)
            if done:
                return
            await learner.saved.wait()

    def prune(self) -> None:
        """Remove the checkpoints that stayed to be evaluated. To be called when the learner writes none any more."""
        if self.config.evaluation.every:
            keep = functools.partial(evaluations.retained, self.run_dir, self.config)
            prune(self.run_dir / "checkpoints", self.config.learner.checkpoint_keep, keep)

    def _due(self) -> list[int]:
        steps = map(step_of, checkpoints(self.run_dir / "checkpoints"))
        return evaluations.due(self.run_dir, self.config, steps)

    async def _evaluate(self, role: RoleProcess, step: int) -> None:
        label = evaluations.label_of(step)
        role.arguments, role.restarts = ("--label", label, "--step", str(step), "--checkpoint"), 0
        try:
            await self.processes.start(role)
            await self.processes.watch([role])
        except (RoleDied, ConfigError, DeadlineExceeded) as error:
            evaluations.give_up(self.run_dir, step)
            self.view.event(f"the evaluation of {label} is given up, the run goes on: {error}")
