"""Entry point of `python -m coserve`."""

from coserve.cli.app import main

main()
