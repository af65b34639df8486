"""`slipstream show RUN [--step N | --evaluation [LABEL]] [--worst|--best|--failed] [--episode ID] [--count K] [--tokens]`: what the
policy wrote."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from ...errors import ConfigError
from ...monitor.output import open_console
from ...monitor.text import duration, printable, reward
from .options import CommandTable, add_evaluation, add_run

if TYPE_CHECKING:
    from ...dashboard.episodes import StoredEpisode
    from ...dashboard.texts import ShownMessage
    from ...dashboard.trajectory import StoredTrajectory, TrajectoryReader

COLORS = {"assistant": "green", "system": "magenta", "developer": "magenta", "user": "cyan"}
TOOLS = "yellow"  # messages of all other roles
COUNT_LIMIT = 1000
COLUMNS = f"{'token':>8}  {'id':>7}  {'version':>7}  {'staleness':>9}  {'log-prob':>8}  loss  text"
LOSS = {0: "", 1: "yes", 2: "no"}  # as `TrajectoryReader.window` has it


def register(commands: CommandTable) -> None:
    parser = commands.add(
        "show", show, "print what the policy wrote: episodes of a step, of a run that goes on or is over"
    )
    add_run(parser)
    parser.add_argument("--step", type=int, metavar="N", help="of this learner step; default: the newest one")
    add_evaluation(parser, "of an evaluation, for example 'step 20' or 'final, math'; without LABEL the newest one")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--worst", action="store_const", dest="order", const="worst", help="those with the lowest reward"
    )
    which.add_argument("--best", action="store_const", dest="order", const="best", help="those with the highest reward")
    text = "those that failed, with the reason; without --step the newest of the run"
    which.add_argument("--failed", action="store_const", dest="order", const="failed", help=text)
    which.add_argument("--episode", metavar="ID", help="this one, for example 221.0.1")
    text = "how many episodes; default: 1"
    parser.add_argument("--count", type=int, default=1, metavar="K", help=text)
    text = "the sampled tokens one by one, with version, staleness and log-prob, instead of the messages"
    parser.add_argument("--tokens", action="store_true", help=text)


def show(options: argparse.Namespace) -> int:
    if not 0 < options.count <= COUNT_LIMIT:
        raise ConfigError(f"--count {options.count}: allowed are 1 to {COUNT_LIMIT}")
    evaluation, order = options.evaluation, options.order or "newest"
    if options.episode and options.step is not None:
        raise ConfigError("--episode, --step: an episode is of one step; give one of the two")
    if evaluation is not None and options.step is not None:
        raise ConfigError("--evaluation, --step: an evaluation's label names its step; give one of the two")
    from ...dashboard.episodes import read_episode, select, select_evaluated
    from ..watched import open_played_run, open_run

    run, source = (
        (open_played_run(options.run), "training") if evaluation is None else (open_run(options.run), "evaluation")
    )
    page = _Page(run.reader_of(source), open_console(), tokens=options.tokens, evaluated=source == "evaluation")
    if options.episode:
        page.print(read_episode(run, options.episode, source))
        return 0
    if evaluation is None:
        found = select(run, options.step, order, options.count)
    else:
        found = select_evaluated(run, evaluation, order, options.count)
    page.line(found.title, "bold")
    for id in found.ids:
        page.print(read_episode(run, id, source))
    return 0


class _Page:
    """Prints episodes. Text of the run is printed as text: no markup, no control character of it reaches the terminal, and what its
    encoding has not is an escape. A pipe gets lines as they are; a terminal folds them."""

    def __init__(self, reader: TrajectoryReader, console: Console, *, tokens: bool, evaluated: bool) -> None:
        self._reader = reader
        self._console = console
        self._tokens = tokens
        self._evaluated = evaluated

    def line(self, text: str, style: str = "") -> None:
        encoding = self._console.encoding
        shown = printable(text).encode(encoding, "backslashreplace").decode(encoding)
        self._console.print(Text(shown, style), soft_wrap=not self._console.is_terminal)

    def print(self, episode: StoredEpisode) -> None:
        self._console.print()
        self.line(f"== episode {episode.id}", "bold")
        for text in _facts(episode, evaluated=self._evaluated):
            self.line(text)
        if episode.outcome is not None and not episode.outcome.trainable:
            self.line(f"failed: {episode.outcome.reason}", "bold red")
            self.line(episode.outcome.detail or "no reason was recorded")
        if not episode.branches:
            self.line("it left no tokens")
        for branch in episode.branches:
            if len(episode.branches) > 1:
                self._console.print()
                self.line(f"-- branch {branch.header.branch} of {len(episode.branches)}", "bold")
            if branch.position is None or self._reader.arrays(branch) is None:
                self.line(f"its tokens {self._reader.why_none(branch)}")
            elif self._tokens:
                self._print_tokens(branch)
            else:
                self._print_messages(branch)

    def _print_messages(self, branch: StoredTrajectory) -> None:
        for message in self._reader.conversation(branch):
            self._console.print()
            role = message.role or "given"
            name = f" {message.name}" if message.name else ""
            self.line(f"{role}{name}{_of_turn(branch, message)}", f"bold {COLORS.get(role, TOOLS)}")
            self.line(message.text)
            if message.malformed:
                self.line(f"(could not be read: {message.malformed})", "red")
            if message.cut:
                self.line(f"(cut after {len(message.text)} characters; --tokens has all of it)", "dim")

    def _print_tokens(self, branch: StoredTrajectory) -> None:
        from ...dashboard.trajectory import WINDOW

        self._console.print()
        self.line(COLUMNS, "bold")
        at = 0
        for turn in branch.header.turns:
            if turn.start > at:
                self.line(f"{at:8}  to {turn.start - 1}: not sampled", "dim")
            for start in range(turn.start, turn.end, WINDOW):
                end = min(start + WINDOW, turn.end)
                window = self._reader.window(branch.header.id, start, end)
                names = ("ids", "versions", "staleness", "logprobs", "loss", "texts")
                self.line("\n".join(_token_lines(start, zip(*(window[name] for name in names), strict=True))))
            at = turn.end
        if at < len(branch.header):
            self.line(f"{at:8}  to {len(branch.header) - 1}: not sampled", "dim")


def _facts(episode: StoredEpisode, *, evaluated: bool) -> list[str]:
    """Lines of what is known of an episode beside its tokens."""
    trained = f"trained in the batch that made version {episode.trained_at}" if episode.account == "trained" else ""
    because = f" ({episode.reason.replace('_', ' ')})" if episode.reason else ""
    state = trained or f"{episode.account.replace('_', ' ')}{because}"
    if not episode.branches:
        return [f"group {episode.group_id}, {episode.tokens} tokens generated by {episode.worker}, {state}"]
    first = episode.branches[0]
    h = first.header
    spans = [span for branch in episode.branches for span in branch.header.version_spans]
    versions = sorted({span.version for span in spans})
    withheld = f", withheld: {first.withheld}" if first.withheld else ""
    state = f"of the evaluation {first.request!r}" if evaluated else state
    turns = sum(_is_own(branch, turn.start) for branch in episode.branches for turn in branch.header.turns)
    sampled, longest = (
        sum(branch.header.sampled for branch in episode.branches),
        max(len(b.header) for b in episode.branches),
    )
    count = len(episode.branches)
    branches = f" in {count} branches, the longest has " if count > 1 else ", "
    lines = [
        f"task {h.task_id} of {h.env}, group {episode.group_id}",
        f"reward {reward(h.reward)}, {h.outcome.label} after {turns} turns in {_seconds(h.timings.get('total', 0.0))}",
        f"{sampled} tokens sampled{branches}{longest} with those given; {state}{withheld}",
    ]
    if versions:
        ages = [first.learner_version - version for version in reversed(versions)]
        age = "" if evaluated else f", staleness {_range(ages)}"
        lines.append(f"sampled by version {_range(versions)}{age}")
    if h.metrics:
        lines.append(", ".join(f"{name} {value:g}" for name, value in h.metrics.items()))
    return lines


def _of_turn(branch: StoredTrajectory, message: ShownMessage) -> str:
    if message.turn is None:
        return ""
    turn = branch.header.turns[message.turn]
    versions = sorted({span.version for span in branch.header.version_spans if turn.start <= span.start < turn.end})
    if not versions:
        return f", turn {message.turn + 1}: sampled in another branch"
    took = f", {_seconds(turn.queued_s + turn.first_s + turn.decode_s)}" if turn.asked else ""
    return f", turn {message.turn + 1}: version {_range(versions)}, {turn.end - turn.start} tokens, {turn.finish_reason}{took}"


def _is_own(branch: StoredTrajectory, start: int) -> bool:
    """Whether the turn that begins there was sampled in this branch."""
    return any(span.start <= start < span.end for span in branch.header.version_spans)


def _token_lines(start: int, rows: Iterable[tuple[int, int, int, float, int, str]]) -> Iterable[str]:
    for number, (id, version, staleness, logprob, loss, text) in enumerate(rows, start):
        shown = printable(text.replace("\\", "\\\\")).replace("\n", "\\n").replace("\t", "\\t")
        yield f"{number:8}  {id:7}  {version:7}  {staleness:9}  {logprob:8.3f}  {LOSS[loss]:4}  {shown}"


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else duration(seconds)
