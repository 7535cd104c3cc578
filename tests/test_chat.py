"""`specfw chat`: what it remembers, what it shows, and how it ends."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator

import pytest

from specfw import Pipeline
from specfw.cli import chat, main
from specfw.errors import ConfigError
from tests.byte_models import save_tiny_chat


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def pipeline(checkpoint: str) -> Iterator[Pipeline]:
    with Pipeline.from_config({"target": checkpoint}) as made:
        yield made


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))


def test_a_conversation_grows_and_is_forgotten(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers without what was said before, or with what /reset should have dropped."""
    talk = chat.Chat(pipeline, settings={"max_new_tokens": 5})
    say(monkeypatch, "one", "", "two")
    talk.run()
    roles = [message["role"] for message in talk.messages]
    assert roles == ["user", "assistant", "user", "assistant"]
    [expected] = pipeline.generate([talk.messages[:1]], max_new_tokens=5)
    assert talk.messages[1]["content"] == expected.text
    [expected] = pipeline.generate([talk.messages[:3]], max_new_tokens=5)
    assert talk.messages[3]["content"] == expected.text
    out, err = capsys.readouterr()
    assert out == talk.messages[1]["content"] + "\n" + talk.messages[3]["content"] + "\n"
    speeds = re.findall(r"\[(\d+) tokens, [\d.]+ tokens/s, ([\d.]+) tokens a target pass\]", err)
    assert speeds == [("5", "1.00")] * 2
    say(monkeypatch, "/reset", "/nonsense", "three", "/quit", "four")
    talk.run()
    assert [m["content"] for m in talk.messages if m["role"] == "user"] == ["three"]
    assert "no such command: /nonsense" in capsys.readouterr().err
    begun = chat.Chat(pipeline, "Be brief.")
    say(monkeypatch, "/reset")
    begun.run()
    assert begun.messages == [{"role": "system", "content": "Be brief."}]


def test_a_failed_or_interrupted_answer_leaves_the_conversation(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A question that is too long, or Ctrl-C, that ends the chat or stays in every later prompt."""
    talk = chat.Chat(pipeline, settings={"max_new_tokens": 5})
    say(monkeypatch, "x" * 10_000, "fine", "/quit")
    talk.run()
    assert "error: request: expected a prompt shorter than" in capsys.readouterr().err
    assert [message["content"] for message in talk.messages][::2] == ["fine"]

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "print_stream", interrupted)
    before = list(talk.messages)
    talk.answer("again")
    assert talk.messages == before


def test_a_target_without_a_template_is_refused(pipeline: Pipeline) -> None:
    pipeline.target.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"tokenizer with a chat template.*use specfw generate"):
        chat.Chat(pipeline)


def test_the_command_streams_answers(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Options that do not reach the pipeline."""
    say(monkeypatch, "hello", "/quit")
    arguments = ["chat", "--target", checkpoint, "--max-new-tokens", "4", "--seed", "1"]
    monkeypatch.setattr(
        sys, "argv", ["specfw", *arguments, "--temperature", "1", "--show-accepted"]
    )
    with pytest.raises(SystemExit) as caught:
        main.run()
    out, err = capfd.readouterr()
    assert not caught.value.code
    with Pipeline.from_config({"target": checkpoint}) as pipeline:
        prompt = [{"role": "user", "content": "hello"}]
        [expected] = pipeline.generate(prompt, max_new_tokens=4, seed=1, temperature=1.0)
    assert out == expected.text + "\n"
    assert "[4 tokens" in err
