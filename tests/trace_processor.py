"""Perfetto's trace processor, the program by which its page reads a trace and answers SQL about it. The build, v20.1, knows the
flows of an older format only."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from slipstream.tests.npm_packages import TRACE_PROCESSOR

SCRIPT = Path(__file__).with_suffix(".js")
ANSWER_S = 60.0


def rows(trace: Path, sql: str) -> list[tuple[Any, ...]]:
    """What the query selects in a trace: whole numbers, floats, texts, None. Fails with what the program says of either."""
    page = TRACE_PROCESSOR.installed() / "node_modules" / "@pinpoint-apm" / "perfetto-ui"
    protos: Any = ProtoFactory(PlatformDelegate())
    kind = protos.TraceProcessorRpc
    requests = protos.TraceProcessorRpcStream()
    requests.msg.add(seq=0, request=kind.TPM_APPEND_TRACE_DATA, append_trace_data=trace.read_bytes())
    requests.msg.add(seq=1, request=kind.TPM_FINALIZE_TRACE_DATA)
    requests.msg.add(seq=2, request=kind.TPM_QUERY_STREAMING, query_args=protos.QueryArgs(sql_query=sql))
    command = ("node", str(SCRIPT), str(page))
    asked = requests.SerializeToString()
    done = subprocess.run(command, input=asked, capture_output=True, timeout=ANSWER_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    replies = protos.TraceProcessorRpcStream.FromString(done.stdout)
    assert [reply.append_result.error for reply in replies.msg if reply.HasField("append_result")] == [""]
    results = [reply.query_result for reply in replies.msg if reply.HasField("query_result")]
    assert results, done.stderr.decode()
    assert not any(result.error for result in results), results
    cells = [cell for result in results for batch in result.batch for cell in _cells(batch)]
    width = len(results[0].column_names)
    return [tuple(cells[at : at + width]) for at in range(0, len(cells), width)]


def _cells(batch: Any) -> list[Any]:
    """The values of a QueryResult.CellsBatch, row after row: each kind of them is a list of its own."""
    texts = batch.string_cells.split("\0")
    of = {
        batch.CELL_NULL: iter(lambda: None, 0),
        batch.CELL_VARINT: iter(batch.varint_cells),
        batch.CELL_FLOAT64: iter(batch.float64_cells),
        batch.CELL_STRING: iter(texts),
    }
    return [next(of[cell]) for cell in batch.cells]
