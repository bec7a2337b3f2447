"""What llama.cpp 0.3.36 does when the end of a sequence is removed: docs/memory-kinds.md as tests.

A round decodes one token and a draft after it in one batch, then removes what was rejected. These are
facts about llama.cpp, not about this package: when one changes, so may the engine.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from tests.models import (
    Reference,
    Vocabulary,
    write_gemma3,
    write_jamba,
    write_lfm2,
    write_llama,
    write_mamba,
    write_qwen35,
)

PREFIX, BLOCK = 40, 5
WINDOW = 16  # of write_gemma3
RING = 256  # cells of its windowed cache: the window and a batch, rounded up to a multiple of 256
ROUNDING, WRONG = 0.02, 0.5  # the largest difference in a logit: logits are about 2 in size

RECURRENT = ["mamba", "jamba", "lfm2", "qwen35"]
WITH_SNAPSHOTS = ["lfm2", "qwen35"]


@pytest.fixture(scope="module")
def paths(models: Path, vocabulary: Vocabulary) -> dict[str, Path]:
    writers: list[Callable[..., Path]] = [
        write_llama,
        write_gemma3,
        write_mamba,
        write_jamba,
        write_lfm2,
        write_qwen35,
    ]
    names = [writer.__name__.removeprefix("write_") for writer in writers]
    return {
        name: writer(models / f"{name}.gguf", vocabulary)
        for name, writer in zip(names, writers, strict=True)
    }


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 24, count)]


def positions(model: Reference) -> tuple[int, int]:
    return (
        llama_cpp.llama_memory_seq_pos_min(model.memory, 0),
        llama_cpp.llama_memory_seq_pos_max(model.memory, 0),
    )


def error_after_removal(
    path: Path, drop: int, *, prefix: int = PREFIX, block: int = BLOCK, **settings: int
) -> float | None:
    """Decode a prefix and a block, remove ``drop`` tokens and go on.

    Returns the largest difference in a logit from a context that never saw the removed tokens, or None
    when llama.cpp refused.
    """
    tokens = random_tokens(prefix + block)
    keep = prefix + block - drop
    continuation = random_tokens(6, seed=1)
    with Reference(path, **settings) as model:
        model.decode(tokens[:prefix])
        model.decode(tokens[prefix:], prefix)
        if not model.remove(keep):
            return None
        got = [model.decode([token], keep + i)[0] for i, token in enumerate(continuation)]
    with Reference(path, n_ctx=1024, swa_full=True) as model:
        expected = model.evaluate(tokens[:keep] + continuation)[keep:]
    return float(np.abs(np.stack(got) - expected).max())


# ---- what a model says of itself ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "recurrent", "hybrid", "window", "snapshots"),
    [
        ("llama", False, False, 0, 0),
        ("gemma3", False, False, WINDOW, 0),
        ("mamba", True, False, 0, 0),
        ("jamba", False, True, 0, 0),
        ("lfm2", False, True, 0, 8),
        ("qwen35", False, True, 0, 8),
    ],
)
def test_a_context_tells_its_kind(
    kind: str,
    recurrent: bool,
    hybrid: bool,
    window: int,
    snapshots: int,
    paths: dict[str, Path],
) -> None:
    with Reference(paths[kind], n_rs_seq=8) as model:
        assert llama_cpp.llama_model_is_recurrent(model.model) == recurrent
        assert llama_cpp.llama_model_is_hybrid(model.model) == hybrid
        assert llama_cpp.llama_model_n_swa(model.model) == window
        # Where there are no snapshots, the request is dropped without a word.
        assert llama_cpp.llama_n_rs_seq(model.context) == snapshots
        model.decode(random_tokens(PREFIX))
        first = PREFIX - 1 if recurrent or hybrid else 0
        assert positions(model) == (first, PREFIX - 1)


@pytest.mark.parametrize("kind", ["llama", "gemma3", *RECURRENT])
def test_whether_positions_can_shift_says_nothing_of_removal(
    kind: str, paths: dict[str, Path]
) -> None:
    with Reference(paths[kind]) as model:
        assert llama_cpp.llama_memory_can_shift(model.memory) == (kind != "qwen35")


@pytest.mark.parametrize("kind", ["llama", "gemma3", *RECURRENT])
def test_the_whole_sequence_can_always_be_removed(kind: str, paths: dict[str, Path]) -> None:
    with Reference(paths[kind]) as model:
        model.decode(random_tokens(PREFIX))
        assert model.remove(0)
        assert positions(model) == (-1, -1)


# ---- KV caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("drop", [1, BLOCK, 20])
def test_a_kv_cache_drops_any_suffix(kind: str, drop: int, paths: dict[str, Path]) -> None:
    for swa_full in (False, True):
        error = error_after_removal(paths[kind], drop, swa_full=swa_full)
        assert error is not None
        assert error < ROUNDING


@pytest.mark.parametrize(
    ("drop", "swa_full", "right"),
    [
        (BLOCK, False, True),
        (200, False, True),
        (250, False, False),
        (300, False, False),
        (250, True, True),
        (300, True, True),
    ],
)
def test_a_windowed_cache_agrees_to_a_removal_that_needs_cells_it_has_reused(
    drop: int, swa_full: bool, right: bool, paths: dict[str, Path]
) -> None:
    settings = {"n_ctx": 1024, "n_batch": 1024, "n_ubatch": 16, "swa_full": swa_full}
    error = error_after_removal(paths["gemma3"], drop, prefix=700, **settings)
    assert error is not None
    assert error < ROUNDING if right else error > WRONG


def test_the_first_position_left_tells_whether_the_window_is_whole(paths: dict[str, Path]) -> None:
    settings = {"n_ctx": 1024, "n_batch": 1024, "n_ubatch": 16, "swa_full": False}
    prefix = 700
    with Reference(paths["gemma3"], **settings) as model:
        model.decode(random_tokens(prefix))
        model.decode(random_tokens(BLOCK), prefix)
        first, last = positions(model)
    assert last - RING < first < last - WINDOW
    # The token at position `keep` sees itself and the 15 before it.
    drop = last + 1 - (first + WINDOW - 1)
    whole = error_after_removal(paths["gemma3"], drop, prefix=prefix, **settings)
    lacking = error_after_removal(paths["gemma3"], drop + 4, prefix=prefix, **settings)
    assert whole is not None
    assert lacking is not None
    assert whole < ROUNDING < lacking


@pytest.mark.parametrize(("swa_full", "same"), [(False, False), (True, True)])
def test_a_removal_across_the_end_of_the_ring_changes_the_bits(
    swa_full: bool, same: bool, paths: dict[str, Path]
) -> None:
    """The cells are filled in another order afterwards, and attention adds them up in that order."""
    start = RING - 3
    tokens, draft = random_tokens(start + 20), random_tokens(BLOCK, seed=1)
    settings = {"n_ctx": 1024, "n_batch": 16, "n_ubatch": 16, "swa_full": swa_full}
    with Reference(paths["gemma3"], **settings) as model:
        expected = model.evaluate(tokens)
        model.evaluate(tokens[:start])
        model.decode(draft, start)
        assert model.remove(start)
        got = [model.decode([token], start + i)[0] for i, token in enumerate(tokens[start:])]
    difference = np.abs(np.stack(got) - expected[start:]).max()
    assert difference == 0 if same else 0 < difference < ROUNDING


def test_a_plain_cache_has_the_same_bits_after_a_removal(paths: dict[str, Path]) -> None:
    tokens, draft = random_tokens(PREFIX + 20), random_tokens(BLOCK, seed=1)
    with Reference(paths["llama"]) as model:
        expected = model.evaluate(tokens)
        model.evaluate(tokens[:PREFIX])
        model.decode(draft, PREFIX)
        assert model.remove(PREFIX)
        got = [model.decode([token], PREFIX + i)[0] for i, token in enumerate(tokens[PREFIX:])]
    np.testing.assert_array_equal(np.stack(got), expected[PREFIX:])


# ---- recurrent state ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_recurrent_state_refuses_and_stays_as_it_was(kind: str, paths: dict[str, Path]) -> None:
    tokens = random_tokens(PREFIX + BLOCK)
    with Reference(paths[kind]) as model:
        expected = model.evaluate(tokens)
        model.evaluate(tokens[:-1])
        assert not model.remove(PREFIX)
        assert positions(model)[1] == PREFIX + BLOCK - 2
        with pytest.raises(RuntimeError, match="llama_decode returned -1"):
            model.decode([3], PREFIX)  # a position before the end is refused too
        np.testing.assert_array_equal(model.decode(tokens[-1:], len(tokens) - 1)[0], expected[-1])


@pytest.mark.parametrize("kind", WITH_SNAPSHOTS)
@pytest.mark.parametrize(
    ("block", "drop", "agrees", "right"),
    [
        (BLOCK, 1, True, True),
        (BLOCK, BLOCK - 1, True, True),
        (BLOCK, BLOCK, True, False),  # the state before the batch has no snapshot of this batch
        (BLOCK, 8, True, False),
        (1, 1, True, False),
        (12, 8, True, True),
        (12, 9, False, False),
    ],
)
def test_snapshots_reach_back_to_the_first_token_of_the_last_batch(
    kind: str, block: int, drop: int, agrees: bool, right: bool, paths: dict[str, Path]
) -> None:
    error = error_after_removal(paths[kind], drop, block=block, n_rs_seq=8)
    assert (error is not None) == agrees
    if error is not None:
        assert error < ROUNDING if right else error > WRONG


@pytest.mark.parametrize("kind", WITH_SNAPSHOTS)
def test_a_second_removal_needs_a_decode_in_between(kind: str, paths: dict[str, Path]) -> None:
    tokens = random_tokens(PREFIX + BLOCK)
    with Reference(paths[kind], n_rs_seq=8) as model:
        model.decode(tokens)
        assert model.remove(PREFIX + 3)
        assert not model.remove(PREFIX + 2)
        model.decode(tokens[:2], PREFIX + 3)
        assert model.remove(PREFIX + 4)


@pytest.mark.parametrize("kind", WITH_SNAPSHOTS)
def test_keeping_snapshots_leaves_the_logits(kind: str, paths: dict[str, Path]) -> None:
    tokens = random_tokens(PREFIX)
    results = []
    for snapshots in (0, 8):
        with Reference(paths[kind], n_rs_seq=snapshots) as model:
            results.append((model.decode(tokens), model.evaluate(tokens)))
    np.testing.assert_array_equal(results[0], results[1])


def test_snapshots_need_a_wider_micro_batch_or_the_process_ends(paths: dict[str, Path]) -> None:
    program = (
        "import sys; from tests.models import Reference\n"
        "with Reference(sys.argv[1], n_rs_seq=8, n_ubatch=int(sys.argv[2])) as model:\n"
        "    model.decode([3] * 20)\n"
    )

    def status(n_ubatch: int) -> int:
        command = [sys.executable, "-c", program, str(paths["lfm2"]), str(n_ubatch)]
        environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
        root = Path(__file__).parent.parent
        return subprocess.run(
            command, env=environment, cwd=root, capture_output=True, check=False
        ).returncode

    assert status(10) == 0
    assert status(9) == -signal.SIGABRT


@pytest.mark.parametrize("kind", ["gemma3", *RECURRENT])
def test_a_saved_state_brings_any_memory_back(kind: str, paths: dict[str, Path]) -> None:
    """The partial state is what a KV cache cannot cut back: recurrent states and windows."""
    tokens = random_tokens(PREFIX + 10)
    draft = random_tokens(BLOCK, seed=1)
    flags = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
    with Reference(paths[kind]) as model:
        expected = model.evaluate(tokens)
        model.evaluate(tokens[:PREFIX])
        size = llama_cpp.llama_state_seq_get_size_ext(model.context, 0, flags)
        state = (ctypes.c_uint8 * size)()
        saved = llama_cpp.llama_state_seq_get_data_ext(model.context, state, size, 0, flags)
        assert saved == size
        for i, token in enumerate(draft):  # one by one, as a draft model would
            model.decode([token], PREFIX + i)
        assert llama_cpp.llama_state_seq_set_data_ext(model.context, state, size, 0, flags) == size
        assert model.remove(PREFIX)  # what is left of the draft, in the layers that have a KV cache
        got = [model.decode([token], PREFIX + i)[0] for i, token in enumerate(tokens[PREFIX:])]
    np.testing.assert_array_equal(np.stack(got), expected[PREFIX:])
