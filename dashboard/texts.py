"""The dashboard's texts of tokens, by the tokenizer that the run keeps a copy of, else by that of its model's folder.

Invariants:
- A character that several tokens make together belongs to the last of them; the others have no text.
- Where there is no tokenizer, numbers are shown, and nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ..buffer.image_files import FOLDER
from ..buffer.trajectory import Segment
from ..common.images import PlacedImage

TOKENIZER = "tokenizer"  # folder of a run: the copy of its model's tokenizer
FILE = "tokenizer.json"
CUT = 20_000  # characters of a message; the tokens have all of it
ROLES = (
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "ipython",
    "function",
    "model",
)  # as chat formats spell them


class ShownMessage(msgspec.Struct, frozen=True):
    """Tokens `[start, end)`. `role` is the message's, or what the chat format has there between its control tokens, "" where that
    is no role; `turn` is the number of the turn that sampled it, None for what the policy was given."""

    start: int
    end: int
    role: str
    turn: int | None
    text: str
    cut: bool  # whether the text ends before the tokens do
    name: str = ""  # of the tool that answered
    malformed: str = ""  # why a sampled message could not be read


class TokenTexts:
    def __init__(self, folder: Path, model: str) -> None:
        """Of the run in `folder`, whose config says `model` for `model.path`."""
        found = (path for path in (folder / TOKENIZER / FILE, Path(model) / FILE) if path.is_file())
        self.source = next(found, None)
        self._tokenizer = None if self.source is None else Tokenizer.from_file(str(self.source))
        added = {} if self._tokenizer is None else self._tokenizer.get_added_tokens_decoder()
        self._control = frozenset(id for id, token in added.items() if token.special)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; empty for the first ones of a character that several make."""
        if self._tokenizer is None:
            return [f"[{id}]" for id in ids]
        stream = DecodeStream(skip_special_tokens=False)
        return [self._step(stream, id) for id in ids]

    def text(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return " ".join(f"[{id}]" for id in ids)
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def messages(
        self,
        ids: Sequence[int],
        turns: Sequence[tuple[int, int]],
        segments: Sequence[Segment] = (),
        cut: int = CUT,
        images: Sequence[PlacedImage] = (),
    ) -> list[ShownMessage]:
        """A trajectory as a conversation: its messages, where they are recorded; else its turns, and what is between them, split at
        the control tokens of the chat format. No text has more than `cut` characters; an image is the name of its file in it."""
        if any(segment.role != "assistant" for segment in segments):
            return self._recorded(ids, turns, segments, cut, images)
        found: list[ShownMessage] = []
        at = 0
        for number, (start, end) in enumerate(turns):
            found += self._context_messages(ids, at, start, cut)
            while end > start and ids[end - 1] in self._control:
                end -= 1  # the control token that ends the turn belongs to the format
            found.append(self._message(ids, start, end, "assistant", number, cut))
            at = end
        return found + self._context_messages(ids, at, len(ids), cut)

    def _recorded(
        self,
        ids: Sequence[int],
        turns: Sequence[tuple[int, int]],
        segments: Sequence[Segment],
        cut: int,
        images: Sequence[PlacedImage],
    ) -> list[ShownMessage]:
        number = {start: turn for turn, (start, _) in enumerate(turns)}
        known = {segment.start for segment in segments}
        # Completions of raw tokens are no messages.
        raw = (Segment(start, end, "assistant") for start, end in turns if start not in known)
        found = list[ShownMessage]()
        for one in sorted((*segments, *raw), key=lambda segment: segment.start):
            end = one.end
            while one.role == "assistant" and end > one.start and ids[end - 1] in self._control:
                end -= 1
            message = self._message(ids, one.start, end, one.role, number.get(one.start), cut)
            if seen := [image for image in images if one.start <= image.start and image.end <= end]:
                text = self._with_images(ids, one.start, end, seen)
                message = msgspec.structs.replace(message, text=text[:cut], cut=len(text) > cut)
            found.append(msgspec.structs.replace(message, name=one.name, malformed=one.malformed))
        return found

    def _context_messages(self, ids: Sequence[int], start: int, end: int, cut: int) -> list[ShownMessage]:
        """What the policy was given in `[start, end)`."""
        cuts = [i for i in range(start, end) if ids[i] in self._control]
        found, role = list[ShownMessage](), ""
        for begin, until in zip([start, *(i + 1 for i in cuts)], [*cuts, end], strict=True):
            message = self._message(ids, begin, until, role, None, cut)
            first, _, rest = message.text.strip().partition("\n")
            if begin > start and first.strip() in ROLES:
                role, text = first.strip(), rest
            else:
                text = message.text
            if text.strip():
                found.append(msgspec.structs.replace(message, role=role, text=text.strip()))
                role = ""
        return found

    def _message(self, ids: Sequence[int], start: int, end: int, role: str, turn: int | None, cut: int) -> ShownMessage:
        most = start + cut  # a token has a character at least, nearly always
        text = self.text(ids[start : min(end, most)])
        return ShownMessage(start, end, role, turn, text[:cut], end > most or len(text) > cut)

    def _with_images(self, ids: Sequence[int], start: int, end: int, images: Sequence[PlacedImage]) -> str:
        """Without the tokens that the chat format has around an image."""
        texts, at = list[str](), start
        for image in images:
            texts += [
                self.text(self._without_control(ids[at : image.start])),
                f"[{FOLDER}/{image.name[:2]}/{image.name}]",
            ]
            at = image.end
        return "".join([*texts, self.text(self._without_control(ids[at:end]))])

    def _without_control(self, ids: Sequence[int]) -> list[int]:
        return [id for id in ids if id not in self._control]

    def _step(self, stream: DecodeStream, id: int) -> str:
        assert self._tokenizer is not None
        return stream.step(self._tokenizer, id) or ""
