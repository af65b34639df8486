"""TensorBoard: event files in `<run>/tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ...configs import Config
from .base import TABLE, TrajectorySample


class TensorBoard:
    def __init__(self, folder: Path, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), flush_secs=10)
        self._writer.add_text("config", f"```json\n{msgspec.json.format(msgspec.json.encode(config)).decode()}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self.log(step, values)

    def sampled(self, step: int, rows: Sequence[TrajectorySample]) -> None:
        """As Markdown: a table of its text plugin would draw no line breaks."""
        self._writer.add_text(TABLE, "\n\n".join(map(_markdown, rows)), step)

    def close(self) -> None:
        self._writer.close()


def _markdown(row: TrajectorySample) -> str:
    """Texts are indented: no mark in them is Markdown's."""
    title = f"**{row.id}** {row.env} {row.task}: {row.outcome}, reward {row.reward:g}, staleness {row.staleness:.2f}"
    texts = ("\n".join(f"    {line}" for line in text.splitlines()) for text in (row.prompt, row.response))
    return f"{title}, {row.tokens} tokens\n\nprompt\n\n{next(texts)}\n\nresponse\n\n{next(texts)}"
