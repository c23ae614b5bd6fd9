"""What is typed into a chat, and what the conversation makes of it."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from services.cli import chat
from services.cli.answer import Answer
from services.cli.chat import Conversation
from shared.errors import TransientError
from shared.messages import ChatMessage, FinishReason, Request, SamplingParams

Type = Callable[[str], None]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Type:
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def answer(text: str = "Hi.", tokens: int = 3, **fields: float) -> Answer:
    return Answer(
        token_ids=list(range(tokens)), text=text, finish_reason=FinishReason.STOP,
        num_prompt_tokens=10, num_cached_tokens=4,
        first_token_s=fields.get("first_token_s", 1.0), last_token_s=fields.get("last_s", 2.0),
    )  # fmt: skip


def turns_of(typed: Type, text: str) -> list[str | None]:
    typed(text)
    turns: list[str | None] = []
    while not turns or turns[-1] is not None:
        turns.append(chat._read_turn())
    return turns[:-1]


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("one", ["one"]),
        ("\n\none\n", ["", "", "one"]),
        ("a\\\nb\\\nc\nd\n", ["a\nb\nc", "d"]),
        ("a\\\n", ["a"]),
        ('"""a\n\n/b"""\nc\n', ["a\n\n/b", "c"]),
        ('"""\na\n"""\n', ["a"]),
        ('"""a"""\n', ["a"]),
        ('"""open', ["open"]),
    ],
)
def test_a_turn_may_have_several_lines(typed: Type, text: str, turns: list[str]) -> None:
    assert turns_of(typed, text) == turns


def test_the_model_is_told_what_was_said_before() -> None:
    talk = Conversation(system="Be brief.")
    talk.answered("Hello", answer("Hi."))

    assert talk.messages("And now?") == (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Hello"),
        ChatMessage("assistant", "Hi."),
        ChatMessage("user", "And now?"),
    )


def test_a_turn_that_was_stopped_before_a_word_is_forgotten() -> None:
    talk = Conversation()

    talk.answered("Hello", Answer(finish_reason=FinishReason.ABORT))

    assert talk.messages("x") == (ChatMessage("user", "x"),)


def test_reset_forgets_what_was_said_and_keeps_the_system_message() -> None:
    talk = Conversation(system="Be brief.")
    talk.answered("Hello", answer())

    told = talk.command("/reset")

    assert told == "forgot 1 turn"
    assert talk.messages("x") == (ChatMessage("system", "Be brief."), ChatMessage("user", "x"))


def test_system_sets_and_takes_away_the_system_message() -> None:
    talk = Conversation()

    talk.command("/system Answer in verse.")
    with_it = talk.messages("x")
    talk.command("/system")

    assert with_it[0] == ChatMessage("system", "Answer in verse.")
    assert talk.messages("x") == (ChatMessage("user", "x"),)


def test_stats_count_what_was_said() -> None:
    talk = Conversation()
    talk.answered("a", answer(tokens=5, first_token_s=1.0, last_s=3.0))
    talk.answered("b", answer(tokens=3, first_token_s=1.0, last_s=2.0))
    talk.command("/reset")

    told = talk.command("/stats")

    assert told == (
        "2 answers, 8 tokens, 2.0 tok/s; 20 prompt tokens, 8 of them cached; 0 turns remembered"
    )


def test_an_unknown_command_is_named() -> None:
    assert "/nonsense" in Conversation().command("/nonsense x")


def test_a_turn_that_fails_says_who_speaks_and_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def submit(request: Request) -> str:
        raise TransientError("the cluster is away", remedy="bring it back")

    producer = SimpleNamespace(submit=submit)
    session = SimpleNamespace(producer=producer, outlives_us=False)

    chat._take_turn(session, Conversation(), "hi", SamplingParams(), timeout_s=9)  # type: ignore[arg-type]

    assert capsys.readouterr().err == "cellpipe: the cluster is away\n  bring it back\n"
