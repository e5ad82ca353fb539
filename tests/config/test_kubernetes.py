"""The manifest for Kubernetes is YAML, holds together, and has a pipeline's file that can be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace.config.pipeline import load

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"


@pytest.fixture
def manifest() -> dict[str, Any]:
    """The objects by their kind; there is one of each."""
    found = [each for each in yaml.safe_load_all((FOLDER / "tailrace.yaml").read_text()) if each]
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


def test_the_deployment_names_what_the_manifest_makes_and_keeps_nothing(manifest: dict[str, Any]) -> None:
    deployment = manifest["Deployment"]["spec"]
    pod = deployment["template"]["spec"]
    assert (deployment["replicas"], deployment["strategy"]["type"]) == (1, "Recreate")
    assert deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"]
    assert manifest["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == deployment["selector"]["matchLabels"]
    assert pod["serviceAccountName"] == manifest["ServiceAccount"]["metadata"]["name"]
    assert manifest["RoleBinding"]["subjects"][0]["name"] == pod["serviceAccountName"]
    assert [volume for volume in pod["volumes"] if not volume.keys() & {"emptyDir", "configMap"}] == []
    [container] = pod["containers"]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(Path(container["args"][1]).parent) in mounted
    assert Path(container["args"][1]).name in manifest["ConfigMap"]["data"]


def test_the_file_in_the_manifest_is_a_pipeline_whose_variables_the_pod_has(
    manifest: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [container] = manifest["Deployment"]["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value", "10.0.0.5") for each in container["env"]}
    secrets = {"SHOP_DSN": "postgresql://shop@db/shop", "STATE_DSN": "postgresql://state@db/state"}
    for name, value in (variables | secrets).items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "shop.yaml"
    file.write_text(manifest["ConfigMap"]["data"]["shop.yaml"])
    config = load(file)
    assert (config.spark.master, config.store.type) == ("k8s://https://kubernetes.default.svc", "postgres")
    assert config.spark.conf["spark.driver.host"] == "10.0.0.5"
    assert config.spark.conf["spark.kubernetes.container.image"] == container["image"]
    assert not any(secret in file.read_text() for secret in secrets.values())
