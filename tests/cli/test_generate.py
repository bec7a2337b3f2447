"""`pyspec generate` as a user runs it: separate processes, real pipes, real terminals."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from pyspec.chat import prompt_ids
from pyspec.cli import main
from pyspec.engine import Engine
from pyspec.sampling import SamplingParams
from tests.models import CHATML, all_bytes, byte_level, empty, foreign, truncated, write_llama

PYSPEC = [sys.executable, "-m", "pyspec"]
STATISTICS = [
    "prompt_tokens",
    "completion_tokens",
    "ttft_s",
    "tokens_per_second",
    "rounds",
    "tokens_per_round",
    "drafted",
    "verified",
    "accepted",
    "acceptance_rate",
    "accepted_histogram",
    "prefill_s",
    "draft_s",
    "verify_s",
    "sample_s",
    "finish_reason",
    "bit_exact",
]


def pyspec(
    *arguments: str | Path, stdin: bytes = b"", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*PYSPEC, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )


def on_terminal(*arguments: str | Path, **environment: str) -> str:
    """What a terminal would show of stdout and stderr together."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [*PYSPEC, *map(str, arguments)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment},
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            data = os.read(controller, 4096)
        except OSError:  # how Linux says that the other side is closed
            break
        if not data:
            break
        shown += data
    assert process.wait() == 0, shown
    os.close(controller)
    return shown.decode()


@pytest.fixture(scope="module")
def pair(chat_target: Path, chat_draft: Path) -> list[str]:
    """Options that name a small pair and make runs short."""
    return ["-m", str(chat_target), "-d", str(chat_draft), "-n", "24", "--threads", "1"]


def generated(target: Path, draft: Path | None, prompt: str, **settings: object) -> bytes:
    """What the API writes for a chat prompt."""
    params = SamplingParams(**{"max_tokens": 24, **settings})  # type: ignore[arg-type]
    with Engine(target, draft, threads=1) as engine:
        ids = prompt_ids(engine.target, [{"role": "user", "content": prompt}])
        return "".join(piece.text for piece in engine.generate(ids, params)).encode()


# ---- what goes where ----------------------------------------------------------------------------------


def test_the_text_and_nothing_else_is_on_stdout(
    pair: list[str], chat_target: Path, chat_draft: Path
) -> None:
    run = pyspec("generate", *pair, "--temp", "0", "hello")
    assert (run.returncode, run.stderr) == (0, b"")
    assert run.stdout == generated(chat_target, chat_draft, "hello", temperature=0)
    assert run.stdout == generated(chat_target, None, "hello", temperature=0)


def test_the_options_reach_the_sampler(
    pair: list[str], chat_target: Path, chat_draft: Path
) -> None:
    settings = {
        "temperature": 1.3,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "repeat_penalty": 1.2,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "repeat_last_n": 16,
        "seed": 7,
    }
    options = [
        part
        for name, value in settings.items()
        for part in (f"--{name.replace('temperature', 'temp').replace('_', '-')}", str(value))
    ]
    run = pyspec("generate", *pair, *options, "hello")
    assert run.stdout == generated(chat_target, chat_draft, "hello", **settings)
    assert run.stdout != generated(chat_target, chat_draft, "hello", seed=7)


def test_a_seed_writes_the_same_text_in_two_processes(pair: list[str]) -> None:
    runs = [pyspec("generate", *pair, "--seed", "3", "hello").stdout for _ in range(2)]
    assert runs[0] == runs[1] != b""


