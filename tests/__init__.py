import os
import sys

# Before anything loads OpenMP, here and in the processes that tests start: threads that wait by spinning take
# the cores from whatever else runs, and on a busy machine a test took ten times as long. Benchmarks write models
# with this package too; waiting so would cost each of their passes 10 ms.
if "pytest" in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
