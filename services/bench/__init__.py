"""Measures speed beside what the machine could do and beside a peer, interleaved, in medians."""
