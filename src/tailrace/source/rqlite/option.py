"""The keys of `source:` with `type: rqlite`."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from tailrace.option import FilePath, Options, Place, Secret, Size, TypedOptions

SERVICE = "rqlite"
"""The service of events that name none: rqlite sends `service_id` only when it is configured."""

MAX_BODY_BYTES = 32_000_000


def split_listen(value: str) -> tuple[str, int]:
    """Host and port of `listen`; an IPv6 host stands in brackets. Raises ValueError for anything else."""
    host, colon, port = value.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("has an IPv6 address without brackets; write [::1]:8099")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError("must be host:port, such as 127.0.0.1:8099")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(value: str) -> str:
    split_listen(value)
    return value


def _path(value: str) -> str:
    if not value.startswith("/") or any(letter in value for letter in "?#{}") or value in ("/healthz", "/metrics"):
        raise ValueError("must begin with /, without ? # { }, and be neither /healthz nor /metrics")
    return value


def _url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("must be a URL such as http://127.0.0.1:4001")
    if parts.username is not None or parts.password is not None:
        raise ValueError("holds credentials; move them to api_auth: {username, password}")
    return value.rstrip("/")


def _journal_path(value: object, info: ValidationInfo) -> object:
    return Place.of(info).state / "journal" if value is None else value


ApiUrl = Annotated[str, AfterValidator(_url)]


class AuthOptions(Options):
    """Basic authentication."""

    username: str = Field(min_length=1)
    password: Secret = Field(description="take it from the environment: ${RQLITE_PASSWORD}")


class TlsOptions(Options):
    """HTTPS at the endpoint."""

    cert: FilePath = Field(description="the certificate with its chain, PEM")
    key: FilePath = Field(description="its private key, PEM, without a passphrase")
    client_ca: FilePath | None = Field(
        default=None, description="clients must show a certificate of this authority (mutual TLS)"
    )


class JournalOptions(Options):
    """What was received and is not yet applied, on disk: a folder for each cluster."""

    path: Annotated[FilePath, BeforeValidator(_journal_path, json_schema_input_type=str)] = Field(
        default=None,
        validate_default=True,
        description="default: the folder `journal` in `state`; on a cluster a folder that every executor sees",
    )
    max_bytes: Size = Field(
        default=20_000_000_000, description="above this a cluster's requests get 503, and rqlite keeps the rest"
    )
    segment_bytes: Size = Field(default=64_000_000, ge=1_000_000, description="how large a journal file grows")


class CopyOptions(Options):
    """The initial copy of a table."""

    chunk_rows: int = Field(default=10_000, ge=1, description="how many rows of a table one query copies")


class RqliteOptions(TypedOptions):
    """rqlite clusters that post their changes here. A cluster's tables lie in a schema named after its `service_id`."""

    type: Literal["rqlite"]
    listen: Annotated[str, AfterValidator(_listen)] = Field(
        default="127.0.0.1:8099", description="host:port; beyond this machine only with auth or tls.client_ca"
    )
    path: Annotated[str, AfterValidator(_path)] = Field(default="/cdc", description="where rqlite posts to")
    auth: AuthOptions | None = Field(default=None, description="what rqlite must show at the endpoint")
    tls: TlsOptions | None = None
    max_body: Size = Field(default=MAX_BODY_BYTES, ge=1_000, description="larger requests get 413")
    max_requests: float | None = Field(
        default=None, gt=0, description="per second; more get 429, and rqlite sends them again"
    )
    api: ApiUrl | dict[str, ApiUrl] | None = Field(
        default=None,
        description="rqlite's HTTP API, for schemas, copies and missing images; one URL, or one for each service",
    )
    api_auth: AuthOptions | None = Field(default=None, description="credentials for the API")
    schema_file: FilePath | None = Field(
        default=None, alias="schema", description="a file of CREATE TABLE statements, where there is no api"
    )
    rowids: bool = Field(default=False, description="adds the column `rowid` to tables whose key is another")
    missing_images: Literal["stop", "pass"] = Field(
        default="stop", description="without api: what to do about changes that came without their row"
    )
    journal: JournalOptions = Field(default_factory=dict, validate_default=True)
    copying: CopyOptions = Field(default_factory=CopyOptions, alias="copy")

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        host, _ = split_listen(self.listen)
        if not is_loopback(host) and self.auth is None and (self.tls is None or self.tls.client_ca is None):
            raise ValueError(
                "listens beyond this machine without knowing who posts;"
                " add auth: {username, password} or tls: {cert, key, client_ca}, or listen on 127.0.0.1"
            )
        return self

    def api_of(self, service: str) -> str | None:
        """The API of a cluster, if it is known. A single URL serves every service."""
        return self.api.get(service) if isinstance(self.api, dict) else self.api
