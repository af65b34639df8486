"""The accounts by SQL: what they say of a file, and that they notice where it contradicts itself."""

from __future__ import annotations

import contextlib
import io
import json
import sqlite3
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from slipstream.buffer.admission import ReplayCounters
from slipstream.buffer.group_table import Episode, Group
from slipstream.buffer.ledger import Counts, Ledger, VersionLedgers, Withheld, total_of
from slipstream.buffer.ledger_report import ledger_report, ledgers_by_version
from slipstream.buffer.schema import SCHEMA_VERSION
from slipstream.buffer.segments import segments_path
from slipstream.buffer.store import Store, WriteBatch
from slipstream.buffer.trajectory import FINISHED, TOKEN_BYTES
from slipstream.chaos.command import _ledger_check
from slipstream.errors import StoreError
from slipstream.launch.cli.ledger import print_report
from slipstream.launch.cli.main import main
from slipstream.tests.episodes import trajectory_of
from slipstream.tests.stores import entire, new_trajectory


def sql(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        assert db.execute(statement).rowcount == 1


def file_of(path: Path, *episodes: Episode) -> Path:
    """A buffer that holds `episodes`, with arrays for what they kept."""
    groups: dict[int, Group] = {}
    for e in episodes:
        group = int(e.id.split(".")[0])
        groups.setdefault(group, Group(group, episodes={})).episodes[e.id] = e
    store = Store(path)
    sent = [new_trajectory(e.id, trajectory_of(e.id, e.kept)) for e in episodes if e.kept]
    store.save(WriteBatch.of(ReplayCounters(next_group=len(groups)), entire(*groups.values()), sent))
    store.close()
    return path


def in_flight(name: str, generated: Counts) -> Episode:
    return Episode(name, generated=generated)


def delivered(name: str, generated: Counts, kept: Counts, *, withheld: Withheld | None = None) -> Episode:
    return Episode(name, account="ready", generated=generated, kept=kept, withheld=withheld, settled=True)


def trained(
    name: str, generated: Counts, kept: Counts, loss_from: int | None, withheld: Withheld | None = None
) -> Episode:
    return Episode(
        name, "", "trained", generated, kept, settled=True, loss_from=loss_from, withheld=withheld, outcome=FINISHED
    )


def discarded(name: str, generated: Counts, reason: str) -> Episode:
    return Episode(name, account="discarded", generated=generated, reason=reason, settled=True)


EPISODES = (
    in_flight("0.0.0", {1: 5, 2: 6}),
    in_flight("0.0.1", {}),
    delivered("1.0.0", {1: 10, 2: 3}, {1: 8, 2: 3}),
    trained("2.0.0", {0: 4, 1: 9}, {0: 4, 1: 7}, loss_from=1),
    trained("2.0.1", {1: 100}, {1: 100}, None, "late"),
    trained("2.0.2", {1: 5}, {1: 4}, None, "baseline"),
    trained("2.0.3", {0: 1, 1: 5}, {0: 1, 1: 5}, None, "filtered"),
    delivered("1.0.1", {2: 5}, {2: 5}, withheld="filtered"),
    discarded("3.0.0", {2: 40}, "failed_tool"),
    discarded("3.0.1", {2: 2}, "stale"),
)


def test_every_token_is_in_one_account_of_its_version(tmp_path: Path) -> None:
    accounts = ledger_report(file_of(tmp_path / "buffer.sqlite", *EPISODES))
    assert accounts.balances
    assert accounts.by_version == {
        0: Ledger(generated=5, withheld={"stale": 4, "filtered": 1}),
        1: Ledger(
            generated=134,
            in_flight=5,
            ready=8,
            trained=7,
            withheld={"late": 100, "baseline": 4, "filtered": 5},
            discarded={"unused": 5},
        ),
        2: Ledger(generated=56, in_flight=6, ready=8, discarded={"failed_tool": 40, "stale": 2}),
    }
    assert accounts.total == total_of(accounts.by_version.values())
    assert ledgers_by_version(tmp_path / "buffer.sqlite") == accounts.by_version


def test_lengths_are_counted_in_powers_of_two_and_their_skew_is_told(tmp_path: Path) -> None:
    accounts = ledger_report(file_of(tmp_path / "buffer.sqlite", *EPISODES))
    assert {length: ledger.generated for length, ledger in accounts.by_length.items()} == {
        2: 2,
        4: 16,
        8: 37,
        32: 40,
        64: 100,
    }
    assert accounts.by_length[64] == Ledger(generated=100, withheld={"late": 100})
    assert accounts.trained_length == 13
    assert accounts.generated_length == pytest.approx(
        (11**2 + 13**2 + 13**2 + 100**2 + 5**2 + 6**2 + 5**2 + 40**2 + 2**2) / 195
    )


def test_a_run_that_generated_nothing_has_empty_accounts(tmp_path: Path) -> None:
    accounts = ledger_report(file_of(tmp_path / "buffer.sqlite"))
    assert (accounts.total, accounts.by_version, accounts.by_length) == (Ledger(), {}, {})
    assert (accounts.generated_length, accounts.trained_length, accounts.balances) == (0.0, None, True)


def test_the_running_books_are_told_the_same(tmp_path: Path) -> None:
    books = VersionLedgers()
    for e in EPISODES:
        books.add_generated(e.generated)
        for account, counts in e.accounts():
            books.add(account, counts)
    assert books.gap() == ""
    assert books.by_version == ledgers_by_version(file_of(tmp_path / "buffer.sqlite", *EPISODES))
    assert VersionLedgers(books.by_version).total == books.total


def test_what_is_told_as_json_is_the_total_and_the_rest_by_name(tmp_path: Path) -> None:
    reported = ledger_report(file_of(tmp_path / "buffer.sqlite", *EPISODES)).to_builtins()
    assert (reported["generated"], reported["trained"], reported["closes"], reported["miscounted"]) == (195, 7, True, 0)
    assert reported["withheld"] == {"stale": 4, "late": 100, "baseline": 4, "filtered": 6}
    assert reported["discarded"] == {"unused": 5, "failed_tool": 40, "stale": 2}
    assert set(reported["by_version"]) == {"0", "1", "2"}


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE trajectories SET length = length - 1 WHERE id = '1.0.0.0'",
        "DELETE FROM trajectories WHERE id = '2.0.0.0'",
        """UPDATE episodes SET kept = '{"0":5,"1":6}' WHERE id = '2.0.0'""",  # of 4 of version 0
        """UPDATE episodes SET kept = '{"1":8,"7":3}' WHERE id = '1.0.0'""",  # of a version that it has nothing of
        """UPDATE episodes SET generated = '{"1":10,"2":4}' WHERE id = '1.0.0'""",
        """UPDATE episodes SET generated = '{"2":41}' WHERE id = '3.0.0'""",
        "UPDATE episodes SET account = 'gone' WHERE id = '3.0.0'",
    ],
)
def test_a_row_that_contradicts_the_accounts_is_counted(tmp_path: Path, statement: str) -> None:
    path = file_of(tmp_path / "buffer.sqlite", *EPISODES)
    assert ledger_report(path).miscounted == 0
    sql(path, statement)
    accounts = ledger_report(path)
    assert accounts.miscounted == 1
    assert not accounts.balances
    assert accounts.to_builtins()["closes"] is False


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (None, "closes"),
        (
            "UPDATE episodes SET account = 'gone' WHERE id = '3.0.0'",
            "DOES NOT CLOSE\nepisodes with another number of sampled tokens than the ledger has for them: 1",
        ),
    ],
)
def test_the_command_says_whether_the_ledger_closes_and_where_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], statement: str | None, said: str
) -> None:
    path = file_of(tmp_path / "buffer.sqlite", *EPISODES)
    if statement:
        sql(path, statement)
    status = 1 if statement else 0
    assert main(["ledger", str(tmp_path)]) == status
    assert f"\n{said}\n" in capsys.readouterr().out
    assert main(["ledger", str(tmp_path), "--json"]) == status
    assert json.loads(capsys.readouterr().out)["closes"] is not bool(status)
    check = _ledger_check(tmp_path)
    assert (check.examined, check.problems) == (195, ("it does not close",) if statement else ())


