"""The tool `search`: passages from an index on this host, or from a server that speaks Search-R1's `/retrieve`.

Invariants:
- Every query finds something or nothing; none is an error of syntax: operators are words like any others.
- A server that fails, or answers otherwise, is a ToolError and never text that the policy reads.
- An index in a folder is whole or absent, and is built once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ..common.fsio import replace_directory
from ..errors import ConfigError, ToolError, describe
from .base import JSON, ToolSpec
from .tools import InvalidCall, Tool, in_thread

if TYPE_CHECKING:
    import tantivy

RETRIEVE_S = 30.0  # longest answer of a server
HEAP = 64 << 20  # bytes that building an index may use
WORDS = 64  # of a query, the first ones: a policy may search for a whole page
LONGEST = 4000  # characters of an answer
BODY = "body"


class Passage(msgspec.Struct, frozen=True):
    """A passage that was found; a higher score is a better match."""

    text: str
    score: float


class Retriever(Protocol):
    """What finds passages."""

    async def search(self, query: str, count: int) -> list[Passage]:
        """At most `count` passages, best first. Raises ToolError."""
        ...


class SearchIndex:
    """Passages in an embedded full-text index (tantivy, BM25, English stems).

    Args:
        passages: texts, or a JSONL file of them: each line a text, or an object with `contents` (as Search-R1's corpora) or `text`.
        folder: where the index stays; None keeps it in memory. An index that is there is opened, and `passages` not read.

    Raises:
        ConfigError: tantivy is not installed, or a line of the file has no text.
    """

    def __init__(self, passages: Iterable[str] | Path, folder: Path | None = None) -> None:
        try:
            import tantivy
        except ImportError:
            raise ConfigError("the tool `search` needs the package tantivy; run `pip install tantivy`") from None
        schema = tantivy.SchemaBuilder().add_text_field(BODY, stored=True, tokenizer_name="en_stem").build()
        if folder is None:
            self._index = tantivy.Index(schema)
            _fill(self._index, passages)
        else:
            if not (folder / "meta.json").exists():
                part = folder.with_name(f".{folder.name}.part")
                part.mkdir(parents=True, exist_ok=True)
                _fill(tantivy.Index(schema, path=str(part), reuse=False), passages)
                replace_directory(folder, part)
            self._index = tantivy.Index.open(str(folder))
        self._index.reload()
        self._searcher = self._index.searcher()

    def __len__(self) -> int:
        return self._searcher.num_docs

    async def search(self, query: str, count: int) -> list[Passage]:
        return await in_thread(self.find, query, count)

    def find(self, query: str, count: int) -> list[Passage]:
        """As `search`, in the caller's thread."""
        words = re.findall(r"\w+", query.lower())[:WORDS]
        if not words:
            return []
        parsed, _ = self._index.parse_query_lenient(" ".join(words), [BODY])
        hits = self._searcher.search(parsed, count).hits
        return [Passage(str(self._searcher.doc(address)[BODY][0]), float(score)) for score, address in hits]


class RetrieveServer:
    """A server of passages at `url`, for example `http://10.0.0.7:8000/retrieve`."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def search(self, query: str, count: int) -> list[Passage]:
        import aiohttp  # here: an environment in an interpreter of its own may be without it

        body = {"query": query, "queries": [query], "topk": count, "return_scores": True}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(RETRIEVE_S)) as session,
                session.post(self._url, json=body) as response,
            ):
                answer = await response.read()
                if response.status != 200:
                    raise ToolError(f"{self._url} answered {response.status}: {answer[:200].decode(errors='replace')}")
                found = json.loads(answer)["result"]
                found = found[0] if found and isinstance(found[0], list) else found
                return [Passage(_text(hit["document"]), float(hit["score"])) for hit in found[:count]]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ToolError(f"{self._url} does not answer: {describe(error)}") from error
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ToolError(f"{self._url} gave no answer of /retrieve's form: {describe(error)}") from error


def search_tool(retriever: Retriever, count: int = 3, *, longest: int = LONGEST) -> Tool:
    """The tool `search`: the `count` best passages, together at most `longest` characters. Episodes may share it."""

    async def run(arguments: JSON) -> str:
        query = arguments.get("query")
        if not isinstance(query, str) or len(arguments) != 1:
            raise InvalidCall('the tool search takes {"query": "..."}')
        found = await retriever.search(query, count)
        each = longest // max(1, len(found))
        return "\n\n".join(f"[{i}] {hit.text[:each]}" for i, hit in enumerate(found, 1)) or "[nothing was found]"

    parameters: JSON = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    return Tool(ToolSpec("search", "Search passages of text.", parameters), run)


def _fill(index: tantivy.Index, passages: Iterable[str] | Path) -> None:
    import tantivy

    writer = index.writer(HEAP, 1)
    for passage in _lines(passages) if isinstance(passages, Path) else passages:
        writer.add_document(tantivy.Document(**{BODY: passage}))
    writer.commit()
    writer.wait_merging_threads()


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield _text(msgspec.json.decode(line))
                except (msgspec.DecodeError, TypeError, KeyError) as error:
                    raise ConfigError(f"{path}, line {number}: no passage with `contents` or `text`: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _text(passage: Any) -> str:
    """The text of a passage as corpora and servers have it."""
    if isinstance(passage, dict):
        passage = passage["contents"] if "contents" in passage else passage["text"]
    if not isinstance(passage, str):
        raise TypeError(f"{type(passage).__name__} instead of a text")
    return passage
