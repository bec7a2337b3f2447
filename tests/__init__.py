import os

# Before anything loads OpenMP, here and in the processes that tests start: threads that wait by spinning take
# the cores from whatever else runs, and on a busy machine a test took ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
