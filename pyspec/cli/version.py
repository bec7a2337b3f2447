"""What `pyspec --version` says."""

from __future__ import annotations

import re
from importlib import metadata


def version_text() -> str:
    """Versions of pyspec and llama.cpp, CPU features, kernels, and whether the bridge is attached."""
    from pyspec import bridge, llama

    status, kernels = bridge.attach(), bridge.attach_kernels()
    features = re.findall(r"(\w+) = 1\b", llama.system_info())
    return "\n".join(
        (
            f"pyspec {metadata.version('pyspec')}",
            f"llama.cpp {llama.llama_cpp_version()} in llama-cpp-python {llama.version()}",
            f"CPU features: {', '.join(features)}",
            f"kernels: {kernels.instructions or f'none ({kernels.reason})'}",
            "bit-exact: " + ("yes" if status.attached else f"no ({status.reason})"),
        )
    )
