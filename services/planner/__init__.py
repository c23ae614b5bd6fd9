"""Pipelines on paper: what a model on a pool of machines needs, costs and gives. All of it pure.

`specs` and `library` say what machines, networks and models are; `tensors` and `cost` count a
model's bytes and work; the rest turns both into a plan.
"""
