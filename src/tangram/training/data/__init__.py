"""From files to batches: documents, tokens, packed samples, and a stream whose position no number of ranks changes.

files    what a source consists of  opened   what a file is          sources  documents of files
tokens   text <-> numbers           cache    tokens on disk, made once
samples  windows over documents    mix     sources by weight, in a shuffled order
corpus   what a job trains on      stream   what each rank gets of it
messages what rows say             answers  where a template writes the answers of conversations
chat     conversations -> numbers  tasks    what a job's task takes of these; preferences -> numbers
"""

from tangram.training.data.corpus import Corpus, measured_and_trained, open_corpus, prepare, repeats, times_seen
from tangram.training.data.files import list_files
from tangram.training.data.samples import IGNORE, Batch, Split
from tangram.training.data.stream import (
    RankBatches,
    Stream,
    batches_once,
    held_out_batches,
    held_out_samples,
    padding,
    sample_ids,
    shown_samples,
    step_batches,
    step_length,
    step_lengths,
    unigram_entropy,
)
from tangram.training.data.tasks import tokens_of
from tangram.training.data.tokens import BYTES, END, VOCABULARY, Tokens, load_tokens

__all__ = [
    "BYTES",
    "END",
    "IGNORE",
    "VOCABULARY",
    "Batch",
    "Corpus",
    "RankBatches",
    "Split",
    "Stream",
    "Tokens",
    "batches_once",
    "held_out_batches",
    "held_out_samples",
    "list_files",
    "load_tokens",
    "measured_and_trained",
    "open_corpus",
    "padding",
    "prepare",
    "repeats",
    "sample_ids",
    "shown_samples",
    "step_batches",
    "step_length",
    "step_lengths",
    "times_seen",
    "tokens_of",
    "unigram_entropy",
]
