"""`tailrace alert`: whether alerts get to people."""

from __future__ import annotations

import typer

from tailrace.cli.error import CommandGroup, Debug, Json, PipelineFile, print_result

app = typer.Typer(
    cls=CommandGroup,
    name="alert",
    help="Try the alerts of a pipeline.",
    no_args_is_help=True,
    epilog="Example: tailrace alert test shop.yaml",
)


@app.callback()
def _group() -> None:
    """Try the alerts of a pipeline."""


@app.command("test", epilog="Example: tailrace alert test shop.yaml")
def send_test(file: PipelineFile, as_json: Json = False, debug: Debug = False) -> None:
    """Send one alert, named `test`, as a running pipeline would. Exits with 4 if it did not arrive.

    It needs neither source nor destination, and does not change what the pipeline has told.
    """
    from tailrace.alert.delivery import Alert, open_delivery
    from tailrace.config.pipeline import load_all
    from tailrace.errors import ConfigError
    from tailrace.state.record import now, text_of

    config = load_all(file)[0]
    name = config.source_context.name
    if config.alerts is None:
        raise ConfigError(f"{file} has no section alerts", fix='add one: alerts: {webhook: {url: "${ALERT_URL}"}}')
    at = text_of(now())
    text = f"{name}: a test; nothing is wrong"
    open_delivery(config.alerts).send(Alert(f"{name}/test/{at}", name, "test", "firing", text, at, at))
    print_result("the alert was sent", {"sent": True}, as_json=as_json)
