#!/bin/bash
# What the compile job runs on its host. Values are the document's parameters, each held to a pattern.
set -Eeuo pipefail
# Whatever becomes of it, the host ends: the agent has two minutes to report.
trap 'shutdown -P +2' EXIT
cloud-init status --wait >/dev/null
export AWS_DEFAULT_REGION='@REGION@'
work=/var/lib/neuronfleet/compile
neuronfleet=/opt/neuronfleet/venv/bin/neuronfleet
mkdir -p $work
$neuronfleet artifacts pull '{{ ModelDigest }}' --bucket '@BUCKET@' --into $work/models --aws
options=()
buckets='{{ Buckets }}'
if [ -n "$buckets" ]; then options+=(--buckets "$buckets"); fi
$neuronfleet compile --model "$work/models/{{ ModelDigest }}" --name '{{ ModelName }}' --profile '@PROFILE@' \
  --tp-degree '{{ TpDegree }}' --batch-size '{{ BatchSize }}' --max-model-len '{{ MaxModelLen }}' \
  "${options[@]}" --out $work/out --publish '@BUCKET@' --aws
