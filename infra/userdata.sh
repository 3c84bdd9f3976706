#!/bin/bash
# NeuronFleet's first minute on a host: arm the trap, write the node config, fetch the bundle, run its installer.
set -Eeuo pipefail
region=@REGION@ domain=@REGION@.@URL_SUFFIX@ why='' err=/run/neuronfleet-install.err
say() { echo "neuronfleet: $*"; }
get() { curl -fsS --connect-timeout 5 -m 20 --retry 40 --retry-delay 3 --retry-max-time 120 --retry-all-errors "$@"; }
meta() {
  local url=http://169.254.169.254/latest token
  token=$(get -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' $url/api/token) &&
    get -H "X-aws-ec2-metadata-token: $token" "$url/meta-data/$1"
}
# call SERVICE [curl options]: signed by the instance role, whose keys stay off the command line
call() {
  local role keys service=$1
  role=$(meta iam/security-credentials/) && keys=$(meta "iam/security-credentials/$role") || return
  key() { sed -n "s/.*\"$1\" *: *\"\([^\"]*\)\".*/\1/p" <<<"$keys"; }
  get --aws-sigv4 "aws:amz:$region:$service" "${@:2}" -K <(
    printf 'user = "%s:%s"\nheader = "x-amz-security-token: %s"\n' \
      "$(key AccessKeyId)" "$(key SecretAccessKey)" "$(key Token)"
  )
}
report() {
  local code=$? id
  trap - ERR EXIT
  set +e
  [ $code = 0 ] && exit
  id=$(meta instance-id)
  echo "neuronfleet-failed: $id user-data: exit $code: $why" | tee /dev/console
  call cloudformation "https://cloudformation.$domain/" -o /dev/null --retry-max-time 40 -d Action=SignalResource \
    -d Version=2010-05-15 -d Status=FAILURE -d LogicalResourceId=@LOGICAL_ID@ \
    --data-urlencode StackName=@STACK_NAME@ -d UniqueId="$id" || say "no signal sent" | tee /dev/console
  call autoscaling "https://autoscaling.$domain/" -o /dev/null --retry-max-time 40 -d Action=SetInstanceHealth \
    -d Version=2011-01-01 -d HealthStatus=Unhealthy -d ShouldRespectGracePeriod=false -d InstanceId="$id" ||
    say "not marked unhealthy" | tee /dev/console
  exit $code
}
trap 'why="line $LINENO: $BASH_COMMAND"' ERR
trap report EXIT
trap 'why=stopped; exit 143' TERM INT HUP

install -d /etc/neuronfleet /opt/neuronfleet
cat >/etc/neuronfleet/node.json <<'EOF'
@NODE_CONFIG@
EOF

cd /opt/neuronfleet
say "fetching the bundle"
call s3 -m 600 --retry-max-time 900 -o bundle.part -H \
  x-amz-content-sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855 \
  "https://@BUNDLE_BUCKET@.s3.$domain/@BUNDLE_KEY@"
sha256sum -c <<<"@BUNDLE_SHA256@  bundle.part"
rm -rf bundle
@VENV@/bin/python -m zipfile -e bundle.part bundle
rm bundle.part
say "installing"
bash bundle/install.sh 2>$err || {
  code=$?
  why=$(tail -n 1 $err)
  cat $err >&2
  exit $code
}
cat $err >&2
say "installed; the units report from here on"
