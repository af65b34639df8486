"""A long run in which servers die and join all the time, and the audit of what it left.

    python -m slipstream.tests.soak RUN_DIR [--minutes 10] [--engine vllm] [--replicas 3] [--every 30] [key=value ...]

Every `--every` seconds a serving replica is killed for good, and half a period later one is added, while the learner pushes all the
time. Then the run is interrupted and audited from its files:

    no hang          the longest time between two learner steps
    no episode lost  every episode begun is delivered, under way at the end, or discarded for no fault of the engines
    spans exact      log-probs of every stored token, computed anew by transformers with the very weights its span names
    ledger closes    by the command, and no version was trained on twice

Exit status 0 only when all of it holds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file
from slipstream.buffer.trajectory import Trajectory
from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task
from slipstream.tests.runs import (
    SMALL,
    Background,
    ledger,
    leftovers,
    metrics,
    query,
    slipstream,
    stored_trajectory,
    tiny_policy,
)
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-3
"""Nats, fp32: rounding stays below 1e-4, one token under other weights is off by more."""

HANG_S = 60.0
"""Longest time between two learner steps: with all replicas but one gone, batches take long on a small machine, but they come."""

PUSH_S = 2.0
"""A push comes at least as often as this, in seconds, on average."""

AUDITED = 4000
"""Trajectories whose log-probs are computed anew: first those of several versions, then the newest."""

ALLOWED = ("", "worker_stopped", "stale", "too_few_members")
"""Reasons for which episodes may have been discarded: at the end of the run, or by the staleness bound. Nothing else was killed."""


TURNS = 4


class Noise(SimpleEnv):
    """Pays at random, so that a policy that knows nothing moves at every step: versions must differ to be told apart."""

    def task(self, index: int) -> Task:
        return Task(f"noise-{index}")

    async def reset(self, task: Task) -> Observation:
        self._said = ""
        self._turns = 0
        return Observation((Message("user", f"Tell me about {task.id}."),))

    async def step(self, message: Message) -> StepResult:
        self._said += message.content
        self._turns += 1
        reward = random.Random(self._said).random()
        return StepResult((Message("user", "Go on."),), reward=reward, done=self._turns == TURNS)


def main() -> int:
    options = _options()
    run, began = options.run_dir.resolve(), time.monotonic()
    policy = tiny_policy(run.parent / f"{run.name}-policy")
    arguments = (
        *("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL),
        *(
            "env.kind=python",
            "env.factory=slipstream.tests.soak:Noise",
            "agent.max_tokens=768",
            "agent.max_tokens_per_turn=96",
        ),
        *("learner.steps=1000000", "launch.restarts=0", "weightsync.transport=disk"),
        *(f"rollout.engine.kind={options.engine}", f"rollout.engine.replicas={options.replicas}"),
        *options.overrides,
    )
    history = run.parent / f"{run.name}-versions"
    history.mkdir()
    stop = threading.Event()
    with Background(*arguments) as going:
        threading.Thread(target=_keep_versions, args=(run / "weights", history, stop), daemon=True).start()
        going.until_step(1)
        reported = _inject_faults(going, run, 60 * options.minutes, options.every)
        stopped = time.time()
        going.process.send_signal(signal.SIGINT)
        output = going.output()
        status = going.process.returncode
    stop.set()
    (run / "soak.log").write_text(output)
    problems = [] if status == 130 else [f"the run ended with status {status}: {output[-2000:]}"]
    problems += [f"left running: {process}" for process in leftovers(run)]
    rows = metrics(run)
    gaps = [b - a for a, b in itertools.pairwise([*(row["time"] for row in rows), stopped])]
    if max(gaps) > HANG_S:
        problems.append(f"{max(gaps):.1f} s without a step")
    if sum(gaps) / len(gaps) > PUSH_S:
        problems.append(f"a push every {sum(gaps) / len(gaps):.1f} s only")
    problems += _accounts(run, reported) + _spans(run, history, policy, reported)
    reported |= {
        "engine": options.engine,
        "minutes": (time.monotonic() - began) / 60,
        "steps": len(rows),
        "seconds_between_pushes_mean": sum(gaps) / len(gaps),
        "seconds_between_steps_max": max(gaps),
        "canary_max_nats": max(row["canary"] for row in rows),
        "problems": problems,
    }
    sys.stdout.write(json.dumps(reported, indent=2) + "\n")
    return 1 if problems else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--every", type=float, default=30.0)
    return parser.parse_intermixed_args()


def _inject_faults(going: Background, run: Path, seconds: float, every: float) -> dict[str, object]:
    """Kill and add by turns; what was done."""
    pick, began, killed, added = random.Random(0), time.monotonic(), [], 0
    turn = 0
    while (next_at := (turn + 1) * every / 2) < seconds:
        time.sleep(max(0.0, began + next_at - time.monotonic()))
        assert going.process.poll() is None, going.output()
        if turn % 2:
            slipstream("replicas", str(run), "add")
            added += 1
        else:
            there = json.loads(slipstream("replicas", str(run), "list", "--json").stdout)
            serving = [replica_info for replica_info in there if replica_info["state"] == "serving"]
            if len(serving) > 1:  # the last one may not be killed for good: none would be left
                victim = pick.choice(serving)
                os.killpg(victim["pid"], signal.SIGKILL)
                killed.append(victim["name"])
        turn += 1
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    return {"killed": killed, "added": added}


def _keep_versions(weights: Path, history: Path, stop: threading.Event) -> None:
    """Link every file of full weights before the run removes it."""
    while not stop.wait(0.05):
        for path in weights.glob("v*.full.safetensors"):
            target = history / path.name
            if not target.exists():
                try:
                    os.link(path, target)
                except FileNotFoundError:
                    continue


def _accounts(run: Path, reported: dict[str, object]) -> list[str]:
    problems = []
    shown = ledger(run)
    if not shown["closes"]:
        problems.append(f"the ledger does not close: {shown}")
    if query(run, "SELECT count(*) - count(DISTINCT id) FROM trajectories") != [(0,)]:
        problems.append("a trajectory is there twice")
    if query(run, "SELECT count(*) FROM groups JOIN commits ON trained_at = version WHERE rolled_back") != [(0,)]:
        problems.append("a group counts as trained by a commit that was rolled back")
    episodes = Counter()
    for account, reason, count in query(run, "SELECT account, reason, count(*) FROM episodes GROUP BY account, reason"):
        episodes[f"{account} {reason}".strip()] = count
        if reason not in ALLOWED:
            problems.append(f"{count} episodes were lost: {reason}")
    reported |= {"ledger": shown, "episodes": dict(episodes)}
    return problems


def _spans(run: Path, history: Path, policy: Path, reported: dict[str, object]) -> list[str]:
    """Every audited token's log-prob under the version that its span names, over the whole prefix."""
    trajectories = _trajectories(run)
    trajectories.sort(key=lambda t: (-len(t.version_spans), -t.group_id))
    audited = trajectories[:AUDITED]
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    by_version: dict[int, list[Trajectory]] = {}
    for trajectory in audited:
        for version in {span.version for span in trajectory.version_spans}:
            by_version.setdefault(version, []).append(trajectory)
    errors, strangers, tokens, unknown = [0.0], [], 0, 0
    for version, members in sorted(by_version.items()):
        path = history / f"v{version}.full.safetensors"
        if not path.exists():
            unknown += 1
            continue
        model.load_state_dict(load_file(path), strict=False)
        model.tie_weights()
        for trajectory in members:
            ids = torch.tensor(trajectory.token_ids, dtype=torch.long)
            with torch.no_grad():
                rows = model(ids[None], use_cache=False).logits[0].float().log_softmax(-1)
            for span in trajectory.version_spans:
                at = torch.arange(span.start, span.end)
                theirs = torch.from_numpy(trajectory.behavior_logprobs[span.start : span.end].copy())
                error = float(torch.nan_to_num((rows[at - 1, ids[at]] - theirs).abs(), nan=torch.inf).max())
                (errors if span.version == version else strangers).append(error)
                tokens += (span.end - span.start) * (span.version == version)
    worst = max(errors)
    reported |= {
        "trajectories": len(trajectories),
        "trajectories_of_several_versions": sum(len(t.version_spans) > 1 for t in trajectories),
        "most_versions_in_one": max(len(t.version_spans) for t in trajectories),
        "tokens_audited": tokens,
        "versions_audited": len(by_version) - unknown,
        "worst_logprob_error_nats": worst,
        "same_under_a_neighbouring_version_nats": {
            "median": statistics.median(strangers),
            "share_above_tolerance": sum(e > TOLERANCE for e in strangers) / len(strangers),
        },
    }
    if unknown:
        return [f"{unknown} versions were trained on of which no file was kept"]
    if statistics.median(strangers) < 10 * TOLERANCE:
        return ["the versions are too much alike for this audit to say anything"]
    if worst > TOLERANCE or not tokens:
        return [f"a log-prob is off by {worst:.3g} nats over {tokens} tokens: a span names the wrong version"]
    return []


def _trajectories(run: Path) -> list[Trajectory]:
    rows = query(run, "SELECT header, arrays, length FROM trajectories WHERE arrays NOTNULL")
    return [stored_trajectory(run, *row) for row in rows]


if __name__ == "__main__":
    sys.exit(main())
