"""The options that `cellpipe gateway` and `cellpipe serve` share. Opens nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from shared.config import Config, parse_size

if TYPE_CHECKING:
    from services.gateway.backend import Backend


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """As typed at the command line."""

    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback need a key.")
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 is any that is free.", min=0, max=65_535)
    ] = 8000
    api_keys_file: Annotated[
        Path | None, typer.Option(help="Lines that `cellpipe key` prints, one a key.")
    ] = None
    allow_anonymous: Annotated[
        bool, typer.Option("--allow-anonymous", help="Let everybody in who reaches --host.")
    ] = False
    max_body: Annotated[str, typer.Option(help="Largest body of a request.")] = "4MiB"
    max_running: Annotated[
        int, typer.Option(help="Answers that run at once for one key.", min=1)
    ] = 256
    per_minute: Annotated[
        int, typer.Option(help="Requests a minute for one key; 0 is no limit.", min=0)
    ] = 0
    request_timeout: Annotated[
        float, typer.Option(help="Seconds that an answer may take.", min=1, max=1e6)
    ] = 600.0
    keep_alive: Annotated[
        float, typer.Option(help="Seconds of silence before a stream gets a comment.", min=0.05)
    ] = 15.0
    resume_grace: Annotated[
        float, typer.Option(help="Seconds that a stream runs on without its client.", min=0)
    ] = 5.0
    grace: Annotated[
        float, typer.Option(help="Seconds that answers may take to end at SIGTERM.", min=1)
    ] = 30.0
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="A web page that may call, as https://host; may be repeated."),
    ] = None
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain; serves HTTPS.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="Its private key.")] = None

    def server(self, config: Config) -> Callable[[Backend], None]:
        """Checks the options now; what it returns serves until SIGTERM or SIGINT."""
        from services.gateway.access import Keys
        from services.gateway.app import HttpOptions
        from services.gateway.gateway import Gateway, GatewayLimits
        from services.gateway.server import ServerOptions, check_options, serve

        keys = Keys.read(config.api_keys, self.api_keys_file)
        limits = GatewayLimits(
            max_running=self.max_running,
            max_per_minute=self.per_minute or None,
            request_timeout_s=self.request_timeout,
            resume_grace_s=self.resume_grace,
        )
        http = HttpOptions(
            max_body_bytes=parse_size(self.max_body, field="--max-body"),
            keep_alive_s=self.keep_alive,
            origins=tuple(self.allow_origin or ()),
        )
        options = ServerOptions(
            host=self.host,
            port=self.port,
            allow_anonymous=self.allow_anonymous,
            grace_s=self.grace,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
        )
        check_options(options, keys)

        def run(backend: Backend) -> None:
            serve(
                Gateway(backend, limits),
                keys,
                options,
                http,
                listening=lambda url: typer.echo(f"listening on {url}/v1", err=True),
            )

        return run


def with_gateway_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options above, as its argument `options`."""
    hints = get_type_hints(GatewayOptions, include_extras=True)
    own = [
        p for p in inspect.signature(command, eval_str=True).parameters.values()
        if p.name != "options"
    ]  # fmt: skip
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(GatewayOptions)
    ]

    def run(**values: Any) -> None:
        options = GatewayOptions(**{name: values.pop(name) for name in hints})
        command(**values, options=options)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own, *shared)}
    return run
