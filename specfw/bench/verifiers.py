"""`specfw bench verifiers`: which sibling laws and which verifiers keep most, on laws of real models.

The demo model writes some texts. At places in these, a truncated copy of it drafts, and what would be
kept is computed from both models' laws, by closed forms where there are any; then the text goes on as it
was written. Nothing is timed, and what chance remains comes from keyed noise, so the tables repeat.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from specfw.bench.engines import engine_beside
from specfw.bench.prompts import load_prompts
from specfw.bench.schedulers import CLASSES
from specfw.contracts import Drafter, Outcome, TargetLoader, Verifier
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.draft import Draft
from specfw.decoding.probabilities import NodeLaws
from specfw.decoding.random import KeyedSource, Purpose, RandomSource, Site
from specfw.engine.fixed import FixedScheduler
from specfw.pipeline import Pipeline
from specfw.plugins import PluginManager
from specfw.types import Guarantee, SamplingParams

__all__ = ["SIBLING_LAWS", "VerifiersBench", "bench_verifiers", "kept_of_siblings"]

_WIDTHS = (1, 2, 3, 4)
_TREES = (1, 2, 3)
"""Siblings below every node of the trees that are compared; all trees have as many nodes."""
_NODES = 6
_NOISE = 32
"""Draws for laws without a closed form."""
_PROMPT = 32
_BEFORE = 8
"""Tokens of each text before the first place."""


@dataclass(slots=True)
class VerifiersBench:
    """What was kept, in the mean over all places."""

    places: int = 0
    siblings: dict[tuple[str, float, str, int], float] = field(default_factory=dict)
    """The chance that one of the siblings below a node is kept, by drafter, temperature, law and width."""
    trees: dict[tuple[str, float, str, int], float] = field(default_factory=dict)
    """Draft tokens kept, by drafter, temperature, verifier and siblings below every node."""

    def mapping(self) -> dict[str, Any]:
        """The stable keys of `specfw bench verifiers --json`."""
        return {
            "places": self.places,
            "nodes": _NODES,
            "siblings": [
                {"drafter": d, "temperature": t, "law": law, "width": width, "kept": kept}
                for (d, t, law, width), kept in self.siblings.items()
            ],
            "trees": [
                {"drafter": d, "temperature": t, "verifier": verifier, "width": w, "kept": kept}
                for (d, t, verifier, w), kept in self.trees.items()
            ],
        }

    def markdown(self) -> str:
        """Two tables."""
        return (
            f"The chance that one of the siblings below a node is kept, over {self.places} places:\n\n"
            + _table("sibling law", "siblings", _WIDTHS, self.siblings)
            + f"\n\nDraft tokens kept of {_NODES} nodes, by siblings below every node:\n\n"
            + _table("verifier", "siblings", _TREES, self.trees)
            + "\n"
        )


def _table(
    what: str,
    unit: str,
    columns: Sequence[int],
    values: dict[tuple[str, float, str, int], float],
) -> str:
    heads = ["1 sibling" if n == 1 else f"{n} {unit}" for n in columns]
    lines = [
        f"| drafter | temperature | {what} | {' | '.join(heads)} |",
        f"|---|---:|---|{'---:|' * len(columns)}",
    ]
    for drafter, temperature, name in dict.fromkeys(key[:3] for key in values):
        row = [values.get((drafter, temperature, name, n)) for n in columns]
        cells = [f"{value:.3f}" if value is not None else "" for value in row]
        lines.append(f"| `{drafter}` | {temperature} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def bench_verifiers(
    layers: Sequence[int] = (28, 24),
    temperatures: Sequence[float] = (1.0, 0.7),
    per_text: int = 8,
    dtype: str = "bfloat16",
    target: object = "demo",
    draft_model: str = "demo(layers={layers})",
    progress: Callable[[str], None] = lambda text: None,
) -> VerifiersBench:
    """Compute what is kept at places in texts that the target wrote itself, one text a class of prompts.

    Args:
        layers: of the truncated copies that draft.
        temperatures: of texts and drafts.
        per_text: places in each text, one after the other.
        dtype: what the weights become; a ready loader keeps its own.
        target: as in a config.
        draft_model: a target as in a config, in which `{layers}` is replaced.
        progress: told what runs now.

    Raises:
        ConfigError: a setting is wrong.
    """
    manager = PluginManager()
    settings = {} if isinstance(target, TargetLoader) else {"dtype": dtype}
    result = VerifiersBench()
    with Pipeline.from_config({"target": target, **settings}) as pipeline:
        texts = {t: _texts(pipeline, t, per_text) for t in temperatures}
        result.places = len(CLASSES) * per_text
        for number in layers:
            model = draft_model.format(layers=number)
            name = f"small-model({model})"
            for width in _TREES:
                options = {"model": model, "dtype": "auto", "width": width, "max_nodes": _NODES}
                drafter = manager.bind("drafter", {"name": "small-model", **options})
                for temperature in temperatures:
                    progress(f"{name}, {width} siblings, temperature {temperature}")
                    for kind in (_Planned, _Walked):
                        seen = kind(texts[temperature])
                        _draft(pipeline, drafter.build(), seen, temperature, per_text)
                        for verifier, kept in seen.kept.items():
                            result.trees[name, temperature, verifier, width] = fmean(kept)
                        if width == 1 and isinstance(seen, _Planned):
                            for (law, count), chance in _siblings(seen).items():
                                result.siblings[name, temperature, law, count] = chance
    return result


def _texts(pipeline: Pipeline, temperature: float, per_text: int) -> list[list[int]]:
    """Prompts, and how the target goes on."""
    first = {prompt.category: prompt for prompt in reversed(load_prompts())}
    prompts = [
        pipeline.encode([{"role": "user", "content": first[category].turns[0]}])[-_PROMPT:]
        for category in CLASSES.values()
    ]
    written = _BEFORE + per_text
    params = [
        SamplingParams(temperature=temperature, max_new_tokens=written, seed=seed, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    outputs = pipeline.generate(prompts, params, progress=False)
    return [[*p, *output.token_ids] for p, output in zip(prompts, outputs, strict=True)]


def _draft(
    pipeline: Pipeline, drafter: Drafter, seen: _Watcher, temperature: float, per_text: int
) -> None:
    """Let a verifier see a draft at each place of its texts."""
    longest = _PROMPT + _BEFORE + per_text + _NODES + 2
    limits = FixedScheduler(_NODES, _NODES, _NODES)
    count = len(seen.texts)
    with engine_beside(pipeline, drafter, seen, limits, count, longest) as engine:
        requests = [
            engine.add(
                text[:-per_text],
                SamplingParams(
                    temperature=temperature,
                    max_new_tokens=per_text + _NODES + 1,
                    seed=seed,
                    ignore_eos=True,
                ),
            )
            for seed, text in enumerate(seen.texts)
        ]
        for _ in range(per_text):
            engine.step()
        for request in requests:
            engine.cancel(request)


class _Watcher(Verifier):
    """Lets known texts go on, and notes what verifiers would keep of the drafts; a request's seed is its text."""

    guarantee: ClassVar[Guarantee] = "lossy"

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = texts
        self.kept: dict[str, list[float]] = {}
        """Draft tokens kept at each place, by verifier."""

    @abstractmethod
    def note(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> None:
        """Note what is kept."""

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        if draft.batch:
            self.note(draft, laws, random)
        places = zip(draft.seed.tolist(), draft.start.tolist(), strict=True)
        following = [self.texts[text][start + 1] for text, start in places]
        return Outcome(torch.zeros_like(draft.start), draft.start.new_tensor(following))


class _Planned(_Watcher):
    """Verifiers whose plan form says what they keep in the mean."""

    noise: ClassVar[Literal["target", "draft"]] = "draft"

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(texts)
        manager = PluginManager()
        names = [name for name in ("rejection", "block") if name in manager.names("verifier")]
        self._verifiers = {name: manager.bind("verifier", name).build() for name in names}
        self.laws: list[tuple[Tensor, Tensor]] = []
        """The target's law and the drafter's after each place, [V] each, if the drafts are chains."""

    def note(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> None:
        for name, verifier in self._verifiers.items():
            stop = verifier.plan(draft, laws)
            assert stop is not None
            self.kept.setdefault(name, []).extend(draft.mean_depth(stop).tolist())
        if draft.max_width == 1 and draft.qstore is not None:
            root = laws.rows(torch.zeros_like(draft.start)).double()
            drafted = draft.qstore[torch.from_numpy(draft.qrow[:, 1]).long()].double()
            self.laws += zip(root, drafted, strict=True)


class _Walked(_Watcher):
    """The coupled verifier, whose plan form does not know the noise that it shares with drafts."""

    noise: ClassVar[Literal["target", "draft"]] = "target"

    def note(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> None:
        last = CoupledVerifier().verify(draft, laws, random).node.tolist()
        depths = [float(draft.depth[b, node]) for b, node in enumerate(last)]
        self.kept.setdefault("coupled", []).extend(depths)


def _siblings(seen: _Planned) -> dict[tuple[str, int], float]:
    """The mean chance to keep one of the siblings, by law and width."""
    kept: dict[tuple[str, int], list[float]] = {}
    for name, law in SIBLING_LAWS.items():
        for p, q in seen.laws:
            for width, chance in zip(_WIDTHS, law(p, q, _WIDTHS), strict=True):
                kept.setdefault((name, width), []).append(chance)
    return {key: fmean(chances) for key, chances in kept.items()}


def kept_of_siblings(law: str, p: Tensor, q: Tensor, width: int) -> float:
    """The chance that one of `width` siblings is kept, for the target's law p and the drafter's q, [V] each.

    Args:
        law: one of `SIBLING_LAWS`.
        p, q: laws, float [V].
        width: siblings.
    """
    return SIBLING_LAWS[law](p, q, [width])[0]


def _with_replacement(p: Tensor, q: Tensor, width: int) -> float:
    """Draws from q, each tested against what those before it left of p."""
    refused = 1.0
    for _ in range(width):
        kept = float(torch.minimum(p, q).sum())
        refused *= 1 - kept
        p = _left(p, q)
    return 1 - refused


def _without_replacement(p: Tensor, q: Tensor, widths: Sequence[int]) -> list[float]:
    """Draws from q without the earlier ones, in the mean over keyed noise; k race keys are such draws."""
    drawn = _race(q, Purpose.DRAFT, max(widths))
    return [_kept_of_draws(p, q, drawn[:, : width - 1]) for width in widths]


def _kept_of_draws(p: Tensor, q: Tensor, drawn: Tensor) -> float:
    """The mean chance to keep one of `drawn` [S, W - 1], drawn from q one after the other, or a further draw."""
    rows = torch.arange(len(drawn))
    left, rest = p.expand(len(drawn), -1).clone(), q.expand(len(drawn), -1).clone()
    refused = torch.ones(len(drawn), dtype=p.dtype)
    for token in drawn.T:
        refused *= 1 - (left[rows, token] / rest[rows, token]).nan_to_num(0).clamp_max(1)
        left = _left(left, rest)
        rest[rows, token] = 0
        rest = rest / rest.sum(-1, keepdim=True).clamp_min(1e-300)
    refused *= 1 - torch.minimum(left, rest).sum(-1)  # the last draw in closed form
    return float(1 - refused.mean())


def _guesses(p: Tensor, q: Tensor, width: int) -> float:
    """q's most likely tokens."""
    return float(p[q.topk(width).indices].sum())


def _guesses_then_draw(p: Tensor, q: Tensor, width: int) -> float:
    """q's most likely tokens, then a draw from the rest of q."""
    sure, rest = _split(p, q, width)
    left = p.clone()
    left[sure] = 0
    mass = float(left.sum())
    return 1 - mass + mass * float(torch.minimum(left / max(mass, 1e-300), rest).sum())


def _draw_then_guesses(p: Tensor, q: Tensor, width: int) -> float:
    """A draw from q without its most likely tokens, then these: what `DraftBuilder.sample` does."""
    sure, rest = _split(p, q, width)
    return float(torch.minimum(p, rest).sum() + p[sure].sum())


def _race_keys(p: Tensor, q: Tensor, widths: Sequence[int]) -> list[float]:
    """The best race keys of q under the target's own noise, in the mean over keyed noise (`coupled`)."""
    same = _race(q, Purpose.TARGET, max(widths)) == _race(p, Purpose.TARGET, 1)
    return [float(same[:, :width].any(1).double().mean()) for width in widths]


def _each(
    kept: Callable[[Tensor, Tensor, int], float],
) -> Callable[[Tensor, Tensor, Sequence[int]], list[float]]:
    return lambda p, q, widths: [kept(p, q, width) for width in widths]


SIBLING_LAWS: dict[str, Callable[[Tensor, Tensor, Sequence[int]], list[float]]] = {
    "draws with replacement": _each(_with_replacement),
    "draws without replacement": _without_replacement,
    "guesses": _each(_guesses),
    "guesses, then a draw": _each(_guesses_then_draw),
    "a draw, then guesses": _each(_draw_then_guesses),
    "race keys (`coupled`)": _race_keys,
}
"""Ways to choose siblings, each with the chance, by width, that one is kept; all by rejection but the last."""


def _left(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+ normalised; p where nothing is left, which has probability zero."""
    rest = (p - q).clamp_min(0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


def _split(p: Tensor, q: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """q's `width` - 1 most likely tokens, and q without them; q itself where nothing is left."""
    sure = q.topk(width - 1).indices
    rest = q.clone()
    rest[sure] = 0
    mass = rest.sum()
    return sure, rest / mass if mass > 0 else q


def _race(law: Tensor, purpose: Purpose, k: int) -> Tensor:
    """The k best race keys of a law under each of some seeds: [_NOISE, k]."""
    seed = torch.arange(_NOISE)
    site = Site(purpose, seed, torch.zeros_like(seed))
    return KeyedSource().race(law.expand(_NOISE, -1), site, k)
