"""llama.cpp as a library: its start, its log, its version, and how many threads suit the machine.

Its own log lines go to the logger "pyspec.llama".
"""

from __future__ import annotations

import logging
import os
from collections import deque

# Should llama.cpp end the process, the debugger's report that it would start belongs on no one's output.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

import llama_cpp
import psutil

log = logging.getLogger("pyspec.llama")

_LOG_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.WARNING}
_CONTINUED = 5
# llama.cpp says why a call failed only in its log, so its last complaints are kept for the message.
complaints: deque[str] = deque(maxlen=8)
_last_level = logging.DEBUG


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _to_logging(level: int, text: bytes, _: object) -> None:
    global _last_level
    if level != _CONTINUED:
        _last_level = _LOG_LEVELS.get(level, logging.DEBUG)
    line = text.decode("utf-8", "replace").strip(" \n.")
    if line:
        log.log(_last_level, "%s", line)
        if _last_level == logging.WARNING:
            complaints.append(line)


llama_cpp.llama_log_set(_to_logging, None)
llama_cpp.llama_backend_init()


def why() -> str:
    """The first of llama.cpp's last complaints, the one nearest to the cause."""
    return complaints[0] if complaints else "llama.cpp gave no reason"


def default_threads() -> int:
    """Physical cores that this process may run on: more threads than that fight for the same units."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(psutil.cpu_count(logical=False) or 1, allowed or 1))


def version() -> str:
    """llama-cpp-python's version."""
    return str(llama_cpp.__version__)


def llama_cpp_version() -> str:
    """The version of the llama.cpp inside it."""
    return str(llama_cpp.llama_version().decode())


def system_info() -> str:
    """The CPU features that llama.cpp was built with, as it prints them."""
    return str(llama_cpp.llama_print_system_info().decode().strip(" |\n"))
