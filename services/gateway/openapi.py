"""The OpenAPI document of the gateway, made from the schema. Pure."""

from __future__ import annotations

from typing import Any

from shared.api.schema import Body, ChatCompletion, Detokenize, TextCompletion, Tokenize

BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": TextCompletion,
    "/tokenize": Tokenize,
    "/detokenize": Detokenize,
}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_REPLY = {
    "description": "the answer",
    "content": {"application/json": {}, "text/event-stream": {}},
}
_REFUSAL = {
    "description": "refused, and why",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
_RESPONSES = {"200": _REPLY, "4XX": _REFUSAL, "5XX": _REFUSAL}


def openapi_document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {}
    for path, body in BODIES.items():
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[body.__name__] = schema
        reference = {"$ref": f"#/components/schemas/{body.__name__}"}
        paths[path] = {
            "post": {
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": reference}},
                },
                "responses": _RESPONSES,
            }
        }
    for path in ("/v1/models", "/health", "/ready"):
        paths[path] = {"get": {"responses": _RESPONSES}}
    for path in ("/v1/chat/completions/{completion_id}", "/v1/completions/{completion_id}"):
        paths[path] = {
            "get": {
                "parameters": [
                    {
                        "name": "completion_id",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "string"},
                    }
                ],
                "responses": _RESPONSES,
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "cellpipe", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas},
    }
