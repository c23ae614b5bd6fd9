"""Bodies in OpenAI's format: what may be asked, and how it is answered, by HTTP or in a batch.

schema     what clients may send, field by field
ask        body -> token ids and sampling
choice     tokens -> text, and why there is none
documents  text -> JSON objects
errors     what a failure means, with its status

Knows no socket, file, queue or store.
"""
