"""Kills things on purpose and proves that nothing was lost.

schedule   when which fault comes, from a seed; pure
faults     does one fault to processes or servers, and undoes it
questions  what is asked, from the seed; pure
reference  the undisturbed answer that every request must equal
memory     the memory of each process, and whether it is flat; pure
verdict    counts what was seen; pure
report     the verdict as text and as JSON
run        all of it in order

Servers, processes and load of a run are `shared.local_cluster`.
"""
