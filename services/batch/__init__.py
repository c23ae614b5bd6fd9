"""Runs files of requests in OpenAI's batch format.

lines        lines of the input file: the requests of each, or why there are none
line_answer  the answer of one line, from events to its output line
output       the output file: one line a request, whatever is killed
run          the turn: submit, look, write
"""
