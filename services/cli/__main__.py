"""`python -m services.cli` is `cellpipe`."""

from services.cli.entry import main

main()