def test_the_prompt_may_come_from_an_argument_a_file_or_a_pipe(
    pair: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hellö\n")
    options = ["generate", *pair, "--temp", "0"]
    expected = pyspec(*options, "hellö").stdout
    assert pyspec(*options, "--file", file).stdout == expected
    assert pyspec(*options, stdin="hellö\n".encode()).stdout == expected
    assert pyspec(*options, "--file", "-", stdin="hellö\n".encode()).stdout == expected


def test_raw_and_system_change_the_prompt(
    pair: list[str], chat_target: Path, chat_draft: Path
) -> None:
    options = ["generate", *pair, "--temp", "0", "--stats", "json"]
    counts = {
        name: json.loads(pyspec(*options, *extra, "hi").stderr)["prompt_tokens"]
        for name, extra in (("chat", []), ("raw", ["--raw"]), ("system", ["--system", "be brief"]))
    }
    with Engine(chat_target, chat_draft, threads=1) as engine:
        assert engine.target.chat_template == CHATML
        assert counts["raw"] == len(engine.target.tokenize("hi"))
        messages = [{"role": "user", "content": "hi"}]
        assert counts["chat"] == len(prompt_ids(engine.target, messages))
        messages.insert(0, {"role": "system", "content": "be brief"})
        assert counts["system"] == len(prompt_ids(engine.target, messages))


def test_stop_is_repeatable(pair: list[str]) -> None:
    whole = pyspec("generate", *pair, "--temp", "0", "hello").stdout.decode()
    stop = whole[7:9]
    run = pyspec("generate", *pair, "--temp", "0", "--stop", "@@@@", "--stop", stop, "hello")
    assert run.stdout.decode() == whole[: whole.index(stop)]


# ---- statistics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--stats", "json", "hi"], ["hi", "--stats", "json"]])
def test_statistics_as_json_are_one_line_with_the_promised_keys(
    pair: list[str], arguments: list[str]
) -> None:
    run = pyspec("generate", *pair, "--gamma", "3", *arguments)
    assert run.returncode == 0
    assert run.stderr.count(b"\n") == 1
    statistics = json.loads(run.stderr)
    assert set(STATISTICS) <= set(statistics)
    assert sum(statistics["accepted_histogram"]) == statistics["rounds"]
    assert statistics["completion_tokens"] <= 24


def test_statistics_without_a_value_do_not_swallow_the_prompt(pair: list[str]) -> None:
    run = pyspec("generate", *pair, "--gamma", "2", "--stats", "hi")
    assert run.returncode == 0
    assert b"tokens/s" in run.stderr
    assert b"accepted" in run.stderr


def test_a_prompt_called_stats_is_a_prompt(pair: list[str]) -> None:
    run = pyspec("generate", *pair, "--temp", "0", "--", "--stats")
    assert (run.returncode, run.stderr) == (0, b"")


def test_no_draft_decodes_plainly_and_says_so(chat_target: Path) -> None:
    run = pyspec("generate", "-m", chat_target, "--no-draft", "-n", "5", "--stats", "json", "hi")
    statistics = json.loads(run.stderr)
    assert (statistics["drafted"], statistics["acceptance_rate"]) == (0, None)


# ---- streaming ----------------------------------------------------------------------------------------


def test_each_rounds_text_is_written_at_once(chat_target: Path, chat_draft: Path) -> None:
    process = subprocess.Popen(
        [*PYSPEC, "generate", "-m", chat_target, "-d", chat_draft, "-n", "3000", "hi"],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    reads = []
    while data := os.read(process.stdout.fileno(), 1 << 16):
        reads.append(data)
    process.stdout.close()
    assert process.wait() == 0
    # A buffered stream would come in blocks of 8 KiB, or all at the end.
    assert len(reads) > 20


@pytest.mark.parametrize("phase", ["prefill", "rounds"])
def test_ctrl_c_ends_at_once_without_a_traceback(tmp_path: Path, phase: str) -> None:
    # Large enough that a pass over the prompt takes seconds.
    target = write_llama(tmp_path / "t.gguf", all_bytes(), width=256, layers=12, context=1 << 17)
    prompt = "hello " * (5000 if phase == "prefill" else 1)
    process = subprocess.Popen(
        [*PYSPEC, "generate", "-m", target, "--ctx", "40000", "--threads", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(prompt.encode())
    process.stdin.close()
    if phase == "rounds":
        os.read(process.stdout.fileno(), 1)
    else:
        time.sleep(3)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    assert process.stderr is not None
    assert (process.returncode, process.stderr.read().strip()) == (130, b"")
    process.stdout.close()
    process.stderr.close()


def test_a_reader_that_goes_away_is_no_error_message(pair: list[str]) -> None:
    process = subprocess.Popen(
        [*PYSPEC, "generate", *pair, "-n", "3000", "hi"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


# ---- terminals ----------------------------------------------------------------------------------------


def test_accepted_draft_tokens_are_coloured_on_a_terminal(pair: list[str]) -> None:
    def answer(*options: str, **environment: str) -> str:
        # A fixed gamma: whether drafting pays on a busy machine is not what is asked.
        fixed = ("--temp", "0", "--gamma", "4")
        shown = on_terminal("generate", *pair, *fixed, *options, "hello", **environment)
        assert shown.endswith("\n")
        # Before it is progress, which hides the cursor and shows it again.
        return shown.rpartition("\x1b[?25h")[2]

    assert "\x1b[32m" in answer("--show-drafts")
    assert "\x1b[32m" not in answer()
    assert "\x1b[32m" not in answer("--show-drafts", NO_COLOR="1")


def test_colour_turns_itself_off_in_a_pipe(pair: list[str]) -> None:
    run = pyspec("generate", *pair, "--temp", "0", "--show-drafts", "hello")
    assert b"\x1b" not in run.stdout


def test_characters_that_the_terminal_cannot_show_do_not_end_the_run(pair: list[str]) -> None:
    run = pyspec("generate", *pair, "--seed", "1", "-n", "200", "hi", PYTHONIOENCODING="ascii")
    assert run.returncode == 0
    assert run.stdout.isascii()


# ---- errors (run in this process, since there are many) --------------------------------------------------


class Fails(Protocol):
    def __call__(self, status: int, *parts: str, arguments: Sequence[str | Path]) -> None: ...


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fails:
    """Runs pyspec generate, which must end with this status and one line with these parts."""

    def check(status: int, *parts: str, arguments: Sequence[str | Path]) -> None:
        monkeypatch.setattr(sys, "argv", ["pyspec", "generate", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, message = capsys.readouterr()
        assert (ended.value.code, out) == (status, ""), message
        assert message.count("\n") == 1, message
        assert "Traceback" not in message
        for part in parts:
            assert part in message

    return check


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-n", "0"], "max-tokens must be 1 or more, not 0"),
        (["--temp", "-1"], "temperature must be 0 or more"),
        (["--temp", "nan"], "temperature must be 0 or more"),
        (["--top-p", "0"], "top-p must be over 0 and at most 1"),
        (["--top-p", "1.5"], "top-p must be over 0 and at most 1"),
        (["--top-k", "-1"], "top-k must be 0 (off) or more"),
        (["--min-p", "2"], "min-p must be from 0 to 1"),
        (["--repeat-penalty", "0"], "repeat penalty must be over 0"),
        (["--seed", "-5"], "seed must be from 0"),
        (["--gamma", "-1"], "gamma must be auto, or from 0 to 31"),
        (["--gamma", "32"], "gamma must be auto, or from 0 to 31"),
        (["--ctx", "0"], "the context must be from 1 to"),
        (["--threads", "0"], "threads must be from 1 to 512"),
        (["--threads", "100000"], "threads must be from 1 to 512"),
        (["--draft-threads", "0"], "the draft's threads must be from 1 to 512"),
        (["--top-k", "2147483648"], "top-k must be 0 (off) or more, below 2**31"),
        (["--stop", ""], "stop string must not be empty"),
        (["--no-draft"], "--draft and --no-draft exclude each other"),
        (["--raw", "--system", "x"], "--system needs the chat template"),
        (["--stats=xml"], "--stats takes json or nothing"),
        (["--file", "nowhere.txt"], "not both"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_is_one_line_and_status_2(
    pair: list[str], options: Sequence[str], message: str, fails: Fails
) -> None:
    fails(2, message, arguments=[*pair, *options, "hi"])


def test_prompts_that_are_none(
    pair: list[str], tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(2, "the prompt is empty", arguments=[*pair, ""])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    fails(2, "the prompt is empty", arguments=pair)
    fails(2, "cannot read", "no.txt", arguments=[*pair, "--file", tmp_path / "no.txt"])


def test_model_files_that_cannot_be_used(tmp_path: Path, chat_target: Path, fails: Fails) -> None:
    cases = {
        "missing": (tmp_path / "none.gguf", "no such file"),
        "empty": (empty(tmp_path / "empty.gguf"), "empty"),
        "foreign": (foreign(tmp_path / "page.gguf"), "not a GGUF"),
        "truncated": (truncated(tmp_path / "half.gguf", chat_target), "truncated"),
        "header": (truncated(tmp_path / "head.gguf", chat_target, 0.001), "truncated"),
    }
    for path, message in cases.values():
        fails(1, path.name, message, arguments=["-m", path, "hi"])
        fails(1, path.name, message, arguments=["-m", chat_target, "-d", path, "hi"])


def test_a_prompt_longer_than_the_context(pair: list[str], fails: Fails) -> None:
    arguments = [*pair, "--ctx", "32", "--raw", "x" * 100]
    fails(1, "the prompt has", "tokens and the context 32", arguments=arguments)


def test_a_context_larger_than_memory(pair: list[str], fails: Fails) -> None:
    fails(1, "GB of KV cache", arguments=[*pair, "--ctx", "2000000000", "hi"])


def test_a_vocabulary_that_does_not_fit(chat_target: Path, tmp_path: Path, fails: Fails) -> None:
    vocabulary = byte_level()
    for token in range(3, 24):
        vocabulary = vocabulary.spelled(token, 3 * chr(ord("A") + token))
    draft = write_llama(tmp_path / "d.gguf", vocabulary, width=32, layers=1)
    fails(1, "only 0 of its 21 tokens", arguments=["-m", chat_target, "-d", draft, "hi"])


def test_a_model_without_a_chat_template(tiny_target: Path, fails: Fails) -> None:
    fails(1, "no chat template", "--raw", arguments=["-m", tiny_target, "a"])


def test_nan_logits(tmp_path: Path, fails: Fails) -> None:
    damaged = write_llama(tmp_path / "nan.gguf", all_bytes(), nan_token=9)
    fails(1, "the target's logits", "NaN", arguments=["-m", damaged, "hi"])


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    for order in (["--debug", "generate"], ["generate", "--debug"]):
        run = pyspec(*order, "-m", tmp_path / "none.gguf", "hi")
        assert run.returncode == 1
        assert b"Traceback" in run.stderr


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for", "does not work: TemplateSyntaxError"),
        ("{% break %}", "does not work: SyntaxError"),
        ("{{ 1 // 0 }}", "does not work: ZeroDivisionError"),
        ("{{ messages[5].content }}", "does not work: UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "does not work: SecurityError"),
    ],
)
def test_a_chat_template_that_does_not_work(
    template: str, message: str, tmp_path: Path, fails: Fails
) -> None:
    vocabulary = replace(all_bytes(), chat_template=template)
    target = write_llama(tmp_path / "t.gguf", vocabulary)
    fails(1, message, "--raw", arguments=["-m", target, "hi"])


def test_a_chat_template_that_refuses(tmp_path: Path, fails: Fails) -> None:
    vocabulary = replace(all_bytes(), chat_template="{{ raise_exception('no system role') }}")
    target = write_llama(tmp_path / "t.gguf", vocabulary)
    fails(2, "refuses the messages: no system role", arguments=["-m", target, "hi"])


# ---- streams that are closed, full or odd ---------------------------------------------------------------


def in_shell(command: str, *arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", f'"$@" {command}', "bash", *PYSPEC, "generate", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )


def test_closed_streams(pair: list[str]) -> None:
    options = [*pair, "--temp", "0"]
    text = in_shell("", *options, "hello").stdout
    run = in_shell("<&-", *options)
    assert (run.returncode, run.stdout) == (2, b"")
    assert b"the prompt is empty" in run.stderr
    assert in_shell("2>&-", *options, "hello").stdout == text
    run = in_shell(">&-", *options, "hello")
    assert (run.returncode, run.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_output_that_is_full(pair: list[str]) -> None:
    run = in_shell(">/dev/full", *pair, "hello")
    assert (run.returncode, run.stderr) == (1, b"pyspec: No space left on device\n")


def test_prompts_that_are_not_utf_8(pair: list[str], tmp_path: Path) -> None:
    data = b"caf\xe9 \xf7\x88\x93\x82\x00 \r\n end"
    file = tmp_path / "prompt"
    file.write_bytes(data)
    options = ["generate", *pair, "--temp", "0"]
    runs = [pyspec(*options, stdin=data), pyspec(*options, "--file", file)]
    assert [run.returncode for run in runs] == [0, 0]
    assert runs[0].stdout == runs[1].stdout


def test_sigterm_ends_as_ctrl_c_does(pair: list[str]) -> None:
    process = subprocess.Popen(
        [*PYSPEC, "generate", *pair, "-n", "3000", "hi"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 1)
    process.terminate()
    _, errors = process.communicate()
    assert (process.returncode, errors) == (143, b"")


# ---- help ---------------------------------------------------------------------------------------------


def test_version_names_pyspec_llama_cpp_and_the_cpu() -> None:
    text = pyspec("--version").stdout.decode()
    assert re.match(r"pyspec \d+\.\d+\.\d+\n", text)
    assert "llama-cpp-python 0.3.36" in text
    assert "CPU features: " in text
    assert re.search(r"^kernels: (c|avx2|avxvnni|avx512|amx|none \(.+\))$", text, re.MULTILINE)
    assert re.search(r"^bit-exact: (yes|no \(.+\))$", text, re.MULTILINE)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["generate", "-h"], ["models", "-h"]])
def test_help_is_there(arguments: list[str]) -> None:
    run = pyspec(*arguments)
    assert run.returncode == 0
    assert run.stdout.startswith(b"Usage: ")


def test_an_unknown_command_is_bad_usage() -> None:
    assert pyspec("generat").returncode == 2


def test_shell_completion_knows_commands_and_models() -> None:
    def complete(words: str, at: int) -> str:
        return subprocess.run(
            [Path(sys.executable).with_name("pyspec")],
            env={
                **os.environ,
                "_PYSPEC_COMPLETE": "bash_complete",
                "COMP_WORDS": words,
                "COMP_CWORD": str(at),
            },
            capture_output=True,
            text=True,
            check=False,
        ).stdout

    assert "plain,generate" in complete("pyspec gen", 1)
    assert "plain,smollm2-135m" in complete("pyspec generate --model smol", 3)


OTHER_VERSION = """
import sys
import llama_cpp
llama_cpp.__version__ = "0.3.37"
from pyspec.cli import main
main()
"""


def test_without_the_bridge_it_says_so_once_and_works(chat_target: Path, chat_draft: Path) -> None:
    arguments = ["generate", "-m", str(chat_target), "-d", str(chat_draft), "--temp", "0"]
    arguments += ["-n", "20", "hi"]
    off = pyspec(*arguments, PYSPEC_BRIDGE="off")
    other = subprocess.run(
        [sys.executable, "-c", OTHER_VERSION, *arguments], capture_output=True, check=False
    )
    expected = (
        "pyspec: llama.cpp runs without pyspec's bridge ({}): checking several tokens costs more, "
        "and a draft may change greedy text\n"
    )
    assert (off.returncode, other.returncode) == (0, 0)
    assert off.stderr.decode() == expected.format("PYSPEC_BRIDGE=off")
    assert other.stderr.decode() == expected.format("llama-cpp-python is 0.3.37, not 0.3.36")
    assert off.stdout == other.stdout != b""


def test_kernels_that_were_turned_off_are_not_mentioned(chat_target: Path) -> None:
    run = pyspec("generate", "-m", chat_target, "-n", "5", "hi", PYSPEC_KERNELS="off")
    assert (run.returncode, run.stderr) == (0, b"")
    run = pyspec("generate", "-m", chat_target, "-n", "5", "hi", PYSPEC_KERNELS="sse")
    assert run.returncode == 0
    assert run.stderr.startswith(b"pyspec: no kernels (PYSPEC_KERNELS is none of off, c, avx2")


# ---- grammars ------------------------------------------------------------------------------------------


def test_json_of_a_schema(chat_target: Path, chat_draft: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"type": "array", "items": {"enum": ["é", 7]}, "minItems": 3, "maxItems": 5}'
    )
    options = ["--raw", "--seed", "1", "--json-schema", schema, "Numbers:"]
    run = pyspec("generate", "-m", chat_target, "-d", chat_draft, *options)
    assert (run.returncode, run.stderr) == (0, b"")
    written = json.loads(run.stdout)
    assert 3 <= len(written) <= 5
    assert set(written) <= {"é", 7}


@pytest.mark.parametrize(
    "text", ['# llama.cpp\nroot ::= ("ab" | "ba") "!"\n', 'start: ("ab" | "ba") "!"\n']
)
def test_a_text_of_a_grammar(chat_target: Path, tmp_path: Path, text: str) -> None:
    grammar = tmp_path / "grammar"
    grammar.write_text(text)
    run = pyspec("generate", "-m", chat_target, "--raw", "--grammar", grammar, "Say:")
    assert (run.returncode, run.stderr) == (0, b"")
    assert run.stdout in (b"ab!", b"ba!")


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--json-schema", b'{"type": ', "file is not JSON: Expecting value: line 1 column 10"),
        (
            "--json-schema",
            b'{"type": "strin"}',
            "file: the JSON schema cannot be used: Invalid type: strin",
        ),
        ("--json-schema", b"[]", "file: the JSON schema must be an object, not list"),
        ("--json-schema", b"[" * 99999, "file is nested too deeply"),
        (
            "--grammar",
            b"start: foo",
            'file: the grammar cannot be used: at 1(8): unknown name: "foo"',
        ),
        ("--grammar", b'root ::= "a', "file: the grammar is not GBNF: "),
        ("--grammar", b"\xff", "file is not UTF-8 text: "),
        ("--grammar", None, "No such file or directory"),
    ],
)
def test_a_wrong_grammar_is_one_line_and_status_2(
    option: str, text: bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    if text is not None:
        path.write_bytes(text)
    run = pyspec("generate", "-m", "none.gguf", option, path, "Hello")
    assert run.returncode == 2
    assert run.stdout == b""
    (line,) = run.stderr.decode().splitlines()
    assert line.startswith("pyspec: ")
    assert message in line


def test_one_grammar_at_a_time() -> None:
    run = pyspec("generate", "--json-schema", "a", "--grammar", "b", "Hello")
    assert (run.returncode, run.stdout) == (2, b"")
    assert b"--json-schema and --grammar exclude each other" in run.stderr
