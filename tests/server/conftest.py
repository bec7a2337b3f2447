"""One service for the tests that do not change it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import openai
import pytest

from pyspec.engine import Engine
from pyspec.llama import Model
from tests.models import all_bytes, write_llama
from tests.server.fakes import FakeEngine
from tests.server.service import serving

# Says what tools there are, and shows calls and their results, as Qwen's template does.
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Call as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}"
    '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def engine(chat_target: Path, chat_draft: Path) -> Iterator[Engine]:
    with Engine(chat_target, chat_draft, gamma=4, n_ctx=512, threads=1, parallel=4) as engine:
        yield engine


@pytest.fixture(scope="session")
def url(engine: Engine) -> Iterator[str]:
    with serving(engine) as url:
        yield url


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def reference(chat_target: Path, chat_draft: Path) -> Iterator[Engine]:
    """The same pair in an engine of its own, for one request at a time."""
    with Engine(chat_target, chat_draft, gamma=4, n_ctx=512, threads=1) as engine:
        yield engine


@pytest.fixture(scope="session")
def tools_target(models: Path) -> Path:
    """A target whose template has tools."""
    vocabulary = replace(all_bytes(), chat_template=TOOLS_TEMPLATE)
    return write_llama(models / "tools-target.gguf", vocabulary)


@pytest.fixture(scope="session")
def tools_model(tools_target: Path) -> Model:
    return Model(tools_target)


@pytest.fixture
def fake_url(fake: FakeEngine) -> Iterator[str]:
    """A service over the test file's own fake engine, of which no round is held back at the end."""
    with serving(cast(Engine, fake)) as url:
        yield url
        rounds, fake.rounds = fake.rounds, None
        if rounds is not None:
            rounds.release(10_000)
