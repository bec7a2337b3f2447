"""`python -m pyspec` is `pyspec`."""

from pyspec.cli import main

main()
