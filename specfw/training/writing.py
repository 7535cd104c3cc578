"""Writing texts with the target itself: the user's turn, then the answer, at mixed temperatures.

All chance is keyed by the run's seed, the shard's number and the conversation's number in it.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from specfw.errors import ConfigError
from specfw.fingerprint import KEY, fingerprint
from specfw.pipeline import Pipeline
from specfw.training.files import exclusive
from specfw.training.openings import Opening
from specfw.training.recording import Recorded, RowRecorder
from specfw.training.texts import Shard, Texts
from specfw.types import SamplingParams

__all__ = ["TextWriter", "WritingSettings", "write_texts"]


@dataclass(frozen=True)
class WritingSettings:
    """What decides the texts; a run goes on only with the same."""

    seed: int = 0
    conversations: int = 64
    """In each shard."""
    turn_tokens: int = 64
    """Most tokens of a user's turn."""
    answer_tokens: int = 256
    """Most tokens of an answer."""
    turn_temperature: float = 1.0
    temperatures: tuple[float, ...] = (0.0, 0.5, 0.8, 1.0)
    """Of the answers, in turn."""
    min_p: float = 0.01
    """Tokens below this share of the best one's probability are not drawn."""
    top_k: int = 8
    """Best tokens that are kept after each token."""


class TextWriter:
    """Writes shard after shard."""

    def __init__(
        self,
        pipeline: Pipeline,
        recorder: RowRecorder,
        opening: Opening,
        settings: WritingSettings,
        prompts: Sequence[Sequence[int]] = (),
    ) -> None:
        """Wire the parts; the pipeline's drafter is the recorder, and `prompts` replace the user's turns."""
        self._pipeline, self._recorder = pipeline, recorder
        self._opening, self._settings, self._prompts = opening, settings, prompts

    def about(self) -> dict[str, str]:
        """What the shards follow from, as text by name."""
        settings = {name: str(value) for name, value in asdict(self._settings).items()}
        opening = repr((self._opening.before, self._opening.after, self._prompts))
        return {
            **settings,
            "opening": hashlib.sha256(opening.encode()).hexdigest()[:16],
            "target": self._pipeline.engine.info.name,
            KEY: fingerprint(self._pipeline.engine.info),
        }

    def check(self, texts: Texts) -> None:
        """Refuse to go on with texts that were written in another way.

        Raises:
            ConfigError: they were.
        """
        found, wanted = texts.about(), self.about()
        for name, value in wanted.items() if found else ():
            if found.get(name) != value:
                raise ConfigError(
                    f"train: expected texts in {texts.folder} with {name} {value}, got {found.get(name)}; "
                    "take the same settings again, or name another folder"
                )

    def write(self, number: int) -> Shard:
        """Write the texts of a shard."""
        began = time.perf_counter()
        count = self._settings.conversations
        parts: list[list[Recorded]] = []
        prompts = [list(self._opening.before)] * count
        if self._opening.after or self._prompts:
            turns = self._given_turns(number) or self._written_turns(number, prompts, parts)
            after = list(self._opening.after)
            prompts = [
                [*prompt, *turn, *after] for prompt, turn in zip(prompts, turns, strict=True)
            ]
        temperatures = self._settings.temperatures
        mixed = [temperatures[i % len(temperatures)] for i in range(count)]
        parts.append(self._decode(number, prompts, mixed, self._settings.answer_tokens, "answer"))
        return _shard_of(parts, mixed, self._settings.top_k, time.perf_counter() - began)

    def _given_turns(self, number: int) -> list[list[int]]:
        count = self._settings.conversations
        if not self._prompts:
            return []
        return [
            list(self._prompts[(number * count + i) % len(self._prompts)]) for i in range(count)
        ]

    def _written_turns(
        self, number: int, prompts: Sequence[list[int]], parts: list[list[Recorded]]
    ) -> list[list[int]]:
        """The user's turns as the target writes them, without what ended them."""
        stop = self._opening.after[0]
        heat = [self._settings.turn_temperature] * len(prompts)
        recorded = self._decode(number, prompts, heat, self._settings.turn_tokens, "turn", (stop,))
        parts.append(recorded)
        ends = {stop, *self._pipeline.engine.info.eos_token_ids}
        turns = []
        for one in recorded:
            turn = one.tokens[one.prompt_length :]
            turns.append(turn[:-1] if turn and turn[-1] in ends else turn)
        return turns

    def _decode(
        self,
        number: int,
        prompts: Sequence[list[int]],
        temperatures: Sequence[float],
        tokens: int,
        part: str,
        stops: tuple[int, ...] = (),
    ) -> list[Recorded]:
        params = [
            SamplingParams(
                max_new_tokens=tokens,
                temperature=temperature,
                min_p=self._settings.min_p,
                seed=_seed(self._settings.seed, number, i, part),
                stop_token_ids=stops,
            )
            for i, temperature in enumerate(temperatures)
        ]
        self._pipeline.generate(list(prompts), params, progress=False)
        return self._recorder.take()


def _seed(*key: object) -> int:
    digest = hashlib.blake2b(" ".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _shard_of(
    parts: Sequence[Sequence[Recorded]], temperatures: Sequence[float], k: int, seconds: float
) -> Shard:
    """Join what was recorded of each conversation; its last part holds all of its tokens."""
    tokens, tops, ends = [], [], []
    for recorded in zip(*parts, strict=True):
        text = recorded[-1].tokens
        top = np.full((len(text), k), -1, np.int32)
        for part in recorded:
            for position, best in part.top.items():
                top[position, : len(best)] = best
        tokens.append(np.array(text, np.int32))
        tops.append(top)
        ends.append(len(text))
    return Shard(
        np.concatenate(tokens),
        np.cumsum(ends),
        np.concatenate(tops),
        np.array(temperatures, np.float32),
        seconds,
    )


def write_texts(
    writer: TextWriter,
    texts: Texts,
    tokens: float,
    seconds: float = math.inf,
    tell: Callable[[Shard], None] = lambda shard: None,
) -> None:
    """Write shards until they hold `tokens` written tokens, or have taken `seconds` in all.

    Args:
        writer: writes them.
        texts: where they go; what is there counts.
        tokens: written tokens in all.
        seconds: time of writing in all, that of earlier runs included.
        tell: given each new shard once it is on the disk.

    Raises:
        ConfigError: the folder holds texts with other settings and not enough of them, or another run writes
            to it.
    """
    with exclusive(texts.folder):
        while texts.written < tokens and texts.seconds < seconds:
            writer.check(texts)
            number = len(texts)
            shard = writer.write(number)
            texts.save(number, shard, writer.about())
            tell(shard)
