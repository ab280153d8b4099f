"""``python -m fp8core``: the command line, also from a bare checkout."""

from fp8core.cli import main

main()
