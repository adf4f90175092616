"""Entry point of `python -m coserve.cli`."""

from coserve.cli.app import main

main()
