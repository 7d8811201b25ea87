"""What a job's task makes of the rows of its sources: one row of a table for each task."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tangram.schema.job import DataPlan, Job
from tangram.schema.tuning import TaskName
from tangram.training.data.chat import chat_tokens
from tangram.training.data.pairs import pair_tokens
from tangram.training.data.tokens import Tokens, load_tokens

TOKENS: Mapping[TaskName, Callable[[Tokens, DataPlan], Tokens]] = MappingProxyType(
    {
        "pretrain": lambda tokens, data: tokens,
        "sft": chat_tokens,
        "dpo": pair_tokens,
    }
)


def tokens_of(job: Job) -> Tokens:
    """The tokens that a job asks for. Raises UserError as `load_tokens`, and where the task cannot take them."""
    return TOKENS[job.task](load_tokens(job.data, job.model.path), job.data)
