"""The contracts of drafters, verifiers, schedulers and target loaders: the one file a plugin author reads.

A plugin's class derives from one of the four bases below, is registered by name through a hook
(`specfw.hookspecs`) and is built from its options once, at start. The decode loop then calls plain
methods of plain objects. Words are those of the glossary in `docs/reference/glossary.md`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from specfw.errors import ConfigError
from specfw.types import Guarantee, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from specfw.decoding.builder import DraftBuilder
    from specfw.decoding.draft import Draft
    from specfw.decoding.probabilities import NodeLaws
    from specfw.decoding.random import RandomSource
    from specfw.training.run import TrainingRun
    from specfw.training.texts import Shard

__all__ = [
    "API_VERSION",
    "DraftLimits",
    "Drafter",
    "Feedback",
    "LoadedTarget",
    "Outcome",
    "Quantization",
    "RankedRows",
    "ReadChunk",
    "RequestAhead",
    "RequestView",
    "Requirements",
    "Scheduler",
    "SchedulerView",
    "Scorer",
    "TargetInfo",
    "TargetLoader",
    "Trained",
    "Trainer",
    "Verifier",
]

API_VERSION = 1
"""The integer that a plugin states as `specfw_api`; raised when a contract changes incompatibly."""


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a drafter or scheduler may know of the target, handed to `attach` once, before any request."""

    name: str
    vocab_size: int
    """Width of a logits row; at least the tokenizer's size."""
    max_length: int
    """Longest sequence, prompt and output together, in tokens."""
    eos_token_ids: tuple[int, ...]
    tokenizer: Any
    """The target's tokenizer, or None for targets that speak token ids only."""
    model: Any
    """The target's module; for reading (embeddings, head, config), never for changing."""
    device: torch.device
    dtype: torch.dtype
    pass_seconds: Callable[[], Mapping[int, float]] | None = None
    """Seconds of a target pass by its rows: measured at the first call, unless the user's cache has them;
    None where nobody measures, as in certification."""


class RequestView(ABC):
    """One request as a component sees it. Read only; the same object from `begin` to `end`."""

    id: int
    tokens: Sequence[int]
    """Committed token ids: the prompt, then what was emitted; the last one is the draft's root."""
    prompt_length: int
    params: SamplingParams


@dataclass(eq=False)
class RequestAhead(RequestView):
    """A request as it would be, were a path of guesses accepted."""

    id: int
    tokens: Sequence[int]
    prompt_length: int
    params: SamplingParams

    @classmethod
    def after(cls, request: RequestView, path: Sequence[int]) -> RequestView:
        """The request with these tokens behind its own; itself if there are none."""
        if not path:
            return request
        tokens = [*request.tokens, *path]
        return cls(request.id, tokens, request.prompt_length, request.params)


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """How much may be drafted for one request in one step: nodes in all, depth, siblings.

    Extra rows count as nodes.
    """

    max_nodes: int = 0
    max_depth: int = 0
    max_width: int = 1

    def __and__(self, other: DraftLimits) -> DraftLimits:
        """The tighter of two limits, field by field."""
        return DraftLimits(
            min(self.max_nodes, other.max_nodes),
            min(self.max_depth, other.max_depth),
            min(self.max_width, other.max_width),
        )


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a drafter needs from the target pass beyond the tokens."""

    hidden_layers: tuple[int, ...] = ()
    """Indices into transformers' `hidden_states` (0 is the embedding output)."""
    top_k: int = 0
    """How many of the target's most likely tokens to hand over after every scored node; 0 for none."""
    draft_layers: tuple[int, ...] = ()
    """Layers of the target that drafts are run through, rising from 0; see `DraftBuilder.draft_states`."""

    def __or__(self, other: Requirements) -> Requirements:
        """All that either requires.

        Raises:
            ConfigError: both require draft layers, and not the same ones.
        """
        mine, theirs = self.draft_layers, other.draft_layers
        if mine and theirs and mine != theirs:
            raise ConfigError(
                f"drafters: expected one set of draft layers for all that draft together, got "
                f"{list(mine)} and {list(theirs)}; let them leave the target after the same layer"
            )
        return Requirements(
            tuple(dict.fromkeys([*self.hidden_layers, *other.hidden_layers])),
            max(self.top_k, other.top_k),
            mine or theirs,
        )


@dataclass(frozen=True, slots=True)
class RankedRows:
    """The target's most likely tokens after each of some rows of one request."""

    tokens: NDArray[np.int64]
    """What each row carries, [N]."""
    parents: NDArray[np.int64]
    """Which of the rows each one follows, [N]; negative where it is none of them."""
    top: NDArray[np.int64]
    """Token ids after each row, best first, [N, k], by the target's raw logits."""


@dataclass(frozen=True, slots=True)
class ReadChunk:
    """A part of a request's tokens that the target ran in a step in which the request emitted nothing."""

    request: RequestView
    first: int
    """Position of its first row."""
    hidden: Mapping[int, torch.Tensor]
    """Per asked-for layer, float [rows, H]."""


