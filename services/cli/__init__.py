"""The `cellpipe` command. Only wires: parses options, opens connections, prints.

Command modules import what they run when it runs: a worker has 90 MB for all of its code, and
`cellpipe --help` should not wait for a tokenizer.
"""
