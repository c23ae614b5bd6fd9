"""Runs files of requests in OpenAI's batch format.

bodies   bodies of OpenAI requests and responses
lines    lines of the input file, and the request id of each
output   the output file: one line a request, whatever is killed
run      the turn: submit, look, write
"""
