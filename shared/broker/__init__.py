"""Messaging: the promises (`base`), RabbitMQ (`rabbitmq`, the only importer of pika), `memory`."""
