"""Writing texts with the target itself: the user's turn, then the answer, at mixed temperatures.

All chance is keyed by the run's seed, the shard's number and the conversation's number in it.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from specfw.errors import ConfigError
from specfw.fingerprint import KEY, fingerprint
from specfw.pipeline import Pipeline
from specfw.training.files import exclusive
from specfw.training.openings import Opening, Turn
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
    """Most tokens that the target writes of a user's turn."""
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
        prompts: Sequence[Turn] = (),
    ) -> None:
        """Wire the parts; the pipeline's drafter is the recorder, and `prompts` are user's turns; none leaves them to the target."""
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
        first, count = number * self._settings.conversations, self._settings.conversations
        given = self._prompts or [Turn()]
        turns = [given[(first + i) % len(given)] for i in range(count)]
        begun = [[*self._opening.before, *turn.tokens] for turn in turns]
        temperatures = self._settings.temperatures
        mixed = [temperatures[(first + i) % len(temperatures)] for i in range(count)]
        parts: list[list[Recorded]] = []
        if self._opening.after:
            parts.append(self._finish_turns(number, turns, begun))
        prompts = [[*prompt, *self._opening.after] for prompt in begun]
        every, most = range(count), self._settings.answer_tokens
        parts.append(self._decode(number, every, prompts, mixed, most, "answer"))
        return _shard_of(parts, mixed, self._settings.top_k, time.perf_counter() - began)

    def _finish_turns(
        self, number: int, turns: Sequence[Turn], begun: Sequence[list[int]]
    ) -> list[Recorded]:
        """Let the target go on with what is unfinished of `begun`, in place, without what ends a turn."""
        stop = self._opening.after[0]
        ends = {stop, *self._pipeline.engine.info.eos_token_ids}
        which = [i for i, turn in enumerate(turns) if turn.unfinished]
        prompts = [begun[i] for i in which]
        heat = [self._settings.turn_temperature] * len(which)
        most = self._settings.turn_tokens
        recorded = [Recorded() for _ in turns]
        for i, one in zip(
            which, self._decode(number, which, prompts, heat, most, "turn", (stop,)), strict=True
        ):
            recorded[i] = one
            written = one.tokens[one.prompt_length :]
            begun[i].extend(written[:-1] if written and written[-1] in ends else written)
        return recorded

    def _decode(
        self,
        number: int,
        which: Iterable[int],
        prompts: Sequence[list[int]],
        temperatures: Sequence[float],
        tokens: int,
        part: str,
        stops: tuple[int, ...] = (),
    ) -> list[Recorded]:
        """Go on with some of the shard's conversations, each with chance of its own."""
        params = [
            SamplingParams(
                max_new_tokens=tokens,
                temperature=temperature,
                min_p=self._settings.min_p,
                seed=_seed(self._settings.seed, number, i, part),
                stop_token_ids=stops,
            )
            for i, temperature in zip(which, temperatures, strict=True)
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
