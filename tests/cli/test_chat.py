"""`pyspec chat` through pipes, in this process and in others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pyspec.chat import prompt_ids
from pyspec.cli.chat import command
from pyspec.conversation import Conversation, Turn
from pyspec.engine import Engine
from pyspec.sampling import SamplingParams

PYSPEC = [sys.executable, "-m", "pyspec"]
LENGTH = 12
Chat = Callable[..., Result]


@pytest.fixture(scope="module")
def pair(chat_target: Path, chat_draft: Path) -> list[str]:
    """Options that name a small pair and make answers short and always the same."""
    options = ["-m", chat_target, "-d", chat_draft, "-n", LENGTH, "--threads", 1, "--temp", 0]
    return list(map(str, options))


@pytest.fixture
def talk(pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """Sends lines through a pipe in this process; {} in them is a folder."""
    monkeypatch.chdir(tmp_path)

    def run(*lines: str, options: tuple[str, ...] = ()) -> Result:
        return CliRunner().invoke(
            command, [*pair, *options], input="".join(f"{x}\n" for x in lines)
        )

    return run


@pytest.fixture(scope="module")
def engine(chat_target: Path) -> Engine:
    return Engine(chat_target, threads=1)


def fresh(engine: Engine, conversation: Conversation, question: str, **settings: object) -> str:
    """What the target alone answers to the conversation, with nothing kept from before."""
    messages = [*conversation.messages(), {"role": "user", "content": question}]
    params = SamplingParams(**{"temperature": 0, "max_tokens": LENGTH, **settings})  # type: ignore[arg-type]
    pieces = engine.generate(prompt_ids(engine.target, messages), params)
    return "".join(piece.text for piece in pieces)


def expected(engine: Engine, *questions: str, system: str | None = None) -> Conversation:
    """The conversation in which these were asked."""
    conversation = Conversation(system)
    for question in questions:
        answer = fresh(engine, conversation, question)
        conversation.turns.append(Turn(question, answer))
    return conversation


def answers(conversation: Conversation) -> str:
    texts = (turn.assistant for turn in conversation.turns)
    return "".join(text if text.endswith("\n") else f"{text}\n" for text in texts)


# ---- answers ------------------------------------------------------------------------------------------


def test_each_line_is_answered_as_a_fresh_process_would(talk: Chat, engine: Engine) -> None:
    run = talk("hi", "", "how are you?", "bye")
    assert (run.exit_code, run.stderr) == (0, "")
    assert run.stdout == answers(expected(engine, "hi", "how are you?", "bye"))


def test_a_pipe_of_another_process(pair: list[str], engine: Engine) -> None:
    run = subprocess.run(
        [*PYSPEC, "chat", *pair], input=b"hi\nbye", capture_output=True, timeout=120, check=False
    )
    assert (run.returncode, run.stderr) == (0, b"")
    assert run.stdout.decode() == answers(expected(engine, "hi", "bye"))


def test_a_system_message_is_an_option_and_a_command(talk: Chat, engine: Engine) -> None:
    with_one = answers(expected(engine, "hi", system="be brief"))
    assert with_one != answers(expected(engine, "hi"))
    assert talk("hi", options=("--system", "be brief")).stdout == with_one
    assert talk("/system be brief", "hi").stdout == with_one
    run = talk("/system none", "hi", "/system", options=("--system", "be brief"))
    assert run.stdout == answers(expected(engine, "hi"))
    assert run.stderr == "no system message\n"


def test_a_message_may_begin_with_a_slash(talk: Chat, engine: Engine) -> None:
    questions = (" /help", "/usr/bin", "// comment", "/* comment */")
    assert talk(*questions).stdout == answers(expected(engine, *questions))


def test_the_oldest_turns_are_forgotten_and_that_is_said_once(talk: Chat) -> None:
    run = talk(*["some words to fill it"] * 12, "/save talk.json", options=("--ctx", "160"))
    assert run.exit_code == 0
    assert run.stderr.count("forgets") == 1
    assert "the context of 160 tokens is full" in run.stderr
    conversation = Conversation.load(Path("talk.json"))
    assert len(conversation.turns) == 12
    assert conversation.forgotten > 0


def test_a_message_that_is_too_long_fails_alone(talk: Chat, engine: Engine) -> None:
    run = talk("hi", "long " * 200, "bye", options=("--ctx", "300"))
    assert run.exit_code == 1
    assert run.stdout == answers(expected(engine, "hi", "bye"))
    assert run.stderr.count("\n") == 1
    assert "tokens and the context 300: shorten it" in run.stderr


def test_an_answer_that_fills_the_context_says_so(talk: Chat) -> None:
    run = talk("hi", "/set max-tokens none", "bye", options=("--ctx", "100"))
    assert run.stderr.endswith("the context of 100 tokens is full: the answer ends here\n")


# ---- commands -----------------------------------------------------------------------------------------


def test_undo_retry_and_reset(talk: Chat, engine: Engine) -> None:
    run = talk("hi", "bye", "/undo", "why?", "/retry", "/reset", "/undo", "hi")
    hi, why = expected(engine, "hi", "why?").turns
    bye = expected(engine, "hi", "bye").turns[1]
    texts = [turn.assistant for turn in (hi, bye, why, why, hi)]
    assert run.stdout == "".join(f"{text}\n" for text in texts)
    assert run.stderr.splitlines() == [
        "taken back: bye",
        "all turns are forgotten",
        "pyspec: the conversation has no turn yet",
    ]


def test_a_retry_that_fails_keeps_the_turn(talk: Chat) -> None:
    talk("hi", "/system " + "long " * 300, "/retry", "/save talk.json", options=("--ctx", "200"))
    assert [turn.user for turn in Conversation.load(Path("talk.json")).turns] == ["hi"]


def test_a_saved_conversation_goes_on_in_another_session(talk: Chat, engine: Engine) -> None:
    first = talk("/system be brief", "hi", "bye", "/save my talk.json")
    assert first.stderr == "2 turns in my talk.json\n"
    conversation = expected(engine, "hi", "bye", "why?", system="be brief")
    assert json.loads(Path("my talk.json").read_text())["messages"] == conversation.messages()[:5]
    second = talk("/load my talk.json", "why?")
    assert second.stderr == "2 turns from my talk.json\nthe last: bye\n"
    assert second.stdout == f"{conversation.turns[2].assistant}\n"


def test_settings_reach_the_sampler(talk: Chat, engine: Engine) -> None:
    run = talk("/set temp 1.5", "/set top-k 0", "/set seed 7", "/set rule coupled", "hi")
    assert "temp 1.5  Temperature" in run.stderr
    settings = {"temperature": 1.5, "top_k": 0, "seed": 7}
    # With shared noise the text is the same without a draft.
    params = SamplingParams(max_tokens=LENGTH, **settings)  # type: ignore[arg-type]
    ids = prompt_ids(engine.target, [{"role": "user", "content": "hi"}])
    pieces = engine.generate(ids, params, rule="coupled")
    assert run.stdout.rstrip("\n") == "".join(piece.text for piece in pieces).rstrip("\n")


def test_gamma_may_be_set(talk: Chat) -> None:
    run = talk("/set gamma 0", "hi", "/stats", "/set gamma 3", "bye", "/stats")
    assert run.stderr.count("of drafts accepted") == 1


def test_set_lists_what_there_is(talk: Chat) -> None:
    run = talk("/set")
    names = [line.split()[0] for line in run.stderr.splitlines()]
    assert {"gamma", "rule", "temp", "top-k", "top-p", "min-p", "seed", "max-tokens"} <= set(names)
    assert "seed none " in run.stderr
    assert f"max-tokens {LENGTH} " in run.stderr


def test_statistics_are_a_line_after_each_answer_if_wanted(talk: Chat) -> None:
    for run in (talk("hi", "bye", options=("--stats",)), talk("/stats on", "hi", "bye")):
        lines = run.stderr.splitlines()
        assert len(lines) == 2
        assert all(line.startswith(f"{LENGTH} tokens, ") for line in lines)
    assert (
        talk("/stats", "/stats on", "/stats off", "hi").stderr == "there is no whole answer yet\n"
    )


def test_help_names_every_command(talk: Chat) -> None:
    run = talk("/help", "/quit", "hi")
    assert (run.exit_code, run.stdout) == (0, "")
    names = re.findall(r"^/(\w+)", run.stderr, re.MULTILINE)
    assert " ".join(names) == "help system reset undo retry save load stats set drafts quit"


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("/rest", "no command /rest; did you mean /reset?"),
        ("/xyz abc", "no command /xyz; /help lists them"),
        ("/", "no command /; /help lists them"),
        ("/save", "what is meant? /save FILE"),
        ("/undo it", "/undo stands alone"),
        ("/drafts maybe", "on or off, not maybe"),
        ("/set temperature 1", "no setting temperature; did you mean temp?"),
        ("/set temp warm", "temp: 'warm' is not a valid float"),
        ("/set temp none", "temp: 'none' is not a valid float"),
        ("/set temp -1", "temperature must be 0 or more, not -1"),
        ("/set gamma 99", "gamma must be auto, or from 0 to 31, not 99"),
        ("/set rule dice", "rule: 'dice' is not one of"),
        ("/load nowhere.json", "cannot read nowhere.json: No such file or directory"),
        ("/save nowhere/talk.json", "cannot write nowhere/talk.json: No such file or directory"),
        ("/retry", "the conversation has no turn yet"),
        ("/load a\x1b[31m\tb", "cannot read a␛[31m b: No such file"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_the_session_goes_on(
    talk: Chat, line: str, hint: str
) -> None:
    run = talk(line, "hi")
    assert run.exit_code == 1
    assert run.stderr.startswith(f"pyspec: {hint}")
    assert run.stderr.count("\n") == 1
    assert run.stdout


# ---- beginning and end ----------------------------------------------------------------------------------


def test_a_model_without_a_template_says_what_works(tiny_target: Path) -> None:
    run = subprocess.run(
        [*PYSPEC, "chat", "-m", tiny_target], input=b"hi\n", capture_output=True, check=False
    )
    assert (run.returncode, run.stdout) == (1, b"")
    assert run.stderr.count(b"\n") == 1
    assert b"no chat template: it continues a text with `pyspec generate --raw`" in run.stderr


def test_ctrl_c_ends_a_run_through_a_pipe(pair: list[str]) -> None:
    process = subprocess.Popen(
        [*PYSPEC, "chat", *pair, "-n", "8000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"hi\n")
    process.stdin.flush()
    os.read(process.stdout.fileno(), 1)
    process.send_signal(2)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors.strip()) == (130, b"")


# ---- the real pair ----------------------------------------------------------------------------------------


@pytest.mark.models
def test_turns_with_the_real_pair_are_those_of_fresh_processes(tmp_path: Path) -> None:
    def run(*lines: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PYSPEC, "chat", "--temp", "0", "-n", "80"],
            input="\n".join(lines),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            check=True,
        )

    questions = (
        "Write a Python function that adds two numbers.",
        "And one that multiplies them?",
        "Which of the two did you write first?",
    )
    whole = run(*questions, "/stats", "/save talk.json")
    conversation = Conversation.load(tmp_path / "talk.json")
    assert [turn.user for turn in conversation.turns] == list(questions)
    assert whole.stdout == answers(conversation)
    # What was evaluated for the first two turns was not evaluated again.
    found = re.search(r"prompt of (\d+) \((\d+) kept\)", whole.stderr)
    assert found is not None
    assert 0.7 * int(found[1]) < int(found[2]) < int(found[1])

    for n, turn in enumerate(conversation.turns):
        Conversation(None, conversation.turns[:n]).save(tmp_path / "so-far.json")
        fresh_run = run("/load so-far.json", turn.user)
        assert fresh_run.stdout.rstrip("\n") == turn.assistant.rstrip("\n")