@dataclass(slots=True)
class Feedback:
    """What became of one step, for the requests that drafted or emitted in it."""

    requests: Sequence[RequestView]
    emitted: Sequence[Sequence[int]]
    """Emitted tokens per request: the kept draft tokens, then one more, cut at the first stop."""
    kept: Sequence[Sequence[int]]
    """Builder handles of the kept draft nodes per request, in order."""
    drafted: Sequence[int]
    """Draft nodes per request."""
    hidden: Mapping[int, Sequence[torch.Tensor]] = field(default_factory=dict)
    """Per asked-for layer and request, float [rows, H]: the context rows of this pass, the root, the kept nodes."""
    chunks: Sequence[ReadChunk] = ()
    """If the drafter requires hidden states: what was read of long prompts, whose requests are not in `requests`."""
    ranked: Sequence[RankedRows] = ()
    """Per request, if the drafter requires `top_k`: every node of the draft, kept or not; row 0 is the root."""
    extra: Sequence[RankedRows] = ()
    """Per request, if the step had any: its extra rows (`DraftBuilder.extra`), with `top_k` tokens, at least one."""
    tested: Sequence[int] = ()
    """Depths per request at which a draft token was tested; all but the last of them, or all, were kept."""
    ranks: Sequence[Sequence[int]] = ()
    """Per request and kept node, its rank among its siblings."""
    siblings: Sequence[Sequence[int]] = ()
    """Per request and tested depth, the siblings that were there; those after a kept one were not tested."""
    chances: Sequence[Sequence[Sequence[float]]] = ()
    """Per request, tested depth and sibling, how likely it was in the law that it was drawn from, NaN at a guess;
    nothing unless a scheduler is asked before draws (`Scheduler.stops_drafts`)."""
    rows: int = 0
    """Rows of this target pass: drafts, extra rows and prefill chunks included."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time of this step's phases so far: plan, draft, forward, verify, commit."""


class Drafter(ABC):
    """Proposes draft nodes; never draws a token and never states a law.

    State after `observe` must equal that of a fresh drafter begun on the same tokens; what a
    drafter learns on purpose is excepted, and may change what is drafted, never the text's law.
    A drafter that raises or hands over non-finite logits costs its draft, never the request.
    """

    requires: ClassVar[Requirements] = Requirements()
    reads_ahead: ClassVar[bool] = False
    """Whether `propose` takes requests whose tokens go beyond the committed ones as given, for that call
    only, and so can continue what another drafter guessed."""

    @property
    def faults(self) -> Mapping[str, int]:
        """Drafts lost in drafters that this one is made of, by cause; what it raises itself is not among them."""
        return {}

    def attach(self, target: TargetInfo) -> None:
        """Prepare for this target; called once before any request.

        Raises:
            ConfigError: this drafter cannot work with this target; say why and what works.
        """

    def begin(self, request: RequestView) -> None:
        """A request enters (again, after a preemption)."""

    @abstractmethod
    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        """Add draft nodes for `requests` through `builder.sample` and `builder.guess`.

        `requests[i]` is the builder's request i; `builder.roots[i]` is its root's handle and
        `builder.limits[i]` its limits. Adding nothing is ordinary decoding. What a drafter wants to
        know of the target, but not to propose, it adds through `builder.extra`.
        """

    def observe(self, feedback: Feedback) -> None:
        """Learn what was kept, and roll back own state to the committed tokens."""

    def end(self, request: RequestView) -> None:
        """A request leaves (finished, cancelled, failed or preempted): drop everything held for it."""

    def close(self) -> None:
        """The pipeline is closed."""


class Scorer(Drafter):
    """A drafter with a model that can also score what another drafter drafted for it."""

    @abstractmethod
    def score(
        self, requests: Sequence[RequestView], draft: Draft
    ) -> tuple[torch.Tensor, Sequence[bool]]:
        """Run the model over the committed tokens and a draft, row i of it for `requests[i]`.

        Returns:
            The logits after every node, request by request in index order, float [R, V] with the
            target's V, and for each request whether it was scored; rows of others are arbitrary.
        """


@dataclass(slots=True)
class Outcome:
    """What a verifier decided: the last kept node of each request and the token after it."""

    node: torch.Tensor
    """int64 [B]; 0 is the root, so that nothing of the draft was kept."""
    next_token: torch.Tensor
    """int64 [B]; the recovered or bonus token."""


class Verifier(ABC):
    """Decides which draft nodes are kept, so that the emitted tokens follow the target's law."""

    guarantee: ClassVar[Guarantee]
    """`same-text`: the text plain decoding gives for the seed; `exact-law`: its law; `lossy`: neither."""
    noise: ClassVar[Literal["target", "draft"]]
    """Which noise drafts are drawn with: the target's own at each position, or fresh for each step."""
    supports_trees: ClassVar[bool] = True
    """Whether siblings are understood; without, drafts are chains."""

    @abstractmethod
    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        """Walk the trees of all requests at once.

        Ask `laws.rows(node, live)` only for nodes that are reached, and draw lazily and jointly.
        All chance goes through `random`.
        """

    def plan(self, draft: Draft, laws: NodeLaws) -> torch.Tensor | None:
        """The plan form: where the walk ends, without chance, if this verifier can tell.

        It looks at every node, not at reached ones only, and `laws` remembers what was not finite;
        so hand over laws that no walk uses.

        Returns:
            The probability that each node is the last kept one, given the draft: float [B, N], 0 at
            padding, each row's sum 1; None from a verifier without a plan form.
        """
        return None


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """What a scheduler sees before a step: the requests that could draft, and what each may at most.

    `caps` already respect the remaining tokens, the context, the memory and the request's own settings.
    """

    requests: Sequence[RequestView]
    caps: Sequence[DraftLimits]
    rows: int
    """Rows of the target pass before any draft (prefill chunks and last tokens)."""


