"""`pyspec serve` as a user starts it and ends it."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from click import ClickException

from pyspec.cli import cli
from pyspec.errors import PyspecError
from tests.models import sentence_piece, write_llama
from tests.server.service import Process
from tests.server.test_disconnect import post
from tests.server.test_guard import CHAT, fetch


@pytest.fixture
def pair(chat_target: Path, chat_draft: Path) -> list[str | Path]:
    return ["-m", chat_target, "-d", chat_draft, "--threads", "1"]


def started(connection: socket.socket) -> bytes:
    """What comes of a streamed answer until its text has begun."""
    received = b""
    while b'"tokens"' not in received:
        received += connection.recv(65536)
    return received


def rest(connection: socket.socket) -> bytes:
    received = b""
    while more := connection.recv(65536):
        received += more
    return received


def test_it_says_where_it_is_what_it_needs_and_how_to_try_it(pair: list[str | Path]) -> None:
    with Process(*pair, "--ctx", "256", "--parallel", "3") as process:
        where, memory, example = process.log.splitlines()[-3:]
        assert urlsplit(process.url).hostname == "127.0.0.1"
        assert where.startswith("chat-target at ")
        # F16 keys and values of 2 + 1 layers with 2 and 1 heads of 16: 320 bytes a position.
        assert f"for 3 answers at once {3 * 256 * 320 / 1e3:.3g} kB of caches" in memory
        assert "(256 tokens each)" in memory
        curl = shlex.split(example.removeprefix("try: "))
        run = subprocess.run([*curl, "-sS"], capture_output=True, check=True, timeout=120)
        assert json.loads(run.stdout).get("object") == "chat.completion", run.stdout
        asked = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 3}
        fetch(process.url, CHAT, asked)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        line = process.log.splitlines()[-1]
    assert "POST /v1/chat/completions 200 in " in line
    assert " + 3 tokens" in line
    assert "secret" not in process.log


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)]
)
def test_told_to_end_it_lets_answers_end(pair: list[str | Path], number: signal.Signals) -> None:
    with Process(*pair) as process:
        with post(process.url, stream=True, max_tokens=100, temperature=0) as connection:
            received = started(connection)
            process.signal(number)
            received += rest(connection)
        assert process.wait() == 0
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b'"finish_reason":"length"' in received
        assert "Traceback" not in process.log


def test_after_the_grace_answers_are_cut_with_an_error(pair: list[str | Path]) -> None:
    with Process(*pair, "--grace", "0") as process:
        with post(process.url, stream=True, max_tokens=4000) as connection:
            received = started(connection)
            process.signal(signal.SIGTERM)
            received += rest(connection)
        assert process.wait() == 0
        assert b"shutting down" in received
        assert b"[DONE]" not in received


@pytest.mark.thorough
def test_a_second_signal_does_not_wait(pair: list[str | Path]) -> None:
    with Process(*pair, "--grace", "1000") as process:
        with post(process.url, stream=True, max_tokens=4000) as connection:
            started(connection)
            process.signal(signal.SIGTERM)
            process.signal(signal.SIGTERM)
            rest(connection)
        assert process.wait() == 0


def test_killed_it_leaves_nothing(pair: list[str | Path], tmp_path: Path) -> None:
    with Process(*pair, TMPDIR=str(tmp_path)) as process:
        port = urlsplit(process.url).port
        with post(process.url, stream=True, max_tokens=4000) as connection:
            started(connection)
            children = psutil.Process(process.pid).children(recursive=True)
            process.signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        assert children == []
        assert list(tmp_path.iterdir()) == []
        # Its port can be had again at once.
        socket.create_server(("127.0.0.1", port)).close()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("from-the-file\n\n  another  \n")
    return path


def test_keys_come_from_options_files_and_the_environment(
    pair: list[str | Path], key_file: Path
) -> None:
    with Process(*pair, "--api-key-file", key_file, PYSPEC_API_KEY="from-outside") as process:
        assert "-H 'Authorization: Bearer KEY'" in process.log
        for key, status in (
            ("from-outside", 200),
            ("from-the-file", 200),
            ("another", 200),
            ("", 401),
            ("KEY", 401),
        ):
            assert fetch(process.url, "/v1/models", Authorization=f"Bearer {key}")[0] == status
        for key in ("from-outside", "from-the-file"):
            assert key not in process.log
        process.signal(signal.SIGTERM)
        process.wait()


def test_a_fatal_option_does_not_let_the_world_in_unsaid(pair: list[str | Path]) -> None:
    with Process(*pair, "--host", "0.0.0.0") as process:
        assert "warning: whoever reaches 0.0.0.0 can use the service" in process.log
        url = process.url.replace("0.0.0.0", "127.0.0.1")
        assert fetch(url, "/health", Host="a.name.of.its.own")[0] == 200


def refused(*arguments: str | Path) -> str:
    """What is said of a start that fails."""
    with pytest.raises((PyspecError, ClickException)) as caught:
        cli.main(["serve", *map(str, arguments)], standalone_mode=False)
    return str(caught.value)


def test_a_port_that_is_taken(pair: list[str | Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refused(*pair, "--port", str(port)) == (
            f"cannot listen on 127.0.0.1, port {port}: Address already in use; "
            "choose others with --host and --port"
        )


def test_a_draft_of_another_vocabulary_is_served_with(chat_target: Path, models: Path) -> None:
    other = write_llama(models / "sentence-pieces.gguf", sentence_piece())
    with Process("-m", chat_target, "-d", other) as process:
        assert fetch(process.url, "/health")[0] == 200


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--api-key", "a key", "an API key is made of"),
        ("--api-key", "", "an API key is made of"),
        ("--api-key-file", "/nowhere", "cannot read /nowhere"),
        ("--host", "no.such.name.invalid", "cannot listen on no.such.name.invalid"),
        ("--port", "70000", "70000"),
        ("--parallel", "0", "0"),
        ("--no-draft", "--draft=x", "exclude each other"),
    ],
)
def test_a_wrong_option(pair: list[str | Path], option: str, value: str, said: str) -> None:
    assert said in refused("-m", pair[1], "--port", "0", option, value)


def test_a_missing_package_is_named_with_what_to_install(pair: list[str | Path]) -> None:
    code = (
        "import sys; sys.modules['uvicorn'] = None; sys.argv[1:1] = ['serve']; "
        "from pyspec.cli import main; main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, pair)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert run.stderr == (
        'pyspec: uvicorn is not installed, which the service needs: pip install "pyspec[serve]"\n'
    )


def test_other_commands_do_not_load_the_service() -> None:
    code = (
        "import sys, pyspec.cli; from click.testing import CliRunner; "
        "CliRunner().invoke(pyspec.cli.cli, ['generate', '--help']); "
        "sys.exit('fastapi' in sys.modules or 'pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
