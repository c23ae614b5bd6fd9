"""`python -m services.cli` is `cellpipe`."""

from services.cli.app import main

main()
