"""The text of a job, ready to be trained on: tokenised once by `prepare`, mapped by every rank with `open_corpus`."""

import hashlib
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tangram.errors import UserError
from tangram.planner.plan import DataPlan, SourcePlan
from tangram.training.data.samples import Split
from tangram.training.data.tokens import Tokens

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """The documents of every source, in the order of the plan, trained on and held out."""

    training: tuple[Split, ...]
    held_out: tuple[Split, ...]
    digest: str
    """A fixed text for the content, by which ranks and resumed runs know that they read the same."""
    fill: int
    """The token in places that count nothing."""

    def summary(self) -> str:
        """How much text it is, in words."""
        trained, kept = (
            f"{sum(len(split.end_D) for split in splits):,} documents, {sum(split.size for split in splits):,} tokens"
            for splits in (self.training, self.held_out)
        )
        return f"{trained}; held out {kept}"


def prepare(data: DataPlan, tokens: Tokens, on_event: Callable[[object], None]) -> None:
    """Tokenise what is not in the cache yet."""


def open_corpus(data: DataPlan, tokens: Tokens) -> Corpus:
    """Map the tokens that `prepare` has made."""
    training: list[Split] = []
    held_out: list[Split] = []
    digest = hashlib.blake2b(digest_size=16)
    for source in data.sources:
        kept: tuple[list[bytes], list[bytes]] = ([], [])
        for text in _documents(source):
            kept[held_out_by_content(text, data.held_out)].append(text)
        for splits, texts in zip((training, held_out), kept, strict=True):
            splits.append(_in_memory(texts, tokens))
            digest.update(splits[-1].read(0, splits[-1].size).tobytes())
    return Corpus(tuple(training), tuple(held_out), digest.hexdigest(), tokens.end)


def held_out_by_content(text: bytes, share: float) -> bool:
    """Whether a document is held out: by its content alone, so copies go together and new documents move none."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest()) / 2**48 < share


def _documents(source: SourcePlan) -> list[bytes]:
    root = Path(sysconfig.get_path("stdlib")) if source.path == "stdlib" else Path(source.path)
    if not root.is_dir():
        raise UserError(f'the source "{root}" in data.sources does not exist')
    files = [
        path
        for path in sorted(root.glob(source.pattern or "**/*.py"))
        if path.is_file() and not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1])
    ]
    return [text for path in files if (text := path.read_bytes())]


def _in_memory(texts: list[bytes], tokens: Tokens) -> Split:
    begin = [] if tokens.begin is None else [tokens.begin]
    rows = [np.concatenate([begin, row, [tokens.end]]).astype(np.int64) for row in tokens.encode(texts)]
    everything = np.concatenate([np.zeros(0, np.int64), *rows])
    return Split(len(everything), np.cumsum([len(row) for row in rows], dtype=np.int64), lambda a, b: everything[a:b])
