import os
import sys

# Before anything loads OpenMP, here and in the processes that tests start: threads that spin take the
# cores from whatever else runs, and on a busy machine a test took ten times as long. Benchmarks write
# models with this package too: there each pass would take 10 ms longer.
if "pytest" in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
