"""Kills things on purpose and proves that nothing was lost.

schedule   when which fault comes, from a seed; pure
processes  the private servers, schedulers and workers of one run
faults     does one fault to them and undoes it
load       the requests, and what was seen of each
reference  the undisturbed answer that every request must equal
memory     the memory of each process, and whether it is flat; pure
verdict    counts what was seen; pure
report     the verdict as text and as JSON
run        all of it in order
"""
