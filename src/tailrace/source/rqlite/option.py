"""The keys of `source:` with `type: rqlite`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, Field, model_validator

from tailrace.errors import ConfigError
from tailrace.option.value import FilePath, Options, Secret, Size, is_loopback, split_listen
from tailrace.source.option import DraftSection, JournalOptions, SourceOptions

SERVICE = "rqlite"
"""The service of events that name none: rqlite sends `service_id` only when it is configured."""

MAX_BODY_BYTES = 128_000_000


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


Urls = str | list[str]
"""One node's URL, or those of several nodes of one cluster."""


def _nodes(value: Urls) -> Urls:
    if isinstance(value, list) and not value:
        raise ValueError("names no node")
    return _url(value) if isinstance(value, str) else [_url(url) for url in value]


def _urls(value: Urls | dict[str, Urls] | None) -> Urls | dict[str, Urls] | None:
    if isinstance(value, dict):
        return {service: _nodes(urls) for service, urls in value.items()}
    return value if value is None else _nodes(value)


def _listed(urls: Urls) -> list[str]:
    return [urls] if isinstance(urls, str) else urls


class AuthOptions(Options):
    """Basic authentication."""

    username: str = Field(min_length=1, description="who may post events")
    password: Secret = Field(description="take it from the environment: ${RQLITE_PASSWORD}")


class ListenerTlsOptions(Options):
    """HTTPS at the endpoint."""

    cert: FilePath = Field(description="the certificate with its chain, PEM")
    key: FilePath = Field(description="its private key, PEM, without a passphrase")
    client_ca: FilePath | None = Field(
        default=None, description="clients must show a certificate of this authority (mutual TLS)"
    )


class ApiTlsOptions(Options):
    """The authorities to trust at the API, and our certificate. Verification is always on."""

    ca: FilePath | None = Field(default=None, description="authorities to trust, PEM; default: the system's")
    cert: FilePath | None = Field(
        default=None, description="our certificate, for nodes that ask for one (-http-verify-client)"
    )
    key: FilePath | None = Field(default=None, description="its key, without a passphrase; default: in the same file")

    @model_validator(mode="after")
    def _paired(self) -> Self:
        if self.key is not None and self.cert is None:
            raise ValueError("`key` needs `cert`")
        return self


class RqliteCopyOptions(Options):
    """The initial copy of a table."""

    chunk_rows: int = Field(default=10_000, ge=1, description="how many rows of a table one query copies")


class RqliteOptions(SourceOptions):
    """rqlite clusters that post their changes here. A cluster's tables lie in a schema named after its `service_id`."""

    example_address: ClassVar[str] = "http://127.0.0.1:4001"

    type: Literal["rqlite"]
    listen: Annotated[str, AfterValidator(_listen)] = Field(
        default="127.0.0.1:8099", description="host:port; beyond this machine only with auth or tls.client_ca"
    )
    path: Annotated[str, AfterValidator(_path)] = Field(default="/cdc", description="where rqlite posts to")
    auth: AuthOptions | None = Field(default=None, description="what rqlite must show at the endpoint")
    tls: ListenerTlsOptions | None = None
    max_body: Size = Field(default=MAX_BODY_BYTES, ge=1_000, description="larger requests get 413")
    max_requests: float | None = Field(
        default=None, gt=0, description="per second; more get 429, and rqlite sends them again"
    )
    api: Annotated[Urls | dict[str, Urls] | None, AfterValidator(_urls)] = Field(
        default=None,
        description="rqlite's HTTP API, for schemas, copies and missing images: a URL or a list of the nodes' URLs,"
        " or that for each service",
    )
    api_auth: AuthOptions | None = Field(default=None, description="credentials for the API")
    api_tls: ApiTlsOptions | None = Field(default=None, description="for an API with certificates of its own")
    schema_file: FilePath | None = Field(
        default=None, alias="schema", description="a file of CREATE TABLE statements, where there is no api"
    )
    rowids: bool = Field(default=False, description="adds the column `rowid` to tables whose key is another")
    missing_images: Literal["stop", "pass"] = Field(
        default="stop", description="without api: what to do about changes that came without their row"
    )
    journal: JournalOptions = Field(default_factory=dict, validate_default=True)
    copying: RqliteCopyOptions = Field(default_factory=RqliteCopyOptions, alias="copy")

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if isinstance(self.journal.path, str):
            raise ValueError(  # noqa: TRY004 - what pydantic reports
                "keeps its journal in a folder: rqlite sends nothing again that was acknowledged, and what recognises"
                " its repeats lies next to the journal; set journal.path to a folder that every executor sees"
            )
        host, _ = split_listen(self.listen)
        if not is_loopback(host) and self.auth is None and (self.tls is None or self.tls.client_ca is None):
            raise ValueError(
                "listens beyond this machine without knowing who posts;"
                " add auth: {username, password} or tls: {cert, key, client_ca}, or listen on 127.0.0.1"
            )
        urls = [url for nodes in self.nodes().values() for url in nodes]
        if self.api_tls is not None and not any(url.startswith("https:") for url in urls):
            raise ValueError("has api_tls, but no `api` with https")
        return self

    @classmethod
    def for_address(cls, address: str, *, chosen: bool) -> DraftSection | None:
        if not address.startswith(("http://", "https://")):
            return None
        try:
            url = urlsplit(address)
            place = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
            keys: dict[str, Any] = {"api": _url(place)}
        except ValueError:
            raise ConfigError(
                "the address is not that of rqlite's HTTP API", fix="write it as http://user:password@127.0.0.1:4001"
            ) from None
        if url.username:
            keys["api_auth"] = {"username": unquote(url.username), "password": unquote(url.password or "")}
        return DraftSection(SERVICE, keys)

    def needed_extra(self) -> str | None:
        return "rqlite"

    def nodes(self) -> dict[str, list[str]]:
        """The nodes' URLs by service; under `""` those whose service only the nodes themselves know."""
        if self.api is None:
            return {}
        return {
            name: _listed(one) for name, one in (self.api if isinstance(self.api, dict) else {"": self.api}).items()
        }
