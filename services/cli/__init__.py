"""The `cellpipe` command. Only wires: parses options, opens connections, prints."""