class Scheduler(ABC):
    """Sets draft limits and stops drafts. Schedulers compose: limits are the minimum, any stop stops.

    Decisions may use committed text, any past, and this step's kept tokens, never a token that
    is then dropped.
    """

    def attach(self, target: TargetInfo) -> None:
        """Prepare for this target; called once before any request."""

    @abstractmethod
    def plan(self, view: SchedulerView) -> Sequence[DraftLimits]:
        """Draft limits per request, at most `view.caps`."""

    @property
    def stops_drafts(self) -> bool:
        """Whether it answers before draws; if no scheduler does, none is asked."""
        mine = type(self)
        return (
            mine.before_draw is not Scheduler.before_draw
            or mine.after_kept is not Scheduler.after_kept
        )

    def before_draw(self, q: torch.Tensor) -> torch.Tensor | None:
        """Asked with the law of each coming draw, float [M, V]: bool [M], False stops; None means go on.

        For a greedy request, which has no draw, the law is the softmax of its logits.
        """
        return None

    def after_kept(self, chances: torch.Tensor) -> torch.Tensor | None:
        """Asked at the same time with what was drawn and kept on the way to each coming draw.

        Args:
            chances: the probability that each of these tokens had in the law it was drawn from, in order,
                float [M, D]; 1 at guesses, and in front where the way is shorter.

        Returns:
            bool [M], False stops; None means go on. All that was drawn stays in the draft either way.
        """
        return None

    def observe(self, feedback: Feedback) -> None:
        """Learn what was kept."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a quantised model are held and multiplied, as its loader knows it.

    What follows for a pass over several rows is measured: `specfw doctor`.
    """

    method: str
    """Who quantised, such as `bitsandbytes`, `gptq` or `gguf`."""
    setting: str
    """What it did, in words: `nf4, double quantisation`."""
    packed: bool = True
    """Whether the weights stay small in memory; False if they were dequantised at load."""
    batch_invariant: bool | None = None
    """Whether a row of a linear layer's output depends on no other row and not on how many there are;
    None if the loader does not know."""
    compileable: bool = False
    """Whether `torch.compile` takes the layers as they are."""
    kernel: str = ""
    """How a product is made, for reports: `dequantised before each product`."""

    def __str__(self) -> str:
        return f"{self.method}, {self.setting}" if self.setting else self.method


@dataclass(slots=True)
class LoadedTarget:
    """A model ready to be the target, or a drafter's model."""

    name: str
    model: Any
    """A transformers causal language model in eval mode."""
    tokenizer: Any = None
    notes: tuple[str, ...] = ()
    """What the loader wants a user to know (bytes per weight, dequantised, approximations)."""
    quantization: Quantization | None = None
    """What is known of the quantised weights; None if they are not quantised."""


class TargetLoader(ABC):
    """Loads the model whose law is kept (a quantised target is the quantised model)."""

    @abstractmethod
    def load(self) -> LoadedTarget:
        """Load the model and its tokenizer.

        Raises:
            ConfigError: the model cannot be found or its settings are wrong.
            UnsupportedModelError: its kind cannot run.
        """


@dataclass(frozen=True, slots=True)
class Trained:
    """What a trainer has made, complete and in its place."""

    drafter: Mapping[str, Any]
    """The reference by which a config names the trained drafter."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What its model card says besides, by name."""


class Trainer(ABC):
    """Makes a drafter for one target from texts that the target wrote itself.

    The framework writes the texts, keeps time, and describes the result; it can be killed at any
    time, and the same call goes on.
    """

    text_share: ClassVar[float] = 0.5
    """The part of the time that may go into writing texts; the rest is for `train`."""

    def attach(self, target: TargetInfo) -> None:
        """Prepare for this target; called once, before anything is written.

        Raises:
            ConfigError: nothing can be trained for this target; say why and what works.
        """

    def room(self, tokens: int) -> tuple[int, int]:
        """Bytes of disk and of memory that training on so many tokens takes, besides the texts."""
        return 0, 0

    def watch(self, shard: Shard) -> str:
        """A shard of texts was written or is there already: a few words on what it promises, or none."""
        return ""

    @abstractmethod
    def train(self, run: TrainingRun) -> Trained:
        """Train on all texts of the run, from where an earlier run was killed, if one was.

        No file may be under its final name before it is complete; `specfw.training` helps with that.
        """
