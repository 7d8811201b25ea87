"""What a training step draws at random, as dropout does: that of one process which takes the global batch at once.

    key       the run's seed, the step, and which of a forward's draws it is (`random.fresh`: of torch's generator,
              which the step has seeded, so what is recomputed draws the same)
    element   its number in the tensor of the whole global batch (`DrawNumbers`): a sample's masks are its own,
              on whatever rank and in whatever micro-batch it is
    stages    of a pipeline go on counting where the one before has ended

A derived model draws so by its programs (`training.mesh.tensor_parallel`), a plain one within `DrawMode`. Where it is
not known which elements are a sample's, and for operators that nothing is known of, it is the micro-batch that has
numbers of its own, which `drawn_apart` tells.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_leaves  # pyright: ignore[reportUnknownVariableType]

from tangram.errors import UserError
from tangram.models.building.twin import without_memory
from tangram.models.capturing.reasons import place_and_reason
from tangram.relayout.exchange.peers import Peers
from tangram.schema.plan import Plan
from tangram.sharding.local_ops.random_numbers import DrawNumbers, Samples
from tangram.sharding.local_ops.random_ops import DrawMode
from tangram.sharding.local_ops.samples import draws_of, places_of
from tangram.training.data import RankBatches
from tangram.training.mesh import modes
from tangram.training.mesh.tensor_parallel import DerivedModel
from tangram.training.mesh.written_parameters import keep_written


class Drawer:
    """Looks at the inputs of a plain model: whether it draws, and where samples stand in what it draws for."""

    def __init__(self, part: nn.Module, compiled: bool) -> None:
        """Of a model, or a stage of one, that has no programs; before it is compiled, recomputed and cut."""
        self.numbers = DrawNumbers()
        self.draws: bool | None = False if compiled else None
        """Whether it has drawn so far; None: it is not known, and the step is looked at. While one is, torch compiles
        nothing."""
        self.now: Draws | None = None
        """The step that is under way."""
        self._part = part
        self._known: dict[Any, Mapping[tuple[int, ...], int]] = {}
        self._template: nn.Module | None = None
        self.unknown = ""
        """Why it is not known where samples stand in what it draws for; "" where it is."""
        self._told = ""
        try:
            self._template = without_memory(part)
        except UserError as error:  # a model that cannot be copied
            self.draws, self.unknown = None, str(error)
        self._modules: list[nn.Module] = [*part.modules()]
        self._dropping: list[Any] = [module for module in self._modules if hasattr(module, "p")]
        part.forward = self._watched(part.forward)

    def _watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.numbers.samples is not None and self._template is not None:
                self._look(args, kwargs)
            return forward(*args, **kwargs)

        return run

    def _look(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        samples = self.numbers.samples
        assert samples is not None
        leaves: list[Any] = tree_leaves((args, kwargs))
        sizes = tuple(modes.size_of(x) for x in leaves)
        probabilities = tuple([module.p for module in self._dropping])
        key = samples.rows, sizes, tuple([module.training for module in self._modules]), probabilities
        if key not in self._known:
            self._known[key] = self._learned(args, kwargs, samples.rows)
        self.numbers.after = self._known[key]
        if self.draws is not False and self.now is not None:
            self.now.engage()

    def _learned(self, args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> Mapping[tuple[int, ...], int]:
        """Where samples stand in what is drawn; nowhere of a model that does not run without memory, which may draw."""
        assert self._template is not None
        written: set[str] = set()
        try:
            modes.follow(self._template, self._part)
            draws, after, self.unknown = places_of(self._template, args, kwargs, count, written)
        except Exception as error:  # noqa: BLE001  whatever a model's code raises where tensors have no values
            self.draws = self.draws or None
            self.unknown = f"without values it does not run, {place_and_reason(error)}"
            return {}
        keep_written(self._part, written)
        self.draws = self.draws or draws
        return after

    def tell(self) -> None:
        """It has drawn for a part of the batch: say once why that is not what one process draws, if it is not."""
        if self.unknown != self._told:
            self.numbers.apart = self._told = self.unknown


def seed_for(device: torch.device, seed: int, step: int, skip: int = 0) -> None:
    """Seed the generators of this process and of its device for a step, which begins with this sample of the job.

    `skip`: how many draws others have had before in the same forward.
    """
    number = int.from_bytes(hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=7).digest())
    modes.seed_generators(device, number)
    if skip:
        with _disable_current_modes():
            torch.empty(skip, dtype=torch.int64).random_(generator=torch.random.default_generator)


def _state() -> bytes:
    """Of torch's generator, also in a run without memory."""
    with _disable_current_modes():
        return torch.random.default_generator.get_state().numpy().tobytes()


DrawSource = Drawer | DerivedModel
"""What draws in a forward: a plain model or stage, or a derived one by its programs."""


