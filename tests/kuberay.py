"""The fields of KubeRay's RayJob, ray.io/v1, as its API reference lists them; a field that it does not have is refused.

KubeRay's own schema is in no package of PyPI, npm or Debian. What is in a pod template is Kubernetes' own, and is validated by its
published schema (`kubernetes-validate`), see test_launch_submit.py.
"""

from __future__ import annotations

from typing import Any

COUNT = {"type": "integer", "minimum": 0}
TEXT = {"type": "string"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
POD_TEMPLATE = {"type": "object", "required": ["spec"]}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


HEAD = _object(
    ("template",),
    serviceType=TEXT,
    headService={"type": "object"},
    enableIngress={"type": "boolean"},
    rayStartParams=TEXTS,
    template=POD_TEMPLATE,
)
WORKERS = _object(
    ("groupName", "template", "minReplicas", "maxReplicas"),
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=COUNT,
    rayStartParams=TEXTS,
    template=POD_TEMPLATE,
    scaleStrategy={"type": "object"},
)
CLUSTER = _object(
    ("headGroupSpec",),
    headGroupSpec=HEAD,
    workerGroupSpecs={"type": "array", "items": WORKERS},
    rayVersion=TEXT,
    enableInTreeAutoscaling={"type": "boolean"},
    autoscalerOptions={"type": "object"},
    headServiceAnnotations=TEXTS,
    suspend={"type": "boolean"},
)
SPEC = _object(
    ("entrypoint", "rayClusterSpec"),
    activeDeadlineSeconds={"type": "integer", "minimum": 1},
    backoffLimit=COUNT,
    rayClusterSpec=CLUSTER,
    submitterPodTemplate=POD_TEMPLATE,
    metadata=TEXTS,
    clusterSelector=TEXTS,
    submitterConfig=_object(backoffLimit=COUNT),
    managedBy=TEXT,
    entrypoint=TEXT,
    runtimeEnvYAML=TEXT,
    jobId=TEXT,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
    entrypointResources=TEXT,
    entrypointNumCpus={"type": "number"},
    entrypointNumGpus={"type": "number"},
    ttlSecondsAfterFinished=COUNT,
    shutdownAfterJobFinishes={"type": "boolean"},
    suspend={"type": "boolean"},
)
RAY_JOB = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=_object(
        ("name",), name={"type": "string", "maxLength": 47}, namespace=TEXT, labels=TEXTS, annotations=TEXTS
    ),
    spec=SPEC,
)