def test_every_account_is_in_the_ledger_whatever_the_width_and_in_one_table_without_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = ledger_report(file_of(tmp_path / "buffer.sqlite", *EPISODES))
    reasons = ("baseline", "filtered", "late", "stale", "failed", "unused")
    for width in (60, 70, 80, 100):
        console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        print_report(report, "length", console)
        tables = [line for line in console.file.getvalue().splitlines() if line.startswith(("┏", "└"))]
        assert all(line.endswith(("┓", "┘")) and len(line) <= width for line in tables)
        assert all(reason in console.file.getvalue() for reason in reasons)
    assert main(["ledger", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (total,) = (line for line in lines if line.split()[1:2] == ["all"])
    assert [int(cell) for cell in total.split("│")[2:-1]] == [195, 11, 16, 7, 4, 6, 100, 4, 40, 2, 5]


def test_the_verdict_names_the_versions_whose_tokens_are_in_no_account(tmp_path: Path) -> None:
    report = ledger_report(file_of(tmp_path / "buffer.sqlite", *EPISODES))
    lost = msgspec.structs.replace(report.by_version[2], ready=0)
    report = msgspec.structs.replace(report, by_version=report.by_version | {2: lost})
    console = Console(file=io.StringIO(), width=80)
    print_report(report, "version", console)
    assert "\nDOES NOT CLOSE\nversion 2: 56 generated, 48 accounted for\nmean" in console.file.getvalue()


def test_a_loss_mask_that_contradicts_the_accounts_is_counted(tmp_path: Path) -> None:
    path = file_of(tmp_path / "buffer.sqlite", *EPISODES)
    (segment,) = segments_path(path).iterdir()
    with contextlib.closing(sqlite3.connect(path)) as db:
        position, length = db.execute("SELECT arrays, length FROM trajectories WHERE id = '1.0.0.0'").fetchone()
    with segment.open("r+b") as file:
        file.seek(position + (TOKEN_BYTES - 1) * length)
        file.write(bytes(length))
    assert ledger_report(path).miscounted == 1
    segment.unlink()  # bytes that are gone contradict nothing
    assert ledger_report(path).balances


def test_arrays_that_were_dropped_contradict_nothing(tmp_path: Path) -> None:
    path = file_of(tmp_path / "buffer.sqlite", *EPISODES)
    sql(path, "UPDATE trajectories SET arrays = NULL WHERE id = '2.0.0.0'")
    assert ledger_report(path).balances


def test_the_accounts_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a #1 50%?.sqlite"  # characters that mean something in an address
    store = Store(path)
    assert path.exists()
    store.save(
        WriteBatch.of(ReplayCounters(next_group=1), entire(Group(0, episodes={"0.0.0": in_flight("0.0.0", {0: 4})})))
    )
    assert ledger_report(path).total == Ledger(generated=4, in_flight=4)
    store.save(
        WriteBatch.of(
            ReplayCounters(next_group=1),
            entire(Group(0, episodes={"0.0.0": discarded("0.0.0", {0: 6}, "failed_tool")})),
        )
    )
    assert ledger_report(path).total == Ledger(generated=6, discarded={"failed_tool": 6})


def test_a_reader_changes_nothing(tmp_path: Path) -> None:
    path = file_of(tmp_path / "buffer.sqlite", *EPISODES)
    before = path.read_bytes()
    ledger_report(path)
    assert path.read_bytes() == before


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    for reading in (ledger_report, ledgers_by_version):
        with pytest.raises(StoreError, match="there is no buffer at"):
            reading(path)
    assert not path.exists()


def test_a_database_without_the_tables_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE other (x)")
    with pytest.raises(StoreError, match="has schema 0, this program knows") as error:
        ledger_report(path)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    with pytest.raises(StoreError, match=r"cannot read the buffer .*: no such table") as error:
        ledger_report(path)
    assert str(path) in str(error.value)