def drawn_apart(sources: Iterable[tuple[str, DrawSource]], peers: Peers | None = None) -> list[str]:
    """A sentence, once, for each of these, by name, that has drawn numbers which are not those of one process.

    `peers`: other ranks with other stages, whose sentences are told on all. Collective over them.
    """
    found: list[str] = []
    for name, source in sources:
        if source.numbers.apart:
            found.append(
                f"some of what {name} draws at random is each micro-batch's own, and not what one process draws for "
                f"the whole batch: {source.numbers.apart}"
            )
            source.numbers.apart = ""
    return [*dict.fromkeys(sentence for some in (peers or Peers()).all_words(found) for sentence in some)]


class Draws:
    """What one step draws: is told of which micro-batch and stage that is which runs next."""

    def __init__(self, sources: Sequence[DrawSource], seed: int, batches: RankBatches, stack: ExitStack) -> None:
        self._sources, self._seed, self._batches, self._stack = sources, seed, batches, stack
        self._drawers = [source for source in sources if isinstance(source, Drawer)]
        self._mode: DrawMode | None = None
        self._numbers = DrawNumbers()
        self._state: bytes | None = None
        if any(drawer.draws is not False for drawer in self._drawers):
            self.engage()

    def engage(self) -> None:
        """Look at every operator from here to the end of the step."""
        if self._mode is None:
            self.refuse_unseen()
            self._mode = self._stack.enter_context(DrawMode(numbers=self._numbers))

    def begin(self, micro: int, source: DrawSource | None = None, skip: int = 0) -> None:
        """The forward of a micro-batch begins: of a model, or of the stage whose `source` this is.

        `skip`: how many draws other stages have had in it.
        """
        self.refuse_unseen()
        seed_for(self._batches.micro[micro].inputs_BS.device, self._seed, self._batches.begin, skip)
        if self._mode is None and self._drawers:
            self._state = _state()
        for one in self._sources if source is None else [source]:
            self.turn(micro, one)

    def turn(self, micro: int, source: DrawSource) -> None:
        """What runs next is of this micro-batch: its forward, or its backward, which may recompute some of it."""
        rows, first = self._batches.micro[micro].inputs_BS.shape[0], self._batches.firsts[micro]
        source.numbers.samples = Samples(first - self._batches.begin, rows, self._batches.total)
        if isinstance(source, Drawer):
            source.now, self._numbers = self, source.numbers
            if self._mode is not None:
                self._mode.numbers = source.numbers

    def refuse_unseen(self) -> None:
        """Raise UserError where something has drawn in a step of which nothing was known to draw."""
        state, self._state = self._state, None
        if state is not None and state != _state():
            raise UserError(
                "random numbers were drawn in this step, though none in those before it, by code that is not looked "
                "at: draw them in every step, or by a torch.Generator of your own"
            )

    def end(self) -> None:
        """No micro-batch runs any more."""
        self.refuse_unseen()
        in_parts = any(batch.inputs_BS.shape[0] < self._batches.total for batch in self._batches.micro)
        for drawer in self._drawers:
            drawer.draws = bool(drawer.draws) or (self._mode is not None and self._mode.stream > 0)
            if drawer.draws and in_parts:
                drawer.tell()


@contextmanager
def drawing(sources: Sequence[DrawSource], seed: int, batches: RankBatches) -> Generator[Draws]:
    """Around the forwards and backwards of a step: of a model, or of the stages of one (`ParallelModel.draw_sources`).

    Before each forward call `begin` of what this gives. What runs within it draws as one process does that takes the
    global batch at once, in a loop of one's own as in `train_step`. Raises UserError where code draws unseen.
    """
    with ExitStack() as stack:
        draws = Draws(sources, seed, batches, stack)
        try:
            yield draws
            draws.end()
        finally:
            for source in sources:
                source.numbers.samples = None


def counts_of_stages(model: nn.Module, plan: Plan) -> Sequence[int]:
    """How many draws the modules of the stages before have had when a forward comes to each. `model`: with all stages.

    What code between modules draws before it, each stage draws again for itself. Raises UserError where the forward
    does not run without values.
    """
    if plan.pipeline is None:
        return ()
    ids = torch.empty(2, plan.data.sequence, dtype=torch.long, device="meta")
    template = without_memory(model).train()
    try:
        found = draws_of(template, (), {"input_ids": ids, "use_cache": False}, {}, set())
    except Exception as error:
        raise UserError(
            f"{type(model).__name__} does not run without values, so it is not known what each stage of a pipeline "
            f"draws: {place_and_reason(error)}"
        ) from error
    stage_of = {name: number for number, names in enumerate(plan.pipeline.stages) for name in names}
    counted: Counter[int] = Counter()
    for draw in found:
        path = draw.module
        while path and path not in stage_of:
            path = path.rpartition(".")[0]
        if path in stage_of:
            counted[stage_of[path]] += 1
    return [sum(counted[before] for before in range(stage)) for stage in range(len(plan.pipeline.stages))]
