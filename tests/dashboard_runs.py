"""A run folder for tests of the dashboard: the product's store, metrics and replay, over conversations whose tokens are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from slipstream.buffer.admission import Admission, ReplayConfig
from slipstream.buffer.encoded import DeliveredTrajectory, EncodedTrajectory
from slipstream.buffer.replay import Replay
from slipstream.buffer.store import CommitRow, Store, WriteBatch
from slipstream.buffer.trajectory import FINISHED, EnvCall, Outcome, Trajectory, Turn, VersionSpan, by_version
from slipstream.tests.synthetic_runs import synthetic
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MEMBERS = 4
BEGAN = 1.8e9
PLANTED = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
"""What must stay text wherever it is shown."""


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and the control tokens of a chat format."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    return tokenizer


class DashboardRun:
    """Writes a run of `max_staleness` 2 into `folder`, a group of `MEMBERS` for each step. Its store stays open until `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = byte_tokenizer()
        synthetic(
            folder, 0, overrides=("buffer.groups_per_batch=1", f"buffer.group_size={MEMBERS}", "model.path=/no/model")
        )
        (folder / "tokenizer").mkdir()
        self.tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
        self.replay = Replay(Admission(2, 1), ReplayConfig(MEMBERS, MEMBERS, "withhold", 5.0))
        self.replay.mark_served(0)
        self.store = Store(folder / "buffer.sqlite")

    def close(self) -> None:
        self.store.close()

    def play(self) -> list[Trajectory]:
        """Lease a group and deliver its episodes. Their tokens are of the three newest versions."""
        lease = self.replay.leases.grant("worker-0", 0.0)
        assert lease is not None
        made = list[Trajectory]()
        for member in lease.members:
            one = self.trajectory(lease.episode(member))
            counts = by_version(one.version_spans)
            assert self.replay.leases.deliver(lease.episode(member), one.outcome, counts, counts, one.reward)
            made.append(one)
        self._save([DeliveredTrajectory.of(one.episode, one, EncodedTrajectory.of(one)) for one in made])
        return made

    def step(self) -> None:
        """Train on the oldest group."""
        version = self.replay.version
        assert self.replay.take(version) is not None
        self.replay.commit(version)
        self._save([], [CommitRow(version + 1, BEGAN + version, 1, 2, 1)])
        self.replay.mark_served(version + 1)
        self.replay.mark_checkpointed(version + 1)
        self._save([])

    def record(self, groups: int) -> list[Trajectory]:
        """Of `groups` groups all but the last are trained on."""
        made = list[Trajectory]()
        for number in range(groups):
            made += self.play()
            if number < groups - 1:
                self.step()
        synthetic(
            self.folder,
            max(1, groups - 1),
            overrides=("buffer.groups_per_batch=1", f"buffer.group_size={MEMBERS}", "model.path=/no/model"),
        )
        return made

    def trajectory(self, episode: str) -> Trajectory:
        """Two turns around a tool; the second is sampled by one version after another."""
        group, _, member = map(int, episode.split("."))
        now = self.replay.version
        given = f"<|im_start|>user\nWhat is {group} + {member}? {PLANTED} é<|im_end|>\n<|im_start|>assistant\n"
        found = f"<tool_response>\n{group + member} {PLANTED}\n</tool_response>"
        result = f"\n<|im_start|>user\n{found}<|im_end|>\n<|im_start|>assistant\n"
        parts = [
            self.ids(text)
            for text in (
                given,
                f"calculator({group})<|im_end|>",
                result,
                f"It is {group + member} ✓ {PLANTED}<|im_end|>",
            )
        ]
        edges = np.cumsum([0, *map(len, parts)]).tolist()
        first, last = range(edges[1], edges[2]), range(edges[3], edges[4])
        thirds = np.linspace(last.start, last.stop, 4).astype(int).tolist()
        versions = [max(0, now - 2), max(0, now - 1), now]
        spans = [VersionSpan(first.start, first.stop, versions[0])]
        spans += [VersionSpan(start, end, v) for start, end, v in zip(thirds, thirds[1:], versions, strict=False)]
        mask = np.zeros(edges[-1], dtype=np.bool_)
        mask[first.start : first.stop] = mask[last.start : last.stop] = True
        began = BEGAN + group
        truncated = member == 3
        return Trajectory(
            id=f"{episode}.0",
            group_id=group,
            member=member,
            branch=0,
            task_id=f"sum-{group} {PLANTED}",
            env="calculator",
            version_spans=tuple(spans),
            turns=(
                Turn(first.start, first.stop, "stop", began + 0.1, 0.01, 0.02, 0.1, 0, "engine-0"),
                Turn(last.start, last.stop, "stop", began + 0.5, 0.01, 0.02, 0.2, edges[2], "engine-0"),
            ),
            reward=float(member % 2),
            turn_rewards=(0.0, float(member % 2)),
            outcome=Outcome("truncated") if truncated else FINISHED,
            timings={"total": 1.0 + 0.1 * member},
            started=began,
            env_calls=(
                EnvCall(began, began + 0.1, "reset"),
                EnvCall(began + 0.25, began + 0.45, "tool", f"calculator {PLANTED}", ""),
            ),
            token_ids=np.array([id for part in parts for id in part], dtype=np.int32),
            loss_mask=mask,
            behavior_logprobs=np.where(mask, -0.25 * (1 + np.arange(edges[-1]) % 8), 0.0).astype(np.float32),
        )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def _save(self, new: list[DeliveredTrajectory], commits: list[CommitRow] | None = None) -> None:
        self.store.save(WriteBatch.of(self.replay.table.counters, self.replay.table.drain(), new, commits or []))
