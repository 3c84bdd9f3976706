# shellcheck shell=bash disable=SC2154
set -Eeuo pipefail
# From here on this is a compile host: whatever happens, it ends, and its end is its termination.
ended() {
  local code=$?
  trap - ERR EXIT
  [ $code = 0 ] && exit
  echo "neuronfleet-failed: compile host: exit $code: $why" | tee /dev/console
  systemctl poweroff --no-block
  exit $code
}
trap 'why="line $LINENO: $BASH_COMMAND"' ERR
trap ended EXIT
trap 'why=stopped; exit 143' TERM INT HUP
# The hard limit, armed before anything else: no unit can hold it up.
systemd-run --unit=neuronfleet-time-limit --on-active=@LIMIT_S@s --timer-property=AccuracySec=1s systemctl poweroff --force

install -d /etc/neuronfleet /opt/neuronfleet
cat >/etc/neuronfleet/node.json <<'JSON'
@NODE_CONFIG@
JSON
cd /opt/neuronfleet
say "fetching the bundle"
call s3 -m 600 --retry-max-time 900 -o bundle.part -H \
  x-amz-content-sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855 \
  "https://@BUNDLE_BUCKET@.s3.$domain/@BUNDLE_KEY@"
sha256sum -c <<<"@BUNDLE_SHA256@  bundle.part"
rm -rf bundle
@VENV@/bin/python -m zipfile -e bundle.part bundle
rm bundle.part
NEURONFLEET_INSTALL=venv bash bundle/install.sh 2>"$err" || {
  code=$?
  why=$(tail -n 1 "$err")
  cat "$err" >&2
  exit $code
}
say "installed; the automation sends the command"
