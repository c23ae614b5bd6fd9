"""A cluster on this machine for the length of one command, which it starts and ends itself.

processes  schedulers and workers as `cellpipe` commands
servers    private RabbitMQ and Redis, or those of a cluster
start      connections, and the wait until all of it serves
load       requests, a few at a time, and what was seen of each

Knows neither what breaks nor what is measured.
"""
